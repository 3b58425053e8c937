"""Evaluates a run of tools/train.py in any number of towers.

  python tools/evaluate.py --logdir=/tmp/resnet20 --num_towers=4
  python tools/evaluate.py --logdir=/tmp/resnet20 --best

Model, data set and batch size are those of the run, which noted them in its
logdir; how many towers trained it does not matter. Each of the test images
counts once. What is printed are counts of images (or pixels) and their ratios,
the same for every number of towers; only where the scores of two classes differ
by no more than float rounding may a prediction change. The last line is the
score.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import List, Optional, Sequence

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tools import startup

startup.load_tensorflow()

from absl import flags
import tensorflow.compat.v1 as tf

from tools import logdirs
from tools import tasks
from tools import training
from tools import training_graph
from tools import training_options

UsageError = training_options.UsageError


def _flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = flags.FlagValues()
  text = functools.partial(flags.DEFINE_string, flag_values=values)
  count = functools.partial(
      flags.DEFINE_integer, lower_bound=1, flag_values=values)
  text("logdir", None, "Directory of the run, as train.py printed it.")
  flags.DEFINE_boolean(
      "best", False, "Takes the checkpoint with the best score of the run, in "
      "place of the last one.", flag_values=values)
  text("checkpoint", None, "Prefix of another checkpoint of the same model, in "
       "place of the last one in --logdir.")
  text("data_dir", None, "Where the files of the data set are now. Default: "
       "where they were in training.")
  count("num_towers", None, "Number of towers, on the first GPUs or, without "
        "GPUs, on as many logical CPU devices; 2 unless --devices is given.")
  flags.DEFINE_list("devices", None, "One device per tower, such as "
                    "/gpu:0,/gpu:1.", flag_values=values)
  count("batch_size", None, "Images in a batch of all towers together. "
        "Default: as in training.")
  flags.DEFINE_boolean("help", False, "Shows this text.", short_name="h",
                       flag_values=values)
  return values


def checkpoint_of(logdir: str, best: bool, checkpoint: Optional[str]) -> str:
  """Returns the prefix of the checkpoint that is asked for.

  Raises:
    UsageError: If there is none, or two are asked for.
  """
  if best and checkpoint is not None:
    raise UsageError("`--best` and `--checkpoint` must not both be given: got "
                     f"--checkpoint={checkpoint}.")
  if checkpoint is not None:
    if not tf.train.checkpoint_exists(checkpoint):
      raise UsageError(
          "`--checkpoint` must be the prefix of a checkpoint, such as "
          f"{logdir}/model.ckpt-600: got {checkpoint}, which is not there.")
    return checkpoint
  folder = str(pathlib.Path(logdir, "best")) if best else logdir
  path = logdirs.latest(folder)
  if path is None:
    raise UsageError(f"`--logdir` must hold a checkpoint: found none in "
                     f"{folder}. Train first.")
  return path


def evaluate(options: training_options.Options, path: str) -> tasks.Score:
  """Returns the score on the test images of a checkpoint.

  Args:
    options: Those of the run, with the towers to evaluate in.
    path: Prefix of the checkpoint.

  Raises:
    UsageError: If data, devices or checkpoint do not fit.
  """
  data = training.load_data(options)
  with tf.Graph().as_default():
    evaluation = training_graph.build_evaluation(options, data)
    with tf.Session(config=evaluation.config) as session:
      logdirs.restore_model(session, path)
      # Replicated variables have copies, which start with what was restored.
      session.run(tf.local_variables_initializer())
      confusion = training_graph.evaluate(session, evaluation, data)
  return tasks.TASKS[data.kind].score(confusion, data)


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()
  values = _flags()
  try:
    rest: List[str] = values(argv)[1:]
    if values.help:
      print(__doc__ + values.get_help())
      return 0
    if rest:
      raise UsageError(f"there must be flags only: got {rest[0]}. Write "
                       "--flag=value.")
    if values.logdir is None:
      raise UsageError("`--logdir` must be given: the directory of a run.")
    run = training_options.load_run(values.logdir)
    path = checkpoint_of(values.logdir, values.best, values.checkpoint)
    changes = {name: values[name].value for name in (
        "data_dir", "batch_size") if values[name].value is not None}
    options = dataclasses.replace(
        run.options, num_towers=values.num_towers, devices=values.devices,
        summarize_images=0, **changes)
    training_options.check_devices(options)
    score = evaluate(options, path)
  except (UsageError, flags.Error) as error:
    text = str(error).partition("\n")[0]
    print(f"{pathlib.Path(argv[0]).name}: {text}", file=sys.stderr)
    return 2
  print(f"checkpoint: {path}")
  if score.table:
    print(score.table)
  print(f"test {score.name}: {score.value:.4f}")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
