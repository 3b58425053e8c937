"""Checks that a model in N towers computes what it does on one device.

  python tools/verify.py --model=resnet20 --num_towers=3
  python tools/verify.py --model=model.py:loss_fn --inputs='float32[9,8]'
  python tools/verify.py --model=model.py:loss_fn --data=batch.npz --rows=9,8,1

Builds the model in one tower and in N, with the same values of the variables,
and compares loss, outputs, gradients, and variables after the update ops, for
batches of several sizes. Where they differ, it names the layer in which towers
first differ from one device, and the likely cause. Random numbers, as of
dropout, are held equal.

Models with a name are narrow ones on random images, which takes a while for
deep ones. A function of one's own takes what --inputs or --data has, and
returns a loss, or a dict with "loss".

The status is 0 if the towers compute the same, 1 if not, and 2 if flags are
wrong or the model fails on one device.
"""

import functools
import json
import pathlib
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
from tools import startup

startup.load_tensorflow()

from absl import flags
import numpy as np
import tensorflow.compat.v1 as tf

from tools import command_line
from tools import examples
from tools import synced_layers
import towers



def make_flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  # Flags of its own, so that scripts can be imported side by side.
  values = command_line.flag_values()
  text = functools.partial(flags.DEFINE_string, flag_values=values)
  count = functools.partial(
      flags.DEFINE_integer, lower_bound=1, flag_values=values)
  switch = functools.partial(flags.DEFINE_boolean, flag_values=values)
  listed = functools.partial(flags.DEFINE_list, flag_values=values)
  text("model", None,
       f"One of {', '.join(examples.MODELS)}; or a function as FILE.py:NAME.")
  count("num_towers", None,
        "Number of towers, on the first GPUs or, without GPUs, on as many "
        "logical CPU devices; 2 unless --devices is given.")
  listed("devices", None, "One device per tower, such as /gpu:0,/gpu:1.")
  listed("rows", None, "Sizes of the batches to compare, such as 9,8,1. "
         "Default: the whole batch, one that deals out evenly, one row less, "
         "one row less than towers, and 1.")
  count("batch_size", None, "Rows of the batch of a model with a name, and of "
        "--inputs that have ? for it. Default: two for each tower, and one.")
  count("image_size", 32, "Height and width of images of a model with a name.")
  listed("inputs", [], "Type and shape of each input of FILE.py:NAME, such as "
         "float32[?,8]. Floats are random, integers 0 or 1.")
  text("data", None, "File with the arrays of FILE.py:NAME, by np.savez, in "
       "its order; instead of --inputs.")
  text("arguments", "{}",
       "Further keyword arguments of FILE.py:NAME, as JSON.")
  listed("losses", None, "Names of the scalar outputs whose gradients to "
         "compare. Default: loss, or without one all scalar outputs.")
  switch("hold_random", True, "Whether to hold random numbers equal.")
  switch("sync_batch_norm", True,
         "Whether batch norm takes the rows of all towers together.")
  flags.DEFINE_enum("update_ops", "first", ["first", "all"],
                    "Whose update ops run.", flag_values=values)
  flags.DEFINE_enum("variables", "shared", ["shared", "balanced", "replicated"],
                    "Where variables live.", flag_values=values)
  switch("static_rows", None, "Whether the number of rows is known while the "
         "model is built. Default: if it must be.")
  flags.DEFINE_float("tolerance", None, "Largest difference of float32, in "
                     "terms of the largest number of a tensor. Default: 1e-4.",
                     lower_bound=0.0, flag_values=values)
  return values


def load_model(values: flags.FlagValues, count: int) -> examples.Example:
  """Returns the model and the batch that the flags name.

  Args:
    values: The flags.
    count: The number of towers.

  Raises:
    UsageError: If there are none.
  """
  rows = values.batch_size or 2 * count + 1
  if values.model is None:
    raise command_line.UsageError(
        f"`--model` must be given: one of {', '.join(examples.MODELS)}, or a "
        "function as FILE.py:NAME.")
  if ":" in values.model:
    try:
      function = synced_layers.load(values.model)
    except ValueError as error:
      raise command_line.UsageError(command_line.first_line(error)) from error
    arguments = _arguments(values.arguments)
    return examples.Example(
        functools.partial(function, **arguments), _batch(values, rows))
  if values.model not in examples.MODELS:
    raise command_line.UsageError(
        f"`--model` must be one of {', '.join(examples.MODELS)}, or a function "
        f"as FILE.py:NAME: got {values.model}.")
  if values.inputs or values.data or values.arguments != "{}":
    raise command_line.UsageError(
        "`--inputs`, `--data` and `--arguments` must be given with a function "
        f"as FILE.py:NAME only: got --model={values.model}.")
  return examples.MODELS[values.model](rows, values.image_size, True)


