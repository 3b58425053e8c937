"""Tests for tools.training."""

import contextlib
import dataclasses
import io
import os
import pathlib
import signal
import tempfile
from unittest import mock

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from tools import datasets
from tools import tasks
from tools import training


def small_dataset(rows=40, test_rows=11):
  """Returns random images whose brightness tells their label."""
  rng = np.random.RandomState(0)

  def images_and_labels(count):
    labels = np.arange(count) % 3
    noise = rng.normal(size=[count, 4, 4, 1])
    return (noise + 2.0 * (labels[:, None, None, None] - 1)), labels

  return datasets.classification(
      "brightness", datasets.Split(*images_and_labels(rows)),
      datasets.Split(*images_and_labels(test_rows)), num_classes=3)


def linear(images, *, num_classes, training):
  """Returns logits `[B, num_classes]` of a network without batch norm."""
  del training  # It does the same in tests.
  features = tf.reshape(images, [-1, images.shape[1:].num_elements()])
  kernel = tf.get_variable("kernel", [features.shape[-1], num_classes],
                           initializer=tf.glorot_uniform_initializer())
  return tf.matmul(features, kernel)


def without_batch_norm():
  """Makes a linear network of the default one."""
  stack = contextlib.ExitStack()
  stack.enter_context(mock.patch.dict(tasks.CLASSIFIERS, convnet=linear))
  stack.enter_context(
      mock.patch.object(tasks, "WITHOUT_BATCH_NORM", ("convnet",)))
  return stack


def stop_after(steps):
  """Returns what takes the place of Ctrl-C in the given step."""
  remaining = [steps]

  def interrupted():
    remaining[0] -= 1
    return remaining[0] < 0

  return mock.patch.object(training, "catch_interrupt",
                           lambda: contextlib.nullcontext(interrupted))


def checkpoint(logdir):
  """Returns the names and values of the last checkpoint's variables."""
  reader = tf.train.load_checkpoint(logdir)
  return {name: reader.get_tensor(name)
          for name in reader.get_variable_to_shape_map()}


def scalars(logdir):
  """Returns the TensorBoard scalars as `{tag: {step: value}}`."""
  found = {}
  for path in sorted(pathlib.Path(logdir).glob("events.*")):
    for event in tf.train.summary_iterator(str(path)):
      for value in event.summary.value:
        found.setdefault(value.tag, {})[event.step] = value.simple_value
  return found


class TrainingTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(
        mock.patch.object(datasets, "load", lambda *_, **__: small_dataset()))
    self.enter_context(contextlib.redirect_stderr(io.StringIO()))
    self.enter_context(contextlib.redirect_stdout(io.StringIO()))

  def logdir(self):
    return self.create_tempdir().full_path

  def run_steps(self, steps, **options):
    options = dict(dict(batch_size=8, learning_rate=0.05,
                        logdir=self.logdir()), **options)
    return training.run(training.Options(steps=steps, **options))

  def assert_same_checkpoint(self, first, second):
    first, second = checkpoint(first), checkpoint(second)
    self.assertCountEqual(first, second)
    for name in first:
      self.assertAllClose(first[name], second[name], rtol=1e-4, atol=1e-5,
                          msg=name)

  @parameterized.parameters("momentum", "adam", "sgd")
  def test_learns(self, optimizer):
    result = self.run_steps(30, optimizer=optimizer, learning_rate=None)
    self.assertEqual(result.step, 30)
    self.assertGreaterEqual(result.score.value, 0.8)

  def test_writes_scalars_and_checkpoints(self):
    result = self.run_steps(6, log_every=2, evaluate_every=4)
    found = scalars(result.logdir)
    self.assertCountEqual(found, ["loss", "learning_rate", "accuracy",
                                  "images_per_second"])
    for tag in ("loss", "learning_rate", "images_per_second"):
      self.assertCountEqual(found[tag], [2, 4, 6], msg=tag)
    self.assertCountEqual(found["accuracy"], [4, 6])
    self.assertAlmostEqual(found["accuracy"][6], result.score.value, places=6)
    self.assertCountEqual(
        [path.name for path in pathlib.Path(result.logdir).glob("*.index")],
        ["model.ckpt-4.index", "model.ckpt-6.index"])

  def test_learning_rate_warms_up_and_falls_along_a_cosine(self):
    result = self.run_steps(40, log_every=1, learning_rate=0.2)
    rates = scalars(result.logdir)["learning_rate"]
    progress = (np.arange(40) + 0.5) / 40
    expected = (0.2 * np.minimum(progress / 0.05, 1.0) *
                (1.0 + np.cos(np.pi * progress)) / 2.0)
    self.assertAllClose([rates[step + 1] for step in range(40)], expected)

  def test_loss_is_cross_entropy_and_decay_of_the_kernels_once(self):
    data = small_dataset()
    images, labels = data.train.columns
    for num_towers in (1, 2):
      losses = []
      for weight_decay in (0.0, 0.5):
        with tf.Graph().as_default():
          graph = training.build(training.Options(
              num_towers=num_towers, batch_size=8,
              weight_decay=weight_decay), data)
          with tf.Session(config=graph.config) as sess:
            sess.run(tf.global_variables_initializer())
            for variable in tf.trainable_variables():
              value = np.full(variable.shape, 0.1)
              variable.load(value, sess)
            losses.append(sess.run(graph.loss, {
                graph.images: images[:5], graph.labels: labels[:5],
                graph.weights: np.ones([5])}))
            kernels = sum(variable.shape.num_elements()
                          for variable in tf.trainable_variables()
                          if variable.op.name.endswith("kernel"))
      self.assertAllClose(losses[0], np.log(3.0))
      self.assertAllClose(losses[1] - losses[0], 0.5 * kernels * 0.01 / 2.0)

  @parameterized.parameters(1, 3, 4, 11, 40)
  def test_evaluation_counts_each_image_once(self, batch_size):
    """11 images: with most batch sizes the last batch is short."""
    data = small_dataset()
    graph = training.build(
        training.Options(num_towers=2, batch_size=batch_size), data)
    images, labels = data.test.columns
    images = (images - data.scale.mean) / data.scale.deviation
    with self.session(config=graph.config) as sess:
      sess.run(tf.global_variables_initializer())
      right, count = sess.run(graph.counts, {graph.images: images,
                                             graph.labels: labels})
      self.assertEqual(count, 11)
      self.assertEqual(training.evaluate(sess, graph).value, right / 11)

  @parameterized.parameters("momentum", "adam")
  def test_continued_run_equals_an_uninterrupted_one(self, optimizer):
    whole = self.run_steps(12, optimizer=optimizer)
    logdir = self.logdir()
    with stop_after(7):
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
    data = small_dataset(rows=27)
    if "skip_nonfinite" in options:
      data.train.columns[0][5] = np.nan  # Skipped batches, once an epoch.
      data = dataclasses.replace(data, scale=small_dataset().scale)
    with mock.patch.object(datasets, "load", lambda *_, **__: data):
      whole = self.run_steps(8, **options)
      logdir = self.logdir()
      with stop_after(5):
        self.run_steps(8, logdir=logdir, **options)
      rest = self.run_steps(8, logdir=logdir, **options)
    self.assertEqual(rest.score, whole.score)
    self.assert_same_checkpoint(logdir, whole.logdir)
    if "skip_nonfinite" in options:
      # Of 17 batches of 8, 8, 8 and 3 rows, one in four.
      self.assertBetween(checkpoint(logdir)["skipped_steps"], 3, 6)

  def test_filled_up_batches_train_like_short_ones(self):
    """27 rows in batches of 8: the last has 3, or 8 of which 5 do not count."""
    data = small_dataset(rows=27)
    results = {}
    with without_batch_norm(), \
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
    self.assertNotAllClose(checkpoint(dropped.logdir)["kernel"],
                           checkpoint(expected.logdir)["kernel"])

  def test_images_of_weight_0_count_in_no_loss(self):
    data = small_dataset()
    images, labels = data.train.columns
    weights = np.array([1, 1, 1, 1, 0, 0, 0], np.float32)
    for num_towers in (1, 2, 3, 4):
      with without_batch_norm(), tf.Graph().as_default():
        graph = training.build(training.Options(
            num_towers=num_towers, batch_size=7, weight_decay=0.0), data)
        with tf.Session(config=graph.config) as sess:
          sess.run(tf.global_variables_initializer())
          kernel = sess.run(tf.trainable_variables()[0])
          loss = sess.run(graph.loss, {
              graph.images: images[:7], graph.labels: labels[:7],
              graph.weights: weights})
      logits = images[:4].reshape([4, -1]) @ kernel
      losses = np.log(np.exp(logits).sum(axis=1)) - logits[range(4), labels[:4]]
      self.assertAllClose(loss, losses.mean(), msg=num_towers)

  def test_accumulated_batches_make_the_step_of_a_large_one(self):
    with without_batch_norm():
      large = self.run_steps(4, batch_size=8)
      small = self.run_steps(4, batch_size=2, accumulate_steps=4)
    self.assertEqual(small.step, 4)
    self.assert_same_checkpoint(small.logdir, large.logdir)
    losses = [scalars(result.logdir)["loss"][4] for result in (small, large)]
    self.assertAllClose(*losses)

  @parameterized.parameters("balanced", "replicated")
  def test_place_of_variables_changes_nothing(self, variables):
    results = [self.run_steps(3, variables=choice)
               for choice in ("shared", variables)]
    self.assertEqual(results[0].score, results[1].score)
    self.assert_same_checkpoint(*(result.logdir for result in results))

  def test_clips_the_gradient(self):
    with without_batch_norm():
      start, clipped = (
          self.run_steps(1, optimizer="sgd", learning_rate=rate, clip_norm=0.01)
          for rate in (0.0, 1.0))
    change = (checkpoint(clipped.logdir)["kernel"] -
              checkpoint(start.logdir)["kernel"])
    # Half a step of one is half way down the cosine.
    self.assertAllClose(np.linalg.norm(change), 0.01 * 0.5, rtol=1e-3)

  def test_loss_scale_changes_nothing(self):
    with without_batch_norm():
      results = [self.run_steps(3, loss_scale=scale)
                 for scale in (None, 1024.0)]
    self.assert_same_checkpoint(*(result.logdir for result in results))

  def test_dynamic_loss_scale_trains(self):
    with without_batch_norm():
      result = self.run_steps(3, loss_scale="dynamic")
    self.assertEqual(result.step, 3)
    self.assertEqual(checkpoint(result.logdir)["skipped_steps"], 0)

  def test_stops_when_all_batches_are_skipped(self):
    data = small_dataset()
    data.train.columns[0][:] = np.nan
    with without_batch_norm(), \
        mock.patch.object(datasets, "load", lambda *_, **__: data):
      with self.assertRaisesRegex(
          training.UsageError, "the gradients of 50 batches or more in step 1 "
          "were not finite. Give a lower `--learning_rate`"):
        self.run_steps(2, skip_nonfinite=True)

  def test_number_of_towers_may_change_on_the_way(self):
    logdirs = self.logdir(), self.logdir()
    for num_towers, logdir in zip((1, 3), logdirs):
      with stop_after(0):
        self.run_steps(3, num_towers=2, logdir=logdir)
      result = self.run_steps(3, num_towers=num_towers, logdir=logdir)
      self.assertEqual(result.step, 3)
    self.assert_same_checkpoint(*logdirs)

  def test_run_with_its_steps_behind_it_only_evaluates(self):
    first = self.run_steps(3)
    files = sorted(os.listdir(first.logdir))
    for steps in (3, 2):
      self.assertEqual(self.run_steps(steps, logdir=first.logdir), first)
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

  def test_logdir_of_its_own_by_default(self):
    parent = self.logdir()
    with mock.patch.object(tempfile, "tempdir", parent):
      logdirs = [os.path.basename(training.prepare_logdir(training.Options()))
                 for _ in range(2)]
    self.assertCountEqual(os.listdir(parent), logdirs)
    self.assertNotEqual(*logdirs)

  def test_without_sync_batch_norm(self):
    self.assertEqual(self.run_steps(2, sync_batch_norm=False).step, 2)

  def test_towers_on_named_devices(self):
    result = self.run_steps(2, devices=["/cpu:1", "/cpu:0", "/cpu:2"])
    self.assertEqual(result.step, 2)

  @parameterized.named_parameters(
      ("model", dict(model="resnet8"), r"such as block_1/.*\(shape \["),
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
        training.UsageError, "must hold checkpoints that can be read: got "
        ".*ckpt-1 .*Give another `--logdir`"):
      self.run_steps(2, logdir=first.logdir)

  def test_rejects_a_batch_larger_than_the_training_set(self):
    with self.assertRaisesRegex(training.UsageError,
                                "`--batch_size` .* expected 1 to 40, got 41"):
      self.run_steps(1, batch_size=41)

  def test_stops_when_the_loss_is_not_finite(self):
    logdir = self.logdir()
    with self.assertRaisesRegex(
        training.UsageError, r"the loss became (nan|inf) in step \d+\. Give"):
      self.run_steps(100, optimizer="sgd", learning_rate=1e30,
                     weight_decay=1.0, logdir=logdir)
    self.assertIsNone(tf.train.latest_checkpoint(logdir))

  def test_rejects_gpus_that_are_not_there(self):
    with self.assertRaisesRegex(
        training.UsageError, "`--devices` or `--num_towers` does not fit: "
        "`devices` must exist on this machine.*gpu:97"):
      self.run_steps(1, devices=["/gpu:97"])


if __name__ == "__main__":
  tf.test.main()
