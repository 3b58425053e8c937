"""Scores of a network, from counts of what it took for which class."""

from typing import NamedTuple, Optional, Sequence

import numpy as np

from models import segmentation
from tools import datasets

# A confusion matrix of more does not fit a screen.
MAX_CLASSES_OF_TABLE = 20


class Score(NamedTuple):
  """How good a network is, by the whole test set.

  Fields:
    tag: Name for TensorBoard.
    name: Name for people.
    value: From 0 to 1; the higher, the better.
    table: Lines that say more, such as the score of each class, to print
      before; or "".
  """
  tag: str
  name: str
  value: float
  table: str = ""


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray,
                     data: datasets.Dataset) -> np.ndarray:
  """Returns how many images (or pixels) of each class were taken for which.

  Args:
    labels: Integers of shape `[B]` or `[B, H, W]`; the void label counts for
      nothing.
    predictions: Integers of the same shape, from 0 to `data.num_classes - 1`.
    data: The data set.

  Returns:
    int64 array `[num_classes, num_classes]`: labels by predictions. Those of
    several batches add up.
  """
  classes = data.num_classes
  valid = labels != (-1 if data.void_label is None else data.void_label)
  cells = labels[valid].astype(np.int64) * classes + predictions[valid]
  return np.bincount(cells, minlength=classes**2).reshape([classes, classes])


def accuracy(confusion: np.ndarray, data: datasets.Dataset) -> Score:
  """Returns the share of images that were taken for what they are."""
  return Score("accuracy", "accuracy",
               float(np.trace(confusion) / confusion.sum()),
               _confusion_table(confusion, data.class_names))


def mean_iou(confusion: np.ndarray, data: datasets.Dataset) -> Score:
  """Returns the mean over the classes of intersection over union."""
  return Score("mean_iou", "mean IoU", segmentation.mean_iou(confusion),
               _iou_table(segmentation.iou(confusion), data.class_names))


def _names(names: Optional[Sequence[str]], count: int) -> Sequence[str]:
  return names or [str(number) for number in range(count)]


def _confusion_table(confusion: np.ndarray,
                     names: Optional[Sequence[str]]) -> str:
  """Returns a line per class with its row; "" if they are too many to read."""
  if len(confusion) > MAX_CLASSES_OF_TABLE:
    return ""
  names = _names(names, len(confusion))
  corner = "label, taken for:"
  first = max(map(len, (corner, *names)))
  width = max(len(str(confusion.max())), *map(len, names)) + 2
  rows = [[corner, *names],
          *([name, *row] for name, row in zip(names, confusion))]
  return "\n".join(
      f"{row[0]:{first}}" + "".join(f"{cell:>{width}}" for cell in row[1:])
      for row in rows)


def _iou_table(values: np.ndarray, names: Optional[Sequence[str]]) -> str:
  """Returns a line per class; "-" for one that neither occurs nor is found."""
  names = _names(names, len(values))
  width = max(map(len, ("class", *names)))
  lines = [f"{'class':{width}}  IoU"]
  for name, value in zip(names, values):
    text = "-" if np.isnan(value) else f"{value:.4f}"
    lines.append(f"{name:{width}}  {text}")
  return "\n".join(lines)
