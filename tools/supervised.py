"""Learning from labels: one class per image, or one class per pixel."""

import functools
from typing import Any, Callable, Dict, Iterator, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from models import alexnet
from models import convnet
from models import fcn
from models import resnet
from models import segmentation
from models import unet
from tools import datasets
from tools import scores
from tools import task

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

MIN_SIZE_OF_ALEXNET = 32


class Supervised(task.Task):
  """What both have in common: logits, predictions and a confusion matrix."""

  def network(self, options: Any, data: Any) -> Callable[..., tf.Tensor]:
    """Returns what makes logits, in float32, of images, in any precision."""
    return self.computed(options, functools.partial(
        self.networks[options.model], num_classes=data.num_classes))

  def outputs(self, data: datasets.Dataset, options: Any, images: tf.Tensor,
              *others: tf.Tensor) -> Dict[str, tf.Tensor]:
    """Returns the class of each image or pixel, by moving statistics."""
    network = self.network(options, data)
    return {"predictions": tf.argmax(network(images, training=False), axis=-1)}

  def measure(self, rows: Callable[[str], Iterator[task.Rows]],
              data: datasets.Dataset) -> np.ndarray:
    """Returns the confusion matrix of the test images, `[K, K]`."""
    return sum(
        (scores.confusion_matrix(labels, outputs["predictions"], data)
         for labels, outputs in rows("test")),
        np.zeros([data.num_classes, data.num_classes], np.int64))


class Classification(Supervised):
  """One class per image."""
  networks = CLASSIFIERS

  def misfit(self, model: str, data: datasets.Dataset) -> Optional[str]:
    """Returns why `model` cannot learn `data`, in one line; None if it can."""
    height, width, _ = data.image_shape
    least = MIN_SIZE_OF_ALEXNET
    if model != "alexnet" or height == width >= least:
      return None
    return (f"`--model=alexnet` must have square images of {least}x{least} or "
            f"more: {data.name} has {height}x{width}. Choose another `--model` "
            "or `--dataset`.")

  def losses(self, data: datasets.Dataset, options: Any,
             *batch: tf.Tensor) -> task.Losses:
    """Returns the mean cross entropy of the images that count."""
    images, labels, weights = batch
    losses = _cross_entropy(self.network(options, data)(images, training=True),
                            labels, options.label_smoothing)
    total = tf.reduce_sum(weights)
    return task.Losses({"loss": tf.math.divide_no_nan(
        tf.reduce_sum(weights * losses), total)}, total)

  def score(self, found: np.ndarray, data: datasets.Dataset) -> scores.Score:
    """Returns the accuracy."""
    return scores.accuracy(found, data)


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


class Segmentation(Supervised):
  """One class per pixel."""
  kind = datasets.SEGMENTATION
  networks = SEGMENTERS
  batch_size = 16

  def losses(self, data: datasets.Dataset, options: Any,
             *batch: tf.Tensor) -> task.Losses:
    """Returns the mean cross entropy of the pixels that count."""
    images, labels, weights = batch
    loss, weight = segmentation.loss(
        self.network(options, data)(images, training=True), labels,
        num_classes=data.num_classes, void_label=data.void_label,
        weight=weights, label_smoothing=options.label_smoothing)
    return task.Losses({"loss": loss}, weight)

  def score(self, found: np.ndarray, data: datasets.Dataset) -> scores.Score:
    """Returns the mean over the classes of intersection over union."""
    return scores.mean_iou(found, data)
