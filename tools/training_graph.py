"""The graph of a run: training in towers, and evaluation of its variables."""

import functools
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from tools import datasets
from tools import pictures
from tools import schedules
from tools import tasks
from tools import training_options
import towers

Options = training_options.Options


class Evaluation(NamedTuple):
  """What to run over the test images: first `start`, then the others.

  Fields:
    start: Goes to the first batch.
    images: `[B, H, W, C]`, the next batch.
    labels: `[B]`, or `[B, H, W]` for segmentation.
    predictions: The same, int64.
    pictures: Image summary of the first images of the batch; None for none.
    config: For the session.
  """
  start: tf.Operation
  images: tf.Tensor
  labels: tf.Tensor
  predictions: tf.Tensor
  pictures: Optional[tf.Tensor]
  config: tf.ConfigProto


class Training(NamedTuple):
  """The tensors and ops of training, and `evaluation` of the same variables.

  Fields:
    start: Goes to the batch of the number that `first_batch` is fed with.
    first_batch: Placeholder `[]`.
    images: `[B, H, W, C]`, the batch that `train_op` takes.
    labels: `[B]`, or `[B, H, W]` for segmentation.
    weights: `[B]`, 0 for images that only fill up a batch.
    loss: `[]`, the mean over the batch, with weight decay.
    learning_rate: `[]`, at the current step.
    global_step: `[]`.
    train_op: A batch; `accumulate_steps` of them are a step.
    step_after: `[]`, the global step when `train_op` has run.
    skipped: `[]`, how many batches were skipped; None if none can be.
    evaluation: For the test images.
    config: For the session.
    train: The towers in training.
  """
  start: tf.Operation
  first_batch: tf.Tensor
  images: tf.Tensor
  labels: tf.Tensor
  weights: tf.Tensor
  loss: tf.Tensor
  learning_rate: tf.Tensor
  global_step: tf.Variable
  train_op: tf.Operation
  step_after: tf.Tensor
  skipped: Optional[tf.Variable]
  evaluation: Evaluation
  config: tf.ConfigProto
  train: towers.TowerGraph


def build(options: Options, data: datasets.Dataset) -> Training:
  """Builds training, and evaluation of the same variables, in towers.

  Raises:
    UsageError: If the options do not fit the data, or the devices do not exist.
  """
  options = training_options.completed(options, data)
  network = network_of(options, data)
  task = tasks.TASKS[data.kind]

  def train_fn(images, labels, weights):
    loss, weight = task.loss(network(images, training=True), labels, weights,
                             data, options.label_smoothing)
    kernels = [variable for variable in tf.trainable_variables()
               if variable.op.name.endswith("kernel")]
    decay = tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
    return towers.TowerSpec(loss + options.weight_decay * decay, weight=weight)

  tf.set_random_seed(options.seed)
  first_batch = tf.placeholder(tf.int64, [], name="first_batch")
  batches = tf.data.make_initializable_iterator(data.batches(
      "train", options.batch_size, seed=options.seed, augment=options.augment,
      remainder=options.remainder, skip=first_batch))
  inputs = batches.get_next()
  train = _build_towers(train_fn, inputs, options)
  with tf.variable_scope(tf.get_variable_scope(), reuse=True):
    evaluation = build_evaluation(options, data)

  global_step = tf.train.get_or_create_global_step()
  make_optimizer, rate = training_options.OPTIMIZERS[options.optimizer]
  if options.learning_rate is not None:
    rate = options.learning_rate
  learning_rate = schedules.learning_rate(
      options.schedule, rate, global_step=global_step, steps=options.steps,
      warm_up=options.warm_up)
  train_op = train.minimize(
      make_optimizer(learning_rate), global_step=global_step,
      clip_norm=options.clip_norm, loss_scale=options.loss_scale,
      accumulate_steps=options.accumulate_steps,
      skip_nonfinite=options.skip_nonfinite)
  with tf.control_dependencies([train_op]):
    step_after = tf.identity(global_step.read_value(), name="step_after")
  images, labels, weights = inputs
  return Training(
      start=batches.initializer, first_batch=first_batch, images=images,
      labels=labels, weights=weights, loss=train.loss,
      learning_rate=learning_rate, global_step=global_step, train_op=train_op,
      step_after=step_after,
      skipped=train.skipped_steps if options.may_skip else None,
      evaluation=evaluation, config=evaluation.config, train=train)


