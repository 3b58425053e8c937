"""Random changes of images, each a function of an image and a seed alone.

Each function draws all its random numbers from one stateless op, so that an
image is changed in the same way whatever else happens in the graph: however
many towers there are, and wherever a run continues.

Images have the shape `[H, W, C]` and type float32, masks `[H, W]`. A `fill` of
shape `[C]` is the colour of pixels that lie outside the image.
"""

from typing import Tuple

import numpy as np
import tensorflow.compat.v1 as tf

ImageAndLabel = Tuple[tf.Tensor, tf.Tensor]

# The version of TensorFlow 2 maps centres of pixels to centres of pixels, so
# that a mask stays in line with its image.
_resize = tf.compat.v2.image.resize


def keep(image: tf.Tensor, label: tf.Tensor, seed: tf.Tensor) -> ImageAndLabel:
  """Changes nothing; for images of which too little is known."""
  del seed
  return image, label


def shift(image: tf.Tensor, label: tf.Tensor, seed: tf.Tensor, *, padding: int,
          fill: np.ndarray, flip: bool) -> ImageAndLabel:
  """Pads all sides, cuts a random window of the old size, and may mirror it.

  With a padding of 4 and mirroring, the augmentation of CIFAR-10 in He et al.

  Args:
    image: Image of static shape `[H, W, C]`.
    label: Returned as it is.
    seed: int64 tensor of shape `[2]`.
    padding: Largest shift in each direction, in pixels.
    fill: Colour of the padding, shape `[C]`.
    flip: Whether half of the images are mirrored, left to right.

  References:
    He et al., "Deep Residual Learning for Image Recognition", 2015,
      https://arxiv.org/abs/1512.03385
  """
  numbers = tf.random.stateless_uniform([3], seed)
  start = tf.cast(numbers[:2] * (2 * padding + 1), tf.int32)
  padded = _pad(image, [[padding] * 2, [padding] * 2], fill)
  shifted = tf.slice(padded, [start[0], start[1], 0], image.shape)
  if flip:
    shifted = _mirror_if(numbers[2] < 0.5, shifted)
  return shifted, label


def random_window(image: tf.Tensor, label: tf.Tensor, seed: tf.Tensor, *,
                  size: int) -> ImageAndLabel:
  """Cuts a window of random area and shape, resizes it and may mirror it.

  The window covers 8 to 100 % of the image and is 3/4 to 4/3 as wide as high,
  where the image has room for it, as in Szegedy et al.

  Args:
    image: Image of any size.
    label: Returned as it is.
    seed: int64 tensor of shape `[2]`.
    size: Height and width of the result.

  References:
    Szegedy et al., "Going Deeper with Convolutions", 2014,
      https://arxiv.org/abs/1409.4842
  """
  numbers = tf.random.stateless_uniform([5], seed)
  full = tf.cast(tf.shape(image)[:2], tf.float32)
  area = (0.08 + 0.92 * numbers[0]) * full[0] * full[1]
  ratio = tf.pow(4.0 / 3.0, 2.0 * numbers[1] - 1.0)
  window = tf.stack([tf.sqrt(area / ratio), tf.sqrt(area * ratio)])
  window = tf.clip_by_value(tf.round(window), 1.0, full)
  start = tf.floor(numbers[2:4] * (full - window + 1.0))
  start, window = tf.cast(start, tf.int32), tf.cast(window, tf.int32)
  image = tf.slice(image, tf.concat([start, [0]], 0),
                   tf.concat([window, [-1]], 0))
  image = _resize(image, [size, size])
  return _mirror_if(numbers[4] < 0.5, image), label


def central_window(image: tf.Tensor, label: tf.Tensor, *,
                   size: int) -> ImageAndLabel:
  """Resizes the shorter side to 8/7 of `size` and cuts the middle, for tests.

  These are the usual 256 pixels for windows of 224.

  Args:
    image: Image of any size.
    label: Returned as it is.
    size: Height and width of the result.
  """
  full = tf.shape(image)[:2]
  shorter = tf.cast(tf.reduce_min(full), tf.float32)
  factor = round(size * 8 / 7) / shorter
  image = _resize(image, _scaled(full, factor))
  start = (tf.shape(image)[:2] - size) // 2
  return tf.slice(image, tf.concat([start, [0]], 0), [size, size, -1]), label


