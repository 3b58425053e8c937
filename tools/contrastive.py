"""Learning without labels: two views of an image are to be alike.

What has been learned is tested by the nearest neighbours of a test image among
the training images, by their features: the labels of those say what it is taken
for. That trains nothing, and is the same for every number of towers.

References:
  Chen et al., "A Simple Framework for Contrastive Learning of Visual
    Representations", 2020, https://arxiv.org/abs/2002.05709
  Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance
    Discrimination", 2018, section 3.4 (nearest neighbours of equally long
    features), https://arxiv.org/abs/1805.01978
"""

import functools
from typing import Any, Callable, Dict, Iterator, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from models import simclr
from tools import datasets
from tools import scores
from tools import task
from tools import views

NEIGHBOURS = 5

# Of so many training images, the first, at most.
MAX_REFERENCES = 50000

# Test images whose similarities are in memory at a time.
_CHUNK = 256


class Encoder(NamedTuple):
  """Both take a tensor and `training`: images, and what the first returns."""
  features: Callable[..., tf.Tensor]
  vectors: Callable[..., tf.Tensor]


def encoder(depth: int, size: int) -> Encoder:
  """Returns SimCLR's networks, of that depth and length of vectors."""
  return Encoder(functools.partial(simclr.features, depth=depth),
                 functools.partial(simclr.project, size=size))


ENCODERS = {"simclr": encoder(depth=20, size=128)}


class Contrastive(task.Task):
  """Views of one image are alike, and those of two images are not."""
  networks = ENCODERS
  batch_size = 128  # Each view is compared with all others of a batch.
  optimizer = "adam"
  test_splits = ("train", "test")

  def refusal(self, options: Any):
    """Returns which option makes no sense, in one line; None without such."""
    if options.label_smoothing:
      return (f"`--label_smoothing` must be 0 for {options.model}, which "
              "learns without labels: got "
              f"{options.label_smoothing}. Leave it out.")
    return None

  def batches(self, data: datasets.Dataset, options: Any,
              first_batch: tf.Tensor,
              share: datasets.Share) -> tf.data.Dataset:
    """Makes batches whose images are pairs of views, `[B, 2, H, W, C]`."""
    return super().batches(views.of(data), options, first_batch, share)

  def losses(self, data: datasets.Dataset, options: Any,
             *batch: tf.Tensor) -> task.Losses:
    """Returns the loss that compares all views of all towers."""
    network = self.networks[options.model]

    def vectors(images, *, training):
      return network.vectors(network.features(images, training=training),
                             training=training)

    # One batch, so that batch norm sees both views.
    pair = tf.concat(tf.unstack(batch[0], axis=1), axis=0)
    pair = self.computed(options, vectors)(pair, training=True)
    return task.Losses({"loss": simclr.contrastive_loss(*tf.split(pair, 2))})

  def outputs(self, data: datasets.Dataset, options: Any, images: tf.Tensor,
              *others: tf.Tensor) -> Dict[str, tf.Tensor]:
    """Returns the features of each image, by moving statistics."""
    features = self.computed(options, self.networks[options.model].features)
    return {"features": features(images, training=False)}

  def measure(self, rows: Callable[[str], Iterator[task.Rows]],
              data: datasets.Dataset) -> np.ndarray:
    """Returns the confusion matrix of the test images, `[K, K]`."""
    references, labels = _collected(rows("train"), MAX_REFERENCES)
    features, expected = _collected(rows("test"), None)
    return scores.confusion_matrix(
        expected, nearest_labels(features, references, labels), data)

  def score(self, found: np.ndarray, data: datasets.Dataset) -> scores.Score:
    """Returns the accuracy of the nearest neighbours."""
    return scores.accuracy(found, data)._replace(
        name=f"accuracy of the {NEIGHBOURS} nearest neighbours")


def _collected(batches: Iterator[task.Rows], most: Any):
  """Returns the features and labels of the first rows."""
  features, labels, count = [], [], 0
  for label, outputs in batches:
    features.append(outputs["features"])
    labels.append(label)
    count += len(label)
    if most is not None and count >= most:
      break
  return np.concatenate(features)[:most], np.concatenate(labels)[:most]


def nearest_labels(features: np.ndarray, references: np.ndarray,
                   labels: np.ndarray, count: int = NEIGHBOURS) -> np.ndarray:
  """Returns the label that most of the nearest references have.

  Nearest are those of the largest cosine. Of labels that equally many have, it
  is that of the nearest one.

  Args:
    features: Array of shape `[B, F]`.
    references: Array of shape `[N, F]`.
    labels: Integers of shape `[N]`, from 0.
    count: How many references to ask, at most.

  Returns:
    Integers of shape `[B]`.
  """
  features, references = _of_length_1(features), _of_length_1(references)
  count = min(count, len(references))
  result = []
  for start in range(0, len(features), _CHUNK):
    cosines = features[start:start + _CHUNK] @ references.T
    nearest = np.argpartition(-cosines, count - 1, axis=1)[:, :count]
    nearest = np.sort(nearest, axis=1)  # Of equal ones, the first.
    order = np.argsort(-np.take_along_axis(cosines, nearest, 1), axis=1,
                       kind="stable")
    result.append(_most_frequent(
        labels[np.take_along_axis(nearest, order, 1)]))
  return np.concatenate(result)


def _of_length_1(x: np.ndarray) -> np.ndarray:
  x = x.astype(np.float64)
  length = np.linalg.norm(x, axis=1, keepdims=True)
  return x / np.maximum(length, np.finfo(np.float64).tiny)


def _most_frequent(labels: np.ndarray) -> np.ndarray:
  """Returns the most frequent label of each row; of several, the first."""
  counts = (labels[:, :, np.newaxis] == labels[:, np.newaxis, :]).sum(axis=2)
  return labels[np.arange(len(labels)), counts.argmax(axis=1)]
