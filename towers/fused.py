"""Normalisation by the moments of all towers, on TensorFlow's fused kernels.

The forward pass of a layer takes two fused calls in each tower: one in training
mode for the moments of its own rows, and, when all towers have met, one in
inference mode that normalises with the moments of the whole batch.

The backward pass takes two as well. `FusedBatchNormGradV3` in inference mode
gives the gradient by `x` at fixed moments and, in the same pass, the tower's
sums of `dy` and of `dy * x_hat`, where `x_hat = (x - mean) / deviation` and
`deviation = sqrt(variance + epsilon)`. What is missing, the gradient that flows
through the moments, is the same affine map of `x` for all rows of the batch.
With `N` the number of elements per channel in the whole batch:

    slope = -scale / (N * deviation**2) * sum(dy * x_hat)
    dx   += slope * (x - mean) - scale / (N * deviation) * sum(dy)

So no more than two vectors travel each way. They travel in gradient slots: the
normalising op hands its two sums to the merged moments as if they were their
gradients, TensorFlow adds them up over the towers, and the merge hands the map
to each tower's own moments. Only the ops of this module use these slots. The
moments that others read come out of the merge apart, with true gradients.

A second derivative through such slots would be wrong, so the fast pass refuses
it. Inside model code (`tf.gradients` in `model_fn`), where a gradient is often
made to be differentiated again, plain ops and true gradients stand instead.
"""

from typing import Any, Callable, ContextManager, List, NamedTuple, Optional
from typing import Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import collectives
from towers import context
from towers import lockstep as lockstep_lib

# They add up to exactly 1, so that a fused call in inference mode is an affine
# map. cuDNN takes no epsilon below 1e-5.
_UNIT_EPSILON = 2.0**-12
_UNIT_VARIANCE = 1.0 - _UNIT_EPSILON
_EPSILON = "_towers_epsilon"
_SUMS_ARE_SCALED = "_towers_sums_are_scaled"
# The inputs of the op that ends a merge, after its six results.
_PACKED, _MINUS_TOTAL, _SCALE, _DEVIATIONS, _PRESENT = range(6, 11)


class Merged(NamedTuple):
  """The moments of the whole batch, as the towers get them.

  Fields:
    slot_mean: Float32 tensor of shape `[C]`, for ops of this module only.
    slot_variance: The same for the variance (biased).
    mean: Float32 tensor of shape `[C]`, without a gradient.
    unbiased_variance: Float32 tensor of shape `[C]`, without a gradient.
    sums_are_scaled: Whether the normalising ops multiply their sums by their
      scale, since it may not be the same in all towers.
  """
  slot_mean: tf.Tensor
  slot_variance: tf.Tensor
  mean: tf.Tensor
  unbiased_variance: tf.Tensor
  sums_are_scaled: bool


class _Weights(NamedTuple):
  """How the moments of `T` towers add up.

  Fields:
    shares: Share of each tower in the elements of the batch, `[T, 1]`.
    within: Weight of each tower's unbiased variance, `[T, 1]`.
    minus_total: Elements per channel in the batch, negative, `[]`.
    bessel: `N / (N - 1)` for `N` such elements, `[]`; 1 for a single one.
    present: 1 for each tower that has rows, else 0, `[T, 1]`; None if all do.
  """
  shares: tf.Tensor
  within: tf.Tensor
  minus_total: tf.Tensor
  bessel: tf.Tensor
  present: Optional[tf.Tensor]


def merged_statistics(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, *,
                      epsilon: float, data_format: str, name: str,
                      in_place: bool = False) -> Merged:
  """Returns the moments of `x` over the rows of all towers.

  Args:
    x: Tensor in `data_format`, with the batch on axis 0; float16, bfloat16 or
      float32.
    scale: Float32 tensor of shape `[C]`.
    offset: Float32 tensor of shape `[C]`.
    epsilon: Will be added to the variance.
    data_format: "NHWC", "NCHW", "NDHWC" or "NCDHW".
    name: Name of the layer, for the scope of the merge and for errors.
    in_place: Whether it is for `normalise_in_place`, for a library's op.
  """
  lockstep, tower = context.lockstep(), context.current_tower()
  channels = tf.dimension_value(scale.shape[0])
  with tf.name_scope("whole_batch"):
    empty = _tensorflow.shared_constant(
        [], tf.float32, x.device or tower.device, tower.name_scope)
    with _gradient("FusedBatchNormV3", "TowersStatistics"):
      own = tf.raw_ops.FusedBatchNormV3(
          x=x, scale=scale, offset=offset, mean=empty, variance=empty,
          epsilon=epsilon, data_format=data_format, is_training=True)
    message = tf.stack([own.batch_mean, own.batch_variance])
    size = x.shape.num_elements()
    value = (message, scale, tf.size(x) if size is None else size)

  def merged(values: Sequence[Any]) -> Merged:
    messages, scales, sizes = zip(*values)
    weights = _weights(sizes, lockstep.rows, channels)
    result = _merge(tf.stack(messages), scales, weights, epsilon)
    if in_place:  # Once for all towers, rather than in each.
      result = result._replace(
          slot_mean=_tensorflow.of_unknown_shape(result.slot_mean),
          slot_variance=_tensorflow.of_unknown_shape(result.slot_variance))
    return result

  return lockstep.merge("batch norm", name, merged, value,
                        (x.dtype.name, f"{channels} channels"), not in_place)


