"""Tests for towers.gradients: one backward pass, and its averages."""

import sys

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import references
import testing
import towers

gradients = sys.modules["towers.gradients"]


def batch(rows=7, columns=4):
  return np.random.RandomState(rows).normal(size=[rows, columns])


def weights(name, shape, dtype=tf.float64, **options):
  return tf.get_variable(name, shape, dtype, **options)


def by_name(pairs):
  return {variable.op.name: gradient for gradient, variable in pairs}


def plain_and_towers(test, make_model, values, num_towers=3, **options):
  references.assert_equal(
      test, references.run(make_model, values, num_towers, **options),
      references.run(make_model, values))


class AverageTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(1, 2, 3, 4)
  def test_dense_equals_numpy(self, num_towers):
    """The mean over all rows, not the mean of the towers' means."""
    x, w = batch(), np.arange(4.0)[:, np.newaxis]
    graph = towers.build_towers(
        lambda x: tf.reduce_mean(tf.square(tf.matmul(x, weights(
            "w", [4, 1], initializer=tf.constant_initializer(w))))),
        testing.devices(num_towers), inputs=x)
    (gradient, variable), = graph.gradients()
    self.assertEqual(variable.op.name, "w")
    with testing.session(initialize=True) as sess:
      self.assertAllClose(
          sess.run(gradient), 2 * x.T @ x @ w / len(x), 1e-12, 1e-12)

  def test_is_made_on_the_device_of_the_variable(self):
    graph = towers.build_towers(
        lambda x: tf.reduce_mean(tf.matmul(x, weights("w", [4, 1]))),
        testing.devices(3), inputs=batch(), parameter_device="/cpu:4")
    before = set(tf.get_default_graph().get_operations())
    graph.gradients()
    added = set(tf.get_default_graph().get_operations()) - before
    sums = [op for op in added if op.type == "AddN"]
    self.assertLen(sums, 1)
    self.assertEqual(sums[0].device, "/device:CPU:4")
    self.assertEqual(
        {(op.name.split("/")[1], op.device) for op in added
         if op.type == "MatMul"},
        {(f"tower_{i}", f"/device:CPU:{i}") for i in range(3)})

  def test_no_tower_gives_what_one_alone_does_not_touch(self):
    """A variable that some towers use, and one that none does."""
    def model(x):
      w, some = weights("w", [4, 1]), weights("some", [])
      weights("none", [2])
      loss = tf.reduce_mean(tf.matmul(x, w))
      if towers.current_tower().index == 1:
        loss += 3 * some
      return loss

    graph = towers.build_towers(model, testing.devices(3), inputs=batch(7))
    found = by_name(graph.gradients())
    self.assertIsNone(found["none"])
    with testing.session(initialize=True) as sess:
      self.assertAllClose(sess.run(found["some"]), 3 * 2 / 7)

  def test_of_variables_that_do_not_train(self):
    def model(x):
      return tf.reduce_mean(
          tf.matmul(x, weights("w", [4, 1], trainable=False)))

    graph = towers.build_towers(model, testing.devices(2), inputs=batch(6))
    self.assertEqual(graph.gradients(), [])
    (gradient, _), = graph.gradients(var_list=tf.global_variables())
    with testing.session(initialize=True) as sess:
      self.assertAllClose(sess.run(gradient)[:, 0], batch(6).mean(0))

  @parameterized.parameters(1, 3)
  def test_weight_decay_counts_once(self, num_towers):
    """Over all trainable variables, also those from outside the towers."""
    def make_model():
      outside = weights("outside", [3])

      def model(x):
        y = tf.matmul(x, weights("w", [4, 3])) + outside
        return tf.reduce_mean(y**2) + 0.1 * tf.add_n(
            [tf.nn.l2_loss(v) for v in tf.trainable_variables()])

      return model

    plain_and_towers(self, make_model, [batch()], num_towers)

  def test_weight_decay_may_stand_outside(self):
    """A loss of the graph's loss and of the variables themselves."""
    graph = towers.build_towers(
        lambda x: tf.reduce_mean(tf.matmul(x, weights("w", [4, 1]))),
        testing.devices(2), inputs=batch(6))
    w, = graph.variables
    (gradient, _), = graph.gradients(graph.loss + tf.nn.l2_loss(w))
    with testing.session(initialize=True) as sess:
      self.assertAllClose(*sess.run((gradient, w + batch(6).mean(0)[:, None])))

  @parameterized.parameters(2, 4)
  def test_through_what_the_towers_close_over(self, num_towers):
    def make_model():
      hidden = tf.tanh(weights("outside", [4, 4]))

      def model(x):
        y = tf.matmul(tf.matmul(x, hidden), weights("w", [4, 1]))
        return tf.reduce_mean(y**2)

      return model

    plain_and_towers(self, make_model, [batch()], num_towers)

  def test_through_partitioned_variables(self):
    def model(x):
      w = weights("w", [4, 3], partitioner=tf.fixed_size_partitioner(2))
      return tf.reduce_mean(tf.matmul(x, tf.convert_to_tensor(w))**2)

    plain_and_towers(self, lambda: model, [batch()])

  def test_through_control_flow(self):
    def model(x):
      def step(i, h):
        h = tf.tanh(tf.matmul(h, weights("w", [4, 4])))
        return i + 1, tf.cond(i > 0, lambda: h + weights("b", [4]), lambda: h)

      _, h = tf.while_loop(lambda i, _: i < 3, step, [0, x])
      return tf.reduce_mean(h**2)

    plain_and_towers(self, lambda: model, [batch()])

  def test_through_statistics_that_a_fused_layer_alone_does_not_use(self):
    """TensorFlow fills in zeros for the output that the loss does not need."""
    def model(x):
      h = tf.matmul(x, weights("w", [4, 4], tf.float32))[:, None, None]
      _, mean, _ = tf.nn.fused_batch_norm(
          h, weights("scale", [4], tf.float32), tf.zeros([4]))
      return tf.reduce_mean(mean) + tf.reduce_mean(h**2)

    values = [batch().astype(np.float32)]
    references.assert_equal(
        self, references.run(lambda: model, values, 2, sync_batch_norm=False),
        references.run(lambda: model, values), 1e-5)

  def test_twice_through_a_fused_layer_of_one_tower(self):
    def model(x):
      h = tf.matmul(x, weights("w", [4, 4], tf.float32))
      y = tf.tanh(towers.batch_norm(h, training=True))
      gradient, = tf.gradients(y, x)
      return tf.reduce_mean(y**2) + tf.reduce_mean(gradient**2)

    values = [batch().astype(np.float32)]
    references.assert_equal(self, references.run(lambda: model, values, 1),
                            references.run(lambda: model, values), 1e-5)

  def test_ops_grow_linearly_with_the_towers(self):
    """Eight layers whose statistics tie the towers together."""
    counts, matmuls = {}, {}
    for num_towers in (1, 2, 4, 8):
      with tf.Graph().as_default() as graph:
        def model(x):
          for i in range(8):
            x = tf.matmul(x, weights(f"w_{i}", [4, 4], tf.float32))
            x = towers.batch_norm(x, training=True)
          return tf.reduce_mean(x**2)

        built = towers.build_towers(
            model, num_towers, inputs=tf.placeholder(tf.float32, [None, 4]))
        before = set(graph.get_operations())
        built.gradients()
        added = set(graph.get_operations()) - before
        counts[num_towers] = len(added)
        matmuls[num_towers] = sum(op.type == "MatMul" for op in added)
    for num_towers, count in matmuls.items():
      self.assertEqual(count, num_towers * 8 * 2)  # By weights and by inputs.
    per_tower = (counts[8] - counts[4]) / 4
    self.assertAllClose(per_tower, (counts[4] - counts[2]) / 2, 0.1)


