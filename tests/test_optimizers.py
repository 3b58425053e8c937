"""Tests of optimizers: any of v1, several at once, and averages around them."""

import itertools
import socket

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
import training_cases as cases


class Halving(tf.train.GradientDescentOptimizer):
  """Overrides `compute_gradients`, as clipping wrappers do."""

  def compute_gradients(self, loss, *args, **kwargs):
    pairs = super().compute_gradients(loss, *args, **kwargs)
    return [(g if g is None else tf.convert_to_tensor(g) * 0.5, v)
            for g, v in pairs]


class ScalingTheLoss(tf.train.Optimizer):
  """Wraps an optimizer and differentiates another loss, as for float16."""

  def __init__(self, optimizer):
    super().__init__(use_locking=False, name="Scaling")
    self._optimizer = optimizer

  def compute_gradients(self, loss, var_list=None, **kwargs):
    pairs = self._optimizer.compute_gradients(loss * 8.0, var_list, **kwargs)
    return [(tf.convert_to_tensor(g) / 8.0, v) for g, v in pairs]

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return self._optimizer.apply_gradients(grads_and_vars, global_step, name)


class Averaging(tf.train.Optimizer):
  """Wraps an optimizer, and averages the variables after each update."""

  def __init__(self, optimizer):
    super().__init__(use_locking=False, name="Averaging")
    self._optimizer = optimizer
    self._average = tf.train.ExponentialMovingAverage(0.5)

  def compute_gradients(self, *args, **kwargs):
    return self._optimizer.compute_gradients(*args, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    applied = self._optimizer.apply_gradients(grads_and_vars, global_step, name)
    with tf.control_dependencies([applied]):
      return self._average.apply([v for _, v in grads_and_vars])


class AlsoByTheLoss(tf.train.GradientDescentOptimizer):
  """Takes another derivative beside."""

  def compute_gradients(self, loss, var_list=None, **kwargs):
    own, = tf.gradients(loss, [loss])
    pairs = super().compute_gradients(loss, var_list, **kwargs)
    return [(tf.convert_to_tensor(g) * own, v) for g, v in pairs]


def free_port():
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.3),
    "momentum": lambda: tf.train.MomentumOptimizer(0.3, 0.9),
    "nesterov": lambda: tf.train.MomentumOptimizer(0.3, 0.9,
                                                   use_nesterov=True),
    "adam": lambda: tf.train.AdamOptimizer(0.05),
    "rmsprop": lambda: tf.train.RMSPropOptimizer(0.05, centered=True),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.3),
    "adadelta": lambda: tf.train.AdadeltaOptimizer(1.0),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.3),
    "halving": lambda: Halving(0.3),
    "scaling": lambda: ScalingTheLoss(tf.train.AdamOptimizer(0.05)),
    "averaging": lambda: Averaging(tf.train.MomentumOptimizer(0.3, 0.9)),
    "averaging_halving": lambda: Averaging(Halving(0.3)),
    "also_by_the_loss": lambda: AlsoByTheLoss(0.3),
}


def train(trainer, steps=3):
  with trainer.session():
    for k in range(steps):
      trainer.step(cases.batch(5 + k, k))
    return trainer.variables()


