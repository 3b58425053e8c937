"""Any graph as plain nodes: who reads whom, on which device, how many bytes.

A `tf.Graph`, a `GraphDef` and a `MetaGraphDef` say the same things in different
words, and only the first can be asked for shapes. What looks at graphs here
sees nodes only, so it works on a graph that was read from a file just as well.
All passes are linear in the number of nodes and edges.
"""

import collections
import re
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional
from typing import Set, Tuple

from tensorflow.core.framework import variable_pb2
import tensorflow.compat.v1 as tf

from towers import placement
from towers import step_stats

VARIABLES = frozenset(["VarHandleOp", "VariableV2", "Variable"])
_INPUTS = step_stats.INPUT_OPS | {
    "Placeholder", "PlaceholderV2", "PlaceholderWithDefault"}

# Ops that hand on what they get, in TensorFlow's order of inputs the first.
_FORWARDING = frozenset([
    "Identity", "Enter", "RefEnter", "Switch", "RefSwitch", "RefIdentity",
    "StopGradient", "PreventGradient", "Snapshot",
])
_APPLIES = re.compile("(Resource)?(Sparse)?Apply[A-Z]")
# TensorFlow places these with the variable that is their first input.
_ON_VARIABLE = re.compile("|".join([
    "ReadVariableOp", "Resource", "(Sparse)?Apply[A-Z]", "Assign", "Scatter",
    "VarIsInit", "VariableShape", "IsVariableInit", "CountUpTo", "DestroyRes",
]))
_CHANGES = re.compile("|".join([
    _APPLIES.pattern, "Assign", "(Resource)?Scatter",
    "(Resource)?StridedSliceAssign", "(Resource)?CountUpTo",
]))
_BACKWARD = re.compile(r"(?:^|/)gradients(?:_\d+)?/")
_RESOURCE = tf.resource.as_datatype_enum

# What a node's value comes from, as bits of `Node.origin`.
FROM_INPUT, FROM_VARIABLE, FROM_RANDOM = 1, 2, 4

# Above this many nodes, importing a graph for its shapes takes too long.
_MOST_TO_IMPORT = 20000


class Node:
  """One op of a graph.

  Attributes:
    name: Its name.
    op: Its type.
    device: Where it runs, in one spelling; "" where the graph does not say.
    inputs: List of (node, output index) that it reads.
    controls: List of the nodes that it only waits for.
    readers: List of the nodes that read it.
    followers: List of the nodes that only wait for it.
    attr: Attributes, as in its `NodeDef`.
    handle: The variable that its output refers to, or None.
    value_of: The variable whose value it hands on unchanged, or None.
    origin: What its value comes from, a sum of the `FROM_...` bits.
  """
  __slots__ = ("name", "op", "device", "inputs", "controls", "readers",
               "followers", "attr", "handle", "value_of", "origin")

  def __init__(self, definition: Any):
    self.name: str = definition.name
    self.op: str = definition.op
    self.device: str = definition.device
    self.attr = definition.attr
    self.inputs: List[Tuple[Node, int]] = []
    self.controls: List[Node] = []
    self.readers: List[Node] = []
    self.followers: List[Node] = []
    self.handle: Optional[Node] = None
    self.value_of: Optional[Node] = None
    self.origin = 0

  @property
  def is_variable(self) -> bool:
    """Whether it is the op of a variable."""
    return self.op in VARIABLES

  @property
  def is_apply(self) -> bool:
    """Whether it is the op with which an optimizer changes a variable."""
    return bool(_APPLIES.match(self.op))

  @property
  def is_backward(self) -> bool:
    """Whether it stands where `tf.gradients` puts its ops."""
    return bool(_BACKWARD.search(self.name))

  @property
  def is_input(self) -> bool:
    """Whether it brings data into the graph."""
    return self.op in _INPUTS

  @property
  def changed_variable(self) -> Optional["Node"]:
    """The variable that it changes, or None."""
    if self.inputs and _CHANGES.match(self.op):
      return self.inputs[0][0].handle
    return None

  def __repr__(self) -> str:
    return f"Node({self.name!r}, {self.op!r}, {self.device!r})"


class Variable(NamedTuple):
  """A variable of the graph.

  Fields:
    name: Name of its op.
    shape: Its shape as a list with None for unknown sizes; None if unknown.
    dtype: Name of its type.
    num_bytes: Its size; None if unknown.
    device: Where it lives; "" where the graph does not say.
    trainable: Whether it is in `TRAINABLE_VARIABLES`; without that collection,
      whether an optimizer changes it.
  """
  name: str
  shape: Optional[List[Optional[int]]]
  dtype: str
  num_bytes: Optional[int]
  device: str
  trainable: bool


