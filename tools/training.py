"""Training and testing of an image network in towers, with checkpoints."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import signal
import tempfile
import time
from typing import Callable, Iterator, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
import tqdm

from tools import datasets
from tools import tasks
from tools import training_options
import towers

MODELS = tasks.CLASSIFIERS
OPTIMIZERS = training_options.OPTIMIZERS
Options = training_options.Options
UsageError = training_options.UsageError

# The learning rate grows linearly over this part of the steps.
WARM_UP = 0.05

# A dynamic loss scale finds its size in about 15 batches.
MAX_SKIPPED = 50


class Batches(NamedTuple):
  """What to run for the data: first `start`, then `next` for each batch."""
  start: tf.Operation
  next: Sequence[tf.Tensor]  # Images, labels and weights, as in `Graph`.


class Graph(NamedTuple):
  """The tensors and ops of a run."""
  images: tf.Tensor  # Placeholder [B, H, W, C], for training and evaluation.
  labels: tf.Tensor  # Placeholder [B], or [B, H, W] for segmentation.
  weights: tf.Tensor  # Placeholder [B], of the images in training.
  train_batches: Batches
  test_batches: Batches
  first_batch: tf.Tensor  # Placeholder [], where `train_batches` start.
  loss: tf.Tensor  # [], the mean over the batch, with weight decay.
  learning_rate: tf.Tensor  # [], at the current step.
  global_step: tf.Variable  # [].
  train_op: tf.Operation  # A batch; `accumulate_steps` of them are a step.
  skipped: Optional[tf.Variable]  # [], batches skipped; None if none can be.
  counts: tf.Tensor  # What `score` takes the sum of, over a batch.
  score: Callable[[np.ndarray], tasks.Score]
  config: tf.ConfigProto


class Result(NamedTuple):
  """What a run came to; `score` is None if it was interrupted."""
  step: int
  score: Optional[tasks.Score]
  logdir: str


def _batches(dataset: tf.data.Dataset) -> Batches:
  iterator = tf.data.make_initializable_iterator(dataset)
  return Batches(iterator.initializer, iterator.get_next())


def build(options: Options, data: datasets.Dataset) -> Graph:
  """Builds training, and evaluation of the same variables, in towers.

  Raises:
    UsageError: If the options do not fit the data, or the devices do not exist.
  """
  options = training_options.completed(options, data)
  task = tasks.TASKS[data.kind]
  network = functools.partial(task.networks[options.model],
                              num_classes=data.num_classes)

  def train_fn(images, labels, weights):
    loss, weight = task.loss(
        network(images, training=True), labels, weights, data)
    kernels = [variable for variable in tf.trainable_variables()
               if variable.op.name.endswith("kernel")]
    decay = tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
    return towers.TowerSpec(loss + options.weight_decay * decay, weight=weight)

  def test_fn(images, labels):
    return {"counts": task.counts(
        network(images, training=False), labels, data)}

  tf.set_random_seed(options.seed)
  images = tf.placeholder(
      tf.float32, [None, *data.image_shape], name="images")
  label_shape = ([] if data.kind == datasets.CLASSIFICATION
                 else data.image_shape[:2])
  labels = tf.placeholder(tf.int64, [None, *label_shape], name="labels")
  weights = tf.placeholder(tf.float32, [None], name="weights")
  first_batch = tf.placeholder(tf.int64, [], name="first_batch")
  train_batches = _batches(data.batches(
      "train", options.batch_size, seed=options.seed, augment=options.augment,
      remainder=options.remainder, skip=first_batch))
  test_batches = _batches(data.batches("test", options.batch_size))
  build_towers = functools.partial(
      towers.build_towers, devices=options.devices or options.num_towers or 2,
      variables=options.variables, sync_batch_norm=options.sync_batch_norm)
  try:
    train = build_towers(train_fn, inputs=(images, labels, weights))
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      test = build_towers(test_fn, inputs=(images, labels), name="test_tower")
    config = train.session_config()
  except ValueError as error:
    # The library names the argument at fault first; anything else is a mistake
    # in a model, whose author wants the traceback.
    if not str(error).startswith("`devices"):
      raise
    raise UsageError(
        f"`--devices` or `--num_towers` does not fit: {error}") from error

  global_step = tf.train.get_or_create_global_step()
  make_optimizer, rate = OPTIMIZERS[options.optimizer]
  learning_rate = _learning_rate(
      rate if options.learning_rate is None else options.learning_rate,
      global_step, options.steps)
  train_op = train.minimize(
      make_optimizer(learning_rate), global_step=global_step,
      clip_norm=options.clip_norm, loss_scale=options.loss_scale,
      accumulate_steps=options.accumulate_steps,
      skip_nonfinite=options.skip_nonfinite)
  return Graph(
      images=images, labels=labels, weights=weights,
      train_batches=train_batches, test_batches=test_batches,
      first_batch=first_batch, loss=train.loss, learning_rate=learning_rate,
      global_step=global_step, train_op=train_op,
      skipped=train.skipped_steps if options.may_skip else None,
      counts=tf.reduce_sum(test.outputs["counts"], axis=0),
      score=lambda counts: task.score(counts, data), config=config)


def _learning_rate(highest: float, global_step: tf.Variable,
                   steps: int) -> tf.Tensor:
  # Half a step in, so that neither the first step nor the last has rate 0.
  progress = (tf.cast(global_step, tf.float32) + 0.5) / steps
  warm_up = tf.minimum(progress / WARM_UP, 1.0)
  return highest * warm_up * (1.0 + tf.cos(math.pi * progress)) / 2.0


def evaluate(session: tf.Session, graph: Graph) -> tasks.Score:
  """Returns the score on the test images.

  Each image counts once, whatever the size of the last batch.
  """
  counts = 0
  session.run(graph.test_batches.start)
  while True:
    try:
      images, labels, _ = session.run(graph.test_batches.next)
    except tf.errors.OutOfRangeError:
      return graph.score(counts)
    counts = counts + session.run(graph.counts, {
        graph.images: images, graph.labels: labels})


class Step(NamedTuple):
  """What a step did: `loss` is the mean over its `num_images` images."""
  step: int
  loss: float
  learning_rate: float
  num_images: int


def run_step(session: tf.Session, graph: Graph, options: Options,
             step: int) -> Step:
  """Runs batches until they have made the step after `step`.

  Raises:
    UsageError: If the loss is not finite, or the batches that are skipped for
      that do not end.
  """
  losses, sizes = [], []
  while True:
    images, labels, weights = session.run(graph.train_batches.next)
    _, loss, learning_rate = session.run(
        [graph.train_op, graph.loss, graph.learning_rate],
        {graph.images: images, graph.labels: labels, graph.weights: weights})
    if graph.skipped is None and not math.isfinite(loss):
      raise UsageError(
          f"the loss became {loss} in step {step + 1}. Give a lower "
          "`--learning_rate` and another `--logdir`.")
    losses.append(loss)
    sizes.append(int(weights.sum()))
    reached = int(session.run(graph.global_step))
    if reached > step:
      kept = np.isfinite(losses)  # The others were skipped.
      loss = np.average(np.where(kept, losses, 0.0), weights=sizes * kept)
      return Step(reached, float(loss), learning_rate, sum(sizes))
    if len(losses) >= options.accumulate_steps + MAX_SKIPPED:
      raise UsageError(
          f"the gradients of {MAX_SKIPPED} batches or more in step {step + 1} "
          "were not finite. Give a lower `--learning_rate` and another "
          "`--logdir`.")


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


def train(session: tf.Session, graph: Graph, options: Options,
          save: Callable[[int], None]) -> Tuple[int, Optional[tasks.Score]]:
  """Trains up to `options.steps`, with a progress bar and TensorBoard scalars.

  Args:
    session: Session whose variables have their values.
    graph: What `build` returned.
    options: What to do; `logdir` must be there.
    save: Saves a checkpoint of the given step.

  Returns:
    The step at the end, and the score on the test images, which is None if
    Ctrl-C was pressed. A checkpoint of that step is saved.

  Raises:
    UsageError: If the loss is no longer finite; that step is not saved.
  """
  first = step = int(session.run(graph.global_step))
  # All batches that the run has behind it: those of its steps, and skipped.
  batches = first * options.accumulate_steps
  if graph.skipped is not None:
    batches += int(session.run(graph.skipped))
  score = None
  session.run(graph.train_batches.start, {graph.first_batch: batches})
  since, num_images = time.perf_counter(), 0
  with tf.summary.FileWriter(options.logdir) as writer, \
      catch_interrupt() as interrupted, \
      tqdm.tqdm(initial=first, total=options.steps, unit="step",
                dynamic_ncols=True) as bar:

    def log(**scalars):
      writer.add_summary(tf.Summary(value=[
          tf.Summary.Value(tag=tag, simple_value=value)
          for tag, value in scalars.items()]), step)

    # TensorBoard drops what a killed run wrote after its last checkpoint.
    writer.add_session_log(
        tf.SessionLog(status=tf.SessionLog.START), first + 1)
    while step < options.steps and not interrupted():
      step, loss, learning_rate, size = run_step(
          session, graph, options, step)
      num_images += size
      last = step == options.steps
      speed = num_images / (time.perf_counter() - since)
      bar.set_postfix_str(
          f"loss {loss:.4f}, learning rate {learning_rate:.2g}, "
          f"{speed:.0f} images/s", refresh=last)
      bar.update()
      if step % options.log_every == 0 or last:
        log(loss=loss, learning_rate=learning_rate, images_per_second=speed)
        since, num_images = time.perf_counter(), 0
      if last or step % options.evaluate_every == 0 and not interrupted():
        save(step)
        score = evaluate(session, graph)
        log(**{score.tag: score.value})
        since, num_images = time.perf_counter(), 0
    if step < options.steps:
      save(step)
      score = None
  return step, score


def prepare_logdir(options: Options) -> str:
  """Returns the directory of the run, which exists and can be written to.

  Without `--logdir` it is a new one under the system's temporary directory, so
  that no run continues another by accident.

  Raises:
    UsageError: If nothing can be written there.
  """
  if options.logdir is None:
    return tempfile.mkdtemp(prefix=f"towers-{options.model}-")
  try:
    pathlib.Path(options.logdir).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.logdir).close()
  except OSError as error:
    raise UsageError(
        "`--logdir` must be a directory that can be written to: got "
        f"{options.logdir} ({error.strerror}).") from error
  return options.logdir


def restore(session: tf.Session, saver: tf.train.Saver, logdir: str) -> None:
  """Gives the variables their values from the last checkpoint, if there is one.

  Raises:
    UsageError: If the checkpoint cannot be read or has other variables.
  """
  path = tf.train.latest_checkpoint(logdir)
  if path is None:
    session.run(tf.global_variables_initializer())
    return
  try:
    saved = dict(tf.train.list_variables(path))
  except tf.errors.OpError as error:
    raise UsageError(
        f"`--logdir` must hold checkpoints that can be read: got {path} "
        f"({_first_line(error)}). Give another `--logdir`.") from error
  built = {variable.op.name: variable.shape.as_list()
           for variable in tf.global_variables()}
  different = sorted(name for name in saved.keys() | built.keys()
                     if saved.get(name) != built.get(name))
  if different:
    name = different[0]
    raise UsageError(
        "`--logdir` must hold a checkpoint of the same model, dataset and "
        f"optimizer: {path} differs in {len(different)} variables, such as "
        f"{name} (shape {saved.get(name, 'none')} there, "
        f"{built.get(name, 'none')} here). Give the flags that it was trained "
        "with, or another `--logdir`.")
  saver.restore(session, path)


def run(options: Options) -> Result:
  """Trains, or continues, and tests, in a graph of its own.

  Raises:
    UsageError: If the options do not fit the data, the machine or the
      checkpoint, or the loss is no longer finite.
  """
  try:
    data = datasets.load(options.dataset, options.data_dir,
                         image_size=options.image_size)
  except datasets.DatasetError as error:
    raise UsageError(_first_line(error)) from error
  options = training_options.completed(options, data)
  # Before the build, which takes long for a deep network.
  options = dataclasses.replace(options, logdir=prepare_logdir(options))
  with tf.Graph().as_default():
    graph = build(options, data)
    saver = tf.train.Saver(save_relative_paths=True)
    with tf.Session(config=graph.config) as session:
      restore(session, saver, options.logdir)
      # Sums of accumulated gradients, and copies of replicated variables.
      session.run(tf.local_variables_initializer())
      step = int(session.run(graph.global_step))
      size = sum(variable.shape.num_elements()
                 for variable in tf.trainable_variables())
      print(f"{options.model}, {size:,} parameters, on {options.dataset}: "
            f"{data.size('train'):,} images to train on, "
            f"{data.size('test'):,} to test on")
      print(f"logdir: {options.logdir}" +
            (f", continuing from step {step}" if step else ""), flush=True)
      if step >= options.steps:
        score = evaluate(session, graph)
      else:
        step, score = train(
            session, graph, options,
            lambda step: saver.save(
                session, str(pathlib.Path(options.logdir, "model.ckpt")), step,
                write_meta_graph=False))
  return Result(step, score, options.logdir)


def _first_line(error: Exception) -> str:
  return str(error).strip().partition("\n")[0]
