"""Who tells whom what in a cluster, and when.

The chief tells that training begins, with its facts, whenever it makes a
session, and when it is done. It tells the tasks that only serve, which wait for
that; other workers read it from the first parameter server.
"""

import contextlib
import time
from typing import Any, Callable, Iterator, List, Mapping, Sequence, Tuple

from absl import logging
import tensorflow.compat.v1 as tf

from towers import cluster_facts
from towers import cluster_network
from towers import cluster_notice
from towers import cluster_spec

_POLL_SECONDS = 0.2

# How long a server waits for the other workers when the chief has ended.
_GRACE_SECONDS = 30.0

# What a board says whose task is being started again, or is stopped.
_PASSING = (tf.errors.UnavailableError, tf.errors.AbortedError,
            tf.errors.DeadlineExceededError, cluster_network.Overdue)

# How long a board may take, with a new session for it, before it is asked anew.
_ANSWER_SECONDS = 12.0


class Talk:
  """What one task says and hears."""

  def __init__(self, members: cluster_spec.Members,
               told: Sequence[cluster_spec.Task], *, target: str,
               time_limit: float):
    """Makes the connection; says nothing yet.

    Args:
      members: The tasks.
      told: Those that the chief tells what it does.
      target: The server of this process.
      time_limit: For how many seconds to wait for another task.
    """
    self._members, self._told = members, list(told)
    self._target, self._time_limit = target, time_limit

  @contextlib.contextmanager
  def _board(self, task: cluster_spec.Task) -> Iterator[cluster_notice.Board]:
    board = cluster_notice.Board(task, self._target, self._members.workers)
    try:
      yield board
    finally:
      board.close()

  def _at_board(self, task: cluster_spec.Task,
                action: Callable[[cluster_notice.Board], Any]) -> Any:
    """Returns what `action` returns, once the board of `task` answers.

    Raises:
      ClusterError: If it does not in time.
    """
    found: List[Any] = []

    def attempt() -> Any:
      with self._board(task) as board:
        return action(board)

    def has_answered() -> bool:
      with contextlib.suppress(*_PASSING):
        found.append(cluster_network.watched(
            attempt, cluster_network.Watch([task], self._time_limit),
            _ANSWER_SECONDS))
      return bool(found)

    cluster_network.wait_until(has_answered, self._time_limit,
                               lambda: cluster_network.state(task))
    return found[0]

  # --- Workers ---

  def begin(self, facts: Mapping[str, str]) -> cluster_network.Watch:
    """Waits for who is needed, then tells or checks facts.

    Returns:
      What ends waits for who is needed.

    Raises:
      ClusterError: If a task is missing, or has other facts; or if training
        has ended while this one was away.
    """
    own = self._members.own
    cluster_network.wait_until_up(self._told, self._time_limit)
    if own == self._members.chief:
      for task in self._told:
        if task in self._members.workers:
          self._wait_until_serves(task)
    else:
      self._check_notice(facts)
    for task in self._told:
      self._at_board(task, lambda board: self._write_begin(board, facts))
    return cluster_network.Watch(self._told, self._time_limit)

  def _write_begin(self, board: cluster_notice.Board,
                   facts: Mapping[str, str]) -> None:
    board.write_end(self._members.own, False)
    if self._members.own == self._members.chief:
      board.write(cluster_notice.Notice(cluster_notice.TRAINING, dict(facts)))

  def _wait_until_serves(self, task: cluster_spec.Task) -> None:
    """Waits until a worker has what it serves with, such as its inputs.

    It is up long before: its server starts first.
    """
    cluster_network.wait_until(
        lambda: self._at_board(task, cluster_notice.Board.serves),
        self._time_limit,
        lambda: f"tasks that do not serve: {cluster_network.state(task)}")

  def _check_notice(self, facts: Mapping[str, str]) -> None:
    """Waits for the chief to begin, and compares facts."""
    own, chief = self._members.own, self._members.chief
    found: List[Any] = []

    def look(board: cluster_notice.Board) -> Tuple[Any, bool]:
      return board.read(), own in board.not_ended()

    def is_told() -> bool:
      notice, has_begun = self._at_board(self._told[0], look)
      found[:] = [notice]
      if notice is not None and notice.state == cluster_notice.DONE and (
          has_begun):
        self.end()
        raise cluster_network.ClusterError(
            "`Cluster.session` must be entered before training ends: got "
            f"{own}, which has come back after that. There is nothing left to "
            "do.")
      # The end of an earlier run does not count.
      return notice is not None and notice.state == cluster_notice.TRAINING

    cluster_network.wait_until(
        is_told, self._time_limit,
        lambda: f"the chief to begin: {cluster_network.state(chief)}")
    cluster_facts.check(facts, found[0].facts, own)

  def has_ended(self) -> bool:
    """Returns whether the chief has ended training."""
    notice = self._at_board(self._told[0], cluster_notice.Board.read)
    return notice is not None and notice.state == cluster_notice.DONE

  def end(self) -> None:
    """Tells that this worker has ended as it should.

    To those that are down it is told when they are back, if that is soon.
    """
    brief = Talk(self._members, self._told, target=self._target,
                 time_limit=min(self._time_limit, _GRACE_SECONDS))
    for task in self._told:
      try:
        brief._at_board(task, self._write_end)
      except (tf.errors.OpError, cluster_network.ClusterError) as error:
        logging.warning("Could not tell %s that training is done: %s", task,
                        error)

  def _write_end(self, board: cluster_notice.Board) -> None:
    board.write_end(self._members.own, True)
    if self._members.own == self._members.chief:
      board.write(cluster_notice.Notice(cluster_notice.DONE, {}))

  # --- Tasks that only serve ---

  def serve(self, facts: Mapping[str, str]) -> None:
    """Serves until the chief says that training is done.

    Raises:
      ClusterError: If the chief has other facts, or is gone for too long.
    """
    own = self._members.own
    watch = cluster_network.Watch([self._members.chief], self._time_limit)
    with self._board(own) as board:
      board.write_serves()
      while not self._is_done(board, facts):
        watch.check()
        time.sleep(_POLL_SECONDS)
      if own in self._members.servers:
        self._serve_others(board)

  def _is_done(self, board: cluster_notice.Board,
               facts: Mapping[str, str]) -> bool:
    """Returns whether the chief says so on this task's board."""
    try:
      notice = board.read()
    except tf.errors.DeadlineExceededError:
      return False  # The process was stopped for a while, say by Ctrl-Z.
    if notice is None:
      return False
    if notice.state == cluster_notice.DONE:
      return True
    cluster_facts.check(facts, notice.facts, self._members.own)
    return False

  def _serve_others(self, board: cluster_notice.Board) -> None:
    """Serves the workers that are in their last step, but not for ever.

    Also one that has died, so that it finds out here, when it comes back, that
    there is nothing left to do.
    """
    end = time.monotonic() + _GRACE_SECONDS
    while board.not_ended() and time.monotonic() < end:
      time.sleep(_POLL_SECONDS)
