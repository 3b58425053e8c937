"""Tests of variables that belong to a process and not to the model."""

from absl.testing import absltest
import numpy as np
import tensorflow.compat.v1 as tf

import testing
from towers import local_variables


class LocalVariablesTest(absltest.TestCase):

  def test_zeros_are_set_back_with_their_variable(self):
    with tf.Graph().as_default():
      variable = tf.get_variable("v", [2], use_resource=True)
      local = local_variables.zeros([3], tf.float32, device="/cpu:1",
                                    name="sum", variable=variable)
      self.assertEqual(tf.local_variables(), [local])
      self.assertNotIn(local, tf.global_variables())
      add = local.assign_add(tf.ones([3]))
      with testing.session(initialize=True) as sess:
        for initialise in (variable.initializer,
                           tf.local_variables_initializer(),
                           tf.global_variables_initializer()):
          sess.run(add)
          sess.run(initialise)
          np.testing.assert_array_equal(sess.run(local), np.zeros([3]))

  def test_copy_takes_the_first_value_and_later_ones(self):
    with tf.Graph().as_default():
      variable = tf.get_variable("v", [4], use_resource=True)
      copy = local_variables.copy_of(variable, device="/cpu:1", name="copy")
      with testing.session() as sess:
        sess.run(variable.initializer)
        one, other = sess.run([variable, copy])
        np.testing.assert_array_equal(one, other)
        sess.run(variable.assign([1.0, 2.0, 3.0, 4.0]))
        sess.run(copy.initializer)
        np.testing.assert_array_equal(sess.run(copy), [1, 2, 3, 4])

  def test_copy_before_its_variable(self):
    """Both initialisers in one run, whichever comes first."""
    with tf.Graph().as_default():
      variable = tf.get_variable("v", [4], use_resource=True)
      copy = local_variables.copy_of(variable, device="/cpu:1", name="copy")
      both = tf.group(copy.initializer, variable.initializer)
      for _ in range(20):
        with testing.session() as sess:
          sess.run(both)
          np.testing.assert_array_equal(*sess.run([variable, copy]))


if __name__ == "__main__":
  absltest.main()
