"""Tests for the two-column AlexNet, in towers of one and of two devices."""

import itertools
import warnings

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import alexnet
import references
import testing
import towers

BATCH_SIZES = (1, 2, 4, 5, 7)
NARROW = 1 / 16
# Towers of two devices each; the third one borrows the first one's.
PAIRS = [("/cpu:0", "/cpu:1"), ("/cpu:2", "/cpu:3"), ("/cpu:4", "/cpu:0")]
CONVOLUTIONS = [f"conv{layer}" for layer in range(1, 6)]
LAYERS = CONVOLUTIONS + ["fc6", "fc7", "fc8"]


def devices(num_towers, paired):
  return PAIRS[:num_towers] if paired else testing.devices(num_towers)


def named(device):
  """Returns how a graph spells the name of a device."""
  return f"/device:{device[1:].upper()}"


def placeholders(dtype=tf.float64):
  return (tf.placeholder(dtype, [None, 32, 32, 3]),
          tf.placeholder(tf.int64, [None]))


def data(batch_size):
  rng = np.random.RandomState(batch_size)
  return rng.normal(size=[batch_size, 32, 32, 3]), rng.randint(0, 5, batch_size)


def model(images, labels, dropout_rate=0.0):
  logits = alexnet.logits(images, num_classes=5, training=True, width=NARROW,
                          dropout_rate=dropout_rate)
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels=labels, logits=logits)
  return {"loss": tf.reduce_mean(losses), "logits": logits}


class Built:
  """One graph with the model in it, and values for its variables."""

  def __init__(self, tower_devices, dtype=tf.float64, **options):
    """Builds plain TensorFlow code if `tower_devices` is None."""
    self.graph = tf.Graph()
    with self.graph.as_default():
      tf.set_random_seed(3)
      self._inputs = placeholders(dtype)
      model_fn = lambda *inputs: model(*inputs, **options)
      if tower_devices is None:
        outputs = model_fn(*self._inputs)
        self.loss, self._logits = outputs["loss"], outputs["logits"]
        self.variables = tf.trainable_variables()
        gradients = tf.gradients(self.loss, self.variables)
      else:
        built = towers.build_towers(model_fn, tower_devices,
                                    inputs=self._inputs)
        self.loss, self._logits = built.loss, built.outputs["logits"]
        self.variables, gradients = [], []
        for gradient, variable in built.gradients():
          self.variables.append(variable)
          gradients.append(gradient)
      self.names = [variable.op.name for variable in self.variables]
      self._gradients = dict(zip(self.names, gradients))

  def run(self, batch_sizes):
    """Returns loss, logits and gradients of one batch of each size."""
    results = []
    with testing.session(self.graph) as sess:
      for variable in self.variables:
        # Of a size at which neither ReLU nor softmax says the same to all.
        value = references.value_for(variable)
        value *= np.sqrt(2 / value[..., 0].size) if value.ndim > 1 else 0.1
        variable.load(value, sess)
      for batch_size in batch_sizes:
        feed = dict(zip(self._inputs, data(batch_size)))
        results.append(sess.run((self.loss, self._logits, self._gradients),
                                feed))
    return results

  def devices_of(self, op_type, column):
    """Returns by tower the devices of the ops of one type and column."""
    result = {}
    for op in self.graph.get_operations():
      if op.type == op_type and f"/column_{column}/" in op.name:
        tower = op.name[op.name.find("tower_"):].partition("/")[0]
        result.setdefault(tower, []).append(op.device)
    return result


