"""Tests for towers.lockstep."""

import collections
import threading
import time
import traceback

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import lockstep

Pair = collections.namedtuple("Pair", ["first", "second"])


class ModelError(Exception):
  """What only a model raises."""


def index():
  return towers.current_tower().index


def summed(x):
  return towers.merge(tf.add_n, x)


def raised_by(function, *args, **kwargs):
  """Returns what `function` raises, with its traceback."""
  try:
    function(*args, **kwargs)
  except BaseException as error:  # pylint: disable=broad-except
    return error
  raise AssertionError("Nothing was raised.")


def functions_in(error):
  """Returns the names of the functions in the traceback of `error`."""
  return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class MergeTest(parameterized.TestCase, tf.test.TestCase):

  def build(self, model, count=3, **options):
    return towers.build_towers(model, testing.devices(count), **options)

  @parameterized.parameters(1, 2, 3, 4)
  def test_every_tower_gets_what_the_function_returns_once(self, count):
    calls = []

    def model():
      x = tf.constant(float(index() + 1))

      def fn(values):
        calls.append(len(values))
        return {"sum": tf.add_n([v["x"].first for v in values]),
                "all": Pair(tf.stack([v["x"].second[0] for v in values]), 7)}

      merged = towers.merge(fn, {"x": Pair(x, [tf.as_string(x)])})
      self.assertEqual(merged["all"].second, 7)
      return {"loss": merged["sum"], "names": merged["all"].first}

    graph = self.build(model, count)
    self.assertEqual(calls, [count])
    with testing.session() as sess:
      for tower in graph.towers:
        loss, names = sess.run((tower.loss, tower.outputs["names"]))
        self.assertEqual(loss, sum(range(1, count + 1)))
        self.assertAllEqual(names, [b"%d.000000" % (i + 1)
                                    for i in range(count)])

  def test_stands_in_a_scope_and_on_the_device_of_no_tower(self):
    seen = []

    def model():
      with tf.name_scope("head"):
        def fn(values):
          seen.append(tf.add_n(values, name="total").op)
          return seen[0].outputs[0]
        return towers.merge(fn, tf.constant(1.0))

    self.build(model, parameter_device="/cpu:4")
    self.assertEqual([op.name for op in seen], ["cross_tower/head/total"])
    self.assertEqual([op.device for op in seen], ["/device:CPU:4"])

  def test_towers_take_turns(self):
    """One at a time, from tower 0 up, so each meeting finds all before it."""
    order = []

    def model():
      for step in range(2):
        order.append((step, index()))
        summed(tf.constant(1.0))
      order.append((2, index()))
      return 1.0

    self.build(model)
    self.assertEqual(order, [(s, i) for s in range(3) for i in range(3)])

  def test_gradient_passes_through(self):
    """The same as of the plain sum on one device."""
    x = tf.constant([1.0, 2.0, 3.0])

    def model(x):
      weight = tf.get_variable("w", [], initializer=tf.ones_initializer())
      total = summed(tf.reduce_sum(weight * x))
      return tf.square(total)

    graph = self.build(model, inputs=x)
    with testing.session(initialize=True) as sess:
      loss, gradient = sess.run((graph.loss, graph.gradients()[0].gradient))
    self.assertAllClose((loss, gradient), (36.0, 2 * 6.0 * 6.0))

  @parameterized.product(taken=(True, False), nested=(True, False),
                         alike=(True, False))
  def test_in_a_branch(self, taken, nested, alike):
    """With one predicate for all, or one computed alike in each tower."""
    training = tf.placeholder(tf.bool, [])
    x = tf.placeholder(tf.float32, [None])

    def model(x):
      weight = tf.get_variable("w", [], initializer=tf.ones_initializer())
      predicate = training
      if alike:
        predicate = tf.logical_not(tf.logical_not(training))
      meet = lambda: summed(tf.reduce_sum(weight * x))
      inner = lambda: tf.cond(predicate, meet, lambda: weight)
      return tf.cond(predicate, inner if nested else meet,
                     lambda: weight * tf.reduce_mean(x))

    graph = self.build(model, inputs=x)
    gradient = graph.gradients()[0].gradient
    with testing.session(initialize=True) as sess:
      got = sess.run((graph.loss, gradient),
                     {training: taken, x: [1.0, 2.0, 3.0, 4.0]})
    self.assertAllClose(got, (10.0, 10.0) if taken else (2.5, 2.5))

  def test_predicate_made_by_a_long_computation(self):
    """Every step uses the one before it twice: 2**60 ways back."""

    def model():
      x = shared
      for _ in range(60):
        x = x + x
      for _ in range(1500):
        x = tf.abs(x)
      return tf.cond(x > 0.0, lambda: summed(tf.constant(1.0)), lambda: 0.0)

    shared = tf.placeholder(tf.float32, [])
    start = time.time()
    graph = self.build(model, 2)
    self.assertLess(time.time() - start, 20.0)
    with testing.session() as sess:
      self.assertAllClose(sess.run(graph.loss, {shared: 1.0}), 2.0)

  def test_function_that_raises(self):
    """Its error arrives from the model's own line."""

    def failing(values):
      raise ModelError(f"got {len(values)} values")

    def the_model():
      return towers.merge(failing, tf.constant(1.0))

    error = raised_by(self.build, the_model)
    self.assertIsInstance(error, ModelError)
    self.assertEqual(str(error), "got 3 values")
    self.assertContainsSubset(["the_model", "failing"], functions_in(error))

  def test_model_may_go_on_after_a_function_that_raises(self):
    def failing(values):
      raise ModelError(values)

    def model():
      try:
        towers.merge(failing, tf.constant(1.0))
      except ModelError:
        return summed(tf.constant(2.0))

    with testing.session() as sess:
      self.assertEqual(sess.run(self.build(model).loss), 6.0)


