"""Batch norm of any library, made to take in the rows of all towers.

While a model function runs, every op that it creates is looked at, and the few
that compute statistics over the batch are changed on the spot, in place: the op
keeps its name, its shape and its place in the model, and gives the value that
it would have on one device.

- A fused batch norm in training mode becomes one in inference mode, fed with
  the moments of the whole batch (see `fused.py`).
- A mean that `tf.nn.moments` takes, and a sum that other functions for moments
  take, is computed beside it and put together over the towers; the op itself is
  then left to reduce axes of size 1.

What counts is which function asks for the op, not which library calls that; the
table below has one line for each. Reductions that leave out the batch axis
(layer, instance and group norm) stay as they are.

Batch norm layers change their moving statistics by assignments. Some libraries
put these into `UPDATE_OPS`; for those that do not, they are noted here.
"""

import contextlib
import re
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence
from typing import Set, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import collectives
from towers import context
from towers import fused
from towers import lockstep as lockstep_lib
from towers import moments
from towers import tower as tower_lib


class SyncedLayer(NamedTuple):
  """A layer whose statistics are those of the whole batch.

  Fields:
    name: Name of the layer, without the scope of a tower.
    kind: What makes it: "towers.batch_norm", a class such as
      "keras.BatchNormalization", or a function such as "tf.nn.moments".
    axes: The axes of its input that the statistics go over.
    towers: How many towers meet in it.
  """
  name: str
  kind: str
  axes: Tuple[int, ...]
  towers: int


