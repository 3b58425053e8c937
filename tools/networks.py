"""The benchmark's models as lists of layers, for who builds them otherwise.

`models/` has ResNet and U-Net as code for one device, which is what most
contenders take. A loop that is cut at each layer, and a Keras model, need the
same networks layer by layer; here they are, in terms of a few layers that each
of the two has in its own way. The order of the variables is that of `models/`.
"""

import functools
from typing import Any, Callable, NamedTuple, Protocol, Tuple

import tensorflow.compat.v1 as tf

from models import resnet
from models import unet

NUM_CLASSES = 10


class Layers(Protocol):
  """What a network is made of; values are of the maker's own kind."""

  def conv(self, x: Any, filters: int, strides: int, name: str) -> Any:
    """Convolution 3x3 without bias, and batch norm."""

  def relu(self, x: Any) -> Any:
    """Rectifies."""

  def add(self, x: Any, y: Any) -> Any:
    """Adds."""

  def shortcut(self, x: Any, filters: int, strides: int) -> Any:
    """Subsamples, and adds zero channels up to `filters`."""

  def pool(self, x: Any) -> Any:
    """Halves height and width by the maximum."""

  def up(self, x: Any, skip: Any, filters: int, name: str) -> Any:
    """Doubles height and width, and joins `skip` in front."""

  def mean(self, x: Any) -> Any:
    """Averages over height and width."""

  def dense(self, x: Any, units: int, name: str) -> Any:
    """Dense layer with bias; over a picture, the same for each pixel."""


def resnet_of(layers: Layers, x: Any, *, depth: int) -> Any:
  """Returns the scores of `models/resnet.py`."""
  x = layers.relu(layers.conv(x, 16, 1, "conv"))
  channels = 16
  for stage, filters in enumerate([16, 32, 64], start=1):
    for block in range(1, depth // 6 + 1):
      strides = 2 if stage > 1 and block == 1 else 1
      name = f"stage_{stage}/block_{block}/conv"
      shortcut = x
      if strides > 1 or filters > channels:
        shortcut = layers.shortcut(x, filters, strides)
      x = layers.relu(layers.conv(x, filters, strides, f"{name}_1"))
      x = layers.conv(x, filters, 1, f"{name}_2")
      x = layers.relu(layers.add(shortcut, x))
      channels = filters
  return layers.dense(layers.mean(x), NUM_CLASSES, "dense")


def unet_of(layers: Layers, x: Any, *, width: int = 16, levels: int = 3) -> Any:
  """Returns the scores of `models/unet.py`."""

  def convs(x, filters, name):
    for number in (1, 2):
      x = layers.relu(layers.conv(x, filters, 1, f"{name}/conv_{number}"))
    return x

  skips = []
  for level in range(levels):
    x = convs(x, width * 2**level, f"down_{level + 1}")
    skips.append(x)
    x = layers.pool(x)
  x = convs(x, width * 2**levels, "bottom")
  for level in reversed(range(levels)):
    name, filters = f"up_{level + 1}", width * 2**level
    x = convs(layers.up(x, skips[level], filters, f"{name}/up"), filters, name)
  return layers.dense(x, NUM_CLASSES, "scores")


class Network(NamedTuple):
  """A model of the benchmark.

  Fields:
    image_shape: Height, width and channels of an image.
    labels_shape: Shape of the labels of an image.
    logits: Takes images, returns scores, by the code in `models/`.
    of_layers: Takes `Layers` and images, returns the same.
    batch_norms: How many batch norm layers it has.
  """
  image_shape: Tuple[int, ...]
  labels_shape: Tuple[int, ...]
  logits: Callable[[tf.Tensor], tf.Tensor]
  of_layers: Callable[[Layers, Any], Any]
  batch_norms: int

  def loss(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the mean loss of a batch, by the code in `models/`."""
    return cross_entropy(self.logits(images), labels)


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
  return tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(
          logits=logits, labels=labels))


def _resnet(depth: int) -> Network:
  return Network(
      (32, 32, 3), (),
      functools.partial(resnet.logits, num_classes=NUM_CLASSES, training=True,
                        depth=depth),
      functools.partial(resnet_of, depth=depth), depth - 1)


def _unet(size: int, **shape: int) -> Network:
  return Network(
      (size, size, 3), (size, size),
      functools.partial(unet.logits, num_classes=NUM_CLASSES, training=True,
                        **shape),
      functools.partial(unet_of, **shape), 2 + 4 * shape["levels"])


NETWORKS = {
    **{f"resnet{depth}": _resnet(depth) for depth in (8, 20, 32, 44, 56, 110)},
    "unet": _unet(64, width=16, levels=3),
    # For tests.
    "unet_small": _unet(8, width=2, levels=1),
}
