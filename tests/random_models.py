"""Random small models, for tests that hold of every model.

A `Case` says in plain data what to build: parts that follow each other, the
loss, the options of a step and the batch. `cases()` draws them by hypothesis,
which also finds the smallest case that fails; its `repr` is all it takes to
build it again.
"""

import dataclasses
from typing import Any, Callable, List, Optional, Tuple

from hypothesis import strategies as st
import numpy as np
import tensorflow.compat.v1 as tf
import towers

IDS = 5
CLASSES = 3
CHANNELS = 2


class Context:
  """What the parts of one call of a model function share."""

  def __init__(self, training: tf.Tensor, ids: tf.Tensor,
               dtype: tf.DType) -> None:
    self.training = training
    self.ids = ids
    self.dtype = dtype
    self.kernels: List[Any] = []

  def _initial(self, shape: Any, dtype: tf.DType = tf.float32,
               **unused: Any) -> tf.Tensor:
    rng = np.random.RandomState(len(self.kernels))
    value = 0.5 + np.abs(rng.normal(size=tf.TensorShape(shape).as_list()))
    return tf.constant(value, dtype)

  def variable(self, name: str, shape: Any, trainable: bool = True,
               plain: bool = False) -> Any:
    """Makes a variable by `tf.get_variable`, or by `tf.Variable` if `plain`."""
    if plain:
      variable = tf.Variable(tf.zeros(shape, self.dtype), trainable=trainable,
                             name=name)
    else:
      variable = tf.get_variable(name, shape, self.dtype, trainable=trainable,
                                 initializer=self._initial)
    if trainable:
      self.kernels.append(variable)
    return variable


@dataclasses.dataclass(frozen=True)
class Convolution:
  """3x3 convolution of images."""
  filters: int
  bias: bool

  images = True

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    kernel = context.variable("kernel", [3, 3, x.shape[-1], self.filters])
    x = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
    if self.bias:
      x = tf.nn.bias_add(x, context.variable("bias", [self.filters]))
    return x


@dataclasses.dataclass(frozen=True)
class Dense:
  """Product with a matrix over the last axis."""
  units: int
  bias: bool
  plain: bool

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    kernel = context.variable("kernel", [x.shape[-1], self.units],
                              plain=self.plain)
    x = tf.tensordot(x, kernel, 1)
    return x + context.variable("bias", [self.units]) if self.bias else x


@dataclasses.dataclass(frozen=True)
class BatchNorm:
  """Batch norm as `towers.batch_norm`, or written out by other functions.

  `training` is True, False, or "fed", for the tensor that all towers share.
  """
  kind: str
  training: Any
  momentum: float
  epsilon: float
  center: bool
  scale: bool

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    training = context.training if self.training == "fed" else self.training
    if self.kind == "towers":
      return towers.batch_norm(
          x, training=training, momentum=self.momentum, epsilon=self.epsilon,
          center=self.center, scale=self.scale)
    channels = [x.shape[-1]]
    gamma = context.variable("gamma", channels) if self.scale else None
    beta = context.variable("beta", channels) if self.center else None
    moving = [context.variable(name, channels, trainable=False)
              for name in ("moving_mean", "moving_variance")]
    if self.kind == "fused" and x.shape.rank == 4 and (
        x.dtype == tf.float32 and isinstance(training, bool)):
      y, *found = tf.nn.fused_batch_norm(
          x, tf.ones(channels) if gamma is None else gamma,
          tf.zeros(channels) if beta is None else beta,
          *([] if training else moving), epsilon=self.epsilon,
          is_training=training)
    else:
      axes = list(range(x.shape.rank - 1))
      if training is True:
        found = tf.nn.moments(x, axes)
      elif training is False:
        found = moving
      else:
        found = tf.cond(training, lambda: tuple(tf.nn.moments(x, axes)),
                        lambda: tuple(map(tf.identity, moving)))
      y = tf.nn.batch_normalization(x, *found, beta, gamma, self.epsilon)
    if training is not False:
      for average, value in zip(moving, found):
        # Without training this assigns the average to itself.
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.assign_sub(
            (average - tf.stop_gradient(value)) * (1 - self.momentum)))
    return y


@dataclasses.dataclass(frozen=True)
class Function:
  """An op without variables; see `FUNCTIONS`."""
  name: str

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    return FUNCTIONS[self.name](x)


def _layer_norm(x: tf.Tensor) -> tf.Tensor:
  mean, variance = tf.nn.moments(x, [x.shape.rank - 1], keepdims=True)
  return (x - mean) * tf.math.rsqrt(variance + 0.1)


