"""Batch normalisation over the rows of all towers."""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from towers import context
from towers import collectives
from towers import fused
from towers import moments


def batch_norm(x: Any,
               *,
               training: Any,
               axis: int = -1,
               momentum: float = 0.99,
               epsilon: float = 1e-3,
               center: bool = True,
               scale: bool = True,
               name: Optional[str] = None) -> tf.Tensor:
  """Normalises `x` by channel, with the moments over the rows of all towers.

  In training, with mean and variance over all axes but `axis` and over all
  towers:

      y = gamma * (x - mean) / sqrt(variance + epsilon) + beta
      moving_mean     = momentum * moving_mean     + (1 - momentum) * mean
      moving_variance = momentum * moving_variance +
                        (1 - momentum) * variance * N / (N - 1)

  `variance` is the biased estimator. `N` is the number of elements per channel
  in the whole batch, so the moving variance takes the unbiased estimator, for
  every rank of `x` and every number of towers. The two updates go to
  `tf.GraphKeys.UPDATE_OPS` and are made once for all towers.

  Otherwise the moving statistics stand for mean and variance, and the towers do
  not meet.

  Under `towers.no_sync()`, or with `sync_batch_norm=False`, each tower takes
  the moments of its own rows. The moving statistics then take the mean of the
  towers' moments, weighted by their numbers of elements, once a step.

  Variables have the names and initial values of
  `tf.layers.batch_normalization`: `gamma` (ones), `beta` (zeros), `moving_mean`
  (zeros) and `moving_variance` (ones), of shape `[C]`. They and all statistics
  are float32 for 16-bit `x`.

  Args:
    x: Float tensor with the batch on axis 0, of rank 2 or more.
    training: Python bool, or scalar bool tensor (the same in all towers).
    axis: The channel axis, of static size `C`.
    momentum: How much of the moving statistics stays in each step.
    epsilon: Added to the variance.
    center: Whether to add `beta`.
    scale: Whether to multiply by `gamma`.
    name: Variable scope of the layer; default `batch_normalization`, made
      unique as in unnamed `tf.layers`.

  Returns:
    Tensor of the shape and type of `x`.

  Raises:
    TypeError: If `x` is not of a floating type, or `training` no bool.
    ValueError: If the rank of `x` is unknown or less than 2, `axis` is 0 or
      outside the rank, the size of the channel axis is unknown, or `momentum`
      or `epsilon` lie outside their range; where towers cannot meet (in a while
      loop, or a branch of v2 control flow); or if they do not all come to the
      same layer.

  References:
    Ioffe and Szegedy, "Batch Normalization", 2015,
      https://arxiv.org/abs/1502.03167
    Peng et al., "MegDet", 2018, for the moments over several devices,
      https://arxiv.org/abs/1711.07240
  """
  x = moments.checked(x)
  axis = _checked_axis(x, axis)
  _check_range("momentum", momentum, 0.0, 1.0)
  _check_range("epsilon", epsilon, 0.0, float("inf"))
  static_training, training = _checked_training(training)
  with context.not_watched(), tf.variable_scope(name, "batch_normalization",
                                                [x]):
    layer = _Layer(x, axis, momentum, epsilon, center, scale)
    if static_training is None:
      return layer.either(training)
    return layer.train() if static_training else layer.infer()


def _checked_axis(x: tf.Tensor, axis: int) -> int:
  rank = x.shape.rank
  if rank < 2:
    raise ValueError("`x` must have a batch axis and a channel axis: expected "
                     f"rank 2 or more, got shape {x.shape} (`{x.name}`).")
  if not -rank <= axis < rank or axis % rank == 0:
    raise ValueError(
        f"`axis` must be the channel axis of `x`, not its batch axis: expected "
        f"one of 1 to {rank - 1} or -1 to {1 - rank}, got {axis}.")
  axis %= rank
  if tf.dimension_value(x.shape[axis]) is None:
    raise ValueError(
        f"`x` must have a static size on its channel axis {axis}: `{x.name}` "
        f"has shape {x.shape}. Set it with `x.set_shape`.")
  return axis


def _check_range(argument: str, value: float, low: float, high: float) -> None:
  if not low <= value <= high:
    raise ValueError(f"`{argument}` must lie between {low} and {high}: got "
                     f"{value}.")


