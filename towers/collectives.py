"""Operations of model code that go over all towers.

Each is plain dataflow, so it has a gradient, any part of the graph can be
fetched alone, and nothing can deadlock in a session.
"""

from typing import Any, Callable, List, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import context
from towers import lockstep as lockstep_lib


def merge(fn: Callable[[List[Any]], Any], value: Any) -> Any:
  """Calls `fn` once with the values of all towers; each tower gets the result.

  Example, for the mean over a batch of what each tower has counted:

      positives = towers.merge(tf.add_n, positives_of_this_tower)

  The ops that `fn` adds stand in a name scope `cross_tower/...` on the
  parameter device. The result is differentiable where `fn` is. Outside a build,
  `fn` gets a list of one value.

  Note: a tower without rows computes on a borrowed row, and its value is in the
  list. `all_reduce` and `all_gather` leave it out.

  Args:
    fn: Takes a list with one nest of tensors per tower, in tower order; returns
      a nest of tensors.
    value: Nest of tensors, of the same structure and types in each tower.

  Raises:
    ValueError: If the towers do not all come to the same `merge`, or come with
      values that differ in structure or type; or inside a while loop or a
      branch of v2 control flow, where towers cannot meet.
  """
  return meet("towers.merge", _scope_in_tower(), fn, value)


def all_reduce(x: Any, op: str = "sum") -> tf.Tensor:
  """Returns the sum or the mean of `x` over all towers.

  With `r_t` the number of rows of tower `t`, and `x_t` its value:

      sum  = sum_t(x_t), over the towers that have rows
      mean = sum_t(r_t * x_t) / sum_t(r_t)

  So the mean of means over rows is the mean over the rows of the whole batch.
  Outside a build both are `x`.

  Args:
    x: Tensor of the same shape in each tower.
    op: "sum" or "mean".

  Raises:
    TypeError: If a mean is asked for and `x` is not of a floating type.
    ValueError: If `op` is neither, or where `merge` raises it.
  """
  if op not in ("sum", "mean"):
    raise ValueError(
        f"`op` must be the reduction to make: expected 'sum' or 'mean', got "
        f"{op!r}.")
  x = tf.convert_to_tensor(x)
  if op == "mean" and not (x.dtype.is_floating or x.dtype.is_complex):
    raise TypeError(
        f"`x` must be of a floating type for a mean: got {x.dtype.name} "
        f"(`{x.name}`). Cast it first.")
  lockstep = context.lockstep()
  if lockstep is None:
    return x

  def reduced(values: Sequence[tf.Tensor]) -> tf.Tensor:
    rows = lockstep.rows
    if op == "sum":
      return tf.add_n([_if_any_rows(v, r) for v, r in zip(values, rows)])
    shares = shares_of(rows, x.dtype)
    return tf.add_n([v * share for v, share in zip(values, shares)])

  return meet("towers.all_reduce", _scope_in_tower(), reduced, x)


def all_gather(x: Any) -> tf.Tensor:
  """Returns the rows of all towers, in batch order.

  Args:
    x: Tensor of shape `[B_t, ...]`; `B_t` may differ between towers. The row of
      a tower that has none of its own is left out.

  Returns:
    Tensor of shape `[B, ...]`, with `B` the sum of all `B_t`. Outside a build
    it is `x`.

  Raises:
    ValueError: If `x` is a scalar, or where `merge` raises it.
  """
  x = tf.convert_to_tensor(x)
  if x.shape.rank == 0:
    raise ValueError(
        f"`x` must have rows to gather: got the scalar `{x.name}`. For a "
        "scalar use `towers.all_reduce`.")
  lockstep = context.lockstep()
  if lockstep is None:
    return x
  return meet("towers.all_gather", _scope_in_tower(),
              lambda values: concat_rows(values, lockstep.rows), x)


def mean_over_rows(x: tf.Tensor, name: str) -> tf.Tensor:
  """Returns the mean of `x` over the towers, weighted by their rows."""
  lockstep = context.lockstep()

  def mean(values: Sequence[tf.Tensor]) -> tf.Tensor:
    shares = shares_of(lockstep.rows, x.dtype)
    return tf.add_n([v * share for v, share in zip(values, shares)])

  return meet("moving statistics", name, mean, x, exact_name=False)


def concat_rows(values: Sequence[tf.Tensor], rows: Sequence[Any]) -> tf.Tensor:
  """Concatenates the towers' rows, without those that were only borrowed."""
  kept = []
  for value, row_count in zip(values, rows):
    if isinstance(row_count, float):
      if row_count:
        kept.append(value)
    else:
      own = tf.shape(value)[0] * tf.cast(row_count > 0, tf.int32)
      with tf.device(None), tf.device(value.device):
        piece = value[:own]
      kept.append(piece)
  return kept[0] if len(kept) == 1 else tf.concat(kept, axis=0)


