"""One run of the experiment on batch norm: a network, trained and tested."""

import dataclasses
import functools
import time
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from models import resnet
from models import segmentation
from models import unet
from tools import datasets
import towers

TEST_BATCH_SIZE = 50

# Of the `Setting.dataset`.
MODELS = {"shapes": "U-Net", "digits": "ResNet-8"}


@dataclasses.dataclass(frozen=True)
class Setting:
  """What all three do; a batch has `num_towers * rows` images."""
  dataset: str  # One of `MODELS`.
  rows: int
  steps: int
  num_towers: int = 8
  evaluations: int = 8
  learning_rate: float = 0.003  # Of Adam; it falls to 0 along a cosine.
  width: int = 8  # Of the U-Net.
  image_size: Optional[int] = None  # Of shapes.

  @property
  def title(self) -> str:
    images = "image" if self.rows == 1 else "images"
    return (f"{MODELS[self.dataset]} on {self.dataset}, {self.num_towers} "
            f"towers of {self.rows} {images}")

  @property
  def metric(self) -> str:
    return "mean IoU" if self.dataset == "shapes" else "accuracy"

  @property
  def points(self) -> List[int]:
    """The steps after which the test images are tested."""
    return [self.steps * (number + 1) // self.evaluations
            for number in range(self.evaluations)]


# Whether to build towers, and their `sync_batch_norm`.
CONTENDERS = {"one device": None, "whole batch": True, "per tower": False}


class Run(NamedTuple):
  """The scores of one contender from one seed.

  Fields:
    key: The setting's fields, the contender and the seed.
    losses: The training loss at each of the setting's `points`.
    scores: Mean IoU or accuracy after each of them.
    seconds: How long all took; it depends on what else the machine does.
  """
  key: Dict[str, Any]
  losses: List[float]
  scores: List[float]
  seconds: float


def key_of(setting: Setting, contender: str, seed: int) -> Dict[str, Any]:
  """Returns what tells a run from others, as JSON can hold it."""
  return {**dataclasses.asdict(setting), "contender": contender, "seed": seed}


def measure(setting: Setting, contender: str, seed: int,
            data: datasets.Dataset) -> Run:
  """Trains a contender, and tests it at the setting's `points`."""
  begin = time.perf_counter()
  initial = _initial_values(setting, seed, data)
  with tf.Graph().as_default():
    start, images, labels = _batches(data, "train", seed,
                                     setting.num_towers * setting.rows)
    model_fn = functools.partial(_model_fn, setting, data)
    step = tf.train.get_or_create_global_step()
    optimizer = tf.train.AdamOptimizer(
        tf.train.cosine_decay(setting.learning_rate, step, setting.steps))
    if CONTENDERS[contender] is None:
      loss = model_fn(images, labels).loss
      with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        train_op = optimizer.minimize(loss, step)
      config = tf.ConfigProto()
    else:
      graph = towers.build_towers(
          model_fn, setting.num_towers, inputs=(images, labels),
          sync_batch_norm=CONTENDERS[contender])
      loss, config = graph.loss, graph.session_config()
      train_op = graph.minimize(optimizer, global_step=step)
    test_start, confusion = _confusion(setting, data)
    with tf.Session(config=config) as session:
      session.run([tf.global_variables_initializer(), start])
      for variable in tf.trainable_variables():
        variable.load(initial[variable.op.name], session)
      losses, scores = [], []
      for number in range(1, setting.steps + 1):
        value, _ = session.run([loss, train_op])
        if number in setting.points:
          losses.append(float(value))
          session.run(test_start)
          scores.append(_score(data, _sum(session, confusion)))
  return Run(key_of(setting, contender, seed), losses, scores,
             round(time.perf_counter() - begin, 1))


def _initial_values(setting: Setting, seed: int,
                    data: datasets.Dataset) -> Dict[str, np.ndarray]:
  """Returns initial weights by name, those of the plain graph for all.

  A graph's seed gives each op numbers of its own, by how many ops there were
  before it: the graphs of the contenders would start from unequal weights.
  """
  with tf.Graph().as_default():
    tf.set_random_seed(seed)
    _logits(setting, data, tf.zeros([1, *data.image_shape]), training=True)
    with tf.Session() as session:
      session.run(tf.global_variables_initializer())
      return {variable.op.name: session.run(variable)
              for variable in tf.trainable_variables()}


def _batches(data: datasets.Dataset, split: str, seed: int, size: int):
  """Returns the op that starts the iterator, and images and labels.

  Labels are `[B, H, W]`; those of classification `[B, 1, 1]`, as if its images
  were of one pixel, so that one loss and one confusion matrix serve both.
  """
  iterator = tf.data.make_initializable_iterator(
      data.batches(split, size, seed=seed))
  images, labels, _ = iterator.get_next()
  if data.kind == datasets.CLASSIFICATION:
    labels = labels[:, tf.newaxis, tf.newaxis]
  return iterator.initializer, images, labels


def _logits(setting: Setting, data: datasets.Dataset, images: tf.Tensor,
            training: bool) -> tf.Tensor:
  """Returns logits of the shape of the labels, with the classes behind."""
  if data.kind == datasets.SEGMENTATION:
    return unet.logits(images, num_classes=data.num_classes, training=training,
                       width=setting.width)
  logits = resnet.logits(images, num_classes=data.num_classes,
                         training=training, depth=8)
  return logits[:, tf.newaxis, tf.newaxis, :]


def _model_fn(setting: Setting, data: datasets.Dataset, images: tf.Tensor,
              labels: tf.Tensor) -> towers.TowerSpec:
  loss, weight = segmentation.loss(
      _logits(setting, data, images, training=True), labels,
      num_classes=data.num_classes, void_label=data.void_label)
  return towers.TowerSpec(loss, weight=weight)


def _confusion(setting: Setting, data: datasets.Dataset):
  """Returns what starts the test, and a batch's matrices, on one device."""
  start, images, labels = _batches(data, "test", 0, TEST_BATCH_SIZE)
  with tf.variable_scope(tf.get_variable_scope(), reuse=True):
    logits = _logits(setting, data, images, training=False)
  return start, segmentation.confusion_matrix(
      labels, tf.argmax(logits, axis=-1), num_classes=data.num_classes,
      void_label=data.void_label)


def _sum(session: tf.Session, confusion: tf.Tensor) -> np.ndarray:
  total = 0
  while True:
    try:
      total += session.run(confusion).sum(axis=0)
    except tf.errors.OutOfRangeError:
      return total


def _score(data: datasets.Dataset, confusion: np.ndarray) -> float:
  if data.kind == datasets.SEGMENTATION:
    return segmentation.mean_iou(confusion)
  return segmentation.pixel_accuracy(confusion)


