"""`tf.gradients` inside model code: as on one device, over the whole batch.

A model may differentiate on its own, for adversarial examples, saliency maps or
gradient penalties. On one device, the derivative of a loss takes in all rows.
So in a tower it stands for the derivative of the sum over all towers: what
reaches an `x` of the tower through other towers (by batch norm) comes to it in
the meetings that `collectives` and `fused` make of their gradients, and for an
`x` that all towers share (a variable) the towers' derivatives are added up.

The derivative of a sum over a tower's rows adds up as it is. That of a mean
over them must be weighed by the tower's share in the batch first. Which of the
two a tensor is shows in the ops that made it.
"""

import contextlib
import inspect
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import collectives
from towers import context
from towers import gradients
from towers import lockstep as lockstep_lib
from towers import tower as tower_lib

_ADDITIONS = frozenset(["AddV2", "Add", "AddN", "Sub"])
_LINEAR = _ADDITIONS | frozenset([
    "Identity", "IdentityN", "Neg", "Cast", "Reshape", "Squeeze", "ExpandDims",
    "StopGradient", "Mul"
])
_SHAPING = frozenset(["ConcatV2", "Pack", "StridedSlice"])
_DIVISIONS = frozenset(["RealDiv", "DivNoNan", "Div"])
_REDUCTIONS = frozenset(["Sum", "Mean", "Max", "Min", "Prod"])
# What these make of a value per row is one again.
_ELEMENTWISE = frozenset([
    "Abs", "Exp", "Log", "Log1p", "Pow", "Relu", "Rsqrt", "Sigmoid", "Softplus",
    "Sqrt", "Square", "Tanh"
])
# Ops that look at the shapes of their inputs only.
_OF_SHAPES = frozenset([
    "Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"
])
_CONSTANTS = frozenset(["Const", "VarHandleOp", "VariableV2", "NoOp"])
_RANDOM = ("Random", "Truncated", "Stateless", "Multinomial", "Parameterized")

_local = threading.local()


@contextlib.contextmanager
def installed() -> Iterator[None]:
  """Lets `tf.gradients` of towers take in all towers, during a build."""
  with _tensorflow.gradients_intercepted(_gradients):
    yield


def _gradients(original: Callable[..., List[Any]], *args: Any,
               **kwargs: Any) -> List[Any]:
  """Stands before `tf.gradients`, which has the arguments of `original`."""
  lockstep = context.lockstep()
  if lockstep is None or getattr(_local, "inside", False):
    return original(*args, **kwargs)
  arguments = inspect.signature(original).bind(*args, **kwargs).arguments
  ys, xs = _as_list(arguments["ys"]), _as_list(arguments["xs"])
  grad_ys = arguments.get("grad_ys")
  grad_ys = [None] * len(ys) if grad_ys is None else _as_list(grad_ys)
  rows = _Rows(lockstep, context.current_tower())
  arguments["grad_ys"] = _weighted(ys, grad_ys, rows, lockstep)
  # The handle itself also takes in what reaches the variable not by the tower's
  # view: what was computed from it outside the towers, and cached reads.
  arguments["xs"] = [_source(x) for x in xs]
  stops = arguments.get("stop_gradients")
  if stops is not None:
    arguments["stop_gradients"] = [_source(x) for x in _as_list(stops)]
  # Branches and loops of v2 control flow come here again.
  _local.inside = True
  try:
    result = original(**arguments)
  finally:
    _local.inside = False
  return [
      _over_towers(gradient) if rows.all_share(x) else gradient
      for x, gradient in zip(xs, result)
  ]


def _as_list(value: Any) -> List[Any]:
  return list(value) if isinstance(value, (list, tuple)) else [value]


def _source(x: Any) -> Any:
  """Returns the real handle of a variable, and anything else as it is."""
  if _tensorflow.is_resource_variable(x):
    return x.op.outputs[0]
  return x


