"""Gradients of several runs, added up for one update.

With `W_m` the weight of the batch of run `m` (its rows, or the units that the
model's losses are means over) and `g_m` its gradient, `k` runs make an update
by

    sum_m(W_m * g_m) / sum_m(W_m)

which is the gradient over one batch that holds the rows of all `k`.
"""

from typing import Any, List, NamedTuple, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import gradients
from towers import local_variables


class _Sum(NamedTuple):
  """Where the gradient of one variable is added up.

  Fields:
    total: Local variable of the variable's shape.
    touched: For sparse gradients, local variable of shape `[rows]`: not zero
      for each row that has a gradient, since an optimizer leaves the others of
      a sparse gradient alone; else None.
  """
  total: Any
  touched: Optional[Any]


class Accumulator:
  """Adds up what `minimize` would apply, until it is enough.

  Sums are kept in at least float32. They are local variables: a checkpoint does
  not hold them, and a run that continues from one starts a new sum.

  Attributes:
    count: Local variable, scalar int64: how many runs are in the sum.
  """

  def __init__(self, pairs: Sequence[gradients.GradientAndVariable],
               device: str):
    first = next(v for g, v in pairs if g is not None)
    self._pairs = pairs
    self._sums: List[Optional[_Sum]] = [_sum_of(g, v) for g, v in pairs]
    self.count = local_variables.zeros(
        [], tf.int64, device=device, name="accumulated_runs", variable=first)
    self._weight = local_variables.zeros(
        [], tf.float64, device=device, name="accumulated_weight",
        variable=first)

  def add(self, weight: tf.Tensor) -> tf.Operation:
    """Returns the op that adds this run's gradients, by a scalar `weight`."""
    ops = [self.count.assign_add(1, read_value=False),
           self._weight.assign_add(
               tf.cast(weight, tf.float64), read_value=False)]
    for (gradient, variable), own in zip(self._pairs, self._sums):
      if own is None:
        continue
      with tf.device(None), tf.device(variable.device):
        factor = tf.cast(weight, own.total.dtype)
        # A run of weight 0 has no gradient, whatever 0 / 0 made of it.
        weighted = gradients.with_values(
            gradient, lambda values, factor=factor: tf.math.multiply_no_nan(
                tf.cast(values, factor.dtype), factor))
        if own.touched is None:
          total = tf.convert_to_tensor(weighted)
          ops.append(own.total.assign_add(total, read_value=False))
        else:
          ops.append(own.total.scatter_add(weighted).op)
          ones = tf.ones_like(weighted.indices, own.touched.dtype)
          ops.append(own.touched.scatter_update(
              tf.IndexedSlices(ones, weighted.indices)).op)
    return tf.group(*ops)

  def mean(self) -> List[gradients.GradientAndVariable]:
    """Returns the mean of all runs since the last `clear`."""
    weight = self._weight.read_value()
    result = []
    for (gradient, variable), own in zip(self._pairs, self._sums):
      mean = None
      if own is not None:
        with tf.device(None), tf.device(variable.device):
          mean = _mean(gradient, own, weight)
      result.append(gradients.GradientAndVariable(mean, variable))
    return result

  def clear(self) -> tf.Operation:
    """Returns the op that starts a new sum."""
    ops = []
    for own in self._sums:
      for local in own or ():
        if local is not None:
          with tf.device(None), tf.device(local.device):
            zeros = tf.zeros(local.shape, local.dtype)
            ops.append(local.assign(zeros, read_value=False))
    for local in (self.count, self._weight):
      ops.append(local.assign(tf.zeros([], local.dtype), read_value=False))
    return tf.group(*ops)


def _sum_of(gradient: Any, variable: Any) -> Optional[_Sum]:
  """Makes the sum for one variable; None where it has no gradient.

  Raises:
    ValueError: If the shape of the variable is unknown.
  """
  if gradient is None:
    return None
  if not variable.shape.is_fully_defined():
    raise ValueError(
        "`accumulate_steps` must be 1 for variables of unknown shape: got "
        f"`{variable.op.name}` of shape {variable.shape}. Set its shape.")
  dtype = variable.dtype.base_dtype
  if dtype in (tf.float16, tf.bfloat16):
    dtype = tf.float32
  name = f"accumulated/{variable.op.name}"
  total = local_variables.zeros(
      variable.shape, dtype, device=variable.device, name=name,
      variable=variable)
  touched = None
  if isinstance(gradient, tf.IndexedSlices):
    touched = local_variables.zeros(
        variable.shape[:1], tf.float32, device=variable.device,
        name=f"{name}/touched", variable=variable)
  return _Sum(total, touched)


def _mean(gradient: Any, own: _Sum, weight: tf.Tensor) -> Any:
  dtype = own.total.dtype

  def mean(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(
        tf.math.divide_no_nan(values, tf.cast(weight, dtype)), gradient.dtype)

  if own.touched is None:
    return mean(own.total.read_value())
  rows = tf.where_v2(own.touched.read_value() > 0)[:, 0]
  return tf.IndexedSlices(
      mean(tf.gather(own.total.read_value(), rows)),
      tf.cast(rows, gradient.indices.dtype), gradient.dense_shape)
