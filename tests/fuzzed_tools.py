"""Random command lines and damaged files for the tools, in this process.

What comes in is data of a `Damaged` or a `CommandLine`; `check` writes whole
files into a folder of their own, damages them, and runs a tool on them. A tool
may succeed or end with one line on standard error. It must not raise, nor
change a file that was there.
"""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import tempfile
from typing import Any, Callable, Dict, List, Sequence, Tuple
import warnings

from hypothesis import strategies as st
import numpy as np
import tensorflow.compat.v1 as tf

import dataset_cases
from tools import benchmark
from tools import benchmark_suites
from tools import benchmark_tables
from tools import command_line
from tools import evaluate
from tools import export
from tools import import_checkpoint
from tools import inspect_graph
from tools import launch
from tools import precise_batch_norm
from tools import predict
from tools import train
from tools import training
from tools import training_options
from tools import verify

Files = Dict[str, bytes]


@dataclasses.dataclass(frozen=True)
class Edit:
  """How a file is damaged: which, how, where (of 1000) and with what."""
  file: int
  kind: str
  place: int
  value: int


@dataclasses.dataclass(frozen=True)
class Damaged:
  """A tool and what is done to its files."""
  target: str
  edits: Tuple[Edit, ...]


@dataclasses.dataclass(frozen=True)
class CommandLine:
  """A tool and its flags; `FOLDER` stands for one with nothing of use."""
  tool: str
  flags: Tuple[str, ...]


# --- Whole files, and what reads them -----------------------------------------


def _graph() -> tf.Graph:
  with tf.Graph().as_default() as graph:
    x = tf.placeholder(tf.float32, [None, 2], name="x")
    for index in range(2):
      with tf.name_scope(f"tower_{index}"), tf.variable_scope(
          "", reuse=index > 0):
        kernel = tf.get_variable("kernel", [2, 2])
        y = tf.reduce_mean(tf.matmul(x, kernel), name="y")
    tf.train.GradientDescentOptimizer(0.1).minimize(y)
  return graph


def _graph_files(folder: pathlib.Path) -> None:
  graph = _graph()
  tf.io.write_graph(graph, str(folder), "graph.pb", as_text=False)
  tf.io.write_graph(graph, str(folder), "graph.pbtxt")
  (folder / "graph.meta").write_bytes(
      tf.train.export_meta_graph(graph=graph).SerializeToString())
  writer = tf.summary.FileWriter(str(folder / "events"), graph)
  writer.close()
  event, = (folder / "events").iterdir()
  event.rename(folder / "events.out.tfevents.1")
  (folder / "events").rmdir()


def _inspect(name: str, folder: pathlib.Path) -> int:
  return inspect_graph.main(["inspect_graph.py", f"--graph={folder / name}",
                             f"--json={folder / 'new.json'}"])


def _checkpoint_files(folder: pathlib.Path) -> None:
  with tf.Graph().as_default(), tf.Session() as sess:
    for name in ("tower_0/dense/kernel", "tower_1/dense/kernel", "step"):
      tf.get_variable(name, [3, 5], initializer=tf.ones_initializer())
    sess.run(tf.global_variables_initializer())
    saver = tf.train.Saver(save_relative_paths=True)
    saver.save(sess, str(folder / "model.ckpt"), 7, write_meta_graph=False)


def _import(folder: pathlib.Path) -> int:
  return import_checkpoint.main([
      "import_checkpoint.py", f"--checkpoint={folder}", "--tower=0",
      f"--output={folder / 'new.ckpt'}", "--nooverwrite"])


def _run_files(folder: pathlib.Path) -> None:
  _checkpoint_files(folder)
  options = training_options.Options(batch_size=4, num_towers=2)
  training_options.save_run(training_options.Run(
      options, "classification", (8, 8, 1), 10, None, None, (0.5,), (0.25,)),
                            str(folder))


def _evaluate(folder: pathlib.Path) -> int:
  return evaluate.main(["evaluate.py", f"--logdir={folder}"])


