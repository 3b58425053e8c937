"""Tests that variables of other libraries' layers are shared by the towers.

Which libraries there are depends on TensorFlow: `tf.keras` is Keras 2 in
TensorFlow 2.15, and later with TF_USE_LEGACY_KERAS=1, else it is Keras 3, with
which there is no `tf.layers`. Unnamed layers of Keras 3 are numbered by process
and not by graph, so names are compared without these numbers where a model is
built more than once.
"""

import ast
import contextlib
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import references
import testing
import towers

keras = tf.keras
IS_KERAS_3 = getattr(keras, "__version__", "2").startswith("3.")


def has_tf_layers():
  try:
    return tf.layers.Dense is not None
  except AttributeError:  # "`Dense` is not available with Keras 3."
    return False


def batch(rows=7, columns=4):
  return np.random.RandomState(rows).normal(size=[rows, columns]).astype("f")


def dense(units=4, **options):
  return keras.layers.Dense(units, activation="tanh", **options)


def made_inside():
  def model(x):
    return tf.reduce_mean(dense(1)(dense()(dense()(x))))

  return model


def made_inside_from_the_last_to_the_first():
  def model(x):
    layers = [dense(), dense(), dense(2)]
    for layer in reversed(layers[:2]):
      x = layer(x)
    return tf.reduce_mean(layers[2](x)**2)

  return model


def named():
  def model(x):
    h = dense(name="fc_2")(dense(name="fc_1")(x))
    return tf.reduce_mean(dense(name="fc_0")(h)**2)

  return model


def in_scopes():
  def model(x):
    with tf.variable_scope("a"):
      x = dense()(x)
    with tf.name_scope("b"):
      x = dense()(x)
    return tf.reduce_mean(x**2)

  return model


def made_outside():
  layer, last = dense(), dense(1)
  return lambda x: tf.reduce_mean(last(layer(layer(x))))


def built_outside():
  layer = dense()
  layer.build([None, 4])
  return lambda x: tf.reduce_mean(layer(x)**2)


def outside_and_inside_look_alike():
  """A layer for all towers, and one that each asks for, of one shape."""
  shared = dense()

  def model(x):
    return tf.reduce_mean(dense(1)(shared(dense()(shared(x)))))

  return model


def named_outside_and_inside():
  shared = dense(name="fc_1")
  return lambda x: tf.reduce_mean(dense(name="fc_2")(shared(x))**2)


def sequential_outside():
  model = keras.Sequential([dense(), dense()])
  return lambda x: tf.reduce_mean(dense()(model(x))**2)


def functional_outside():
  inputs = keras.Input([4])
  model = keras.Model(inputs, dense(2)(dense()(inputs)))
  return lambda x: tf.reduce_mean(model(x)**2)


def functional_inside():
  def model(x):
    inputs = keras.Input([4])
    outputs = dense(2)(dense()(inputs))
    return tf.reduce_mean(keras.Model(inputs, outputs)(x)**2)

  return model


def weight_decay():
  """By a regularizer of the layer, and by the layer's weights."""
  def model(x):
    layer = dense(2, kernel_regularizer=keras.regularizers.L2(0.1))
    y = layer(x)
    decay = tf.add_n(layer.losses) + 0.1 * tf.add_n(
        [tf.nn.l2_loss(tf.convert_to_tensor(w))
         for w in layer.trainable_weights])
    return tf.reduce_mean(y**2) + decay

  return model


def frozen():
  layer = dense(trainable=False)
  return lambda x: tf.reduce_mean(dense(1)(layer(x)))


def embedding():
  layer = keras.layers.Embedding(5, 4)

  def model(x):
    ids = tf.cast(tf.abs(x[:, 0]), tf.int32)
    inside = keras.layers.Embedding(5, 4)
    return tf.reduce_mean(layer(ids) * inside(ids) * x)

  return model


def recurrent():
  cell = keras.layers.SimpleRNNCell(3)

  def model(x):
    layer = keras.layers.RNN(cell, unroll=True)
    return tf.reduce_mean(layer(tf.reshape(x, [-1, 2, 2]))**2)

  return model