class Nodes:
  """The nodes of a graph, and what is in its collections.

  Attributes:
    ordered: The nodes, each after those that it reads or waits for (but for the
      way back of loops).
    by_name: The nodes by their names.
    collections: For each collection that holds ops, tensors or variables, the
      names of their ops.
    num_functions: How many functions the graph has, whose bodies are not among
      the nodes.
  """

  def __init__(self, definition: Any, collection_names: Dict[str, List[str]],
               graph: Optional[tf.Graph]):
    self.by_name = {node.name: Node(node) for node in definition.node}
    self.collections = {
        key: kept for key, kept in (
            (key, [name for name in names if name in self.by_name])
            for key, names in collection_names.items()) if kept}
    self.num_functions = len(definition.library.function)
    self._graph = graph
    for node in definition.node:
      self._link(self.by_name[node.name], node.input)
    self.ordered = _in_order(list(self.by_name.values()))
    spellings: Dict[str, str] = {}
    for node in self.ordered:
      if node.device not in spellings:
        spellings[node.device] = _spelling(node.device)
      node.device = spellings[node.device]
      self._describe(node)

  def _link(self, node: Node, inputs: Iterable[str]) -> None:
    for entry in inputs:
      name, _, port = entry.lstrip("^").partition(":")
      source = self.by_name.get(name)
      if source is None:
        raise ValueError(
            "`graph` must hold every op that another one reads: "
            f"`{node.name}` reads `{name}`, which is not there. Inspect the "
            "graph before parts are cut out of it.")
      if entry.startswith("^"):
        node.controls.append(source)
        source.followers.append(node)
      else:
        node.inputs.append((source, int(port or 0)))
        source.readers.append(node)

  def _describe(self, node: Node) -> None:
    """Fills in what follows from the node's inputs, which are done."""
    first = node.inputs[0][0] if node.inputs else None
    if node.is_variable:
      node.handle = node
      node.origin = FROM_VARIABLE
    elif first is not None:
      for source, _ in node.inputs:
        node.origin |= source.origin
      if first.handle is not None:
        self._describe_use(node, first.handle)
      elif first.value_of is not None and node.op in _FORWARDING:
        node.value_of = first.value_of
    if node.is_input:
      node.origin |= FROM_INPUT
    elif "seed2" in node.attr or node.op.startswith("StatelessRandom"):
      node.origin |= FROM_RANDOM
    if not node.device:
      for label in node.attr["_class"].list.s if "_class" in node.attr else ():
        other = self.by_name.get(label.decode().partition("loc:@")[2])
        if other is not None and other.device:
          node.device = _spelling(other.device)
          break

  def _describe_use(self, node: Node, variable: Node) -> None:
    """As `_describe`, of a node whose first input refers to a variable."""
    if node.op in _FORWARDING:
      if node.op.startswith("Ref") or (
          variable.op == "VarHandleOp" and
          node.attr["T"].type in (0, _RESOURCE)):
        node.handle = variable
        node.device = node.device or variable.device
      else:
        node.value_of = variable
    elif node.op == "ReadVariableOp":
      node.value_of = variable
    elif variable.op != "VarHandleOp" and _CHANGES.match(node.op):
      node.handle = variable  # They return the reference that they got.
    if _ON_VARIABLE.match(node.op):
      node.device = variable.device

  def output_bytes(self, node: Node, port: int) -> Optional[int]:
    """Returns the bytes of an output; None if its shape is not known."""
    found = self.output_shape(node, port)
    if found is None or found[1] is None:
      return None
    return placement.num_bytes_of(found[1], found[0])

  def output_shape(
      self, node: Node, port: int
  ) -> Optional[Tuple[tf.DType, Optional[tf.TensorShape]]]:
    """Returns type and shape of an output, as far as known, or None."""
    if self._graph is not None:
      tensor = self._graph.get_tensor_by_name(f"{node.name}:{port}")
      return tensor.dtype.base_dtype, tensor.shape
    if node.op == "Const":
      value = node.attr["value"].tensor
      return tf.as_dtype(value.dtype), tf.TensorShape(value.tensor_shape)
    source = node.value_of or node
    if "shape" in source.attr and (source.is_variable or source.is_input):
      return (tf.as_dtype(source.attr["dtype"].type).base_dtype,
              tf.TensorShape(source.attr["shape"].shape))
    shapes = node.attr["_output_shapes"].list.shape if (
        "_output_shapes" in node.attr) else ()
    kind = next((node.attr[key].type for key in ("T", "dtype", "DstT")
                 if key in node.attr), 0)
    if port < len(shapes) and kind:
      return tf.as_dtype(kind).base_dtype, tf.TensorShape(shapes[port])
    return None

  def variables(self) -> List[Variable]:
    """Returns the variables of the graph."""
    trainable = set(self.collections.get(
        tf.GraphKeys.TRAINABLE_VARIABLES, ()))
    if not trainable:
      trainable = {node.changed_variable.name for node in self.ordered
                   if node.is_apply and node.changed_variable}
    found = []
    for node in self.ordered:
      if node.is_variable:
        shape = tf.TensorShape(node.attr["shape"].shape)
        dtype = tf.as_dtype(node.attr["dtype"].type).base_dtype
        found.append(Variable(
            node.name, None if shape.rank is None else shape.as_list(),
            dtype.name, placement.num_bytes_of(shape, dtype), node.device,
            node.name in trainable))
    return found


