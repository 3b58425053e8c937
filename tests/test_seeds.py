"""Tests of random ops: different in each tower, repeatable, or warned about."""

import warnings

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


def build(model_fn, num_towers=2):
  """Builds; returns the `TowerGraph` and the texts of warnings."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    graph = towers.build_towers(model_fn, testing.devices(num_towers),
                                inputs=tf.ones([4, 8]))
  return graph, [str(w.message) for w in caught if "seed" in str(w.message)]


def dropout_model(seed=None):
  def model(x):
    return {"y": tf.nn.dropout(x, rate=0.5, seed=seed, name="drop")}

  return model


class SeedsTest(parameterized.TestCase):

  def masks(self, num_towers, seed=None):
    results = []
    for _ in range(2):
      with tf.Graph().as_default():
        tf.set_random_seed(7)
        graph, _ = build(dropout_model(seed), num_towers)
        with testing.session() as sess:
          results.append(
              sess.run([tower.outputs["y"] for tower in graph.towers]))
    return results

  @parameterized.parameters(2, 3, 4)
  def test_c036_masks_differ_and_repeat(self, num_towers):
    first, second = self.masks(num_towers)
    for k in range(num_towers):
      np.testing.assert_array_equal(first[k], second[k])
      for other in range(k):
        rows = min(len(first[k]), len(first[other]))
        self.assertTrue(np.any(first[k][:rows] != first[other][:rows]))

  def test_c036_one_tower_draws_what_plain_code_draws(self):
    with tf.Graph().as_default():
      tf.set_random_seed(7)
      plain = dropout_model()(tf.ones([4, 8]))["y"]
      with testing.session() as sess:
        expected = sess.run(plain)
    first, _ = self.masks(1)
    np.testing.assert_array_equal(first[0], expected)

  def test_c036_seed_of_an_op_is_warned_of_once(self):
    def model(x):
      x = tf.nn.dropout(x, rate=0.5, seed=3, name="first")
      x = tf.nn.dropout(x, rate=0.5, name="fine")
      x += tf.random.stateless_uniform([8], [1, 2], name="stateless")
      return {"y": tf.nn.dropout(x, rate=0.5, seed=4, name="second")}

    with tf.Graph().as_default():
      _, texts = build(model, 3)
    text, = texts
    self.assertRegex(
        text, "same numbers in every tower: .*`first/.*` .seed 3.*`stateless.*"
        "`second/.*` .seed 4.*Leave out their `seed`")
    self.assertNotIn("fine", text)

  def test_seed_by_tower_draws_no_warning(self):
    def model(x):
      seed = 3 + towers.current_tower().index
      return {"y": tf.nn.dropout(x, rate=0.5, seed=seed)}

    with tf.Graph().as_default():
      tf.set_random_seed(7)
      graph, texts = build(model)
      self.assertEmpty(texts)
      with testing.session() as sess:
        one, other = sess.run([t.outputs["y"] for t in graph.towers])
    self.assertTrue(np.any(one != other))

  def test_initial_values_draw_no_warning(self):
    def model(x):
      w = tf.get_variable("w", [8],
                          initializer=tf.random_normal_initializer(seed=1))
      v = tf.Variable(tf.random.normal([8], seed=2))
      return tf.reduce_mean(x * w * v)

    with tf.Graph().as_default():
      _, texts = build(model)
    self.assertEmpty(texts)

  def test_one_tower_draws_no_warning(self):
    with tf.Graph().as_default():
      _, texts = build(dropout_model(3), 1)
    self.assertEmpty(texts)

  def test_inside_a_conditional(self):
    def model(x):
      y = tf.cond(tf.reduce_sum(x) > 0,
                  lambda: tf.nn.dropout(x, rate=0.5, seed=5, name="inner"),
                  lambda: x)
      return {"y": y}

    with tf.Graph().as_default():
      _, texts = build(model)
    self.assertLen(texts, 1)
    self.assertIn("inner", texts[0])

  def test_long_lists_are_cut(self):
    def model(x):
      for k in range(15):
        x = tf.nn.dropout(x, rate=0.5, seed=k + 1)
      return {"y": x}

    with tf.Graph().as_default():
      _, texts = build(model)
    self.assertIn("and 5 more", texts[0])


if __name__ == "__main__":
  absltest.main()
