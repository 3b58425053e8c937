"""Finds what the moving statistics of batch norm layers are statistics of.

An update op changes a moving mean or variance by what its layer has computed
over the batch, whatever library the layer is from. From there the way leads
back to the ops that reduce the rows of each tower, and so to the input of the
layer in each tower.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import lockstep
from towers import tower as tower_lib
from towers import updates

_SUBTRACTIONS = ("AssignSubVariableOp", "AssignSub")
_ADDITIONS = ("AssignAddVariableOp", "AssignAdd")
_ASSIGNMENTS = ("AssignVariableOp", "Assign") + _SUBTRACTIONS + _ADDITIONS
_FUSED = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
_READS = ("ReadVariableOp", "ResourceGather")
# What hangs on no value of the batch.
_ENDS = ("Const", "Placeholder", "Shape", "ShapeN", "Size", "Rank",
         "VarHandleOp", "VariableV2")
_SQUARES = ("SquaredDifference", "Square")
_RESULTS = "_towers_results"
# The way is short; longer, it has missed what it looks for.
_MOST_OPS = 2000


class Source(NamedTuple):
  """What statistics are of: the input of a layer.

  Fields:
    inputs: Tensor of each tower.
    axes: The axes that are reduced.
  """
  inputs: Tuple[tf.Tensor, ...]
  axes: Tuple[int, ...]


class Statistic(NamedTuple):
  """A moving statistic, and how it moves.

  Fields:
    variable: It.
    source: What it is a statistic of.
    reads: The tensors by which its update reads it.
    batch_value: What the update lets it move towards, where `reads` are fed
      zeros: the statistic of the batch, as the layer has it.
  """
  variable: Any
  source: Source
  reads: Tuple[tf.Tensor, ...]
  batch_value: tf.Tensor

  @property
  def name(self) -> str:
    return self.variable.op.name


def find(towers: Sequence[tower_lib.Tower], update_ops: Sequence[tf.Operation],
         variables: Sequence[Any]) -> List[Statistic]:
  """Returns the moving statistics that `update_ops` change.

  Other variables, such as counters, are left out.

  Args:
    towers: The towers of a build.
    update_ops: Its update ops.
    variables: The variables that the towers made or used.

  Raises:
    ValueError: If there is no telling how the moving statistic of a layer
      moves. The message names it.
  """
  by_op = {v.handle.op: v for v in variables if hasattr(v, "handle")}
  changes: Dict[tf.Operation, List[tf.Operation]] = {}
  for op in updates.ancestors(update_ops):
    if op.type in _ASSIGNMENTS:
      changes.setdefault(lockstep.variable_op(op.inputs[0]), []).append(op)
  found = []
  for op, variable in by_op.items():  # In the order of the layers.
    if op in changes and not variable.trainable and (
        variable.dtype.base_dtype.is_floating and variable.shape.rank):
      statistic = _statistic(towers, variable, changes[op])
      if statistic is not None:
        found.append(statistic)
  return found


def _statistic(towers: Sequence[tower_lib.Tower], variable: Any,
               changes: Sequence[tf.Operation]) -> Optional[Statistic]:
  """Returns the statistic that `changes` move; None if they move another."""
  ways = [_Way(towers, variable, change) for change in changes]
  if not any(way.found for way in ways):
    return None
  source = ways[0].source()
  fault = None
  if len(changes) > 1:
    fault = f"{len(changes)} updates in a step"
  elif source is None:
    fault = "an update by something else than the moments of all towers"
  elif any(any(_tensorflow.control_flow_of(op)) for op in (
      changes[0], *[x.op for x in source.inputs])):
    fault = "an update inside a `tf.cond`"
  if fault is not None or source is None:
    raise ValueError(
        f"`{variable.op.name}` must move by the moments of its layer's input, "
        f"once a step: got {fault} (`{changes[0].name}`). Put the layer "
        "outside of that, or leave its moving statistics as training made "
        "them.")
  value = _batch_value(changes[0], ways[0].reads)
  return Statistic(variable, source, tuple(ways[0].reads), value)


class _Way:
  """The way back from a change of a moving statistic.

  Attributes:
    found: For each tower (by index), what its ops reduce: inputs and axes.
    reads: The tensors by which the change reads the statistic, outside of
      conditionals.
  """

  def __init__(self, towers: Sequence[tower_lib.Tower], variable: Any,
               change: tf.Operation):
    self._towers = towers
    self._variable = variable.handle.op
    self.found: Dict[int, Set[Tuple[tf.Tensor, Tuple[int, ...]]]] = {}
    self.reads: List[tf.Tensor] = []
    self._complete = True
    self._walk(change.inputs[1])

  def source(self) -> Optional[Source]:
    """Returns the input of the layer, if there is one and the same."""
    if not self._complete or len(self.found) != len(self._towers) or any(
        len(found) != 1 for found in self.found.values()):
      return None
    pairs = [next(iter(self.found[t.index])) for t in self._towers]
    axes = {own for _, own in pairs}
    if len(axes) > 1:
      return None
    return Source(tuple(x.deref() for x, _ in pairs), axes.pop())

  def _walk(self, start: tf.Tensor) -> None:
    pending, seen = [start], set()
    while pending:
      x = pending.pop()
      if (x.op, x.value_index) in seen:
        continue
      seen.add((x.op, x.value_index))
      if len(seen) > _MOST_OPS:
        self._complete = False
        return
      pending.extend(self._before(x))

  def _before(self, x: tf.Tensor) -> List[tf.Tensor]:
    """Returns what the way to `x` leads back to."""
    op = x.op
    if op.type in _READS:
      if (lockstep.variable_op(op.inputs[0]) is self._variable and
          not any(_tensorflow.control_flow_of(op))):
        self.reads.append(x)
      return []
    if op.type in _ENDS:
      return []
    if op.type in _FUSED:
      if op.get_attr("is_training"):
        layout = op.get_attr("data_format").decode()
        self._note(op, op.inputs[0],
                   [k for k, axis in enumerate(layout) if axis != "C"])
        return []
      # In inference, it passes on the statistics that it was given.
      return [op.inputs[x.value_index + 2]] if x.value_index in (1, 2) else []
    if op.type in ("Mean", "Sum") and self._tower_of(op) is not None:
      axes = tf.get_static_value(op.inputs[1])
      reduced = op.inputs[0]
      if axes is not None and reduced.shape.rank and not _from_merge(reduced):
        rank = reduced.shape.rank
        axes = sorted({a % rank for a in np.reshape(axes, [-1]).tolist()})
        if 0 in axes and len(axes) == rank - 1:
          self._note(op, reduced, axes)
          return []
    if op.type == "IdentityN" and _is_merge(op):
      return [op.inputs[x.value_index]]
    if op.type in ("Switch", "RefSwitch"):
      return [op.inputs[0]]
    return [y for y in op.inputs if y.dtype != tf.resource]

  def _note(self, op: tf.Operation, x: tf.Tensor, axes: Sequence[int]) -> None:
    tower = self._tower_of(op)
    while x.op.type in _SQUARES or x.op.type == "Switch" or (
        x.op.type == "Identity" and any(_tensorflow.control_flow_of(x.op))):
      x = x.op.inputs[0]
    if tower is None:
      self._complete = False
    else:
      self.found.setdefault(tower, set()).add((x.ref(), tuple(axes)))

  def _tower_of(self, op: tf.Operation) -> Optional[int]:
    for tower in self._towers:
      if op.name.startswith(tower.name_scope):
        return tower.index
    return None


def _is_merge(op: tf.Operation) -> bool:
  return _RESULTS in op.node_def.attr


def _from_merge(x: tf.Tensor) -> bool:
  """Says whether `x` is the statistic over all towers, in an op's place."""
  op = x.op
  while op.type in ("Cast", "Identity", "PlaceholderWithDefault", "Switch"):
    op = op.inputs[0].op
  return op.type == "IdentityN" and _is_merge(op)


def _batch_value(change: tf.Operation, reads: Sequence[tf.Tensor]) -> tf.Tensor:
  """Returns what the change moves the statistic towards.

  With `m` the statistic, `r` the rate and `v` what it moves towards, the change
  is `m -= r * (m - v)` or the like: linear in `m`, with a slope that tells `r`.
  Where `m` is fed 0, `v` is what remains.
  """
  value = start = change.inputs[1]
  while start.op.type in ("StopGradient", "PlaceholderWithDefault", "Identity"):
    start = start.op.inputs[0]
  slopes = tf.gradients(start, list(reads)) if reads else []
  slopes = [tf.convert_to_tensor(s) for s in slopes if s is not None]
  slope = tf.add_n(slopes) if slopes else tf.zeros([], value.dtype)
  if change.type in _SUBTRACTIONS + _ADDITIONS:
    return -value / slope
  return value / (1.0 - slope)
