"""What a look at a graph may find wrong, and what the rules that look share."""

import collections
from typing import Dict, Iterator, NamedTuple, Optional, Sequence, Set

from towers import graph_nodes
from towers import scopes as scopes_lib

Node = graph_nodes.Node

_NAMES_KEPT = 20


class Finding(NamedTuple):
  """Something in a graph that is likely to be a mistake.

  Fields:
    rule: Name of the rule that found it.
    what: What is there.
    where: Names of ops or variables, at most 20.
    why: Why it hurts.
    remedy: What to do.
  """
  rule: str
  what: str
  where: Sequence[str]
  why: str
  remedy: str


Found = Iterator[Finding]


class Context(NamedTuple):
  """What the rules look at.

  Fields:
    nodes: The graph.
    scopes: Its towers.
    needed: What a training step runs; None if that is not known.
    update_ops: The nodes of the collection `UPDATE_OPS`.
    variables: The variables by their names.
  """
  nodes: graph_nodes.Nodes
  scopes: scopes_lib.Scopes
  needed: Optional[Set[Node]]
  update_ops: Sequence[Node]
  variables: Dict[str, graph_nodes.Variable]


def names(nodes: Sequence[Node]) -> Sequence[str]:
  """Returns the names of the first `nodes`, for `Finding.where`."""
  return tuple(node.name for node in nodes[:_NAMES_KEPT])


def uses(context: Context,
          towers: scopes_lib.TowerSet) -> Dict[Node, Set[int]]:
  """Returns for each variable which towers compute with it."""
  uses: Dict[Node, Set[int]] = collections.defaultdict(set)
  for index, members in towers.nodes.items():
    for node in members:
      if node.value_of is None and node.handle is None and (
          node.changed_variable is None):
        for source, _ in node.inputs:
          variable = source.value_of or source.handle
          if variable is not None:
            uses[variable].add(index)
  return uses


def towers_behind(context: Context,
                   towers: scopes_lib.TowerSet) -> Dict[Node, int]:
  """Returns for each node, as bits, the towers that its value comes from."""
  bits = {index: 1 << k for k, index in enumerate(towers.nodes)}
  behind: Dict[Node, int] = {}
  for node in context.nodes.ordered:
    mask = 0
    for source, _ in node.inputs:
      mask |= behind.get(source, 0)
    place = context.scopes.place(node)
    if place is not None and place.towers == towers.name:
      mask |= bits[place.index]
    behind[node] = mask
  return behind
