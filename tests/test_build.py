"""Tests of what a build leaves behind for the steps of training."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


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
