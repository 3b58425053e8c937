"""Finds a tower's operations and tensors by the names of the plain model.

Model code for one device has names such as `conv1/Relu`, which books, scripts
and summaries know. In a tower the op is `tower_1/conv1/Relu`, or, of a second
build, `towers_2/tower_1/conv1/Relu`; a variable stands outside of all towers.
The names that are looked up here are those of the plain model.
"""

import difflib
import re
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import tensorflow.compat.v1 as tf

# Where a build puts what it adds to a tower; no op of the model stands there.
VIEWS = "towers_view/"
_OURS = re.compile("towers_[a-z]+/")

_REF_VARIABLES = frozenset(["VariableV2", "Variable"])
_SUGGESTIONS = 3


class TowerNames(NamedTuple):
  """The names of one tower.

  Fields:
    graph: The graph.
    where: What errors call the tower, such as "tower 1".
    scope: The tower's name scope with a trailing slash, or "".
    enclosing: The name scope of the caller of the build, likewise.
    replaced: For names of the tower's tensors, the tensor that the model was
      given instead.
  """
  graph: tf.Graph
  where: str
  scope: str
  enclosing: str
  replaced: Dict[str, tf.Tensor]

  def operation(self, name: str) -> tf.Operation:
    """Returns the operation of that name; see `Tower.operation`."""
    _check_text(name)
    if ":" in name:
      raise ValueError(
          f"`name` of an operation must not have an output: got {name!r} "
          f"({self.where}). Ask for the tensor, or leave out what follows the "
          "colon.")
    return self._found(name)

  def tensor(self, name: str) -> tf.Tensor:
    """Returns the tensor of that name; see `Tower.tensor`."""
    _check_text(name)
    op_name, colon, port = name.partition(":")
    if colon and not port.isdecimal():
      raise ValueError(
          "`name` of a tensor must end in the number of an output after its "
          f"colon: got {name!r} ({self.where}).")
    op = self._found(op_name)
    if op.type == "VarHandleOp":
      # What `session.run(variable)` fetches.
      op = self._op(f"{op.name}/Read/ReadVariableOp") or op
    if int(port or 0) >= len(op.outputs):
      way_out = " They count from 0." if op.outputs else (
          " Ask for the operation.")
      raise ValueError(
          f"`name` must be that of a tensor: got {name!r}, while `{op.name}` "
          f"has {len(op.outputs)} outputs ({self.where}).{way_out}")
    tensor = op.outputs[int(port or 0)]
    return self.replaced.get(tensor.name, tensor)

  def to_feed(self, name: str) -> tf.Tensor:
    """Returns the tensor of that name, if a session may be fed a value for it.

    Raises:
      ValueError: If it may not, or there is none.
    """
    tensor = self.tensor(name)
    if is_value_of_variable(tensor):
      raise ValueError(
          f"`name` of what is fed must not be a variable: got {name!r} "
          f"({self.where}), which the model reads by other tensors. Assign the "
          "value to the variable.")
    if not self.graph.is_feedable(tensor):
      raise ValueError(
          "`name` of what is fed must be a tensor that can be fed: got "
          f"{name!r}, which is `{tensor.name}` ({self.where}).")
    return tensor

  def _found(self, name: str) -> tf.Operation:
    for candidate in self._candidates(name):
      op = self._op(candidate)
      if op is not None:
        return self._own(op)
    # Of a variable that is no resource, the value has a name of its own.
    stem, slash, last = name.rpartition("/")
    if slash and last == "read":
      for candidate in self._candidates(stem):
        op = self._op(candidate)
        if op is not None and op.type == "VarHandleOp":
          read = self._op(f"{self._own(op).name}/Read/ReadVariableOp")
          if read is not None:
            return read
    raise ValueError(self._not_found(name))

  def _candidates(self, name: str) -> Iterator[str]:
    """Yields what an op of that plain name may be called, the likely first."""
    yield self.scope + name
    if self.enclosing and name.startswith(self.enclosing):
      yield self.scope + name[len(self.enclosing):]
    # What stands outside the towers: variables, and what all towers share.
    for outside in (self.enclosing + name, name):
      if self._tower_of(outside) is None or outside.startswith(self.scope):
        yield outside

  def _op(self, name: str) -> Optional[tf.Operation]:
    try:
      return self.graph.get_operation_by_name(name)
    except (KeyError, ValueError):  # The latter: no name that an op can have.
      return None

  def _own(self, op: tf.Operation) -> tf.Operation:
    """Returns the tower's copy of a variable, if it has one; else `op`."""
    if op.type == "VarHandleOp" and self.scope:
      view = self._op(f"{self.scope}{VIEWS}{op.name}")
      if view is not None and view.inputs[0].op.type == "VarHandleOp":
        return view.inputs[0].op
    return op

  def _tower_of(self, name: str) -> Optional[str]:
    """Returns the scope of the tower of this build that `name` stands in."""
    if not self.scope:
      return None
    found = re.match(rf"{re.escape(self._prefix())}_\d+/", name)
    return found and found.group()

  def _prefix(self) -> str:
    """Returns what the scopes of all towers begin with."""
    return self.scope.rstrip("/").rpartition("_")[0]

  def _not_found(self, name: str) -> str:
    other = self._tower_of(name)
    if other is not None and other != self.scope and self._op(name) is not None:
      return (f"`name` must be that of an operation of {self.where}: got "
              f"{name!r}, which stands in `{other}`. Leave the scope of the "
              f"tower out: {name[len(other):]!r}.")
    first = f"{self._prefix()}_0/"
    if self.scope != first and self._op(first + name) is not None:
      return (f"`name` must be that of an operation of {self.where}: found "
              f"none for {name!r}. Tower 0 has it alone, as it has what runs "
              "once for all towers.")
    known = self._known()
    close = [other for other in known if other.endswith(f"/{name}")]
    close += difflib.get_close_matches(name, known, n=_SUGGESTIONS)
    close = list(dict.fromkeys(close))[:_SUGGESTIONS]
    hint = " Names like it: " + ", ".join(map(repr, close)) if close else (
        " Names are those of the model on one device, such as "
        f"{known[0]!r}" if known else " It has no operations")
    return (f"`name` must be that of an operation of {self.where}: found none "
            f"for {name!r}.{hint}.")

  def _known(self) -> List[str]:
    """Returns the plain names of the tower's ops and of variables."""
    names: Dict[str, None] = {}
    for op in self.graph.get_operations():
      name = op.name
      if self.scope and name.startswith(self.scope):
        name = name[len(self.scope):]
        if not _OURS.match(name):
          names[name] = None
      elif not self.scope or (self._tower_of(name) is None and (
          op.type == "VarHandleOp" or op.type in _REF_VARIABLES or
          op.type.startswith("Placeholder"))):
        names[name] = None
    return list(names)


def is_value_of_variable(tensor: tf.Tensor) -> bool:
  """Says whether `tensor` is what `session.run(variable)` fetches."""
  op = tensor.op
  if op.type in _REF_VARIABLES:
    return True
  return op.type == "ReadVariableOp" and op.inputs[0].op.name == (
      op.name.rpartition("/Read/ReadVariableOp")[0])


def _check_text(name: Any) -> None:
  if not isinstance(name, str):
    raise TypeError(
        "`name` must be text, the name of an operation or tensor of the model "
        f"on one device: got {name!r}.")
