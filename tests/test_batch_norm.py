"""Tests for towers.batch_norm: values, gradients, moving statistics."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import batch_norm_cases as cases
import testing
import towers

BATCH_SIZES = range(1, 10)

# These are tried with every number of towers.
MAIN_LAYOUTS = ("matrix", "image_last", "image_first", "volume_first",
                "image_middle")


class BatchNormTest(cases.LayerTestCase):

  def check(self, layer, plain, axis, batch_sizes, tolerance):
    """Checks values, statistics and gradients on several batches."""
    rng = np.random.RandomState(0)
    shape = layer.x.shape.as_list()[1:]
    channels = layer.x.shape.as_list()[axis]
    gamma = rng.uniform(0.5, 2.0, channels)
    beta, mean = rng.normal(size=[2, channels])
    variance = rng.uniform(1.0, 3.0, channels)
    for batch in batch_sizes:
      x = rng.normal(1.0, 2.0, [batch, *shape])
      targets = rng.normal(size=x.shape)
      layer.set(gamma, beta, mean, variance)
      y, gradients = layer.run([layer.built.outputs["y"], layer.gradients], x,
                               targets)
      expected = cases.oracle(x, axis, gamma, beta)
      close = dict(rtol=tolerance, atol=tolerance)
      with self.subTest("y", batch=batch):
        self.assertAllClose(y, expected.y, **close)
      with self.subTest("gradients", batch=batch):
        for one, other in zip(plain.run(x, targets, gamma, beta), gradients):
          self.assertAllClose(one, other, rtol=tolerance, atol=10 * tolerance)
      with self.subTest("moving_statistics", batch=batch):
        moving = layer.update(x)
        self.assertAllClose(
            moving, [cases.moved(mean, expected.mean),
                     cases.moved(variance, expected.unbiased)], **close)

  @parameterized.named_parameters(
      (f"{layout}_{num_towers}", layout, num_towers)
      for layout in cases.LAYOUTS
      for num_towers in ((1, 2, 3, 4) if layout in MAIN_LAYOUTS else (3,)))
  def test_c041_every_layout_equals_one_device(self, layout, num_towers):
    shape, axis = cases.LAYOUTS[layout]
    plain = cases.Plain(shape, axis)
    self.addCleanup(plain.session.close)
    self.check(self.layer(num_towers, shape, axis), plain, axis, BATCH_SIZES,
               1e-5)

  @parameterized.product(layout=("matrix", "image_first"), num_towers=(1, 2, 4))
  def test_float64(self, layout, num_towers):
    shape, axis = cases.LAYOUTS[layout]
    plain = cases.Plain(shape, axis)
    self.addCleanup(plain.session.close)
    self.check(self.layer(num_towers, shape, axis, dtype=tf.float64), plain,
               axis, (1, 2, 5, 9), 1e-11)

  @parameterized.product(
      dtype=(tf.float16, tf.bfloat16), around=(5.0, 300.0),
      layout=("matrix", "image_last", "image_first", "image_middle"))
  def test_c044_half_precision(self, dtype, around, layout):
    shape, axis = cases.LAYOUTS[layout]
    layer = self.layer(2, shape, axis, dtype=dtype, momentum=0.0)
    rng = np.random.RandomState(0)
    x = rng.normal(around, around / 5, [7, *shape]).astype(
        dtype.as_numpy_dtype).astype("f")
    layer.set()
    y, gradients = layer.run([layer.built.outputs["y"], layer.gradients], x,
                             rng.normal(size=x.shape))
    expected = cases.oracle(x, axis)
    unit = 2.0**-8 if dtype == tf.bfloat16 else 2.0**-11
    self.assertEqual(y.dtype, dtype.as_numpy_dtype)
    self.assertAllClose(y.astype("f"), expected.y, rtol=unit, atol=2 * unit)
    self.assertEqual({v.dtype.base_dtype for v in layer.built.variables},
                     {tf.float32})
    mean, variance = layer.update(x)
    self.assertAllClose(mean, expected.mean, rtol=1e-5)
    self.assertAllClose(variance, expected.unbiased, rtol=1e-4)
    for gradient in gradients:
      self.assertAllInSet(np.isfinite(gradient.astype("f")), [True])

  @parameterized.product(layout=("matrix", "image_last", "image_middle"))
  def test_large_mean_keeps_precision(self, layout):
    """Mean 1000 and deviation 0.1: a difference of squares would be noise."""
    shape, axis = cases.LAYOUTS[layout]
    layer = self.layer(3, shape, axis, momentum=0.0)
    plain = cases.Plain(shape, axis)
    self.addCleanup(plain.session.close)
    rng = np.random.RandomState(0)
    x = rng.normal(1000.0, 0.1, [64, *shape]).astype("f")
    targets = rng.normal(size=x.shape).astype("f")
    layer.set()
    y, gradients = layer.run([layer.built.outputs["y"], layer.gradients], x,
                             targets)
    expected = cases.oracle(x, axis)
    self.assertAllClose(y, expected.y, rtol=1e-3, atol=2e-3)
    self.assertAllClose(layer.update(x)[1], expected.unbiased, rtol=1e-3)
    for one, other in zip(plain.run(x, targets, np.ones(3), np.zeros(3)),
                          gradients):
      self.assertAllClose(one, other, rtol=2e-3, atol=2e-3 * np.abs(one).max())

  def test_many_elements(self):
    layer = self.layer(2, [512, 512, 1], momentum=0.0)
    x = np.random.RandomState(0).normal(3.0, 2.0, [5, 512, 512, 1]).astype("f")
    layer.set()
    mean, variance = layer.update(x)
    self.assertAllClose(mean, cases.oracle(x).mean, rtol=1e-4)
    # No better than TensorFlow's kernel, which adds up in float32.
    self.assertAllClose(variance, cases.oracle(x).unbiased, rtol=1e-3)

  @parameterized.product(num_towers=(1, 2, 4),
                         shape=([3], [1, 1, 3], [3, 1, 1]))
  def test_one_element_per_channel_and_constant_inputs(self, num_towers, shape):
    axis = shape.index(3) + 1
    layer = self.layer(num_towers, shape, axis)
    for batch in (1, 6):
      x = np.full([batch, *shape], 7.0)
      layer.set([2.0] * 3, [5.0] * 3, [1.0] * 3, [3.0] * 3)
      y, (dx, _, _) = layer.run([layer.built.outputs["y"], layer.gradients], x,
                                np.ones(x.shape))
      # The mean may be off by a bit in the last place.
      self.assertAllClose(y, np.full(x.shape, 5.0), atol=2e-4)
      self.assertAllClose(dx, np.zeros(x.shape), atol=1e-4)
      self.assertAllClose(layer.update(x), [[2.5] * 3, [2.25] * 3])

  @parameterized.product(num_towers=(1, 2, 4), dtype=(tf.float32, tf.float64))
  def test_c003_unbiased_by_the_global_count(self, num_towers, dtype):
    layer = self.layer(num_towers, [1], dtype=dtype, momentum=0.0)
    x = [[1.0], [2.0], [3.0], [4.0]]
    layer.set()
    y = layer.run(layer.built.outputs["y"], x)
    self.assertAllClose(y, (np.array(x) - 2.5) / np.sqrt(1.25 + cases.EPSILON))
    self.assertAllClose(layer.update(x), [[2.5], [5 / 3]])

  def test_c077_gradients_of_gamma_and_beta_are_counted_once(self):
    rng = np.random.RandomState(0)
    x, targets = rng.normal(size=[2, 8, 4, 5, 3])
    gradients = []
    for num_towers in (1, 2, 4):
      layer = self.layer(num_towers, [4, 5, 3])
      layer.set()
      gradients.append(layer.run(layer.gradients[1:], x, targets))
    self.assertAllClose(gradients[0], gradients[1], rtol=1e-5, atol=1e-5)
    self.assertAllClose(gradients[0], gradients[2], rtol=1e-5, atol=1e-5)
    self.assertGreater(np.abs(gradients[0]).max(), 0.1)

  @parameterized.product(center=(True, False), scale=(True, False),
                         dtype=(tf.float32, tf.float64))
  def test_center_and_scale(self, center, scale, dtype):
    layer = self.layer(2, [4, 3], dtype=dtype, center=center, scale=scale)
    names = ["gamma"] * scale + ["beta"] * center
    self.assertEqual(
        [v.op.name for v in layer.built.variables],
        [f"batch_normalization/{name}"
         for name in names + ["moving_mean", "moving_variance"]])
    self.assertLen(layer.built.trainable_variables, len(names))
    gamma, beta = [2.0] * scale, [5.0] * center
    layer.set(*[np.full([3], v) for v in gamma + beta + [0.0, 1.0]])
    x = np.random.RandomState(0).normal(size=[5, 4, 3])
    self.assertAllClose(
        layer.run(layer.built.outputs["y"], x),
        cases.oracle(x, -1, *(gamma or [1.0]), *(beta or [0.0])).y, rtol=1e-5,
        atol=1e-5)


class RowsTest(cases.LayerTestCase):
  """Towers with different numbers of rows, or none."""

  @parameterized.product(layout=("image_last", "image_first"),
                         dtype=(tf.float32, tf.float64),
                         training=(True, lambda: tf.placeholder(tf.bool, [])))
  def test_c039_towers_of_different_sizes(self, layout, dtype, training):
    training = training() if callable(training) else training
    axis = cases.LAYOUTS[layout][1]
    sizes = [[2, 4, 5], [4, 3, 7], [1, 6, 1]]
    shapes = [[n, h, w, 3] if axis == -1 else [n, 3, h, w] for n, h, w in sizes]
    rng = np.random.RandomState(0)
    shards = [rng.normal(k, 2.0 + k, shape) for k, shape in enumerate(shapes)]
    unknown = [[None, 3][k == axis % 4] for k in range(4)]
    inputs = [tf.placeholder(dtype, unknown) for _ in shards]

    def model(x):
      y = towers.batch_norm(x, axis=axis, training=training, momentum=0.0)
      return {"sum": tf.reduce_sum(y), "y": tf.reshape(y, [-1])}

    built = towers.build_towers(
        model, testing.devices(3), inputs=towers.PerTower(inputs))
    expected = cases.oracle(np.concatenate(
        [np.moveaxis(s, axis, -1).reshape(-1, 3) for s in shards]))
    feed = dict(zip(inputs, shards))
    if training is not True:
      feed[training] = True
    with testing.session(initialize=True) as sess:
      ys, _ = sess.run([[tower.outputs["y"] for tower in built.towers],
                        built.update_ops], feed)
      moving = sess.run(built.variables[-2:])
    actual = np.concatenate([
        np.moveaxis(y.reshape(shape), axis, -1).reshape(-1, 3)
        for y, shape in zip(ys, shapes)])
    self.assertAllClose(actual, expected.y, rtol=1e-5, atol=1e-5)
    self.assertAllClose(moving, [expected.mean, expected.unbiased], rtol=1e-5)

  def test_c001_a_tower_without_rows(self):
    layer = self.layer(2, [3], momentum=0.9)
    rng = np.random.RandomState(0)
    layer.set()
    mean, variance = np.zeros(3), np.ones(3)
    for rows in (4, 1, 3, 1):
      x = rng.normal(2.0, 3.0, [rows, 3])
      mean = cases.moved(mean, cases.oracle(x).mean, 0.9)
      variance = cases.moved(variance, cases.oracle(x).unbiased, 0.9)
      self.assertAllClose(layer.update(x), [mean, variance], rtol=1e-5)
    for value in layer.variables():
      self.assertAllInSet(np.isfinite(value), [True])

  @parameterized.product(dtype=(tf.float32, tf.float64), empty=(0, 1, 2))
  def test_c001_an_explicit_empty_feed(self, dtype, empty):
    inputs = [tf.placeholder(dtype, [None, 2, 3]) for _ in range(3)]
    built = towers.build_towers(
        lambda x: {"y": towers.batch_norm(x, training=True, momentum=0.0)},
        testing.devices(3), inputs=towers.PerTower(inputs))
    shards = [np.random.RandomState(k).normal(k, 1.0, [(k != empty) * (k + 2),
                                                       2, 3])
              for k in range(3)]
    expected = cases.oracle(np.concatenate(shards))
    with testing.session(initialize=True) as sess:
      y, _ = sess.run([built.outputs["y"], built.update_ops],
                      dict(zip(inputs, shards)))
      self.assertAllClose(y, expected.y, rtol=1e-5, atol=1e-5)
      self.assertAllClose(sess.run(built.variables[-2:]),
                          [expected.mean, expected.unbiased], rtol=1e-5)

  def test_c013_moving_statistics_are_those_of_all_towers(self):
    """Sorted data: the first tower sees N(0, 1), the second N(4, 1)."""
    layer = self.layer(2, [1], momentum=0.9)
    rng = np.random.RandomState(0)
    layer.set()
    for _ in range(100):
      mean, variance = layer.update(
          np.concatenate([rng.normal(m, 1.0, [32, 1]) for m in (0.0, 4.0)]))
    self.assertAllClose(mean, [2.0], atol=0.1)
    self.assertAllClose(variance, [5.0], atol=0.3)


if __name__ == "__main__":
  tf.test.main()
