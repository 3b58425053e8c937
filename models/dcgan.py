"""DCGAN: a generator of images, and a discriminator that tells them from real.

Convolutions with a stride of two take the place of pooling. The generator
starts from a small map and doubles it three times; the discriminator is its
mirror image. With `D` the `depth` and images of 32x32 (of 28x28):

    noise      [B, N]                  images   [B, 32, 32, C] ([B, 28, 28, C])
    project    [B, 4, 4, 4D]           conv_1   [B, 16, 16, D] ([B, 14, 14, D])
    deconv_1   [B, 8, 8, 2D] (7, 7)    conv_2   [B, 8, 8, 2D] ([B, 7, 7, 2D])
    deconv_2   [B, 16, 16, D] (14, 14) conv_3   [B, 4, 4, 4D]
    deconv_3   [B, 32, 32, C] (28, 28) score    [B]

All kernels are 5x5. Batch norm follows each layer but the generator's last and
the discriminator's first and last; ReLU in the generator, leaky ReLU in the
discriminator, tanh at the end: scale the real images to [-1, 1].

Trainable parameters, for a depth of 64 and noise of 100 numbers:

    channels               1          3
    generator      1,436,097  1,439,299
    discriminator  1,030,529  1,033,729

    python tools/train.py --model=dcgan

To train it in code of your own, in two steps of their own:

    def model_fn(images):
      return dcgan.losses(images)

    graph = towers.build_towers(model_fn, devices, inputs=images)
    steps = {}
    for part in ("discriminator", "generator"):
      steps[part] = graph.minimize(
          tf.train.AdamOptimizer(0.0002, beta1=0.5), loss=f"{part}_loss",
          var_list=[v for v in graph.trainable_variables
                    if v.op.name.startswith(part)],
          update_ops=[op for op in graph.update_ops if f"/{part}/" in op.name])

Without `update_ops`, each step would update the moving statistics of both.

References:
  Radford, Metz and Chintala, "Unsupervised Representation Learning with Deep
    Convolutional Generative Adversarial Networks", 2015,
    https://arxiv.org/abs/1511.06434
  Goodfellow et al., "Generative Adversarial Networks", 2014 (the losses, the
    generator's being the one that does not saturate),
    https://arxiv.org/abs/1406.2661
"""

from typing import Any, Dict, List, Optional, Union

import tensorflow.compat.v1 as tf
import towers

_KERNEL = 5
_DOUBLINGS = 3
_LEAK = 0.2
_MIN_SIZE = 8


def generator(noise: tf.Tensor, *, training: Union[bool, tf.Tensor],
              size: int = 32, channels: int = 3, depth: int = 64) -> tf.Tensor:
  """Makes an image of each row of noise.

  Variables stand in the scope `generator`.

  Args:
    noise: Float tensor of shape `[B, N]`; `B` may be unknown while the graph is
      built.
    training: Whether batch norm uses the statistics of the batch (and adds
      their moving averages to `tf.GraphKeys.UPDATE_OPS`): a bool, or a bool
      tensor of shape `[]`.
    size: Height and width `S` of the images, such as 28 or 32.
    channels: Number of channels `C` of the images.
    depth: Number of filters of the layer before the last.

  Returns:
    Tensor of shape `[B, S, S, C]` with values in [-1, 1], of the type of
    `noise`.

  Raises:
    ValueError: If `noise` is not of rank 2, or its last axis has no static
      size.
    ValueError: If `size` is less than 8.
  """
  if noise.shape.ndims != 2 or tf.dimension_value(noise.shape[-1]) is None:
    raise ValueError(
        "`noise` must have a shape [B, N] with static N: got "
        f"{noise.shape}. Use `tf.reshape` or `tf.ensure_shape`.")
  _check_size("size", size)
  first, *sizes = _sizes(size)
  with tf.variable_scope("generator"):
    with tf.variable_scope("project"):
      filters = 2**(_DOUBLINGS - 1) * depth
      kernel = _kernel([noise.shape[-1], first * first * filters], noise.dtype)
      x = tf.reshape(tf.matmul(noise, kernel), [-1, first, first, filters])
      x = tf.nn.relu(_batch_norm(x, training))
    for layer, bigger in enumerate(sizes[:-1], start=1):
      with tf.variable_scope(f"deconv_{layer}"):
        filters //= 2
        x = tf.nn.relu(_batch_norm(_deconv(x, bigger, filters), training))
    with tf.variable_scope(f"deconv_{_DOUBLINGS}"):
      x = _deconv(x, size, channels)
      return tf.tanh(tf.nn.bias_add(x, _bias(channels, x.dtype)))


