"""Tests for the command line of tools/train.py."""

import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from tools import tasks
from tools import train
from tools import training

SCRIPT = pathlib.Path(train.__file__)


def environment():
  """Returns an environment in which the script sets its own log level."""
  return {name: value for name, value in os.environ.items()
          if name != "TF_CPP_MIN_LOG_LEVEL"}


def run_script(*arguments):
  return subprocess.run(
      [sys.executable, str(SCRIPT), *arguments], env=environment(),
      capture_output=True, text=True, timeout=120)


def own_lines(stderr):
  """Returns the lines on standard error that are no progress bar."""
  return [line for line in re.split(r"[\r\n]+", stderr)
          if line.strip() and not re.search("step/s|s/step", line)]


class MainTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    # Where a run without --logdir writes.
    self.enter_context(mock.patch.object(tempfile, "tempdir", self.logdir()))

  def logdir(self):
    return self.create_tempdir().full_path

  def main(self, *arguments):
    """Returns exit status, standard output and standard error."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout, \
        contextlib.redirect_stderr(io.StringIO()) as stderr:
      status = train.main(["train.py", *arguments])
    return status, stdout.getvalue(), stderr.getvalue()

  def test_defaults(self):
    self.assertEqual(train.parse(["train.py"]), training.Options())

  def test_flags_become_options(self):
    self.assertEqual(
        train.parse([
            "train.py", "--model=resnet110", "--dataset=images.npz",
            "--devices=/gpu:0,/cpu:3", "--batch_size=8", "--steps=9",
            "--learning_rate=0.5", "--optimizer=adam", "--weight_decay=0",
            "--nosync_batch_norm", "--seed=4", "--logdir=runs",
            "--log_every=2", "--evaluate_every=3", "--data_dir=files",
            "--image_size=48", "--noaugment", "--variables=balanced",
            "--remainder=keep", "--accumulate_steps=5", "--clip_norm=2",
            "--loss_scale=8", "--skip_nonfinite", "--schedule=linear",
            "--warm_up=0.5", "--label_smoothing=0.1", "--precision=bfloat16",
            "--early_stop=6", "--summarize_images=7", "--trace_steps=8,9"]),
        training.Options(
            model="resnet110", dataset="images.npz",
            devices=["/gpu:0", "/cpu:3"], batch_size=8, steps=9,
            learning_rate=0.5, optimizer="adam", weight_decay=0.0,
            sync_batch_norm=False, seed=4, logdir="runs", log_every=2,
            evaluate_every=3, data_dir="files", image_size=48, augment=False,
            variables="balanced", remainder="keep", accumulate_steps=5,
            clip_norm=2.0, loss_scale=8.0, skip_nonfinite=True,
            schedule="linear", warm_up=0.5, label_smoothing=0.1,
            precision="bfloat16", early_stop=6, summarize_images=7,
            trace_steps=(8, 9)))

  def test_every_model_is_a_choice(self):
    for model in (*tasks.CLASSIFIERS, *tasks.SEGMENTERS, "simclr", "dcgan"):
      options = train.parse(["train.py", f"--model={model}"])
      self.assertEqual(options.model, model)
    for depth in (20, 32, 44, 56, 110):
      self.assertIn(f"resnet{depth}", tasks.CLASSIFIERS)

  def test_loss_scale_may_be_dynamic(self):
    options = train.parse(["train.py", "--loss_scale=dynamic"])
    self.assertEqual(options.loss_scale, "dynamic")

  def test_help_names_every_option(self):
    status, stdout, stderr = self.main("--help")
    self.assertEqual((status, stderr), (0, ""))
    self.assertIn("python tools/train.py", stdout)
    self.assertIn("GLOBAL batch size", stdout)
    for name in training.Options.__dataclass_fields__:
      self.assertRegex(stdout, rf"--(\[no\])?{name}:")

  @parameterized.named_parameters(
      ("unknown_flag", ["--stepz=3"], "Unknown command line flag 'stepz'"),
      ("no_flag", ["convnet"], "there must be flags only: got convnet"),
      ("bad_number", ["--steps=many"], "flag --steps=many: invalid literal"),
      ("no_steps", ["--steps=0"], "flag --steps=0: 0 is not a positive"),
      ("no_towers", ["--num_towers=0"], "flag --num_towers=0: 0 is not a"),
      ("no_batch", ["--batch_size=0"], "flag --batch_size=0: 0 is not a"),
      ("rate", ["--learning_rate=-1"], "flag --learning_rate=-1: .*negative"),
      ("model", ["--model=vgg"], "flag --model=vgg: .*<convnet.resnet8.*>"),
      ("optimizer", ["--optimizer=lion"], "flag --optimizer=lion: .*<moment"),
      ("bool", ["--sync_batch_norm=x"], "flag --sync_batch_norm=x: .*boolean"),
      ("dataset", ["--dataset=cifar"], "`dataset` must be one of digits,"),
      ("no_data_dir", ["--dataset=cifar10"], "`data_dir` must say where .*"),
      ("data_dir", ["--data_dir=x"], "`data_dir` must not be given for digits"),
      ("missing_files", ["--dataset=cifar10", "--data_dir=/no/where"],
       ".*/no/where"),
      ("image_size", ["--image_size=40"], "`image_size` must not be given"),
      ("small_image_size", ["--dataset=shapes", "--image_size=31"],
       "`image_size` must be at least 32: got 31"),
      ("segmenter", ["--model=unet"],
       "`--model` must fit `--dataset`: digits is for classification, with one "
       "label per image, got unet. Choose one of convnet, resnet8"),
      ("classifier", ["--dataset=shapes"],
       "`--model` must fit `--dataset`: shapes is for segmentation, with one "
       "label per pixel, got convnet. Choose one of unet, fcn"),
      ("small_images", ["--model=alexnet"],
       "`--model=alexnet` must have square images of 32x32 or more: digits has "
       "8x8"),
      ("repeat", ["--remainder=repeat"],
       "`--remainder=repeat` must not be given for a model with batch norm"),
      ("remainder", ["--remainder=x"], "flag --remainder=x: .*<keep.drop.repe"),
      ("variables", ["--variables=x"], "flag --variables=x: .*<shared.balance"),
      ("no_norm", ["--clip_norm=0"], "`--clip_norm` must be .*above 0: got 0"),
      ("nan_norm", ["--clip_norm=nan"], "`--clip_norm` must be .*: got nan"),
      ("no_scale", ["--loss_scale=0"], "`--loss_scale` must be .*: got 0"),
      ("bad_scale", ["--loss_scale=big"], "`--loss_scale` must be .*: got big"),
      ("no_accumulation", ["--accumulate_steps=0"],
       "flag --accumulate_steps=0: 0 is not a positive"),
      ("schedule", ["--schedule=x"], "flag --schedule=x: .*<cosine.linear.st"),
      ("warm_up", ["--warm_up=2"], "flag --warm_up=2: 2.0 is not a number in"),
      ("smoothing", ["--label_smoothing=-1"], "flag --label_smoothing=-1: -1"),
      ("smooth_views", ["--label_smoothing=0.1", "--model=simclr"],
       "`--label_smoothing` must be 0 for simclr, .*: got 0.1"),
      ("smooth_fakes", ["--label_smoothing=0.1", "--model=dcgan"],
       "`--label_smoothing` must be 0 for dcgan, .*: got 0.1"),
      ("gan_precision", ["--precision=bfloat16", "--model=dcgan"],
       "`--precision` must be float32 for dcgan: got bfloat16"),
      ("gan_skips", ["--skip_nonfinite", "--model=dcgan"],
       "`--skip_nonfinite` and .* must not .* dcgan, .*: got True and None"),
      ("gan_masks", ["--model=dcgan", "--dataset=shapes"],
       "`--model` must fit `--dataset`: shapes is for segmentation"),
      ("precision", ["--precision=half"], "flag --precision=half: .*<float32"),
      ("early_stop", ["--early_stop=0"], "flag --early_stop=0: 0 is not a pos"),
      ("pictures", ["--summarize_images=-1"], "flag --summarize_images=-1: -1"),
      ("trace", ["--trace_steps=3,x"], "`--trace_steps` must .*: got 3,x"),
      ("trace_0", ["--trace_steps=0"], "`--trace_steps` must .*: got 0"),
      ("both", ["--num_towers=2", "--devices=/cpu:0"],
       "`--num_towers` and `--devices` must not both be given: got 2 and /cpu"),
      ("no_devices", ["--devices="], "`--devices` must list .*: got ''"),
      ("bad_device", ["--devices=/cpu:0,x"], "`--devices` must list .*got 'x'"),
      ("other_machine", ["--devices=/job:worker/cpu:0"],
       "`--devices` must list .* of this machine.*got '/job:worker/cpu:0'"),
      ("missing_gpu", ["--devices=/gpu:97"],
       "`--devices` or `--num_towers` does not fit: .*/gpu:97"),
      ("large_batch", ["--batch_size=1439"],
       "`--batch_size` must be at most .*expected 1 to 1438, got 1439"),
      ("logdir_is_a_file", [f"--logdir={__file__}"],
       r"`--logdir` must be a directory .*test_train.py \(File exists\)"),
      ("logdir_in_a_file", [f"--logdir={__file__}/runs"],
       r"`--logdir` must be a directory .*\(Not a directory\)"),
      ("logdir_not_writable", ["--logdir=/proc/1"],
       "`--logdir` must be a directory that can be written to: got /proc/1"),
  )
  def test_rejects_in_one_line(self, arguments, message):
    status, stdout, stderr = self.main(*arguments)
    self.assertEqual((status, stdout), (2, ""))
    self.assertRegex(stderr, rf"^train.py: {message}.*\n$")

  def test_bad_flag_of_the_script(self):
    result = run_script("--model=vgg")
    self.assertEqual((result.returncode, result.stdout), (2, ""))
    self.assertRegex(result.stderr, r"^train.py: flag --model=vgg: .*\n$")

  def test_script_trains_on_digits(self):
    """A sixth of the default number of steps."""
    logdir = self.logdir()
    result = run_script("--steps=100", f"--logdir={logdir}")
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertEmpty(own_lines(result.stderr))
    self.assertRegex(result.stderr, r"loss .*, learning rate .* images/s")
    last = result.stdout.splitlines()[-1]
    self.assertRegex(last, r"^test accuracy: [01]\.\d{4}$")
    self.assertGreater(float(last.split()[-1]), 0.95)
    self.assertIn("1,438 images to train on, 359 to test on", result.stdout)

  def test_script_saves_at_an_interrupt_and_continues(self):
    logdir = self.logdir()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--steps=1000000",
         f"--logdir={logdir}"], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    written = ""
    while "loss" not in written and process.poll() is None:
      written += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    self.assertEqual(process.returncode, 130, written + rest)
    lines = own_lines(written + rest)
    self.assertLen(lines, 1)
    self.assertRegex(lines[0], r"^Interrupted: saved step \d+\. To continue, "
                     rf"give the same flags and --logdir={logdir}$")
    step = int(re.search(r"\d+", lines[0]).group())

    status, stdout, stderr = self.main(f"--steps={step + 5}",
                                       f"--logdir={logdir}")
    self.assertEqual((status, own_lines(stderr)), (0, []))
    self.assertIn(f"continuing from step {step}\n", stdout)
    self.assertRegex(stdout, r"\ntest accuracy: [01]\.\d{4}\n$")
    self.assertEndsWith(tf.train.latest_checkpoint(logdir), f"-{step + 5}")


if __name__ == "__main__":
  tf.test.main()
