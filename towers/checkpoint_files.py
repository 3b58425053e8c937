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
from typing import Dict, Iterator, List, NamedTuple, Optional, cast

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
    last = _listed(path)
    if last is None:
      raise ValueError(
          "`checkpoint` must be a checkpoint or a directory that lists one: "
          f"got {path}, whose file `checkpoint` is missing or damaged, or "
          f"names files that are not there. {_advice(os.path.join(path, ''))}")
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


def latest_good(directory: str) -> Optional[str]:
  """Returns the prefix of the latest checkpoint in `directory` that is whole.

  That is the last one by TensorFlow's own list, the file `checkpoint`, if all
  of it can be read, as nearly always; else the newest of the others. Each is
  read to its end, so that its checksums are checked.

  Args:
    directory: A directory, which need not exist.

  Returns:
    The prefix, for `tf.train.Saver.restore`; None if there is none.
  """
  directory = os.fspath(directory)
  last = _listed(directory)
  if last is not None and _fault(last) is None:
    return last
  return last_good(last or os.path.join(directory, ""))


@contextlib.contextmanager
def replacing(path: str, latest_filename: Optional[str] = None
             ) -> Iterator[None]:
  """A context for writing a checkpoint where there may be one already.

  A checkpoint has two files, which cannot take the place of two others at once;
  who is killed in between leaves the one of the new with the other of the old.
  So where the last checkpoint is to be replaced, a copy of it is the last one
  meanwhile.

  Args:
    path: The prefix. What is run inside writes it, and makes it the last one.
    latest_filename: The directory's list, if it is not `checkpoint`.
  """
  folder, name = os.path.split(path)
  folder = folder or "."
  match = cast(re.Match, re.fullmatch(r"(.*?)(-\d+)?", name, re.DOTALL))
  stem, step = match.groups()
  spare = os.path.join(folder, f"{stem}.spare{step or ''}")
  last = _listed(folder, latest_filename)
  if last is not None and _same_file(last, path):
    for file in sorted(tf.io.gfile.listdir(folder)):
      # Both files before the list. The `.meta` holds no values.
      if re.fullmatch(re.escape(name) + r"\.(index|data-\d+-of-\d+)", file):
        tf.io.gfile.copy(os.path.join(folder, file),
                         spare + file[len(name):], overwrite=True)
    _list_as_last(spare, folder, latest_filename)
  yield
  last = _listed(folder, latest_filename)
  if last is not None and _same_file(last, spare):  # No list was written.
    _list_as_last(path, folder, latest_filename)
  if exists(spare):
    tf.train.remove_checkpoint(spare)


def _list_as_last(path: str, directory: str,
                  latest_filename: Optional[str]) -> None:
  """Makes `path` the last in a directory's list, which lists others."""
  state = tf.train.get_checkpoint_state(directory, latest_filename)
  tf.train.update_checkpoint_state(
      directory, path, list(state.all_model_checkpoint_paths),
      latest_filename=latest_filename)


def _listed(directory: str,
            latest_filename: Optional[str] = None) -> Optional[str]:
  """Returns what the list of a directory names as the last, if it is there."""
  try:
    return tf.train.latest_checkpoint(directory, latest_filename)
  except ValueError:  # That file is empty, or no text.
    return None


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