def ancestors(nodes: Iterable[Node]) -> Set[Node]:
  """Returns `nodes` and all that they read or wait for."""
  found, pending = set(), list(nodes)
  while pending:
    node = pending.pop()
    if node not in found:
      found.add(node)
      pending.extend(source for source, _ in node.inputs)
      pending.extend(node.controls)
  return found


def read(graph: Any) -> Nodes:
  """Returns the nodes of a graph.

  Args:
    graph: A `tf.Graph`, `GraphDef` or `MetaGraphDef`.

  Raises:
    TypeError: If it is something else.
    ValueError: If a node reads one that is not there, or a `tf.Graph` holds
      more than the 2 GB of constants that a `GraphDef` can.
  """
  if isinstance(graph, tf.Graph):
    # First, as TensorFlow makes the op of a regularisation loss only when it is
    # asked for it.
    names = dict(_collections_of_graph(graph))
    try:
      definition = graph.as_graph_def()
    except ValueError as error:
      raise ValueError(
          "`graph` must fit into a `GraphDef`, got one that does not "
          f"({error}). Feed large constants instead.") from error
    return Nodes(definition, names, graph)
  if isinstance(graph, tf.MetaGraphDef):
    return Nodes(graph.graph_def, dict(_collections_of_file(graph)),
                 _imported(graph.graph_def))
  if isinstance(graph, tf.GraphDef):
    return Nodes(graph, {}, _imported(graph))
  raise TypeError(
      "`graph` must be a `towers.TowerGraph`, a `tf.Graph`, a `GraphDef` or a "
      f"`MetaGraphDef`: got {type(graph)}.")


def _collections_of_graph(
    graph: tf.Graph) -> Iterator[Tuple[str, List[str]]]:
  for key in graph.get_all_collection_keys():
    names = []
    for item in graph.get_collection(key):
      try:
        op = item if isinstance(item, tf.Operation) else item.op
      except (AttributeError, RuntimeError):
        continue  # No part of the graph; or one to be made after its end.
      if isinstance(op, tf.Operation):
        names.append(op.name)
    if names:
      yield str(key), names


def _collections_of_file(graph: Any) -> Iterator[Tuple[str, List[str]]]:
  for key, entry in sorted(graph.collection_def.items()):
    names = [name.partition(":")[0] for name in entry.node_list.value]
    if "variables" in key:
      for text in entry.bytes_list.value:
        names.append(variable_pb2.VariableDef.FromString(
            text).variable_name.partition(":")[0])
    names = [name.rpartition("read/")[0] or name for name in names]
    if names:
      yield key, names


def _imported(definition: Any) -> Optional[tf.Graph]:
  """Returns the graph of a `GraphDef`, for its shapes; None if it cannot be."""
  if len(definition.node) > _MOST_TO_IMPORT:
    return None
  with tf.Graph().as_default() as graph:
    try:
      tf.import_graph_def(definition, name="")
    except (ValueError, TypeError, tf.errors.OpError):
      return None  # Such as ops of a library that is not loaded.
  return graph


def _spelling(device: str) -> str:
  try:
    spec = tf.DeviceSpec.from_string(device)
  except ValueError:
    return device
  if spec.job in (None, "localhost"):
    spec = tf.DeviceSpec(device_type=spec.device_type,
                         device_index=spec.device_index)
  return placement.same_spelling(spec.to_string())


def _in_order(nodes: List[Node]) -> List[Node]:
  """Returns `nodes` so that each stands after those it depends on."""
  waiting = {}
  for node in nodes:
    waiting[node] = len(node.controls) + sum(
        source.op not in ("NextIteration", "RefNextIteration")
        for source, _ in node.inputs)
  ready = collections.deque(node for node in nodes if not waiting[node])
  ordered = []
  while ready:
    node = ready.popleft()
    ordered.append(node)
    if node.op in ("NextIteration", "RefNextIteration"):
      following = node.followers
    else:
      following = node.readers + node.followers
    for reader in following:
      waiting[reader] -= 1
      if not waiting[reader]:
        ready.append(reader)
  if len(ordered) < len(nodes):
    done = set(ordered)
    ordered.extend(node for node in nodes if node not in done)
  return ordered
