"""Many small tensors that go from one device to another in few messages.

What a message costs beside its bytes is the same for a vector of ten numbers as
for a large one. Where that shows (between machines), the small tensors of one
type that one device sends to another are laid end to end there, and taken apart
where they arrive.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers import placement


def checked_bytes(pack_bytes: Any) -> int:
  """Returns `pack_bytes` if it is a number of bytes.

  Raises:
    ValueError: If it is not.
  """
  if (isinstance(pack_bytes, bool) or
      not isinstance(pack_bytes, (int, np.integer)) or pack_bytes < 0):
    raise ValueError(
        "`pack_bytes` must be up to how many bytes travel in one message: "
        f"expected 0 (one message each) or a positive number, got "
        f"{pack_bytes!r}.")
  return int(pack_bytes)


def sent_together(shares_of: Sequence[Sequence[Any]],
                  towers_of: Sequence[Sequence[Optional[int]]],
                  variables: Sequence[Any], tower_devices: Sequence[str],
                  pack_bytes: int) -> List[List[Any]]:
  """Packs the towers' gradients on their way to the variables' devices.

  Args:
    shares_of: For each variable, its gradients: dense, sparse, or None.
    towers_of: For each of these, the tower that it comes from; None for one
      that belongs to no tower.
    variables: The variables.
    tower_devices: The device of each tower.
    pack_bytes: Bytes in a message at most.

  Returns:
    `shares_of`, with the same values. Those that were packed arrive on the
    device of the variable. The last variable's gradient, which is ready first,
    is the first of the first message. Sparse gradients, those of unknown shape,
    and those that fill a message by themselves are left alone.
  """
  result = [list(shares) for shares in shares_of]
  lanes: Dict[Tuple[Any, ...], List[Tuple[int, int]]] = {}
  for number in reversed(range(len(variables))):
    for position, tower in enumerate(towers_of[number]):
      share = result[number][position]
      target = variables[number].device
      if tower is None or not isinstance(share, tf.Tensor) or (
          placement.same_spelling(tower_devices[tower]) ==
          placement.same_spelling(target)):
        continue
      if 0 < num_bytes(share) <= pack_bytes // 2:
        lane = (tower, target, share.dtype)
        lanes.setdefault(lane, []).append((number, position))
  for (tower, target, _), places in lanes.items():
    values = [result[number][position] for number, position in places]
    arrived = transferred(values, tower_devices[tower], target, pack_bytes)
    for (number, position), value in zip(places, arrived):
      result[number][position] = value
  return result


def transferred(values: Sequence[tf.Tensor], source: str, target: str,
                pack_bytes: int) -> List[tf.Tensor]:
  """Moves tensors of one type and static shapes in messages of `pack_bytes`.

  Args:
    values: The tensors, in the order in which they are ready.
    source: The device that they are on.
    target: The device that wants them.
    pack_bytes: Bytes in a message at most.
  """
  result: List[tf.Tensor] = []
  for bucket in _buckets(values, pack_bytes):
    if len(bucket) == 1:
      result.extend(bucket)
      continue
    sizes = [value.shape.num_elements() for value in bucket]
    with tf.device(None), tf.device(source):
      message = tf.concat([tf.reshape(value, [-1]) for value in bucket], axis=0,
                          name="packed")
    with tf.device(None), tf.device(target):
      for piece, value in zip(tf.split(message, sizes), bucket):
        result.append(tf.reshape(piece, value.shape))
  return result


def num_bytes(value: tf.Tensor) -> int:
  """Returns the size of `value` in bytes; 0 where its shape is unknown."""
  return (value.shape.num_elements() or 0) * value.dtype.size


def _buckets(values: Sequence[tf.Tensor],
             pack_bytes: int) -> List[List[tf.Tensor]]:
  """Cuts `values` into runs of at most `pack_bytes`, in order."""
  buckets: List[List[tf.Tensor]] = []
  room = 0
  for value in values:
    size = num_bytes(value)
    if not buckets or size > room:
      buckets.append([])
      room = pack_bytes
    buckets[-1].append(value)
    room -= size
  return buckets