def _weighted(ys: List[Any], grad_ys: List[Any], rows: "_Rows",
              lockstep: lockstep_lib.Lockstep) -> List[Any]:
  """Weighs each of `ys` such that the towers' gradients add up."""
  weights: Dict[Any, Any] = {}

  def weight_of(y: tf.Tensor) -> Any:
    count = lockstep.rows[context.current_tower().index]
    if not rows.is_mean(y):
      return (float(count > 0) if isinstance(count, float) else tf.cast(
          count > 0, tf.float32))
    double = y.dtype in (tf.float64, tf.complex128)
    dtype = tf.float64 if double else tf.float32
    if dtype not in weights:
      shares = collectives.shares_of(lockstep.rows, dtype)
      weights[dtype] = shares[context.current_tower().index]
    return weights[dtype]

  result = []
  for y, grad_y in zip(ys, grad_ys):
    if isinstance(y, tf.Tensor) and (y.dtype.is_floating or y.dtype.is_complex):
      weight = weight_of(y)
      if not isinstance(weight, float) or weight != 1.0:
        # As a number, which takes the type of what it is multiplied by.
        if isinstance(weight, tf.Tensor):
          weight = tf.cast(weight, y.dtype)
        grad_y = weight * (tf.ones_like(y) if grad_y is None else grad_y)
    result.append(grad_y)
  return result


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


# --- What a tensor is to the rows of its tower --------------------------------


class _Kind(NamedTuple):
  """What a tensor made of rows is.

  Fields:
    has_rows: Whether its first axis are rows; else it is a sum over them.
    is_mean: Whether it was divided by the number of rows.
  """
  has_rows: bool
  is_mean: bool


