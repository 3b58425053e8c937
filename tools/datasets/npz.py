"""Images and labels in a NumPy archive, as Keras stores MNIST."""

import zipfile

import numpy as np

from tools.datasets import arrays
from tools.datasets import dataset
from tools.datasets import errors

KEYS = ("x_train", "y_train", "x_test", "y_test")
EXPECTED = f"a NumPy archive with the arrays {', '.join(KEYS)}"
ADVICE = "`numpy.savez` writes one."


def load(path: errors.Path) -> dataset.Dataset:
  """Returns the images of an .npz file; nothing is known that augments them.

  Args:
    path: File with arrays `x_train` and `x_test` of shape `[N, H, W]` or
      `[N, H, W, C]`, and `y_train` and `y_test` with labels from 0.

  Raises:
    DatasetError: If it is anything else.
  """
  with errors.reading(path, EXPECTED, ADVICE):
    try:
      with open(path, "rb") as file, np.load(file) as archive:
        images, labels, test_images, test_labels = (
            archive[key] for key in KEYS)
    # NumPy has many ways to fail on a strange file; a .npy file is an array,
    # which has no context.
    except (ValueError, KeyError, AttributeError, TypeError,
            zipfile.BadZipFile) as error:
      found = str(error).strip("'\"").partition("\n")[0] or "something else"
      raise errors.unfit(
          path, expected=EXPECTED, found=found, advice=ADVICE) from error
  try:
    num_classes = max(
        int(np.max(array)) if array.size else 0
        for array in (labels, test_labels)) + 1
    return arrays.classification(
        str(path), arrays.Split(images, labels),
        arrays.Split(test_images, test_labels), num_classes=num_classes)
  except (ValueError, TypeError) as error:
    raise errors.DatasetError(f"`{path}` does not fit: {error}") from error
