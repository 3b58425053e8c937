"""Training and testing of an image classifier in towers, with checkpoints."""

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

from models import convnet
from models import resnet
from tools import datasets
import towers

# Each takes images [B, H, W, C], `num_classes` and `training`, and returns
# logits [B, num_classes].
MODELS = {
    "convnet": convnet.logits,
    **{f"resnet{depth}": functools.partial(resnet.logits, depth=depth)
       for depth in (8, 20, 32, 44, 56, 110)},
}

# Constructors that take the learning rate, and its default.
OPTIMIZERS = {
    "momentum": (functools.partial(tf.train.MomentumOptimizer, momentum=0.9),
                 0.1),
    "adam": (tf.train.AdamOptimizer, 0.001),
    "sgd": (tf.train.GradientDescentOptimizer, 0.1),
}

# The learning rate grows linearly over this part of the steps.
WARM_UP = 0.05


class UsageError(Exception):
  """Something that the user can put right: shown in one line."""


@dataclasses.dataclass(frozen=True)
class Options:
  """What a run does; the flags of the same names say more."""
  model: str = "convnet"
  dataset: str = "digits"
  num_towers: Optional[int] = None
  devices: Optional[Sequence[str]] = None
  batch_size: int = 64
  steps: int = 600
  learning_rate: Optional[float] = None
  optimizer: str = "momentum"
  weight_decay: float = 1e-4
  sync_batch_norm: bool = True
  seed: int = 0
  logdir: Optional[str] = None
  log_every: int = 10
  evaluate_every: int = 200


class Batches(NamedTuple):
  """What to run for the data: first `start`, then `next` for each batch."""
  start: tf.Operation
  next: Sequence[tf.Tensor]  # Images [B, H, W, C] and labels [B].


class Graph(NamedTuple):
  """The tensors and ops of a run."""
  images: tf.Tensor  # Placeholder [B, H, W, C], for training and evaluation.
  labels: tf.Tensor  # Placeholder [B].
  train_batches: Batches
  test_batches: Batches
  first_step: tf.Tensor  # Placeholder [], where `train_batches` start.
  loss: tf.Tensor  # [], the mean over the batch, with weight decay.
  learning_rate: tf.Tensor  # [], at the current step.
  global_step: tf.Variable  # [].
  train_op: tf.Operation
  correct: tf.Tensor  # [B], whether evaluation finds the label.
  config: tf.ConfigProto


class Result(NamedTuple):
  """What a run came to; `accuracy` is None if it was interrupted."""
  step: int
  accuracy: Optional[float]
  logdir: str


def _batches(dataset: tf.data.Dataset) -> Batches:
  iterator = tf.data.make_initializable_iterator(dataset)
  return Batches(iterator.initializer, iterator.get_next()[:2])


def build(options: Options, data: datasets.Dataset) -> Graph:
  """Builds training, and evaluation of the same variables, in towers.

  Raises:
    UsageError: If the devices do not exist.
  """
  network = functools.partial(MODELS[options.model],
                              num_classes=data.num_classes)

  def train_fn(images, labels):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=network(images, training=True))
    kernels = [variable for variable in tf.trainable_variables()
               if variable.op.name.endswith("kernel")]
    decay = tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
    return tf.reduce_mean(losses) + options.weight_decay * decay

  def test_fn(images, labels):
    predictions = tf.argmax(network(images, training=False), axis=-1)
    return {"correct": tf.equal(predictions, labels)}

  tf.set_random_seed(options.seed)
  images = tf.placeholder(
      tf.float32, [None, *data.image_shape], name="images")
  labels = tf.placeholder(tf.int64, [None], name="labels")
  first_step = tf.placeholder(tf.int64, [], name="first_step")
  train_batches = _batches(data.batches(
      "train", options.batch_size, seed=options.seed, augment=False,
      skip=first_step))
  test_batches = _batches(data.batches("test", options.batch_size))
  devices = options.devices or options.num_towers or 2
  try:
    train = towers.build_towers(
        train_fn, devices, inputs=(images, labels),
        sync_batch_norm=options.sync_batch_norm)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      test = towers.build_towers(
          test_fn, devices, inputs=(images, labels), name="test_tower")
    config = train.session_config()
  except ValueError as error:
    # The library names the argument at fault first; anything else is a mistake
    # in a model, whose author wants the traceback.
    if not str(error).startswith("`devices"):
      raise
    raise UsageError(
        f"`--devices` or `--num_towers` does not fit: {error}") from error

  global_step = tf.train.get_or_create_global_step()
  make_optimizer, default_rate = OPTIMIZERS[options.optimizer]
  rate = (default_rate if options.learning_rate is None
          else options.learning_rate)
  # Half a step in, so that neither the first step nor the last has rate 0.
  progress = (tf.cast(global_step, tf.float32) + 0.5) / options.steps
  warm_up = tf.minimum(progress / WARM_UP, 1.0)
  learning_rate = rate * warm_up * (1.0 + tf.cos(math.pi * progress)) / 2.0
  train_op = train.minimize(make_optimizer(learning_rate),
                            global_step=global_step)
  return Graph(images, labels, train_batches, test_batches, first_step,
               train.loss, learning_rate, global_step, train_op,
               test.outputs["correct"], config)


