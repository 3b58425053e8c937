"""Tests for towers.moments."""

import importlib
import itertools

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

# `towers.moments` is the function.
moments = importlib.import_module("towers.moments")

BATCH_SIZES = range(1, 10)
ALL_AXES = [axes for count in (1, 2, 3)
            for axes in itertools.combinations(range(3), count)]


def numpy_moments(x, axes):
  x = np.asarray(x, np.float64)
  return x.mean(axis=tuple(axes)), x.var(axis=tuple(axes))


def build(model, num_towers, inputs, **options):
  return towers.build_towers(
      model, testing.devices(num_towers), inputs=inputs, **options)


def moments_op(axes):
  return lambda x: towers.moments(x, axes)._asdict()


def cross_ops():
  return [op for op in tf.get_default_graph().get_operations()
          if op.name.startswith("cross_tower/moments")]


class MomentsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(axes=ALL_AXES, num_towers=(1, 3, 4))
  def test_every_set_of_axes(self, axes, num_towers):
    """Over the whole batch with axis 0, else of the tower's own rows."""
    x = tf.placeholder(tf.float32, [None, 4, 3])
    built = build(moments_op(axes), num_towers, x)
    with testing.session() as sess:
      for batch in BATCH_SIZES:
        value = np.random.RandomState(batch).normal(1.0, 2.0, [batch, 4, 3])
        each = sess.run([tower.outputs for tower in built.towers], {x: value})
        shards = np.array_split(value, num_towers)
        for outputs, shard in zip(each, shards):
          # A scalar output of a tower without rows is 0.
          if len(shard) or (0 in axes and len(axes) < 3):
            expected = numpy_moments(value if 0 in axes else shard, axes)
            self.assertAllClose([outputs["mean"], outputs["variance"]],
                                expected, rtol=1e-5, atol=1e-5)
        if 0 not in axes:
          self.assertAllClose(sess.run(built.outputs["mean"], {x: value}),
                              value.mean(axis=axes), rtol=1e-5, atol=1e-5)

  @parameterized.named_parameters(
      ("number", 0, (0,)), ("numpy_number", np.int64(0), (0,)),
      ("negative", [-3, -1], (0, 2)), ("unsorted", (2, 0), (0, 2)),
      ("array", np.array([0, 1]), (0, 1)), ("range", range(3), (0, 1, 2)))
  def test_axes_may_be_given_as(self, axes, expected):
    value = np.random.RandomState(0).normal(size=[5, 4, 3])
    built = build(moments_op(axes), 2, tf.constant(value))
    with testing.session() as sess:
      outputs = sess.run(built.towers[1].outputs)
    self.assertAllClose([outputs["mean"], outputs["variance"]],
                        numpy_moments(value, expected))

  @parameterized.product(sizes=([3, 1, 2], [0, 2, 1], [1, 0, 0]),
                         dtype=(tf.float32, tf.float64))
  def test_c039_counts_weigh(self, sizes, dtype):
    """Towers of different rows, heights and widths, or none at all."""
    inputs = [tf.placeholder(dtype, [None, None, None, 3]) for _ in sizes]
    built = build(moments_op([0, 1, 2]), 3, towers.PerTower(inputs))
    shards = [
        np.random.RandomState(k).normal(k, 1.0 + k, [size, k + 2, 5 - k, 3])
        for k, size in enumerate(sizes)]
    expected = numpy_moments(
        np.concatenate([shard.reshape(-1, 3) for shard in shards]), [0])
    with testing.session() as sess:
      for outputs in sess.run([tower.outputs for tower in built.towers],
                              dict(zip(inputs, shards))):
        self.assertAllClose([outputs["mean"], outputs["variance"]], expected,
                            rtol=1e-5)

  def test_differs_from_the_mean_of_the_towers_variances(self):
    built = build(moments_op(0), 2, tf.constant([[0.0], [0.0], [1.0], [1.0]]))
    with testing.session() as sess:
      self.assertAllEqual(sess.run(built.towers[0].outputs["variance"]), [0.25])

  @parameterized.parameters(1, 2, 3, 4)
  def test_large_mean_keeps_precision(self, num_towers):
    value = np.random.RandomState(0).normal(1000.0, 0.1, [64, 4, 3])
    value = value.astype("f")
    built = build(moments_op([0, 1]), num_towers, tf.constant(value))
    with testing.session() as sess:
      variance = sess.run(built.towers[0].outputs["variance"])
    self.assertAllClose(variance, numpy_moments(value, [0, 1])[1], rtol=1e-3)

  @parameterized.product(dtype=(tf.float16, tf.bfloat16), around=(5.0, 300.0))
  def test_c044_half_precision_gives_float32(self, dtype, around):
    value = np.random.RandomState(0).normal(around, 2.0, [7, 3]).astype(
        dtype.as_numpy_dtype)
    built = build(moments_op(0), 2, tf.constant(value))
    with testing.session() as sess:
      outputs = sess.run(built.towers[0].outputs)
    for result, expected in zip((outputs["mean"], outputs["variance"]),
                                numpy_moments(value, [0])):
      self.assertEqual(result.dtype, np.float32)
      self.assertAllClose(result, expected, rtol=1e-4)

  @parameterized.parameters(1, 2, 3, 4)
  def test_constant_input_has_no_variance(self, num_towers):
    built = build(moments_op([0, 1]), num_towers, tf.fill([5, 4, 3], 7.0))
    with testing.session() as sess:
      outputs = sess.run(built.towers[0].outputs)
    self.assertAllEqual(outputs["mean"], [7.0] * 3)
    self.assertAllEqual(outputs["variance"], [0.0] * 3)


class GradientTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("rows_1", (0,), 1), ("rows_2", (0,), 2), ("rows_4", (0,), 4),
      ("first_axes", (0, 1), 3), ("all_axes", (0, 1, 2), 3),
      ("one_axis", (1,), 3))
  def test_first_and_second_derivative(self, axes, num_towers):
    x = tf.placeholder(tf.float64, [None, 4, 3])

    def loss_of(x, mean, variance):
      rows = tf.sin(x) * mean + tf.cos(x) * tf.sqrt(variance + 0.1)
      return tf.reduce_mean(tf.reduce_sum(rows, axis=[1, 2]))

    def lined_up(x, moments):
      for axis in axes:
        moments = [tf.expand_dims(value, axis) for value in moments]
      return loss_of(x, *moments)

    built = build(lambda x: lined_up(x, towers.moments(x, axes)), num_towers, x)
    mean = tf.reduce_mean(x, axes, keepdims=True)
    plain = loss_of(
        x, mean, tf.reduce_mean(tf.square(x - mean), axes, keepdims=True))
    first, second = [], []
    for loss in (plain, built.loss):
      first.append(tf.gradients(loss, x)[0])
      second.append(tf.gradients(tf.reduce_sum(first[-1]**2), x)[0])
    with testing.session() as sess:
      for batch in (1, 2, 5, 9):
        value = np.random.RandomState(batch).normal(size=[batch, 4, 3])
        for pair in sess.run([first, second], {x: value}):
          self.assertAllClose(*pair, rtol=1e-9, atol=1e-10)

  @parameterized.parameters(1, 2, 3)
  def test_gradient_penalty_inside_the_model(self, num_towers):
    x = tf.placeholder(tf.float64, [None, 3])

    def penalty(x, moments):
      mean, variance = moments(x)
      y = (x - mean) / tf.sqrt(variance + 1e-3)
      gradient, = tf.gradients(tf.reduce_sum(tf.tanh(y)**3), x)
      return tf.reduce_mean(tf.reduce_sum(gradient**2, axis=1))

    built = build(lambda x: penalty(x, lambda x: towers.moments(x, [0])),
                  num_towers, x)
    plain = penalty(x, lambda x: (
        tf.reduce_mean(x, 0),
        tf.reduce_mean(tf.square(x - tf.reduce_mean(x, 0)), 0)))
    fetches = [[loss, tf.gradients(loss, x)[0]] for loss in (plain, built.loss)]
    with testing.session() as sess:
      for batch in (1, 2, 5, 9):
        value = np.random.RandomState(batch).normal(size=[batch, 3])
        for one, other in zip(*sess.run(fetches, {x: value})):
          self.assertAllClose(one, other, rtol=1e-8, atol=1e-9)


class GraphTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(2, 4)
  def test_reduces_in_the_tower_and_merges_on_the_parameter_device(
      self, num_towers):
    build(moments_op([0, 1]), num_towers, tf.ones([8, 4, 3]),
          parameter_device="/cpu:4")
    self.assertEqual({op.device for op in cross_ops()}, {"/device:CPU:4"})
    self.assertLen([op for op in cross_ops() if op.type == "IdentityN"], 1)
    for index in range(num_towers):
      means = [op for op in tf.get_default_graph().get_operations()
               if op.type == "Mean" and op.name.startswith(f"tower_{index}/")]
      self.assertLen(means, 2)
      self.assertEqual({op.device for op in means}, {f"/device:CPU:{index}"})

  def test_no_merge_without_the_batch_axis(self):
    build(moments_op([1, 2]), 3, tf.ones([8, 4, 3]))
    self.assertEmpty(cross_ops())

  @parameterized.parameters(True, False)
  def test_no_sync_keeps_to_the_tower(self, by_option):
    value = np.random.RandomState(0).normal(size=[5, 3])

    def model(x):
      with towers.no_sync():
        return towers.moments(x, 0)._asdict()

    built = build(moments_op(0) if by_option else model, 2, tf.constant(value),
                  sync_batch_norm=not by_option)
    self.assertEmpty(cross_ops())
    with testing.session() as sess:
      for tower, shard in zip(built.towers, (value[:3], value[3:])):
        outputs = sess.run(tower.outputs)
        self.assertAllClose([outputs["mean"], outputs["variance"]],
                            numpy_moments(shard, [0]))

  def test_outside_a_build_it_is_the_plain_function(self):
    value = np.random.RandomState(0).normal(size=[5, 4, 3])
    result = towers.moments(value, [0, 2])
    self.assertIsInstance(result, towers.Moments)
    with testing.session() as sess:
      self.assertAllClose(tuple(sess.run(result)), numpy_moments(value, [0, 2]))

  def test_shapes_are_known(self):
    x = tf.placeholder(tf.float32, [None, None, 4, 3])
    for num_towers in (1, 2):
      built = build(moments_op([0, 2]), num_towers, x)
      for value in built.towers[0].outputs.values():
        self.assertEqual(value.shape.as_list(), [None, 3])

  def test_ops_stand_under_the_name_of_the_function(self):
    build(moments_op([0]), 2, tf.ones([4, 3]))
    for tower in ("tower_0", "tower_1"):
      self.assertNotEmpty([
          op for op in tf.get_default_graph().get_operations()
          if op.name.startswith(f"{tower}/moments/")])


class ErrorsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("integers", TypeError, tf.int64, [4, 3], [0],
       "`x` must be of a floating type: got int64 "),
      ("unknown_rank", ValueError, tf.float32, None, [0],
       "`x` must have a known rank: `x:0` has none. Set it with `x.set_shape`"),
      ("outside", ValueError, tf.float32, [4, 3], [0, 2],
       r"`axes` must be .* expected values in \[-2, 2\), got \[0, 2\]"),
      ("just_outside", ValueError, tf.float32, [4, 3], [1, 2],
       r"got \[1, 2\]"),
      ("outside_below", ValueError, tf.float32, [4, 3], -3, r"got \[-3\]"),
      ("twice", ValueError, tf.float32, [4, 3], [0, -2], r"got \[0, -2\]"),
      ("none", ValueError, tf.float32, [4, 3], [], r"got \[\]"))
  def test_rejects(self, error, dtype, shape, axes, message):
    x = tf.placeholder(dtype, shape, name="x")
    with self.assertRaisesRegex(error, message):
      towers.moments(x, axes)

  def test_refused_in_a_while_loop(self):
    with self.assertRaisesRegex(
        ValueError, r"towers.moments `moments` \(tower 0\) must not stand "
        "inside a while loop"):
      build(lambda x: tf.while_loop(
          lambda i, _: i < 2,
          lambda i, x: (i + 1, x - towers.moments(x, 0).mean), [0, x])[1], 2,
            tf.ones([4, 3]))


class CountsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(((0,), 5), ((0, 2), 20), ((0, 1, 2), 60))
  def test_elements_are_counted(self, axes, expected):
    x = tf.placeholder(tf.float32, [None, 3, 4])
    known = moments.element_count(tf.zeros([5, 3, 4]), axes)
    self.assertEqual(tf.get_static_value(known), expected)
    with testing.session() as sess:
      self.assertEqual(sess.run(moments.element_count(x, axes),
                                {x: np.zeros([5, 3, 4])}), expected)

  @parameterized.parameters(False, True)
  def test_c001_towers_without_rows_count_nothing(self, in_session):
    rows = [2.0, 0.0, 1.0]
    if in_session:
      rows = [rows[0], tf.constant(rows[1]), tf.constant(rows[2])]
    counts = moments.counts_of_towers([8, 4, 4], rows, tf.float64)
    self.assertEqual(counts.dtype, tf.float64)
    with testing.session() as sess:
      self.assertAllEqual(sess.run(counts), [8.0, 0.0, 4.0])


if __name__ == "__main__":
  tf.test.main()
