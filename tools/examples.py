"""The models of `models/` by name, each as a model function with a batch.

For the tools that look at a model rather than train it. Images are random.
"""

import functools
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from models import dcgan
from models import segmentation
from models import simclr
from tools import tasks
import towers

_NUM_CLASSES = 10
_VOID_LABEL = 255


class Example(NamedTuple):
  """A model function and a batch for it, a nest of arrays or None."""
  model_fn: Callable[..., Any]
  inputs: Any


def _images(rows: int, size: int) -> np.ndarray:
  return np.random.RandomState(0).normal(
      size=[rows, size, size, 3]).astype(np.float32)


def _classifier(rows: int, size: int, narrow: bool, *,
                name: str) -> Example:
  network = tasks.CLASSIFIERS[name]
  if narrow and name == "alexnet":
    network = functools.partial(network, width=0.1)

  def model_fn(images, labels):
    logits = network(images, num_classes=_NUM_CLASSES, training=True)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=logits))
    return {"loss": loss, "logits": logits}

  labels = np.random.RandomState(1).randint(0, _NUM_CLASSES, rows)
  return Example(model_fn, (_images(rows, size), labels))


def _segmenter(rows: int, size: int, narrow: bool, *, name: str) -> Example:
  network = tasks.SEGMENTERS[name]
  if narrow:
    network = functools.partial(network, width=4, levels=3)

  def model_fn(images, labels):
    logits = network(images, num_classes=_NUM_CLASSES, training=True)
    mean = segmentation.loss(logits, labels, num_classes=_NUM_CLASSES,
                             void_label=_VOID_LABEL)
    return towers.TowerSpec(mean.loss, {"logits": logits}, mean.weight)

  rng = np.random.RandomState(1)
  labels = rng.randint(0, _NUM_CLASSES, [rows, size, size])
  # More of them in one image than in another, as borders are.
  void = rng.uniform(size=labels.shape) < rng.uniform(size=[rows, 1, 1])
  return Example(model_fn, (_images(rows, size),
                            np.where(void, _VOID_LABEL, labels)))


def _simclr(rows: int, size: int, narrow: bool) -> Example:
  loss = functools.partial(simclr.loss, training=True)
  if narrow:
    loss = functools.partial(loss, depth=8, projection_size=16)
  return Example(loss, tuple(np.split(_images(2 * rows, size), 2)))


def _dcgan(rows: int, size: int, narrow: bool) -> Example:
  losses = functools.partial(dcgan.losses, depth=8) if narrow else dcgan.losses
  return Example(losses, (np.tanh(_images(rows, size)),))


# Each takes the number of rows, the height and width of images, and whether to
# take few filters, which is as good where only equality counts.
MODELS: Mapping[str, Callable[[int, int, bool], Example]] = {
    **{name: functools.partial(_classifier, name=name)
       for name in tasks.CLASSIFIERS},
    **{name: functools.partial(_segmenter, name=name)
       for name in tasks.SEGMENTERS},
    "resnet": functools.partial(_classifier, name="resnet20"),
    "simclr": _simclr,
    "dcgan": _dcgan,
}
