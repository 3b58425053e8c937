"""Tests for towers.lint_variables."""

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import loop_cases
import towers
from towers import inspection

RESOURCE = (("reference", False), ("resource", True))


def with_own_bias(images, index):
  """As in c016: `tf.Variable` makes a new one in each tower."""
  del index
  bias = tf.Variable(tf.zeros([3]), name="bias", use_resource=True)
  return tf.reduce_mean(
      tf.square(tf.matmul(images, loop_cases.weights()) + bias))


def with_average(images, index, resource=True, decay=0.9):
  """A loss with the moving mean of the images, as batch norm keeps it."""
  del index
  mean = loop_cases.variable("mean", [4], resource, trainable=False)
  with tf.device("/cpu:0"):
    new = (1.0 - decay) * (mean - tf.reduce_mean(images, 0))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(mean, new))
  return tf.reduce_mean(
      tf.square(tf.matmul(images, loop_cases.weights(resource))))


def with_counter(images, index):
  del index
  steps = loop_cases.variable("steps", [], trainable=False)
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(steps, 1.0))
  return tf.reduce_mean(tf.matmul(images, loop_cases.weights()))


class SharingTest(parameterized.TestCase):

  @parameterized.named_parameters(("two", 2), ("three", 3), ("four", 4))
  def test_right_loop(self, num_towers):
    self.assertEmpty(loop_cases.rules(loop_cases.loop(num_towers=num_towers)))

  @parameterized.named_parameters(*RESOURCE)
  def test_variables_under_another_name_in_each_tower(self, resource):
    def loss(images, index):
      kernel = loop_cases.variable(
          f"dense_{index}/kernel" if index else "dense/kernel", [4, 3],
          resource)
      return tf.reduce_mean(tf.square(tf.matmul(images, kernel)))

    built = loop_cases.loop(loss, 3, reuse=False, own_gradients=True)
    self.assertEqual(loop_cases.rules(built), ["variables_not_shared"])
    finding, = inspection.report(
        built.graph, train_op=built.train_op).findings
    self.assertEqual(finding.where, (
        "dense/kernel", "dense_1/kernel", "dense_2/kernel"))
    self.assertStartsWith(
        finding.what, "3 trainable variables of `tower` belong to one tower")

  def test_own_variable_beside_shared_ones_c016(self):
    built = loop_cases.loop(with_own_bias, own_gradients=True)
    finding, = inspection.report(
        built.graph, train_op=built.train_op).findings
    self.assertEqual(finding.rule, "variables_not_shared")
    self.assertEqual(finding.where, ("tower_0/bias", "tower_1/bias"))

  def test_copies_that_get_the_gradients_of_all_towers(self):
    """One replica of the variables per tower, kept equal by all-reduce."""
    with tf.Graph().as_default() as graph:
      copies, gradients = [], []
      for i in range(2):
        with tf.name_scope(f"tower_{i}"):
          kernel = tf.get_variable(f"copy_{i}/kernel", [4, 3])
          copies.append(kernel)
          loss = tf.reduce_mean(tf.matmul(loop_cases.inputs(), kernel))
          gradients.append(tf.gradients(loss, kernel)[0])
      total = tf.add_n(gradients) / 2.0
      train_op = tf.train.GradientDescentOptimizer(0.1).apply_gradients(
          [(total, copy) for copy in copies])
    self.assertEmpty(loop_cases.rules(loop_cases.Loop(graph, train_op)))

  def test_a_variable_that_only_one_tower_uses(self):
    def loss(images, index):
      result = loop_cases.linear_loss(images, index)
      if index == 0:
        result += tf.reduce_sum(loop_cases.variable("extra", [2]))
      return result

    self.assertEmpty(loop_cases.rules(loop_cases.loop(loss)))


class DevicesTest(parameterized.TestCase):

  @parameterized.named_parameters(*RESOURCE)
  def test_variable_that_a_layer_did_not_pin_c038(self, resource):
    def loss(images, index):
      del index
      cell = loop_cases.variable("cell", [4, 4], resource, device=None)
      return tf.reduce_mean(tf.matmul(
          tf.matmul(images, cell), loop_cases.weights(resource)))

    built = loop_cases.loop(loss)
    self.assertEqual(loop_cases.rules(built), ["variables_on_tower_devices"])
    finding, = inspection.report(
        built.graph, train_op=built.train_op).findings
    self.assertEqual(finding.where, ("cell",))
    self.assertIn("live on `/device:GPU:0`", finding.what)
    self.assertIn("others live on `/device:CPU:0`", finding.what)

  def test_all_variables_on_one_tower_are_a_choice(self):
    self.assertEmpty(loop_cases.rules(loop_cases.loop(
        lambda images, index: tf.reduce_mean(tf.matmul(
            images, loop_cases.weights(device=None))))))

  def test_towers_on_one_device(self):
    with tf.Graph().as_default() as graph:
      losses = []
      for i in range(2):
        with tf.name_scope(f"tower_{i}"), tf.device("/gpu:0"), (
            tf.variable_scope("", reuse=i > 0)):
          cell = loop_cases.variable("cell", [4, 4], device=None)
          losses.append(tf.reduce_mean(tf.matmul(tf.matmul(
              loop_cases.inputs(), cell), loop_cases.weights())))
      train_op = tf.train.GradientDescentOptimizer(0.1).minimize(
          tf.add_n(losses) / 2.0)
    self.assertEmpty(loop_cases.rules(loop_cases.Loop(graph, train_op)))


