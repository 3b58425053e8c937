"""Tests for towers.merge, towers.all_reduce and towers.all_gather."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

BATCH_SIZES = range(1, 10)


def build(model, num_towers, inputs=None, **options):
  return towers.build_towers(
      model, testing.devices(num_towers), inputs=inputs, **options)


def cross_ops():
  return [op for op in tf.get_default_graph().get_operations()
          if op.name.startswith("cross_tower/")]


class MergeTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(1, 2, 3, 4)
  def test_calls_once_with_all_values_in_tower_order(self, num_towers):
    calls = []

    def fn(values):
      calls.append(values)
      return tf.stack([value["a"] for value in values]), values[-1]["b"][0]

    def model():
      index = towers.current_tower().index
      value = {"a": tf.constant(index), "b": [tf.constant(10.0 * index)]}
      stacked, last = towers.merge(fn, value)
      return {"stacked": stacked, "last": last}

    built = build(model, num_towers)
    self.assertLen(calls, 1)
    self.assertLen(calls[0], num_towers)
    with testing.session() as sess:
      for outputs in sess.run([tower.outputs for tower in built.towers]):
        self.assertAllEqual(outputs["stacked"], np.arange(num_towers))
        self.assertEqual(outputs["last"], 10.0 * (num_towers - 1))

  def test_ops_stand_in_the_scope_of_the_model_on_the_parameter_device(self):
    def model(x):
      with tf.name_scope("block"):
        x = towers.merge(lambda values: tf.add_n(values, name="total"), x)
      return {"y": towers.merge(lambda values: values[0] * 2.0, x)}

    build(model, 3, tf.ones([3, 2]), parameter_device="/cpu:4")
    ops = cross_ops()
    self.assertIn("cross_tower/block/total", [op.name for op in ops])
    self.assertIn("cross_tower/merge/mul", [op.name for op in ops])
    self.assertEqual({op.device for op in ops if "/block/" in op.name},
                     {"/device:CPU:4"})
    self.assertLen([op for op in ops if op.type == "IdentityN"], 2)

  @parameterized.parameters(1, 2, 3)
  def test_gradient_and_second_derivative(self, num_towers):
    """As on one device: of the sum of squares over the batch."""
    x = tf.placeholder(tf.float64, [None, 2])

    def model(x):
      total = towers.merge(tf.add_n, tf.reduce_sum(x**2, axis=0))
      return tf.reduce_mean(tf.reduce_sum(x * tf.sin(total), axis=1))

    built = build(model, num_towers, x)
    plain = tf.reduce_mean(
        tf.reduce_sum(x * tf.sin(tf.reduce_sum(x**2, axis=0)), axis=1))
    first, second = [], []
    for loss in (plain, built.loss):
      first.append(tf.gradients(loss, x)[0])
      second.append(tf.gradients(tf.reduce_sum(tf.square(first[-1])), x)[0])
    with testing.session() as sess:
      for batch in range(num_towers, 10):
        value = np.random.RandomState(batch).normal(size=[batch, 2])
        for pair in sess.run([first, second], {x: value}):
          self.assertAllClose(*pair, rtol=1e-10, atol=1e-10)

  def test_integers_strings_and_python_values_pass(self):
    def model(x):
      count = towers.merge(tf.add_n, tf.shape(x)[0])
      names = towers.merge(tf.stack, tf.constant("n"))
      nothing, number = towers.merge(lambda values: (None, 3), x)
      self.assertIsNone(nothing)
      self.assertEqual(number, 3)
      return {"count": count, "names": tf.strings.length(names)[:1]}

    built = build(model, 2, tf.ones([5, 3]))
    with testing.session() as sess:
      self.assertEqual(sess.run(built.towers[1].outputs["count"]), 5)

  def test_in_a_conditional_that_all_towers_share(self):
    phase = tf.placeholder(tf.bool, [])
    built = build(
        lambda x: {"y": x + tf.cond(
            phase, lambda: towers.merge(tf.add_n, tf.reduce_sum(x)),
            lambda: 0.0)}, 2, tf.constant([[1.0], [2.0], [4.0]]))
    with testing.session() as sess:
      self.assertAllClose(sess.run(built.outputs["y"], {phase: True}),
                          [[8.0], [9.0], [11.0]])
      self.assertAllClose(sess.run(built.outputs["y"], {phase: False}),
                          [[1.0], [2.0], [4.0]])

  def test_outside_a_build_there_is_one_value(self):
    x = tf.constant([1.0])
    self.assertIs(towers.merge(lambda values: values, x)[0], x)

  @parameterized.named_parameters(
      ("types", lambda k: tf.constant(1, [tf.int32, tf.float32][k]),
       "`block` must meet with values alike .* expected int32 as in tower 0, "
       "got float32 in tower 1"),
      ("structures", lambda k: [tf.constant(1)] * (k + 1),
       r"got \['int32', 'int32'\] in tower 1"))
  def test_values_must_be_alike(self, value, message):
    def model():
      with tf.name_scope("block"):
        return {"y": towers.merge(
            lambda values: tf.nest.flatten(values)[0],
            value(towers.current_tower().index))}

    with self.assertRaisesRegex(ValueError, "towers.merge .*" + message):
      build(model, 2)

  def test_error_of_the_function_arrives_as_it_is(self):
    def fail(values):
      raise KeyError(f"no {len(values)} values")

    with self.assertRaisesRegex(KeyError, "no 3 values"):
      build(lambda x: towers.merge(fail, x), 3, tf.ones([3]))

  @parameterized.named_parameters(
      ("merge", "towers.merge", lambda x: towers.merge(tf.add_n, x)),
      ("all_reduce", "towers.all_reduce", towers.all_reduce),
      ("all_gather", "towers.all_gather", towers.all_gather))
  def test_refused_where_towers_cannot_meet(self, name, call):
    loop = lambda x: tf.while_loop(
        lambda i, _: i < 2, lambda i, x: (i + 1, call(x)), [0, x])[1]
    with self.assertRaisesRegex(
        ValueError, name + r" `while` \(tower 0\) must not stand inside a while"
        " loop"):
      build(loop, 2, tf.ones([4, 3]))
    tf.enable_control_flow_v2()
    self.addCleanup(tf.disable_control_flow_v2)
    phase = tf.placeholder(tf.bool, [])
    with self.assertRaisesRegex(
        ValueError, name + r".* \(tower 0\) must not stand inside a function"):
      build(lambda x: tf.cond(phase, lambda: call(x), lambda: x), 2,
            tf.ones([4, 3]))


class AllReduceTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(num_towers=(1, 2, 3, 4), unknown=(True, False))
  def test_sum_and_mean_are_those_of_the_batch(self, num_towers, unknown):
    for batch in (1, 2, 3, 5, 8):
      with tf.Graph().as_default():
        value = np.random.RandomState(batch).normal(size=[batch, 2])
        x = tf.placeholder(tf.float64, [None if unknown else batch, 2])
        ones = tf.placeholder(tf.int32, [None if unknown else batch])

        def model(x, ones):
          return {
              "sum": towers.all_reduce(tf.reduce_sum(x, axis=0)),
              "mean": towers.all_reduce(tf.reduce_mean(x, axis=0), "mean"),
              "count": towers.all_reduce(tf.reduce_sum(ones, keepdims=True)),
          }

        built = build(model, num_towers, (x, ones))
        with testing.session() as sess:
          each = sess.run([tower.outputs for tower in built.towers],
                          {x: value, ones: [1] * batch})
        for outputs in each:
          self.assertAllClose(outputs["sum"], value.sum(axis=0))
          self.assertAllClose(outputs["mean"], value.mean(axis=0))
          self.assertEqual(outputs["count"], batch)

  @parameterized.product(op=("sum", "mean"), num_towers=(1, 2, 3, 4))
  def test_gradient(self, op, num_towers):
    x = tf.placeholder(tf.float64, [None, 2])
    reduce = {"sum": tf.reduce_sum, "mean": tf.reduce_mean}[op]

    def loss_of(x, total):
      return tf.reduce_mean(tf.reduce_sum(tf.sin(x) * total**2, axis=1))

    built = build(
        lambda x: loss_of(x, towers.all_reduce(reduce(x, axis=0), op)),
        num_towers, x)
    gradients = [tf.gradients(loss, x)[0]
                 for loss in (built.loss, loss_of(x, reduce(x, axis=0)))]
    with testing.session() as sess:
      for batch in BATCH_SIZES:
        value = np.random.RandomState(batch).normal(size=[batch, 2])
        self.assertAllClose(*sess.run(gradients, {x: value}), rtol=1e-10)

  def test_without_inputs_each_tower_counts_alike(self):
    built = build(
        lambda: {"mean": towers.all_reduce(
            tf.constant(1.0 + towers.current_tower().index), "mean")}, 4)
    with testing.session() as sess:
      self.assertEqual(sess.run(built.towers[3].outputs["mean"]), 2.5)

  def test_outside_a_build_it_is_the_value(self):
    x = tf.constant([1.0])
    self.assertIs(towers.all_reduce(x), x)
    self.assertIs(towers.all_reduce(x, "mean"), x)
    self.assertLen(tf.get_default_graph().get_operations(), 1)

  @parameterized.named_parameters(
      ("op", ValueError, 1.0, "max",
       "`op` must be .* expected 'sum' or 'mean', got 'max'"),
      ("integers", TypeError, 1, "mean",
       "`x` must be of a floating type for a mean: got int32"))
  def test_rejects(self, error, x, op, message):
    with self.assertRaisesRegex(error, message):
      towers.all_reduce(tf.constant(x), op)
    with self.assertRaisesRegex(error, message):
      build(lambda: towers.all_reduce(tf.constant(x), op), 2)


class AllGatherTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(num_towers=(1, 2, 3, 4), unknown=(True, False))
  def test_rows_in_batch_order_without_borrowed_ones(self, num_towers, unknown):
    for batch in (1, 2, 3, 5, 8):
      with tf.Graph().as_default():
        x = tf.placeholder(tf.int64, [None if unknown else batch, 2])
        built = build(lambda x: {"all": towers.all_gather(x)}, num_towers, x)
        value = np.arange(2 * batch).reshape([batch, 2])
        with testing.session() as sess:
          for tower in built.towers:
            self.assertAllEqual(sess.run(tower.outputs["all"], {x: value}),
                                value)

  @parameterized.parameters(1, 2, 3, 4)
  def test_contrastive_loss_equals_one_device(self, num_towers):
    x = tf.placeholder(tf.float64, [None, 4])
    labels = tf.placeholder(tf.int32, [None])

    def model(x, labels):
      kernel = tf.get_variable("kernel", [4, 3], tf.float64)
      z = tf.nn.l2_normalize(tf.matmul(x, kernel), axis=1)
      scores = tf.matmul(z, towers.all_gather(z), transpose_b=True)
      same = tf.equal(labels[:, tf.newaxis], towers.all_gather(labels))
      return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(
          labels=tf.cast(same, tf.float64), logits=scores))

    with tf.variable_scope("", reuse=tf.AUTO_REUSE, use_resource=True):
      plain = model(x, labels)
      built = build(model, num_towers, (x, labels))
    variable, = built.variables
    expected = [plain, *tf.gradients(plain, [variable, x])]
    actual = [built.loss, built.gradients()[0].gradient,
              tf.gradients(built.loss, x)[0]]
    with testing.session(initialize=True) as sess:
      for batch in BATCH_SIZES:
        rng = np.random.RandomState(batch)
        feed = {x: rng.normal(size=[batch, 4]),
                labels: rng.randint(0, 3, batch)}
        for one, other in zip(*sess.run([expected, actual], feed)):
          self.assertAllClose(one, other, rtol=1e-10, atol=1e-12)

  def test_outside_a_build_it_is_the_value(self):
    x = tf.constant([1.0])
    self.assertIs(towers.all_gather(x), x)

  def test_rejects_a_scalar(self):
    message = ("`x` must have rows to gather: got the scalar `.*`. For a "
               "scalar use `towers.all_reduce`")
    with self.assertRaisesRegex(ValueError, message):
      towers.all_gather(tf.constant(1.0))
    with self.assertRaisesRegex(ValueError, message):
      build(lambda x: towers.all_gather(tf.reduce_sum(x)), 2, tf.ones([4]))


if __name__ == "__main__":
  tf.test.main()
