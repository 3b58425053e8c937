"""Tests of towers that train without waiting for each other."""

import itertools
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


def linear(x):
  w = tf.get_variable("w", [], x.dtype, initializer=tf.zeros_initializer(),
                      regularizer=lambda v: 0.5 * tf.square(v - 1.0))
  return tf.reduce_mean(w * x) + tf.losses.get_regularization_loss()


SGD = lambda: tf.train.GradientDescentOptimizer(1.0)


class TrainOpsTest(parameterized.TestCase):

  @parameterized.parameters((True, 1), (True, 3), (False, 2), (False, 4))
  def test_each_applies_its_own_gradient(self, scale, num_towers):
    with tf.Graph().as_default():
      x = tf.placeholder(tf.float32, [None])
      graph = towers.build_towers(linear, testing.devices(num_towers), inputs=x)
      step = tf.train.get_or_create_global_step()
      training = graph.minimize_async(SGD(), global_step=step,
                                      scale_by_towers=scale)
      self.assertLen(training.train_ops, num_towers)
      rows = np.arange(2 * num_towers, dtype=np.float32)
      w, factor = 0.0, 1.0 / num_towers if scale else 1.0
      with testing.session(initialize=True) as sess:
        for k, op in enumerate(training.train_ops):
          sess.run(op, {x: rows})
          w -= factor * (rows[2 * k:2 * k + 2].mean() + (w - 1.0))
          np.testing.assert_allclose(sess.run(graph.variables[0]), w,
                                     rtol=1e-5, atol=1e-6)
        self.assertEqual(sess.run(step), num_towers)

  def test_needs_no_other_tower(self):
    """The input of another tower is not even there."""
    with tf.Graph().as_default():
      own = [tf.placeholder(tf.float32, [1]) for _ in range(2)]
      graph = towers.build_towers(linear, testing.devices(2),
                                  inputs=towers.PerTower(own))
      training = graph.minimize_async(SGD())
      with testing.session(initialize=True) as sess:
        sess.run(training.train_ops[1], {own[1]: [3.0]})
        sess.run(training.train_ops[0], {own[0]: [3.0]})

  @parameterized.parameters("towers", "keras")
  def test_moving_statistics_of_its_own(self, library):
    def model(x):
      if library == "towers":
        y = towers.batch_norm(x, training=True, momentum=0.5)
      else:
        layer = tf.keras.layers.BatchNormalization(momentum=0.5)
        y = layer(x, training=True)
      return tf.reduce_mean(y * tf.get_variable("w", []))

    with tf.Graph().as_default():
      own = [tf.placeholder(tf.float32, [2, 1]) for _ in range(2)]
      graph = towers.build_towers(
          model, testing.devices(2), inputs=towers.PerTower(own),
          sync_batch_norm=False)
      training = graph.minimize_async(SGD())
      moving, = [v for v in graph.variables if "moving_mean" in v.op.name]
      with testing.session(initialize=True) as sess:
        sess.run(training.train_ops[1], {own[1]: [[3.0], [5.0]]})
        np.testing.assert_allclose(sess.run(moving), [2.0])
        sess.run(training.train_ops[0], {own[0]: [[8.0], [8.0]]})
        np.testing.assert_allclose(sess.run(moving), [5.0])

  def test_borrowed_row_changes_nothing(self):
    with tf.Graph().as_default():
      x = tf.placeholder(tf.float32, [None])
      graph = towers.build_towers(linear, testing.devices(3), inputs=x)
      training = graph.minimize_async(SGD())
      with testing.session(initialize=True) as sess:
        sess.run(training.train_ops[2], {x: [1.0, 2.0]})
        self.assertEqual(sess.run(graph.variables[0]), 0.0)

  def test_loss_by_name(self):
    def model(x):
      w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
      return {"one": tf.reduce_mean(w * x), "two": tf.reduce_mean(-w * x)}

    with tf.Graph().as_default():
      graph = towers.build_towers(model, testing.devices(2),
                                  inputs=tf.ones([4]))
      training = graph.minimize_async(SGD(), loss="two")
      with testing.session(initialize=True) as sess:
        sess.run(training.train_ops[1])
        self.assertEqual(sess.run(graph.variables[0]), 0.5)


