"""Mean and variance over the rows of all towers."""

import numbers
from typing import Any, List, NamedTuple, Sequence, Union, cast

import tensorflow.compat.v1 as tf

from towers import collectives
from towers import context


class Moments(NamedTuple):
  """What `towers.moments` returns.

  Fields:
    mean: Tensor of the shape of `x` without the reduced axes.
    variance: Tensor of the same shape, the biased estimator, never negative.
  """
  mean: tf.Tensor
  variance: tf.Tensor


class Counted(NamedTuple):
  """Moments, and the number of elements that each is a mean over (scalar)."""
  mean: tf.Tensor
  variance: tf.Tensor
  count: tf.Tensor


def moments(x: Any, axes: Union[int, Sequence[int]]) -> Moments:
  """Returns the mean and variance of `x` over `axes` and over all towers.

  Each tower reduces its own rows first, and one packed message (mean and
  variance) goes to the parameter device. With `n_t`, `m_t` and `s_t` the
  element count, mean and sum of squared deviations of tower `t`, and `N` the
  sum of all `n_t`:

      mean     = sum_t(n_t * m_t) / N
      variance = sum_t(s_t + n_t * (m_t - mean)**2) / N

  No tower's squares are added up before its mean is taken off, so nothing
  cancels; and counts weigh, so towers may have different numbers of rows. Both
  results are differentiable.

  Where `axes` leaves out the batch axis 0, rows stay apart and the result is
  the tower's own, as it is outside a build and under `towers.no_sync()`.

  Args:
    x: Float tensor of shape `[B_t, ...]`. `B_t` may differ between towers.
    axes: Axes to reduce.

  Returns:
    A `Moments` of type float32 for 16-bit `x`, else of the type of `x`.

  Raises:
    TypeError: If `x` is not of a floating type.
    ValueError: If the rank of `x` is unknown or `axes` lie outside it, or where
      `towers.merge` raises it.

  References:
    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
      Computing Sample Variances", 1979,
      http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf
    Peng et al., "MegDet: A Large Mini-Batch Object Detector", 2018,
      https://arxiv.org/abs/1711.07240
  """
  x = checked(x)
  with context.not_watched(), tf.name_scope("moments"):
    counted = over_towers(x, normalised_axes(axes, x.shape.rank), "moments")
  return Moments(counted.mean, counted.variance)


def checked(x: Any) -> tf.Tensor:
  """Returns `x` as a float tensor of known rank.

  Raises:
    TypeError: If it is not of a floating type.
    ValueError: If its rank is unknown.
  """
  x = tf.convert_to_tensor(x)
  if not x.dtype.is_floating:
    raise TypeError(f"`x` must be of a floating type: got {x.dtype.name} "
                    f"(`{x.name}`).")
  if x.shape.rank is None:
    raise ValueError(f"`x` must have a known rank: `{x.name}` has none. Set it "
                     "with `x.set_shape`.")
  return x


def normalised_axes(axes: Union[int, Sequence[int]], rank: int) -> List[int]:
  """Returns `axes` as a sorted list of numbers from 0.

  Raises:
    ValueError: If one lies outside the rank or stands twice.
  """
  # Not `int`, as NumPy's whole numbers are none.
  one = isinstance(axes, numbers.Integral)
  listed = [cast(int, axes)] if one else list(cast(Sequence[int], axes))
  result = sorted(axis % rank for axis in listed if -rank <= axis < rank)
  if len(set(result)) != len(listed) or not listed:
    raise ValueError(
        f"`axes` must be different axes of `x`: expected values in "
        f"[{-rank}, {rank}), got {listed}.")
  return result


def over_towers(x: tf.Tensor, axes: Sequence[int], name: str) -> Counted:
  """`moments` with the count, under `name`; `axes` sorted and from 0."""
  if x.dtype in (tf.float16, tf.bfloat16):
    x = tf.cast(x, tf.float32)
  lockstep = context.lockstep()
  shared = lockstep is not None and 0 in axes and context.sync_batch_norm()
  mean = tf.reduce_mean(x, axes, keepdims=True)
  # The gradient by this mean is 0, but the second derivative is not; so no
  # `stop_gradient` here, unlike in `tf.nn.moments`.
  variance = tf.reduce_mean(tf.squared_difference(x, mean), axes)
  mean = tf.squeeze(mean, axes)
  count = element_count(x, axes)
  if not shared:
    return Counted(mean, variance, count)

  def combined(values: Sequence[Any]) -> Counted:
    messages, counts = zip(*values)
    means, variances = tf.unstack(tf.stack(messages), axis=1)
    weights = counts_of_towers(counts, lockstep.rows, x.dtype)
    return combine(means, variances, weights)

  message = tf.stack([mean, variance])
  # The count travels as a host integer where it is not known while building.
  return collectives.meet("towers.moments", name, combined, (message, count))


def element_count(x: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
  """Returns how many elements of `x` each reduced value is made of (int32)."""
  shape = x.shape.as_list()
  sizes = [shape[axis] for axis in axes]
  if None not in sizes:
    return tf.constant(_product(sizes), tf.int32)
  return tf.reduce_prod(tf.gather(tf.shape(x), list(axes)))


def _product(sizes: Sequence[int]) -> int:
  result = 1
  for size in sizes:
    result *= size
  return result


def counts_of_towers(counts: Sequence[Any], rows: Sequence[Any],
                     dtype: tf.DType) -> tf.Tensor:
  """Returns the element counts of all towers, 0 for those without rows.

  Returns:
    Tensor of shape `[T]` and type `dtype`.
  """
  weights = tf.cast(tf.stack(counts), dtype)
  if all(isinstance(r, float) and r for r in rows):
    return weights
  present = [
      float(r > 0) if isinstance(r, float) else tf.cast(r > 0, dtype)
      for r in rows
  ]
  return weights * tf.stack([tf.cast(p, dtype) for p in present])


def combine(means: tf.Tensor, variances: tf.Tensor,
            counts: tf.Tensor) -> Counted:
  """Combines the moments of towers, the way that does not cancel.

  Args:
    means: Tensor of shape `[T, ...]`.
    variances: Tensor of the same shape, biased.
    counts: Tensor of shape `[T]`, the element counts.
  """
  total = tf.reduce_sum(counts)
  shares = tf.reshape(counts / total, [-1] + [1] * (means.shape.rank - 1))
  mean = tf.reduce_sum(shares * means, axis=0)
  between = tf.squared_difference(means, mean)
  variance = tf.reduce_sum(shares * (variances + between), axis=0)
  return Counted(mean, variance, total)
