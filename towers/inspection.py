"""Reports what a graph of towers holds, moves and forgets.

Works on what `towers.build_towers` returns and on any other graph with towers
in it, such as a tower loop written by hand, or a file of one:

    print(inspection.report(graph, train_op=train_op))
"""

import json
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence
from typing import Tuple

import tensorflow.compat.v1 as tf

from towers import display
from towers import findings as findings_lib
from towers import graph as graph_lib
from towers import graph_nodes
from towers import lint
from towers import picture
from towers import report_text
from towers import scopes as scopes_lib
from towers import transfers as transfers_lib

Node = graph_nodes.Node


class DeviceUse(NamedTuple):
  """What is on a device.

  Fields:
    device: Its name; "" for ops that say none, which TensorFlow will place.
    ops: How many ops.
    variables: How many variables.
    parameters: How many numbers its trainable variables have.
    num_bytes: The bytes of all its variables of known shape.
  """
  device: str
  ops: int
  variables: int
  parameters: int
  num_bytes: int


class TowerUse(NamedTuple):
  """One tower.

  Fields:
    towers: Name of the set that it belongs to.
    index: Its number.
    ops: How many ops.
    devices: The devices they are on, most ops first.
    difference: How its ops differ from those of the first tower.
  """
  towers: str
  index: int  # type: ignore[assignment]  # Hides `tuple.index`.
  ops: int
  devices: Tuple[str, ...]
  difference: scopes_lib.Difference


class UpdateOp(NamedTuple):
  """One of `UPDATE_OPS`.

  Fields:
    name: Its name.
    runs: "before" if every change that the optimizer makes waits for it;
      "beside" if the train op runs it, in any order; "never" if it does not;
      "unknown" without a train op.
  """
  name: str
  runs: str


class CollectionUse(NamedTuple):
  """What is in a collection of the graph.

  Fields:
    key: Its key.
    items: How many ops, tensors or variables.
    in_towers: How many of them stand in the scope of each tower, by its name.
  """
  key: str
  items: int
  in_towers: Dict[str, int]


class Report(NamedTuple):
  """What `report` found. `str` makes a text of tables of it.

  Fields:
    num_ops: How many ops the graph has.
    train_ops: Names of what a training step runs.
    train_ops_given: Whether the caller said so; otherwise they are from the
      collection `TRAIN_OP`, or all ends of the graph at which an optimizer has
      changed variables.
    devices: What is on each device.
    towers: The towers, set by set.
    transfers: What goes between devices in a training step, or, if there is no
      train op, in the whole graph.
    synced_layers: The layers in which towers meet (see `TowerGraph`); None for
      a graph that was not given as a `TowerGraph`.
    update_ops: What is in `UPDATE_OPS`, and when it runs.
    variables: The variables, and where they live.
    regularization_losses: Names in that collection.
    collections: How full the collections are.
    findings: What is likely to be a mistake.
  """
  num_ops: int
  train_ops: Sequence[str]
  train_ops_given: bool
  devices: Sequence[DeviceUse]
  towers: Sequence[TowerUse]
  transfers: Sequence[transfers_lib.Transfer]
  synced_layers: Optional[Sequence[Any]]
  update_ops: Sequence[UpdateOp]
  variables: Sequence[graph_nodes.Variable]
  regularization_losses: Sequence[str]
  collections: Sequence[CollectionUse]
  findings: Sequence[findings_lib.Finding]

  def __str__(self) -> str:
    return report_text.text(self)

  def to_json(self) -> str:
    """Returns the report as JSON: the fields, as objects and lists."""
    return json.dumps(_plain(self), indent=2)

  def draw(self, path: str) -> None:
    """Draws towers, devices and what flows between them; needs matplotlib.

    Args:
      path: File to write; its ending says which format: .png, .svg or .pdf.

    Raises:
      ImportError: If matplotlib is not installed.
      ValueError: If the ending is none of these.
    """
    picture.draw(self, path)


