"""Tests for tools.tasks."""

import contextlib
import dataclasses

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import alexnet
from tools import tasks
from tools.datasets import shapes


def small_shapes():
  return shapes.load(image_size=32, num_train=9, num_test=7)


class TasksTest(parameterized.TestCase, tf.test.TestCase):

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

  def test_confusion_matrix(self):
    rng = np.random.RandomState(0)
    labels = rng.randint(0, 6, [4, 3, 3])
    labels[0, 0, :2] = 255
    predictions = rng.randint(0, 6, [4, 3, 3])
    expected = np.zeros([6, 6], np.int64)
    valid = labels != 255
    np.add.at(expected, (labels[valid], predictions[valid]), 1)
    self.assertAllEqual(
        tasks.confusion_matrix(labels, predictions, dataclasses.replace(
            small_shapes(), void_label=255)), expected)

  def test_confusion_table(self):
    data = dataclasses.replace(
        small_shapes(), num_classes=2, class_names=("cat", "dog"))
    task = tasks.TASKS["classification"]
    score = task.score(np.array([[30, 1], [2, 4]]), data)
    self.assertEqual(score.value, 34 / 37)
    self.assertEqual(score.table, "label, taken for:  cat  dog\n"
                     "cat                 30    1\n"
                     "dog                  2    4")
    many = np.eye(tasks.MAX_CLASSES_OF_TABLE + 1, dtype=np.int64)
    self.assertEqual(task.score(many, data), tasks.Score(
        "accuracy", "accuracy", 1.0, ""))


if __name__ == "__main__":
  tf.test.main()
