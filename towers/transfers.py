"""What travels between the devices of a graph in each step, and what for."""

import re
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

from towers import graph_nodes
from towers import scopes as scopes_lib

PARAMETERS = "parameters"
GRADIENTS = "gradients"
MOMENTS = "moments"
INPUTS = "inputs"
OTHER = "other"
CONTROL = "control"

# TensorFlow (not yet 2.15) copies constants of up to so many elements from a
# CPU, if several devices read them, to each of these.
_COPIED_ELEMENTS = 16
_AFTER = -1  # Stands for an output where an op is only waited for.

_STATISTICS = re.compile(
    r"batch_?norm|moments/|whole_batch|(?:^|[/_])bn[\d_]*/", re.IGNORECASE)
# Where `towers` puts what the towers make together.
_MERGE = re.compile(r"(?:^|/)cross_\w+?/")
# Several tensors in one message, see `packing`.
_PACKED = re.compile(r"(?:^|/)packed(?:_\d+)?$")


class Transfer(NamedTuple):
  """What goes from one device to another in each step, for one purpose.

  Fields:
    source: Device that sends; "" for ops without one.
    target: Device that receives, likewise.
    purpose: "parameters" for values of variables; "gradients" for what the
      backward pass sends; "moments" for statistics of batch norm, forward and
      backward; "inputs" for data; "control" for messages without a value, that
      an op has run; else "other", such as losses.
    tensors: How many tensors. TensorFlow sends a tensor to a device once,
      however many ops there read it.
    num_bytes: The bytes of those whose static shape is known.
    unknown: How many there are whose shape is not known.
  """
  source: str
  target: str
  purpose: str
  tensors: int
  num_bytes: int
  unknown: int


def between_devices(nodes: graph_nodes.Nodes, scopes: scopes_lib.Scopes,
                    needed: Optional[Set[graph_nodes.Node]] = None
                   ) -> List[Transfer]:
  """Returns what travels between devices, most bytes first.

  Args:
    nodes: The graph.
    scopes: Its towers.
    needed: The nodes that a step runs. Default: all, also initialisers.
  """
  found: Dict[Tuple[str, str, str], List[int]] = {}
  for node in nodes.ordered:
    if needed is not None and node not in needed:
      continue
    for (port, target), readers in _sent(node, needed).items():
      num_bytes: Optional[int] = 0
      if port == _AFTER:
        purpose = CONTROL
      elif _is_copied(nodes, node):
        continue
      else:
        purpose = _purpose(node, readers, scopes)
        num_bytes = _num_bytes(nodes, node, port)
      sums = found.setdefault((node.device, target, purpose), [0, 0, 0])
      sums[0] += 1
      sums[1] += num_bytes or 0
      sums[2] += num_bytes is None
  transfers = [Transfer(*key, *sums) for key, sums in found.items()]
  return sorted(transfers, key=lambda t: (-t.num_bytes, -t.tensors, t))


def _sent(node: graph_nodes.Node, needed: Optional[Set[graph_nodes.Node]]
         ) -> Dict[Tuple[int, str], List[graph_nodes.Node]]:
  """Returns the readers of each (output, device) that `node` sends to."""
  sent: Dict[Tuple[int, str], List[graph_nodes.Node]] = {}
  for reader in node.followers:
    if reader.device != node.device and (needed is None or reader in needed):
      sent.setdefault((_AFTER, reader.device), []).append(reader)
  for reader in dict.fromkeys(node.readers):
    if reader.device != node.device and (needed is None or reader in needed):
      for source, port in reader.inputs:
        if source is node:
          sent.setdefault((port, reader.device), []).append(reader)
  return sent


def _is_copied(nodes: graph_nodes.Nodes, node: graph_nodes.Node) -> bool:
  """Says whether TensorFlow makes a copy of a constant instead."""
  if node.op != "Const" or "CPU" not in node.device or node.followers or (
      len({reader.device for reader in node.readers}) < 2):
    return False
  known = nodes.output_shape(node, 0)
  return known is not None and known[1] is not None and (
      (known[1].num_elements() or 0) <= _COPIED_ELEMENTS)


def _num_bytes(nodes: graph_nodes.Nodes, node: graph_nodes.Node,
               port: int) -> Optional[int]:
  """Returns the bytes of an output; None if its shape is not known."""
  num_bytes = nodes.output_bytes(node, port)
  if num_bytes is None and node.op == "PlaceholderWithDefault":
    # It may hide a shape, as where converted statistics come back from a merge.
    # In a step that does not feed it, it hands its default on.
    return _num_bytes(nodes, *node.inputs[0])
  return num_bytes


def _purpose(node: graph_nodes.Node, readers: List[graph_nodes.Node],
             scopes: scopes_lib.Scopes) -> str:
  if node.op == "ConcatV2" and _PACKED.search(node.name):
    first = node.inputs[0][0]  # All in a message are of one kind.
    if first.op == "Reshape":
      node = first.inputs[0][0]
  if node.value_of is not None or node.handle is not None:
    return PARAMETERS
  if _is_statistics(node, readers, scopes):
    return MOMENTS
  if node.is_backward or any(
      reader.is_apply or reader.op.endswith("AccumulatorApplyGradient")
      for reader in readers):
    return GRADIENTS
  if node.origin == graph_nodes.FROM_INPUT and scopes.place(node) is None:
    return INPUTS
  return OTHER


def _is_statistics(node: graph_nodes.Node, readers: List[graph_nodes.Node],
                   scopes: scopes_lib.Scopes) -> bool:
  """Says whether the statistics of a layer meet, or come back from there."""
  for reader in readers:
    if not (_STATISTICS.search(node.name) or _STATISTICS.search(reader.name)):
      continue
    if _MERGE.search(node.name) or _MERGE.search(reader.name):
      return True
    # The two sums of a layer's backward pass, added up over the towers. They
    # are the gradients of scale and offset as well, and travel once.
    if node.is_backward and reader.is_backward and (
        scopes.place(node) is not None) and scopes.place(reader) is None:
      return True
  return False
