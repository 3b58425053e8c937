"""Tests for tools.datasets.augmentation and tools.datasets.shapes."""

import functools
import hashlib

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import dataset_cases as cases
import testing
from tools import datasets
from tools.datasets import augmentation
from tools.datasets import shapes

FILL = np.float32([1000.0, 2000.0])

GOLDEN_PIXELS = [[8, 7], [8, 2], [7, 1]]
GOLDEN_MASK = "6e3a1faa02640a5a51ff0ee8f337674a"


def numbered(height, width):
  """Returns an image whose pixels tell where they are, `[H, W, 2]`."""
  return np.stack(np.mgrid[:height, :width], axis=-1).astype(np.float32)


class AugmentationTest(parameterized.TestCase, tf.test.TestCase):

  def results(self, function, image, label, count=60, dynamic=True):
    """Returns `count` results `(image, label)` of one image, by seeds."""
    seeds = tf.data.Dataset.range(count)

    def change(index):
      inputs = tf.constant(image), tf.constant(label)
      if dynamic:
        inputs = [tf.placeholder_with_default(
            value, [None] * (value.shape.ndims - 1) + value.shape.as_list()[-1:]
            if value.shape.ndims == 3 else [None] * value.shape.ndims)
                  for value in inputs]
      return function(*inputs, tf.stack([index, 7]))

    batch = tf.data.make_one_shot_iterator(seeds.map(change)).get_next()
    with self.session(config=testing.config()) as sess:
      return [sess.run(batch) for _ in range(count)]

  def assert_same_everywhere(self, image, mask, void_label=255):
    """A mask of rows and an image of rows must stay in line."""
    inside = mask != void_label
    self.assertAllClose(image[~inside], np.broadcast_to(
        FILL, image[~inside].shape))
    return image[inside], mask[inside]

  def test_shift_with_and_without_mirroring(self):
    image = numbered(6, 5)
    padded = np.broadcast_to(FILL, [10, 9, 2]).copy()
    padded[2:8, 2:7] = image
    for flip in (False, True):
      function = functools.partial(
          augmentation.shift, padding=2, fill=FILL, flip=flip)
      seen = set()
      for found, label in self.results(function, image, 3, 300, dynamic=False):
        self.assertEqual(label, 3)
        seen.update(
            (i, j, step) for i in range(5) for j in range(5)
            for step in (1, -1) if np.array_equal(
                padded[i:i + 6, j:j + 5][:, ::step], found))
      steps = (1, -1) if flip else (1,)
      self.assertContainsSubset(
          seen, {(i, j, step) for i in range(5) for j in range(5)
                 for step in steps})
      # Of 300 draws, nearly all of 25 or 50 cases come up.
      self.assertGreater(len(seen), 22 * len(steps))

  def test_random_window_keeps_areas_and_ratios_in_bounds(self):
    image = numbered(60, 80)
    areas, mirrored = [], []
    for found, label in self.results(
        functools.partial(augmentation.random_window, size=32), image, 3, 200):
      self.assertEqual((label, found.shape), (3, (32, 32, 2)))
      # Neighbours differ by the pixels of the window for one of the result.
      height = 32 * np.median(np.diff(found[..., 0], axis=0))
      width = 32 * np.median(np.diff(found[..., 1], axis=1))
      mirrored.append(width < 0)
      areas.append(height * abs(width) / 4800)
      self.assertBetween(abs(width) / height, 0.7, 1.4)
      self.assertBetween(found.min(), 0, 80)
      self.assertLessEqual(found[..., 0].max(), 59)
      self.assertLessEqual(found[..., 1].max(), 79)
    self.assertBetween(min(areas), 0.07, 0.15)
    self.assertBetween(max(areas), 0.85, 1.01)
    self.assertBetween(np.mean(mirrored), 0.35, 0.65)

  @parameterized.parameters((1, 1), (1, 50), (3, 2), (50, 1))
  def test_windows_of_small_images(self, height, width):
    image = np.ones([height, width, 3], np.float32)
    for found, _ in self.results(
        functools.partial(augmentation.random_window, size=32), image, 3, 20):
      self.assertAllClose(found, np.ones([32, 32, 3]))
    middle, _ = augmentation.central_window(tf.constant(image), 3, size=32)
    with self.session() as sess:
      self.assertAllClose(sess.run(middle), np.ones([32, 32, 3]))

  @parameterized.parameters((37, 64), (64, 37), (37, 37), (128, 200))
  def test_central_window_is_the_middle(self, height, width):
    middle, _ = augmentation.central_window(
        tf.constant(numbered(height, width)), 3, size=32)
    with self.session() as sess:
      found = sess.run(middle)
    self.assertEqual(found.shape, (32, 32, 2))
    step = min(height, width) / 37  # 32 * 8 / 7 is nearly 37.
    self.assertAllClose(found.mean(axis=(0, 1)),
                        [(height - 1) / 2, (width - 1) / 2], atol=step)
    self.assertAllClose(np.diff(found[..., 0], axis=0),
                        np.full([31, 32], step), rtol=0.1)

  def test_scale_and_place_changes_image_and_mask_alike(self):
    """The mask is the image's first channel, but for the scale's blur."""
    image = numbered(40, 30)
    mask = image[..., 0].astype(np.int64)
    for size in ((64, 64), (24, 20), (50, 20)):
      function = functools.partial(
          augmentation.scale_and_place, size=size, scales=(0.5, 2.0), fill=FILL,
          void_label=255)
      areas, mirrored = [], []
      for found, label in self.results(function, image, mask):
        self.assertEqual((found.shape, label.shape), ((*size, 2), size))
        values, classes = self.assert_same_everywhere(found, label)
        self.assertAllClose(values[:, 0], classes, atol=1.01)
        areas.append(len(classes))
        columns = found[..., 1][found[..., 1] < 1000].reshape(
            (label != 255).any(axis=1).sum(), -1)
        mirrored.append(columns[0, 0] > columns[0, -1])
      if size == (64, 64):
        self.assertBetween(min(areas), 300, 500)
        self.assertBetween(max(areas), 3000, 64 * 60)
      self.assertBetween(np.mean(mirrored), 0.25, 0.75)

  @parameterized.named_parameters(
      ("padded", (50, 40), (40, 30)), ("same", (40, 30), (40, 30)),
      ("shrunk_to_height", (20, 40), (20, 15)),
      ("shrunk_to_width", (40, 10), (13, 10)))
  def test_fit(self, size, inside):
    image = numbered(40, 30)
    mask = image[..., 1].astype(np.int64)
    found, label = augmentation.fit(
        tf.constant(image), tf.constant(mask), size=size, fill=FILL,
        void_label=255)
    with self.session() as sess:
      found, label = sess.run([found, label])
    self.assertEqual((found.shape, label.shape), ((*size, 2), size))
    expected = np.zeros(size, bool)
    expected[:inside[0], :inside[1]] = True
    self.assertAllEqual(label != 255, expected)
    values, classes = self.assert_same_everywhere(found, label)
    self.assertAllClose(values[:, 1], classes, atol=1.01)
    if inside == (40, 30):
      self.assertAllEqual(values.reshape(image.shape), image)

  def test_numbers_are_those_of_other_processes(self):
    """The result is that of another process, and must stay."""
    function = functools.partial(augmentation.shift, padding=4, fill=FILL,
                                 flip=True)
    found = self.results(function, numbered(9, 9), 0, 3, dynamic=False)
    self.assertAllEqual([image[4, 4] for image, _ in found], GOLDEN_PIXELS)


