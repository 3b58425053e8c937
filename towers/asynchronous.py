"""Towers that train without waiting for each other.

Each tower has a train op of its own, which applies that tower's gradient to the
shared variables whenever it is ready. What it was computed from may be older
than what it is applied to, so the result is not that of one device.
"""

import functools
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import build as build_lib
from towers import gradients
from towers import replicas
from towers import tower as tower_lib
from towers import train_step
from towers import updates as updates_lib


class AsyncTraining:
  """The train ops of towers that do not wait for each other.

  Attributes:
    train_ops: Tuple of ops, one per tower.
  """

  def __init__(self, train_ops: Sequence[tf.Operation]):
    self.train_ops = tuple(train_ops)

  def run(self, session: tf.Session, *, steps: Optional[int] = None,
          stop: Optional[Callable[[], bool]] = None) -> int:
    """Runs each train op in a thread of its own, again and again.

    Ends when `steps` steps were made, `stop` says so, or the data of a tower
    ends; then each thread completes the step that it is in.

    Args:
      session: The session, from which several threads may run at once; any
        `tf.Session` is one.
      steps: How many steps to make, of all towers together. None for no limit.
      stop: Called before each step, from any thread; returns whether to end.

    Returns:
      How many steps were made.

    Raises:
      ValueError: If neither `steps` nor `stop` is given, or `steps` is negative
        or no number.
      Exception: What the first tower to fail raised, once all have ended.
    """
    if steps is None and stop is None:
      raise ValueError(
          "`steps` or `stop` must say when to end: got "
          f"`steps={steps}` and `stop={stop}`.")
    if steps is not None and (isinstance(steps, bool) or
                              not isinstance(steps, int) or steps < 0):
      raise ValueError("`steps` must be a number of steps: expected 0 or more, "
                       f"got {steps!r}.")
    counter = _Counter(steps)
    coordinator = tf.train.Coordinator()

    def work(train_op: tf.Operation) -> None:
      with coordinator.stop_on_exception():
        while not coordinator.should_stop():
          if stop is not None and stop() or not counter.take():
            coordinator.request_stop()
            return
          session.run(train_op)
          counter.made()

    threads = [
        threading.Thread(target=work, args=[op], daemon=True)
        for op in self.train_ops
    ]
    for thread in threads:
      thread.start()
    try:
      # The coordinator raises the first error again.
      coordinator.join(threads, stop_grace_period_secs=float("inf"))
    except BaseException:
      coordinator.request_stop()
      for thread in threads:
        thread.join()
      raise
    return counter.steps_made


class _Counter:
  """Counts the steps of several threads."""

  def __init__(self, limit: Optional[int]):
    self._limit = limit
    self._taken = 0
    self._lock = threading.Lock()
    self.steps_made = 0

  def take(self) -> bool:
    """Says whether there is a step to make, and takes it."""
    with self._lock:
      if self._limit is not None and self._taken >= self._limit:
        return False
      self._taken += 1
      return True

  def made(self) -> None:
    with self._lock:
      self.steps_made += 1


def training(build: build_lib.Build, losses: Sequence[tf.Tensor],
             variables: Sequence[Any], apply: Callable[[Any], tf.Operation], *,
             global_step: Optional[Any], factor: float) -> AsyncTraining:
  """Returns the train ops of all towers.

  Args:
    build: The build.
    losses: The loss of each tower.
    variables: What to train.
    apply: Makes the op that applies pairs of gradients and variables.
    global_step: Variable to add one to in the step of each tower, or None.
    factor: What gradients are multiplied by.

  Raises:
    ValueError: If the towers or their inputs depend on each other, or
      variables have copies.
  """
  _check_independent(build.towers, losses, build.cross_scope)
  if build.borrows and len(build.towers) > 1:
    raise ValueError(
        "`inputs` of each tower must have a size that is known while building "
        "for `minimize_async`: got `towers.PerTower` of unknown sizes, where a "
        "tower without rows would wait for another's. Batch them with "
        "`drop_remainder=True`.")
  if replicas.of_graph(build.graph).has_any(variables):
    raise ValueError(
        "`variables` of `build_towers` must be 'shared' or 'balanced' for "
        "`minimize_async`: got 'replicated', whose copies all change together.")
  train_ops = []
  for tower, loss in zip(build.towers, losses):
    with tf.name_scope(f"train_{tower.index}"):
      with tf.device(tower.device):
        start = tf.constant(factor, loss.dtype)
      # Of the other towers' views, only those have a part in it by which all
      # share what tower 0 has made, such as a regularisation loss.
      pairs = gradients.averaged(
          build.backward, loss, variables, loss_gradient=start)
      step = functools.partial(_step, build, tower, pairs, apply, global_step)
      if isinstance(tower.weight, float):
        train_ops.append(step() if tower.weight else tf.no_op())
      else:  # Without rows, the tower has borrowed one.
        train_ops.append(train_step.run_if(tower.weight > 0, step))
  return AsyncTraining(train_ops)


