"""Tests of faults that stand beside those that users of tower loops have met.

Each is of the kind of one case of the table in docs/testing.md, but another
fault. Where a test elsewhere is such a neighbour already, the table names that.
"""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import references
import testing
import towers
from update_cases import count_calls
from update_cases import linear
from update_cases import sgd
from update_cases import variable


def batch(rows=7, columns=4):
  return np.random.RandomState(rows).normal(size=[rows, columns])


def weights(name, shape, **options):
  return tf.get_variable(name, shape, tf.float64, **options)


def touched_in_nested_loops(x):
  """A loop in a loop; the variable is first read in the inner one."""
  def inner(j, h):
    with tf.variable_scope("inner", caching_device="/cpu:0"):
      return j + 1, tf.tanh(tf.matmul(h, weights("w", [4, 4])))

  def outer(i, h):
    _, h = tf.while_loop(lambda j, _: j < 2, inner, [0, h])
    return i + 1, h + weights("b", [4])

  _, h = tf.while_loop(lambda i, _: i < 3, outer, [0, x])
  return tf.reduce_mean(h**2)


def touched_in_a_scan(x):
  """As a recurrent layer over the columns."""
  def step(state, column):
    return tf.tanh(state * weights("w", []) + column[:, None]
                   * weights("v", [1, 3]))

  first = tf.zeros_like(x[:, :1]) + weights("start", [3])
  return tf.reduce_mean(tf.scan(step, tf.transpose(x), first)**2)


def total_of_collected_losses(x):
  """Losses and regularizers by the collections that the model reads itself."""
  w = weights("w", [4, 1], regularizer=lambda w: 0.1 * tf.reduce_sum(w**2))
  y = tf.matmul(x, w)
  tf.losses.add_loss(tf.reduce_mean((y - 1.0)**2))
  tf.losses.add_loss(tf.reduce_mean(tf.abs(y)))
  return tf.losses.get_total_loss()


def average_without_bias(x):
  """An average that keeps a sum and a count of its own, for each step."""
  mean = tf.reduce_mean(tf.matmul(x, weights("w", [4, 1])))
  average = tf.train.ExponentialMovingAverage(0.75, zero_debias=True)
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.apply([mean]))
  return {"loss": mean, "average": average.average(mean)}


class OneDeviceTest(parameterized.TestCase, tf.test.TestCase):

  def check(self, model, num_towers):
    for rows in (7, 2):
      references.assert_equal(
          self, references.run(lambda: model, [batch(rows)], num_towers),
          references.run(lambda: model, [batch(rows)]))

  @parameterized.parameters(2, 3)
  def test_c035_neighbour_nested_loops(self, num_towers):
    self.check(touched_in_nested_loops, num_towers)

  @parameterized.parameters(2, 3)
  def test_c035_neighbour_scan(self, num_towers):
    self.check(touched_in_a_scan, num_towers)

  @parameterized.parameters(2, 3, 4)
  def test_c028_neighbour_total_of_collected_losses(self, num_towers):
    self.check(total_of_collected_losses, num_towers)

  @parameterized.parameters(1, 2, 3)
  def test_c018_neighbour_average_without_bias(self, num_towers):
    """The variables are those of plain code, and each step counts once."""
    found = []
    for count in (None, num_towers):
      with tf.Graph().as_default():
        x = tf.constant(np.repeat(batch(1), 6, axis=0))
        with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
          if count is None:
            outputs = average_without_bias(x)
            updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
          else:
            built = towers.build_towers(
                average_without_bias, testing.devices(count), inputs=x)
            outputs, updates = built.outputs, built.update_ops
        with testing.session() as sess:
          sess.run(tf.global_variables_initializer())
          w = variable("w")
          values = []
          for k in (1.0, 3.0):
            sess.run(w.initializer, {w.initializer.inputs[1]: [[k]] * 4})
            sess.run(updates)
            values.append(sess.run(outputs["average"]))
        found.append(([v.op.name for v in tf.global_variables()], values))
    self.assertEqual(found[1][0], found[0][0])
    self.assertAllClose(found[1][1], found[0][1], 1e-9, 1e-9)


class StepTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(count=(2, 3), policy=("first", "all"))
  def test_c006_neighbour_damaged_element(self, count, policy):
    """An element of one tower that cannot be read: nothing has moved."""
    bad = count + 1
    dataset = tf.data.Dataset.range(100).map(
        lambda i: tf.debugging.check_numerics(
            tf.where(tf.equal(i, bad), np.float32(np.nan),
                     tf.cast(i, tf.float32)), "damaged"))
    iterator = tf.data.make_initializable_iterator(dataset)

    def model():
      x = iterator.get_next()
      count_calls()
      decayed = tf.get_variable("decayed", [],
                                initializer=tf.ones_initializer())
      return linear(x) + tf.nn.l2_loss(decayed)

    graph = towers.build_towers(model, testing.devices(count),
                                update_ops=policy)
    step = sgd(graph)
    with testing.session() as sess:
      for _ in range(10):
        sess.run([tf.global_variables_initializer(), iterator.initializer])
        sess.run(step)
        before = sess.run(tf.global_variables())
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "damaged"):
          sess.run(step)
        self.assertAllEqual(sess.run(tf.global_variables()), before)

  def test_c061_neighbour_fetching_gradients(self):
    """Gradients that are only looked at run no update op."""
    x = tf.placeholder(tf.float32, [None, 1])

    def model(x):
      count_calls()
      return linear(towers.batch_norm(x, training=True, name="norm") + x)

    graph = towers.build_towers(model, testing.devices(3), inputs=x)
    gradients = [pair.gradient for pair in graph.gradients()]
    with testing.session(initialize=True) as sess:
      before = sess.run(tf.global_variables())
      feed = {x: 1000.0 + np.arange(7.0)[:, None]}
      found = sess.run([gradients, tf.linalg.global_norm(gradients)], feed)
      self.assertGreater(found[1], 100.0)
      self.assertAllEqual(sess.run(tf.global_variables()), before)
      sess.run(graph.update_ops, feed)
      self.assertEqual(sess.run(variable("calls")), 1)

  @parameterized.product(count=(1, 2, 3), policy=("first", "all"))
  def test_c033_neighbour_one_case_of_three(self, count, policy):
    """As `tf.cond`: a step in which the branch is not taken still trains."""
    which = tf.placeholder(tf.int32, [])
    x = tf.placeholder(tf.float32, [None])

    def model(x):
      def updating():
        with tf.control_dependencies([count_calls()]):
          return tf.constant(1.0)

      one = tf.ones([])
      factor = tf.case([(tf.equal(which, 0), lambda: 1.0 * one),
                        (tf.equal(which, 1), updating)],
                       default=lambda: 1.0 * one, exclusive=True)
      return linear(x) * factor

    graph = towers.build_towers(model, testing.devices(count), inputs=x,
                                update_ops=policy)
    step = sgd(graph)
    with testing.session(initialize=True) as sess:
      for number, taken in enumerate((0, 1, 2, 1), 1):
        before = sess.run(variable("calls"))
        sess.run(step, {which: taken, x: [1.0, 1.0, 1.0]})
        self.assertAllClose(
            sess.run((variable("weight"), tf.train.get_global_step())),
            (-float(number), number))
        self.assertEqual(sess.run(variable("calls")) > before, taken == 1)

  def test_c059_neighbour_scratch_graph_in_the_model(self):
    """Update ops of a graph that the model makes for itself do not count."""
    def model():
      with tf.Graph().as_default():
        count_calls("scratch")
      count_calls()
      return linear(1.0)

    graph = towers.build_towers(model, testing.devices(2), update_ops="all")
    self.assertLen(graph.update_ops, 2)
    self.assertEqual({op.graph for op in graph.update_ops},
                     {tf.get_default_graph()})
    step = sgd(graph)
    with testing.session(initialize=True) as sess:
      sess.run(step)
      self.assertEqual(sess.run(variable("calls")), 2)

  @parameterized.parameters(1, 2, 3, 4)
  def test_c082_neighbour_clipped_steps(self, num_towers):
    """Norm and momentum are those of the rows that there are, as in NumPy."""
    x = tf.placeholder(tf.float64, [None, 4])

    def model(x):
      w = weights("w", [4, 1], initializer=tf.zeros_initializer())
      return tf.reduce_mean((tf.matmul(x, w) - 1.0)**2)

    graph = towers.build_towers(model, testing.devices(num_towers), inputs=x)
    step = graph.minimize(tf.train.MomentumOptimizer(0.125, 0.75),
                          clip_norm=0.5)
    w, momentum = np.zeros([4, 1]), np.zeros([4, 1])
    clipped = 0
    with testing.session(initialize=True) as sess:
      for rows in (7, 1, 2, 3, 1):
        value = batch(rows)
        sess.run(step, {x: value})
        gradient = 2.0 / rows * value.T @ (value @ w - 1.0)
        norm = np.linalg.norm(gradient)
        clipped += norm > 0.5
        momentum = 0.75 * momentum + gradient * min(1.0, 0.5 / norm)
        w = w - 0.125 * momentum
        self.assertAllClose(sess.run(variable("w")), w, 1e-9, 1e-12)
    self.assertGreater(clipped, 0)

  @parameterized.parameters(1, 3)
  def test_c080_neighbour_placeholder_with_default(self, num_towers):
    """It needs no feed; one feed sets it in all towers."""
    def model(x):
      rate = tf.placeholder_with_default(1.0, [], name="rate")
      return {"loss": tf.reduce_mean(x), "y": x * rate}

    x = np.arange(5.0, dtype="f")
    graph = towers.build_towers(model, testing.devices(num_towers), inputs=x)
    with testing.session() as sess:
      self.assertAllEqual(sess.run(graph.outputs["y"]), x)
      self.assertAllEqual(
          sess.run(graph.outputs["y"], graph.feeds({"rate": 0.5})), x / 2)


