"""Finds what hand-written tower loops get wrong, in a graph that is there.

Each rule looks at the towers of one set, and at what a training step runs. It
reports what computes something else than one device would on the whole batch,
or leaves traces of the towers in checkpoints; not what is merely slow.
"""

import collections
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence
from typing import Set, Tuple

import tensorflow.compat.v1 as tf

from towers import findings
from towers import graph_nodes
from towers import lint_losses
from towers import lint_variables
from towers import scopes as scopes_lib
from towers import tower as tower_lib

Node = graph_nodes.Node

# Batch norm of fewer rows than these is noise: Wu and He, "Group
# Normalization", 2018, https://arxiv.org/abs/1803.08494, figure 1.
_FEW_ROWS = 16

_FUSED_BATCH_NORMS = frozenset(
    ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"])


def check(context: findings.Context) -> List[findings.Finding]:
  """Returns what all rules find in all sets of two and more towers."""
  found = list(lint_variables.optimizer_slots(context))
  for towers in context.scopes.sets:
    if len(towers.nodes) > 1:
      for rule in RULES:
        found.extend(rule(context, towers))
  found.extend(lint_variables.updates_not_run(context))
  found.extend(_regularization(context))
  return found


def _reads_another_tower(context: findings.Context,
                         towers: scopes_lib.TowerSet) -> findings.Found:
  # What comes from variables alone is the same in every tower.
  own = graph_nodes.FROM_INPUT | graph_nodes.FROM_RANDOM
  reading, pairs = [], set()
  for index, members in towers.nodes.items():
    for node in members:
      if node.is_backward:
        continue
      for source, _ in node.inputs:
        place = context.scopes.place(source)
        if place is not None and place.towers == towers.name and (
            place.index != index) and source.origin & own:
          reading.append(node)
          pairs.add((index, place.index))
  if reading:
    one, other = min(pairs)
    yield findings.Finding(
        "reads_another_tower",
        f"{len(reading)} ops of `{towers.name}` read what another tower "
        f"computed; tower {one} reads tower {other}, for one.",
        findings.names(reading),
        "That part of the model counts several times in the loss, and the "
        "towers wait for each other.",
        "A tower should take its losses from a collection by its own scope "
        "with the slash at its end, `tf.get_collection(key, \"tower_1/\")`. "
        "To put values of all towers together, use `towers.merge`.")


def _scope_prefix(context: findings.Context,
                  towers: scopes_lib.TowerSet) -> findings.Found:
  confused = {}
  for index in towers.nodes:
    family = {i for i in towers.nodes if str(i).startswith(str(index))}
    if 1 < len(family) < len(towers.nodes):
      confused[frozenset(family)] = index
  if not confused:
    return
  found: List[Any] = []
  gathered: Dict[Node, FrozenSet[int]] = {}
  for node in context.nodes.ordered:
    place = context.scopes.place(node)
    parts = [gathered[source] for source in _sources(node)
             if source in gathered]
    union = frozenset().union(*parts)
    if union in confused and union not in parts and not node.is_backward and (
        place is None or place.index == confused[union]):
      found.append((confused[union], node))
    if place is not None and place.towers == towers.name:
      gathered[node] = frozenset([place.index])
    elif node.op in ("NoOp", "Identity"):  # As `tf.group` puts them between.
      gathered[node] = union
  if found:
    index = found[0][0]
    yield findings.Finding(
        "scope_prefix",
        f"{len(found)} ops take what tower {index} of `{towers.name}` put into "
        f"a collection, and what tower {index}0 did.",
        findings.names([node for _, node in found]),
        "`tf.get_collection(key, scope)` compares the start of names, and "
        f"`tower_{index}0/` starts with `tower_{index}`.",
        "End the scope with a slash, or use `Tower.collection(key)`.")


def _sources(node: Node) -> List[Node]:
  return [source for source, _ in node.inputs] + node.controls


def _few_rows(context: findings.Context,
              towers: scopes_lib.TowerSet) -> findings.Found:
  layers, fewest = [], _FEW_ROWS
  for members in towers.nodes.values():
    for node in members:
      if not node.is_backward and _normalises_by_own_rows(node):
        shape = context.nodes.output_shape(*node.inputs[0])
        rows = shape[1].dims[0].value if (
            shape and shape[1] is not None and shape[1].rank) else None
        if rows is not None and rows < _FEW_ROWS:
          layers.append(node)
          fewest = min(fewest, rows)
  if layers:
    yield findings.Finding(
        "batch_norm_of_few_rows",
        f"{len(layers)} batch norm ops of `{towers.name}` normalise by the "
        f"statistics of as few as {fewest} rows.", findings.names(layers),
        "Statistics of few rows are noise; training gets worse, and differs "
        "from evaluation.",
        "Let the towers' statistics meet (`towers.build_towers` does it to any "
        "library's batch norm), or give each tower more rows.")


def _normalises_by_own_rows(node: Node) -> bool:
  if node.op in _FUSED_BATCH_NORMS:
    return node.attr["is_training"].b and any(
        source is node and port == 0
        for reader in node.readers for source, port in reader.inputs)
  if node.op != "Mean" or "moments" not in node.name:
    return False
  axes = node.inputs[1][0]
  return axes.op == "Const" and (
      0 in tf.make_ndarray(axes.attr["value"].tensor)) and any(
          "SquaredDifference" in reader.op or reader.op == "StopGradient"
          for reader in node.readers)


def _same_seeds(context: findings.Context,
                towers: scopes_lib.TowerSet) -> findings.Found:
  drawn: Dict[Tuple[Any, ...], Dict[int, Node]] = collections.defaultdict(dict)
  feeds = _with_data(context)
  for index, members in towers.nodes.items():
    for node in members:
      seed = _seed(node)
      if seed is not None and node in feeds:
        name = tower_lib.without_numbers(context.scopes.plain_name(node))
        drawn[node.op, name, seed].setdefault(index, node)
  same = [node for nodes in drawn.values() if len(nodes) > 1
          for node in nodes.values()]
  if same:
    yield findings.Finding(
        "same_seed",
        f"{len(same)} random ops of `{towers.name}`, such as "
        f"`{same[0].name}`, draw the same numbers as in another tower.",
        findings.names(same),
        "Rows of different towers get the same dropout masks, noise or "
        "augmentation, unlike rows of one batch.",
        "Leave out the op's `seed` and call `tf.set_random_seed`, or add the "
        "tower's number to the seed.")


def _seed(node: Node) -> Optional[Tuple[Any, ...]]:
  """Returns the seed that `node` starts from; None if it has none of its own.
  """
  if node.op.startswith("StatelessRandom") and len(node.inputs) > 1:
    source = node.inputs[1][0]
    if "Key" in source.op and source.inputs:  # Made from the seed.
      source = source.inputs[0][0]
    if source.op == "Const":
      return tuple(tf.make_ndarray(source.attr["value"].tensor).ravel())
    return (source.name,)
  if "seed2" not in node.attr:
    return None
  seeds = (node.attr["seed"].i, node.attr["seed2"].i)
  return seeds if any(seeds) else None


def _with_data(context: findings.Context) -> Set[Node]:
  """Returns the nodes that a step runs, or that meet data, unlike initialisers.
  """
  if context.needed is not None:
    return context.needed
  meets: Set[Node] = set()
  for node in reversed(context.nodes.ordered):
    if node.origin & graph_nodes.FROM_INPUT or any(
        reader in meets for reader in node.readers):
      meets.add(node)
  return meets


def _regularization(context: findings.Context) -> findings.Found:
  missing, excess = lint_losses.check(context.nodes, context.scopes,
                                      context.needed)
  if missing:
    yield findings.Finding(
        "regularization_left_out",
        f"None of the {len(missing)} regularisation losses has a gradient in "
        "the training step.", findings.names(missing),
        "Weight decay that was asked for does not happen, silently.",
        "Add `tf.add_n` of `REGULARIZATION_LOSSES` to the loss, read without a "
        "tower's scope: shared variables add theirs once, without a prefix; or "
        "add `graph.regularization_loss`.")
  if excess:
    most = max(excess.values())
    yield findings.Finding(
        "regularization_counted_again",
        f"{len(excess)} sums count a regularisation loss up to {most:.3g} "
        "times as often as the towers' losses.", findings.names(list(excess)),
        "Weight decay grows with the number of towers.",
        "Add regularisation losses once, to the mean of the towers' losses; or "
        "in each tower those of its own scope only, before the mean.")


Rule = Callable[[findings.Context, scopes_lib.TowerSet], findings.Found]
RULES: Sequence[Rule] = (
    lint_variables.variables_not_shared,
    lint_variables.variables_on_tower_devices,
    lint_variables.updates_of_all_towers,
    _reads_another_tower, _scope_prefix, _few_rows, _same_seeds)