class SparseTest(parameterized.TestCase, tf.test.TestCase):

  def embedding(self, rows=100000):
    """[3, 3, 7] in the first tower, [7, 9] in the second."""
    def model(ids):
      table = tf.get_variable("table", [rows, 8],
                              initializer=tf.ones_initializer())
      return tf.reduce_mean(tf.reduce_sum(tf.gather(table, ids), axis=1))

    return towers.build_towers(model, testing.devices(2),
                               inputs=np.array([3, 3, 7, 7, 9]))

  def test_stays_sparse(self):
    """c023: nothing of the size of the table among the averaging ops."""
    graph = self.embedding()
    before = set(tf.get_default_graph().get_operations())
    (gradient, table), = graph.gradients()
    self.assertIsInstance(gradient, tf.IndexedSlices)
    self.assertEqual(gradient.values.device, table.device)
    added = set(tf.get_default_graph().get_operations()) - before
    large = [x.name for op in added for x in op.outputs
             if x.shape.rank and x.shape.as_list()[0] == 100000]
    self.assertEmpty(large)
    with testing.session() as sess:
      indices, values, shape = sess.run(
          (gradient.indices, gradient.values, gradient.dense_shape))
    self.assertAllEqual(indices, [3, 3, 7, 7, 9])
    self.assertAllClose(values, np.full([5, 8], 1 / 5))
    self.assertAllEqual(shape, [100000, 8])

  @parameterized.named_parameters(
      ("sgd", lambda: tf.train.GradientDescentOptimizer(0.5)),
      ("adam", lambda: tf.train.AdamOptimizer(0.5)))
  def test_updates_as_one_device_does(self, optimizer):
    """c023: the tables after two steps are equal."""
    train_op = self.embedding(rows=12).minimize(optimizer())
    with testing.session(initialize=True) as sess:
      sess.run([train_op])
      sess.run([train_op])
      actual = sess.run(tf.trainable_variables()[0])
    with tf.Graph().as_default():
      table = tf.get_variable("table", [12, 8], use_resource=True,
                              initializer=tf.ones_initializer())
      loss = tf.reduce_mean(tf.reduce_sum(
          tf.gather(table, [3, 3, 7, 7, 9]), axis=1))
      train_op = optimizer().minimize(loss)
      with testing.session(initialize=True) as sess:
        sess.run([train_op])
        sess.run([train_op])
        self.assertAllClose(actual, sess.run(table), 1e-6, 1e-6)

  def test_no_tower_sees_rows_half_updated(self):
    """c069: 500 steps, each equal to the reference."""
    ids = tf.placeholder(tf.int32, [None])

    def model(ids):
      rows = tf.gather(weights("table", [9, 3]), ids)
      return {"loss": tf.reduce_mean(tf.reduce_sum(rows**2, axis=1) / 2),
              "rows": rows}

    graph = towers.build_towers(model, testing.devices(2), inputs=ids)
    (gradient, table), = graph.gradients()
    train_op = graph.minimize(tf.train.GradientDescentOptimizer(0.25))
    rng = np.random.RandomState(0)
    with testing.session(initialize=True) as sess:
      expected = sess.run(table)
      for step in range(500):
        looked_up = rng.randint(0, 9, [rng.randint(1, 6)])
        rows, indices, _ = sess.run(
            (graph.outputs["rows"], gradient.indices, train_op),
            {ids: looked_up})
        self.assertAllClose(rows, expected[looked_up], 1e-12, 1e-12)
        self.assertContainsSubset(indices, looked_up)
        step = np.zeros_like(expected)
        np.add.at(step, looked_up, expected[looked_up] / len(looked_up))
        expected = expected - 0.25 * step
      self.assertAllClose(sess.run(table), expected, 1e-9, 1e-12)

  def test_mixes_with_dense(self):
    def model(x):
      table = weights("table", [5, 4])
      ids = tf.cast(tf.abs(x[:, 0]), tf.int32)
      y = tf.gather(table, ids) + tf.matmul(x, table, transpose_b=True)[:, :4]
      return tf.reduce_mean(y**2) + tf.nn.l2_loss(table)

    plain_and_towers(self, lambda: model, [batch()])

  def test_sparse_in_one_tower_and_dense_in_another(self):
    def model(x):
      table = weights("table", [2, 4])
      if towers.current_tower().index:
        return tf.reduce_mean(tf.reduce_sum(tf.gather(table, [0]) * x, 1))
      return tf.reduce_mean(tf.reduce_sum(table[:1] * x, 1))

    graph = towers.build_towers(model, testing.devices(2), inputs=batch())
    (gradient, _), = graph.gradients()
    with testing.session(initialize=True) as sess:
      self.assertAllClose(sess.run(tf.convert_to_tensor(gradient)),
                          [batch().mean(0), np.zeros(4)])


