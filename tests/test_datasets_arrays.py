"""Tests for digits, .npz and IDX files in tools.datasets."""

import os
import pathlib
from unittest import mock

from absl.testing import parameterized
import numpy as np
from sklearn import datasets as sklearn_datasets
import tensorflow.compat.v1 as tf

import dataset_cases as cases
from tools import datasets
from tools.datasets import idx
from tools.datasets import pixels


class Folder(parameterized.TestCase):

  def folder(self):
    return self.create_tempdir().full_path


class PixelsTest(parameterized.TestCase):

  @parameterized.parameters(1, 7, 1000)
  def test_scale_is_mean_and_deviation_of_each_channel(self, chunk):
    images = np.random.RandomState(0).randint(
        256, size=[20, 3, 4, 3]).astype(np.uint8)
    with mock.patch.object(pixels, "CHUNK", chunk):
      scale = pixels.scale_of(images)
    exact = images.astype(np.float64)
    np.testing.assert_allclose(scale.mean, exact.mean(axis=(0, 1, 2)), 1e-6)
    np.testing.assert_allclose(scale.deviation, exact.std(axis=(0, 1, 2)), 1e-6)


class ClassificationTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("rank", [4, 5], [4], r"`images` must .*\[N, H, W, C\]: got \(4, 5\)"),
      ("fewer", [4, 5, 5], [3], "got 4 images and 3 labels"),
      ("none", [0, 5, 5], [0], "got 0 images and 0 labels"),
  )
  def test_rejects_shapes(self, images, labels, message):
    split = datasets.Split(np.zeros(images), np.zeros(labels))
    with self.assertRaisesRegex(ValueError, message):
      datasets.classification("x", split, split, num_classes=2)

  @parameterized.named_parameters(
      ("large", [0, 2], "from 0 to 1: got 0 to 2"),
      ("negative", [-1, 0], "from 0 to 1: got -1 to 0"),
      ("fraction", [0.5, 0], "whole numbers .*got 0.0 to 0.5"),
      ("texts", ["a", "b"], "`labels` must hold numbers: got the type <U1"),
  )
  def test_rejects_labels(self, labels, message):
    split = datasets.Split(np.zeros([2, 3, 3]), np.array(labels))
    with self.assertRaisesRegex(ValueError, message):
      datasets.classification("x", split, split, num_classes=2)

  def test_rejects_images_of_two_sizes(self):
    labels = np.zeros([2])
    with self.assertRaisesRegex(
        ValueError, r"one shape: got \(3, 3, 1\) and \(4, 3, 1\)"):
      datasets.classification(
          "x", datasets.Split(np.zeros([2, 3, 3]), labels),
          datasets.Split(np.zeros([2, 4, 3]), labels), num_classes=1)


class DigitsTest(parameterized.TestCase):

  def test_split_without_loss_or_overlap(self):
    data = datasets.load("digits")
    self.assertEqual(data.size("train"), 1438)
    self.assertEqual(data.size("test"), 359)
    self.assertEqual((data.image_shape, data.num_classes), ((8, 8, 1), 10))
    expected = sklearn_datasets.load_digits()
    images, labels = (np.concatenate(columns) for columns in zip(
        data.test.columns, data.train.columns))
    self.assertCountEqual(
        [(*image.ravel(), label) for image, label in zip(images, labels)],
        [(*row, label) for row, label in zip(
            expected.data.astype(int), expected.target)])

  def test_same_each_time(self):
    for first, second in zip(datasets.load("digits").train.columns,
                             datasets.load("digits").train.columns):
      np.testing.assert_array_equal(first, second)


