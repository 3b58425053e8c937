"""Tests for the data sets of tools.datasets that stay in image files."""

import pathlib
import struct
import sys
from unittest import mock

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import dataset_cases as cases
from tools import datasets
from tools.datasets import segmentation


class Folder(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)

  def values(self, data, split, **options):
    """Returns `(value, label)` of each image, which are of one colour each."""
    found = cases.run(data.batches(split, 2, **options), 3)
    images = cases.original(data, cases.column(found, 0))
    self.assertEqual(images.shape[1:], data.image_shape)
    self.assertAllClose(images, np.broadcast_to(
        images[:, :1, :1, :1], images.shape), atol=1.5)
    return [(round(float(image.mean())), int(label)) for image, label in zip(
        images, cases.column(found, 1))]

  def rejects(self, name, message):
    with self.assertRaisesRegex(datasets.DatasetError, message) as caught:
      datasets.load(name, self.root)
    self.assertNotIn("\n", str(caught.exception))


class ImagesTest(Folder):

  def load(self):
    cases.folders(self.root)
    return datasets.load("images", self.root, image_size=32)

  def test_reads_each_image_with_the_label_of_its_folder(self):
    data = self.load()
    self.assertEqual(data.class_names, ("cat", "dog"))
    self.assertEqual((data.size("train"), data.size("test")), (5, 2))
    expected = [(50, 0), (60, 0), (150, 1), (160, 1), (170, 1)]
    for augment in (False, True):  # A window of one colour has that colour.
      self.assertEqual(expected, self.values(
          data, "train", shuffle=False, repeat=False, remainder="keep",
          augment=augment))
    self.assertEqual(self.values(data, "test"), [(70, 0), (180, 1)])

  def test_order_and_windows_depend_on_the_seed(self):
    gradient = np.arange(40 * 50 * 3).reshape([40, 50, 3]) % 256
    for name in ("train/a/1.png", "train/a/2.png", "val/a/3.png"):
      cases.write(self.root / name, cases.encode(gradient))
    data = datasets.load("images", self.root, image_size=32)
    first, again, other = (
        cases.column(cases.run(data.batches("train", 2, seed=seed), 3), 0)
        for seed in (1, 1, 2))
    self.assertAllEqual(first, again)
    self.assertNotAllClose(first, other)

  @parameterized.named_parameters(
      ("no_train", "train", None, "/train` must be a folder with one folder a "
       "class: got no such folder"),
      ("no_test", "val", None, "/test` must .* got no such folder"),
      ("file", "train", b"x", "/train` must .*got a file"),
      ("no_class", "train/*", None, "/train` must .*got no folder in it"),
      ("empty_class", "train/cat/*", None, "/cat` must be a folder with JPEG "
       "or PNG files: got none"),
      ("empty_test_class", "val/cat/*", None, "/val/cat` must .*: got none"),
      ("empty_file", "train/cat/1.jpg", b"", "/1.jpg` must be a JPEG or PNG "
       "image: got an empty file"),
      ("text", "train/cat/1.jpg", b"a text", r"starts with b'a text'"),
      ("cut_jpeg", "train/cat/1.jpg",
       cases.encode(cases.plain(9, 9, 5), "JPEG")[:-20], "is cut short"),
      ("cut_png", "val/dog/7.png", cases.encode(cases.plain(9, 9, 5))[:-9],
       "7.png` must be a JPEG or PNG image: got a file that is cut short"),
      ("strange_class", "val/cow/1.png", cases.encode(cases.plain(9, 9, 5)),
       "/val` must be .*classes of .*/train: got the class cow"),
  )
  def test_rejects(self, name, content, message):
    cases.folders(self.root)
    if content is None or not name.endswith((".jpg", ".png")):
      for path in self.root.glob(name):
        self.remove(path)
    if content is not None:
      cases.write(self.root / name, content)
    self.rejects("images", f"{message}.*`data_dir` must hold folders train")

  def remove(self, path):
    if path.is_dir():
      for inner in path.iterdir():
        self.remove(inner)
      path.rmdir()
    else:
      path.unlink()

  def test_notes_after_the_end_of_an_image_do_no_harm(self):
    cases.folders(self.root)
    path = self.root / "val/cat/6.jpg"
    path.write_bytes(path.read_bytes() + b"x" * 1000)
    self.assertEqual(self.values(self.load(), "test")[0], (70, 0))

  def test_rejects_a_directory_instead_of_a_file(self):
    cases.folders(self.root)
    (self.root / "train/cat/3.jpg").mkdir()
    self.rejects("images", "/3.jpg` must be a JPEG or PNG .*got a directory")


