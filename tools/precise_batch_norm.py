"""Estimates the batch norm statistics of a run of tools/train.py anew.

  python tools/precise_batch_norm.py --logdir=/tmp/resnet20 --num_batches=100

Takes the last checkpoint of the run and replaces the moving statistics, which
are averages over the last steps of training, by those of a number of batches of
training images, all with the weights of the checkpoint. Nothing else changes.
The result is a new checkpoint, LOGDIR/precise/model.ckpt-STEP, for

  python tools/evaluate.py --logdir=LOGDIR --checkpoint=...

The batches are the first of training, in its batch size and with its
augmentation. In how many towers they run makes no difference but of float
rounding, unless the run was trained with --nosync_batch_norm.
"""

import pathlib
import sys
from typing import NamedTuple, Sequence

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
import towers

UsageError = command_line.UsageError

FOLDER = "precise"


class Result(NamedTuple):
  """What was done.

  Fields:
    checkpoint: Prefix of the new checkpoint.
    names: The variables that were estimated.
    before: The score on the test images with the old statistics.
    after: The score with the new ones.
  """
  checkpoint: str
  names: Sequence[str]
  before: tasks.Score
  after: tasks.Score


def _flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = command_line.flag_values()
  run_flags.define_logdir(values)
  run_flags.define_towers(values)
  flags.DEFINE_integer("num_batches", 100,
                       "Number of batches of training images.", lower_bound=1,
                       flag_values=values)
  return values


def estimate(options: training_options.Options, num_batches: int) -> Result:
  """Writes a checkpoint with new moving statistics.

  Args:
    options: Those of the run, with its logdir and the towers to use.
    num_batches: Number of batches.

  Raises:
    UsageError: If data, devices or checkpoint do not fit, the model has no
      batch norm, or the checkpoint cannot be written.
  """
  path = run_flags.last_checkpoint(options.logdir)
  data = training.load_data(options)
  with tf.Graph().as_default():
    graph = training_graph.build(options, data)
    if not graph.train.update_ops:
      raise UsageError(
          "`--logdir` must be that of a model with batch norm: got "
          f"{options.model}, which has no moving statistics.")
    estimator = towers.precise_batch_norm.PreciseBatchNorm(graph.train)
    saver = tf.train.Saver(save_relative_paths=True)

    def score(session):
      return graph.evaluation.task.score(
          training_graph.evaluate(session, graph.evaluation, data), data)

    with tf.Session(config=graph.config) as session:
      logdirs.restore(session, saver, path)
      session.run(tf.local_variables_initializer())
      before = score(session)
      session.run(graph.start, {graph.first_batch: 0})
      estimator.update(session, num_batches)
      after = score(session)
      folder = pathlib.Path(options.logdir, FOLDER)
      with logdirs.writing(options.logdir):
        folder.mkdir(exist_ok=True)
        written = saver.save(session, str(folder / logdirs.NAME),
                             graph.global_step, write_meta_graph=False)
  return Result(written, estimator.names, before, after)


def run(values: flags.FlagValues) -> int:
  """Does what the flags say; returns the exit status of the process."""
  result = estimate(run_flags.options(values), values.num_batches)
  before, after = result.before, result.after
  print(f"estimated {len(result.names)} moving statistics over "
        f"{values.num_batches} batches")
  print(f"test {before.name} before: {before.value:.4f}")
  print(f"test {after.name}: {after.value:.4f}")
  print(f"checkpoint: {result.checkpoint}")
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()
  return command_line.main(argv, _flags(), text=__doc__, action=run)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