def convolution():
  def model(x):
    h = keras.layers.Conv2D(3, 2, activation="relu")(
        tf.reshape(x, [-1, 2, 2, 1]))
    h = keras.layers.PReLU()(keras.layers.Flatten()(h))
    return tf.reduce_mean(h**2)

  return model


KERAS_MODELS = (
    made_inside, made_inside_from_the_last_to_the_first, named, in_scopes,
    made_outside, built_outside, outside_and_inside_look_alike,
    named_outside_and_inside, sequential_outside, functional_outside,
    functional_inside, weight_decay, frozen, embedding, recurrent, convolution)


def without_counts(result):
  """Returns `result` without the numbers in names."""
  def plain(name):
    return re.sub(r"(_\d+)+(?=/)", "", name) if IS_KERAS_3 else name

  return result._replace(
      variables=list(map(plain, result.variables)),
      gradients={(plain(name), position): gradient for position, (
          name, gradient) in enumerate(result.gradients.items())})


def by_position(variable):
  """A value that does not depend on the variable's name."""
  position = [v.op.name for v in tf.global_variables()].index(variable.op.name)
  return np.random.RandomState(position).normal(
      size=variable.shape.as_list()).astype(
          variable.dtype.base_dtype.as_numpy_dtype)


class KerasTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(
        absltest.mock.patch.object(references, "value_for", by_position))

  @parameterized.named_parameters((m.__name__, m) for m in KERAS_MODELS)
  def test_equals_one_device(self, make_model):
    """Names and order of the variables, loss and gradients."""
    expected = without_counts(references.run(make_model, [batch()]))
    for num_towers in (1, 3):
      with self.subTest(num_towers=num_towers):
        actual = references.run(make_model, [batch()], num_towers)
        self.assertNotIn("tower", "".join(actual.variables))
        references.assert_equal(self, without_counts(actual), expected, 1e-4)

  def test_layers_after_a_build_have_the_next_numbers(self):
    """So checkpoints do not depend on the number of towers."""
    def numbers(num_towers):
      with tf.Graph().as_default():
        first = dense()
        towers.build_towers(made_inside(), testing.devices(num_towers),
                            inputs=batch())
        last = dense()
        names = [v.op.name for v in tf.global_variables()]
        begin, end = (int((re.findall(r"\d+$", layer.name) or [0])[0])
                      for layer in (first, last))
        return end - begin, len(names), len(set(names))

    self.assertEqual(numbers(1), (4, 6, 6))
    self.assertEqual(numbers(3), (4, 6, 6))

  def test_membership_and_names_inside(self):
    """A layer's weights are the shared variables, in each tower."""
    found = []

    def model(x):
      layer = dense(name="fc")
      y = layer(x)
      found.append([w.path if hasattr(w, "path") else w.op.name
                    for w in layer.trainable_weights])
      return tf.reduce_mean(y)

    graph = towers.build_towers(model, testing.devices(3), inputs=batch())
    self.assertEqual(found, [["fc/kernel", "fc/bias"]] * 3)
    self.assertEqual([v.op.name for v in graph.trainable_variables],
                     ["fc/kernel", "fc/bias"])

  def test_settings_of_the_caller_hold_in_all_towers(self):
    """Keras 3 keeps its policy for types by thread."""
    set_policy = (keras.config.set_dtype_policy
                  if IS_KERAS_3 else keras.backend.set_floatx)
    self.addCleanup(set_policy, "float32")
    set_policy("float64")
    types = []

    def model(x):
      y = dense(2)(tf.cast(x, tf.float64))
      types.append(y.dtype)
      return tf.reduce_mean(y)

    graph = towers.build_towers(model, testing.devices(3), inputs=batch())
    self.assertEqual(types, [tf.float64] * 3)
    self.assertEqual({v.dtype.base_dtype for v in graph.variables},
                     {tf.float64})

  def test_towers_that_make_other_layers(self):
    def model(x):
      return tf.reduce_mean(dense(3 + towers.current_tower().index)(x))

    with self.assertRaisesRegex(
        ValueError, "`model_fn` must make the same variables in each tower: "
        r"only tower 0 makes `dense.*/kernel` \(4, 3\).*, only tower 1 makes "
        r"`dense.*/kernel_1` \(4, 4\)"):
      towers.build_towers(model, testing.devices(2), inputs=batch())

  @parameterized.parameters(1, 3)
  def test_trains(self, num_towers):
    """All variables change as on one device, made inside and outside."""
    def train(build):
      with tf.Graph().as_default():
        step = build(outside_and_inside_look_alike())
        variables = tf.trainable_variables()
        with testing.session() as sess:
          references.initialize(sess)
          for _ in range(3):
            sess.run(step)
          return [sess.run(v) for v in variables]

    def plain(model):
      return tf.train.GradientDescentOptimizer(0.5).minimize(
          model(tf.constant(batch())))

    def built(model):
      graph = towers.build_towers(model, testing.devices(num_towers),
                                  inputs=batch())
      return graph.minimize(tf.train.GradientDescentOptimizer(0.5))

    for actual, expected in zip(train(built), train(plain)):
      self.assertAllClose(actual, expected, 1e-4, 1e-5)


