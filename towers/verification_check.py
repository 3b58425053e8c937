"""Compares one batch on one device and in towers, for `verification`."""

import re
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional
from typing import Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers import lockstep as lockstep_lib
from towers import verification_causes as causes
from towers import verification_compare as compare
from towers import verification_random as random_lib
from towers import verification_runs as runs

_FIXED_SIZE = re.compile(
    "reshape|shape|dimension|size", re.IGNORECASE)
_TOWERS_DIFFER = re.compile("in each tower|meet in|in tower", re.IGNORECASE)

# Where the errors of a session have their own text, after the lines of the code
# that made the operation; the first is of errors of several operations.
_ROOTS = (re.compile(r"\(0\) [A-Z_ ]+: +(.+)"),
          re.compile(r"^Node: .*\n(?!Node: |Detected at )(.+)", re.MULTILINE))

# Variables of these are compared, and what they were changed by.
_ASSIGNMENTS = re.compile("(Resource)?(Assign|Scatter)")


class Difference(NamedTuple):
  """Something that N towers have otherwise than one device.

  Fields:
    kind: "loss", "output", "gradient" or "update", for what differs in value;
      "random" for numbers that differ unless they are held equal; "variable"
      for one that is made on one side only; "error" if the towers cannot be
      built or run.
    name: What differs: an output, or a variable, by its name.
    rows: How many rows the batch had; None for a model without inputs.
    largest: The largest difference; NaN where there is no number for it.
    allowed: The difference that would have passed.
    index: Where it is largest; its first number is often the row.
    cause: The `Cause`: the layer in which towers first differ, and why.
    message: What is to be said in words, such as an error; or "".
  """
  kind: str
  name: str
  rows: Optional[int]
  largest: float
  allowed: float
  index: Tuple[int, ...]  # type: ignore[assignment]  # Hides `tuple.index`.
  cause: causes.Cause
  message: str = ""


class Results(NamedTuple):
  """What a side has computed.

  Fields:
    loss: The loss, or None.
    outputs: The outputs by name.
    gradients: The gradients that there are.
    losses: Each tower's own loss.
    parts: Each tower's own outputs by name.
    after: The variables after the update ops.
  """
  loss: Any
  outputs: Mapping[str, Any]
  gradients: Mapping[runs.Gradient, Any]
  losses: Sequence[Any]
  parts: Sequence[Mapping[str, Any]]
  after: Mapping[str, np.ndarray]


class Pair(NamedTuple):
  """The model on one device and in towers, and how to compare them.

  Fields:
    one: On one device.
    many: In towers.
    draws: The random numbers to hold equal.
    initial: Values of the variables.
    allowed: The tolerance of each type.
  """
  one: runs.Side
  many: runs.Side
  draws: Sequence[random_lib.Draw]
  initial: Mapping[str, np.ndarray]
  allowed: Mapping[Any, compare.Tolerance]

  def load(self) -> None:
    """Sets the variables of both sides."""
    self.one.load(self.initial)
    self.many.load(self.initial)


class OneDeviceError(Exception):
  """What the model raises on one device already."""


def check(pair: Pair, inputs: Any, rows: Optional[int]) -> List[Difference]:
  """Returns how the sides differ on a batch.

  Raises:
    OneDeviceError: If the model fails on one device.
    ValueError: If random numbers cannot be held equal.
  """
  held = random_lib.Held({}, {}, [], [], [])
  pair.load()
  try:
    expected = _results(pair.one, inputs, {}, pair)
  except tf.errors.OpError as error:
    raise OneDeviceError(message_of(error)) from error
  try:
    if pair.draws:
      pair.load()
      held = random_lib.hold(
          pair.draws, pair.one, pair.many, inputs=inputs, rows=rows)
      expected = _results(pair.one, inputs, held.one, pair)
    actual = _results(pair.many, inputs, held.many, pair)
  except tf.errors.OpError as error:
    return [_failed_run(pair, error, inputs, rows)]
  found = list(_compared(pair, expected, actual))
  comparison = _Comparison(pair, inputs, rows, held, expected, actual)
  result = list(_of_random(comparison))
  return result + (comparison.explained(found) if found else [])


def _results(side: runs.Side, inputs: Any, held: Mapping[tf.Tensor, Any],
             pair: Pair) -> Results:
  forward = {
      "loss": side.graph.loss if side.graph.loss is not None else [],
      "outputs": side.outputs,
  }
  fetches = {
      "gradients": {k: g for k, g in side.gradients.items() if g is not None},
      "losses": [t.loss for t in side.towers if t.loss is not None],
      "parts": [dict(runs.named(t.outputs)) if t.outputs is not None else {}
                for t in side.towers],
      **forward,
  }
  side.load(pair.initial)
  values = side.run(fetches, inputs, held)
  side.load(pair.initial)
  side.run([forward, list(side.graph.update_ops)], inputs, held)
  return Results(after=side.values(), **{
      **values, "loss": None if side.graph.loss is None else values["loss"]})


