"""The error of all data sets, and how errors of files become one."""

import contextlib
import pathlib
from typing import Iterator, Union
import zlib

Path = Union[str, pathlib.Path]


class DatasetError(Exception):
  """A data set that is missing, damaged or of another kind: one line."""


def unfit(path: Path, *, expected: str, found: str,
          advice: str) -> DatasetError:
  """Returns the error for a file or folder that is not what it should be.

  Args:
    path: The file or folder at fault.
    expected: What it must be, after "must be".
    found: What it is instead.
    advice: Where to get a right one, as whole sentences.
  """
  return DatasetError(f"`{path}` must be {expected}: got {found}. {advice}")


@contextlib.contextmanager
def reading(path: Path, expected: str, advice: str) -> Iterator[None]:
  """Turns what goes wrong when the context reads a file into one clear error.

  Args:
    path: The file that is read.
    expected: What it must be, after "must be".
    advice: Where to get a right one, as whole sentences.

  Raises:
    DatasetError: In place of an `OSError` or an error of decompression.
  """
  try:
    yield
  except (EOFError, zlib.error) as error:
    raise unfit(
        path, expected=expected,
        found=f"a file that is cut short or damaged ({error})",
        advice=advice) from error
  except FileNotFoundError as error:
    raise unfit(
        path, expected=expected, found="no such file", advice=advice) from error
  except IsADirectoryError as error:
    raise unfit(
        path, expected=expected, found="a directory", advice=advice) from error
  except OSError as error:
    # Errors of gzip have a text of their own in place of the system's.
    raise unfit(path, expected=expected,
                found=f"a file that cannot be read ({error.strerror or error})",
                advice=advice) from error


def directory(path: Path, expected: str, advice: str) -> pathlib.Path:
  """Returns `path`, which must be a directory.

  Raises:
    DatasetError: If it is missing or something else.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise unfit(
        path, expected=expected,
        found="a file" if path.exists() else "no such folder", advice=advice)
  return path