class AnyOptimizerTest(parameterized.TestCase):

  @parameterized.parameters(*OPTIMIZERS)
  def test_equals_one_device(self, name):
    expected = train(
        cases.Trainer(None, cases.plain_step(OPTIMIZERS[name])))
    for options in ({}, {"variables": "replicated"}):
      got = train(cases.Trainer(3, cases.towers_step(OPTIMIZERS[name]),
                                **options))
      self.assertEqual(expected.keys(), got.keys())
      for key in expected:
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-9,
                                   atol=1e-13, err_msg=key)

  @parameterized.parameters("averaging", "scaling", "halving")
  def test_wrappers_with_options(self, name):
    """In a conditional, too, what wrappers make has its usual names."""
    expected = train(
        cases.Trainer(None, cases.plain_step(OPTIMIZERS[name])))
    got = train(cases.Trainer(2, cases.towers_step(
        OPTIMIZERS[name], skip_nonfinite=True, loss_scale=8.0)))
    got.pop("skipped_steps")
    self.assertEqual(expected.keys(), got.keys())
    for key in expected:
      np.testing.assert_allclose(got[key], expected[key], rtol=1e-9, atol=1e-13)

  def test_slots_under_the_callers_scope(self):
    names = {}
    for num_towers in (None, 1, 3):
      def scoped(make):
        def made(graph, step):
          with tf.variable_scope("training"):
            return make(graph, step)
        return made

      make = (cases.plain_step if num_towers is None else cases.towers_step)(
          OPTIMIZERS["adam"])
      names[num_towers] = set(train(
          cases.Trainer(num_towers, scoped(make)), 1))
    self.assertEqual(names[None], names[1])
    self.assertEqual(names[None], names[3])
    self.assertIn("training/beta1_power", names[3])

  def test_c021_no_key_has_a_towers_prefix(self):
    for key in train(cases.Trainer(4, cases.towers_step(OPTIMIZERS["adam"])),
                     1):
      self.assertNotIn("tower", key)

  def test_ref_variables_of_outside_train_too(self):
    with tf.Graph().as_default():
      outside = tf.get_variable("outside", [], use_resource=False,
                                initializer=tf.ones_initializer())

      def model(x):
        return tf.reduce_mean(x * outside * tf.get_variable(
            "w", [], initializer=tf.ones_initializer()))

      graph = towers.build_towers(model, testing.devices(2),
                                  inputs=tf.constant([1.0, 2.0, 3.0]))
      train_op = graph.minimize(Halving(0.5))
      with testing.session(initialize=True) as sess:
        sess.run(train_op)
        np.testing.assert_allclose(sess.run(outside), 0.5)


class MovingAverageTest(parameterized.TestCase):

  @parameterized.parameters((1, "shared"), (3, "shared"), (3, "balanced"),
                            (3, "replicated"))
  def test_c018_around_the_train_op(self, num_towers, variables):
    def averaged(make):
      def made(graph, step):
        average = tf.train.ExponentialMovingAverage(0.5)
        with tf.control_dependencies([make(graph, step)]):
          return average.apply(tf.trainable_variables())
      return made

    expected = train(cases.Trainer(
        None, averaged(cases.plain_step(OPTIMIZERS["momentum"]))))
    got = train(cases.Trainer(
        num_towers, averaged(cases.towers_step(OPTIMIZERS["momentum"])),
        variables=variables))
    self.assertEqual(expected.keys(), got.keys())
    self.assertIn("weights/ExponentialMovingAverage", got)
    for key in expected:
      np.testing.assert_allclose(got[key], expected[key], rtol=1e-9)


def gan(noise, images):
  """A generator and a discriminator, both with batch norm."""
  with tf.variable_scope("generator"):
    w = tf.get_variable("w", [3, 4], noise.dtype)
    fake = towers.batch_norm(tf.matmul(noise, w), training=True, momentum=0.5)

  def discriminator(x, reuse):
    with tf.variable_scope("discriminator", reuse=tf.AUTO_REUSE):
      w = tf.get_variable("w", [4, 1], x.dtype)
      # One for each call: updates of one layer run in no fixed order.
      x = towers.batch_norm(x, training=True, momentum=0.5,
                            name="fake" if reuse else "real")
      return tf.matmul(tf.tanh(x), w)[:, 0]

  real_score, fake_score = (discriminator(images, False),
                            discriminator(fake, True))
  return {
      "discriminator_loss": tf.reduce_mean(
          tf.nn.softplus(-real_score) + tf.nn.softplus(fake_score)),
      "generator_loss": tf.reduce_mean(tf.nn.softplus(-fake_score)),
      "fake": fake,
  }