def message_of(error: Exception) -> str:
  """Returns what an error says, in a line, without where and how it came."""
  text = str(getattr(error, "message", None) or error).strip()
  found = _ROOTS[0].search(text) or _ROOTS[1].search(text)
  lines = (found.group(1) if found else text).splitlines()
  return lines[0].strip() if lines else type(error).__name__


def _failed_run(pair: Pair, error: tf.errors.OpError, inputs: Any,
                rows: Optional[int]) -> Difference:
  """Returns the difference that the towers fail and one device does not."""
  graph = pair.many.graph
  try:  # Without the gradients, to which it may have come first.
    pair.many.run([graph.loss if graph.loss is not None else [],
                   pair.many.outputs], inputs, {})
  except tf.errors.OpError as forward_error:
    error = forward_error
  op, rule = error.op, "fails_in_towers"
  name = kind = ""
  if op is not None:
    kind, name = op.type, op.name
    for tower in pair.many.towers:
      if name.startswith(tower.name_scope):
        name = name[len(tower.name_scope):]
  if _FIXED_SIZE.search(str(error.message)):
    rule = "batch_size_fixed"
  if "Gather" in kind or "ndices" in str(error.message):
    rule = "position_in_batch"
  return _of_error(causes.make(rule, name, kind), error, rows)


def failed_build(error: Exception, rows: Optional[int]) -> Difference:
  """Returns the difference that towers cannot be built, and one can."""
  message = str(error)
  rule = "towers_differ"
  if not _TOWERS_DIFFER.search(message) and _FIXED_SIZE.search(message):
    rule = "batch_size_fixed"
  return _of_error(causes.make(rule, ""), error, rows)


def _of_error(cause: causes.Cause, error: Exception,
              rows: Optional[int]) -> Difference:
  return Difference("error", "towers", rows, float("nan"), 0.0, (), cause,
                    message_of(error))


class _Found(NamedTuple):
  kind: str
  key: Any
  gap: compare.Gap
  message: str = ""


_MISSING = compare.Gap(float("nan"), 0.0, ())


def _compared(pair: Pair, expected: Results,
              actual: Results) -> Iterator[_Found]:
  """Yields what differs, in the order in which a model computes it."""
  pairs = [("output", name, value, actual.outputs.get(name))
           for name, value in expected.outputs.items()]
  if expected.loss is not None:
    pairs.append(("loss", "loss", expected.loss, actual.loss))
  for kind, key, value, other in pairs:
    if other is None:
      yield _Found(kind, key, _MISSING, "The towers do not return it.")
    else:
      gap = compare.gap(value, other, pair.allowed)
      if gap is not None:
        message = "" if np.shape(value) == np.shape(other) else (
            f"Its shape is {list(np.shape(other))}, on one device "
            f"{list(np.shape(value))}.")
        yield _Found(kind, key, gap, message)
  for by in {**pair.one.gradients, **pair.many.gradients}:  # Which gradient.
    value, other = expected.gradients.get(by), actual.gradients.get(by)
    if (value is None) != (other is None):
      side = "the towers" if value is None else "one device"
      yield _Found("gradient", by, _MISSING, f"Only {side} has a gradient.")
    elif value is not None:
      gap = compare.gap(value, other, pair.allowed)
      if gap is not None:
        yield _Found("gradient", by, gap)
  for name, value in expected.after.items():
    if name in actual.after:
      gap = compare.gap(value, actual.after[name], pair.allowed)
      if gap is not None:
        yield _Found("update", name, gap)


def _of_random(comparison: "_Comparison") -> Iterator[Difference]:
  order = comparison.forward().order if (
      comparison.held.alike or comparison.held.apart) else {}
  for rule, draws in (("same_random_numbers", comparison.held.alike),
                      ("random_numbers_for_whole_batch",
                       comparison.held.apart)):
    # An op may have several outputs.
    ops = {draw.name.partition(":")[0]: draw for draw in draws}
    for name, draw in ops.items():
      cause = causes.make(rule, name, draw.one.op.type, order[draw.one.op])
      yield Difference("random", name, comparison.rows, float("nan"), 0.0, (),
                       cause)


