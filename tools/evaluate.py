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

import pathlib
import sys
from typing import Sequence

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tools import startup

startup.load_tensorflow()

from absl import flags
import tensorflow.compat.v1 as tf

from tools import command_line
from tools import logdirs
from tools import run_flags
from tools import tasks
from tools import training
from tools import training_graph
from tools import training_options


def _flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = command_line.flag_values()
  run_flags.define_logdir(values)
  run_flags.define_checkpoint(values)
  run_flags.define_towers(values)
  flags.DEFINE_integer(
      "batch_size", None, "Images in a batch of all towers together. Default: "
      "as in training.", lower_bound=1, flag_values=values)
  return values


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
      found = training_graph.evaluate(session, evaluation, data)
  return evaluation.task.score(found, data)


def run(values: flags.FlagValues) -> int:
  """Does what the flags say; returns the exit status of the process."""
  options = run_flags.options(values, batch_size=values.batch_size)
  path = run_flags.checkpoint(values)
  score = evaluate(options, path)
  print(f"checkpoint: {path}")
  if score.table:
    print(score.table)
  print(f"test {score.name}: {score.value:.4f}")
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()
  return command_line.main(argv, _flags(), text=__doc__, action=run)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
