"""Tests for the example models."""

import inspect
import re

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import convnet
from models import resnet
import testing

MODELS = (
    ("convnet", convnet, {}),
    ("resnet8", resnet, dict(depth=8)),
)


def num_parameters():
  """Returns the number of trainable parameters of the default graph."""
  return sum(int(np.prod(variable.shape.as_list()))
             for variable in tf.trainable_variables())


def batch_norm_parameters(channels):
  return 2 * channels


def convnet_parameters(channels, classes):
  """Counts by hand: weights and batch norm of four convolutions, and dense."""
  sizes = [(channels, 32), (32, 32), (32, 64), (64, 64)]
  return (sum(9 * rows * columns + batch_norm_parameters(columns)
              for rows, columns in sizes) + 64 * classes + classes)


def resnet_parameters(depth, channels, classes):
  """Counts by hand: one convolution, then 2n for each of 16, 32, 64 filters."""
  sizes = [(channels, 16)]
  for filters in (16, 32, 64):
    for _ in range(2 * (depth - 2) // 6):
      sizes.append((sizes[-1][1], filters))
  return (sum(9 * rows * columns + batch_norm_parameters(columns)
              for rows, columns in sizes) + 64 * classes + classes)


class ModelsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(model=MODELS, size=[1, 8, 28, 32], channels=[1, 3])
  def test_logits_have_one_row_per_image(self, model, size, channels):
    _, module, options = model
    images = tf.placeholder(tf.float32, [None, size, size, channels])
    logits = module.logits(images, num_classes=7, training=False, **options)
    self.assertEqual(logits.dtype, tf.float32)
    self.assertEqual(logits.shape.as_list(), [None, 7])
    with testing.session(initialize=True) as sess:
      for rows in (1, 3):
        values = sess.run(
            logits, {images: np.ones([rows, size, size, channels])})
        self.assertEqual(values.shape, (rows, 7))
        self.assertTrue(np.isfinite(values).all())

  @parameterized.named_parameters(*MODELS)
  def test_unknown_sizes_and_oblong_images(self, module, options):
    images = tf.placeholder(tf.float32, [None, None, None, 2])
    logits = module.logits(images, num_classes=3, training=True, **options)
    with testing.session(initialize=True) as sess:
      values = sess.run(logits, {images: np.ones([2, 7, 5, 2])})
    self.assertEqual(values.shape, (2, 3))

  @parameterized.named_parameters(*MODELS)
  def test_double_precision_and_a_tensor_for_training(self, module, options):
    training = tf.placeholder(tf.bool, [])
    logits = module.logits(tf.random.uniform([4, 8, 8, 1], dtype=tf.float64),
                           num_classes=3, training=training, **options)
    self.assertEqual(logits.dtype, tf.float64)
    self.assertEqual({variable.dtype.base_dtype
                      for variable in tf.trainable_variables()}, {tf.float64})
    with testing.session(initialize=True) as sess:
      self.assertFalse(np.allclose(sess.run(logits, {training: True}),
                                   sess.run(logits, {training: False})))

  @parameterized.named_parameters(*MODELS)
  def test_only_training_updates_moving_averages(self, module, options):
    images = tf.zeros([4, 8, 8, 1])
    module.logits(images, num_classes=3, training=True, **options)
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    moving = [variable for variable in tf.global_variables()
              if "moving_" in variable.name]
    self.assertLen(updates, len(moving))
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      module.logits(images, num_classes=3, training=False, **options)
    self.assertLen(tf.get_collection(tf.GraphKeys.UPDATE_OPS), len(moving))

  @parameterized.named_parameters(*MODELS)
  def test_every_parameter_has_a_gradient(self, module, options):
    logits = module.logits(tf.random.uniform([4, 8, 8, 1]), num_classes=3,
                           training=True, **options)
    gradients = tf.gradients(logits, tf.trainable_variables())
    self.assertNotIn(None, gradients)

  @parameterized.named_parameters(
      ("one_channel", 1, 65_834), ("three_channels", 3, 66_410))
  def test_convnet_parameters(self, channels, expected):
    convnet.logits(tf.placeholder(tf.float32, [None, 8, 8, channels]),
                   num_classes=10, training=True)
    self.assertEqual(num_parameters(), expected)
    self.assertEqual(convnet_parameters(channels, 10), expected)
    self.assertIn(f"{expected:,}", convnet.__doc__)

  @parameterized.named_parameters(
      ("20", 20, 269_722, 19), ("32", 32, 464_154, 31), ("44", 44, 658_586, 43),
      ("56", 56, 853_018, 55), ("110", 110, 1_727_962, 109))
  def test_resnet_parameters_and_batch_norm_layers(self, depth, expected,
                                                   layers):
    resnet.logits(tf.placeholder(tf.float32, [None, 32, 32, 3]),
                  num_classes=10, training=True, depth=depth)
    self.assertEqual(num_parameters(), expected)
    self.assertEqual(resnet_parameters(depth, 3, 10), expected)
    self.assertIn(f"{expected:,}", resnet.__doc__)
    self.assertLen([variable for variable in tf.global_variables()
                    if variable.op.name.endswith("/moving_mean")], layers)
    self.assertLen([variable for variable in tf.trainable_variables()
                    if variable.op.name.endswith("kernel")], depth)

  def test_convnet_variable_names(self):
    convnet.logits(tf.zeros([1, 8, 8, 1]), num_classes=2, training=True)
    convolutions = [f"block_{block}/conv_{conv}" for block in (1, 2)
                    for conv in (1, 2)]
    self.assertCountEqual(
        [variable.op.name for variable in tf.global_variables()],
        [f"{scope}/{name}" for scope in convolutions for name in (
            "kernel", "batch_normalization/gamma", "batch_normalization/beta",
            "batch_normalization/moving_mean",
            "batch_normalization/moving_variance")] +
        ["dense/kernel", "dense/bias"])

  def test_resnet_variable_names(self):
    resnet.logits(tf.zeros([1, 8, 8, 1]), num_classes=2, training=True, depth=8)
    self.assertCountEqual(
        [variable.op.name for variable in tf.trainable_variables()
         if variable.op.name.endswith("kernel")],
        ["conv/kernel", "dense/kernel"] +
        [f"stage_{stage}/block_1/conv_{conv}/kernel" for stage in (1, 2, 3)
         for conv in (1, 2)])

  def test_resnet_shortcut_is_the_identity_padded_with_zero_channels(self):
    """With convolutions of zeros, a block passes on its shortcut alone."""
    images = np.random.RandomState(0).uniform(size=[2, 8, 8, 1])
    logits = resnet.logits(tf.constant(images), num_classes=3, training=False,
                           depth=8)
    with testing.session(initialize=True) as sess:
      for variable in tf.trainable_variables():
        if variable.op.name.startswith("stage"):
          variable.load(np.zeros(variable.shape), sess)
      first, dense, actual = sess.run([
          tf.get_default_graph().get_tensor_by_name("Relu:0"),
          tf.trainable_variables()[-2], logits])
    self.assertEqual(first.shape, (2, 8, 8, 16))
    features = np.zeros([2, 64])
    features[:, :16] = first[:, ::4, ::4].mean(axis=(1, 2))
    self.assertAllClose(actual, features @ dense)

  @parameterized.named_parameters(*MODELS)
  def test_rejects_other_ranks_and_unknown_channels(self, module, options):
    for shape in ([4, 8, 8], [4, 8, 8, None], None):
      with self.assertRaisesRegex(
          ValueError, r"`images` must have a shape \[B, H, W, C\].*: got"):
        module.logits(tf.placeholder(tf.float32, shape), num_classes=2,
                      training=True, **options)

  @parameterized.parameters(0, 2, 9, 18, 111)
  def test_resnet_rejects_depths_that_are_not_6n_plus_2(self, depth):
    with self.assertRaisesRegex(
        ValueError, rf"`depth` must be 6n \+ 2.*got {depth}\."):
      resnet.logits(tf.zeros([1, 8, 8, 1]), num_classes=2, training=True,
                    depth=depth)

  @parameterized.named_parameters(*MODELS)
  def test_code_names_towers_for_batch_norm_only(self, module, unused_options):
    self.assertEqual(
        re.findall(r"\w*tower[\w.]*", inspect.getsource(module), re.IGNORECASE),
        ["towers", "towers.batch_norm"])


if __name__ == "__main__":
  tf.test.main()
