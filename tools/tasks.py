"""What a network learns: one class per image, or one class per pixel.

A task says what to train with and what to count in tests. Its losses are means
over what counts, and tell how much that is, so that towers with unequal shares
make the loss of the whole batch.
"""

import functools
from typing import Callable, Mapping, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from models import alexnet
from models import convnet
from models import fcn
from models import resnet
from models import segmentation
from models import unet
from tools import datasets

# Each takes images [B, H, W, C], `num_classes` and `training`, and returns
# logits [B, num_classes].
CLASSIFIERS = {
    "convnet": convnet.logits,
    **{f"resnet{depth}": functools.partial(resnet.logits, depth=depth)
       for depth in (8, 20, 32, 44, 56, 110)},
    "alexnet": alexnet.logits,
}

# The same, with logits [B, H, W, num_classes].
SEGMENTERS = {"unet": unet.logits, "fcn": fcn.logits}

# The results of the others depend on all rows of a batch, whatever they weigh.
WITHOUT_BATCH_NORM = ("alexnet",)

MIN_SIZE_OF_ALEXNET = 32


class Loss(NamedTuple):
  """Scalar tensors: a mean, and the sum of weights that it is a mean over."""
  loss: tf.Tensor
  weight: tf.Tensor


class Score(NamedTuple):
  """How good a network is, by the whole test set.

  Fields:
    tag: Name for TensorBoard.
    name: Name for people.
    value: From 0 to 1.
    table: Lines with the score of each class, to print before; or "".
  """
  tag: str
  name: str
  value: float
  table: str = ""


class Task(NamedTuple):
  """What is learned.

  Fields:
    networks: By name, the networks that learn it.
    loss: Takes logits, labels, weights `[B]` of the images, and the data set;
      returns a `Loss`.
    counts: Takes logits, labels and the data set; returns an int64 tensor
      `[B, ...]`, whose sum over all images is what `score` takes.
    score: Takes that sum, and the data set; returns a `Score`.
    batch_size: How many images a step takes by default.
  """
  networks: Mapping[str, Callable[..., tf.Tensor]]
  loss: Callable[..., Loss]
  counts: Callable[..., tf.Tensor]
  score: Callable[..., Score]
  batch_size: int


def _class_loss(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor,
                unused_data: datasets.Dataset) -> Loss:
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels=labels, logits=logits)
  total = tf.reduce_sum(weights)
  return Loss(tf.math.divide_no_nan(tf.reduce_sum(weights * losses), total),
              total)


def _right_and_all(logits: tf.Tensor, labels: tf.Tensor,
                   unused_data: datasets.Dataset) -> tf.Tensor:
  right = tf.cast(tf.equal(tf.argmax(logits, axis=-1), labels), tf.int64)
  return tf.stack([right, tf.ones_like(right)], axis=-1)


def _accuracy(counts: np.ndarray, unused_data: datasets.Dataset) -> Score:
  return Score("accuracy", "accuracy", float(counts[0] / counts[1]))


def _pixel_loss(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor,
                data: datasets.Dataset) -> Loss:
  return Loss(*segmentation.loss(
      logits, labels, num_classes=data.num_classes, void_label=data.void_label,
      weight=weights))


def _confusion(logits: tf.Tensor, labels: tf.Tensor,
               data: datasets.Dataset) -> tf.Tensor:
  return segmentation.confusion_matrix(
      labels, tf.argmax(logits, axis=-1), num_classes=data.num_classes,
      void_label=data.void_label)


def _mean_iou(counts: np.ndarray, data: datasets.Dataset) -> Score:
  return Score("mean_iou", "mean IoU", segmentation.mean_iou(counts),
               _iou_table(segmentation.iou(counts), data.class_names))


def _iou_table(values: np.ndarray, names: Optional[Sequence[str]]) -> str:
  """Returns a line per class; "-" for one that neither occurs nor is found."""
  names = names or [str(number) for number in range(len(values))]
  width = max(map(len, ("class", *names)))
  lines = [f"{'class':{width}}  IoU"]
  for name, value in zip(names, values):
    text = "-" if np.isnan(value) else f"{value:.4f}"
    lines.append(f"{name:{width}}  {text}")
  return "\n".join(lines)


TASKS: Mapping[str, Task] = {
    datasets.CLASSIFICATION: Task(
        CLASSIFIERS, _class_loss, _right_and_all, _accuracy, batch_size=64),
    datasets.SEGMENTATION: Task(
        SEGMENTERS, _pixel_loss, _confusion, _mean_iou, batch_size=16),
}


def misfit(model: str, data: datasets.Dataset) -> Optional[str]:
  """Returns why `model` cannot learn `data`, in one line; None if it can."""
  fitting = TASKS[data.kind].networks
  if model not in fitting:
    labels = ("one label per image" if data.kind == datasets.CLASSIFICATION
              else "one label per pixel")
    return (f"`--model` must fit `--dataset`: {data.name} is for {data.kind}, "
            f"with {labels}, got {model}. Choose one of {', '.join(fitting)}.")
  height, width, _ = data.image_shape
  least = MIN_SIZE_OF_ALEXNET
  if model == "alexnet" and (height != width or height < least):
    return (f"`--model=alexnet` must have square images of {least}x{least} or "
            f"more: {data.name} has {height}x{width}. Choose another `--model` "
            "or `--dataset`.")
  return None
