"""Names for display: each op of a graph of towers in one of a few boxes.

TensorBoard makes a box of each name scope. A graph of towers has many at its
top: one per tower, and one for each scope of the model, as variables carry no
tower's prefix. Here each op gets a name in one of these boxes instead:

    input        what makes the batch and deals it out
    towers       the towers' forward passes, `towers/tower_0` and so on
    cross_tower  where towers meet: statistics of batch norm, the loss
    gradients    the backward pass, in boxes of the same names
    average      what adds up the towers' gradients
    apply        what changes variables: the optimizer, moving averages
    variables    variables, their initial values, savers
    outputs      what else is made of the towers' results, such as metrics

Towers that evaluate beside these get a box of their own, named as they are. In
a graph without towers, only variables and gradients are set apart.
"""

import re
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, cast

from towers import graph_nodes
from towers import scopes as scopes_lib

Node = graph_nodes.Node

INPUT, TOWERS, CROSS_TOWER = "input", "towers", "cross_tower"
GRADIENTS, AVERAGE, APPLY = "gradients", "average", "apply"
VARIABLES, OUTPUTS = "variables", "outputs"

BOXES = (INPUT, TOWERS, CROSS_TOWER, GRADIENTS, AVERAGE, APPLY, VARIABLES,
         OUTPUTS)

_BACKWARD = re.compile(r"^(.*?/)??gradients((?:_\d+)?)/")
_AVERAGE = re.compile(r"(?:^|/)average_gradients(?:_\d+)?/")
_CROSS = re.compile(r"(?P<outer>^|^.*?/)cross_(?P<name>\w+?)/")
_COPIES = "towers_copy/"  # Where replicated variables have their copies.
_NUMBER = re.compile(r"_\d+$")
_SAVER_OPS = re.compile("Save|Restore|MergeV2Checkpoints")

# Where ops of one scope belong in several boxes, all go to the first of these.
_STRONGEST = (VARIABLES, APPLY, OUTPUTS, CROSS_TOWER, INPUT)


class Towers:
  """The towers of a graph, however their scopes are called.

  Attributes:
    boxes: The box of each set of towers, by its name.
  """

  def __init__(self, nodes: graph_nodes.Nodes, pattern: Optional[str] = None,
               known: Iterable[str] = ()):
    """Looks at all nodes; see `scopes.Scopes` for `pattern` and `known`."""
    self._found = [scopes_lib.Scopes(nodes, pattern, tuple(known))]
    # What `build_towers(..., name="eval")` calls its scopes shows where its
    # towers meet.
    usual = {towers.name.rpartition("/")[2] for towers in self._found[0].sets}
    met = dict.fromkeys(match["name"] for match in map(
        _CROSS.match, nodes.by_name) if match)
    for name in met:
      if name not in usual:
        self._found.append(scopes_lib.Scopes(
            nodes, rf"(?:^|/)(?P<name>{name})_(?P<index>\d+)/"))
    position = {node: i for i, node in enumerate(nodes.ordered)}
    sets = [towers for scopes in self._found for towers in scopes.sets]
    sets.sort(key=lambda towers: position[towers.nodes[0][0]])
    self.boxes: Dict[str, str] = {}
    for towers in sets:
      self.boxes.setdefault(
          towers.name, _box_of(towers.name) if self.boxes else TOWERS)

  def place(self, node: Node) -> Optional[scopes_lib.Place]:
    """Returns in which tower `node` is; None if it is in none."""
    found = (scopes.place(node) for scopes in self._found)
    return next((place for place in found if place is not None), None)

  @property
  def outer_scope(self) -> str:
    """The scope that the first set of towers stands in; "" if there is none."""
    first = next(iter(self.boxes), "")
    return first[:first.rfind("/") + 1]


def _box_of(name: str) -> str:
  """Returns a box for a further set of towers, such as "towers_2/tower"."""
  # Loops that are written twice make towers "tower_0_1", "tower_1_1".
  label = name.partition("/")[0].replace("_*", "s")
  label = re.sub(r"[^\w.-]", "", label).strip("_.-")
  return f"{label}_towers" if not label or label in BOXES else label


def names(nodes: graph_nodes.Nodes, towers: Towers) -> Dict[str, str]:
  """Returns the name for display of each op, by its real name."""
  boxes = _Boxes(nodes, towers).of_nodes
  shown: Dict[str, str] = {}
  taken: Set[str] = set()
  gradients = _GradientNames(towers)
  for node in nodes.ordered:
    box = boxes[node]
    if box == GRADIENTS:
      name = gradients.of(node)
    else:
      name = _name_in(box, node.name)
    while name in taken:
      name += "_"
    taken.add(name)
    shown[node.name] = name
  return shown


def _name_in(box: Optional[str], name: str) -> str:
  if box is None or name.startswith(f"{box}/"):
    return name
  if box == CROSS_TOWER:
    match = _CROSS.match(name)
    name = match["outer"] + name[match.end():] if match else name
  if box == AVERAGE and name.startswith("average_gradients/"):
    name = name.partition("/")[2]
  return f"{box}/{name}"


