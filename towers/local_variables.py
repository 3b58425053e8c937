"""Variables that belong to a process and not to the model.

Checkpoints leave them out, so that what they hold (copies, sums of a step that
is not complete) depends on no one's number of towers. They stand in
`tf.GraphKeys.LOCAL_VARIABLES` and are set by `tf.local_variables_initializer`,
which `MonitoredTrainingSession` runs after it has initialised or restored the
others; and also whenever the variable that they belong to is initialised, so
that `tf.global_variables_initializer` alone suffices.
"""

from typing import Any

import tensorflow.compat.v1 as tf

from towers import _tensorflow


def copy_of(variable: Any, *, device: str, name: str) -> Any:
  """Returns a variable, in no collection yet, that starts as `variable` is.

  Args:
    variable: A resource variable.
    device: Where the copy is.
    name: Its name.
  """
  # As its initial value, TensorFlow would take the variable's initial one.
  copy = _make(variable.shape, variable.dtype.base_dtype, device, name)
  first = _first_value(variable)
  with tf.device(None), tf.device(device):
    _tensorflow.set_initializer(copy, copy.assign(first, read_value=False))
    # Both may run at once: then this comes last.
    with tf.control_dependencies([variable.initializer, copy.initializer]):
      follow = copy.assign(variable.read_value(), read_value=False)
  _tensorflow.extend_initializer(variable, [follow])
  return copy


def zeros(shape: Any, dtype: tf.DType, *, device: str, name: str,
          variable: Any) -> Any:
  """Returns a local variable of zeros, set back whenever `variable` is."""
  local = _make(shape, dtype, device, name)
  tf.add_to_collection(tf.GraphKeys.LOCAL_VARIABLES, local)
  _tensorflow.extend_initializer(variable, [local.initializer])
  return local


def _first_value(variable: Any) -> tf.Tensor:
  """Returns the value of `variable`, or the one that it is about to get."""
  if variable.initial_value is None:  # It comes from an imported graph.
    return variable.read_value()
  # Both may be initialised in one run, in either order.
  with tf.device(None), tf.device(variable.device):
    return tf.cond(variable.is_initialized(), variable.read_value,
                   lambda: variable.initial_value)


def _make(shape: Any, dtype: tf.DType, device: str, name: str) -> Any:
  with tf.device(None), tf.device(device):
    return tf.Variable(
        lambda: tf.zeros(_known(shape), dtype), trainable=False, dtype=dtype,
        use_resource=True, name=name, shape=shape, collections=[])


def _known(shape: Any) -> Any:
  """Returns a shape that `shape` allows."""
  shape = tf.TensorShape(shape)
  return [size or 0 for size in shape.as_list()] if shape.rank else []