@contextlib.contextmanager
def unnamed_scope():
  with tf.variable_scope(None, "block"):
    yield


def functions(x):
  x = tf.layers.dense(x, 4, activation=tf.tanh)
  x = tf.layers.dense(x, 4)
  with tf.variable_scope("scope"):
    x = tf.layers.dense(x, 4, activation=tf.tanh)
  for _ in range(2):
    with unnamed_scope():
      x = tf.layers.dense(x, 4)
      x = tf.layers.dense(x, 4, name="fc", activation=tf.tanh)
  return tf.reduce_mean(x**2)


def functions_under_reuse(x):
  for reuse in (False, True):
    with tf.variable_scope("scope", reuse=reuse):
      x = tf.layers.dense(x, 4, activation=tf.tanh)
      x = tf.layers.conv2d(tf.reshape(x, [-1, 2, 2, 1]), 2, 2, name="conv")
      x = tf.reshape(tf.tile(x, [1, 1, 1, 2]), [-1, 4])
  return tf.reduce_mean(x**2)


def regularized(x):
  """c028: the collection holds each regularizer's loss once."""
  x = tf.layers.dense(x, 2, kernel_regularizer=tf.nn.l2_loss)
  return tf.reduce_mean(x**2) + tf.losses.get_regularization_loss()


def objects_inside(x):
  layer = tf.layers.Dense(4, activation=tf.tanh)
  return tf.reduce_mean(tf.layers.Dense(1)(layer(layer(x))))


TF_LAYERS_MODELS = (functions, functions_under_reuse, regularized,
                    objects_inside)


class TFLayersTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    if not has_tf_layers():
      self.skipTest("`tf.layers` needs Keras 2.")

  @parameterized.named_parameters((m.__name__, m) for m in TF_LAYERS_MODELS)
  def test_equals_one_device(self, model):
    expected = references.run(lambda: model, [batch()])
    for num_towers in (1, 3):
      with self.subTest(num_towers=num_towers):
        references.assert_equal(
            self, references.run(lambda: model, [batch()], num_towers),
            expected, 1e-4)

  def test_objects_outside_and_inside(self):
    def make_model():
      shared = tf.layers.Dense(4, activation=tf.tanh)

      def model(x):
        return tf.reduce_mean(tf.layers.dense(shared(
            tf.layers.dense(shared(x), 4)), 4))

      return model

    expected = references.run(make_model, [batch()])
    for num_towers in (1, 3):
      references.assert_equal(
          self, references.run(make_model, [batch()], num_towers), expected,
          1e-4)

  @parameterized.parameters(1, 3)
  def test_regularizers_are_listed_once(self, num_towers):
    graph = towers.build_towers(regularized, testing.devices(num_towers),
                                inputs=batch())
    key = tf.GraphKeys.REGULARIZATION_LOSSES
    self.assertLen(tf.get_collection(key), 1)
    for tower in graph.towers:
      self.assertLen(tower.collection(key), 1)

  @parameterized.parameters(1, 3)
  def test_evaluates_beside_training(self, num_towers):
    def model(x):
      return tf.reduce_mean(tf.layers.dense(x, 2, name="fc")**2)

    towers.build_towers(model, testing.devices(num_towers), inputs=batch())
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      graph = towers.build_towers(model, testing.devices(2), inputs=batch(),
                                  name="eval")
    self.assertEqual([v.op.name for v in tf.global_variables()],
                     ["fc/kernel", "fc/bias"])
    self.assertLen(graph.variables, 2)

  def test_layers_after_a_build_have_the_next_names(self):
    found = []
    for num_towers in (1, 3):
      with tf.Graph().as_default():
        towers.build_towers(functions, testing.devices(num_towers),
                            inputs=batch())
        tf.layers.dense(tf.ones([1, 2]), 2)
        found.append([v.op.name for v in tf.global_variables()])
    self.assertEqual(found[0], found[1])
    self.assertEqual(found[1][-1], "dense_2/bias")


class RemovedTest(parameterized.TestCase, tf.test.TestCase):
  """What TensorFlow has with Keras 2 alone, and `towers` does not need."""

  def check(self, make, message):
    """Checks that `make` works in towers, or fails as it does outside."""
    def model(x):
      return tf.reduce_mean(make(x)**2)

    if has_tf_layers():
      references.assert_equal(
          self, references.run(lambda: model, [batch()], 3),
          references.run(lambda: model, [batch()]), 1e-4)
      return
    with self.assertRaisesRegex(AttributeError, message) as outside:
      make(tf.constant(batch()))
    for num_towers in (1, 3):
      with self.assertRaisesRegex(
          AttributeError, f"^{re.escape(str(outside.exception))}"):
        towers.build_towers(model, testing.devices(num_towers), inputs=batch())

  @parameterized.named_parameters(
      ("dense", lambda x: tf.layers.dense(x, 2)),
      ("conv2d", lambda x: tf.layers.conv2d(x[:, None, :, None], 2, 1)),
      ("batch_normalization", lambda x: tf.layers.batch_normalization(x)))
  def test_c046_tf_layers(self, make):
    """With Keras 3, the error is TensorFlow's own."""
    self.check(make, "is not available with Keras 3")

  @parameterized.named_parameters(
      ("basic_lstm", lambda: tf.nn.rnn_cell.BasicLSTMCell(3)),
      ("gru", lambda: tf.nn.rnn_cell.GRUCell(3)))
  def test_c046_neighbour_rnn_cells(self, make_cell):
    """They went with the layers."""
    def unrolled(x):
      return tf.nn.static_rnn(make_cell(), tf.unstack(x[:, :, None], axis=1),
                              dtype=tf.float32)[0][-1]

    self.check(unrolled, "rnn_cell|Cell|Keras")

  def test_c046_no_code_of_ours_needs_them(self):
    root = pathlib.Path(references.__file__).resolve().parent.parent
    paths = [path for folder in ("towers", "models", "tools")
             for path in (root / folder).rglob("*.py")]
    self.assertGreater(len(paths), 50)
    for path in paths:
      for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in (
            "layers", "rnn_cell", "estimator"):
          self.assertNotEqual(ast.unparse(node.value), "tf", f"{path}: {node}")

  def test_c046_the_page_names_what_to_install(self):
    root = pathlib.Path(references.__file__).resolve().parent.parent
    for page in ("README.md", "docs/migrate/tf_layers.md"):
      text = " ".join((root / page).read_text(encoding="utf-8").split())
      self.assertRegex(
          text, r"`tf\.layers` needs .*`(pip install )?tf-keras`.*"
          "`TF_USE_LEGACY_KERAS=1`.*`towers` itself needs neither")


if __name__ == "__main__":
  tf.test.main()
