"""Tests for tools.datasets."""

import os

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from sklearn import datasets as sklearn_datasets

from tools import datasets


def arrays(shape=(6, 5, 4, 3), rows=6, test_rows=4):
  """Returns random images of 0 to 255 and labels, as in an .npz file."""
  rng = np.random.RandomState(0)
  return dict(
      x_train=rng.randint(256, size=shape).astype(np.uint8),
      y_train=np.arange(rows) % 3,
      x_test=rng.randint(256, size=(4, *shape[1:])).astype(np.uint8),
      y_test=np.arange(test_rows) % 2)


class LoadTest(parameterized.TestCase):

  def save(self, **contents):
    path = os.path.join(self.create_tempdir(), "images.npz")
    np.savez(path, **contents)
    return path

  def test_digits_are_split_without_loss_or_overlap(self):
    data = datasets.load("digits")
    self.assertEqual(data.train_images.shape, (1438, 8, 8, 1))
    self.assertEqual(data.test_images.shape, (359, 8, 8, 1))
    self.assertEqual(data.num_classes, 10)
    found = np.concatenate([data.test_images, data.train_images])
    original = sklearn_datasets.load_digits()
    # Standardising keeps the order of the grey values, so that ranks tell rows.
    grey = np.unique(found, return_inverse=True)[1].reshape(-1, 64)
    labels = np.concatenate([data.test_labels, data.train_labels])
    self.assertCountEqual(
        [(*row, label) for row, label in zip(grey.tolist(), labels)],
        [(*row, label) for row, label in zip(
            original.data.astype(int).tolist(), original.target)])

  def test_digits_are_the_same_each_time(self):
    for first, second in zip(datasets.load("digits"), datasets.load("digits")):
      np.testing.assert_array_equal(first, second)

  def test_channels_are_standardised_by_the_training_images(self):
    contents = arrays()
    data = datasets.load(self.save(**contents))
    self.assertEqual(data.train_images.dtype, np.float32)
    np.testing.assert_allclose(
        data.train_images.mean(axis=(0, 1, 2)), np.zeros(3), atol=1e-5)
    np.testing.assert_allclose(
        data.train_images.std(axis=(0, 1, 2)), np.ones(3), atol=1e-5)
    x = contents["x_train"].astype(np.float64)
    expected = ((contents["x_test"] - x.mean(axis=(0, 1, 2))) /
                x.std(axis=(0, 1, 2)))
    np.testing.assert_allclose(data.test_images, expected, atol=1e-5)

  def test_file_may_lack_a_channel_axis_and_have_labels_in_columns(self):
    contents = arrays(shape=(6, 5, 4))
    contents["y_train"] = contents["y_train"].reshape(-1, 1).astype(np.uint8)
    data = datasets.load(self.save(**contents))
    self.assertEqual(data.train_images.shape, (6, 5, 4, 1))
    self.assertEqual(data.train_labels.tolist(), [0, 1, 2, 0, 1, 2])
    self.assertEqual(data.train_labels.dtype, np.int64)
    self.assertEqual(data.num_classes, 3)

  def test_constant_channel_stays_finite(self):
    contents = arrays()
    contents["x_train"][...] = 7
    data = datasets.load(self.save(**contents))
    self.assertTrue(np.isfinite(data.test_images).all())

  @parameterized.named_parameters(
      ("fewer_labels", dict(rows=5), "got 6 images and 5 labels"),
      ("fewer_test_labels", dict(test_rows=3), "got 4 images and 3 labels"),
      ("rank", dict(shape=(6, 5)), r"\[N, H, W, C\], got \(6, 5\)"),
  )
  def test_rejects_arrays_that_do_not_fit(self, options, message):
    path = self.save(**arrays(**options))
    with self.assertRaisesRegex(ValueError, f"`dataset` must be.*{message}"):
      datasets.load(path)

  def test_rejects_what_is_no_data_set(self):
    contents = arrays()
    del contents["y_test"]
    text = self.create_tempfile(content="not an archive").full_path
    for path, message in ((self.save(**contents), "y_test"), (text, "pickle"),
                          ("mnist", "No such file")):
      with self.assertRaisesRegex(
          ValueError, f"`dataset` must be `digits` or .*got {path}.*{message}"):
        datasets.load(path)


class BatchRowsTest(parameterized.TestCase):

  @parameterized.parameters(1, 3, 4, 10)
  def test_an_epoch_takes_each_row_at_most_once(self, batch_size):
    steps = 10 // batch_size
    for epoch in range(3):
      rows = np.concatenate([
          datasets.batch_rows(epoch * steps + step, num_rows=10,
                              batch_size=batch_size, seed=0)
          for step in range(steps)])
      self.assertLen(set(rows), steps * batch_size)
      self.assertContainsSubset(rows, range(10))

  def test_depends_on_step_and_seed_alone(self):

    def order(step, seed):
      return datasets.batch_rows(
          step, num_rows=100, batch_size=100, seed=seed).tolist()

    self.assertEqual(order(3, seed=0), order(3, seed=0))
    self.assertNotEqual(order(3, seed=0), order(4, seed=0))
    self.assertNotEqual(order(3, seed=0), order(3, seed=1))


if __name__ == "__main__":
  absltest.main()
