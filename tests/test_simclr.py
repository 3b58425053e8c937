"""Tests for SimCLR, whose loss compares the rows of all towers."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import resnet
from models import simclr
import references
import testing
import towers

BATCH_SIZES = (1, 2, 3, 5, 7)
DEPTH = 8


def nt_xent(first, second, temperature):
  """The paper's equation 1 and algorithm 1, one pair at a time."""
  z = np.empty([2 * len(first), first.shape[1]])
  z[0::2], z[1::2] = first, second
  z /= np.linalg.norm(z, axis=1, keepdims=True)
  similarities = np.exp(z @ z.T / temperature)

  def loss(i, j):
    others = [k for k in range(len(z)) if k != i]
    return -np.log(similarities[i, j] / similarities[i, others].sum())

  return np.mean([loss(2 * k, 2 * k + 1) + loss(2 * k + 1, 2 * k)
                  for k in range(len(first))]) / 2


def vectors(batch_size):
  rng = np.random.RandomState(batch_size)
  return [rng.normal(size=[batch_size, 4]) for _ in range(2)]


def views(batch_size):
  rng = np.random.RandomState(batch_size)
  return [rng.normal(size=[batch_size, 8, 8, 2]) for _ in range(2)]


class ContrastiveLossTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(num_towers=(None, 1, 2, 3, 4),
                         temperature=(0.1, 0.5, 1.0))
  def test_equals_the_equation_on_the_whole_batch(self, num_towers,
                                                  temperature):
    """`None` for plain code; a batch of 1 to 3 rows leaves towers without."""
    inputs = [tf.placeholder(tf.float64, [None, 4]) for _ in range(2)]
    model = lambda *inputs: simclr.contrastive_loss(
        *inputs, temperature=temperature)
    loss = model(*inputs) if num_towers is None else towers.build_towers(
        model, testing.devices(num_towers), inputs=tuple(inputs)).loss
    with testing.session() as sess:
      for size in BATCH_SIZES:
        values = vectors(size)
        self.assertAllClose(sess.run(loss, dict(zip(inputs, values))),
                            nt_xent(*values, temperature), rtol=1e-10,
                            atol=1e-10)

  @parameterized.parameters(1, 2, 3, 4)
  def test_gradient_is_that_of_the_whole_batch(self, num_towers):
    """By the vectors of all towers, and by finite differences."""
    inputs = tuple(tf.placeholder(tf.float64, [None, 4]) for _ in range(2))
    loss = towers.build_towers(
        simclr.contrastive_loss, testing.devices(num_towers),
        inputs=inputs).loss
    gradients = tf.gradients(loss, inputs)
    step = 1e-6
    with testing.session() as sess:
      for size in BATCH_SIZES:
        values = vectors(size)
        actual = sess.run(gradients, dict(zip(inputs, values)))
        for view, row in ((0, 0), (1, size - 1)):
          for k in range(4):
            ends = []
            for sign in (1, -1):
              moved = [value.copy() for value in values]
              moved[view][row, k] += sign * step
              ends.append(nt_xent(*moved, 0.5))
            self.assertAllClose(actual[view][row, k],
                                (ends[0] - ends[1]) / (2 * step), atol=1e-8)

  def test_a_tower_without_rows_may_stand_between_others(self):
    """Its borrowed row is no row of the batch, and moves no other."""
    sizes = (3, 0, 2, 0)
    inputs = [tuple(tf.placeholder(tf.float64, [None, 4]) for _ in range(2))
              for _ in sizes]
    loss = towers.build_towers(
        simclr.contrastive_loss, testing.devices(4),
        inputs=towers.PerTower(inputs)).loss
    whole = vectors(5)
    feed, begin = {}, 0
    for own, size in zip(inputs, sizes):
      feed.update({x: value[begin:begin + size]
                   for x, value in zip(own, whole)})
      begin += size
    with testing.session() as sess:
      self.assertAllClose(sess.run(loss, feed), nt_xent(*whole, 0.5))

  def test_each_tower_compares_its_rows_with_all(self):
    """The work of a tower is `[B_t, B]` and not `[B, B]`."""
    inputs = tuple(tf.constant(value) for value in vectors(7))
    towers.build_towers(simclr.contrastive_loss, testing.devices(3),
                        inputs=inputs)
    cosines = [op.outputs[0] for op in
               tf.get_default_graph().get_operations() if op.type == "MatMul"]
    with testing.session() as sess:
      self.assertEqual([value.shape for value in sess.run(cosines)],
                       [(3, 7)] * 4 + [(2, 7)] * 8)

  def test_close_pairs_of_low_temperature_stay_finite(self):
    """Cosines over 0.001 would overflow as plain exponentials, in float32."""
    first = tf.constant(vectors(5)[0], tf.float32)
    loss = simclr.contrastive_loss(first, first, temperature=0.001)
    gradient, = tf.gradients(loss, first)
    with testing.session() as sess:
      values = sess.run([loss, gradient])
    self.assertTrue(np.isfinite(values[1]).all())
    self.assertAllClose(values[0], 0.0, atol=1e-3)

  @parameterized.parameters(
      ([3, 4], [3, 5]), ([3, 4], [2, 4]), ([3, None], [3, None]),
      ([3, 4, 1], [3, 4, 1]), (None, None))
  def test_rejects_vectors_of_other_shapes(self, *shapes):
    with self.assertRaisesRegex(
        ValueError, r"`first` and `second` must have one shape \[B, P\] with "
        "static P: got .* and "):
      simclr.contrastive_loss(*[tf.placeholder(tf.float32, shape)
                                for shape in shapes])

  @parameterized.parameters(0.0, -0.5)
  def test_rejects_a_temperature_that_is_not_positive(self, temperature):
    with self.assertRaisesRegex(
        ValueError, f"`temperature` must be .* above 0, got {temperature}"):
      simclr.contrastive_loss(tf.zeros([2, 3]), tf.zeros([2, 3]),
                              temperature=temperature)


