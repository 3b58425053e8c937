"""Tests for the tasks without labels: contrastive and adversarial training."""

import contextlib
import io
import pathlib
from unittest import mock

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import run_cases
from tools import adversarial
from tools import contrastive
from tools import datasets
from tools import evaluate
from tools import export
from tools import training
from tools import training_graph
from tools import views

MODELS = ("simclr", "dcgan")


def images_of(data, count, seed=3):
  """Returns the first batch of views."""
  batch = tf.data.make_one_shot_iterator(
      views.of(data).batches("train", count, seed=seed)).get_next()
  with tf.Session() as sess:
    return sess.run(batch[0])


class UnlabelledTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    self.data = datasets.load("digits")
    self.enter_context(mock.patch.object(
        datasets, "load", lambda *_, **__: self.data))
    self.enter_context(mock.patch.dict(
        contrastive.ENCODERS, simclr=contrastive.encoder(depth=8, size=16)))
    self.enter_context(mock.patch.dict(
        adversarial.GENERATORS, dcgan=adversarial.networks(depth=4)))
    self.out = self.enter_context(contextlib.redirect_stdout(io.StringIO()))
    self.enter_context(contextlib.redirect_stderr(io.StringIO()))

  def run_steps(self, model, steps, **options):
    options = dict(dict(batch_size=18, logdir=self.create_tempdir().full_path,
                        model=model, log_every=1), **options)
    return training.run(training.Options(steps=steps, **options))

  @parameterized.parameters(*MODELS)
  def test_same_curve_for_every_number_of_towers(self, model):
    curves = []
    for num_towers in (1, 2, 3):
      with tf.Graph().as_default():
        graph = training_graph.build(training.Options(
            model=model, num_towers=num_towers, batch_size=17), self.data)
        losses = {"loss": graph.loss, **graph.part_losses}
        with tf.Session(config=graph.config) as sess:
          sess.run(tf.global_variables_initializer())
          sess.run(graph.start, {graph.first_batch: 0})
          runs = [sess.run([losses, graph.step_after])[0] for _ in range(4)]
      curves.append([[run[name] for name in sorted(run)] for run in runs])
    self.assertGreater(np.ptp(np.array(curves[0])[:, 0]), 1e-3)
    for curve in curves[1:]:
      self.assertAllClose(curve, curves[0], rtol=2e-5, atol=2e-5)

  @parameterized.parameters(*MODELS)
  def test_continued_run_equals_an_uninterrupted_one(self, model):
    whole = self.run_steps(model, 5)
    logdir = self.create_tempdir().full_path
    with run_cases.stop_after(3):
      self.run_steps(model, 5, logdir=logdir)
    rest = self.run_steps(model, 5, logdir=logdir)
    self.assertAlmostEqual(rest.score.value, whole.score.value, places=5)
    first, second = map(run_cases.checkpoint, (logdir, whole.logdir))
    self.assertCountEqual(first, second)
    for name in first:
      self.assertAllClose(first[name], second[name], rtol=1e-4, atol=1e-5,
                          msg=name)

  def test_score_of_made_images_gets_better(self):
    result = self.run_steps("dcgan", 100, batch_size=64, num_towers=2,
                            learning_rate=0.001, evaluate_every=100)
    untrained = self.run_steps("dcgan", 1, batch_size=64, learning_rate=0.0)
    self.assertGreater(result.score.value, untrained.score.value + 0.02)

  def test_contrastive_loss_falls(self):
    """Its score is no measure: features of an untrained network are good."""
    options = training.Options(model="simclr", steps=60, batch_size=64,
                               num_towers=2)
    with tf.Graph().as_default():
      graph = training_graph.build(options, self.data)
      with tf.Session(config=graph.config) as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(graph.start, {graph.first_batch: 0})
        losses = [sess.run([graph.loss, graph.step_after])[0]
                  for _ in range(60)]
    self.assertLess(np.mean(losses[-10:]), np.mean(losses[:10]) - 0.3)

  @parameterized.parameters(*MODELS)
  def test_evaluate_and_export(self, model):
    result = self.run_steps(model, 2, num_towers=3)
    for num_towers in (1, 2):
      self.out.seek(0)
      self.out.truncate()
      self.assertEqual(evaluate.main(
          ["evaluate.py", f"--logdir={result.logdir}",
           f"--num_towers={num_towers}"]), 0)
      self.assertEndsWith(
          self.out.getvalue(),
          f"test {result.score.name}: {result.score.value:.4f}\n")
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
      self.assertEqual(export.main(
          ["export.py", f"--logdir={result.logdir}",
           f"--export_dir={result.logdir}/served"]), 2)
    self.assertRegex(stderr.getvalue(), r"^export.py: `--logdir` must be that "
                     rf"of a model that gives classes: got {model}\..*\n$")

  def test_made_images_are_drawn(self):
    result = self.run_steps("dcgan", 2)
    path = pathlib.Path(result.logdir, "made.png")
    self.assertIn(str(path), result.pictures)
    with tf.Session() as sess:
      picture = sess.run(tf.io.decode_png(path.read_bytes()))
    self.assertEqual(picture.shape, (8 * 9 * 4, 8 * 9 * 4, 3))
    tags = [value.tag for path in pathlib.Path(result.logdir).glob("events.*")
            for event in tf.train.summary_iterator(str(path))
            for value in event.summary.value if value.HasField("image")]
    self.assertLen(tags, 16)
    self.assertStartsWith(tags[0], "made_images/")


