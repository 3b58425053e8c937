"""Finds a data set by its name."""

import pathlib
from typing import Optional

from tools.datasets import cifar
from tools.datasets import digits
from tools.datasets import errors
from tools.datasets import idx
from tools.datasets import images
from tools.datasets import npz
from tools.datasets import segmentation
from tools.datasets import shapes
from tools.datasets import tfrecords
from tools.datasets.dataset import Dataset

# Those that must be told where their files are, with where to get them.
_FROM_FILES = {
    **{name: cifar.advice(name) for name in cifar.VARIANTS},
    "images": images.ADVICE,
    "tfrecords": tfrecords.ADVICE,
    "voc": segmentation.ADVICE,
}
_OF_ANY_SIZE = ("images", "tfrecords", "voc", "shapes")

NAMES = ("digits", "shapes", *idx.VARIANTS, *_FROM_FILES)


def load(name: str, data_dir: Optional[errors.Path] = None, *,
         image_size: Optional[int] = None) -> Dataset:
  """Returns a data set, checked as far as can be done before training.

  Args:
    name: One of `NAMES`, or the path of an `.npz` file with arrays `x_train`,
      `y_train`, `x_test` and `y_test`, as Keras stores MNIST.
    data_dir: Folder or archive with the files. `mnist` and `fashion_mnist`
      look in the usual places without it; `digits`, `shapes` and an `.npz` file
      take none.
    image_size: Height and width of the images in batches, for `images`,
      `tfrecords`, `voc` and `shapes`; each has a default.

  Raises:
    DatasetError: If the data set is unknown, missing, damaged or of another
      kind, or an argument does not fit it: one line that says what to do.
  """
  is_path = name not in NAMES
  if is_path and not (name.endswith(".npz") or pathlib.Path(name).is_file()):
    raise errors.DatasetError(
        f"`dataset` must be one of {', '.join(NAMES)}, or the path of an .npz "
        "file with images x_train and x_test and labels y_train and y_test: "
        f"got {name}.")
  if name in _FROM_FILES and data_dir is None:
    raise errors.DatasetError(
        f"`data_dir` must say where the files of {name} are: got none. "
        f"{_FROM_FILES[name]}")
  if data_dir is not None and name not in (*_FROM_FILES, *idx.VARIANTS):
    raise errors.DatasetError(
        f"`data_dir` must not be given for {name}: got {data_dir}.")
  if image_size is not None and name not in _OF_ANY_SIZE:
    raise errors.DatasetError(
        f"`image_size` must not be given for {name}, whose images have one "
        f"size: got {image_size}.")
  if image_size is not None and image_size < 32:
    raise errors.DatasetError(
        f"`image_size` must be at least 32: got {image_size}.")
  size = {} if image_size is None else {"image_size": image_size}
  if is_path:
    return npz.load(name)
  if name == "digits":
    return digits.load()
  if name == "shapes":
    return shapes.load(**size)
  if name in idx.VARIANTS:
    return idx.load(name, data_dir)
  if name in cifar.VARIANTS:
    return cifar.load(name, data_dir)
  loaders = {"images": images, "tfrecords": tfrecords, "voc": segmentation}
  return loaders[name].load(data_dir, **size)
