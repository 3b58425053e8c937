"""Training and testing of an image network in towers, with checkpoints."""

import contextlib
import dataclasses
import pathlib
import signal
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
import tqdm

from tools import cluster_run
from tools import command_line
from tools import datasets
from tools import evaluator
from tools import logdirs
from tools import pictures
from tools import places
from tools import tasks
from tools import training_graph
from tools import training_options
import towers

Options = training_options.Options
UsageError = training_options.UsageError

# A dynamic loss scale finds its size in about 15 batches.
MAX_SKIPPED = 50

# After how many lost sessions in a row to give up, on a cluster.
MAX_SESSIONS = 10

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


class _AtSession(tf.train.SessionRunHook):
  """Does something in each new session."""

  def __init__(self, action: Callable[[tf.Session], None]):
    self._action = action

  def after_create_session(self, session: tf.Session, coord: Any) -> None:
    del coord
    self._action(session)


class Trainer:
  """A run whose graph is built; its parts share the session and the files."""

  def __init__(self, graph: training_graph.Training, data: datasets.Dataset,
               options: Options, place: places.Places):
    """Prepares savers and hooks; `options.logdir` must be there."""
    self._graph, self._data, self._options = graph, data, options
    self._place = place
    self._saver = towers.checkpoints.Saver(save_relative_paths=True)
    self._best_saver = towers.checkpoints.Saver(
        save_relative_paths=True, max_to_keep=1)
    self._best = logdirs.read_best(options.logdir)
    # The step that the next batch is for.
    self._starts_at = 0
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
    listeners = [_AtSession(self._start), self._throughput, self._starvation]
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
    with self._place.session(self._graph.train, scaffold, hooks=listeners,
                             config=self._graph.config) as session:
      self._session = session
      yield

  def _quiet(self, action: Callable[[tf.Session], Any]) -> Any:
    """Does something without the hooks, which count what they see as steps."""
    for _ in range(MAX_SESSIONS):
      try:
        return self._session.run_step_fn(
            lambda step_context: action(step_context.session))
      except RuntimeError as error:
        # A task of the cluster died meanwhile, and there is a new session.
        if "closed Session" not in str(error):
          raise
    raise UsageError("the processes of the cluster must not die all the time: "
                     f"{MAX_SESSIONS} sessions were lost. See their logs.")

  @property
  def step(self) -> int:
    """The global step."""
    return int(self._quiet(
        lambda session: session.run(self._graph.global_step)))

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
    step, score, found = self.step, None, None
    with logdirs.event_writer(options.logdir, step) as self._writer, \
        catch_interrupt() as interrupted, tqdm.tqdm(
            initial=step, total=options.steps, unit="step",
            dynamic_ncols=True) as bar:
      while not self.is_done(step) and not interrupted():
        before = step
        step, losses, learning_rate = self._run_step(step)
        last = step >= options.steps

        # Steps of other workers may lie between.
        def passed(every, before=before, after=step):
          return after // every > before // every

        bar.set_postfix_str(self._progress(losses["loss"], learning_rate),
                            refresh=last)
        bar.update(step - bar.n)
        if passed(options.log_every) or last:
          self._log(step, **losses, learning_rate=learning_rate,
                    images_per_second=self._throughput.examples_per_second)
        if last or passed(options.evaluate_every) and not interrupted():
          with self._throughput.paused():
            if self._save(step):
              score, found = self.evaluate()
              self._note(step, score)
            else:  # The cluster went back to a checkpoint.
              step = self.step
    if not self.is_done(step):
      self._save(step)
      return Result(step, None, options.logdir, self._best)
    return self._result(step, score, found)

  def follow(self) -> None:
    """Trains along with the chief of a cluster, which saves and tests.

    Ctrl-C is left to the chief, too: it must not wait for who has gone.
    """
    step = self.step
    with catch_interrupt():
      while step < self._options.steps and not self._session.should_stop():
        step, _, _ = self._run_step(step)

  def test(self) -> Result:
    """Evaluates only; for a run that is done."""
    return self._result(self.step, *self.evaluate())

  def evaluate(self) -> Tuple[tasks.Score, Any]:
    """Returns the score on the test images, and what it is the score of."""
    evaluation = self._graph.evaluation
    found = self._quiet(lambda session: training_graph.evaluate(
        session, evaluation, self._data))
    return evaluation.task.score(found, self._data), found

  def _start(self, session: tf.Session) -> None:
    """Goes to the first batch after those that the run has behind it."""
    self._starts_at = int(session.run(self._graph.global_step))
    batches = self._starts_at * self._options.accumulate_steps
    if self._graph.skipped is not None:
      batches += int(session.run(self._graph.skipped))
    session.run(self._graph.start, {
        self._graph.first_batch: self._place.first_batch(batches)})

  def _run_step(self, step: int) -> Tuple[int, Dict[str, float], float]:
    """Runs batches until they have made the step after `step`.

    Returns:
      The step, the means of the losses over its images, and the learning rate.
    """
    graph, runs, sizes = self._graph, [], []
    fetches = [graph.step_after, {"loss": graph.loss, **graph.part_losses},
               graph.learning_rate, graph.weights]
    while True:
      try:
        reached, losses, learning_rate, weights = self._session.run(fetches)
      except tf.errors.InvalidArgumentError as error:
        if f"`{graph.loss.name}` must be finite" not in str(error):
          raise
        raise UsageError(
            f"the loss was NaN or infinite in step {step + 1}. Give a lower "
            "`--learning_rate` and another `--logdir`.") from error
      runs.append(losses)
      sizes.append(weights.sum())
      reached = self._place.reached(reached, lambda: self.step)
      goes_on = self._place.goes_on(self._starts_at, reached)
      if goes_on:
        self._starts_at = reached
      else:
        self._quiet(self._start)
      if reached != step or not goes_on or self._session.should_stop():
        kept = np.isfinite([run["loss"] for run in runs])  # Else skipped.
        return reached, {
            name: float(np.average(
                np.where(kept, [run[name] for run in runs], 0.0),
                weights=sizes * kept)) for name in losses}, learning_rate
      if len(runs) >= self._options.accumulate_steps + MAX_SKIPPED:
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

  def _save(self, step: int) -> bool:
    """Saves the variables; returns whether they were those of the step."""
    return self._quiet(lambda session: self._save_in(session, step))

  def _save_in(self, session: tf.Session, step: int) -> bool:
    if session.run(self._graph.global_step) < step:
      return False  # The cluster lost a task, and went back to a checkpoint.
    with logdirs.writing(self._options.logdir):
      self._saver.save(
          session, str(pathlib.Path(self._options.logdir, logdirs.NAME)), step,
          write_meta_graph=False)
    return True

  def _note(self, step: int, score: tasks.Score) -> None:
    """Writes a score for TensorBoard, and keeps the variables if it is best."""
    self._log(step, **{score.tag: score.value})
    if self._graph.evaluation.pictures is not None:
      shown = self._quiet(self._pictures)
      with logdirs.writing(self._options.logdir):
        self._writer.add_summary(shown, step)
        self._writer.flush()
    if self._best is None or score.value > self._best.value:
      self._best = logdirs.Best(step, score.value)
      with logdirs.writing(self._options.logdir):
        self._quiet(lambda session: logdirs.write_best(
            self._best, session, self._best_saver, self._options.logdir))

  def _pictures(self, session: tf.Session) -> bytes:
    session.run(self._graph.evaluation.start)
    return session.run(self._graph.evaluation.pictures)

  def _result(self, step: int, score: tasks.Score, found: Any) -> Result:
    with logdirs.writing(self._options.logdir):
      drawn = [
          pictures.draw_curves(self._options.logdir),
          self._graph.evaluation.task.draw(
              found, self._options.logdir, self._data)]
    return Result(step, score, self._options.logdir, self._best,
                  tuple(filter(None, drawn)))

  def _log(self, step: int, **scalars: Optional[float]) -> None:
    with logdirs.writing(self._options.logdir):
      self._writer.add_summary(tf.Summary(value=[
          tf.Summary.Value(tag=tag, simple_value=value)
          for tag, value in scalars.items() if value is not None]), step)


