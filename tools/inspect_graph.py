"""Reports what a graph of towers holds, moves between devices, and gets wrong.

  python tools/inspect_graph.py --model=resnet20 --num_towers=2
  python tools/inspect_graph.py --model=model.py:loss_fn --inputs='float32[?,8]'
  python tools/inspect_graph.py --graph=model.ckpt-10.meta --picture=towers.png

Either builds a model in towers and its training step, and trains nothing; or
reads any graph from a file: a GraphDef (.pb, .pbtxt), a MetaGraph (.meta), a
SavedModel (saved_model.pb) or an event file of TensorBoard. Such a graph need
not be of `towers`: loops written by hand, with scopes such as tower_0/ or
clone_0/, are looked at for what these often get wrong.

With --logdir, TensorBoard's graph page shows the graph in a few boxes (input,
towers, cross_tower, gradients, average, apply, variables), with devices and
shapes; with --trace also the time and memory of each op in one step, which runs
on random images or numbers. Look under "Tag" and "Color by" there.

  python tools/inspect_graph.py --model=resnet20 --logdir=/tmp/graph --trace
  tensorboard --logdir=/tmp/graph

The report goes to standard output. With --check, the status is 1 if anything
was found.
"""

import functools
import pathlib
import re
import sys
from typing import Any, NamedTuple, Optional, Sequence

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
from tools import startup

startup.load_tensorflow()

from absl import flags
from google.protobuf import message
from google.protobuf import text_format
import numpy as np
from tensorflow.core.protobuf import saved_model_pb2
import tensorflow.compat.v1 as tf

from tools import command_line
from tools import examples
from tools import synced_layers
import towers

_ROWS_PER_TOWER = 2
_EVENT_FILE = "tfevents"


class Inspected(NamedTuple):
  """A graph to look at, and what a training step of it runs, if known."""
  graph: Any
  train_op: Any
  inputs: Sequence[tf.Tensor] = ()


def make_flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  # Flags of its own, so that scripts can be imported side by side.
  values = command_line.flag_values()
  text = functools.partial(flags.DEFINE_string, flag_values=values)
  count = functools.partial(
      flags.DEFINE_integer, lower_bound=1, flag_values=values)
  text("model", None,
       f"One of {', '.join(examples.MODELS)}; or a function as FILE.py:NAME, "
       "which returns a loss, or a dict with \"loss\".")
  text("graph", None, "File with a graph, instead of --model.")
  count("num_towers", None,
        "Number of towers, on the first GPUs or, without GPUs, on as many "
        "logical CPU devices; 2 unless --devices is given.")
  flags.DEFINE_list("devices", None, "One device per tower, such as "
                    "/gpu:0,/gpu:1.", flag_values=values)
  count("batch_size", None, "GLOBAL batch size of the models with a name. "
        "Default: not known, so that some sizes are not known either.")
  count("image_size", 32, "Height and width of their images.")
  flags.DEFINE_list(
      "inputs", [], "Type and shape of each input of FILE.py:NAME, such as "
      "float32[?,32,32,3].", flag_values=values)
  text("train_op", None,
       "Name of what a training step of --graph runs. Default: found, where "
       "an optimizer changes variables.")
  text("tower_pattern", None,
       "Regular expression that finds a tower's scope in a name, with a group "
       r"around the number, such as 'worker_(\d+)/'.")
  text("logdir", None, "Directory to write the graph to, for TensorBoard.")
  flags.DEFINE_boolean(
      "trace", False, "Runs one step of --model and writes its times and "
      "memory to --logdir, too. It takes --batch_size random rows; by default "
      f"{_ROWS_PER_TOWER} for each tower.", flag_values=values)
  text("json", None, "File to write the report to, as JSON.")
  text("picture", None, "File to draw towers, devices and what flows between "
       "them to: .png, .svg or .pdf. Needs matplotlib.")
  flags.DEFINE_boolean("check", False, "Whether findings make the status 1.",
                       flag_values=values)
  return values


