"""Flags of tools that use a run of tools/train.py, and what they ask for."""

import dataclasses
import pathlib
from typing import Any

from absl import flags
import tensorflow.compat.v1 as tf

from tools import command_line
from tools import logdirs
from tools import training_options


def define_logdir(values: flags.FlagValues) -> None:
  """Defines `logdir`."""
  flags.DEFINE_string(
      "logdir", None, "Directory of the run, as train.py printed it.",
      flag_values=values)


def define_checkpoint(values: flags.FlagValues) -> None:
  """Defines `best` and `checkpoint`."""
  flags.DEFINE_boolean(
      "best", False, "Takes the checkpoint with the best score of the run, in "
      "place of the last one.", flag_values=values)
  flags.DEFINE_string(
      "checkpoint", None, "Prefix of another checkpoint of the same model, in "
      "place of the last one in --logdir.", flag_values=values)


def define_towers(values: flags.FlagValues) -> None:
  """Defines `data_dir`, `num_towers` and `devices`."""
  flags.DEFINE_string(
      "data_dir", None, "Where the files of the data set are now. Default: "
      "where they were in training.", flag_values=values)
  flags.DEFINE_integer(
      "num_towers", None, "Number of towers, on the first GPUs or, without "
      "GPUs, on as many logical CPU devices; 2 unless --devices is given.",
      lower_bound=1, flag_values=values)
  flags.DEFINE_list(
      "devices", None, "One device per tower, such as /gpu:0,/gpu:1.",
      flag_values=values)


def run(values: flags.FlagValues) -> training_options.Run:
  """Returns what the logdir says about its run.

  Raises:
    UsageError: If there is no such run.
  """
  if not values.logdir:
    raise command_line.UsageError(
        "`--logdir` must be given: the directory of a run.")
  return training_options.load_run(values.logdir)


def options(values: flags.FlagValues,
            **changes: Any) -> training_options.Options:
  """Returns the options of the run, with the towers that the flags ask for.

  Args:
    values: The flags of `define_logdir` and `define_towers`.
    **changes: Further options to change, unless they are None.

  Raises:
    UsageError: If there is no such run, or the flags do not fit.
  """
  changes["data_dir"] = values.data_dir
  changed = dataclasses.replace(
      run(values).options, logdir=values.logdir, num_towers=values.num_towers,
      devices=values.devices, summarize_images=0,
      **{name: value for name, value in changes.items() if value is not None})
  training_options.check_devices(changed)
  return changed


def checkpoint(values: flags.FlagValues) -> str:
  """Returns the prefix of the checkpoint that is asked for.

  Args:
    values: The flags of `define_logdir` and `define_checkpoint`.

  Raises:
    UsageError: If there is none, or two are asked for.
  """
  if values.best and values.checkpoint is not None:
    raise command_line.UsageError(
        "`--best` and `--checkpoint` must not both be given: got "
        f"--checkpoint={values.checkpoint}.")
  if values.checkpoint is not None:
    if not tf.train.checkpoint_exists(values.checkpoint):
      raise command_line.UsageError(
          "`--checkpoint` must be the prefix of a checkpoint, such as "
          f"{values.logdir}/model.ckpt-600: got {values.checkpoint}, which is "
          "not there.")
    return values.checkpoint
  return last_checkpoint(
      str(pathlib.Path(values.logdir, "best")) if values.best
      else values.logdir)


def last_checkpoint(folder: str) -> str:
  """Returns the prefix of the last checkpoint in `folder`.

  Raises:
    UsageError: If there is none, or it is damaged.
  """
  path = logdirs.latest(folder)
  if path is None:
    raise command_line.UsageError(
        f"`--logdir` must hold a checkpoint: found none in {folder}. Train "
        "first.")
  return path
