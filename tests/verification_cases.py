"""Model functions with planted faults, for the tests of towers.verification."""

from typing import Any, Callable, Dict, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf
import towers


class Case(NamedTuple):
  """A fault and how it is to be found.

  Fields:
    model: The model function, of features and labels.
    rule: The rule of its first cause.
    operation: What the name of the operation must contain.
    kinds: The kinds of results that differ, at least.
    options: Go to `verify`.
  """
  model: Callable[..., Any]
  rule: str
  operation: str
  kinds: Any = ("loss", "gradient")
  options: Optional[Dict[str, Any]] = None


def batch(rows: int = 7) -> Any:
  """Returns features `[rows, 4]` and labels `[rows, 3]`."""
  rng = np.random.RandomState(0)
  return (rng.normal(size=[rows, 4]).astype("f"),
          rng.normal(size=[rows, 3]).astype("f"))


def dense(x: tf.Tensor, name: str, units: int = 3) -> tf.Tensor:
  """Returns `x` times a kernel."""
  with tf.variable_scope(name):
    kernel = tf.get_variable(
        "kernel", [x.shape[-1], units],
        initializer=tf.random_normal_initializer())
    return tf.matmul(x, kernel)


def squares(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
  """Returns the squared error of each row."""
  return tf.reduce_mean(tf.squared_difference(x, labels), axis=1)


def through(change: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
  """Returns a model that has `change` between its two layers."""
  def model_fn(features, labels):
    x = dense(features, "first", 4)
    with tf.name_scope("middle"):
      x = change(x)
    x = dense(x, "last")
    return {"loss": tf.reduce_mean(squares(x, labels)), "scores": x}
  return model_fn


def with_loss(reduce: Callable[[tf.Tensor, tf.Tensor], Any]
             ) -> Callable[..., Any]:
  """Returns a model whose loss is `reduce(losses [B], labels [B, 3])`."""
  def model_fn(features, labels):
    x = tf.nn.tanh(dense(features, "first"))
    with tf.name_scope("reduced"):
      return reduce(squares(x, labels), labels)
  return model_fn


def own_batch_norm(x):
  with towers.no_sync():
    return towers.batch_norm(x, training=True, momentum=0.9)


def moments_by_hand(x):
  mean, variance = tf.nn.moments(x, [0])
  return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def own_moments(x):
  with towers.no_sync():
    return moments_by_hand(x)


def masked_mean(losses, labels):
  mask = tf.cast(labels[:, 0] > 0, tf.float32)
  return tf.reduce_sum(losses * mask) / (tf.reduce_sum(mask) + 1e-6)


def masked_mean_with_weight(losses, labels):
  mask = tf.cast(labels[:, 0] > 0, tf.float32)
  total = tf.reduce_sum(mask)
  return towers.TowerSpec(
      tf.math.divide_no_nan(tf.reduce_sum(losses * mask), total), weight=total)


def wrong_weight(losses, unused_labels):
  return towers.TowerSpec(tf.reduce_mean(losses),
                          weight=1.0 + towers.current_tower().index)


def regularized_sum(losses, unused_labels):
  return tf.reduce_sum(losses) + 0.1 * tf.nn.l2_loss(
      tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)[0])


def mixed(x):
  order = tf.random.shuffle(tf.range(tf.shape(x)[0]))
  return 0.7 * x + 0.3 * tf.gather(x, order)


def one_number(x):
  return x * tf.random.uniform([])


def of_pairs(x):
  return tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)


def batch_size(x):
  return x * tf.cast(tf.shape(x)[0], tf.float32)


def by_position(x):
  steps = tf.cast(tf.range(tf.shape(x)[0]), tf.float32)
  return x * steps[:, tf.newaxis]


def tower_number(x):
  return x * (1.0 + towers.current_tower().index)


def gradient_by_rows(x):
  @tf.custom_gradient
  def same(y):
    rows = tf.cast(tf.shape(y)[0], tf.float32)
    return tf.identity(y), lambda slope: slope * rows
  return same(x)


def _average(features, labels):
  """Keeps a moving average by hand, of a tower's own rows."""
  x = dense(features, "first")
  average = tf.get_variable("average", [3], trainable=False,
                            initializer=tf.zeros_initializer())
  update = average.assign_sub(0.1 * (average - tf.reduce_mean(x, axis=0)))
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
  return tf.reduce_mean(squares(x, labels))


def _count(features, labels):
  """Counts steps, which each tower does."""
  steps = tf.get_variable("steps", [], trainable=False,
                          initializer=tf.zeros_initializer())
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, steps.assign_add(1.0))
  return tf.reduce_mean(squares(dense(features, "first"), labels))


def _fixed_size(features, labels):
  rows = batch()[0].shape[0]
  x = tf.reshape(dense(features, "first"), [rows, 3], name="fixed")
  return tf.reduce_mean(squares(x, labels))


def _sum_as_output(features, labels):
  x = dense(features, "first")
  right = tf.equal(tf.argmax(x, axis=1), tf.argmax(labels, axis=1))
  return {"loss": tf.reduce_mean(squares(x, labels)),
          "right": tf.reduce_sum(tf.cast(right, tf.float32), name="right")}


