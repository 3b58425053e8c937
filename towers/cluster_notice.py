"""What the chief tells the other tasks, and they it: facts, and the end.

Each task but a lone chief has texts on its own device: the chief's notice,
whether the task serves and, on parameter servers, who has ended. They are
variables of TensorFlow's, in graphs of their own: no checkpoint holds them, and
no other way between the tasks is needed.
"""

import json
from typing import Dict, List, NamedTuple, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import cluster_spec

TRAINING, DONE, SERVES = "training", "done", "serves"

# A board that does not answer within this time belongs to a task that is gone.
_TIMEOUT = tf.RunOptions(timeout_in_ms=10000)


class Notice(NamedTuple):
  """What the chief says.

  Fields:
    state: `TRAINING` or `DONE`.
    facts: What must be the same in all tasks.
  """
  state: str
  facts: Dict[str, str]


class Board:
  """The texts on the device of one task, as any task reads and writes them."""

  def __init__(self, task: cluster_spec.Task, target: str,
               writers: Sequence[cluster_spec.Task] = ()):
    """Opens a session with that task alone.

    Args:
      task: Whose board it is.
      target: The server of this process.
      writers: The tasks that tell their end here.
    """
    graph = tf.Graph()
    with graph.as_default(), tf.device(task.device()):
      self._notice = _Text("towers_notice")
      self._serves = _Text("towers_serves")
      self._ended = {
          writer: _Text(f"towers_ended/{writer.job}_{writer.index}")
          for writer in writers
      }
    config = tf.ConfigProto(
        device_filters=[f"/job:{task.job}/task:{task.index}"])
    self._session = tf.Session(target, graph=graph, config=config)

  def close(self) -> None:
    self._session.close()

  def write(self, notice: Notice) -> None:
    """Puts the chief's notice up."""
    self._notice.write(self._session, json.dumps(notice._asdict()))

  def read(self) -> Optional[Notice]:
    """Returns the chief's notice; None before there is one."""
    text = self._notice.read(self._session)
    return None if text is None else Notice(**json.loads(text))

  def write_serves(self) -> None:
    """Notes that the task has all that it serves with."""
    self._serves.write(self._session, SERVES)

  def serves(self) -> bool:
    """Returns whether it has."""
    return self._serves.read(self._session) == SERVES

  def write_end(self, writer: cluster_spec.Task, ended: bool) -> None:
    """Notes whether a worker has ended as it should."""
    self._ended[writer].write(self._session, DONE if ended else TRAINING)

  def not_ended(self) -> List[cluster_spec.Task]:
    """Returns the workers that have begun and not ended."""
    return [writer for writer, text in self._ended.items()
            if text.read(self._session) == TRAINING]


class _Text:
  """A text in a variable that is none until somebody writes it."""

  def __init__(self, name: str):
    variable = tf.Variable("", name=name, use_resource=True, collections=[],
                           trainable=False)
    self._there = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
    self._value = variable.value()
    self._new = tf.placeholder(tf.string, [])
    self._assign = variable.assign(self._new, read_value=False)

  def read(self, session: tf.Session) -> Optional[str]:
    if not session.run(self._there, options=_TIMEOUT):
      return None
    return session.run(self._value, options=_TIMEOUT).decode()

  def write(self, session: tf.Session, text: str) -> None:
    session.run(self._assign, {self._new: text}, options=_TIMEOUT)
