"""Towers built side by side, one at a time, that can meet in between.

Each tower's model function runs in a thread of its own, so that it can stop in
the middle. Only one thread ever runs. It runs until its tower asks to meet the
others (`Lockstep.merge`) or ends; then comes the next tower's turn, from tower
0 up. When all towers wait at the same meeting, the builder's thread computes
its result once, and the towers go on from there in turn. So tower 0 has always
done whatever another tower comes to do.

Between turns, the parts of the graph's state that TensorFlow keeps neither by
thread nor by tower are exchanged (`_tensorflow.SwitchedState`).
"""

import contextvars
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence
from typing import Set

import tensorflow.compat.v1 as tf

from towers import _keras
from towers import _tensorflow
from towers import context
from towers import tower as tower_lib


class _Abandoned(BaseException):
  """Ends the thread of a tower whose build failed elsewhere.

  No `Exception`, so that a model's own `except Exception` lets it pass.
  """


class Meeting(NamedTuple):
  """What a tower asks of the others when it stops.

  Fields:
    kind: What the model called, such as "towers.batch_norm".
    name: Name of the layer or scope, the same in each tower.
    function: Takes the list of all towers' values, returns the result.
    value: The tower's own value, anything.
    identity: Must be equal in all towers; the name, or most of it.
    signature: Must be equal in all towers; says what `value` looks like.
    branches: The v1 conditionals that the tower stands in, outside first.
  """
  kind: str
  name: str
  function: Callable[[List[Any]], Any]
  value: Any
  identity: str
  signature: Any
  branches: Sequence[_tensorflow.Branch]

  def __str__(self) -> str:
    return f"{self.kind} `{self.name}`" if self.name else self.kind


class _Seat:
  """One tower's thread, and what it waits for."""

  def __init__(self, state: _tensorflow.SwitchedState):
    self.state = state
    self.go_on = threading.Semaphore(0)
    self.stopped = threading.Semaphore(0)
    self.thread: Any = None  # Until the build begins.
    self.meeting: Any = None  # A `Meeting` while the tower waits in it.
    self.outcome: Any = None
    self.failure: Optional[BaseException] = None
    self.result: Any = None
    self.ended = False
    self.shared_so_far = 0


