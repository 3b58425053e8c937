"""Tests for towers.precise_batch_norm, against NumPy."""

import os

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import precise_batch_norm

IS_KERAS_3 = getattr(tf.keras, "__version__", "2").startswith("3.")
CHANNELS = 3
EPSILON = 1e-3


def session():
  return testing.session(initialize=True)


def batches(sizes=(7, 4, 2)):
  """Returns batches of images whose distribution drifts."""
  rng = np.random.RandomState(0)
  return [rng.normal(k, 1 + k, [size, 2, 2, CHANNELS]).astype("f")
          for k, size in enumerate(sizes)]


def kernel(name):
  values = np.random.RandomState(len(name)).normal(size=[CHANNELS, CHANNELS])
  return tf.get_variable(name, initializer=values.astype("f"))


def by_towers(x, training):
  return towers.batch_norm(x, training=training, epsilon=EPSILON)


def by_fused_op(x, training):
  """A layer such as people write: the op, and moving averages by hand."""
  del training
  with tf.variable_scope(None, "bn"):
    make = lambda name, value: tf.get_variable(
        name, [CHANNELS], initializer=tf.constant_initializer(value),
        trainable=False)
    moving_mean, moving_variance = make("moving_mean", 0), make("moving_var", 1)
    y, mean, variance = tf.nn.fused_batch_norm(
        x, tf.ones([CHANNELS]), tf.zeros([CHANNELS]), epsilon=EPSILON)
    for moving, value in ((moving_mean, mean), (moving_variance, variance)):
      tf.add_to_collection(
          tf.GraphKeys.UPDATE_OPS,
          moving.assign_add((value - moving) * 0.03))
  return y


def by_moments(x, training):
  """Another: `tf.nn.moments` and an average that assigns."""
  del training
  with tf.variable_scope(None, "bn"):
    make = lambda name, value: tf.get_variable(
        name, [1, 1, 1, CHANNELS], initializer=tf.constant_initializer(value),
        trainable=False)
    mean, variance = tf.nn.moments(x, [0, 1, 2], keep_dims=True)
    for name, value in (("running_mean", mean), ("running_var", variance)):
      moving = make(name, 0.5)
      tf.add_to_collection(
          tf.GraphKeys.UPDATE_OPS,
          tf.assign(moving, 0.9 * moving + 0.1 * value))
  return (x - mean) * tf.rsqrt(variance + EPSILON)


def by_keras(x, training):
  return tf.keras.layers.BatchNormalization(epsilon=EPSILON)(
      x, training=training)


def double_precision(x, training):
  y = towers.batch_norm(tf.cast(x, tf.float64), training=training,
                        epsilon=EPSILON)
  return tf.cast(y, tf.float32)


class Model:
  """Two layers of batch norm, the second of which depends on the first."""

  def __init__(self, layer, num_towers, *, training=True, inputs=None,
               **options):
    self.x = tf.placeholder(tf.float32, [None, 2, 2, CHANNELS])
    self.steps = None

    def model(x):
      # As TensorFlow's own updates, not of batch norm.
      steps = tf.get_variable("steps", [2], trainable=False,
                              initializer=tf.zeros_initializer())
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                           steps.assign_add(tf.ones([2])))
      self.steps = steps
      for name in ("one", "second"):
        x = tf.reshape(tf.matmul(tf.reshape(x, [-1, CHANNELS]), kernel(name)),
                       tf.shape(x))
        x.set_shape([None, 2, 2, CHANNELS])
        x = tf.nn.elu(layer(x, training))
      return tf.reduce_mean(x)

    self.graph = towers.build_towers(
        model, testing.devices(num_towers),
        inputs=self.x if inputs is None else inputs, **options)
    self.moving = [v for v in tf.global_variables()
                   if not v.trainable and v.op.name != "steps"]

  def feeds(self, data):
    return [{self.x: batch} for batch in data]