def normalise(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor,
              merged: Merged, *, epsilon: float,
              data_format: str) -> tf.Tensor:
  """Normalises `x` with the moments of the whole batch."""
  y = tf.raw_ops.FusedBatchNormV3(
      x=x, scale=scale, offset=offset, mean=merged.slot_mean,
      variance=merged.slot_variance, epsilon=epsilon, data_format=data_format,
      is_training=False).y
  _make_normalising(y.op, merged)
  return y


def normalise_in_place(op: tf.Operation, merged: Merged) -> None:
  """Turns a fused batch norm in training mode into a normalising op."""
  _tensorflow.set_bool_attribute(op, "is_training", False)
  _tensorflow.replace_inputs(op, {
      3: merged.slot_mean,
      4: merged.slot_variance
  })
  _make_normalising(op, merged)


def _make_normalising(op: tf.Operation, merged: Merged) -> None:
  _tensorflow.set_gradient(op, "TowersNormalise")
  _tensorflow.set_attribute(op, _SUMS_ARE_SCALED, int(merged.sums_are_scaled))


def _merge(packed: tf.Tensor, scales: Sequence[tf.Tensor], weights: _Weights,
           epsilon: float) -> Merged:
  """Combines the towers' moments, `packed` as `[T, 2, C]`."""
  means, variances = tf.unstack(packed, axis=1)
  mean = _sum_over_towers(weights.shares * means)
  # What the backward pass takes, too.
  deviations = means - mean
  variance = _sum_over_towers(weights.within * variances +
                              weights.shares * tf.square(deviations))
  # The scale is most often one variable that all towers read.
  scale = scales[0]
  sums_are_scaled = not all(
      lockstep_lib.same_value(scale, other, reads=True) for other in scales)
  if sums_are_scaled:
    scale = tf.ones_like(scale)
  others = [packed, weights.minus_total, scale, deviations]
  if weights.present is not None:
    others.append(weights.present)
  unbiased = variance * weights.bessel
  passed = collectives.boundary(
      "TowersBatchMoments", [mean, variance, mean, variance, mean, unbiased],
      others)
  _tensorflow.set_attribute(passed[0].op, _EPSILON, float(epsilon))
  return Merged(passed[2], passed[3], passed[4], passed[5], sums_are_scaled)