class TfrecordsTest(Folder):

  EXPECTED = [(10, 1), (20, 2), (30, 0), (40, 1), (50, 2)]

  def test_reads_all_files_of_a_split(self):
    cases.record_files(self.root)
    data = datasets.load("tfrecords", self.root, image_size=32)
    self.assertEqual((data.num_classes, data.class_names), (3, None))
    self.assertEqual((data.size("train"), data.size("test")), (5, 2))
    self.assertEqual(self.EXPECTED, self.values(
        data, "train", shuffle=False, repeat=False, remainder="keep"))
    self.assertEqual(self.values(data, "test"), [(60, 0), (70, 1)])

  def test_shuffles_over_files_and_skips(self):
    cases.record_files(self.root)
    data = datasets.load("tfrecords", self.root, image_size=32)
    order = np.concatenate([np.random.RandomState([3, epoch]).permutation(5)[:4]
                            for epoch in range(3)])
    expected = [self.EXPECTED[row] for row in order]
    self.assertEqual(self.values(data, "train", seed=3), expected[:6])
    self.assertEqual(self.values(data, "train", seed=3, skip=3), expected[6:])

  def test_class_names_come_from_a_text(self):
    cases.record_files(self.root)
    cases.write(self.root / "labels.txt", b"zero\none\n\ntwo\nthree\n")
    data = datasets.load("tfrecords", self.root, image_size=32)
    self.assertEqual(data.num_classes, 4)
    self.assertEqual(data.class_names, ("zero", "one", "two", "three"))

  def test_label_out_of_range_after_the_first_record(self):
    """With class names, loading does not read all records."""
    cases.record_files(self.root)
    image = cases.encode(cases.plain(40, 40, 5))
    cases.records(self.root / "val.tfrecord",
                  [cases.example(image, label) for label in (0, 7)])
    cases.write(self.root / "labels.txt", b"zero\none\ntwo\n")
    data = datasets.load("tfrecords", self.root, image_size=32)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError,
                                "labels must be from 0 to 2.*val.tfrecord"):
      cases.run(data.batches("test", 4))

  @parameterized.named_parameters(
      ("text", b"a text that is no record", "24 bytes, cut short or of another "
       "kind: the record at byte 0 needs"),
      ("empty", b"", "got an empty file"),
      ("other", struct.pack("<Q", 3) + b"x" * 11, "other bytes at byte 12"),
  )
  def test_rejects_a_file_of(self, content, message):
    cases.record_files(self.root)
    cases.write(self.root / "val-1", content)
    self.rejects("tfrecords", f"/val-1` must be .*{message}.*`data_dir` must")

  @parameterized.named_parameters(
      ("no_image", None, 1, "got 0 and 1 of them in the record at byte 12"),
      ("no_label", b"\xff\xd8\xff", None, "got 1 and 0 of them"),
      ("no_jpeg", b"bitmap", 1, "JPEG or PNG images as image/encoded: got "
       "b'bitmap' in the record"),
      ("negative", b"\xff\xd8\xff", -1, "from 0: got the label -1 at byte 12"),
  )
  def test_rejects_a_record_with(self, image, label, message):
    cases.record_files(self.root)
    cases.records(self.root / "val-1", [cases.example(image, label)])
    self.rejects("tfrecords", f"/val-1` must be .*{message}")

  def test_rejects_a_cut_file(self):
    cases.record_files(self.root)
    path = self.root / "train-00000-of-00002"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    self.rejects("tfrecords", f"{path}` must be .*got {size - 1} bytes, cut "
                 f"short .* needs {size}")

  def test_rejects_a_label_beyond_the_names(self):
    cases.record_files(self.root)
    cases.write(self.root / "labels.txt", b"zero\n")
    self.rejects("tfrecords", "labels from 0 to 0: got the label 1")

  def test_rejects_missing_files_and_bad_names(self):
    self.rejects("tfrecords", "a folder with a file for train: got none")
    cases.records(self.root / "train", [b"x"])
    self.rejects("tfrecords", "a folder with a file for test: got none")
    cases.write(self.root / "labels.txt", b"\n")
    self.rejects("tfrecords", "labels.txt` must be a text .*an empty file")
    cases.write(self.root / "labels.txt", b"\xff\xfe")
    self.rejects("tfrecords", "labels.txt` must be .*a file that is no text")


