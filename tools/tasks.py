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

# A confusion matrix of more does not fit a screen.
MAX_CLASSES_OF_TABLE = 20


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
    loss: Takes float32 logits, labels, weights `[B]` of the images, the data
      set and the amount of label smoothing; returns a `Loss`.
    score: Takes the confusion matrix of the test images, and the data set;
      returns a `Score`.
    batch_size: How many images a step takes by default.
  """
  networks: Mapping[str, Callable[..., tf.Tensor]]
  loss: Callable[..., Loss]
  score: Callable[..., Score]
  batch_size: int


def _class_loss(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor,
                unused_data: datasets.Dataset, smoothing: float) -> Loss:
  losses = _cross_entropy(logits, labels, smoothing)
  total = tf.reduce_sum(weights)
  return Loss(tf.math.divide_no_nan(tf.reduce_sum(weights * losses), total),
              total)


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor,
                   smoothing: float) -> tf.Tensor:
  """Returns the loss of each image, `[B]`.

  With label smoothing `e`, the right class of K has the probability
  `1 - e + e / K`, each other `e / K` (Szegedy et al., "Rethinking the Inception
  Architecture", 2015, section 7).
  """
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels=labels, logits=logits)
  if not smoothing:
    return losses
  uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
  return (1.0 - smoothing) * losses + smoothing * uniform


def _accuracy(confusion: np.ndarray, data: datasets.Dataset) -> Score:
  return Score("accuracy", "accuracy",
               float(np.trace(confusion) / confusion.sum()),
               _confusion_table(confusion, data.class_names))


def _pixel_loss(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor,
                data: datasets.Dataset, smoothing: float) -> Loss:
  del smoothing  # Not for segmentation; `training_options` refuses it.
  return Loss(*segmentation.loss(
      logits, labels, num_classes=data.num_classes, void_label=data.void_label,
      weight=weights))


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray,
                     data: datasets.Dataset) -> np.ndarray:
  """Returns how many images (or pixels) of each class were taken for which.

  Args:
    labels: Integers of shape `[B]` or `[B, H, W]`; the void label counts for
      nothing.
    predictions: Integers of the same shape, from 0 to `data.num_classes - 1`.
    data: The data set.

  Returns:
    int64 array `[num_classes, num_classes]`: labels by predictions. Those of
    several batches add up.
  """
  classes = data.num_classes
  valid = labels != (-1 if data.void_label is None else data.void_label)
  cells = labels[valid].astype(np.int64) * classes + predictions[valid]
  return np.bincount(cells, minlength=classes**2).reshape([classes, classes])


def _mean_iou(confusion: np.ndarray, data: datasets.Dataset) -> Score:
  return Score("mean_iou", "mean IoU", segmentation.mean_iou(confusion),
               _iou_table(segmentation.iou(confusion), data.class_names))


def _names(names: Optional[Sequence[str]], count: int) -> Sequence[str]:
  return names or [str(number) for number in range(count)]


def _confusion_table(confusion: np.ndarray,
                     names: Optional[Sequence[str]]) -> str:
  """Returns a line per class with its row; "" if they are too many to read."""
  if len(confusion) > MAX_CLASSES_OF_TABLE:
    return ""
  names = _names(names, len(confusion))
  corner = "label, taken for:"
  first = max(map(len, (corner, *names)))
  width = max(len(str(confusion.max())), *map(len, names)) + 2
  rows = [[corner, *names],
          *([name, *row] for name, row in zip(names, confusion))]
  return "\n".join(
      f"{row[0]:{first}}" + "".join(f"{cell:>{width}}" for cell in row[1:])
      for row in rows)


def _iou_table(values: np.ndarray, names: Optional[Sequence[str]]) -> str:
  """Returns a line per class; "-" for one that neither occurs nor is found."""
  names = _names(names, len(values))
  width = max(map(len, ("class", *names)))
  lines = [f"{'class':{width}}  IoU"]
  for name, value in zip(names, values):
    text = "-" if np.isnan(value) else f"{value:.4f}"
    lines.append(f"{name:{width}}  {text}")
  return "\n".join(lines)


TASKS: Mapping[str, Task] = {
    datasets.CLASSIFICATION: Task(
        CLASSIFIERS, _class_loss, _accuracy, batch_size=64),
    datasets.SEGMENTATION: Task(
        SEGMENTERS, _pixel_loss, _mean_iou, batch_size=16),
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
