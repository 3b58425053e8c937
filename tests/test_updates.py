"""Tests for towers.updates."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
from update_cases import count_calls
from update_cases import linear
from update_cases import sgd
from update_cases import variable
from update_cases import zeros


class ChosenTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("first_1", 1, "first", 1), ("first_3", 3, "first", 1),
      ("all_1", 1, "all", 1), ("all_3", 3, "all", 3))
  def test_policy(self, count, policy, expected):
    """c057: each op once; with "all" each tower's own."""
    x = tf.ones([6])

    def model(x):
      update = count_calls()
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)  # A second time.
      return linear(x)

    graph = towers.build_towers(model, testing.devices(count), inputs=x,
                                update_ops=policy)
    self.assertIsInstance(graph.update_ops, tuple)
    self.assertLen(graph.update_ops, expected)
    self.assertLen(set(graph.update_ops), expected)
    step = sgd(graph)
    with testing.session(initialize=True) as sess:
      sess.run(step)
      self.assertEqual(sess.run(variable("calls")), expected)
    self.assertLen({len(t.update_ops) for t in graph.towers}, 1)

  @parameterized.product(count=(1, 2, 3), policy=("first", "all"),
                         sync=(True, False))
  def test_batch_norm_is_updated_once_with_the_mean_of_all(self, count, policy,
                                                           sync):
    """c007, c057: never the last tower's, never N times, always the same."""
    x = tf.constant(np.repeat([10.0, 20.0, 30.0], 2)[:, None], tf.float32)

    def model(x):
      y = towers.batch_norm(x, training=True, momentum=0.9, name="norm")
      return tf.reduce_mean(y)

    graph = towers.build_towers(model, testing.devices(count), inputs=x,
                                update_ops=policy, sync_batch_norm=sync)
    self.assertLen(graph.update_ops, 2)
    self.assertLen({len(t.update_ops) for t in graph.towers}, 1)
    mean = variable("norm/moving_mean")
    with testing.session() as sess:
      for _ in range(20):
        sess.run(tf.global_variables_initializer())
        sess.run(graph.update_ops)
        self.assertAllClose(sess.run(mean), [2.0])

  def test_do_not_depend_on_the_default_graph(self):
    """c059: captured from the graph of the towers, while they are built."""
    with tf.Graph().as_default() as own:
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.no_op(name="before"))

      def model():
        count_calls()
        return linear(1.0)

      graph = towers.build_towers(model, testing.devices(2))
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.no_op(name="after"))
    with tf.Graph().as_default():
      count_calls()
    self.assertLen(graph.update_ops, 1)
    self.assertEqual([len(t.update_ops) for t in graph.towers], [1, 1])
    step = graph.minimize(tf.train.GradientDescentOptimizer(1.0))
    self.assertIs(step.graph, own)

  def test_collection_holds_those_of_tower_0(self):

    def model(x):
      count_calls()
      return linear(x)

    graph = towers.build_towers(model, testing.devices(3), inputs=tf.ones([3]))
    collected = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    self.assertEqual(
        [op if isinstance(op, tf.Operation) else op.op for op in collected],
        list(graph.update_ops))

  @parameterized.parameters("last", "FIRST", None, True, 1)
  def test_rejects_policy(self, policy):
    with self.assertRaisesRegex(
        ValueError, "`update_ops` must say whose .* expected 'first' or 'all', "
        f"got {policy!r}"):
      towers.build_towers(lambda: 0.0, ["/cpu:0"], update_ops=policy)


class StepTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(1, 2)
  def test_only_the_step_changes_variables(self, count):
    """c009, c061: neither loss nor outputs nor summaries change anything."""
    x = tf.placeholder(tf.float32, [None, 1])

    def model(x):
      count_calls()
      y = towers.batch_norm(x, training=True)
      tf.summary.scalar("mean", tf.reduce_mean(y))
      return {"loss": linear(y + x), "y": y}

    graph = towers.build_towers(model, testing.devices(count), inputs=x)
    step = sgd(graph)
    self.assertIsInstance(step, tf.Operation)
    self.assertIsNot(step, graph.loss.op)
    with testing.session(initialize=True) as sess:
      before = sess.run(tf.global_variables())
      feed = {x: 1000.0 + np.arange(4.0)[:, None]}
      for _ in range(10):
        sess.run((graph.loss, graph.outputs, tf.summary.merge_all(),
                  [t.loss for t in graph.towers]), feed)
      self.assertAllEqual(sess.run(tf.global_variables()), before)
      sess.run(step, feed)
      after = sess.run(tf.global_variables())
      changed = {v.op.name
                 for v, a, b in zip(tf.global_variables(), before, after)
                 if not np.array_equal(a, b)}
      self.assertContainsSubset(
          ["weight", "calls", "global_step", "batch_normalization/moving_mean"],
          changed)

  def test_updates_come_before_the_gradient_is_applied(self):

    def model():
      count_calls()
      return linear(1.0)

    graph = towers.build_towers(model, testing.devices(2))
    sgd(graph)
    ops = tf.get_default_graph().get_operations()
    applied = [op for op in ops if op.type == "ResourceApplyGradientDescent"]
    self.assertLen(applied, 1)
    waits_for = set()
    pending = applied
    while pending:
      waits_for.update(pending)
      pending = [source for op in pending
                 for source in list(op.control_inputs) +
                 [x.op for x in op.inputs] if source not in waits_for]
    self.assertContainsSubset(graph.update_ops, waits_for)


class ControlFlowTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(count=(1, 2), policy=("first", "all"),
                         nested=(False, True))
  def test_branch_not_taken_lets_the_step_train(self, count, policy, nested):
    """c033: never a step that silently does nothing."""
    training = tf.placeholder(tf.bool, [], name="training")
    x = tf.placeholder(tf.float32, [None])

    def branch():
      update = zeros("calls", tf.int32).assign_add(1)
      op = update if isinstance(update, tf.Operation) else update.op
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)
      with tf.control_dependencies([op]):
        return tf.constant(1.0)

    def either():
      if not nested:
        return branch()
      return tf.cond(training, branch, lambda: tf.constant(2.0))

    def model(x):
      zeros("calls", tf.int32)
      with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        factor = tf.cond(training, either, lambda: tf.constant(1.0))
      return linear(x) * factor

    graph = towers.build_towers(model, testing.devices(count), inputs=x,
                                update_ops=policy)
    step = sgd(graph)
    updated = count if policy == "all" else 1
    with testing.session(initialize=True) as sess:
      for taken, calls, steps in ((True, updated, 1), (False, 0, 2),
                                  (False, 0, 3), (True, updated, 4)):
        before = sess.run(variable("calls"))
        sess.run(step, {training: taken, x: [1.0, 1.0, 1.0]})
        self.assertAllClose(
            sess.run((variable("weight"), tf.train.get_global_step())),
            (-float(steps), steps))
        # What runs in a branch runs for its own result as well: see `first`.
        self.assertBetween(sess.run(variable("calls")) - before, calls,
                           count if taken else 0)

  def test_batch_norm_in_a_branch(self):
    """c033: with False the step trains, and moving statistics stay."""
    training = tf.placeholder(tf.bool, [])
    x = tf.placeholder(tf.float32, [None, 1])

    def model(x):
      y = tf.cond(
          training,
          lambda: towers.batch_norm(x, training=True, momentum=0.5, name="n"),
          lambda: x)
      return linear(x) + 0.0 * tf.reduce_mean(y)

    graph = towers.build_towers(model, testing.devices(2), inputs=x)
    step = sgd(graph)
    with testing.session(initialize=True) as sess:
      for taken, mean, steps in ((True, 2.0, 1), (False, 2.0, 2),
                                 (True, 3.0, 3)):
        sess.run(step, {training: taken, x: [[2.0], [4.0], [6.0]]})
        self.assertAllClose(
            sess.run((variable("n/moving_mean"), variable("weight"),
                      tf.train.get_global_step())),
            ([mean], -4.0 * steps, steps))

  def test_refuses_ops_from_a_while_loop(self):

    def model():
      counter = zeros("calls", tf.int32)

      def body(i):
        update = counter.assign_add(1, read_value=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        with tf.control_dependencies([update]):
          return i + 1

      tf.while_loop(lambda i: i < 3, body, [0], name="walk")
      return linear(1.0)

    for count in (1, 2):
      with tf.Graph().as_default(), self.assertRaisesRegex(
          ValueError, "`UPDATE_OPS` must not hold ops from inside a while "
          r"loop, got `tower_0/walk/Assign\w+` \(tower 0\) from "
          "`tower_0/walk/"):
        towers.build_towers(model, testing.devices(count))

  def test_loop_that_an_update_needs(self):
    """What the loop itself changes cannot wait; the update can."""
    x = tf.placeholder(tf.float32, [None])

    def model(x):
      counter = zeros("calls", tf.int32)

      def body(i):
        with tf.control_dependencies([counter.assign_add(1)]):
          return i + 1

      total = zeros("total", tf.int32).assign_add(
          tf.while_loop(lambda i: i < 3, body, [0]))
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, total)
      return linear(x)

    graph = towers.build_towers(model, testing.devices(2), inputs=x)
    step = sgd(graph)
    with testing.session(initialize=True) as sess:
      sess.run(step, {x: [1.0]})
      self.assertEqual(
          sess.run((variable("calls"), variable("total"))), (3, 3))

  def test_refuses_ops_from_a_branch_of_v2_control_flow(self):
    """c033: refused by name, not an error about an element of a graph."""

    def model():
      counter = zeros("calls", tf.int32)
      updates = []

      def branch():
        updates.append(counter.assign_add(1, read_value=False))
        return tf.constant(1.0)

      loss = linear(1.0) + tf.cond(training, branch, lambda: tf.constant(1.0))
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, updates[0])
      return loss

    tf.enable_control_flow_v2()
    self.addCleanup(tf.disable_control_flow_v2)
    for count in (1, 2):
      with tf.Graph().as_default():
        training = tf.placeholder(tf.bool, [])
        with self.assertRaisesRegex(
            ValueError, "`UPDATE_OPS` must not hold ops from inside .* v2 "
            r"control flow, got `.*Assign.*` \(tower 0\)"):
          towers.build_towers(model, testing.devices(count))


if __name__ == "__main__":
  tf.test.main()
