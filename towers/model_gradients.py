"""`tf.gradients` inside model code: as on one device, over the whole batch.

A model may differentiate on its own, for adversarial examples, saliency maps or
gradient penalties. On one device, the derivative of a loss takes in all rows.
So in a tower it stands for the derivative of the sum over all towers: what
reaches an `x` of the tower through other towers (by batch norm) comes to it in
the meetings that `collectives` and `fused` make of their gradients, and for an
`x` that all towers share (a variable) the towers' derivatives are added up.
"""

import contextlib
import threading
from typing import Any, Iterator, List

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import collectives
from towers import context
from towers import gradients

_LINEAR = frozenset([
    "Identity", "IdentityN", "Neg", "Cast", "Reshape", "Squeeze",
    "StopGradient", "AddV2", "Add", "AddN", "Sub", "Mul"
])
_DIVISIONS = frozenset(["RealDiv", "DivNoNan", "Div"])
_SUMS = frozenset(["Sum", "L2Loss"])
# Ops whose result depends on no value of their inputs, or on nothing.
_NO_DATA = frozenset([
    "Const", "VarHandleOp", "VariableV2", "Variable", "Shape", "ShapeN", "Size",
    "Rank", "ZerosLike", "OnesLike", "NoOp"
])

_local = threading.local()


@contextlib.contextmanager
def installed() -> Iterator[None]:
  """Lets `tf.gradients` of towers take in all towers, during a build."""
  with _tensorflow.gradients_intercepted(_gradients):
    yield


def _gradients(original: Any, ys: Any, xs: Any, grad_ys: Any, *args,
               **kwargs) -> List[Any]:
  lockstep = context.lockstep()
  if lockstep is None or getattr(_local, "inside", False):
    return original(ys, xs, grad_ys, *args, **kwargs)
  ys, xs = _as_list(ys), _as_list(xs)
  grad_ys = [None] * len(ys) if grad_ys is None else _as_list(grad_ys)
  shares = collectives.shares_of(lockstep.rows, tf.float32)
  share = shares[context.current_tower().index]
  grad_ys = [_weighted(y, g, share) for y, g in zip(ys, grad_ys)]
  # Branches and loops of v2 control flow come here again.
  _local.inside = True
  try:
    result = original(ys, xs, grad_ys, *args, **kwargs)
  finally:
    _local.inside = False
  return [
      _over_towers(gradient) if _is_shared(x) else gradient
      for x, gradient in zip(xs, result)
  ]


def _as_list(value: Any) -> List[Any]:
  return list(value) if isinstance(value, (list, tuple)) else [value]


def _weighted(y: Any, grad_y: Any, share: Any) -> Any:
  """Weighs a mean over the tower's rows by the tower's share in the batch."""
  if not isinstance(y, tf.Tensor) or y.shape.rank != 0:
    return grad_y
  if _kind(y, y) == "sum":
    return grad_y
  weight = tf.cast(share, y.dtype)
  return weight if grad_y is None else grad_y * weight


def _kind(x: tf.Tensor, y: tf.Tensor) -> str:
  """Says how scalar `x`, a part of `y`, is made of rows.

  Returns:
    "sum", "mean", or "" for what depends on no rows (weight decay).

  Raises:
    ValueError: If it is something else, which takes the whole batch at once.
  """
  op = x.op
  if not _depends_on_data(x):
    return ""
  if op.type in _SUMS:
    return "sum"
  if op.type == "Mean":
    return "mean"
  operands = [x for x in op.inputs if _depends_on_data(x)]
  if op.type in _DIVISIONS and operands == [op.inputs[0]]:
    return "mean"  # A sum, divided by its number of rows.
  if op.type in _LINEAR and (len(operands) == 1 or op.type != "Mul"):
    kinds = {_kind(operand, y) for operand in operands}
    if len(kinds) == 1:
      return kinds.pop()
  raise ValueError(
      "`ys` of `tf.gradients` in `model_fn` must be tensors with a value per "
      "row, or scalars that are a sum or a mean over the tower's rows: got "
      f"`{y.name}`, which depends on rows by `{op.name}` ({op.type}). "
      "Differentiate the values per row; or make the value from what all "
      "towers have, with `towers.all_reduce`.")


def _depends_on_data(x: tf.Tensor) -> bool:
  """Says whether `x` is made of anything but constants and variables."""
  pending, seen = [x.op], set()
  while pending:
    op = pending.pop()
    if op in seen or op.type in _NO_DATA:
      continue
    seen.add(op)
    if not op.inputs:
      return True
    pending.extend(source.op for source in op.inputs)
  return False


def _is_shared(x: Any) -> bool:
  """Says whether all towers use the same `x`."""
  if _tensorflow.is_variable(x):
    return True
  scope = context.current_tower().name_scope
  return x.dtype == tf.resource or not x.op.name.startswith(scope)


def _over_towers(gradient: Any) -> Any:
  """Adds up the towers' derivatives by something that they share."""
  lockstep = context.lockstep()
  return lockstep.merge("tf.gradients", "gradient", _total, gradient, None)


def _total(shares: List[Any]) -> Any:
  total = gradients.add_up(shares)
  if total is None:
    return None
  if isinstance(total, tf.IndexedSlices):
    values = [share.values if share is not None else total.values[:0]
              for share in shares]
    passed = collectives.boundary("TowersMerge", [total.values], values)
    return tf.IndexedSlices(passed[0], total.indices, total.dense_shape)
  values = [tf.zeros_like(total) if share is None else
            tf.convert_to_tensor(share) for share in shares]
  return collectives.boundary("TowersMerge", [total], values)[0]
