"""What model functions return: checked for each tower, then put together."""

from typing import Any, List, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import collectives
from towers import tower as tower_lib


def take(tower: tower_lib.Tower, returned: Any) -> None:
  """Sets the loss, outputs and weight of `tower` from what its model returned.

  Raises:
    TypeError: If it returned something else than a loss, a dict, or a
      `TowerSpec` of tensors.
    ValueError: If it returned nothing, or a loss or weight that can be none.
  """
  spec = _spec(tower, returned)
  where = f"tower {tower.index}"
  if spec.weight is not None:
    tower.weight = _checked_weight(spec.weight, tower.weight, where)
  if spec.loss is not None:
    tower.loss = _that_counts(tower, _checked_loss(spec.loss, where))
  if spec.outputs is not None:
    flat = tf.nest.flatten(spec.outputs)
    tower.outputs = tf.nest.pack_sequence_as(spec.outputs, [
        _that_counts(tower, _checked_output(value, where)) for value in flat
    ])


def _spec(tower: tower_lib.Tower, returned: Any) -> tower_lib.TowerSpec:
  expected = ("a scalar loss, a dict of tensors with the loss as 'loss', or a "
              "towers.TowerSpec")
  if isinstance(returned, tower_lib.TowerSpec):
    spec = returned
  elif isinstance(returned, dict):
    outputs = {key: value for key, value in returned.items() if key != "loss"}
    spec = tower_lib.TowerSpec(returned.get("loss"), outputs)
  elif returned is None:
    spec = tower_lib.TowerSpec()
  elif isinstance(returned, (tuple, list, tf.Operation)):
    raise TypeError(f"`model_fn` must return {expected}: got {returned!r} "
                    f"(tower {tower.index}).")
  else:
    spec = tower_lib.TowerSpec(loss=returned)
  if spec.loss is None and not tf.nest.flatten(spec.outputs or []):
    raise ValueError(f"`model_fn` must return {expected}: got {returned!r}, "
                     f"which holds no tensor (tower {tower.index}).")
  return spec


def _tensor(value: Any, what: str, where: str) -> tf.Tensor:
  try:
    if value is None:
      raise ValueError("`None` is no tensor.")
    return tf.convert_to_tensor(value)
  except (TypeError, ValueError) as error:
    raise TypeError(
        f"`model_fn` must return tensors: got {value!r} as {what} ({where}). "
        f"{error}") from error


def _checked_loss(loss: Any, where: str) -> tf.Tensor:
  loss = _tensor(loss, "the loss", where)
  if loss.shape.rank not in (0, None) or not loss.dtype.is_floating:
    raise ValueError(
        "`loss` of `model_fn` must be a scalar of a floating type, the mean "
        f"over the tower's rows: got `{loss.name}` of type {loss.dtype.name} "
        f"and shape {loss.shape} ({where}). Reduce it with `tf.reduce_mean`.")
  return loss


def _checked_weight(weight: Any, rows: Any, where: str) -> Any:
  """Returns the weight as a number or tensor, 0 for a tower without rows."""
  if _tensorflow.is_variable(weight):
    weight = tf.convert_to_tensor(weight)
  value = weight
  if isinstance(weight, tf.Tensor):
    if weight.shape.rank not in (0, None) or weight.dtype in (tf.bool,
                                                              tf.string):
      raise ValueError(
          "`weight` of `towers.TowerSpec` must be a scalar number: got "
          f"`{weight.name}` of type {weight.dtype.name} and shape "
          f"{weight.shape} ({where}).")
    value = tf.get_static_value(weight)
  elif isinstance(value, bool) or not isinstance(value, (int, float)) and (
      getattr(value, "shape", None) != () or value.dtype.kind not in "iuf"):
    raise ValueError(
        "`weight` of `towers.TowerSpec` must be a scalar number: got "
        f"{weight!r} ({where}).")
  if value is not None:
    if not value >= 0:
      raise ValueError("`weight` of `towers.TowerSpec` must not be negative: "
                       f"got {value} ({where}).")
    weight = float(value)
  elif not weight.dtype.is_floating:
    weight = tf.cast(weight, tf.float64)
  if isinstance(rows, float):
    return weight if rows else 0.0
  return tf.where_v2(rows > 0, weight, tf.zeros_like(weight))


def _checked_output(value: Any, where: str) -> tf.Tensor:
  value = _tensor(value, "an output", where)
  if value.shape.rank is None:
    raise ValueError(
        "`outputs` of `model_fn` must have a known rank, to tell rows from "
        f"scalars: `{value.name}` has none ({where}). Set it with "
        "`set_shape`.")
  if value.shape.rank == 0 and value.dtype == tf.string:
    raise ValueError(
        "`outputs` of `model_fn` must be tensors with rows, or scalars that "
        f"can be averaged: got the string `{value.name}` ({where}).")
  return value


