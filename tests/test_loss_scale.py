"""Tests of the factor that keeps gradients of 16 bits from vanishing."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import towers
import training_cases as cases

MOMENTUM = lambda: tf.train.MomentumOptimizer(0.3, 0.9)


def normalised(features, ids, labels):
  """Batch norm between two layers."""
  del ids, labels
  x = features
  for name in ("one", "two"):
    x = tf.matmul(x, tf.get_variable(name, [3, 3], features.dtype))
    x = towers.batch_norm(x, training=True, momentum=0.5)
  return tf.reduce_mean(tf.square(tf.tanh(x) - features))


class LossScaleTest(parameterized.TestCase):

  @parameterized.parameters(1, 2, 3)
  def test_dynamic_scale_halves_and_doubles(self, num_towers):
    trainer = cases.Trainer(
        num_towers, cases.towers_step(
            MOMENTUM,
            loss_scale=towers.DynamicLossScale(8.0, growth_steps=2)))
    good, bad = cases.batch(4), cases.batch(4)
    bad[0][0, 0] = np.inf
    scales = []
    with trainer.session():
      scale, = trainer.graph.loss_scales
      for values in (good, good, good, bad, good, good, bad, bad, bad, bad, bad,
                     bad):
        trainer.step(values)
        scales.append(float(trainer.evaluate(scale)))
    self.assertEqual(scales, [8, 16, 16, 8, 8, 16, 8, 4, 2, 1, 1, 1])
    self.assertFalse(scale.trainable)

  @parameterized.parameters(*itertools.product(
      (1, 2, 3), (tf.float32, tf.float64)))
  def test_through_batch_norm_it_changes_nothing(self, num_towers, dtype):
    results = []
    for scale in (None, 512.0):
      trainer = cases.Trainer(
          num_towers, cases.towers_step(MOMENTUM, loss_scale=scale),
          model_fn=normalised, dtype=dtype)
      with trainer.session():
        for k in range(3):
          trainer.step(cases.batch(5 + k, k))
        results.append(trainer.variables())
    for name, value in results[0].items():
      np.testing.assert_allclose(results[1][name], value, rtol=1e-5, atol=1e-6)

  def test_scale_is_saved(self):
    trainer = cases.Trainer(
        2, cases.towers_step(MOMENTUM, loss_scale="dynamic"))
    with trainer.session():
      self.assertIn("loss_scale", trainer.variables())

  @parameterized.parameters(1, 2, 3, 4)
  def test_small_gradients_of_float16_survive(self, num_towers):
    """2**-26 is zero in float16; times a scale of 2**12 it is not."""

    def model(features, ids, labels):
      del ids, labels
      weight = tf.get_variable("weight", [], tf.float32,
                               initializer=tf.ones_initializer())
      small = tf.cast(features, tf.float16) * tf.cast(weight, tf.float16)
      return tf.reduce_mean(tf.cast(small * np.float16(2.0**-13), tf.float32))

    sizes = {}
    for scale in (None, 2.0**12):
      trainer = cases.Trainer(
          num_towers, cases.towers_step(
              lambda: tf.train.GradientDescentOptimizer(2.0**26),
              loss_scale=scale), model_fn=model, dtype=tf.float32)
      values = cases.batch(5)
      values[0] = np.full([5, 3], 2.0**-12, np.float32)
      with trainer.session():
        trainer.step(values)
        sizes[scale] = 1 - trainer.variables()["weight"]
    np.testing.assert_allclose(sizes[2.0**12], 2.0, rtol=2e-2)
    self.assertNotAlmostEqual(float(sizes[None]), 2.0, delta=0.05)

  @parameterized.parameters(*itertools.product(
      (1, 2, 3, 4), (tf.float16, tf.bfloat16)))
  def test_of_variables_of_16_bits(self, num_towers, dtype):
    """1 / 2**26 is zero in float16, so the division takes more bits."""

    def model(features, ids, labels):
      del ids, labels
      weight = tf.get_variable("weight", [], dtype,
                               initializer=tf.ones_initializer())
      return tf.reduce_mean(
          tf.cast(weight, tf.float32) * features * 2.0**-14)

    trainer = cases.Trainer(
        num_towers, cases.towers_step(
            lambda: tf.train.GradientDescentOptimizer(2.0**13),
            loss_scale=2.0**26), model_fn=model, dtype=tf.float32)
    values = cases.batch(5)
    values[0] = np.ones([5, 3], np.float32)
    with trainer.session():
      trainer.step(values)
      weight = np.float32(trainer.variables()["weight"])
    np.testing.assert_allclose(weight, 0.5, rtol=2.0**-7)

  def test_scale_grows_no_further_than_float32(self):
    trainer = cases.Trainer(
        2, cases.towers_step(
            MOMENTUM, loss_scale=towers.DynamicLossScale(2.0**127, 1)),
        dtype=tf.float64)
    with trainer.session():
      for _ in range(3):
        trainer.step(cases.batch(4))
      scale, = trainer.graph.loss_scales
      self.assertEqual(trainer.evaluate(scale), np.float32(2.0**127))

  def test_each_minimize_has_a_scale_of_its_own(self):
    trainer = cases.Trainer(
        2, cases.towers_step(MOMENTUM, loss_scale="dynamic"))
    with trainer._graph.as_default():
      trainer.graph.minimize(MOMENTUM(), loss_scale="dynamic")
    one, other = trainer.graph.loss_scales
    self.assertEqual((one.op.name, other.op.name),
                     ("loss_scale", "loss_scale_1"))


if __name__ == "__main__":
  absltest.main()