def _arguments(text: str) -> Dict[str, Any]:
  try:
    return dict(**json.loads(text))
  except (TypeError, ValueError) as error:
    raise command_line.UsageError(
        "`--arguments` must be a JSON object of keyword arguments: got "
        f"{text} ({error}).") from error


def _batch(values: flags.FlagValues, rows: int) -> Optional[Tuple[Any, ...]]:
  """Returns the batch of a function of one's own."""
  if values.data and values.inputs:
    raise command_line.UsageError(
        "`--inputs` and `--data` must not both be given: got "
        f"{','.join(values.inputs)} and {values.data}.")
  if values.data:
    try:
      with np.load(values.data) as arrays:
        return tuple(arrays[name] for name in arrays.files)
    except (OSError, ValueError, AttributeError, TypeError) as error:
      raise command_line.UsageError(
          "`--data` must be a file of arrays, as np.savez writes it: got "
          f"{values.data} ({command_line.first_line(error)}).") from error
  with tf.Graph().as_default():
    try:
      tensors = synced_layers.placeholders(
          synced_layers.split_list(values.inputs))
    except ValueError as error:
      raise command_line.UsageError(command_line.first_line(error)) from error
    return tuple(_random(x, rows, k) for k, x in enumerate(tensors)) or None


def _random(x: tf.Tensor, rows: int, seed: int) -> np.ndarray:
  shape = x.shape.as_list()
  if shape and shape[0] is None:
    shape[0] = rows
  if not shape or None in shape or not (
      x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool):
    raise command_line.UsageError(
        "`--inputs` must be numbers, of a shape that is known but for the "
        f"rows: got {x.dtype.name} of shape {x.shape}.")
  rng = np.random.RandomState(seed)
  drawn = rng.normal(size=shape) if x.dtype.is_floating else (
      rng.randint(0, 2, shape))
  return drawn.astype(x.dtype.as_numpy_dtype)


def _rows(texts: Optional[Sequence[str]]) -> Optional[List[int]]:
  try:
    return None if texts is None else [int(text) for text in texts]
  except ValueError as error:
    raise command_line.UsageError(
        "`--rows` must be sizes of batches, such as 9,8,1: got "
        f"{','.join(texts)}.") from error


def run(values: flags.FlagValues) -> Any:
  """Returns the report that the flags ask for.

  Raises:
    UsageError: If the flags do not fit, or the model fails on one device.
  """
  if values.devices is not None and values.num_towers is not None:
    raise command_line.UsageError(
        "`--num_towers` and `--devices` must not both be given: got "
        f"{values.num_towers} and {','.join(values.devices)}.")
  devices = values.devices or values.num_towers or 2
  count = devices if isinstance(devices, int) else len(devices)
  checked = load_model(values, count)
  tolerances = None if values.tolerance is None else {
      tf.float32: values.tolerance}
  try:
    return towers.verification.verify(
        checked.model_fn, checked.inputs, devices, rows=_rows(values.rows),
        losses=values.losses, hold_random=values.hold_random,
        tolerances=tolerances, static_rows=values.static_rows,
        sync_batch_norm=values.sync_batch_norm, update_ops=values.update_ops,
        variables=values.variables)
  except (TypeError, ValueError) as error:
    # The library's own texts; others are mistakes in a model, whose author
    # wants the traceback.
    if not str(error).startswith("`"):
      raise
    raise command_line.UsageError(command_line.first_line(error)) from error


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()

  def action(values):
    report = run(values)
    print(report, end="")
    return 0 if report.equal else 1

  return command_line.main(argv, make_flags(), text=__doc__, action=action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
