"""Tests for tools.training_graph."""

import contextlib
import dataclasses
import io
from unittest import mock

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import run_cases
from tools import datasets
from tools import tasks
from tools import training_graph
from tools import training_options
from tools.datasets import shapes


def build(data=None, **options):
  """Builds with a batch whose size is not static, so that it can be fed."""
  return training_graph.build(
      training_options.Options(**dict(dict(remainder="keep"), **options)),
      run_cases.small_dataset() if data is None else data)


class TrainingGraphTest(parameterized.TestCase, tf.test.TestCase):

  def test_loss_is_cross_entropy_and_decay_of_the_kernels_once(self):
    images, labels = run_cases.small_dataset().train.columns
    for num_towers in (1, 2):
      losses = []
      for weight_decay in (0.0, 0.5):
        with tf.Graph().as_default():
          graph = build(num_towers=num_towers, weight_decay=weight_decay)
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

  @parameterized.parameters((0.0, 1), (0.0, 3), (0.3, 1), (0.3, 2), (0.3, 4))
  def test_images_of_weight_0_count_in_no_loss(self, smoothing, num_towers):
    images, labels = run_cases.small_dataset().train.columns
    weights = np.array([1, 1, 1, 1, 0, 0, 0], np.float32)
    with run_cases.without_batch_norm():
      graph = build(num_towers=num_towers, weight_decay=0.0,
                    label_smoothing=smoothing)
      with self.session(config=graph.config) as sess:
        sess.run(tf.global_variables_initializer())
        kernel = sess.run(tf.trainable_variables()[0])
        loss = sess.run(graph.loss, {
            graph.images: images[:7], graph.labels: labels[:7],
            graph.weights: weights})
    logits = images[:4].reshape([4, -1]) @ kernel
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    targets = np.eye(3)[labels[:4]] * (1.0 - smoothing) + smoothing / 3.0
    self.assertAllClose(loss, -(targets * logs).sum(axis=1).mean())

  @parameterized.parameters(1, 3, 4, 11, 40)
  def test_evaluation_counts_each_image_once(self, batch_size):
    """11 images: with most batch sizes the last batch is short."""
    data = run_cases.small_dataset()
    graph = build(num_towers=2, batch_size=batch_size)
    images, labels = data.test.columns
    images = (images - data.scale.mean) / data.scale.deviation
    evaluation = graph.evaluation
    with self.session(config=graph.config) as sess:
      sess.run(tf.global_variables_initializer())
      predictions = sess.run(evaluation.predictions,
                             {evaluation.images: images})
      confusion = training_graph.evaluate(sess, evaluation, data)
    expected = np.zeros([3, 3], np.int64)
    np.add.at(expected, (labels, predictions), 1)
    self.assertAllEqual(confusion, expected)
    self.assertEqual(confusion.sum(), 11)

  @parameterized.parameters(("float16", 5e-3), ("bfloat16", 4e-2))
  def test_precision(self, precision, tolerance):
    """16 bits within the network, none in variables, loss or evaluation."""
    losses = {}
    for choice in ("float32", precision):
      with tf.Graph().as_default():
        graph = build(precision=choice, num_towers=2, batch_size=8)
        self.assertEqual(
            {variable.dtype.base_dtype for variable in tf.global_variables()
             if variable.dtype.is_floating}, {tf.float32})
        self.assertEqual(graph.loss.dtype, tf.float32)
        kinds = {op.outputs[0].dtype for op in tf.get_default_graph()
                 .get_operations() if op.type in ("Conv2D", "MatMul")}
        self.assertEqual(kinds, {tf.as_dtype(choice)})
        with tf.Session(config=graph.config) as sess:
          sess.run(tf.global_variables_initializer())
          sess.run(tf.local_variables_initializer())
          sess.run(graph.start, {graph.first_batch: 0})
          losses[choice] = []
          for _ in range(3):
            _, loss = sess.run([graph.step_after, graph.loss])
            losses[choice].append(loss)
    self.assertAllClose(losses[precision], losses["float32"], atol=tolerance,
                        rtol=tolerance)
    self.assertNotAllClose(losses[precision], losses["float32"], rtol=1e-7,
                           atol=1e-7)

  def test_float16_comes_with_a_loss_scale(self):
    data = run_cases.small_dataset()
    for precision, given, expected in (
        ("float16", None, "dynamic"), ("float16", 8.0, 8.0),
        ("bfloat16", None, None), ("float32", None, None)):
      completed = training_options.completed(training_options.Options(
          precision=precision, loss_scale=given, batch_size=8), data)
      self.assertEqual(completed.loss_scale, expected, precision)

  def test_the_same_curve_on_1_2_and_4_towers(self):
    """Digits, batch norm and augmentation: 50 steps in float32.

    At higher rates training magnifies the rounding of the sums, on whatever
    devices; that the curves are the same is shown in float64 elsewhere.
    """
    data = datasets.load("digits")
    curves = []
    for num_towers in (1, 2, 4):
      with tf.Graph().as_default():
        graph = training_graph.build(training_options.Options(
            num_towers=num_towers, optimizer="adam", learning_rate=3e-4), data)
        with tf.Session(config=graph.config) as sess:
          sess.run(tf.global_variables_initializer())
          sess.run(graph.start, {graph.first_batch: 0})
          curves.append([sess.run([graph.loss, graph.step_after])[0]
                         for _ in range(50)])
    self.assertLess(curves[0][-1], 0.7 * curves[0][0])
    for curve in curves[1:]:
      self.assertAllClose(curve, curves[0], rtol=1e-4, atol=1e-4)


class SegmentationTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(
        mock.patch.dict(tasks.SEGMENTERS, per_pixel=run_cases.per_pixel))
    self.enter_context(contextlib.redirect_stderr(io.StringIO()))
    self.data = shapes.load(image_size=32, num_train=9, num_test=7)

  @parameterized.parameters(
      ("per_pixel", 1, 3), ("per_pixel", 3, 3), ("per_pixel", 4, 4),
      ("fcn", 2, 3))
  def test_evaluation_counts_each_pixel_once(self, model, num_towers,
                                               batch_size):
    """Seven images: the last batch has one, fewer than there are towers."""
    data = self.data
    evaluation = training_graph.build_evaluation(
        training_options.Options(
            model=model, num_towers=num_towers, batch_size=batch_size), data)
    images, labels = data.test.columns
    images = (images - data.scale.mean) / data.scale.deviation
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      predictions = tf.argmax(tasks.SEGMENTERS[model](
          tf.constant(images, tf.float32), num_classes=6, training=False), -1)
    with self.session(config=evaluation.config) as sess:
      sess.run(tf.global_variables_initializer())
      confusion = training_graph.evaluate(sess, evaluation, data)
      found = sess.run(predictions)
    expected = np.zeros([6, 6], np.int64)
    valid = labels != 255
    np.add.at(expected, (labels[valid].astype(int), found[valid]), 1)
    self.assertAllEqual(confusion, expected)

  @parameterized.parameters(0.0, 0.3)
  def test_loss_is_the_mean_over_pixels_of_images_that_count(self, smoothing):
    """Towers have unequal numbers of pixels that are not void."""
    data = dataclasses.replace(self.data, void_label=255)
    images = np.random.RandomState(0).normal(size=[5, 32, 32, 3])
    labels = data.train.columns[1][:5].astype(np.int64)
    labels[0, :20] = 255
    weights = np.array([1, 1, 1, 1, 0], np.float32)
    for num_towers in (1, 2, 3, 4):
      with tf.Graph().as_default():
        graph = build(data, model="per_pixel", num_towers=num_towers,
                      weight_decay=0.0, label_smoothing=smoothing)
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
          logits = run_cases.per_pixel(
              tf.constant(images, tf.float32), num_classes=6, training=True)
        with tf.Session(config=graph.config) as sess:
          sess.run(tf.global_variables_initializer())
          loss, logits = sess.run([graph.loss, logits], {
              graph.images: images, graph.labels: labels,
              graph.weights: weights})
      valid = (labels != 255) & (weights > 0)[:, None, None]
      chosen = logits[valid].astype(np.float64)
      logs = chosen - np.log(np.exp(chosen).sum(axis=-1, keepdims=True))
      targets = np.eye(6)[labels[valid]] * (1.0 - smoothing) + smoothing / 6.0
      each = -(targets * logs).sum(axis=-1)
      self.assertAllClose(loss, each.mean(), rtol=1e-5, msg=num_towers)

  def test_pictures_show_image_labels_and_predictions(self):
    evaluation = training_graph.build_evaluation(
        training_options.Options(model="per_pixel", batch_size=3,
                                 summarize_images=2), self.data)
    with self.session(config=evaluation.config) as sess:
      sess.run(tf.global_variables_initializer())
      sess.run(evaluation.start)
      labels, text = sess.run([evaluation.labels, evaluation.pictures])
      values = tf.Summary.FromString(text).value
      pixels = [sess.run(tf.io.decode_png(value.image.encoded_image_string))
                for value in values]
    self.assertLen(pixels, 2)
    self.assertEqual(pixels[0].shape, (32, 96, 3))
    # Each class has one colour, in the middle picture.
    for picture, mask in zip(pixels, labels):
      for label in np.unique(mask):
        colours = np.unique(picture[:, 32:64][mask == label], axis=0)
        self.assertLen(colours, 1)


if __name__ == "__main__":
  tf.test.main()