class NpzTest(Folder):

  def save(self, shape=(6, 5, 4, 3), rows=6, test_rows=4, **changes):
    rng = np.random.RandomState(0)
    contents = dict(
        x_train=rng.randint(256, size=shape).astype(np.uint8),
        y_train=np.arange(rows) % 3,
        x_test=rng.randint(256, size=(4, *shape[1:])).astype(np.uint8),
        y_test=np.arange(test_rows) % 2)
    contents.update(changes)
    path = os.path.join(self.folder(), "images.npz")
    np.savez(path, **{key: value for key, value in contents.items()
                      if value is not None})
    return path, contents

  def test_channels_are_standardised_by_the_training_images(self):
    path, contents = self.save()
    data = datasets.load(path)
    x = contents["x_train"].astype(np.float64)
    mean, deviation = x.mean(axis=(0, 1, 2)), x.std(axis=(0, 1, 2))
    for split in ("train", "test"):
      (images, labels, _), = cases.run(
          data.batches(split, 10, shuffle=False, repeat=False,
                       remainder="keep"))
      np.testing.assert_allclose(
          images, (contents[f"x_{split}"] - mean) / deviation, atol=1e-5)
      np.testing.assert_array_equal(labels, contents[f"y_{split}"])
    self.assertEqual(data.num_classes, 3)

  def test_may_lack_a_channel_axis_and_have_labels_in_columns(self):
    path, _ = self.save(shape=(6, 5, 4),
                        y_train=np.arange(6).astype(np.uint8)[:, None] % 3)
    data = datasets.load(path)
    self.assertEqual(data.image_shape, (5, 4, 1))
    self.assertEqual(data.train.columns[1].tolist(), [0, 1, 2, 0, 1, 2])

  def test_constant_channel_stays_finite(self):
    path, _ = self.save(x_train=np.full([6, 5, 4, 3], 7))
    (images, _, _), = cases.run(datasets.load(path).batches("test", 4))
    self.assertTrue(np.isfinite(images).all())

  @parameterized.named_parameters(
      ("fewer_labels", dict(rows=5), "got 6 images and 5 labels"),
      ("fewer_test_labels", dict(test_rows=3), "got 4 images and 3 labels"),
      ("rank", dict(shape=(6, 5)), r"\[N, H, W, C\]: got \(6, 5\)"),
      ("negative", dict(y_test=np.array([0, 0, 0, -1])), "got -1 to 0"),
      ("missing", dict(y_test=None), "with the arrays x_train, .*got y_test"),
      ("objects", dict(x_test=np.array([{}])), "Object arrays cannot be"),
      ("no_labels", dict(y_train=np.zeros([0])), "got 6 images and 0 labels"),
  )
  def test_rejects(self, options, message):
    path, _ = self.save(**options)
    with self.assertRaisesRegex(datasets.DatasetError, f"`{path}` .*{message}"):
      datasets.load(path)

  @parameterized.named_parameters(
      ("text", b"not an archive", "must be a NumPy archive .*pickle"),
      ("cut", b"PK\x03\x04 and so on", "must be a NumPy archive .*zip"),
      ("empty", b"", "must be a NumPy archive"),
  )
  def test_rejects_a_file_of(self, content, message):
    path = os.path.join(self.folder(), "x.npz")
    cases.write(path, content)
    with self.assertRaisesRegex(datasets.DatasetError, message):
      datasets.load(path)

  def test_rejects_single_arrays_folders_and_nothing(self):
    folder = self.folder()
    np.save(os.path.join(folder, "one.npy"), np.zeros([3]))
    os.mkdir(os.path.join(folder, "folder.npz"))
    for name, message in (("one.npy", "must be a NumPy archive"),
                          ("folder.npz", "got a directory"),
                          ("no.npz", "got no such file")):
      with self.assertRaisesRegex(datasets.DatasetError, message):
        datasets.load(os.path.join(folder, name))


