"""Tests for towers.verification_check; see also those of verification."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import towers
from towers import verification
from towers import verification_check as check


class MessageTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("plain", "Too few.\nMore.", "Too few."),
      ("node", "Graph execution error:\n\nDetected at node 'x' defined at:\n"
       "    File \"a.py\", line 6\nNode: 'x'\nWrong size\n\t [[{{node x}}]]",
       "Wrong size"),
      ("roots", "Graph execution error:\n\nDetected at node 'x' defined at:\n"
       "Node: 'x'\nDetected at node 'x' defined at:\nNode: 'x'\n2 root error(s)"
       " found.\n  (0) INVALID_ARGUMENT: Wrong size\n\t [[{{node x}}]]\n"
       "  (1) INVALID_ARGUMENT: Other", "Wrong size"),
  )
  def test_says_what_is_wrong(self, text, expected):
    self.assertEqual(check.message_of(ValueError(text)), expected)
    self.assertEqual(check.message_of(
        tf.errors.InvalidArgumentError(None, None, text)), expected)

  def test_an_error_without_text(self):
    self.assertEqual(check.message_of(ValueError()), "ValueError")


class DifferencesTest(tf.test.TestCase):

  def test_shapes_and_missing_gradients_are_told(self):
    def model_fn(x):
      w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
      v = tf.get_variable("v", [2], initializer=tf.ones_initializer())
      alone = towers.current_tower().count == 1
      x = x * w + (v if alone else tf.stop_gradient(v))
      return {"loss": tf.reduce_mean(x), "pairs": x[:2]}

    report = verification.verify(
        model_fn, np.arange(10, dtype=np.float32).reshape(5, 2), 2)
    output, gradient = report.differences[:2]
    if output.kind != "output":
      output, gradient = gradient, output
    self.assertEqual((output.name, output.message), (
        "pairs", "Its shape is [4, 2], on one device [2, 2]."))
    self.assertTrue(np.isnan(output.largest))
    gradient = next(d for d in report.differences if d.kind == "gradient")
    self.assertEqual((gradient.name, gradient.message),
                     ("v", "Only one device has a gradient."))

  def test_a_gather_beyond_the_rows_of_a_tower(self):
    def model_fn(x):
      w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
      return tf.reduce_mean(tf.gather(x * w, [4], name="fifth"))

    report = verification.verify(model_fn, np.ones([5, 2], np.float32), 2,
                                 rows=[5])
    difference, = report.differences
    self.assertEqual(difference.kind, "error")
    self.assertEqual(difference.cause.rule, "position_in_batch")
    self.assertEqual(difference.cause.operation, "fifth")
    self.assertIn("indices[0] = 4 is not in [0,", difference.message)
    self.assertIn(difference.message.split(" is ")[0], str(report))


if __name__ == "__main__":
  tf.test.main()
