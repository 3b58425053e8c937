"""What a training run is asked to do, and whether that fits together."""

import dataclasses
import functools
from typing import Optional, Sequence, Union

import tensorflow.compat.v1 as tf

from tools import datasets
from tools import tasks

# Constructors that take the learning rate, and its default.
OPTIMIZERS = {
    "momentum": (functools.partial(tf.train.MomentumOptimizer, momentum=0.9),
                 0.1),
    "adam": (tf.train.AdamOptimizer, 0.001),
    "sgd": (tf.train.GradientDescentOptimizer, 0.1),
}


class UsageError(Exception):
  """Something that the user can put right: shown in one line."""


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
  optimizer: str = "momentum"
  weight_decay: float = 1e-4
  clip_norm: Optional[float] = None
  loss_scale: Union[None, float, str] = None
  skip_nonfinite: bool = False
  seed: int = 0
  logdir: Optional[str] = None
  log_every: int = 10
  evaluate_every: int = 200

  @property
  def may_skip(self) -> bool:
    """Whether a batch may leave everything as it was."""
    return self.skip_nonfinite or self.loss_scale == "dynamic"


def completed(options: Options, data: datasets.Dataset) -> Options:
  """Returns the options with the defaults that depend on the data set.

  Raises:
    UsageError: If the options do not fit the data set, or each other.
  """
  misfit = tasks.misfit(options.model, data)
  if misfit is not None:
    raise UsageError(misfit)
  batch_size = options.batch_size or tasks.TASKS[data.kind].batch_size
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
  return dataclasses.replace(options, batch_size=batch_size)
