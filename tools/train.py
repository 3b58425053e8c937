"""Trains an image network in several towers, and tests it.

  python tools/train.py
  python tools/train.py --model=resnet20 --num_towers=4 --dataset=cifar10 \\
    --data_dir=cifar-10-python.tar.gz --logdir=/tmp/resnet20
  python tools/train.py --devices=/gpu:0,/gpu:1 --dataset=/data/mnist.npz
  python tools/train.py --model=unet --dataset=shapes
  python tools/train.py --model=simclr
  python tools/train.py --model=dcgan

By default a small convolutional network learns the 1,797 handwritten digits
that come with scikit-learn, in two towers on the CPU, in about a minute. The
last line on standard output is the score on images that it did not train on:
the accuracy; or, for a data set with one class per pixel, the mean over the
classes of intersection over union (IoU), below a table of each class. simclr
learns without labels; its score is the accuracy of the nearest neighbours by
its features. dcgan learns to make images; its score says how much they are like
the test images (see tools/adversarial.py), and --logdir gets a picture of them.

The batch size is GLOBAL: it is that of all towers together, and the learning
rate is the one for that batch size on one device. Neither changes with the
number of towers, nor does the result.

Scalars for TensorBoard and checkpoints go to --logdir. To continue a run, give
the same flags and --logdir again: also after Ctrl-C, which saves first. The
images of a step depend on --seed and the step alone (and on how many batches
were skipped before), so that a continued run does what an uninterrupted one
would have done. The number of towers may change on the way: it is not in the
checkpoint.

On several machines, or as several processes on this one, see --job_name:

  python tools/launch.py --workers=2 --ps=1 -- --logdir=/tmp/digits
"""

import signal
import sys

if __name__ == "__main__":
  # Ctrl-C ends the process without a traceback, also while TensorFlow loads;
  # during training, `training.catch_interrupt` takes over.
  signal.signal(signal.SIGINT, signal.SIG_DFL)

import dataclasses
import functools
import math
import pathlib
from typing import NamedTuple, Optional, Sequence, Union

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tools import startup

startup.load_tensorflow()

from absl import flags
import tensorflow.compat.v1 as tf

from tools import cluster_run
from tools import command_line
from tools import datasets
from tools import schedules
from tools import tasks
from tools import training
from tools import training_options


