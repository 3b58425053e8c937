"""One update of all workers' mean, where each worker has a graph of its own.

Each worker has, on the parameter servers, an accumulator of its own for each
variable. Into it goes the gradient over its rows, times their weight, under the
number of the round that the worker computed it in; TensorFlow's accumulators
drop what belongs to an earlier round. When all workers have sent theirs, the
chief takes the gradients, applies

    sum_w(weight_w * gradient_w) / sum_w(weight_w)

which is the gradient over the rows of all workers. The order of the sum is that
of the workers, so that a run gives the same numbers every time.

The chief begins the next round when it goes on itself. Until then the others
wait, so that none of them ends before the chief has saved the last step: had
that to make some steps once more after a fault, it would be alone.

`tf.train.SyncReplicasOptimizer` is not used, for three reasons: a worker that
dies takes its token along, and all others wait for ever; its mean knows no
weights; and where one worker is slow, another's next gradient may take its
place.

A number of a round is never used twice, also after a restart of the chief or of
a server, when variables go back to the last checkpoint. Neither accumulators
nor rounds are in checkpoints: how many workers there are does not show there.
"""

import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import cluster_network
from towers import cluster_spec
from towers import gradients
from towers import graph as graph_lib
from towers import optimizers
from towers import train_step

# After how many seconds of waiting a worker looks whether training has ended.
_LOOK_SECONDS = 1.0


class _Sent(NamedTuple):
  """The accumulators of one worker.

  Fields:
    gradients: One for each gradient; `tf.ConditionalAccumulator` or
      `tf.SparseConditionalAccumulator`.
    weight: That of the weight of the worker's rows, which is sent last.
  """
  gradients: List[Any]
  weight: Any

  def all(self) -> List[Any]:
    return self.gradients + [self.weight]