def discriminator(images: tf.Tensor, *, training: Union[bool, tf.Tensor],
                  depth: int = 64, momentum: float = 0.9) -> tf.Tensor:
  """Scores images: the higher, the more real they seem.

  Variables stand in the scope `discriminator`. Real and made images are scored
  in calls of their own, the second with `tf.variable_scope(..., reuse=True)`,
  so that batch norm does not mix them.

  Args:
    images: Float tensor of shape `[B, S, S, C]`, with values in [-1, 1]; `B`
      may be unknown while the graph is built.
    training: See `generator`.
    depth: Number of filters of the first layer.
    momentum: How much of batch norm's moving statistics stays in each step; 1
      leaves them as they are.

  Returns:
    Tensor of shape `[B]`, the logits, of the type of `images`.

  Raises:
    ValueError: If `images` is not of rank 4, its height, width or channels are
      unknown, or they are no square of at least 8x8.
  """
  shape = images.shape.as_list() if images.shape.ndims == 4 else [None]
  if None in shape[1:] or len(shape) != 4 or shape[1] != shape[2]:
    raise ValueError(
        "`images` must have a shape [B, S, S, C] with static S and C: got "
        f"{images.shape}. Crop or resize them, or use `tf.ensure_shape`.")
  _check_size("images", shape[1])
  x = images
  with tf.variable_scope("discriminator"):
    for layer in range(1, _DOUBLINGS + 1):
      filters = 2**(layer - 1) * depth
      with tf.variable_scope(f"conv_{layer}"):
        kernel = _kernel([_KERNEL, _KERNEL, x.shape[-1], filters], x.dtype)
        x = tf.nn.conv2d(x, kernel, strides=2, padding="SAME")
        if layer == 1:
          x = tf.nn.bias_add(x, _bias(filters, x.dtype))
        else:
          x = _batch_norm(x, training, momentum)
        x = tf.nn.leaky_relu(x, _LEAK)
    with tf.variable_scope("score"):
      x = tf.reshape(x, [-1, x.shape[1:].num_elements()])
      x = tf.matmul(x, _kernel([x.shape[-1], 1], x.dtype))
      return tf.squeeze(tf.nn.bias_add(x, _bias(1, x.dtype)), axis=1)


def losses(images: tf.Tensor, noise: Optional[tf.Tensor] = None, *,
           depth: int = 64, noise_size: int = 100) -> Dict[str, tf.Tensor]:
  """Returns what a model function returns to train both networks.

  With `d` the probability that the discriminator sees in a real image, and
  `d'` that in a made one:

      discriminator_loss = mean(-log(d) - log(1 - d'))
      generator_loss = mean(-log(d'))

  A step of `minimize` on one of them must be given its own part's variables,
  as the module's example does; else it would train the other part against its
  purpose. The discriminator's moving statistics are those of real images.

  Args:
    images: Real images, see `discriminator`.
    noise: Float tensor of shape `[B, N]`. Default: uniform on [-1, 1], drawn
      anew in each step, by the seed of the graph.
    depth: See `generator` and `discriminator`.
    noise_size: `N`, where `noise` is not given.

  Returns:
    Dict of scalars `generator_loss` and `discriminator_loss`, and `images`, the
    made images, of shape `[B, S, S, C]`.

  Raises:
    ValueError: See `generator` and `discriminator`.
  """
  real = discriminator(images, training=True, depth=depth)
  if noise is None:
    noise = tf.random.uniform([tf.shape(images)[0], noise_size], -1.0, 1.0,
                              dtype=images.dtype)
  size, channels = images.shape.as_list()[2:]
  made = generator(noise, training=True, size=size, channels=channels,
                   depth=depth)
  with tf.variable_scope(tf.get_variable_scope(), reuse=True):
    # Two changes of the same moving statistics in a step would race.
    scores = discriminator(made, training=True, depth=depth, momentum=1.0)
  return {
      "generator_loss": _cross_entropy(scores, True),
      "discriminator_loss": (_cross_entropy(real, True) +
                             _cross_entropy(scores, False)),
      "images": made,
  }


def _cross_entropy(scores: tf.Tensor, real: bool) -> tf.Tensor:
  """Returns the mean of `-log(probability of being real, or not)`."""
  return tf.reduce_mean(tf.nn.softplus(-scores if real else scores))


def _check_size(argument: str, size: int) -> None:
  if size < _MIN_SIZE:
    raise ValueError(
        f"`{argument}` must be of {_MIN_SIZE}x{_MIN_SIZE} pixels or more: got "
        f"{size}x{size}. Three halvings leave too little of smaller ones.")


def _sizes(size: int) -> List[int]:
  """Returns the sizes of the generator's maps, up to that of the images."""
  result = [size]
  for _ in range(_DOUBLINGS):
    result.insert(0, (result[0] + 1) // 2)
  return result


def _deconv(x: tf.Tensor, size: int, filters: int) -> tf.Tensor:
  """Transposed convolution: `[B, H, W, C]` to `[B, size, size, filters]`."""
  # The filters of a transposed convolution come before its channels.
  kernel = _kernel([_KERNEL, _KERNEL, filters, x.shape[-1]], x.dtype)
  return tf.nn.conv2d_transpose(
      x, kernel, [tf.shape(x)[0], size, size, filters], strides=2,
      padding="SAME")


def _batch_norm(x: tf.Tensor, training: Union[bool, tf.Tensor],
                momentum: float = 0.9) -> tf.Tensor:
  """Batch norm over the rows of all towers."""
  # 0.99 is slow for short runs.
  return towers.batch_norm(x, training=training, momentum=momentum)


def _kernel(shape: Any, dtype: tf.DType) -> Any:
  """Returns a kernel with the paper's initial values."""
  return tf.get_variable("kernel", shape, dtype=dtype,
                         initializer=tf.random_normal_initializer(stddev=0.02))


def _bias(filters: int, dtype: tf.DType) -> Any:
  return tf.get_variable("bias", [filters], dtype=dtype,
                         initializer=tf.zeros_initializer())
