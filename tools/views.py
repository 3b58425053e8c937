"""Two views of each image, as contrastive learning compares them.

A view is the image as the data set augments it, of which a window is cut out
and resized, with another contrast, brightness and colour. Like all
augmentation it is a function of the image and a seed alone.

References:
  Chen et al., "A Simple Framework for Contrastive Learning of Visual
    Representations", 2020, appendix A, https://arxiv.org/abs/2002.05709
"""

import dataclasses

import tensorflow.compat.v1 as tf

from tools import datasets
from tools.datasets import pixels

# Share of the image that a window covers. The paper starts from 0.08, for
# photographs of hundreds of pixels.
MIN_AREA = 0.8

# Contrast and brightness change by up to so much of the standard deviation.
STRENGTH = 0.4

# How many images of three channels lose their colours.
GREY = 0.2

# Numbers of images stay below.
_STREAM = 1 << 40


def of(data: datasets.Dataset) -> datasets.Dataset:
  """Returns the data set whose images are pairs of views, `[2, H, W, C]`.

  Without augmentation both views are the image itself.
  """

  def views(image, label, seed):
    pair = []
    for number in range(2):
      # Each needs random numbers of its own, and so has what it does first.
      own, other = ([seed[0], seed[1] + _STREAM * (2 * number + step)]
                    for step in range(2))
      view, _ = data.augment(image, label, tf.stack(own))
      view = tf.ensure_shape(view, data.image_shape)
      pair.append(_changed(view, tf.stack(other), data.scale))
    return tf.stack(pair), label

  def prepare(image, label):
    image, label = data.prepare(image, label)
    return tf.stack([image, image]), label

  return dataclasses.replace(
      data, augment=views, prepare=prepare, image_shape=(2, *data.image_shape))


def _changed(image: tf.Tensor, seed: tf.Tensor,
             scale: pixels.Scale) -> tf.Tensor:
  """Returns a window of an image `[H, W, C]`, resized and recoloured."""
  channels = image.shape[-1]
  numbers = tf.random.stateless_uniform([6 + channels], seed)
  image = _window(image, numbers[:4])
  if channels == 3:
    grey = tf.reduce_mean(image, axis=-1, keepdims=True)
    image = tf.where_v2(numbers[4] < GREY, tf.tile(grey, [1, 1, 3]), image)
  contrast = 1.0 + STRENGTH * (2.0 * numbers[5] - 1.0)
  brightness = STRENGTH * (2.0 * numbers[6:] - 1.0)
  return scale.mean + (image - scale.mean) * contrast + (
      brightness * scale.deviation)


def _window(image: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
  """Returns a random window, 3/4 to 4/3 as wide as high, at the old size."""
  full = tf.constant(image.shape.as_list()[:2], tf.float32)
  area = (MIN_AREA + (1.0 - MIN_AREA) * numbers[0]) * full[0] * full[1]
  ratio = tf.pow(4.0 / 3.0, 2.0 * numbers[1] - 1.0)
  window = tf.stack([tf.sqrt(area / ratio), tf.sqrt(area * ratio)])
  window = tf.clip_by_value(tf.round(window), 1.0, full)
  start = tf.cast(tf.floor(numbers[2:4] * (full - window + 1.0)), tf.int32)
  cut = tf.slice(image, tf.concat([start, [0]], 0),
                 tf.concat([tf.cast(window, tf.int32), [-1]], 0))
  # Of TensorFlow 2: it maps centres of pixels to centres of pixels.
  return tf.compat.v2.image.resize(cut, image.shape[:2])