def _checked_training(training: Any) -> Tuple[Optional[bool], Any]:
  """Returns the value of `training` if it is known now, and its tensor."""
  if isinstance(training, (bool, int)) and training in (0, 1):
    return bool(training), None
  if training is None:
    raise TypeError("`training` must be a bool or a bool tensor: got None.")
  training = tf.convert_to_tensor(training)
  if training.dtype != tf.bool or training.shape.rank not in (0, None):
    raise TypeError(
        f"`training` must be a bool or a scalar bool tensor: got `"
        f"{training.name}` of type {training.dtype.name} and shape "
        f"{training.shape}.")
  value = tf.get_static_value(training)
  return (None if value is None else bool(value)), training


class _Statistics(NamedTuple):
  """What one pass in training gives; `[C]` vectors but for `y`."""
  y: tf.Tensor
  mean: tf.Tensor
  variance: tf.Tensor


class _Layer:
  """One call of the layer; its variables stand in the current scope."""

  def __init__(self, x: tf.Tensor, axis: int, momentum: float, epsilon: float,
               center: bool, scale: bool):
    self._x = x
    self._axis = axis
    self._momentum = momentum
    self._epsilon = epsilon
    self._channels = tf.dimension_value(x.shape[axis])
    half = x.dtype in (tf.float16, tf.bfloat16)
    self._dtype = tf.float32 if half else x.dtype
    self._name = tf.get_variable_scope().name
    self._gamma = self._variable("gamma", 1.0) if scale else None
    self._beta = self._variable("beta", 0.0) if center else None
    self._moving_mean = self._variable("moving_mean", 0.0, False)
    self._moving_variance = self._variable("moving_variance", 1.0, False)

  def _variable(self, name: str, value: float, trainable: bool = True) -> Any:
    return tf.get_variable(
        name, [self._channels], self._dtype,
        initializer=tf.constant_initializer(value), trainable=trainable)

  def train(self) -> tf.Tensor:
    """Normalises by the moments of the batch, and updates the moving ones."""
    result = self._by_batch()
    self._update(result)
    return result.y

  def infer(self) -> tf.Tensor:
    """Normalises by the moving statistics."""
    return self._by_moving().y

  def either(self, training: tf.Tensor) -> tf.Tensor:
    """Does one or the other in the session."""
    y, mean, variance = tf.cond(training, lambda: tuple(self._by_batch()),
                                lambda: tuple(self._by_moving()))
    y.set_shape(self._x.shape)
    self._update(_Statistics(y, mean, variance), training)
    return y

  def _by_batch(self) -> _Statistics:
    lockstep = context.lockstep()
    shared = lockstep is not None and context.sync_batch_norm()
    if shared:
      context.conversion().note(self._name, "towers.batch_norm",
                                self._other_axes())
    if not self._has_kernel():
      counted = moments.over_towers(self._x, self._other_axes(), self._name)
      count = tf.cast(counted.count, self._dtype)
      unbiased = counted.variance * (count / tf.maximum(count - 1, 1))
      result = _Statistics(
          self._normalise(counted.mean, counted.variance), counted.mean,
          unbiased)
    else:
      x, data_format = self._as_image()
      scale, offset = self._scale(), self._offset()
      if shared:
        merged = fused.merged_statistics(
            x, scale, offset, epsilon=self._epsilon, data_format=data_format,
            name=self._name)
        y = fused.normalise(
            x, scale, offset, merged, epsilon=self._epsilon,
            data_format=data_format)
        result = _Statistics(y, merged.mean, merged.unbiased_variance)
        for old, new in zip(y.op.outputs[1:3], result[1:]):
          context.current_tower().note_replaced(old, new)
      else:
        result = tf.nn.fused_batch_norm(
            x, scale, offset, epsilon=self._epsilon, data_format=data_format,
            is_training=True)
      result = _Statistics(self._from_image(result[0]), *result[1:])
    if lockstep is not None and not shared:
      return self._mean_statistics(result)
    return result

  def _by_moving(self) -> _Statistics:
    mean = tf.convert_to_tensor(self._moving_mean)
    variance = tf.convert_to_tensor(self._moving_variance)
    if self._has_kernel():
      x, data_format = self._as_image()
      y = tf.nn.fused_batch_norm(
          x, self._scale(), self._offset(), mean, variance,
          epsilon=self._epsilon, data_format=data_format, is_training=False)[0]
      return _Statistics(self._from_image(y), mean, variance)
    return _Statistics(self._normalise(mean, variance), mean, variance)

  def _mean_statistics(self, own: _Statistics) -> _Statistics:
    """Replaces the tower's own statistics by the mean over the towers."""
    lockstep = context.lockstep()
    count = moments.element_count(self._x, self._other_axes())

    def mean_over_towers(values: Sequence[Any]) -> tf.Tensor:
      statistics, counts = zip(*values)
      weights = moments.counts_of_towers(counts, lockstep.rows, self._dtype)
      shares = (weights / tf.reduce_sum(weights))[:, tf.newaxis, tf.newaxis]
      return tf.reduce_sum(tf.stack(statistics) * shares, axis=0)

    statistics = tf.stop_gradient(tf.stack(own[1:]))
    merged = collectives.meet("batch norm", self._name, mean_over_towers,
                              (statistics, count))
    context.conversion().note_own(merged, statistics)
    return _Statistics(own.y, merged[0], merged[1])

  def _update(self, statistics: _Statistics,
              training: Optional[tf.Tensor] = None) -> None:
    """Adds the updates of the moving statistics to the collection, once."""
    lockstep = context.lockstep()
    updates = (
        self._updates(statistics, training) if lockstep is None else
        lockstep.once(lambda: self._updates(statistics, training)))
    for update in updates:
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)

  def _updates(self, statistics: _Statistics,
               training: Optional[tf.Tensor]) -> Any:
    rate = tf.constant(1.0 - self._momentum, self._dtype)
    if training is not None:
      # In inference nothing must change, to the bit.
      rate = tf.where_v2(training, rate, tf.zeros_like(rate))
    updates = []
    for moving, value in ((self._moving_mean, statistics.mean),
                          (self._moving_variance, statistics.variance)):
      with tf.name_scope("update_" + moving.op.name.rpartition("/")[2]):
        with tf.device(None), tf.device(moving.device):
          step = (tf.convert_to_tensor(moving) - value) * rate
          updates.append(moving.assign_sub(step, read_value=False))
    return updates

  # --- Kernels and layouts ---

  def _has_kernel(self) -> bool:
    """Says whether a fused kernel takes this type and layout."""
    rank = self._x.shape.rank
    return (self._x.dtype in (tf.float16, tf.bfloat16, tf.float32) and
            rank <= 5 and self._axis in (1, rank - 1))

  def _other_axes(self) -> List[int]:
    return [k for k in range(self._x.shape.rank) if k != self._axis]

  def _vector(self, variable: Any, value: float) -> tf.Tensor:
    if variable is None:
      return tf.constant(value, self._dtype, [self._channels])
    return tf.convert_to_tensor(variable)

  def _scale(self) -> tf.Tensor:
    return self._vector(self._gamma, 1.0)

  def _offset(self) -> tf.Tensor:
    return self._vector(self._beta, 0.0)

  def _as_image(self) -> Tuple[tf.Tensor, str]:
    """Returns `x` in a layout of rank 4, and that layout's name."""
    x, rank, channels = self._x, self._x.shape.rank, self._channels
    last = self._axis == rank - 1
    data_format = "NHWC" if last else "NCHW"
    if rank == 4:
      return x, data_format
    if rank == 3:
      return tf.expand_dims(x, 2 if last else 3), data_format
    if last:
      return tf.reshape(x, [-1, 1, 1, channels]), data_format
    return tf.reshape(x, [tf.shape(x)[0], channels, -1, 1]), data_format

  def _from_image(self, y: tf.Tensor) -> tf.Tensor:
    """Brings a result of rank 4 back to the shape of `x`."""
    rank = self._x.shape.rank
    if rank == 3:
      y = tf.squeeze(y, 2 if self._axis == rank - 1 else 3)
    elif rank == 2:
      y = tf.reshape(y, [-1, self._channels])
    elif rank == 5:
      y = tf.reshape(y, tf.shape(self._x))
    y.set_shape(self._x.shape)
    return y

  def _normalise(self, mean: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
    """Normalises by plain ops, for types and layouts without a kernel."""
    shape = [1] * self._x.shape.rank
    shape[self._axis] = self._channels
    factor = tf.math.rsqrt(variance + self._epsilon) * self._scale()
    centred = tf.cast(self._x, self._dtype) - tf.reshape(mean, shape)
    y = centred * tf.reshape(factor, shape) + tf.reshape(
        self._offset(), shape)
    return tf.cast(y, self._x.dtype)
