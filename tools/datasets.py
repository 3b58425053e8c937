"""Labelled images in memory, and the order in which training takes them."""

from typing import NamedTuple

import numpy as np


class Dataset(NamedTuple):
  """Images of shape `[N, H, W, C]`, float32, and labels `[N]`, int64."""
  train_images: np.ndarray
  train_labels: np.ndarray
  test_images: np.ndarray
  test_labels: np.ndarray
  num_classes: int


def load(name: str) -> Dataset:
  """Returns a data set, each channel standardised by the training images.

  A fifth of the digits, which no option changes, is for testing, so that the
  accuracies of all runs compare.

  Args:
    name: `digits` for scikit-learn's 8x8 handwritten digits, or the path of an
      `.npz` file with arrays `x_train` and `x_test` of shape `[N, H, W]` or
      `[N, H, W, C]`, and `y_train` and `y_test` with labels from 0, as Keras
      stores MNIST.

  Raises:
    ValueError: If `name` is neither.
  """
  if name == "digits":
    # Here, since the import takes a second that other data does not need.
    from sklearn import datasets
    digits = datasets.load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    x, y = digits.images[order], digits.target[order]
    num_test = len(y) // 5
    return _standardised(x[num_test:], y[num_test:], x[:num_test], y[:num_test])
  try:
    with open(name, "rb") as file, np.load(file) as arrays:
      return _standardised(*(arrays[key] for key in (
          "x_train", "y_train", "x_test", "y_test")))
  except Exception as error:  # NumPy has many ways to fail on a strange file.
    raise ValueError(
        "`dataset` must be `digits` or the path of an .npz file with images "
        "x_train and x_test and labels y_train and y_test: got "
        f"{name} ({error}).") from error


def _standardised(train_images: np.ndarray, train_labels: np.ndarray,
                  test_images: np.ndarray, test_labels: np.ndarray) -> Dataset:
  """Checks the arrays, adds a missing channel axis, and scales the images."""
  shape = train_images.shape[1:]
  if len(shape) not in (2, 3) or test_images.shape[1:] != shape:
    raise ValueError(
        "images must have one shape [N, H, W] or [N, H, W, C], got "
        f"{train_images.shape} and {test_images.shape}")
  if len(shape) == 2:
    train_images, test_images = train_images[..., None], test_images[..., None]
  train_labels = train_labels.astype(np.int64).reshape(-1)
  test_labels = test_labels.astype(np.int64).reshape(-1)
  for images, labels in ((train_images, train_labels),
                         (test_images, test_labels)):
    if not len(labels) or len(images) != len(labels) or labels.min() < 0:
      raise ValueError(
          "there must be images, and one label from 0 for each, got "
          f"{len(images)} images and {len(labels)} labels")
  mean = train_images.mean(axis=(0, 1, 2))
  deviation = train_images.std(axis=(0, 1, 2)) + 1e-6
  return Dataset(
      ((train_images - mean) / deviation).astype(np.float32), train_labels,
      ((test_images - mean) / deviation).astype(np.float32), test_labels,
      int(max(train_labels.max(), test_labels.max())) + 1)


def batch_rows(step: int, *, num_rows: int, batch_size: int,
               seed: int) -> np.ndarray:
  """Returns which rows of the training set a step takes, shape `[batch_size]`.

  A function of its arguments alone, so that a run can stop and continue
  anywhere. Each epoch is a new random order, without an incomplete last batch.

  Args:
    step: Number of steps taken so far.
    num_rows: Number of rows in the training set, at least `batch_size`.
    batch_size: Number of rows per step.
    seed: Chooses the orders.
  """
  epoch, index = divmod(step, num_rows // batch_size)
  order = np.random.RandomState([seed, epoch]).permutation(num_rows)
  return order[index * batch_size:(index + 1) * batch_size]