def model(first, second):
  return simclr.loss(first, second, training=True, depth=DEPTH,
                     projection_size=5)


class Built:
  """One graph with the model in it, and values for its variables."""

  def __init__(self, num_towers, dtype=tf.float64):
    """Builds plain TensorFlow code if `num_towers` is None."""
    self._graph = tf.Graph()
    with self._graph.as_default():
      self._inputs = tuple(
          tf.placeholder(dtype, [None, 8, 8, 2]) for _ in range(2))
      if num_towers is None:
        loss = model(*self._inputs)
        variables = tf.trainable_variables()
        gradients = tf.gradients(loss, variables)
      else:
        graph = towers.build_towers(model, testing.devices(num_towers),
                                    inputs=self._inputs)
        loss = graph.loss
        gradients, variables = zip(*graph.gradients())
      self.variables = [variable.op.name for variable in tf.global_variables()]
      names = [variable.op.name for variable in variables]
      self._fetches = loss, dict(zip(names, gradients))

  def run(self):
    """Returns loss and gradients of one batch of each size."""
    with testing.session(self._graph) as sess:
      references.initialize(sess)
      return [sess.run(self._fetches, dict(zip(self._inputs, views(size))))
              for size in BATCH_SIZES]


class EquivalenceTest(parameterized.TestCase, tf.test.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    plain = Built(None)
    cls.variables = plain.variables
    cls.expected = plain.run()

  def assert_equals_plain_code(self, built, tolerance):
    self.assertEqual(built.variables, self.variables)
    for size, expected, actual in zip(BATCH_SIZES, self.expected, built.run()):
      with self.subTest(batch_size=size):
        self.assertAllClose(expected, actual, rtol=tolerance, atol=tolerance)

  @parameterized.parameters(1, 2, 3, 4)
  def test_equals_plain_code_on_the_whole_batch(self, num_towers):
    """Loss and all gradients, with fewer rows than towers too."""
    self.assert_equals_plain_code(Built(num_towers), 1e-8)

  def test_equals_plain_code_in_single_precision(self):
    self.assert_equals_plain_code(Built(3, tf.float32), 1e-3)

  def test_every_variable_has_a_gradient_that_is_not_zero(self):
    for name, gradient in self.expected[-1][1].items():
      self.assertGreater(np.abs(gradient).max(), 1e-6, name)


class ModelTest(parameterized.TestCase, tf.test.TestCase):

  def test_loss_is_that_of_the_projections(self):
    """Of both views as one batch, so that batch norm sees both."""
    inputs = [tf.constant(value) for value in views(5)]
    loss = model(*inputs)
    with tf.variable_scope("", reuse=True):
      x = simclr.features(tf.concat(inputs, axis=0), training=True, depth=DEPTH)
      projections = simclr.project(x, training=True, size=5)
    with testing.session(initialize=True) as sess:
      actual, z = sess.run([loss, projections])
    self.assertEqual(z.shape, (10, 5))
    self.assertAllClose(actual, nt_xent(z[:5], z[5:], 0.5), rtol=1e-9)

  def test_parameters(self):
    images = tf.placeholder(tf.float32, [None, 32, 32, 3])
    simclr.loss(images, images, training=True)
    sizes = {variable.op.name: int(np.prod(variable.shape.as_list()))
             for variable in tf.trainable_variables()}
    encoder = sum(size for name, size in sizes.items()
                  if name.startswith("encoder/"))
    # By hand: ResNet-20 without its dense layer; two kernels and batch norm.
    self.assertEqual(encoder, 269_722 - 650)
    self.assertEqual(sum(sizes.values()), encoder + 64 * 64 + 128 + 64 * 128)
    for number in (encoder, sum(sizes.values())):
      self.assertIn(f"{number:,}", simclr.__doc__)

  def test_features_are_for_other_tasks(self):
    """They have the names of the encoder alone, in a build beside training."""
    images = tf.placeholder(tf.float32, [None, 8, 8, 3])
    graph = towers.build_towers(
        lambda x: simclr.loss(x, x, training=True, depth=DEPTH),
        testing.devices(2), inputs=images)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      test = towers.build_towers(
          lambda x: {"features": simclr.features(x, training=False,
                                                 depth=DEPTH)},
          testing.devices(2), inputs=images, name="test_tower")
    self.assertEqual(
        {variable.op.name for variable in test.trainable_variables},
        {variable.op.name for variable in graph.trainable_variables
         if variable.op.name.startswith("encoder/")})
    with testing.session(initialize=True) as sess:
      values = sess.run(test.outputs["features"],
                        {images: np.ones([3, 8, 8, 3])})
    self.assertEqual(values.shape, (3, 64))

  def test_training_lowers_the_loss(self):
    """From about that of random vectors: the views of an image are close."""
    rng = np.random.RandomState(0)
    first = rng.normal(size=[7, 8, 8, 1]).astype(np.float32)
    second = first + 0.1 * rng.normal(size=first.shape).astype(np.float32)
    tf.set_random_seed(1)
    graph = towers.build_towers(
        lambda *inputs: simclr.loss(*inputs, training=True, depth=DEPTH),
        testing.devices(2), inputs=(first, second))
    train_op = graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
    with testing.session(initialize=True) as sess:
      before = sess.run(graph.loss)
      for _ in range(20):
        sess.run(train_op)
      self.assertLess(sess.run(graph.loss), before - 0.3)

  def test_rejects_views_of_different_shapes(self):
    with self.assertRaisesRegex(
        ValueError, r"`first` and `second` must be views of one shape: got "
        r"\(3, 8, 8, 1\) and \(3, 9, 9, 1\)\."):
      simclr.loss(tf.zeros([3, 8, 8, 1]), tf.zeros([3, 9, 9, 1]),
                  training=True)

  def test_encoder_is_what_the_logits_of_the_resnet_read(self):
    images = tf.random.stateless_normal([3, 8, 8, 1], [1, 2])
    logits = resnet.logits(images, num_classes=2, training=False, depth=DEPTH)
    with tf.variable_scope("", reuse=True):
      features = resnet.features(images, training=False, depth=DEPTH)
      kernel, bias = [tf.get_variable(f"dense/{name}")
                      for name in ("kernel", "bias")]
    with testing.session(initialize=True) as sess:
      logits, features, kernel, bias = sess.run(
          [logits, features, kernel, bias])
    self.assertAllClose(logits, features @ kernel + bias, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
  tf.test.main()
