"""The graph of a run: training in towers, and evaluation of its variables."""

import dataclasses
from typing import Any, Callable, Dict, List, NamedTuple, Optional
from typing import Sequence

import tensorflow.compat.v1 as tf

from tools import datasets
from tools import places
from tools import schedules
from tools import task
from tools import tasks
from tools import training_options
import towers

Options = training_options.Options


class Evaluation(NamedTuple):
  """What to run over images to test: first a start, then the others.

  Fields:
    starts: By the name of a split, the op that goes to its first batch.
    images: `[B, H, W, C]`, the next batch.
    labels: `[B]`, or `[B, H, W]` for segmentation.
    outputs: What the task wants to know of them, with a row each.
    pictures: Image summary of the first images of the batch; None for none.
    config: For the session.
  """
  starts: Dict[str, tf.Operation]
  images: tf.Tensor
  labels: tf.Tensor
  outputs: Dict[str, tf.Tensor]
  pictures: Optional[tf.Tensor]
  config: tf.ConfigProto
  task: task.Task

  @property
  def start(self) -> tf.Operation:
    """Goes to the first batch of the test images."""
    return self.starts["test"]

  @property
  def predictions(self) -> tf.Tensor:
    """The class of each image or pixel, int64, in the shape of the labels."""
    return self.outputs["predictions"]


class Training(NamedTuple):
  """The tensors and ops of training, and `evaluation` of the same variables.

  Fields:
    start: Goes to the batch of the number that `first_batch` is fed with.
    first_batch: Placeholder `[]`.
    images: `[B, H, W, C]`, the batch that `train_op` takes.
    labels: `[B]`, or `[B, H, W]` for segmentation.
    weights: `[B]`, 0 for images that only fill up a batch.
    loss: `[]`, the mean over the batch, with weight decay; of several parts,
      the sum.
    part_losses: Those of the parts by name, if there are several.
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
  part_losses: Dict[str, tf.Tensor]
  learning_rate: tf.Tensor
  global_step: tf.Variable
  train_op: tf.Operation
  step_after: tf.Tensor
  skipped: Optional[tf.Variable]
  evaluation: Evaluation
  config: tf.ConfigProto
  train: towers.TowerGraph


def build(options: Options, data: datasets.Dataset,
          place: Optional[places.Places] = None) -> Training:
  """Builds training, and evaluation of the same variables, in towers.

  Args:
    options: What to do.
    data: The data set.
    place: Where; by default here.

  Raises:
    UsageError: If the options do not fit the data, or the devices do not exist.
  """
  options = training_options.completed(options, data)
  place = place or places.Places(options)
  learned = tasks.of_model(options.model)

  def train_fn(*batch):
    values, weight = learned.losses(data, options, *batch)
    totals = {part.loss: values[part.loss] + options.weight_decay * _decay(part)
              for part in learned.parts}
    loss = tf.add_n(list(totals.values()))
    return towers.TowerSpec(loss, totals if len(totals) > 1 else None, weight)

  tf.set_random_seed(options.seed)
  first_batch = tf.placeholder(tf.int64, [], name="first_batch")
  seeded = dataclasses.replace(options, seed=place.seed(options.seed))
  inputs = place.inputs(
      lambda share: learned.batches(data, seeded, first_batch, share))
  train = _build_towers(train_fn, inputs.inputs, options, place)
  with tf.variable_scope(tf.get_variable_scope(), reuse=True):
    evaluation = build_evaluation(options, data, place)

  global_step = place.global_step()
  make_optimizer, rate = learned.optimizers[
      options.optimizer or learned.optimizer]
  if options.learning_rate is not None:
    rate = options.learning_rate
  learning_rate = schedules.learning_rate(
      options.schedule, rate, global_step=global_step, steps=options.steps,
      warm_up=options.warm_up)
  train_op = tf.group(*_steps(
      train, learned.parts, lambda: make_optimizer(learning_rate),
      minimize=place.minimize, global_step=global_step,
      clip_norm=options.clip_norm, loss_scale=options.loss_scale,
      accumulate_steps=options.accumulate_steps,
      skip_nonfinite=options.skip_nonfinite))
  with tf.control_dependencies([train_op]):
    step_after = tf.identity(global_step.read_value(), name="step_after")
  images, labels, weights = inputs.batch
  return Training(
      start=inputs.start, first_batch=first_batch, images=images,
      labels=labels, weights=weights, loss=train.loss,
      part_losses=dict(train.outputs or {}), learning_rate=learning_rate,
      global_step=global_step, train_op=train_op, step_after=step_after,
      skipped=train.skipped_steps if options.may_skip else None,
      evaluation=evaluation, config=evaluation.config, train=train)


def _decay(part: task.Part) -> tf.Tensor:
  """Returns half the sum of squares of a part's kernels."""
  return tf.add_n([
      tf.nn.l2_loss(variable) for variable in tf.trainable_variables()
      if variable.op.name.endswith("kernel") and part.has(variable.op.name)])


