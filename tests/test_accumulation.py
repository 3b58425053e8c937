"""Tests of gradients that several runs add up for one update."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import towers
import training_cases as cases

MOMENTUM = lambda: tf.train.MomentumOptimizer(0.3, 0.9)


class AccumulationTest(parameterized.TestCase):

  @parameterized.parameters(1, 2, 3, 4)
  def test_c026_moves_once_per_update(self, num_towers):
    trainer = cases.Trainer(
        num_towers,
        cases.towers_step(MOMENTUM, accumulate_steps=4))
    with trainer.session():
      start = trainer.variables()
      for number in range(1, 9):
        before = trainer.variables()
        trainer.step(cases.batch(4, number))
        after = trainer.variables()
        self.assertEqual(after["global_step"], number // 4)
        # Update ops run at each.
        self.assertNotEqual(after["seen"], before["seen"])
        if number % 4:
          np.testing.assert_array_equal(after["weights"], before["weights"])
        else:
          self.assertTrue(np.any(after["weights"] != before["weights"]))
    self.assertNotIn("accumulated_runs", start)
    self.assertFalse([name for name in start if "accumulated" in name])

  def test_c026_initialising_starts_a_new_sum(self):
    """A run that continues from a checkpoint is not led by what was left."""
    results = []
    for interrupted in (False, True):
      trainer = cases.Trainer(
          2, cases.towers_step(MOMENTUM, accumulate_steps=2))
      with trainer.session():
        if interrupted:
          trainer.step(cases.batch(4, 7))
          with trainer._graph.as_default():
            trainer.evaluate(tf.local_variables_initializer())
            for variable in tf.global_variables():
              if variable.op.name == "seen":
                trainer.evaluate(variable.initializer)
        trainer.step(cases.batch(4, 1))
        trainer.step(cases.batch(4, 2))
        results.append(trainer.variables())
    for name in results[0]:
      np.testing.assert_array_equal(results[0][name], results[1][name], name)

  def test_units_of_a_tower_spec_weigh(self):
    def model(features, ids, labels):
      del ids
      valid = tf.cast(labels, features.dtype)
      w = tf.get_variable("w", [], features.dtype,
                          initializer=tf.ones_initializer())
      count = tf.reduce_sum(valid)
      loss = tf.math.divide_no_nan(
          tf.reduce_sum(w * features[:, 0] * valid), count)
      return towers.TowerSpec(loss, weight=count)

    trainer = cases.Trainer(
        3, cases.towers_step(lambda: tf.train.GradientDescentOptimizer(1.0),
                             accumulate_steps=2), model_fn=model)
    first, second = cases.batch(5, 1), cases.batch(7, 2)
    first[2][:] = [1, 0, 0, 0, 0]
    second[2][:] = [0, 1, 1, 1, 0, 1, 1]
    with trainer.session():
      trainer.step(first)
      trainer.step(second)
      got = trainer.variables()["w"]
    features = np.concatenate([first[0], second[0]])[:, 0]
    valid = np.concatenate([first[2], second[2]])
    np.testing.assert_allclose(got, 1 - np.sum(features * valid) / valid.sum())

  @parameterized.parameters(1, 2, 3, 4)
  def test_with_frozen_batch_norm_it_is_one_large_batch(self, num_towers):
    def model(features, ids, labels):
      del ids, labels
      x = tf.matmul(features, tf.get_variable("w", [3, 3], features.dtype))
      x = towers.batch_norm(x, training=False)
      return tf.reduce_mean(tf.square(tf.tanh(x) - features))

    batches = [cases.batch(size, size) for size in (3, 7, 2)]
    joined = [np.concatenate(parts) for parts in zip(*batches)]
    plain = cases.Trainer(None, cases.plain_step(MOMENTUM), model_fn=model)
    many = cases.Trainer(
        num_towers, cases.towers_step(MOMENTUM, accumulate_steps=3),
        model_fn=model)
    with plain.session(), many.session():
      for _ in range(2):
        plain.step(joined)
        for values in batches:
          many.step(values)
      expected, got = plain.variables(), many.variables()
    self.assertEqual(expected.keys(), got.keys())
    for name, value in expected.items():
      np.testing.assert_allclose(got[name], value, rtol=1e-10, atol=1e-13)

  def test_unknown_shape_is_refused(self):
    def model(features, ids, labels):
      del ids, labels
      size = tf.placeholder_with_default(3, [])
      w = tf.get_variable("w", initializer=tf.ones([size], tf.float64),
                          validate_shape=False)
      return tf.reduce_mean(features * w)

    with self.assertRaisesRegex(
        ValueError, "`accumulate_steps` must be 1 for variables of unknown"):
      cases.Trainer(2, cases.towers_step(MOMENTUM, accumulate_steps=2),
                    model_fn=model)

  def test_variable_without_gradient_stays_without(self):
    def model(features, ids, labels):
      del ids, labels
      tf.get_variable("unused", [2], features.dtype)
      w = tf.get_variable("w", [3], features.dtype)
      return tf.reduce_mean(features * w)

    trainer = cases.Trainer(
        2, cases.towers_step(MOMENTUM, accumulate_steps=2), model_fn=model)
    with trainer.session():
      before = trainer.variables()
      trainer.step(cases.batch(4))
      trainer.step(cases.batch(4))
      after = trainer.variables()
    self.assertNotIn("unused/Momentum", after)
    np.testing.assert_array_equal(before["unused"], after["unused"])
    self.assertTrue(np.any(before["w"] != after["w"]))


if __name__ == "__main__":
  absltest.main()