def scale_and_place(image: tf.Tensor, mask: tf.Tensor, seed: tf.Tensor, *,
                    size: Tuple[int, int], scales: Tuple[float, float],
                    fill: np.ndarray, void_label: int) -> ImageAndLabel:
  """Scales an image and its mask alike, cuts or pads them, may mirror them.

  Args:
    image: Image of any size.
    mask: Class of each pixel; takes the nearest pixel's class when scaled.
    seed: int64 tensor of shape `[2]`.
    size: Height and width of the results, the image being placed at random
      where it is smaller, and cut at random where it is larger.
    scales: Smallest and largest factor, drawn uniformly in the logarithm.
    fill: Colour of what lies outside the image, shape `[C]`.
    void_label: Class of what lies outside the image.
  """
  numbers = tf.random.stateless_uniform([4], seed)
  low, high = np.log(scales).astype(np.float32)
  factor = tf.exp(low + (high - low) * numbers[0])
  image, mask = _resize_both(image, mask, factor)
  image, mask = _place(image, mask, size, numbers[1:3], fill, void_label)
  flip = numbers[3] < 0.5
  return _mirror_if(flip, image), _mirror_if(flip, mask)


def fit(image: tf.Tensor, mask: tf.Tensor, *, size: Tuple[int, int],
        fill: np.ndarray, void_label: int) -> ImageAndLabel:
  """Pads an image and its mask below and to the right, shrunk if they must be.

  Args:
    image: Image of any size.
    mask: Class of each pixel.
    size: Height and width of the results.
    fill: Colour of the padding, shape `[C]`.
    void_label: Class of the padding.
  """
  room = np.array(size) / tf.cast(tf.shape(image)[:2], tf.float64)
  factor = tf.cast(tf.minimum(tf.reduce_min(room), 1.0), tf.float32)
  image, mask = _resize_both(image, mask, factor)
  return _place(image, mask, size, tf.zeros([2]), fill, void_label)


def _scaled(size: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
  """Returns the height and width of an image that is scaled, at least 1."""
  scaled = tf.round(tf.cast(size, tf.float32) * factor)
  return tf.maximum(tf.cast(scaled, tf.int32), 1)


def _resize_both(image: tf.Tensor, mask: tf.Tensor,
                 factor: tf.Tensor) -> ImageAndLabel:
  size = _scaled(tf.shape(image)[:2], factor)
  return (_resize(image, size),
          _resize(mask[..., None], size, method="nearest")[..., 0])


def _place(image: tf.Tensor, mask: tf.Tensor, size: Tuple[int, int],
           where: tf.Tensor, fill: np.ndarray,
           void_label: int) -> ImageAndLabel:
  """Cuts or pads to `size`, at the fractions `where` of the room there is."""
  room = np.array(size, np.int32) - tf.shape(image)[:2]
  chosen = tf.cast(where * tf.cast(tf.abs(room) + 1, tf.float32), tf.int32)
  start = tf.where(room < 0, chosen, tf.zeros_like(chosen))
  before = tf.where(room > 0, chosen, tf.zeros_like(chosen))
  padding = tf.stack([before, tf.maximum(room, 0) - before], axis=1)
  end = start + size
  image = image[start[0]:end[0], start[1]:end[1]]
  mask = mask[start[0]:end[0], start[1]:end[1]]
  return (_pad(image, padding, fill),
          tf.pad(mask, padding, constant_values=void_label))


def _pad(image: tf.Tensor, padding, fill: np.ndarray) -> tf.Tensor:
  padding = tf.concat([padding, [[0, 0]]], axis=0)
  inside = tf.pad(tf.ones_like(image), padding)
  # Exact inside, which adding the colour and taking it away is not.
  return tf.pad(image, padding) + (1.0 - inside) * fill


def _mirror_if(flip: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
  mirrored = tf.cond(flip, lambda: tf.reverse(image, [1]), lambda: image)
  mirrored.set_shape(image.shape)
  return mirrored
