"""Tests of where variables live."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import placement


def spelled(device):
  return placement.same_spelling(device)


def model(x):
  for k, size in enumerate((100, 60, 30, 20, 10)):
    w = tf.get_variable(f"w{k}", [3, size])
    b = tf.get_variable(f"b{k}", [size], initializer=tf.zeros_initializer())
    y = tf.matmul(x, w) + b
  tf.Variable(tf.zeros([7], tf.float64), name="unnamed", trainable=False)
  return tf.reduce_mean(y)


class PlacementTest(parameterized.TestCase):

  def build(self, num_towers=3, model_fn=model, **options):
    x = tf.placeholder(tf.float32, [None, 3])
    return towers.build_towers(
        model_fn, testing.devices(num_towers), inputs=x, **options)

  def test_c038_shared_variables_are_on_the_parameter_device(self):
    def model_with_scopes(x):
      with tf.device("/cpu:2"):
        return model(x)

    with tf.Graph().as_default():
      graph = self.build(2, model_with_scopes, parameter_device="/cpu:3")
      train_op = graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
      self.assertIsNotNone(train_op)
      self.assertLen(graph.placement(), 11)
      for row in graph.placement():
        self.assertEqual(spelled(row.device), "/device:CPU:3")
      for variable in tf.global_variables():
        self.assertEqual(spelled(variable.device), "/device:CPU:3")

  def test_table_says_bytes(self):
    with tf.Graph().as_default():
      table = {row.variable: row.num_bytes for row in self.build().placement()}
    self.assertEqual(table["w0"], 3 * 100 * 4)
    self.assertEqual(table["b1"], 60 * 4)
    self.assertEqual(table["unnamed"], 7 * 8)

  @parameterized.parameters(1, 2, 3, 4)
  def test_balanced_by_bytes(self, num_towers):
    with tf.Graph().as_default():
      graph = self.build(num_towers, variables="balanced")
      loads = {spelled(d): 0 for d in testing.devices(num_towers)}
      for row in graph.placement():
        loads[spelled(row.device)] += row.num_bytes
        self.assertEqual(row.num_bytes % 4, 0)
    # The greedy rule leaves no more than the largest variable between two.
    self.assertLessEqual(max(loads.values()) - min(loads.values()), 1200)
    self.assertGreater(min(loads.values()), 0)

  def test_balanced_counts_what_exists(self):
    with tf.Graph().as_default():
      with tf.device("/cpu:0"):
        tf.get_variable("large", [10000], use_resource=True)
      graph = self.build(2, variables="balanced")
      devices = {spelled(row.device) for row in graph.placement()}
    self.assertEqual(devices, {"/device:CPU:1"})

  def test_balanced_averages_where_the_variable_is(self):
    with tf.Graph().as_default() as g:
      graph = self.build(3, variables="balanced")
      graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
      places = {row.variable: spelled(row.device) for row in graph.placement()}
      slots = [v for v in tf.global_variables() if "/Momentum" in v.op.name]
      self.assertNotEmpty(slots)
      for slot in slots:
        self.assertEqual(spelled(slot.device),
                         places[slot.op.name.rpartition("/")[0]])
      pairs = graph.gradients()
      for gradient, variable in pairs:
        if gradient is not None:
          self.assertEqual(spelled(gradient.device),
                           places[variable.op.name])
      self.assertIsNotNone(g)

  def test_balanced_unknown_shape_goes_to_the_parameter_device(self):
    def unknown(x):
      size = tf.placeholder_with_default(3, [])
      w = tf.get_variable("w", initializer=tf.ones([size]),
                          validate_shape=False)
      return tf.reduce_mean(x * w)

    with tf.Graph().as_default():
      graph = self.build(2, unknown, variables="balanced",
                         parameter_device="/cpu:4")
      row, = graph.placement()
      self.assertIsNone(row.num_bytes)
      self.assertEqual(spelled(row.device), "/device:CPU:4")

  def test_partitions_are_balanced_apart(self):
    def partitioned(x):
      with tf.variable_scope("p", partitioner=tf.fixed_size_partitioner(2)):
        w = tf.get_variable("w", [4, 3])
      return tf.reduce_mean(x * tf.convert_to_tensor(w)[0])

    with tf.Graph().as_default():
      graph = self.build(2, partitioned, variables="balanced")
      self.assertLen({spelled(row.device) for row in graph.placement()}, 2)
      graph.minimize(tf.train.GradientDescentOptimizer(1.0))
      with testing.session(initialize=True) as sess:
        for variable in graph.variables:
          self.assertTrue(np.all(np.isfinite(sess.run(variable))))

  @parameterized.parameters("mirrored", None, 3)
  def test_unknown_policy(self, variables):
    with tf.Graph().as_default():
      with self.assertRaisesRegex(
          ValueError, "`variables` must say where variables live"):
        self.build(2, variables=variables)

  @parameterized.parameters("balanced", "replicated")
  def test_several_parameter_devices_are_for_shared_variables(self, variables):
    with tf.Graph().as_default():
      with self.assertRaisesRegex(
          ValueError, "`parameter_device` must be one device unless "
          r"variables are shared: got \['/cpu:1', '/cpu:2'\] with "
          rf"`variables='{variables}"):
        self.build(2, variables=variables,
                   parameter_device=["/cpu:1", "/cpu:2"])

  @parameterized.parameters("shared", "balanced", "replicated")
  def test_c075_initialisers_cover_everything(self, variables):
    with tf.Graph().as_default():
      graph = self.build(3, variables=variables)
      graph.minimize(tf.train.AdamOptimizer(0.1), accumulate_steps=2,
                     loss_scale="dynamic")
      with testing.session() as sess:
        sess.run(tf.global_variables_initializer())
        self.assertEmpty(sess.run(tf.report_uninitialized_variables()))


if __name__ == "__main__":
  absltest.main()
