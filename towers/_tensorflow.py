"""Every TensorFlow internal that `towers` leans on, and why.

The public API of `tensorflow.compat.v1` builds graphs from one thread, for one
tower. Building several towers side by side needs a little more: state that
TensorFlow keeps by graph must be kept by tower, and a few functions must ask
which tower is building before they act. Each entry here is small, says what it
needs, and is tested on both ends of the TensorFlow versions that we support.
Nothing here stays behind: what is replaced is put back on leaving the context.
"""

import contextlib
import copy
import functools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional
from typing import Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import op_callbacks
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import control_flow_state
from tensorflow.python.ops import gradients_util
from tensorflow.python.ops import metrics as metric_ops
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.ops import summary_op_util
from tensorflow.python.ops import variable_scope
from tensorflow.python.ops import variables

from towers import _keras

# pylint: disable=protected-access

# Seeds that TensorFlow derives by counting are this far apart between towers,
# more than any one tower draws.
_SEEDS_PER_TOWER = 1 << 20

# Where functions of `tf.metrics` are looked up; in the latter by TF-Slim.
METRIC_MODULES = (tf.metrics, metric_ops)

_FUSED_BATCH_NORMS = frozenset(
    ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"])

# The stacks that `Graph.switch_to_thread_local` makes a thread's own.
_THREAD_STACKS = ("_device_function_stack", "_colocation_stack",
                  "_control_dependencies_stack")


def is_plain_graph(graph: tf.Graph) -> bool:
  """Says whether `graph` is no function body (`tf.function`, v2 branches)."""
  return not graph.building_function


# --- Graph state that must be kept by tower ----------------------------------


class SwitchedState(NamedTuple):
  """What a graph holds for whoever builds in it, but not by thread."""
  collections: Dict[Any, List[Any]]
  control_flow_context: Optional[Any]
  seeds_drawn: int
  attribute_scopes: Dict[str, Any]
  gradient_overrides: Dict[str, str]
  kernel_labels: Dict[str, str]
  layer_counts: _keras.Counts


def ensure_variable_stores() -> None:
  """Makes the current graph's variable stores, which stand in collections.

  Otherwise each tower would make its own, in its own collections.
  """
  variable_scope._get_default_variable_store()
  variable_scope.get_variable_scope_store()


def fork_state(graph: tf.Graph, tower_index: int) -> SwitchedState:
  """Returns a copy of the state of `graph` for tower `tower_index` to use.

  The tower adds to collections of its own, so it finds in them what the model
  would find on one device. It draws its derived seeds from a range of its own,
  so dropout differs between towers. Tower 0 goes on where the graph is, with
  the graph's own collections: what it leaves there is what one device would,
  and variables get the same initial values for every number of towers.
  """
  collections = graph._collections
  layer_counts = _keras.counts_by_graph(graph)
  if tower_index > 0:
    collections = {key: list(items) for key, items in collections.items()}
    layer_counts = _keras.copy_of(layer_counts)
  return SwitchedState(
      collections=collections,
      control_flow_context=None,
      seeds_drawn=seeds_drawn(graph) + tower_index * _SEEDS_PER_TOWER,
      attribute_scopes=dict(graph._attr_scope_map),
      gradient_overrides=dict(graph._gradient_override_map),
      kernel_labels=dict(graph._op_to_kernel_label_map),
      layer_counts=layer_counts)


def exchange_state(graph: tf.Graph, state: SwitchedState) -> SwitchedState:
  """Installs `state` in `graph`; returns the state that was there before."""
  previous = SwitchedState(
      collections=graph._collections,
      control_flow_context=graph._get_control_flow_context(),
      seeds_drawn=seeds_drawn(graph),
      attribute_scopes=graph._attr_scope_map,
      gradient_overrides=graph._gradient_override_map,
      kernel_labels=graph._op_to_kernel_label_map,
      layer_counts=_keras.counts_by_graph(graph))
  graph._collections = state.collections
  graph._set_control_flow_context(state.control_flow_context)
  set_seeds_drawn(graph, state.seeds_drawn)
  graph._attr_scope_map = state.attribute_scopes
  graph._gradient_override_map = state.gradient_overrides
  graph._op_to_kernel_label_map = state.kernel_labels
  _keras.set_counts_by_graph(graph, state.layer_counts)
  return previous


def kept_with(graph: tf.Graph, name: str, make: Callable[[], Any]) -> Any:
  """Returns what `towers` keeps under `name` for as long as `graph` lives."""
  if not hasattr(graph, name):
    setattr(graph, name, make())
  return getattr(graph, name)


def seeds_drawn(graph: tf.Graph) -> int:
  """Returns how many seeds were derived from the seed of `graph`."""
  return random_seed._graph_to_seed_dict.get(graph, 0)


def set_seeds_drawn(graph: tf.Graph, count: int) -> None:
  """Lets the next derived seed be the one after `count` others."""
  random_seed._graph_to_seed_dict[graph] = count


def collection_sizes(graph: tf.Graph) -> Dict[Any, int]:
  """Returns how many items each collection of `graph` holds."""
  return {key: len(items) for key, items in graph._collections.items()}


def added_to_collections(graph: tf.Graph,
                         sizes: Dict[Any, int]) -> Dict[Any, List[Any]]:
  """Returns what was appended to each collection since `sizes` was taken."""
  return {
      key: items[sizes.get(key, 0):]
      for key, items in graph._collections.items()
      if len(items) > sizes.get(key, 0)
  }


def snapshot_collections(graph: tf.Graph) -> Dict[Any, List[Any]]:
  """Returns a copy of all collections of `graph`."""
  return {key: list(items) for key, items in graph._collections.items()}


def restore_collections(graph: tf.Graph, saved: Dict[Any, List[Any]]) -> None:
  """Puts all collections of `graph` back, in the lists that others hold."""
  for key in list(graph._collections):
    if key in saved:
      graph._collections[key][:] = saved[key]
    else:
      del graph._collections[key]


# --- Scopes that a tower's thread takes over from the caller's ---------------


class CallerScopes:
  """The caller's devices, control dependencies, creators and variable scope.

  TensorFlow keeps them by thread once `Graph.switch_to_thread_local` was
  called, so a tower's thread would start without them.
  """

  def __init__(self, graph: tf.Graph):
    self._graph = graph
    self._was_thread_local = graph._stack_state_is_thread_local
    self._device_functions = graph._device_function_stack.copy()
    self._colocations = graph._colocation_stack.copy()
    self._control_dependencies = list(graph._control_dependencies_stack)
    self._variable_creators = list(graph._variable_creator_stack)
    store = variable_scope.get_variable_scope_store()
    self._variable_scope = store.current_scope
    self._layer_counts = _keras.counts_by_thread()
    self._keras_settings = _keras.settings_of_thread()
    self._scope_counts = dict(store.variable_scopes_count)

  @contextlib.contextmanager
  def thread_local_stacks(self) -> Iterator[None]:
    """Keeps the graph's stacks by thread; for the caller's own thread."""
    graph = self._graph
    if self._was_thread_local:
      yield
      return
    graph.switch_to_thread_local()
    try:
      yield
    finally:
      graph._stack_state_is_thread_local = False
      for name in _THREAD_STACKS:
        # A later switch would find these, outdated.
        graph._thread_local.__dict__.pop(name, None)

  @contextlib.contextmanager
  def entered(self) -> Iterator[None]:
    """Enters the caller's scopes; for a tower's thread."""
    graph = self._graph
    graph._device_function_stack = self._device_functions.copy()
    graph._colocation_stack = self._colocations.copy()
    graph._control_dependencies_stack = list(self._control_dependencies)
    graph._variable_creator_stack = list(self._variable_creators)
    store = variable_scope.get_variable_scope_store()
    # A copy, so that `reuse_variables()` in a model stays in its tower.
    store.current_scope = copy.copy(self._variable_scope)
    store.variable_scopes_count = dict(self._scope_counts)
    _keras.take_settings(self._keras_settings)
    _keras.set_counts_by_thread(self._layer_counts)
    yield

  def counts(self) -> Tuple[Any, Any]:
    """Returns how often names of scopes and layers were given, in this thread.
    """
    store = variable_scope.get_variable_scope_store()
    return dict(store.variable_scopes_count), _keras.counts_by_thread()

  def adopt_counts(self, counts: Tuple[Any, Any]) -> None:
    """Goes on, in the caller's thread, where another's counts ended."""
    store = variable_scope.get_variable_scope_store()
    store.variable_scopes_count = dict(counts[0])
    _keras.set_counts_by_thread(counts[1])


@contextlib.contextmanager
def root_variable_scope_kept() -> Iterator[None]:
  """Undoes `reuse_variables()` on the current variable scope on leaving."""
  store = variable_scope.get_variable_scope_store()
  scope = store.current_scope
  store.current_scope = copy.copy(scope)
  try:
    yield
  finally:
    store.current_scope = scope


# --- Variables ----------------------------------------------------------------


def is_variable(value: Any) -> bool:
  """Says whether `value` is a variable; not all are `tf.Variable` of v1."""
  return isinstance(value, variables.Variable)


def is_resource_variable(value: Any) -> bool:
  """Says whether `value` is a variable read through a resource handle."""
  return isinstance(value, resource_variable_ops.BaseResourceVariable)


def make_tower_aware(variable: Any, choose_handle: Callable[..., tf.Tensor],
                     choose_device: Callable[..., str]) -> None:
  """Gives resource variable `variable` a handle for each tower.

  Every read, gather and assignment of a resource variable goes through its
  `handle`. Where that property asks which tower is building, one variable
  object serves all towers: it is the variable in every other respect (type,
  name, identity, membership in collections), and its gradient comes apart by
  tower.

  `choose_handle` takes the variable and its real handle, and returns the handle
  that the building tower is to use; `choose_device` likewise for the device.
  """
  variable._towers_choose = (choose_handle, choose_device)
  variable.__class__ = _tower_aware_class(variable.__class__)


def make_unaware(variable: Any) -> None:
  """Undoes `make_tower_aware`."""
  variable.__class__ = type(variable).__bases__[0]
  del variable._towers_choose


# TensorFlow notes every class that it has made a tensor of, for as long as the
# process lives, and with it all that its methods refer to. So all graphs share
# these classes, and what belongs to one graph hangs on the variable.
@functools.cache
def _tower_aware_class(cls: Any) -> Any:
  real_handle = cls.handle.fget

  def where_it_is(lookup: Any) -> Any:
    # As for reads. TensorFlow would move the lookup to the variable, but not
    # the gradient ops that were told to stay with it on the tower's device.
    def placed(self: Any, *args: Any, **kwargs: Any) -> Any:
      with self.graph.colocate_with(None, ignore_existing=True):
        return lookup(self, *args, **kwargs)

    return placed

  def to_proto(self: Any, export_scope: Any = None) -> Any:
    view, self.__class__ = self.__class__, cls
    try:
      return self.to_proto(export_scope)
    finally:
      self.__class__ = view

  return _subclass(
      cls,
      handle=property(
          lambda self: self._towers_choose[0](self, real_handle(self))),
      # These describe the variable, not the tower's way to it.
      op=property(lambda self: real_handle(self).op),
      device=property(
          lambda self: self._towers_choose[1](self, real_handle(self).device)),
      graph=property(lambda self: real_handle(self).graph),
      sparse_read=where_it_is(cls.sparse_read),
      gather_nd=where_it_is(cls.gather_nd),
      to_proto=to_proto)


def _subclass(cls: Any, **members: Any) -> Any:
  """Returns a subclass that looks like `cls` to who asks for its name."""
  looks = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
  return type(cls)(cls.__name__, (cls,), {**looks, **members})


def guard_updates(variable: Any, check: Callable[[Any], None]) -> None:
  """Calls `check` with `variable` whenever an optimizer updates it.

  Optimizers of v1 ask each variable for its `constraint` as they do.
  """
  if not hasattr(variable, "_towers_check"):
    variable._towers_check = check
    variable.__class__ = _guarded_class(variable.__class__)


@functools.cache
def _guarded_class(cls: Any) -> Any:
  constraint = cls.constraint.fget

  def checked(self: Any) -> Any:
    self._towers_check(self)
    return constraint(self)

  return _subclass(cls, constraint=property(checked))


def parts_of(variable: Any) -> List[Any]:
  """Returns the variables that a partitioned variable is made of, or itself."""
  if isinstance(variable, variables.PartitionedVariable):
    return list(variable)
  return [variable]


def set_initializer(variable: Any, op: tf.Operation) -> None:
  """Makes `op` what initialises `variable`."""
  variable._initializer_op = op


def extend_initializer(variable: Any, ops: List[tf.Operation]) -> None:
  """Makes `ops` part of what initialises `variable`, from now on."""
  own = variable._initializer_op
  value = own.inputs[1]  # `variable.load` feeds this input of the initialiser.
  with tf.control_dependencies(None), tf.control_dependencies([own, *ops]):
    with tf.device(own.device):
      variable._initializer_op = tf.raw_ops.IdentityN(
          input=[value, value], name="initialize")[1].op


def known_variables(graph: tf.Graph) -> List[tf.Variable]:
  """Returns the variables in collections of `graph` and in its variable store.

  A variable in no collection is still found by its name in the store.
  """
  found = [item for items in graph._collections.values() for item in items
           if is_variable(item)]
  found += variable_scope._get_default_variable_store()._vars.values()
  return list({id(item): item for item in found}.values())


@contextlib.contextmanager
def intercepted_get_variable(
    single: Callable[..., Any],
    partitioned: Callable[..., Any]) -> Iterator[None]:
  """Routes `tf.get_variable` of the current graph through two functions.

  A custom getter would do, but for models that re-enter a variable scope
  object from elsewhere (which brings its own getters) or whose getters ask for
  variables under other names. All of them end in these two methods of the
  graph's variable store.

  Args:
    single: Called with the original method and its keyword arguments.
    partitioned: The same for partitioned variables.
  """
  store = variable_scope._get_default_variable_store()
  original: Any = type(store)

  class Routed(original):
    """The store, with both methods overridden; its attributes are slots."""
    __slots__ = ()

    def _get_single_variable(self, *args: Any, **kwargs: Any) -> Any:
      return single(super()._get_single_variable, *args, **kwargs)

    def _get_partitioned_variable(self, *args: Any, **kwargs: Any) -> Any:
      return partitioned(super()._get_partitioned_variable, *args, **kwargs)

  store.__class__ = Routed
  try:
    yield
  finally:
    store.__class__ = original


# --- Control flow -------------------------------------------------------------


class Branch(NamedTuple):
  """One branch of a v1 conditional: its predicate, and which way it is."""
  predicate: tf.Tensor
  taken_when: int


def enclosing_control_flow(graph: tf.Graph) -> Tuple[List[Branch], List[str]]:
  """Returns the v1 conditionals and the loops that the graph is building in.

  Both go from the outside in; loops are given by name.
  """
  return _unwind(graph._get_control_flow_context())


def control_flow_of(op: tf.Operation) -> Tuple[List[Branch], List[str]]:
  """Returns the v1 conditionals and the loops around `op`, outside first."""
  return _unwind(op._get_control_flow_context())


def _unwind(control_flow_context: Any) -> Tuple[List[Branch], List[str]]:
  branches, loops = [], []
  while control_flow_context is not None:
    if control_flow_context.IsWhileContext():
      loops.append(control_flow_context.name)
    elif control_flow_context.IsCondContext():
      branches.append(
          Branch(control_flow_context.pred, control_flow_context.branch))
    control_flow_context = control_flow_context.outer_context
  return branches[::-1], loops[::-1]


def starts_of(op: tf.Operation) -> List[tf.Operation]:
  """Returns the ops that must wait in order that `op` waits.

  Nothing inside a loop can wait for what is outside, so the whole loop waits.
  """
  starts = [op]
  context = op._get_control_flow_context()
  while context is not None:
    if context.IsWhileContext():
      starts = [tensor.op for tensor in context.loop_enters]
    context = context.outer_context
  return starts


def lift_out_of_conditionals(op: tf.Operation) -> tf.Operation:
  """Returns an op outside all conditionals that runs after `op`, if it runs.

  An op in a branch that is not taken is dead, and so is all that waits for it.
  A `Merge` of both branches is alive either way.
  """
  context = op._get_control_flow_context()
  signal = op
  while context is not None:
    with _in_context(op.graph, context.outer_context):
      off, on = tf.raw_ops.Switch(data=context.pred, pred=context.pred)
      mine, other = (on, off) if context.branch == 1 else (off, on)
      with tf.control_dependencies([signal]):
        mine = tf.identity(mine)
      signal = tf.raw_ops.Merge(inputs=[mine, other]).output.op
    context = context.outer_context
  return signal


@contextlib.contextmanager
def _in_context(graph: tf.Graph,
                control_flow_context: Any) -> Iterator[None]:
  with graph.control_dependencies(None):
    graph._set_control_flow_context(control_flow_context)
    yield


def add_control_inputs(op: tf.Operation, inputs: List[tf.Operation]) -> None:
  """Makes an op that exists wait for `inputs` as well."""
  op._add_control_inputs(inputs)


def is_reference(tensor: tf.Tensor) -> bool:
  """Says whether `tensor` is a variable (or other state) to change."""
  return tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
  """A context on `device`, whatever device is current."""
  with tf.device(None), tf.device(device):
    yield


def value_now(variable_op: tf.Operation) -> tf.Tensor:
  """Returns what the variable of an op holds before anything changes it."""
  with tf.control_dependencies(None), _on(variable_op.device):
    if variable_op.type != "VarHandleOp":
      return tf.raw_ops.DeepCopy(x=variable_op.outputs[0])  # Updated in place.
    value = tf.raw_ops.ReadVariableOp(
        resource=variable_op.outputs[0], dtype=variable_op.get_attr("dtype"))
  value.set_shape(tf.TensorShape(variable_op.get_attr("shape")))
  return value


def assign_value(variable_op: tf.Operation, value: tf.Tensor) -> tf.Operation:
  """Returns the op that sets the variable of an op."""
  with _on(variable_op.device):
    if variable_op.type != "VarHandleOp":
      return tf.assign(variable_op.outputs[0], value).op
    return tf.raw_ops.AssignVariableOp(
        resource=variable_op.outputs[0], value=value)


# --- Ops, as they are created -------------------------------------------------


@contextlib.contextmanager
def op_callback(
    function: Callable[[tf.Operation], Optional[Sequence[tf.Tensor]]]
) -> Iterator[None]:
  """Calls `function` with each op that the current thread creates.

  Ops that `function` creates itself are not passed to it.

  Args:
    function: Returns None, or the tensors that whoever asked for the op gets in
      place of its outputs.
  """

  def callback(op_type: Any, inputs: Any, attributes: Any, outputs: Any,
               op_name: Any = None, graph: Any = None) -> Any:
    del op_type, inputs, attributes  # As the op has them.
    if graph is None:
      return None
    op = outputs[0].op if outputs else graph.get_operation_by_name(op_name)
    return function(op)

  op_callbacks.add_op_callback(callback)
  try:
    yield
  finally:
    op_callbacks.remove_op_callback(callback)


def copy_op(op: tf.Operation, inputs: List[tf.Tensor],
            control_inputs: List[tf.Operation]) -> tf.Operation:
  """Returns an op like `op` that is fed otherwise."""
  with tf.control_dependencies(control_inputs):
    with _on(op.device):
      return op.graph.create_op(
          op.type, inputs, dtypes=[x.dtype for x in op.outputs],
          name=op.name.rpartition("/")[2], attrs=dict(op.node_def.attr),
          op_def=op.op_def)


def replace_inputs(op: tf.Operation, inputs: Dict[int, tf.Tensor]) -> None:
  """Feeds an op that exists from other tensors, of the same types.

  They pass through an op of unknown shape, since TensorFlow takes none in place
  of an input of another shape. If `op` stands in a conditional, that brings
  them into it, too.
  """
  for index, tensor in inputs.items():
    if tensor.shape.rank is not None:
      tensor = of_unknown_shape(tensor)
    elif op._get_control_flow_context() is not None:
      tensor = tf.identity(tensor)
    op._update_input(index, tensor)


def of_unknown_shape(tensor: tf.Tensor) -> tf.Tensor:
  """Returns `tensor` without what is known of its shape."""
  return tf.placeholder_with_default(tensor, None)


def set_bool_attribute(op: tf.Operation, name: str, value: bool) -> None:
  """Changes an attribute of an op that exists."""
  op._set_attr(name, attr_value_pb2.AttrValue(b=value))


def has_gradient_of_its_own(op: tf.Operation) -> bool:
  """Says whether `op` has another gradient than that of its type."""
  try:
    return bool(op.get_attr("_gradient_op_type"))
  except ValueError:
    return False


def set_gradient(op: tf.Operation, gradient: str) -> None:
  """Gives an op that exists the registered `gradient`."""
  op._set_attr("_gradient_op_type",
               attr_value_pb2.AttrValue(s=gradient.encode()))


# --- Gradients ----------------------------------------------------------------


def set_attribute(op: tf.Operation, name: str, value: Any) -> None:
  """Notes a number on `op`, where it survives an export of the graph."""
  field = "f" if isinstance(value, float) else "i"
  op._set_attr(name, attr_value_pb2.AttrValue(**{field: value}))


@contextlib.contextmanager
def gradients_intercepted(
    function: Callable[..., List[Any]]) -> Iterator[None]:
  """Routes `tf.gradients` and all that is built on it through `function`.

  Args:
    function: Called with the original function and its arguments.
  """
  original = gradients_util._GradientsHelper

  def routed(*args: Any, **kwargs: Any) -> Any:
    return function(original, *args, **kwargs)

  gradients_util._GradientsHelper = routed
  try:
    yield
  finally:
    gradients_util._GradientsHelper = original


@contextlib.contextmanager
def no_zeros_for_batch_norm() -> Iterator[None]:
  """Keeps `tf.gradients` from making zeros that nothing reads.

  For each output of an op that the loss does not depend on, `tf.gradients`
  creates a `ZerosLike`: five for each fused batch norm, whose gradient looks at
  the first output only. In a ResNet-110 that is one op in seven.
  The gradients of `towers` take None for such an output.
  """
  original = control_flow_state.ZerosLike

  def zeros_like(op: tf.Operation, index: int) -> Optional[tf.Tensor]:
    # Not the first output, nor those of the gradient: their gradients do look.
    unread = op.type in _FUSED_BATCH_NORMS and index > 0
    if unread or _is_ours(op):
      return None
    return original(op, index)

  control_flow_state.ZerosLike = zeros_like
  try:
    yield
  finally:
    control_flow_state.ZerosLike = original


def _is_ours(op: tf.Operation) -> bool:
  try:
    return op.get_attr("_gradient_op_type").startswith(b"Towers")
  except ValueError:
    return False


def is_zeros(value: Optional[tf.Tensor]) -> bool:
  """Says whether a gradient is None or zeros that `tf.gradients` filled in."""
  return value is None or value.op.type == "ZerosLike"


def shared_constant(value: Any, dtype: tf.DType, device: str,
                    scope: str) -> tf.Tensor:
  """Returns a constant, made once for each device and scope of the graph.

  In a deep model, constants for each layer would be a good part of all ops.

  Args:
    value: A number or array.
    dtype: Type of the constant.
    device: Device that it is needed on.
    scope: Name scope that it belongs to, with a trailing slash, or "".
  """
  graph = tf.get_default_graph()
  constants = kept_with(graph, "_towers_constants", dict)
  value = np.asarray(value, dtype.as_numpy_dtype)
  key = (value.tobytes(), value.shape, dtype, device, scope)
  if key not in constants:
    # Outside all control flow, since others will use it too.
    with graph.control_dependencies(None):
      with graph.colocate_with(None, ignore_existing=True), tf.device(device):
        with tf.name_scope(scope + "towers_constants/"):
          constants[key] = tf.constant(value)
  return constants[key]


# --- Summaries ----------------------------------------------------------------


@contextlib.contextmanager
def summary_tags(rename: Callable[[str], str]) -> Iterator[None]:
  """Passes the tag of each summary that is made through `rename`.

  A v1 summary takes its tag from the name scope that it is made in.
  """
  original = summary_op_util.summary_scope

  @contextlib.contextmanager
  def renamed(*args: Any, **kwargs: Any) -> Iterator[Any]:
    with original(*args, **kwargs) as (tag, scope):
      yield rename(tag), scope

  summary_op_util.summary_scope = renamed
  try:
    yield
  finally:
    summary_op_util.summary_scope = original