class AddUpTest(tf.test.TestCase):

  def slices(self, indices, dtype=tf.int32):
    return tf.IndexedSlices(tf.ones([len(indices), 2]),
                            tf.constant(indices, dtype), tf.constant([5, 2]))

  def test_nothing(self):
    self.assertIsNone(gradients.add_up([None, None]))

  def test_one_stays_as_it_is(self):
    x, slices = tf.ones([2]), self.slices([1])
    self.assertIs(gradients.add_up([None, x]), x)
    self.assertIs(gradients.add_up([slices, None]), slices)

  def test_indices_of_several_types(self):
    total = gradients.add_up([self.slices([1]), self.slices([4, 1], tf.int64)])
    self.assertEqual(total.indices.dtype, tf.int64)
    with testing.session() as sess:
      self.assertAllEqual(sess.run(total.indices), [1, 4, 1])

  def test_sparse_and_dense(self):
    total = gradients.add_up([self.slices([1]), tf.ones([5, 2])])
    with testing.session() as sess:
      self.assertAllEqual(sess.run(total)[:, 0], [1, 2, 1, 1, 1])


class OfAllGradientsTest(tf.test.TestCase):
  """The numbers are those of `test_train_step.py`; here, what is built."""

  def pairs(self, dtype=tf.float32):
    """Returns a dense gradient on CPU 1 and a sparse one on CPU 2."""
    with tf.device("/cpu:1"):
      dense = weights("dense", [2], dtype)
    with tf.device("/cpu:2"):
      table = weights("table", [5, 2], dtype)
    sparse = tf.IndexedSlices(tf.ones([3, 2], dtype), tf.constant([4, 1, 4]),
                              tf.constant([5, 2]))
    return [gradients.GradientAndVariable(tf.ones([2], dtype), dense),
            gradients.GradientAndVariable(sparse, table)]

  def ops(self, kind):
    return [op for op in tf.get_default_graph().get_operations()
            if op.type == kind]

  def assert_devices(self, kind, *numbers):
    self.assertEqual(sorted(op.device for op in self.ops(kind)),
                     [f"/device:CPU:{number}" for number in numbers])

  def test_norms_are_made_where_the_variables_are(self):
    gradients.clip_by_global_norm(self.pairs(), 1.0)
    self.assert_devices("L2Loss", 1, 2)
    self.assert_devices("Unique", 2)

  def test_clipped_sparse_gradients_stay_sparse(self):
    _, (gradient, _) = gradients.clip_by_global_norm(self.pairs(), 1.0)
    # What makes a sparse gradient dense would add up its rows a second time.
    self.assertLen(self.ops("UnsortedSegmentSum"), 1)
    with testing.session() as sess:
      self.assertAllEqual(sess.run(gradient.indices), [4, 1])
      self.assertAllEqual(sess.run(gradient.dense_shape), [5, 2])

  def test_norm_is_of_the_type_of_the_gradients(self):
    for dtype in (tf.float32, tf.float64):
      with tf.Graph().as_default():
        gradients.clip_by_global_norm(self.pairs(dtype), 1.0)
        self.assertEqual([op.outputs[0].dtype for op in self.ops("Sqrt")],
                         [dtype])

  def test_are_checked_where_the_variables_are(self):
    gradients.all_finite(self.pairs())
    self.assert_devices("IsFinite", 1, 2)
    self.assertEmpty(self.ops("UnsortedSegmentSum"))


if __name__ == "__main__":
  tf.test.main()