class SeveralLossesTest(parameterized.TestCase):

  def build(self, num_towers, own_updates=False):
    self.inputs = (tf.placeholder(tf.float64, [None, 3]),
                   tf.placeholder(tf.float64, [None, 4]))
    graph = towers.build_towers(gan, testing.devices(num_towers),
                                inputs=self.inputs)
    steps = {}
    for part in ("generator", "discriminator"):
      update_ops = None
      if own_updates:
        update_ops = [op for op in graph.update_ops if part in op.name]
      steps[part] = graph.minimize(
          tf.train.AdamOptimizer(0.1), loss=f"{part}_loss",
          var_list=tf.trainable_variables(part), update_ops=update_ops)
    return graph, steps

  def feed(self, rows=5):
    rng = np.random.RandomState(rows)
    return dict(zip(self.inputs, (rng.normal(size=[rows, 3]),
                                  rng.normal(size=[rows, 4]))))

  def values(self, sess, part, trainable=None):
    found = tf.global_variables(part)
    if trainable is not None:
      found = [v for v in found if v.trainable == trainable]
    return {v.op.name: sess.run(v) for v in found}

  @parameterized.parameters(1, 2, 3, 4)
  def test_one_step_leaves_the_other_part_bitwise_untouched(self, num_towers):
    for part, other in (("generator", "discriminator"),
                        ("discriminator", "generator")):
      with tf.Graph().as_default():
        tf.set_random_seed(1)
        _, steps = self.build(num_towers, own_updates=True)
        with testing.session(initialize=True) as sess:
          before = self.values(sess, other)
          own = self.values(sess, part)
          sess.run(steps[part], self.feed())
          after = self.values(sess, other)
          for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, name)
          for name, value in self.values(sess, part).items():
            self.assertTrue(np.any(value != own[name]), name)

  def test_by_default_all_moving_statistics_move(self):
    with tf.Graph().as_default():
      tf.set_random_seed(1)
      _, steps = self.build(2)
      with testing.session(initialize=True) as sess:
        before = self.values(sess, "generator")
        sess.run(steps["discriminator"], self.feed())
        for name, value in self.values(sess, "generator").items():
          self.assertEqual(bool(np.any(value != before[name])),
                           "moving" in name, name)

  def test_towers_equal_each_other(self):
    results = []
    for num_towers in (1, 3):
      with tf.Graph().as_default():
        tf.set_random_seed(1)
        _, steps = self.build(num_towers, own_updates=True)
        with testing.session(initialize=True) as sess:
          for k in range(4):
            sess.run(steps["discriminator"], self.feed(4 + k))
            sess.run(steps["generator"], self.feed(4 + k))
          results.append({v.op.name: sess.run(v)
                          for v in tf.global_variables()})
    self.assertEqual(results[0].keys(), results[1].keys())
    for name, value in results[0].items():
      np.testing.assert_allclose(results[1][name], value, rtol=1e-8, atol=1e-9)

  def test_shared_trunk_trained_by_two_losses(self):
    def model(x):
      trunk = tf.matmul(x, tf.get_variable("trunk", [3, 4], x.dtype))
      one = tf.get_variable("one", [4], x.dtype)
      two = tf.get_variable("two", [4], x.dtype)
      return {"a": tf.reduce_mean(tf.square(tf.reduce_sum(trunk * one, 1) - 1)),
              "b": tf.reduce_mean(tf.abs(tf.reduce_sum(trunk * two, 1)))}

    results = []
    for num_towers in (1, 2, 4):
      with tf.Graph().as_default():
        tf.set_random_seed(3)
        x = tf.placeholder(tf.float64, [None, 3])
        graph = towers.build_towers(model, testing.devices(num_towers),
                                    inputs=x)
        optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
        both = tf.group(graph.minimize(optimizer, loss="a"))
        with tf.control_dependencies([both]):
          after = graph.minimize(
              tf.train.AdamOptimizer(0.1),
              loss=graph.outputs["b"] * 2.0 + graph.outputs["a"])
        with testing.session(initialize=True) as sess:
          for k in range(3):
            feed = {x: np.random.RandomState(k).normal(size=[5, 3])}
            sess.run(both, feed)
            sess.run(after, feed)
          results.append(sess.run(list(graph.variables)))
    for other in results[1:]:
      for a, b in zip(results[0], other):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


