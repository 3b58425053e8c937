"""Which devices the towers run on, and a session config that has them."""

import collections
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow.compat.v1 as tf

# One tower's devices, the first of which is its own.
TowerDevices = Tuple[str, ...]


def resolve(
    devices: Union[int, Sequence[Union[str, Sequence[str]]]]
) -> Tuple[TowerDevices, ...]:
  """Returns the devices of each tower as a tuple of device strings.

  Args:
    devices: Device strings, one per tower; a tuple of strings for a tower that
      spans several devices; or a number of towers, for as many GPUs or, where
      there is no GPU, logical CPU devices.

  Raises:
    TypeError: If `devices` is no such list or number.
    ValueError: If it names no device, asks for more GPUs than there are, or
      holds a string that is no device name.
  """
  if isinstance(devices, int) and not isinstance(devices, bool):
    return _first(devices)
  if isinstance(devices, (str, bytes)) or not isinstance(
      devices, collections.abc.Sequence):
    raise TypeError(
        "`devices` must be a list of device strings (or of tuples of them), or "
        f"a number of towers: expected for example ['/gpu:0', '/gpu:1'], got "
        f"{devices!r}.")
  if not devices:
    raise ValueError(
        "`devices` must name at least one device, one per tower: got none.")
  towers = tuple(
      (entry,) if isinstance(entry, str) else entry for entry in devices)
  for index, entry in enumerate(towers):
    if not isinstance(entry, (tuple, list)) or not entry or not all(
        isinstance(device, str) for device in entry):
      raise TypeError(
          f"`devices[{index}]` must be a device string, or a tuple of device "
          f"strings for a tower that spans several: got {devices[index]!r}.")
    for device in entry:
      _parse(device, f"devices[{index}]")
  return tuple(tuple(entry) for entry in towers)


def _first(count: int) -> Tuple[TowerDevices, ...]:
  if count < 1:
    raise ValueError(
        "`devices` must be at least one tower: expected a positive number, "
        f"got {count}.")
  gpus = len(tf.config.list_physical_devices("GPU"))
  if 0 < gpus < count:
    raise ValueError(
        "`devices` must not ask for more GPUs than there are: expected at most "
        f"{gpus}, got {count}. To run several towers on a GPU or on CPU "
        "devices, pass a list of device strings.")
  kind = "GPU" if gpus else "CPU"
  return tuple((f"/device:{kind}:{index}",) for index in range(count))


def _parse(device: str, argument: str) -> tf.DeviceSpec:
  try:
    return tf.DeviceSpec.from_string(device)
  except ValueError as error:
    raise ValueError(
        f"`{argument}` must be a device string such as '/gpu:0' or "
        f"'/job:worker/task:1/device:CPU:0': got {device!r}.") from error


def parameter_devices(requested: Union[None, str, Sequence[str]],
                      towers: Sequence[TowerDevices]) -> Tuple[str, ...]:
  """Returns the devices where variables live and gradients are averaged.

  They are `requested` where that is given. Otherwise it is the first CPU of the
  first tower's host; a single tower keeps its variables to itself, as plain
  code does.

  Raises:
    TypeError: If `requested` is no string, no list of strings and not None.
    ValueError: If it names no device, or holds a string that is no device name.
  """
  if requested is None:
    if len(towers) == 1:
      return (towers[0][0],)
    first = _parse(towers[0][0], "devices[0]")
    return (first.replace(device_type="CPU", device_index=0).to_string(),)
  named: Tuple[Any, ...] = (requested,)
  if isinstance(requested, (list, tuple)):
    named = tuple(requested)
  if not all(isinstance(device, str) for device in named):
    raise TypeError("`parameter_device` must be a device string, a list of "
                    f"device strings, or None: got {requested!r}.")
  if not named:
    raise ValueError("`parameter_device` must name a device: got an empty "
                     f"list, {requested!r}.")
  for device in named:
    _parse(device, "parameter_device")
  return named


def home_device(towers: Sequence[TowerDevices], parameters: str) -> str:
  """Returns the device for what belongs to this build and to no tower.

  It is `parameters`, where variables live, if that is on the host of a tower.
  On a parameter server, what several workers build would get mixed up there,
  and each meeting would cross the network; then it is the first CPU of the
  first tower's host.
  """
  first = tf.DeviceSpec.from_string(towers[0][0])
  hosts = {_host(own[0]) for own in towers}
  if _host(parameters) in hosts:
    return parameters
  return first.replace(device_type="CPU", device_index=0).to_string()