def _export(folder: pathlib.Path) -> int:
  return export.main(["export.py", f"--logdir={folder}",
                      f"--export_dir={folder / 'new'}"])


def _reestimate(folder: pathlib.Path) -> int:
  return precise_batch_norm.main(["precise_batch_norm.py",
                                  f"--logdir={folder}"])


def _predict_files(folder: pathlib.Path) -> None:
  with tf.Graph().as_default() as graph:
    x = tf.placeholder(tf.float32, [None, 2], name="x")
    tf.identity(2.0 * x, name="y")
  tf.io.write_graph(graph, str(folder), "graph.pb", as_text=False)
  np.save(folder / "images.npy", np.ones([3, 2], np.float32))


def _predict(folder: pathlib.Path) -> int:
  return predict.main([
      "predict.py", f"--frozen_graph={folder / 'graph.pb'}", "--input=x:0",
      "--fetch=y:0", f"--images={folder / 'images.npy'}",
      f"--output={folder / 'new.npz'}"])


def _benchmark_files(folder: pathlib.Path) -> None:
  comparison = benchmark_suites.Comparison(contenders=("loop", "towers"))
  runs = [{"build": 1.5, "ops": 200 + k, "first_step": 0.5, "turns": [0.25, 1],
           "peak_memory": 1e6} for k in range(2)]
  benchmark.save_json(str(folder / "results.json"),
                      benchmark_tables.describe_machine(2),
                      {comparison: dict.fromkeys(comparison.contenders, runs)})


def _benchmark(folder: pathlib.Path) -> int:
  return benchmark.main(["benchmark.py", f"--read={folder / 'results.json'}"])


def _load(name: str, folder: pathlib.Path) -> int:
  path = folder / name if "." in name else None
  options = training_options.Options(
      dataset=str(path or name), data_dir=None if path else str(folder))

  def action():
    training.load_data(options)
    return 0
  return command_line.ended(["train.py"], action)


def _npz(folder: pathlib.Path) -> None:
  images, labels = np.zeros([4, 8, 8], np.uint8), np.arange(4)
  np.savez(folder / "digits.npz", x_train=images, y_train=labels,
           x_test=images, y_test=labels)


def _cifar(is_pickle: bool, folder: pathlib.Path) -> None:
  contents, _, _ = dataset_cases.cifar_files("cifar10", is_pickle=is_pickle)
  for name, content in contents.items():
    dataset_cases.write(folder / name, content)


def _archive(folder: pathlib.Path) -> None:
  contents, _, _ = dataset_cases.cifar_files("cifar10", is_pickle=True)
  dataset_cases.archive(folder / "cifar.tar.gz", contents)


def _load_archive(folder: pathlib.Path) -> int:
  return _load("cifar10", folder / "cifar.tar.gz")


TARGETS: Dict[str, Tuple[Callable[[pathlib.Path], Any],
                         Callable[[pathlib.Path], int]]] = {
    **{name: (_graph_files, functools.partial(_inspect, name)) for name in (
        "graph.pb", "graph.pbtxt", "graph.meta", "events.out.tfevents.1")},
    "import_checkpoint": (_checkpoint_files, _import),
    "evaluate": (_run_files, _evaluate),
    "export": (_run_files, _export),
    "precise_batch_norm": (_run_files, _reestimate),
    "predict": (_predict_files, _predict),
    "benchmark": (_benchmark_files, _benchmark),
    "mnist": (dataset_cases.mnist, functools.partial(_load, "mnist")),
    "mnist_gz": (functools.partial(dataset_cases.mnist, compress=True),
                 functools.partial(_load, "mnist")),
    "cifar10": (functools.partial(_cifar, True),
                functools.partial(_load, "cifar10")),
    "cifar10_binary": (functools.partial(_cifar, False),
                       functools.partial(_load, "cifar10")),
    "cifar10_archive": (_archive, _load_archive),
    "npz": (_npz, functools.partial(_load, "digits.npz")),
    "images": (dataset_cases.folders, functools.partial(_load, "images")),
    "tfrecords": (dataset_cases.record_files,
                  functools.partial(_load, "tfrecords")),
    "voc": (dataset_cases.voc, functools.partial(_load, "voc")),
}


