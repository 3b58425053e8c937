"""Whether the tasks of a cluster can be reached, by plain sockets.

TensorFlow waits for tasks without end and with no word of whom it waits for. So
this is found out before a session is made. A task is up as long as its server
accepts connections, which it does for as long as its process lives.
"""

import socket
import time
from typing import Callable, Dict, Optional, Sequence

from absl import logging

from towers import cluster_spec

# How long one attempt to connect may take.
_CONNECT_SECONDS = 2.0
_POLL_SECONDS = 0.1

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

  def all_up():
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
  told, pause = start, 0.002
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
    time.sleep(pause)
    # Short at first: most waits are for another worker of the same step.
    pause = min(1.2 * pause, _POLL_SECONDS)
