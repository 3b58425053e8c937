"""The processes of the benchmark: one for each contender, which take turns.

A worker builds its contender and then waits on a pipe for what to do next: to
build, to run a turn of steps, or to end and say what else there is to say. So
turns alternate between processes that are all warm, and while one runs the
others sleep.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Optional

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tools import startup

startup.load_tensorflow()

import numpy as np
import tensorflow.compat.v1 as tf
import towers

from tools import command_line
from tools import contenders
from tools import mirrored
from tools import networks

MIRRORED = "mirrored"
DESCRIPTIONS = {
    **{name: function.__doc__.splitlines()[0]
       for name, function in contenders.CONTENDERS.items()},
    MIRRORED: mirrored.DESCRIPTION,
}
_FIRST_DEVICE = ("", "/device:CPU:0")
# Graphs of more ops take minutes to search for what travels.
_MOST_OPS_TO_SEARCH = 100000


@dataclasses.dataclass(frozen=True)
class Task:
  """What one worker does.

  Fields:
    contender: One of `DESCRIPTIONS`.
    model: One of `networks.NETWORKS`.
    num_towers: Number of towers.
    rows: Rows of the batch for each tower.
    threads: Threads of TensorFlow, within ops and between them; 0 for one per
      core.
    runs: Whether it runs steps; otherwise it builds only.
  """
  contender: str
  model: str
  num_towers: int
  rows: int
  threads: int = 0
  runs: bool = True


# --- In the worker ------------------------------------------------------------


class GraphRun:
  """A contender in graph mode."""

  def __init__(self, task: Task):
    self._task = task
    self._network = networks.NETWORKS[task.model]
    self.graph = tf.Graph()
    self._built: Any = None
    self._placeholders: Any = None
    self._initializer: Any = None
    self._session: Any = None
    self._feed: Any = None

  def build(self, images: np.ndarray, labels: np.ndarray) -> None:
    """Builds the graph of training."""
    task = self._task
    with self.graph.as_default():
      tf.set_random_seed(0)
      self._placeholders = [
          tf.placeholder(tf.float32, images.shape),
          tf.placeholder(tf.int64, labels.shape)
      ]
      self._built = contenders.CONTENDERS[task.contender](
          self._network, *self._placeholders, task.num_towers)
      self._initializer = tf.global_variables_initializer()

  def prepare(self, images: np.ndarray, labels: np.ndarray) -> None:
    """Opens a session and sets the variables."""
    config = self._built.config
    config.intra_op_parallelism_threads = self._task.threads
    config.inter_op_parallelism_threads = self._task.threads
    self._feed = dict(zip(self._placeholders, (images, labels)))
    self._session = tf.Session(graph=self.graph, config=config)
    self._session.run(self._initializer)

  def step(self) -> None:
    """Trains on the batch."""
    self._session.run(self._built.train_op, self._feed)

  def num_ops(self) -> int:
    """Returns how many ops the graph has."""
    return len(self.graph.get_operations())

  def bytes_between_devices(self) -> Optional[int]:
    """Returns what a step sends from one device to another; None if unknown."""
    if self.num_ops() > _MOST_OPS_TO_SEARCH:
      return None
    report = towers.inspection.report(
        self.graph, train_op=self._built.train_op)
    # Ops that name no device run on the first.
    return sum(t.num_bytes for t in report.transfers
               if not {t.source, t.target} <= set(_FIRST_DEVICE))


class MirroredRun:
  """The contender `mirrored`."""

  def __init__(self, task: Task):
    self._run = mirrored.Mirrored(
        networks.NETWORKS[task.model], task.num_towers, task.threads)
    self.build = self._run.build
    self.step = self._run.step
    self.bytes_between_devices = self._run.bytes_between_devices

  @property
  def graph(self) -> tf.Graph:
    return self._run.graph

  def prepare(self, images: np.ndarray, labels: np.ndarray) -> None:
    """Does nothing: the variables have their values from the start."""

  def num_ops(self) -> int:
    """Returns how many ops a step has, those of its functions included."""
    definition = self.graph.as_graph_def()
    return len(definition.node) + sum(
        len(function.node_def) for function in definition.library.function)


def batch(task: Task) -> List[np.ndarray]:
  """Returns random images and labels, the same for all contenders."""
  network = networks.NETWORKS[task.model]
  rng = np.random.RandomState(0)
  rows = task.num_towers * task.rows
  images = rng.standard_normal([rows, *network.image_shape])
  labels = rng.randint(0, networks.NUM_CLASSES, [rows, *network.labels_shape])
  return [images.astype(np.float32), labels]


class Served:
  """What a worker does when it is asked; figures are in seconds and MB."""

  def __init__(self, task: Task):
    self._task = task
    self._run = (MirroredRun if task.contender == MIRRORED else GraphRun)(task)
    self._resident = 0.0
    self._peak_before = 0.0

  def build(self) -> Dict[str, float]:
    """Builds, and runs the first step."""
    data = batch(self._task)
    start = time.perf_counter()
    self._run.build(*data)
    figures = {"build": time.perf_counter() - start}
    if self._task.runs:
      self._run.prepare(*data)
      # From here on the peak is that of the steps.
      self._peak_before = peak_memory()
      forget_peak_memory()
      self._resident = resident_memory()
      start = time.perf_counter()
      self._run.step()
      figures["first_step"] = time.perf_counter() - start
      figures["build_and_first_step"] = (
          figures["build"] + figures["first_step"])
    return figures

  def turn(self, steps: int) -> Dict[str, List[float]]:
    """Times `steps` steps, after one that wakes the process up."""
    times = []
    for _ in range(1 + steps):
      start = time.perf_counter()
      self._run.step()
      times.append(time.perf_counter() - start)
    return {"times": times[1:]}

  def end(self) -> Dict[str, float]:
    """Returns the figures that are known at the end."""
    peak = peak_memory()
    figures = {"peak_memory": max(peak, self._peak_before)}
    if self._task.runs:
      figures["step_memory"] = peak - self._resident
    graph = self._run.graph
    figures["ops"] = self._run.num_ops()
    figures["graph_bytes"] = graph.as_graph_def().ByteSize()
    figures["merge_ops"] = sum(
        op.name.startswith("cross_tower/") and op.type != "NoOp"
        for op in graph.get_operations())
    sent = self._run.bytes_between_devices()
    if sent is not None:
      figures["bytes_between_devices"] = sent
    return figures


def _status(key: str) -> float:
  """Returns a line of Linux' account of this process, in MB."""
  text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
  lines = [line.split() for line in text.splitlines()]
  return next(float(line[1]) for line in lines if line[0] == f"{key}:") / 1024