def evaluate(session: tf.Session, graph: Graph) -> float:
  """Returns the share of test images that are classified right.

  Each image counts once, whatever the size of the last batch.
  """
  correct = []
  session.run(graph.test_batches.start)
  while True:
    try:
      images, labels = session.run(graph.test_batches.next)
    except tf.errors.OutOfRangeError:
      return float(np.mean(np.concatenate(correct)))
    correct.append(session.run(graph.correct, {
        graph.images: images, graph.labels: labels}))


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
          save: Callable[[int], None]) -> Tuple[int, Optional[float]]:
  """Trains up to `options.steps`, with a progress bar and TensorBoard scalars.

  Args:
    session: Session whose variables have their values.
    graph: What `build` returned.
    options: What to do; `logdir` must be there.
    save: Saves a checkpoint of the given step.

  Returns:
    The step at the end, and the accuracy on the test images, which is None if
    Ctrl-C was pressed. A checkpoint of that step is saved.

  Raises:
    UsageError: If the loss is no longer finite; that step is not saved.
  """
  first = step = int(session.run(graph.global_step))
  accuracy = None
  session.run(graph.train_batches.start, {graph.first_step: first})
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
      images, labels = session.run(graph.train_batches.next)
      _, loss, learning_rate = session.run(
          [graph.train_op, graph.loss, graph.learning_rate],
          {graph.images: images, graph.labels: labels})
      step += 1
      num_images += len(labels)
      if not math.isfinite(loss):
        raise UsageError(
            f"the loss became {loss} in step {step}. Give a lower "
            "`--learning_rate` and another `--logdir`.")
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
        accuracy = evaluate(session, graph)
        log(accuracy=accuracy)
        since, num_images = time.perf_counter(), 0
    if step < options.steps:
      save(step)
      accuracy = None
  return step, accuracy


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
    data = datasets.load(options.dataset)
  except datasets.DatasetError as error:
    raise UsageError(_first_line(error)) from error
  if data.kind != datasets.CLASSIFICATION:
    raise UsageError(
        "`--dataset` must have one label per image, since `--model` is a "
        f"classifier: got {options.dataset}, for {data.kind}.")
  if options.batch_size > data.size("train"):
    raise UsageError(
        "`--batch_size` must be at most the number of training images: "
        f"expected 1 to {data.size('train')}, got {options.batch_size}.")
  # Before the build, which takes long for a deep network.
  options = dataclasses.replace(options, logdir=prepare_logdir(options))
  with tf.Graph().as_default():
    graph = build(options, data)
    saver = tf.train.Saver(save_relative_paths=True)
    with tf.Session(config=graph.config) as session:
      restore(session, saver, options.logdir)
      step = int(session.run(graph.global_step))
      size = sum(variable.shape.num_elements()
                 for variable in tf.trainable_variables())
      print(f"{options.model}, {size:,} parameters, on {options.dataset}: "
            f"{data.size('train'):,} images to train on, "
            f"{data.size('test'):,} to test on")
      print(f"logdir: {options.logdir}" +
            (f", continuing from step {step}" if step else ""), flush=True)
      if step >= options.steps:
        accuracy = evaluate(session, graph)
      else:
        step, accuracy = train(
            session, graph, options,
            lambda step: saver.save(
                session, str(pathlib.Path(options.logdir, "model.ckpt")), step,
                write_meta_graph=False))
  return Result(step, accuracy, options.logdir)


def _first_line(error: Exception) -> str:
  return str(error).strip().partition("\n")[0]
