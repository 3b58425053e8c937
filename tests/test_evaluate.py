"""Tests for tools/evaluate.py."""

import contextlib
import io
import os
import pathlib
from unittest import mock

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import run_cases
from tools import datasets
from tools import evaluate
from tools import training


class EvaluateTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(
        datasets, "load", lambda *_, **__: run_cases.small_dataset()))
    self.enter_context(run_cases.with_batch_norm())

  def trained(self, **options):
    logdir = self.create_tempdir().full_path
    with contextlib.redirect_stderr(io.StringIO()), \
        contextlib.redirect_stdout(io.StringIO()):
      return training.run(training.Options(
          logdir=logdir, batch_size=8, **options))

  def main(self, *arguments):
    """Returns exit status, standard output and standard error."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout, \
        contextlib.redirect_stderr(io.StringIO()) as stderr:
      status = evaluate.main(["evaluate.py", *arguments])
    return status, stdout.getvalue(), stderr.getvalue()

  @parameterized.parameters("shared", "replicated")
  def test_same_numbers_for_every_number_of_towers(self, variables):
    """11 test images; trained in 3 towers, with an optimizer's slots."""
    result = self.trained(steps=4, num_towers=3, optimizer="adam",
                          variables=variables)
    texts = set()
    for flags in (["--num_towers=1"], ["--num_towers=2"], ["--num_towers=4"],
                  ["--devices=/cpu:1,/cpu:0,/cpu:2", "--batch_size=5"], []):
      status, stdout, stderr = self.main(f"--logdir={result.logdir}", *flags)
      self.assertEqual((status, stderr), (0, ""))
      texts.add(stdout)
    text, = texts
    self.assertEqual(
        text, f"checkpoint: {result.logdir}/model.ckpt-4\n"
        f"{result.score.table}\ntest accuracy: {result.score.value:.4f}\n")

  def test_best_and_other_checkpoints(self):
    result = self.trained(steps=6, evaluate_every=2)
    with open(os.path.join(result.logdir, "best", "checkpoint")) as file:
      best = file.read().split('"')[1]
    for flags, path in (
        (["--best"], f"{result.logdir}/best/{best}"),
        ([f"--checkpoint={result.logdir}/model.ckpt-2"],
         f"{result.logdir}/model.ckpt-2")):
      status, stdout, _ = self.main(f"--logdir={result.logdir}", *flags)
      self.assertEqual(status, 0)
      self.assertStartsWith(stdout, f"checkpoint: {path}\n")
      if "--best" in flags:
        self.assertIn(f"accuracy: {result.best.value:.4f}\n", stdout)

  def test_help(self):
    status, stdout, stderr = self.main("--help")
    self.assertEqual((status, stderr), (0, ""))
    for name in ("logdir", "num_towers", "best", "checkpoint", "data_dir"):
      self.assertRegex(stdout, rf"--(\[no\])?{name}:")

  @parameterized.named_parameters(
      ("flag", ["--logdirs=x"], "Unknown command line flag 'logdirs'"),
      ("nothing", [], "`--logdir` must be given"),
      ("text", ["--logdir={}", "x"], "there must be flags only: got x"),
      ("no_run", ["--logdir=/"], "`--logdir` must be the directory of a run "),
      ("missing", ["--logdir=/no/where"], "`--logdir` must be the directory "),
      ("both", ["--logdir={}", "--best", "--checkpoint=x"],
       "`--best` and `--checkpoint` must not both be given"),
      ("no_checkpoint", ["--logdir={}", "--checkpoint=/no/ckpt-1"],
       "`--checkpoint` must be the prefix .*got /no/ckpt-1"),
      ("towers", ["--logdir={}", "--num_towers=2", "--devices=/cpu:0"],
       "`--num_towers` and `--devices` must not both be given"),
      ("device", ["--logdir={}", "--devices=/gpu:93"],
       "`--devices` or `--num_towers` does not fit: .*gpu:93"))
  def test_rejects_in_one_line(self, arguments, message):
    if any("{}" in argument for argument in arguments):
      logdir = self.trained(steps=1).logdir
      arguments = [argument.format(logdir) for argument in arguments]
    status, stdout, stderr = self.main(*arguments)
    self.assertEqual((status, stdout), (2, ""))
    self.assertRegex(stderr, rf"^evaluate.py: {message}.*\n$")

  @parameterized.parameters("index", "data", "missing")
  def test_rejects_checkpoint(self, damage):
    logdir = self.trained(steps=1).logdir
    if damage == "missing":
      pathlib.Path(logdir, "model.ckpt-1.index").unlink()
    else:
      path, = pathlib.Path(logdir).glob(f"model.ckpt-1.{damage}*")
      path.write_bytes(path.read_bytes()[:30])
    status, stdout, stderr = self.main(f"--logdir={logdir}")
    self.assertEqual((status, stdout), (2, ""))
    self.assertRegex(stderr, r"^evaluate.py: `--logdir` must hold .*\n$")

  def test_rejects_checkpoint_of_another_model(self):
    logdir = self.trained(steps=1).logdir
    path = str(pathlib.Path(self.create_tempdir().full_path, "other"))
    with tf.Graph().as_default():
      tf.get_variable("kernel", [2, 2])
      with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        tf.train.Saver().save(sess, path)
    status, _, stderr = self.main(f"--logdir={logdir}", f"--checkpoint={path}")
    self.assertEqual(status, 2)
    self.assertRegex(
        stderr, "must hold a checkpoint of the same model, .*other differs in")


if __name__ == "__main__":
  tf.test.main()