class _Comparison:
  """Finds the causes of what differs in one batch."""

  def __init__(self, pair: Pair, inputs: Any, rows: Optional[int],
               held: random_lib.Held, expected: Results, actual: Results):
    self.pair = pair
    self.inputs = inputs
    self.rows = rows
    self.held = held
    self.expected = expected
    self.actual = actual
    self.dealt = compare.shares(rows, len(pair.many.towers))
    self._needed = pair.one.needed()

  def forward(self) -> causes.Forward:
    """Returns the model, without what the towers have of it."""
    one = self.pair.one
    tower = one.towers[0]
    return causes.Forward(
        tower.name_scope, {op: k for k, op in enumerate(self._needed)}, {},
        {x.name for x in self.held.one}, {d.one.name for d in
                                          self.held.shuffles},
        {op for op in self._needed if random_lib.is_random(op)},
        self._has_weights())

  def _has_weights(self) -> bool:
    return any(
        not isinstance(tower.weight, float) or tower.weight != share.own
        for tower, share in zip(self.pair.many.towers, self.dealt))

  def explained(self, found: Sequence[_Found]) -> List[Difference]:
    """Returns the differences with their causes."""
    forward = self.forward()._replace(relations=self._relations())
    assigned = self._assigned()
    cause_of_loss: Dict[Any, causes.Cause] = {}
    result = []
    for item in found:
      name = item.key
      if item.kind in ("output", "loss"):
        cause = self._of_result(forward, item)
        cause_of_loss[None if item.kind == "loss" else item.key] = cause
      elif item.kind == "gradient":
        name = item.key.variable
        if item.key.loss is not None:
          name += f" by {item.key.loss}"
        cause = cause_of_loss.get(item.key.loss) or self._of_gradient(
            forward, item)
      else:
        cause = self._of_update(forward, item, assigned.get(item.key))
      result.append(Difference(item.kind, name, self.rows, *item.gap, cause,
                               item.message))
    return result

  def _relations(self) -> Dict[str, compare.Relation]:
    """Runs both sides; returns what the towers' tensors are to the model's."""
    one, many = self.pair.one, self.pair.many
    tensors, others = [], []
    for op in self._needed:
      if one.may_fetch(op) and op.type != "Placeholder":
        for x in op.outputs:
          x_others = runs.counterparts(x, one, many) if (
              x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool or
              x.dtype.is_complex) else None
          if x_others is not None:
            tensors.append(x)
            others.append(x_others)
    self.pair.load()
    values = one.run(tensors, self.inputs, self.held.one)
    parts = many.run(others, self.inputs, self.held.many)
    return {
        x.name: compare.relation(value, own, self.dealt, self.pair.allowed)
        for x, value, own in zip(tensors, values, parts)
    }

  def _result_tensor(self, name: Optional[str]) -> tf.Tensor:
    one = self.pair.one
    return one.graph.loss if name is None else one.outputs[name]

  def _of_result(self, forward: causes.Forward, item: _Found) -> causes.Cause:
    if item.kind == "loss":
      name, whole, parts = None, self.expected.loss, self.actual.losses
    else:
      name, whole = item.key, self.expected.outputs[item.key]
      parts = [own.get(name) for own in self.actual.parts]
    relation = None
    if all(part is not None for part in parts):
      relation = compare.relation(whole, parts, self.dealt, self.pair.allowed)
    return causes.locate(forward, self._result_tensor(name),
                         root_relation=relation)

  def _of_gradient(self, forward: causes.Forward,
                   item: _Found) -> causes.Cause:
    cause = None
    root = self._result_tensor(item.key.loss)
    if root is not None:
      cause = causes.locate_behind(forward, root)
    if cause is not None:
      return cause
    value = self.expected.gradients.get(item.key)
    other = self.actual.gradients.get(item.key)
    rule = "gradient_function"
    if value is not None and other is not None:
      count = sum(share.own > 0 for share in self.dealt)
      if count > 1 and any(
          compare.gap((value * factor).astype(value.dtype), other,
                      self.pair.allowed) is None
          for factor in (count, 1.0 / count)):
        rule = "gradient_counted_again"
    return causes.make(rule, item.key.variable)

  def _assigned(self) -> Dict[str, tf.Operation]:
    """Returns by variable the op that changes it on one device."""
    found = {}
    for op in self._needed:
      if _ASSIGNMENTS.match(op.type) and op.inputs:
        found[lockstep_lib.variable_op(op.inputs[0]).name] = op
    return found

  def _of_update(self, forward: causes.Forward, item: _Found,
                 op: Optional[tf.Operation]) -> causes.Cause:
    before = self.pair.initial.get(item.key)
    value, other = (side.after[item.key] for side in (self.expected,
                                                      self.actual))
    if before is not None and before.dtype.kind in "iuf":
      change = (value - before).astype(np.float64)
      many = (other - before).astype(np.float64)
      count = len(self.dealt)
      if np.any(change) and compare.gap(
          change * count, many, {tf.float64: compare.Tolerance(
              1e-4, 1e-9)}) is None:
        return causes.make("update_in_each_tower", item.key)
    if op is None:
      return causes.make("update_is_another", item.key)
    cause = None
    for root in list(op.inputs)[1:]:
      kind = forward.kind(root)
      cause = causes.locate_behind(forward, root)
      if cause is None and kind not in (compare.EQUAL, compare.ROWS, None):
        cause = causes.locate(forward, root)
        if cause.rule != "batch_norm_of_own_rows":
          cause = causes.make("update_of_first_tower", item.key)
      if cause is not None:
        return cause
    return causes.make("update_is_another", item.key)