def build(values: flags.FlagValues) -> Inspected:
  """Builds the model that the flags name, and its training step.

  Raises:
    UsageError: If the flags do not fit.
  """
  devices = values.devices or values.num_towers or 2
  with tf.Graph().as_default():
    # Without a device they might be thought to travel.
    with tf.device("/cpu:0"):
      model, inputs = _model(values)
    try:
      built = towers.build_towers(model, devices, inputs=inputs)
    except (TypeError, ValueError) as error:
      # The library's own texts; others are mistakes in a model, whose author
      # wants the traceback.
      if not str(error).startswith("`"):
        raise
      raise command_line.UsageError(command_line.first_line(error)) from error
    train_op = None
    if built.loss is not None:
      with tf.device("/cpu:0"):
        step = tf.train.get_or_create_global_step()
      train_op = built.minimize(tf.train.MomentumOptimizer(0.1, 0.9),
                                global_step=step)
    return Inspected(built, train_op, inputs or ())


def _model(values: flags.FlagValues) -> Any:
  """Returns the model function, and placeholders for its inputs."""
  if ":" in values.model:
    try:
      function = synced_layers.load(values.model)
      inputs = synced_layers.placeholders(
          synced_layers.split_list(values.inputs))
    except ValueError as error:
      raise command_line.UsageError(command_line.first_line(error)) from error
    return function, tuple(inputs) or None
  if values.model not in examples.MODELS:
    raise command_line.UsageError(
        f"`--model` must be one of {', '.join(examples.MODELS)}, or a function "
        f"as FILE.py:NAME: got {values.model}.")
  example = examples.MODELS[values.model](1, values.image_size, False)
  return example.model_fn, tuple(
      tf.placeholder(array.dtype, [values.batch_size, *array.shape[1:]],
                     name=f"input_{k}")
      for k, array in enumerate(example.inputs))


def read(path: str, train_op: Optional[str] = None) -> Inspected:
  """Reads a graph from a file.

  Raises:
    UsageError: If there is none in it.
  """
  name = pathlib.Path(path).name
  try:
    if _EVENT_FILE in name:
      graph = _from_events(path)
    elif name == "saved_model.pb":
      saved = saved_model_pb2.SavedModel.FromString(
          pathlib.Path(path).read_bytes())
      graph = saved.meta_graphs[0] if saved.meta_graphs else tf.GraphDef()
    elif name.endswith(".meta"):
      graph = tf.MetaGraphDef.FromString(pathlib.Path(path).read_bytes())
    elif name.endswith(".pb"):
      graph = tf.GraphDef.FromString(pathlib.Path(path).read_bytes())
    elif name.endswith(".pbtxt"):
      graph = text_format.Parse(
          pathlib.Path(path).read_text(encoding="utf-8"), tf.GraphDef())
    else:
      raise command_line.UsageError(
          "`--graph` must be a file ending in .pb, .pbtxt or .meta, or with "
          f"{_EVENT_FILE} in its name: got {path}.")
  except (OSError, UnicodeDecodeError, message.DecodeError,
          text_format.ParseError, tf.errors.OpError) as error:
    text = getattr(error, "strerror", None) or command_line.first_line(error)
    raise command_line.UsageError(
        f"`--graph` must be a file that can be read: got {path} ({text})."
    ) from error
  definition = graph.graph_def if isinstance(graph, tf.MetaGraphDef) else graph
  if not definition.node:
    raise command_line.UsageError(
        f"`--graph` must be a file with a graph: there is no op in {path}.")
  return Inspected(graph, train_op)


def _from_events(path: str) -> Any:
  """Returns the last graph of an event file, with collections if it can be."""
  graph, with_collections = tf.GraphDef(), None
  for event in tf.train.summary_iterator(path):
    kind = event.WhichOneof("what")
    if kind == "graph_def":
      graph = towers.inspection.real_graph(
          tf.GraphDef.FromString(event.graph_def))
    elif kind == "meta_graph_def":
      with_collections = tf.MetaGraphDef.FromString(event.meta_graph_def)
  if with_collections is not None and with_collections.graph_def.node:
    return with_collections
  return graph


