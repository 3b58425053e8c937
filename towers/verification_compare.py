"""Says whether what N towers have of a tensor is what one device has."""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence
from typing import Tuple, Union, cast

import numpy as np
import tensorflow.compat.v1 as tf

Layout = Tuple[int, int]

# What a tensor of one device is to its counterparts in the towers.
EQUAL = "equal"  # The same in each tower that has rows.
ROWS = "rows"  # The towers' rows, put together.
MEAN = "mean"  # The mean of the towers' values, weighted by their rows.
SUM = "sum"  # Their sum.
OTHER_ROWS = "other_rows"  # Rows of the same number, but not the same.
OTHER_SHAPE = "other_shape"  # Not rows, but of another shape.
OTHER = "other"  # Of the same shape, and none of the above.


class Tolerance(NamedTuple):
  """By how much two values may differ: `relative * scale + absolute`.

  Fields:
    relative: Times the largest magnitude in the tensor of one device.
    absolute: What is added to it.
  """
  relative: float
  absolute: float


DEFAULTS: Mapping[Any, Tolerance] = {
    tf.float64: Tolerance(1e-9, 1e-10),
    tf.float32: Tolerance(1e-4, 1e-5),
    tf.float16: Tolerance(2e-2, 2e-3),
    tf.bfloat16: Tolerance(1e-1, 1e-2),
    tf.complex64: Tolerance(1e-4, 1e-5),
    tf.complex128: Tolerance(1e-9, 1e-10),
}


class Gap(NamedTuple):
  """How two tensors differ.

  Fields:
    largest: The largest difference; NaN where one alone is no finite number, or
      their shapes or texts differ.
    allowed: The difference that would have passed.
    index: Where the difference is largest.
  """
  largest: float
  allowed: float
  index: Tuple[int, ...]  # type: ignore[assignment]  # Hides `tuple.index`.


class Share(NamedTuple):
  """The rows of the batch that one tower has.

  Fields:
    begin: The first.
    end: What follows the last; of a tower without rows, the row that it borrows
      is `begin`.
    own: How many they are, 0 for a tower that borrows.
  """
  begin: int
  end: int
  own: int


def shares(rows: Optional[int], count: int) -> List[Share]:
  """Returns the rows of each tower as `towers.build_towers` deals them out.

  Without rows (a model without inputs), each tower has one to itself.
  """
  if rows is None:
    return [Share(index, index + 1, 1) for index in range(count)]
  share, extra = divmod(rows, count)
  result = []
  for tower in range(count):
    own = share + (tower < extra)
    begin = min(tower * share + min(tower, extra), rows - 1)
    result.append(Share(begin, begin + max(own, 1), own))
  return result


def tolerances(
    given: Optional[Mapping[Any, Union[float, Tolerance, Sequence[float]]]]
) -> Dict[Any, Tolerance]:
  """Returns the tolerance of each type, with what is `given` put in.

  Raises:
    TypeError: If it is no mapping from types.
    ValueError: If a tolerance is no number, or two, of 0 or more.
  """
  result = dict(DEFAULTS)
  if given is not None and not isinstance(given, Mapping):
    raise TypeError(
        "`tolerances` must map types to tolerances: expected for example "
        f"{{tf.float32: 1e-4}}, got {given!r}.")
  for key, value in (given or {}).items():
    try:
      dtype = tf.as_dtype(key)
    except TypeError as error:
      raise TypeError(
          "`tolerances` must map types to tolerances: got the type "
          f"{key!r}.") from error
    try:
      pair = Tolerance(*value) if isinstance(value, (tuple, list)) else (
          Tolerance(cast(float, value),
                    DEFAULTS.get(dtype, Tolerance(0, 0)).absolute))
      valid = all(float(part) >= 0 for part in pair)
    except (TypeError, ValueError):
      valid = False
    if not valid:
      raise ValueError(
          "`tolerances` must be a relative tolerance, or a pair with the "
          f"absolute one, of 0 or more: got {value!r} for {dtype.name}.")
    result[dtype] = pair
  return result


def gap(expected: Any, actual: Any,
        allowed: Mapping[Any, Tolerance]) -> Optional[Gap]:
  """Returns how two arrays differ; None if they are equal within tolerance.

  NaN equals NaN, and an infinity that of the same sign. Types without a
  tolerance, such as integers, must be equal to the bit.
  """
  expected, actual = np.asarray(expected), np.asarray(actual)
  nothing = Gap(float("nan"), 0.0, ())
  if expected.shape != actual.shape or expected.dtype != actual.dtype:
    return nothing
  if not expected.size:
    return None
  tolerance = allowed.get(tf.as_dtype(expected.dtype)) if (
      expected.dtype != object) else None
  if tolerance is None:
    return _exact_gap(expected, actual)
  wide = np.complex128 if np.iscomplexobj(expected) else np.float64
  expected, actual = expected.astype(wide), actual.astype(wide)
  finite = np.isfinite(expected) & np.isfinite(actual)
  same = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
  if not np.all(finite | same):
    place = np.argwhere(~(finite | same))[0]
    return nothing._replace(index=tuple(map(int, place)))
  # A copy of 0 stands where nothing can be subtracted.
  distance = np.abs(np.where(finite, actual, 0) - np.where(finite, expected, 0))
  scale = np.max(np.abs(np.where(finite, expected, 0)))
  limit = tolerance.relative * scale + tolerance.absolute
  largest = np.max(distance)
  if largest <= limit:
    return None
  place = np.unravel_index(np.argmax(distance), distance.shape)
  return Gap(float(largest), float(limit), tuple(map(int, place)))


