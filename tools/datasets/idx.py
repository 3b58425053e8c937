"""MNIST and Fashion-MNIST in their IDX files, plain or compressed by gzip.

An IDX file starts with two zero bytes, one for the type (8 for unsigned bytes)
and one for the number of axes; then come the sizes of the axes, as big-endian
32-bit integers, and the bytes.

References:
  LeCun, Cortes and Burges, "The MNIST database of handwritten digits",
    http://yann.lecun.com/exdb/mnist/
  Xiao, Rasul and Vollgraf, "Fashion-MNIST", 2017,
    https://arxiv.org/abs/1708.07747
"""

import functools
import gzip
import pathlib
from typing import NamedTuple, Optional, Sequence

import numpy as np

from tools.datasets import arrays
from tools.datasets import augmentation
from tools.datasets import dataset
from tools.datasets import errors

NUM_CLASSES = 10
GZIP_MAGIC = b"\x1f\x8b"


class Variant(NamedTuple):
  """What tells the data sets of this form apart."""
  places: Sequence[str]  # Folders in which they stand without being asked.
  advice: str  # Where to get the files.
  flip: bool  # Whether a mirrored image is still one of its class.
  class_names: Sequence[str]


VARIANTS = {
    "mnist": Variant(
        ("/usr/share/datasets/mnist", "/usr/share/mnist"),
        "The MNIST project publishes the files.", False,
        tuple("0123456789")),
    "fashion_mnist": Variant(
        ("/usr/share/datasets/fashion-mnist",
         "/usr/share/datasets/fashion_mnist", "/usr/share/fashion-mnist"),
        "The Debian package dataset-fashion-mnist installs the files, "
        "zalandoresearch/fashion-mnist publishes them.", True,
        ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal",
         "shirt", "sneaker", "bag", "ankle boot")),
}


def load(name: str, data_dir: Optional[errors.Path] = None) -> dataset.Dataset:
  """Returns MNIST or Fashion-MNIST; augmentation shifts by up to 2 pixels.

  Args:
    name: A key of `VARIANTS`.
    data_dir: Folder of the four files; by default a place where systems keep
      them.

  Raises:
    DatasetError: If a file is missing or damaged, or they do not fit together.
  """
  variant = VARIANTS[name]
  advice = variant.advice + " Give their folder in `data_dir`."
  if data_dir is None:
    found = [place for place in variant.places if pathlib.Path(place).is_dir()]
    data_dir = (found or variant.places)[0]
  folder = errors.directory(
      data_dir, f"the folder with the files of {name}", advice)
  train, test = (_split(folder, prefix, advice) for prefix in ("train", "t10k"))
  if train.images.shape[1:] != test.images.shape[1:]:
    raise errors.unfit(
        folder, expected="a folder with images of one size",
        found=f"{train.images.shape[1:]} for training and "
        f"{test.images.shape[1:]} for tests", advice=advice)
  return arrays.classification(
      name, train, test, num_classes=NUM_CLASSES,
      augment=functools.partial(
          augmentation.shift, padding=2, fill=np.zeros([1], np.float32),
          flip=variant.flip),
      class_names=variant.class_names)


def _split(folder: pathlib.Path, prefix: str, advice: str) -> arrays.Split:
  """Reads the images and labels of training (`train`) or tests (`t10k`)."""
  images_path = _find(folder, f"{prefix}-images", 3)
  labels_path = _find(folder, f"{prefix}-labels", 1)
  images = read(images_path, num_axes=3, advice=advice)
  labels = read(labels_path, num_axes=1, advice=advice)
  if not images.size:
    raise errors.unfit(
        images_path, expected="a file with images", found="none", advice=advice)
  if len(labels) != len(images):
    raise errors.unfit(
        labels_path,
        expected=f"a file with {len(images)} labels, as {images_path} "
        "has images", found=f"{len(labels)} labels", advice=advice)
  if labels.max() >= NUM_CLASSES:
    raise errors.unfit(
        labels_path, expected=f"a file with labels from 0 to {NUM_CLASSES - 1}",
        found=f"the label {labels.max()}", advice=advice)
  return arrays.Split(images, labels)


def _find(folder: pathlib.Path, start: str, num_axes: int) -> pathlib.Path:
  """Returns the file's path; names are in use with a hyphen and with a dot."""
  paths = [folder / f"{start}{mark}idx{num_axes}-ubyte{ending}"
           for mark in "-." for ending in ("", ".gz")]
  return next((path for path in paths if path.exists()), paths[0])


def read(path: errors.Path, *, num_axes: int, advice: str = "") -> np.ndarray:
  """Reads an IDX file of unsigned bytes, plain or compressed by gzip.

  Args:
    path: The file; its first bytes tell whether it is compressed.
    num_axes: Number of axes that the array must have.
    advice: Where to get the file, for errors.

  Raises:
    DatasetError: If the file is missing, cut short or of another kind.
  """
  magic = bytes([0, 0, 8, num_axes])
  expected = f"an IDX file with the magic number 0x{magic.hex()}"
  with errors.reading(path, expected, advice):
    content = pathlib.Path(path).read_bytes()
    if content.startswith(GZIP_MAGIC):
      content = gzip.decompress(content)
  header = 4 + 4 * num_axes
  if content[:4] != magic[:len(content)]:
    raise errors.unfit(
        path, expected=expected, found=f"0x{content[:4].hex()}", advice=advice)
  if len(content) < header:
    raise errors.unfit(
        path, expected=expected, found=f"only {len(content)} bytes",
        advice=advice)
  sizes = np.frombuffer(content, ">u4", num_axes, offset=4).tolist()
  size = header + int(np.prod(sizes, dtype=object))
  if len(content) != size:
    raise errors.unfit(
        path,
        expected=f"a file of {size} bytes, as its header says (sizes {sizes})",
        found=f"{len(content)} bytes", advice=advice)
  return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)
