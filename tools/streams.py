"""Passes what a child process writes on as it is, to a file and a terminal.

Bytes are passed on as they come, so that what redraws a line (a carriage
return) does so on the terminal. Nothing here waits: the caller polls the file
descriptors, and so stays free for signals also where a terminal or a pager
takes no more.
"""

import errno
import fcntl
import os
import pty
import re
import select
import struct
import termios
import tty
from typing import BinaryIO, Optional

# A pipe that is ready for writing takes so many bytes without a wait.
CHUNK = select.PIPE_BUF

# Where so many bytes wait to be written, no more are read.
MAX_WAITING = 65536

# How much of the end of a file to look at for its last line.
_TAIL = 8192
_MAX_LINE = 300
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Output:
  """A file descriptor to write to when it is ready; it is not closed here."""

  def __init__(self, descriptor: int):
    self.descriptor = descriptor
    self._waiting = bytearray()
    self._last = b"\n"
    self._is_broken = False

  @property
  def waiting(self) -> int:
    """Number of bytes that wait to be written."""
    return len(self._waiting)

  def add(self, data: bytes) -> None:
    if data and not self._is_broken:
      self._waiting += data
      self._last = data[-1:]

  def add_line(self, line: str) -> None:
    """Adds a line of its own, also below a progress bar."""
    start = "" if self._last == b"\n" else "\n"
    self.add(f"{start}{line}\n".encode(errors="backslashreplace"))

  def write_some(self) -> None:
    """Writes a little, without a wait if the descriptor is ready."""
    try:
      written = os.write(self.descriptor, self._waiting[:CHUNK])
      del self._waiting[:written]
    except BlockingIOError:
      pass
    except OSError:  # Nobody reads it any more; a log has it all.
      self._is_broken = True
      self.drop()

  def drop(self) -> None:
    """Gives up what waits."""
    self._waiting.clear()


class Tee:
  """What a child writes to one file descriptor, to a log and an `Output`.

  Attributes:
    descriptor: To read from; None after the end.
    child_descriptor: For the child to write to.
    output: Gets all of it.
  """

  def __init__(self, log: BinaryIO, output: Output):
    """Opens a pipe; or a pseudo-terminal, if `output` is a terminal.

    A progress bar then finds a terminal of the right width.

    Args:
      log: A file without a buffer, which gets all of it, too.
      output: See the attribute.
    """
    self._log: Optional[BinaryIO] = log
    self.output = output
    self.descriptor: Optional[int]
    if os.isatty(output.descriptor):
      self.descriptor, self.child_descriptor = pty.openpty()
      # The real terminal turns newlines into what it needs, once.
      tty.setraw(self.child_descriptor)
      self.copy_size()
    else:
      self.descriptor, self.child_descriptor = os.pipe()
    os.set_blocking(self.descriptor, False)

  def copy_size(self) -> None:
    """Gives the pseudo-terminal, if it is one, the size of the terminal."""
    if self.descriptor is None or not os.isatty(self.descriptor):
      return
    try:
      size = fcntl.ioctl(self.output.descriptor, termios.TIOCGWINSZ,
                         struct.pack("4H", 0, 0, 0, 0))
      fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)
    except OSError:  # The terminal has gone.
      pass

  def close_child_end(self) -> None:
    """To call when the child has it: reading then comes to an end."""
    os.close(self.child_descriptor)

  @property
  def is_ready(self) -> bool:
    """Whether more may be read."""
    return self.descriptor is not None and self.output.waiting < MAX_WAITING

  def read_some(self) -> bool:
    """Passes on what is there; returns whether there may be more."""
    if self.descriptor is None:
      return False
    try:
      data = os.read(self.descriptor, CHUNK)
    except BlockingIOError:
      return False
    except OSError as error:
      if error.errno != errno.EIO:
        raise
      data = b""  # So ends a pseudo-terminal.
    if not data:
      self.close()
      return False
    self._write_log(data)
    self.output.add(data)
    return True

  def _write_log(self, data: bytes) -> None:
    try:
      while data and self._log is not None:
        data = data[self._log.write(data):]
    except OSError as error:  # Such as a full disk: the rest still shows.
      self.output.add_line(
          f"`{self._log.name}` takes no more ({error.strerror}).")
      self._log = None

  def close(self) -> None:
    """Closes what is read from; nothing if that is done."""
    if self.descriptor is not None:
      os.close(self.descriptor)
      self.descriptor = None


def last_line(path: str, start: int = 0) -> str:
  """Returns the last line with text in a file, or a note that there is none.

  Args:
    path: The file.
    start: Where in it to begin, in bytes.
  """
  try:
    with open(path, "rb") as file:
      end = file.seek(0, os.SEEK_END)
      file.seek(max(start, end - _TAIL))
      text = file.read().decode(errors="replace")
  except OSError:
    text = ""
  for line in reversed(_ESCAPES.sub("", text).splitlines()):
    line = "".join(c if c.isprintable() else " " for c in line).strip()
    if line:
      return line[-_MAX_LINE:]
  return "no output"
