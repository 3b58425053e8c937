"""Tests for tools.training_options."""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tools import datasets
from tools import training_options
from tools.datasets import shapes


def small_dataset(size):
  split = datasets.Split(np.zeros([5, size, size, 1]), np.arange(5) % 2)
  return datasets.classification("small", split, split, num_classes=2)


class TrainingOptionsTest(parameterized.TestCase):

  def test_batch_size_depends_on_the_data_set(self):
    completed = training_options.completed(
        training_options.Options(remainder="keep"), small_dataset(8))
    self.assertEqual(completed.batch_size, 64)
    completed = training_options.completed(
        training_options.Options(model="unet"),
        shapes.load(num_train=16, num_test=1))
    self.assertEqual(completed.batch_size, 16)

  @parameterized.parameters(("keep", "convnet"), ("repeat", "alexnet"))
  def test_batch_may_be_larger_than_the_training_set(self, remainder, model):
    options = training_options.Options(
        batch_size=6, remainder=remainder, model=model)
    self.assertEqual(
        training_options.completed(options, small_dataset(32)), options)

  @parameterized.named_parameters(
      ("batch", dict(batch_size=6),
       "`--batch_size` must .*`--remainder=drop`: expected 1 to 5, got 6"),
      ("repeat", dict(remainder="repeat"),
       "`--remainder=repeat` must not .*batch norm.*convnet. Use `--rem"),
      ("model", dict(model="unet"), "`--model` must fit `--dataset`: small is"))
  def test_rejects(self, options, message):
    with self.assertRaisesRegex(training_options.UsageError, message):
      training_options.completed(
          training_options.Options(**options), small_dataset(32))

  def test_which_options_may_skip_batches(self):
    for options, expected in (
        (dict(), False), (dict(skip_nonfinite=True), True),
        (dict(loss_scale=8.0), False), (dict(loss_scale="dynamic"), True)):
      self.assertEqual(
          training_options.Options(**options).may_skip, expected, options)

  def test_notes_of_a_run(self):
    logdir = self.create_tempdir().full_path
    for data in (small_dataset(8), shapes.load(num_train=2, num_test=1)):
      options = training_options.Options(
          devices=("/cpu:1",), trace_steps=(3,), loss_scale="dynamic")
      run = training_options.run_of(options, data)
      training_options.save_run(run, logdir)
      self.assertEqual(training_options.load_run(logdir), run)
      self.assertEqual(run.kind, data.kind)
      self.assertEqual(run.image_shape, tuple(data.image_shape))
      np.testing.assert_allclose(run.mean, np.ravel(data.scale.mean))
    self.assertEqual(os.listdir(logdir), ["run.json"])

  @parameterized.named_parameters(
      ("nothing", None, "must be the directory of a run of train.py: got .*"),
      ("cut", '{"options": ', "must hold a run.json as train.py writes it"),
      ("other", "[3]", "must hold a run.json as train.py writes it"),
      ("unknown", '{"options": {"vgg": 3}}',
       "must hold a run.json as train.py .*unexpected.*'vgg'"))
  def test_rejects_notes(self, text, message):
    logdir = self.create_tempdir().full_path
    if text is not None:
      pathlib.Path(logdir, "run.json").write_text(text, encoding="utf-8")
    with self.assertRaisesRegex(training_options.UsageError,
                                f"`--logdir` {message}"):
      training_options.load_run(logdir)


if __name__ == "__main__":
  absltest.main()
