"""Networks that compute in 16 bits, with variables and results of 32."""

from typing import Any, Callable

import tensorflow.compat.v1 as tf

# Types in which a network may compute; variables are float32 in any case.
PRECISIONS = ("float32", "float16", "bfloat16")


def computed_in(precision: str,
                network: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
  """Returns a network that takes and returns float32 and computes in another.

  Args:
    precision: One of `PRECISIONS`.
    network: Takes one tensor, and what else by keyword; returns a tensor.
  """
  if precision == "float32":
    return network

  def mixed(x, **arguments):
    with tf.variable_scope(
        tf.get_variable_scope(), auxiliary_name_scope=False,
        custom_getter=_float32_variable):
      result = network(tf.cast(x, precision), **arguments)
    return tf.cast(result, tf.float32)

  return mixed


def _float32_variable(getter: Callable[..., tf.Variable], name: str,
                      dtype: tf.DType = tf.float32, **arguments: Any) -> Any:
  """Makes a float32 variable, and casts it to what the model asked for.

  Steps of a small learning rate would be lost in 16 bits.
  """
  dtype = tf.as_dtype(dtype)
  if dtype not in (tf.float16, tf.bfloat16):
    return getter(name, dtype=dtype, **arguments)
  return tf.cast(getter(name, dtype=tf.float32, **arguments), dtype)