def _steps(train: towers.TowerGraph, parts: Sequence[task.Part],
           make_optimizer: Callable[[], tf.train.Optimizer], *,
           minimize: Callable[..., tf.Operation], global_step: tf.Variable,
           **arguments: Any) -> List[tf.Operation]:
  """Returns the train ops of the parts, which run at the same time.

  All gradients are those before the step: each part's variables wait for its
  own gradients, which need all that the towers read of them.
  """
  if len(parts) == 1:
    return [minimize(train, make_optimizer(), global_step=global_step,
                     **arguments)]
  ops = []
  for part in parts:
    ops.append(minimize(
        train, make_optimizer(), loss=part.loss,
        var_list=[variable for variable in train.trainable_variables
                  if part.has(variable.op.name)],
        update_ops=[op for op in train.update_ops if part.has(op.name)],
        global_step=global_step if part is parts[-1] else None, **arguments))
  return ops


def build_evaluation(options: Options, data: datasets.Dataset,
                     place: Optional[places.Places] = None) -> Evaluation:
  """Builds the network in towers, with moving statistics, on the test images.

  Args:
    options: What to do.
    data: The data set.
    place: Where; by default here.

  Raises:
    UsageError: If the options do not fit the data, or the devices do not exist.
  """
  options = training_options.completed(options, data)
  place = place or places.Places(options)
  learned = tasks.of_model(options.model)
  batches = {split: learned.test_batches(data, options, split)
             for split in learned.test_splits}
  one = batches["test"]
  iterator = tf.data.Iterator.from_structure(
      tf.data.get_output_types(one), tf.data.get_output_shapes(one))
  images, labels, *others = iterator.get_next()
  test = _build_towers(
      lambda *inputs: learned.outputs(data, options, *inputs),
      [images, *others], options, place, name="test_tower")
  shown, count = None, options.summarize_images
  if count is None:
    count = learned.summarize_images
  if count:
    with tf.device("/cpu:0"):
      shown = learned.summary(images, labels, test.outputs, data, count)
  return Evaluation(
      {split: iterator.make_initializer(each)
       for split, each in batches.items()}, images, labels, test.outputs, shown,
      test.session_config(**place.visible.session_options()), learned)


def evaluate(session: tf.Session, evaluation: Evaluation,
             data: datasets.Dataset) -> Any:
  """Returns what the task finds in the test images, such as their confusions.

  Each image counts once, whatever the size of the last batch. The score is
  `evaluation.task.score` of that.
  """

  def rows(split):
    session.run(evaluation.starts[split])
    while True:
      try:
        batch = session.run([evaluation.labels, evaluation.outputs])
      except tf.errors.OutOfRangeError:
        return
      yield batch

  return evaluation.task.measure(rows, data)


def _build_towers(model_fn: Callable[..., Any], inputs: Any, options: Options,
                  place: places.Places, **arguments: Any) -> towers.TowerGraph:
  """Builds as the options say, which may ask for what is not there."""
  try:
    graph = towers.build_towers(
        model_fn, place.devices, inputs=inputs,
        parameter_device=place.parameter_device, variables=options.variables,
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
  """Returns what makes logits, in float32, of images, in any precision.

  Raises:
    UsageError: If the model is for a task without classes.
  """
  network = tasks.of_model(options.model).network(options, data)
  if network is None:
    raise training_options.UsageError(
        "`--logdir` must be that of a model that gives classes: got "
        f"{options.model}. Use it by its code in models/.")
  return network
