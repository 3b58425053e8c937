"""Checkpoints in other people's namings, which the tests of restoring share."""

import os
from typing import Any, Dict

import numpy as np
import tensorflow.compat.v1 as tf

import testing


def write(path: str, values: Dict[str, Any], **options: Any) -> str:
  """Writes a checkpoint of these values by these keys; returns its prefix.

  Args:
    path: The prefix.
    values: The values by key.
    **options: For `tf.train.Saver`.
  """
  with tf.Graph().as_default(), testing.session() as sess:
    variables = {
        key: tf.Variable(value, name=f"v{k}", dtype=np.asarray(value).dtype)
        for k, (key, value) in enumerate(values.items())
    }
    sess.run(tf.global_variables_initializer())
    return tf.train.Saver(variables, **options).save(
        sess, os.fspath(path), write_meta_graph=False)


def read(path: str) -> Dict[str, np.ndarray]:
  """Returns the values in a checkpoint by key."""
  reader = tf.train.load_checkpoint(path)
  return {key: reader.get_tensor(key)
          for key in reader.get_variable_to_shape_map()}


def value(seed: int, shape: Any = (2, 3)) -> np.ndarray:
  """Returns float32 values that depend on the seed."""
  return np.random.RandomState(seed).normal(size=shape).astype("float32")


def truncate(path: str, *, part: str = "data-00000-of-00001",
             length: int = 5) -> None:
  """Cuts off one of a checkpoint's files after `length` bytes."""
  os.truncate(f"{path}.{part}", length)
