"""Tests that no variable moves in a step that lacks data."""

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import testing
import towers
from update_cases import count_calls
from update_cases import linear
from update_cases import sgd
from update_cases import variable
from update_cases import zeros


class GateTest(parameterized.TestCase, tf.test.TestCase):

  def run_to_the_end(self, graph, step, elements, count, repeat=20):
    """Runs until the data end, `repeat` times; checks that nothing moved."""
    del graph
    with testing.session() as sess:
      for _ in range(repeat):
        sess.run(tf.global_variables_initializer())
        sess.run(tf.get_collection(tf.GraphKeys.TABLE_INITIALIZERS))
        steps = 0
        with self.assertRaisesRegex(tf.errors.OutOfRangeError,
                                    "[Ee]nd of sequence"):
          while True:
            before = sess.run(tf.global_variables())
            sess.run(step)
            steps += 1
        self.assertEqual(steps, elements // count)
        for one, other in zip(sess.run(tf.global_variables()), before):
          self.assertAllEqual(one, other)

  @parameterized.product(count=(2, 3), policy=("first", "all"),
                         updates=(True, False))
  def test_end_of_data_in_one_tower_moves_nothing(self, count, policy, updates):
    """c006: each tower takes the next element of one iterator."""
    elements = 2 * count + 1
    dataset = tf.data.Dataset.range(elements).map(
        lambda i: tf.cast(i, tf.float32))
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)

    def model():
      x = iterator.get_next()
      if updates:
        count_calls("calls", 7)
        own = zeros("sum").assign_add(x)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, own)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.group(
            zeros("scattered", shape=[2]).scatter_add(
                tf.IndexedSlices(tf.ones([1]), [1]))))
      decayed = tf.get_variable("decayed", [],
                                initializer=tf.ones_initializer())
      return linear(x) + tf.nn.l2_loss(decayed)

    graph = towers.build_towers(model, testing.devices(count),
                                update_ops=policy)
    self.run_to_the_end(graph, sgd(graph), elements, count)

  def test_end_of_data_in_one_tower_with_an_iterator_of_its_own(self):
    """c006: with `PerTower`; the second tower's data end first."""
    iterators = [tf.data.make_initializable_iterator(
        tf.data.Dataset.range(n).batch(1)) for n in (5, 3)]
    for iterator in iterators:
      tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS,
                           iterator.initializer)

    def model(x):
      count_calls()
      decayed = tf.get_variable("decayed", [],
                                initializer=tf.ones_initializer())
      return linear(tf.cast(x, tf.float32)) + tf.nn.l2_loss(decayed)

    graph = towers.build_towers(
        model, testing.devices(2), update_ops="all",
        inputs=towers.PerTower([it.get_next() for it in iterators]))
    self.run_to_the_end(graph, sgd(graph), 3, 1)

  @parameterized.parameters(True, False)
  def test_inner_optimizer_waits_too(self, in_all):
    """Not only assignments change variables."""
    dataset = tf.data.Dataset.range(3).map(lambda i: tf.cast(i, tf.float32))
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)

    def model():
      x = iterator.get_next()
      inner = zeros("inner")
      tf.add_to_collection(
          tf.GraphKeys.UPDATE_OPS,
          tf.raw_ops.ResourceApplyGradientDescent(
              var=inner.handle, alpha=1.0, delta=1.0))
      return linear(x)

    graph = towers.build_towers(model, testing.devices(2),
                                update_ops="all" if in_all else "first")
    self.run_to_the_end(graph, sgd(graph), 3, 2)

  def test_update_that_the_data_need_does_not_wait_for_them(self):
    """An op that comes before the data runs; no cycle is made."""
    dataset = tf.data.Dataset.range(10)
    iterator = tf.data.make_one_shot_iterator(dataset)

    def model():
      update = count_calls()
      with tf.control_dependencies([update]):
        x = iterator.get_next()
      return linear(tf.cast(x, tf.float32))

    graph = towers.build_towers(model, testing.devices(2), update_ops="all")
    step = sgd(graph)
    with testing.session(initialize=True) as sess:
      sess.run(step)
      self.assertEqual(sess.run(variable("calls")), 2)

  def test_update_ops_do_not_wait_for_inputs_of_other_builds(self):
    first = tf.placeholder(tf.float32, [None])
    second = tf.placeholder(tf.float32, [None])

    def model(x):
      count_calls()
      return linear(x)

    graph = towers.build_towers(model, testing.devices(2), inputs=first)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      towers.build_towers(model, testing.devices(2), inputs=second, name="eval")
    with testing.session(initialize=True) as sess:
      sess.run(graph.update_ops, {first: [1.0, 2.0]})
      self.assertEqual(sess.run(variable("calls")), 1)


if __name__ == "__main__":
  tf.test.main()