def _that_counts(tower: tower_lib.Tower, value: tf.Tensor) -> tf.Tensor:
  """Returns a scalar `value`, or 0 where the tower's weight is 0.

  Whatever a mean over nothing is (often NaN), it must not count.
  """
  always = isinstance(tower.weight, float) and tower.weight
  if tower.count == 1 or always or value.shape.rank:
    return value
  if not value.op.name.startswith(tower.name_scope):
    return value  # Of all towers, or none: it is the same in each.
  _let_nothing_divide_nothing(value)
  return tf.where_v2(tower.weight > 0, value, tf.zeros_like(value))


def _let_nothing_divide_nothing(value: tf.Tensor) -> None:
  """Makes the gradients of the quotients in a mean 0 where the slope is 0.

  A mean over weights, `sum(loss * mask) / sum(mask)`, is 0 / 0 in a tower that
  has nothing to count. That it does not count leaves a slope of 0, of which a
  plain quotient would make 0 / 0 again, for every variable.
  """
  pending, seen = [value], set()
  while pending:
    op = pending.pop().op
    if op in seen:
      continue
    seen.add(op)
    if (op.type in ("RealDiv", "Div") and op.inputs[1].shape.rank == 0 and
        not _tensorflow.has_gradient_of_its_own(op)):
      _tensorflow.set_gradient(op, "TowersQuotient")
    pending.extend(
        x for x in op.inputs if x.shape.rank == 0 or op.type in ("Sum", "Mean"))


@tf.RegisterGradient("TowersQuotient")
def _quotient_gradient(op: tf.Operation, slope: tf.Tensor) -> List[tf.Tensor]:
  by_numerator = tf.math.divide_no_nan(slope, op.inputs[1])
  by_denominator = tf.math.multiply_no_nan(op.outputs[0], by_numerator)
  return [by_numerator, -tf.reduce_sum(by_denominator)]


def together(towers: Sequence[tower_lib.Tower],
             rows: Sequence[Any]) -> Tuple[Optional[tf.Tensor], Any]:
  """Returns the loss over the whole batch and the outputs of all its rows.

  Raises:
    ValueError: If the towers returned different structures or types.
  """
  first = towers[0]
  for tower in towers[1:]:
    _check_alike(first, tower)
  if len(towers) == 1:
    return first.loss, first.outputs
  weights = [tower.weight for tower in towers]
  loss = None
  if first.loss is not None:
    with tf.name_scope("loss"):
      loss = mean_by_weight([tower.loss for tower in towers], weights)
  outputs = None
  if first.outputs is not None:
    with tf.name_scope("outputs"):
      flats = zip(*[tf.nest.flatten(tower.outputs) for tower in towers])
      outputs = tf.nest.pack_sequence_as(
          first.outputs, [_joined(values, weights, rows) for values in flats])
  return loss, outputs


def mean_by_weight(values: Sequence[tf.Tensor],
                   weights: Sequence[Any]) -> tf.Tensor:
  """Returns the weighted mean of one scalar of each tower."""
  dtype = values[0].dtype
  if not (dtype.is_floating or dtype.is_complex):
    dtype = tf.float64  # Holds every int32, and every count in an int64.
  shares = collectives.shares_of(weights, dtype)
  return tf.add_n(
      [tf.cast(value, dtype) * share for value, share in zip(values, shares)])


def _joined(values: Sequence[tf.Tensor], weights: Sequence[Any],
            rows: Sequence[Any]) -> tf.Tensor:
  if all(value is values[0] for value in values):
    return values[0]  # What towers made together, or is of none.
  if values[0].shape.rank == 0:
    return mean_by_weight(values, weights)
  return collectives.concat_rows(values, rows)


def _check_alike(first: tower_lib.Tower, other: tower_lib.Tower) -> None:
  if (first.loss is None) != (other.loss is None):
    with_loss, without = ((other, first) if first.loss is None else
                          (first, other))
    raise ValueError(
        "`model_fn` must return the same structure in each tower: tower "
        f"{with_loss.index} returned a loss, tower {without.index} none.")
  try:
    tf.nest.assert_same_structure(first.outputs, other.outputs)
  except (TypeError, ValueError) as error:
    raise ValueError(
        "`model_fn` must return the same structure in each tower: the outputs "
        f"of tower {other.index} differ from those of tower 0. {error}"
    ) from error
  one, two = ([first.loss] + tf.nest.flatten(first.outputs),
              [other.loss] + tf.nest.flatten(other.outputs))
  for a, b in zip(one, two):
    if a is not None and (a.dtype != b.dtype or not _fit_together(a, b)):
      raise ValueError(
          "`model_fn` must return tensors of the same type and shape in each "
          f"tower, but for the number of rows: got `{a.name}` {a.dtype.name} "
          f"of shape {a.shape} in tower 0, `{b.name}` {b.dtype.name} of shape "
          f"{b.shape} in tower {other.index}.")


def _fit_together(one: tf.Tensor, other: tf.Tensor) -> bool:
  if None in (one.shape.rank, other.shape.rank):  # Of a loss.
    return True
  return (one.shape.rank == other.shape.rank and
          one.shape[1:].is_compatible_with(other.shape[1:]))
