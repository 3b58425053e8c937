"""Tests for tools/verify.py."""

import contextlib
import io
import pathlib

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from tools import examples
from tools import verify

MODEL = '''
import tensorflow.compat.v1 as tf

def _scores(x):
  w = tf.get_variable("w", [x.shape[-1]], initializer=tf.ones_initializer())
  return tf.cast(x, tf.float32) * w

def mean(x, y=None, scale=1.0):
  return tf.reduce_mean(_scores(x)) * scale

def total(x):
  return {"loss": tf.reduce_sum(_scores(x), name="total")}

def alone():
  return tf.square(tf.get_variable("w", []))

def broken(x):
  return tf.reduce_mean(tf.reshape(_scores(x), [1000]))
'''


class VerifyTest(parameterized.TestCase, tf.test.TestCase):

  def run_tool(self, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      status = verify.main(["verify.py", *arguments])
    return status, out.getvalue(), err.getvalue()

  def model(self, name):
    path = pathlib.Path(self.create_tempdir().full_path, "model.py")
    path.write_text(MODEL, encoding="utf-8")
    return f"--model={path}:{name}"

  @parameterized.named_parameters(
      ("alexnet", "alexnet", 32),
      ("unet", "unet", 8), ("fcn", "fcn", 8), ("simclr", "simclr", 4),
      ("dcgan", "dcgan", 8))
  def test_passes_every_model(self, name, size):
    status, out, err = self.run_tool(
        f"--model={name}", "--num_towers=2", f"--image_size={size}",
        "--batch_size=5", "--rows=5")
    self.assertEqual((status, err), (0, ""), out)
    self.assertStartsWith(out, "2 towers compute what one device computes.\n")

  def test_knows_every_depth_of_resnet(self):
    self.assertContainsSubset(["resnet8", "resnet20", "resnet110"],
                              examples.MODELS)

  def test_segmenters_have_pixels_that_do_not_count(self):
    _, (images, labels) = examples.MODELS["unet"](3, 8, True)
    void = np.mean(labels == 255, axis=(1, 2))
    self.assertEqual(images.shape, (3, 8, 8, 3))
    self.assertLen(set(void), 3)

  def test_a_function_of_a_file(self):
    status, out, _ = self.run_tool(
        self.model("mean"), "--inputs=float32[?,4],int32[?]", "--num_towers=3",
        '--arguments={"scale": 2.0}')
    self.assertEqual(status, 0, out)
    self.assertIn("of 7, 6, 2 and 1 rows", " ".join(out.split()))

  def test_a_function_without_inputs(self):
    status, out, _ = self.run_tool(self.model("alone"))
    self.assertEqual(status, 0, out)

  def test_a_fault_makes_the_status_1_and_names_itself(self):
    data = pathlib.Path(self.create_tempdir().full_path, "batch.npz")
    np.savez(data, np.ones([6, 2], np.float32))
    status, out, err = self.run_tool(
        self.model("total"), f"--data={data}", "--rows=6,1")
    self.assertEqual((status, err), (1, ""))
    self.assertStartsWith(
        out, "2 towers do not compute what one device computes.\n")
    self.assertIn("1. sum_over_rows: `total` (Sum) adds up", out)

  @parameterized.named_parameters(
      ("no_model", [], "`--model` must be given: one of convnet"),
      ("unknown_model", ["--model=vgg"], "`--model` must be one of .* got vgg"),
      ("rest", ["--model=convnet", "extra"], "flags only: got extra"),
      ("unknown_flag", ["--modle=convnet"], "modle"),
      ("rows", ["--model=convnet", "--rows=a"], "`--rows` must be .* got a"),
      ("too_many_rows", ["--model=convnet", "--rows=9", "--batch_size=3"],
       "`rows` must be sizes of batches: expected 1 to 3, got 9"),
      ("one_tower", ["--model=convnet", "--num_towers=1"],
       "`devices` must be two or more"),
      ("both", ["--num_towers=2", "--devices=/cpu:0,/cpu:1"],
       "`--num_towers` and `--devices` must not both be given"),
      ("inputs", ["--model=convnet", "--inputs=float32[2]"],
       "`--inputs`, `--data` and `--arguments` must .* got --model=convnet"),
      ("no_file", ["--model=/nowhere.py:f"], "`model` must be a file"),
  )
  def test_flags_that_do_not_fit(self, arguments, message):
    status, out, err = self.run_tool(*arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^verify.py: .*{message}")
    self.assertLen(err.splitlines(), 1)

  @parameterized.named_parameters(
      ("data", "mean", ["--data=/nowhere.npz"], "`--data` must be a file"),
      ("data_and_inputs", "mean", ["--data=a", "--inputs=float32[2]"],
       "`--inputs` and `--data` must not both be given"),
      ("shape", "mean", ["--inputs=float32[2,?]"],
       "`--inputs` must be numbers, of a shape"),
      ("type", "mean", ["--inputs=text[2]"], "`inputs` must be types"),
      ("arguments", "mean", ["--inputs=float32[?,2]", "--arguments=[1]"],
       r"`--arguments` must be a JSON object .* got \[1\]"),
      ("one_device", "broken", ["--inputs=float32[?,2]"],
       "`model_fn` must run on one device: it fails there on 5 rows: "),
  )
  def test_functions_that_do_not_fit(self, name, arguments, message):
    status, out, err = self.run_tool(self.model(name), *arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^verify.py: {message}")
    self.assertLen(err.splitlines(), 1)

  def test_help(self):
    status, out, _ = self.run_tool("--help")
    self.assertEqual(status, 0)
    self.assertIn("python tools/verify.py --model=resnet20", out)
    self.assertIn("--[no]hold_random", out)


if __name__ == "__main__":
  tf.test.main()
