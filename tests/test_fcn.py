"""Tests for models.fcn."""

import inspect
import re

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import fcn
from models import segmentation
import segmentation_cases
import testing


def parameters(width, levels, channels, classes):
  """Counts by hand: convolutions with batch norm, and three scores."""
  convs, scored, before = [], [], channels
  for block in range(1, levels + 1):
    size = width * min(2**(block - 1), 8)
    convs += [(9 * before, size)] + [(9 * size, size)] * (1 if block < 3 else 2)
    scored.append(size)
    before = size
  convs += [(9 * before, 2 * before), (2 * before, 2 * before)]
  scored = scored[-3:-1] + [2 * before]
  return (sum(rows * columns + 2 * columns for rows, columns in convs) +
          sum((size + 1) * classes for size in scored))


def numpy_upsample(x, factor, height, width):
  """Bilinear upsampling pixel by pixel, as the docstring has it."""
  result = np.zeros([len(x), height, width, x.shape[-1]])
  for row, column in np.ndindex(height, width):
    ends = []
    for index, size in ((row, x.shape[1]), (column, x.shape[2])):
      position = min(max((index + 0.5) / factor - 0.5, 0), size - 1)
      low = int(position)
      ends.append((low, min(low + 1, size - 1), position - low))
    (top, bottom, down), (left, right, along) = ends
    result[:, row, column] = (
        (1 - down) * (1 - along) * x[:, top, left] +
        (1 - down) * along * x[:, top, right] +
        down * (1 - along) * x[:, bottom, left] +
        down * along * x[:, bottom, right])
  return result


class UpsampleTest(parameterized.TestCase, tf.test.TestCase):

  def upsample(self, x, factor, height, width):
    like = np.zeros([len(x), height, width, 1])
    y = fcn.upsample(tf.constant(x), factor, tf.constant(like))
    self.assertEqual(y.shape.as_list(), [len(x), height, width, x.shape[-1]])
    self.assertEqual(y.dtype, x.dtype)
    with testing.session() as sess:
      return sess.run(y)

  def test_by_hand(self):
    x = np.array([0.0, 4.0]).reshape([1, 1, 2, 1])
    self.assertAllClose(self.upsample(x, 2, 1, 4).ravel(), [0, 1, 3, 4])
    self.assertAllClose(self.upsample(x, 2, 2, 3)[0, :, :, 0],
                        [[0, 1, 3], [0, 1, 3]])

  @parameterized.parameters(
      (1, 3, 4), (2, 6, 8), (2, 5, 7), (4, 12, 16), (4, 9, 13), (8, 24, 32),
      (8, 17, 25))
  def test_equals_numpy(self, factor, height, width):
    x = np.random.RandomState(0).normal(size=[2, 3, 4, 5])
    self.assertAllClose(
        self.upsample(x, factor, height, width),
        numpy_upsample(x, factor, height, width), rtol=1e-13, atol=1e-13)

  @parameterized.parameters(2, 4, 8)
  def test_equals_resize_bilinear_where_sizes_divide(self, factor):
    x = np.random.RandomState(0).normal(size=[2, 3, 4, 5]).astype(np.float32)
    size = [3 * factor, 4 * factor]
    expected = tf.image.resize_bilinear(x, size, half_pixel_centers=True)
    with testing.session() as sess:
      expected = sess.run(expected)
    self.assertAllClose(self.upsample(x, factor, *size), expected)

  @parameterized.parameters(np.float16, np.float32, np.float64)
  def test_keeps_constants_and_types(self, dtype):
    x = np.full([1, 3, 40, 1], 3.0, dtype)
    self.assertAllClose(self.upsample(x, 8, 20, 317),
                        np.full([1, 20, 317, 1], 3.0), rtol=1e-3)

  def test_gradient_is_the_transpose(self):
    """Of a linear map: <y, upsample(x)> = <gradient by x, x>."""
    rng = np.random.RandomState(0)
    x = tf.constant(rng.normal(size=[2, 3, 4, 5]))
    weights = rng.normal(size=[2, 5, 7, 5])
    total = tf.reduce_sum(weights * fcn.upsample(x, 2, tf.constant(weights)))
    gradient, = tf.gradients(total, x)
    with testing.session() as sess:
      total, product = sess.run([total, tf.reduce_sum(gradient * x)])
    self.assertAllClose(total, product, rtol=1e-12)


class FcnTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(
      size=[(1, 1), (13, 21), (32, 32)], levels=[3, 5])
  def test_one_score_for_each_pixel_and_class(self, size, levels):
    images = tf.placeholder(tf.float32, [None, *size, 3])
    logits = fcn.logits(images, num_classes=5, training=False, width=2,
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
    logits = fcn.logits(images, num_classes=2, training=True, width=2)
    self.assertEqual(logits.shape.as_list(), [None, None, None, 2])
    with testing.session(initialize=True) as sess:
      for size in ((8, 8), (7, 12), (1, 3)):
        self.assertEqual(
            sess.run(logits, {images: np.ones([2, *size, 1])}).shape,
            (2, *size, 2))

  @parameterized.parameters(1, 2, 3, 4)
  def test_c053_equals_one_device_with_uneven_void_pixels(self, num_towers):
    segmentation_cases.assert_equals_one_device(self, fcn, num_towers, width=2)

  @parameterized.named_parameters(
      ("small", 8, 3, 51_270, 9), ("default", 16, 3, 201_710, 9),
      ("half", 32, 5, 5_135_102, 15), ("paper", 64, 5, 20_508_126, 15))
  def test_parameters_and_batch_norm_layers(self, width, levels, expected,
                                            layers):
    fcn.logits(tf.placeholder(tf.float32, [None, None, None, 3]),
               num_classes=10, training=True, width=width, levels=levels)
    self.assertEqual(sum(variable.shape.num_elements()
                         for variable in tf.trainable_variables()), expected)
    self.assertEqual(parameters(width, levels, 3, 10), expected)
    self.assertIn(f"{expected:,}", fcn.__doc__)
    self.assertLen([variable for variable in tf.global_variables()
                    if variable.op.name.endswith("/moving_mean")], layers)

  def test_defaults_are_counted_in_the_docstring(self):
    parameters_of = inspect.signature(fcn.logits).parameters
    self.assertEqual([parameters_of[name].default
                      for name in ("width", "levels")], [16, 3])

  def test_variable_names(self):
    fcn.logits(tf.zeros([1, 8, 8, 1]), num_classes=2, training=True)
    convolutions = [f"{scope}/conv_{conv}" for conv in (1, 2) for scope in (
        "block_1", "block_2", "block_3", "head")] + ["block_3/conv_3"]
    self.assertCountEqual(
        [variable.op.name for variable in tf.global_variables()],
        [f"{scope}/{name}" for scope in convolutions for name in (
            "kernel", "batch_normalization/gamma", "batch_normalization/beta",
            "batch_normalization/moving_mean",
            "batch_normalization/moving_variance")] +
        [f"{scope}/scores/{name}" for scope in ("block_1", "block_2", "head")
         for name in ("kernel", "bias")])

  @parameterized.parameters(3, 5)
  def test_skips_of_two_strides_are_added_to_the_coarse_scores(self, levels):
    """The strides are 2^levels, and a half and a quarter of it."""
    size = (2**levels + 3, 2**(levels + 1) - 1)
    images = np.random.RandomState(0).normal(size=[2, *size, 1])
    logits = fcn.logits(tf.constant(images), num_classes=3, training=False,
                        width=2, levels=levels)
    scopes = [f"block_{levels - 2}", f"block_{levels - 1}", "head"]
    scores = [tf.get_default_graph().get_tensor_by_name(
        f"{scope}/scores/BiasAdd:0") for scope in scopes]
    with testing.session(initialize=True) as sess:
      for variable in tf.trainable_variables():
        if "/scores/" in variable.op.name:
          variable.load(np.random.RandomState(1).normal(
              size=variable.shape.as_list()), sess)
      actual, (fine, middle, coarse) = sess.run([logits, scores])
    for stride, part in ((levels - 2, fine), (levels - 1, middle),
                         (levels, coarse)):
      self.assertEqual(part.shape, (
          2, -(-size[0] // 2**stride), -(-size[1] // 2**stride), 3))
    expected = middle + numpy_upsample(coarse, 2, *middle.shape[1:3])
    expected = fine + numpy_upsample(expected, 2, *fine.shape[1:3])
    self.assertAllClose(
        actual, numpy_upsample(expected, 2**(levels - 2), *size),
        rtol=1e-10, atol=1e-10)

  def test_skips_start_as_zero(self):
    fcn.logits(tf.random.uniform([2, 16, 16, 1]), num_classes=2, training=True)
    scores = [tf.get_default_graph().get_tensor_by_name(
        f"{scope}/scores/BiasAdd:0") for scope in (
            "block_1", "block_2", "head")]
    with testing.session(initialize=True) as sess:
      self.assertEqual([bool(np.any(value)) for value in sess.run(scores)],
                       [False, False, True])

  def test_every_parameter_has_a_gradient_and_training_updates(self):
    training = tf.placeholder(tf.bool, [])
    logits = fcn.logits(tf.random.uniform([4, 9, 8, 1]), num_classes=3,
                        training=training, width=2)
    gradients = tf.gradients(tf.square(logits), tf.trainable_variables())
    self.assertNotIn(None, gradients)
    self.assertLen(tf.get_collection(tf.GraphKeys.UPDATE_OPS), 2 * 9)
    with testing.session(initialize=True) as sess:
      for gradient in sess.run(gradients, {training: True}):
        self.assertGreater(np.abs(gradient).max(), 0)
      self.assertFalse(np.allclose(sess.run(logits, {training: True}),
                                   sess.run(logits, {training: False})))

  def test_two_towers_learn_which_quarters_are_bright(self):
    """Stride 2 cannot tell single pixels, so labels are of quarters."""
    rng = np.random.RandomState(0)
    quarters = rng.randint(0, 2, [4, 2, 2]).repeat(4, axis=1).repeat(4, axis=2)
    images = quarters[..., np.newaxis] + 0.3 * rng.normal(size=[4, 8, 8, 2])
    labels = quarters.astype(np.uint8)
    labels[:2, 6:] = segmentation_cases.VOID
    built = segmentation_cases.Built(
        segmentation_cases.model_fn(fcn, width=4), 2)
    self.addCleanup(built.session.close)
    first = built.run((images, labels), steps=40)
    feed = dict(zip(built.inputs, (images, labels)))
    loss, outputs = built.session.run((built.loss, built.outputs), feed)
    self.assertLess(loss, first["loss"] / 4)
    confusion = outputs["confusion"].sum(axis=0)
    self.assertGreater(segmentation.mean_iou(confusion), 0.85)
    self.assertLess(segmentation.mean_iou(
        first["outputs"]["confusion"].sum(axis=0)), 0.7)

  @parameterized.named_parameters(
      ("three_axes", [4, 8, 8]), ("channels", [4, 8, 8, None]), ("rank", None))
  def test_rejects_images_of_shape(self, shape):
    with self.assertRaisesRegex(
        ValueError, r"`images` must have a shape \[B, H, W, C\].*: got"):
      fcn.logits(tf.placeholder(tf.float32, shape), num_classes=2,
                 training=True)

  @parameterized.parameters((0, 3), (8, 2))
  def test_rejects(self, width, levels):
    with self.assertRaisesRegex(
        ValueError, "`width` must be at least 1 and `levels` at least 3.*got "
        f"{width} and {levels}"):
      fcn.logits(tf.zeros([1, 8, 8, 1]), num_classes=2, training=True,
                 width=width, levels=levels)

  def test_code_names_towers_for_batch_norm_only(self):
    self.assertEqual(
        re.findall(r"\w*tower[\w.]*", inspect.getsource(fcn), re.IGNORECASE),
        ["towers", "towers.batch_norm"])


if __name__ == "__main__":
  tf.test.main()
