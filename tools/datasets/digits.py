"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn."""

import functools

import numpy as np

from tools.datasets import arrays
from tools.datasets import augmentation
from tools.datasets import dataset


def load() -> dataset.Dataset:
  """Returns the digits; a fifth, which no option changes, is for testing.

  So the accuracies of all runs compare. Augmentation shifts by a pixel.
  """
  # Here, since the import takes a second that other data does not need.
  from sklearn import datasets
  digits = datasets.load_digits()
  permutation = np.random.RandomState(0).permutation(len(digits.target))
  images = digits.images[permutation].astype(np.uint8)
  labels = digits.target[permutation]
  num_test = len(labels) // 5
  return arrays.classification(
      "digits", arrays.Split(images[num_test:], labels[num_test:]),
      arrays.Split(images[:num_test], labels[:num_test]), num_classes=10,
      augment=functools.partial(augmentation.shift, padding=1,
                                fill=np.zeros([1], np.float32), flip=False))