def _flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = command_line.flag_values()
  text = functools.partial(flags.DEFINE_string, flag_values=values)
  names = functools.partial(flags.DEFINE_list, flag_values=values)
  choice = functools.partial(flags.DEFINE_enum, flag_values=values)
  switch = functools.partial(flags.DEFINE_boolean, flag_values=values)
  number = functools.partial(
      flags.DEFINE_float, lower_bound=0.0, flag_values=values)
  count = functools.partial(
      flags.DEFINE_integer, lower_bound=1, flag_values=values)
  rates = ", ".join(f"{rate} for {name}"
                    for name, (_, rate) in training_options.OPTIMIZERS.items())
  sizes = ", ".join(f"{task.batch_size} for {kind}"
                    for kind, task in tasks.TASKS.items())
  models = "; ".join(f"for {kind}: {', '.join(task.networks)}"
                     for kind, task in tasks.TASKS.items())

  defaults = training.Options()
  choice("model", defaults.model,
         [name for task in tasks.TASKS.values() for name in task.networks],
         f"The network to train, {models}. Those for segmentation give each "
         "pixel a class.")
  text("dataset", defaults.dataset,
       f"One of {', '.join(datasets.NAMES)}; or the path of an .npz file with "
       "x_train, y_train, x_test and y_test. shapes and voc are for "
       "segmentation, the others for classification.")
  text("data_dir", defaults.data_dir,
       "Folder or archive with the files of the data set. Not for digits, "
       "shapes and .npz files; mnist and fashion_mnist look where systems "
       "install them by default.")
  count("image_size", defaults.image_size,
        "Height and width of the images, for images, tfrecords, voc and "
        "shapes; each has a default.")
  switch("augment", defaults.augment,
         "Changes training images at random: shifts, mirrors, cuts or scales "
         "them, as suits the data set.")
  count("num_towers", defaults.num_towers,
        "Number of towers, on the first GPUs or, without GPUs, on as many "
        "logical CPU devices; 2 unless --devices is given.")
  names("devices", defaults.devices,
        "One device per tower, such as /gpu:0,/gpu:1.")
  choice("variables", defaults.variables, ["shared", "balanced", "replicated"],
         "Where variables live. shared: on one device. balanced: each on the "
         "tower's device that holds the fewest bytes. replicated: on the first "
         "tower's device, with a copy on each other's. Checkpoints are alike.")
  switch("sync_batch_norm", defaults.sync_batch_norm,
         "Batch norm over the whole batch, as on one device; otherwise over "
         "each tower's part.")
  count("batch_size", defaults.batch_size,
        "GLOBAL batch size: images in a batch of ALL towers together, dealt "
        "out among them; NOT images per tower. It need not divide. Default: "
        f"{sizes}.")
  choice("remainder", defaults.remainder, ["keep", "drop", "repeat"],
         "What becomes of the training images that do not fill the last batch "
         "of an epoch. keep: a short batch. drop: they are left out of that "
         "epoch. repeat: other images fill up the batch and count for nothing; "
         "not for models with batch norm, which would see them. All test "
         "images are tested in any case.")
  count("accumulate_steps", defaults.accumulate_steps,
        "How many batches make one step, as one batch of all their images "
        "would (but batch norm sees each batch for itself). The learning rate "
        "is then that of accumulate_steps * batch_size images.")
  count("steps", defaults.steps,
        "Number of steps in all, those before a checkpoint included.")
  number("learning_rate", defaults.learning_rate,
         "Highest learning rate, see --schedule. It is the rate for the GLOBAL "
         "batch size: do NOT multiply it by the number of towers. When you "
         "change the batch size, change it too, by about the same factor (not "
         f"for adam). Default: {rates}; alexnet needs about a tenth of that. "
         "dcgan: 0.0002 for adam.")
  choice("optimizer", defaults.optimizer, list(training_options.OPTIMIZERS),
         "momentum (of 0.9), adam or sgd. Default: momentum; for simclr and "
         "dcgan adam, which has a beta1 of 0.5 for the latter.")
  choice("schedule", defaults.schedule, list(schedules.SCHEDULES),
         "How the learning rate falls. cosine and linear: to 0. steps: to a "
         "tenth after half of the steps, and again after three quarters. "
         "constant: not at all.")
  number("warm_up", defaults.warm_up,
         "Part of the steps in which the learning rate grows from 0 to its "
         "place in the schedule; 0 for none.", upper_bound=1.0)
  number("weight_decay", defaults.weight_decay,
         "Factor of half the sum of squares of all kernels in the loss.")
  number("label_smoothing", defaults.label_smoothing,
         "Part of the probability that all classes share in the loss, in place "
         "of the right one alone. For classification and segmentation.",
         upper_bound=1.0)
  choice("precision", defaults.precision,
         list(training_options.PRECISIONS),
         "Type in which the network computes; variables, loss and statistics "
         "of batch norm are float32 in any case. float16 comes with "
         "--loss_scale=dynamic unless another is given. Fast on devices made "
         "for it; CPUs are slower.")
  number("clip_norm", defaults.clip_norm,
         "Largest global norm of the gradient of the whole batch; a larger one "
         "is scaled down to that. Default: no limit.")
  text("loss_scale", defaults.loss_scale,
       "What the loss is multiplied by and the gradients are divided by, to "
       "keep small ones: a number; or dynamic, which finds one and skips the "
       "batches where it was too large. Default: none.")
  switch("skip_nonfinite", defaults.skip_nonfinite,
         "Skips a batch with an infinity or NaN in its gradient, without a "
         "trace; otherwise training ends when the loss is no longer finite.")
  count("seed", defaults.seed,
        "Seed of the initial weights and of the order of the images.",
        lower_bound=0, upper_bound=2**31 - 1)
  text("logdir", defaults.logdir,
       "Directory for checkpoints and TensorBoard scalars; a run continues "
       "from its last checkpoint. Default: a new temporary directory.")
  count("log_every", defaults.log_every,
        "Steps between scalars for TensorBoard.")
  count("evaluate_every", defaults.evaluate_every,
        "Steps between checkpoints, each tested on the test images. The one "
        "with the best score is kept in the folder best of --logdir.")
  count("early_stop", defaults.early_stop,
        "Ends training after so many tests without a better score. There are "
        "no images but those for tests to choose by, so that the best score is "
        "a little too good. Default: never.")
  count("summarize_images", defaults.summarize_images,
        "Number of test images to show in TensorBoard at each test; for "
        "segmentation with their masks: what is right, and what is found; of "
        "dcgan, made images. Default: 16 for dcgan, else 0.",
        lower_bound=0)
  names("trace_steps", defaults.trace_steps,
        "Batches of which to write Chrome traces into the folder traces of "
        "--logdir, counted from 1, such as 10,20: what ran when in each tower. "
        "Open them in chrome://tracing.")
  cluster_run.define_flags(values)
  return values


