"""Rows of a data set, in memory or as places of files that are read later."""

import dataclasses
from typing import Callable, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

# Rows that one call from TensorFlow to Python looks up.
CHUNK = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
  """Columns with one entry for each row, and what makes a row of them.

  The columns stay in Python: as constants they would swell the graph, which
  TensorFlow limits to 2 GB and which summaries and checkpoints write out.

  Attributes:
    columns: Arrays of shape `[N, ...]`, N at least 1; bytes have dtype object.
    decode: Takes one row's entries as tensors and returns an image of shape
      `[H, W, C]`, of any real dtype, and a label of shape `[]`, or `[H, W]` for
      segmentation.
  """
  columns: Tuple[np.ndarray, ...]
  decode: Callable[..., Tuple[tf.Tensor, tf.Tensor]] = (
      lambda image, label: (image, label))

  def __len__(self) -> int:
    return len(self.columns[0])

  def rows(self, numbers: tf.data.Dataset) -> tf.data.Dataset:
    """Looks rows up, in order.

    Args:
      numbers: Elements `(row, weight)`, scalars of type int64 and float32.

    Returns:
      A data set with elements `(row, weight, *entries)`, not yet decoded.
    """

    def look_up(rows, weights):
      entries = tf.numpy_function(
          lambda rows: tuple(column[rows] for column in self.columns), [rows],
          [tf.as_dtype(column.dtype) for column in self.columns])
      for entry, column in zip(entries, self.columns):
        entry.set_shape([None, *column.shape[1:]])
      return (rows, weights, *entries)

    return numbers.batch(CHUNK).map(look_up).unbatch()


def bytes_column(values) -> np.ndarray:
  """Returns a column of shape `[N]` with texts or paths as bytes."""
  column = np.empty([len(values)], dtype=object)
  column[:] = [str(value).encode() for value in values]
  return column
