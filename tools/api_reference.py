"""Writes the API reference, as web pages, from the docstrings of `towers`.

    pip install -e ".[docs]"
    python tools/api_reference.py --output=build/api

Then open build/api/index.html. A docstring or annotation that cannot be made
sense of ends the tool with status 2, and so does a name of `towers` that a
docstring mentions and that does not exist.
"""

import importlib
import inspect
import os
import pathlib
import re
import sys
import types
from typing import Any, Iterator, List, Sequence, Tuple
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

# pylint: disable=wrong-import-position
from absl import flags

from tools import startup

startup.load_tensorflow()

from tools import command_line

PACKAGE = importlib.import_module("towers")

# TensorFlow asks the machine what it is when it is imported.
os.environ.setdefault("PDOC_ALLOW_EXEC", "1")


def _flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = command_line.flag_values()
  flags.DEFINE_string("output", "build/api", "Directory to write to.",
                      flag_values=values)
  return values


def public_modules() -> List[types.ModuleType]:
  """Returns `towers` and those of its modules that are used by their name."""
  path = pathlib.Path(inspect.getfile(PACKAGE))
  names = re.findall(r"^from towers import (\w+)$",
                     path.read_text(encoding="utf-8"), re.MULTILINE)
  return [PACKAGE, *(getattr(PACKAGE, name) for name in names)]


def docstrings(module: types.ModuleType) -> Iterator[Tuple[str, str]]:
  """Yields the name and docstring of the module and all that is public in it.

  Args:
    module: One of `public_modules`.
  """
  yield module.__name__, module.__doc__ or ""
  names = getattr(module, "__all__", None) or [
      name for name, value in vars(module).items()
      if not name.startswith("_") and (
          getattr(value, "__module__", None) == module.__name__)]
  for name in names:
    value = getattr(module, name)
    yield f"{module.__name__}.{name}", getattr(value, "__doc__", None) or ""
    if inspect.isclass(value):
      for member, own in vars(value).items():
        if not member.startswith("_"):
          yield (f"{module.__name__}.{name}.{member}",
                 getattr(own, "__doc__", None) or "")


def unknown_names(text: str) -> List[str]:
  """Returns the names such as `towers.merge` in a text that do not exist."""
  return [name for name in re.findall(r"`(towers(?:\.\w+)+)", text)
          if not _exists(name)]


def _exists(name: str) -> bool:
  value: Any = PACKAGE
  for part in name.split(".")[1:]:
    if not hasattr(value, part):
      return False
    value = getattr(value, part)
  return True


def check() -> None:
  """Checks that docstrings mention names that exist.

  Raises:
    UsageError: If one does not.
  """
  for module in public_modules():
    for where, text in docstrings(module):
      unknown = unknown_names(text)
      if unknown:
        raise command_line.UsageError(
            f"the docstring of {where} mentions {', '.join(unknown)}, which "
            "there is not. Correct it.")


def write(output: pathlib.Path) -> None:
  """Writes the pages.

  Args:
    output: Directory; it is made if need be.

  Raises:
    UsageError: If pdoc is not installed, or warns of something.
  """
  try:
    pdoc = importlib.import_module("pdoc")
  except ImportError as error:
    raise command_line.UsageError(
        "pdoc must be installed. Run `pip install -e \".[docs]\"`.") from error
  check()
  pdoc.render.configure(docformat="google")
  lists = importlib.import_module("pdoc.docstrings").GOOGLE_LIST_SECTIONS
  lists += [name for name in ("Fields", "Yields") if name not in lists]
  modules = public_modules()
  kept = PACKAGE.__all__
  # pdoc lists as parts of a module what stands there.
  PACKAGE.__all__ = (
      *kept, *(module.__name__.rpartition(".")[2] for module in modules[1:]))
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("error", UserWarning)
      pdoc.pdoc("towers", output_directory=output)
  except UserWarning as warning:
    raise command_line.UsageError(
        f"pdoc warns: {command_line.first_line(warning)}") from warning
  finally:
    PACKAGE.__all__ = kept


def main(argv: Sequence[str]) -> int:
  """Runs the tool; returns the exit status of the process."""

  def run(values: flags.FlagValues) -> int:
    output = pathlib.Path(values.output)
    write(output)
    print(f"Written to {output / 'index.html'}.")
    return 0

  return command_line.main(argv, _flags(), text=__doc__, action=run)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
