"""Tests for tools/synced_layers.py."""

import contextlib
import io
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tools import synced_layers

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESNET = f"--model={ROOT}/models/resnet.py:logits"
IMAGES = "--inputs=float32[?,16,16,3]"
ARGUMENTS = '--arguments={"num_classes": 10, "training": true, "depth": 14}'

MODEL = """
import tensorflow.compat.v1 as tf

def plain(images, labels):
  gamma = tf.get_variable("gamma", [3])
  x, _, _ = tf.nn.fused_batch_norm(images, gamma, gamma, is_training=True)
  mean, variance = tf.nn.moments(x, [0, 1, 2], name="stats")
  instance, _ = tf.nn.moments(x, [1, 2], name="instance")
  return tf.reduce_mean(x - mean) + tf.reduce_mean(instance)

def layer(images):
  norm = tf.keras.layers.BatchNormalization(name="norm")
  return {"y": norm(images, training=True)}

def looping(images):
  def body(i, x):
    return i + 1, x - tf.nn.moments(x, [0])[0]
  return tf.while_loop(lambda i, _: i < 2, body, [0, images])[1]
"""


def run(*arguments):
  """Returns status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = synced_layers.main(["synced_layers.py", *arguments])
  return status, out.getvalue(), err.getvalue()


class SyncedLayersTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    synced_layers.FLAGS.unparse_flags()
    for name in ("model", "inputs", "arguments", "num_towers"):
      synced_layers.FLAGS[name].unparse()
    self.file = self.create_tempfile("model.py", MODEL).full_path

  def test_lists_every_layer_of_a_resnet(self):
    status, out, err = run(RESNET, IMAGES, ARGUMENTS, "--num_towers=3")
    self.assertEqual((status, err), (0, ""))
    lines = out.splitlines()
    self.assertEqual(lines[-1], "13 layers meet.")
    self.assertRegex(
        lines[1],
        r"^conv/batch_normalization +towers.batch_norm +\[0, 1, 2\] +3$")

  def test_lists_layers_of_a_file_of_plain_code(self):
    status, out, _ = run(f"--model={self.file}:plain",
                         "--inputs=float32[8,4,4,3],int64[8]")
    self.assertEqual(status, 0)
    self.assertIn("tf.nn.fused_batch_norm", out)
    self.assertRegex(out, r"stats +tf.nn.moments +\[0, 1, 2\] +2")
    self.assertNotIn("instance", out)
    self.assertIn("2 layers meet.", out)

  def test_lists_layers_of_keras(self):
    status, out, _ = run(f"--model={self.file}:layer",
                         "--inputs=float32[?,4,4,3]")
    self.assertEqual(status, 0)
    self.assertRegex(out, r"norm +\w+\.BatchNormalization +\[0, 1, 2\] +2")

  @parameterized.named_parameters(
      ("unknown_flag", ["--modle=x"], "Unknown command line flag 'modle'"),
      ("no_model", [], "`--model` must be given"),
      ("no_file", ["--model=none.py:f"], "`model` must be a file or module"),
      ("no_module", ["--model=none.such:f"], "got 'none.such:f'"),
      ("no_function", [RESNET + "x"], "has no attribute 'logitsx'"),
      ("no_shape", [RESNET, "--inputs=float32"], "got 'float32'"),
      ("no_type", [RESNET, "--inputs=float33[3]"], r"got 'float33\[3\]'"),
      ("no_json", [RESNET, "--arguments=depth"], "must be a JSON object"),
      ("positional", [RESNET, "stray"], "`stray` is no flag"),
      ("no_towers", [RESNET, IMAGES, ARGUMENTS, "--num_towers=0"],
       "`devices` must be at least one tower"),
  )
  def test_rejects(self, arguments, message):
    status, out, err = run(*arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, message)
    self.assertLen(err.strip().splitlines(), 1)

  def test_names_a_layer_that_cannot_be_converted(self):
    status, _, err = run(f"--model={self.file}:looping",
                         "--inputs=float32[?,3]")
    self.assertEqual(status, 2)
    self.assertRegex(err, "`while/moments`.*must not stand inside a while loop")


if __name__ == "__main__":
  absltest.main()