def by_table(words):
  """Looks words up in a table that the model makes."""
  table = tf.lookup.StaticHashTable(
      tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0]), -1.0)
  return tf.reduce_mean(tf.get_variable(
      "w", [], initializer=tf.ones_initializer()) * table.lookup(words))


def from_queue(x):
  """Adds numbers that come through a queue of the model's own."""
  queue = tf.FIFOQueue(10, tf.float32, [[]])
  tf.train.add_queue_runner(
      tf.train.QueueRunner(queue, [queue.enqueue(3.0)]))
  return {"sum": x + queue.dequeue()}


class InitialisersTest(parameterized.TestCase):

  @parameterized.parameters(1, 2, 3, 4)
  def test_c075_neighbour_table_of_the_model(self, num_towers):
    """Each tower has a table; the initialiser of one was in the collection."""
    with tf.Graph().as_default():
      words = tf.placeholder(tf.string, [None])
      graph = towers.build_towers(
          by_table, testing.devices(num_towers), inputs=words)
      train_op = graph.minimize(tf.train.GradientDescentOptimizer(1.0))
      with testing.session(initialize=True) as sess:
        sess.run(tf.tables_initializer())
        feed = {words: ["a", "b", "b", "?", "a"]}
        self.assertAlmostEqual(sess.run(graph.loss, feed), 1.0)
        sess.run(train_op, feed)
        self.assertAlmostEqual(sess.run(graph.variables[0]), 0.0)
    self.assertLen(graph.graph.get_collection(
        tf.GraphKeys.TABLE_INITIALIZERS), num_towers)

  @parameterized.parameters(1, 2, 3)
  def test_c075_neighbour_queue_of_the_model(self, num_towers):
    """A tower whose queue nobody fills waits without end."""
    with tf.Graph().as_default():
      x = tf.placeholder(tf.float32, [None])
      graph = towers.build_towers(
          from_queue, testing.devices(num_towers), inputs=x)
      with testing.session(operation_timeout_in_ms=60000) as sess:
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(sess, coordinator)
        np.testing.assert_array_equal(
            sess.run(graph.outputs["sum"], {x: [1.0, 2.0, 3.0, 4.0]}),
            [4.0, 5.0, 6.0, 7.0])
        coordinator.request_stop()
        coordinator.join(threads)
    self.assertLen(threads, 2 * num_towers)  # One fills, one closes.


class CollectionsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(1, 2, 3)
  def test_c071_neighbour_summaries_merged_by_the_model(self, count):
    """What a model merges are its own summaries, not also earlier towers'."""
    tf.summary.scalar("before", 0.0)

    def model(x):
      tf.summary.scalar("average", tf.reduce_mean(x))
      tf.summary.histogram("rows", x)
      return {"loss": tf.reduce_mean(x),
              "merged": tf.reshape(tf.summary.merge_all(), [1])}

    x = tf.range(6.0)
    graph = towers.build_towers(model, testing.devices(count), inputs=x)
    with testing.session() as sess:
      merged = [sess.run(tower.outputs["merged"])[0] for tower in graph.towers]
    for k, rows in enumerate(np.array_split(np.arange(6.0), count)):
      scope = f"tower_{k}/" if k else ""
      values = {v.tag: v for v in tf.Summary.FromString(merged[k]).value}
      self.assertCountEqual(
          values, ["before", scope + "average", scope + "rows"])
      self.assertAllClose(values[scope + "average"].simple_value, rows.mean())
      self.assertEqual(values[scope + "rows"].histo.num, len(rows))


if __name__ == "__main__":
  tf.test.main()
