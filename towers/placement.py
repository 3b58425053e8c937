"""On which device each variable lives."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import tensorflow.compat.v1 as tf


class Placement(NamedTuple):
  """Where a variable is.

  Fields:
    variable: Its name.
    num_bytes: Its size in bytes; None if its shape is unknown.
    device: Its device.
  """
  variable: str
  num_bytes: Optional[int]
  device: str


class Shared:
  """All variables on the parameter device."""

  replicated = False

  def __init__(self, parameter_device: str, tower_devices: Sequence[str]):
    self._parameter_device = parameter_device
    self._tower_devices = list(tower_devices)

  def device_for(self, num_bytes: Callable[[], Optional[int]],
                 trainable: bool) -> str:
    """Returns the device of a variable that is about to be made.

    Args:
      num_bytes: Returns its size; None if unknown.
      trainable: Whether it is.
    """
    del num_bytes, trainable
    return self._parameter_device

  def count(self, variables: Sequence[Any]) -> None:
    """Takes note of variables that exist."""


class Balanced(Shared):
  """Each variable on the tower's device that holds the fewest bytes so far."""

  def __init__(self, parameter_device: str, tower_devices: Sequence[str]):
    super().__init__(parameter_device, tower_devices)
    self._bytes: Dict[str, int] = {}
    for device in self._devices():
      self._bytes.setdefault(same_spelling(device), 0)

  def _devices(self) -> Sequence[str]:
    return self._tower_devices

  def device_for(self, num_bytes: Callable[[], Optional[int]],
                 trainable: bool) -> str:
    size = num_bytes()
    if size is None:
      return self._parameter_device
    device = min(self._bytes, key=self._bytes.__getitem__)
    self._bytes[device] += size
    return device

  def count(self, variables: Sequence[Any]) -> None:
    for variable in variables:
      device = same_spelling(variable.device)
      if device in self._bytes:
        self._bytes[device] += num_bytes_of(
            variable.shape, variable.dtype) or 0


class BalancedParameters(Balanced):
  """Each variable on the parameter device that holds the fewest bytes so far.

  For several parameter servers.
  """

  def __init__(self, parameter_devices: Sequence[str],
               tower_devices: Sequence[str]):
    self._parameter_devices = list(parameter_devices)
    super().__init__(parameter_devices[0], tower_devices)

  def _devices(self) -> Sequence[str]:
    return self._parameter_devices


class Replicated(Shared):
  """Trained variables on the device of tower 0, copies on the others'."""

  replicated = True

  def device_for(self, num_bytes: Callable[[], Optional[int]],
                 trainable: bool) -> str:
    return self._tower_devices[0] if trainable else self._parameter_device


_POLICIES = {"shared": Shared, "balanced": Balanced, "replicated": Replicated}


def policy(variables: Any, parameter_devices: Sequence[str],
           tower_devices: Sequence[str]) -> Shared:
  """Returns the policy that `variables` names.

  Raises:
    ValueError: If it names none, or one that has no use for several parameter
      devices where there are several.
  """
  if not isinstance(variables, str) or variables not in _POLICIES:
    raise ValueError(
        "`variables` must say where variables live: expected one of "
        f"{sorted(_POLICIES)}, got {variables!r}.")
  if len(parameter_devices) == 1:
    return _POLICIES[variables](parameter_devices[0], tower_devices)
  if variables != "shared":
    raise ValueError(
        "`parameter_device` must be one device unless variables are shared: "
        f"got {list(parameter_devices)} with `variables={variables!r}`.")
  return BalancedParameters(parameter_devices, tower_devices)


def table(variables: Sequence[Any]) -> List[Placement]:
  """Returns where each of `variables` is."""
  return [
      Placement(variable.op.name,
                num_bytes_of(variable.shape, variable.dtype), variable.device)
      for variable in variables
  ]


def num_bytes_of(shape: Any, dtype: Optional[tf.DType]) -> Optional[int]:
  """Returns the bytes of a tensor; None if its shape or type is unknown."""
  shape = tf.TensorShape(shape)
  if dtype is None or not shape.is_fully_defined():
    return None
  return shape.num_elements() * dtype.base_dtype.size


def same_spelling(device: str) -> str:
  """Returns one spelling for all names of a device."""
  return tf.DeviceSpec.from_string(device or "").to_string()