class WorkersMean:
  """The ops of synchronous training in the graph of one worker.

  Attributes:
    send: Op that sends the gradient of one batch; the worker's train op.
    update: Op that applies the mean; the chief's.
    next_round: Op that begins the next round; the chief's.
  """

  def __init__(self, graph: graph_lib.TowerGraph,
               optimizer: tf.train.Optimizer, *,
               members: cluster_spec.Members, device: str,
               global_step: Any, loss: Any = None,
               var_list: Optional[Sequence[Any]] = None,
               clip_norm: Any = None):
    """Builds them; see `Cluster.minimize`.

    Args:
      graph: The worker's towers.
      optimizer: The optimizer.
      members: The tasks of the cluster.
      device: The parameter server's device for what belongs to no variable.
      global_step: The variable that counts the rounds in checkpoints.
      loss: See `TowerGraph.minimize`.
      var_list: See `TowerGraph.minimize`.
      clip_norm: See `TowerGraph.minimize`.
    """
    optimizers.check(optimizer)
    build = graph._build  # pylint: disable=protected-access
    clip_norm = train_step.checked(clip_norm, None, 1, False).clip_norm
    variables = build.variables_to_train(var_list)
    self._members = members
    # One gradient goes to the server, not one for each of the worker's towers.
    backward = build.backward._replace(sum_device=members.own.device())
    with graph.graph.as_default():
      pairs = [
          pair for pair in optimizers.compute_gradients(
              optimizer, backward, build.scalar(loss), variables)
          if pair.gradient is not None
      ]
      with tf.name_scope("workers_mean"), tf.device(device):
        self._make_state(members, pairs)
        # Moving statistics are the chief's, from its own rows.
        updates = build.updates.only(
            None if members.own == members.chief else [])
        before = train_step.everything_before(updates, pairs)
        self.send = self._sending(pairs, build.weight(), before)
        mean = self._mean(pairs)
        if clip_norm is not None:
          mean = gradients.clip_by_global_norm(mean, clip_norm)
      self.update = build.applied(optimizer, mean, global_step=global_step,
                                  name_scope=build.name_scope())
      with tf.device(device):
        self.next_round = self._round.assign_add(1, read_value=False)

  def _make_state(self, members: cluster_spec.Members,
                  pairs: Sequence[gradients.GradientAndVariable]) -> None:
    with tf.device(members.own.device()):
      # How often this process has run `send`.
      self.times_sent = tf.Variable(
          0, dtype=tf.int64, name="times_sent", trainable=False,
          use_resource=True, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    self._round = tf.Variable(
        0, dtype=tf.int64, name="round", trainable=False, use_resource=True,
        collections=[])
    self._round_there = tf.raw_ops.VarIsInitializedOp(
        resource=self._round.handle)
    self.round_read = self._round.value()
    self._stamp = tf.placeholder_with_default(
        tf.constant(-1, tf.int64), [], name="stamp")
    self._new_round = tf.placeholder(tf.int64, [], name="new_round")
    self._sent: Dict[cluster_spec.Task, _Sent] = {
        worker: _Sent([_accumulator(pair, worker) for pair in pairs],
                      tf.ConditionalAccumulator(
                          tf.float64, [], shared_name=_name("weight", worker)))
        for worker in members.workers
    }
    everyone = [kept for sent in self._sent.values() for kept in sent.all()]
    self._set_rounds = [
        kept.set_global_step(self._new_round) for kept in everyone]
    self._counts = [kept.num_accumulated() for kept in everyone]
    self._clear = [_taken(kept) for kept in everyone]
    self._set_round = self._round.assign(self._new_round, read_value=False)
    self.weights_sent = [
        sent.weight.num_accumulated() for sent in self._sent.values()]

  def _sending(self, pairs: Sequence[gradients.GradientAndVariable],
               weight: Any, before: Sequence[tf.Operation]) -> tf.Operation:
    """Returns the op that sends gradients, their weight last."""
    checked = tf.debugging.Assert(
        self._stamp >= 0,
        ["`train_op` must run in a session of `Cluster.session`, which says "
         "to which round its gradients belong: got none."])
    weight = tf.cast(weight, tf.float64)
    with tf.control_dependencies([*before, checked]):
      stamp = tf.identity(self._stamp)
      own = self._sent[self._members.own]
      sent = []
      for pair, kept in zip(pairs, own.gradients):
        with tf.device(self._members.own.device()):
          weighted = _ready_to_send(_times(pair.gradient, weight))
        with tf.device(None), tf.device(pair.variable.device):
          sent.append(_send(kept, weighted, stamp))
    with tf.control_dependencies(sent):
      last = own.weight.apply_grad(weight, local_step=stamp)
    with tf.control_dependencies([last]), tf.device(
        self._members.own.device()):
      return self.times_sent.assign_add(1, read_value=False)

  def _mean(self, pairs: Sequence[gradients.GradientAndVariable]
           ) -> List[gradients.GradientAndVariable]:
    """Returns the mean over the workers; takes what they have sent."""
    total = tf.add_n([sent.weight.take_grad(1) for sent in self._sent.values()])
    mean = []
    for number, pair in enumerate(pairs):
      with tf.device(None), tf.device(pair.variable.device):
        added = gradients.add_up([
            _taken(sent.gradients[number]) for sent in self._sent.values()])
        mean.append(gradients.GradientAndVariable(
            _times(added, 1.0 / total), pair.variable))
    return mean

  # --- In a session ---

  def feeds(self, stamp: int) -> Dict[tf.Tensor, int]:
    """Returns what `send` must be fed with in the round `stamp`."""
    return {self._stamp: stamp}

  def begin(self, session: tf.Session) -> int:
    """Begins a round in which nobody has sent anything yet; returns it."""
    before = session.run(self.round_read) if session.run(
        self._round_there) else 0
    # Greater than all before, also than those that lost servers remember.
    stamp = max(int(before) + 1, int(time.time() * 1e6))
    feed = {self._new_round: stamp}
    session.run(self._set_rounds, feed)  # From now on earlier rounds' are late.
    counts = session.run(self._counts)
    session.run([clear for clear, count in zip(self._clear, counts) if count])
    session.run(self._set_rounds, feed)  # Taking has moved them on by one.
    session.run(self._set_round, feed)
    return stamp

  def current(self, session: tf.Session) -> Optional[int]:
    """Returns the round; None before the chief has begun one."""
    if not session.run(self._round_there):
      return None
    return int(session.run(self.round_read)) or None

  def missing(self, session: tf.Session) -> List[cluster_spec.Task]:
    """Returns the workers that have not sent theirs in this round."""
    counts = session.run(self.weights_sent)
    return [worker for worker, count in zip(self._sent, counts) if not count]


def _name(name: str, worker: cluster_spec.Task) -> str:
  return f"towers_sent/{worker.job}_{worker.index}/{name}"


def _accumulator(pair: gradients.GradientAndVariable,
                 worker: cluster_spec.Task) -> Any:
  """Makes what a worker sends a gradient to, beside the variable."""
  make = (tf.SparseConditionalAccumulator if isinstance(
      pair.gradient, tf.IndexedSlices) else tf.ConditionalAccumulator)
  with tf.device(None), tf.device(pair.variable.device):
    return make(pair.variable.dtype.base_dtype, pair.variable.shape,
                shared_name=_name(pair.variable.op.name, worker))


def _times(gradient: Any, factor: tf.Tensor) -> Any:
  return gradients.with_values(
      gradient, lambda values: values * tf.cast(factor, values.dtype))


def _ready_to_send(gradient: Any) -> Any:
  """Returns a gradient as an accumulator wants it.

  A worker that was restarted in a round sends twice in it, of which the
  accumulator takes the mean; it wants each row once and in order for that.
  """
  if not isinstance(gradient, tf.IndexedSlices):
    return gradient
  order = tf.argsort(gradient.indices)
  gradient = gradients.rows_once(tf.IndexedSlices(
      tf.gather(gradient.values, order), tf.gather(gradient.indices, order),
      gradient.dense_shape))
  return tf.IndexedSlices(
      gradient.values, tf.cast(gradient.indices, tf.int64),
      None if gradient.dense_shape is None else tf.cast(
          gradient.dense_shape, tf.int64))


def _send(kept: Any, gradient: Any, stamp: tf.Tensor) -> tf.Operation:
  if isinstance(gradient, tf.IndexedSlices):
    return kept.apply_indexed_slices_grad(gradient, local_step=stamp)
  return kept.apply_grad(gradient, local_step=stamp)


def _taken(kept: Any) -> Any:
  if isinstance(kept, tf.SparseConditionalAccumulator):
    return kept.take_indexed_slices_grad(1)
  return kept.take_grad(1)


class SyncHook(tf.train.SessionRunHook):
  """Keeps the rounds of synchronous training, for `Cluster.session`."""

  def __init__(self, mean: WorkersMean, members: cluster_spec.Members,
               has_ended: Callable[[], bool], *, time_limit: float):
    """Makes the hook.

    Args:
      mean: The ops.
      members: The tasks.
      has_ended: Returns whether the chief has ended training.
      time_limit: For how many seconds to wait for another task.
    """
    self._mean, self._members = mean, members
    self._has_ended, self._time_limit = has_ended, time_limit
    self._stamp: Any = -1
    self._times_sent = 0
    self._has_updated = False

  def after_create_session(self, session: tf.Session, coord: Any) -> None:
    del coord
    if self._members.own == self._members.chief:
      self._stamp = self._mean.begin(session)
      self._has_updated = False
    else:
      found: List[Optional[int]] = [None]

      def has_begun() -> bool:
        found[0] = self._mean.current(session)
        return found[0] is not None

      cluster_network.wait_until(has_begun, self._time_limit,
                                 self._chief_missing)
      self._stamp = found[0]
    self._times_sent = session.run(self._mean.times_sent)

  def before_run(self, run_context: Any) -> tf.train.SessionRunArgs:
    if self._has_updated:
      run_context.session.run(self._mean.next_round)
      self._has_updated = False
      self._stamp += 1
    return tf.train.SessionRunArgs(None, self._mean.feeds(self._stamp))

  def after_run(self, run_context: Any, run_values: Any) -> None:
    session = run_context.session
    times_sent = session.run(self._mean.times_sent)
    if times_sent == self._times_sent:
      return  # This run was for something else.
    self._times_sent = times_sent
    if self._members.own == self._members.chief:
      self._update(session)
    elif not self._next_round(session):
      run_context.request_stop()

  def _update(self, session: tf.Session) -> None:
    cluster_network.wait_until(
        lambda: not self._mean.missing(session), self._time_limit,
        lambda: self._workers_missing(session))
    session.run(self._mean.update)
    self._has_updated = True

  def _next_round(self, session: tf.Session) -> bool:
    """Waits for the next round; returns whether there is one.

    The chief may take its time, say for a test, as long as it is up.
    """
    watch = cluster_network.Watch([self._members.chief], self._time_limit)
    looked, pause = time.monotonic(), cluster_network.FIRST_PAUSE
    while True:
      stamp = self._mean.current(session)
      if stamp not in (None, self._stamp):
        self._stamp = stamp
        return True
      if time.monotonic() - looked > _LOOK_SECONDS:
        if self._has_ended():
          return False
        looked = time.monotonic()
      watch.check()
      pause = cluster_network.paused(pause)

  def _chief_missing(self) -> str:
    return f"the chief to go on: {cluster_network.state(self._members.chief)}"

  def _workers_missing(self, session: tf.Session) -> str:
    states = map(cluster_network.state, self._mean.missing(session))
    return f"gradients of {', '.join(states)}"