def _relu(x: tf.Tensor) -> tf.Tensor:
  # In float32 rounding can put a value on the other side of the kink; what is 0
  # but for rounding, as batch norm of one row, can do so in any type.
  return tf.nn.relu(x + 0.3) if x.dtype == tf.float64 else tf.nn.softplus(x)


def _less_mean(x: tf.Tensor) -> tf.Tensor:
  return x - towers.all_reduce(tf.reduce_mean(x, axis=0), "mean")


def _sum_of_all(x: tf.Tensor) -> tf.Tensor:
  return tf.tanh(x + towers.all_reduce(tf.reduce_sum(x, axis=0)))


def _pairs(x: tf.Tensor) -> tf.Tensor:
  flat = tf.reshape(x, [-1, int(np.prod(x.shape[1:]))])
  others = towers.all_gather(flat)
  weights = tf.nn.softmax(0.1 * tf.matmul(flat, others, transpose_b=True))
  mixed = tf.reshape(tf.matmul(weights, others), [-1, *x.shape[1:]])
  return tf.tanh(x + mixed)


FUNCTIONS = {
    "tanh": tf.tanh,
    "softplus": tf.nn.softplus,
    "relu": _relu,
    "layer_norm": _layer_norm,
    "stop_gradient": lambda x: 0.5 * x + 0.5 * tf.stop_gradient(x),
    "whole_moments": lambda x: x * tf.math.rsqrt(
        0.1 + towers.moments(x, list(range(x.shape.rank - 1)))[1]),
    "less_mean": _less_mean,
    "sum_of_all": _sum_of_all,
    "pairs": _pairs,
}


@dataclasses.dataclass(frozen=True)
class Pool:
  """Mean over 2x2 pixels."""

  images = True

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    return tf.nn.avg_pool2d(x, 2, 1, "SAME")


@dataclasses.dataclass(frozen=True)
class Embedding:
  """Adds rows of a table, whose gradient is `IndexedSlices`."""
  dense_too: bool

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    table = context.variable("table", [IDS, x.shape[-1]])
    found = tf.nn.embedding_lookup(table, context.ids)
    for _ in range(x.shape.rank - 2):
      found = found[:, tf.newaxis]
    x += found
    return x + tf.reduce_mean(table, axis=0) if self.dense_too else x


@dataclasses.dataclass(frozen=True)
class Shared:
  """One layer, called twice."""
  bias: bool

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    for _ in range(2):
      with tf.variable_scope("layer", reuse=tf.AUTO_REUSE):
        kernel = tf.get_variable("kernel", [x.shape[-1]] * 2, context.dtype)
        x = tf.tensordot(x, kernel, 1)
        if self.bias:
          x += tf.get_variable("bias", x.shape[-1:], context.dtype)
        x = tf.tanh(x)
    return x


@dataclasses.dataclass(frozen=True)
class Branches:
  """Two chains of parts side by side, added or one after the other's channels.
  """
  one: Tuple[Any, ...]
  other: Tuple[Any, ...]
  join: str

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    made = [chain(parts, x, context) for parts in (self.one, self.other)]
    if self.join == "concat" or made[0].shape[-1] != made[1].shape[-1]:
      return tf.concat(made, axis=-1)
    return made[0] + made[1]


@dataclasses.dataclass(frozen=True)
class Conditional:
  """A `tf.cond`, by the tensor that all towers share or by a tower's own rows.
  """
  parts: Tuple[Any, ...]
  own_predicate: bool

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    predicate = context.training
    if self.own_predicate:  # True in every tower, which nothing shows ahead.
      predicate = tf.reduce_max(tf.abs(x)) >= 0
    shape = x.shape

    def taken():
      y = tf.tensordot(chain(self.parts, x, context), context.variable(
          "back", [self.channels(x), shape[-1]]), 1)
      return tf.tanh(y)

    y = tf.cond(predicate, taken, lambda: 0.5 * x)
    y.set_shape(shape)
    return y

  def channels(self, x: tf.Tensor) -> int:
    count = x.shape[-1]
    for part in self.parts:
      count = getattr(part, "units", getattr(part, "filters", count))
    return count


@dataclasses.dataclass(frozen=True)
class Loop:
  """A `tf.while_loop` over a recurrence; see `LOOPS` for what it adds."""
  steps: int
  kind: str

  def __call__(self, x: tf.Tensor, context: Context) -> tf.Tensor:
    def step(i, state):
      kernel = tf.get_variable("recurrent", [x.shape[-1]] * 2, context.dtype)
      state = LOOPS[self.kind](tf.tensordot(state, kernel, 1))
      return i + 1, tf.tanh(state)

    shape = x.shape
    _, x = tf.while_loop(lambda i, _: i < self.steps, step, [0, x])
    x.set_shape(shape)
    return x


