"""Tests for tools.tasks, and for training and tests of segmentation."""

import contextlib
import dataclasses
import io
from unittest import mock

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import alexnet
from tools import tasks
from tools import training
from tools.datasets import shapes


def small_shapes():
  return shapes.load(image_size=32, num_train=9, num_test=7)


def per_pixel(images, *, num_classes, training):
  """Returns logits `[B, H, W, num_classes]`, each of one pixel's channels."""
  del training  # It does the same in tests.
  kernel = tf.get_variable("kernel", [1, 1, 3, num_classes],
                           initializer=tf.glorot_uniform_initializer())
  return tf.nn.conv2d(images, kernel, strides=1, padding="SAME")


def numpy_confusion(labels, predictions, num_classes, void_label):
  matrix = np.zeros([num_classes, num_classes], np.int64)
  valid = labels != void_label
  np.add.at(matrix, (labels[valid], predictions[valid]), 1)
  return matrix


class TasksTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(
        mock.patch.dict(tasks.SEGMENTERS, per_pixel=per_pixel))
    self.enter_context(contextlib.redirect_stderr(io.StringIO()))
    self.enter_context(contextlib.redirect_stdout(io.StringIO()))

  @parameterized.parameters(
      ("unet", "segmentation", 8, None), ("fcn", "segmentation", 8, None),
      ("convnet", "classification", 8, None),
      ("alexnet", "classification", 32, None),
      ("alexnet", "classification", 31, "square images of 32x32 or more.*31x"),
      ("unet", "classification", 8, "one label per image, got unet"),
      ("alexnet", "segmentation", 64, "one label per pixel, got alexnet"))
  def test_misfit(self, model, kind, size, message):
    data = dataclasses.replace(
        small_shapes(), kind=kind, image_shape=(size, size, 3))
    found = tasks.misfit(model, data)
    if message is None:
      self.assertIsNone(found)
    else:
      self.assertRegex(found, message)
      self.assertNotIn("\n", found)

  def test_alexnet_takes_the_least_size_and_no_less(self):
    for size, fits in ((tasks.MIN_SIZE_OF_ALEXNET, True),
                       (tasks.MIN_SIZE_OF_ALEXNET - 1, False)):
      images = tf.placeholder(tf.float32, [None, size, size, 1])
      with contextlib.nullcontext() if fits else self.assertRaisesRegex(
          ValueError, "`images` must be square"):
        alexnet.logits(images, num_classes=2, training=False, width=0.1)

  def test_accuracy(self):
    score = tasks.TASKS["classification"].score(np.array([3, 4]), None)
    self.assertEqual(score, tasks.Score("accuracy", "accuracy", 0.75, ""))

  def test_iou_by_class(self):
    data = dataclasses.replace(
        small_shapes(), num_classes=3, class_names=("sky", "background", "car"))
    confusion = np.array([[3, 1, 0], [2, 4, 0], [0, 0, 0]])
    task = tasks.TASKS["segmentation"]
    score = task.score(confusion, data)
    self.assertAlmostEqual(score.value, (3 / 6 + 4 / 7) / 2)
    self.assertEqual(score.table, "class       IoU\n"
                     "sky         0.5000\nbackground  0.5714\ncar         -")
    unnamed = dataclasses.replace(data, class_names=None)
    self.assertStartsWith(task.score(confusion, unnamed).table,
                          "class  IoU\n0      0.5000\n1      0.5714")

  @parameterized.parameters(
      ("per_pixel", 1, 3), ("per_pixel", 3, 3), ("per_pixel", 4, 4),
      ("fcn", 2, 3))
  def test_evaluation_counts_each_pixel_once(self, model, num_towers,
                                               batch_size):
    """Seven images: the last batch has one, fewer than there are towers."""
    data = small_shapes()
    graph = training.build(training.Options(
        model=model, num_towers=num_towers, batch_size=batch_size), data)
    images, labels = data.test.columns
    images = (images - data.scale.mean) / data.scale.deviation
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      predictions = tf.argmax(tasks.SEGMENTERS[model](
          tf.constant(images, tf.float32), num_classes=6, training=False), -1)
    with self.session(config=graph.config) as sess:
      sess.run(tf.global_variables_initializer())
      score = training.evaluate(sess, graph)
      confusion = numpy_confusion(
          labels.astype(np.int64), sess.run(predictions), 6, 255)
    both = np.diagonal(confusion)
    either = confusion.sum(axis=0) + confusion.sum(axis=1) - both
    self.assertAllClose(score.value, np.mean(both[either > 0] /
                                             either[either > 0]))

  def test_loss_is_the_mean_over_pixels_of_images_that_count(self):
    """Towers have unequal numbers of pixels that are not void."""
    data = small_shapes()
    images = np.random.RandomState(0).normal(size=[5, 32, 32, 3])
    labels = data.train.columns[1][:5].astype(np.int64)
    labels[0, :20] = 255
    weights = np.array([1, 1, 1, 1, 0], np.float32)
    for num_towers in (1, 2, 3, 4):
      with tf.Graph().as_default():
        graph = training.build(training.Options(
            model="per_pixel", num_towers=num_towers, batch_size=5,
            weight_decay=0.0), data)
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
          logits = per_pixel(
              tf.constant(images, tf.float32), num_classes=6, training=True)
        with tf.Session(config=graph.config) as sess:
          sess.run(tf.global_variables_initializer())
          loss, logits = sess.run([graph.loss, logits], {
              graph.images: images, graph.labels: labels,
              graph.weights: weights})
      valid = (labels != 255) & (weights > 0)[:, None, None]
      chosen = logits[valid].astype(np.float64)
      each = (np.log(np.exp(chosen).sum(axis=-1)) -
              chosen[np.arange(len(chosen)), labels[valid]])
      self.assertAllClose(loss, each.mean(), rtol=1e-5, msg=num_towers)


if __name__ == "__main__":
  tf.test.main()
