"""Finds checkpoint files and reads them, with errors that name the file.

A checkpoint is the pair of files `PREFIX.index` and `PREFIX.data-...` that
`tf.train.Saver` writes, the one file of its older format, or what
`tf.train.Checkpoint` and Keras write, whose keys tell the way to an object
(`layer/kernel/.ATTRIBUTES/VARIABLE_VALUE`). The latter hold the variables'
names besides, and go by these here.
"""

import contextlib
import os
import re
from typing import Dict, Iterator, List, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

# Where object-based checkpoints note which object has which key.
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

# What TensorFlow raises for files that are not there, cut off or damaged; it
# turns "out of range" into Python's `IndexError`.
READ_ERRORS = (tf.errors.OpError, LookupError, ValueError, RuntimeError,
               OSError)


class Entry(NamedTuple):
  """One tensor of a checkpoint.

  Fields:
    key: Its key in the file.
    shape: Its shape.
    dtype: Its type.
  """
  key: str
  shape: List[int]
  dtype: tf.DType


class File:
  """A checkpoint that can be read.

  Attributes:
    path: Its prefix.
    entries: What it holds, by name.
  """

  def __init__(self, checkpoint: str):
    """Opens it.

    Args:
      checkpoint: See `find`.

    Raises:
      ValueError: If there is no such checkpoint, or its index cannot be read.
    """
    self.path = find(checkpoint)
    with explained(self.path):
      self._reader = tf.train.load_checkpoint(self.path)
      shapes = self._reader.get_variable_to_shape_map()
      types = self._reader.get_variable_to_dtype_map()
      names = {}
      if _OBJECT_GRAPH in shapes:
        names = _variable_names(self._reader.get_tensor(_OBJECT_GRAPH))
        # Counters of saves, and the graph itself, are no one's variables.
        shapes = {key: shapes[key] for key in names if key in shapes}
    self.entries: Dict[str, Entry] = {
        names.get(key, key): Entry(key, list(shapes[key]),
                                   tf.as_dtype(types[key]))
        for key in sorted(shapes)
    }

  def value(self, name: str) -> np.ndarray:
    """Returns the value of the entry `name`.

    Raises:
      ValueError: If it cannot be read.
    """
    with explained(self.path):
      return self._reader.get_tensor(self.entries[name].key)


def _variable_names(object_graph: bytes) -> Dict[str, str]:
  """Returns the names of the variables that an object graph holds, by key."""
  graph = trackable_object_graph_pb2.TrackableObjectGraph()
  graph.ParseFromString(object_graph)
  return {attribute.checkpoint_key: attribute.full_name
          for node in graph.nodes for attribute in node.attributes
          if attribute.full_name}


def find(checkpoint: str) -> str:
  """Returns the prefix of a checkpoint.

  Args:
    checkpoint: Its prefix, one of its files, or a directory, which stands for
      the last checkpoint in it by TensorFlow's own list, the file `checkpoint`.

  Raises:
    ValueError: If there is none. The message names the last good one in that
      directory, if there is one.
  """
  path = os.fspath(checkpoint)
  if tf.io.gfile.isdir(path):
    last = tf.train.latest_checkpoint(path)
    if last is None:
      raise ValueError(
          "`checkpoint` must be a checkpoint or a directory that lists one: "
          f"got {path}, whose file `checkpoint` is missing or names files that "
          f"are not there. {_advice(os.path.join(path, ''))}")
    return last
  if not exists(path):
    path = re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path)
  if not exists(path):
    raise ValueError(
        f"`checkpoint` must exist: got {os.fspath(checkpoint)}, and there is "
        f"no {path}.index. {_advice(path)}")
  return path


def exists(path: str) -> bool:
  """Returns whether there is a checkpoint of this prefix, good or not."""
  # The older format is one file, without an ending; ours are not.
  return tf.io.gfile.exists(path + ".index") or (
      tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path)
      and not re.search(r"\.(index|meta|data-\d+-of-\d+)$", path))


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
  """Turns errors of reading a checkpoint into one that names the file.

  Errors with another cause, such as a closed session, pass as they are.

  Raises:
    ValueError: If what is run inside fails and the file cannot be read.
  """
  try:
    yield
  except READ_ERRORS as error:
    fault = _fault(path)
    if fault is None:
      raise
    raise ValueError(
        f"`checkpoint` must be whole: {path} cannot be read ({fault}). "
        f"{_advice(path)}") from error


def last_good(path: str) -> Optional[str]:
  """Returns the newest other checkpoint beside `path` that can be read.

  Reads each whole, until one is good.

  Args:
    path: A prefix, which need not exist.
  """
  pattern = os.path.join(os.path.dirname(path), "*.index")
  found = []
  # Deleted meanwhile, or a directory that does not exist.
  with contextlib.suppress(tf.errors.OpError):
    for index in tf.io.gfile.glob(pattern):
      found.append((tf.io.gfile.stat(index).mtime_nsec, index))
  for _, index in sorted(found, reverse=True):
    prefix = index[:-len(".index")]
    if not _same_file(prefix, path) and _fault(prefix) is None:
      return prefix
  return None


def _same_file(prefix: str, path: str) -> bool:
  return os.path.abspath(prefix) == os.path.abspath(path)


def _fault(path: str) -> Optional[str]:
  """Reads a whole checkpoint; returns what is wrong with it, in one line."""
  try:
    reader = tf.train.load_checkpoint(path)
    for key in reader.get_variable_to_shape_map():
      reader.get_tensor(key)
  except READ_ERRORS as error:
    text = getattr(error, "message", None) or str(error) or repr(error)
    return text.strip().splitlines()[0]
  return None


def _advice(path: str) -> str:
  good = last_good(path)
  if good is None:
    return "No checkpoint beside it can be read; give another `checkpoint`."
  return f"The last good one there is {good}; give that `checkpoint`."