class RefusedTest(parameterized.TestCase):

  def build(self, model_fn=linear, **options):
    return towers.build_towers(model_fn, testing.devices(2),
                               inputs=tf.ones([4, 2]), **options)

  def test_whole_batch_norm(self):
    def model(x):
      x = towers.batch_norm(x, training=True, name="norm")
      return tf.reduce_mean(x * tf.get_variable("w", []))

    with tf.Graph().as_default():
      with self.assertRaisesRegex(
          ValueError, "`minimize_async` must not wait for other towers.*"
          "`cross_tower/norm.*sync_batch_norm=False"):
        self.build(model).minimize_async(SGD())

  def test_merge(self):
    def model(x):
      mean = towers.all_reduce(tf.reduce_mean(x), "mean")
      return tf.reduce_mean(x * tf.get_variable("w", [])) * mean

    with tf.Graph().as_default():
      with self.assertRaisesRegex(ValueError, "must not wait for other towers"):
        self.build(model).minimize_async(SGD())

  def test_copies(self):
    with tf.Graph().as_default():
      with self.assertRaisesRegex(ValueError, "'shared' or 'balanced'"):
        self.build(variables="replicated").minimize_async(SGD())

  def test_rows_of_another_tower(self):
    with tf.Graph().as_default():
      own = [tf.placeholder(tf.float32, [None]) for _ in range(2)]
      graph = towers.build_towers(linear, testing.devices(2),
                                  inputs=towers.PerTower(own))
      with self.assertRaisesRegex(
          ValueError, "`inputs` of each tower must have a size that is known"):
        graph.minimize_async(SGD())

  def test_loss_that_is_a_tensor(self):
    with tf.Graph().as_default():
      graph = self.build()
      with self.assertRaisesRegex(ValueError, "must be the name of an output"):
        graph.minimize_async(SGD(), loss=graph.loss)

  def test_optimizer(self):
    with tf.Graph().as_default():
      with self.assertRaisesRegex(TypeError, "`optimizer` must be"):
        self.build().minimize_async("sgd")


class RunTest(parameterized.TestCase):

  def training(self, num_towers=3, model_fn=linear, inputs=None):
    graph = towers.build_towers(
        model_fn, testing.devices(num_towers),
        inputs=tf.ones([2 * num_towers]) if inputs is None else inputs)
    step = tf.train.get_or_create_global_step()
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    return graph, step, graph.minimize_async(optimizer, global_step=step)

  def test_steps_of_all_towers_together(self):
    with tf.Graph().as_default():
      _, step, training = self.training()
      with testing.session(initialize=True) as sess:
        before = threading.active_count()
        self.assertEqual(training.run(sess, steps=31), 31)
        self.assertEqual(sess.run(step), 31)
        self.assertEqual(threading.active_count(), before)
        self.assertEqual(training.run(sess, steps=0), 0)

  def test_stop(self):
    with tf.Graph().as_default():
      _, step, training = self.training()
      with testing.session(initialize=True) as sess:
        calls = itertools.count()  # Threads share it.
        made = training.run(sess, stop=lambda: next(calls) >= 30)
        self.assertEqual(made, 30)
        end = time.time() + 0.3
        made += training.run(sess, stop=lambda: time.time() > end)
        self.assertEqual(sess.run(step), made)

  @parameterized.parameters(True, False)
  def test_no_step_is_lost(self, use_resource):
    """Two additions at once would count as one, were they not locked."""
    with tf.Graph().as_default():
      step = tf.get_variable("step", [], tf.int64, trainable=False,
                             initializer=tf.zeros_initializer(),
                             use_resource=use_resource)
      graph = towers.build_towers(linear, testing.devices(4),
                                  inputs=tf.ones([8]))
      training = graph.minimize_async(SGD(), global_step=step)
      added = [op for op in tf.get_default_graph().get_operations()
               if op.type in ("AssignAdd", "AssignAddVariableOp") and
               op.inputs[0].op.name == "step"]
      self.assertLen(added, 4)
      for op in added:
        # Additions to resource variables are locked in any case.
        self.assertTrue(use_resource or op.get_attr("use_locking"))
      with testing.session(initialize=True) as sess:
        self.assertEqual(training.run(sess, steps=2000), 2000)
        self.assertEqual(sess.run(step), 2000)

  def test_learns(self):
    with tf.Graph().as_default():
      graph, _, training = self.training()
      with testing.session(initialize=True) as sess:
        training.run(sess, steps=600)
        # The minimum of w + (w - 1)**2 / 2.
        np.testing.assert_allclose(sess.run(graph.variables[0]), 0.0,
                                   atol=1e-3)

  def test_end_of_data_ends_cleanly(self):
    with tf.Graph().as_default():
      iterators = [
          tf.data.make_one_shot_iterator(
              tf.data.Dataset.from_tensors([1.0]).repeat(count))
          for count in (5, 1000000)
      ]
      _, step, training = self.training(
          2, inputs=towers.PerTower([i.get_next() for i in iterators]))
      with testing.session(initialize=True) as sess:
        made = training.run(sess, steps=1000000)
        self.assertEqual(sess.run(step), made)

  def test_first_error_is_raised(self):
    def model(x):
      if towers.current_tower().index == 1:
        x = tf.debugging.check_numerics(x / 0.0, "bad tower")
      return linear(x)

    with tf.Graph().as_default():
      _, _, training = self.training(3, model)
      with testing.session(initialize=True) as sess:
        before = threading.active_count()
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError,
                                    "bad tower"):
          training.run(sess, steps=10**9)
        self.assertEqual(threading.active_count(), before)

  @parameterized.parameters(
      (dict(), "`steps` or `stop` must say"),
      (dict(steps=-1), "`steps` must be a number.*got -1"),
      (dict(steps=1.5), "`steps` must be a number.*got 1.5"))
  def test_bad_limits(self, limits, message):
    with self.assertRaisesRegex(ValueError, message):
      towers.AsyncTraining([]).run(None, **limits)


if __name__ == "__main__":
  absltest.main()
