"""How often a regularisation loss counts in what a graph trains.

A sum of losses is followed back through the ops that only add and scale, to
the regularisation losses and the towers' losses in it, with the factor of each.
Over all towers, a regularisation loss must weigh as much as the data do.
"""

import collections
from typing import Any, Dict, List, Optional, Set, Tuple

import tensorflow.compat.v1 as tf

from towers import graph_nodes
from towers import scopes as scopes_lib
from towers import tower as tower_lib

Node = graph_nodes.Node

_SAME = frozenset(["Identity", "Cast", "Reshape", "ExpandDims", "Squeeze"])
_SUMS = frozenset(["Add", "AddV2", "AddN", "Pack", "ConcatV2"])
_MEANS = frozenset(["Sum", "Mean"])
_SCALES = frozenset(["Mul", "RealDiv"])

# Rounding of the scales, and weights of towers that are a little uneven.
_TOLERANCE = 1.3


def check(nodes: graph_nodes.Nodes, scopes: scopes_lib.Scopes,
          needed: Optional[Set[Node]]) -> Tuple[List[Node], Dict[Node, float]]:
  """Looks at the collection `REGULARIZATION_LOSSES`.

  And at what `LOSSES` holds that depends on variables alone: code from before
  the other collection puts weight decay there.

  Args:
    nodes: The graph.
    scopes: Its towers.
    needed: What a training step runs; None if that is not known.

  Returns:
    The losses in the collection, if no one of them has a gradient in the step,
    else none; and the sums in which some count too often, with how much.
  """
  collected = [
      nodes.by_name[name] for name in dict.fromkeys(
          [*nodes.collections.get(tf.GraphKeys.REGULARIZATION_LOSSES, ()),
           *nodes.collections.get(tf.GraphKeys.LOSSES, ())])
      if nodes.by_name[name].origin == graph_nodes.FROM_VARIABLE
  ]
  losses = _like(collected, nodes, scopes)
  missing: List[Node] = []
  if collected and needed is not None and not _have_gradients(losses, needed):
    missing = collected
  return missing, _counted_again(losses, scopes)


def _like(collected: List[Node], nodes: graph_nodes.Nodes,
          scopes: scopes_lib.Scopes) -> List[Node]:
  """Returns `collected` and what computes the same from the same variables.

  TensorFlow makes the op of a regularisation loss again each time that it is
  taken from the collection; other towers may have made theirs.
  """
  def key(node: Node) -> Any:
    return (tower_lib.without_numbers(scopes.plain_name(node)), node.op)

  behind: Dict[Any, Set[Any]] = {}
  for loss in collected:
    behind.setdefault(key(loss), set()).add(_variables_behind(loss))
  return [node for node in nodes.ordered
          if node.origin == graph_nodes.FROM_VARIABLE and key(node) in behind
          and _variables_behind(node) in behind[key(node)]]


def _have_gradients(losses: List[Node], needed: Set[Node]) -> bool:
  """Says whether a step differentiates any of `losses`."""
  differentiated = set()
  for node in needed:
    if node.is_backward and "_grad/" in node.name:
      # As in `gradients/w/Regularizer/L2Loss_grad/mul`.
      name = node.name[node.name.rindex("gradients"):].partition("/")[2]
      differentiated.add(name.rpartition("_grad/")[0])
  for loss in losses:
    pending, seen = [loss], set()
    while pending:
      node = pending.pop()
      if node in seen or node.value_of is not None or node.handle is not None:
        continue
      seen.add(node)
      if node.name in differentiated:
        return True
      pending.extend(source for source, _ in node.inputs)
  return False


def _counted_again(losses: List[Node],
                   scopes: scopes_lib.Scopes) -> Dict[Node, float]:
  """Returns sums with losses that count too often, and how often."""
  sums = set()
  pending = list(losses)
  while pending:
    node = pending.pop()
    if node not in sums:
      sums.add(node)
      pending.extend(reader for reader in node.readers
                     if _is_linear(reader) and not reader.is_backward)
  excess = {}
  for node in sums:
    if not any(reader in sums for reader in node.readers):
      often = _how_often(node, set(losses), scopes)
      if often > _TOLERANCE:
        excess[node] = often
  return excess


