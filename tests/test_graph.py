"""Tests for towers.graph: what a build returns, and how it trains."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import references
import testing
import towers


def batch(rows=7, columns=4, dtype=np.float64):
  return np.random.RandomState(rows).normal(
      1.0, 2.0, size=[rows, columns]).astype(dtype)


def weights(name, shape, dtype=tf.float64, **options):
  return tf.get_variable(name, shape, dtype, **options)


def regression(x):
  """A model with batch norm, a number and a value per row as outputs."""
  h = towers.batch_norm(tf.matmul(x, weights("w", [4, 3])), training=True,
                        momentum=0.5)
  y = tf.reduce_sum(tf.tanh(h), axis=1)
  return {"loss": tf.reduce_mean((y - 1)**2), "mean": tf.reduce_mean(y),
          "rows": y}


def adversaries(x):
  """Two losses over variables of their own, as in a GAN."""
  fake = tf.matmul(x, weights("generator/w", [4, 4]))
  judge = weights("critic/w", [4, 1])
  real_score, fake_score = tf.matmul(x, judge), tf.tanh(tf.matmul(fake, judge))
  return {"generator_loss": -tf.reduce_mean(fake_score),
          "critic_loss": tf.reduce_mean(fake_score - tf.tanh(real_score)),
          "scores": fake_score, "count": tf.shape(x)[0]}


def values_of(sess, variables=None):
  variables = tf.global_variables() if variables is None else variables
  return {v.op.name: sess.run(v) for v in variables}


def assert_unchanged(test, before, after):
  for name, value in before.items():
    test.assertAllEqual(after[name], value, msg=name)


class AttributesTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(1, 3)
  def test_variables(self, num_towers):
    """Those that the towers make, and those that they use."""
    used = weights("used", [], use_resource=True)
    weights("unused", [], use_resource=True)
    graph = towers.build_towers(
        lambda x: tf.reduce_mean(tf.matmul(x, weights("w", [4, 1])) + used) +
        weights("fixed", [], trainable=False),
        testing.devices(num_towers), inputs=batch())
    self.assertCountEqual([v.op.name for v in graph.variables],
                          ["used", "w", "fixed"])
    self.assertCountEqual([v.op.name for v in graph.trainable_variables],
                          ["used", "w"])
    self.assertIsInstance(graph.variables, tuple)
    self.assertIsInstance(graph.towers, tuple)

  @parameterized.parameters(1, 2, 3)
  def test_outputs_equal_one_device(self, num_towers):
    references.assert_equal(
        self, references.run(lambda: regression, [batch()], num_towers),
        references.run(lambda: regression, [batch()]))

  @parameterized.parameters(0, 2)
  def test_one_towers_outputs_are_fetched_alone(self, index):
    """In a graph for training, where the towers meet in batch norm."""
    x = tf.placeholder(tf.float64, [None, 4])
    graph = towers.build_towers(regression, testing.devices(3), inputs=x)
    graph.minimize(tf.train.AdamOptimizer())
    expected = references.run(lambda: regression, [batch(6)])
    with testing.session() as sess:
      references.initialize(sess)
      before = values_of(sess)
      rows = sess.run(graph.towers[index].outputs["rows"], {x: batch(6)})
      self.assertAllClose(
          rows, expected.outputs["rows"][2 * index:2 * index + 2], 1e-9)
      assert_unchanged(self, before, values_of(sess))

  def test_session_config_is_that_of_the_graph(self):
    graph = towers.build_towers(
        regression, ["/cpu:1", ("/cpu:2", "/cpu:6")], inputs=batch(),
        parameter_device="/cpu:3")
    config = graph.session_config(log_device_placement=True)
    self.assertEqual(config.device_count["CPU"], 7)
    self.assertTrue(config.allow_soft_placement)
    self.assertTrue(config.log_device_placement)
    with self.assertRaisesRegex(ValueError, "`device_count` must leave every"):
      graph.session_config(device_count={"CPU": 3})

  def test_monitored_training_session(self):
    """Reads no loss: the global step counts the steps alone."""
    step = tf.train.get_or_create_global_step()
    graph = towers.build_towers(regression, 3, inputs=batch())
    train_op = graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9),
                              global_step=step)
    folder = self.create_tempdir().full_path
    losses = []
    for last_step in (3, 5):
      with tf.train.MonitoredTrainingSession(
          config=graph.session_config(), checkpoint_dir=folder,
          hooks=[tf.train.StopAtStepHook(last_step=last_step)]) as sess:
        while not sess.should_stop():
          losses.append(sess.run((graph.loss, train_op))[0])
    self.assertLen(losses, 5)
    self.assertLess(losses[-1], losses[0])
    self.assertEqual(tf.train.load_variable(folder, "global_step"), 5)


class MinimizeTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(
      num_towers=(1, 3),
      optimizer=(lambda: tf.train.MomentumOptimizer(0.125, 0.5),
                 lambda: tf.train.AdamOptimizer(0.125)))
  def test_steps_equal_one_device(self, num_towers, optimizer):
    def values(step, x):
      with testing.session() as sess:
        references.initialize(sess)
        for rows in (7, 2, 5):
          sess.run(step, {x: batch(rows)})
        return values_of(sess)

    with tf.Graph().as_default():
      x = tf.placeholder(tf.float64, [None, 4])
      with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
        loss = regression(x)["loss"]
      with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        expected = values(optimizer().minimize(loss), x)
    x = tf.placeholder(tf.float64, [None, 4])
    graph = towers.build_towers(regression, testing.devices(num_towers),
                                inputs=x)
    actual = values(graph.minimize(optimizer()), x)
    self.assertCountEqual(actual, expected)
    for name, value in expected.items():
      self.assertAllClose(actual[name], value, 1e-9, 1e-9, msg=name)

  @parameterized.parameters(1, 3)
  def test_is_one_op_that_runs_updates_first(self, num_towers):
    """What is updated may then be read by the optimizer."""
    def model(x):
      rate = weights("rate", [], trainable=False,
                     initializer=tf.zeros_initializer())
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, rate.assign_add(0.25))
      w = weights("w", [4, 1], initializer=tf.zeros_initializer())
      return tf.reduce_mean(tf.matmul(x, w))

    graph = towers.build_towers(model, testing.devices(num_towers),
                                inputs=batch())
    rate = next(v for v in graph.variables if v.op.name == "rate")
    w, = graph.trainable_variables
    with tf.control_dependencies(graph.update_ops):
      now = tf.identity(rate.read_value())
    train_op = graph.minimize(tf.train.GradientDescentOptimizer(now))
    self.assertIsInstance(train_op, tf.Operation)
    with testing.session(initialize=True) as sess:
      sess.run(train_op)
      self.assertAllClose(sess.run(rate), 0.25)
      self.assertAllClose(sess.run(w)[:, 0], -0.25 * batch().mean(0))
      sess.run(train_op)
      self.assertAllClose(sess.run(w)[:, 0], -0.75 * batch().mean(0))

  @parameterized.parameters(1, 2)
  def test_nothing_else_changes_variables(self, num_towers):
    """c061: losses, outputs and summaries of strange data change nothing."""
    x = tf.placeholder(tf.float64, [None, 4])

    def model(x):
      outputs = regression(x)
      tf.summary.scalar("loss", outputs["loss"])
      return outputs

    graph = towers.build_towers(model, testing.devices(num_towers), inputs=x)
    summaries = tf.summary.merge_all()
    graph.minimize(tf.train.AdamOptimizer())
    with testing.session(initialize=True) as sess:
      before = values_of(sess)
      for _ in range(10):
        sess.run((graph.loss, graph.outputs, summaries, graph.gradients()),
                 {x: batch() + 1000})
      assert_unchanged(self, before, values_of(sess))

  def test_two_losses_with_variables_of_their_own(self):
    """As for a GAN: two optimizers, named losses, lists of variables."""
    x = tf.placeholder(tf.float64, [None, 4])
    graph = towers.build_towers(adversaries, testing.devices(3), inputs=x)
    by_part = {
        part: [v for v in graph.trainable_variables
               if v.op.name.startswith(part)] for part in ("critic",
                                                           "generator")}
    steps = {
        part: graph.minimize(tf.train.GradientDescentOptimizer(0.125),
                             loss=f"{part}_loss", var_list=variables)
        for part, variables in by_part.items()}
    with tf.Graph().as_default():
      y = tf.placeholder(tf.float64, [None, 4])
      losses = adversaries(y)
      names = {v.op.name: v for v in tf.trainable_variables()}
      expected = {
          part: tf.gradients(losses[f"{part}_loss"], names[f"{part}/w"])[0]
          for part in by_part}
      with testing.session() as sess:
        references.initialize(sess)
        expected = sess.run(expected, {y: batch()})
    for part, step in steps.items():
      with self.subTest(part), testing.session() as sess:
        references.initialize(sess)
        before = values_of(sess)
        sess.run(step, {x: batch()})
        after = values_of(sess)
        for name, value in before.items():
          change = 0.125 * expected[part] if name == f"{part}/w" else 0
          self.assertAllClose(value - after[name], change + 0 * value, 1e-9,
                              1e-12)

  def test_loss_may_be_made_of_outputs(self):
    graph = towers.build_towers(adversaries, testing.devices(2),
                                inputs=batch(6))
    total = graph.outputs["generator_loss"] + graph.outputs["critic_loss"]
    names = [v.op.name for g, v in graph.gradients(total) if g is not None]
    self.assertEqual(names, ["generator/w", "critic/w"])

  def test_one_partitioned_variable(self):
    def model(x):
      tf.get_variable("b", [4], tf.float64)
      w = weights("w", [4, 3], partitioner=tf.fixed_size_partitioner(2))
      return tf.reduce_mean(tf.matmul(x, tf.convert_to_tensor(w)))

    graph = towers.build_towers(model, testing.devices(2), inputs=batch())
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      w = weights("w", [4, 3], partitioner=tf.fixed_size_partitioner(2))
    self.assertEqual([v.op.name for _, v in graph.gradients(var_list=[w])],
                     ["w/part_0", "w/part_1"])

  def test_global_step(self):
    step = tf.train.get_or_create_global_step()
    graph = towers.build_towers(regression, testing.devices(2), inputs=batch())
    train_op = graph.minimize(tf.train.AdamOptimizer(), global_step=step)
    with testing.session(initialize=True) as sess:
      sess.run(train_op)
      sess.run(train_op)
      self.assertEqual(sess.run(step), 2)

  def test_other_graphs_may_be_the_default(self):
    graph = towers.build_towers(regression, testing.devices(2), inputs=batch())
    with tf.Graph().as_default():
      train_op = graph.minimize(tf.train.AdamOptimizer())
    self.assertIs(train_op.graph, tf.get_default_graph())


class RejectsTest(parameterized.TestCase, tf.test.TestCase):

  def build(self, model):
    return towers.build_towers(model, testing.devices(2), inputs=batch())

  def sgd(self):
    return tf.train.GradientDescentOptimizer(0.1)

  def test_minimize_without_a_loss(self):
    graph = self.build(adversaries)
    with self.assertRaisesRegex(
        ValueError, r"`model_fn` must return a loss to train with: it returned "
        r"outputs only, \['count', 'critic_loss', 'generator_loss', 'scores'\]"
        r".*name a scalar output by `loss`"):
      graph.minimize(self.sgd())

  @parameterized.named_parameters(
      ("unknown", "other_loss", r"`loss` must name an output of `model_fn`: "
       r"expected one of \['count', .*\], got 'other_loss'"),
      ("rows", "scores", r"`loss` must be a scalar of a floating type: got "
       r".*float64.* of shape \(\d+, 1\)"),
      ("number", 3, "`loss` must be a scalar of a floating type: got .*int"),
  )
  def test_loss(self, loss, message):
    graph = self.build(adversaries)
    with self.assertRaisesRegex(ValueError, message):
      graph.minimize(self.sgd(), loss=loss)

  def test_loss_of_a_whole_type(self):
    graph = self.build(adversaries)
    with self.assertRaisesRegex(ValueError, "scalar of a floating type: got "
                                ".*int64"):
      graph.gradients(tf.constant(1, tf.int64))

  def test_var_list(self):
    graph = self.build(regression)
    with self.assertRaisesRegex(
        TypeError, r"`var_list` must hold variables: got <tf.Tensor"):
      graph.minimize(self.sgd(), var_list=[tf.ones([2])])
    with self.assertRaisesRegex(TypeError, "must hold variables: got 'w'"):
      graph.gradients(var_list=["w"])

  def test_no_gradient(self):
    def model(x):
      weights("idle", [2])
      return tf.reduce_mean(x) + 0 * tf.stop_gradient(
          tf.reduce_sum(weights("w", [2])))

    with self.assertRaisesRegex(
        ValueError, r"`loss` must depend on a variable to train: it has no "
        r"gradient by any of \['idle', 'w'\]"):
      self.build(model).minimize(self.sgd())

  def test_nothing_to_train(self):
    with self.assertRaisesRegex(ValueError, r"no gradient by any of \[\]"):
      self.build(lambda x: tf.reduce_mean(x)).minimize(self.sgd())

  @parameterized.named_parameters(
      ("name", lambda: "adam"),
      ("class", lambda: tf.train.Saver()),
      ("keras", lambda: tf.keras.optimizers.SGD(0.1)),
  )
  def test_optimizer(self, make_optimizer):
    graph = self.build(regression)
    with self.assertRaisesRegex(
        TypeError, "`optimizer` must be a tf.train.Optimizer of "
        "tensorflow.compat.v1: got .*Keras optimizers do not work"):
      graph.minimize(make_optimizer())


if __name__ == "__main__":
  tf.test.main()
