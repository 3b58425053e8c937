"""Measures what building a model in towers costs, beside what else there is.

  python tools/benchmark.py
  python tools/benchmark.py --model=resnet56 --num_towers=4 --rows=16 --steps=20

Trains residual networks on random 32x32 images, on logical CPU devices, by each
of several contenders: one device, a hand-written tower loop, and `towers`. Each
run is a process of its own, and the contenders take turns, so that whatever
else the machine does meets all of them. Prints a Markdown table for each
setting: medians, the range, and the ratio to the contender `loop` in the same
turn. By default a large graph (ResNet-110 in 8 towers) shows the time to build
it and to run its first step, and ResNet-20 in 2 towers the time of a step. That
takes about a quarter of an hour on two cores.
"""

import dataclasses
import functools
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tools import startup

startup.load_tensorflow()

from absl import flags
import numpy as np
import tensorflow.compat.v1 as tf

from models import resnet
from tools import command_line
from tools import contenders

UsageError = command_line.UsageError

IMAGE_SHAPE = (32, 32, 3)
NUM_CLASSES = 10
MODELS = {f"resnet{depth}": depth for depth in (8, 20, 32, 44, 56, 110)}

CONTENDERS = contenders.CONTENDERS
# Those that take part if no others are asked for.
DEFAULT_CONTENDERS = ("one", "loop", "towers", "converted")

# Where ratios are to this contender.
BASE = "loop"


@dataclasses.dataclass(frozen=True)
class Setting:
  """What all contenders do: `steps` timed steps after the first one."""
  model: str = "resnet20"
  num_towers: int = 2
  rows: int = 32
  steps: int = 20

  def __str__(self) -> str:
    return f"{self.model}, {self.num_towers} towers of {self.rows} rows"


DEFAULT_SETTINGS = (
    Setting("resnet110", 8, 4, steps=3),
    Setting("resnet20", 2, 32, steps=20),
    Setting("resnet20", 2, 128, steps=10),
)


@dataclasses.dataclass(frozen=True)
class Options:
  """What a run does; the flags of the same names say more."""
  settings: Sequence[Setting] = DEFAULT_SETTINGS
  contenders: Sequence[str] = DEFAULT_CONTENDERS
  repetitions: int = 3
  threads: int = 0
  json: Optional[str] = None
  here: bool = False


# --- One run ------------------------------------------------------------------


class Figure(NamedTuple):
  """A line of the tables: heading, and how to write a value."""
  heading: str
  form: str


FIGURES = {
    "ops": Figure("ops", "{:.0f}"),
    "build": Figure("build, s", "{:.2f}"),
    "first_step": Figure("first step, s", "{:.2f}"),
    "build_and_first_step": Figure("build + first step, s", "{:.2f}"),
    "step": Figure("step, s", "{:.3f}"),
    "examples_per_second": Figure("examples/s", "{:.0f}"),
    "peak_memory": Figure("peak memory, MB", "{:.0f}"),
}


def measure(contender: str, setting: Setting,
            threads: int = 0) -> Dict[str, float]:
  """Runs a contender in this process; returns a value for each of `FIGURES`.

  The memory is the most that the process has had so far, so a process must run
  no more than one contender. Without steps there is no time of a step.
  """
  rng = np.random.RandomState(0)
  rows = setting.num_towers * setting.rows
  with tf.Graph().as_default() as graph:
    tf.set_random_seed(0)
    start = time.perf_counter()
    images = tf.placeholder(tf.float32, [None, *IMAGE_SHAPE])
    labels = tf.placeholder(tf.int64, [None])
    built = CONTENDERS[contender](_loss_fn(setting.model), images, labels,
                                  setting.num_towers)
    figures = {"build": time.perf_counter() - start}
    initializer = tf.global_variables_initializer()
    figures["ops"] = len(graph.get_operations())
    built.config.intra_op_parallelism_threads = threads
    built.config.inter_op_parallelism_threads = threads
    feed = {
        images: rng.standard_normal([rows, *IMAGE_SHAPE]).astype(np.float32),
        labels: rng.randint(0, NUM_CLASSES, [rows]),
    }
    with tf.Session(config=built.config) as session:
      session.run(initializer)
      times = []
      for _ in range(1 + setting.steps):
        start = time.perf_counter()
        session.run(built.train_op, feed)
        times.append(time.perf_counter() - start)
  figures["first_step"] = times.pop(0)
  figures["build_and_first_step"] = figures["build"] + figures["first_step"]
  if times:
    figures["step"] = statistics.median(times)
    figures["examples_per_second"] = rows / figures["step"]
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  figures["peak_memory"] = peak / (2**20 if sys.platform == "darwin" else 2**10)
  return figures


