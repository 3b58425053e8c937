"""Keeps a process away from the GPUs that it was not asked to use.

A process of TensorFlow takes nearly all memory of every GPU that it can see, on
whichever its ops are placed. So only those that the towers are on are made
visible, in the config of its sessions (`visible_device_list`). In the process
they are then numbered from 0, in that order: of --devices=/gpu:2,/gpu:3 the
towers are on /gpu:0 and /gpu:1.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import tensorflow.compat.v1 as tf


class Visible(NamedTuple):
  """What a process sees.

  Fields:
    devices: For `build_towers`, by the numbers within the process.
    gpus: The numbers of the visible GPUs on the machine, in the order of their
      numbers within the process. None where devices are asked for that are not
      there, which `build_towers` tells.
  """
  devices: Union[int, Sequence[str]]
  gpus: Optional[Tuple[int, ...]]

  def session_options(self) -> Dict[str, Any]:
    """Returns fields of `tf.ConfigProto`, the same for all sessions."""
    if self.gpus is None:
      return {}
    if not self.gpus:  # An empty list would mean all of them.
      return {"device_count": {"GPU": 0}}
    return {"gpu_options": tf.GPUOptions(
        visible_device_list=",".join(map(str, self.gpus)))}

  def __str__(self) -> str:
    pairs = [f"/gpu:{own} is GPU {number} of this machine"
             for own, number in enumerate(self.gpus or ())]
    return ", ".join(pairs) or "no GPU is used"


def asked_for(devices: Union[int, Sequence[str]],
              num_gpus: Optional[int] = None) -> Visible:
  """Returns what a process sees that is asked to use some devices.

  Args:
    devices: Device strings of this machine, or a number of towers, as for
      `build_towers`.
    num_gpus: How many GPUs the machine has. Default: looked up, which takes no
      memory of them.
  """
  if num_gpus is None:
    num_gpus = len(tf.config.list_physical_devices("GPU"))
  if isinstance(devices, int):
    if not 0 < devices <= num_gpus:
      return Visible(devices, None if num_gpus else ())
    devices = [f"/gpu:{number}" for number in range(devices)]
  specs = [tf.DeviceSpec.from_string(device) for device in devices]
  numbers = [spec.device_index or 0 if spec.device_type == "GPU" else None
             for spec in specs]
  gpus = tuple(dict.fromkeys(
      number for number in numbers if number is not None))
  if max(gpus, default=-1) >= num_gpus:
    return Visible(devices, None)
  own: List[str] = [
      device if number is None else f"/gpu:{gpus.index(number)}"
      for device, number in zip(devices, numbers)]
  return Visible(own, gpus)