FAULTS = {
    "batch_norm_without_sync": Case(
        through(own_batch_norm), "batch_norm_of_own_rows",
        "middle/batch_normalization", ("loss", "gradient", "update", "output")),
    "batch_norm_switched_off": Case(
        through(lambda x: towers.batch_norm(x, training=True)),
        "batch_norm_of_own_rows", "middle/batch_normalization",
        options={"sync_batch_norm": False}),
    "moments_without_sync": Case(
        through(own_moments), "batch_norm_of_own_rows", "middle/moments"),
    "mean_of_own_rows": Case(
        through(lambda x: x - tf.reduce_mean(x, axis=0)),
        "statistic_of_own_rows", "middle/Mean"),
    "softmax_over_rows": Case(
        through(lambda x: tf.transpose(tf.nn.softmax(tf.transpose(x)))),
        "unknown", "middle/"),
    "pairs_of_rows": Case(through(of_pairs), "pairs_of_rows", "middle/MatMul"),
    "batch_size": Case(through(batch_size), "batch_size", "middle/mul"),
    "position": Case(through(by_position), "position_in_batch", "middle/"),
    "reversed": Case(through(lambda x: x + x[::-1]), "position_in_batch",
                     "middle/strided_slice"),
    "tower_number": Case(
        through(tower_number), "tower_dependent", "middle/mul"),
    "shuffle": Case(through(mixed), "shuffle_in_tower",
                               "middle/RandomShuffle"),
    "dropout_with_seed": Case(
        through(lambda x: tf.nn.dropout(x, rate=0.5, seed=3)),
        "same_random_numbers", "middle/dropout", ("random",)),
    "stateless_seed": Case(
        through(lambda x: x + tf.random.stateless_normal(
            tf.shape(x), seed=[1, 2])),
        "same_random_numbers", "middle/stateless_random_normal", ("random",)),
    "dropout_not_held": Case(
        through(lambda x: tf.nn.dropout(x, rate=0.5)), "own_random_numbers",
        "middle/dropout", options={"hold_random": False}),
    "one_number_for_all": Case(
        through(one_number), "random_numbers_for_whole_batch",
        "middle/random_uniform", ("random",)),
    "custom_gradient": Case(
        through(gradient_by_rows), "gradient_function", "first/kernel",
        ("gradient",)),
    "sum": Case(with_loss(lambda losses, _: tf.reduce_sum(losses) / 7.0),
                "sum_over_rows", "reduced/Sum"),
    "sum_with_decay": Case(with_loss(regularized_sum), "sum_over_rows",
                           "reduced/Sum"),
    "masked_mean": Case(with_loss(masked_mean), "mean_without_weight",
                        "reduced/truediv"),
    "boolean_mask": Case(
        with_loss(lambda losses, labels: tf.reduce_mean(
            tf.boolean_mask(losses, labels[:, 0] > 0))),
        "mean_without_weight", "reduced/Mean"),
    "wrong_weight": Case(with_loss(wrong_weight), "weight_of_another_mean",
                         "reduced/Mean"),
    "root_of_mean": Case(
        with_loss(lambda losses, _: tf.sqrt(tf.reduce_mean(losses))),
        "function_of_batch_statistic", "reduced/Sqrt"),
    "largest": Case(with_loss(lambda losses, _: tf.reduce_max(losses)),
                    "reduction_over_rows", "reduced/Max"),
    "moving_average": Case(_average, "update_of_first_tower", "average",
                           ("update",)),
    "counter_in_each_tower": Case(
        _count, "update_in_each_tower", "steps", ("update",),
        {"update_ops": "all"}),
    "fixed_batch_size": Case(
        _fixed_size, "batch_size_fixed", "fixed", ("error",)),
    "sum_as_output": Case(
        _sum_as_output, "sum_over_rows", "right", ("output",)),
}


def _with_sync(x):
  return towers.batch_norm(x, training=True, momentum=0.9)


def _row_noise(x):
  x = tf.nn.dropout(x, rate=0.5, noise_shape=[tf.shape(x)[0], 1])
  return x + tf.random.normal(tf.shape(x))


def _time_major(x):
  x = tf.transpose(tf.reshape(x, [-1, 2, 2]), [1, 0, 2])
  x = tf.nn.dropout(x, rate=0.5)
  return tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 4])


def _merged_noise(x):
  noise = tf.random.uniform([4])
  return x * towers.merge(lambda values: values[0], noise)


SOUND = {
    "batch_norm": through(_with_sync),
    "moments": through(moments_by_hand),
    "dropout": through(lambda x: tf.nn.dropout(x, rate=0.5)),
    "noise_by_row": through(_row_noise),
    "dropout_with_time_first": through(_time_major),
    "mean": with_loss(lambda losses, _: tf.reduce_mean(losses)),
    "masked_mean_with_weight": with_loss(masked_mean_with_weight),
    "mean_by_shape": with_loss(
        lambda losses, _: tf.reduce_sum(losses) / tf.cast(
            tf.shape(losses)[0], tf.float32)),
    "not_a_number": with_loss(
        lambda losses, _: tf.reduce_mean(losses) * float("nan")),
}
