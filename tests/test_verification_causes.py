"""Tests for towers.verification_causes; see also those of verification."""

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from towers import verification_causes as causes
from towers import verification_compare as compare


class LocateTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    with tf.name_scope("tower_0"):
      self.x = tf.placeholder(tf.float32, [None, 2], name="x")
      with tf.name_scope("layer"):
        self.centre = tf.reduce_mean(self.x, axis=0, name="centre")
        self.y = tf.subtract(self.x, self.centre, name="y")
      self.losses = tf.reduce_sum(self.y, axis=1, name="losses")
      self.loss = tf.reduce_mean(self.losses, name="loss")

  def forward(self, **kinds):
    graph = tf.get_default_graph()
    gap = compare.Gap(1.0, 0.0, ())
    return causes.Forward(
        "tower_0/", {op: k for k, op in enumerate(graph.get_operations())},
        {getattr(self, name).name: compare.Relation(kind, gap)
         for name, kind in kinds.items()}, set(), set(), set(), False)

  def test_first_rows_that_differ_and_what_is_behind(self):
    forward = self.forward(
        x=compare.ROWS, centre=compare.MEAN, y=compare.OTHER_ROWS,
        losses=compare.OTHER_ROWS, loss=compare.OTHER)
    cause = causes.locate(forward, self.loss)
    self.assertEqual(cause.rule, "statistic_of_own_rows")
    self.assertEqual(cause.operation, "layer/centre")
    self.assertEqual(cause.layer, "layer")
    self.assertIn("`layer/centre` (Mean) takes a statistic", str(cause))
    # Of a loss that is right by chance, too.
    self.assertEqual(causes.locate_behind(forward, self.loss), cause)

  def test_goes_back_through_what_has_no_counterpart(self):
    forward = self.forward(x=compare.OTHER_ROWS, loss=compare.OTHER)
    self.assertEqual(causes.locate(forward, self.loss).operation, "x")

  def test_stops_at_rows_that_are_right(self):
    forward = self.forward(
        x=compare.OTHER_ROWS, losses=compare.ROWS, loss=compare.SUM)
    cause = causes.locate(forward, self.loss)
    self.assertEqual(cause.rule, "sum_over_rows")
    self.assertEqual(cause.operation, "loss")
    self.assertIsNone(causes.locate_behind(forward, self.loss))


class MakeTest(tf.test.TestCase):

  def test_of_a_variable(self):
    cause = causes.make("update_in_each_tower", "steps")
    self.assertEqual(cause.layer, "steps")
    self.assertStartsWith(str(cause), "`steps` changes a variable in each")

  def test_of_the_whole_model(self):
    self.assertStartsWith(str(causes.make("towers_differ", "")),
                          "The model cannot be built")


if __name__ == "__main__":
  tf.test.main()