def _host(device: str) -> Tuple[Any, ...]:
  spec = tf.DeviceSpec.from_string(device)
  return spec.job, spec.replica, spec.task


def merge_device(towers: Sequence[TowerDevices], parameters: str) -> str:
  """Returns the device where the towers' values meet, such as batch moments.

  It is the first tower's where all towers are on GPUs: on the way through a CPU
  each layer would wait for its memory, twice a step. Elsewhere it is
  `home_device`.
  """
  types = {tf.DeviceSpec.from_string(own[0]).device_type for own in towers}
  if types == {"GPU"}:
    return towers[0][0]
  return home_device(towers, parameters)


def session_config(devices: Sequence[str],
                   overrides: Dict[str, Any]) -> tf.ConfigProto:
  """Returns a config under which all of `devices` exist in a session.

  Soft placement is on, for ops without a kernel on the device of their tower.
  It would also move a whole tower whose device is missing, without a word; that
  is why the devices are checked here. Where all are CPUs, TensorFlow's graph
  optimizer is off, unless `overrides` has `graph_options`.

  Args:
    devices: Device strings.
    overrides: Fields of `tf.ConfigProto` and their values.

  Raises:
    ValueError: If `overrides` has an unknown field or leaves too few CPU
      devices, or if this machine lacks a GPU that `devices` names.
  """
  needed = _highest(devices)
  counts = dict(overrides.pop("device_count", {}))
  cpus = counts.setdefault("CPU", max(needed["CPU"], 1))
  if cpus < needed["CPU"]:
    raise ValueError(
        "`device_count` must leave every device of the graph: expected at "
        f"least {needed['CPU']} CPU devices, got {cpus}, which lacks "
        f"{_missing(devices, 'CPU', cpus)}.")
  gpus = len(tf.config.list_physical_devices("GPU")) if needed["GPU"] else 0
  gpus = min(gpus, counts.get("GPU", gpus))
  if gpus < needed["GPU"]:
    raise ValueError(
        f"`devices` must exist on this machine: expected {needed['GPU']} GPUs, "
        f"got {gpus}, which lacks {_missing(devices, 'GPU', gpus)}. Build the "
        "towers on devices that exist, for example `devices=2` for any two.")
  fields = dict(allow_soft_placement=True)
  fields.update(overrides)
  try:
    config = tf.ConfigProto(device_count=counts, **fields)
  except (ValueError, TypeError) as error:
    raise ValueError(
        "`overrides` must be fields of tf.ConfigProto and their values: got "
        f"{overrides!r} ({error}).") from error
  if not needed["GPU"] and "graph_options" not in overrides:
    # On CPUs the graph optimizer brings nothing that a step would show, and
    # takes most of the time to the first step of a deep model.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config


def _local(device: str) -> Optional[tf.DeviceSpec]:
  """Returns the parsed device, or None for another machine's."""
  spec = tf.DeviceSpec.from_string(device)
  return spec if spec.job in (None, "localhost") else None


def _highest(devices: Sequence[str]) -> Dict[str, int]:
  """Returns how many devices of each type must exist here."""
  needed = {"CPU": 0, "GPU": 0}
  for device in devices:
    spec = tf.DeviceSpec.from_string(device)
    kind = spec.device_type
    # A server of a cluster has its own config, but for the CPU count that it
    # shares with its clients' sessions in tests and on one machine.
    if kind in needed and (kind == "CPU" or _local(device)):
      needed[kind] = max(needed[kind], (spec.device_index or 0) + 1)
  return needed


def _missing(devices: Sequence[str], kind: str, count: int) -> List[str]:
  missing = []
  for device in devices:
    spec = tf.DeviceSpec.from_string(device)
    if (spec.device_type == kind and (spec.device_index or 0) >= count and
        device not in missing):
      missing.append(device)
  return missing


def without_task(own: Sequence[str]) -> str:
  """Returns the name of a tower's device without job and task."""
  spec = tf.DeviceSpec.from_string(own[0])
  if len(own) > 1 or spec.job is not None or spec.device_type is None:
    raise ValueError(
        "`devices` must name one device per tower, without job and task: "
        f"expected for example '/gpu:0', got {own!r}.")
  return f"/device:{spec.device_type}:{spec.device_index or 0}"