# Functions that take statistics: the end of their module's name, their own
# name, the op type that reduces in them, and what users call them.
_MAKERS = (
    ("tensorflow.python.ops.nn_impl", "moments", "Mean", "tf.nn.moments"),
    ("tensorflow.python.ops.nn_impl", "weighted_moments", "Sum",
     "tf.nn.weighted_moments"),
    ("layers.normalization.batch_normalization", "_sync_calculate_mean_and_var",
     "Sum", ""),
    ("keras.src.backend.tensorflow.nn", "_compute_moments_sync", "Sum", ""),
    ("keras.src.layers.normalization.batch_normalization", "_moments", "Sum",
     ""),
)
# A local variable of these functions that exists from their first reduction on.
_FIRST_RESULTS = ("mean", "weighted_input_sum", "local_sum", "masked_input_sum")
_ASSIGNMENTS = frozenset([
    "AssignVariableOp", "AssignSubVariableOp", "AssignAddVariableOp", "Assign",
    "AssignSub", "AssignAdd"
])
_FUSED = frozenset(
    ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"])


class Conversion:
  """What is converted in one build.

  Attributes:
    layers: The layers whose statistics are those of the whole batch.
    assignments: For each tower, the ops by which batch norm layers change their
      moving statistics.
    duplicates: Of these, the ops that repeat what tower 0's counterpart does.
    own_statistics: For each tower, what it has itself in place of a tensor (by
      name) that is the mean over towers which normalise each by its own rows.
  """

  def __init__(self, count: int):
    self._count = count
    self.layers: List[SyncedLayer] = []
    self.assignments: Dict[int, List[tf.Operation]] = {
        tower: [] for tower in range(count)
    }
    self.duplicates: Set[tf.Operation] = set()
    self.own_statistics: Dict[int, Dict[str, tf.Tensor]] = {
        tower: {} for tower in range(count)
    }

  @contextlib.contextmanager
  def installed(self) -> Iterator[None]:
    """Looks at every op that is created; for each tower's thread."""
    with _tensorflow.op_callback(self._look):
      yield

  def note(self, name: str, kind: str, axes: Sequence[int]) -> None:
    """Notes a layer whose towers meet."""
    if context.current_tower().index == 0:
      self.layers.append(SyncedLayer(name, kind, tuple(axes), self._count))

  def note_own(self, mean: tf.Tensor, own: tf.Tensor) -> None:
    """Notes what the building tower has put into a mean over the towers."""
    self.own_statistics[context.current_tower().index][mean.name] = own

  def _look(self, op: tf.Operation) -> Optional[Sequence[tf.Tensor]]:
    """Converts `op` if it takes statistics; returns its outputs if changed."""
    if context.unwatched():
      return None
    synced = context.lockstep() is not None and context.sync_batch_norm()
    if op.type in _FUSED:
      if synced and op.get_attr("is_training") and _has_batch(op.inputs[0]):
        return self._convert_fused(op)
    elif op.type in ("Mean", "Sum"):
      if synced:
        self._convert_reduction(op)
    elif op.type in _ASSIGNMENTS:
      self._take_assignment(op)
    return None

  # --- Statistics ---

  def _convert_fused(self, op: tf.Operation) -> Sequence[tf.Tensor]:
    layer = _layer_around()
    name = _name_of(op)
    _check_layer(layer, name)
    data_format = op.get_attr("data_format").decode()
    if tf.dimension_value(op.inputs[1].shape[0]) is None:
      raise ValueError(
          f"`scale` of a fused batch norm must have a static size: got "
          f"`{op.inputs[1].name}` of shape {op.inputs[1].shape} (layer "
          f"`{name}`, tower {context.current_tower().index}). Set the shape, "
          "or put the layer under `towers.no_sync()`.")
    axes = [k for k, axis in enumerate(data_format) if axis != "C"]
    self.note(_layer_name(layer, name), _kind(layer, "tf.nn.fused_batch_norm"),
              axes)
    merged = fused.merged_statistics(
        op.inputs[0], op.inputs[1], op.inputs[2],
        epsilon=op.get_attr("epsilon"), data_format=data_format, name=name,
        in_place=True)
    factor = 1.0
    if op.type == "FusedBatchNormV3":
      factor = op.get_attr("exponential_avg_factor")
    outputs = list(op.outputs)
    outputs[1] = _blend(op.inputs[3], merged.mean, factor)
    outputs[2] = _blend(op.inputs[4], merged.unbiased_variance, factor)
    for old, new in zip(op.outputs[1:3], outputs[1:3]):
      context.current_tower().note_replaced(old, new)
    fused.normalise_in_place(op, merged)
    return outputs

  def _convert_reduction(self, op: tf.Operation) -> None:
    maker, frame = _maker_around(op.type)
    if maker is None:
      return
    name = _name_of(op)
    axes = tf.get_static_value(op.inputs[1])
    x = op.inputs[0]
    if axes is None or x.shape.rank is None:
      raise ValueError(
          f"`axes` of {maker} must be known while the model is built, to tell "
          f"whether the batch is among them: got `{op.inputs[1].name}` for `"
          f"{x.name}` of shape {x.shape} (layer `{name}`, tower "
          f"{context.current_tower().index}). Pass numbers, and set the rank.")
    axes = moments.normalised_axes(np.reshape(axes, [-1]).tolist(),
                                   x.shape.rank)
    if 0 not in axes or not _has_batch(x):
      return
    layer = _layer_around()
    _check_layer(layer, name)
    if not any(local in frame.f_locals for local in _FIRST_RESULTS):
      self.note(_layer_name(layer, name), _kind(layer, maker), axes)
    with tf.name_scope("whole_batch"):
      whole = _reduce_over_towers(op.type, x, axes, name)
      _tensorflow.replace_inputs(op, {0: tf.cast(whole, x.dtype)})

  # --- Moving statistics ---

  def _take_assignment(self, op: tf.Operation) -> None:
    """Notes an assignment of a batch norm layer, and lets it count once."""
    layer = _layer_around()
    moving = layer is not None or _in_moving_average()
    lockstep = context.lockstep()
    if lockstep is not None:
      if (moving and not context.sync_batch_norm() and
          op.inputs[1].dtype.is_floating):
        # The towers' values differ; what is assigned is linear in them.
        with tf.name_scope("mean_over_towers"):
          own = op.inputs[1]
          mean = collectives.mean_over_rows(own, _name_of(op))
          self.note_own(mean, own)
          _tensorflow.replace_inputs(op, {1: tf.stop_gradient(mean)})
      first = lockstep.once(lambda: op)
      if first is not op and (moving or _repeats(op, first,
                                                 lockstep.name_scope)):
        self.duplicates.add(op)
    if layer is not None:
      self.assignments[context.current_tower().index].append(op)


def _repeats(op: tf.Operation, first: tf.Operation, scope: str) -> bool:
  """Says whether `op` makes the change that tower 0's op makes already.

  It does if both assign to one variable what follows from where towers met. A
  counter that each tower counts up is another matter.
  """
  common: List[tf.Tensor] = []
  return (op.type == first.type and lockstep_lib.variable_op(op.inputs[0]) is
          lockstep_lib.variable_op(first.inputs[0]) and
          lockstep_lib.same_value(op.inputs[1], first.inputs[1], True, common)
          and any(x.op.name.startswith(scope) for x in common))


def _has_batch(x: tf.Tensor) -> bool:
  """Says whether the leading axis of `x` is the batch.

  Layer and instance norm are made of the fused kernel, too: of an `x` whose
  leading axis is 1 and which has the rows among its channels.
  """
  if x.shape.rank is None or tf.dimension_value(x.shape[0]) != 1:
    return True
  tower = context.current_tower().index
  rows = context.lockstep().rows[tower]
  if not isinstance(rows, float) or rows > 1.0 or any(
      frame.f_globals.get("__name__", "").endswith(".layer_normalization")
      for frame in _frames()):
    return False
  if _leading_number(x) == 1:
    raise ValueError(
        "`x` of a batch norm must show which axis is the batch: got "
        f"`{x.name}` of shape {x.shape}, reshaped to a leading 1 in a tower of "
        f"one row (tower {tower}). Reshape to a leading -1 if that is the "
        "batch; if not, pass inputs of unknown batch size, or put the layer "
        "under `towers.no_sync()`.")
  return True


def _leading_number(x: tf.Tensor) -> Optional[int]:
  """Returns the leading size that `x` was reshaped to as a number, if any."""
  op = x.op
  while op.type in ("Identity", "Cast", "Transpose"):
    op = op.inputs[0].op
  if op.type != "Reshape":
    return None
  shape = op.inputs[1]
  if shape.op.type == "Pack":
    return tf.get_static_value(shape.op.inputs[0])
  sizes = tf.get_static_value(shape)
  return None if sizes is None or not len(sizes) else sizes[0]


def _blend(before: tf.Tensor, now: tf.Tensor, factor: float) -> tf.Tensor:
  """The running average that the kernel makes of its input and the batch."""
  if factor == 1.0:
    return now
  return before * (1.0 - factor) + now * factor


def _reduce_over_towers(op_type: str, x: tf.Tensor, axes: Sequence[int],
                        name: str) -> tf.Tensor:
  """Returns the mean or sum over `axes` and all towers, keeping the axes."""
  lockstep = context.lockstep()
  if x.dtype in (tf.float16, tf.bfloat16):
    x = tf.cast(x, tf.float32)
  reduce = tf.reduce_mean if op_type == "Mean" else tf.reduce_sum
  own = reduce(x, axes, keepdims=True)
  count = moments.element_count(x, axes)

  def over_towers(values: Sequence[Any]) -> tf.Tensor:
    reduced, counts = zip(*values)
    weights = moments.counts_of_towers(counts, lockstep.rows, x.dtype)
    if op_type == "Mean":
      weights /= tf.reduce_sum(weights)
    else:
      weights = tf.cast(weights > 0, x.dtype)
    weights = tf.reshape(weights, [-1] + [1] * x.shape.rank)
    return tf.reduce_sum(weights * tf.stack(reduced), axis=0)

  return collectives.meet("batch statistics", name, over_towers, (own, count),
                          exact_name=False)


def _name_of(op: tf.Operation) -> str:
  """Returns the scope of `op` without the tower's: the layer's name."""
  name = context.current_tower().plain_name(op.name)
  return name.rpartition("/")[0] or name


def _layer_name(layer: Any, scope: str) -> str:
  """Returns the name of the layer that takes statistics in `scope`."""
  # The scopes that libraries open inside the layer's own are not its name.
  name = re.sub(r"(?<=.)/(cond|moments|weighted_moments)(_\d+)?(?=/|$)", "",
                scope)
  parent, slash, last = name.rpartition("/")
  own = getattr(layer, "name", last)
  # Keras opens the scope of a layer once to build it and once to call it.
  same = tower_lib.without_numbers(own) == tower_lib.without_numbers(last)
  return parent + slash + own if same else name


# --- Who asks for an op -------------------------------------------------------
#
# The op is created by a call from its library, so the answer stands on the
# stack. Module and function names are compared, so that no library has to be
# imported.

_DEPTH = 60


def _frames() -> Iterator[Any]:
  frame: Any = sys._getframe(2)  # pylint: disable=protected-access
  for _ in range(_DEPTH):
    if frame is None or frame.f_globals.get("__name__") == "towers.builder":
      return
    yield frame
    frame = frame.f_back


def _maker_around(op_type: str) -> Tuple[Optional[str], Any]:
  """Returns the function for moments that asks for an op, and its frame."""
  for frame in _frames():
    for module, function, reduction, public_name in _MAKERS:
      if (frame.f_code.co_name == function and reduction == op_type and
          frame.f_globals.get("__name__", "").endswith(module)):
        return public_name or function, frame
  return None, None


def _layer_around() -> Optional[Any]:
  """Returns the batch norm layer whose method asks for an op, if any."""
  for frame in _frames():
    layer = frame.f_locals.get("self") if "self" in frame.f_locals else None
    if layer is not None and hasattr(type(layer), "call") and hasattr(
        layer, "moving_mean") and hasattr(layer, "moving_variance"):
      return layer
  return None


def _in_moving_average() -> bool:
  return any(frame.f_code.co_name == "assign_moving_average" and frame.f_globals
             .get("__name__") == "tensorflow.python.training.moving_averages"
             for frame in _frames())


def _kind(layer: Any, otherwise: str) -> str:
  if layer is None:
    return otherwise
  library = type(layer).__module__
  library = "tf.layers" if "legacy_tf_layers" in library else library.partition(
      ".")[0]
  return f"{library}.{type(layer).__name__}"


def _check_layer(layer: Any, name: str) -> None:
  """Refuses what would not equal one device."""
  where = f"layer `{name}`, tower {context.current_tower().index}"
  if getattr(layer, "renorm", False):
    raise ValueError(
        "`renorm` of a batch norm layer must be False for statistics over the "
        f"whole batch: got True ({where}). Towers would read its moving "
        "statistics while another changes them. Use plain batch norm.")
  if getattr(layer, "virtual_batch_size", None) is not None:
    raise ValueError(
        "`virtual_batch_size` of a batch norm layer must be None for "
        f"statistics over the whole batch: got {layer.virtual_batch_size} "
        f"({where}). Put the layer under `towers.no_sync()`, where its ghost "
        "batches are made of the rows of a tower.")