def _step(build: build_lib.Build, tower: tower_lib.Tower, pairs: Any,
          apply: Callable[[Any], tf.Operation],
          global_step: Optional[Any]) -> tf.Operation:
  """Makes the train op of one tower."""
  updates = _own_updates(tower, build.own_statistics[tower.index],
                         build.updates.inputs_ready)
  with tf.control_dependencies(updates):
    applied = apply(pairs)
  if global_step is None:
    return applied
  with tf.control_dependencies([applied]), tf.device(global_step.device):
    # An optimizer adds without a lock: where towers do so at the same time,
    # one of them is lost.
    return tf.assign_add(global_step, 1, use_locking=True).op


def _check_independent(towers: Sequence[tower_lib.Tower],
                      losses: Sequence[tf.Tensor], cross_scope: str) -> None:
  """Checks that no tower's loss depends on another tower.

  Raises:
    ValueError: If one does.
  """
  for tower, loss in zip(towers, losses):
    for op in updates_lib.ancestors([loss.op]):
      if op.name.startswith(cross_scope) and op.inputs:
        raise ValueError(
            "`minimize_async` must not wait for other towers: the loss of "
            f"tower {tower.index} depends on `{op.name}`, where the towers "
            "meet. Batch norm over the whole batch, and all that merges "
            "towers, needs them all in one step. Build with "
            "`sync_batch_norm=False`, or train with `minimize`.")


def _own_updates(tower: tower_lib.Tower, own_statistics: Dict[str, tf.Tensor],
                inputs_ready: Sequence[tf.Operation]) -> List[tf.Operation]:
  """Returns update ops of one tower that need no other tower.

  Those of a build wait for the inputs of all towers, and take the mean of the
  statistics of all. Here stand copies of them that do neither.

  Args:
    tower: The tower.
    own_statistics: What the tower itself has, in place of means (by name).
    inputs_ready: The ops that wait for the inputs of all towers.

  Raises:
    ValueError: If an update op that needs a copy stands in control flow.
  """
  ready = set(inputs_ready)
  roots = [x if isinstance(x, tf.Operation) else x.op
           for x in tower.update_ops]
  copies: Dict[tf.Operation, Optional[tf.Operation]] = {}

  def own(x: tf.Tensor) -> tf.Tensor:
    if x.name in own_statistics:
      return own_statistics[x.name]
    copy = copies[x.op]
    return x if copy is None else copy.outputs[x.value_index]

  for op in _in_order(roots, ready, own_statistics):
    inputs = [own(x) for x in op.inputs]
    controls = [copies[c] or c for c in op.control_inputs if c not in ready]
    changed = (updates_lib.changes(op) or
               any(a is not b for a, b in zip(inputs, op.inputs)) or
               controls != list(op.control_inputs))
    if changed and any(_tensorflow.control_flow_of(op)):
      raise ValueError(
          "`minimize_async` must run update ops for each tower: got "
          f"`{op.name}` in a conditional or loop (tower {tower.index}). Pass "
          "`training` as True or False.")
    copies[op] = (
        _tensorflow.copy_op(op, inputs, controls) if changed else None)
  return [copies[root] or root for root in roots]


def _in_order(roots: Sequence[tf.Operation], ready: Any,
              own_statistics: Dict[str, tf.Tensor]) -> List[tf.Operation]:
  """Returns what `roots` need, inputs first, up to the means over towers."""
  order: Dict[tf.Operation, None] = {}
  pending: List[Tuple[tf.Operation, bool]] = [(root, False) for root in roots]
  started = set()
  while pending:
    op, complete = pending.pop()
    if complete:
      order[op] = None
    elif op not in started:
      started.add(op)
      pending.append((op, True))
      pending.extend((x.op, False) for x in op.inputs
                     if x.name not in own_statistics)
      pending.extend((c, False) for c in op.control_inputs if c not in ready)
  return list(order)
