"""Tests for towers.report_text."""

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import loop_cases
import towers
from towers import inspection
from towers import report_text


class FormatTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("none", 0, "0 B"), ("bytes", 999, "999 B"), ("kilo", 1000, "1.0 kB"),
      ("rounded_up", 999_960, "1.0 MB"), ("mega", 1_250_000, "1.2 MB"),
      ("giga", 7_000_000_000, "7.0 GB"), ("tera", 2 * 10**15, "2000.0 TB"))
  def test_size(self, num_bytes, expected):
    self.assertEqual(report_text.size(num_bytes), expected)

  def test_device_name(self):
    self.assertEqual(report_text.device_name(""), "(not set)")
    self.assertEqual(report_text.device_name("/job:worker/device:GPU:1"),
                     "/job:worker/GPU:1")

  def test_table(self):
    self.assertEqual(
        report_text.table(("name", "ops"), [("a", 1), ("bcdef", 1234)]),
        "name     ops\na          1\nbcdef  1,234")

  def test_long_table(self):
    lines = report_text.table(("n",), [(k,) for k in range(1234)]).splitlines()
    self.assertLen(lines, 102)
    self.assertEqual(lines[-1], "and 1,134 more")


class TextTest(parameterized.TestCase):

  def test_of_towers(self):
    with tf.Graph().as_default():
      graph = towers.build_towers(
          lambda x: tf.reduce_mean(tf.matmul(
              towers.batch_norm(x, training=True), loop_cases.weights())),
          3, inputs=loop_cases.inputs(9))
      train_op = graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
      text = str(inspection.report(graph, train_op=train_op))
    self.assertStartsWith(
        text, f"{len(train_op.graph.get_operations())} ops, 3 towers, "
        "0 findings. Train op: Momentum.\n")
    for line in (
        r"tower 2 +\d+  /CPU:2 +same",
        r"/CPU:0 +/CPU:2 +parameters +3 +80 B +0",
        r"batch_normalization +towers.batch_norm +\[0\]",
        r"tower_0/.*AssignSubVariableOp +before",
        r"weights +\[4, 3\] +float32 +48 B +/CPU:0  trainable",
        r"update_ops +2  tower 0: 2",
        r"No findings\."):
      self.assertRegex(text, rf"(?m)^{line}$")

  def test_of_a_wrong_loop(self):
    built = loop_cases.loop(
        lambda x, i: loop_cases.linear_loss(
            (tf.nn.relu(x) if i else x) + tf.random.uniform([4], seed=1), i),
        3)
    text = str(inspection.report(built.graph))
    self.assertIn("(not given, found)", text)
    for line in (
        r"FINDING same_seed", r"  What to do: Leave out .*",
        r"tower 1 +\d+  /GPU:1 +\d+ ops missing, \d+ more",
        r"\+ Relu = Relu\(images\)", r"- add = AddV2\(images, .*"):
      self.assertRegex(text, rf"(?m)^{line}")
    for line in text.partition("FINDING")[2].splitlines():
      self.assertLessEqual(len(line), 80)

  def test_of_almost_nothing(self):
    with tf.Graph().as_default() as graph:
      tf.no_op()
    text = str(inspection.report(graph))
    self.assertIn("1 ops, 0 towers, 0 findings. No train op is known.", text)
    self.assertIn("Nothing goes from one device to another.", text)


if __name__ == "__main__":
  absltest.main()