class SegmentationTest(Folder):

  def load(self, size=64):
    self.masks = cases.voc(self.root)
    return datasets.load("voc", self.root, image_size=size)

  def test_masks_are_indices_padded_with_void(self):
    data = self.load()
    self.assertEqual((data.kind, data.num_classes, data.void_label),
                     (datasets.SEGMENTATION, 21, 255))
    images, labels, weights = cases.run(data.batches(
        "train", 3, shuffle=False, augment=False), 1)[0]
    self.assertEqual(images.shape, (3, 64, 64, 3))
    self.assertAllEqual(weights, np.ones([3]))
    for image, label, mask in zip(cases.original(data, images), labels,
                                  self.masks[1:]):
      height, width = mask.shape
      expected = np.full([64, 64], 255)
      expected[:height, :width] = mask
      self.assertAllEqual(label, expected)
      # Noise of one pixel's size is not what JPEG keeps best.
      self.assertLess(abs(image[:height, :width].mean() - mask.mean()), 3.0)
      self.assertAllClose(
          image[height:], np.broadcast_to(
              data.scale.mean, image[height:].shape), atol=1e-3)

  def test_images_larger_than_a_batch_are_shrunk(self):
    data = self.load(size=32)
    (_, labels, _), = cases.run(data.batches("test", 1))
    rows = ((np.arange(32) + 0.5) * 40 / 32).astype(int)
    columns = ((np.arange(24) + 0.5) * 30 / 24).astype(int)
    self.assertAllEqual(labels[0, :, :24], self.masks[0][rows][:, columns])
    self.assertAllEqual(labels[0, :, 24:], np.full([32, 8], 255))

  def test_augmentation_makes_no_new_classes(self):
    data = self.load()
    found = cases.run(data.batches("train", 3, seed=2), 4)
    labels = cases.column(found, 1)
    self.assertContainsSubset(np.unique(labels), [*range(21), 255])
    # Two of twelve may be alike, but not many.
    self.assertGreater(len({label.tobytes() for label in labels}), 9)
    again = cases.run(data.batches("train", 3, seed=2, skip=2), 2)
    self.assertAllEqual(cases.column(again, 1), labels[6:])
    self.assertAllEqual(cases.column(again, 0), cases.column(found, 0)[6:])

  def test_finds_the_folder_in_what_the_archive_unpacks_to(self):
    cases.voc(self.root / "VOCdevkit" / "VOC2012")
    self.assertEqual(datasets.load("voc", self.root).size("train"), 3)

  def test_classes_may_come_from_a_text(self):
    cases.voc(self.root)
    cases.write(self.root / "labels.txt",
                "".join(f"class {i}\n" for i in range(30)).encode())
    self.assertEqual(datasets.load("voc", self.root).num_classes, 30)

  @parameterized.named_parameters(
      ("no_list", "ImageSets/Segmentation/val.txt", None,
       "/val.txt` must be a list .*got no such file"),
      ("empty_list", "ImageSets/Segmentation/train.txt", b" \n",
       "/train.txt` must be a list .*got an empty file"),
      ("unknown", "ImageSets/Segmentation/val.txt", b"image_9",
       "/image_9.jpg` must be a JPEG or PNG image: got no such file"),
      ("no_mask", "SegmentationClass/image_1.png", None,
       "/image_1.png` must be a PNG mask .*got no such file"),
      ("no_png", "SegmentationClass/image_1.png", b"x" * 100,
       "/image_1.png` must be a PNG mask .*cannot"),
      ("cut", "SegmentationClass/image_1.png",
       cases.encode(np.random.RandomState(0).randint(20, size=[30, 40]))[:-200],
       "/image_1.png` must be a PNG mask .*(cannot be read|damaged)"),
      ("colours", "SegmentationClass/image_1.png",
       cases.encode(cases.plain(30, 40, 1)), "got an image of the mode RGB"),
      ("size", "SegmentationClass/image_1.png",
       cases.encode(np.zeros([40, 30])),
       "/image_1.png` must be .*size of its image, 30x40: got 40x30"),
      ("class", "SegmentationClass/image_2.png",
       cases.encode(np.full([36, 36], 21)),
       "/image_2.png` must be .*from 0 to 20 and 255 .*: got the class 21"),
      ("image", "JPEGImages/image_2.jpg", b"", "got an empty file"),
      ("too_many", "labels.txt", b"x\n" * 256, "at most 255 .*: got 256"),
  )
  def test_rejects(self, name, content, message):
    cases.voc(self.root)
    if content is None:
      (self.root / name).unlink()
    else:
      cases.write(self.root / name, content)
    self.rejects("voc", f"{message}.*The Pascal VOC project publishes")

  def test_rejects_another_folder(self):
    self.rejects("voc", "form of Pascal VOC: got no SegmentationClass in it")

  def test_asks_for_pillow(self):
    cases.voc(self.root)
    with mock.patch.dict(sys.modules, {"PIL": None}):
      self.rejects("voc", "`Pillow` must be installed .*`pip install pillow`")

  def test_grey_masks_work_as_well(self):
    path = self.root / "mask.png"
    mask = np.arange(12).reshape([3, 4])
    cases.write(path, cases.encode(mask))
    self.assertAllEqual(segmentation.read_mask(path), mask)
    cases.write(path, cases.encode(mask, "BMP"))
    self.assertAllEqual(segmentation.read_mask(path), mask)


if __name__ == "__main__":
  tf.test.main()