def _loss_fn(model: str) -> contenders.LossFn:
  def loss_fn(images, labels):
    logits = resnet.logits(images, num_classes=NUM_CLASSES, training=True,
                           depth=MODELS[model])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            logits=logits, labels=labels))

  return loss_fn


# --- All runs -----------------------------------------------------------------


def run_apart(contender: str, setting: Setting,
              threads: int) -> Dict[str, float]:
  """Returns what `measure` returns in a process of its own.

  Raises:
    UsageError: If that process fails.
  """
  values = {**dataclasses.asdict(setting), "threads": threads}
  command = [sys.executable, __file__, "--here", f"--contenders={contender}"]
  command += [f"--{name}={value}" for name, value in values.items()]
  process = subprocess.run(command, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, check=False)
  if process.returncode:
    lines = process.stderr.strip().splitlines() or ["it says nothing"]
    raise UsageError(f"`{contender}` must run in {setting}: it ended with "
                     f"status {process.returncode} ({lines[-1]}).")
  return json.loads(process.stdout)


# For each contender, the figures of each repetition.
Result = Dict[str, List[Dict[str, float]]]


def run_all(options: Options, save: Callable[[List[Result]], None]) -> None:
  """Runs all settings; says on standard error which it is at.

  Args:
    options: What to run.
    save: Called after every run with the results so far, one per setting.
  """
  results: List[Result] = []
  total = (len(options.settings) * options.repetitions *
           len(options.contenders))
  done = 0
  for setting in options.settings:
    result: Result = {name: [] for name in options.contenders}
    results.append(result)
    for _ in range(options.repetitions):
      for contender in options.contenders:
        done += 1
        print(f"[{done}/{total}] {setting}: {contender}", file=sys.stderr)
        result[contender].append(
            run_apart(contender, setting, options.threads))
        save(results)
    print(table(setting, result) + "\n", flush=True)


def save_json(options: Options, machine: Dict[str, Any],
              results: Sequence[Result]) -> None:
  """Writes the figures of every run, if there is a file to write them to."""
  if options.json is not None:
    settings = [{**dataclasses.asdict(setting), "contenders": result}
                for setting, result in zip(options.settings, results)]
    pathlib.Path(options.json).write_text(
        json.dumps({"machine": machine, "settings": settings}, indent=2) + "\n",
        encoding="utf-8")


def describe_machine(threads: int) -> Dict[str, Any]:
  """Returns what the figures depend on beside the code."""
  cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
           else os.cpu_count())
  return {
      "cores": cores,
      "processor": platform.machine(),
      "tensorflow": tf.__version__,
      "python": platform.python_version(),
      "threads": threads or cores,
      "load_before": round(os.getloadavg()[0], 2),
  }


def table(setting: Setting, result: Result) -> str:
  """Returns one setting's figures as a Markdown table."""
  lines = [[str(setting)] + [f"`{contender}`" for contender in result],
           ["---"] + ["---:"] * len(result)]
  for name, figure in FIGURES.items():
    if all(name in run for runs in result.values() for run in runs):
      base = [run[name] for run in result.get(BASE, [])]
      lines.append([figure.heading] + [
          _cell(figure.form, [run[name] for run in runs],
                base if contender != BASE else [])
          for contender, runs in result.items()])
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(form: str, values: Sequence[float], base: Sequence[float]) -> str:
  low, middle, high = [
      form.format(value)
      for value in (min(values), statistics.median(values), max(values))]
  text = middle if low == high else f"{middle} ({low} to {high})"
  if base:
    ratio = statistics.median([a / b for a, b in zip(values, base)])
    text += f" **{ratio:.2f}**"
  return text


