"""What a training run is asked to do, and whether that fits together.

A run notes it in its logdir, in `run.json`, for the tools that use its
checkpoints.
"""

import dataclasses
import json
import os
import pathlib
from typing import NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow.compat.v1 as tf

from tools import command_line
from tools import datasets
from tools import precision
from tools import task
from tools import tasks

OPTIMIZERS = task.OPTIMIZERS
PRECISIONS = precision.PRECISIONS
UsageError = command_line.UsageError


@dataclasses.dataclass(frozen=True)
class Options:
  """What a run does; the flags of the same names say more."""
  model: str = "convnet"
  dataset: str = "digits"
  data_dir: Optional[str] = None
  image_size: Optional[int] = None
  augment: bool = True
  num_towers: Optional[int] = None
  devices: Optional[Sequence[str]] = None
  variables: str = "shared"
  sync_batch_norm: bool = True
  batch_size: Optional[int] = None
  remainder: str = "drop"
  accumulate_steps: int = 1
  steps: int = 600
  learning_rate: Optional[float] = None
  optimizer: Optional[str] = None
  schedule: str = "cosine"
  warm_up: float = 0.05
  weight_decay: float = 1e-4
  label_smoothing: float = 0.0
  precision: str = "float32"
  clip_norm: Optional[float] = None
  loss_scale: Union[None, float, str] = None
  skip_nonfinite: bool = False
  seed: int = 0
  logdir: Optional[str] = None
  log_every: int = 10
  evaluate_every: int = 200
  early_stop: Optional[int] = None
  summarize_images: Optional[int] = None
  trace_steps: Sequence[int] = ()

  @property
  def may_skip(self) -> bool:
    """Whether a batch may leave everything as it was."""
    return self.skip_nonfinite or self.loss_scale == "dynamic"


def completed(options: Options, data: datasets.Dataset) -> Options:
  """Returns the options with the defaults that depend on the data set.

  Raises:
    UsageError: If the options do not fit the data set, or each other.
  """
  learned = tasks.of_model(options.model)
  for reason in (tasks.misfit(options.model, data), learned.refusal(options)):
    if reason is not None:
      raise UsageError(reason)
  batch_size = options.batch_size or learned.batch_size
  if options.remainder == "drop" and batch_size > data.size("train"):
    raise UsageError(
        "`--batch_size` must be at most the number of training images with "
        f"`--remainder=drop`: expected 1 to {data.size('train')}, got "
        f"{batch_size}.")
  if options.remainder == "repeat" and (
      options.model not in tasks.WITHOUT_BATCH_NORM):
    raise UsageError(
        "`--remainder=repeat` must not be given for a model with batch norm, "
        f"which would count the images that fill up a batch: got "
        f"{options.model}. Use `--remainder=keep`, where the last batch of an "
        "epoch is short and each image counts once.")
  scale = options.loss_scale
  if scale is None and options.precision == "float16":
    scale = "dynamic"  # Its smallest number is 6e-8; gradients are smaller.
  return dataclasses.replace(
      options, batch_size=batch_size, loss_scale=scale)


def check_devices(options: Options) -> None:
  """Checks that `devices` can be devices of this machine.

  Raises:
    UsageError: If they cannot, or `num_towers` is given as well.
  """
  if options.devices is None:
    return
  if options.num_towers is not None:
    raise UsageError(
        "`--num_towers` and `--devices` must not both be given: got "
        f"{options.num_towers} and {','.join(options.devices)}. `--devices` "
        "makes one tower on each device.")
  for device in options.devices or [""]:
    try:
      spec = tf.DeviceSpec.from_string(device)
    except ValueError:
      spec = tf.DeviceSpec()
    if spec.device_type not in ("CPU", "GPU") or spec.job is not None:
      raise UsageError(
          "`--devices` must list CPU or GPU devices of this machine, such as "
          f"/gpu:0,/gpu:1: got {device!r}.")


RUN_FILE = "run.json"


class Run(NamedTuple):
  """What a logdir says about its run.

  Fields:
    options: The options of its last start, defaults filled in.
    kind: The kind of its data set, see `datasets.Dataset`; so are all others.
    image_shape: `(H, W, C)`.
    num_classes: Number of classes.
    void_label: Label that counts for nothing, or None.
    class_names: A name per class, or None.
    mean: What is subtracted from the channels of an image of the files, a
      float per channel or one for all.
    deviation: What they are divided by then, likewise.
  """
  options: Options
  kind: str
  image_shape: Tuple[int, int, int]
  num_classes: int
  void_label: Optional[int]
  class_names: Optional[Tuple[str, ...]]
  mean: Sequence[float]
  deviation: Sequence[float]


def run_of(options: Options, data: datasets.Dataset) -> Run:
  """Returns what is to be noted of a run with these options on these data."""
  numbers = lambda values: tuple(np.ravel(values).astype(float).tolist())
  return Run(options, data.kind, tuple(data.image_shape), data.num_classes,
             data.void_label, data.class_names, numbers(data.scale.mean),
             numbers(data.scale.deviation))


def save_run(run: Run, logdir: str) -> None:
  """Notes a run in its logdir, at once or not at all.

  Raises:
    OSError: If it cannot be written.
  """
  fields = dict(run._asdict(), options=dataclasses.asdict(run.options))
  path = pathlib.Path(logdir, RUN_FILE)
  temporary = path.with_suffix(".tmp")
  temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
  os.replace(temporary, path)


def load_run(logdir: str) -> Run:
  """Reads what `save_run` noted.

  Raises:
    UsageError: If the directory holds no run, or notes that cannot be read.
  """
  path = pathlib.Path(logdir, RUN_FILE)
  try:
    fields = json.loads(path.read_text(encoding="utf-8"))
    options = Options(**{
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.pop("options").items()})
    fields = {name: tuple(value) if isinstance(value, list) else value
              for name, value in fields.items()}
    return Run(options=options, **fields)
  except FileNotFoundError as error:
    raise UsageError(
        f"`--logdir` must be the directory of a run of train.py: got {logdir}, "
        f"where there is no {RUN_FILE}. Give the `--logdir` that train.py "
        "printed.") from error
  except OSError as error:
    raise UsageError(
        f"`--logdir` must be a directory that can be read: got {logdir} "
        f"({error.strerror}).") from error
  except (ValueError, TypeError, AttributeError, KeyError) as error:
    raise UsageError(
        f"`--logdir` must hold a {RUN_FILE} as train.py writes it: got {path}, "
        f"which cannot be read ({error}). Start train.py once more with the "
        "flags of the run; it writes the file anew.") from error