class EquivalenceTest(parameterized.TestCase, tf.test.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.plain = Built(None)
    cls.expected = cls.plain.run(BATCH_SIZES)

  @parameterized.product(num_towers=(1, 2, 3), paired=(False, True))
  def test_equals_plain_code_on_the_whole_batch(self, num_towers, paired):
    built = Built(devices(num_towers, paired))
    self.assertEqual(built.names, self.plain.names)
    for size, expected, actual in zip(BATCH_SIZES, self.expected,
                                      built.run(BATCH_SIZES)):
      for part, one, other in zip(("loss", "logits", "gradients"), expected,
                                  actual):
        with self.subTest(part, batch_size=size):
          self.assertAllClose(one, other, rtol=1e-10, atol=1e-10)

  @parameterized.parameters(False, True)
  def test_equals_plain_code_in_single_precision(self, paired):
    """Here the response norm is TensorFlow's own op."""
    built = Built(devices(2, paired), tf.float32)
    for expected, actual in zip(self.expected, built.run(BATCH_SIZES)):
      self.assertAllClose(expected, actual, rtol=1e-4, atol=1e-5)

  def test_every_variable_has_a_gradient_that_is_not_zero(self):
    _, _, gradients = self.expected[-1]
    self.assertLen(gradients, 4 * len(LAYERS))
    for name, gradient in gradients.items():
      self.assertGreater(np.abs(gradient).max(), 1e-4, name)

  @parameterized.parameters(1, 2, 3)
  def test_dropout_is_the_same_on_one_and_on_two_devices(self, num_towers):
    """Of towers of one device and of two; one tower is as plain code."""
    results = [Built(devices(num_towers, paired), dropout_rate=0.5).run([7])
               for paired in (False, True)]
    if num_towers == 1:
      results.append(Built(None, dropout_rate=0.5).run([7]))
    for result in results[1:]:
      self.assertAllClose(results[0], result, rtol=1e-10, atol=1e-10)
    self.assertNotAllClose(results[0][0][1], self.expected[-1][1])


class PlacementTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(1, 2, 3)
  def test_a_column_stands_on_its_own_device(self, num_towers):
    """Forward and backward: of both passes, the ops that do the work."""
    built = Built(PAIRS[:num_towers])
    counts = {"Conv2D": 5, "Conv2DBackpropFilter": 5, "Conv2DBackpropInput": 5,
              "MatMul": 9}
    for op_type, count in counts.items():
      for column in (0, 1):
        with self.subTest(op_type, column=column):
          self.assertEqual(
              built.devices_of(op_type, column),
              {f"tower_{tower}": [named(PAIRS[tower][column])] * count
               for tower in range(num_towers)})
    # Pooling stands outside the scopes of the columns.
    for op_type in ("MaxPool", "MaxPoolGrad"):
      with self.subTest(op_type):
        self.assertCountEqual(
            [op.device for op in built.graph.get_operations()
             if op.type == op_type],
            [named(device) for pair in PAIRS[:num_towers] for device in pair
             for _ in range(3)])

  def test_both_columns_stand_on_the_only_device(self):
    built = Built(testing.devices(2))
    for op_type, column in itertools.product(
        ("Conv2D", "Conv2DBackpropFilter", "MatMul"), (0, 1)):
      self.assertEqual(
          {tower: set(names) for tower, names in built.devices_of(
              op_type, column).items()},
          {"tower_0": {named("/cpu:0")}, "tower_1": {named("/cpu:1")}})

  def test_outside_a_build_no_device_is_named(self):
    built = Built(None)
    self.assertEqual({op.device for op in built.graph.get_operations()}, {""})

  def test_rejects_more_devices_than_columns(self):
    images, labels = placeholders()
    with self.assertRaisesRegex(
        ValueError, r"`devices` must give tower 1 at most 2 devices, one per "
        r"column: got \('/cpu:1', '/cpu:2', '/cpu:3'\)\."):
      towers.build_towers(model, ["/cpu:0", ("/cpu:1", "/cpu:2", "/cpu:3")],
                          inputs=(images, labels))


class ModelTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("32", 32, 10, 28_569_994), ("64", 64, 10, 28_576_906),
      ("224", 224, 1000, 60_965_224))
  def test_parameters(self, size, classes, expected):
    alexnet.logits(tf.placeholder(tf.float32, [None, size, size, 3]),
                   num_classes=classes, training=True)
    shapes = {variable.op.name: variable.shape.as_list()
              for variable in tf.trainable_variables()}
    self.assertEqual(
        sum(int(np.prod(shape)) for shape in shapes.values()), expected)
    self.assertIn(f"{expected:,}", alexnet.__doc__)
    # By hand: the layers of the paper, per column.
    first, pooled = {32: (5, 3), 64: (7, 3), 224: (11, 6)}[size]
    expected = [[first, first, 3, 48], [5, 5, 48, 128], [3, 3, 256, 192],
                [3, 3, 192, 192], [3, 3, 192, 128],
                [pooled * pooled * 256, 2048], [4096, 2048],
                [4096, classes // 2]]
    for layer, shape in zip(LAYERS, expected):
      for column in (0, 1):
        self.assertEqual(shapes[f"{layer}/column_{column}/kernel"], shape)
        self.assertEqual(shapes[f"{layer}/column_{column}/bias"], shape[-1:])

  @parameterized.parameters(32, 33, 47, 63, 64, 127, 128, 224)
  def test_logits_have_one_row_per_image(self, size):
    images = tf.placeholder(tf.float32, [None, size, size, 1])
    logits = alexnet.logits(images, num_classes=7, training=False, width=NARROW)
    self.assertEqual(logits.shape.as_list(), [None, 7])
    with testing.session(initialize=True) as sess:
      values = sess.run(logits, {images: np.ones([2, size, size, 1])})
    self.assertEqual(values.shape, (2, 7))
    self.assertTrue(np.isfinite(values).all())

  def test_maps_have_the_sizes_of_the_paper(self):
    alexnet.logits(tf.zeros([1, 224, 224, 3]), num_classes=2, training=False,
                   width=NARROW)
    sizes = [op.outputs[0].shape.as_list()[1]
             for op in tf.get_default_graph().get_operations()
             if op.type in ("Conv2D", "MaxPool")]
    # Two columns each: conv1, pool, conv2, pool, conv3, conv4, conv5, pool.
    self.assertEqual(sizes[::2], [55, 27, 27, 13, 13, 13, 13, 6])
    self.assertEqual(sizes[1::2], sizes[::2])

  @parameterized.parameters(1, 2, 3)
  def test_odd_numbers_of_classes(self, classes):
    logits = alexnet.logits(tf.zeros([2, 32, 32, 3]), num_classes=classes,
                            training=False, width=NARROW)
    self.assertEqual(logits.shape.as_list(), [2, classes])
    with testing.session(initialize=True) as sess:
      self.assertEqual(sess.run(logits).shape, (2, classes))

  def test_columns_meet_where_the_paper_lets_them(self):
    alexnet.logits(tf.zeros([2, 32, 32, 3]), num_classes=2, training=False,
                   width=NARROW)
    graph = tf.get_default_graph()
    outputs = {(layer, column): graph.get_tensor_by_name(
        f"{layer}/column_{column}/BiasAdd:0") for layer in LAYERS
               for column in (0, 1)}
    before = dict(zip(LAYERS[1:], LAYERS))
    for layer in LAYERS[1:]:
      for column in (0, 1):
        own, other = tf.gradients(
            outputs[layer, column], [outputs[before[layer], column],
                                     outputs[before[layer], 1 - column]])
        with self.subTest(layer, column=column):
          self.assertIsNotNone(own)
          self.assertEqual(other is not None,
                           layer in ("conv3", "fc6", "fc7", "fc8"))

  @parameterized.parameters(tf.float32, tf.float64)
  def test_response_norm_is_that_of_the_paper(self, dtype):
    x = np.random.RandomState(0).normal(size=[2, 3, 4, 9]) * 50
    expected = np.zeros_like(x)
    for c in range(9):
      sums = (x[..., max(0, c - 2):c + 3]**2).sum(axis=-1)
      expected[..., c] = x[..., c] / (2 + 1e-4 * sums)**0.75
    # pylint: disable-next=protected-access
    normed = alexnet._response_norm(tf.constant(x, dtype))
    with testing.session() as sess:
      actual = sess.run(normed)
    tolerance = {tf.float32: 1e-5, tf.float64: 1e-12}[dtype]
    self.assertAllClose(actual, expected, rtol=tolerance, atol=tolerance)

  def test_training_lowers_the_loss(self):
    images, labels = placeholders(tf.float32)
    tf.set_random_seed(1)
    graph = towers.build_towers(model, PAIRS[:2], inputs=(images, labels))
    train_op = graph.minimize(tf.train.MomentumOptimizer(0.01, 0.9))
    feed = dict(zip((images, labels), data(5)))
    with testing.session(initialize=True) as sess:
      before = sess.run(graph.loss, feed)
      for _ in range(30):
        sess.run(train_op, feed)
      self.assertLess(sess.run(graph.loss, feed), 0.5 * before)


class DropoutTest(parameterized.TestCase, tf.test.TestCase):

  def logits(self, **options):
    return alexnet.logits(tf.ones([3, 32, 32, 3]), num_classes=5, width=NARROW,
                          **options)

  def test_half_of_the_units_are_dropped_and_the_others_doubled(self):
    self.logits(training=True)
    graph = tf.get_default_graph()
    before = [graph.get_tensor_by_name(f"fc7/column_{column}/BiasAdd:0")
              for column in (0, 1)]
    after = graph.get_operation_by_name("fc8/column_0/MatMul").inputs[0]
    with testing.session(initialize=True) as sess:
      before, after = sess.run([tf.nn.relu(tf.concat(before, axis=1)), after])
    self.assertEqual(after.shape, (3, 256))
    self.assertAllClose(after, np.where(after != 0, 2 * before, 0))
    self.assertBetween(np.mean(after[before > 0] == 0), 0.35, 0.65)

  def test_only_training_drops(self):
    """Also where a tensor says whether it is training."""
    tf.set_random_seed(1)
    training = tf.placeholder(tf.bool, [])
    by_tensor = self.logits(training=training)
    with tf.variable_scope("", reuse=True):
      off = [self.logits(training=False),
             self.logits(training=True, dropout_rate=0.0)]
    with testing.session(initialize=True) as sess:
      for phase in (True, False):
        values = sess.run([by_tensor, *off], {training: phase})
        self.assertAllEqual(values[1], values[2])
        self.assertEqual(np.array_equal(values[0], values[1]), not phase)
    self.assertLen([op for op in tf.get_default_graph().get_operations()
                    if op.type == "RandomUniform" and "dropout" in op.name], 4)

  def test_towers_draw_numbers_of_their_own(self):
    images, labels = placeholders(tf.float32)
    tf.set_random_seed(1)
    with warnings.catch_warnings():
      warnings.simplefilter("error", UserWarning)
      graph = towers.build_towers(
          lambda *inputs: model(*inputs, dropout_rate=0.5), PAIRS[:2],
          inputs=(images, labels))
    same = np.ones([2, 32, 32, 3])
    with testing.session(initialize=True) as sess:
      first, second = sess.run(graph.outputs["logits"],
                               {images: same, labels: [0, 0]})
    self.assertNotAllClose(first, second)

  @parameterized.parameters(-0.1, 1.0, 2.0)
  def test_rejects_a_rate_that_is_no_part(self, rate):
    with self.assertRaisesRegex(
        ValueError, rf"`dropout_rate` must be the part .* got {rate}\."):
      self.logits(training=True, dropout_rate=rate)


class RejectsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(
      [[4, 32, 32]], [[4, 32, None, 3]], [[4, 32, 32, None]], [None])
  def test_unknown_shapes(self, shape):
    with self.assertRaisesRegex(
        ValueError, r"`images` must have a shape \[B, S, S, C\] .*: got"):
      alexnet.logits(tf.placeholder(tf.float32, shape), num_classes=2,
                     training=True)

  @parameterized.parameters([[4, 28, 28, 1]], [[4, 32, 64, 3]])
  def test_small_and_oblong_images(self, shape):
    with self.assertRaisesRegex(
        ValueError, r"`images` must be square, of 32x32 or more: got "):
      alexnet.logits(tf.zeros(shape), num_classes=2, training=True)

  @parameterized.parameters(0.0, -1.0)
  def test_widths_that_are_no_factor(self, width):
    with self.assertRaisesRegex(ValueError, rf"`width` must .* got {width}\."):
      alexnet.logits(tf.zeros([1, 32, 32, 3]), num_classes=2, training=True,
                     width=width)


if __name__ == "__main__":
  tf.test.main()
