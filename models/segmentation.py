"""Loss and scores of models that give each pixel a class.

Pixels with the void label (object borders, what nobody annotated) count
nowhere. So towers with equally many images may have unequal numbers of pixels
that count, and a mean over such pixels must say how many they are:

    def model_fn(images, labels):
      logits = unet.logits(images, num_classes=21, training=True)
      loss, weight = segmentation.loss(logits, labels, num_classes=21)
      predictions = tf.argmax(logits, axis=-1)
      return towers.TowerSpec(
          loss, {"confusion": segmentation.confusion_matrix(
              labels, predictions, num_classes=21)}, weight=weight)

The matrices are outputs with one row per image, and add up over batches:

    confusion += sess.run(graph.outputs["confusion"], feed).sum(axis=0)
    print(segmentation.mean_iou(confusion))

References:
  Long, Shelhamer and Darrell, "Fully Convolutional Networks for Semantic
    Segmentation", 2015, section 5 (scores), https://arxiv.org/abs/1411.4038
  Szegedy et al., "Rethinking the Inception Architecture for Computer Vision",
    2015, section 7 (label smoothing), https://arxiv.org/abs/1512.00567
"""

from typing import NamedTuple, Optional, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

VOID_LABEL = 255  # As in the Pascal VOC masks.


class Loss(NamedTuple):
  """What `loss` returns: scalar tensors of one floating type.

  Fields:
    loss: The mean over the pixels that count; 0 where none does.
    weight: How many pixels count, or the sum of their weights.
  """
  loss: tf.Tensor
  weight: tf.Tensor


def loss(logits: tf.Tensor, labels: tf.Tensor, *, num_classes: int,
         void_label: Optional[int] = VOID_LABEL,
         weight: Optional[tf.Tensor] = None,
         label_smoothing: float = 0.0) -> Loss:
  """Returns the mean softmax cross entropy over the pixels that count.

  With `w_p` the weight of pixel `p`, 0 where its label is void, and `l_p` its
  cross entropy, the loss is

      sum_p(w_p * l_p) / sum_p(w_p)

  and 0, with gradients of 0, where the sum of weights is 0. With label
  smoothing `e`, the cross entropy is that of the probability `1 - e + e / K`
  for the right one of the K classes, and `e / K` for each other one. Logits of
  16 bits are cast to float32 before: no such type holds the number of pixels of
  an image.

  Args:
    logits: Float tensor of shape `[B, H, W, num_classes]`.
    labels: Integer tensor of shape `[B, H, W]` with classes from 0, or
      `void_label`. Any other label is an error when the graph runs.
    num_classes: Number of classes.
    void_label: Label of pixels that do not count; it may be that of a class.
      None if all count.
    weight: Tensor of shape `[B]`, one weight per image (0 for one that only
      fills up a batch), or `[B, H, W]`, one per pixel (such as the border
      weights of the U-Net paper). None for 1.
    label_smoothing: Part of the probability that all classes share, 0 to 1.

  Returns:
    A `Loss` with the mean, and its `weight` for `towers.TowerSpec`. Both have
    the type of `logits`, or float32 if that has 16 bits.

  Raises:
    TypeError: If `labels` is not of an integer type.
    ValueError: If a shape is not as above, `num_classes` is less than 1, or
      `label_smoothing` is not from 0 to 1.
  """
  _check_num_classes(num_classes)
  if not 0.0 <= label_smoothing <= 1.0:
    raise ValueError(
        "`label_smoothing` must be a part of the probability: expected a "
        f"number from 0 to 1, got {label_smoothing}.")
  logits = tf.convert_to_tensor(logits)
  if (logits.shape.ndims != 4 or
      tf.dimension_value(logits.shape[-1]) != num_classes):
    raise ValueError(
        f"`logits` must have a shape [B, H, W, {num_classes}], with the "
        f"`num_classes` as its last axis: got {logits.shape}.")
  if logits.dtype.size < 4:
    logits = tf.cast(logits, tf.float32)
  labels, valid = _labels_and_valid(labels, num_classes, void_label)
  weights = tf.cast(valid, logits.dtype)
  if weight is not None:
    weights *= _per_pixel(tf.cast(weight, logits.dtype))
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels=labels, logits=logits)
  if label_smoothing:
    uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    losses = (1.0 - label_smoothing) * losses + label_smoothing * uniform
  total = tf.reduce_sum(weights)
  # Both the quotient and its gradients are 0 where nothing counts, not NaN.
  mean = tf.math.divide_no_nan(tf.reduce_sum(weights * losses), total)
  return Loss(mean, total)


