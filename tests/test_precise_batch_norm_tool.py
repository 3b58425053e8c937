"""Tests for tools/precise_batch_norm.py."""

import contextlib
import io

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import run_cases
from tools import precise_batch_norm
from tools import training
from tools import training_options
from unittest import mock


class PreciseBatchNormToolTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    self.data = run_cases.small_dataset()
    self.enter_context(mock.patch.object(
        training.datasets, "load", lambda *_, **__: self.data))

  def train(self, **options):
    return training.run(training_options.Options(
        batch_size=10, steps=2, num_towers=2, logdir=self.folder,
        augment=False, **options))

  def call(self, *arguments):
    """Returns status, output and errors of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      status = precise_batch_norm.main(
          ["precise_batch_norm.py", *arguments])
    return status, out.getvalue(), err.getvalue()

  def test_new_checkpoint(self):
    """Four batches are all training images: statistics are theirs."""
    values = {}
    with run_cases.with_batch_norm():
      self.train()
      for num_towers in (1, 3):
        status, output, errors = self.call(
            f"--logdir={self.folder}", "--num_batches=4",
            f"--num_towers={num_towers}")
        self.assertEqual((status, errors), (0, ""))
        self.assertRegex(
            output, "estimated 2 moving statistics over 4 batches\n"
            r"test accuracy before: 0\.\d+\ntest accuracy: 0\.\d+\n"
            f"checkpoint: {self.folder}/precise/model.ckpt-2\n$")
        values[num_towers] = run_cases.checkpoint(f"{self.folder}/precise")
    old = run_cases.checkpoint(self.folder)
    self.assertEqual(old.keys(), values[3].keys())
    moving = {name for name in old if "moving" in name}
    self.assertLen(moving, 2)
    for name, value in values[3].items():
      self.assertAllClose(value, values[1][name], 1e-6)
      if name in moving:
        self.assertNotAllClose(value, old[name])
      else:
        self.assertAllEqual(value, old[name])
    images = self.data.batches("train", 40, augment=False)
    images = tf.data.make_one_shot_iterator(images).get_next()[0]
    with tf.Session() as sess:
      images = sess.run(images).astype(np.float64)
    prefix = next(iter(moving)).rpartition("/")[0]
    self.assertAllClose(values[3][f"{prefix}/moving_mean"],
                        images.mean(axis=(0, 1, 2)), 1e-5)
    self.assertAllClose(values[3][f"{prefix}/moving_variance"],
                        images.reshape(-1, 1).var(axis=0, ddof=1), 1e-5)

  def test_a_model_without_batch_norm(self):
    with run_cases.without_batch_norm():
      self.train()
      status, _, errors = self.call(f"--logdir={self.folder}")
    self.assertEqual(status, 2)
    self.assertRegex(errors, "^precise_batch_norm.py: `--logdir` must be that "
                     "of a model with batch norm: got convnet.*\n$")

  @parameterized.named_parameters(
      ("no_logdir", [], "`--logdir` must be given"),
      ("no_run", ["--logdir=/nowhere"], "`--logdir` must be the directory of "),
      ("no_batches", ["--logdir=/nowhere", "--num_batches=0"], "num_batches"),
      ("no_flag", ["data"], "there must be flags only: got data"))
  def test_rejects(self, arguments, message):
    status, output, errors = self.call(*arguments)
    self.assertEqual((status, output), (2, ""))
    self.assertRegex(errors, f"^precise_batch_norm.py: .*{message}.*\n$")

  def test_help(self):
    self.assertRegex(self.call("--help")[1], "(?s)^Estimates .*--num_batches")


if __name__ == "__main__":
  tf.test.main()
