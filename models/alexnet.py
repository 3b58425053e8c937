"""AlexNet in two columns, each of which may have a device of its own.

The network of Krizhevsky, Sutskever and Hinton, which the authors split over
two GPUs since it did not fit on one. Each layer is split into two columns of
half its filters or units. A column reads its own half of the layer before; only
the third convolution and the fully connected layers read both halves.

    images                                  [B, S, S, C]
    conv1, response norm, pooled, per column                [B, .., .., 48]
    conv2 5x5, response norm, pooled, per column            [B, .., .., 128]
    conv3 3x3, of both columns, per column                  [B, .., .., 192]
    conv4 3x3, per column                                   [B, .., .., 192]
    conv5 3x3, pooled, per column                           [B, P, P, 128]
    fc6 and fc7, dropout, of both columns, per column       [B, 2048]
    fc8, of both columns, each column half of the classes   [B, num_classes]

Images must be square, of 32x32 or more. For 224x224 it is the network of the
paper. On small images its 11x11 filters, four pixels apart, would leave little
to see, so `conv1` depends on the size. Trainable parameters, for three
channels:

    size S                32          64         224
    conv1, stride     5x5, 1      7x7, 2    11x11, 4
    P                      3           3           6
    classes               10          10       1,000
    parameters    28,569,994  28,576,906  60,965,224

In a tower that spans two devices, the ops of column k stand on device k; in any
other tower, and outside a build, all stand on the one device. Variables are the
same in each case, one per column (`conv1/column_0/kernel`), and so are loss and
gradients. So this trains two towers of two GPUs each:

    graph = towers.build_towers(
        model_fn, [("/gpu:0", "/gpu:1"), ("/gpu:2", "/gpu:3")],
        inputs=(images, labels))
    train_op = graph.minimize(tf.train.MomentumOptimizer(0.01, 0.9))

with a `model_fn` that returns a loss of `alexnet.logits`, such as

    tf.losses.sparse_softmax_cross_entropy(
        labels, alexnet.logits(images, num_classes=1000, training=True))

Where we differ from the paper: initial weights are those of He et al., since a
standard deviation of 0.01 suits the sizes of the paper's layers only, and
initial biases are 0.

References:
  Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep
    Convolutional Neural Networks", 2012,
    https://papers.nips.cc/paper/4824-imagenet-classification-with-deep-convolutional-neural-networks
  He et al., "Delving Deep into Rectifiers", 2015 (initial weights),
    https://arxiv.org/abs/1502.01852
"""

import contextlib
from typing import Any, Callable, List, Optional, Sequence, Union

import tensorflow.compat.v1 as tf
import towers

_COLUMNS = 2
_MIN_SIZE = 32

# Of the response norm, from the paper: five filters, one beside the other.
_RADIUS = 2
_BIAS = 2.0
_ALPHA = 1e-4
_BETA = 0.75

# What each column holds, or reads.
Columns = List[tf.Tensor]


def logits(images: tf.Tensor, *, num_classes: int,
           training: Union[bool, tf.Tensor], dropout_rate: float = 0.5,
           width: float = 1.0) -> tf.Tensor:
  """Returns the class scores of a batch of images, before any softmax.

  Args:
    images: Float tensor of shape `[B, S, S, C]`, with `S` at least 32; `B` may
      be unknown while the graph is built.
    num_classes: Number of classes, the size of the last axis of the result.
    training: Whether there is dropout: a bool, or a bool tensor of shape `[]`.
    dropout_rate: Which part of the units of `fc6` and `fc7` dropout sets to 0
      in training; 0 for none. Its random numbers follow the seed of the graph.
    width: Factor of the numbers of filters and hidden units.

  Returns:
    Tensor of shape `[B, num_classes]`, of the type of `images`.

  Raises:
    ValueError: If `images` is not of rank 4, its height, width or channels are
      unknown, or they are no square of at least 32x32.
    ValueError: If `dropout_rate` is not in [0, 1), or `width` not above 0.
    ValueError: If the tower has more devices than there are columns.
  """
  size = _checked_size(images)
  if not 0.0 <= dropout_rate < 1.0:
    raise ValueError(
        "`dropout_rate` must be the part of units to drop: expected a number "
        f"from 0 up to, not including, 1, got {dropout_rate}.")
  if not width > 0.0:
    raise ValueError(
        "`width` must be a factor of the numbers of filters: expected a number "
        f"above 0, got {width}.")
  rate = _rate(dropout_rate, training, images.dtype)
  filters = lambda number: [max(1, round(number * width))] * _COLUMNS

  x = [images] * _COLUMNS
  x = _conv(x, "conv1", filters(48), *_first_layer(size))
  x = _each(_pool, _each(_response_norm, x))
  x = _conv(x, "conv2", filters(128), 5)
  x = _each(_pool, _each(_response_norm, x))
  x = _conv(_both(x), "conv3", filters(192), 3)
  x = _conv(x, "conv4", filters(192), 3)
  x = _each(_pool, _conv(x, "conv5", filters(128), 3))
  x = _each(_flat, x)
  for name in ("fc6", "fc7"):
    x = _each(tf.nn.relu, _dense(_both(x), name, filters(2048), 2.0))
    if rate is not None:
      x = _each(lambda h: tf.nn.dropout(h, rate=rate), x)
  half = num_classes // 2  # One class alone belongs to column 0.
  x = _dense(_both(x), "fc8", [num_classes - half, half][:num_classes], 1.0)
  return tf.concat(x, axis=-1)


