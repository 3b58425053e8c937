"""Random numbers of one device, held equal in the towers, for `verification`.

What a random op gives can be fed to a session like any other tensor. So the
model is run on one device, its random numbers are kept, and each tower is fed
those of its rows. Before that it is noted what the towers draw by themselves:
towers that draw the same for different rows, or different numbers where one
device draws one for all rows, are not what one device is, and feeding hides it.
"""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence
from typing import Set

import numpy as np
import tensorflow.compat.v1 as tf

from towers import verification_compare as compare
from towers import verification_runs as runs

_STATELESS = re.compile("Stateless(?:" + "|".join([
    "Random(?!Get)", "TruncatedNormal", "Multinomial", "Parameterized",
    "SampleDistorted", "Shuffle"]) + ")")
_STATEFUL = re.compile(
    "Stateful(StandardNormal|TruncatedNormal|Uniform|RandomBinomial)")
# They have a seed that they do not draw with: for a dropout that is off unless
# it is asked for, and because their kin have one.
_NOT_RANDOM = re.compile("Cudnn|ComputeAccidentalHits|.*Dataset|.*Iterator")
_SCOPE = re.compile(r"^tower_\d+/")

# Fewer equal numbers than these are no sign of a common seed; small integers
# may be equal by chance.
_FEWEST_FLOATS, _FEWEST_INTEGERS = 2, 16

SHUFFLE = frozenset(["RandomShuffle", "StatelessShuffle"])


class Draw(NamedTuple):
  """An output of a random op.

  Fields:
    name: Its name on one device.
    one: The tensor on one device.
    many: Its counterparts in the towers; one alone that all towers share.
  """
  name: str
  one: tf.Tensor
  many: Sequence[tf.Tensor]


class Held(NamedTuple):
  """Random numbers to feed, and what the towers drew without.

  Fields:
    one: Feeds for one device.
    many: Feeds for the towers.
    alike: Draws that are the same for different rows.
    apart: Draws that differ between towers, where one device draws once.
    shuffles: Draws that change the order of the rows of a tower; not held.
  """
  one: Dict[tf.Tensor, Any]
  many: Dict[tf.Tensor, Any]
  alike: List[Draw]
  apart: List[Draw]
  shuffles: List[Draw]


def is_random(op: Any) -> bool:
  """Says whether `op`, an operation or a node of a graph, draws numbers."""
  kind, attributes = (
      (op.type, op.node_def.attr) if isinstance(op, tf.Operation)
      else (op.op, op.attr))
  if _NOT_RANDOM.match(kind):
    return False
  return bool(_STATELESS.match(kind) or _STATEFUL.match(kind) or
              ("seed" in attributes and "seed2" in attributes))


def find(one: runs.Side, many: runs.Side) -> List[Draw]:
  """Returns what a step draws, on one device and in the towers.

  Raises:
    ValueError: If numbers are drawn where they cannot be held equal.
  """
  first = _drawn(one)
  rest = {x.name: x for x in _drawn(many)}
  draws, alone = [], []
  for x in first:
    others = runs.counterparts(x, one, many)
    name = one.towers[0].plain_name(x.name)
    if others is None:
      alone.append(x)
    else:
      draws.append(Draw(name, x, others))
      for other in others:
        rest.pop(other.name, None)
  # What the towers draw together: it stands in no tower.
  together = list(rest.values())
  if [x.op.type for x in alone] != [x.op.type for x in together]:
    odd = (alone or together)[0]
    raise ValueError(_refusal(
        odd, "which the towers and one device do not have in common"))
  draws += [Draw(one.towers[0].plain_name(x.name), x, [other])
            for x, other in zip(alone, together)]
  return draws