@functools.cache
def _whole(write: Callable[[pathlib.Path], Any]) -> Files:
  with tempfile.TemporaryDirectory() as folder:
    write(pathlib.Path(folder))
    return snapshot(pathlib.Path(folder))


def snapshot(folder: pathlib.Path) -> Files:
  """Returns what the files below a folder hold, by their names."""
  return {str(path.relative_to(folder)): path.read_bytes()
          for path in sorted(folder.rglob("*")) if path.is_file()}


# --- Damage -------------------------------------------------------------------

VALUES = (None, -1, 0, 1.5, 10**30, "x", "", [], {}, True, [1], ["a", "b"],
          {"a": 1}, "/nonexistent", float("nan"), "unet")


def _leaves(value: Any) -> List[Tuple[Any, Any]]:
  """Returns all places in JSON, as a container and a key."""
  keys = value.keys() if isinstance(value, dict) else (
      range(len(value)) if isinstance(value, list) else ())
  return [(value, key) for key in keys] + [
      place for key in keys for place in _leaves(value[key])]


def _other_json(content: bytes, edit: Edit) -> bytes:
  value = json.loads(content)
  places = _leaves(value)
  if not places:
    return content
  container, key = places[edit.place % len(places)]
  if edit.value % 5 == 0:
    del container[key]
  else:
    container[key] = VALUES[edit.value % len(VALUES)]
  return json.dumps(value).encode()


def damaged(content: bytes, edit: Edit) -> bytes:
  """Returns the content of a file after an edit."""
  place = edit.place * len(content) // 1000
  if edit.kind == "other_json":
    try:
      return _other_json(content, edit)
    except ValueError:
      pass  # No JSON: another byte.
  noise = np.random.RandomState(edit.value).bytes(1 + edit.value % 40)
  changed = bytes(byte ^ (1 + edit.value % 255)
                  for byte in content[place:place + 1])
  return {
      "cut": content[:place], "empty": b"", "extend": content + noise,
      "insert": content[:place] + noise + content[place:],
      "overwrite": content[:place] + noise + content[place + len(noise):],
      "drop": content[:place] + content[place + 1 + edit.value % 40:],
      "noise": noise,
  }.get(edit.kind, content[:place] + changed + content[place + 1:])


KINDS = ("flip", "flip", "cut", "empty", "extend", "insert", "overwrite",
         "drop", "noise", "remove", "folder", "other_json", "other_json")


def _write(folder: pathlib.Path, files: Files, edits: Sequence[Edit]) -> None:
  files, folders = dict(files), []
  for edit in edits:
    if files:
      name = sorted(files)[edit.file % len(files)]
      if edit.kind in ("remove", "folder"):
        del files[name]
        folders += [name] if edit.kind == "folder" else []
      else:
        files[name] = damaged(files[name], edit)
  for name, content in files.items():
    dataset_cases.write(folder / name, content)
  for name in folders:
    (folder / name).mkdir(parents=True, exist_ok=True)


# --- Command lines ------------------------------------------------------------


def _parse(argv: Sequence[str]) -> int:
  """Does what train.py does before it trains."""
  def action():
    options = train.parse(argv)
    if options is not None:
      training.load_data(options)
    return 0
  return command_line.ended(argv, action)


def _parse_benchmark(argv: Sequence[str]) -> int:
  def action():
    benchmark.parse(argv)
    return 0
  return command_line.ended(argv, action)


def _parse_launch(argv: Sequence[str]) -> int:
  def action():
    own, program_flags = launch.split(argv)
    launch.check_program_flags(program_flags)
    # pylint: disable-next=protected-access
    command_line.read(launch._flags(), own, "")
    return 0
  return command_line.ended(argv, action)


