"""Who tells whom what in a cluster, and when.

The chief tells that training begins, with its facts, whenever it makes a
session, and when it is done. It tells the tasks that only serve, which wait for
that; other workers read it from the first parameter server.
"""

import contextlib
import time
from typing import Iterator, List, Mapping, Sequence

from absl import logging
import tensorflow.compat.v1 as tf

from towers import cluster_facts
from towers import cluster_network
from towers import cluster_notice
from towers import cluster_spec

_POLL_SECONDS = 0.2

# How long a server waits for the other workers when the chief has ended.
_GRACE_SECONDS = 30.0


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

  # --- Workers ---

  def begin(self, facts: Mapping[str, str]) -> None:
    """Waits for who is needed, then tells or checks facts.

    Raises:
      ClusterError: If a task is missing, or has other facts.
    """
    own = self._members.own
    cluster_network.wait_until_up(self._told, self._time_limit)
    if own != self._members.chief:
      self._check_notice(facts)
    for task in self._told:
      with self._board(task) as board:
        board.write_end(own, False)
        if own == self._members.chief:
          board.write(cluster_notice.Notice(cluster_notice.TRAINING, facts))

  def _check_notice(self, facts: Mapping[str, str]) -> None:
    """Waits for the chief to begin, and compares facts."""
    found, chief = [], self._members.chief
    with self._board(self._told[0]) as board:

      def is_told():
        found[:] = [board.read()]
        return (found[0] is not None and
                found[0].state == cluster_notice.TRAINING)

      cluster_network.wait_until(
          is_told, self._time_limit,
          lambda: f"the chief to begin: {cluster_network.state(chief)}")
    cluster_facts.check(facts, found[0].facts, self._members.own)

  def has_ended(self) -> bool:
    """Returns whether the chief has ended training."""
    with self._board(self._told[0]) as board:
      notice = board.read()
    return notice is not None and notice.state == cluster_notice.DONE

  def end(self) -> None:
    """Tells that this worker has ended as it should."""
    own = self._members.own
    for task in self._told:
      try:
        with self._board(task) as board:
          board.write_end(own, True)
          if own == self._members.chief:
            board.write(cluster_notice.Notice(cluster_notice.DONE, {}))
      except tf.errors.OpError as error:
        logging.warning("Could not tell %s that training is done: %s", task,
                        error.message)

  # --- Tasks that only serve ---

  def serve(self, facts: Mapping[str, str]) -> None:
    """Serves until the chief says that training is done.

    Raises:
      ClusterError: If the chief has other facts, or is gone for too long.
    """
    own = self._members.own
    last_up = time.monotonic()
    with self._board(own) as board:
      while True:
        notice = board.read()
        if notice is not None:
          if notice.state == cluster_notice.DONE:
            break
          cluster_facts.check(facts, notice.facts, own)
        last_up = self._seen_chief(last_up)
        time.sleep(_POLL_SECONDS)
      if own in self._members.servers:
        self._serve_others(board)

  def _seen_chief(self, last_up: float) -> float:
    """Returns when the chief was up last."""
    why = cluster_network.fault(self._members.chief)
    now = time.monotonic()
    if why is None:
      return now
    if now - last_up > self._time_limit:
      raise cluster_network.ClusterError(
          "`time_limit` must suffice for the chief to come back: "
          f"{self._members.chief} has been gone for {now - last_up:.0f} s "
          f"({why}). Start it again, then this task.")
    return last_up

  def _serve_others(self, board: cluster_notice.Board) -> None:
    """Serves the workers that are in their last step, but not for ever."""
    end = time.monotonic() + _GRACE_SECONDS

    def busy() -> List[cluster_spec.Task]:
      return [worker for worker in board.not_ended()
              if cluster_network.fault(worker) is None]

    while busy() and time.monotonic() < end:
      time.sleep(_POLL_SECONDS)
