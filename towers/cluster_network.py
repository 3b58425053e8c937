"""Whether the tasks of a cluster can be reached, by plain sockets.

TensorFlow waits for tasks without end and with no word of whom it waits for. So
this is found out before a session is made. A task is up as long as its server
accepts connections, which it does for as long as its process lives.
"""

import socket
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

from absl import logging

from towers import cluster_spec

# How long one attempt to connect may take.
_CONNECT_SECONDS = 2.0
_POLL_SECONDS = 0.1

# How long the first pause of a wait is: most are for another worker of the same
# step.
FIRST_PAUSE = 0.002

# How often to look at most whether a task is still up.
_LOOK_SECONDS = 1.0

# After how many seconds of waiting to say for whom, each time.
_LOG_SECONDS = 15.0


class ClusterError(RuntimeError):
  """A task of the cluster is missing, or does not fit the others."""


def check_own_address(task: cluster_spec.Task) -> None:
  """Checks that the server of this process could listen at its address.

  TensorFlow's server shares a port that is in use, without a word.

  Raises:
    ClusterError: If it could not.
  """
  try:
    found = socket.getaddrinfo(task.host, task.port, type=socket.SOCK_STREAM)
  except OSError as error:
    raise ClusterError(
        f"`jobs` must hold hosts that can be found: got {task}, "
        f"whose host cannot ({error}). Mend the name, or give its IP address."
    ) from error
  family, kind, protocol, _, address = found[0]
  with socket.socket(family, kind, protocol) as probe:
    # A port that an ended process has used is free, one that is listened at is
    # not.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind(address)
    except OSError as error:
      raise ClusterError(
          "`jobs` must give this process an address of its own host with a "
          f"free port: got {task} ({error.strerror}). Give another port, or "
          "end the process that has it; or start this task on its host."
      ) from error


def fault(task: cluster_spec.Task) -> Optional[str]:
  """Returns why a task cannot be reached; None if it is up."""
  try:
    socket.create_connection((task.host, task.port), _CONNECT_SECONDS).close()
    return None
  except socket.gaierror as error:
    return f"its host cannot be found: {error.strerror}"
  except OSError as error:
    return str(error.strerror or error)


def state(task: cluster_spec.Task) -> str:
  """Returns a task and whether it is up, in words."""
  return f"{task}: {fault(task) or 'it is up, but sends nothing'}"


def missing(tasks: Sequence[cluster_spec.Task]) -> Dict[str, str]:
  """Returns the tasks that are not up, and why."""
  faults = {str(task): fault(task) for task in tasks}
  return {name: why for name, why in faults.items() if why is not None}


def listed(faults: Dict[str, str]) -> str:
  """Returns tasks and their faults as text."""
  return ", ".join(f"{name}: {why}" for name, why in faults.items())


def wait_until_up(tasks: Sequence[cluster_spec.Task],
                  time_limit: float) -> None:
  """Waits until all tasks are up.

  Args:
    tasks: The tasks.
    time_limit: For how many seconds to wait.

  Raises:
    ClusterError: If some are not; it lists them.
  """
  left = list(tasks)

  def all_up() -> bool:
    left[:] = [task for task in left if fault(task) is not None]
    return not left

  wait_until(all_up, time_limit,
             lambda: f"tasks that are not up: {listed(missing(left))}")


def wait_until(done: Callable[[], bool], time_limit: float,
               waits_for: Callable[[], str]) -> None:
  """Waits until `done()`.

  Args:
    done: Returns whether to go on.
    time_limit: For how many seconds to wait.
    waits_for: Returns for what, in words, with the tasks that are missing.

  Raises:
    ClusterError: If it took longer.
  """
  start = time.monotonic()
  told, pause = start, FIRST_PAUSE
  while not done():
    now = time.monotonic()
    if now - start > time_limit:
      raise ClusterError(
          f"`time_limit` must suffice for the others: waited {now - start:.0f} "
          f"s for {waits_for()}. Start what is missing, see its log, or give "
          "it more time.")
    if now - told > _LOG_SECONDS:
      told = now
      logging.warning("Waiting since %.0f s for %s.", now - start, waits_for())
    pause = paused(pause)


def paused(seconds: float) -> float:
  """Sleeps in a wait; returns for how long to do so the next time."""
  time.sleep(seconds)
  return min(1.2 * seconds, _POLL_SECONDS)


class Overdue(Exception):
  """Something has taken longer than it may; for who can try once more."""


class Watch:
  """Ends waits for what others do when one of them is gone for too long."""

  def __init__(self, tasks: Sequence[cluster_spec.Task], time_limit: float):
    """Takes all tasks to be up now.

    Args:
      tasks: Whom to watch.
      time_limit: For how many seconds each may be gone.
    """
    self._time_limit = time_limit
    self._looked = time.monotonic()
    self._last_up = dict.fromkeys(tasks, self._looked)

  def check(self) -> None:
    """Looks whether the tasks are up, if it is time for that.

    Raises:
      ClusterError: If one has been gone for too long.
    """
    if time.monotonic() < self._looked + _LOOK_SECONDS:
      return
    for task, last_up in self._last_up.items():
      why = fault(task)
      gone = time.monotonic() - last_up
      if why is None:
        self._last_up[task] = time.monotonic()
      elif gone > self._time_limit:
        raise ClusterError(
            "`time_limit` must suffice for a task to come back: "
            f"{task} has been gone for {gone:.0f} s ({why}). Start it again, "
            "then this task.")
    self._looked = time.monotonic()


def watched(action: Callable[[], Any], watch: Watch,
            seconds: float = float("inf")) -> Any:
  """Returns what `action` returns, which may wait for tasks without an end.

  So does TensorFlow when it makes a session.

  Args:
    action: Runs in a thread of its own, which is left behind if it does not
      end.
    watch: Whom it may wait for.
    seconds: How long it may take in any case.

  Raises:
    ClusterError: If one of these has been gone for too long.
    Overdue: If it takes longer.
    Exception: What `action` raised.
  """
  returned: List[Any] = []
  raised: List[BaseException] = []

  def run() -> None:
    try:
      returned.append(action())
    except BaseException as error:  # pylint: disable=broad-except
      raised.append(error)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  end = time.monotonic() + seconds
  thread.join(_POLL_SECONDS)
  while thread.is_alive():
    watch.check()
    if time.monotonic() > end:
      raise Overdue(f"`action` took more than {seconds:.0f} s.")
    thread.join(_POLL_SECONDS)
  if raised:
    raise raised[0]
  return returned[0]
