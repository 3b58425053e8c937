"""Encoded images in TFRecord files, as the scripts for ImageNet write them.

Each record is a `tf.train.Example` with the features `image/encoded` (a JPEG or
PNG file) and `image/class/label` (an integer).

The files are not read in order but at the places of the records, which loading
finds once by the length before each. So every epoch is in a new order over all
images, and a run can continue anywhere without reading what lies before. A
record is: its length (8 bytes, little-endian), a checksum of that (4), its
bytes, and a checksum of those (4).
"""

import pathlib
import re
import struct
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from tools.datasets import dataset
from tools.datasets import errors
from tools.datasets import files
from tools.datasets import images
from tools.datasets import tables

HEADER, FOOTER = 12, 4
IMAGE, LABEL = "image/encoded", "image/class/label"

ADVICE = (f"`data_dir` must hold TFRecord files of examples with {IMAGE} and "
          f"{LABEL}, with train and with test or validation in their names.")


def load(data_dir: errors.Path, *,
         image_size: int = images.IMAGE_SIZE) -> dataset.Dataset:
  """Returns the images of a folder of TFRecord files.

  Files belong to training or tests by the word `train`, or `test`, `val` or
  `validation`, in their names, such as `train-00000-of-01024` or
  `flowers_validation.tfrecord`. Labels are those of the records, from 0; where
  records start at 1, class 0 stays empty. With a file `labels.txt`, one class a
  line, loading reads no record but the first of each file; without it, all, to
  learn how many classes there are.

  Args:
    data_dir: Folder with the files.
    image_size: Height and width of the images in batches; see
      `images.photographs`.

  Raises:
    DatasetError: If files are missing, cut short or of another kind.
  """
  root = errors.directory(data_dir, "a folder of TFRecord files", ADVICE)
  names = files.class_names(root, ADVICE)
  places = [_places(root, words) for words in
            (("train",), ("test", "val", "validation"))]
  largest = max(_check_records(paths, names) for paths in places)
  num_classes = largest + 1 if names is None else len(names)
  train, test = (_table(paths, num_classes) for paths in places)
  return images.photographs(
      str(data_dir), train, test, num_classes=num_classes,
      image_size=image_size, class_names=names)


def _places(root: pathlib.Path,
            words: Sequence[str]) -> List[Tuple[pathlib.Path, np.ndarray]]:
  """Returns each file of a split, and `[N, 2]` offsets and lengths in it."""
  pattern = re.compile(rf"(^|[^a-z])({'|'.join(words)})([^a-z]|$)")
  paths = sorted(path for path in root.iterdir()
                 if path.is_file() and pattern.search(path.name.lower()))
  if not paths:
    raise errors.unfit(
        root, expected=f"a folder with a file for {words[0]}", found="none",
        advice=ADVICE)
  return [(path, np.array(list(_records(path)), np.int64)) for path in paths]


def _records(path: pathlib.Path) -> Iterator[Tuple[int, int]]:
  """Yields offset and length of each record's bytes."""
  expected = "a TFRecord file that is not compressed"
  with errors.reading(path, expected, ADVICE), open(path, "rb") as file:
    size = file.seek(0, 2)
    if not size:
      raise errors.unfit(
          path, expected=expected, found="an empty file", advice=ADVICE)
    start = 0
    while start < size:
      file.seek(start)
      header = file.read(HEADER)
      length = (struct.unpack("<Q", header[:8])[0]
                if len(header) == HEADER else size)
      end = start + HEADER + length + FOOTER
      if end > size:
        raise errors.unfit(
            path, expected=expected,
            found=f"{size} bytes, cut short or of another kind: the "
            f"record at byte {start} needs {end}", advice=ADVICE)
      yield start + HEADER, length
      start = end


def _check_records(places, names: Optional[Sequence[str]]) -> int:
  """Checks records, all or the first of each file; returns the largest label.
  """
  largest = 0
  for path, offsets in places:
    if names is not None:
      offsets = offsets[:1]
    for offset, length in offsets.tolist():
      label = _label(path, offset, length)
      if label < 0 or names is not None and label >= len(names):
        allowed = f"0 to {len(names) - 1}" if names else "0"
        raise errors.unfit(
            path, expected=f"a file with labels from {allowed}",
            found=f"the label {label} at byte {offset}", advice=ADVICE)
      largest = max(largest, label)
  return largest


def _label(path: pathlib.Path, offset: int, length: int) -> int:
  expected = f"a TFRecord file of examples with {IMAGE} and {LABEL}"
  example = tf.train.Example()
  try:
    example.ParseFromString(_read(path, offset, length))
  except Exception as error:  # Versions of protobuf raise different classes.
    raise errors.unfit(
        path, expected=expected, found=f"other bytes at byte {offset}",
        advice=ADVICE) from error
  features = example.features.feature
  counts = (len(features[IMAGE].bytes_list.value),
            len(features[LABEL].int64_list.value))
  if counts != (1, 1):
    raise errors.unfit(
        path, expected=expected, found=f"{counts[0]} and {counts[1]} of them "
        f"in the record at byte {offset}", advice=ADVICE)
  image = features[IMAGE].bytes_list.value[0]
  if not image.startswith(tuple(start for start, _ in files.MARKS)):
    raise errors.unfit(
        path, expected=f"a file with JPEG or PNG images as {IMAGE}",
        found=f"{image[:8]!r} in the record at byte {offset}", advice=ADVICE)
  return features[LABEL].int64_list.value[0]


def _read(path: errors.Path, offset: int, length: int) -> bytes:
  with open(path, "rb") as file:
    file.seek(offset)
    return file.read(length)


def _table(places, num_classes: int) -> tables.Table:
  paths = tables.bytes_column([path for path, _ in places])
  file_numbers = np.repeat(np.arange(len(places)),
                           [len(offsets) for _, offsets in places])
  offsets = np.concatenate([offsets for _, offsets in places])

  def read(number, offset, length):
    return _read(paths[number].decode(), offset, length)

  def decode(number, offset, length):
    record = tf.numpy_function(read, [number, offset, length], tf.string)
    features = tf.io.parse_single_example(
        tf.ensure_shape(record, []),
        {IMAGE: tf.io.FixedLenFeature([], tf.string),
         LABEL: tf.io.FixedLenFeature([], tf.int64)})
    label = features[LABEL]
    check = tf.debugging.Assert(
        tf.logical_and(label >= 0, label < num_classes),
        [f"labels must be from 0 to {num_classes - 1}; byte", offset, "of file",
         tf.gather([path.decode() for path in paths], number), "has", label])
    with tf.control_dependencies([check]):
      return files.decode_colours(features[IMAGE]), tf.identity(label)

  return tables.Table((file_numbers, offsets[:, 0], offsets[:, 1]), decode)
