"""Runs several commands until all have ended, or one has failed.

`Tasks` starts them, passes on what one of them shows, forwards signals, starts
again what may be started again, and ends the others when one fails. It does all
that in one thread, which polls: Linux ties a child to the thread that started
it, see `children`. It knows nothing of what the commands do.
"""

import contextlib
import datetime
import os
import select
import shlex
import signal
import sys
import time
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from tools import children
from tools import streams

# The status with which programs end that do not understand their flags: they
# would not understand them a second time.
USAGE_STATUS = 2

# How long to wait at most before a look around, which signals cut short.
_POLL_SECONDS = 0.5

# How long the end of the output may keep an ended process waiting, where
# something that left its session still has the pipe.
_DRAIN_SECONDS = 1.0

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Command(NamedTuple):
  """A command to run.

  Attributes:
    name: What to call it.
    arguments: Program and arguments.
    log: Path of the file that all of its output is added to.
    is_shown: Whether its output goes to this process's standard output and
      standard error, too.
    restarts: How often it is started again when it has failed.
    after: Names of commands: once they have all ended with 0, this one must
      end by itself within the grace time.
    leader: Name of the command that sees the work done. When that has ended
      with 0, this one is no longer needed, and may fail. When that is started
      again, so is this one, if it has ended.
  """
  name: str
  arguments: Sequence[str]
  log: str
  is_shown: bool = False
  restarts: int = 0
  after: Sequence[str] = ()
  leader: Optional[str] = None


class _Task:
  """A command with its process, which may be the second or third one."""

  def __init__(self, command: Command):
    self.command = command
    self.child: Optional[children.Child] = None
    self.tees: List[streams.Tee] = []
    self.status: Optional[int] = None
    self.restarts = 0
    self.was_killed = False
    self.started = self.ended = 0.0
    self._log_start = 0

  def start(self, guard: children.Guard, outputs: Sequence[streams.Output],
            environment: Optional[Mapping[str, str]]) -> None:
    """Starts it, again if it has ended."""
    log = open(self.command.log, "ab", buffering=0)
    now = datetime.datetime.now().isoformat(" ", "seconds")
    log.write(f"[{now}] {shlex.join(self.command.arguments)}\n".encode())
    self._log_start = log.tell()
    self.status = None
    self.started, self.ended = time.monotonic(), 0.0
    stdout = stderr = log
    if self.command.is_shown:
      self.tees = [streams.Tee(log, output) for output in outputs]
      # If both are the same terminal, one for both keeps what is written in
      # order.
      stdout = self.tees[0].child_descriptor
      stderr = self.tees[-1].child_descriptor
    try:
      self.child = children.Child(self.command.arguments, guard, stdout=stdout,
                                  stderr=stderr, environment=environment)
    except OSError:
      self.close()
      raise
    finally:
      for tee in self.tees:
        tee.close_child_end()
      if not self.tees:
        log.close()

  def has_ended(self) -> bool:
    """Whether it has just ended, with all of its output passed on."""
    status = self.child.status() if self.child else None
    if status is None:
      return False
    now = time.monotonic()
    self.ended = self.ended or now
    for tee in self.tees:
      while tee.read_some():
        pass
    if (any(tee.descriptor is not None for tee in self.tees) and
        now < self.ended + _DRAIN_SECONDS):
      return False
    self.close()
    self.child, self.status = None, status
    return True

  def close(self) -> None:
    """Reads no more."""
    for tee in self.tees:
      tee.close()

  def last_line(self) -> str:
    return streams.last_line(self.command.log, self._log_start)


