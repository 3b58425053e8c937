"""Checks random models and random inputs of tools, as long as one likes.

  python tests/nightly.py --examples=10000 --seed=20
  python tests/nightly.py --what=tools --examples=5000

`models` are those of `test_properties.py`, `tools` the inputs of
`test_fuzzed_tools.py`; others are drawn for each --seed. Each failure is
printed with the smallest case that shows it, and makes the exit status 1.
"""

import pathlib
import sys
import time
import traceback
from typing import Any, Callable, Sequence

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent)]

# pylint: disable=wrong-import-position
import conftest  # Sets TensorFlow up as for the tests.

from absl import flags
import hypothesis
import tensorflow.compat.v1 as tf

import property_cases
import random_models

# After a failure the next examples are of another seed, so that one fault does
# not hide all others.
CHUNK = 100


def _flags() -> flags.FlagValues:
  values = flags.FlagValues()
  flags.DEFINE_integer("examples", 10000, "How many to draw of each.",
                       lower_bound=1, flag_values=values)
  flags.DEFINE_integer("seed", None, "Where to begin. Default: the clock.",
                       lower_bound=0, flag_values=values)
  flags.DEFINE_list("what", ["models", "tools"], "What to check.",
                    flag_values=values)
  flags.DEFINE_float("seconds", None, "Stops after so many seconds.",
                     lower_bound=0, flag_values=values)
  return values


def check(draw: Any, holds: Callable[[Any], Any], examples: int, seed: int,
          until: float) -> int:
  """Checks what is drawn; returns how many chunks had a failure."""
  failures = drawn = checked = 0
  begin = time.time()
  while drawn < examples and time.time() < until:
    size, last = min(CHUNK, examples - drawn), []

    @hypothesis.seed(seed + drawn)
    @hypothesis.settings(max_examples=size, deadline=None, database=None,
                         print_blob=False, suppress_health_check=list(
                             hypothesis.HealthCheck))
    @hypothesis.given(draw)
    def chunk(case):
      nonlocal checked
      if time.time() < until:
        last[:] = [case]  # noqa: B023  # It runs in this very round.
        checked += 1
        holds(case)

    try:
      chunk()
    except Exception as error:  # Whatever it is, it is a failure.
      failures += 1
      print(f"--- seed {seed + drawn}: {last[0]!r}")
      traceback.print_exception(type(error), error, error.__traceback__)
    drawn += size
    print(f"{checked} examples, {failures} failures, "
          f"{time.time() - begin:.0f} s", flush=True)
  return failures


def _models() -> Any:
  return random_models.cases(), property_cases.check


def _tools() -> Any:
  import fuzzed_tools  # pylint: disable=import-outside-toplevel
  return fuzzed_tools.inputs(), fuzzed_tools.check


CHECKS = {"models": _models, "tools": _tools}


def main(argv: Sequence[str]) -> int:
  """Returns the exit status."""
  values = _flags()
  try:
    values(argv)
    chosen = [CHECKS[name] for name in values.what]
  except (flags.Error, KeyError) as error:
    print(f"nightly.py: {error}", file=sys.stderr)
    return 2
  seed = int(time.time()) if values.seed is None else values.seed
  until = time.time() + (values.seconds or float("inf"))
  print(f"TensorFlow {tf.__version__}, seed {seed}", flush=True)
  failures = 0
  for make in chosen:
    failures += check(*make(), values.examples, seed, until)
  return 1 if failures else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
