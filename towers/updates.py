"""Which update ops run in a step, and what they wait for.

What a model changes beside its trained variables (moving statistics, counters)
it puts into `tf.GraphKeys.UPDATE_OPS`. A step must make these changes once, all
or none: none before every tower has its inputs, and none that a branch not
taken can turn into a step that silently does nothing.
"""

from typing import Any, Iterable, List, Sequence, Set

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import tower as tower_lib

# Ops that give each tower the next part of the data, or fail at its end.
_SOURCES = frozenset([
    "IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional",
    "MultiDeviceIteratorGetNextFromShard", "QueueDequeueV2",
    "QueueDequeueManyV2", "QueueDequeueUpToV2", "ReaderReadV2", "Unstage",
])

# Ops that change a variable.
_CHANGES = frozenset([
    "Assign", "AssignAdd", "AssignSub", "AssignVariableOp",
    "AssignAddVariableOp", "AssignSubVariableOp", "ScatterAdd", "ScatterSub",
    "ScatterUpdate", "ScatterNdUpdate", "ScatterNdAdd", "ScatterNdSub",
    "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate",
    "ResourceScatterMul", "ResourceScatterDiv", "ResourceScatterMin",
    "ResourceScatterMax", "ResourceScatterNdUpdate", "ResourceScatterNdAdd",
    "ResourceScatterNdSub", "ResourceStridedSliceAssign", "StridedSliceAssign",
    "CountUpTo", "ResourceCountUpTo",
])


def policy(update_ops: str) -> str:
  """Returns `update_ops` if it names a policy.

  Raises:
    ValueError: If it does not.
  """
  if update_ops not in ("first", "all"):
    raise ValueError(
        "`update_ops` must say whose update ops run: expected 'first' or "
        f"'all', got {update_ops!r}.")
  return update_ops


def chosen(towers: Sequence[tower_lib.Tower], update_ops: str) -> List[Any]:
  """Returns the update ops that run in a step, each once.

  Ops inside a `tf.cond` are lifted: what stands for them here runs them if
  their branch is taken, and runs itself either way.

  Raises:
    ValueError: If an update op stands inside a while loop.
  """
  taken = towers[:1] if update_ops == "first" else towers
  ops = {}
  for tower in taken:
    for item in tower.update_ops:
      ops.setdefault(_op(item), tower)
  return [_alive(op, tower) for op, tower in ops.items()]


def _op(item: Any) -> tf.Operation:
  if isinstance(item, tf.Operation):
    return item
  return item.op


def _alive(op: tf.Operation, tower: tower_lib.Tower) -> tf.Operation:
  branches, loops = _tensorflow.control_flow_of(op)
  if loops:
    raise ValueError(
        f"`UPDATE_OPS` must not hold ops from inside a while loop, got "
        f"`{op.name}` (tower {tower.index}) from `{loops[0]}`, which nothing "
        "outside the loop can wait for. Return the value from the loop and "
        "assign it outside.")
  return _tensorflow.lift_out_of_conditionals(op) if branches else op


def gate(made: Sequence[tf.Operation], input_ops: Iterable[tf.Operation],
         update_ops: Sequence[tf.Operation]) -> None:
  """Lets no update start before every tower has all its inputs.

  Without it, a step that fails for want of data in one tower may already have
  moved what another tower updates.

  Args:
    made: The ops that the towers added to the graph.
    input_ops: The ops that hold the towers' inputs.
    update_ops: What `chosen` returned. Of the ops that they need, those that
      change variables are made to wait.
  """
  sources = {op for op in made if op.type in _SOURCES}
  sources.update(input_ops)
  sources = {op for op in sources if not _in_control_flow(op)}
  if not sources or not update_ops:
    return
  made = set(made)
  needed = _ancestors(update_ops, made)
  changes = [op for op in needed if op.type in _CHANGES]
  # What the inputs themselves need cannot wait for them.
  before = _ancestors(sources, made)
  changes = [op for op in changes if op not in before]
  if not changes:
    return
  with tf.control_dependencies(None):
    with tf.control_dependencies(list(sources)):
      ready = tf.no_op(name="inputs_ready")
  for op in changes:
    _tensorflow.add_control_inputs(op, [ready])


def _in_control_flow(op: tf.Operation) -> bool:
  branches, loops = _tensorflow.control_flow_of(op)
  return bool(branches or loops)


def _ancestors(ops: Iterable[tf.Operation],
               within: Set[tf.Operation]) -> Set[tf.Operation]:
  """Returns `ops` and all that they need, as far as it lies in `within`."""
  found, pending = set(), list(ops)
  while pending:
    op = pending.pop()
    if op in found:
      continue
    found.add(op)
    pending.extend(
        source for source in [x.op for x in op.inputs] + list(op.control_inputs)
        if source in within)
  return found
