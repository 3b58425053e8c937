"""Training and testing of an image network in towers, with checkpoints."""

import contextlib
import dataclasses
import pathlib
import signal
from typing import Callable, Iterator, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
import tqdm

from tools import command_line
from tools import datasets
from tools import logdirs
from tools import pictures
from tools import tasks
from tools import training_graph
from tools import training_options
import towers

Options = training_options.Options
UsageError = training_options.UsageError

# A dynamic loss scale finds its size in about 15 batches.
MAX_SKIPPED = 50

# One batch in so many is traced for the time that devices wait for input.
TRACE_STEPS = 25


class Result(NamedTuple):
  """What a run came to.

  Fields:
    step: The step at the end.
    score: The score on the test images; None if the run was interrupted.
    logdir: Where its checkpoints are.
    best: The best score of all evaluations; None before the first.
    pictures: Paths of what was drawn.
  """
  step: int
  score: Optional[tasks.Score]
  logdir: str
  best: Optional[logdirs.Best] = None
  pictures: Tuple[str, ...] = ()


@contextlib.contextmanager
def catch_interrupt() -> Iterator[Callable[[], bool]]:
  """Yields a function that says whether Ctrl-C was pressed.

  A step or a checkpoint is never cut in two. A second Ctrl-C does what it did
  outside the context.
  """
  caught = []

  def handle(signal_number, unused_frame):
    caught.append(signal_number)
    signal.signal(signal.SIGINT, previous)

  previous = signal.signal(signal.SIGINT, handle)
  try:
    yield lambda: bool(caught)
  finally:
    signal.signal(signal.SIGINT, previous)