class ShapesTest(parameterized.TestCase, tf.test.TestCase):

  def test_images_are_those_of_other_processes(self):
    image, mask = shapes.draw(64, [0, 0])
    self.assertEqual(hashlib.md5(mask.tobytes()).hexdigest(), GOLDEN_MASK)
    self.assertEqual((image.shape, image.dtype), ((64, 64, 3), np.uint8))

  def test_all_classes_are_there_and_images_differ(self):
    data = shapes.load(num_train=60, num_test=20)
    self.assertEqual((data.kind, data.num_classes, data.void_label),
                     (datasets.SEGMENTATION, 6, 255))
    self.assertEqual((data.size("train"), data.size("test")), (60, 20))
    images, masks = data.train.columns
    counts = np.bincount(masks.ravel(), minlength=256)
    self.assertEqual(counts.nonzero()[0].tolist(), [0, 1, 2, 3, 4, 5, 255])
    self.assertGreater(counts[1:6].min(), counts.sum() / 100)
    self.assertLess(counts[0], 0.8 * counts.sum())
    every = np.concatenate([images, data.test.columns[0]])
    self.assertLen({image.tobytes() for image in every}, 80)
    other = shapes.load(num_train=1, num_test=1, seed=1)
    self.assertNotAllClose(other.train.columns[0][0], images[0])

  def test_batches(self):
    data = shapes.load(num_train=8, num_test=3, image_size=48)
    (images, labels, _), = cases.run(data.batches("train", 8), 1)
    self.assertEqual((images.shape, labels.shape),
                     ((8, 48, 48, 3), (8, 48, 48)))
    self.assertLess(abs(images.mean()), 0.5)
    self.assertBetween(images.std(), 0.5, 1.5)
    tests = cases.run(data.batches("test", 2))
    self.assertAllEqual(cases.column(tests, 1), data.test.columns[1])

  @parameterized.named_parameters(
      ("size", dict(image_size=31), "`image_size` must be at least 32: got 31"),
      ("train", dict(num_train=0), "`num_train` and `num_test` .*got 0 and"),
      ("test", dict(num_test=0), "must be at least 1: got 1000 and 0"),
  )
  def test_rejects(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      shapes.load(**options)


if __name__ == "__main__":
  tf.test.main()
