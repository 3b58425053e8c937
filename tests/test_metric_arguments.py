"""Tests for towers.metric_arguments: what becomes of tensors of each kind."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


def rows(count=5):
  return np.random.RandomState(count).uniform(0.1, 1, [count, 3]).astype("f")


class ArgumentsTest(parameterized.TestCase, tf.test.TestCase):

  def streamed(self, make, batches, num_towers, known=False, inputs=None):
    """Returns the value of the metric that `make` makes of the rows."""
    with tf.Graph().as_default():
      fed = tf.placeholder(tf.float32, [len(batches[0]) if known else None, 3])
      model = lambda x: dict(zip(["value", "update"], make(x)))
      graph = towers.build_towers(
          model, testing.devices(num_towers),
          inputs=fed if inputs is None else inputs)
      with testing.session() as sess:
        sess.run(tf.local_variables_initializer())
        for batch in batches:
          sess.run(graph.outputs["update"], {fed: batch})
        return sess.run(graph.outputs["value"])

  @parameterized.product(num_towers=(2, 3, 4), known=(True, False))
  def test_a_scalar_is_the_mean_over_the_rows(self, num_towers, known):
    """As a loss is; each batch counts once, as on one device."""
    batches = [rows(5), 2 * rows(5)] if known else [rows(5), rows(2)]
    value = self.streamed(lambda x: tf.metrics.mean(tf.reduce_mean(x)), batches,
                          num_towers, known)
    self.assertAllClose(value, np.mean([np.mean(b) for b in batches]), 1e-6)

  @parameterized.parameters(1, 2, 4)
  def test_a_mean_over_nothing_does_not_count(self, num_towers):
    """c082: what a tower without rows makes may be NaN."""

    def make(x):
      own = towers.all_reduce(tf.size(x)) * 0 + tf.shape(x)[0]
      count = tf.cast(own, tf.float32)
      return tf.metrics.mean(tf.reduce_sum(x[:, 0]) / count, weights=count)

    self.assertAllClose(self.streamed(make, [rows(2), rows(1)], num_towers),
                        np.concatenate([rows(2), rows(1)])[:, 0].mean(), 1e-6)

  @parameterized.product(num_towers=(1, 3), constant=(True, False))
  def test_a_scalar_with_a_weight(self, num_towers, constant):
    """The weight of a tower is an amount, such as of pixels that count."""

    def make(x):
      if constant:
        return tf.metrics.mean(tf.reduce_mean(x), weights=tf.constant(2.0))
      valid = tf.cast(x > 0.4, tf.float32)
      amount = tf.reduce_sum(valid)
      return tf.metrics.mean(
          tf.math.divide_no_nan(tf.reduce_sum(x * valid), amount),
          weights=amount)

    batches = [rows(5), rows(2)]
    all_rows = np.concatenate(batches)
    expected = np.mean([b.mean() for b in batches]) if constant else (
        all_rows[all_rows > 0.4].mean())
    self.assertAllClose(self.streamed(make, batches, num_towers), expected,
                        1e-6)

  @parameterized.product(num_towers=(1, 3),
                         shape=("[]", "[1, 1]", "[1, 3]", "[B, 1]"))
  def test_weights_that_are_one_for_all_rows_of_a_tower(self, num_towers,
                                                        shape):
    """Each row counts with the weight that it has in its tower."""
    batches = [rows(5), rows(2)]

    def make(x):
      weight = 1.0 + tf.cast(towers.current_tower().index, tf.float32)
      weight *= tf.reduce_mean(tf.ones_like(x))  # No constant.
      if shape == "[B, 1]":
        return tf.metrics.mean(x, weight * tf.ones_like(x[:, :1]))
      target = {"[]": [], "[1, 1]": [1, 1], "[1, 3]": [1, 3]}[shape]
      return tf.metrics.mean(x, tf.broadcast_to(weight, target))

    values, weights = [], []
    for batch in batches:
      for index, part in enumerate(np.array_split(batch, num_towers)):
        values.append(part)
        weights.append(np.full(part.shape, 1.0 + index))
    expected = np.average(np.concatenate(values),
                          weights=np.concatenate(weights))
    self.assertAllClose(self.streamed(make, batches, num_towers), expected,
                        1e-6)

  @parameterized.parameters(1, 2, 4)
  def test_what_all_towers_share_stays(self, num_towers):
    batches = [rows(5)]

    def make(x):
      gathered = towers.all_gather(x)
      means = towers.all_reduce(tf.reduce_mean(x, axis=0), "mean")
      near = tf.metrics.mean_squared_error(
          gathered, 2.0 * gathered, weights=tf.constant([[1.0, 2.0, 3.0]]))
      mean, update = tf.metrics.mean_tensor(means)
      return tf.concat([mean, near[0][tf.newaxis]], 0), tf.group(
          update, near[1])

    value, x = self.streamed_op(make, batches, num_towers), batches[0]
    self.assertAllClose(value[:3], x.mean(axis=0), 1e-6)
    self.assertAllClose(value[3], np.average(
        x**2, weights=np.tile([1.0, 2.0, 3.0], [5, 1])), 1e-6)

  def streamed_op(self, make, batches, num_towers):
    """The same for an update that is no tensor, which is no output."""
    with tf.Graph().as_default():
      fed = tf.placeholder(tf.float32, [None, 3])
      updates = []

      def model(x):
        value, update = make(x)
        updates.append(update)
        return {"value": value}

      graph = towers.build_towers(model, testing.devices(num_towers),
                                  inputs=fed)
      with testing.session() as sess:
        sess.run(tf.local_variables_initializer())
        for batch in batches:
          sess.run(updates[-1], {fed: batch})
        return sess.run(graph.towers[-1].outputs["value"])

  @parameterized.parameters(1, 2, 4)
  def test_sparse_labels(self, num_towers):
    """Rows with one or two labels; a tower without rows has borrowed one."""
    batches = [rows(5), rows(1), rows(2)]

    def make(x):
      both = x[:, 0] > 0.5
      dense = tf.stack([tf.fill(tf.shape(both), 1),
                        tf.where(both, tf.fill(tf.shape(both), 2),
                                 tf.fill(tf.shape(both), -1))], axis=1)
      indices = tf.where(dense >= 0)
      labels = tf.SparseTensor(
          indices, tf.cast(tf.gather_nd(dense, indices), tf.int64),
          tf.cast(tf.shape(dense), tf.int64))
      return tf.metrics.recall_at_k(labels, x, 2)

    hits = total = 0
    for row in np.concatenate(batches):
      labels = [1, 2] if row[0] > 0.5 else [1]
      total += len(labels)
      hits += len(set(labels) & set(np.argsort(row)[1:]))
    self.assertAllClose(self.streamed(make, batches, num_towers), hits / total,
                        1e-6)

  @parameterized.parameters(1, 2, 3)
  def test_inputs_of_each_towers_own(self, num_towers):
    with tf.Graph().as_default():
      parts = [tf.constant(rows(k + 1)) for k in range(num_towers)]
      graph = towers.build_towers(
          lambda x: dict(zip(["value", "update"], tf.metrics.mean(x))),
          testing.devices(num_towers), inputs=towers.PerTower(parts))
      with testing.session() as sess:
        sess.run(tf.local_variables_initializer())
        sess.run(graph.outputs["update"])
        self.assertAllClose(
            sess.run(graph.outputs["value"]), np.concatenate(
                [rows(k + 1) for k in range(num_towers)]).mean(), 1e-6)

  @parameterized.named_parameters(
      ("a_vector_by_class",
       lambda x: tf.metrics.mean(tf.reduce_mean(x, axis=0)), False,
       r"`values` of `tf.metrics.mean` must have the rows of its tower "
       r"on the leading axis: got `.*` of shape \(3,\) in tower 0, which has "
       "any number of rows. Make it the same"),
      ("a_vector_of_another_size",
       lambda x: tf.metrics.mean(tf.reduce_mean(x, axis=0)), True,
       r"shape \(3,\) in tower 0, which has 2.0 rows"),
      ("a_tensor_without_rows",
       lambda x: tf.metrics.mean_tensor(tf.reduce_mean(x, axis=0)), False,
       r"`values` of `tf.metrics.mean_tensor` must be the same in all "
       r"towers, .* tower 0.*all_reduce\(x"),
      ("a_scalar_label", lambda x: tf.metrics.accuracy(x[0, 0], x[:, 0]), False,
       "`labels` of `tf.metrics.accuracy` must have rows: got the "
       "scalar `tower_0/.*`, of another value in each"),
      ("scalars_only", lambda x: tf.metrics.accuracy(x[0, 0], x[0, 1]), False,
       "`labels` of .* must have rows: got the scalar"),
      ("unknown_rank",
       lambda x: tf.metrics.mean(tf.placeholder_with_default(x, None)), False,
       r"`values` of .* must have a known rank, .* none \(tower 0\)"),
  )
  def test_rejects(self, make, known, message):
    with self.assertRaisesRegex(ValueError, message):
      self.streamed(make, [rows(4)], 2, known)

  def test_rejects_ragged_tensors(self):

    def make(x):
      ragged = tf.RaggedTensor.from_row_lengths(x, [tf.shape(x)[0]])
      return towers.metrics.streaming(lambda values: (values, values), ragged)

    with self.assertRaisesRegex(
        TypeError, r"`values` of streaming metric `<lambda>` must be made of "
        r"tensors or sparse tensors: got a RaggedTensor \(tower 0\)"):
      self.streamed(make, [rows(4)], 2)


if __name__ == "__main__":
  tf.test.main()
