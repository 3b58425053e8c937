"""Measures what training in towers costs, beside what else there is.

  python tools/benchmark.py --suite=targets --json=figures.json
  python tools/benchmark.py --model=unet --num_towers=4 --rows=8

Trains networks on random images, on logical CPU devices, by each of several
contenders: one device with the whole batch, hand-written tower loops,
`MirroredStrategy`, and `towers`. Each contender has a process of its own; they
take turns, so that whatever else the machine does meets all of them. Prints
Markdown: a table of the targets, and one of all figures for each comparison.

Suites: `targets` has what the project promises, and takes about 20 minutes on
two cores. `models`, `rows`, `towers` and `depth` vary one thing each; `all` is
all of these. Without --suite, flags such as --model make one comparison.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tools import startup

startup.load_tensorflow()

from absl import flags

from tools import benchmark_plots as plots
from tools import benchmark_suites as suites
from tools import benchmark_tables as tables
from tools import benchmark_workers as workers
from tools import command_line
from tools import networks

UsageError = command_line.UsageError
Comparison = suites.Comparison
_FIELDS = ("model", "num_towers", "rows", "builds", "turns", "steps")


@dataclasses.dataclass(frozen=True)
class Options:
  """What a run does; the flags of the same names say more."""
  comparisons: Tuple[Comparison, ...] = suites.SUITES["targets"]
  threads: int = 0
  json: Optional[str] = None
  markdown: Optional[str] = None
  plots: Optional[str] = None
  read: Optional[str] = None


# --- Measuring ----------------------------------------------------------------


def measure(comparison: Comparison, threads: int,
            say: Callable[[str], None]) -> suites.Result:
  """Lets the contenders of a comparison take turns.

  Args:
    comparison: What they do.
    threads: Threads of TensorFlow.
    say: Called with each thing that is about to be done.

  Raises:
    UsageError: If a contender fails.
  """
  result: suites.Result = {name: [] for name in comparison.contenders}
  for build in range(comparison.builds):
    names = comparison.in_build(build)
    with contextlib.ExitStack() as stack:
      running = {}
      for name in names:
        say(f"{name}, build {build + 1}")
        running[name] = stack.enter_context(workers.Worker(workers.Task(
            name, comparison.model, comparison.num_towers, comparison.rows,
            threads, comparison.runs)))
        result[name].append(running[name].ask("build"))
      for turn in range(comparison.turns if comparison.runs else 0):
        say(f"turn {turn + 1}")
        # Nobody always comes after the same other.
        first = turn % len(names)
        for name in names[first:] + names[:first]:
          times = running[name].ask("turn", steps=comparison.steps)["times"]
          result[name][-1].setdefault("turns", []).append(
              statistics.median(times))
      for name in names:
        result[name][-1].update(running[name].ask("end"))
  return result


def run_all(options: Options, machine: Dict[str, Any],
            save: Callable[[tables.Results], None]) -> tables.Results:
  """Measures everything; says on standard error which it is at.

  Args:
    options: What to run.
    machine: Gets the minutes that it took.
    save: Called after every comparison with the results so far.
  """
  results: tables.Results = {}
  start = time.perf_counter()
  total = len(options.comparisons)
  for number, comparison in enumerate(options.comparisons, start=1):

    def say(what, number=number, comparison=comparison):
      minutes, seconds = divmod(int(time.perf_counter() - start), 60)
      print(f"{minutes:3d}:{seconds:02d} [{number}/{total}] {comparison}: "
            f"{what}", file=sys.stderr)

    results[comparison] = measure(comparison, options.threads, say)
    machine["minutes"] = (time.perf_counter() - start) / 60
    save(results)
  return results


def save_json(path: Optional[str], machine: Dict[str, Any],
              results: tables.Results) -> None:
  """Writes the figures, if there is a file to write them to."""
  if path is not None:
    pathlib.Path(path).write_text(
        json.dumps(tables.to_json(machine, results), indent=1) + "\n",
        encoding="utf-8")


def load_json(path: str) -> Tuple[Dict[str, Any], tables.Results]:
  """Returns the machine and the results in a file.

  Raises:
    UsageError: If it cannot be read or holds something else.
  """
  try:
    found = tables.from_json(json.loads(
        pathlib.Path(path).read_text(encoding="utf-8")))
    tables.report(*found)  # Figures that are none show there.
    return found
  except (OSError, ValueError, LookupError, TypeError, AttributeError,
          ArithmeticError) as error:
    raise UsageError("`--read` must be a file that `--json` wrote: got "
                     f"{path} ({error}).") from error


# --- The command line ---------------------------------------------------------


def parse(argv: Sequence[str]) -> Optional[Options]:
  """Returns the options that a command line asks for; None if it is for help.

  Raises:
    UsageError: If a flag is unknown or has a bad value.
  """
  values = command_line.flag_values()
  count = functools.partial(
      flags.DEFINE_integer, lower_bound=1, flag_values=values)
  text = functools.partial(flags.DEFINE_string, default=None,
                           flag_values=values)
  flags.DEFINE_enum("suite", None, list(suites.SUITES),
                    "Named list of comparisons; default: targets.",
                    flag_values=values)
  flags.DEFINE_enum("model", None, list(networks.NETWORKS),
                    "The network; one comparison instead of a suite.",
                    flag_values=values)
  count("num_towers", None, "Number of towers, likewise.")
  count("rows", None, "Rows of the batch for each tower, likewise.")
  count("builds", None, "How many times all is built, in new processes; also "
        "of a suite.")
  count("turns", None, "Turns of each contender after a build, likewise.",
        lower_bound=0)
  count("steps", None, "Timed steps of a turn, likewise.")
  flags.DEFINE_list("contenders", None, "Who takes part, in order: of "
                    f"{', '.join(workers.DESCRIPTIONS)}; likewise.",
                    flag_values=values)
  count("threads", Options.threads,
        "Threads of TensorFlow, within ops and between them; 0 for as many as "
        "there are cores.", lower_bound=0)
  text("json", help="File for all figures.")
  text("markdown", help="File for what is printed.")
  text("plots", help="Folder for pictures; needs matplotlib.")
  text("read", help="File that --json wrote: tables and pictures of that, "
       "nothing is measured.")
  if not command_line.read(values, argv, __doc__):
    return None
  for flag in ("json", "markdown"):
    command_line.check_writable(flag, values[flag].value)
  return Options(
      comparisons=_comparisons(values), threads=values.threads,
      json=values.json, markdown=values.markdown,
      plots=_checked_folder(values.plots), read=values.read)


def _comparisons(values: flags.FlagValues) -> Tuple[Comparison, ...]:
  changes = {name: values[name].value for name in _FIELDS
             if values[name].value is not None}
  if values.contenders is not None:
    _check_contenders(values.contenders)
    changes["contenders"] = tuple(values.contenders)
  if set(changes) & {"model", "num_towers", "rows"}:
    if values.suite is not None:
      raise UsageError(
          "`--suite` must stand without --model, --num_towers and --rows: got "
          f"{values.suite}. Leave it out for one comparison.")
    return (Comparison(**changes),)
  suite = suites.SUITES[values.suite or "targets"]
  return tuple(dict.fromkeys(
      dataclasses.replace(comparison, **changes) for comparison in suite))


def _check_contenders(names: Sequence[str]) -> None:
  unknown = [name for name in names if name not in workers.DESCRIPTIONS]
  if unknown or not names or len(set(names)) < len(names):
    raise UsageError(
        "`--contenders` must list different ones of "
        f"{', '.join(workers.DESCRIPTIONS)}: got {','.join(names)!r}.")


def _checked_folder(path: Optional[str]) -> Optional[str]:
  if path is not None:
    try:
      pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise UsageError("`--plots` must be a folder that can be made: got "
                       f"{path} ({error.strerror}).") from error
    plots.check_available()
  return path


def benchmark(options: Options) -> int:
  """Does what the options say; returns the exit status of the process."""
  if options.read is not None:
    machine, results = load_json(options.read)
  else:
    machine = tables.describe_machine(options.threads)
    results = run_all(options, machine,
                      functools.partial(save_json, options.json, machine))
  text = tables.report(machine, results)
  print(text)
  if options.markdown is not None:
    pathlib.Path(options.markdown).write_text(text + "\n", encoding="utf-8")
  if options.plots is not None:
    plots.draw_all(results, options.plots)
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""

  def action():
    options = parse(argv)
    return 0 if options is None else benchmark(options)

  return command_line.ended(argv, action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
