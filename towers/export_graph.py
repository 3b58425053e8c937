"""Builds a model once for inference, as a graph that runs anywhere.

The graph is a new one: what the caller has open (devices, scopes, a tower loop)
does not reach it. It holds what the outputs need and nothing else, and names no
device, no matter what the model asks for.
"""

from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Set
import warnings

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import export_layout
from towers import export_signature

# A process that loads the model cannot run the ops whose type starts so.
_UNFIT = {
    "Placeholder": "what to feed it with is no input of the model. Pass it in "
                   "by `inputs`, or use `tf.placeholder_with_default`",
    "PyFunc": "only this process has the Python function that it calls. Use "
              "TensorFlow's ops, or do it before or after the model",
    "EagerPyFunc": "only this process has the Python function that it calls. "
                   "Use TensorFlow's ops, or do it before or after the model",
    "Iterator": "the model reads data of its own. Pass them in by `inputs`",
    "OneShotIterator": "the model reads data of its own. Pass them in by "
                       "`inputs`",
    "QueueDequeue": "the model reads data of its own. Pass them in by `inputs`",
}

_BATCH_NORMS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")

# They belong to the building process: devices that it knew, and gradients that
# it had registered.
_ATTRIBUTES_DROPPED = ("_class", "_gradient_op_type")

_COLLECTIONS = (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES,
                tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.ASSET_FILEPATHS)

# How many names a message lists before it counts the rest.
_SHOWN = 5


class InferenceGraph(NamedTuple):
  """A model's graph for inference.

  Fields:
    graph: The graph.
    inputs: Its placeholders, by the keys of the signature.
    outputs: Its outputs, likewise.
    saver: Restores the variables that the outputs need, and saves them.
  """
  graph: tf.Graph
  inputs: Dict[str, tf.Tensor]
  outputs: Dict[str, tf.Tensor]
  saver: tf.train.Saver

  @property
  def variables(self) -> List[Any]:
    """The variables that the outputs need."""
    return self.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)

  @property
  def table_initializers(self) -> List[Any]:
    """What fills the lookup tables that the outputs need."""
    return self.graph.get_collection(tf.GraphKeys.TABLE_INITIALIZERS)

  @property
  def assets(self) -> List[Any]:
    """Tensors with the paths of files that these read."""
    return self.graph.get_collection(tf.GraphKeys.ASSET_FILEPATHS)


def build(model_fn: Callable[..., Any], inputs: Any) -> InferenceGraph:
  """Builds `model_fn` in a graph of its own.

  Args:
    model_fn: See `towers.export.saved_model`.
    inputs: See `towers.export.saved_model`.

  Raises:
    TypeError: If `inputs` or outputs are nothing that can be exported.
    ValueError: Likewise; or if the outputs need what another process does not
      have, or do not leave the batch size free.
  """
  built = tf.Graph()
  with built.as_default(), tf.variable_creator_scope(_resource_variable):
    given = export_signature.placeholders(inputs, model_fn)
    outputs = export_signature.outputs(
        export_signature.called(model_fn, given.nest))
    return _for_inference(built, given.by_key, outputs)


def _for_inference(built: tf.Graph, inputs: Dict[str, tf.Tensor],
                   outputs: Dict[str, tf.Tensor]) -> InferenceGraph:
  """Returns what `outputs` need of `built`, the current graph, as a new one."""
  input_names = {key: x.op.name for key, x in inputs.items()}
  output_names = {key: x.op.name for key, x in outputs.items()}

  needed = _ancestors(built, output_names.values())
  _check_runs_elsewhere(built, needed, input_names.values())
  _check_free(built, outputs, input_names.values())
  _warn_of_training(built, needed)
  meta = _meta_graph(built, needed | set(input_names.values()))
  graph = tf.Graph()
  with graph.as_default():
    saver = tf.train.import_meta_graph(meta)
  if saver is None:
    raise ValueError("`model_fn` must make variables for its outputs: got "
                     f"{sorted(outputs)}, which need none.")
  tensor = lambda name: graph.get_tensor_by_name(f"{name}:0")
  return InferenceGraph(
      graph, {key: tensor(name) for key, name in input_names.items()},
      {key: tensor(name) for key, name in output_names.items()}, saver)


def _resource_variable(make: Callable[..., Any], **arguments: Any) -> Any:
  # TensorFlow 2 does not load the older kind.
  return make(**{**arguments, "use_resource": True})


def _ancestors(graph: tf.Graph, names: Iterable[str]) -> Set[str]:
  """Returns the names of the ops that those named depend on, and their own."""
  pending = [graph.get_operation_by_name(name) for name in names]
  found = {op.name for op in pending}
  while pending:
    op = pending.pop()
    for other in [x.op for x in op.inputs] + list(op.control_inputs):
      if other.name not in found:
        found.add(other.name)
        pending.append(other)
  return found


def _check_runs_elsewhere(graph: tf.Graph, needed: Set[str],
                          input_names: Iterable[str]) -> None:
  for name in sorted(needed - set(input_names)):
    op_type = graph.get_operation_by_name(name).type
    for prefix, reason in _UNFIT.items():
      if op_type.startswith(prefix) and op_type != "PlaceholderWithDefault":
        raise ValueError(
            "`model_fn` must make outputs that another process can compute: "
            f"they need the {op_type} `{name}`, and {reason}.")


