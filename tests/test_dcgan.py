"""Tests for DCGAN: two networks, two losses, two steps."""

import contextlib
import itertools

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import dcgan
import references
import testing
import towers

BATCH_SIZES = (1, 2, 3, 5, 7)
PARTS = ("generator", "discriminator")
SIZE, CHANNELS, DEPTH, NOISE = 12, 2, 2, 6


def data(batch_size):
  rng = np.random.RandomState(batch_size)
  return (rng.uniform(-1, 1, [batch_size, SIZE, SIZE, CHANNELS]),
          rng.uniform(-1, 1, [batch_size, NOISE]))


def model(images, noise):
  return dcgan.losses(images, noise, depth=DEPTH)


def of_part(part, variables):
  return [variable for variable in variables
          if variable.op.name.startswith(f"{part}/")]


class Built:
  """One graph with both networks; what tests do not ask for is not made."""

  def __init__(self, num_towers, dtype=tf.float64):
    """Builds plain TensorFlow code if `num_towers` is None."""
    self.graph = tf.Graph()
    self._towers = None
    with self.graph.as_default():
      self._inputs = (tf.placeholder(dtype, [None, SIZE, SIZE, CHANNELS]),
                      tf.placeholder(dtype, [None, NOISE]))
      if num_towers is None:
        with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
          self.outputs = model(*self._inputs)
        self.updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
      else:
        self._towers = towers.build_towers(
            model, testing.devices(num_towers), inputs=self._inputs)
        self.outputs = self._towers.outputs
        self.updates = self._towers.update_ops
      self._trainable = tf.trainable_variables()
      self.variables = tf.global_variables()
      self.names = [variable.op.name for variable in self.variables]

  def gradients(self):
    """Returns those of both losses by all variables."""
    result = {}
    for part in PARTS:
      loss = f"{part}_loss"
      with self.graph.as_default():
        gradients = (
            [pair.gradient for pair in self._towers.gradients(loss)]
            if self._towers else
            tf.gradients(self.outputs[loss], self._trainable))
      for variable, gradient in zip(self._trainable, gradients):
        if gradient is not None:
          result[loss, variable.op.name] = gradient
    return result

  def step(self, part):
    """Returns the train op of one of the networks."""
    optimizer = tf.train.GradientDescentOptimizer(0.5)
    variables = of_part(part, self._trainable)
    updates = [op for op in self.updates if f"/{part}/" in f"/{op.name}"]
    if self._towers:
      return self._towers.minimize(
          optimizer, loss=f"{part}_loss", var_list=variables,
          update_ops=updates)
    with self.graph.as_default(), tf.control_dependencies(updates):
      return optimizer.minimize(self.outputs[f"{part}_loss"],
                                var_list=variables)

  @contextlib.contextmanager
  def session(self):
    """Opens a session in which variables have the values of their names."""
    with testing.session(self.graph, initialize=True) as sess:
      for variable in self._trainable:
        value = references.value_for(variable)
        scale = np.sqrt(1 / value[..., 0].size) if value.ndim > 1 else 0.2
        variable.load(
            scale * value + (1 if "gamma" in variable.name else 0), sess)
      yield sess

  def feed(self, batch_size):
    return dict(zip(self._inputs, data(batch_size)))

  def values(self, sess):
    return dict(zip(self.names, sess.run(self.variables)))


