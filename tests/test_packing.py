"""Tests of small tensors that travel together."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import packing
import training_cases as cases


def messages(graph):
  """Returns the inputs of each message that was packed."""
  return [[x.op.inputs[0].shape.num_elements() for x in op.inputs[:-1]]
          for op in graph.get_operations()
          if op.type == "ConcatV2" and "average_gradients/packed" in op.name]


def model(x):
  y = x
  for k in range(6):
    y += tf.get_variable(f"w{k}", [10 + k])[0]
  large = tf.get_variable("large", [1000])
  size = tf.placeholder_with_default(3, [])
  unknown = tf.get_variable("unknown", initializer=tf.ones([size]),
                            validate_shape=False)
  double = tf.get_variable("double", [10], tf.float64)
  table = tf.get_variable("table", [7, 2])
  y += tf.reduce_sum(large) + tf.reduce_sum(unknown)
  y += tf.cast(tf.reduce_sum(double), tf.float32)
  y += tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2, 2]))
  return tf.reduce_mean(y)


class PackingTest(parameterized.TestCase):

  def gradients(self, pack_bytes, num_towers=3, **options):
    with tf.Graph().as_default() as g:
      tf.set_random_seed(1)
      graph = towers.build_towers(
          model, testing.devices(num_towers), inputs=tf.ones([5]), **options)
      pairs = graph.gradients(pack_bytes=pack_bytes)
      with testing.session(initialize=True) as sess:
        values = sess.run([tf.convert_to_tensor(gr) for gr, _ in pairs])
      kinds = [type(gradient) for gradient, _ in pairs]
      return messages(g), values, kinds

  @parameterized.parameters(("shared", 1), ("shared", 3), ("balanced", 2),
                            ("replicated", 3))
  def test_values_stay(self, variables, num_towers):
    _, expected, kinds = self.gradients(0, num_towers, variables=variables)
    _, got, packed_kinds = self.gradients(200, num_towers, variables=variables)
    self.assertEqual(kinds, packed_kinds)
    for one, other in zip(expected, got):
      np.testing.assert_array_equal(one, other)

  def test_buckets_are_bounded_and_in_reverse_order_of_creation(self):
    found, _, _ = self.gradients(200)
    # Towers 1 and 2; tower 0 is where the variables are. 200 bytes hold 50
    # floats; the large, the unknown, the double and the sparse ones go alone.
    self.assertEqual(found, 2 * [[15, 14, 13], [12, 11, 10]])

  def test_off_by_default(self):
    found, _, _ = self.gradients(0)
    self.assertEmpty(found)

  def test_new_values_of_copies_are_packed_too(self):
    counts = {}
    for pack_bytes in (0, 10000):
      trainer = cases.Trainer(
          2, cases.towers_step(lambda: tf.train.GradientDescentOptimizer(0.1),
                               pack_bytes=pack_bytes), variables="replicated")
      splits = [op for op in trainer._graph.get_operations()
                if op.type == "SplitV"]
      counts[pack_bytes] = len(splits)
    # One message each way.
    self.assertEqual(counts, {0: 0, 10000: 2})

  @parameterized.parameters(-1, 1.5, True, "1 MB")
  def test_bad_number(self, pack_bytes):
    with self.assertRaisesRegex(
        ValueError, "`pack_bytes` must be up to how many bytes"):
      packing.checked_bytes(pack_bytes)


if __name__ == "__main__":
  absltest.main()