class _Boxes:
  """Finds the box of each op: by its name, else by what it reads and feeds.

  Attributes:
    of_nodes: The box of each node; None for those that keep their names.
  """

  def __init__(self, nodes: graph_nodes.Nodes, towers: Towers):
    self._ordered, self._towers = nodes.ordered, towers
    self._variables = {node.name for node in nodes.ordered if node.is_variable}
    self.of_nodes: Dict[Node, Optional[str]] = {
        node: self._by_name(node) for node in nodes.ordered}
    if towers.boxes:
      self._move_what_serves_state()
      self._place_the_rest()

  def _by_name(self, node: Node) -> Optional[str]:
    name, place = node.name, self._towers.place(node)
    if any(scope in self._variables for scope in _scopes_of(name)):
      return VARIABLES
    if _is_backward(node, place):
      return GRADIENTS
    if place is not None:
      copies = place.plain_name.startswith(_COPIES)
      return VARIABLES if copies else self._towers.boxes[place.towers]
    match = _CROSS.match(name)
    if match:
      box = self._towers.boxes.get(match["outer"] + match["name"], TOWERS)
      return CROSS_TOWER if box == TOWERS else box
    return AVERAGE if _AVERAGE.search(name) else None

  def _move_what_serves_state(self) -> None:
    """Takes initial values and updates, which one tower makes, out of it."""
    boxes = self.of_nodes
    in_towers = set(self._towers.boxes.values())
    for node in reversed(self._ordered):
      if boxes[node] not in in_towers or self._towers.place(node) is None or (
          node.is_backward or node.is_apply):
        continue
      if node.changed_variable is not None:
        boxes[node] = APPLY
        continue
      after = {boxes[reader] for reader in _after(node)}
      if after and after <= {VARIABLES, APPLY}:
        boxes[node] = APPLY if APPLY in after else VARIABLES

  def _place_the_rest(self) -> None:
    """Finds a box for each scope, or op without a scope, that has none yet."""
    boxes = self.of_nodes
    rest = [node for node in self._ordered if boxes[node] is None]
    changes = [node for node in self._ordered if node.is_apply]
    middle = [node for node, box in boxes.items()
              if box not in (None, VARIABLES, APPLY)]
    before_middle, after_middle = graph_nodes.ancestors(middle), _after_all(
        middle)
    around_changes = graph_nodes.ancestors(changes) | _after_all(changes)
    groups: Dict[str, Set[str]] = {}
    for node in reversed(rest):
      if _SAVER_OPS.match(node.op) or _runs_only(node, boxes, VARIABLES):
        box = VARIABLES
      elif node in before_middle:
        # Weight decay, for one, reads variables only and is no tower's.
        box = (CROSS_TOWER if node.origin == graph_nodes.FROM_VARIABLE
               else INPUT)
      elif node in around_changes:
        box = APPLY
      elif node in after_middle:
        box = OUTPUTS
      else:  # Constants, say, belong to who reads them.
        box = next((boxes[reader] for reader in _after(node)), None) or INPUT
      boxes[node] = box
      groups.setdefault(self._group(node), set()).add(box)
    for node in rest:
      found = groups[self._group(node)]
      boxes[node] = next((box for box in _STRONGEST if box in found),
                         boxes[node])

  def _group(self, node: Node) -> str:
    outer = self._towers.outer_scope
    name = node.name[len(outer):] if node.name.startswith(outer) else node.name
    return name.partition("/")[0]


class _GradientNames:
  """Names ops of the backward pass, alike in each tower."""

  def __init__(self, towers: Towers):
    self._towers = towers
    self._counts: Dict[str, int] = {}

  def of(self, node: Node) -> str:
    """Returns the name for display of `node`."""
    match = cast(re.Match, _BACKWARD.match(node.name))
    start = f"{GRADIENTS}/{match[1] or ''}"
    if match[2]:
      start += f"{GRADIENTS}{match[2]}/"
    rest = node.name[match.end():]
    if "/" in rest:
      return start + rest
    # What adds up gradients stands in no scope. Numbered anew, the ops of each
    # tower have the same names.
    scopes = {self._tower_scope(source) for source, _ in node.inputs}
    scope = scopes.pop() if len(scopes) == 1 else None
    base = f"{start}{scope or CROSS_TOWER + '/'}{_NUMBER.sub('', rest)}"
    count = self._counts.get(base, 0)
    self._counts[base] = count + 1
    return f"{base}_{count}" if count else base

  def _tower_scope(self, node: Node) -> Optional[str]:
    """Returns the scope of the tower that `node` is a gradient of."""
    match, place = _BACKWARD.match(node.name), self._towers.place(node)
    if not match or place is None:
      return None
    rest, plain = node.name[match.end():], place.plain_name[match.end():]
    lost = len(rest) - len(plain)
    return rest[:lost] if rest[lost:] == plain else None


def _is_backward(node: Node, place: Optional[scopes_lib.Place]) -> bool:
  """Says whether `node` is in a backward pass that is not a tower's own."""
  match = _BACKWARD.match(node.name)
  # A tower's scope that comes first is missing in the plain name.
  return match is not None and (
      place is None or place.plain_name.startswith(match[0]))


def _scopes_of(name: str) -> Iterator[str]:
  """Yields the scopes of an op, and its own name."""
  position = name.find("/")
  while position >= 0:
    yield name[:position]
    position = name.find("/", position + 1)
  yield name


def _after(node: Node) -> List[Node]:
  return node.readers + node.followers


def _after_all(nodes: Iterable[Node]) -> Set[Node]:
  """Returns `nodes` and all that reads or waits for them."""
  found, pending = set(), list(nodes)
  while pending:
    node = pending.pop()
    if node not in found:
      found.add(node)
      pending.extend(_after(node))
  return found


def _runs_only(node: Node, boxes: Dict[Node, Any], box: str) -> bool:
  """Says whether `node` only groups ops of a box, as an initialiser does."""
  return bool(node.controls) and not node.inputs and (
      all(boxes[source] == box for source in node.controls))
