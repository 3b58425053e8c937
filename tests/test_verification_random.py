"""Tests for towers.verification_random."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import towers
from towers import verification
from towers import verification_random as random_lib
from towers import verification_runs as runs

X = np.arange(14, dtype=np.float32).reshape(7, 2)


def sides(model_fn, num_towers=3):
  devices = [f"/cpu:{k}" for k in range(num_towers)]
  return [runs.Side(model_fn, own, inputs=X, rows=None, seed=1, losses=None,
                    options={}) for own in (devices[:1], devices)]


def held(model_fn, rows=7):
  """Returns what is held, and the outputs with it on both sides."""
  one, many = sides(model_fn)
  result = random_lib.hold(random_lib.find(one, many), one, many,
                           inputs=X[:rows], rows=rows)
  outputs = [side.run(side.outputs, X[:rows], feeds) for side, feeds in (
      (one, result.one), (many, result.many))]
  one.close()
  many.close()
  return result, outputs


class HoldTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(("uneven", 7), ("short", 2), ("one", 1))
  def test_towers_get_the_numbers_of_their_rows(self, rows):
    def model_fn(x):
      return {"rows": tf.random.normal(tf.shape(x)),
              "columns": tf.transpose(tf.random.uniform([3, tf.shape(x)[0]])),
              "whole_numbers": tf.random.uniform([tf.shape(x)[0]], maxval=9,
                                                 dtype=tf.int32),
              "stateless": tf.random.stateless_uniform(
                  tf.shape(x), [1, towers.current_tower().index])}

    _, (expected, actual) = held(model_fn, rows)
    names = ["rows", "columns", "whole_numbers", "stateless"]
    for name in names:
      self.assertAllEqual(actual[name], expected[name])
      self.assertLen(actual[name], rows)

  def test_tells_what_towers_draw_alike(self):
    def model_fn(x):
      return {"seed": tf.random.normal(tf.shape(x), seed=5),
              "none": tf.random.normal(tf.shape(x)),
              "shared": tf.random.normal([4], seed=6)[tf.newaxis] + x[:, :1]}

    result, _ = held(model_fn)
    self.assertEqual([draw.name for draw in result.alike],
                     ["random_normal/RandomStandardNormal:0"])
    self.assertEmpty(result.apart)  # By its seed it is what one device has.

  def test_tells_what_towers_draw_apart(self):
    def model_fn(x):
      return {"x": x * tf.random.uniform([])}

    result, (expected, actual) = held(model_fn)
    self.assertLen(result.apart, 1)
    self.assertAllClose(actual["x"], expected["x"])

  def test_what_towers_draw_together_is_held(self):
    def model_fn(x):
      noise = towers.merge(lambda values: tf.random.uniform([]), x)
      return {"x": x * noise}

    result, (expected, actual) = held(model_fn)
    self.assertEmpty(result.apart)
    self.assertAllClose(actual["x"], expected["x"])

  def test_shuffles_of_rows_are_told_and_not_held(self):
    def model_fn(x):
      return {"rows": tf.random.shuffle(x),
              "other": x[:, :1] * tf.cast(tf.random.shuffle([1, 2, 3, 4])[0],
                                          tf.float32)}

    result, (expected, actual) = held(model_fn)
    self.assertEqual([draw.name for draw in result.shuffles],
                     ["RandomShuffle:0"])
    self.assertAllEqual(np.sort(actual["rows"][:3], axis=0), X[:3])
    self.assertAllEqual(actual["other"], expected["other"])

  def test_initial_values_are_no_draws(self):
    def model_fn(x):
      w = tf.get_variable("w", [2], initializer=tf.random_normal_initializer())
      return {"x": x * w}

    one, many = sides(model_fn)
    self.assertEmpty(random_lib.find(one, many))


class RefusalTest(parameterized.TestCase, tf.test.TestCase):

  def check(self, model_fn, message):
    with self.assertRaisesRegex(
        ValueError, f"`hold_random` must be False .*{message}.* outside"):
      verification.verify(model_fn, X, 2, rows=[7])

  def test_in_a_branch(self):
    def model_fn(x):
      return {"x": tf.cond(tf.reduce_sum(x) > -1.0,
                           lambda: x + tf.random.normal(tf.shape(x)),
                           lambda: x)}

    self.check(model_fn, "`cond/random_normal/RandomStandardNormal` .* branch")

  def test_in_a_function(self):
    @tf.function
    def noisy(x):
      return x + tf.random.normal(tf.shape(x))

    self.check(lambda x: {"x": noisy(x)}, "draws in a function")

  def test_of_another_shape(self):
    def model_fn(x):
      return {"x": tf.reduce_sum(tf.random.normal([tf.shape(x)[0] ** 2])) + x}

    self.check(model_fn, r"of shape \[49\] on one device and \[\[16\], \[9\]\]")

  def test_in_other_numbers_of_ops(self):
    def model_fn(x):
      for _ in range(1 + (towers.current_tower().count > 1)):
        x += towers.merge(lambda values: tf.random.uniform([]), x)
      return {"x": x}

    self.check(model_fn, "do not have in common")


if __name__ == "__main__":
  tf.test.main()
