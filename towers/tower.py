"""What one tower is, and what a model function returns for it."""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import tensorflow.compat.v1 as tf


class TowerSpec(NamedTuple):
  """What a model function returns for its tower, where a dict says too little.

  Fields:
    loss: Scalar float tensor, the mean over the tower's rows, or over `weight`
      units where that is given. None for a model without a loss.
    outputs: Nest of tensors. Tensors of shape `[B_t, ...]` are put together in
      batch order, scalars are averaged by weight.
    weight: Scalar number or tensor, how many units (valid pixels, tokens) the
      tower's loss is a mean over. None for the number of its rows.
  """
  loss: Optional[tf.Tensor] = None
  outputs: Optional[Any] = None
  weight: Optional[Any] = None


def without_numbers(name: str) -> str:
  """Returns `name` without the numbers that make each of its parts unique."""
  return re.sub(r"_\d+(?=/|$)", "", name)


class Tower:
  """One copy of the model, on its own device.

  Attributes:
    index: Which tower this is, from 0.
    count: How many towers there are.
    device: Device string of the tower.
    devices: All devices of a tower that spans several; else `(device,)`.
    name_scope: The name scope of the tower's ops, with a trailing slash, such
      as `"tower_0/"`; `""` outside a build.
    weight: How many rows (or units, see `TowerSpec`) the tower's loss is a mean
      over; 0 for a tower without rows, 1 where the model function takes no
      inputs and gives no weight. A number where it is known while building,
      else a scalar tensor.
    loss: Scalar tensor, what the model function returned; None without one.
    outputs: What the model function returned beside the loss.
    update_ops: Tuple of ops that this tower put into `UPDATE_OPS`.
  """

  def __init__(self, *, index: int, count: int, devices: Tuple[str, ...],
               name_scope: str, enclosing_scope: str = ""):
    self.index = index
    self.count = count
    self.devices = devices
    self.name_scope = name_scope
    self._enclosing_scope = enclosing_scope
    self.weight: Any = None
    self.loss: Optional[tf.Tensor] = None
    self.outputs: Any = None
    self.update_ops: Tuple[Any, ...] = ()
    self._collections: Dict[Any, List[Any]] = {}

  @property
  def device(self) -> str:
    """Device string of the tower, the first of its `devices`."""
    return self.devices[0]

  def collection(self, key: Any) -> List[Any]:
    """Returns what this tower alone put into the graph collection `key`."""
    return list(self._collections.get(key, ()))

  def plain_name(self, name: str) -> str:
    """Returns the name that `name` would have without the tower's scope."""
    position = f"/{name}".find(f"/{self.name_scope}") if self.name_scope else -1
    if position < 0:
      return name
    rest = name[position + len(self.name_scope):]
    return name[:position] + self._enclosing_scope + rest

  def set_collections(self, collections: Dict[Any, List[Any]]) -> None:
    """Keeps what the tower put into each collection; for the builder."""
    self._collections = collections

  def __repr__(self) -> str:
    return (f"Tower(index={self.index}, count={self.count}, "
            f"devices={self.devices}, name_scope={self.name_scope!r})")