def _drawn(side: runs.Side) -> List[tf.Tensor]:
  random_functions = _functions_that_draw(side)
  found = []
  for op in side.needed():
    called = {
        function.name
        for value in op.node_def.attr.values()
        for function in [value.func, *value.list.func] if function.name
    }
    if called & random_functions:
      raise ValueError(_refusal(
          op.outputs[0] if op.outputs else op,
          "which draws in a function, a loop or a branch"))
    if is_random(op):
      for x in op.outputs:
        if not (side.may_fetch(op) and side.may_feed(x)):
          raise ValueError(_refusal(x, "which stands in a loop or a branch"))
        found.append(x)
  return found


def _refusal(what: Any, why: str) -> str:
  op = what.op if isinstance(what, tf.Tensor) else what
  name = _SCOPE.sub("", op.name)
  return ("`hold_random` must be False for this model: got the random numbers "
          f"of `{name}` ({op.type}), {why}, so that they cannot be held equal. "
          "Draw them outside, or switch them off for the check.")


def _functions_that_draw(side: runs.Side) -> Set[str]:
  definitions = {f.signature.name: f for f in side.function_definitions()}
  found: Set[str] = {
      name for name, definition in definitions.items()
      if any(map(is_random, definition.node_def))
  }
  while True:
    more = {
        name for name, definition in definitions.items() if name not in found
        and any(value.func.name in found
                for node in definition.node_def
                for value in node.attr.values())
    }
    if not more:
      return found
    found |= more


def hold(draws: Sequence[Draw], one: runs.Side, many: runs.Side, *,
         inputs: Any, rows: Optional[int]) -> Held:
  """Draws once on one device, and deals the numbers out to the towers.

  Args:
    draws: What to hold.
    one: The model on one device.
    many: The model in towers.
    inputs: The batch.
    rows: How many rows it has; None for a model without inputs.

  Raises:
    ValueError: If a draw has not the shape of the rows of a tower.
  """
  dealt = compare.shares(rows, len(many.towers))
  values = one.run([draw.one for draw in draws], inputs, {})
  drawn = many.run([list(draw.many) for draw in draws], inputs, {})
  held = Held({}, {}, [], [], [])
  for draw, value, own in zip(draws, values, drawn):
    parts = _parts(value, own, dealt)
    by_rows = parts is not None and len(own) > 1 and any(
        part.shape != value.shape for part, share in zip(parts, dealt)
        if share.own)
    if by_rows and draw.one.op.type in SHUFFLE:
      held.shuffles.append(draw)
      held.one[draw.one] = value
      continue
    if parts is None:
      raise ValueError(_refusal(
          draw.one, f"of shape {list(value.shape)} on one device and "
          f"{[list(v.shape) for v in own]} in the towers"))
    with_rows = [v for v, share in zip(own, dealt) if share.own]
    if len(own) > 1 and len(with_rows) > 1:
      if by_rows and _alike(with_rows):
        held.alike.append(draw)
      elif not by_rows and rows is not None and not all(
          np.array_equal(v, with_rows[0]) for v in with_rows[1:]):
        held.apart.append(draw)
    held.one[draw.one] = value
    held.many.update(zip(draw.many, parts))
  return held


def _parts(value: np.ndarray, own: Sequence[np.ndarray],
           dealt: Sequence[compare.Share]) -> Optional[List[np.ndarray]]:
  """Returns what each of `own` is to be instead; None if that is unknown."""
  if all(v.shape == value.shape for v in own):
    return [value] * len(own)
  where = None
  if len(own) == len(dealt):
    where = compare.layout(value.shape, [v.shape for v in own], dealt)
  if where is None:
    return None
  return compare.cut(value, where, dealt)


def _alike(values: Sequence[np.ndarray]) -> bool:
  """Says whether values of different rows begin with the same numbers."""
  for value in values[1:]:
    shape = tuple(map(min, value.shape, values[0].shape))
    corner = tuple(slice(size) for size in shape)
    first, other = values[0][corner], value[corner]
    fewest = (_FEWEST_FLOATS if np.issubdtype(first.dtype, np.floating) else
              _FEWEST_INTEGERS)
    if np.size(first) >= fewest and len(np.unique(first)) > 1 and (
        np.array_equal(first, other)):
      return True
  return False