def build_evaluation(options: Options, data: datasets.Dataset) -> Evaluation:
  """Builds the network in towers, with moving statistics, on the test images.

  Raises:
    UsageError: If the options do not fit the data, or the devices do not exist.
  """
  options = training_options.completed(options, data)
  network = network_of(options, data)

  def test_fn(images):
    return {"predictions": tf.argmax(
        network(images, training=False), axis=-1)}

  batches = tf.data.make_initializable_iterator(
      data.batches("test", options.batch_size))
  images, labels, _ = batches.get_next()
  test = _build_towers(test_fn, [images], options, name="test_tower")
  predictions = test.outputs["predictions"]
  shown = None
  if options.summarize_images:
    with tf.device("/cpu:0"):
      shown = pictures.summary(images, labels, predictions=predictions,
                               data=data, count=options.summarize_images)
  return Evaluation(batches.initializer, images, labels, predictions, shown,
                    test.session_config())


def evaluate(session: tf.Session, evaluation: Evaluation,
             data: datasets.Dataset) -> np.ndarray:
  """Returns the confusion matrix of the test images, `[K, K]`.

  Each image counts once, whatever the size of the last batch.
  """
  total = np.zeros([data.num_classes, data.num_classes], np.int64)
  session.run(evaluation.start)
  while True:
    try:
      labels, predictions = session.run(
          [evaluation.labels, evaluation.predictions])
    except tf.errors.OutOfRangeError:
      return total
    total += tasks.confusion_matrix(labels, predictions, data)


def _build_towers(model_fn: Callable[..., Any], inputs: Any, options: Options,
                  **arguments: Any) -> towers.TowerGraph:
  """Builds as the options say, which may ask for what is not there."""
  try:
    graph = towers.build_towers(
        model_fn, options.devices or options.num_towers or 2,
        inputs=inputs, variables=options.variables,
        sync_batch_norm=options.sync_batch_norm, **arguments)
    graph.session_config()
    return graph
  except ValueError as error:
    # The library names the argument at fault first; anything else is a mistake
    # in a model, whose author wants the traceback.
    if not str(error).startswith("`devices"):
      raise
    raise training_options.UsageError(
        f"`--devices` or `--num_towers` does not fit: {error}") from error


def network_of(options: Options,
             data: datasets.Dataset) -> Callable[..., tf.Tensor]:
  """Returns what makes logits, in float32, of images, in any precision."""
  network = functools.partial(
      tasks.TASKS[data.kind].networks[options.model],
      num_classes=data.num_classes)
  if options.precision == "float32":
    return network

  def mixed(images, *, training):
    with tf.variable_scope(
        tf.get_variable_scope(), auxiliary_name_scope=False,
        custom_getter=_float32_variable):
      logits = network(tf.cast(images, options.precision), training=training)
    return tf.cast(logits, tf.float32)

  return mixed


def _float32_variable(getter: Callable[..., tf.Variable], name: str,
                      dtype: tf.DType = tf.float32, **arguments: Any) -> Any:
  """Makes a float32 variable, and casts it to what the model asked for.

  Steps of a small learning rate would be lost in 16 bits.
  """
  dtype = tf.as_dtype(dtype)
  if dtype not in (tf.float16, tf.bfloat16):
    return getter(name, dtype=dtype, **arguments)
  return tf.cast(getter(name, dtype=tf.float32, **arguments), dtype)
