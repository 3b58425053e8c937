"""Tests for towers.lint_losses."""

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import loop_cases
import towers
from towers import inspection

Loop = loop_cases.Loop
LOSSES = tf.GraphKeys.LOSSES
REGULARIZATION = tf.GraphKeys.REGULARIZATION_LOSSES

AGAIN = ["regularization_counted_again"]
LEFT_OUT = ["regularization_left_out"]


def decayed(kernel):
  return tf.multiply(tf.nn.l2_loss(kernel), 1e-4, name="decay")


def total_loop(total, num_towers, scale=1.0, regularizer=decayed):
  """A loop that differentiates one total of the towers' losses.

  Args:
    total: Returns the total of the list of losses.
    num_towers: Number of towers.
    scale: What each loss is multiplied by, as slim does with 1/N.
    regularizer: Of the shared variable.
  """
  with tf.Graph().as_default() as graph:
    losses = []
    for i in range(num_towers):
      with tf.name_scope(f"clone_{i}"), tf.variable_scope("", reuse=i > 0):
        kernel = loop_cases.weights(regularizer=regularizer)
        losses.append(scale * tf.reduce_mean(
            tf.square(tf.matmul(loop_cases.inputs(), kernel))))
    train_op = tf.train.GradientDescentOptimizer(0.1).minimize(total(losses))
  return Loop(graph, train_op)


def excess(built):
  found, = inspection.report(built.graph, train_op=built.train_op).findings
  return found.what


class CountedAgainTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("mean", 1.0, lambda x, n: tf.add_n(x) / n),
      ("pack", 1.0, lambda x, n: tf.reduce_mean(x)),
      ("scaled", None, lambda x, n: tf.add_n(x)),
      ("sum_of_pack", None, lambda x, n: tf.reduce_sum(tf.stack(x))))
  def test_added_once_to_the_mean(self, scale, mean):
    for n in (2, 3, 4):
      built = total_loop(
          lambda losses, n=n: mean(losses, n) + tf.add_n(
              tf.get_collection(REGULARIZATION)), n, scale or 1.0 / n)
      self.assertEmpty(loop_cases.rules(built))

  @parameterized.named_parameters(("two", 2), ("three", 3), ("four", 4))
  def test_added_to_each_scaled_loss_c028(self, n):
    built = total_loop(
        lambda losses: tf.add_n(
            [x + tf.add_n(tf.get_collection(REGULARIZATION)) for x in losses]),
        n, 1.0 / n)
    self.assertEqual(loop_cases.rules(built), AGAIN)
    self.assertIn(f"up to {n} times", excess(built))

  def test_added_to_each_loss_before_the_mean(self):
    built = total_loop(
        lambda losses: tf.add_n(
            [x + tf.add_n(tf.get_collection(REGULARIZATION))
             for x in losses]) / 3.0, 3)
    self.assertEmpty(loop_cases.rules(built))

  def test_sum_of_all_losses(self):
    """Everything counts three times, in the right proportion."""
    built = total_loop(
        lambda losses: tf.add_n(
            [x + tf.add_n(tf.get_collection(REGULARIZATION))
             for x in losses]), 3)
    self.assertEmpty(loop_cases.rules(built))

  def collected(self, in_tower):
    def loss(images, index):
      with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        tf.add_to_collection(LOSSES, decayed(loop_cases.weights()))
        tf.add_to_collection(LOSSES, loop_cases.linear_loss(images, index))
      return tf.add_n(tf.get_collection(LOSSES, in_tower.format(index)))

    return loop_cases.loop(loss, 3)

  def test_collection_of_the_old_tutorial(self):
    self.assertEmpty(loop_cases.rules(self.collected("tower_{}/")))
    # Read without a scope, tower 2 has three decays, and the others' losses.
    self.assertIn("reads_another_tower", loop_cases.rules(self.collected("")))

  @parameterized.named_parameters(
      ("sum", lambda losses: tf.add_n(losses) / 3.0),
      ("pack", tf.reduce_mean))
  def test_decay_of_each_tower_added_after_the_mean(self, mean):
    with tf.Graph().as_default() as graph:
      losses = []
      for i in range(3):
        with tf.name_scope(f"tower_{i}"), tf.variable_scope(
            "", reuse=tf.AUTO_REUSE):
          tf.add_to_collection(
              REGULARIZATION, decayed(loop_cases.weights()))
          losses.append(loop_cases.linear_loss(loop_cases.inputs(), i))
      total = mean(losses) + tf.add_n(
          tf.get_collection(REGULARIZATION))
      train_op = tf.train.GradientDescentOptimizer(0.1).minimize(total)
    self.assertEqual(loop_cases.rules(Loop(graph, train_op)), AGAIN)

  def test_sum_that_is_only_shown(self):
    built = total_loop(
        lambda losses: tf.add_n(losses) / 2.0 + tf.add_n(
            tf.get_collection(REGULARIZATION)), 2)
    with built.graph.as_default():
      tf.summary.scalar("decay", 5.0 * tf.add_n(
          tf.get_collection(REGULARIZATION)))
    self.assertEmpty(loop_cases.rules(built))


