"""The fully convolutional network of Long et al. (FCN-8s), with batch norm.

A trunk like that of VGG-16 halves height and width `levels` times; after it, as
after each of the two poolings before, a 1x1 convolution scores the classes. The
coarse scores are upsampled and added to the finer ones, and their sum is
upsampled to the size of the image. With F filters (`width`), L `levels` and K
classes:

    images                                        [B, H, W, C]
    block_1, block_2: 2 x (conv, batch norm) and pooling
    block_3 to block_L: 3 x (conv, batch norm) and pooling
        block_i                                   [B, H/2^i, W/2^i, F * 2^(i-1)]
                                                  (from block_4 on, F * 8)
    head: 2 x (conv, batch norm)                  [B, H/2^L, W/2^L, ..]
    head/scores                                   [B, H/2^L, W/2^L, K]
    upsampled + block_(L-1)/scores                [B, H/2^(L-1), .., K]
    upsampled + block_(L-2)/scores                [B, H/2^(L-2), .., K]
    upsampled                                     [B, H, W, K]

Five levels are those of the paper, with skips at strides 8 and 16. The default
of three levels does the same for small images, with skips at strides 2 and 4.
Any image size will do: pooling rounds up, and what is upsampled leaves out the
rows and columns at the end that the finer scores do not have.

Differences from the paper: batch norm after each 3x3 convolution, in place of
dropout and of a trained classifier to start from; the head is a 3x3 and a 1x1
convolution with twice the last block's filters, in place of 7x7 and 1x1 with
4096; all upsampling is bilinear, while the paper learns the 2x steps from
there. The scores of the skips start as zero, as in the paper.

Trainable parameters for three channels and ten classes, and batch norm layers;
64 and 5 are width and levels of the paper:

    width, levels              8, 3        16, 3        32, 5          64, 5
    parameters               51,270      201,710    5,135,102     20,508,126
    batch norm                    9            9           15             15

    python tools/train.py --model=fcn --dataset=shapes

`models/segmentation.py` has the loss and the scores.

References:
  Long, Shelhamer and Darrell, "Fully Convolutional Networks for Semantic
    Segmentation", 2015, https://arxiv.org/abs/1411.4038
  Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale
    Image Recognition", 2015 (trunk), https://arxiv.org/abs/1409.1556
  Ioffe and Szegedy, "Batch Normalization", 2015,
    https://arxiv.org/abs/1502.03167
  He et al., "Delving Deep into Rectifiers", 2015 (initial weights),
    https://arxiv.org/abs/1502.01852
"""

from typing import Any, Union

import tensorflow.compat.v1 as tf
import towers


def _conv(x: tf.Tensor, filters: int, training: Union[bool, tf.Tensor],
          name: str, size: int = 3) -> tf.Tensor:
  """Convolution, batch norm, ReLU: `[B, H, W, C]` to `[B, H, W, filters]`."""
  with tf.variable_scope(name):
    kernel = tf.get_variable(
        "kernel", [size, size, x.shape[-1], filters], dtype=x.dtype,
        initializer=tf.variance_scaling_initializer(
            2.0, distribution="untruncated_normal"))
    x = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
    # 0.99 is slow for short runs.
    return tf.nn.relu(towers.batch_norm(x, training=training, momentum=0.9))


def _scores(x: tf.Tensor, num_classes: int, initializer: Any) -> tf.Tensor:
  """Convolution 1x1 with bias: `[B, H, W, C]` to `[B, H, W, num_classes]`."""
  with tf.variable_scope("scores"):
    kernel = tf.get_variable("kernel", [1, 1, x.shape[-1], num_classes],
                             dtype=x.dtype, initializer=initializer)
    bias = tf.get_variable("bias", [num_classes], dtype=x.dtype,
                           initializer=tf.zeros_initializer())
    return tf.nn.bias_add(
        tf.nn.conv2d(x, kernel, strides=1, padding="SAME"), bias)


