"""Tests for tools.training."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
from unittest import mock

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import run_cases
from models import convnet
from tools import datasets
from tools import logdirs
from tools import tasks
from tools import training
from tools import training_options


class TrainingTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(
        datasets, "load", lambda *_, **__: run_cases.small_dataset()))
    self.enter_context(run_cases.with_batch_norm())
    self.enter_context(contextlib.redirect_stderr(io.StringIO()))
    self.enter_context(contextlib.redirect_stdout(io.StringIO()))

  def logdir(self):
    return self.create_tempdir().full_path

  def run_steps(self, steps, **options):
    options = dict(dict(batch_size=8, learning_rate=0.05,
                        logdir=self.logdir()), **options)
    return training.run(training.Options(steps=steps, **options))

  def assert_same_checkpoint(self, first, second):
    first, second = run_cases.checkpoint(first), run_cases.checkpoint(second)
    self.assertCountEqual(first, second)
    for name in first:
      self.assertAllClose(first[name], second[name], rtol=1e-4, atol=1e-5,
                          msg=name)

  @parameterized.parameters("momentum", "adam", "sgd")
  def test_learns(self, optimizer):
    with mock.patch.dict(tasks.CLASSIFIERS, convnet=convnet.logits):
      result = self.run_steps(30, optimizer=optimizer, learning_rate=None)
    self.assertEqual(result.step, 30)
    self.assertGreaterEqual(result.score.value, 0.8)

  def test_writes_scalars_and_checkpoints(self):
    result = self.run_steps(10, log_every=2, evaluate_every=4)
    found = run_cases.scalars(result.logdir)
    self.assertCountEqual(found, ["loss", "learning_rate", "accuracy",
                                  "images_per_second"])
    for tag in ("loss", "learning_rate"):
      self.assertCountEqual(found[tag], [2, 4, 6, 8, 10], msg=tag)
    # Of two steps each, after five of warm-up.
    self.assertCountEqual(found["images_per_second"], [8, 10])
    self.assertCountEqual(found["accuracy"], [4, 8, 10])
    self.assertAlmostEqual(found["accuracy"][10], result.score.value, places=6)
    self.assertCountEqual(
        [path.name for path in pathlib.Path(result.logdir).glob("*.index")],
        [f"model.ckpt-{step}.index" for step in (4, 8, 10)])

  @parameterized.parameters("momentum", "adam")
  def test_continued_run_equals_an_uninterrupted_one(self, optimizer):
    whole = self.run_steps(12, optimizer=optimizer)
    logdir = self.logdir()
    with run_cases.stop_after(7):
      part = self.run_steps(12, optimizer=optimizer, logdir=logdir)
    self.assertEqual(part, training.Result(7, None, logdir))
    rest = self.run_steps(12, optimizer=optimizer, logdir=logdir)
    self.assertEqual(rest.step, 12)
    self.assertEqual(rest.score, whole.score)
    self.assert_same_checkpoint(logdir, whole.logdir)

  @parameterized.parameters(
      dict(accumulate_steps=3),
      dict(skip_nonfinite=True, accumulate_steps=2, remainder="keep"),
      dict(variables="replicated", num_towers=3))
  def test_continued_run_equals_an_uninterrupted_one_with(self, **options):
    data = run_cases.small_dataset(rows=27)
    if "skip_nonfinite" in options:
      data.train.columns[0][5] = np.nan  # Skipped batches, once an epoch.
      data = dataclasses.replace(data, scale=run_cases.small_dataset().scale)
    with mock.patch.object(datasets, "load", lambda *_, **__: data):
      whole = self.run_steps(8, **options)
      logdir = self.logdir()
      with run_cases.stop_after(5):
        self.run_steps(8, logdir=logdir, **options)
      rest = self.run_steps(8, logdir=logdir, **options)
    self.assertEqual(rest.score, whole.score)
    self.assert_same_checkpoint(logdir, whole.logdir)
    if "skip_nonfinite" in options:
      # Of 17 batches of 8, 8, 8 and 3 rows, one in four.
      self.assertBetween(run_cases.checkpoint(logdir)["skipped_steps"], 3, 6)

  def test_filled_up_batches_train_like_short_ones(self):
    """27 rows in batches of 8: the last has 3, or 8 of which 5 do not count."""
    data = run_cases.small_dataset(rows=27)
    results = {}
    with run_cases.without_batch_norm(), \
        mock.patch.object(datasets, "load", lambda *_, **__: data):
      for remainder in ("keep", "repeat"):
        for num_towers in (1, 3):
          results[remainder, num_towers] = self.run_steps(
              9, remainder=remainder, num_towers=num_towers)
      dropped = self.run_steps(9, remainder="drop")
    expected = results["keep", 1]
    for result in results.values():
      self.assertEqual(result.score, expected.score)
      self.assert_same_checkpoint(result.logdir, expected.logdir)
    self.assertNotAllClose(run_cases.checkpoint(dropped.logdir)["kernel"],
                           run_cases.checkpoint(expected.logdir)["kernel"])

  def test_accumulated_batches_make_the_step_of_a_large_one(self):
    with run_cases.without_batch_norm():
      large = self.run_steps(4, batch_size=8)
      small = self.run_steps(4, batch_size=2, accumulate_steps=4)
    self.assertEqual(small.step, 4)
    self.assert_same_checkpoint(small.logdir, large.logdir)
    losses = [run_cases.scalars(result.logdir)["loss"][4]
              for result in (small, large)]
    self.assertAllClose(*losses)

  @parameterized.parameters("balanced", "replicated")
  def test_place_of_variables_changes_nothing(self, variables):
    results = [self.run_steps(3, variables=choice)
               for choice in ("shared", variables)]
    self.assertEqual(results[0].score, results[1].score)
    self.assert_same_checkpoint(*(result.logdir for result in results))

  def test_clips_the_gradient(self):
    with run_cases.without_batch_norm():
      start, clipped = (
          self.run_steps(1, optimizer="sgd", learning_rate=rate, clip_norm=0.01)
          for rate in (0.0, 1.0))
    change = (run_cases.checkpoint(clipped.logdir)["kernel"] -
              run_cases.checkpoint(start.logdir)["kernel"])
    # Half a step of one is half way down the cosine.
    self.assertAllClose(np.linalg.norm(change), 0.01 * 0.5, rtol=1e-3)

  def test_loss_scale_changes_nothing(self):
    with run_cases.without_batch_norm():
      results = [self.run_steps(3, loss_scale=scale)
                 for scale in (None, 1024.0)]
    self.assert_same_checkpoint(*(result.logdir for result in results))

  def test_dynamic_loss_scale_trains(self):
    with run_cases.without_batch_norm():
      result = self.run_steps(3, loss_scale="dynamic")
    self.assertEqual(result.step, 3)
    self.assertEqual(run_cases.checkpoint(result.logdir)["skipped_steps"], 0)

  def test_stops_when_all_batches_are_skipped(self):
    data = run_cases.small_dataset()
    data.train.columns[0][:] = np.nan
    with run_cases.without_batch_norm(), \
        mock.patch.object(datasets, "load", lambda *_, **__: data):
      with self.assertRaisesRegex(
          training.UsageError, "the gradients of 50 batches or more in step 1 "
          "were not finite. Give a lower `--learning_rate`"):
        self.run_steps(2, skip_nonfinite=True)

  @parameterized.parameters((3, 1), (1, 4), (2, 3), (4, 2))
  def test_run_goes_on_with_another_number_of_towers(self, before, after):
    """The curve is that of one device that was never stopped."""
    common = dict(log_every=1, batch_size=9)
    whole = self.run_steps(12, num_towers=1, **common)
    logdir = self.logdir()
    with run_cases.stop_after(5):
      self.run_steps(12, num_towers=before, logdir=logdir, **common)
    result = self.run_steps(12, num_towers=after, logdir=logdir, **common)
    self.assertEqual(result.step, 12)
    losses = [run_cases.scalars(path)["loss"] for path in (
        logdir, whole.logdir)]
    self.assertCountEqual(losses[0], range(1, 13))
    self.assertAllClose(*losses, rtol=1e-5, atol=1e-5)
    self.assert_same_checkpoint(logdir, whole.logdir)

  def test_run_with_its_steps_behind_it_only_evaluates(self):
    first = self.run_steps(3)
    files = sorted(os.listdir(first.logdir))
    for steps in (3, 2):
      self.assertEqual(self.run_steps(steps, logdir=first.logdir), first)
      self.assertEqual(training_options.load_run(first.logdir).options.steps,
                       steps)
    self.assertEqual(sorted(os.listdir(first.logdir)), files)

  def test_more_steps_continue(self):
    first = self.run_steps(2)
    self.assertEqual(self.run_steps(4, logdir=first.logdir).step, 4)

  def test_interrupt_is_caught_once(self):
    outside = signal.getsignal(signal.SIGINT)
    with self.assertRaisesRegex(KeyboardInterrupt, "^$"):
      with training.catch_interrupt() as interrupted:
        self.assertFalse(interrupted())
        os.kill(os.getpid(), signal.SIGINT)
        self.assertTrue(interrupted())
        os.kill(os.getpid(), signal.SIGINT)
    self.assertEqual(signal.getsignal(signal.SIGINT), outside)

  def test_without_sync_batch_norm(self):
    self.assertEqual(self.run_steps(2, sync_batch_norm=False).step, 2)

  def test_towers_on_named_devices(self):
    result = self.run_steps(2, devices=["/cpu:1", "/cpu:0", "/cpu:2"])
    self.assertEqual(result.step, 2)

  @parameterized.named_parameters(
      ("model", dict(model="resnet8"), r"such as .*\(shape "),
      ("optimizer", dict(optimizer="sgd"), "such as .*/Momentum .* none here"),
  )
  def test_rejects_a_checkpoint_of(self, options, message):
    first = self.run_steps(1)
    with self.assertRaisesRegex(
        training.UsageError, "`--logdir` must hold a checkpoint of the same "
        f"model, dataset and optimizer: .*ckpt-1 differs in .*{message}"):
      self.run_steps(2, logdir=first.logdir, **options)

  def test_rejects_a_broken_checkpoint(self):
    first = self.run_steps(1)
    pathlib.Path(first.logdir, "model.ckpt-1.index").write_bytes(b"broken")
    with self.assertRaisesRegex(
        training.UsageError, "must hold a last checkpoint that can be read: "
        ".*ckpt-1 is damaged. No other is good; give another `--logdir`"):
      self.run_steps(2, logdir=first.logdir)

  def test_rejects_a_batch_larger_than_the_training_set(self):
    with self.assertRaisesRegex(training.UsageError,
                                "`--batch_size` .* expected 1 to 40, got 41"):
      self.run_steps(1, batch_size=41)

  def test_stops_when_the_loss_is_not_finite(self):
    logdir = self.logdir()
    with self.assertRaisesRegex(
        training.UsageError,
        r"the loss was NaN or infinite in step \d+\. Give"):
      self.run_steps(100, optimizer="sgd", learning_rate=1e30,
                     weight_decay=1.0, logdir=logdir)
    self.assertIsNone(tf.train.latest_checkpoint(logdir))

  def test_rejects_gpus_that_are_not_there(self):
    with self.assertRaisesRegex(
        training.UsageError, "`--devices` or `--num_towers` does not fit: "
        "`devices` must exist on this machine.*gpu:97"):
      self.run_steps(1, devices=["/gpu:97"])

  def test_keeps_the_best_and_stops_early(self):
    scores = iter([0.5, 0.9, 0.7, 0.9, 0.8, 1.0])
    real = training.Trainer.evaluate
    best = {}

    def evaluate(trainer):
      score, confusion = real(trainer)
      return score._replace(value=next(scores)), confusion

    with mock.patch.object(training.Trainer, "evaluate", evaluate):
      result = self.run_steps(20, evaluate_every=2, early_stop=3)
      self.assertEqual((result.step, result.score.value), (10, 0.8))
      self.assertEqual(result.best, (4, 0.9))
      best = run_cases.checkpoint(str(pathlib.Path(result.logdir, "best")))
      self.assertEqual(best["global_step"], 4)
      # As often as it is started: nothing is left to do but a test.
      again = self.run_steps(20, evaluate_every=2, early_stop=3,
                             logdir=result.logdir)
    self.assertEqual((again.step, again.best), (10, (4, 0.9)))

  def test_best_score_outlives_a_restart(self):
    scores = iter([0.9, 0.8, 0.95])
    real = training.Trainer.evaluate
    logdir = self.logdir()
    with mock.patch.object(
        training.Trainer, "evaluate", lambda trainer: (
            real(trainer)[0]._replace(value=next(scores)), np.eye(3))):
      for steps, best in ((2, (2, 0.9)), (4, (2, 0.9)), (6, (6, 0.95))):
        self.assertEqual(self.run_steps(steps, logdir=logdir).best, best)
    self.assertEqual(os.listdir(pathlib.Path(logdir, "best")).count(
        "model.ckpt-6.index"), 1)

  def test_progress_line(self):
    with contextlib.redirect_stderr(io.StringIO()) as stderr, \
        mock.patch.object(training, "TRACE_STEPS", 2):
      self.run_steps(12, log_every=5)
    self.assertRegex(stderr.getvalue(), r"loss [\d.]+, learning rate [\d.e-]+, "
                     r"\d+ images/s, waits \d+ %\]")

  def test_traces_steps(self):
    result = self.run_steps(3, trace_steps=[2], num_towers=3)
    trace = json.loads(pathlib.Path(
        result.logdir, "traces", "trace-2.json").read_text(encoding="utf-8"))
    names = [event["args"]["name"] for event in trace["traceEvents"]
             if event.get("name") == "process_name"]
    for tower in range(3):
      self.assertTrue(any(f"CPU:{tower}" in name for name in names), names)

  def test_pictures_of_test_images(self):
    result = self.run_steps(4, evaluate_every=2, summarize_images=2)
    found = {}
    for path in pathlib.Path(result.logdir).glob("events.*"):
      for event in tf.train.summary_iterator(str(path)):
        for value in event.summary.value:
          if value.HasField("image"):
            found.setdefault(event.step, []).append(value.image.height)
    self.assertEqual(found, {2: [4, 4], 4: [4, 4]})

  @parameterized.parameters("checkpoint", "scalar", "best")
  def test_full_disk(self, what):
    error = tf.errors.ResourceExhaustedError(None, None, "no space; No space")
    target = {"checkpoint": (tf.train.Saver, "save"),
              "scalar": (tf.summary.FileWriter, "add_summary"),
              "best": (logdirs, "write_best")}[what]
    with mock.patch.object(*target, side_effect=error):
      with self.assertRaisesRegex(
          training.UsageError, "`--logdir` must have room and stay writable: "
          "could not write to .*no space; No space.* give the same flags"):
        self.run_steps(2)


if __name__ == "__main__":
  tf.test.main()
