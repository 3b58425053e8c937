"""Data sets whose images all fit into memory, as arrays."""

from typing import Callable, NamedTuple, Optional, Sequence

import numpy as np

from tools.datasets import augmentation
from tools.datasets import dataset
from tools.datasets import pixels
from tools.datasets import tables


class Split(NamedTuple):
  """Images of shape `[N, H, W]` or `[N, H, W, C]`, and labels `[N]`."""
  images: np.ndarray
  labels: np.ndarray


def classification(
    name: str, train: Split, test: Split, *, num_classes: int,
    augment: Callable[..., augmentation.ImageAndLabel] = augmentation.keep,
    class_names: Optional[Sequence[str]] = None) -> dataset.Dataset:
  """Makes a data set, each channel standardised by the training images.

  Args:
    name: What the data set is called.
    train: What to train on; at least one image.
    test: What to test on, images of the same shape.
    num_classes: Labels must be from 0 to one less.
    augment: How training images may be changed at random.
    class_names: One name per class, where they are known.

  Raises:
    ValueError: If shapes, numbers or labels do not fit.
  """
  train, test = _checked(train, num_classes), _checked(test, num_classes)
  shape = train.images.shape[1:]
  if test.images.shape[1:] != shape:
    raise ValueError(
        "`train` and `test` must hold images of one shape: got "
        f"{shape} and {test.images.shape[1:]}.")
  return dataset.Dataset(
      name=name, kind=dataset.CLASSIFICATION, image_shape=shape,
      num_classes=num_classes, train=tables.Table(tuple(train)),
      test=tables.Table(tuple(test)), scale=pixels.scale_of(train.images),
      augment=augment,
      class_names=None if class_names is None else tuple(class_names))


def _checked(split: Split, num_classes: int) -> Split:
  """Returns checked arrays with a channel axis, and labels of type int64."""
  images, labels = (np.asarray(array) for array in split)
  if images.ndim not in (3, 4):
    raise ValueError(
        "`images` must have the shape [N, H, W] or [N, H, W, C]: got "
        f"{images.shape}.")
  for array, argument in ((images, "images"), (labels, "labels")):
    if array.dtype.kind not in "buif":
      raise ValueError(
          f"`{argument}` must hold numbers: got the type {array.dtype}.")
  if images.ndim == 3:
    images = images[..., None]
  numbers = labels.astype(np.int64).reshape(-1)
  if not len(numbers) or not images.size or len(images) != len(numbers):
    raise ValueError(
        "`labels` must hold one label for each image, and at least one: got "
        f"{len(images)} images and {len(numbers)} labels.")
  if (numbers != labels.reshape(-1)).any() or not (
      0 <= numbers.min() and numbers.max() < num_classes):
    raise ValueError(
        f"`labels` must be whole numbers from 0 to {num_classes - 1}: got "
        f"{labels.min()} to {labels.max()}.")
  return Split(images, numbers)