def _check_free(graph: tf.Graph, outputs: Dict[str, tf.Tensor],
                input_names: Iterable[str]) -> None:
  """Checks that no output of the inputs has a fixed number of rows."""
  for key, x in outputs.items():
    rows = x.shape.as_list()[0] if x.shape.rank else None
    if rows is not None and not (_ancestors(graph, [x.op.name]).isdisjoint(
        input_names)):
      raise ValueError(
          "`model_fn` must leave the batch size free: expected [None, ...] for "
          f"the output `{key}`, got {x.shape.as_list()}. Take the number of "
          "rows from `tf.shape`, or -1 in `tf.reshape`.")


def _warn_of_training(graph: tf.Graph, needed: Set[str]) -> None:
  """Warns where a model seems to be built for training."""
  found = []
  for name in sorted(needed):
    op = graph.get_operation_by_name(name)
    if (op.type in _BATCH_NORMS and op.get_attr("is_training")
        and not _tensorflow.control_flow_of(op)[0]):
      found.append(name)
  if found:
    warnings.warn(
        "The exported outputs depend on which rows share a batch, as in "
        f"training: batch norm takes the batch's own moments in "
        f"{_listed(found)}. Build the model with `training=False`.")


def _listed(names: List[str]) -> str:
  more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
  return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more


def _meta_graph(graph: tf.Graph, needed: Set[str]) -> tf.MetaGraphDef:
  """Returns the part of `graph` that is needed, with its variables."""
  ranks = {op.name: op.outputs[0].shape.rank
           for op in graph.get_operations() if op.outputs}
  roots = needed | _keep_variables(graph, needed)
  roots |= _keep_tables(graph, needed)
  meta = tf.train.export_meta_graph(
      graph=graph, clear_devices=True, collection_list=list(_COLLECTIONS))
  graph_def = _pruned(
      export_layout.channels_last(meta.graph_def, ranks), roots)
  _strip(graph_def)
  meta.graph_def.CopyFrom(graph_def)
  left = export_layout.channels_first_ops(graph_def)
  if left:
    warnings.warn(
        "The exported model computes channels first, which many CPUs cannot: "
        f"{_listed(left)} could not be rewritten.")
  return meta


def _keep_variables(graph: tf.Graph, needed: Set[str]) -> Set[str]:
  """Leaves in the collections only variables that are needed.

  Returns:
    The names of the ops that belong to them.

  Raises:
    ValueError: If there are variables that no collection knows.
  """
  # Local ones count as well, and those of Keras, which may be in none.
  variables = [variable for variable in _tensorflow.known_variables(graph)
               if variable.op.name in needed]
  names = {variable.op.name for variable in variables}
  unknown = [name for name in sorted(needed - names)
             if graph.get_operation_by_name(name).type == "VarHandleOp"]
  if unknown:
    raise ValueError(
        "`model_fn` must make its variables by `tf.get_variable` or "
        f"`tf.Variable`, in a collection: got {_listed(unknown)}, which stand "
        "in none, so that no saver can restore them.")
  trainable = graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
  _set_collection(graph, tf.GraphKeys.GLOBAL_VARIABLES, variables)
  _set_collection(graph, tf.GraphKeys.TRAINABLE_VARIABLES, [
      variable for variable in variables
      if any(variable is other for other in trainable)])
  protos = [variable.to_proto() for variable in variables]
  return {name.partition(":")[0] for proto in protos for name in (
      proto.variable_name, proto.initializer_name, proto.snapshot_name,
      proto.initial_value_name) if name}


def _keep_tables(graph: tf.Graph, needed: Set[str]) -> Set[str]:
  """The same for lookup tables, and the files that these read."""
  initializers = [
      op for op in graph.get_collection(tf.GraphKeys.TABLE_INITIALIZERS)
      if any(x.op.name in needed for x in op.inputs)]
  names = _ancestors(graph, [op.name for op in initializers])
  _set_collection(graph, tf.GraphKeys.TABLE_INITIALIZERS, initializers)
  _set_collection(graph, tf.GraphKeys.ASSET_FILEPATHS, [
      x for x in graph.get_collection(tf.GraphKeys.ASSET_FILEPATHS)
      if x.op.name in names])
  return names


def _set_collection(graph: tf.Graph, key: str, items: List[Any]) -> None:
  graph.clear_collection(key)
  for item in items:
    graph.add_to_collection(key, item)


def _pruned(graph: tf.GraphDef, roots: Iterable[str]) -> tf.GraphDef:
  """Returns the nodes that `roots` depend on; functions stay."""
  nodes = {node.name: node for node in graph.node}
  pending, found = list(roots), set(roots)
  while pending:
    for name in nodes[pending.pop()].input:
      name = name.lstrip("^").partition(":")[0]
      if name not in found:
        found.add(name)
        pending.append(name)
  pruned = tf.GraphDef(versions=graph.versions, library=graph.library)
  pruned.node.extend(node for node in graph.node if node.name in found)
  return pruned


def _strip(graph: tf.GraphDef) -> None:
  """Drops what binds nodes, also those of functions, to this process."""
  for node in [*graph.node, *(node for function in graph.library.function
                              for node in function.node_def)]:
    node.device = ""
    for name in _ATTRIBUTES_DROPPED:
      node.attr.pop(name, None)