def _constant(value: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
  """Returns a constant for a merge, which many layers share."""
  lockstep = context.merging()
  return _tensorflow.shared_constant(value, dtype, lockstep.device,
                                     lockstep.name_scope)


def _sum_over_towers(x: tf.Tensor) -> tf.Tensor:
  return tf.reduce_sum(x, axis=_constant(0, tf.int32))


def _weights(sizes: Sequence[Any], rows: Sequence[Any],
             channels: int) -> _Weights:
  """Returns how towers with `sizes` elements add up.

  The fused kernels give the unbiased variance of a tower's `n` elements. Its
  share in the biased variance of all `N` is `(n - 1) / N` of that.
  """
  if not any(isinstance(v, tf.Tensor) for v in list(sizes) + list(rows)):
    present = np.asarray(rows, np.float32)[:, np.newaxis] > 0
    counts = np.asarray(sizes, np.float64)[:, np.newaxis] / channels * present
    total = counts.sum()
    return _Weights(
        _constant(counts / total),
        _constant(np.maximum(counts - 1, 0) / total), _constant(-total),
        _constant(total / max(total - 1, 1)),
        None if present.all() else _constant(present))
  one, zero = _constant(1.0), _constant(0.0)
  column, meeting = _constant([len(sizes), 1], tf.int32), context.merging()
  present = meeting.once_a_build("present", lambda: _present(rows, column))
  counts = tf.cast(tf.reshape(tf.stack(sizes), column), tf.float32)
  counts *= _constant(1.0 / channels)
  if present is not None:
    counts *= present
  total = tf.squeeze(_sum_over_towers(counts))
  return _Weights(counts / total, tf.maximum(counts - one, zero) / total,
                  -total, total / tf.maximum(total - one, one), present)


def _present(rows: Sequence[Any], column: tf.Tensor) -> Optional[tf.Tensor]:
  """Returns 1 for each tower that has rows, else 0, `[T, 1]`."""
  if all(isinstance(r, float) and r for r in rows):
    return None
  return tf.cast(tf.reshape(tf.stack(rows), column) > 0, tf.float32)


def _gradient(op_type: str, gradient: str) -> ContextManager[None]:
  """A context in which ops of `op_type` get the registered `gradient`."""
  return tf.get_default_graph().gradient_override_map({op_type: gradient})


# --- Gradients: in the towers, from the last op to the first ------------------


@tf.RegisterGradient("TowersNormalise")
def _normalise_gradient(op: tf.Operation, dy: tf.Tensor, *_: Any) -> List[Any]:
  """Hands the tower's sums to the slots of mean and variance."""
  if context.building() is not None:
    return _true_normalise_gradient(op, dy)
  x, scale, _, mean, variance = op.inputs
  data_format = op.get_attr("data_format").decode()
  last = _channels_last(data_format)
  with _gradient("FusedBatchNormGradV3", "TowersFirstDerivative"):
    # In inference mode, the gradient kernel has no other layout.
    grads = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=_transposed(dy, data_format, last),
        x=_transposed(x, data_format, last), scale=scale,
        reserve_space_1=mean, reserve_space_2=variance,
        reserve_space_3=op.outputs[-1], epsilon=op.get_attr("epsilon"),
        data_format=last, is_training=False)
  dx = _transposed(grads.x_backprop, last, data_format)
  sums = [grads.offset_backprop, grads.scale_backprop]
  if op.get_attr(_SUMS_ARE_SCALED):
    sums = [scale * total for total in sums]
  return [dx, grads.scale_backprop, grads.offset_backprop] + sums


def _channels_last(data_format: str) -> str:
  return data_format.replace("C", "") + "C"


def _transposed(x: tf.Tensor, source: str, target: str) -> tf.Tensor:
  if source == target:
    return x
  return tf.transpose(x, [source.index(axis) for axis in target])


@tf.RegisterGradient("TowersBatchMoments")
def _moments_gradient(op: tf.Operation, dmean: Any, dvariance: Any, sum_dy: Any,
                      sum_dy_x_hat: Any, *_: Any) -> List[Any]:
  """Turns the towers' sums into the map that each applies to its rows."""
  if context.building() is not None:
    return _true_moments_gradient(op, [dmean, dvariance, sum_dy, sum_dy_x_hat])
  variance, minus_total, scale, deviations = (
      op.inputs[1], op.inputs[_MINUS_TOTAL], op.inputs[_SCALE],
      op.inputs[_DEVIATIONS])
  slopes, shifts = [], []
  if not _tensorflow.is_zeros(sum_dy):
    epsilon = _backward_constant(op.get_attr(_EPSILON), tf.float32, op)
    inverse = tf.math.rsqrt(variance + epsilon)
    factor = scale * inverse / minus_total
    slopes.append(factor * inverse * sum_dy_x_hat)
    shifts.append(factor * sum_dy)
  if not _tensorflow.is_zeros(dmean):
    shifts.append(-dmean / minus_total)
  if not _tensorflow.is_zeros(dvariance):
    slopes.append(-2.0 * dvariance / minus_total)
  slope = tf.add_n(slopes) if slopes else tf.zeros_like(variance)
  shift = tf.add_n(shifts) if shifts else tf.zeros_like(variance)
  # Each tower measures x from its own mean, which is close to its values.
  shifts = shift + slope * deviations
  shape = _backward_constant(deviations.shape.as_list(), tf.int32, op)
  maps = tf.stack([tf.broadcast_to(slope, shape), shifts], axis=1)
  return _for_packed(op, maps)


def _backward_constant(value: Any, dtype: tf.DType,
                       op: tf.Operation) -> tf.Tensor:
  """Returns a constant that the backward pass of many layers shares."""
  return _tensorflow.shared_constant(value, dtype, op.device, "gradients/")


def _for_packed(op: tf.Operation, gradient: tf.Tensor) -> List[Any]:
  """Returns `gradient` for the packed moments, none to towers without rows."""
  if len(op.inputs) > _PRESENT:
    gradient *= op.inputs[_PRESENT][:, :, tf.newaxis]
  gradients: List[Any] = [None] * len(op.inputs)
  gradients[_PACKED] = gradient
  return gradients