def peak_memory() -> float:
  return _status("VmHWM")


def resident_memory() -> float:
  return _status("VmRSS")


def forget_peak_memory() -> None:
  """Starts the peak anew, where the system allows it."""
  try:
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
  except OSError:
    pass


def serve(task: Task, requests: Any, answers: Any) -> None:
  """Answers requests, one line of JSON each, until there are no more."""
  if task.contender != MIRRORED:
    tf.disable_v2_behavior()
  served = Served(task)
  for line in requests:
    request = json.loads(line)
    result = getattr(served, request.pop("do"))(**request)
    answers.write(json.dumps(result) + "\n")
    answers.flush()


# --- In the process that asks -------------------------------------------------


class Worker:
  """A worker process; use it as a context, which ends the process."""

  def __init__(self, task: Task):
    self._task = task
    self._errors = tempfile.TemporaryFile("w+", encoding="utf-8",
                                          errors="replace")
    self._process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(dataclasses.asdict(task))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        text=True)

  def __enter__(self) -> "Worker":
    return self

  def __exit__(self, *_: Any) -> None:
    self._process.kill()
    self._process.communicate()
    self._errors.close()

  def ask(self, request: str, **arguments: Any) -> Dict[str, Any]:
    """Returns what the method `request` of `Served` returns there.

    Raises:
      UsageError: If the process has ended.
    """
    try:
      self._process.stdin.write(json.dumps({"do": request, **arguments}) + "\n")
      self._process.stdin.flush()
    except BrokenPipeError:
      pass  # Reading tells why.
    line = self._process.stdout.readline()
    if line:
      return json.loads(line)
    status = self._process.wait()
    self._errors.seek(0)
    lines = self._errors.read().strip().splitlines() or ["it says nothing"]
    task = self._task
    raise command_line.UsageError(
        f"`{task.contender}` must run {task.model} in {task.num_towers} towers "
        f"of {task.rows} rows: it ended with status {status} ({lines[-1]}).")


def main(arguments: List[str], requests: Optional[Any] = None) -> None:
  """Serves on standard input and output."""
  # What else is written to standard output must not come between the answers.
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)
  serve(Task(**json.loads(arguments[0])), requests or sys.stdin, answers)


if __name__ == "__main__":
  main(sys.argv[1:])
