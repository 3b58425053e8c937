"""Finds the towers of a graph by the name scopes that they stand in.

Whoever builds towers gives each a scope with its number: `tower_0/`, slim's
`clone_0/`, `replica_0/`, `gpu_0/`. A graph may hold several sets of them, such
as one that trains and one that evaluates.
"""

import collections
import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from towers import graph_nodes

_DEFAULT = "".join([
    r"(?:^|/)(?!update_)",  # An optimizer's `update_tower_0/...` is no tower.
    r"(?P<name>[\w.-]*?(?:tower|clone|replica|gpu))",
    r"_?(?P<index>\d+)(?P<again>_\d+)?/",
])
# What `tf.gradients` puts before the names of the ops it differentiates.
_GRADIENTS = re.compile(r"^.*?gradients(?:_\d+)?/")
# What makes a name unique, also in the middle of a gradient op's name.
_NUMBERS = re.compile(r"_\d+(?=/|$|_grad)")
_DIFFERENCES_SHOWN = 10


class Place(NamedTuple):
  """In which tower a node is, or would be without its number.

  Fields:
    towers: Name of the set of towers.
    index: Number of the tower.
    plain_name: The node's name without the tower's scope.
  """
  towers: str
  index: int  # type: ignore[assignment]  # Hides `tuple.index`.
  plain_name: str


class TowerSet(NamedTuple):
  """The towers of one loop.

  Fields:
    name: What their scopes have in common.
    nodes: The nodes of each, by its number.
  """
  name: str
  nodes: Dict[int, List[graph_nodes.Node]]


class Difference(NamedTuple):
  """How a tower differs from the first one in its ops.

  Fields:
    num_missing: How many ops of the first tower it lacks.
    num_extra: How many it has that the first has not.
    missing: The first of those missing, as text.
    extra: The first of those extra, as text.
  """
  num_missing: int
  num_extra: int
  missing: Tuple[str, ...]
  extra: Tuple[str, ...]


class Scopes:
  """Tells nodes of towers from others.

  Attributes:
    sets: The sets of towers that were found, the first one first.
  """

  def __init__(self, nodes: graph_nodes.Nodes, pattern: Optional[str] = None,
               known: Sequence[str] = ()):
    """Looks at all nodes.

    Args:
      nodes: The nodes.
      pattern: Regular expression that finds a tower's scope in a name. Its
        group `index`, or its first, is the number.
      known: Scopes of towers that the caller knows of, in order, such as
        `["tower_0/", "tower_1/"]`.

    Raises:
      ValueError: If `pattern` is no regular expression with a group.
    """
    self._pattern = _compiled(pattern)
    self._known = {scope: i for i, scope in enumerate(known) if scope}
    self._known_name = re.sub(r"_?\d*/$", "", known[0]) if known else ""
    self._known_pattern = re.compile(
        "(?:^|/)(" + "|".join(map(re.escape, self._known)) + ")")
    self._places: Dict[graph_nodes.Node, Place] = {}
    by_set: Dict[str, Dict[int, List[graph_nodes.Node]]] = {}
    for node in nodes.ordered:
      place = self._find(node.name)
      if place is not None:
        self._places[node] = place
        by_set.setdefault(place.towers, {}).setdefault(
            place.index, []).append(node)
    self.sets = [
        TowerSet(name, dict(sorted(towers.items())))
        for name, towers in by_set.items() if 0 in towers
    ]
    names = {towers.name for towers in self.sets}
    self._places = {node: place for node, place in self._places.items()
                    if place.towers in names}

  def place(self, node: graph_nodes.Node) -> Optional[Place]:
    """Returns in which tower `node` is; None if it is in none."""
    return self._places.get(node)

  def plain_name(self, node: graph_nodes.Node) -> str:
    """Returns the name of `node` without a tower's scope."""
    place = self._places.get(node)
    return node.name if place is None else place.plain_name

  def _find(self, name: str) -> Optional[Place]:
    if self._known:
      match = self._known_pattern.search(name)
      if match:
        return Place(self._known_name, self._known[match[1]],
                     name[:match.start(1)] + name[match.end(1):])
    match = self._pattern.search(name)
    if not match:
      return None
    groups = match.groupdict()
    index = groups.get("index") or match[1]
    if not index or not index.isdecimal():
      return None
    start = match.start() + match[0].startswith("/")
    # Gradient ops of a tower belong to the set of what they differentiate.
    before = _GRADIENTS.sub("", name[:start])
    label = groups.get("name") or match.re.pattern
    if groups.get("again"):
      label += f"_*{groups['again']}"
    return Place(before + label, int(index), name[:start] + name[match.end():])


def _compiled(pattern: Optional[str]) -> Any:
  if pattern is None:
    return re.compile(_DEFAULT, re.IGNORECASE)
  try:
    compiled = re.compile(pattern)
  except re.error as error:
    raise ValueError(
        "`tower_pattern` must be a regular expression: got "
        f"{pattern!r} ({error}).") from error
  if not compiled.groups:
    raise ValueError(
        "`tower_pattern` must have a group around the tower's number, such as "
        rf"'worker_(\d+)/': got {pattern!r}.")
  return compiled


Signatures = Dict[Tuple[str, str, Tuple[str, ...]], int]


def signatures(scopes: Scopes,
               tower: Sequence[graph_nodes.Node]) -> Signatures:
  """Returns what the ops of `tower` have in common with another's, counted.

  Ops are the same if their types are, their names but for the towers' scopes
  and the numbers that make names unique, and the ops that they read. What only
  serves to change state is left out, such as initial values and moving
  averages: often one tower does that for all.
  """
  return collections.Counter(
      _signature(scopes, node) for node in _that_compute(tower))


def difference(first: Signatures, other: Signatures) -> Difference:
  """Compares the `signatures` of a tower with those of the first one."""
  missing = collections.Counter(first) - collections.Counter(other)
  extra = collections.Counter(other) - collections.Counter(first)
  return Difference(sum(missing.values()), sum(extra.values()),
                    _shown(missing), _shown(extra))


def _that_compute(
    tower: Sequence[graph_nodes.Node]) -> List[graph_nodes.Node]:
  """Returns the nodes of `tower` without those that serve its state only."""
  left_out = set()
  for node in reversed(tower):  # Readers first.
    serves_state = node.changed_variable is not None and not node.is_apply
    after = node.readers + node.followers
    if not serves_state and (
        after or not node.origin & ~graph_nodes.FROM_RANDOM):
      serves_state = all(reader in left_out for reader in after)
    if serves_state or node.is_variable:
      left_out.add(node)
  return [node for node in tower if node not in left_out]


def _signature(scopes: Scopes,
               node: graph_nodes.Node) -> Tuple[str, str, Tuple[str, ...]]:
  return (_NUMBERS.sub("", scopes.plain_name(node)), node.op,
          tuple(_NUMBERS.sub("", scopes.plain_name(source))
                for source, _ in node.inputs))


def _shown(counter: Signatures) -> Tuple[str, ...]:
  return tuple(f"{name} = {op}({', '.join(inputs)})"
               for name, op, inputs in sorted(counter)[:_DIFFERENCES_SHOWN])
