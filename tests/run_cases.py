"""A small data set, and what tests of training runs share."""

import contextlib
import pathlib
from unittest import mock

import numpy as np
import tensorflow.compat.v1 as tf

from tools import datasets
from tools import tasks
from tools import training
import towers


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


def normalised(images, *, num_classes, training):
  """The same, with batch norm before."""
  with tf.variable_scope("input"):
    images = towers.batch_norm(images, training=training, momentum=0.9)
  return linear(images, num_classes=num_classes, training=training)


def per_pixel(images, *, num_classes, training):
  """Returns logits `[B, H, W, num_classes]`, each of one pixel's channels."""
  del training  # It does the same in tests.
  kernel = tf.get_variable("kernel", [1, 1, 3, num_classes],
                           initializer=tf.glorot_uniform_initializer())
  return tf.nn.conv2d(images, kernel, strides=1, padding="SAME")


def with_batch_norm():
  """Makes a network that is built fast of the default one."""
  return mock.patch.dict(tasks.CLASSIFIERS, convnet=normalised)


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
