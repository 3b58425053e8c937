"""A tower loop cut at each batch norm layer, as people write it by hand.

Each layer is a function of a list, with one entry per tower. At batch norm the
activations of all towers are put together on the CPU that also holds the
variables, normalised there, and dealt out again. Gradients are taken by tower,
as in the loop without synchronisation; since the towers hang together, each of
these passes walks through all of them.
"""

from typing import Callable, List, Sequence

import tensorflow.compat.v1 as tf

from tools import networks

_EPSILON = 1e-3  # That of `towers.batch_norm`, as is the momentum here.
_MOMENTUM = 0.9

Values = List[tf.Tensor]


class ListLayers:
  """Layers of lists with one tensor per tower; see `networks.Layers`."""

  def __init__(self, num_towers: int):
    self._num_towers = num_towers

  def _each(self, function: Callable[..., tf.Tensor],
            *lists: Sequence[tf.Tensor]) -> Values:
    results = []
    for i, values in enumerate(zip(*lists)):
      with tf.device(f"/cpu:{i}"), tf.name_scope(f"tower_{i}/"):
        results.append(function(*values))
    return results

  def conv(self, xs: Values, filters: int, strides: int, name: str) -> Values:
    with tf.variable_scope(name):
      kernel = _kernel([3, 3, xs[0].shape[-1], filters],
                       tf.variance_scaling_initializer(
                           2.0, distribution="untruncated_normal"))
      xs = self._each(
          lambda x: tf.nn.conv2d(x, kernel, strides=strides, padding="SAME"),
          xs)
      return self._batch_norm(xs)

  def _batch_norm(self, xs: Values) -> Values:
    """Gathers on the CPU, normalises there, and deals out again."""
    channels = [xs[0].shape[-1]]
    ones, zeros = tf.ones_initializer(), tf.zeros_initializer()
    with tf.variable_scope("batch_normalization"), tf.device("/cpu:0"):
      gamma = tf.get_variable("gamma", channels, initializer=ones)
      beta = tf.get_variable("beta", channels, initializer=zeros)
      moving = [
          tf.get_variable("moving_mean", channels, initializer=zeros,
                          trainable=False),
          tf.get_variable("moving_variance", channels, initializer=ones,
                          trainable=False)
      ]
      y, *moments = tf.nn.fused_batch_norm(
          tf.concat(xs, axis=0), gamma, beta, epsilon=_EPSILON,
          is_training=True)
      for average, moment in zip(moving, moments):
        tf.add_to_collection(
            tf.GraphKeys.UPDATE_OPS,
            average.assign_sub((average - moment) * (1 - _MOMENTUM)))
      return tf.split(y, self._num_towers)

  def relu(self, xs: Values) -> Values:
    return self._each(tf.nn.relu, xs)

  def add(self, xs: Values, ys: Values) -> Values:
    return self._each(tf.add, xs, ys)

  def shortcut(self, xs: Values, filters: int, strides: int) -> Values:
    added = filters - tf.dimension_value(xs[0].shape[-1])
    padding = [[0, 0], [0, 0], [0, 0], [0, added]]
    return self._each(
        lambda x: tf.pad(x[:, ::strides, ::strides, :], padding), xs)

  def pool(self, xs: Values) -> Values:
    return self._each(
        lambda x: tf.nn.max_pool2d(x, ksize=2, strides=2, padding="SAME"), xs)

  def up(self, xs: Values, skips: Values, filters: int, name: str) -> Values:
    with tf.variable_scope(name):
      channels = tf.dimension_value(xs[0].shape[-1])
      kernel = _kernel([2, 2, filters, channels],
                       tf.random_normal_initializer(stddev=channels**-0.5))
      bias = _bias(filters)

    def one(x, skip):
      size = tf.concat([tf.shape(skip)[:3], [filters]], axis=0)
      x = tf.nn.conv2d_transpose(x, kernel, size, strides=2, padding="SAME")
      x.set_shape(skip.shape[:3].concatenate([filters]))
      return tf.concat([skip, tf.nn.bias_add(x, bias)], axis=-1)

    return self._each(one, xs, skips)

  def mean(self, xs: Values) -> Values:
    return self._each(lambda x: tf.reduce_mean(x, axis=[1, 2]), xs)

  def dense(self, xs: Values, units: int, name: str) -> Values:
    picture = xs[0].shape.rank == 4
    shape = [xs[0].shape[-1], units]
    with tf.variable_scope(name):
      kernel = _kernel([1, 1] * picture + shape,
                       tf.variance_scaling_initializer())
      bias = _bias(units)

    def one(x):
      product = (tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
                 if picture else tf.matmul(x, kernel))
      return tf.nn.bias_add(product, bias)

    return self._each(one, xs)


def _kernel(shape: Sequence[int], initializer: Callable[..., tf.Tensor]):
  with tf.device("/cpu:0"):
    return tf.get_variable("kernel", shape, initializer=initializer)


def _bias(size: int):
  with tf.device("/cpu:0"):
    return tf.get_variable("bias", [size], initializer=tf.zeros_initializer())


def losses(network: networks.Network, images: tf.Tensor, labels: tf.Tensor,
           num_towers: int) -> Values:
  """Returns the loss of each tower."""
  layers = ListLayers(num_towers)
  scores = network.of_layers(layers, tf.split(images, num_towers))
  result = []
  for i, pair in enumerate(zip(scores, tf.split(labels, num_towers))):
    with tf.device(f"/cpu:{i}"), tf.name_scope(f"tower_{i}/"):
      result.append(networks.cross_entropy(*pair))
  return result
