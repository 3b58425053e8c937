"""How tools read their flags, and end: with help, or with one clear line."""

import pathlib
import sys
from typing import Callable, Optional, Sequence, Union

from absl import flags


class UsageError(Exception):
  """Something that the user can put right: shown in one line."""


def first_line(error: Union[Exception, str]) -> str:
  """Returns the first line of an error, or of its text."""
  return str(error).strip().partition("\n")[0]


def flag_values() -> flags.FlagValues:
  """Returns flags of a tool's own, so that tools can be imported side by side.

  They hold the flag `help` already.
  """
  values = flags.FlagValues()
  flags.DEFINE_boolean("help", False, "Shows this text.", short_name="h",
                       flag_values=values)
  return values


def read(values: flags.FlagValues, argv: Sequence[str], text: str) -> bool:
  """Sets flags by a command line.

  Args:
    values: The flags.
    argv: The command line, the name of the tool first.
    text: What the tool is for, to print above the flags.

  Returns:
    Whether to go on; otherwise help was asked for, and printed.

  Raises:
    UsageError: If a flag is unknown or has a bad value, or there is more.
  """
  try:
    rest = values(argv)[1:]
  except flags.Error as error:
    raise UsageError(first_line(error)) from error
  if values.help:
    print(text + values.get_help())
    return False
  if rest:
    raise UsageError(
        f"there must be flags only: got {rest[0]}. Write --flag=value.")
  return True


def ended(argv: Sequence[str], action: Callable[[], int]) -> int:
  """Runs a tool; returns the exit status of the process.

  Args:
    argv: The command line, whose first entry names the tool.
    action: Returns the exit status. A `UsageError` is one line on standard
      error, and the status 2.
  """
  try:
    return action()
  except UsageError as error:
    print(f"{pathlib.Path(argv[0]).name}: {error}", file=sys.stderr)
    return 2


def main(argv: Sequence[str], values: flags.FlagValues, *, text: str,
         action: Callable[[flags.FlagValues], int]) -> int:
  """Reads the flags and runs a tool; returns the exit status of the process.

  Args:
    argv: See `read`.
    values: See `read`.
    text: See `read`.
    action: Does what the flags say; see `ended`.
  """
  return ended(argv, lambda: action(values) if read(values, argv, text) else 0)


def check_writable(flag: str, path: Optional[str]) -> None:
  """Finds out before the work whether a file can be written, and not after.

  Raises:
    UsageError: If `path`, the value of `flag`, is given and cannot.
  """
  if path is None:
    return
  try:
    with open(path, "a", encoding="utf-8"):
      pass
  except OSError as error:
    raise UsageError(f"`--{flag}` must be a file that can be written to: got "
                     f"{path} ({error.strerror}).") from error