def _exact_gap(expected: np.ndarray, actual: np.ndarray) -> Optional[Gap]:
  wrong = np.argwhere(expected != actual)
  if not wrong.size and not np.any(expected != actual):
    return None
  place = tuple(map(int, wrong[0]))
  largest = float("nan")
  if expected.dtype.kind in "iub":
    largest = float(np.max(np.abs(
        actual.astype(np.float64) - expected.astype(np.float64))))
  return Gap(largest, 0.0, place)


def layout(whole: Sequence[int], parts: Sequence[Sequence[int]],
           dealt: Sequence[Share]) -> Optional[Layout]:
  """Returns where the batch is in a tensor that towers have the rows of.

  Args:
    whole: Shape of the tensor on one device.
    parts: Its shape in each tower.
    dealt: The towers' rows.

  Returns:
    The axis, and how many places of that axis belong to a row of the batch; or
    None if the shapes are not those of rows.
  """
  rows = sum(share.own for share in dealt)
  for axis in range(len(whole)):
    factor, rest = divmod(whole[axis], rows)
    fits = factor and not rest and all(
        len(part) == len(whole) and
        part[axis] == factor * (share.end - share.begin) and
        list(part[:axis]) == list(whole[:axis]) and
        list(part[axis + 1:]) == list(whole[axis + 1:])
        for part, share in zip(parts, dealt))
    if fits:
      return axis, factor
  return None


def joined(values: Sequence[np.ndarray], where: Layout,
           dealt: Sequence[Share]) -> List[np.ndarray]:
  """Returns what the towers' rows are when put together, in batch order.

  Where several places belong to each row, they may lie side by side, or in
  blocks of the batch; then there are two results.
  """
  axis, factor = where
  own = [np.asarray(v) for v, share in zip(values, dealt) if share.own]
  result = [np.concatenate(own, axis)]
  if factor > 1:
    blocks = [np.split(v, factor, axis) for v in own]
    result.append(np.concatenate(
        [np.concatenate(pieces, axis) for pieces in zip(*blocks)], axis))
  return result


def cut(value: np.ndarray, where: Layout,
        dealt: Sequence[Share]) -> List[np.ndarray]:
  """Returns the rows of `value` that each tower has, or borrows."""
  axis, factor = where
  return [
      np.take(value, range(factor * share.begin, factor * share.end), axis)
      for share in dealt
  ]


class Relation(NamedTuple):
  """What a tensor of one device is to its counterparts in the towers.

  Fields:
    kind: One of the constants above.
    gap: How they differ, if they do.
  """
  kind: str
  gap: Optional[Gap] = None


def relation(whole: Any, parts: Sequence[Any], dealt: Sequence[Share],
             allowed: Mapping[Any, Tolerance],
             weights: Optional[Sequence[float]] = None) -> Relation:
  """Returns what `whole` is to the towers' values.

  Args:
    whole: The value on one device.
    parts: The value in each tower.
    dealt: The towers' rows.
    allowed: The tolerance of each type.
    weights: What a mean is weighted by. Default: the rows.
  """
  whole, parts = np.asarray(whole), list(map(np.asarray, parts))
  counting = [k for k, share in enumerate(dealt) if share.own]
  own = [parts[k] for k in counting]
  if all(part.shape == whole.shape for part in own):
    return _of_same_shape(
        whole, own, allowed,
        [dealt[k].own if weights is None else weights[k] for k in counting])
  where = layout(whole.shape, [part.shape for part in parts], dealt)
  if where is not None:
    gaps = [gap(whole, value, allowed) for value in joined(parts, where, dealt)]
    return Relation(ROWS) if None in gaps else Relation(OTHER_ROWS, gaps[0])
  # As many as a mask has left of them.
  if whole.ndim and all(part.shape[1:] == whole.shape[1:] and part.ndim
                        for part in own) and (
      sum(part.shape[0] for part in own) == whole.shape[0]):
    found = gap(whole, np.concatenate(own), allowed)
    return Relation(ROWS) if found is None else Relation(OTHER_ROWS, found)
  return Relation(OTHER_SHAPE)


def _of_same_shape(whole: np.ndarray, own: Sequence[np.ndarray],
                   allowed: Mapping[Any, Tolerance],
                   weights: Sequence[float]) -> Relation:
  gaps = [gap(whole, value, allowed) for value in own]
  different = [found for found in gaps if found is not None]
  if not different:
    return Relation(EQUAL)
  if whole.dtype.kind not in "SUOb":
    dtype = tf.as_dtype(whole.dtype)
    # A sum of integers has no rounding to allow for, but a mean has.
    close = {tf.float64: allowed.get(dtype, Tolerance(1e-9, 1e-9))}
    wide = [value.astype(np.float64) for value in own if not np.iscomplexobj(
        value)]
    if len(wide) == len(own):
      expected, total = whole.astype(np.float64), sum(weights)
      # Of nothing, such as the loss of a tower where all is masked.
      mean = sum(np.where(w, v, 0.0) * w for v, w in zip(wide, weights))
      if total and gap(expected, np.asarray(mean / total), close) is None:
        return Relation(MEAN, different[0])
      if gap(expected, np.asarray(sum(wide)), close) is None:
        return Relation(SUM, different[0])
  return Relation(OTHER, different[0])
