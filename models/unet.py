"""The U-Net of Ronneberger et al., with batch norm, for image segmentation.

A contracting path halves height and width `levels` times, and doubles the
channels as often; an expanding path goes back, and at each resolution takes in
the features that the contracting path had there, its skip. With F filters
(`width`) and L `levels`:

    images                                   [B, H, W, C]
    down_1: 2 x (conv, batch norm), pooling  [B, H, W, F], skip; half of it
    ...
    down_L: 2 x (conv, batch norm), pooling  [B, H/2^(L-1), .., F * 2^(L-1)]
    bottom: 2 x (conv, batch norm)           [B, H/2^L, W/2^L, F * 2^L]
    up_L: up-convolution, skip,              [B, H/2^(L-1), .., F * 2^(L-1)]
        2 x (conv, batch norm)
    ...
    up_1                                     [B, H, W, F]
    scores: 1x1 convolution                  [B, H, W, num_classes]

Differences from the paper: batch norm after each 3x3 convolution, in place of
their biases and of dropout; SAME padding, so that there is a score for every
pixel of the image and no skip is cropped. Any image size will do: pooling
rounds up, and the up-convolution (a transposed convolution, 2x2, stride 2)
leaves out the last row or column where the skip has an odd size.

Trainable parameters for three channels and ten classes, and batch norm layers;
64 and 4 are those of the paper:

    width, levels              8, 3        16, 3        32, 4          64, 4
    parameters              121,258      482,890    7,763,338     31,038,218
    batch norm                   14           14           18             18

    python tools/train.py --model=unet --dataset=shapes

`models/segmentation.py` has the loss and the scores.

References:
  Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical
    Image Segmentation", 2015, https://arxiv.org/abs/1505.04597
  Ioffe and Szegedy, "Batch Normalization", 2015,
    https://arxiv.org/abs/1502.03167
  He et al., "Delving Deep into Rectifiers", 2015 (initial weights),
    https://arxiv.org/abs/1502.01852
"""

from typing import Union

import tensorflow.compat.v1 as tf
import towers


def _conv(x: tf.Tensor, filters: int, training: Union[bool, tf.Tensor],
          name: str) -> tf.Tensor:
  """Convolution, batch norm, ReLU: `[B, H, W, C]` to `[B, H, W, filters]`."""
  with tf.variable_scope(name):
    kernel = tf.get_variable(
        "kernel", [3, 3, x.shape[-1], filters], dtype=x.dtype,
        initializer=tf.variance_scaling_initializer(
            2.0, distribution="untruncated_normal"))
    x = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
    # 0.99 is slow for short runs.
    return tf.nn.relu(towers.batch_norm(x, training=training, momentum=0.9))


def _convs(x: tf.Tensor, filters: int,
           training: Union[bool, tf.Tensor]) -> tf.Tensor:
  """Two convolutions: `[B, H, W, C]` to `[B, H, W, filters]`."""
  return _conv(_conv(x, filters, training, "conv_1"), filters, training,
               "conv_2")


def _up(x: tf.Tensor, skip: tf.Tensor, filters: int) -> tf.Tensor:
  """Doubles height and width to those of `skip`, and joins it in front.

  Args:
    x: Tensor of shape `[B, ceil(H/2), ceil(W/2), C]`.
    skip: Tensor of shape `[B, H, W, S]`.
    filters: Number of channels that `x` gets.

  Returns:
    Tensor of shape `[B, H, W, S + filters]`.
  """
  with tf.variable_scope("up"):
    channels = tf.dimension_value(x.shape[-1])
    # One position of `x` alone reaches a pixel: its channels are the fan-in.
    kernel = tf.get_variable(
        "kernel", [2, 2, filters, channels], dtype=x.dtype,
        initializer=tf.random_normal_initializer(stddev=channels**-0.5))
    bias = tf.get_variable("bias", [filters], dtype=x.dtype,
                           initializer=tf.zeros_initializer())
    size = tf.concat([tf.shape(skip)[:3], [filters]], axis=0)
    x = tf.nn.conv2d_transpose(x, kernel, size, strides=2, padding="SAME")
    x.set_shape(skip.shape[:3].concatenate([filters]))
    return tf.concat([skip, tf.nn.bias_add(x, bias)], axis=-1)


def logits(images: tf.Tensor, *, num_classes: int,
           training: Union[bool, tf.Tensor], width: int = 16,
           levels: int = 3) -> tf.Tensor:
  """Returns the class scores of each pixel, before any softmax.

  Args:
    images: Float tensor of shape `[B, H, W, C]`; all but `C` may be unknown
      while the graph is built. Any height and width will do.
    num_classes: Number of classes, the size of the last axis of the result.
    training: Whether batch norm uses the statistics of the batch (and adds
      their moving averages to `tf.GraphKeys.UPDATE_OPS`): a bool, or a bool
      tensor of shape `[]`.
    width: Number of filters at the full resolution; each level doubles it. The
      paper has 64.
    levels: How many times height and width are halved. The paper has 4.

  Returns:
    Tensor of shape `[B, H, W, num_classes]`, of the type of `images`.

  Raises:
    ValueError: If `width` or `levels` is less than 1.
    ValueError: If `images` is not of rank 4, or its last axis has no static
      size.
  """
  if width < 1 or levels < 1:
    raise ValueError(
        f"`width` and `levels` must be at least 1: got {width} and {levels}. "
        "The paper has 64 and 4.")
  if images.shape.ndims != 4 or tf.dimension_value(images.shape[-1]) is None:
    raise ValueError(
        "`images` must have a shape [B, H, W, C] with static C: got "
        f"{images.shape}. Add the missing axis, or use `tf.ensure_shape`.")

  x, skips = images, []
  for level in range(1, levels + 1):
    with tf.variable_scope(f"down_{level}"):
      x = _convs(x, width * 2**(level - 1), training)
      skips.append(x)
      x = tf.nn.max_pool2d(x, ksize=2, strides=2, padding="SAME")
  with tf.variable_scope("bottom"):
    x = _convs(x, width * 2**levels, training)
  for level in range(levels, 0, -1):
    with tf.variable_scope(f"up_{level}"):
      filters = width * 2**(level - 1)
      x = _convs(_up(x, skips[level - 1], filters), filters, training)
  with tf.variable_scope("scores"):
    kernel = tf.get_variable(
        "kernel", [1, 1, x.shape[-1], num_classes], dtype=x.dtype,
        initializer=tf.variance_scaling_initializer())
    bias = tf.get_variable("bias", [num_classes], dtype=x.dtype,
                           initializer=tf.zeros_initializer())
    x = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
    return tf.nn.bias_add(x, bias)