def _normalised(x: tf.Tensor) -> tf.Tensor:
  mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)))
  return (x - mean) * tf.math.rsqrt(variance + 0.1)


LOOPS = {"none": lambda x: x, "moments": _normalised, "less_mean": _less_mean}


def chain(parts: Tuple[Any, ...], x: tf.Tensor, context: Context) -> tf.Tensor:
  """Returns what the parts make of `x`; those for images skip what is none."""
  for part in parts:
    if getattr(part, "images", False) and x.shape.rank != 4:
      continue
    with tf.variable_scope(None, type(part).__name__.lower()):
      x = part(x, context)
  return x


@dataclasses.dataclass(frozen=True)
class Case:
  """A model, its batch, and a step of training.

  Without an `optimizer` a step is the update ops, and gradients are compared in
  place of what an optimizer makes of them.
  """
  on_images: Tuple[Any, ...]
  on_features: Tuple[Any, ...]
  loss: str
  decay: str
  penalty: bool
  extra: Tuple[str, ...]
  double: bool
  num_towers: int
  rows: int
  known_rows: bool
  training: bool
  optimizer: Optional[str]
  clip: bool
  variables: str
  update_ops: str
  seed: int

  @property
  def dtype(self) -> tf.DType:
    return tf.float64 if self.double else tf.float32

  def batch(self) -> Tuple[np.ndarray, ...]:
    """Returns images `[B, 4, 4, 2]`, ids, labels and weights `[B]`."""
    rng = np.random.RandomState(self.seed)
    weights = rng.randint(0, 4, [self.rows])
    weights[rng.randint(self.rows)] = 2  # In all there is something to learn.
    return (rng.normal(0.5, 1.5, [self.rows, 4, 4, CHANNELS]).astype(
        self.dtype.as_numpy_dtype), rng.randint(0, IDS, [self.rows]),
            rng.randint(0, CLASSES, [self.rows]),
            weights.astype(self.dtype.as_numpy_dtype))

  def all_parts(self) -> List[Any]:
    """Returns the parts, and those inside of others, after them."""
    found, left = [], [*self.on_images, *self.on_features]
    while left:
      part = left.pop(0)
      found.append(part)
      for name in ("one", "other", "parts"):
        left.extend(getattr(part, name, ()))
    return found

  def refused(self) -> bool:
    """Whether towers cannot build it, as they would have to meet in a loop.
    """
    if self.num_towers == 1:
      return False
    for part in self.all_parts():
      if isinstance(part, Loop) and part.kind != "none":
        return True
      if isinstance(part, Conditional) and part.own_predicate and any(
          _meets(inner) for inner in part.parts):
        return True
    return False


def _meets(part: Any) -> bool:
  if isinstance(part, BatchNorm):
    return part.training is not False
  return isinstance(part, Function) and part.name in (
      "whole_moments", "less_mean", "sum_of_all", "pairs")


def make_model(case: Case, training: tf.Tensor,
               plant: Optional[Callable[[tf.Tensor], tf.Tensor]] = None,
               of_losses: Optional[Callable[..., Any]] = None
              ) -> Callable[..., Any]:
  """Returns the model function of a case.

  Args:
    case: The case.
    training: Scalar bool tensor, for batch norm and conditionals; or a function
      that makes it.
    plant: Changes the features `[B, C]` before the last layer.
    of_losses: Makes the loss, or what the model returns, of the losses and the
      weights `[B]`, in place of the case's own.
  """
  def model_fn(images, ids, labels, weights):
    context = Context(training() if callable(training) else training, ids,
                      case.dtype)
    x = chain(case.on_images, images, context)
    if "frozen" in case.extra:
      x *= context.variable("frozen", [], trainable=False)
    x = chain(case.on_features, tf.reduce_mean(x, axis=[1, 2]), context)
    if plant is not None:
      # What the parts made may be 0 in all rows.
      x += images[:, 0, 0, :1]
      with tf.name_scope("planted"):
        x = plant(x)
    logits = chain((Dense(CLASSES, True, False),), x, context)
    if "unused" in case.extra:
      context.variable("unused", [2])
      context.kernels.pop()
    if "counter" in case.extra:
      counter = tf.get_variable("counter", [], tf.int64, trainable=False,
                                initializer=tf.zeros_initializer())
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, counter.assign_add(1))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=logits)
    if of_losses is not None:
      return of_losses(losses, weights)
    loss = {
        "mean": lambda: tf.reduce_mean(losses),
        "collected": lambda: _collected(losses, labels, logits),
        "squares": lambda: tf.reduce_mean(
            tf.square(logits - tf.one_hot(labels, CLASSES, dtype=case.dtype))),
        "weighted": lambda: tf.math.divide_no_nan(
            tf.reduce_sum(losses * weights), tf.reduce_sum(weights)),
    }[case.loss]()
    # TensorFlow has no second derivative of a loop.
    if case.penalty and case.loss != "weighted" and not any(
        isinstance(part, Loop) for part in case.all_parts()):
      slope, = tf.gradients(tf.reduce_sum(logits), images)
      if slope is not None:
        loss += 0.1 * tf.reduce_mean(tf.square(slope))
    loss += _decay(case.decay, context)
    outputs = {"logits": logits, "losses": losses}
    if "scalar" in case.extra and case.loss != "weighted":
      outputs["scalar"] = tf.reduce_mean(tf.square(x))
    if case.loss == "weighted":
      return towers.TowerSpec(loss, outputs, weight=tf.reduce_sum(weights))
    return {"loss": loss, **outputs}
  return model_fn