class Trainer:
  """A run whose graph is built; its parts share the session and the files."""

  def __init__(self, graph: training_graph.Training, data: datasets.Dataset,
               options: Options):
    """Prepares savers and hooks; `options.logdir` must be there."""
    self._graph, self._data, self._options = graph, data, options
    self._saver = towers.checkpoints.Saver(save_relative_paths=True)
    self._best_saver = towers.checkpoints.Saver(
        save_relative_paths=True, max_to_keep=1)
    self._best = logdirs.read_best(options.logdir)
    self._throughput = towers.hooks.ThroughputHook(
        tf.reduce_sum(graph.weights),
        log_steps=options.log_every * options.accumulate_steps)
    self._starvation = towers.hooks.InputStarvationHook(
        log_steps=4 * TRACE_STEPS, trace_steps=TRACE_STEPS)

  @contextlib.contextmanager
  def open(self) -> Iterator[None]:
    """Opens the session, with new variables or those of the last checkpoint.

    Raises:
      UsageError: See `logdirs.restore`.
    """
    listeners = [self._throughput, self._starvation]
    if self._graph.skipped is None:
      listeners.append(towers.hooks.StopOnNanHook(self._graph.loss))
    if self._options.trace_steps:
      listeners.append(towers.hooks.TraceHook(
          str(pathlib.Path(self._options.logdir, "traces")),
          steps=self._options.trace_steps))

    def restore(unused_scaffold, session):
      path = logdirs.latest(self._options.logdir)
      if path is not None:
        logdirs.restore(session, self._saver, path)

    scaffold = tf.train.Scaffold(saver=self._saver, init_fn=restore)
    creator = tf.train.ChiefSessionCreator(scaffold, config=self._graph.config)
    with tf.train.MonitoredSession(creator, hooks=listeners) as session:
      self._session = session
      yield

  @property
  def _quiet_session(self) -> tf.Session:
    """The session without the hooks, which count what they see as steps."""
    return self._session.run_step_fn(lambda step_context: step_context.session)

  @property
  def step(self) -> int:
    """The global step."""
    return int(self._quiet_session.run(self._graph.global_step))

  def is_done(self, step: int) -> bool:
    """Whether there is nothing left to train at that step."""
    options = self._options
    return step >= options.steps or (
        options.early_stop is not None and self._best is not None and
        step - self._best.step >= options.early_stop * options.evaluate_every)

  def train(self) -> Result:
    """Trains until all is done, or Ctrl-C, with a progress bar.

    Raises:
      UsageError: If the loss is no longer finite (that step is not saved), or
        the logdir can no longer be written to.
    """
    options = self._options
    step, score, confusion = self.step, None, None
    self._start(step)
    with logdirs.event_writer(options.logdir, step) as self._writer, \
        catch_interrupt() as interrupted, tqdm.tqdm(
            initial=step, total=options.steps, unit="step",
            dynamic_ncols=True) as bar:
      while not self.is_done(step) and not interrupted():
        step, loss, learning_rate = self._run_step(step)
        last = step == options.steps
        bar.set_postfix_str(self._progress(loss, learning_rate), refresh=last)
        bar.update()
        if step % options.log_every == 0 or last:
          self._log(step, loss=loss, learning_rate=learning_rate,
                    images_per_second=self._throughput.examples_per_second)
        if last or step % options.evaluate_every == 0 and not interrupted():
          with self._throughput.paused():
            self._save(step)
            score, confusion = self.evaluate()
            self._note(step, score)
    if not self.is_done(step):
      self._save(step)
      return Result(step, None, options.logdir, self._best)
    return self._result(step, score, confusion)

  def test(self) -> Result:
    """Evaluates only; for a run that is done."""
    return self._result(self.step, *self.evaluate())

  def evaluate(self) -> Tuple[tasks.Score, np.ndarray]:
    """Returns the score on the test images, and their confusion matrix."""
    confusion = training_graph.evaluate(
        self._quiet_session, self._graph.evaluation, self._data)
    return tasks.TASKS[self._data.kind].score(confusion, self._data), confusion

  def _start(self, step: int) -> None:
    """Goes to the first batch after those that the run has behind it."""
    batches = step * self._options.accumulate_steps
    if self._graph.skipped is not None:
      batches += int(self._quiet_session.run(self._graph.skipped))
    self._quiet_session.run(
        self._graph.start, {self._graph.first_batch: batches})

  def _run_step(self, step: int) -> Tuple[int, float, float]:
    """Runs batches until they have made the step after `step`.

    Returns:
      The step, the mean of the loss over its images, and the learning rate.
    """
    graph, losses, sizes = self._graph, [], []
    fetches = [graph.step_after, graph.loss, graph.learning_rate,
               graph.weights]
    while True:
      try:
        reached, loss, learning_rate, weights = self._session.run(fetches)
      except tf.errors.InvalidArgumentError as error:
        if f"`{graph.loss.name}` must be finite" not in str(error):
          raise
        raise UsageError(
            f"the loss was NaN or infinite in step {step + 1}. Give a lower "
            "`--learning_rate` and another `--logdir`.") from error
      losses.append(loss)
      sizes.append(weights.sum())
      if reached > step:
        kept = np.isfinite(losses)  # The others were skipped.
        loss = np.average(np.where(kept, losses, 0.0), weights=sizes * kept)
        return int(reached), float(loss), learning_rate
      if len(losses) >= self._options.accumulate_steps + MAX_SKIPPED:
        raise UsageError(
            f"the gradients of {MAX_SKIPPED} batches or more in step "
            f"{step + 1} were not finite. Give a lower `--learning_rate` and "
            "another `--logdir`.")

  def _progress(self, loss: float, learning_rate: float) -> str:
    parts = [f"loss {loss:.4f}", f"learning rate {learning_rate:.2g}"]
    if self._throughput.examples_per_second is not None:
      parts.append(f"{self._throughput.examples_per_second:.0f} images/s")
    if self._starvation.share is not None:
      parts.append(f"waits {100 * self._starvation.share:.0f} %")
    return ", ".join(parts)

  def _save(self, step: int) -> None:
    with logdirs.writing(self._options.logdir):
      self._saver.save(
          self._quiet_session, str(pathlib.Path(
              self._options.logdir, logdirs.NAME)), step,
          write_meta_graph=False)

  def _note(self, step: int, score: tasks.Score) -> None:
    """Writes a score for TensorBoard, and keeps the variables if it is best."""
    self._log(step, **{score.tag: score.value})
    shown = self._graph.evaluation.pictures
    with logdirs.writing(self._options.logdir):
      if shown is not None:
        self._quiet_session.run(self._graph.evaluation.start)
        self._writer.add_summary(self._quiet_session.run(shown), step)
        self._writer.flush()
      if self._best is None or score.value > self._best.value:
        self._best = logdirs.Best(step, score.value)
        logdirs.write_best(self._best, self._quiet_session, self._best_saver,
                           self._options.logdir)

  def _result(self, step: int, score: tasks.Score,
              confusion: np.ndarray) -> Result:
    with logdirs.writing(self._options.logdir):
      drawn = [
          pictures.draw_curves(self._options.logdir),
          pictures.draw_confusion(
              confusion, self._options.logdir, data=self._data)]
    return Result(step, score, self._options.logdir, self._best,
                  tuple(filter(None, drawn)))

  def _log(self, step: int, **scalars: Optional[float]) -> None:
    with logdirs.writing(self._options.logdir):
      self._writer.add_summary(tf.Summary(value=[
          tf.Summary.Value(tag=tag, simple_value=value)
          for tag, value in scalars.items() if value is not None]), step)


def run(options: Options) -> Result:
  """Trains, or continues, and tests, in a graph of its own.

  Raises:
    UsageError: If the options do not fit the data, the machine or the
      checkpoint, the loss is no longer finite, or a disk is full.
  """
  data = load_data(options)
  options = training_options.completed(options, data)
  # Before the build, which takes long for a deep network.
  options = dataclasses.replace(options, logdir=logdirs.prepare(options))
  with tf.Graph().as_default():
    graph = training_graph.build(options, data)
    size = sum(variable.shape.num_elements()
               for variable in tf.trainable_variables())
    trainer = Trainer(graph, data, options)
    with trainer.open():
      with logdirs.writing(options.logdir):
        training_options.save_run(
            training_options.run_of(options, data), options.logdir)
      step = trainer.step
      print(f"{options.model}, {size:,} parameters, on {options.dataset}: "
            f"{data.size('train'):,} images to train on, "
            f"{data.size('test'):,} to test on")
      print(f"logdir: {options.logdir}" +
            (f", continuing from step {step}" if step else ""), flush=True)
      return trainer.test() if trainer.is_done(step) else trainer.train()


def load_data(options: Options) -> datasets.Dataset:
  """Loads the data set of a run.

  Raises:
    UsageError: If files are missing or damaged.
  """
  try:
    return datasets.load(options.dataset, options.data_dir,
                         image_size=options.image_size)
  except datasets.DatasetError as error:
    raise UsageError(command_line.first_line(error)) from error