class ViewsTest(tf.test.TestCase):

  def test_views_differ_and_depend_on_the_seed_alone(self):
    data = datasets.load("digits")
    images = images_of(data, 12)
    self.assertEqual(images.shape, (12, 2, 8, 8, 1))
    self.assertAllEqual(images, images_of(data, 12))
    self.assertAllEqual(images[:5], images_of(data, 5))
    self.assertNotAllClose(images, images_of(data, 12, seed=4))
    for first, second in images:
      self.assertGreater(np.abs(first - second).max(), 0.1)

  def test_without_augmentation_both_are_the_image(self):
    data = datasets.load("digits")
    batches = [tf.data.make_one_shot_iterator(each.batches(
        "train", 4, augment=False)).get_next()[0]
               for each in (data, views.of(data))]
    with tf.Session() as sess:
      images, pairs = sess.run(batches)
    self.assertAllEqual(pairs, np.stack([images, images], axis=1))


class ScoresTest(tf.test.TestCase):

  def test_nearest_labels(self):
    references = np.array([[1, 0], [1, 0.1], [1, 0.2], [0, 1], [-1, 0]])
    labels = np.array([2, 1, 1, 0, 0])
    features = np.array([[5, 0], [0, 0.1], [-3, 0.1]])
    self.assertAllEqual(contrastive.nearest_labels(
        features, references, labels, count=3), [1, 1, 0])
    # Two of equally many: that of the nearest.
    self.assertAllEqual(contrastive.nearest_labels(
        features, references, labels, count=2), [2, 0, 0])
    self.assertAllEqual(contrastive.nearest_labels(
        features, references, labels, count=1), [2, 0, 0])

  def test_frechet_distance(self):
    rng = np.random.RandomState(0)
    images = rng.normal(size=[50, 2, 2, 1])
    first = adversarial.moments(images)
    self.assertAllClose(first.covariance,
                        np.cov(images.reshape(50, 4).T, ddof=0))
    self.assertAllClose(adversarial.frechet_distance(first, first), 0.0,
                        atol=1e-9)
    # Of x and 3 x + 1: the root of the product is three times the covariance.
    second = adversarial.moments(3.0 * images + 1.0)
    expected = np.sum((2.0 * first.mean + 1.0)**2) + (
        4.0 * np.trace(first.covariance))
    self.assertAllClose(adversarial.frechet_distance(first, second), expected)

  def test_cells_are_means(self):
    images = np.random.RandomState(0).normal(size=[5, 16, 16, 2])
    cells = images.reshape([5, 8, 2, 8, 2, 2]).mean(axis=(2, 4))
    self.assertAllClose(adversarial.moments(images).total,
                        cells.sum(axis=0).ravel())


if __name__ == "__main__":
  tf.test.main()
