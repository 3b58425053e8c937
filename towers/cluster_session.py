"""Sessions of a cluster's workers: opened when all that they need is up.

`tf.train.MonitoredTrainingSession` waits without a word for whoever is missing,
and a worker of it looks only every 30 seconds whether the chief has initialised
the variables. What happens after is TensorFlow's: where a task dies and comes
back, `tf.train.MonitoredSession` makes a new session, and the chief restores
the last checkpoint.
"""

import contextlib
import functools
import sys
from typing import Callable, Iterator, Optional

import tensorflow.compat.v1 as tf

from towers import cluster_network
from towers import cluster_spec


# How long to wait for a session to close.
_CLOSE_SECONDS = 10.0


class ChiefCreator(tf.train.SessionCreator):
  """Waits, then initialises the variables or restores them."""

  def __init__(self, prepare: Callable[[], cluster_network.Watch],
               scaffold: tf.train.Scaffold, *, target: str,
               config: tf.ConfigProto, checkpoint_dir: Optional[str]):
    """Makes the creator.

    Args:
      prepare: Waits for the other tasks, and tells them what they must know;
        returns who must stay up.
      scaffold: The scaffold.
      target: The server of this process.
      config: For the session.
      checkpoint_dir: Where to restore from; None for nowhere.
    """
    self._prepare = prepare
    self._creator = tf.train.ChiefSessionCreator(
        scaffold, master=target, config=config, checkpoint_dir=checkpoint_dir)

  def create_session(self) -> tf.Session:
    """Returns a session, as `tf.train.MonitoredSession` asks for one."""
    return _watched(self._creator.create_session, self._prepare())


class WorkerCreator(tf.train.SessionCreator):
  """Waits for the servers, and for the chief to initialise the variables."""

  def __init__(self, prepare: Callable[[], cluster_network.Watch],
               scaffold: tf.train.Scaffold, *, target: str,
               config: tf.ConfigProto, chief: cluster_spec.Task,
               time_limit: float):
    """Makes the creator.

    Args:
      prepare: Waits for the servers and the chief's notice, and checks it;
        returns who must stay up.
      scaffold: The scaffold.
      target: The server of this process.
      config: For the session.
      chief: Whom to name if the variables are not initialised in time.
      time_limit: For how many seconds to wait for that.
    """
    self._prepare = prepare
    self._scaffold, self._target, self._config = scaffold, target, config
    self._chief, self._time_limit = chief, time_limit

  def create_session(self) -> tf.Session:
    """Returns a session, as `tf.train.MonitoredSession` asks for one.

    Raises:
      towers.cluster.ClusterError: If the chief does not initialise variables.
    """
    watch = self._prepare()
    scaffold = self._scaffold.finalize()
    manager = tf.train.SessionManager(
        local_init_op=scaffold.local_init_op,
        local_init_feed_dict=scaffold.local_init_feed_dict,
        ready_op=scaffold.ready_op,
        ready_for_local_init_op=scaffold.ready_for_local_init_op,
        graph=tf.get_default_graph(), recovery_wait_secs=0.5)
    try:
      return _watched(functools.partial(
          manager.wait_for_session, self._target, config=self._config,
          max_wait_secs=self._time_limit), watch)
    except tf.errors.DeadlineExceededError as error:
      why = cluster_network.fault(self._chief) or "it is up"
      raise cluster_network.ClusterError(
          "`time_limit` must suffice for the others: waited "
          f"{self._time_limit:.0f} s for {self._chief} to initialise the "
          f"variables ({why}). See its log, or give it more time.") from error


def _watched(create: Callable[[], tf.Session],
             watch: cluster_network.Watch) -> tf.Session:
  """Creates a session; TensorFlow waits for who dies meanwhile without end."""
  graph = tf.get_default_graph()

  def in_graph() -> tf.Session:
    with graph.as_default():
      return create()

  session = cluster_network.watched(in_graph, watch)
  session.close = _closing(session.close)
  return session


def _closing(close: Callable[[], None]) -> Callable[[], None]:
  """Returns what closes a session, without a wait that does not end.

  TensorFlow's own waits so where the network is down.
  """
  left = [close]

  def close_once() -> None:
    # Sessions close once more when Python deletes them, which may be at its
    # end, when no thread starts any more.
    if left and not sys.is_finalizing():
      with contextlib.suppress(cluster_network.Overdue):
        cluster_network.watched(
            left.pop(), cluster_network.Watch([], 0.0), _CLOSE_SECONDS)

  return close_once


@contextlib.contextmanager
def explained(members: cluster_spec.Members,
              time_limit: float) -> Iterator[None]:
  """Names the tasks where a run of a session took too long.

  Raises:
    towers.cluster.ClusterError: If one did.
  """
  try:
    yield
  except tf.errors.DeadlineExceededError as error:
    states = map(cluster_network.state, members.others())
    raise cluster_network.ClusterError(
        "`time_limit` must suffice for each run of a session: one took more "
        f"than {time_limit:.0f} s; {', '.join(states)}. Start what is "
        "missing, see its log, or give it more time.") from error


def saver_hook(scaffold: tf.train.Scaffold, checkpoint_dir: Optional[str],
               save_checkpoint_steps: Optional[int]) -> list:
  """Returns the hooks that save checkpoints; for the chief."""
  if checkpoint_dir is None or save_checkpoint_steps is None:
    return []
  return [tf.train.CheckpointSaverHook(
      checkpoint_dir, save_steps=save_checkpoint_steps, scaffold=scaffold)]