class ClusterTest(absltest.TestCase):

  def test_c070_two_optimizers_on_two_workers(self):
    """All in one graph, nothing waits for anything but its own tensors."""
    ports = [free_port() for _ in range(3)]
    cluster = tf.train.ClusterSpec({
        "ps": [f"127.0.0.1:{ports[0]}"],
        "worker": [f"127.0.0.1:{port}" for port in ports[1:]],
    })
    servers = [
        tf.train.Server(cluster, job_name=job, task_index=task)
        for job, task in (("ps", 0), ("worker", 0), ("worker", 1))
    ]
    results = []
    for devices, target in (
        (["/cpu:0"], ""),
        (["/job:worker/task:0/device:CPU:0",
          "/job:worker/task:1/device:CPU:0"], servers[1].target)):
      with tf.Graph().as_default():
        tf.set_random_seed(1)
        inputs = (tf.placeholder(tf.float64, [None, 3]),
                  tf.placeholder(tf.float64, [None, 4]))
        graph = towers.build_towers(
            gan, devices, inputs=inputs,
            parameter_device="/job:ps/task:0/cpu:0" if target else None)
        steps = [
            graph.minimize(tf.train.AdamOptimizer(0.1), loss=f"{part}_loss",
                           var_list=tf.trainable_variables(part))
            for part in ("discriminator", "generator")
        ]
        missing = tf.report_uninitialized_variables()
        options = tf.RunOptions(timeout_in_ms=30000)
        with tf.Session(target) as sess:
          self.assertIn(b"generator/w", sess.run(missing, options=options))
          sess.run(tf.global_variables_initializer(), options=options)
          self.assertEmpty(sess.run(missing, options=options))
          for k in range(5):
            rng = np.random.RandomState(k)
            feed = dict(zip(inputs, (rng.normal(size=[5, 3]),
                                     rng.normal(size=[5, 4]))))
            for step in steps:
              sess.run(step, feed, options=options)
          results.append(sess.run(tf.trainable_variables(), options=options))
    for one, other in zip(*results):
      np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-9)


class NoGradientTest(parameterized.TestCase):

  @parameterized.parameters(*itertools.product(
      ({}, {"clip_norm": 0.1}, {"skip_nonfinite": True},
       {"accumulate_steps": 1, "loss_scale": 8.0}, {"pack_bytes": 1000}),
      ("shared", "replicated")))
  def test_variables_that_some_or_all_towers_leave_out(self, options,
                                                       variables):
    """The denominator is the whole batch, not the towers that take part."""

    def model(features, ids, labels):
      del ids, labels
      w = tf.get_variable("w", [], features.dtype,
                          initializer=tf.ones_initializer())
      first = tf.get_variable("first", [], features.dtype,
                              initializer=tf.ones_initializer())
      tf.get_variable("none", [], features.dtype,
                      initializer=tf.ones_initializer())
      y = features[:, 0] * w
      if towers.current_tower().index == 0:
        y += first
      else:
        tf.identity(first)
      return tf.reduce_mean(y)

    trainer = cases.Trainer(
        3, cases.towers_step(lambda: tf.train.MomentumOptimizer(1.0, 0.9),
                             **options), model_fn=model, variables=variables)
    with trainer.session():
      rows = [np.full([7, 3], 0.01), np.zeros(7), np.zeros(7)]
      trainer.step(rows)
      values = trainer.variables()
    # Tower 0 has 3 of the 7 rows.
    factor = 1.0
    if "clip_norm" in options:
      factor = 0.1 / np.sqrt(0.01**2 + (3 / 7)**2)
    np.testing.assert_allclose(values["first"], 1 - factor * 3 / 7)
    np.testing.assert_allclose(values["w"], 1 - factor * 0.01)
    self.assertEqual(values["none"], 1)
    self.assertNotIn("none/Momentum", values)


