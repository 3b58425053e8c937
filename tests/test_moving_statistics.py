"""Tests for towers.moving_statistics: what moving statistics are made of."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import moving_statistics


def found(model, num_towers, shape=(None, 4), **options):
  x = tf.placeholder(tf.float32, shape)
  graph = towers.build_towers(model, testing.devices(num_towers), inputs=x,
                              **options)
  return x, moving_statistics.find(graph.towers, graph.update_ops,
                                   graph.variables)


class FindTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(num_towers=(1, 2, 3), half=(True, False))
  def test_inputs_axes_and_the_value_of_a_batch(self, num_towers, half):

    def model(x):
      x = tf.cast(x, tf.float16) if half else x
      y = towers.batch_norm(x, training=True, momentum=0.9, name="bn")
      return tf.reduce_mean(tf.cast(y, tf.float32))

    x, statistics = found(model, num_towers, (None, 2, 2, 4))
    self.assertEqual([s.name for s in statistics],
                     ["bn/moving_mean", "bn/moving_variance"])
    self.assertEqual(statistics[0].source, statistics[1].source)
    self.assertEqual(statistics[0].source.axes, (0, 1, 2))
    self.assertLen(statistics[0].source.inputs, num_towers)
    batch = np.random.RandomState(0).normal(3, 2, [5, 2, 2, 4]).astype("f")
    batch = batch.astype(np.float16).astype("f")
    feed = {x: batch}
    for statistic in statistics:
      self.assertLen(statistic.reads, 1)
      feed[statistic.reads[0]] = np.zeros([4])
    with testing.session(initialize=True) as sess:
      inputs, mean, variance = sess.run(
          [statistics[0].source.inputs, statistics[0].batch_value,
           statistics[1].batch_value], feed)
    self.assertAllClose(np.concatenate(inputs), batch)
    batch = batch.reshape(-1, 4)
    self.assertAllClose(mean, batch.mean(axis=0), 1e-4)
    self.assertAllClose(variance, batch.var(axis=0, ddof=1), 1e-4)

  def test_other_variables_are_left_out(self):

    def model(x):
      count = tf.get_variable("count", [4], trainable=False)
      average = tf.get_variable("loss_average", [], trainable=False)
      y = towers.batch_norm(x, training=True, name="bn")
      towers.batch_norm(y, training=False, name="frozen")
      loss = tf.reduce_mean(y)
      for op in (count.assign_add(tf.ones([4])),
                 average.assign_sub(0.1 * (average - loss))):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)
      return loss

    _, statistics = found(model, 2)
    self.assertEqual([s.name for s in statistics],
                     ["bn/moving_mean", "bn/moving_variance"])

  def test_a_layer_that_is_used_twice(self):

    def model(x):
      for reuse in (False, True):
        with tf.variable_scope("scope", reuse=reuse):
          x = towers.batch_norm(x, training=True, name="bn")
      return tf.reduce_mean(x)

    with self.assertRaisesRegex(
        ValueError, r"`scope/bn/moving_mean` must move by the moments of its "
        r"layer's input, once a step: got 2 updates in a step \(`tower_0/"):
      found(model, 2)

  def test_a_layer_inside_a_conditional(self):
    training = tf.placeholder(tf.bool, [])

    def model(x):
      return tf.reduce_mean(tf.cond(
          training, lambda: towers.batch_norm(2.0 * x, training=True),
          lambda: x))

    with self.assertRaisesRegex(ValueError, "got an update inside a `tf.cond`"):
      found(model, 2)

  def test_weighted_moments(self):
    """They are no moments of the layer's input alone."""

    def model(x):
      moving = tf.get_variable("moving", [4], trainable=False)
      mean, _ = tf.nn.weighted_moments(x, [0], tf.abs(x[:, :1]))
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                           moving.assign_sub(0.1 * (moving - mean)))
      return tf.reduce_mean(x)

    with self.assertRaisesRegex(
        ValueError, "`moving` must move by .* something else than the moments"):
      found(model, 1)


if __name__ == "__main__":
  tf.test.main()