def shares_of(weights: Sequence[Any], dtype: tf.DType) -> List[Any]:
  """Returns `w_t / sum_t(w_t)` for each tower; 0 where all `w_t` are."""
  if all(isinstance(weight, float) for weight in weights):
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]
  # A type of 16 bits holds no large count.
  wide = tf.float64 if dtype in (tf.float64, tf.complex128) else tf.float32
  stacked = tf.stack([tf.cast(weight, wide) for weight in weights])
  shares = tf.math.divide_no_nan(stacked, tf.reduce_sum(stacked))
  return tf.unstack(tf.cast(shares, dtype))


def _if_any_rows(value: tf.Tensor, row_count: Any) -> tf.Tensor:
  """Returns `value`, or zeros for a tower without rows."""
  if isinstance(row_count, float):
    return value if row_count else tf.zeros_like(value)
  return tf.where_v2(row_count > 0, value, tf.zeros_like(value))


def _scope_in_tower() -> str:
  """Returns the current name scope, without the tower's own."""
  scope = tf.get_default_graph().get_name_scope() + "/"
  return context.current_tower().plain_name(scope).strip("/")


def meet(kind: str, name: str, fn: Callable[[List[Any]], Any], value: Any,
         exact_name: bool = True) -> Any:
  """`merge` under the name that the model called it by.

  Args:
    kind: What the model called.
    name: Name of the layer or scope.
    fn: See `merge`.
    value: See `merge`.
    exact_name: See `lockstep.Lockstep.merge`.
  """
  lockstep = context.lockstep()
  if lockstep is None:
    return fn([value])
  flat = [tf.convert_to_tensor(x) for x in tf.nest.flatten(value)]
  types = tf.nest.pack_sequence_as(value, [x.dtype.name for x in flat])

  def merged(flat_values: List[List[Any]]) -> Any:
    result = fn([tf.nest.pack_sequence_as(value, v) for v in flat_values])
    return _differentiable(result, flat_values)

  return lockstep.merge(kind, name, merged, flat, types, exact_name)


# --- The gradient of a merge --------------------------------------------------
#
# A merge ends in one `IdentityN` of its results and of the values that it was
# made from. A backward pass over all towers takes it for an identity and goes
# on through what `fn` added. A backward pass of one tower (`tf.gradients` in
# model code) would see no more than this tower's part in the result and in its
# use. There it becomes a meeting: the towers add up what they hold against the
# result, and each goes on from its own value.

_RESULTS = "_towers_results"


def _differentiable(result: Any, flat_values: List[List[tf.Tensor]]) -> Any:
  flat_result = tf.nest.flatten(result)
  carried = [
      k for k, x in enumerate(flat_result)
      if isinstance(x, tf.Tensor) and _has_gradient(x)
  ]
  values = [x for flat in flat_values for x in flat if _has_gradient(x)]
  if not carried or not values:
    return result
  passed = boundary("TowersMerge", [flat_result[k] for k in carried], values)
  for k, x in zip(carried, passed):
    flat_result[k] = x
  return tf.nest.pack_sequence_as(result, flat_result)


def _has_gradient(x: tf.Tensor) -> bool:
  return x.dtype.is_floating or x.dtype.is_complex


def boundary(gradient: str, results: Sequence[tf.Tensor],
             others: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
  """Passes `results` through an op with the registered gradient `gradient`."""
  graph = tf.get_default_graph()
  with graph.gradient_override_map({"IdentityN": gradient}):
    passed = tf.identity_n(list(results) + list(others))
  _tensorflow.set_attribute(passed[0].op, _RESULTS, len(results))
  return passed[:len(results)]


def sum_over_towers(kind: str, name: str,
                    values: Sequence[Optional[tf.Tensor]]) -> List[Any]:
  """Adds up gradients over all towers; for code that runs in each tower."""
  present = [k for k, value in enumerate(values) if value is not None]
  sums = meet(
      kind, name,
      lambda all_values: [tf.add_n(list(v)) for v in zip(*all_values)],
      [values[k] for k in present])
  result: List[Any] = [None] * len(values)
  for k, total in zip(present, sums):
    result[k] = total
  return result


@tf.RegisterGradient("TowersMerge")
def _merge_gradient(op: tf.Operation, *grads: Any) -> List[Any]:
  results = op.get_attr(_RESULTS)
  others = len(op.inputs) - results
  lockstep: Optional[lockstep_lib.Lockstep] = context.lockstep()
  if lockstep is None:
    return list(grads[:results]) + [None] * others
  totals = sum_over_towers("tf.gradients of a merge", "gradient",
                           grads[:results])
  # Each tower differentiates the function by its own value.
  own = others // len(lockstep.towers)
  first = results + own * context.current_tower().index
  known = [k for k, total in enumerate(totals) if total is not None]
  value_grads = tf.gradients([op.inputs[k] for k in known],
                             list(op.inputs[first:first + own]),
                             grad_ys=[totals[k] for k in known])
  grads_of_others: List[Any] = [None] * others
  grads_of_others[first - results:first - results + own] = value_grads
  return [None] * results + grads_of_others