class Command(NamedTuple):
  """What a command line asks for."""
  options: training.Options
  cluster: cluster_run.ClusterOptions


def parse(argv: Sequence[str]) -> Optional[training.Options]:
  """Returns the options that a command line asks for; None if it is for help.

  Raises:
    training.UsageError: See `parse_command`.
  """
  command = parse_command(argv)
  return command and command.options


def parse_command(argv: Sequence[str]) -> Optional[Command]:
  """Returns what a command line asks for; None if it is for help.

  Raises:
    training.UsageError: If a flag is unknown or has a bad value.
  """
  values = _flags()
  if not command_line.read(values, argv, __doc__):
    return None
  options = training.Options(**{
      field.name: values[field.name].value
      for field in dataclasses.fields(training.Options)})
  if options.clip_norm is not None and not 0 < options.clip_norm < math.inf:
    raise training.UsageError(
        "`--clip_norm` must be a number above 0: got "
        f"{options.clip_norm}. Leave it out for no limit.")
  options = dataclasses.replace(
      options, loss_scale=_loss_scale(options.loss_scale),
      trace_steps=_trace_steps(options.trace_steps))
  training_options.check_devices(options)
  return Command(options, cluster_run.options_of(values))


def _loss_scale(text: Optional[str]) -> Union[None, float, str]:
  if text in (None, "dynamic"):
    return text
  try:
    scale = float(text)
  except ValueError:
    scale = 0.0
  if not 0 < scale < math.inf:
    raise training.UsageError(
        f"`--loss_scale` must be a number above 0, or dynamic: got {text}.")
  return scale


def _trace_steps(texts: Sequence[str]) -> Sequence[int]:
  try:
    steps = tuple(int(text) for text in texts)
  except ValueError:
    steps = (0,)
  if min(steps, default=1) < 1:
    raise training.UsageError(
        "`--trace_steps` must list numbers of batches from 1 on, such as "
        f"10,20: got {','.join(texts)}.")
  return steps


def train(options: training.Options,
          cluster: Optional[cluster_run.ClusterOptions] = None) -> int:
  """Does what the options say; returns the exit status of the process."""
  result = training.run(options, cluster)
  if result is None:
    return 0  # The chief of the cluster says what training came to.
  if result.score is None:
    print(f"Interrupted: saved step {result.step}. To continue, give the same "
          f"flags and --logdir={result.logdir}", file=sys.stderr)
    return 128 + signal.SIGINT
  if result.score.table:
    print(result.score.table)
  for path in result.pictures:
    print(f"drawn: {path}")
  if result.step < options.steps:
    print(f"stopped early, at step {result.step}")
  if result.best is not None:
    print(f"best test {result.score.name}: {result.best.value:.4f}, at step "
          f"{result.best.step}")
  print(f"test {result.score.name}: {result.score.value:.4f}")
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()

  def action():
    command = parse_command(argv)
    return 0 if command is None else train(*command)

  return command_line.ended(argv, action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
