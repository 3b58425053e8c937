"""Makes the graph of towers that TensorBoard's graph page shows in few boxes.

It computes the same as the real one: only the names of its ops differ (see
`display_names`), and each keeps its real name as an attribute, which
TensorBoard shows and `real_graph` reads back.
"""

import itertools
import re
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import display_names
from towers import graph_nodes

# Attribute that holds the real name of an op.
REAL_NAME = "_name_in_graph"

# TensorBoard shows no longer values, and says so where this attribute names
# them.
_LONGEST_VALUE = 1024
_LEFT_OUT = "_too_large_attrs"

_SHAPES = "_output_shapes"
_FOLDED = re.compile(r"/_\d+__cf__\d+$")
_COLOCATED = b"loc:@"


def display_graph(graph: Any, *, tower_pattern: Optional[str] = None,
                  known: Iterable[str] = ()) -> tf.GraphDef:
  """Returns a graph for display.

  Args:
    graph: A `tf.Graph`, `GraphDef` or `MetaGraphDef`. The shapes of all tensors
      are noted, too, unless it holds ops that TensorFlow does not know.
    tower_pattern: See `inspection.report`.
    known: Scopes of towers that the caller knows of, in order.

  Raises:
    TypeError: If `graph` is something else.
    ValueError: If ops read others that are not there, `tower_pattern` is no
      regular expression with a group, or the graph is larger than the 2 GB that
      a `GraphDef` can be.
  """
  definition = _with_shapes(graph)
  nodes = graph_nodes.Nodes(definition, {}, None)
  towers = display_names.Towers(nodes, tower_pattern, known)
  renamed = _renamed(definition, display_names.names(nodes, towers))
  places = {}
  for node, original in zip(renamed.node, definition.node):
    if node.name != original.name:
      node.attr[REAL_NAME].s = original.name.encode()
    _shorten(node)
    places[node.name] = towers.place(nodes.by_name[original.name])
  result = tf.GraphDef(versions=renamed.versions, library=renamed.library)
  result.node.extend(_ordered(renamed.node, places))
  return result


def real_graph(definition: tf.GraphDef) -> tf.GraphDef:
  """Returns a graph with the real names of one that was made for display.

  Long constants, whose values are not in a graph for display, are zeros.

  Args:
    definition: What `display_graph` returned; any other is returned as it is.
  """
  names = {node.name: node.attr[REAL_NAME].s.decode()
           for node in definition.node if REAL_NAME in node.attr}
  if not names:
    return definition
  result = _renamed(definition, names)
  for node in result.node:
    node.attr.pop(REAL_NAME, None)
  return result


def display_run(run_metadata: tf.RunMetadata,
                graph: tf.GraphDef) -> tf.RunMetadata:
  """Returns what a traced step noted, under names for display.

  Args:
    run_metadata: What `tf.Session.run` filled in.
    graph: What `display_graph` returned for the graph of that session.
  """
  names = {node.attr[REAL_NAME].s.decode(): node.name
           for node in graph.node if REAL_NAME in node.attr}
  # The graphs that ran on each device would only be shown under real names.
  result = tf.RunMetadata(step_stats=run_metadata.step_stats)
  for device in result.step_stats.dev_stats:
    for node in device.node_stats:
      # A GPU's kernels are noted as "name:kernel", and what TensorFlow computed
      # beforehand as "name/_1__cf__1".
      name, colon, kernel = node.node_name.partition(":")
      name = _FOLDED.sub("", name)
      node.node_name = names.get(name, name) + colon + kernel
  return result


def _ordered(nodes: Sequence[Any], places: Dict[str, Any]) -> Iterator[Any]:
  """Yields nodes in an order that gives all towers' boxes one colour.

  TensorBoard colours boxes by what is in them: those with as many ops of each
  type, *counted in the same order*, become candidates for one colour. Only then
  it compares what is inside; but, where JavaScript sorts as in Chrome, before
  it has looked into the boxes there, and so gives boxes with boxes inside each
  a colour of its own. Boxes that are no candidates have the plain colour, all
  the same. So the towers' ops begin with another order of types in each.
  """
  boxes: Dict[str, List[Any]] = {}
  numbers: Dict[str, int] = {}
  for node in sorted(nodes, key=lambda node: node.name):
    box = "/".join(node.name.split("/")[:2])
    boxes.setdefault(box, []).append(node)
    if places[node.name] is not None:
      numbers.setdefault(box, places[node.name].index)
  for box, members in boxes.items():
    first: List[Any] = []
    if box in numbers and any(node.name.count("/") > 2 for node in members):
      by_type = {node.op: node for node in reversed(members)}
      orders = itertools.permutations(sorted(by_type))
      order = next(itertools.islice(orders, numbers[box], None), ())
      first = [by_type[op] for op in order]
    yield from first
    leading = {node.name for node in first}
    yield from (node for node in members if node.name not in leading)


def _with_shapes(graph: Any) -> tf.GraphDef:
  if isinstance(graph, tf.Graph):
    try:
      return graph.as_graph_def(add_shapes=True)
    except ValueError as error:
      raise ValueError(
          "`graph` must fit into a `GraphDef`, got one that does not "
          f"({error}). Feed large constants instead.") from error
  definition = getattr(graph, "graph_def", graph)
  if not isinstance(definition, tf.GraphDef):
    raise TypeError(
        "`graph` must be a `towers.TowerGraph`, a `tf.Graph`, a `GraphDef` or "
        f"a `MetaGraphDef`: got {type(graph)}.")
  with tf.Graph().as_default() as imported:
    try:
      tf.import_graph_def(definition, name="")
    except (ValueError, TypeError, tf.errors.OpError):
      return definition  # Such as ops of a library that is not loaded.
  # Not the rest of it, as importing decides on devices that were left open.
  shapes = {node.name: node.attr[_SHAPES]
            for node in imported.as_graph_def(add_shapes=True).node
            if _SHAPES in node.attr}
  result = tf.GraphDef()
  result.CopyFrom(definition)
  for node in result.node:
    if node.name in shapes:
      node.attr[_SHAPES].CopyFrom(shapes[node.name])
  return result


def _renamed(definition: tf.GraphDef, names: Dict[str, str]) -> tf.GraphDef:
  """Returns a copy of `definition`, in which `names` has new names of ops."""
  result = tf.GraphDef()
  result.CopyFrom(definition)
  for node in result.node:
    node.name = names.get(node.name, node.name)
    node.input[:] = [_renamed_input(entry, names) for entry in node.input]
    if "_class" in node.attr:
      labels = node.attr["_class"].list
      labels.s[:] = [_renamed_label(label, names) for label in labels.s]
  return result


def _renamed_input(entry: str, names: Dict[str, str]) -> str:
  name, colon, port = entry.partition(":")
  if name.startswith("^"):
    return "^" + names.get(name[1:], name[1:])
  return names.get(name, name) + colon + port


def _renamed_label(label: bytes, names: Dict[str, str]) -> bytes:
  if not label.startswith(_COLOCATED):
    return label
  name = label[len(_COLOCATED):].decode()
  return _COLOCATED + names.get(name, name).encode()


def _shorten(node: Any) -> None:
  """Leaves the value of a long constant out; TensorBoard would not show it."""
  if node.op != "Const" or (
      node.attr["value"].ByteSize() <= _LONGEST_VALUE):
    return
  value = node.attr["value"].tensor
  short = type(value)(dtype=value.dtype, tensor_shape=value.tensor_shape)
  value.CopyFrom(short)
  node.attr[_LEFT_OUT].list.s.append(b"value")