class _Rows:
  """The rows of one tower, and what is made of them."""

  def __init__(self, lockstep: lockstep_lib.Lockstep, tower: tower_lib.Tower):
    self._tower = tower
    self._merged = lockstep.name_scope
    self._inputs = lockstep.inputs[tower.index]
    count = lockstep.rows[tower.index]
    # A tower without rows has borrowed one.
    self._count = max(count, 1.0) if isinstance(count, float) else None

  def all_share(self, x: Any) -> bool:
    """Says whether `x` is the same in all towers, as variables are."""
    if _tensorflow.is_variable(x):
      return True
    if not isinstance(x, tf.Tensor):
      return False
    if x.dtype == tf.resource:
      return True
    has_count = x.shape.rank and x.shape.as_list()[0] == self._count
    return not (self._uses(x, shapes=True) or
                has_count and x.op.name.startswith(self._tower.name_scope))

  def is_mean(self, y: tf.Tensor) -> bool:
    """Says whether `y` must be weighed by the tower's share in the batch.

    What all towers share is the same in each, and its own mean over them.

    Raises:
      ValueError: If it cannot be told, or `y` takes the whole batch at once.
    """
    kind = self._kind(y, y)
    return kind is None or kind.is_mean

  def _kind(self, x: tf.Tensor, y: tf.Tensor) -> Optional[_Kind]:
    """Returns what `x`, a part of `y`, is; None if not made of rows."""
    return self._kind_of_rows(x, y) if self._uses(x) else None

  def _kind_of_rows(self, x: tf.Tensor, y: tf.Tensor) -> _Kind:
    """Returns what `x`, a part of `y` that is made of rows, is."""
    op = x.op
    used = [self._uses(v) for v in op.inputs]
    parts = [v for v, use in zip(op.inputs, used) if use]
    others = [v for v, use in zip(op.inputs, used) if not use]
    kind: Optional[_Kind] = None
    if op in self._inputs or not parts and x.shape.rank != 0:
      kind = _Kind(True, False)
    elif op.type in _REDUCTIONS:
      kind = self._reduced(op, self._kind(op.inputs[0], y))
    elif op.type == "L2Loss":
      if self._kind(op.inputs[0], y) == _Kind(True, False):
        kind = _Kind(False, False)
    elif op.type in _DIVISIONS and used == [True, False]:
      kind = self._scaled(parts[0], others[0], y, lambda v: v)
    elif op.type == "Mul" and len(parts) == 1:
      kind = self._scaled(parts[0], others[0], y, lambda v: 1 / v)
    elif op.type in _ADDITIONS or op.type in _SHAPING or (
        op.type in _LINEAR and len(parts) == 1):
      kinds = {self._kind_of_rows(part, y) for part in parts}
      # What all towers share would be added up with a sum once for each tower.
      if len(kinds) == 1:
        kind = kinds.pop()
        shared = not all(_is_constant(v) for v in others)
        if shared and kind == _Kind(False, False) or (
            kind.has_rows and x.shape.rank == 0):
          kind = None
    elif op.type in _ELEMENTWISE:
      if all(self._kind(v, y) == _Kind(True, False) for v in parts):
        kind = _Kind(True, False)
    elif op.type not in _LINEAR | _DIVISIONS and x.shape.rank != 0 and any(
        v.shape.rank != 0 for v in parts):
      kind = _Kind(True, False)
    if kind is None and op.type in _LINEAR | _DIVISIONS and x.shape.rank != 0:
      # Rows, put together with what is not made of rows alone.
      if any(self._kind_of_rows(v, y).has_rows for v in parts):
        kind = _Kind(True, False)
    if kind is None:
      raise ValueError(
          "`ys` of `tf.gradients` in `model_fn` must be tensors with a value "
          "per row, or sums or means of them over the tower's rows: got "
          f"`{y.name}`, which depends on rows by `{op.name}` ({op.type}). "
          "Differentiate the values per row; or make the value from what all "
          "towers have, with `towers.all_reduce`.")
    return kind

  def _reduced(self, op: tf.Operation,
               kind: Optional[_Kind]) -> Optional[_Kind]:
    """Returns what a reduction makes of its input of `kind`."""
    if kind is None:
      return None  # It is the axes that are made of rows.
    if not kind.has_rows:
      return kind if op.type in ("Sum", "Mean") else None
    if not _reduces_first_axis(op):
      return kind if op.type in ("Sum", "Mean") or not kind.is_mean else None
    if op.type == "Sum":
      return _Kind(False, kind.is_mean)
    if op.type == "Mean" and not kind.is_mean:
      return _Kind(False, True)
    return None

  def _scaled(self, x: tf.Tensor, factor: tf.Tensor, y: tf.Tensor,
              divisor: Callable[[float], float]) -> Optional[_Kind]:
    """Returns what `x` is, divided by `divisor` of `factor`."""
    kind = self._kind_of_rows(x, y)
    counts = self._counts_rows(factor, x, divisor)
    if counts is None:
      return None
    if not counts:
      return kind
    return None if kind.is_mean else _Kind(kind.has_rows, True)

  def _counts_rows(self, factor: tf.Tensor, x: tf.Tensor,
                   divisor: Callable[[float], float]) -> Optional[bool]:
    """Says whether `factor` is made of the number of rows; None: who knows."""
    if self._uses(factor, shapes=True):
      return True
    if factor.op.type != "Const":
      # A size that is known while building, and what is computed from it.
      return _is_constant(factor)
    value = tf.get_static_value(factor)
    if self._count is None or np.ndim(value) or not value:
      return False
    number = abs(divisor(value))
    if number < 0.5 or abs(number / self._count -
                           np.round(number / self._count)) > 1e-6:
      return False
    # Half a sum, or the mean of two? Only a number as it stands can be either.
    is_size = x.op.type == "Sum" and np.round(number) in (
        self._count, x.op.inputs[0].shape.num_elements())
    return None if is_size else False

  def _uses(self, x: tf.Tensor, shapes: bool = False) -> bool:
    """Says whether `x` depends on the rows; or, with `shapes`, their number."""
    pending, seen = [x.op], set()
    while pending:
      op = pending.pop()
      if op in seen:
        continue
      seen.add(op)
      if op in self._inputs:
        return True
      # What towers have met in is the same in all.
      if op.name.startswith(self._merged) or op.type in _CONSTANTS or (
          op.type in _OF_SHAPES and not shapes):
        continue
      sources = [v.op for v in op.inputs
                 if not v.op.name.startswith(self._merged)]
      if op.name.startswith(self._tower.name_scope) and (
          not op.inputs or op.type == "PlaceholderWithDefault" and sources or
          op.type.startswith(_RANDOM)):
        return True
      pending.extend(sources)
    return False


def _reduces_first_axis(op: tf.Operation) -> bool:
  rank = op.inputs[0].shape.rank
  axes = tf.get_static_value(op.inputs[1])
  if op.outputs[0].shape.rank == 0 or axes is None or rank is None:
    return True
  return 0 in [axis % rank for axis in np.ravel(axes)]


def _is_constant(x: tf.Tensor) -> bool:
  return all(op.type == "Const" or op.inputs for op in _ancestors(x))


def _ancestors(x: tf.Tensor) -> Iterator[tf.Operation]:
  pending: List[tf.Operation] = [x.op]
  seen = set()
  while pending:
    op = pending.pop()
    if op not in seen:
      seen.add(op)
      yield op
      pending.extend(source.op for source in op.inputs)
