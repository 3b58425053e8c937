"""Tests for towers.batch_norm: training or not, and towers by themselves."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import batch_norm_cases as cases
import testing
import towers


class PhaseTest(cases.LayerTestCase):
  """What `training` may be, and what inference leaves alone."""

  @parameterized.named_parameters(
      ("bool", True), ("number", 1), ("numpy", np.bool_(True)),
      ("constant", lambda: tf.constant(True)),
      ("folded", lambda: tf.logical_not(tf.constant(False))),
      ("default", lambda: tf.placeholder_with_default(True, [])))
  def test_training(self, training):
    layer = self.layer(2, [4, 3], training=training)
    x = np.random.RandomState(0).normal(2.0, 3.0, [5, 4, 3])
    layer.set()
    expected = cases.oracle(x)
    self.assertAllClose(layer.run(layer.built.outputs["y"], x), expected.y,
                        rtol=1e-5, atol=1e-5)
    self.assertAllClose(layer.update(x)[0], cases.moved(0, expected.mean))

  @parameterized.product(num_towers=(1, 2, 3), layout=("image_first", "matrix"),
                         dtype=(tf.float32, tf.float64))
  def test_placeholder(self, num_towers, layout, dtype):
    shape, axis = cases.LAYOUTS[layout]
    epsilon = 0.1  # Which no op of TensorFlow takes by default.
    layer = self.layer(num_towers, shape, axis, dtype=dtype, epsilon=epsilon,
                       training=lambda: tf.placeholder(tf.bool, []))
    static = self.layer(num_towers, shape, axis, dtype=dtype, epsilon=epsilon)
    rng = np.random.RandomState(0)
    x, targets = rng.normal(2.0, 3.0, [2, 5, *shape])
    start = rng.uniform(0.5, 2.0, [4, 3])
    layer.set(*start)
    static.set(*start)
    with self.subTest("training"):
      for one, other in zip(
          tf.nest.flatten(static.run([static.built.outputs, static.gradients],
                                     x, targets)),
          tf.nest.flatten(layer.run([layer.built.outputs, layer.gradients], x,
                                    targets, training=True))):
        self.assertAllClose(one, other, rtol=1e-5, atol=1e-5)
      self.assertAllClose(static.update(x), layer.update(x, training=True),
                          rtol=1e-6)
    before = layer.variables()
    gamma, beta, mean, variance = [
        v.reshape([-1] + [1] * (len(shape) - 1) if axis == 1 else [-1])
        for v in before]
    with self.subTest("inference_uses_the_moving_statistics"):
      y = layer.run(layer.built.outputs["y"], x, training=False)
      self.assertAllClose(
          y, gamma * (x - mean) / np.sqrt(variance + epsilon) + beta,
          rtol=1e-4, atol=1e-4)
    with self.subTest("inference_changes_nothing"):
      for batch in (1, 5):
        layer.update(1e6 * x[:batch], training=False)
        for one, other in zip(before, layer.variables()):
          self.assertEqual(one.tobytes(), other.tobytes())

  def test_tensor_that_each_tower_computes_alike(self):
    step = tf.placeholder_with_default(3, [])
    x = np.random.RandomState(0).normal(2.0, 3.0, [5, 4, 3]).astype("f")
    built = towers.build_towers(
        lambda x: {"y": towers.batch_norm(x, training=tf.less(step, 5))},
        testing.devices(3), inputs=x)
    with testing.session(initialize=True) as sess:
      self.assertAllClose(sess.run(built.outputs["y"]), cases.oracle(x).y,
                          rtol=1e-5, atol=1e-5)
      self.assertAllClose(sess.run(built.outputs["y"], {step: 7}),
                          x / np.sqrt(1 + cases.EPSILON), rtol=1e-5)

  def test_c010_frozen_layer_stays_and_adds_nothing(self):
    x = np.random.RandomState(0).normal(2.0, 3.0, [6, 4, 3]).astype("f")

    def model(x):
      x = towers.batch_norm(x, training=False, name="frozen")
      x = towers.batch_norm(x, training=True, name="live")
      return tf.reduce_mean(tf.tanh(x))

    built = towers.build_towers(model, testing.devices(2), inputs=x)
    live = [v for v in built.trainable_variables if "live" in v.op.name]
    train = built.minimize(tf.train.MomentumOptimizer(0.1, 0.9), var_list=live)
    self.assertNotEmpty(live)
    for tower in built.towers:
      self.assertLen(tower.update_ops, 2)
    names = [op.name for op in tf.get_default_graph().get_operations()]
    self.assertNotEmpty([n for n in names if n.startswith("cross_tower/live")])
    self.assertEmpty([n for n in names if n.startswith("cross_tower/frozen")])
    with testing.session(initialize=True) as sess:
      before = sess.run(list(built.variables))
      for _ in range(5):
        sess.run(train)
      for v, one, other in zip(built.variables, before,
                               sess.run(list(built.variables))):
        self.assertEqual(one.tobytes() == other.tobytes(),
                         v.op.name.startswith("frozen/"), v.op.name)

  def test_inference_works_inside_a_while_loop(self):
    x = np.random.RandomState(0).normal(size=[5, 3]).astype("f")

    def model(x):
      _, y = tf.while_loop(
          lambda i, _: i < 2,
          lambda i, x: (i + 1, towers.batch_norm(x, training=False)), [0, x])
      return {"y": y}

    built = towers.build_towers(model, testing.devices(2), inputs=x)
    with testing.session(initialize=True, allow_soft_placement=True) as sess:
      self.assertAllClose(sess.run(built.outputs["y"]), x / (1 + cases.EPSILON),
                          rtol=1e-5)


class NoSyncTest(cases.LayerTestCase):

  @parameterized.product(layout=("matrix", "image_first", "image_middle"),
                         update_ops=("first", "all"), rows=(7, 2, 1))
  def test_each_tower_by_itself_and_one_update(self, layout, update_ops, rows):
    """The moving statistics take the mean of the towers', weighted by rows."""
    shape, axis = cases.LAYOUTS[layout]
    layer = self.layer(3, shape, axis, sync_batch_norm=False, momentum=0.0,
                       update_ops=update_ops)
    x = np.random.RandomState(0).normal(2.0, 3.0, [rows, *shape])
    shards = [shard for shard in np.array_split(x, 3) if len(shard)]
    expected = [cases.oracle(shard, axis) for shard in shards]
    weights = [len(shard) / rows for shard in shards]
    layer.set()
    self.assertAllClose(layer.run(layer.built.outputs["y"], x),
                        np.concatenate([e.y for e in expected]), rtol=1e-4,
                        atol=1e-4)
    self.assertLen(layer.built.update_ops, 2)
    mean, variance = layer.update(x)
    self.assertAllClose(
        mean, np.average([e.mean for e in expected], 0, weights), rtol=1e-5)
    self.assertAllClose(
        variance, np.average([e.unbiased for e in expected], 0, weights),
        rtol=1e-5, atol=1e-5)

  def test_context_is_for_the_layers_inside(self):
    x = np.random.RandomState(0).normal(2.0, 3.0, [6, 3]).astype("f")

    def model(x):
      with towers.no_sync():
        own = towers.batch_norm(x, training=True)
      return {"own": own, "all": towers.batch_norm(x, training=True)}

    built = towers.build_towers(model, testing.devices(2), inputs=x)
    with testing.session(initialize=True) as sess:
      outputs = sess.run(built.outputs)
    self.assertAllClose(outputs["all"], cases.oracle(x).y, rtol=1e-5, atol=1e-5)
    own = np.concatenate([cases.oracle(x[:3]).y, cases.oracle(x[3:]).y])
    self.assertAllClose(outputs["own"], own, rtol=1e-5, atol=1e-5)

  def test_gradients_stay_in_the_tower(self):
    layer = self.layer(2, [3], sync_batch_norm=False)
    x, targets = np.random.RandomState(0).normal(size=[2, 6, 3])
    plain = cases.Plain([3], -1)
    self.addCleanup(plain.session.close)
    layer.set()
    parts = [plain.run(x[k:k + 3], targets[k:k + 3], np.ones(3), np.zeros(3))
             for k in (0, 3)]
    dx, dgamma, dbeta = layer.run(layer.gradients, x, targets)
    close = dict(rtol=1e-5, atol=1e-5)
    self.assertAllClose(dx, np.concatenate([p[0] for p in parts]) / 2, **close)
    self.assertAllClose(dgamma, (parts[0][1] + parts[1][1]) / 2, **close)
    self.assertAllClose(dbeta, (parts[0][2] + parts[1][2]) / 2, **close)


if __name__ == "__main__":
  tf.test.main()
