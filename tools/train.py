"""Trains an image classifier in several towers, and tests it.

  python tools/train.py
  python tools/train.py --model=resnet20 --num_towers=4 --logdir=/tmp/resnet20
  python tools/train.py --devices=/gpu:0,/gpu:1 --dataset=/data/mnist.npz

By default a small convolutional network learns the 1,797 handwritten digits
that come with scikit-learn, in two towers on the CPU, in less than a minute.
The last line on standard output is the accuracy on images that it did not
train on.

Scalars for TensorBoard and checkpoints go to --logdir. To continue a run, give
the same flags and --logdir again: also after Ctrl-C, which saves first. The
order of the images depends on --seed and the step alone, so that a continued
run does what an uninterrupted one would have done. The number of towers may
change on the way: it is not in the checkpoint.
"""

import signal
import sys

if __name__ == "__main__":
  # Ctrl-C ends the process without a traceback, also while TensorFlow loads;
  # during training, `training.catch_interrupt` takes over.
  signal.signal(signal.SIGINT, signal.SIG_DFL)

import dataclasses
import functools
import pathlib
from typing import Optional, Sequence

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tools import startup

startup.load_tensorflow()

from absl import flags
import tensorflow.compat.v1 as tf

from tools import training


def parse(argv: Sequence[str]) -> Optional[training.Options]:
  """Returns the options that a command line asks for; None if it is for help.

  Raises:
    training.UsageError: If a flag is unknown or has a bad value.
  """
  # Flags of its own, so that scripts can be imported side by side.
  values = flags.FlagValues()
  text = functools.partial(flags.DEFINE_string, flag_values=values)
  names = functools.partial(flags.DEFINE_list, flag_values=values)
  choice = functools.partial(flags.DEFINE_enum, flag_values=values)
  switch = functools.partial(flags.DEFINE_boolean, flag_values=values)
  number = functools.partial(
      flags.DEFINE_float, lower_bound=0.0, flag_values=values)
  count = functools.partial(
      flags.DEFINE_integer, lower_bound=1, flag_values=values)
  rates = ", ".join(f"{rate} for {name}"
                    for name, (_, rate) in training.OPTIMIZERS.items())

  defaults = training.Options()
  choice("model", defaults.model, list(training.MODELS),
         "The network to train.")
  text("dataset", defaults.dataset,
       "`digits`, `mnist` or `fashion_mnist` (where the system installs them), "
       "or the path of an .npz file with x_train, y_train, x_test and y_test.")
  count("num_towers", defaults.num_towers,
        "Number of towers, on the first GPUs or, without GPUs, on as many "
        "logical CPU devices; 2 unless --devices is given.")
  names("devices", defaults.devices,
        "One device per tower, such as /gpu:0,/gpu:1.")
  count("batch_size", defaults.batch_size,
        "GLOBAL batch size: images per step of ALL towers together.")
  count("steps", defaults.steps,
        "Number of steps in all, those before a checkpoint included.")
  number("learning_rate", defaults.learning_rate,
         "Highest learning rate: it grows for the first twentieth of the steps "
         f"and falls to 0 along a cosine. Default: {rates}.")
  choice("optimizer", defaults.optimizer, list(training.OPTIMIZERS),
         "momentum (of 0.9), adam or sgd.")
  number("weight_decay", defaults.weight_decay,
         "Factor of half the sum of squares of all kernels in the loss.")
  switch("sync_batch_norm", defaults.sync_batch_norm,
         "Batch norm over the whole batch, as on one device; otherwise over "
         "each tower's part.")
  count("seed", defaults.seed,
        "Seed of the initial weights and of the order of the images.",
        lower_bound=0, upper_bound=2**31 - 1)
  text("logdir", defaults.logdir,
       "Directory for checkpoints and TensorBoard scalars; a run continues "
       "from its last checkpoint. Default: a new temporary directory.")
  count("log_every", defaults.log_every,
        "Steps between scalars for TensorBoard.")
  count("evaluate_every", defaults.evaluate_every,
        "Steps between checkpoints, each tested on the test images.")
  switch("help", False, "Shows this text.", short_name="h")

  try:
    rest = values(argv)[1:]
  except flags.Error as error:
    raise training.UsageError(str(error).partition("\n")[0]) from error
  if values.help:
    print(__doc__ + values.get_help())
    return None
  if rest:
    raise training.UsageError(
        f"there must be flags only: got {rest[0]}. Write --flag=value.")
  options = training.Options(**{
      field.name: values[field.name].value
      for field in dataclasses.fields(training.Options)})
  if options.devices is not None:
    _check_devices(options)
  return options


def _check_devices(options: training.Options) -> None:
  if options.num_towers is not None:
    raise training.UsageError(
        "`--num_towers` and `--devices` must not both be given: got "
        f"{options.num_towers} and {','.join(options.devices)}. `--devices` "
        "makes one tower on each device.")
  for device in options.devices or [""]:
    try:
      spec = tf.DeviceSpec.from_string(device)
    except ValueError:
      spec = tf.DeviceSpec()
    if spec.device_type not in ("CPU", "GPU") or spec.job is not None:
      raise training.UsageError(
          "`--devices` must list CPU or GPU devices of this machine, such as "
          f"/gpu:0,/gpu:1: got {device!r}.")


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()
  try:
    options = parse(argv)
    if options is None:
      return 0
    result = training.run(options)
  except training.UsageError as error:
    print(f"{pathlib.Path(argv[0]).name}: {error}", file=sys.stderr)
    return 2
  if result.accuracy is None:
    print(f"Interrupted: saved step {result.step}. To continue, give the same "
          f"flags and --logdir={result.logdir}", file=sys.stderr)
    return 128 + signal.SIGINT
  print(f"test accuracy: {result.accuracy:.4f}")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
