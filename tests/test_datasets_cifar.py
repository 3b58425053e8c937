"""Tests for CIFAR, and its restricted pickles, in tools.datasets."""

import os
import pathlib
import pickle

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import dataset_cases as cases
from tools import datasets
from tools.datasets import restricted_pickle


class CifarTest(parameterized.TestCase):

  def place(self, contents, how, name, is_pickle):
    """Writes the files; returns what `data_dir` is."""
    root = pathlib.Path(self.create_tempdir().full_path)
    unpacked = {"cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
                "cifar100": ("cifar-100-binary", "cifar-100-python")}
    folder = unpacked[name][is_pickle]
    if how in ("archive", "folder_of_archive"):
      form = "python" if is_pickle else "binary"
      path = root / f"cifar-{name[5:]}-{form}.tar.gz"
      cases.archive(path, contents, folder)
      return path if how == "archive" else root
    for file, content in contents.items():
      cases.write(root / (folder if how == "unpacked" else "") / file, content)
    return root

  @parameterized.product(
      name=("cifar10", "cifar100"), is_pickle=(False, True),
      how=("files", "unpacked", "archive", "folder_of_archive"))
  def test_reads_images_and_labels(self, name, is_pickle, how):
    contents, images, labels = cases.cifar_files(name, is_pickle=is_pickle)
    data = datasets.load(name, self.place(contents, how, name, is_pickle))
    self.assertEqual((data.image_shape, data.num_classes),
                     ((32, 32, 3), int(name[5:])))
    np.testing.assert_array_equal(data.train.columns[0], images)
    np.testing.assert_array_equal(data.train.columns[1], labels)
    self.assertEqual(data.size("test"), 2)

  def test_augmentation_shifts_by_four_and_mirrors(self):
    contents, images, labels = cases.cifar_files("cifar10", is_pickle=False,
                                                 rows=1)
    data = datasets.load(
        "cifar10", self.place(contents, "files", "cifar10", False))
    found = cases.run(data.batches("train", 5), 20)
    shifts = set()
    for image, label in zip(cases.original(data, cases.column(found, 0)),
                            cases.column(found, 1)):
      before = images[labels == label][0]
      padded = np.full([40, 40, 3], data.scale.mean)
      padded[4:36, 4:36] = before
      matches = [
          (i, j, step) for i in range(9) for j in range(9) for step in (1, -1)
          if np.allclose(padded[i:i + 32, j:j + 32][:, ::step], image,
                         atol=1e-3)]
      self.assertLen(matches, 1)
      shifts.update(matches)
    for axis, expected in enumerate([set(range(9))] * 2 + [{1, -1}]):
      self.assertEqual({shift[axis] for shift in shifts}, expected)

  def test_texts_of_python_3_as_keys(self):
    contents, images, _ = cases.cifar_files("cifar100", is_pickle=True)
    contents["train"] = pickle.dumps({
        key.decode(): value
        for key, value in pickle.loads(contents["train"]).items()})
    data = datasets.load(
        "cifar100", self.place(contents, "files", "cifar100", True))
    np.testing.assert_array_equal(data.train.columns[0], images)

  @parameterized.named_parameters(
      ("cut", False, b"x" * 3072, "3073 bytes for each image: got 3072 bytes"),
      ("empty", False, b"", "a file with images: got none"),
      ("label", False, b"\x0a" + b"x" * 3072,
       "labels from 0 to 9: got labels from 10 to 10"),
      ("missing", False, None, "` must be a file of CIFAR: got no such file"),
      ("no_pickle", True, b"x" * 50, "got something else"),
      ("cut_pickle", True, pickle.dumps({"data": 1})[:-3],
       "got something else .*must be a whole pickle|truncated"),
      ("list", True, pickle.dumps([1]), "dictionary .*got a list"),
      ("keys", True, pickle.dumps({"data": 1}), r"got the keys \[b'data'\]"),
      ("shape", True, pickle.dumps({"data": np.zeros([2, 3], np.uint8),
                                    "labels": [1, 2]}),
       r"got data of shape \(2, 3\) and type uint8"),
      ("type", True, pickle.dumps({"data": np.zeros([2, 3072]),
                                   "labels": [1, 2]}), "type float64"),
      ("text", True, pickle.dumps({"data": "x", "labels": [1, 2]}),
       "type str"),
      ("count", True, pickle.dumps({"data": np.zeros([2, 3072], np.uint8),
                                    "labels": [1]}),
       r"2 whole numbers as labels: got labels of shape \(1,\)"),
      ("range", True, pickle.dumps({"data": np.zeros([2, 3072], np.uint8),
                                    "labels": [1, -1]}),
       "labels from 0 to 9: got labels from -1 to 1"),
      ("code", True, pickle.dumps(os.system), "`posix.system` must not stand"),
  )
  def test_rejects(self, is_pickle, content, message):
    contents, _, _ = cases.cifar_files("cifar10", is_pickle=is_pickle)
    name = "data_batch_3" if is_pickle else "data_batch_3.bin"
    contents[name] = content
    if content is None:
      del contents[name]
    folder = self.place(contents, "files", "cifar10", is_pickle)
    with self.assertRaisesRegex(
        datasets.DatasetError,
        f"{name}.*({message}).*The CIFAR project publishes"):
      datasets.load("cifar10", folder)

  def test_rejects_broken_archives_and_other_places(self):
    root = pathlib.Path(self.create_tempdir().full_path)
    contents, _, _ = cases.cifar_files("cifar10", is_pickle=False, rows=40)
    del contents["test_batch.bin"]
    cases.archive(root / "part.tar.gz", contents)
    whole = (root / "part.tar.gz").read_bytes()
    cases.write(root / "cut.tar.gz", whole[:len(whole) // 2])
    cases.write(root / "text.tar.gz", b"no archive")
    cases.archive(root / "other.tar.gz", {"a": b"b"})
    cases.write(root / "strange" / "file", b"")
    for name, message in (
        ("part.tar.gz", "none of the name test_batch.bin"),
        ("cut.tar.gz", "cut short or damaged|damaged or other file"),
        ("text.tar.gz", r"a damaged or other file \("),
        ("other.tar.gz", r"got an archive of \['a'\]"),
        ("strange", r"a folder with one .*got \['file'\]"),
        ("nowhere", "got nothing there")):
      with self.assertRaisesRegex(datasets.DatasetError, message):
        datasets.load("cifar10", root / name)


class RestrictedPickleTest(parameterized.TestCase):

  @parameterized.parameters(*range(pickle.HIGHEST_PROTOCOL + 1))
  def test_reads_arrays_and_plain_types(self, protocol):
    value = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "a": [1, "b"],
             "scalar": np.float32(2.5), "none": (None, True)}
    found = restricted_pickle.loads(pickle.dumps(value, protocol))
    np.testing.assert_array_equal(found.pop(b"data"), value.pop(b"data"))
    self.assertEqual(found, value)

  def test_runs_no_code(self):
    for content in (b"cos\nsystem\n(S'exit 1'\ntR.",
                    b"cbuiltins\neval\n(S'1/0'\ntR.",
                    b"cnumpy\nload\n(S'x'\ntR."):
      with self.assertRaisesRegex(pickle.UnpicklingError, "must not stand in"):
        restricted_pickle.loads(content)
    with self.assertRaisesRegex(pickle.UnpicklingError, "must be latin1"):
      restricted_pickle.loads(b"c_codecs\nencode\n(V1\nVrot13\ntR.")


if __name__ == "__main__":
  tf.test.main()