class UpdatesTest(parameterized.TestCase):

  @parameterized.named_parameters(*RESOURCE)
  def test_first_tower_only(self, resource):
    built = loop_cases.loop(lambda images, i: with_average(images, i, resource))
    self.assertEmpty(loop_cases.rules(built))
    report = inspection.report(built.graph, train_op=built.train_op)
    self.assertEqual([op.runs for op in report.update_ops], ["before", "never"])

  @parameterized.named_parameters(*RESOURCE)
  def test_all_towers_c057(self, resource):
    built = loop_cases.loop(
        lambda images, i: with_average(images, i, resource), 3,
        update_ops="all")
    self.assertEqual(loop_cases.rules(built), ["updates_of_all_towers"])
    finding, = inspection.report(
        built.graph, train_op=built.train_op).findings
    self.assertEqual(finding.where, ("mean",))
    self.assertIn("changed by 3 towers", finding.what)

  def test_counter_of_each_tower(self):
    self.assertEmpty(loop_cases.rules(
        loop_cases.loop(with_counter, update_ops="all")))

  @parameterized.named_parameters(*RESOURCE)
  def test_nothing_runs_them(self, resource):
    built = loop_cases.loop(
        lambda images, i: with_average(images, i, resource), update_ops=None)
    self.assertEqual(loop_cases.rules(built), ["updates_not_run"])
    finding, = inspection.report(
        built.graph, train_op=built.train_op).findings
    self.assertEqual(finding.where, ("mean",))

  def test_dependency_that_is_lost_c009(self):
    """An op that was made before waits for nothing."""
    built = loop_cases.loop(with_average, update_ops=None)
    with built.graph.as_default():
      updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)[:1]
      with tf.control_dependencies(updates):
        lost = built.train_op
        tf.no_op(name="kept")
    self.assertEqual(loop_cases.rules(loop_cases.Loop(built.graph, lost)),
                     ["train_op_skips_updates"])
    with built.graph.as_default(), tf.control_dependencies(updates):
      train_op = tf.group(built.train_op)
    built = loop_cases.Loop(built.graph, train_op)
    self.assertEmpty(loop_cases.rules(built))
    report = inspection.report(built.graph, train_op=train_op)
    self.assertEqual([op.runs for op in report.update_ops], ["beside", "never"])

  def test_no_train_op(self):
    """What evaluates has no updates to miss."""
    with tf.Graph().as_default() as graph:
      for i in range(2):
        with tf.name_scope(f"tower_{i}"), tf.variable_scope("", reuse=i > 0):
          with_average(loop_cases.inputs(), i)
    report = inspection.report(graph)
    self.assertEmpty(report.findings)
    self.assertEqual([op.runs for op in report.update_ops], ["unknown"] * 2)


class SlotsTest(parameterized.TestCase):

  def test_adam_in_a_tower(self):
    built = loop_cases.loop(
        optimizer=tf.train.AdamOptimizer(), apply_in_tower=True)
    self.assertEqual(loop_cases.rules(built), ["optimizer_slots_in_tower"])
    finding, = inspection.report(
        built.graph, train_op=built.train_op).findings
    self.assertCountEqual(
        finding.where, ["tower_1/beta1_power", "tower_1/beta2_power"])

  def test_adam_outside(self):
    self.assertEmpty(loop_cases.rules(
        loop_cases.loop(optimizer=tf.train.AdamOptimizer())))


class TowersTest(parameterized.TestCase):
  """What `towers` builds is right in each of its settings."""

  @parameterized.product(
      num_towers=(2, 3), variables=("shared", "balanced", "replicated"),
      update_ops=("first", "all"))
  def test_finds_nothing(self, num_towers, variables, update_ops):
    def loss(images):
      with tf.variable_scope("counting"):
        counting = with_counter(images, 0)
      x = towers.batch_norm(images, training=True)
      return with_own_bias(x, 0) + counting

    with tf.Graph().as_default() as graph:
      built = towers.build_towers(
          loss, [f"/gpu:{i}" for i in range(num_towers)],
          inputs=loop_cases.inputs(7), variables=variables,
          update_ops=update_ops, parameter_device="/cpu:0")
      train_op = built.minimize(tf.train.AdamOptimizer())
    self.assertEmpty(loop_cases.rules(loop_cases.Loop(graph, train_op)))
    report = inspection.report(built, train_op=train_op)
    self.assertEmpty(report.findings)
    self.assertEqual({op.runs for op in report.update_ops}, {"before"})


if __name__ == "__main__":
  absltest.main()
