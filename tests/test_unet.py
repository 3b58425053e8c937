"""Tests for models.unet."""

import inspect
import re

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import segmentation
from models import unet
import segmentation_cases
import testing
import towers


def parameters(width, levels, channels, classes):
  """Counts by hand: convolutions with batch norm, up-convolutions, scores."""
  filters = [width * 2**level for level in range(levels + 1)]
  convs, ups, before = [], 0, channels
  for size in filters:
    convs += [(before, size), (size, size)]
    before = size
  for size in reversed(filters[:-1]):
    ups += 4 * before * size + size
    convs += [(2 * size, size), (size, size)]
    before = size
  return (sum(9 * rows * columns + 2 * columns for rows, columns in convs) +
          ups + before * classes + classes)


class UnetTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(
      size=[(1, 1), (13, 21), (16, 16)], levels=[1, 3])
  def test_one_score_for_each_pixel_and_class(self, size, levels):
    images = tf.placeholder(tf.float32, [None, *size, 3])
    logits = unet.logits(images, num_classes=5, training=False, width=2,
                         levels=levels)
    self.assertEqual(logits.dtype, tf.float32)
    self.assertEqual(logits.shape.as_list(), [None, *size, 5])
    with testing.session(initialize=True) as sess:
      for rows in (1, 3):
        values = sess.run(logits, {images: np.ones([rows, *size, 3])})
        self.assertEqual(values.shape, (rows, *size, 5))
        self.assertTrue(np.isfinite(values).all())

  def test_sizes_may_be_unknown(self):
    images = tf.placeholder(tf.float32, [None, None, None, 1])
    logits = unet.logits(images, num_classes=2, training=True, width=2)
    self.assertEqual(logits.shape.as_list(), [None, None, None, 2])
    with testing.session(initialize=True) as sess:
      for size in ((8, 8), (7, 12), (1, 3)):
        self.assertEqual(
            sess.run(logits, {images: np.ones([2, *size, 1])}).shape,
            (2, *size, 2))

  @parameterized.parameters((1, 1), (2, 2), (3, 1), (4, 1))
  def test_c053_equals_one_device_with_uneven_void_pixels(self, num_towers,
                                                          levels):
    segmentation_cases.assert_equals_one_device(
        self, unet, num_towers, width=2, levels=levels)

  @parameterized.named_parameters(
      ("small", 8, 3, 121_258, 14), ("default", 16, 3, 482_890, 14),
      ("half", 32, 4, 7_763_338, 18), ("paper", 64, 4, 31_038_218, 18))
  def test_parameters_and_batch_norm_layers(self, width, levels, expected,
                                            layers):
    unet.logits(tf.placeholder(tf.float32, [None, None, None, 3]),
                num_classes=10, training=True, width=width, levels=levels)
    self.assertEqual(sum(variable.shape.num_elements()
                         for variable in tf.trainable_variables()), expected)
    self.assertEqual(parameters(width, levels, 3, 10), expected)
    self.assertIn(f"{expected:,}", unet.__doc__)
    self.assertLen([variable for variable in tf.global_variables()
                    if variable.op.name.endswith("/moving_mean")], layers)

  def test_defaults_are_counted_in_the_docstring(self):
    parameters_of = inspect.signature(unet.logits).parameters
    self.assertEqual([parameters_of[name].default
                      for name in ("width", "levels")], [16, 3])

  def test_variable_names(self):
    unet.logits(tf.zeros([1, 8, 8, 1]), num_classes=2, training=True, levels=2)
    convolutions = [f"{scope}/conv_{conv}" for conv in (1, 2) for scope in (
        "down_1", "down_2", "bottom", "up_2", "up_1")]
    self.assertCountEqual(
        [variable.op.name for variable in tf.global_variables()],
        [f"{scope}/{name}" for scope in convolutions for name in (
            "kernel", "batch_normalization/gamma", "batch_normalization/beta",
            "batch_normalization/moving_mean",
            "batch_normalization/moving_variance")] +
        [f"{scope}/{name}" for scope in ("up_2/up", "up_1/up", "scores")
         for name in ("kernel", "bias")])

  def test_every_parameter_has_a_gradient_and_training_updates(self):
    training = tf.placeholder(tf.bool, [])
    logits = unet.logits(tf.random.uniform([4, 9, 8, 1]), num_classes=3,
                         training=training, width=2)
    gradients = tf.gradients(tf.square(logits), tf.trainable_variables())
    self.assertNotIn(None, gradients)
    self.assertLen(tf.get_collection(tf.GraphKeys.UPDATE_OPS), 2 * 14)
    with testing.session(initialize=True) as sess:
      for gradient in sess.run(gradients, {training: True}):
        self.assertGreater(np.abs(gradient).max(), 0)
      self.assertFalse(np.allclose(sess.run(logits, {training: True}),
                                   sess.run(logits, {training: False})))

  def test_training_with_one_image_in_each_of_eight_towers(self):
    """In float64 the curves lie on each other; float32 magnifies rounding."""
    rng = np.random.RandomState(0)
    images = rng.normal(size=[8, 12, 12, 3])
    labels = rng.randint(0, 4, [8, 12, 12])
    labels[:3, :4] = segmentation.VOID_LABEL  # So towers weigh differently.
    curves = []
    for num_towers in (1, 8):
      with tf.Graph().as_default():
        tf.set_random_seed(0)

        def model_fn(x, y):
          logits = unet.logits(x, num_classes=4, training=True, width=4,
                               levels=2)
          loss, weight = segmentation.loss(logits, y, num_classes=4)
          return towers.TowerSpec(loss, weight=weight)

        graph = towers.build_towers(
            model_fn, num_towers,
            inputs=(tf.constant(images), tf.constant(labels)))
        train_op = graph.minimize(tf.train.AdamOptimizer(0.01))
        with tf.Session(config=graph.session_config()) as sess:
          sess.run(tf.global_variables_initializer())
          curves.append([sess.run([graph.loss, train_op])[0]
                         for _ in range(40)])
    self.assertLess(curves[0][-1], 0.8 * curves[0][0])
    self.assertAllClose(curves[1], curves[0], rtol=1e-11, atol=1e-11)

  def test_skip_alone_carries_the_finest_detail(self):
    """With up-convolutions of zeros, far pixels no longer matter."""
    images = np.random.RandomState(0).normal(size=[1, 24, 24, 1])
    changed = images.copy()
    changed[0, 0, 0] += 1
    x = tf.placeholder(tf.float64, images.shape)
    logits = unet.logits(x, num_classes=2, training=False, width=2, levels=2)
    with testing.session(initialize=True) as sess:
      moved = np.abs(sess.run(logits, {x: changed}) -
                     sess.run(logits, {x: images})).max(axis=(0, 3)) > 0
      self.assertTrue(moved[8:, 8:].any())  # Beyond the 4 convolutions.
      for variable in tf.trainable_variables():
        if variable.op.name.endswith("up/kernel"):
          variable.load(np.zeros(variable.shape), sess)
      moved = np.abs(sess.run(logits, {x: changed}) -
                     sess.run(logits, {x: images})).max(axis=(0, 3)) > 0
      self.assertTrue(moved[:5, :5].any())
      self.assertFalse(moved[5:].any() or moved[:, 5:].any())

  def test_up_convolution_keeps_pixels_in_place_and_crops_the_end(self):
    """Each coarse pixel becomes 2x2, as a kernel of ones shows."""
    coarse = np.random.RandomState(0).normal(size=[2, 3, 2, 1])
    skip = np.random.RandomState(1).normal(size=[2, 5, 4, 3])
    # pylint: disable-next=protected-access
    joined = unet._up(tf.constant(coarse), tf.constant(skip), 1)
    with testing.session(initialize=True) as sess:
      tf.trainable_variables()[0].load(np.ones([2, 2, 1, 1]), sess)
      actual = sess.run(joined)
    self.assertAllClose(actual[..., :3], skip)
    self.assertAllClose(
        actual[..., 3:], coarse.repeat(2, axis=1).repeat(2, axis=2)[:, :5])

  def test_two_towers_learn_which_pixels_are_bright(self):
    images, _ = segmentation_cases.batch(4)
    labels = (images[..., 0] > 1).astype(np.uint8)
    labels[:2, 3:] = segmentation_cases.VOID
    built = segmentation_cases.Built(
        segmentation_cases.model_fn(unet, width=4, levels=1), 2)
    self.addCleanup(built.session.close)
    first = built.run((images, labels), steps=50)
    feed = dict(zip(built.inputs, (images, labels)))
    loss, outputs = built.session.run((built.loss, built.outputs), feed)
    self.assertLess(loss, first["loss"] / 4)
    confusion = outputs["confusion"].sum(axis=0)
    self.assertGreater(segmentation.mean_iou(confusion), 0.9)
    self.assertLess(segmentation.mean_iou(
        first["outputs"]["confusion"].sum(axis=0)), 0.7)

  @parameterized.named_parameters(
      ("three_axes", [4, 8, 8]), ("channels", [4, 8, 8, None]), ("rank", None))
  def test_rejects_images_of_shape(self, shape):
    with self.assertRaisesRegex(
        ValueError, r"`images` must have a shape \[B, H, W, C\].*: got"):
      unet.logits(tf.placeholder(tf.float32, shape), num_classes=2,
                  training=True)

  @parameterized.parameters((0, 3), (8, 0))
  def test_rejects(self, width, levels):
    with self.assertRaisesRegex(
        ValueError, "`width` and `levels` must be at least 1: got "
        f"{width} and {levels}"):
      unet.logits(tf.zeros([1, 8, 8, 1]), num_classes=2, training=True,
                  width=width, levels=levels)

  def test_code_names_towers_for_batch_norm_only(self):
    self.assertEqual(
        re.findall(r"\w*tower[\w.]*", inspect.getsource(unet), re.IGNORECASE),
        ["towers", "towers.batch_norm"])


if __name__ == "__main__":
  tf.test.main()
