"""The evaluator of a cluster: tests each checkpoint as it comes.

It is no member of the cluster and only reads the logdir. Its scores go to the
folder `evaluator` there, for TensorBoard.
"""

import pathlib
import time
from typing import Any

import tensorflow.compat.v1 as tf

from tools import datasets
from tools import logdirs
from tools import places
from tools import training_graph
from tools import training_options

_POLL_SECONDS = 0.5


def follow(options: training_options.Options, data: datasets.Dataset,
           place: Any) -> None:
  """Tests checkpoints until that of the last step has been tested.

  Args:
    options: The options of the run.
    data: Its data set.
    place: The evaluator's place in the cluster, a `cluster_run.Cluster`.

  Raises:
    UsageError: If no checkpoint comes and the chief is not up, or a checkpoint
      has other variables.
  """
  folder = str(pathlib.Path(options.logdir, "evaluator"))
  with tf.Graph().as_default():
    evaluation = training_graph.build_evaluation(
        options, data, places.Places(options))
    with tf.Session(config=evaluation.config) as session:
      with logdirs.event_writer(folder, 0) as writer:
        last, since = None, time.monotonic()
        while True:
          path = logdirs.latest(options.logdir)
          if path is None or path == last:
            place.check_chief(time.monotonic() - since)
            time.sleep(_POLL_SECONDS)
            continue
          last, since = path, time.monotonic()
          step = _test(session, evaluation, data, path, writer)
          if step >= options.steps:
            return


def _test(session: tf.Session, evaluation: training_graph.Evaluation,
          data: datasets.Dataset, path: str,
          writer: tf.summary.FileWriter) -> int:
  """Tests a checkpoint; returns its step."""
  step = int(path.rpartition("-")[2])
  logdirs.restore_model(session, path)
  session.run(tf.local_variables_initializer())
  score = evaluation.task.score(
      training_graph.evaluate(session, evaluation, data), data)
  print(f"step {step}: test {score.name}: {score.value:.4f}", flush=True)
  writer.add_summary(tf.Summary(value=[
      tf.Summary.Value(tag=score.tag, simple_value=score.value)]), step)
  writer.flush()
  return step
