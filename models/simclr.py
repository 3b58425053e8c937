"""SimCLR: representations of images learned without labels.

Each image comes in two views, differently cropped and coloured. A residual
network and a small projection head make a vector of each view; the loss pulls
the vectors of one image together and pushes those of all other images in the
batch apart. The more images in a batch the better, and here the batch is that
of all towers: each tower compares its own rows with the rows of all.

    two views           2 x [B, H, W, C]
    encoder: resnet     [2B, 64], both views as one batch
    projection/hidden   [2B, 64], batch norm, ReLU
    projection/output   [2B, P]
    loss                [], of the directions of these vectors

With three channels and the defaults (depth 20, P of 128) it has 281,488
trainable parameters, of which 269,072 are the encoder's.

    python tools/train.py --model=simclr

Making the views is left to the input pipeline, there tools/views.py. To train
it in code of your own, and to see what it has learned:

    def model_fn(first, second):
      return simclr.loss(first, second, training=True)

    graph = towers.build_towers(model_fn, devices, inputs=(first, second))
    train_op = graph.minimize(tf.train.AdamOptimizer(0.001))

    features = simclr.features(images, training=False)  # For a classifier.

References:
  Chen et al., "A Simple Framework for Contrastive Learning of Visual
    Representations", 2020, https://arxiv.org/abs/2002.05709
  He et al., "Deep Residual Learning for Image Recognition", 2015 (the encoder),
    https://arxiv.org/abs/1512.03385
"""

from typing import Union

import tensorflow.compat.v1 as tf

from models import resnet
import towers


def features(images: tf.Tensor, *, training: Union[bool, tf.Tensor],
             depth: int = 20) -> tf.Tensor:
  """Returns the representations of images, for use in other tasks.

  Variables stand in the scope `encoder`.

  Args:
    images: Float tensor of shape `[B, H, W, C]`; all but `C` may be unknown
      while the graph is built.
    training: Whether batch norm uses the statistics of the batch (and adds
      their moving averages to `tf.GraphKeys.UPDATE_OPS`): a bool, or a bool
      tensor of shape `[]`.
    depth: Depth of the residual network, `6n + 2`.

  Returns:
    Tensor of shape `[B, 64]`, of the type of `images`.

  Raises:
    ValueError: If `depth` or `images` do not suit `resnet.features`.
  """
  with tf.variable_scope("encoder"):
    return resnet.features(images, training=training, depth=depth)


def project(x: tf.Tensor, *, training: Union[bool, tf.Tensor],
            size: int = 128) -> tf.Tensor:
  """Returns the vectors that the loss compares, of what `features` returned.

  One hidden layer as wide as `x`, with batch norm as in the authors' code.
  Variables stand in the scope `projection`.

  Args:
    x: Float tensor of shape `[B, F]`.
    training: See `features`.
    size: Length `P` of the vectors.

  Returns:
    Tensor of shape `[B, P]`.
  """
  with tf.variable_scope("projection"):
    with tf.variable_scope("hidden"):
      x = _dense(x, x.shape[-1])
      # As in the encoder.
      x = tf.nn.relu(towers.batch_norm(x, training=training, momentum=0.9))
    with tf.variable_scope("output"):
      return _dense(x, size)


def _dense(x: tf.Tensor, units: int) -> tf.Tensor:
  kernel = tf.get_variable(
      "kernel", [x.shape[-1], units], dtype=x.dtype,
      initializer=tf.variance_scaling_initializer())
  return tf.matmul(x, kernel)


def contrastive_loss(first: tf.Tensor, second: tf.Tensor, *,
                     temperature: float = 0.5) -> tf.Tensor:
  """Returns the normalised temperature-scaled cross entropy, NT-Xent.

  With `z` the `2B` vectors of the rows of all towers, both views, at length 1,
  and `i` and `j` the two views of an image, it is the mean over all `i` of

      -log(exp(z_i . z_j / temperature) /
           sum_{k != i}(exp(z_i . z_k / temperature)))

  In a tower the mean is over the tower's own `i`, and `k` goes over the whole
  batch; so the mean over the towers is the loss of one device. It takes memory
  for `2 B_t` times `2B` numbers. Of a batch of one image the loss is 0.

  Args:
    first: Float tensor of shape `[B_t, P]`, vectors of the tower's first views.
    second: The same of the second views, in the same order.
    temperature: What the cosines are divided by. The paper has 0.5 for small
      images (appendix B.9), and 0.1 for ImageNet.

  Returns:
    Scalar tensor.

  Raises:
    ValueError: If the shapes of `first` and `second` cannot be the same
      `[B_t, P]` with static `P`, or `temperature` is not above 0.
  """
  if (first.shape.ndims != 2 or not first.shape.is_compatible_with(
      second.shape) or tf.dimension_value(first.shape[-1]) is None):
    raise ValueError(
        "`first` and `second` must have one shape [B, P] with static P: got "
        f"{first.shape} and {second.shape}. Project both views alike.")
  if not temperature > 0.0:
    raise ValueError(
        "`temperature` must be what cosines are divided by: expected a number "
        f"above 0, got {temperature}.")
  own = [tf.math.l2_normalize(view, axis=-1) for view in (first, second)]
  # Both views in one message.
  every = tf.split(towers.all_gather(tf.concat(own, axis=-1)), 2, axis=-1)
  # A view must not be compared with itself: neither pulled nor pushed.
  itself = tf.equal(_positions(first)[:, tf.newaxis],
                    tf.range(tf.shape(every[0])[0]))
  nowhere = tf.constant(float("-inf"), first.dtype)
  positive = tf.reduce_sum(own[0] * own[1], axis=-1) / temperature
  losses = []
  for view in range(2):
    cosines = [tf.matmul(own[view], other, transpose_b=True) / temperature
               for other in every]
    cosines[view] = tf.where_v2(itself, nowhere, cosines[view])
    losses.append(
        tf.reduce_logsumexp(tf.concat(cosines, axis=-1), axis=-1) - positive)
  return tf.reduce_mean(tf.add_n(losses)) / 2.0


def _positions(x: tf.Tensor) -> tf.Tensor:
  """Returns where the tower's rows stand among the rows of all, `[B_t]`."""
  tower = towers.current_tower()
  rows = tf.shape(x)[0]
  # Only towers with rows of their own are in it.
  owners = towers.all_gather(tf.fill([rows], tower.index))
  before = tf.math.count_nonzero(owners < tower.index, dtype=tf.int32)
  return before + tf.range(rows)


def loss(first: tf.Tensor, second: tf.Tensor, *,
         training: Union[bool, tf.Tensor], depth: int = 20,
         projection_size: int = 128, temperature: float = 0.5) -> tf.Tensor:
  """Returns the contrastive loss of two views of the same images.

  Args:
    first: Float tensor of shape `[B, H, W, C]`, the first views.
    second: Tensor of the same shape, the second views, in the same order.
    training: See `features`.
    depth: See `features`.
    projection_size: See `project`.
    temperature: See `contrastive_loss`.

  Returns:
    Scalar tensor.

  Raises:
    ValueError: If the shapes of `first` and `second` cannot be the same.
    ValueError: See `features` and `contrastive_loss`.
  """
  if not first.shape.is_compatible_with(second.shape):
    raise ValueError(
        "`first` and `second` must be views of one shape: got "
        f"{first.shape} and {second.shape}. Crop or resize them alike.")
  # One batch, so that batch norm sees both views.
  x = features(tf.concat([first, second], axis=0), training=training,
               depth=depth)
  x = project(x, training=training, size=projection_size)
  return contrastive_loss(*tf.split(x, 2), temperature=temperature)