class LeftOutTest(parameterized.TestCase):

  def test_collection_filtered_by_the_tower_c028(self):
    def loss(images, index):
      kernel = loop_cases.weights(regularizer=decayed)
      terms = tf.get_collection(REGULARIZATION, f"tower_{index}/")
      return tf.add_n([tf.reduce_mean(tf.matmul(images, kernel))] + terms)

    self.assertEqual(loop_cases.rules(
        total_loop(lambda losses: tf.add_n(losses) / 2.0, 2)), LEFT_OUT)
    self.assertEqual(loop_cases.rules(loop_cases.loop(loss)), LEFT_OUT)

  @parameterized.named_parameters(
      ("scaled", decayed), ("plain", tf.nn.l2_loss),
      ("named", lambda v: tf.identity(tf.add_n([tf.nn.l2_loss(v)]))),
      ("absolute", lambda v: 0.1 * tf.reduce_sum(tf.abs(v))))
  def test_counted(self, regularizer):
    for n in (2, 3):
      built = total_loop(
          lambda losses, n=n: tf.add_n(losses) / n + tf.add_n(
              tf.get_collection(REGULARIZATION)), n, regularizer=regularizer)
      self.assertEmpty(loop_cases.rules(built))

  def test_evaluation_needs_none(self):
    with tf.Graph().as_default() as graph:
      kernel = loop_cases.weights(regularizer=decayed)
      for i in range(2):
        with tf.name_scope(f"tower_{i}"):
          tf.matmul(loop_cases.inputs(), kernel)
    self.assertEmpty(inspection.report(graph).findings)


class TowersTest(parameterized.TestCase):

  @parameterized.product(num_towers=(2, 3, 4), rows=(None, 7),
                         inside=(True, False))
  def test_finds_nothing(self, num_towers, rows, inside):
    def model(images):
      kernel = tf.get_variable("kernel", [4, 3], regularizer=decayed)
      loss = tf.reduce_mean(tf.square(tf.matmul(images, kernel)))
      if inside:
        loss += tf.add_n(tf.get_collection(REGULARIZATION))
      return loss

    with tf.Graph().as_default() as graph:
      built = towers.build_towers(model, num_towers,
                                  inputs=loop_cases.inputs(rows))
      loss = built.loss
      if not inside:
        loss += built.regularization_loss
      train_op = built.minimize(tf.train.GradientDescentOptimizer(0.1),
                                loss=loss)
    self.assertEmpty(loop_cases.rules(Loop(graph, train_op)))

  def test_finds_what_the_model_leaves_out(self):
    with tf.Graph().as_default() as graph:
      built = towers.build_towers(
          lambda images: tf.reduce_mean(tf.matmul(images, tf.get_variable(
              "kernel", [4, 3], regularizer=decayed))), 2,
          inputs=loop_cases.inputs())
      train_op = built.minimize(tf.train.GradientDescentOptimizer(0.1))
    self.assertEqual(loop_cases.rules(Loop(graph, train_op)), LEFT_OUT)


if __name__ == "__main__":
  absltest.main()
