"""Pictures of a run: images, real or made, masks, curves and confusions.

Curves and confusions need matplotlib, and nothing else here does.
"""

import collections
import pathlib
from typing import Dict, Optional, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from tools import datasets

# Of masks: as far from each other as 20 colours can be, then again; void white.
_COLOURS = np.array([
    (0, 0, 0), (230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200),
    (245, 130, 48), (145, 30, 180), (70, 240, 240), (240, 50, 230),
    (210, 245, 60), (250, 190, 212), (0, 128, 128), (220, 190, 255),
    (170, 110, 40), (255, 250, 200), (128, 0, 0), (170, 255, 195),
    (128, 128, 0), (255, 215, 180), (0, 0, 128)], np.uint8)
_VOID = np.array([(255, 255, 255)], np.uint8)

# Images of fewer pixels are enlarged.
_VISIBLE_SIZE = 32

# Steps and values of a curve.
Curve = Tuple[np.ndarray, np.ndarray]


def summary(images: tf.Tensor, labels: tf.Tensor, *, predictions: tf.Tensor,
            data: datasets.Dataset, count: int) -> tf.Tensor:
  """Makes an image summary of the first images of a batch.

  For segmentation there are three pictures side by side: the image, the mask
  of its labels and the mask of the predictions.

  Args:
    images: `[B, H, W, C]`, as a model takes them.
    labels: `[B]`, or `[B, H, W]` for segmentation.
    predictions: The same.
    data: What they come from.
    count: How many images.

  Returns:
    String tensor of shape `[]`.
  """
  images = tf.cast(images[:count] * data.scale.deviation + data.scale.mean,
                   tf.float32)
  # Files have values up to 16, 255 or else: the brightest is white.
  images = visible(tf.math.divide_no_nan(images, tf.reduce_max(images)))
  if data.kind == datasets.SEGMENTATION:
    classes = -(-data.num_classes // len(_COLOURS))
    colours = tf.constant(np.concatenate(
        [np.tile(_COLOURS, [classes, 1])[:data.num_classes], _VOID]))
    masks = [tf.gather(colours, tf.minimum(mask[:count], data.num_classes))
             for mask in (labels, predictions)]
    images = tf.concat([images, *masks], axis=2)
  return tf.summary.image("test_images", images, max_outputs=count)


def visible(images: tf.Tensor) -> tf.Tensor:
  """Returns images `[B, H, W, C]` of values from 0 to 1 as bytes, in RGB.

  Of images that have not three channels, the first is shown in grey.
  """
  if images.shape[-1] != 3:
    images = tf.repeat(images[..., :1], 3, axis=-1)
  return tf.saturate_cast(images * 255.0, tf.uint8)


def draw_grid(images: np.ndarray, logdir: str) -> str:
  """Draws images, in rows of about as many, into `made.png`.

  Small ones are enlarged, so that the pixels can be seen.

  Args:
    images: `[N, H, W, C]`, values from 0 to 1.
    logdir: Where to write.

  Returns:
    The path.
  """
  count, height, width, channels = images.shape
  columns = int(np.ceil(np.sqrt(count)))
  rows = -(-count // columns)
  grid = np.ones([rows * columns, height + 1, width + 1, channels], np.float32)
  grid[:count, :-1, :-1] = images
  grid = grid.reshape([rows, columns, *grid.shape[1:]]).swapaxes(1, 2).reshape(
      [1, rows * (height + 1), columns * (width + 1), channels])
  factor = max(1, _VISIBLE_SIZE // max(height, width))
  grid = grid.repeat(factor, axis=1).repeat(factor, axis=2)
  with tf.Graph().as_default(), tf.Session() as session:
    content = session.run(tf.io.encode_png(visible(tf.constant(grid))[0]))
  path = pathlib.Path(logdir, "made.png")
  path.write_bytes(content)
  return str(path)


def read_curves(logdir: str) -> Dict[str, Curve]:
  """Reads the scalars that a run wrote for TensorBoard, by tag.

  Where a run continued from a checkpoint, what it had written after that does
  not count, as in TensorBoard.
  """
  curves = collections.defaultdict(dict)
  for path in sorted(pathlib.Path(logdir).glob("events.out.tfevents.*")):
    try:
      for event in tf.train.summary_iterator(str(path)):
        if event.session_log.status == tf.SessionLog.START:
          for curve in curves.values():
            for step in [step for step in curve if step >= event.step]:
              del curve[step]
        for value in event.summary.value:
          if value.WhichOneof("value") == "simple_value":
            curves[value.tag][event.step] = value.simple_value
    except tf.errors.DataLossError:
      continue  # Cut short when the run was killed; what came before counts.
  return {tag: (np.array(sorted(curve)),
                np.array([curve[step] for step in sorted(curve)]))
          for tag, curve in curves.items() if curve}


def draw_curves(logdir: str) -> Optional[str]:
  """Draws all curves of a run, one below the other, into `curves.png`.

  Returns:
    The path; None if there is no curve, or matplotlib is not installed.
  """
  curves = read_curves(logdir)
  figure_type = _figure_type()
  if figure_type is None or not curves:
    return None
  figure = figure_type(figsize=(7, 2.2 * len(curves)), layout="constrained")
  axes = figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
  for axis, (tag, (steps, values)) in zip(axes, sorted(curves.items())):
    axis.plot(steps, values, marker="." if len(steps) < 30 else "")
    axis.set_title(tag, fontsize="medium")
    axis.grid(alpha=0.3)
  axes[-1].set_xlabel("step")
  path = pathlib.Path(logdir, "curves.png")
  figure.savefig(path)
  return str(path)


def draw_confusion(confusion: np.ndarray, logdir: str, *,
                   data: datasets.Dataset) -> Optional[str]:
  """Draws a confusion matrix into `confusion.png`, each row as shares of it.

  Args:
    confusion: `[K, K]`, labels by predictions.
    logdir: Where to write.
    data: Has the names of the classes.

  Returns:
    The path; None if matplotlib is not installed.
  """
  figure_type = _figure_type()
  if figure_type is None:
    return None
  size = min(4.0 + 0.3 * len(confusion), 20.0)
  figure = figure_type(figsize=(size, size), layout="constrained")
  axis = figure.subplots()
  shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
  picture = axis.imshow(shares, vmin=0.0, vmax=1.0, cmap="Blues")
  figure.colorbar(picture, shrink=0.7, label="share of the class")
  axis.set_xlabel("predicted class")
  axis.set_ylabel("class")
  if len(confusion) <= len(_COLOURS):
    names = data.class_names or range(len(confusion))
    axis.set_xticks(range(len(confusion)), names, rotation=90)
    axis.set_yticks(range(len(confusion)), names)
    for (row, column), count in np.ndenumerate(confusion):
      if count:
        axis.text(column, row, str(count), ha="center", va="center",
                  fontsize="x-small",
                  color="white" if shares[row, column] > 0.5 else "black")
  path = pathlib.Path(logdir, "confusion.png")
  figure.savefig(path)
  return str(path)


def _figure_type():
  """Returns matplotlib's `Figure`, which needs no screen; None without it."""
  try:
    from matplotlib import figure
  except ImportError:
    return None
  return figure.Figure