def _checked_size(images: tf.Tensor) -> int:
  """Returns the height and width of images that are fit for the network."""
  if images.shape.ndims != 4 or None in images.shape.as_list()[1:]:
    raise ValueError(
        "`images` must have a shape [B, S, S, C] with static S and C: got "
        f"{images.shape}. Add the missing axis, or use `tf.ensure_shape`.")
  height, width = images.shape.as_list()[1:3]
  if height != width or height < _MIN_SIZE:
    raise ValueError(
        f"`images` must be square, of {_MIN_SIZE}x{_MIN_SIZE} or more: got "
        f"{images.shape}. Crop, pad or resize them.")
  return height


def _first_layer(size: int) -> Sequence[int]:
  """Returns kernel size, stride and padding of `conv1` for images of `size`."""
  if size >= 128:
    return 11, 4, 2  # As in the paper, 224x224 images become 55x55.
  return (7, 2, 3) if size >= 64 else (5, 1, 2)


def _rate(dropout_rate: float, training: Union[bool, tf.Tensor],
          dtype: tf.DType) -> Any:
  """Returns the rate of dropout; None for none."""
  if dropout_rate == 0.0:
    return None
  if isinstance(training, tf.Tensor):
    # At rate 0 dropout multiplies by 1 and drops nothing.
    return tf.cast(tf.where_v2(training, dropout_rate, 0.0), dtype)
  return dropout_rate if training else None


# --- Columns ------------------------------------------------------------------


def _on_device(column: int) -> Any:
  """A context for the ops of a column: on its own device, if there is one."""
  tower = towers.current_tower()
  if len(tower.devices) > _COLUMNS:
    raise ValueError(
        f"`devices` must give tower {tower.index} at most {_COLUMNS} devices, "
        f"one per column: got {tower.devices}. Leave out the rest.")
  if len(tower.devices) < _COLUMNS:
    return contextlib.nullcontext()
  return tf.device(tower.devices[column])


def _each(function: Callable[[tf.Tensor], tf.Tensor], x: Columns) -> Columns:
  """Applies `function` to each column, on the column's device."""
  result = []
  for column, own in enumerate(x):
    with _on_device(column):
      result.append(function(own))
  return result


def _both(x: Columns) -> Columns:
  """Gives each column the channels of both; here the columns exchange."""
  result = []
  for column in range(_COLUMNS):
    with _on_device(column):
      result.append(tf.concat(x, axis=-1))
  return result


def _conv(x: Columns, name: str, filters: Sequence[int], size: int,
          strides: int = 1, padding: Optional[int] = None) -> Columns:
  """Convolution and ReLU, per column: `[B, H, W, C]` to `[B, H', W', F]`."""
  edge = size // 2 if padding is None else padding
  edges = [[0, 0], [edge, edge], [edge, edge], [0, 0]]
  result = []
  for column, own in enumerate(x):
    with _on_device(column), tf.variable_scope(f"{name}/column_{column}"):
      kernel, bias = _weights(
          [size, size, own.shape[-1], filters[column]], own.dtype, 2.0)
      own = tf.nn.conv2d(tf.pad(own, edges), kernel, strides=strides,
                         padding="VALID")
      result.append(tf.nn.relu(tf.nn.bias_add(own, bias)))
  return result


def _dense(x: Columns, name: str, units: Sequence[int],
           scale: float) -> Columns:
  """A fully connected layer, per column: `[B, C]` to `[B, units]`."""
  result = []
  for column, number in enumerate(units):
    with _on_device(column), tf.variable_scope(f"{name}/column_{column}"):
      kernel, bias = _weights(
          [x[column].shape[-1], number], x[column].dtype, scale)
      result.append(tf.nn.bias_add(tf.matmul(x[column], kernel), bias))
  return result


def _weights(shape: Sequence[Any], dtype: tf.DType,
             scale: float) -> Sequence[Any]:
  """Returns the variables `kernel` and `bias` of a layer of a column."""
  kernel = tf.get_variable(
      "kernel", shape, dtype=dtype,
      initializer=tf.variance_scaling_initializer(
          scale, distribution="untruncated_normal"))
  bias = tf.get_variable("bias", shape[-1:], dtype=dtype,
                         initializer=tf.zeros_initializer())
  return kernel, bias


# --- Layers without weights ---------------------------------------------------


def _response_norm(x: tf.Tensor) -> tf.Tensor:
  """Divides by what the neighbouring filters of the column say at a place.

      y[c] = x[c] / (2 + 1e-4 * sum(x[c - 2 : c + 3]**2))**0.75
  """
  if x.dtype != tf.float64:
    return tf.nn.local_response_normalization(
        x, depth_radius=_RADIUS, bias=_BIAS, alpha=_ALPHA, beta=_BETA)
  # TensorFlow's op has no kernel for double precision.
  channels = tf.dimension_value(x.shape[-1])
  squares = tf.pad(tf.square(x), [[0, 0]] * 3 + [[_RADIUS, _RADIUS]])
  sums = tf.add_n([squares[..., first:first + channels]
                   for first in range(2 * _RADIUS + 1)])
  return x * tf.pow(_BIAS + _ALPHA * sums, -_BETA)


def _pool(x: tf.Tensor) -> tf.Tensor:
  """Overlapping max pooling: `[B, H, W, C]` to about half of `H` and `W`."""
  return tf.nn.max_pool2d(x, ksize=3, strides=2, padding="VALID")


def _flat(x: tf.Tensor) -> tf.Tensor:
  """`[B, P, P, C]` to `[B, P * P * C]`."""
  return tf.reshape(x, [-1, x.shape[1:].num_elements()])