def _interpolation(size: tf.Tensor, factor: int, upsampled: tf.Tensor,
                   dtype: tf.DType) -> tf.Tensor:
  """Returns the weights `[upsampled, size]` of bilinear upsampling.

  Pixel `i` lies at `(i + 1/2) / factor - 1/2` of the coarse ones, or at the
  nearest of these if it lies beyond them, and takes `1 - distance` of each that
  is less than 1 away.
  """
  last = tf.cast(size - 1, dtype)
  position = (tf.cast(tf.range(upsampled), dtype) + 0.5) / factor - 0.5
  position = tf.clip_by_value(position, tf.zeros_like(last), last)
  coarse = tf.cast(tf.range(size), dtype)
  return tf.nn.relu(1 - tf.abs(position[:, tf.newaxis] - coarse))


def upsample(x: tf.Tensor, factor: int, like: tf.Tensor) -> tf.Tensor:
  """Returns `x`, upsampled bilinearly and cropped to the size of `like`.

  The centres of pixels stand for them, and the first rows and columns align:
  pooling of an odd size has added a row at the end, which is left out here. So
  it is not `tf.image.resize_bilinear` to that size, which would stretch `x`
  (and has a result, and gradients, of float32 only).

  Args:
    x: Float tensor of shape `[B, ceil(H/factor), ceil(W/factor), C]`.
    factor: How many times larger height and width become.
    like: Tensor of shape `[B, H, W, ..]`.

  Returns:
    Tensor of shape `[B, H, W, C]`, of the type of `x`.
  """
  with tf.name_scope("upsample"):
    coarse, fine = tf.shape(x), tf.shape(like)
    # Positions in large images need more digits than 16 bits hold.
    dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
    rows, columns = (
        _interpolation(coarse[axis], factor, fine[axis], dtype)
        for axis in (1, 2))
    y = tf.einsum("ih,bhwc->biwc", tf.cast(rows, x.dtype), x)
    y = tf.einsum("jw,biwc->bijc", tf.cast(columns, x.dtype), y)
    y.set_shape(like.shape[:3].concatenate(x.shape[3:]))
    return y


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
    width: Number of filters of the first block. The paper has 64.
    levels: How many times height and width are halved. The paper has 5.

  Returns:
    Tensor of shape `[B, H, W, num_classes]`, of the type of `images`.

  Raises:
    ValueError: If `width` is less than 1, or `levels` less than 3.
    ValueError: If `images` is not of rank 4, or its last axis has no static
      size.
  """
  if width < 1 or levels < 3:
    raise ValueError(
        "`width` must be at least 1 and `levels` at least 3, for two skips: "
        f"got {width} and {levels}. The paper has 64 and 5.")
  if images.shape.ndims != 4 or tf.dimension_value(images.shape[-1]) is None:
    raise ValueError(
        "`images` must have a shape [B, H, W, C] with static C: got "
        f"{images.shape}. Add the missing axis, or use `tf.ensure_shape`.")

  x, skips = images, []
  for block in range(1, levels + 1):
    with tf.variable_scope(f"block_{block}"):
      filters = width * 2**min(block - 1, 3)
      for conv in range(1, 3 if block < 3 else 4):
        x = _conv(x, filters, training, f"conv_{conv}")
      x = tf.nn.max_pool2d(x, ksize=2, strides=2, padding="SAME")
      if levels - 2 <= block < levels:
        skips.append(_scores(x, num_classes, tf.zeros_initializer()))
  with tf.variable_scope("head"):
    x = _conv(x, 2 * filters, training, "conv_1")
    x = _conv(x, 2 * filters, training, "conv_2", size=1)
    x = _scores(x, num_classes, tf.variance_scaling_initializer())
  for skip in reversed(skips):
    x = skip + upsample(x, 2, skip)
  return upsample(x, 2**(levels - 2), images)