class RefusedTest(parameterized.TestCase, tf.test.TestCase):

  def assert_refused(self, model, message, count=2, **options):
    threads = threading.enumerate()
    with self.assertRaisesRegex(ValueError, message):
      towers.build_towers(model, testing.devices(count), **options)
    self.assertCountEqual(threading.enumerate(), threads)

  @parameterized.named_parameters(
      ("kind", lambda: towers.all_reduce(1.0), lambda: summed(1.0),
       "tower 0 waits in towers.all_reduce, tower 1 in towers.merge"),
      ("name", lambda: towers.moments(tf.ones([2, 2]), 0),
       lambda: towers.batch_norm(tf.ones([2, 2]), training=True, name="first"),
       "tower 0 waits in .*moments.*, tower 1 in batch norm `first`"),
      ("layer",
       lambda: towers.batch_norm(tf.ones([2, 2]), training=True, name="a"),
       lambda: towers.batch_norm(tf.ones([2, 2]), training=True, name="b"),
       "tower 0 waits in batch norm `a`, tower 1 in batch norm `b`"),
      ("none_in_1", lambda: summed(1.0), lambda: None,
       "tower 1 has ended, while tower 0 waits in towers.merge"),
      ("none_in_0", lambda: None,
       lambda: towers.batch_norm(tf.ones([2, 2]), training=True, name="b"),
       "tower 0 has ended, while tower 1 waits in batch norm `b`"),
  )
  def test_towers_that_do_not_meet(self, first, second, message):
    def model():
      summed(tf.constant(1.0))
      (second if index() == 1 else first)()
      return 1.0

    self.assert_refused(
        model, "`model_fn` must meet in the same layers in each tower: .*"
        + message)

  def test_the_last_of_many_towers_ends(self):
    def model():
      with tf.variable_scope("block"):
        if index() < 3:
          summed(tf.constant(1.0))
      return 1.0

    self.assert_refused(
        model, "tower 3 has ended, while tower 0 waits in towers.merge `block`",
        count=4)

  @parameterized.named_parameters(
      ("type", lambda: tf.constant(1.0), lambda: tf.constant(1),
       "expected .*float32.* as in tower 0, got .*int32.* in tower 1"),
      ("structure", lambda: [tf.constant(1.0)], lambda: (tf.constant(1.0),),
       r"expected \['float32'\] as in tower 0, got \('float32',\) in tower 1"),
      ("keys", lambda: {"a": 1.0}, lambda: {"b": 1.0},
       "expected {'a'.* as in tower 0, got {'b'.* in tower 1"),
  )
  def test_values_that_differ(self, first, second, message):
    self.assert_refused(
        lambda: towers.merge(lambda v: tf.constant(1.0),
                             (second if index() == 1 else first)()),
        "towers.merge must meet with values alike in each tower: " + message)

  @parameterized.named_parameters(
      ("of_each_tower", lambda x, p: tf.reduce_sum(x) > 0.0,
       "the True branch of `tower_0/.*` as in tower 0, got the True branch of "
       "`tower_1/"),
      ("random", lambda x, p: tf.random_uniform([]) > 0.5, "the True branch"),
      ("placeholders", lambda x, p: tf.placeholder(tf.bool, []), "the True"),
      ("default", lambda x, p: tf.placeholder_with_default(True, []),
       "the True"),
      ("constants", lambda x, p: tf.math.greater(
          tf.identity(float(index())), tf.identity(-1.0)), "the True"),
      ("negated", lambda x, p: tf.logical_not(p) if index() else p,
       "the True branch of `p:0` as in tower 0"),
      ("outside", lambda x, p: p if index() else True,
       "expected no `tf.cond` as in tower 0, got the True branch of `p:0`"),
  )
  def test_predicates_that_differ(self, predicate, message):
    p = tf.placeholder(tf.bool, [], name="p")

    def model(x):
      condition = predicate(x, p)
      if condition is True:
        with tf.name_scope("cond"):
          return summed(tf.constant(1.0))
      return tf.cond(condition, lambda: summed(tf.constant(1.0)),
                     lambda: tf.constant(2.0))

    self.assert_refused(
        model,
        "must stand in the same branch of the same `tf.cond` in each tower: "
        f".*{message}.*Compute the predicate outside `model_fn`",
        inputs=tf.ones([4]))

  def test_other_branch_of_the_same_predicate(self):
    p = tf.placeholder(tf.bool, [], name="p")

    def model():
      meet = lambda: summed(tf.constant(1.0))
      stay = lambda: tf.constant(1.0)
      return tf.cond(p, *((meet, stay) if index() else (stay, meet)))

    self.assert_refused(
        model, "expected the False branch of `p:0` as in tower 0, got the True "
        "branch of `p:0` in tower 1")

  @parameterized.named_parameters(
      ("merge", lambda x: summed(x), "towers.merge `block/walk`"),
      ("batch_norm", lambda x: towers.batch_norm(x, training=True, name="bn"),
       "batch norm `block/bn`"),
      ("moments", lambda x: x + towers.moments(x, 0).mean, "towers.moments"),
      ("gather", lambda x: towers.all_gather(x), "towers.all_gather"),
      ("in_a_branch", lambda x: tf.cond(
          tf.placeholder_with_default(True, []), lambda: summed(x),
          lambda: x), "towers.merge"),
  )
  def test_in_a_while_loop(self, layer, name):
    def model(x):
      with tf.variable_scope("block"):
        _, y = tf.while_loop(lambda i, y: i < 2,
                             lambda i, y: (i + 1, layer(y)), [0, x],
                             name="walk")
      return tf.reduce_mean(y)

    self.assert_refused(
        model, rf"{name}.* \(tower 0\) must not stand inside a while loop, got "
        "`tower_0/block/walk/.*Move the layer out of the loop",
        inputs=tf.ones([4, 2]))

  @parameterized.named_parameters(
      ("branch", lambda p, fn: tf.cond(p, fn, lambda: 0.0)),
      ("loop", lambda p, fn: tf.while_loop(lambda x: x < 2.0,
                                           lambda x: x + fn(), [0.0])),
  )
  def test_in_v2_control_flow(self, control_flow):
    tf.enable_control_flow_v2()
    self.addCleanup(tf.disable_control_flow_v2)
    p = tf.placeholder(tf.bool, [])
    self.assert_refused(
        lambda: control_flow(p, lambda: summed(tf.constant(1.0))),
        r"towers.merge.* \(tower 0\) must not stand inside a function or a "
        r"branch of v2 control flow.*tf.disable_control_flow_v2\(\)")

  def test_in_a_function(self):
    function = tf.function(lambda x: summed(x), autograph=False)
    self.assert_refused(lambda: function(tf.constant(1.0)),
                        "must not stand inside a function")


class SameValueTest(tf.test.TestCase):

  def test_reads_and_random_numbers_differ(self):
    x = tf.placeholder(tf.float32, [2])
    self.assertTrue(lockstep.same_value(tf.reduce_sum(x), tf.reduce_sum(x)))
    self.assertTrue(lockstep.same_value(tf.constant(1), tf.constant(1)))
    self.assertFalse(lockstep.same_value(tf.constant(1), tf.constant(2)))
    self.assertFalse(lockstep.same_value(x + 1.0, x + 2.0))
    self.assertFalse(lockstep.same_value(*tf.unstack(x)))
    for make in (lambda: tf.random_uniform([]),
                 lambda: tf.placeholder(tf.float32, [])):
      self.assertFalse(lockstep.same_value(make(), make()))


if __name__ == "__main__":
  tf.test.main()