TOOLS: Dict[str, Callable[[Sequence[str]], int]] = {
    "train.py": _parse,
    "benchmark.py": _parse_benchmark,
    "launch.py": _parse_launch,
    "evaluate.py": evaluate.main,
    "export.py": export.main,
    "precise_batch_norm.py": precise_batch_norm.main,
    "predict.py": predict.main,
    "inspect_graph.py": inspect_graph.main,
    "import_checkpoint.py": import_checkpoint.main,
    "verify.py": verify.main,
}

NAMES = (
    "model", "dataset", "data_dir", "image_size", "num_towers", "devices",
    "batch_size", "accumulate_steps", "learning_rate", "warm_up", "clip_norm",
    "loss_scale", "seed", "logdir", "trace_steps", "label_smoothing", "graph",
    "checkpoint", "best", "export_dir", "frozen_graph", "saved_model", "images",
    "input", "fetch", "train_op", "tower_pattern", "rename", "include", "tower",
    "like", "inputs", "arguments", "data", "rows", "tolerance", "losses",
    "contenders", "suite", "read", "plots", "workers", "ps", "restart", "help",
    "num_batches", "nonsense", "repetitions", "threads", "job_name",
    "replication", "schedule", "check", "trace", "json")
TEXTS = (
    "", "0", "-1", "1", "2", "1.5", "nan", "inf", "1e999", "x", "a,b", ",",
    "[1", "{}", '{"a": 1}', "[1]", "(", "=>", "a=>b", "(?P<n>", "true", "/",
    "FOLDER", "FOLDER/text", "FOLDER/none", "FOLDER/text:f", "FOLDER/code.py:f",
    "FOLDER/code.py:none", "nonsense:f", "float32[?,3]", "float32[", "é",
    "\x00", "9" * 30, "/gpu:0", "/cpu:0,/cpu:1", "/job:x", "digits", "momentum",
    "%s", "\ud800", " ", "-", "--", "1,2", "dynamic", "x:0",
    "images")


def _text_files(folder: pathlib.Path) -> None:
  dataset_cases.write(folder / "text", b"some text\n")
  dataset_cases.write(folder / "code.py", b"def f(:\n")


def check(case: Any) -> str:
  """Returns "success", or what the tool said.

  Raises:
    AssertionError: If it ends otherwise, or changes a file. What a tool raises
      is passed on.
  """
  with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    folder = pathlib.Path(name)
    if isinstance(case, Damaged):
      write, run = TARGETS[case.target]
      _write(folder, _whole(write), case.edits)
      argument: Any = folder
    else:
      run = TOOLS[case.tool]
      _text_files(folder)
      argument = [case.tool, *(
          flag.replace("FOLDER", name) for flag in case.flags)]
    before = snapshot(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      status = run(argument)
    after = snapshot(folder)
  changed = [path for path in before if after.get(path) != before[path]]
  if changed:
    raise AssertionError(f"a tool must change no file: it changed {changed}.")
  lines = err.getvalue().splitlines()
  if status not in (0, 2) or len(lines) != (1 if status else 0):
    raise AssertionError(
        "a tool must succeed, or end with one line: got status "
        f"{status} and {lines}.")
  return lines[0] if status else "success"


def damages() -> Any:
  """Draws damaged files."""
  edits = st.lists(st.builds(
      Edit, st.integers(0, 9), st.sampled_from(KINDS), st.integers(0, 999),
      st.integers(0, 999)), min_size=1, max_size=2).map(tuple)
  return st.builds(Damaged, st.sampled_from(list(TARGETS)), edits)


def command_lines() -> Any:
  """Draws command lines."""
  flag = st.builds("--{}={}".format, st.sampled_from(NAMES),
                   st.sampled_from(TEXTS))
  other = st.sampled_from(TEXTS)
  return st.builds(
      CommandLine, st.sampled_from(list(TOOLS)),
      st.lists(st.one_of(flag, flag, flag, flag, other),
               max_size=4).map(tuple))


def inputs() -> Any:
  """Draws either."""
  return st.one_of(damages(), command_lines())