class Lockstep:
  """The turns of the towers of one build.

  Attributes:
    graph: The graph that the towers are built in.
    towers: The towers.
    rows: How many rows of the batch each tower has, as numbers or scalar
      float32 tensors; 0 for a tower that borrowed a row.
    inputs: The ops that hold the rows of each tower.
    name_scope: The scope of the ops that meetings add, with a trailing slash.
    device: The device of these ops.
    home_device: Where variables live that meetings make.
  """

  def __init__(self, graph: tf.Graph, towers: Sequence[tower_lib.Tower], *,
               rows: Sequence[Any], inputs: Sequence[Set[tf.Operation]],
               name_scope: str, device: str,
               home_device: Optional[str] = None):
    self.graph = graph
    self.towers = towers
    self.rows = rows
    self.inputs = inputs
    self.name_scope = name_scope
    self.device = device
    self.home_device = home_device or device
    self._seats = [
        _Seat(_tensorflow.fork_state(graph, tower.index)) for tower in towers
    ]
    self._abandoned = False
    self._shared: List[Any] = []
    self._made_by_meetings: Dict[str, Any] = {}

  # --- For the builder's thread ---

  def run(self, build_tower: Callable[[tower_lib.Tower], Any]) -> List[Any]:
    """Calls `build_tower` for each tower; returns what each call returned.

    Raises:
      ValueError: If the towers do not come to the same meetings.
      BaseException: What the first tower to fail raised, as it was raised.
    """
    for tower, seat in zip(self.towers, self._seats):
      seat.thread = threading.Thread(
          target=contextvars.copy_context().run,
          args=(self._body, seat, tower, build_tower),
          name=tower.name_scope.rstrip("/"),
          daemon=True)
      seat.thread.start()
    try:
      while True:
        for seat in self._seats:
          self._turn(seat)
          if seat.failure is not None:
            raise seat.failure
        if all(seat.ended for seat in self._seats):
          return [seat.result for seat in self._seats]
        self._meet()
    finally:
      self._end_threads()

  def share_with_all(self, key: Any, item: Any) -> None:
    """Adds `item`, which tower 0 has in collection `key`, for the others."""
    for seat in self._seats[1:]:
      seat.state.collections.setdefault(key, []).append(item)

  def once_a_build(self, key: str, make: Callable[[], Any]) -> Any:
    """Returns what `make()` gave the first meeting that asked for `key`."""
    if key not in self._made_by_meetings:
      # Later meetings use it, whatever conditionals this one stands in.
      with tf.control_dependencies(None):
        self._made_by_meetings[key] = make()
    return self._made_by_meetings[key]

  def collections_of(self, tower: tower_lib.Tower) -> Any:
    """Returns the collections as they look to `tower`, after its turn."""
    return self._seats[tower.index].state.collections

  def _turn(self, seat: _Seat) -> None:
    """Lets one tower run until it stops."""
    builder_state = _tensorflow.exchange_state(self.graph, seat.state)
    try:
      seat.go_on.release()
      seat.stopped.acquire()
    except BaseException:
      # Interrupted. The tower must end before the graph is taken from it.
      self._abandoned = True
      seat.go_on.release()
      seat.thread.join()
      raise
    finally:
      seat.state = _tensorflow.exchange_state(self.graph, builder_state)
    if seat is self._seats[0]:
      # Seeds that a meeting draws come next in the sequence of one device.
      _tensorflow.set_seeds_drawn(self.graph, seat.state.seeds_drawn)
      _keras.set_counts_by_graph(self.graph, seat.state.layer_counts)

  def _meet(self) -> None:
    """Computes the result of the meeting that all towers wait for."""
    self._check_meeting()
    meeting = self._seats[0].meeting
    try:
      with tf.device(self.device), tf.name_scope(self.name_scope):
        with tf.name_scope(meeting.name or "merge"), context.meeting_of(self):
          outcome = meeting.function([s.meeting.value for s in self._seats])
    except Exception as error:  # pylint: disable=broad-except
      # Raised in the tower, so that the traceback shows the model's line.
      outcome = error
    for seat in self._seats:
      seat.meeting, seat.outcome = None, outcome
    first = self._seats[0]
    first.state = first.state._replace(
        seeds_drawn=_tensorflow.seeds_drawn(self.graph))

  def _check_meeting(self) -> None:
    first = self._seats[0]
    for tower, seat in zip(self.towers[1:], self._seats[1:]):
      if first.ended != seat.ended:
        waiting = (0, first) if seat.ended else (tower.index, seat)
        ended = tower.index if seat.ended else 0
        raise ValueError(
            f"`model_fn` must meet in the same layers in each tower: tower "
            f"{ended} has ended, while tower {waiting[0]} waits in "
            f"{waiting[1].meeting}. Make the model take the same path in each "
            "tower.")
      one, other = first.meeting, seat.meeting
      if (one.kind, one.identity) != (other.kind, other.identity):
        raise ValueError(
            f"`model_fn` must meet in the same layers in each tower: tower 0 "
            f"waits in {one}, tower {tower.index} in {other}. Make the model "
            "take the same path in each tower.")
      if one.signature != other.signature:
        raise ValueError(
            f"{one} must meet with values alike in each tower: expected "
            f"{one.signature} as in tower 0, got {other.signature} in tower "
            f"{tower.index}.")
      if not _same_branches(one.branches, other.branches):
        raise ValueError(
            f"{one} must stand in the same branch of the same `tf.cond` in "
            f"each tower: expected {_describe(one.branches)} as in tower 0, "
            f"got {_describe(other.branches)} in tower {tower.index}. Compute "
            "the predicate outside `model_fn`, so that all towers share it.")

  def _end_threads(self) -> None:
    """Ends all threads, whatever they wait for."""
    self._abandoned = True
    for seat in self._seats:
      if not seat.ended:
        self._turn(seat)
    for seat in self._seats:
      seat.thread.join()

  # --- For the towers' threads ---

  def _body(self, seat: _Seat, tower: tower_lib.Tower,
            build_tower: Callable[[tower_lib.Tower], Any]) -> None:
    seat.go_on.acquire()
    try:
      if not self._abandoned:
        seat.result = build_tower(tower)
    except _Abandoned:
      pass
    except BaseException as error:  # pylint: disable=broad-except
      seat.failure = error
    finally:
      seat.ended = True
      seat.stopped.release()

  def merge(self, kind: str, name: str, function: Callable[[List[Any]], Any],
            value: Any, signature: Any, exact_name: bool = True) -> Any:
    """Meets the other towers; returns `function` of the list of all values.

    Args:
      kind: What the model called, for errors.
      name: Name of the layer, the same in each tower.
      function: Called once, in the builder's thread.
      value: This tower's value.
      signature: What must be equal in all towers.
      exact_name: Whether `name` must be the same to the last number. The scopes
        that libraries open need not be.

    Raises:
      ValueError: If the tower stands in a loop or a function body, where towers
        cannot meet; or what `function` raised.
    """
    tower = context.current_tower()
    seat = self._seats[tower.index]
    branches = self._check_place(f"{kind} `{name}`" if name else kind, tower)
    if self._abandoned:
      raise _Abandoned()
    identity = name if exact_name else tower_lib.without_numbers(name)
    seat.meeting = Meeting(kind, name, function, value, identity, signature,
                           branches)
    seat.stopped.release()
    seat.go_on.acquire()
    if self._abandoned:
      raise _Abandoned()
    outcome, seat.outcome = seat.outcome, None
    if isinstance(outcome, Exception):
      raise outcome
    return outcome

  def once(self, function: Callable[[], Any]) -> Any:
    """Returns `function()` as tower 0 computed it, without stopping.

    The k-th call in each tower gets the result of tower 0's k-th call.
    """
    seat = self._seats[context.current_tower().index]
    position = seat.shared_so_far
    seat.shared_so_far += 1
    if seat is self._seats[0]:
      self._shared.append(function())
    return self._shared[position]

  def _check_place(self, what: str,
                   tower: tower_lib.Tower) -> Sequence[_tensorflow.Branch]:
    """Returns the conditionals around; refuses where towers cannot meet."""
    if tf.get_default_graph() is not self.graph:
      raise ValueError(
          f"{what} (tower {tower.index}) must not stand inside a function or a "
          "branch of v2 control flow, where towers cannot meet. Call "
          "`tf.disable_control_flow_v2()` before the model is built, or move "
          "the layer out.")
    branches, loops = _tensorflow.enclosing_control_flow(self.graph)
    if loops:
      raise ValueError(
          f"{what} (tower {tower.index}) must not stand inside a while loop, "
          f"got `{loops[0]}`: towers go through their loops each on its own "
          "and cannot meet there. Move the layer out of the loop.")
    return branches


