"""Tests of what a build leaves behind for the steps of training."""

import re

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import updates


def build(num_towers=2, inputs=None):
  def model(x):
    w = tf.get_variable("w", [3], initializer=tf.ones_initializer())
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.get_variable(
        "calls", [], tf.int32, trainable=False,
        initializer=tf.zeros_initializer()).assign_add(1))
    return {"loss": tf.reduce_mean(x * w), "other": tf.reduce_sum(w)}

  return towers.build_towers(
      model, testing.devices(num_towers),
      inputs=tf.ones([5, 3]) if inputs is None else inputs)


class ApplyGradientsTest(parameterized.TestCase):

  @parameterized.parameters(1, 2, 3)
  def test_changed_gradients_behind_the_gate(self, num_towers):
    with tf.Graph().as_default():
      graph = build(num_towers)
      step = tf.train.get_or_create_global_step()
      pairs = [(tf.sign(g) * 0.25, v) for g, v in graph.gradients()]
      train_op = graph.apply_gradients(
          tf.train.GradientDescentOptimizer(1.0), pairs, global_step=step)
      with testing.session(initialize=True) as sess:
        sess.run(train_op)
        values = {v.op.name: sess.run(v) for v in tf.global_variables()}
    np.testing.assert_allclose(values["w"], [0.75] * 3)
    self.assertEqual(values["calls"], 1)
    self.assertEqual(values["global_step"], 1)

  def test_optimizer_is_checked(self):
    with tf.Graph().as_default():
      graph = build()
      with self.assertRaisesRegex(TypeError, "`optimizer` must be"):
        graph.apply_gradients("sgd", graph.gradients())

  def test_the_optimizers_own_apply_stays_possible(self):
    with tf.Graph().as_default():
      graph = build()
      optimizer = tf.train.GradientDescentOptimizer(3.0)
      with tf.control_dependencies(graph.update_ops):
        train_op = optimizer.apply_gradients(graph.gradients())
      with testing.session(initialize=True) as sess:
        sess.run(train_op)
        np.testing.assert_allclose(sess.run(graph.variables[0]), [0, 0, 0],
                                   atol=1e-6)


class OrderTest(parameterized.TestCase):

  @parameterized.parameters("minimize", "apply_gradients")
  def test_no_variable_changes_before_all_gradients_are_there(self, how):
    """A loss linear in each of two variables: either needs the other's value.

    What is ready early must not change what another tower has yet to read.
    """

    def model(x):
      one = tf.get_variable("one", [], initializer=tf.ones_initializer())
      two = tf.get_variable("two", [], initializer=tf.ones_initializer())
      return tf.reduce_mean(x * one * two)

    with tf.Graph().as_default():
      graph = towers.build_towers(model, testing.devices(3),
                                  inputs=tf.ones([6]))
      optimizer = tf.train.GradientDescentOptimizer(0.5)
      train_op = (graph.minimize(optimizer) if how == "minimize" else
                  graph.apply_gradients(optimizer, graph.gradients()))
      ops = tf.get_default_graph().get_operations()
      totals = {op for op in ops
                if re.match("average_gradients/AddN", op.name)}
      changes = [op for op in ops if op.type == "ResourceApplyGradientDescent"]
      self.assertLen(totals, 2)
      self.assertLen(changes, 2)
      for change in changes:
        self.assertContainsSubset(totals, updates.ancestors([change]))
      with testing.session(initialize=True) as sess:
        for _ in range(50):
          sess.run(tf.global_variables_initializer())
          sess.run(train_op)
          self.assertEqual(sess.run(list(graph.variables)), [0.5, 0.5])


class RegularizationTest(parameterized.TestCase):

  @parameterized.parameters(1, 2, 3)
  def test_terms_made_of_rows_are_averaged(self, num_towers):
    def model(x):
      w = tf.get_variable("w", [], initializer=tf.ones_initializer(),
                          regularizer=lambda v: 3.0 * v)
      tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES,
                           tf.reduce_mean(tf.square(x * w)))
      return tf.reduce_mean(x * w)

    with tf.Graph().as_default():
      x = np.arange(1, 6, dtype=np.float32)
      graph = towers.build_towers(model, testing.devices(num_towers),
                                  inputs=tf.constant(x))
      loss = graph.regularization_loss
      (gradient, _), = graph.gradients(loss)
      with testing.session(initialize=True) as sess:
        np.testing.assert_allclose(
            sess.run([loss, gradient]), [3 + 11, 3 + 22], rtol=1e-5)


class PlaceTest(absltest.TestCase):

  def test_inside_a_branch_of_v2_control_flow_it_is_refused(self):
    with tf.Graph().as_default():
      graph = build()
      tf.enable_control_flow_v2()
      try:
        with self.assertRaisesRegex(
            ValueError, "must not be made inside a `tf.function` or a branch"):
          tf.cond(tf.placeholder(tf.bool, []),
                  lambda: graph.minimize(tf.train.AdamOptimizer()), tf.no_op)
      finally:
        tf.disable_control_flow_v2()


class UpdateOpsTest(parameterized.TestCase):

  def test_none_of_them(self):
    with tf.Graph().as_default():
      graph = build()
      train_op = graph.minimize(tf.train.GradientDescentOptimizer(1.0),
                                update_ops=[])
      with testing.session(initialize=True) as sess:
        sess.run(train_op)
        self.assertEqual(sess.run(graph.variables[1]), 0)


if __name__ == "__main__":
  absltest.main()
