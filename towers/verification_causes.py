"""Finds the layer in which towers first differ from one device, and why.

From a result that differs it goes back to tensors that are still those of one
device: equal in each tower, or its rows. Between the two stands the cause.
"""

import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence
from typing import Set, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers import verification_compare as compare
from towers import verification_rules as rules_lib

_GOOD = (compare.EQUAL, compare.ROWS)
_BAD_ROWS = (compare.OTHER_ROWS, compare.OTHER_SHAPE)

_FUSED_BATCH_NORMS = frozenset(
    ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"])
_NORMALISES = re.compile("moments|batch_?norm", re.IGNORECASE)
_QUOTIENTS = frozenset(["RealDiv", "Div", "DivNoNan", "Xdivy"])
_REDUCTIONS = frozenset([
    "Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "L2Loss", "Cumsum",
    "Cumprod", "EuclideanNorm", "ArgMax", "ArgMin"])
_SUMS = frozenset(["Sum", "L2Loss", "EuclideanNorm"])
_LINEAR = frozenset([
    "Add", "AddV2", "AddN", "Sub", "Mul", "Neg", "Cast", "Identity",
    "Reshape", "Squeeze", "ExpandDims", "Pack"]) | _QUOTIENTS
_POSITIONS = frozenset([
    "Range", "ReverseV2", "Roll", "StridedSlice", "Slice", "Gather", "GatherV2",
    "GatherNd", "LinSpace", "Reverse"])
_PAIRS = frozenset([
    "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"])


class Cause(NamedTuple):
  """Where towers first differ from one device, and why.

  Fields:
    rule: Name of the kind of fault, such as "batch_norm_of_own_rows".
    operation: The operation, by its name on one device; or the variable.
    op_type: Its type, such as "Mean"; "" for a variable.
    layer: The name scope that it stands in, such as "block_1/conv_1".
    order: Where it stands among the operations of the model, from 0.
    why: What it does that one device does not.
    remedy: What to do.
  """
  rule: str
  operation: str
  op_type: str
  layer: str
  order: int
  why: str
  remedy: str

  def __str__(self) -> str:
    kind = f" ({self.op_type})" if self.op_type else ""
    name = f"`{self.operation}`{kind}" if self.operation else "The model"
    return f"{name} {self.why}"


def make(rule: str, operation: str, op_type: str = "", order: int = 0) -> Cause:
  """Returns the cause of that rule at an operation."""
  why, remedy = rules_lib.RULES[rule]
  layer = operation.rpartition("/")[0] or operation
  return Cause(rule, operation, op_type, layer, order, why, remedy)


class Forward(NamedTuple):
  """The model on one device, and what the towers' tensors are to its own.

  Fields:
    scope: The name scope of the model, with a trailing slash.
    order: The place of each operation in the graph.
    relations: By name, the relation of each tensor that has counterparts.
    held: Names of the random tensors that were held equal.
    shuffles: Names of the tensors that towers shuffle for themselves.
    random: The random operations.
    weights: Whether the model gives weights of its own.
  """
  scope: str
  order: Mapping[tf.Operation, int]
  relations: Mapping[str, compare.Relation]
  held: Set[str]
  shuffles: Set[str]
  random: Set[tf.Operation]
  weights: bool

  def kind(self, tensor: tf.Tensor) -> Optional[str]:
    """Returns what the towers' tensors are to `tensor`; None if unknown."""
    found = self.relations.get(tensor.name)
    return None if found is None else found.kind

  def is_good(self, tensor: tf.Tensor) -> bool:
    """Says whether the towers have what one device has."""
    # What stands outside of the model is the same for all, or the batch.
    return self.kind(tensor) in _GOOD or not tensor.op.name.startswith(
        self.scope)

  def cause(self, rule: str, op: tf.Operation) -> Cause:
    """Returns the cause of that rule at `op`."""
    return make(rule, op.name[len(self.scope):], op.type, self.order[op])


def locate(forward: Forward, root: tf.Tensor, *,
           root_relation: Optional[compare.Relation] = None) -> Cause:
  """Returns why towers have something else than `root`.

  Args:
    forward: The model.
    root: The result that differs.
    root_relation: What the towers' results are to it.
  """
  return locate_behind(forward, root) or _of_scalar(
      forward, _region(forward, [root]), root, root_relation)


def locate_behind(forward: Forward, root: tf.Tensor) -> Optional[Cause]:
  """Returns why towers have other rows where `root` comes from.

  Args:
    forward: The model.
    root: A result that may be right, such as where gradients alone differ.

  Returns:
    The cause, or None if no rows are wrong.
  """
  region = _region(forward, [root])
  wrong = [op for op in region if any(
      forward.kind(x) in _BAD_ROWS for x in op.outputs)]
  floats = [op for op in wrong if any(x.dtype.is_floating for x in op.outputs)]
  return _of_rows(forward, (floats or wrong)[0]) if wrong else None


def _region(forward: Forward, roots: Sequence[tf.Tensor]) -> List[tf.Operation]:
  """Returns the ops behind `roots` up to tensors that are right, in order."""
  found: Set[tf.Operation] = set()
  pending = [x.op for x in roots]
  while pending:
    op = pending.pop()
    if op in found or not op.name.startswith(forward.scope):
      continue
    found.add(op)
    pending.extend(x.op for x in op.inputs if not forward.is_good(x))
  return sorted(found, key=forward.order.__getitem__)


def _of_rows(forward: Forward, culprit: tf.Operation) -> Cause:
  """Returns why an operation has other rows in towers."""
  region = _region(forward, culprit.outputs)
  rule, op = _of_region(forward, region)
  if rule is not None:
    return forward.cause(rule, op)
  statistics = [
      op for op in region if op.type in _REDUCTIONS and op is not culprit and
      not any(map(forward.is_good, op.outputs))]
  if statistics:
    return forward.cause("statistic_of_own_rows", statistics[0])
  constants = [op for op in region if op.type == "Const" and
               op.outputs[0].dtype.is_floating]
  if constants and forward.kind(constants[0].outputs[0]) == compare.SUM:
    return forward.cause("batch_size", culprit)
  if constants:
    return forward.cause("tower_dependent", culprit)
  if any(op.type in _POSITIONS - {"StridedSlice"} for op in region) or (
      culprit.type in _POSITIONS):
    return forward.cause("position_in_batch", culprit)
  if any(op.type in ("Shape", "Size", "ShapeN") for op in region):
    return forward.cause("batch_size", culprit)
  crossed = any(
      forward.kind(x) == compare.OTHER_SHAPE for x in culprit.outputs)
  if crossed or culprit.type in _PAIRS:
    return forward.cause("pairs_of_rows", culprit)
  return forward.cause("unknown", culprit)


def _of_region(forward: Forward, region: Sequence[tf.Operation]
              ) -> Tuple[Optional[str], Any]:
  """Returns the rule that the types of ops alone tell, and the op."""
  for op in region:
    names = {x.name for x in op.outputs}
    if names & forward.shuffles:
      return "shuffle_in_tower", op
  for op in region:
    if op in forward.random and not {x.name
                                     for x in op.outputs} & forward.held:
      return "own_random_numbers", op
  for op in region:
    if op.type in _FUSED_BATCH_NORMS and op.get_attr("is_training"):
      return "batch_norm_of_own_rows", op
    if op.type in ("Mean", "Sum") and _over_rows(op) and (
        _NORMALISES.search(op.name[len(forward.scope):])):
      return "batch_norm_of_own_rows", op
  return None, None


def _over_rows(op: tf.Operation) -> bool:
  """Says whether a reduction goes over the leading axis."""
  axes = tf.get_static_value(op.inputs[1])
  rank = op.inputs[0].shape.rank
  return axes is None or rank is None or 0 in [
      axis % rank for axis in np.reshape(axes, [-1]).tolist()]


def _of_scalar(forward: Forward, region: Sequence[tf.Operation],
               root: tf.Tensor,
               relation: Optional[compare.Relation]) -> Cause:
  """Returns why towers have another value that does not belong to rows."""
  rule, op = _of_region(forward, region)
  if rule is not None and op.type not in _REDUCTIONS:
    return forward.cause(rule, op)
  floats = [op for op in region
            if op.outputs and op.outputs[0].dtype.is_floating]
  kinds: Dict[Any, Optional[str]] = {
      op: forward.kind(op.outputs[0]) for op in floats}
  sums = [op for op in floats if kinds[op] == compare.SUM]
  other = [op for op in floats if kinds[op] == compare.OTHER]
  if other:
    return _of_other(forward, other[0], sums)
  kind = forward.kind(root) if relation is None else relation.kind
  if kind == compare.SUM or sums:
    adding = [op for op in sums if op.type in _SUMS] or sums
    return forward.cause("sum_over_rows", (adding or [root.op])[0])
  if kind == compare.MEAN and forward.weights:
    return forward.cause("weight_of_another_mean", root.op)
  if root.op.type in _REDUCTIONS:
    return forward.cause("reduction_over_rows", root.op)
  return forward.cause("unknown", root.op)


def _of_other(forward: Forward, culprit: tf.Operation,
              sums: Sequence[tf.Operation]) -> Cause:
  """Returns why `culprit` is no mean over rows; all before it is."""
  if not culprit.inputs:
    return forward.cause("tower_dependent", culprit)
  inputs = [forward.kind(x) for x in culprit.inputs]
  if culprit.type in _QUOTIENTS and inputs[1] == compare.SUM:
    return forward.cause("mean_without_weight", culprit)
  if culprit.type in _REDUCTIONS and forward.is_good(culprit.inputs[0]):
    if culprit.type == "Mean":  # Over what a mask has left.
      return forward.cause("mean_without_weight", culprit)
    return forward.cause("reduction_over_rows", culprit)
  added = [op for op in sums if op.type in _SUMS]
  if culprit.type in _LINEAR and added and compare.SUM in inputs:
    return forward.cause("sum_over_rows", added[0])
  if culprit.type in _LINEAR and compare.SUM in inputs:
    return forward.cause("batch_size", culprit)
  if compare.MEAN in inputs or compare.SUM in inputs:
    return forward.cause("function_of_batch_statistic", culprit)
  return forward.cause("unknown", culprit)
