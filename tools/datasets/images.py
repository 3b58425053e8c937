"""Photographs in one folder per class, as JPEG or PNG files."""

import functools
import pathlib
from typing import Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from tools.datasets import augmentation
from tools.datasets import dataset
from tools.datasets import errors
from tools.datasets import files
from tools.datasets import pixels
from tools.datasets import tables

IMAGE_SIZE = 224

# Names of the folder with the images to test on; the first that exists counts.
TEST_FOLDERS = ("test", "val", "validation")
ADVICE = ("`data_dir` must hold folders train and test (or val), each with one "
          "folder of JPEG or PNG files per class.")


def load(data_dir: errors.Path, *,
         image_size: int = IMAGE_SIZE) -> dataset.Dataset:
  """Returns the images below `train` and `test` (or `val`, `validation`).

  Classes are numbered in the order of their names. Each file must start and end
  as an image, which is checked; what lies between, is not.

  Args:
    data_dir: Folder with files such as `train/cat/1.jpg` and `test/cat/2.png`.
    image_size: Height and width of the images in batches; see `photographs`.

  Raises:
    DatasetError: If folders or files are missing, empty or of another kind.
  """
  root = errors.directory(data_dir, "a folder of images", ADVICE)
  train = errors.directory(root / "train", "a folder with one folder a class",
                           ADVICE)
  found = [name for name in TEST_FOLDERS if (root / name).is_dir()]
  test = errors.directory(root / (found or TEST_FOLDERS)[0],
                          "a folder with one folder a class", ADVICE)
  names = _classes(train)
  strange = sorted(set(_classes(test)) - set(names))
  if strange:
    raise errors.unfit(
        test, expected=f"a folder with the classes of {train}",
        found=f"the class {strange[0]}, which is not there", advice=ADVICE)
  return photographs(
      str(data_dir), _table(train, names), _table(test, names),
      num_classes=len(names), image_size=image_size, class_names=names)


def photographs(name: str, train: tables.Table, test: tables.Table, *,
                num_classes: int, image_size: int,
                class_names: Optional[Sequence[str]]) -> dataset.Dataset:
  """Makes a data set of colour images of any size, with one label each.

  Training cuts random windows and mirrors; tests cut the middle.

  Args:
    name: What the data set is called.
    train: Rows that decode to images of any size.
    test: Likewise.
    num_classes: Labels are from 0 to one less.
    image_size: Height and width of the images in batches.
    class_names: One name per class, where they are known.
  """
  return dataset.Dataset(
      name=name, kind=dataset.CLASSIFICATION,
      image_shape=(image_size, image_size, 3), num_classes=num_classes,
      train=train, test=test, scale=pixels.PHOTOGRAPHS,
      augment=functools.partial(augmentation.random_window, size=image_size),
      prepare=functools.partial(augmentation.central_window, size=image_size),
      class_names=None if class_names is None else tuple(class_names))


def _classes(folder: pathlib.Path) -> Tuple[str, ...]:
  names = sorted(path.name for path in folder.iterdir() if path.is_dir())
  if not names:
    raise errors.unfit(folder, expected="a folder with one folder a class",
                       found="no folder in it", advice=ADVICE)
  return tuple(names)


def _table(folder: pathlib.Path, names: Sequence[str]) -> tables.Table:
  """Returns the files of one split; a class may lack images to test on."""
  paths, labels = [], []
  for label, name in enumerate(names):
    found = []
    if (folder / name).is_dir():
      found = sorted(path for path in (folder / name).iterdir()
                     if path.suffix.lower() in files.ENDINGS)
    if not found and (folder.name == "train" or (folder / name).exists()):
      raise errors.unfit(
          folder / name, expected="a folder with JPEG or PNG files",
          found="none", advice=ADVICE)
    for path in found:
      files.check_image(path, ADVICE)
    paths += found
    labels += [label] * len(found)
  return tables.Table((tables.bytes_column(paths), np.array(labels, np.int64)),
                      _decode)


def _decode(path: tf.Tensor, label: tf.Tensor):
  return files.decode_colours(tf.io.read_file(path)), label
