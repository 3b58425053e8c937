"""A model and its training, in towers and as plain code, that tests share."""

import contextlib
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

ROWS = 12  # Of the embedding.


def model(features, ids, labels):
  """A dense layer, an embedding and weight decay; a mean over rows."""
  dtype = features.dtype
  regularizer = lambda v: 0.01 * tf.nn.l2_loss(v)
  weights = tf.get_variable("weights", [3, 4], dtype, regularizer=regularizer)
  bias = tf.get_variable("bias", [4], dtype,
                         initializer=tf.zeros_initializer())
  table = tf.get_variable("table", [ROWS, 4], dtype)
  hidden = tf.tanh(tf.matmul(features, weights) + bias)
  hidden += tf.nn.embedding_lookup(table, ids)
  last = tf.get_variable("last", [4, 2], dtype)
  logits = tf.matmul(hidden, last)
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels=labels, logits=logits)
  mean = tf.get_variable("seen", [], dtype, trainable=False,
                         initializer=tf.zeros_initializer())
  now = towers.all_reduce(tf.reduce_mean(features), "mean")
  tf.add_to_collection(
      tf.GraphKeys.UPDATE_OPS,
      mean.assign_sub(0.1 * (mean - tf.stop_gradient(now))))
  decay = tf.losses.get_regularization_loss()
  return tf.reduce_mean(losses) + tf.cast(decay, dtype)


def batch(size: int, seed: int = 0) -> List[np.ndarray]:
  """Returns `size` rows; ids repeat within and across towers."""
  rng = np.random.RandomState(seed * 100 + size)
  return [rng.normal(size=[size, 3]), rng.randint(0, ROWS // 2, [size]),
          rng.randint(0, 2, [size])]


class Trainer:
  """One graph in which the model trains.

  Attributes:
    graph: The `TowerGraph`; None for plain code.
    train_op: The train op.
    loss: The loss.
    global_step: The step.
  """

  def __init__(self, num_towers: Optional[int],
               make_train_op: Callable[[Any, Any], Any], *,
               model_fn: Callable[..., Any] = model,
               dtype: tf.DType = tf.float64, **options: Any):
    """Builds.

    Args:
      num_towers: How many towers; None for plain code.
      make_train_op: Makes the train op from the `TowerGraph` (or the loss) and
        the global step.
      model_fn: The model.
      dtype: Type of the features.
      **options: For `build_towers`.
    """
    self._graph = tf.Graph()
    self._session: Optional[tf.Session] = None
    with self._graph.as_default():
      tf.set_random_seed(5)
      self._inputs = (tf.placeholder(dtype, [None, 3]),
                      tf.placeholder(tf.int64, [None]),
                      tf.placeholder(tf.int64, [None]))
      self.global_step = tf.train.get_or_create_global_step()
      if num_towers is None:
        self.graph = None
        with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
          self.loss = model_fn(*self._inputs)
        self.train_op = make_train_op(self.loss, self.global_step)
      else:
        self.graph = towers.build_towers(
            model_fn, testing.devices(num_towers), inputs=self._inputs,
            **options)
        self.loss = self.graph.loss
        self.train_op = make_train_op(self.graph, self.global_step)

  @contextlib.contextmanager
  def session(self, local: bool = True):
    """Opens a session; variables have the values of their names."""
    with testing.session(self._graph) as sess:
      sess.run(tf.global_variables_initializer())
      if local:
        sess.run(tf.local_variables_initializer())
      self._session = sess
      yield self
      self._session = None

  def step(self, values: Sequence[np.ndarray]) -> None:
    """Runs the train op on a batch."""
    self.run(self.train_op, values)

  def run(self, fetches: Any, values: Sequence[np.ndarray]) -> Any:
    return self._session.run(fetches, dict(zip(self._inputs, values)))

  def variables(self) -> Dict[str, np.ndarray]:
    """Returns the values of all global variables."""
    with self._graph.as_default():
      known = tf.global_variables()
    return dict(zip([v.op.name for v in known], self._session.run(known)))

  def evaluate(self, fetches: Any) -> Any:
    return self._session.run(fetches)


def plain_step(optimizer: Callable[[], tf.train.Optimizer],
               change: Callable[[List[Any]], List[Any]] = lambda pairs: pairs):
  """Returns what makes a train op as one-device code has it."""

  def make(loss, global_step):
    own = optimizer()
    pairs = change(own.compute_gradients(loss))
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    with tf.control_dependencies(updates):
      return own.apply_gradients(pairs, global_step=global_step)

  return make


def towers_step(optimizer: Callable[[], tf.train.Optimizer], **options: Any):
  """Returns what makes a train op of a `TowerGraph`."""

  def make(graph, global_step):
    return graph.minimize(optimizer(), global_step=global_step, **options)

  return make