def _collected(losses: tf.Tensor, labels: tf.Tensor,
               logits: tf.Tensor) -> tf.Tensor:
  if logits.dtype == tf.float32:
    return tf.losses.sparse_softmax_cross_entropy(labels, logits)
  loss = tf.reduce_mean(losses)  # `tf.losses` would make float32 of it.
  tf.losses.add_loss(loss)
  return loss


def _decay(kind: str, context: Context) -> Any:
  variables = {"none": [], "own": context.kernels,
               "all": tf.trainable_variables()}[kind]
  return 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in variables]) if (
      variables) else 0.0


def _batch_norms() -> Any:
  return st.builds(
      BatchNorm, st.sampled_from(["towers", "fused", "moments"]),
      st.sampled_from([True, "fed", False]), st.sampled_from([0.9, 0.5, 0.99]),
      st.sampled_from([0.1, 0.01]), st.booleans(), st.booleans())


def _simple(images: bool) -> Any:
  sizes = st.integers(1, 3)
  kinds = [_batch_norms(),
           st.builds(Function, st.sampled_from(list(FUNCTIONS)))]
  if images:
    kinds += [st.builds(Convolution, sizes, st.booleans()), st.builds(Pool)]
  else:
    kinds += [st.builds(Dense, sizes, st.booleans(), st.booleans())]
  return st.one_of(*kinds)


def _parts(images: bool, most: int) -> Any:
  """Draws up to `most` parts."""
  simple = _simple(images)
  few = st.lists(simple, max_size=2).map(tuple)
  # Update ops in a branch that is not taken have no meaning on one device.
  plain = st.one_of(
      st.builds(Dense, st.integers(1, 3), st.booleans(), st.just(False)),
      st.builds(Function, st.sampled_from(list(FUNCTIONS))))
  kinds = [
      simple, simple,
      st.builds(Embedding, st.booleans()),
      st.builds(Shared, st.booleans()),
      st.builds(Branches, few, few, st.sampled_from(["sum", "concat"])),
      st.builds(Conditional, st.lists(plain, max_size=2).map(tuple),
                st.sampled_from([False, False, False, True])),
      st.builds(Loop, st.integers(1, 2),
                st.sampled_from(["none", "none", *LOOPS])),
  ]
  return st.lists(st.one_of(*kinds), min_size=1, max_size=most).map(tuple)


def cases(**fixed: Any) -> Any:
  """Draws cases; `fixed` has strategies for some of their fields."""
  fields = dict(
      on_images=_parts(True, 2), on_features=_parts(False, 2),
      loss=st.sampled_from(["mean", "collected", "squares", "weighted"]),
      decay=st.sampled_from(["none", "own", "all"]),
      penalty=st.sampled_from([False, False, False, True]),
      extra=st.lists(
          st.sampled_from(["frozen", "unused", "counter", "scalar"]),
          max_size=2, unique=True).map(tuple),
      double=st.sampled_from([True, True, False]),
      num_towers=st.sampled_from([2, 3, 2, 1, 4]), rows=st.integers(1, 9),
      known_rows=st.booleans(), training=st.sampled_from([True, True, False]),
      optimizer=st.sampled_from([None, "momentum", None, "adam", "sgd"]),
      clip=st.booleans(),
      variables=st.sampled_from(["shared", "balanced", "replicated"]),
      update_ops=st.just("first"), seed=st.integers(0, 999))
  fields.update(fixed)
  return st.builds(Case, **fields)
