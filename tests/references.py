"""Runs a model as plain code on one device and in towers, on equal values."""

import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


class Result(NamedTuple):
  """What a model computes.

  Fields:
    loss: Its loss.
    outputs: Its outputs, by name.
    gradients: Its gradients by trainable variable; None where there is none.
    variables: The names of all variables.
  """
  loss: Any
  outputs: Dict[str, Any]
  gradients: Dict[str, Any]
  variables: List[str]


def value_for(variable: Any) -> np.ndarray:
  """Returns a value that depends on the name of the variable alone."""
  rng = np.random.RandomState(zlib.crc32(variable.op.name.encode()) % 2**31)
  value = rng.normal(size=variable.shape.as_list())
  if "variance" in variable.op.name:
    value = 1 + value**2
  return value.astype(variable.dtype.base_dtype.as_numpy_dtype)


def initialize(sess: tf.Session) -> None:
  """Gives each global variable the value that its name stands for."""
  for variable in tf.global_variables():
    sess.run(variable.initializer,
             {variable.initializer.inputs[1]: value_for(variable)})


def run(make_model: Callable[[], Callable[..., Any]],
        values: Sequence[np.ndarray],
        num_towers: Optional[int] = None,
        *,
        known_size: bool = False,
        **options: Any) -> Result:
  """Builds and runs a model in a graph of its own.

  Args:
    make_model: Returns the model function; called in the graph, so that what
      the model closes over can be made there.
    values: The batch.
    num_towers: How many towers to build; None for plain code on one device.
    known_size: Whether the batch size is known while building.
    **options: Go to `towers.build_towers`.
  """
  with tf.Graph().as_default():
    tf.set_random_seed(1)
    inputs = tuple(
        tf.placeholder(v.dtype, v.shape if known_size else [None, *v.shape[1:]])
        for v in values)
    with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
      model = make_model()
    if num_towers is None:
      with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
        returned = model(*inputs)
      outputs = dict(returned) if isinstance(returned, dict) else {
          "loss": returned
      }
      loss = outputs.pop("loss")
      variables = tf.trainable_variables()
      pairs = list(zip(tf.gradients(loss, variables), variables))
    else:
      graph = towers.build_towers(
          model, testing.devices(num_towers), inputs=inputs, **options)
      loss, outputs, pairs = graph.loss, graph.outputs or {}, graph.gradients()
    gradients = {
        variable.op.name: None if gradient is None else
        tf.convert_to_tensor(gradient) for gradient, variable in pairs
    }
    present = {k: g for k, g in gradients.items() if g is not None}
    # A loop on one device cannot keep what it reads from a variable on another
    # for its gradient, with strict placement.
    with testing.session(allow_soft_placement=True) as sess:
      initialize(sess)
      loss, outputs, present = sess.run((loss, outputs, present),
                                        dict(zip(inputs, values)))
    return Result(loss, outputs, {k: present.get(k) for k in gradients},
                  [v.op.name for v in tf.global_variables()])


def assert_equal(test: tf.test.TestCase, actual: Result, expected: Result,
                 tolerance: float = 1e-9) -> None:
  """Fails `test` where two results differ by more than rounding."""
  test.assertEqual(actual.variables, expected.variables)
  test.assertAllClose(actual.loss, expected.loss, tolerance, tolerance)
  test.assertCountEqual(actual.outputs, expected.outputs)
  for name, value in expected.outputs.items():
    test.assertAllClose(actual.outputs[name], value, tolerance, tolerance,
                        msg=name)
  test.assertEqual(list(actual.gradients), list(expected.gradients))
  for name, value in expected.gradients.items():
    if value is None:
      test.assertIsNone(actual.gradients[name], name)
    else:
      test.assertAllClose(actual.gradients[name], value, tolerance, tolerance,
                          msg=name)
