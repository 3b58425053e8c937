"""Finds random ops that draw the same numbers in every tower.

An op with a seed of its own starts from that seed wherever it stands. So a
dropout with `seed=1` drops the same units in each tower, which is not what one
device does with the rows of a batch.
"""

import warnings
from typing import Dict, List, Sequence, Set

import tensorflow.compat.v1 as tf

from towers import lockstep as lockstep_lib
from towers import tower as tower_lib
from towers import updates

# Their inputs, and not their attributes, say what they draw.
_STATELESS = "Stateless"
_NAMES_SHOWN = 10


def warn_of_shared(towers: Sequence[tower_lib.Tower],
                   made: Sequence[tf.Operation]) -> None:
  """Warns, once, of random ops that draw the same in tower 0 and another.

  Args:
    towers: The towers.
    made: The ops that the towers added to the graph, in order.
  """
  random = [op for op in made if _is_random(op)]
  first: Dict[str, tf.Operation] = {}
  for op in random:
    if op.name.startswith(towers[0].name_scope):
      first[op.name[len(towers[0].name_scope):]] = op
  shared = []
  for tower in towers[1:2]:  # The others are as this one.
    for op in random:
      if op.name.startswith(tower.name_scope):
        counterpart = first.get(op.name[len(tower.name_scope):])
        if counterpart is not None and _draw_the_same(counterpart, op):
          shared.append(op)
  if shared:
    used = _needed_by(towers[1])
    shared = [op for op in shared if op in used]
  if shared:
    names = [f"`{towers[1].plain_name(op.name)}`{_seed(op)}" for op in shared]
    more = len(names) - _NAMES_SHOWN
    listed = ", ".join(names[:_NAMES_SHOWN]) + (
        f" and {more} more" if more > 0 else "")
    warnings.warn(
        f"Random ops draw the same numbers in every tower: {listed}. Leave out "
        "their `seed` and call `tf.set_random_seed`, or add "
        "`towers.current_tower().index` to the seed.", stacklevel=3)


def _is_random(op: tf.Operation) -> bool:
  if op.type.startswith(_STATELESS):
    # Not what makes their keys out of a seed.
    return not op.type.startswith(_STATELESS + "RandomGet")
  return "seed2" in op.node_def.attr and "seed" in op.node_def.attr


def _draw_the_same(one: tf.Operation, other: tf.Operation) -> bool:
  if one.type != other.type:
    return False
  if not one.type.startswith(_STATELESS):
    seeds = _seeds(one)
    return any(seeds) and seeds == _seeds(other)
  return len(one.inputs) == len(other.inputs) and all(
      lockstep_lib.same_value(a, b, reads=True)
      for a, b in list(zip(one.inputs, other.inputs))[1:])


def _seeds(op: tf.Operation) -> List[int]:
  return [op.get_attr("seed"), op.get_attr("seed2")]


def _seed(op: tf.Operation) -> str:
  return "" if op.type.startswith(_STATELESS) else f" (seed {_seeds(op)[1]})"


def _needed_by(tower: tower_lib.Tower) -> Set[tf.Operation]:
  """Returns the ops of `tower` that it needs for what it returned.

  The initial values of variables, for one, are needed in tower 0 only.
  """
  returned = [
      x.op if isinstance(x, tf.Tensor) else x
      for x in [tower.loss, *tf.nest.flatten(tower.outputs), *tower.update_ops]
      if isinstance(x, (tf.Tensor, tf.Operation))
  ]
  return updates.ancestors(returned)