class EquivalenceTest(parameterized.TestCase, tf.test.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.plain = Built(None)
    fetches = (cls.plain.outputs, cls.plain.gradients())
    with cls.plain.session() as sess:
      cls.expected = [
          sess.run(fetches, cls.plain.feed(size)) for size in BATCH_SIZES]

  def assert_equals_plain_code(self, built, tolerance):
    fetches = (built.outputs, built.gradients())
    self.assertLen(fetches[1], 2 * 21)
    with built.session() as sess:
      for size, expected in zip(BATCH_SIZES, self.expected):
        actual = sess.run(fetches, built.feed(size))
        for part, one, other in zip(("outputs", "gradients"), expected, actual):
          with self.subTest(part, batch_size=size):
            self.assertAllClose(one, other, rtol=tolerance, atol=tolerance)

  @parameterized.parameters(1, 2, 3, 4)
  def test_equals_plain_code_on_the_whole_batch(self, num_towers):
    """Both losses, the images, and the gradients of both by all variables."""
    built = Built(num_towers)
    self.assertEqual(built.names, self.plain.names)
    self.assert_equals_plain_code(built, 1e-9)

  def test_equals_plain_code_in_single_precision(self):
    """Here batch norm is TensorFlow's fused op."""
    self.assert_equals_plain_code(Built(2, tf.float32), 1e-3)

  def test_every_gradient_is_not_zero(self):
    for name, gradient in self.expected[-1][1].items():
      self.assertGreater(np.abs(gradient).max(), 1e-4, name)

  def test_steps_equal_those_of_plain_code(self):
    """Of both networks: all variables, moving statistics among them."""
    results = []
    for built in (self.plain, Built(3)):
      steps = [built.step(part) for part in PARTS]
      with built.session() as sess:
        for size, step in itertools.product((5, 2), steps):
          sess.run(step, built.feed(size))
        results.append(built.values(sess))
    self.assertAllClose(*results, rtol=1e-8, atol=1e-8)

  @parameterized.parameters(1, 3)
  def test_a_step_leaves_the_other_network_alone(self, num_towers):
    """Bitwise; its own variables all change, moving statistics included."""
    built = Built(num_towers)
    steps = {part: built.step(part) for part in PARTS}
    with built.session() as sess:
      for part, step in steps.items():
        before = built.values(sess)
        for size in (5, 1):
          sess.run(step, built.feed(size))
        after = built.values(sess)
        for name, value in before.items():
          with self.subTest(part, variable=name):
            self.assertEqual(value.tobytes() == after[name].tobytes(),
                             not name.startswith(f"{part}/"))

  def test_moving_statistics_of_the_discriminator_are_of_real_images(self):
    """The momentum is 0.9, and all start at mean 0 and variance 1."""
    built = Built(3)
    kernels = [built.names.index(f"discriminator/conv_{layer}/kernel")
               for layer in (1, 2)]
    bias = built.names.index("discriminator/conv_1/bias")
    with built.session() as sess:
      first, second, bias = sess.run(
          [built.variables[k] for k in (*kernels, bias)])
      sess.run(built.updates, built.feed(7))
      after = built.values(sess)
    with tf.Graph().as_default(), testing.session() as sess:
      x = tf.nn.conv2d(tf.constant(data(7)[0]), first, strides=2,
                       padding="SAME")
      x = tf.nn.leaky_relu(x + bias, 0.2)
      x = sess.run(tf.nn.conv2d(x, second, strides=2, padding="SAME"))
    scope = "discriminator/conv_2/batch_normalization/"
    self.assertAllClose(after[f"{scope}moving_mean"],
                        0.1 * x.mean(axis=(0, 1, 2)), rtol=1e-9, atol=1e-9)
    self.assertAllClose(
        after[f"{scope}moving_variance"],
        0.9 + 0.1 * x.var(axis=(0, 1, 2), ddof=1), rtol=1e-9, atol=1e-9)


class LossesTest(parameterized.TestCase, tf.test.TestCase):

  def test_losses_are_those_of_the_paper(self):
    images, noise = data(5)
    losses = dcgan.losses(tf.constant(images), tf.constant(noise), depth=DEPTH)
    with tf.variable_scope("", reuse=True):
      scores = [dcgan.discriminator(x, training=True, depth=DEPTH)
                for x in (tf.constant(images), losses["images"])]
    with testing.session(initialize=True) as sess:
      losses, (real, made) = sess.run((losses, scores))
    probability = lambda score: 1 / (1 + np.exp(-score))
    self.assertAllClose(losses["generator_loss"],
                        -np.log(probability(made)).mean())
    self.assertAllClose(
        losses["discriminator_loss"],
        -np.log(probability(real)).mean() - np.log(1 - probability(made)).mean()
    )

  def test_noise_is_drawn_anew_by_tower_and_step(self):
    images = tf.placeholder(tf.float32, [None, SIZE, SIZE, CHANNELS])
    tf.set_random_seed(1)
    graph = towers.build_towers(
        lambda images: dcgan.losses(images, depth=DEPTH, noise_size=4),
        testing.devices(3), inputs=images)
    with testing.session(initialize=True) as sess:
      feed = {images: np.zeros([3, SIZE, SIZE, CHANNELS])}
      made = np.concatenate(
          [sess.run(graph.outputs["images"], feed) for _ in range(2)])
    self.assertEqual(made.shape, (6, SIZE, SIZE, CHANNELS))
    for one, other in itertools.combinations(made, 2):
      self.assertNotAllClose(one, other)

  def test_the_discriminator_learns_to_tell_real_from_made(self):
    built = Built(2, tf.float32)
    step = built.step("discriminator")
    with built.session() as sess:
      feed = built.feed(7)
      before = sess.run(built.outputs["discriminator_loss"], feed)
      for _ in range(20):
        sess.run(step, feed)
      self.assertLess(sess.run(built.outputs["discriminator_loss"], feed),
                      0.5 * before)


class NetworksTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("one_channel", 1, 1_436_097, 1_030_529),
      ("three_channels", 3, 1_439_299, 1_033_729))
  def test_parameters(self, channels, *expected):
    dcgan.losses(tf.placeholder(tf.float32, [None, 32, 32, channels]))
    # By hand: kernels, and two numbers per channel for batch norm.
    sizes = [(100, 16 * 256, 2 * 256), (25 * 256, 128, 2 * 128),
             (25 * 128, 64, 2 * 64), (25 * 64, channels, channels)], [
                 (25 * channels, 64, 64), (25 * 64, 128, 2 * 128),
                 (25 * 128, 256, 2 * 256), (16 * 256, 1, 1)]
    for part, layers, number in zip(PARTS, sizes, expected):
      variables = of_part(part, tf.trainable_variables())
      self.assertEqual(sum(int(np.prod(variable.shape.as_list()))
                           for variable in variables), number)
      self.assertEqual(sum(a * b + c for a, b, c in layers), number)
      self.assertIn(f"{number:,}", dcgan.__doc__)

  @parameterized.parameters(8, 15, 28, 32)
  def test_images_of_any_size(self, size):
    noise = tf.placeholder(tf.float32, [None, 5])
    made = dcgan.generator(noise, training=True, size=size, channels=1, depth=2)
    scores = dcgan.discriminator(made, training=True, depth=2)
    self.assertEqual(made.shape.as_list(), [None, size, size, 1])
    self.assertEqual(scores.shape.as_list(), [None])
    with testing.session(initialize=True) as sess:
      values = sess.run([made, scores], {noise: 100 * np.ones([3, 5])})
    self.assertEqual(values[0].shape, (3, size, size, 1))
    self.assertAllInRange(values[0], -1.0, 1.0)
    self.assertEqual(values[1].shape, (3,))

  @parameterized.parameters((28, [4, 7, 14, 28]), (32, [4, 8, 16, 32]))
  def test_maps_have_the_documented_sizes(self, size, expected):
    made = dcgan.generator(tf.zeros([2, 5]), training=True, size=size, depth=2)
    dcgan.discriminator(made, training=True, depth=2)
    maps = {op.name: op.outputs[0].shape.as_list()[1:]
            for op in tf.get_default_graph().get_operations()
            if op.type in ("Conv2D", "Conv2DBackpropInput", "Reshape")}
    self.assertEqual(maps["generator/project/Reshape"], [4, 4, 8])
    self.assertEqual(
        [maps[f"generator/deconv_{layer}/conv2d_transpose"]
         for layer in (1, 2, 3)],
        [[s, s, c] for s, c in zip(expected[1:], (4, 2, 3))])
    self.assertEqual(
        [maps[f"discriminator/conv_{layer}/Conv2D"] for layer in (1, 2, 3)],
        [[s, s, c] for s, c in zip(expected[2::-1], (2, 4, 8))])

  def test_variable_names(self):
    dcgan.losses(tf.zeros([1, 8, 8, 1]), depth=2)
    normed = ["generator/project", "generator/deconv_1", "generator/deconv_2",
              "discriminator/conv_2", "discriminator/conv_3"]
    self.assertCountEqual(
        [variable.op.name for variable in tf.global_variables()],
        [f"{scope}/{name}" for scope in normed for name in (
            "kernel", "batch_normalization/gamma", "batch_normalization/beta",
            "batch_normalization/moving_mean",
            "batch_normalization/moving_variance")] +
        [f"{scope}/{name}" for scope in (
            "generator/deconv_3", "discriminator/conv_1", "discriminator/score")
         for name in ("kernel", "bias")])

  def test_generator_makes_single_images_by_moving_statistics(self):
    """An image then does not depend on the others of the batch."""
    noise = tf.constant(data(5)[1])
    dcgan.generator(noise, training=True, size=8, depth=2)
    with tf.variable_scope("", reuse=True):
      every = dcgan.generator(noise, training=False, size=8, depth=2)
      one = dcgan.generator(noise[2:3], training=False, size=8, depth=2)
    with testing.session(initialize=True) as sess:
      sess.run(tf.get_collection(tf.GraphKeys.UPDATE_OPS))
      values = sess.run([every, one])
    self.assertAllClose(values[0][2:3], values[1])

  @parameterized.parameters([[3]], [[3, None]], [None])
  def test_rejects_noise_of_other_shapes(self, shape):
    with self.assertRaisesRegex(
        ValueError, r"`noise` must have a shape \[B, N\] with static N: got"):
      dcgan.generator(tf.placeholder(tf.float32, shape), training=True)

  @parameterized.parameters(
      [[3, 8, 8]], [[3, 8, 9, 1]], [[3, None, None, 1]], [[3, 8, 8, None]],
      [None])
  def test_rejects_images_of_other_shapes(self, shape):
    with self.assertRaisesRegex(
        ValueError, r"`images` must have a shape \[B, S, S, C\] .*: got"):
      dcgan.losses(tf.placeholder(tf.float32, shape))

  def test_rejects_small_images(self):
    with self.assertRaisesRegex(
        ValueError, "`images` must be of 8x8 pixels or more: got 7x7"):
      dcgan.losses(tf.zeros([1, 7, 7, 1]))
    with self.assertRaisesRegex(
        ValueError, "`size` must be of 8x8 pixels or more: got 4x4"):
      dcgan.generator(tf.zeros([1, 5]), training=True, size=4)


if __name__ == "__main__":
  tf.test.main()
