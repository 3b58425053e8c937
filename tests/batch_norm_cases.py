"""An oracle and one layer in towers, for the tests of batch norm."""

from typing import NamedTuple

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

EPSILON = 1e-3
MOMENTUM = 0.75

# Shape without the batch axis, and the channel axis. Sizes differ in each, so
# that none can stand for another.
LAYOUTS = {
    "matrix": ([3], -1),
    "matrix_wide": ([65], 1),
    "sequence_last": ([5, 3], -1),
    "sequence_first": ([3, 5], 1),
    "image_last": ([4, 5, 3], -1),
    "image_first": ([3, 4, 5], 1),
    "image_last_wide": ([4, 2, 65], 3),
    "image_first_wide": ([65, 4, 2], -3),
    "volume_last": ([2, 4, 5, 3], -1),
    "volume_first": ([3, 2, 4, 5], 1),
    "image_middle": ([4, 3, 5], 2),  # No kernel has this layout,
    "six_axes": ([2, 1, 2, 4, 3], -1),  # nor this rank.
}


class Expected(NamedTuple):
  y: np.ndarray
  mean: np.ndarray
  variance: np.ndarray
  unbiased: np.ndarray


def oracle(x, axis=-1, gamma=1.0, beta=0.0):
  """Transcribes the formulas of the docstring, in float64."""
  x = np.moveaxis(np.asarray(x, np.float64), axis, -1)  # Vectors broadcast.
  elements = x.reshape(-1, x.shape[-1])
  count = len(elements)
  mean, variance = elements.mean(axis=0), elements.var(axis=0)
  y = gamma * (x - mean) / np.sqrt(variance + EPSILON) + beta
  return Expected(np.moveaxis(y, -1, axis), mean, variance,
                  variance * count / max(count - 1, 1))


def moved(start, value, momentum=MOMENTUM):
  return momentum * start + (1 - momentum) * value


def loss_of(y, targets):
  """A mean over rows whose gradient differs in each element."""
  y = tf.cast(y, targets.dtype)
  return tf.reduce_mean(
      tf.reduce_sum(tf.tanh(y) * targets, list(range(1, y.shape.rank))))


class Plain:
  """The layer as plain float64 ops on one device, for its gradients."""

  def __init__(self, shape, axis):
    self.graph = tf.Graph()
    with self.graph.as_default():
      rank = len(shape) + 1
      by_channel = [1] * rank
      by_channel[axis % rank] = -1
      self.inputs = [tf.placeholder(tf.float64, [None, *shape])
                     for _ in range(2)]
      self.vectors = [tf.placeholder(tf.float64, [None]) for _ in range(2)]
      x, targets = self.inputs
      gamma, beta = [tf.reshape(v, by_channel) for v in self.vectors]
      axes = [k for k in range(rank) if k != axis % rank]
      mean = tf.reduce_mean(x, axes, keepdims=True)
      variance = tf.reduce_mean(tf.square(x - mean), axes, keepdims=True)
      y = gamma * (x - mean) / tf.sqrt(variance + EPSILON) + beta
      self.gradients = tf.gradients(loss_of(y, targets), [x] + self.vectors)
      self.session = tf.Session(config=testing.config())

  def run(self, x, targets, gamma, beta):
    feed = dict(zip(self.inputs + self.vectors, (x, targets, gamma, beta)))
    return self.session.run(self.gradients, feed)


class Layer:
  """One layer in towers, in a graph of its own."""

  def __init__(self, num_towers, shape, axis=-1, *, dtype=tf.float32,
               training=True, parameter_device=None, sync_batch_norm=True,
               update_ops="first", **options):
    self.graph = tf.Graph()
    with self.graph.as_default():
      full = tf.float32 if dtype.size == 2 else dtype
      self.x = tf.placeholder(dtype, [None, *shape])
      self.targets = tf.placeholder(full, [None, *shape])
      self.training = training() if callable(training) else training
      options.setdefault("momentum", MOMENTUM)
      options.setdefault("epsilon", EPSILON)

      def model(x, targets):
        y = towers.batch_norm(x, axis=axis, training=self.training, **options)
        return {"loss": loss_of(y, targets), "y": y}

      self.built = towers.build_towers(
          model, testing.devices(num_towers), inputs=(self.x, self.targets),
          parameter_device=parameter_device, sync_batch_norm=sync_batch_norm,
          update_ops=update_ops)
      self.gradients = [tf.gradients(self.built.loss, self.x)[0]] + [
          gradient for gradient, _ in self.built.gradients()]
      self.session = tf.Session(config=testing.config())
      self.values = [v.initializer.inputs[1] for v in self.built.variables]
      self.initializers = [v.initializer for v in self.built.variables]

  def set(self, *values):
    self.session.run(self.initializers, dict(zip(self.values, values)))

  def variables(self):
    with self.graph.as_default():
      return self.session.run(list(self.built.variables))

  def run(self, fetches, x, targets=None, **feed):
    """Runs `fetches`; `training` feeds the placeholder of that name."""
    feed = {getattr(self, name): value for name, value in feed.items()}
    targets = np.zeros(np.shape(x)) if targets is None else targets
    return self.session.run(fetches, {self.x: x, self.targets: targets, **feed})

  def update(self, x, **feed):
    """Runs the update ops; returns the moving mean and variance."""
    self.run(self.built.update_ops, x, **feed)
    return self.variables()[-2:]


class LayerTestCase(parameterized.TestCase, tf.test.TestCase):

  def layer(self, *args, **kwargs):
    layer = Layer(*args, **kwargs)
    self.assertEqual(testing.num_cpus(layer.session), testing.NUM_CPUS)
    self.addCleanup(layer.session.close)
    return layer