def run(options: Options,
        cluster: Optional[cluster_run.ClusterOptions] = None
       ) -> Optional[Result]:
  """Trains, or continues, and tests, in a graph of its own.

  Args:
    options: What to do.
    cluster: Which task of a cluster does it, if there is one.

  Returns:
    What the run came to; None in tasks of a cluster that do not save and test.

  Raises:
    UsageError: If the options do not fit the data, the machine or the
      checkpoint, the loss is no longer finite, or a disk is full; if a task of
      the cluster is missing or has other options.
  """
  place = places.Places(options)
  if cluster is not None and cluster.in_use:
    place = cluster_run.started(cluster, options)
    if place.is_server:
      with catch_interrupt():  # The chief, which gets it too, ends training.
        place.serve()
      return None
  if place.visible.gpus:
    print(place.visible, flush=True)
  data = load_data(options)
  options = training_options.completed(options, data)
  # Before the build, which takes long for a deep network.
  options = dataclasses.replace(options, logdir=logdirs.prepare(options))
  if place.is_evaluator:
    return evaluator.follow(options, data, place)
  with tf.Graph().as_default():
    graph = training_graph.build(options, data, place)
    if place.only_reads:
      with catch_interrupt():
        place.serve()
      return None
    trainer = Trainer(graph, data, options, place)
    with trainer.open():
      if not place.is_chief:
        return trainer.follow()
      return _lead(trainer, options, data)


def _lead(trainer: Trainer, options: Options,
          data: datasets.Dataset) -> Result:
  """Trains and tests; what the only or the first process of a run does."""
  size = sum(variable.shape.num_elements()
             for variable in tf.trainable_variables())
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
