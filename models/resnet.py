"""The residual networks of He et al. for small images: depth 6n + 2.

One 3x3 convolution, then three stages of `n` blocks with 16, 32 and 64
filters, then global average pooling and one dense layer. A block is two 3x3
convolutions, each followed by batch norm, around a shortcut; the first block of
the second and third stage halves height and width. Shortcuts are those of the
paper's option A: the identity everywhere, subsampled and padded with zero
channels where the shape changes, so that they have no parameters.

    images                             [B, H, W, C]
    conv                               [B, H, W, 16]
    stage_1: n blocks                  [B, H, W, 16]
    stage_2: n blocks                  [B, H/2, W/2, 32]
    stage_3: n blocks                  [B, H/4, W/4, 64]
    mean over height and width         [B, 64]
    dense                              [B, num_classes]

Trainable parameters for three channels and ten classes, and batch norm layers:

    depth                  20         32         44         56        110
    parameters        269,722    464,154    658,586    853,018  1,727,962
    batch norm             19         31         43         55        109

    python tools/train.py --model=resnet20

References:
  He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2,
    https://arxiv.org/abs/1512.03385
  He et al., "Delving Deep into Rectifiers", 2015 (initial weights),
    https://arxiv.org/abs/1502.01852
"""

from typing import Union

import tensorflow.compat.v1 as tf
import towers


def _conv(x: tf.Tensor, filters: int, strides: int,
          training: Union[bool, tf.Tensor], name: str) -> tf.Tensor:
  """Convolution and batch norm: `[B, H, W, C]` to `[B, H', W', filters]`."""
  with tf.variable_scope(name):
    kernel = tf.get_variable(
        "kernel", [3, 3, x.shape[-1], filters], dtype=x.dtype,
        initializer=tf.variance_scaling_initializer(
            2.0, distribution="untruncated_normal"))
    x = tf.nn.conv2d(x, kernel, strides=strides, padding="SAME")
    # As in the authors' own code; 0.99 is slow for short runs.
    return towers.batch_norm(x, training=training, momentum=0.9)


def _block(x: tf.Tensor, filters: int, strides: int,
           training: Union[bool, tf.Tensor]) -> tf.Tensor:
  """Convolutions and shortcut: `[B, H, W, C]` to `[B, H', W', filters]`."""
  shortcut = x
  if strides > 1:
    shortcut = shortcut[:, ::strides, ::strides, :]
  added = filters - tf.dimension_value(x.shape[-1])
  if added:
    shortcut = tf.pad(shortcut, [[0, 0], [0, 0], [0, 0], [0, added]])
  x = tf.nn.relu(_conv(x, filters, strides, training, "conv_1"))
  return tf.nn.relu(shortcut + _conv(x, filters, 1, training, "conv_2"))


def features(images: tf.Tensor, *, training: Union[bool, tf.Tensor],
             depth: int = 20) -> tf.Tensor:
  """Returns what the dense layer of `logits` reads: 64 numbers per image.

  Args:
    images: See `logits`.
    training: See `logits`.
    depth: See `logits`; the dense layer, which is not built, counts as one.

  Returns:
    Tensor of shape `[B, 64]`, of the type of `images`.

  Raises:
    ValueError: If `depth` is not `6n + 2` for an `n` of at least 1.
    ValueError: If `images` is not of rank 4, or its last axis has no static
      size.
  """
  if depth < 8 or depth % 6 != 2:
    raise ValueError(
        "`depth` must be 6n + 2 for n blocks per stage: expected one of 8, 14, "
        f"20, 26, ..., got {depth}. The paper has 20, 32, 44, 56 and 110.")
  if images.shape.ndims != 4 or tf.dimension_value(images.shape[-1]) is None:
    raise ValueError(
        "`images` must have a shape [B, H, W, C] with static C: got "
        f"{images.shape}. Add the missing axis, or use `tf.ensure_shape`.")

  x = tf.nn.relu(_conv(images, 16, 1, training, "conv"))
  for stage, filters in enumerate([16, 32, 64], start=1):
    for block in range(1, depth // 6 + 1):
      strides = 2 if stage > 1 and block == 1 else 1
      with tf.variable_scope(f"stage_{stage}/block_{block}"):
        x = _block(x, filters, strides, training)
  return tf.reduce_mean(x, axis=[1, 2])


def logits(images: tf.Tensor, *, num_classes: int,
           training: Union[bool, tf.Tensor], depth: int = 20) -> tf.Tensor:
  """Returns the class scores of a batch of images, before any softmax.

  Args:
    images: Float tensor of shape `[B, H, W, C]`; all but `C` may be unknown
      while the graph is built.
    num_classes: Number of classes, the size of the last axis of the result.
    training: Whether batch norm uses the statistics of the batch (and adds
      their moving averages to `tf.GraphKeys.UPDATE_OPS`): a bool, or a bool
      tensor of shape `[]`.
    depth: Number of layers with weights, `6n + 2` for `n` blocks per stage.

  Returns:
    Tensor of shape `[B, num_classes]`, of the type of `images`.

  Raises:
    ValueError: See `features`.
  """
  x = features(images, training=training, depth=depth)
  with tf.variable_scope("dense"):
    kernel = tf.get_variable(
        "kernel", [x.shape[-1], num_classes], dtype=x.dtype,
        initializer=tf.variance_scaling_initializer())
    bias = tf.get_variable("bias", [num_classes], dtype=x.dtype,
                           initializer=tf.zeros_initializer())
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)