class SparseTest(parameterized.TestCase):

  @parameterized.parameters("sgd", "adam")
  def test_c023_stays_sparse(self, name):
    rows = 100000

    def model(ids):
      table = tf.get_variable("table", [rows, 8],
                              initializer=tf.ones_initializer())
      return tf.reduce_mean(tf.nn.embedding_lookup(table, ids)[:, 0])

    with tf.Graph().as_default() as g:
      ids = tf.constant([3, 3, 7, 7, 9])
      graph = towers.build_towers(model, testing.devices(2), inputs=ids)
      before = len(g.get_operations())
      (gradient, _), = graph.gradients()
      added = g.get_operations()[before:]
      graph.minimize(OPTIMIZERS[name](), clip_norm=1.0)
      self.assertIsInstance(gradient, tf.IndexedSlices)
      for op in added:
        for x in op.outputs:
          if x.shape.rank:
            self.assertNotEqual(x.shape.as_list()[0], rows, op.name)
      with testing.session(initialize=True) as sess:
        indices, values = sess.run([gradient.indices, gradient.values])
    self.assertEqual(indices.tolist(), [3, 3, 7, 7, 9])
    np.testing.assert_allclose(values[:, 0], [0.2] * 5, rtol=1e-6)

  @parameterized.parameters("sgd", "momentum", "adam")
  def test_c069_500_steps_equal_one_device(self, name):
    """Rows that several towers look up, in each step."""
    expected = train(
        cases.Trainer(None, cases.plain_step(OPTIMIZERS[name])), 500)
    got = train(cases.Trainer(2, cases.towers_step(OPTIMIZERS[name])), 500)
    for key in expected:
      np.testing.assert_allclose(got[key], expected[key], rtol=1e-7, atol=1e-9,
                                 err_msg=key)


class RegularizationTest(parameterized.TestCase):

  def build(self, num_towers, adds):
    def model(x):
      w = tf.get_variable("w", [], x.dtype, initializer=tf.ones_initializer(),
                          regularizer=lambda v: 3.0 * v)
      loss = tf.reduce_mean(x) * 0.0
      if adds:
        loss += tf.losses.get_regularization_loss()
      return loss + 0.0 * w

    return towers.build_towers(model, testing.devices(num_towers),
                               inputs=tf.ones([5], tf.float64))

  @parameterized.parameters(1, 2, 3, 4)
  def test_c028_counts_once(self, num_towers):
    for adds in (True, False):
      with tf.Graph().as_default():
        graph = self.build(num_towers, adds)
        self.assertLen(
            tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES), 1)
        loss = graph.loss
        if not adds:
          loss += graph.regularization_loss
        (gradient, _), = graph.gradients(loss)
        with testing.session(initialize=True) as sess:
          self.assertAlmostEqual(sess.run(loss), 3.0)
          self.assertEqual(sess.run(graph.regularization_loss), 3.0)
          self.assertAlmostEqual(sess.run(gradient), 3.0)

  def test_none(self):
    with tf.Graph().as_default():
      graph = towers.build_towers(lambda x: tf.reduce_mean(x),
                                  testing.devices(2), inputs=tf.ones([4]))
      with testing.session() as sess:
        self.assertEqual(sess.run(graph.regularization_loss), 0.0)
      self.assertIs(graph.regularization_loss, graph.regularization_loss)


if __name__ == "__main__":
  absltest.main()