def _describe(branches: Sequence[_tensorflow.Branch]) -> str:
  if not branches:
    return "no `tf.cond`"
  return " in ".join(
      f"the {bool(branch.taken_when)} branch of "
      f"`{_named(branch.predicate).name}`"
      for branch in reversed(branches))


def _named(predicate: tf.Tensor) -> tf.Tensor:
  """Returns the tensor that the model gave to `tf.cond`."""
  while predicate.op.type == "Identity":
    predicate = predicate.op.inputs[0]
  return predicate


def _same_branches(one: Sequence[_tensorflow.Branch],
                   other: Sequence[_tensorflow.Branch]) -> bool:
  return len(one) == len(other) and all(
      a.taken_when == b.taken_when and same_value(a.predicate, b.predicate)
      for a, b in zip(one, other))


def same_value(one: tf.Tensor, other: tf.Tensor, reads: bool = False,
               common: Optional[List[tf.Tensor]] = None) -> bool:
  """Says whether two tensors are computed alike, from the same tensors.

  Then they are equal in every run, although each tower has its own ops for it.
  Ops with a state (random numbers, reads of variables) are taken to differ.

  Args:
    one: A tensor.
    other: Another.
    reads: Whether reads of the same variable are taken to be equal, as they are
      for variables that change between steps only.
    common: List to which tensors are added that both are computed from.
  """
  pending, seen = [(one, other)], set()
  while pending:
    one, other = pending.pop()
    a, b = one.op, other.op
    pair = (a, one.value_index, b, other.value_index)
    if pair in seen:
      continue
    seen.add(pair)
    if one is other:
      if common is not None:
        common.append(one)
    elif reads and a.type == b.type == "ReadVariableOp":
      if variable_op(a.inputs[0]) is not variable_op(b.inputs[0]):
        return False
    elif one.value_index != other.value_index or not _alike(a, b):
      return False
    else:
      pending.extend(zip(a.inputs, b.inputs))
  return True


def _alike(a: tf.Operation, b: tf.Operation) -> bool:
  """Says whether two ops give the same, from the same inputs."""
  return (a.type == b.type and not a.op_def.is_stateful and
          # Each of them may be fed.
          a.type not in ("Placeholder", "PlaceholderWithDefault") and
          len(a.inputs) == len(b.inputs) and
          (bool(a.inputs) or a.type == "Const") and
          _attributes(a) == _attributes(b))


def variable_op(handle: tf.Tensor) -> tf.Operation:
  """Returns the variable's op, whatever view or branch it is read through."""
  op = handle.op
  while op.type in ("Identity", "Switch", "Enter"):
    op = op.inputs[0].op
  return op


def _attributes(op: tf.Operation) -> Dict[str, bytes]:
  return {
      name: value.SerializeToString()
      for name, value in op.node_def.attr.items()
      if not name.startswith("_")
  }
