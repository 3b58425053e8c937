"""Tests for towers.fused: normalisation by the moments of all towers."""

import importlib

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import batch_norm_cases as cases
import testing
import towers

context = importlib.import_module("towers.context")
fused = importlib.import_module("towers.fused")

EPSILON = cases.EPSILON


def build(model, num_towers, inputs, **options):
  return towers.build_towers(
      model, testing.devices(num_towers), inputs=inputs, **options)


def normalise(x, scale=1.0, offset=0.0, data_format="NHWC", channels=3):
  """Both functions with the same scale and offset for each channel."""
  scale, offset = tf.fill([channels], scale), tf.fill([channels], offset)
  with context.not_watched():  # Or its kernels would be converted in turn.
    merged = fused.merged_statistics(
        x, scale, offset, epsilon=EPSILON, data_format=data_format, name="bn")
    y = fused.normalise(x, scale, offset, merged, epsilon=EPSILON,
                        data_format=data_format)
  return {"y": y, "mean": merged.mean, "variance": merged.unbiased_variance}


def plain_normalise(x):
  mean, variance = tf.nn.moments(x, [0, 1, 2])
  return tf.nn.batch_normalization(x, mean, variance, None, None, EPSILON)


def network(images, labels, *, data_format="NHWC", dtype=tf.float32):
  """Two convolutions with batch norm, a shortcut, a dense layer."""
  axis = -1 if data_format == "NHWC" else 1
  x = tf.cast(images, dtype)
  if axis == 1:
    x = tf.transpose(x, [0, 3, 1, 2])
  for i, channels in enumerate([2, 6]):
    kernel = tf.get_variable(f"kernel_{i}", [3, 3, channels, 6], dtype)
    convolved = tf.nn.conv2d(x, kernel, strides=1, padding="SAME",
                             data_format=data_format)
    convolved = tf.nn.tanh(
        towers.batch_norm(convolved, axis=axis, training=True))
    x = convolved if i == 0 else x + convolved
  x = tf.reduce_mean(x, [1, 2] if axis == -1 else [2, 3])
  logits = tf.matmul(x, tf.get_variable("dense", [6, 4], dtype))
  return tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(
          labels=labels, logits=logits))


def network_gradients(num_towers, data_format, dtype, batches):
  """Returns loss and gradients on each batch, weights drawn alike."""
  with tf.Graph().as_default():
    images = tf.placeholder(tf.float32, [None, 5, 5, 2])
    labels = tf.placeholder(tf.int64, [None])
    built = build(
        lambda x, y: network(x, y, data_format=data_format, dtype=dtype),
        num_towers, (images, labels))
    rng = np.random.RandomState(0)
    fetches = [built.loss, [gradient for gradient, _ in built.gradients()]]
    with testing.session() as sess:
      for v in built.variables:
        value = rng.uniform(0.2, 1.0, v.shape)
        sess.run(v.initializer, {v.initializer.inputs[1]: value})
      return [sess.run(fetches, {images: x, labels: y}) for x, y in batches]


class NormaliseTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(
      num_towers=(2, 4), data_format=("NHWC", "NCHW", "NDHWC", "NCDHW"),
      static=(True, False))
  def test_values(self, num_towers, data_format, static):
    sizes = dict(D=2, H=4, W=5, C=3)
    for batch in (1, 2, 7):
      with tf.Graph().as_default():
        shape = [sizes.get(axis, batch) for axis in data_format]
        value = np.random.RandomState(batch).normal(1.0, 2.0, shape)
        x = tf.placeholder(tf.float32, shape if static else [
            size if size == 3 else None for size in shape])
        built = build(lambda x: normalise(x, 2.0, 5.0, data_format), num_towers,
                      x)
        expected = cases.oracle(value, data_format.index("C"), 2.0, 5.0)
        with testing.session() as sess:
          y, each = sess.run(
              [built.outputs["y"], [t.outputs for t in built.towers]],
              {x: value})
        self.assertAllClose(y, expected.y, rtol=1e-5, atol=2e-5)
        for outputs in each:
          self.assertAllClose([outputs["mean"], outputs["variance"]],
                              [expected.mean, expected.unbiased], rtol=1e-5)

  @parameterized.parameters(2, 3)
  def test_moments_that_others_read_have_no_gradient(self, num_towers):
    x = tf.placeholder(tf.float32, [None, 4, 5, 3])

    def model(x, read):
      outputs = normalise(x)
      loss = tf.reduce_mean(tf.sin(outputs["y"]) + x)
      others = outputs["mean"] + outputs["variance"]
      return loss + tf.reduce_sum(others) if read else loss

    losses = [build(lambda x, read=read: model(x, read), num_towers, x).loss
              for read in (False, True)]
    gradients = [tf.gradients(loss, x)[0] for loss in losses]
    with testing.session() as sess:
      value = np.random.RandomState(0).normal(1.0, 2.0, [5, 4, 5, 3])
      self.assertAllClose(*sess.run(gradients, {x: value}))

  @parameterized.parameters(2, 3)
  def test_scale_of_its_own_in_each_tower(self, num_towers):
    x = tf.placeholder(tf.float32, [None, 4, 5, 3])
    built = build(
        lambda x: normalise(x, 1.0 + towers.current_tower().index), num_towers,
        x)
    double = tf.placeholder(tf.float64, x.shape)
    factors = tf.placeholder(tf.float64, [None, 1, 1, 1])
    gradients = [
        tf.gradients(tf.sin(factors * plain_normalise(double)), double)[0],
        tf.gradients(tf.sin(built.outputs["y"]), x)[0]]
    with testing.session() as sess:
      for batch in (1, 2, 5):
        value = np.random.RandomState(batch).normal(1.0, 2.0, [batch, 4, 5, 3])
        tower_of = [
            np.full([len(rows), 1, 1, 1], 1.0 + k)
            for k, rows in enumerate(np.array_split(value, num_towers))]
        self.assertAllClose(
            *sess.run(gradients, {x: value, double: value,
                                  factors: np.concatenate(tower_of)}),
            rtol=1e-4, atol=1e-4)

  def test_other_channels_in_another_tower(self):
    def model(x):
      channels = 2 + towers.current_tower().index
      return normalise(x[..., :channels], channels=channels)

    with self.assertRaisesRegex(
        ValueError, r"batch norm `bn` must meet with values alike in each "
        r"tower: expected \('float32', '2 channels'\) as in tower 0, got "
        r"\('float32', '3 channels'\) in tower 1"):
      build(model, 2, tf.ones([4, 2, 2, 3]))


class GradientTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(num_towers=(1, 2, 3, 4), data_format=("NHWC", "NCHW"))
  def test_network_equals_plain_ops_in_float64(self, num_towers, data_format):
    rng = np.random.RandomState(0)
    batches = [(rng.normal(3.0, 1.0, [size, 5, 5, 2]), rng.randint(0, 4, size))
               for size in (1, 2, 5, 9)]
    expected = network_gradients(1, "NHWC", tf.float64, batches)
    actual = network_gradients(num_towers, data_format, tf.float32, batches)
    for (loss, gradients), (other_loss, others) in zip(expected, actual):
      self.assertAllClose(loss, other_loss, rtol=1e-5)
      for one, other in zip(gradients, others):
        self.assertAllClose(one, other, rtol=1e-4, atol=1e-5)

  @parameterized.product(num_towers=(1, 2, 3), frozen_rows=(True, False))
  def test_loss_that_needs_only_some_of_the_slots(self, num_towers,
                                                  frozen_rows):
    """One tower's loss alone still reaches all towers' rows."""
    x = tf.placeholder(tf.float32, [None, 4, 5, 3])
    built = build(lambda x: {"y": towers.batch_norm(x, training=True)},
                  num_towers, x)
    double = tf.placeholder(tf.float64, x.shape)
    pick = (lambda y: y[:1]) if frozen_rows else (lambda y: y[..., 1])
    loss_of = lambda y: tf.reduce_sum(pick(tf.sin(y)))
    gradients = [
        tf.gradients(loss_of(plain_normalise(double)), double)[0],
        tf.gradients(loss_of(built.outputs["y"]), x)[0]]
    with testing.session(initialize=True) as sess:
      value = np.random.RandomState(0).normal(1.0, 2.0, [5, 4, 5, 3])
      self.assertAllClose(*sess.run(gradients, {x: value, double: value}),
                          rtol=1e-4, atol=1e-5)

  @parameterized.parameters(1, 2, 3, 4)
  def test_gradient_penalty_inside_the_model(self, num_towers):
    """Both derivatives by the input, against plain float64 ops."""
    x = tf.placeholder(tf.float32, [None, 4, 5, 3])
    double = tf.placeholder(tf.float64, x.shape)

    def penalty(x, y):
      gradient, = tf.gradients(tf.reduce_sum(tf.tanh(y)**3), x)
      return tf.reduce_mean(tf.reduce_sum(gradient**2, axis=[1, 2, 3]))

    built = build(
        lambda x: penalty(x, towers.batch_norm(x, training=True)), num_towers,
        x)
    plain = penalty(double, plain_normalise(double))
    fetches = [[plain, tf.gradients(plain, double)[0]],
               [built.loss, tf.gradients(built.loss, x)[0]]]
    with testing.session(initialize=True) as sess:
      for batch in (1, 2, 5):
        value = np.random.RandomState(batch).normal(1.0, 2.0, [batch, 4, 5, 3])
        for one, other in zip(*sess.run(fetches, {x: value, double: value})):
          self.assertAllClose(one, other, rtol=1e-4, atol=1e-4)

  @parameterized.product(by=("x", "gamma"))
  def test_second_derivative_outside_the_model_is_refused(self, by):
    x = tf.placeholder(tf.float32, [None, 4, 5, 3])
    built = build(
        lambda x: tf.reduce_mean(tf.sin(towers.batch_norm(x, training=True))),
        2, x)
    gradient = (tf.gradients(built.loss, x)[0] if by == "x" else
                built.gradients()[0].gradient)
    with self.assertRaisesRegex(
        ValueError, "`tf.gradients` must not differentiate a gradient through "
        "batch norm .* got `.*`: .*Take the first gradient inside `model_fn`"):
      tf.gradients(tf.reduce_sum(gradient**2), x)


class GraphTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(2, 4)
  def test_kernels_of_each_tower(self, num_towers):
    """Two fused calls forward and two back in each tower, on its device."""
    x = tf.placeholder(tf.float32, [None, 4, 5, 3])
    built = build(
        lambda x: tf.reduce_mean(tf.sin(towers.batch_norm(
            x, training=True, name="bn"))), num_towers, x,
        parameter_device="/cpu:4")
    graph = tf.get_default_graph()
    forward = len(graph.get_operations())
    tf.gradients(built.loss, x, colocate_gradients_with_ops=True)

    def count(ops, kind, index):
      return len([op for op in ops
                  if op.type == kind and op.device == f"/device:CPU:{index}"])

    ops = graph.get_operations()
    for index in range(num_towers):
      self.assertEqual(count(ops[:forward], "FusedBatchNormV3", index), 2)
      self.assertEqual(count(ops[forward:], "FusedBatchNormV3", index), 1)
      self.assertEqual(count(ops[forward:], "FusedBatchNormGradV3", index), 1)
    merge = [op for op in ops[forward:] if "cross_tower/bn" in op.name]
    self.assertNotEmpty(merge)
    self.assertEqual({op.device for op in merge}, {"/device:CPU:4"})

  def test_ops_of_a_layer_grow_linearly(self):
    """With the towers: the merge is one, whatever their number."""
    counts = []
    for num_towers in (2, 4, 8):
      with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [None, 4, 5, 3])
        built = build(
            lambda x: tf.reduce_mean(towers.batch_norm(x, training=True)),
            num_towers, x)
        built.gradients()
        counts.append(len(graph.get_operations()))
    self.assertEqual(counts[2] - counts[1], 2 * (counts[1] - counts[0]))


if __name__ == "__main__":
  tf.test.main()
