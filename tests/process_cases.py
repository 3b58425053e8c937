"""Runs programs that start others, with time limits; not a test itself.

The limits are for machines that are slow; nothing waits for them to pass.
"""

import contextlib
import fcntl
import os
import pathlib
import pty
import struct
import subprocess
import sys
import termios
import threading
import time

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
SECONDS = 90

# Gives a program the terminal that it has as standard error, as a shell does.
_WITH_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def wait_until(condition, what, *, pause=0.01, seconds=SECONDS):
  """Returns the first true value of a function; fails after a while."""
  end = time.monotonic() + seconds
  while True:
    value = condition()
    if value:
      return value
    if time.monotonic() > end:
      raise AssertionError(f"timed out: {what}")
    time.sleep(pause)


def wait_for_text(path, text):
  """Waits until a file holds a text; returns what it holds."""
  path = pathlib.Path(path)
  return wait_until(
      lambda: path.exists() and text in path.read_text() and path.read_text(),
      f"`{text}` in {path}")


def is_alive(pid):
  """Whether a process runs; one that nobody has waited for does not."""
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  if not os.path.exists("/proc/self/stat"):
    return True
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_for_end(pids):
  wait_until(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


def run(*arguments, **options):
  """Runs Python with arguments; returns the completed process."""
  return subprocess.run(
      [sys.executable, *map(str, arguments)], cwd=CHECKOUT, text=True,
      stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS,
      check=False, **options)


@contextlib.contextmanager
def running(*arguments, **options):
  """A context with a running Python, which is killed at the end.

  Or before, when it has had its time: so reading what it writes has an end.
  """
  options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
  process = subprocess.Popen(
      [sys.executable, *map(str, arguments)], cwd=CHECKOUT, text=True,
      stdin=subprocess.DEVNULL, **options)
  timer = threading.Timer(SECONDS, process.kill)
  timer.start()
  try:
    yield process
  finally:
    timer.cancel()
    process.kill()
    process.communicate()


class Terminal:
  """A terminal with a program in its foreground; a context manager."""

  def __init__(self, *arguments, columns=80):
    """Starts Python with arguments."""
    self._master, slave = pty.openpty()
    self.resize(columns)
    self.process = subprocess.Popen(
        [sys.executable, "-c", _WITH_TERMINAL, *map(str, arguments)],
        cwd=CHECKOUT, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.set_blocking(self._master, False)
    self.shown = ""

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.process.kill()
    self.process.wait()
    os.close(self._master)

  def resize(self, columns):
    fcntl.ioctl(self._master, termios.TIOCSWINSZ,
                struct.pack("4H", 24, columns, 0, 0))

  def press(self, key):
    os.write(self._master, key)

  def has_shown(self, text):
    self._read()
    return text in self.shown

  def status(self):
    """Waits for the end; returns the exit status."""

    def ended():
      self._read()
      return self.process.poll() is not None

    wait_until(ended, "the end of the program in the terminal")
    self._read()
    return self.process.returncode

  def _read(self):
    with contextlib.suppress(OSError):
      while True:
        self.shown += os.read(self._master, 4096).decode()
