"""Which update ops run in a step, and what they wait for.

What a model changes beside its trained variables (moving statistics, counters)
it puts into `tf.GraphKeys.UPDATE_OPS`. A step must make these changes once, all
or none: none before every tower has its inputs, and none that a branch not
taken can turn into a step that silently does nothing.
"""

import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence
from typing import Set, Tuple

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import lockstep as lockstep_lib
from towers import tower as tower_lib

# Ops that give each tower the next part of the data, or fail at its end.
_SOURCES = frozenset([
    "IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional",
    "MultiDeviceIteratorGetNextFromShard", "QueueDequeueV2",
    "OptionalGetValue", "DatasetToSingleElement", "QueueDequeueV2",
    "QueueDequeueManyV2", "QueueDequeueUpToV2", "ReaderReadV2",
    "ReaderReadUpToV2", "Unstage",
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
_MORE_CHANGES = re.compile("|".join([
    "(Resource)?(Sparse)?Apply[A-Z]",
    "(Resource)?Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)$",
    "LookupTable(Insert|Import)",
    "QueueEnqueue",
]))
# Ops of v2 control flow, whose bodies may change the variables they are given.
_CALLS = frozenset(
    ["If", "While", "Case", "StatefulPartitionedCall", "PartitionedCall"])


class Updates(NamedTuple):
  """The update ops of a step.

  Fields:
    ops: They, each once.
    inputs_ready: What whatever changes variables in a step must wait for.
    made: The ops that the towers added to the graph.
  """
  ops: Sequence[tf.Operation]
  inputs_ready: Sequence[tf.Operation]
  made: Set[tf.Operation]

  def before(self) -> List[tf.Operation]:
    """Returns what the variables wait for in a step.

    Also what no update and no row has a part in waits for the data: if they are
    at their end, no variable moves.
    """
    return list(self.ops) + list(self.inputs_ready)

  def only(self, ops: Optional[Sequence[Any]]) -> "Updates":
    """Returns the same with the update ops that the caller chose.

    Raises:
      TypeError: If `ops` is no sequence.
      ValueError: If one of `ops` is no update op of the graph.
    """
    if ops is None:
      return self
    if not isinstance(ops, (list, tuple)):
      raise TypeError(
          "`update_ops` must be a list of ops from `graph.update_ops`: got "
          f"{ops!r}.")
    chosen_ops = []
    for op in ops:
      if op not in self.ops:
        raise ValueError(
            "`update_ops` must be ops from `graph.update_ops`: got "
            f"{getattr(op, 'name', op)!r}, expected some of "
            f"{[known.name for known in self.ops]}.")
      chosen_ops.append(op)
    return self._replace(ops=chosen_ops)


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


def of_tower(tower: tower_lib.Tower, assignments: Sequence[tf.Operation],
             made: Set[tf.Operation]) -> Tuple[Any, ...]:
  """Returns the update ops of one tower.

  They are what it put into `UPDATE_OPS`, and the `assignments` of its batch
  norm layers that no op in there runs.

  Args:
    tower: The tower.
    assignments: Ops that change moving statistics.
    made: The ops that the towers added to the graph.
  """
  collected = tower.collection(tf.GraphKeys.UPDATE_OPS)
  if not assignments:
    return tuple(collected)
  run = ancestors([_op(item) for item in collected], made)
  return tuple(collected) + tuple(op for op in assignments if op not in run)


def chosen(towers: Sequence[tower_lib.Tower], update_ops: str,
           duplicates: Set[tf.Operation],
           made: Set[tf.Operation]) -> List[tf.Operation]:
  """Returns the update ops that run in a step, each once.

  Ops inside a `tf.cond` are lifted: what stands for them here runs them if
  their branch is taken, and runs itself either way.

  Args:
    towers: The towers.
    update_ops: The policy.
    duplicates: Ops that change what tower 0's counterpart changes already.
    made: The ops that the towers added to the graph.

  Raises:
    ValueError: If an update op stands inside a while loop, or a function.
  """
  taken = towers[:1] if update_ops == "first" else towers
  ops: Dict[tf.Operation, tower_lib.Tower] = {}
  for tower in taken:
    for item in tower.update_ops:
      op = _op(item)
      if tower.index == 0 or not _only_repeats(op, duplicates, made):
        ops.setdefault(op, tower)
  return [_alive(op, tower) for op, tower in ops.items()]


def _only_repeats(op: tf.Operation, duplicates: Set[tf.Operation],
                  made: Set[tf.Operation]) -> bool:
  """Says whether all that `op` changes is changed by tower 0 as well."""
  if not duplicates:
    return False
  found = [x for x in ancestors([op], made) if changes(x)]
  return bool(found) and duplicates.issuperset(found)


def changes(op: tf.Operation) -> bool:
  """Says whether `op` changes a variable, or other state."""
  return op.type in _CHANGES or bool(_MORE_CHANGES.match(op.type))


def _may_change(op: tf.Operation) -> bool:
  return changes(op) or op.type in _CALLS and any(
      _tensorflow.is_reference(x) for x in op.inputs)


def changes_in(towers: Sequence[tower_lib.Tower],
               made: Iterable[tf.Operation]) -> List[tf.Operation]:
  """Returns the ops in the scopes of `towers` that change state."""
  scopes = tuple(tower.name_scope for tower in towers)
  return [op for op in made if changes(op) and op.name.startswith(scopes)]


def _op(item: Any) -> tf.Operation:
  if isinstance(item, tf.Operation):
    return item
  return item.op


def _alive(op: tf.Operation, tower: tower_lib.Tower) -> tf.Operation:
  if not _tensorflow.is_plain_graph(op.graph):
    raise ValueError(
        "`UPDATE_OPS` must not hold ops from inside a function or a branch of "
        f"v2 control flow, got `{op.name}` (tower {tower.index}). Call "
        "`tf.disable_control_flow_v2()` before the model is built, or return "
        "the value from there and assign it outside.")
  branches, loops = _tensorflow.control_flow_of(op)
  if loops:
    raise ValueError(
        f"`UPDATE_OPS` must not hold ops from inside a while loop, got "
        f"`{op.name}` (tower {tower.index}) from `{loops[0]}`, which nothing "
        "outside the loop can wait for. Return the value from the loop and "
        "assign it outside.")
  return _tensorflow.lift_out_of_conditionals(op) if branches else op


def gate(made: Set[tf.Operation], input_ops: Iterable[tf.Operation],
         update_ops: Sequence[tf.Operation]) -> List[tf.Operation]:
  """Lets no update start before every tower has all its inputs.

  Without it, a step that fails for want of data in one tower may already have
  moved what another tower updates.

  Args:
    made: The ops that the towers added to the graph.
    input_ops: The ops that hold the towers' inputs.
    update_ops: What `chosen` returned. Of the ops that they need, those that
      change variables are made to wait.

  Returns:
    The ops that whatever else changes variables in a step must wait for.
  """
  sources = {op for op in made if op.type in _SOURCES}
  sources.update(input_ops)
  sources = {op for op in sources if not _in_control_flow(op)}
  if not sources:
    return []
  needed = ancestors(update_ops, made)
  changing = {
      start for op in needed if _may_change(op)
      for start in _tensorflow.starts_of(op)
  }
  # What the inputs themselves need cannot wait for them.
  before = ancestors(sources, made)
  with tf.control_dependencies(None):
    with tf.control_dependencies(list(sources)):
      ready = tf.no_op(name="inputs_ready")
  for op in changing - before:
    _tensorflow.add_control_inputs(op, [ready])
  return [ready]


class Undo:
  """Puts back what update ops have changed.

  The variables that they change are read before; each change waits for that.
  """

  def __init__(self, updates: Updates):
    self._saved: Dict[tf.Operation, tf.Tensor] = {}
    for change in ancestors(updates.ops, updates.made):
      if not _may_change(change):
        continue
      for variable in _changed_by(change):
        if variable not in self._saved:
          self._saved[variable] = _tensorflow.value_now(variable)
        for start in _tensorflow.starts_of(change):
          _tensorflow.add_control_inputs(start, [self._saved[variable].op])

  def put_back(self) -> tf.Operation:
    """Returns the op that does it, after the update ops."""
    return tf.group(*[
        _tensorflow.assign_value(variable, value)
        for variable, value in self._saved.items()
    ])


def _changed_by(change: tf.Operation) -> List[tf.Operation]:
  """Returns the ops of the variables that `change` changes.

  Raises:
    ValueError: If it changes something else than variables.
  """
  handles = [x for x in change.inputs if _tensorflow.is_reference(x)]
  variables = [lockstep_lib.variable_op(x) for x in handles]
  if not variables or any(
      v.type not in ("VarHandleOp", "VariableV2", "Variable")
      for v in variables):
    raise ValueError(
        "`UPDATE_OPS` must change variables only, where a step may be skipped "
        f"and undone: got `{change.name}` ({change.type}), whose change cannot "
        "be put back. Leave it out of `update_ops`, or train without "
        "`skip_nonfinite` and a dynamic loss scale.")
  return variables


def _in_control_flow(op: tf.Operation) -> bool:
  branches, loops = _tensorflow.control_flow_of(op)
  return bool(branches or loops)


def ancestors(ops: Iterable[tf.Operation],
              within: Optional[Set[tf.Operation]] = None) -> Set[tf.Operation]:
  """Returns `ops` and all that they need, as far as it lies in `within`."""
  found, pending = set(), list(ops)
  while pending:
    op = pending.pop()
    if op in found:
      continue
    found.add(op)
    sources = [x.op for x in op.inputs] + list(op.control_inputs)
    pending.extend(
        source for source in sources if within is None or source in within)
  return found
