"""Measures what batch norm over the whole batch is worth with few rows a tower.

  python tools/batch_norm_experiment.py
  python tools/batch_norm_experiment.py --settings=digits_2 --seeds=5 \\
    --output=runs.json --picture=curves.png

Trains the same network three times, from the same weights, on the same batches,
for as many steps and at the same learning rates:

- `one device`: plain code on the whole batch, without towers;
- `whole batch`: 8 towers, `sync_batch_norm=True`;
- `per tower`: 8 towers, `sync_batch_norm=False`, where each normalises by the
  moments of its own one or two rows.

The settings are a U-Net on the data set `shapes`, with one and with two images
a tower, and a ResNet-8 on `digits` with two. On the way and at the end, all
test images are tested with the moving statistics. Prints a Markdown table: mean
over the seeds, and the range. A seed chooses the initial weights, the order of
the images and how they are augmented.

`--output` keeps the scores of each run as JSON; runs that it has already are
not done again, so that an interrupted experiment goes on where it was. By
default the whole takes up to 25 minutes on two cores.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from typing import Callable, List, Optional, Sequence

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tools import startup

startup.load_tensorflow()

from absl import flags
import numpy as np
import tensorflow.compat.v1 as tf

from tools import batch_norm_runs
from tools import command_line
from tools import datasets

UsageError = command_line.UsageError
CONTENDERS = batch_norm_runs.CONTENDERS
Run = batch_norm_runs.Run
Setting = batch_norm_runs.Setting

SETTINGS = {
    "shapes_1": Setting("shapes", rows=1, steps=400),
    "shapes_2": Setting("shapes", rows=2, steps=300),
    "digits_2": Setting("digits", rows=2, steps=400),
}

# Of the points where the test images are tested, the table shows so many.
ROWS_OF_TABLE = 4


@dataclasses.dataclass(frozen=True)
class Options:
  """What an experiment does; the flags of the same names say more."""
  settings: Sequence[Setting] = tuple(SETTINGS.values())
  seeds: int = 3
  output: Optional[str] = None
  picture: Optional[str] = None


def run_all(options: Options, done: Sequence[Run],
            save: Callable[[Sequence[Run]], None]) -> List[Run]:
  """Does all runs that are not `done`; says on standard error which it is at.

  Args:
    options: What to run.
    done: Runs of before, these or others.
    save: Called after each run with those of before and of now.

  Returns:
    All runs, those of before included.
  """
  runs = list(done)
  # Seed by seed: an interrupted experiment has the first seeds of everything.
  todo = [(setting, seed, contender) for seed in range(options.seeds)
          for setting in options.settings for contender in CONTENDERS]
  for number, (setting, seed, contender) in enumerate(todo, start=1):
    key = batch_norm_runs.key_of(setting, contender, seed)
    if any(run.key == key for run in runs):
      continue
    print(f"[{number}/{len(todo)}] {setting.title}, seed {seed}: {contender}",
          file=sys.stderr, flush=True)
    runs.append(batch_norm_runs.measure(
        setting, contender, seed, _load(setting.dataset, setting.image_size)))
    save(runs)
  return runs


# Drawing the shapes takes seconds.
@functools.cache
def _load(name: str, image_size: Optional[int]) -> datasets.Dataset:
  return datasets.load(name, image_size=image_size)


def scores_of(runs: Sequence[Run], setting: Setting, contender: str,
              seeds: int) -> np.ndarray:
  """Returns the scores of a contender, `[seeds, evaluations]`."""
  keys = [batch_norm_runs.key_of(setting, contender, seed)
          for seed in range(seeds)]
  return np.array([next(run.scores for run in runs if run.key == key)
                   for key in keys])


def table(options: Options, runs: Sequence[Run]) -> str:
  """Returns the scores of the settings as a Markdown table."""
  lines = [["setting", "step", *(f"`{name}`" for name in CONTENDERS)],
           ["---", "---:"] + ["---:"] * len(CONTENDERS)]
  for setting in options.settings:
    scores = {name: scores_of(runs, setting, name, options.seeds)
              for name in CONTENDERS}
    # Evenly spaced, the last one included.
    shown = sorted({-(-setting.evaluations * row // ROWS_OF_TABLE) - 1
                    for row in range(1, ROWS_OF_TABLE + 1)})
    for point in shown:
      lines.append([f"{setting.title}: {setting.metric}"
                    if point == shown[0] else "",
                    str(setting.points[point])] +
                   [_cell(values[:, point]) for values in scores.values()])
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(values: np.ndarray) -> str:
  text = f"{values.mean():.3f}"
  if len(values) > 1:
    text += f" ({values.min():.3f} to {values.max():.3f})"
  return text


def draw(options: Options, runs: Sequence[Run], path: str) -> None:
  """Draws the curves of each setting: mean over the seeds, and range."""
  from matplotlib import figure  # Nothing else here needs it.
  count = len(options.settings)
  picture = figure.Figure(figsize=(1.0 + 4.0 * count, 3.6),
                          layout="constrained")
  all_axes = picture.subplots(1, count, squeeze=False)[0]
  # Thin and dashed on thick and pale: equal curves show as one with both.
  looks = [dict(color="tab:orange", linewidth=5.0, alpha=0.5),
           dict(color="tab:blue", linewidth=1.5, linestyle="--"),
           dict(color="tab:red", linewidth=1.5, marker=".")]
  for axes, setting in zip(all_axes, options.settings):
    for name, look in zip(CONTENDERS, looks):
      scores = scores_of(runs, setting, name, options.seeds)
      axes.plot(setting.points, scores.mean(axis=0), label=name, **look)
      axes.fill_between(setting.points, scores.min(axis=0), scores.max(axis=0),
                        color=look["color"], alpha=0.15, linewidth=0.0)
    axes.set_title(setting.title, fontsize="medium")
    axes.set_xlabel("step")
    axes.set_ylabel(f"{setting.metric}, test images")
    axes.grid(alpha=0.3)
  all_axes[0].legend()
  picture.savefig(path, dpi=90)


# --- The command line ---------------------------------------------------------


def parse(argv: Sequence[str]) -> Optional[Options]:
  """Returns the options that a command line asks for; None if it is for help.

  Raises:
    UsageError: If a flag is unknown or has a bad value.
  """
  values = command_line.flag_values()
  flags.DEFINE_list("settings", list(SETTINGS),
                    f"Which to run, in order: of {', '.join(SETTINGS)}.",
                    flag_values=values)
  flags.DEFINE_integer("seeds", Options.seeds, "Number of seeds, from 0 on.",
                       lower_bound=1, flag_values=values)
  flags.DEFINE_integer("steps", None,
                       "Number of steps, instead of each setting's own.",
                       lower_bound=1, flag_values=values)
  flags.DEFINE_string("output", None,
                      "JSON file for the scores of every run, and with those "
                      "that need not be done again.", flag_values=values)
  flags.DEFINE_string("picture", None,
                      "File for a picture of the curves, such as curves.png; "
                      "needs matplotlib.", flag_values=values)
  if not command_line.read(values, argv, __doc__):
    return None
  names = values.settings
  if not names or not set(names) <= set(SETTINGS) or (
      len(set(names)) < len(names)):
    raise UsageError(
        f"`--settings` must list different ones of {', '.join(SETTINGS)}: got "
        f"{','.join(names)!r}.")
  settings = [SETTINGS[name] for name in names]
  if values.steps is not None:
    settings = [dataclasses.replace(
        setting, steps=values.steps,
        evaluations=min(setting.evaluations, values.steps))
                for setting in settings]
  command_line.check_writable("output", values.output)
  _check_picture(values.picture)
  return Options(tuple(settings), values.seeds, values.output, values.picture)


def _check_picture(path: Optional[str]) -> None:
  if path is None:
    return
  try:
    from matplotlib import figure
  except ImportError as error:
    raise UsageError(
        "`--picture` must not be given without matplotlib: got "
        f"{path} ({error}). Run: pip install matplotlib") from error
  kinds = figure.Figure().canvas.get_supported_filetypes()
  if pathlib.Path(path).suffix[1:].lower() not in kinds:
    raise UsageError("`--picture` must end in the name of a file type, one of "
                     f"{', '.join(sorted(kinds))}: got {path}.")
  command_line.check_writable("picture", path)


def load_runs(path: Optional[str]) -> List[Run]:
  """Returns the runs of an earlier experiment; none without a file.

  Raises:
    UsageError: If the file holds something else.
  """
  if path is None:
    return []
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8")
    return [Run(**run) for run in json.loads(text or "[]")]
  except (ValueError, TypeError) as error:
    raise UsageError("`--output` must be a new file, or one of an earlier "
                     f"experiment: got {path} ({error}).") from error


def save_runs(path: Optional[str], runs: Sequence[Run]) -> None:
  """Writes the runs as JSON, if there is a file to write them to."""
  if path is not None:
    lines = ",\n".join(json.dumps(run._asdict()) for run in runs)
    pathlib.Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def experiment(options: Options) -> int:
  """Does what the options say; returns the exit status of the process."""
  runs = run_all(options, load_runs(options.output),
                 functools.partial(save_runs, options.output))
  print(table(options, runs))
  if options.picture is not None:
    draw(options, runs, options.picture)
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()

  def action():
    options = parse(argv)
    return 0 if options is None else experiment(options)

  return command_line.ended(argv, action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
