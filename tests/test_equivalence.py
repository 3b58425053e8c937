"""Tests that N towers compute what one device computes on the whole batch.

The reference is the same model as plain TensorFlow code in a graph of its own,
without a build: one device, the whole batch.
"""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

BATCH_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 32)
STEPS = 3
OPTIMIZERS = {
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(0.01, epsilon=1e-3),
}
TOLERANCE = {tf.float32: 1e-5, tf.float64: 1e-10}


def model(images, ids, labels):
  """Convolution, batch norm, an embedding, a recurrence, weight decay."""
  dtype = images.dtype
  kernel = tf.get_variable("conv/kernel", [3, 3, 2, 6], dtype)
  x = tf.nn.conv2d(images, kernel, strides=1, padding="SAME")
  x = tf.nn.relu(towers.batch_norm(x, training=True, momentum=0.9))
  kernel = tf.get_variable("conv_1/kernel", [3, 3, 6, 6], dtype)
  x = tf.nn.conv2d(x, kernel, strides=2, padding="SAME")
  x = tf.nn.relu(towers.batch_norm(x, training=True, momentum=0.9))
  x = tf.reduce_mean(x, axis=[1, 2])
  table = tf.get_variable("table", [11, 4], dtype)
  embedded = tf.nn.embedding_lookup(table, ids)
  state = tf.matmul(x, tf.get_variable("into", [6, 4], dtype))

  def step(i, state):
    recurrent = tf.get_variable("recurrent", [4, 4], dtype)
    return i + 1, tf.tanh(tf.matmul(state, recurrent) + embedded)

  _, state = tf.while_loop(lambda i, _: i < 3, step, [0, state])
  state.set_shape([None, 4])
  weights = tf.get_variable("dense/kernel", [4, 5], dtype)
  bias = tf.get_variable("dense/bias", [5], dtype)
  logits = tf.matmul(state, weights) + bias
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
      logits=logits, labels=labels)
  decay = tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])
  return {
      "loss": tf.reduce_mean(losses) + 1e-2 * decay,
      "logits": logits,
      "losses": losses
  }


def data(batch_size, dtype):
  rng = np.random.RandomState(batch_size)
  return (rng.normal(1.0, 2.0, [batch_size, 5, 5, 2]).astype(
      dtype.as_numpy_dtype), rng.randint(0, 11, [batch_size]),
          rng.randint(0, 5, [batch_size]))


class Built:
  """One graph with the model in it, and what the tests fetch from it."""

  def __init__(self, num_towers, dtype, optimizer):
    """Builds plain TensorFlow code if `num_towers` is None."""
    self.graph = tf.Graph()
    with self.graph.as_default():
      tf.set_random_seed(1)
      self.inputs = (tf.placeholder(dtype, [None, 5, 5, 2]),
                     tf.placeholder(tf.int64, [None]),
                     tf.placeholder(tf.int64, [None]))
      optimizer = OPTIMIZERS[optimizer]()
      if num_towers is None:
        pairs = self._build_plain(optimizer)
      else:
        pairs = self._build_towers(num_towers, optimizer)
      self.gradients = {
          variable.op.name: tf.convert_to_tensor(gradient)
          for gradient, variable in pairs
      }
      self.variables = tf.global_variables()
      self.initializers = [v.initializer for v in self.variables]
      # A loop on one device cannot keep what it reads from a variable on
      # another for its gradient, with strict placement.
      self.session = tf.Session(
          config=testing.config(optimize=True, allow_soft_placement=True))
    if testing.num_cpus(self.session) != testing.NUM_CPUS:
      raise AssertionError("The session lacks devices.")
    self.session.run(self.initializers)
    self.initial_values = {
        v.initializer.inputs[1]: value
        for v, value in zip(self.variables, self.session.run(self.variables))
    }

  def _build_plain(self, optimizer):
    # Without resource variables, gradients race with the update in place.
    scope = tf.get_variable_scope()
    with tf.variable_scope(scope, use_resource=True):
      outputs = model(*self.inputs)
    self.loss = outputs.pop("loss")
    self.outputs = outputs
    pairs = optimizer.compute_gradients(self.loss)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
      self.train = optimizer.apply_gradients(pairs)
    return pairs

  def _build_towers(self, num_towers, optimizer):
    built = towers.build_towers(
        model, testing.devices(num_towers), inputs=self.inputs)
    self.loss, self.outputs = built.loss, built.outputs
    self.train = built.minimize(optimizer)
    return built.gradients()

  def run(self, values):
    """Returns loss, outputs, gradients, and all variables after the steps."""
    feed = dict(zip(self.inputs, values))
    run = self.session.run
    run(self.initializers, self.initial_values)
    fetched = run((self.loss, self.outputs, self.gradients), feed)
    for _ in range(STEPS):
      run(self.train, feed)
    return fetched + (dict(zip([v.op.name for v in self.variables],
                               run(self.variables))),)


class EquivalenceTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(
      num_towers=(1, 2, 3, 4),
      dtype=(tf.float32, tf.float64),
      optimizer=tuple(OPTIMIZERS))
  def test_equals_one_device_on_the_whole_batch(self, num_towers, dtype,
                                                optimizer):
    plain = Built(None, dtype, optimizer)
    built = Built(num_towers, dtype, optimizer)
    self.addCleanup(plain.session.close)
    self.addCleanup(built.session.close)
    self.assertAllClose(
        list(plain.initial_values.values()),
        list(built.initial_values.values()), rtol=0, atol=0)
    tolerance = TOLERANCE[dtype]
    for batch_size in BATCH_SIZES:
      values = data(batch_size, dtype)
      expected, actual = plain.run(values), built.run(values)
      for part, one, other in zip(("loss", "outputs", "gradients", "variables"),
                                  expected, actual):
        with self.subTest(part, batch_size=batch_size):
          self.assertAllClose(one, other, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
  tf.test.main()
