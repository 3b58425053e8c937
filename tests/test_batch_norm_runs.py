"""Tests for tools/batch_norm_runs.py."""

import functools

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from tools import batch_norm_runs
from tools import datasets

DIGITS = batch_norm_runs.Setting("digits", rows=2, steps=2, num_towers=3,
                                 evaluations=2)
SHAPES = batch_norm_runs.Setting("shapes", rows=1, steps=2, num_towers=2,
                                 evaluations=1, width=1, image_size=32)


@functools.cache
def run(setting, contender, seed=0):
  """Several tests look at the same runs."""
  data = datasets.load(setting.dataset, image_size=setting.image_size)
  return batch_norm_runs.measure(setting, contender, seed, data)


class MeasureTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(DIGITS, SHAPES)
  def test_whole_batch_equals_one_device(self, setting):
    one, whole = run(setting, "one device"), run(setting, "whole batch")
    self.assertLen(one.losses, setting.evaluations)
    self.assertAllClose(one.losses, whole.losses, rtol=1e-4, atol=0.0)
    # A test image or pixel on the verge may fall to either side.
    self.assertAllClose(one.scores, whole.scores, rtol=0.0, atol=3e-3)

  def test_per_tower_does_not(self):
    one, per_tower = run(DIGITS, "one device"), run(DIGITS, "per tower")
    self.assertGreater(abs(one.losses[0] - per_tower.losses[0]), 1e-2)

  def test_seeds_differ(self):
    losses = [run(DIGITS, "one device", seed).losses[0] for seed in (0, 1)]
    self.assertGreater(abs(losses[0] - losses[1]), 1e-2)

  def test_learns_digits(self):
    setting = batch_norm_runs.Setting("digits", rows=16, steps=60,
                                      num_towers=1, evaluations=3)
    scores = run(setting, "one device").scores
    self.assertLen(scores, 3)
    self.assertBetween(scores[0], 0.0, scores[-1])
    self.assertBetween(scores[-1], 0.7, 1.0)
    # Of 359 test images.
    self.assertAllClose(np.round(np.multiply(scores, 359)),
                        np.multiply(scores, 359))

  def test_key_tells_runs_apart(self):
    keys = [batch_norm_runs.key_of(setting, contender, seed)
            for setting in (DIGITS, SHAPES)
            for contender in batch_norm_runs.CONTENDERS for seed in (0, 1)]
    self.assertLen({str(key) for key in keys}, 12)
    self.assertEqual(run(DIGITS, "one device").key, keys[0])


class SettingTest(tf.test.TestCase):

  def test_points_are_evenly_spaced_and_end_with_the_last_step(self):
    setting = batch_norm_runs.Setting("digits", rows=2, steps=10,
                                      evaluations=4)
    self.assertEqual(setting.points, [2, 5, 7, 10])

  def test_titles(self):
    self.assertEqual(SHAPES.title, "U-Net on shapes, 2 towers of 1 image")
    self.assertEqual(DIGITS.title, "ResNet-8 on digits, 3 towers of 2 images")
    self.assertEqual(SHAPES.metric, "mean IoU")
    self.assertEqual(DIGITS.metric, "accuracy")


if __name__ == "__main__":
  tf.test.main()