def legend(options: Options, machine: Dict[str, Any]) -> str:
  """Returns what there is to know about the tables."""
  names = "\n".join(f"- `{name}`: {CONTENDERS[name].__doc__.splitlines()[0]}"
                    for name in options.contenders)
  ratios = (f" In bold the ratio to `{BASE}`, the median of those of each turn."
            if BASE in options.contenders else "")
  return (
      f"{names}\n\n"
      f"Medians of {options.repetitions} runs (lowest to highest).{ratios}\n"
      f"{machine['cores']} cores ({machine['processor']}), "
      f"{machine['threads']} threads, TensorFlow {machine['tensorflow']}, "
      f"Python {machine['python']}; load before the first run: "
      f"{machine['load_before']}.")


# --- The command line ---------------------------------------------------------


def parse(argv: Sequence[str]) -> Optional[Options]:
  """Returns the options that a command line asks for; None if it is for help.

  Raises:
    UsageError: If a flag is unknown or has a bad value.
  """
  values = command_line.flag_values()
  count = functools.partial(
      flags.DEFINE_integer, lower_bound=1, flag_values=values)
  flags.DEFINE_enum("model", None, list(MODELS),
                    "The network; one setting instead of the default ones.",
                    flag_values=values)
  count("num_towers", None, "Number of towers, likewise.")
  count("rows", None, "Rows of the batch for each tower, likewise.")
  count("steps", None,
        "Timed steps after the first one, also in the default settings.",
        lower_bound=0)
  count("repetitions", Options.repetitions, "Runs of each contender.")
  flags.DEFINE_list("contenders", list(DEFAULT_CONTENDERS),
                    f"Who takes part, in order: of {', '.join(CONTENDERS)}.",
                    flag_values=values)
  count("threads", Options.threads,
        "Threads of TensorFlow, within ops and between them; 0 for as many as "
        "there are cores.", lower_bound=0)
  flags.DEFINE_string("json", None, "File for the figures of every run.",
                      flag_values=values)
  flags.DEFINE_boolean("here", False,
                       "Runs one contender in this process, and prints its "
                       "figures as JSON; the script calls itself by it.",
                       flag_values=values)
  if not command_line.read(values, argv, __doc__):
    return None
  _check_contenders(values.contenders, values.here)
  command_line.check_writable("json", values.json)
  return Options(
      settings=_settings(values), contenders=tuple(values.contenders),
      repetitions=values.repetitions, threads=values.threads, json=values.json,
      here=values.here)


def _settings(values: flags.FlagValues) -> Sequence[Setting]:
  given = {
      name: values[name].value
      for name in ("model", "num_towers", "rows", "steps")
      if values[name].value is not None
  }
  if set(given) - {"steps"}:
    return (Setting(**given),)
  return tuple(dataclasses.replace(setting, **given)
               for setting in DEFAULT_SETTINGS)


def _check_contenders(names: Sequence[str], here: bool) -> None:
  unknown = [name for name in names if name not in CONTENDERS]
  if unknown or not names or len(set(names)) < len(names):
    raise UsageError(
        f"`--contenders` must list different ones of {', '.join(CONTENDERS)}: "
        f"got {','.join(names)!r}.")
  if here and len(names) > 1:
    raise UsageError("`--here` must come with one of `--contenders`: got "
                     f"{','.join(names)}.")


def benchmark(options: Options) -> int:
  """Does what the options say; returns the exit status of the process."""
  if options.here:
    print(json.dumps(measure(options.contenders[0], options.settings[0],
                             options.threads)))
    return 0
  machine = describe_machine(options.threads)
  run_all(options, functools.partial(save_json, options, machine))
  print(legend(options, machine))
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()

  def action():
    options = parse(argv)
    return 0 if options is None else benchmark(options)

  return command_line.ended(argv, action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
