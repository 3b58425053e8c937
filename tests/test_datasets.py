"""Tests for tools.datasets: loading by name, and batches of any data set."""

import os

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import dataset_cases as cases
from tools import datasets
from tools.datasets import augmentation
from tools.datasets import dataset
from tools.datasets import loading
from tools.datasets import order
from tools.datasets import pixels
from tools.datasets import tables
import towers


GOLDEN_ROWS = [1, 4, 2, 5, 3, 0, 6, 7]


def numbered(rows=10, test_rows=5, augment=augmentation.keep):
  """Returns images whose value and label are their row's number."""

  def table(count):
    numbers = np.arange(count)
    return tables.Table((np.ones([count, 2, 2, 1]) * numbers[:, None, None,
                                                             None], numbers))

  return dataset.Dataset(
      "numbered", dataset.CLASSIFICATION, (2, 2, 1), rows, table(rows),
      table(test_rows), pixels.Scale(np.float32([0.0]), np.float32([1.0])),
      augment=augment)


def add_noise(image, label, seed):
  return image + tf.random.stateless_uniform([], seed), label


class OrderTest(parameterized.TestCase):

  def test_same_in_every_process(self):
    """The numbers are those of another process, and must stay."""
    self.assertEqual(
        order.epoch_rows(2, num_rows=8, batch_size=4, remainder="keep",
                         seed=5).rows.tolist(), GOLDEN_ROWS)

  @parameterized.product(batch_size=(1, 3, 4, 10, 13), seed=(None, 0, 7),
                         remainder=order.REMAINDERS)
  def test_an_epoch_takes_each_row_once(self, batch_size, seed, remainder):
    for epoch in range(3):
      rows, weights = order.epoch_rows(
          epoch, num_rows=10, batch_size=batch_size, remainder=remainder,
          seed=seed)
      size = {"keep": 10, "drop": 10 // batch_size * batch_size,
              "repeat": -(-10 // batch_size) * batch_size}[remainder]
      self.assertLen(rows, size)
      self.assertEqual(weights.tolist(), [1.0] * min(size, 10) +
                       [0.0] * max(size - 10, 0))
      real = rows[weights == 1.0]
      self.assertLen(set(real), min(size, 10))
      self.assertContainsSubset(rows, range(10))
      self.assertEqual(
          order.num_batches(10, batch_size, remainder),
          -(-size // batch_size))

  def test_depends_on_epoch_and_seed(self):

    def rows(epoch, seed):
      return order.epoch_rows(epoch, num_rows=50, batch_size=5,
                              remainder="keep", seed=seed).rows.tolist()

    self.assertEqual(rows(3, seed=0), rows(3, seed=0))
    self.assertNotEqual(rows(3, seed=0), rows(4, seed=0))
    self.assertNotEqual(rows(3, seed=0), rows(3, seed=1))
    self.assertEqual(rows(3, seed=None), list(range(50)))


class BatchesTest(parameterized.TestCase, tf.test.TestCase):

  def test_training_by_default_shuffles_and_goes_on(self):
    batches = cases.run(numbered().batches("train", 4, seed=3), 6)
    for epoch in range(3):
      expected = np.random.RandomState([3, epoch]).permutation(10)[:8]
      self.assertAllEqual(cases.column(batches[2 * epoch:2 * epoch + 2], 1),
                          expected)
    for images, labels, weights in batches:
      self.assertAllEqual(images[:, 0, 0, 0], labels)
      self.assertAllEqual(weights, np.ones([4]))
      self.assertEqual([images.dtype, labels.dtype, weights.dtype],
                       [np.float32, np.int64, np.float32])

  def test_testing_by_default_keeps_order_and_ends(self):
    batches = cases.run(numbered().batches("test", 2))
    self.assertEqual([labels.tolist() for _, labels, _ in batches],
                     [[0, 1], [2, 3], [4]])

  @parameterized.named_parameters(
      ("keep", "keep", [[0, 1, 2, 3], [4]], [4, 1], None),
      ("drop", "drop", [[0, 1, 2, 3]], [4], 4),
      ("repeat", "repeat", [[0, 1, 2, 3], [4, 0, 1, 2]], [4, 1], 4),
  )
  def test_remainder(self, remainder, labels, weights, static):
    data = numbered()
    batches = data.batches("test", 4, remainder=remainder)
    shapes = tf.data.get_output_shapes(batches)
    self.assertEqual([shape.as_list() for shape in shapes],
                     [[static, 2, 2, 1], [static], [static]])
    found = cases.run(batches)
    self.assertEqual([batch[1].tolist() for batch in found], labels)
    self.assertEqual([batch[2].sum() for batch in found], weights)
    self.assertAllEqual(found[-1][2], np.arange(len(labels[-1])) < weights[-1])
    self.assertEqual(data.num_batches("test", 4, remainder=remainder),
                     len(labels))

  def test_batch_larger_than_the_data_is_filled_up(self):
    batches = cases.run(numbered().batches("test", 12, remainder="repeat"))
    self.assertLen(batches, 1)
    self.assertEqual(batches[0][1].tolist(), [0, 1, 2, 3, 4] * 2 + [0, 1])
    self.assertEqual(batches[0][2].tolist(), [1.0] * 5 + [0.0] * 7)

  @parameterized.parameters(*order.REMAINDERS)
  def test_skip_equals_an_unbroken_stream(self, remainder):
    data = numbered(augment=add_noise)
    whole = cases.run(data.batches("train", 4, remainder=remainder), 12)
    for skip in (1, 2, 3, 8):
      rest = cases.run(
          data.batches("train", 4, remainder=remainder, skip=skip), 12 - skip)
      self.assertLen(rest, 12 - skip)
      for expected, found in zip(whole[skip:], rest):
        for first, second in zip(expected, found):
          self.assertAllEqual(first, second)

  def test_skip_may_be_a_tensor(self):
    data = numbered(augment=add_noise)
    whole = cases.run(data.batches("train", 4), 9)
    skip = tf.placeholder(tf.int64, [])
    iterator = tf.data.make_initializable_iterator(
        data.batches("train", 4, skip=skip))
    batch = iterator.get_next()
    with self.session() as sess:
      for first in (5, 0, 2):
        sess.run(iterator.initializer, {skip: first})
        for expected in whole[first:first + 4]:
          for one, other in zip(expected, sess.run(batch)):
            self.assertAllEqual(one, other)

  def test_skip_over_many_epochs_reads_nothing(self):
    skip = 2 * 10**9 + 1
    (_, labels, _), = cases.run(numbered().batches("train", 4, skip=skip), 1)
    self.assertAllEqual(
        labels, np.random.RandomState([0, 10**9]).permutation(10)[4:8])

  def test_skip_past_the_end_of_one_epoch_is_the_end(self):
    self.assertEmpty(cases.run(numbered().batches("test", 2, skip=3)))

  def test_works_with_one_shot_iterators(self):
    data = numbered(augment=add_noise)
    for first, second in zip(
        cases.run(data.batches("train", 3, skip=4), 5),
        cases.run(data.batches("train", 3, skip=4), 5, initializable=False)):
      self.assertAllEqual(first[0], second[0])

  def test_augmentation_depends_on_seed_epoch_and_image_alone(self):
    data = numbered(augment=add_noise)

    def noise(batch_size, seed=0):
      batches = cases.run(data.batches("train", batch_size, seed=seed,
                                       remainder="keep"), 40 // batch_size)
      images, labels = cases.column(batches, 0), cases.column(batches, 1)
      found = np.zeros([2, 10])
      for place in range(20):
        found[place // 10, labels[place]] = (
            images[place, 0, 0, 0] - labels[place])
      return found

    first = noise(1)
    self.assertAllClose(noise(2), first)
    self.assertAllClose(noise(5), first)
    self.assertLen(np.unique(first.round(4)), 20)  # New in each epoch.
    self.assertNotAllClose(noise(1, seed=1), first)

  def test_augmentation_can_be_switched(self):
    data = numbered(augment=add_noise)
    for split, augment, expected in (
        ("train", None, True), ("train", False, False), ("test", None, False),
        ("test", True, True)):
      (images, labels, _), = cases.run(
          data.batches(split, 2, augment=augment), 1)
      changed = images[:, 0, 0, 0] != labels
      self.assertEqual(changed.all(), expected, (split, augment))
      self.assertEqual(changed.any(), expected, (split, augment))

  @parameterized.parameters(1, 2, 3, 4)
  def test_c088_towers_share_one_stream(self, num_towers):
    """Of 10 rows in batches of 4, the last batch has 2: fewer than towers."""
    data = numbered(augment=add_noise)
    with tf.Graph().as_default():
      expected = cases.run(data.batches("train", 4, remainder="keep"), 6)
    iterator = tf.data.make_initializable_iterator(
        data.batches("train", 4, remainder="keep"))
    graph = towers.build_towers(
        lambda images, labels, weights: {
            "images": images, "labels": labels, "weights": weights},
        [f"/cpu:{i}" for i in range(num_towers)], inputs=iterator.get_next())
    with self.session(config=graph.session_config()) as sess:
      sess.run(iterator.initializer)
      for images, labels, weights in expected:
        found = sess.run(graph.outputs)  # One run takes one batch.
        self.assertAllEqual(found["images"], images)
        self.assertAllEqual(found["labels"], labels)
        self.assertAllEqual(found["weights"], weights)
    self.assertLen([op for op in tf.get_default_graph().get_operations()
                    if op.type == "IteratorGetNext"], 1)

  def test_digits_are_shifted_by_at_most_a_pixel(self):
    data = datasets.load("digits")
    batches = cases.run(data.batches("train", 64, seed=1), 1)
    images = data.train.columns[0][np.random.RandomState([1, 0]).permutation(
        data.size("train"))[:64]]
    found = np.round(cases.original(data, batches[0][0])).astype(int)
    for before, after in zip(images, found):
      # Shifted by at most a pixel, the middle stays in the image.
      windows = [np.pad(before[..., 0], 1)[i:i + 8, j:j + 8]
                 for i in range(3) for j in range(3)]
      self.assertTrue(any((window == after[..., 0]).all()
                          for window in windows))

  def test_graph_does_not_hold_the_images(self):
    train = datasets.Split(np.zeros([1000, 32, 32, 3], np.uint8),
                           np.zeros([1000]))
    data = datasets.classification("zeros", train, train, num_classes=1)
    tf.data.make_initializable_iterator(data.batches("train", 8))
    size = tf.get_default_graph().as_graph_def().ByteSize()
    self.assertLess(size, 100000)

  @parameterized.named_parameters(
      ("split", dict(split="val"), r"`split` must be one of .*got 'val'"),
      ("batch_size", dict(batch_size=0), "`batch_size` must .* 1: got 0"),
      ("large", dict(batch_size=11),
       "`batch_size` must be at most .*expected 1 to 10, got 11"),
      ("remainder", dict(remainder="pad"), "`remainder` must .*got 'pad'"),
      ("seed", dict(seed=-1), "`seed` must be from 0 to 2147483647: got -1"),
      ("large_seed", dict(seed=2**31), "`seed` must .* got 2147483648"),
      ("skip", dict(skip=-1), "`skip` must be at least 0: got -1"),
  )
  def test_rejects(self, options, message):
    options = dict(dict(split="train", batch_size=2), **options)
    with self.assertRaisesRegex(ValueError, message):
      numbered().batches(**options)


class LoadTest(parameterized.TestCase):

  def test_names(self):
    self.assertEqual(datasets.NAMES, (
        "digits", "shapes", "mnist", "fashion_mnist", "cifar10", "cifar100",
        "images", "tfrecords", "voc"))

  def test_finds_each_by_its_name(self):
    """Each loader has tests of its own."""
    root = self.create_tempdir().full_path
    cases.mnist(root)
    cases.folders(root)
    cases.record_files(os.path.join(root, "records"))
    cases.voc(root)
    contents, _, _ = cases.cifar_files("cifar10", is_pickle=True)
    for name, content in contents.items():
      cases.write(os.path.join(root, name), content)
    for name, folder, classes in (
        ("mnist", root, 10), ("fashion_mnist", root, 10),
        ("cifar10", root, 10), ("images", root, 2),
        ("tfrecords", os.path.join(root, "records"), 3), ("voc", root, 21)):
      data = loading.load(name, folder)
      self.assertEqual(data.num_classes, classes)
      if name not in ("mnist", "fashion_mnist", "cifar10"):
        data = loading.load(name, folder, image_size=33)
        self.assertEqual(data.image_shape, (33, 33, 3))

  @parameterized.named_parameters(
      ("unknown", ["imagenet"], {},
       "`dataset` must be one of digits, .* path of an .npz .*got imagenet"),
      ("no_folder", ["cifar10"], {}, "`data_dir` must say where the files of "
       "cifar10 are: got none. The CIFAR project publishes"),
      ("no_voc", ["voc"], {}, "`data_dir` must say .*Pascal VOC project"),
      ("needless", ["digits", "/tmp"], {}, "`data_dir` must not be given for "
       "digits: got /tmp"),
      ("needless_npz", ["x.npz", "/tmp"], {}, "`data_dir` must not be given"),
      ("size", ["digits"], dict(image_size=32), "`image_size` must not be "
       "given for digits, .*got 32"),
      ("small", ["shapes"], dict(image_size=31), "`image_size` must be at "
       "least 32: got 31"),
  )
  def test_rejects(self, arguments, options, message):
    with self.assertRaisesRegex(datasets.DatasetError, message):
      datasets.load(*arguments, **options)


if __name__ == "__main__":
  tf.test.main()