class IdxTest(Folder):

  @parameterized.product(compress=(False, True), mark=("-", "."),
                         name=("mnist", "fashion_mnist"))
  def test_reads_images_and_labels(self, compress, mark, name):
    folder = self.folder()
    images, labels, test_images, test_labels = cases.mnist(
        folder, compress=compress, mark=mark)
    data = datasets.load(name, folder)
    self.assertEqual((data.image_shape, data.num_classes), ((28, 28, 1), 10))
    self.assertLen(data.class_names, 10)
    np.testing.assert_array_equal(data.train.columns[0][..., 0], images)
    np.testing.assert_array_equal(data.train.columns[1], labels)
    found = cases.run(data.batches("test", 2))
    np.testing.assert_allclose(
        cases.original(data, cases.column(found, 0))[..., 0], test_images,
        atol=1e-3)
    np.testing.assert_array_equal(cases.column(found, 1), test_labels)

  @parameterized.named_parameters(("mnist", "mnist", 1),
                                  ("fashion", "fashion_mnist", 2))
  def test_augmentation_shifts_by_two_and_mirrors_clothes_only(
      self, name, mirrored):
    folder = self.folder()
    images = cases.mnist(folder, rows=1)[0]
    data = datasets.load(name, folder)
    padded = np.pad(images[0], 2)
    windows = [padded[i:i + 28, j:j + 28][:, ::step] for step in (1, -1)
               for i in range(5) for j in range(5)]
    found = cases.run(data.batches("train", 1), 200)
    seen = {next(k for k, window in enumerate(windows)
                 if np.allclose(window, image, atol=1e-3))
            for image in cases.original(data, cases.column(found, 0))[..., 0]}
    self.assertContainsSubset(seen, range(25 * mirrored))
    self.assertGreater(len(seen), 20 * mirrored)

  def test_looks_in_the_usual_places(self):
    folder = self.folder()
    cases.mnist(folder)
    for name in idx.VARIANTS:
      places = idx.VARIANTS[name]._replace(places=["/no/folder", folder])
      with mock.patch.dict(idx.VARIANTS, {name: places}):
        self.assertEqual(datasets.load(name).size("train"), 7)
    self.assertIn("/usr/share/datasets/fashion-mnist",
                  idx.VARIANTS["fashion_mnist"].places)

  def test_real_fashion_mnist_where_debian_puts_it(self):
    folder = pathlib.Path("/usr/share/datasets/fashion-mnist")
    if not folder.is_dir():
      self.skipTest("The Debian package dataset-fashion-mnist is not "
                    f"installed: there is no {folder}.")
    data = datasets.load("fashion_mnist", None)
    self.assertEqual((data.size("train"), data.size("test")), (60000, 10000))
    self.assertEqual(data.image_shape, (28, 28, 1))
    self.assertEqual(data.class_names[0], "T-shirt/top")
    images, labels = data.train.columns
    np.testing.assert_array_equal(np.bincount(labels), np.full([10], 6000))
    self.assertAlmostEqual(float(images.mean()), 72.94, places=2)

  def test_says_where_to_get_what_is_missing(self):
    for name, message in (
        ("mnist", "`/no/folder` must be .*MNIST project publishes"),
        ("fashion_mnist", "Debian package dataset-fashion-mnist installs")):
      places = idx.VARIANTS[name]._replace(places=["/no/folder"])
      with mock.patch.dict(idx.VARIANTS, {name: places}), \
          self.assertRaisesRegex(datasets.DatasetError, message):
        datasets.load(name)

  @parameterized.named_parameters(
      ("missing", "train-images-idx3-ubyte", None,
       "`.*/train-images-idx3-ubyte` must be an IDX file .*got no such file"),
      ("magic", "train-images-idx3-ubyte", cases.idx(np.zeros([7])),
       "magic number 0x00000803: got 0x00000801"),
      ("empty", "t10k-labels-idx1-ubyte", b"", "got only 0 bytes"),
      ("header", "t10k-images-idx3-ubyte", bytes([0, 0, 8, 3, 0]),
       "got only 5 bytes"),
      ("cut", "t10k-images-idx3-ubyte",
       cases.idx(np.zeros([3, 28, 28]))[:-1],
       "a file of 2368 bytes, as its header says .*got 2367 bytes"),
      ("longer", "t10k-images-idx3-ubyte",
       cases.idx(np.zeros([3, 28, 28])) + b"x", "got 2369 bytes"),
      ("huge", "t10k-images-idx3-ubyte",
       bytes([0, 0, 8, 3]) + b"\xff" * 12, "got 16 bytes"),
      ("cut_gzip", "train-labels-idx1-ubyte",
       b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xffKL", "cut short or damaged"),
      ("other_gzip", "train-labels-idx1-ubyte", b"\x1f\x8b\x00\x00\x00" * 9,
       "cannot be read"),
      ("label", "train-labels-idx1-ubyte", cases.idx([0, 1, 2, 3, 4, 5, 10]),
       "labels from 0 to 9: got the label 10"),
      ("count", "train-labels-idx1-ubyte", cases.idx([0] * 8),
       "a file with 7 labels, as .*images-idx3-ubyte has images: got 8"),
      ("none", "train-images-idx3-ubyte", cases.idx(np.zeros([0, 28, 28])),
       "must be a file with images: got none"),
      ("size", "t10k-images-idx3-ubyte", cases.idx(np.zeros([3, 8, 8])),
       r"images of one size: got \(28, 28\) for training and \(8, 8\)"),
  )
  def test_rejects(self, name, content, message):
    folder = self.folder()
    cases.mnist(folder)
    path = os.path.join(folder, name)
    os.remove(path)
    if content is not None:
      cases.write(path, content)
    with self.assertRaisesRegex(
        datasets.DatasetError, f"{message}.*MNIST project publishes"):
      datasets.load("mnist", folder)

  def test_rejects_a_folder_for_a_file_and_a_file_for_the_folder(self):
    folder = self.folder()
    cases.mnist(folder)
    path = os.path.join(folder, "train-labels-idx1-ubyte")
    with self.assertRaisesRegex(datasets.DatasetError, "got a file"):
      datasets.load("mnist", path)
    os.remove(path)
    os.mkdir(path)
    with self.assertRaisesRegex(datasets.DatasetError, "got a directory"):
      datasets.load("mnist", folder)


if __name__ == "__main__":
  tf.test.main()
