"""What one tower is, and what a model function returns for it."""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import tensorflow.compat.v1 as tf

from towers import tower_names


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
               name_scope: str, enclosing_scope: str = "",
               graph: Optional[tf.Graph] = None):
    self.index = index
    self.count = count
    self.devices = devices
    self.name_scope = name_scope
    self._enclosing_scope = enclosing_scope
    self.weight: Any = None
    self.loss: Optional[tf.Tensor] = None
    self.outputs: Any = None
    self.update_ops: Tuple[Any, ...] = ()
    self._graph = graph
    self._collections: Dict[Any, List[Any]] = {}
    self._replaced: Dict[str, tf.Tensor] = {}

  @property
  def device(self) -> str:
    """Device string of the tower, the first of its `devices`."""
    return self.devices[0]

  def collection(self, key: Any) -> List[Any]:
    """Returns what this tower alone put into the graph collection `key`."""
    return list(self._collections.get(key, ()))

  @property
  def names(self) -> tower_names.TowerNames:
    """What the tower's operations are called on one device; for `tensor`."""
    return tower_names.TowerNames(
        self._graph or tf.get_default_graph(), f"tower {self.index}",
        self.name_scope, self._enclosing_scope, self._replaced)

  def tensor(self, name: str) -> tf.Tensor:
    """Returns the tensor that the model on one device calls `name`.

    To fetch it, or to feed it:

        relu = graph.tower(1).tensor("conv1/Relu")
        session.run(relu, {graph.tower(1).tensor("keep_prob"): 1.0})

    Args:
      name: Name without the tower's scope, such as `"conv1/Relu"`, with an
        output as in `"split:1"` if it is not the first. A name without what
        the caller of `build_towers` had opened around it is found as well. The
        name of a variable, `"conv1/kernel"`, stands for its value, as the tower
        reads it; that of a tensor which stands outside of the towers, such as a
        placeholder, for this tensor. The outputs of batch norm that was made to
        take in all towers are those over the whole batch.

    Raises:
      TypeError: If `name` is no text.
      ValueError: If the tower has no such tensor. The message lists names that
        are like it.
    """
    return self.names.tensor(name)

  def operation(self, name: str) -> tf.Operation:
    """Returns the operation that the model on one device calls `name`.

    Args:
      name: See `tensor`, without an output. That of a variable stands for the
        op that holds the variable, or the tower's copy of it.

    Raises:
      TypeError: If `name` is no text.
      ValueError: If the tower has no such operation. The message lists names
        that are like it.
    """
    return self.names.operation(name)

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

  def note_replaced(self, old: tf.Tensor, new: tf.Tensor) -> None:
    """Notes what the model got for a tensor of the tower; for the builder."""
    self._replaced[old.name] = new

  def __repr__(self) -> str:
    return (f"Tower(index={self.index}, count={self.count}, "
            f"devices={self.devices}, name_scope={self.name_scope!r})")


