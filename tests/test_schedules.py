"""Tests for tools.schedules."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from tools import schedules

STEPS = 40


class SchedulesTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(
      ("cosine", 0.05, lambda p: (1.0 + np.cos(np.pi * p)) / 2.0),
      ("linear", 0.25, lambda p: 1.0 - p),
      ("constant", 1.0, np.ones_like),
      ("constant", 0.0, np.ones_like),
      ("steps", 0.0, lambda p: np.repeat([1.0, 0.1, 0.01], [20, 10, 10])))
  def test_rate(self, schedule, warm_up, factor):
    step = tf.placeholder(tf.int64, [])
    rate = schedules.learning_rate(
        schedule, 0.2, global_step=step, steps=STEPS, warm_up=warm_up)
    with self.session() as sess:
      rates = [sess.run(rate, {step: value}) for value in range(STEPS)]
    progress = (np.arange(STEPS) + 0.5) / STEPS
    growth = np.minimum(progress / warm_up, 1.0) if warm_up else 1.0
    self.assertAllClose(rates, 0.2 * growth * factor(progress))
    self.assertGreater(min(rates), 0.0)

  @parameterized.parameters(
      ("cosin", 0.0, "`schedule` must be one of cosine, .*: got 'cosin'"),
      ("cosine", 1.5, "`warm_up` must be a part .* from 0 to 1, got 1.5"))
  def test_rejects(self, schedule, warm_up, message):
    with self.assertRaisesRegex(ValueError, message):
      schedules.learning_rate(schedule, 1.0, global_step=tf.constant(0),
                              steps=9, warm_up=warm_up)


if __name__ == "__main__":
  tf.test.main()
