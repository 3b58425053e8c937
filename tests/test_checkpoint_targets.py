"""Tests for towers.checkpoint_targets."""

import os

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import checkpoint_cases
from towers import checkpoint_files
from towers import checkpoint_targets


class TargetsTest(parameterized.TestCase, tf.test.TestCase):

  def build(self):
    """Makes variables as training does."""
    self.w = tf.get_variable("w", [2, 3])
    self.mean = tf.get_variable("bn/moving_mean", [3], trainable=False)
    self.scale = tf.get_variable("loss_scale", [], trainable=False)
    step = tf.train.get_or_create_global_step()
    tf.train.AdamOptimizer().minimize(tf.reduce_sum(self.w), step)

  @parameterized.parameters(True, False)
  def test_variables_of_the_graph(self, use_resource):
    with tf.variable_scope("", use_resource=use_resource):
      self.build()
    got = checkpoint_targets.targets(None)
    self.assertCountEqual(got, [v.op.name for v in tf.global_variables()])
    self.assertEqual(got["w"], ((2, 3), tf.float32, True, (self.w,)))
    self.assertEqual({name for name, target in got.items() if target.required},
                     {"w", "bn/moving_mean"})

  def test_what_it_returned(self):
    self.build()
    got = checkpoint_targets.targets(None)
    self.assertEqual(checkpoint_targets.targets(got), got)

  def test_some_variables(self):
    self.build()
    self.assertEqual(list(checkpoint_targets.targets([self.w, self.w])), ["w"])

  def test_variables_by_other_names(self):
    self.build()
    got = checkpoint_targets.targets({"weights": self.w})
    self.assertEqual(got, {"weights": ((2, 3), tf.float32, True, (self.w,))})

  @parameterized.parameters("default", "list", "mapping")
  def test_a_partitioned_variable_is_one(self, kind):
    w = tf.get_variable("w", [5, 2],
                        partitioner=tf.fixed_size_partitioner(2))
    got = checkpoint_targets.targets(
        {"default": None, "list": [w], "mapping": {"w": w}}[kind])
    self.assertEqual(list(got), ["w"])
    self.assertEqual(got["w"].shape, (5, 2))
    self.assertEqual([piece.spec for piece in got["w"].pieces()],
                     ["5 2 0,3:0,2", "5 2 3,2:0,2"])

  def test_shapes(self):
    got = checkpoint_targets.targets({"w": [2, None], "w/Adam": None})
    self.assertEqual(got, {"w": ((2, None), None, True, ()),
                           "w/Adam": (None, None, False, ())})

  def test_another_checkpoint(self):
    path = checkpoint_cases.write(
        os.path.join(self.create_tempdir().full_path, "model"),
        {"w": checkpoint_cases.value(0), "w/Adam": checkpoint_cases.value(1)})
    self.assertEqual(
        checkpoint_targets.targets(path),
        {"w": ((2, 3), tf.float32, True, ()),
         "w/Adam": ((2, 3), tf.float32, False, ())})

  @parameterized.parameters(
      ([2, 3], tf.float32, ("", "")),
      ([2, 4], tf.float32, ("float32[2, 4]", "float32[2, ?]")),
      ([2], tf.float32, ("float32[2]", "float32[2, ?]")),
      ([2, 3], tf.float64, ("float64[2, 3]", "float32[2, ?]")),
  )
  def test_difference(self, shape, dtype, expected):
    target = checkpoint_targets.Target((2, None), tf.float32, True)
    if shape == [2, 4]:
      target = target._replace(shape=(2, 3))
      expected = (expected[0], "float32[2, 3]")
    self.assertEqual(
        target.difference(checkpoint_files.Entry("w", shape, dtype)), expected)

  def test_rejects_what_is_no_variable(self):
    with self.assertRaisesRegex(
        TypeError, "`variables` must be variables, .*: got 3 among them"):
      checkpoint_targets.targets([3])

  def test_rejects_a_mixture(self):
    with self.assertRaisesRegex(
        TypeError, r"`variables` must be all .*: got a shape for \['b'\]"):
      checkpoint_targets.targets({"a": tf.get_variable("a", []), "b": [3]})

  def test_rejects_one_name_for_two(self):
    first = tf.get_variable("w", [1])
    with tf.Graph().as_default():
      second = tf.get_variable("w", [1])
    with self.assertRaisesRegex(
        ValueError, "`variables` must have names of their own: w is that of 2"):
      checkpoint_targets.targets([first, second])


if __name__ == "__main__":
  tf.test.main()
