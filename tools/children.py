"""Child processes that do not outlive their parent, whatever ends that.

Each child leads a session, and so a process group, of its own: a terminal's
Ctrl-C does not reach it, and what it starts itself can be ended with it. Where
the parent ends them, it does so by these groups. Where the parent is killed and
can do nothing more,

- Linux kills the children (`PR_SET_PDEATHSIG`). There is no such call on other
  systems, and it does not reach what the children started;
- a guard, a small process that waits for the parent's end, kills the groups of
  all children, on all systems. Both must be killed at once to get around that.

A process that leaves its child's session (a daemon) is out of reach.
"""

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any, Callable, Mapping, Optional, Sequence

# From <sys/prctl.h>.
PR_SET_PDEATHSIG = 1

# Reads lines with a process group to watch, or with a minus to forget.
_GUARD = """
import os, signal, sys
groups = set()
for line in sys.stdin:
  group = int(line)
  groups.add(group) if group > 0 else groups.discard(-group)
for group in groups:
  try:
    os.killpg(group, signal.SIGKILL)
  except OSError:
    pass
"""


def describe(status: int) -> str:
  """Returns an exit status, or minus a signal, in words."""
  if status >= 0:
    return f"status {status}"
  try:
    return signal.Signals(-status).name
  except ValueError:
    return f"signal {-status}"


def exit_status(status: int) -> int:
  """Returns what a shell makes of a status: 128 and more for a signal."""
  return status if status >= 0 else 128 - status


def _killed_with_parent() -> Optional[Callable[[], None]]:
  """Returns what a new child must call on Linux, where its parent is this.

  The call is tied to the THREAD that starts the child, so that has to be one
  that lives as long as the process: the main thread.
  """
  if not sys.platform.startswith("linux"):
    return None
  # Looked up here, since little is safe to do between fork and exec.
  prctl = ctypes.CDLL(None).prctl
  parent = os.getpid()

  def call():
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before the call.
      os.kill(os.getpid(), signal.SIGKILL)

  return call


class Guard:
  """Kills the process groups that it was told of when this process ends."""

  def __init__(self):
    # Isolated and without `site`, it starts in a few milliseconds.
    self._process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True)

  def watch(self, group: int) -> None:
    self._tell(group)

  def forget(self, group: int) -> None:
    self._tell(-group)

  def close(self) -> None:
    """Ends the guard; it kills the groups that were not forgotten."""
    try:
      self._process.stdin.close()
    except BrokenPipeError:
      pass
    self._process.wait()

  def _tell(self, number: int) -> None:
    try:
      self._process.stdin.write(b"%d\n" % number)
      self._process.stdin.flush()
    except BrokenPipeError:  # Somebody killed it: there is still `prctl`.
      pass


class Child:
  """A running child process, with whatever it starts.

  Attributes:
    pid: Its process id, which is that of its group.
  """

  def __init__(self, arguments: Sequence[str], guard: Guard, *, stdout: Any,
               stderr: Any, environment: Optional[Mapping[str, str]] = None):
    """Starts it; call this in the main thread.

    Args:
      arguments: Program and arguments.
      guard: Is told of the child.
      stdout: Where its standard output goes, as for `subprocess.Popen`.
      stderr: Where its standard error goes.
      environment: Its environment; default: that of this process.

    Raises:
      OSError: If the system does not start it.
    """
    self._guard = guard
    self._process = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
        env=environment, start_new_session=True,
        preexec_fn=_killed_with_parent())
    self.pid = self._process.pid
    guard.watch(self.pid)

  def send(self, number: int) -> None:
    """Sends a signal to the child and what it started."""
    try:
      os.killpg(self.pid, number)
    # Without `ProcessLookupError` some systems say that it is not permitted,
    # where the group holds only what has ended.
    except (ProcessLookupError, PermissionError):
      pass

  def status(self) -> Optional[int]:
    """Returns the exit status, or minus the signal; None while it runs.

    When it has ended, what it started is killed.
    """
    if self._process.returncode is None:
      # Left as it is (`WNOWAIT`), so that the group's number stays its own.
      if os.waitid(os.P_PID, self.pid,
                   os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
      self.send(signal.SIGKILL)
      self._guard.forget(self.pid)
      self._process.wait()
    return self._process.returncode