class Tasks:
  """Commands that belong together: all end well, or all are ended."""

  def __init__(self, commands: Sequence[Command], *, title: str,
               grace_seconds: float,
               environment: Optional[Mapping[str, str]] = None):
    """Starts nothing yet.

    Args:
      commands: What to run, in the order to start it, with different names.
      title: What the lines on standard error start with.
      grace_seconds: How long the others have to end by themselves when one has
        failed or a signal has come, before they are killed.
      environment: Environment of the commands; default: that of this process.
    """
    self._tasks = {c.name: _Task(c) for c in commands}
    self._title = title
    self._grace = grace_seconds
    self._environment = environment
    self._outputs = [streams.Output(sys.stderr.fileno())]
    if not os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno()):
      self._outputs.insert(0, streams.Output(sys.stdout.fileno()))
    # Signals that came, in order, and how many of them are dealt with.
    self._signals: List[int] = []
    self._num_handled = 0
    self._status = 0
    self._failed = False
    # When those that still run are killed, once they are to end.
    self._kill_time: Optional[float] = None
    # For a command that must follow others: when it must have ended.
    self._follow_times: Dict[str, float] = {}
    # When a task has last ended, and whether it was said what still runs.
    self._last_end = time.monotonic()
    self._has_noticed = False

  def run(self) -> int:
    """Runs them all; call it in the main thread, once.

    Returns:
      0 if all ended with 0; the status of the first that failed, 128 plus the
      signal if that was one; 128 plus the signal if one came to this process;
      1 if a command did not follow others in time.
    """
    guard = children.Guard()
    with self._handlers() as wakeup:
      try:
        for task in self._tasks.values():
          self._start(task, guard)
        while self._running() or any(o.waiting for o in self._outputs):
          self._wait(wakeup)
          self._handle_signals()
          for task in self._running():
            if task.has_ended():
              self._handle_end(task, guard)
          self._check_leaders(guard)
          self._check_followers()
          self._check_notice()
          self._check_grace()
        self._handle_signals()  # One may have come before the first start.
      finally:
        # Nothing runs any more, but if this function itself has failed.
        for task in self._running():
          task.child.send(signal.SIGKILL)
        guard.close()
    return self._status

  # --- What happens, in the order of `run` ------------------------------------

  @contextlib.contextmanager
  def _handlers(self) -> Iterator[int]:
    """Catches signals; yields a descriptor that can be read when one came."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    handlers = dict.fromkeys(_FORWARDED, self._catch)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
      del handlers[signal.SIGHUP]  # As `nohup` wants it.
    # It only cuts the wait short; where it is ignored, the end of children
    # does not even show.
    handlers[signal.SIGCHLD] = lambda *_: None
    handlers[signal.SIGWINCH] = self._resize
    handlers[signal.SIGTSTP] = self._suspend
    before = {n: signal.signal(n, handler) for n, handler in handlers.items()}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
      yield read
    finally:
      signal.set_wakeup_fd(wakeup)
      for number, handler in before.items():
        signal.signal(number, handler)
      os.close(read)
      os.close(write)

  def _catch(self, number: int, unused_frame) -> None:
    self._signals.append(number)

  def _resize(self, *unused) -> None:
    for task in self._running():
      for tee in task.tees:
        tee.copy_size()

  def _suspend(self, *unused) -> None:
    """Stops all, as Ctrl-Z does; they go on when this process does."""
    for task in self._running():
      task.child.send(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for task in self._running():
      task.child.send(signal.SIGCONT)

  def _start(self, task: _Task, guard: children.Guard) -> None:
    """Starts a task, if none has failed and no signal came before."""
    if self._kill_time is not None or self._signals:
      return
    try:
      task.start(guard, self._outputs, self._environment)
    except OSError as error:
      task.status = 1
      self._fail(1, f"{task.command.name} could not be started: "
                 f"{error.strerror} (log: {task.command.log})")

  def _running(self) -> List[_Task]:
    return [task for task in self._tasks.values() if task.child is not None]

  def _wait(self, wakeup: int) -> None:
    """Waits until something happens; passes on what the commands write."""
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    tees = {tee.descriptor: tee for task in self._running()
            for tee in task.tees if tee.is_ready}
    outputs = {o.descriptor: o for o in self._outputs if o.waiting}
    for descriptor in tees:
      poll.register(descriptor, select.POLLIN)
    for descriptor in outputs:
      poll.register(descriptor, select.POLLOUT)
    for descriptor, _ in poll.poll(1000 * self._seconds_to_wait()):
      if descriptor in tees:
        tees[descriptor].read_some()
      elif descriptor in outputs:
        outputs[descriptor].write_some()
      else:
        os.read(wakeup, 4096)

  def _seconds_to_wait(self) -> float:
    times = list(self._follow_times.values())
    if self._kill_time is not None:
      times.append(self._kill_time)
    left = min(times, default=float("inf")) - time.monotonic()
    return min(max(left, 0.01), _POLL_SECONDS)

  def _handle_signals(self) -> None:
    """Forwards the first signal, once; a second Ctrl-C kills."""
    new = self._signals[self._num_handled:]
    self._num_handled += len(new)
    if not new:
      return
    if self._signals.count(signal.SIGINT) > 1:
      self._kill("a second Ctrl-C")
    if self._kill_time is None:
      self._status = 128 + new[0]
      self._end(new[0])
    if not self._running():
      for output in self._outputs:  # Nobody wants to wait for a pager.
        output.drop()

  def _handle_end(self, task: _Task, guard: children.Guard) -> None:
    """Sees to a task that has ended."""
    self._last_end = time.monotonic()
    if task.status == 0 or self._kill_time is not None or self._signals:
      return
    command = task.command
    what = (f"{command.name} ended with {children.describe(task.status)}: "
            f"{task.last_line()} (log: {command.log})")
    if command.leader and self._tasks[command.leader].status == 0:
      self._tell(f"{what}; it is no longer needed, as {command.leader} is done")
    elif task.status != USAGE_STATUS and task.restarts < command.restarts:
      task.restarts += 1
      self._tell(f"{what}; starting it again, {task.restarts} of "
                 f"{command.restarts}")
      self._start(task, guard)
    else:
      self._fail(children.exit_status(task.status), what)

  def _check_leaders(self, guard: children.Guard) -> None:
    """Starts again who took the work for done, as its leader began anew."""
    for task in self._tasks.values():
      leader = self._tasks.get(task.command.leader or "")
      if (leader and leader.child and task.status == 0 and
          task.started < leader.started and
          # Else the leader may be about to end, too.
          (task.ended < leader.started or
           time.monotonic() > task.ended + self._grace)):
        self._tell(f"starting {task.command.name} again, too")
        self._start(task, guard)

  def _check_followers(self) -> None:
    now = time.monotonic()
    for task in self._running():
      after = task.command.after
      if (self._kill_time is not None or not after or
          any(self._tasks[name].status != 0 for name in after)):
        self._follow_times.pop(task.command.name, None)
        continue
      time_out = self._follow_times.setdefault(
          task.command.name, now + self._grace)
      if now >= time_out:
        self._fail(1, f"{task.command.name} must end within {self._grace:g} "
                   f"seconds after {', '.join(after)} ended with status 0: it "
                   f"still runs (log: {task.command.log})")

  def _check_notice(self) -> None:
    """Says once what is waited for, when all that is shown has ended."""
    running = self._running()
    shown = [t for t in self._tasks.values() if t.command.is_shown]
    if (self._has_noticed or self._kill_time is not None or not running or
        not shown or any(task in running for task in shown) or
        time.monotonic() < self._last_end + self._grace):
      return
    self._has_noticed = True
    names = ", ".join(f"{task.command.name} (log: {task.command.log})"
                      for task in running)
    self._tell(f"still running: {names}")

  def _check_grace(self) -> None:
    if self._kill_time is not None and time.monotonic() >= self._kill_time:
      self._kill(f"still running after {self._grace:g} seconds")

  # --- How things end ---------------------------------------------------------

  def _fail(self, status: int, what: str) -> None:
    self._failed = True
    self._status = status
    self._tell(what)
    self._end(signal.SIGTERM)

  def _end(self, number: int) -> None:
    """Asks all that run to end, with a signal."""
    self._follow_times.clear()
    self._kill_time = time.monotonic() + self._grace
    for task in self._running():
      task.child.send(number)

  def _kill(self, why: str) -> None:
    alive = [task for task in self._running() if not task.was_killed]
    for task in alive:
      task.was_killed = True
      task.child.send(signal.SIGKILL)
    if alive:
      names = ", ".join(task.command.name for task in alive)
      self._tell(f"killed {names}: {why}")

  def _tell(self, line: str) -> None:
    self._outputs[-1].add_line(f"{self._title}: {line}")

  # --- What is left to say ----------------------------------------------------

  def table(self) -> str:
    """Returns a table of all tasks, for the end, if something went wrong."""
    if not self._failed and not any(
        task.was_killed for task in self._tasks.values()):
      return ""
    rows = [("task", "ended with", "log")]
    for name, task in self._tasks.items():
      ended = ("not started" if task.status is None else
               children.describe(task.status))
      rows.append((name, ended, task.command.log))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {ended:{widths[1]}}  {log}"
                     for name, ended, log in rows)