def report(graph: Any, *, train_op: Any = None,
           tower_pattern: Optional[str] = None) -> Report:
  """Returns a report of a graph with towers.

  Args:
    graph: A `towers.TowerGraph`, a `tf.Graph`, a `GraphDef` or `MetaGraphDef`.
      A `GraphDef` has no collections, without which less can be found.
    train_op: What a training step runs: an op, a tensor or the name of one, or
      a list of them. See `Report.train_ops` for the default.
    tower_pattern: Regular expression that finds the scope of a tower in a name,
      with a group around its number, such as `r"worker_(\\d+)/"`. By default
      scopes that end in tower, clone, replica or gpu and a number are found. A
      set of towers starts with number 0.

  Raises:
    TypeError: If `graph` is something else.
    ValueError: If `train_op` is not in the graph, `tower_pattern` is no regular
      expression with a group, or ops read others that are not there.
  """
  known: List[str] = []
  extra_updates: List[str] = []
  layers = None
  if isinstance(graph, graph_lib.TowerGraph):
    known = [tower.name_scope for tower in graph.towers]
    layers = tuple(graph.synced_layers)
    extra_updates = [op.name for op in graph.update_ops]
    graph = graph.graph
  nodes = graph_nodes.read(graph)
  scopes = scopes_lib.Scopes(nodes, tower_pattern, known)
  train = _train_ops(nodes, train_op)
  needed = graph_nodes.ancestors(train) if train else None
  names = [*nodes.collections.get(tf.GraphKeys.UPDATE_OPS, ()), *extra_updates]
  updates = [nodes.by_name[name] for name in dict.fromkeys(names)]
  variables = nodes.variables()
  context = findings_lib.Context(
      nodes, scopes, needed, updates, {v.name: v for v in variables})
  return Report(
      num_ops=len(nodes.ordered),
      train_ops=tuple(node.name for node in train),
      train_ops_given=train_op is not None,
      devices=_devices(nodes, variables),
      towers=_towers(scopes),
      transfers=transfers_lib.between_devices(nodes, scopes, needed),
      synced_layers=layers,
      update_ops=_update_ops(nodes, updates, needed),
      variables=variables,
      regularization_losses=tuple(
          nodes.collections.get(tf.GraphKeys.REGULARIZATION_LOSSES, ())),
      collections=_collections(nodes, scopes),
      findings=lint.check(context))


def write_display_graph(graph: Any, logdir: str, *,
                        run_metadata: Optional[tf.RunMetadata] = None,
                        tag: str = "traced_step",
                        tower_pattern: Optional[str] = None) -> None:
  """Writes a graph for TensorBoard, whose graph page then shows a few boxes.

  The boxes at the top are input, towers, cross_tower, gradients, average, apply
  and variables; outputs, and further sets of towers, where there are any. The
  graph itself keeps its names: only what is written has others, and shows each
  op's real name as its attribute `_name_in_graph`. Devices and shapes are
  written as well.

  Args:
    graph: As for `report`.
    logdir: Directory to write an event file to.
    run_metadata: What a step of this graph noted that ran with
      `tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)`. TensorBoard then
      shows the time and memory of each op.
    tag: What TensorBoard calls that step.
    tower_pattern: As for `report`.

  Raises:
    TypeError: If `graph` is something else.
    ValueError: If ops read others that are not there, `tower_pattern` is no
      regular expression with a group, or the graph is larger than the 2 GB that
      a `GraphDef` can be.
    OSError: If `logdir` cannot be written to; or `tf.errors.OpError`.
  """
  known: List[str] = []
  if isinstance(graph, graph_lib.TowerGraph):
    known = [tower.name_scope for tower in graph.towers]
    graph = graph.graph
  shown = display.display_graph(
      graph, tower_pattern=tower_pattern, known=known)
  with tf.Graph().as_default():  # The writer works in graph mode only.
    with tf.summary.FileWriter(logdir) as writer:
      writer.add_event(tf.Event(graph_def=shown.SerializeToString()))
      if run_metadata is not None:
        writer.add_run_metadata(display.display_run(run_metadata, shown), tag)


def real_graph(graph_def: tf.GraphDef) -> tf.GraphDef:
  """Returns a graph that `write_display_graph` wrote, with its real names.

  Long constants, whose values were not written, are zeros.

  Args:
    graph_def: The graph of an event file. One that was not made for display is
      returned as it is.
  """
  return display.real_graph(graph_def)