@tf.RegisterGradient("TowersStatistics")
def _statistics_gradient(op: tf.Operation, _: Any, slope: Optional[tf.Tensor],
                         shift: Optional[tf.Tensor], *__: Any) -> List[Any]:
  """Applies the map, `slope * (x - own mean) + shift`."""
  if slope is None and shift is None:
    return [None] * 5
  x, own_mean = op.inputs[0], op.outputs[1]
  if context.building() is not None:
    dx = _true_statistics_gradient(op, slope, shift)
    return [dx] + [None] * 4
  channels = tf.dimension_value(own_mean.shape[0])
  unit = _backward_constant(
      np.full([channels], _UNIT_VARIANCE), tf.float32, op)
  with _gradient("FusedBatchNormV3", "TowersFirstDerivative"):
    dx = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=slope, offset=shift, mean=own_mean, variance=unit,
        epsilon=_UNIT_EPSILON, data_format=op.get_attr("data_format"),
        is_training=False).y
  return [dx] + [None] * 4


@tf.RegisterGradient("TowersFirstDerivative")
def _no_second_derivative(op: tf.Operation, *_: Any) -> List[Any]:
  raise ValueError(
      "`tf.gradients` must not differentiate a gradient through batch norm "
      f"that was taken outside `model_fn`, got `{op.name}`: the first pass "
      "keeps no true gradients. Take the first gradient inside `model_fn`, or "
      "put the layer under `towers.no_sync()`.")


# --- The same inside model code, by plain ops that differentiate again --------


def _true_normalise_gradient(op: tf.Operation, dy: tf.Tensor) -> List[Any]:
  x, scale, _, slot_mean, _ = op.inputs
  merged = _boundary_of(slot_mean)
  mean, variance = merged.outputs[:2]  # Those with true gradients.
  axes, by_channel = _layout(op)
  inverse = tf.math.rsqrt(variance + op.get_attr("epsilon"))
  dy = tf.cast(dy, tf.float32)
  centred = tf.cast(x, tf.float32) - by_channel(mean)
  x_hat = centred * by_channel(inverse)
  sum_dy = tf.reduce_sum(dy, axes)
  sum_dy_x_hat = tf.reduce_sum(dy * x_hat, axes)
  return [
      tf.cast(dy * by_channel(scale * inverse), x.dtype), sum_dy_x_hat, sum_dy,
      -scale * inverse * sum_dy, -0.5 * scale * inverse**2 * sum_dy_x_hat
  ]


def _true_moments_gradient(op: tf.Operation, grads: List[Any]) -> List[Any]:
  """Adds up the true gradients of the moments; makes the map of them."""
  mean, packed = op.outputs[0], op.inputs[_PACKED]
  total = -op.inputs[_MINUS_TOTAL]
  dmean, dvariance = grads[0] + grads[2], grads[1] + grads[3]
  dmean, dvariance = collectives.sum_over_towers(
      "tf.gradients of batch norm", "gradient", [dmean, dvariance])
  slope, shift = 2.0 * dvariance / total, dmean / total
  tower = context.current_tower().index
  own_mean = tf.stop_gradient(packed[tower, 0])
  own = tf.stack([slope, shift + slope * (own_mean - mean)])
  count = tf.dimension_value(packed.shape[0])
  maps = [own if k == tower else tf.zeros_like(own) for k in range(count)]
  return _for_packed(op, tf.stack(maps))


def _true_statistics_gradient(op: tf.Operation, slope: tf.Tensor,
                              shift: tf.Tensor) -> tf.Tensor:
  _, by_channel = _layout(op)
  x = op.inputs[0]
  # It cancels between this map and its shift.
  own_mean = tf.stop_gradient(op.outputs[1])
  centred = tf.cast(x, tf.float32) - by_channel(own_mean)
  return tf.cast(centred * by_channel(slope) + by_channel(shift), x.dtype)


def _layout(op: tf.Operation) -> Tuple[List[int], Callable[..., tf.Tensor]]:
  """Returns the reduced axes, and a function that lines up a `[C]` vector."""
  data_format = op.get_attr("data_format").decode()
  axes = [k for k, axis in enumerate(data_format) if axis != "C"]
  shape = [-1 if axis == "C" else 1 for axis in data_format]
  return axes, lambda vector: tf.reshape(vector, shape)


def _boundary_of(slot: tf.Tensor) -> tf.Operation:
  """Returns the merge that `slot` comes from, maybe through a conditional."""
  op = slot.op
  while op.type in ("Switch", "Identity", "PlaceholderWithDefault"):
    op = op.inputs[0].op
  return op