def _how_often(total: Node, losses: Set[Node],
               scopes: scopes_lib.Scopes) -> float:
  """Returns how often `total` counts a loss, in proportion to the data."""
  by_variable: Dict[frozenset, float] = collections.defaultdict(float)
  by_tower: Dict[Optional[scopes_lib.Place], float] = {}
  for leaf, factor in _leaves(total, losses).items():
    if leaf in losses:
      by_variable[_variables_behind(leaf)] += factor
      continue
    place = scopes.place(leaf)
    if leaf.origin & graph_nodes.FROM_INPUT or leaf.origin and place:
      tower = place and place._replace(plain_name="")
      by_tower[tower] = max(by_tower.get(tower, 0.0), factor)
  data = sum(by_tower.values())
  if not by_variable or data <= 0.0:
    return 0.0  # A sum of regularisation losses alone, to be shown.
  return max(by_variable.values()) / data


def _leaves(total: Node, losses: Set[Node]) -> Dict[Node, float]:
  """Returns what `total` is a sum of, with the factors."""
  # From the total down, each node after all that read it.
  order, seen, pending = [], set(), [(total, False)]
  while pending:
    node, done = pending.pop()
    if done:
      order.append(node)
    elif node not in seen:
      seen.add(node)
      pending.append((node, True))
      if node not in losses:
        pending.extend((source, False) for source, _ in _terms(node))
  factors: Dict[Node, float] = collections.defaultdict(float)
  factors[total] = 1.0
  leaves = {}
  for node in reversed(order):
    terms = [] if node in losses else _terms(node)
    if not terms:
      leaves[node] = factors[node]
    for source, scale in terms:
      factors[source] += factors[node] * scale
  return leaves


def _is_linear(node: Node) -> bool:
  return (bool(_terms(node)) and not node.op.startswith("Assign"))


def _terms(node: Node) -> List[Tuple[Node, float]]:
  """Returns what `node` adds up, with factors; nothing if it does not add."""
  sources = [source for source, _ in node.inputs]
  if node.op in _SAME:
    return [(sources[0], 1.0)]
  if node.op in _SUMS:
    values = sources[:-1] if node.op == "ConcatV2" else sources
    return [(source, 1.0) for source in values]
  if node.op in _MEANS:
    parts = _number_of_parts(sources[0])
    if parts is None:
      return []  # Over the rows of a batch: a loss of its own.
    return [(sources[0], 1.0 / parts if node.op == "Mean" else 1.0)]
  if node.op in _SCALES and len(sources) == 2:
    constants = [_constant(source) for source in sources]
    if node.op == "Mul" and constants[0] is not None:
      return [(sources[1], constants[0])]
    if constants[1] is not None and constants[1]:
      scale = constants[1] if node.op == "Mul" else 1.0 / constants[1]
      return [(sources[0], scale)]
  return []


def _number_of_parts(node: Node) -> Optional[int]:
  """Returns how many scalars were put together in `node`; None if none were."""
  while node.op in _SAME and node.inputs:
    node = node.inputs[0][0]
  if node.op == "Pack":
    return len(node.inputs)
  return len(node.inputs) - 1 if node.op == "ConcatV2" else None


def _constant(node: Node) -> Optional[float]:
  """Returns the value of a scalar constant; None if it is none."""
  if node.op != "Const":
    return None
  value = tf.make_ndarray(node.attr["value"].tensor)
  if value.size != 1 or value.dtype.kind not in "fiu":
    return None
  return float(value.reshape(()))


def _variables_behind(loss: Node) -> frozenset:
  """Returns the variables that `loss` is computed from."""
  found, seen, pending = set(), set(), [loss]
  while pending:
    node = pending.pop()
    if node not in seen:
      seen.add(node)
      variable = node.value_of or node.handle
      if variable is not None:
        found.add(variable)
      else:
        pending.extend(source for source, _ in node.inputs)
  return frozenset(found)