def _train_ops(nodes: graph_nodes.Nodes, train_op: Any) -> List[Node]:
  if train_op is None:
    names = nodes.collections.get(tf.GraphKeys.TRAIN_OP, ())
    return [nodes.by_name[name] for name in names] or _ends(nodes)
  found = []
  for item in train_op if isinstance(train_op, (list, tuple)) else [train_op]:
    name = item if isinstance(item, str) else getattr(
        getattr(item, "op", item), "name", None)
    node = nodes.by_name.get(str(name).partition(":")[0])
    if node is None:
      raise ValueError(
          "`train_op` must be an op or tensor of `graph`, or its name: got "
          f"{item!r}.")
    found.append(node)
  return found


def _ends(nodes: graph_nodes.Nodes) -> List[Node]:
  """Returns the ends of the graph that come after an optimizer's changes."""
  after = set()
  for node in nodes.ordered:
    if node.is_apply or any(source in after for source, _ in node.inputs) or (
        any(source in after for source in node.controls)):
      after.add(node)
  return [node for node in nodes.ordered
          if node in after and not node.readers and not node.followers]


def _devices(nodes: graph_nodes.Nodes,
             variables: Iterable[graph_nodes.Variable]) -> List[DeviceUse]:
  sums: Dict[str, List[int]] = {}
  for node in nodes.ordered:
    sums.setdefault(node.device, [0, 0, 0, 0])[0] += 1
  for variable in variables:
    entry = sums[variable.device]
    entry[1] += 1
    size = tf.TensorShape(variable.shape).num_elements()
    entry[2] += size if variable.trainable and size else 0
    entry[3] += variable.num_bytes or 0
  return [DeviceUse(device, *sums[device]) for device in sorted(sums)]


def _towers(scopes: scopes_lib.Scopes) -> List[TowerUse]:
  found = []
  for towers in scopes.sets:
    first = scopes_lib.signatures(scopes, towers.nodes[0])
    for index, members in towers.nodes.items():
      ops: Dict[str, int] = {}
      for node in members:
        # What lies with its variable says nothing about the tower.
        if node.handle is None and node.value_of is None:
          ops[node.device] = ops.get(node.device, 0) + 1
      devices = sorted(ops, key=lambda device: (-ops[device], device))
      found.append(TowerUse(
          towers.name, index, len(members), tuple(devices),
          scopes_lib.difference(
              first, scopes_lib.signatures(scopes, members))))
  return found


def _update_ops(nodes: graph_nodes.Nodes, updates: Sequence[Node],
                needed: Optional[Any]) -> List[UpdateOp]:
  if needed is None:
    return [UpdateOp(node.name, "unknown") for node in updates]
  # For each node, as bits, the updates that it waits for.
  bits = {node: 1 << k for k, node in enumerate(updates)}
  awaited: Dict[Node, int] = {}
  by_all = (1 << len(updates)) - 1
  for node in nodes.ordered:
    mask = bits.get(node, 0)
    for source, _ in node.inputs:
      mask |= awaited.get(source, 0)
    for source in node.controls:
      mask |= awaited.get(source, 0)
    awaited[node] = mask
    if node.is_apply and node in needed:
      by_all &= mask
  return [
      UpdateOp(node.name, "never" if node not in needed else
               "before" if by_all & bits[node] else "beside")
      for node in updates
  ]


def _collections(nodes: graph_nodes.Nodes,
                 scopes: scopes_lib.Scopes) -> List[CollectionUse]:
  found = []
  for key, names in sorted(nodes.collections.items()):
    in_towers: Dict[str, int] = {}
    for name in names:
      place = scopes.place(nodes.by_name[name])
      if place is not None:
        label = f"{place.towers} {place.index}"
        in_towers[label] = in_towers.get(label, 0) + 1
    found.append(CollectionUse(key, len(names), in_towers))
  return found


def _plain(value: Any) -> Any:
  """Returns `value` in what JSON knows, named tuples as objects."""
  if hasattr(value, "_asdict"):
    return {key: _plain(item) for key, item in value._asdict().items()}
  if isinstance(value, dict):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  return value