def expected(data, correction=1, shards=1):
  """Returns the mean and variance that each layer sees, from NumPy.

  Args:
    data: The batches.
    correction: 1 for the unbiased variance.
    shards: Into how many parts, each normalised on its own, a batch is split.
  """
  kernels = [np.random.RandomState(len(name)).normal(size=[CHANNELS, CHANNELS])
             .astype("f").astype(np.float64) for name in ("one", "second")]
  parts = [part.astype(np.float64) for batch in data
           for part in np.array_split(batch, shards) if len(part)]
  results = []
  for matrix in kernels:
    parts = [part @ matrix for part in parts]
    rows = np.concatenate(parts).reshape(-1, CHANNELS)
    results += [rows.mean(axis=0), rows.var(axis=0, ddof=correction)]
    axes = (0, 1, 2)
    parts = [(p - p.mean(axes)) / np.sqrt(p.var(axes) + EPSILON) for p in parts]
    parts = [np.where(p > 0, p, np.expm1(p)) for p in parts]
  return results


class PreciseBatchNormTest(parameterized.TestCase, tf.test.TestCase):

  def check(self, model, data, session, correction=1, shards=1, feeds=None):
    before = session.run(tf.trainable_variables())
    returned = precise_batch_norm.update(
        session, model.graph, model.feeds(data) if feeds is None else feeds)
    values = session.run(model.moving)
    self.assertLen(values, 4)
    for value, right in zip(values, expected(data, correction, shards)):
      self.assertAllClose(value.reshape(-1), right, 1e-5, 1e-5)
    self.assertCountEqual(returned, [v.op.name for v in model.moving])
    for variable, value in zip(model.moving, values):
      self.assertAllEqual(returned[variable.op.name], value)
    self.assertAllEqual(session.run(model.steps), [0, 0])  # Nothing else ran.
    for a, b in zip(before, session.run(tf.trainable_variables())):
      self.assertAllEqual(a, b)

  @parameterized.parameters(1, 2, 3, 4)
  def test_equals_numpy_over_uneven_batches(self, num_towers):
    """Of 7, 4 and 2 rows: the last has fewer than some numbers of towers."""
    model = Model(by_towers, num_towers)
    with session() as sess:
      self.check(model, batches(), sess)

  @parameterized.named_parameters(
      ("fused_op", by_fused_op, 1), ("moments", by_moments, 0),
      ("double_precision", double_precision, 1), ("keras", by_keras, None))
  def test_layers_of_other_libraries(self, layer, correction):
    if correction is None:  # Keras 3 gives the biased variance.
      correction = 0 if IS_KERAS_3 else 1
    for num_towers in (1, 2):
      tf.reset_default_graph()
      testing.clear_keras()
      with self.subTest(num_towers=num_towers), tf.Graph().as_default():
        model = Model(layer, num_towers)
        with session() as sess:
          self.check(model, batches(), sess, correction)

  @parameterized.product(num_towers=(1, 3), layer=(by_towers, by_keras))
  def test_a_training_phase_that_is_fed(self, num_towers, layer):
    if layer is by_keras and IS_KERAS_3:
      layer = by_towers  # Keras 3 takes no tensor there.
    training = tf.placeholder(tf.bool, [])
    model = Model(layer, num_towers, training=training)
    data = batches()
    with session() as sess:
      feeds = [{model.x: batch, training: True} for batch in data]
      self.check(model, data, sess, feeds=feeds)
      before = sess.run(model.moving)
      with self.assertRaisesRegex(
          ValueError, "`.*moving_mean` must move in training: got a layer that "
          "does not move it"):
        precise_batch_norm.update(
            sess, model.graph, [{model.x: data[0], training: False}])
      for a, b in zip(before, sess.run(model.moving)):
        self.assertAllEqual(a, b)

  @parameterized.product(num_towers=(2, 3), layer=(by_towers, by_keras))
  def test_layers_of_each_towers_own(self, num_towers, layer):
    """`no_sync`: normalised by tower; statistics are those of all rows."""
    model = Model(layer, num_towers, sync_batch_norm=False)
    data = batches((7, 4))
    biased = layer is by_keras and IS_KERAS_3
    with session() as sess:
      self.check(model, data, sess, correction=1 - biased, shards=num_towers)

  def test_rejects_updates_that_only_tower_0_makes(self):
    """Without synchronisation, no one averages what people write by hand."""
    model = Model(by_fused_op, 2, sync_batch_norm=False)
    with self.assertRaisesRegex(
        ValueError, "`bn/moving_mean` must move by the moments of .* got an "
        "update by something else than the moments of all towers"):
      precise_batch_norm.PreciseBatchNorm(model.graph)

  @parameterized.parameters(1, 2)
  def test_batches_of_an_iterator(self, num_towers):
    data = batches((4, 4, 4))
    dataset = tf.data.Dataset.from_tensor_slices(np.concatenate(data)).batch(4)
    iterator = tf.data.make_initializable_iterator(dataset)
    model = Model(by_towers, num_towers, inputs=iterator.get_next())
    with session() as sess:
      sess.run(iterator.initializer)
      self.check(model, data[:2], sess, feeds=2)
      before = sess.run(model.moving)
      with self.assertRaisesRegex(
          ValueError, "`batches` must be at most as many as there are: "
          "expected 1 or fewer, got 2. No moving"):
        precise_batch_norm.update(sess, model.graph, 2)
      for a, b in zip(before, sess.run(model.moving)):
        self.assertAllEqual(a, b)

  def test_after_training_and_restoring(self):
    """c013: what sorted data and few steps leave is far off; this is right.

    Copies are renewed before, so a plain restore is enough.
    """
    model = Model(by_towers, 3, variables="replicated")
    train_op = model.graph.minimize(tf.train.GradientDescentOptimizer(0.1))
    saver = tf.train.Saver()
    path = os.path.join(self.create_tempdir().full_path, "model")
    data = batches()
    with session() as sess:
      self.check(model, data, sess)
      saver.save(sess, path)
      for feed in model.feeds(data):
        sess.run(train_op, feed)
      saver.restore(sess, path)
      sess.run([v.assign(tf.ones_like(v)) for v in model.moving])
      self.check(model, data, sess)
    self.assertNotAllClose(expected(data)[1], np.ones([CHANNELS]))

  def test_many_batches_of_a_large_offset(self):
    """c013's neighbour: squares would cancel."""
    rng = np.random.RandomState(1)
    data = [rng.normal(1000.0, 1.0, [8, 4]).astype("f") for _ in range(5)]
    x = tf.placeholder(tf.float32, [None, 4])
    graph = towers.build_towers(
        lambda x: tf.reduce_mean(towers.batch_norm(x, training=True)),
        testing.devices(3), inputs=x)
    with session() as sess:
      values = precise_batch_norm.update(sess, graph, [{x: d} for d in data])
    rows = np.concatenate(data).astype(np.float64)
    self.assertAllClose(values["batch_normalization/moving_mean"],
                        rows.mean(axis=0), 1e-6)
    self.assertAllClose(values["batch_normalization/moving_variance"],
                        rows.var(axis=0, ddof=1), 1e-4)

  @parameterized.parameters(1, 2)
  def test_layers_that_see_nothing(self, num_towers):
    """All statistics of a dead layer are 0; names tell them apart."""
    x = tf.placeholder(tf.float32, [None, 4])
    graph = towers.build_towers(
        lambda x: tf.reduce_mean(towers.batch_norm(0.0 * x, training=True)),
        testing.devices(num_towers), inputs=x)
    with session() as sess:
      values = precise_batch_norm.update(sess, graph, [{x: np.ones([3, 4])}])
    for value in values.values():
      self.assertAllEqual(value, np.zeros([4]))

  def test_a_finalized_graph(self):
    model = Model(by_towers, 2)
    data = batches()
    estimator = precise_batch_norm.PreciseBatchNorm(model.graph)
    self.assertCountEqual(estimator.names, [v.op.name for v in model.moving])
    with session() as sess:
      sess.graph.finalize()
      with self.assertRaisesRegex(
          ValueError, "`graph` must be one that can still be added to: got a "
          "finalized one"):
        precise_batch_norm.update(sess, model.graph, model.feeds(data))
      values = estimator.update(sess, model.feeds(data))
    self.assertAllClose(values["batch_normalization/moving_mean"],
                        expected(data)[0], 1e-5, 1e-5)

  def test_rejects_batches(self):
    model = Model(by_towers, 1)
    with session() as sess:
      for none in (0, -1, []):
        with self.assertRaisesRegex(
            ValueError, r"`batches` must be at least one: got (0|-1|\[\])\."):
          precise_batch_norm.update(sess, model.graph, none)
      for other in ({model.x: 1}, "2", True):
        with self.assertRaisesRegex(TypeError,
                                    "`batches` must be a number, or a feed"):
          precise_batch_norm.update(sess, model.graph, other)
    with tf.Graph().as_default(), tf.Session() as sess:
      with self.assertRaisesRegex(
          ValueError, "`session` must run the graph of the towers"):
        precise_batch_norm.update(sess, model.graph, 1)

  def test_rejects_a_model_without_statistics(self):
    model = Model(lambda x, training: x, 2)
    with self.assertRaisesRegex(
        ValueError, r"`graph` must have batch norm layers that update .* got "
        r"none among its update ops \['tower_0/.*'\]. Build"):
      precise_batch_norm.PreciseBatchNorm(model.graph)

  def test_rejects_what_is_no_moment(self):
    """It moves towards something else that is made of the moments."""

    def layer(x, training):
      del training
      moving = tf.get_variable(
          "moving_mean", [CHANNELS], trainable=False,
          initializer=tf.zeros_initializer())
      mean, _ = tf.nn.moments(x, [0, 1, 2])
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, moving.assign_sub(
          0.1 * (moving - 3.0 * mean)))
      return x

    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
      with self.assertRaisesRegex(
          ValueError, "`moving_mean` must move by the moments of its layer's "
          "input, once a step: got 2 updates in a step"):
        precise_batch_norm.PreciseBatchNorm(Model(layer, 1).graph)
    tf.reset_default_graph()
    x = tf.placeholder(tf.float32, [None, 2, 2, CHANNELS])
    graph = towers.build_towers(
        lambda x: tf.reduce_mean(layer(x, True)), testing.devices(2), inputs=x)
    with session() as sess:
      with self.assertRaisesRegex(
          ValueError, "(?s)`moving_mean` must move by the mean or the variance "
          "of `.*`: got .* for a batch of mean"):
        precise_batch_norm.update(sess, graph, [{x: batches()[1]}])


class PooledTest(parameterized.TestCase, tf.test.TestCase):

  def test_is_that_of_all_elements(self):
    rng = np.random.RandomState(0)
    parts = [rng.normal(k, 2, [k + 1, 3]) for k in range(4)]
    result = precise_batch_norm.pooled([
        precise_batch_norm.Pooled(len(p), p.mean(axis=0), p.var(axis=0))
        for p in parts] + [precise_batch_norm.Pooled(0, [np.nan] * 3,
                                                     [np.nan] * 3)])
    rows = np.concatenate(parts)
    self.assertEqual(result.count, len(rows))
    self.assertAllClose(result.mean, rows.mean(axis=0), 1e-12)
    self.assertAllClose(result.with_bessel(0), rows.var(axis=0), 1e-12)
    self.assertAllClose(result.with_bessel(1), rows.var(axis=0, ddof=1), 1e-12)


if __name__ == "__main__":
  tf.test.main()
