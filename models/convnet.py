"""A small batch-normalised convolutional network.

Four 3x3 convolutions in two blocks, as in VGG, each followed by batch norm and
a ReLU; max pooling after each block; then global average pooling, so that any
image size will do, and one dense layer. It is small enough for a laptop and
made for small images, such as 8x8 digits, 28x28 MNIST or 32x32 CIFAR-10.

    images                            [B, H, W, C]
    block_1: 2 x (conv, batch norm)   [B, H, W, 32], pooled to [B, H/2, W/2, 32]
    block_2: 2 x (conv, batch norm)   [B, H/2, W/2, 64], pooled to half of that
    mean over height and width        [B, 64]
    dense                             [B, num_classes]

For one channel and ten classes it has 65,834 trainable parameters; for three
channels, 66,410. The image size does not change them.

    python tools/train.py --model=convnet

References:
  Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale
    Image Recognition", 2015, https://arxiv.org/abs/1409.1556
  Ioffe and Szegedy, "Batch Normalization", 2015,
    https://arxiv.org/abs/1502.03167
  Lin et al., "Network In Network", 2014 (global average pooling),
    https://arxiv.org/abs/1312.4400
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
    # A momentum of 0.99 would still hold a third of the initial statistics
    # after 100 steps, and a run on a small data set may have no more.
    return tf.nn.relu(towers.batch_norm(x, training=training, momentum=0.9))


def logits(images: tf.Tensor, *, num_classes: int,
           training: Union[bool, tf.Tensor]) -> tf.Tensor:
  """Returns the class scores of a batch of images, before any softmax.

  Args:
    images: Float tensor of shape `[B, H, W, C]`; all but `C` may be unknown
      while the graph is built.
    num_classes: Number of classes, the size of the last axis of the result.
    training: Whether batch norm uses the statistics of the batch (and adds
      their moving averages to `tf.GraphKeys.UPDATE_OPS`): a bool, or a bool
      tensor of shape `[]`.

  Returns:
    Tensor of shape `[B, num_classes]`, of the type of `images`.

  Raises:
    ValueError: If `images` is not of rank 4, or its last axis has no static
      size.
  """
  if images.shape.ndims != 4 or tf.dimension_value(images.shape[-1]) is None:
    raise ValueError(
        "`images` must have a shape [B, H, W, C] with static C: got "
        f"{images.shape}. Add the missing axis, or use `tf.ensure_shape`.")

  x = images
  for block, filters in enumerate([32, 64], start=1):
    with tf.variable_scope(f"block_{block}"):
      x = _conv(x, filters, training, "conv_1")
      x = _conv(x, filters, training, "conv_2")
      x = tf.nn.max_pool2d(x, ksize=2, strides=2, padding="SAME")
  x = tf.reduce_mean(x, axis=[1, 2])
  with tf.variable_scope("dense"):
    kernel = tf.get_variable(
        "kernel", [x.shape[-1], num_classes], dtype=x.dtype,
        initializer=tf.variance_scaling_initializer())
    bias = tf.get_variable("bias", [num_classes], dtype=x.dtype,
                           initializer=tf.zeros_initializer())
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)