def confusion_matrix(labels: tf.Tensor, predictions: tf.Tensor, *,
                     num_classes: int,
                     void_label: Optional[int] = VOID_LABEL) -> tf.Tensor:
  """Returns how many pixels of each class each image has as which class.

  One matrix per image, so that it is an output with rows like any other: the
  towers' are put together in batch order, images that only fill up a batch can
  be left out, and the sum over any images is the matrix of them all.

  Args:
    labels: Integer tensor of shape `[B, H, W]`, as for `loss`.
    predictions: Integer tensor of shape `[B, H, W]` with classes from 0; void
      is no prediction.
    num_classes: Number of classes.
    void_label: Label of pixels that do not count; None if all count.

  Returns:
    int64 tensor of shape `[B, num_classes, num_classes]`: `[b, i, j]` is the
    number of pixels of image `b` with label `i` and prediction `j`.

  Raises:
    TypeError: If `labels` or `predictions` is not of an integer type.
    ValueError: If a shape is not as above, or `num_classes` is less than 1.
  """
  _check_num_classes(num_classes)
  predictions = _integers(predictions, "predictions")
  labels, valid = _labels_and_valid(labels, num_classes, void_label)
  predictions = _checked_range(predictions, num_classes, "predictions")
  count = tf.shape(labels, out_type=tf.int64)[0]
  first = tf.range(count)[:, tf.newaxis, tf.newaxis] * num_classes**2
  cells = first + labels * num_classes + predictions
  matrices = tf.math.unsorted_segment_sum(
      tf.reshape(tf.cast(valid, tf.int64), [-1]), tf.reshape(cells, [-1]),
      count * num_classes**2)
  return tf.reshape(matrices, tf.stack([count, num_classes, num_classes]))


def iou(confusion: np.ndarray) -> np.ndarray:
  """Returns the intersection over union of each class.

      iou[k] = c[k, k] / (sum_j(c[k, j]) + sum_i(c[i, k]) - c[k, k])

  Args:
    confusion: Counts `c` of shape `[K, K]`: labels by predictions.

  Returns:
    float64 array of shape `[K]`; NaN for a class that no pixel has as its label
    nor as its prediction.

  Raises:
    ValueError: If `confusion` is not square.
  """
  confusion = _checked_confusion(confusion)
  both = np.diagonal(confusion)
  either = confusion.sum(axis=0) + confusion.sum(axis=1) - both
  return np.divide(both, either, out=np.full(len(both), np.nan),
                   where=either > 0)


def mean_iou(confusion: np.ndarray) -> float:
  """Returns the mean of `iou` over the classes that occur.

  A class that no pixel has as its label nor as its prediction is left out; one
  that is only predicted counts as 0.

  Args:
    confusion: Counts of shape `[K, K]`: labels by predictions.

  Returns:
    A number from 0 to 1; NaN if there are no pixels at all.

  Raises:
    ValueError: If `confusion` is not square.
  """
  values = iou(confusion)
  values = values[~np.isnan(values)]
  return float(values.mean()) if len(values) else float("nan")


def pixel_accuracy(confusion: np.ndarray) -> float:
  """Returns which share of the pixels has the right class.

  Args:
    confusion: Counts of shape `[K, K]`: labels by predictions.

  Returns:
    A number from 0 to 1; NaN if there are no pixels at all.

  Raises:
    ValueError: If `confusion` is not square.
  """
  confusion = _checked_confusion(confusion)
  total = confusion.sum()
  return float(np.trace(confusion) / total) if total else float("nan")


def _check_num_classes(num_classes: int) -> None:
  if num_classes < 1:
    raise ValueError(
        f"`num_classes` must be at least 1: got {num_classes}.")


def _integers(value: tf.Tensor, name: str) -> tf.Tensor:
  """Returns `value` as int64 of shape `[B, H, W]`."""
  value = tf.convert_to_tensor(value)
  if not value.dtype.is_integer:
    raise TypeError(
        f"`{name}` must be integers: got {value.dtype.name}. Decode a palette "
        "image to its indices; take `tf.argmax` of logits.")
  if value.shape.ndims != 3:
    raise ValueError(
        f"`{name}` must have a shape [B, H, W]: got {value.shape}. Drop a "
        "channel axis with `tf.squeeze(..., axis=-1)`.")
  return tf.cast(value, tf.int64)


def _labels_and_valid(labels: tf.Tensor, num_classes: int,
                      void_label: Optional[int]
                     ) -> Tuple[tf.Tensor, tf.Tensor]:
  """Returns labels with 0 for void, and which are not void."""
  labels = _integers(labels, "labels")
  valid = tf.ones_like(labels, tf.bool)
  if void_label is not None:
    valid = tf.not_equal(labels, void_label)
    labels = tf.where_v2(valid, labels, tf.zeros_like(labels))
  return _checked_range(labels, num_classes, "labels"), valid


def _checked_range(values: tf.Tensor, num_classes: int,
                   name: str) -> tf.Tensor:
  """Returns `values`, which fail to run if one of them is no class.

  A wrong label gives a loss of NaN on a GPU, and would count for another class
  in a confusion matrix.
  """
  right = tf.logical_and(values >= 0, values < num_classes)
  check = tf.Assert(tf.reduce_all(right), [
      f"`{name}` must be classes from 0 to {num_classes - 1}, or void: got "
      "values from", tf.reduce_min(values), "to", tf.reduce_max(values)
  ])
  with tf.control_dependencies([check]):
    return tf.identity(values)


def _per_pixel(weight: tf.Tensor) -> tf.Tensor:
  if weight.shape.ndims == 1:
    return weight[:, tf.newaxis, tf.newaxis]
  if weight.shape.ndims == 3:
    return weight
  raise ValueError(
      "`weight` must have a shape [B], for images, or [B, H, W], for pixels: "
      f"got {weight.shape}.")


def _checked_confusion(confusion: np.ndarray) -> np.ndarray:
  confusion = np.asarray(confusion, np.float64)
  if confusion.ndim != 2 or confusion.shape[0] != confusion.shape[1]:
    raise ValueError(
        "`confusion` must have a shape [K, K]: got "
        f"{list(confusion.shape)}. Add the images up with `.sum(axis=0)`.")
  return confusion
