"""Tests for tools.training_options."""

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


if __name__ == "__main__":
  absltest.main()
