"""Tests for models.segmentation."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import segmentation
import testing
import towers

VOID = segmentation.VOID_LABEL


def numpy_loss(logits, labels, void=VOID, weight=1.0):
  """Transcribes the formula of the docstring; also returns the weight."""
  logits = logits.astype(np.float64)
  logits -= logits.max(axis=-1, keepdims=True)
  scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  weights = np.ones(labels.shape) * weight * (labels != void)
  classes = np.where(labels == void, 0, labels)
  losses = -np.take_along_axis(scores, classes[..., np.newaxis], axis=-1)
  total = weights.sum()
  return ((weights * losses[..., 0]).sum() / total if total else 0.0), total


def numpy_confusion(labels, predictions, num_classes, void=VOID):
  matrix = np.zeros([num_classes, num_classes], np.int64)
  for label, prediction in zip(labels.flat, predictions.flat):
    if label != void:
      matrix[label, prediction] += 1
  return matrix


def numpy_mean_iou(labels, predictions, num_classes, void=VOID):
  """By sets of pixels instead of a matrix."""
  predictions = np.where(labels == void, void, predictions)
  values = []
  for k in range(num_classes):
    either = np.logical_or(labels == k, predictions == k).sum()
    if either:
      both = np.logical_and(labels == k, predictions == k).sum()
      values.append(both / either)
  return np.mean(values)


def masks(shape=(3, 4, 5), num_classes=4, void=VOID, seed=0):
  """Returns labels, a third of them void, and predictions."""
  rng = np.random.RandomState(seed)
  labels = rng.randint(0, num_classes, shape)
  labels[rng.uniform(size=shape) < 1 / 3] = void
  return labels, rng.randint(0, num_classes, shape)


class LossTest(parameterized.TestCase, tf.test.TestCase):

  def run_loss(self, logits, labels, **options):
    result = segmentation.loss(tf.constant(logits), labels,
                               num_classes=logits.shape[-1], **options)
    gradient, = tf.gradients(result.loss, tf.get_default_graph(
        ).get_tensor_by_name("Const:0"))
    with testing.session() as sess:
      return sess.run((result, gradient))

  def logits(self, shape=(3, 4, 5), num_classes=4, dtype=np.float64):
    return np.random.RandomState(1).normal(
        scale=3.0, size=[*shape, num_classes]).astype(dtype)

  @parameterized.named_parameters(
      ("void", VOID, None), ("other_void", 77, None),
      ("negative_void", -1, None), ("per_image", VOID, [1.0, 0.0, 1.0]),
      ("fractions", VOID, [0.5, 2.0, 3.0]),
      ("per_pixel", VOID, np.random.RandomState(2).uniform(size=[3, 4, 5])))
  def test_equals_numpy(self, void, weight):
    labels, _ = masks(void=void)
    logits = self.logits()
    (loss, total), gradient = self.run_loss(
        logits, labels, void_label=void, weight=weight)
    if weight is None:
      by_pixel = 1.0
      self.assertEqual(total, (labels != void).sum())
    else:
      weight = np.asarray(weight)
      by_pixel = weight[:, None, None] if weight.ndim == 1 else weight
    expected, expected_total = numpy_loss(logits, labels, void, by_pixel)
    self.assertAllClose(loss, expected, rtol=1e-12)
    self.assertAllClose(total, expected_total, rtol=1e-12)
    counts = (labels != void) * np.ones(labels.shape) * by_pixel > 0
    self.assertAllEqual(np.abs(gradient).sum(axis=-1) > 0, counts)

  def test_gradient_equals_numpy_differences(self):
    labels, _ = masks((2, 2, 1))
    logits = self.logits((2, 2, 1))
    _, gradient = self.run_loss(logits, labels)
    for index in np.ndindex(logits.shape):
      step = np.zeros(logits.shape)
      step[index] = 1e-5
      slope = (numpy_loss(logits + step, labels)[0] -
               numpy_loss(logits - step, labels)[0]) / 2e-5
      self.assertAllClose(gradient[index], slope, atol=1e-8)

  def test_no_void_label_counts_every_pixel(self):
    labels = masks()[1]
    logits = self.logits()
    (loss, total), _ = self.run_loss(logits, labels, void_label=None)
    self.assertAllClose(loss, numpy_loss(logits, labels, None)[0])
    self.assertEqual(total, labels.size)

  def test_a_class_may_be_void(self):
    labels = masks()[1]
    logits = self.logits()
    (loss, total), _ = self.run_loss(logits, labels, void_label=0)
    self.assertAllClose(loss, numpy_loss(logits, labels, 0)[0])
    self.assertEqual(total, (labels != 0).sum())

  @parameterized.named_parameters(
      ("void", dict()), ("weight", dict(void_label=None, weight=[0.0, 0.0])))
  def test_c053_nothing_that_counts_is_zero_and_not_nan(self, options):
    labels = np.full([2, 3, 3], VOID if not options else 1)
    (loss, total), gradient = self.run_loss(
        self.logits((2, 3, 3)), labels, **options)
    self.assertEqual((loss, total), (0, 0))
    self.assertAllEqual(gradient, np.zeros([2, 3, 3, 4]))

  @parameterized.named_parameters(
      ("half", np.float16, np.float32), ("single", np.float32, np.float32),
      ("double", np.float64, np.float64))
  def test_type_holds_the_number_of_pixels(self, dtype, expected):
    logits = self.logits((1, 300, 300), 2, dtype)  # More than 65,504 pixels.
    labels = masks((1, 300, 300), 2)[1]
    (loss, total), _ = self.run_loss(logits, labels)
    self.assertEqual({loss.dtype, total.dtype}, {np.dtype(expected)})
    self.assertEqual(total, 90_000)
    self.assertAllClose(loss, numpy_loss(logits, labels)[0], rtol=1e-5)

  @parameterized.parameters(np.uint8, np.int32, np.int64)
  def test_sizes_may_be_unknown_and_labels_any_integers(self, dtype):
    labels, _ = masks()
    logits = self.logits()
    x = tf.placeholder(tf.float64, [None, None, None, 4])
    y = tf.placeholder(dtype, [None, None, None])
    result = segmentation.loss(x, y, num_classes=4)
    self.assertEqual(result.loss.shape.as_list(), [])
    self.assertEqual(result.weight.shape.as_list(), [])
    with testing.session() as sess:
      loss = sess.run(result.loss, {x: logits, y: labels})
    self.assertAllClose(loss, numpy_loss(logits, labels)[0])

  @parameterized.parameters(4, 254, -1)
  def test_label_that_is_no_class_fails(self, label):
    labels, _ = masks()
    labels[1, 2, 3] = label
    with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError,
        "`labels` must be classes from 0 to 3, or void: got values from"):
      self.run_loss(self.logits(), labels)

  @parameterized.named_parameters(
      ("logits_rank", [4, 5, 3], [4, 5, 5], None, r"`logits` must .*\[B, H, W, "
       r"3\].*: got \(4, 5, 3\)"),
      ("logits_classes", [2, 4, 5, 4], [2, 4, 5], None,
       r"`logits` must .*`num_classes` as its last axis: got \(2, 4, 5, 4\)"),
      ("labels_rank", [2, 4, 5, 3], [2, 4, 5, 1], None,
       r"`labels` must have a shape \[B, H, W\]: got \(2, 4, 5, 1\)"),
      ("weight_rank", [2, 4, 5, 3], [2, 4, 5], [2, 1],
       r"`weight` must have a shape \[B\].* got \(2, 1\)"))
  def test_rejects(self, logits, labels, weight, message):
    with self.assertRaisesRegex(ValueError, message):
      segmentation.loss(
          tf.zeros(logits), tf.zeros(labels, tf.int32), num_classes=3,
          weight=None if weight is None else tf.ones(weight))

  def test_rejects_labels_of_a_floating_type(self):
    with self.assertRaisesRegex(TypeError, "`labels` must be integers: got "
                                "float32"):
      segmentation.loss(tf.zeros([1, 2, 2, 3]), tf.zeros([1, 2, 2]),
                        num_classes=3)

  def test_rejects_no_classes(self):
    with self.assertRaisesRegex(ValueError,
                                "`num_classes` must be at least 1: got 0"):
      segmentation.loss(tf.zeros([1, 2, 2, 0]), tf.zeros([1, 2, 2], tf.int32),
                        num_classes=0)


class ConfusionMatrixTest(parameterized.TestCase, tf.test.TestCase):

  def run_matrix(self, labels, predictions, num_classes, **options):
    result = segmentation.confusion_matrix(
        tf.constant(labels), tf.constant(predictions), num_classes=num_classes,
        **options)
    self.assertEqual(result.dtype, tf.int64)
    self.assertEqual(result.shape.as_list(),
                     [len(labels), num_classes, num_classes])
    with testing.session() as sess:
      return sess.run(result)

  @parameterized.parameters(1, 2, 4, 21)
  def test_equals_numpy_for_each_image(self, num_classes):
    labels, predictions = masks((4, 7, 6), num_classes)
    labels[2] = VOID
    actual = self.run_matrix(labels, predictions, num_classes)
    for image, matrix in enumerate(actual):
      self.assertAllEqual(matrix, numpy_confusion(
          labels[image], predictions[image], num_classes))
    self.assertAllEqual(actual[2], np.zeros([num_classes, num_classes]))
    self.assertEqual(actual.sum(), (labels != VOID).sum())

  def test_rows_are_labels_and_columns_predictions(self):
    labels, predictions = np.array([[[0, 1, 1]]]), np.array([[[2, 2, 1]]])
    self.assertAllEqual(self.run_matrix(labels, predictions, 3),
                        [[[0, 0, 1], [0, 1, 1], [0, 0, 0]]])

  def test_no_void_label_and_bytes(self):
    labels, predictions = masks()[1].astype(np.uint8), masks(seed=1)[1]
    actual = self.run_matrix(labels, predictions, 4, void_label=None)
    self.assertAllEqual(actual.sum(axis=0),
                        numpy_confusion(labels, predictions, 4))

  @parameterized.parameters(0, 1, 3)
  def test_sizes_may_be_unknown(self, size):
    labels, predictions = masks((size, 4, 5))
    x, y = (tf.placeholder(tf.int64, [None, None, None]) for _ in range(2))
    result = segmentation.confusion_matrix(x, y, num_classes=4)
    self.assertEqual(result.shape.as_list(), [None, 4, 4])
    with testing.session() as sess:
      actual = sess.run(result, {x: labels, y: predictions})
    self.assertEqual(actual.shape, (size, 4, 4))
    self.assertAllEqual(actual.sum(axis=0),
                        numpy_confusion(labels, predictions, 4))

  @parameterized.product(num_towers=[1, 2, 3, 4], batch_size=[1, 2, 3, 4, 5])
  def test_c047_each_pixel_counts_once_in_any_number_of_towers(
      self, num_towers, batch_size):
    """10 images in batches that neither towers nor images divide by."""
    labels, predictions = masks((10, 3, 2))
    inputs = tuple(tf.placeholder(tf.int64, [None, 3, 2]) for _ in range(2))
    graph = towers.build_towers(
        lambda *values: {"confusion": segmentation.confusion_matrix(
            *values, num_classes=4)},
        testing.devices(num_towers), inputs=inputs)
    confusion = np.zeros([4, 4], np.int64)
    with testing.session() as sess:
      for start in range(0, 10, batch_size):
        rows = slice(start, start + batch_size)
        confusion += sess.run(graph.outputs["confusion"], dict(zip(
            inputs, (labels[rows], predictions[rows])))).sum(axis=0)
    self.assertAllEqual(confusion, numpy_confusion(labels, predictions, 4))
    self.assertEqual(confusion.sum(), (labels != VOID).sum())
    self.assertAllClose(segmentation.mean_iou(confusion),
                        numpy_mean_iou(labels, predictions, 4))

  @parameterized.named_parameters(("labels", 0), ("predictions", 1))
  def test_value_that_is_no_class_fails(self, which):
    values = [np.zeros([1, 2, 2], np.int64), np.zeros([1, 2, 2], np.int64)]
    values[which][0, 1, 1] = 3
    name = ("labels", "predictions")[which]
    with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError,
        f"`{name}` must be classes from 0 to 2, or void: got values from"):
      self.run_matrix(*values, 3)

  @parameterized.named_parameters(
      ("labels", [2, 2], [1, 2, 2], "labels"),
      ("predictions", [1, 2, 2], [1, 2, 2, 3], "predictions"))
  def test_rejects_shapes(self, labels, predictions, name):
    with self.assertRaisesRegex(
        ValueError, rf"`{name}` must have a shape \[B, H, W\]: got"):
      segmentation.confusion_matrix(
          tf.zeros(labels, tf.int32), tf.zeros(predictions, tf.int32),
          num_classes=3)

  def test_rejects_logits_for_predictions(self):
    with self.assertRaisesRegex(
        TypeError, "`predictions` must be integers: got float32.*argmax"):
      segmentation.confusion_matrix(
          tf.zeros([1, 2, 2], tf.int32), tf.zeros([1, 2, 2]), num_classes=3)


class ScoresTest(parameterized.TestCase, tf.test.TestCase):

  def test_iou_by_hand(self):
    confusion = [[5, 1, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    self.assertAllClose(segmentation.iou(confusion),
                        [5 / 8, 2 / 5, np.nan, np.nan])
    self.assertAllClose(segmentation.mean_iou(confusion), (5 / 8 + 2 / 5) / 2)
    self.assertAllClose(segmentation.pixel_accuracy(confusion), 7 / 10)

  def test_class_that_is_only_predicted_counts_as_zero(self):
    self.assertAllClose(segmentation.iou([[3, 1], [0, 0]]), [3 / 4, 0])
    self.assertAllClose(segmentation.mean_iou([[3, 1], [0, 0]]), 3 / 8)

  def test_class_that_is_never_predicted_counts_as_zero(self):
    self.assertAllClose(segmentation.mean_iou([[3, 0], [1, 0]]), 3 / 8)

  @parameterized.parameters(*range(5))
  def test_equals_numpy_on_sets_of_pixels(self, seed):
    labels, predictions = masks((2, 3, 3), num_classes=6, seed=seed)
    confusion = numpy_confusion(labels, predictions, 6)
    self.assertAllClose(segmentation.mean_iou(confusion),
                        numpy_mean_iou(labels, predictions, 6))
    valid = labels != VOID
    self.assertAllClose(segmentation.pixel_accuracy(confusion),
                        (labels == predictions)[valid].mean())

  def test_no_pixels_have_no_score(self):
    nothing = np.zeros([3, 3], np.int64)
    self.assertAllEqual(np.isnan(segmentation.iou(nothing)), [True] * 3)
    self.assertTrue(np.isnan(segmentation.mean_iou(nothing)))
    self.assertTrue(np.isnan(segmentation.pixel_accuracy(nothing)))

  @parameterized.product(
      function=[segmentation.iou, segmentation.mean_iou,
                segmentation.pixel_accuracy], shape=[[2, 3], [4, 3, 3], [3]])
  def test_rejects(self, function, shape):
    with self.assertRaisesRegex(
        ValueError, r"`confusion` must have a shape \[K, K\]: got \[.*sum"):
      function(np.zeros(shape))


if __name__ == "__main__":
  tf.test.main()