def trace(inspected: Inspected,
          batch_size: Optional[int] = None) -> tf.RunMetadata:
  """Runs a step of a graph that `build` built, the second one, and traces it.

  Raises:
    UsageError: If an input cannot be made up, or the step fails.
  """
  built, metadata = inspected.graph, tf.RunMetadata()
  rows = batch_size or _ROWS_PER_TOWER * len(built.towers)
  feeds = {x: _random_value(x, rows) for x in inspected.inputs}
  step = inspected.train_op
  if step is None:
    step = [x.op for x in tf.nest.flatten(built.outputs)]
  options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
  with built.graph.as_default():
    initializers = [tf.global_variables_initializer(),
                    tf.local_variables_initializer(), tf.tables_initializer()]
    try:
      with tf.Session(config=built.session_config()) as sess:
        sess.run(initializers)
        sess.run(step, feeds)  # The first one takes much longer.
        sess.run(step, feeds, options=options, run_metadata=metadata)
    except tf.errors.OpError as error:
      # A long account of where ops were made may come first.
      cause = re.split(r"^Node: .*\n(?:.* root error\(s\) found.*\n)?",
                       error.message, flags=re.MULTILINE)[-1]
      raise command_line.UsageError(
          "`--trace` must be given with a model that can make a step on random "
          f"numbers: got an error ({command_line.first_line(cause)})."
      ) from error
  return metadata


def _random_value(x: tf.Tensor, rows: int) -> np.ndarray:
  """Returns a value for a placeholder; zeros for whole numbers, as classes."""
  shape = x.shape.as_list() if x.shape.rank is not None else [None, None]
  if shape and shape[0] is None:
    shape[0] = rows
  if None in shape or not (x.dtype.is_floating or x.dtype.is_integer
                           or x.dtype.is_bool):
    raise command_line.UsageError(
        "`--trace` must be given with inputs that are numbers, of known shape "
        f"but for the rows: got {x.dtype.name} of shape {x.shape}.")
  if x.dtype.is_floating:
    values = np.random.RandomState(0).standard_normal(shape)
    return values.astype(x.dtype.as_numpy_dtype)
  return np.zeros(shape, x.dtype.as_numpy_dtype)


def run(values: flags.FlagValues) -> Any:
  """Returns the report that the flags ask for, after writing their files.

  Raises:
    UsageError: If the flags do not fit, or a file cannot be read or written.
  """
  if (values.model is None) == (values.graph is None):
    raise command_line.UsageError(
        "`--model` or `--graph` must be given, and not both: got "
        f"--model={values.model} and --graph={values.graph}.")
  if values.devices is not None and values.num_towers is not None:
    raise command_line.UsageError(
        "`--num_towers` and `--devices` must not both be given: got "
        f"{values.num_towers} and {','.join(values.devices)}.")
  if values.trace and None in (values.logdir, values.model):
    raise command_line.UsageError(
        "`--trace` must be given with --model and --logdir: got "
        f"--model={values.model} and --logdir={values.logdir}.")
  if values.graph is not None:
    inspected = read(values.graph, values.train_op)
  elif values.train_op is not None:
    raise command_line.UsageError(
        f"`--train_op` must be given with `--graph` only: got "
        f"{values.train_op}. With `--model` it is known.")
  else:
    inspected = build(values)
  try:
    report = towers.inspection.report(
        inspected.graph, train_op=inspected.train_op,
        tower_pattern=values.tower_pattern)
    if values.picture is not None:
      report.draw(values.picture)
    if values.json is not None:
      pathlib.Path(values.json).write_text(
          report.to_json() + "\n", encoding="utf-8")
    if values.logdir is not None:
      metadata = trace(inspected, values.batch_size) if values.trace else None
      towers.inspection.write_display_graph(
          inspected.graph, values.logdir, run_metadata=metadata,
          tower_pattern=values.tower_pattern)
  except message.DecodeError as error:  # In a collection of a MetaGraphDef.
    raise command_line.UsageError(
        f"`--graph` must be a file that can be read: got {values.graph} "
        f"({command_line.first_line(error)}).") from error
  except (ImportError, ValueError) as error:
    raise command_line.UsageError(command_line.first_line(error)) from error
  except (OSError, tf.errors.OpError) as error:
    raise command_line.UsageError(
        "`--json`, `--picture` and `--logdir` must name what can be written: "
        f"{command_line.first_line(error)}.") from error
  return report


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()

  def action(values):
    report = run(values)
    print(report, end="")
    return 1 if values.check and report.findings else 0

  return command_line.main(argv, make_flags(), text=__doc__, action=action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
