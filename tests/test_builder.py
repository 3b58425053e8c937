"""Tests for towers.builder: the steps of a build, and what it leaves behind."""

import collections
import threading
from unittest import mock

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


def batch(rows=6, columns=4):
  return np.random.RandomState(rows).normal(size=[rows, columns])


def linear(x):
  w = tf.get_variable("w", [4, 1], tf.float64)
  return tf.reduce_mean(tf.matmul(x, w, name="product"))


def build(model=linear, num_towers=2, **options):
  options.setdefault("inputs", batch())
  return towers.build_towers(model, testing.devices(num_towers), **options)


def operations(graph=None):
  return (graph or tf.get_default_graph()).get_operations()


def names_in(scope):
  """Returns the names below `scope`, without it."""
  return [op.name[len(scope):] for op in operations()
          if op.name.startswith(scope)]


def variables():
  return [v.op.name for v in tf.global_variables()]


class ScopesTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(1, 2, 3)
  def test_towers_have_scopes_and_devices_of_their_own(self, num_towers):
    graph = build(num_towers=num_towers)
    for index, tower in enumerate(graph.towers):
      self.assertEqual(tower.name_scope, f"tower_{index}/")
      self.assertEqual(tower.count, num_towers)
      product = tf.get_default_graph().get_operation_by_name(
          f"tower_{index}/product")
      self.assertEqual(product.device, f"/device:CPU:{index}")
    self.assertEqual(variables(), ["w"])

  def test_a_tower_may_span_several_devices(self):
    def model(x):
      tower = towers.current_tower()
      with tf.device(tower.devices[1]):
        h = tf.tanh(x, name="later")
      return linear(h)

    graph = towers.build_towers(
        model, [("/cpu:0", "/cpu:1"), ("/cpu:2", "/cpu:3")], inputs=batch())
    found = {op.name: op.device for op in operations() if op.type == "Tanh"}
    self.assertEqual(found, {"tower_0/later": "/device:CPU:1",
                             "tower_1/later": "/device:CPU:3"})
    with testing.session(initialize=True) as sess:
      sess.run(graph.loss)

  @parameterized.parameters(1, 2)
  def test_stands_below_the_callers_name_scope(self, num_towers):
    with tf.name_scope("outer"):
      graph = build(num_towers=num_towers)
    self.assertEqual(graph.towers[0].name_scope, "outer/tower_0/")
    self.assertEqual(variables(), ["w"])
    self.assertEmpty([op.name for op in operations()
                      if op.name.startswith("tower_")])

  @parameterized.parameters(1, 2)
  def test_stands_below_the_callers_variable_scope(self, num_towers):
    def model(x):
      return linear(x) + tf.reduce_sum(
          tf.Variable(tf.zeros([2], tf.float64), name="b"))

    with tf.variable_scope("outer"):
      build(model, num_towers)
      self.assertEqual(tf.get_variable_scope().name, "outer")
      tf.get_variable("after", [])
    self.assertEqual(variables(), ["outer/w", "outer/b", "outer/after"])

  def test_the_callers_device_is_for_what_has_none(self):
    with tf.device("/cpu:4"):
      graph = build()
    self.assertEqual(graph.variables[0].device, "/device:CPU:0")
    self.assertEqual({op.device for op in operations() if op.type == "MatMul"},
                     {"/device:CPU:0", "/device:CPU:1"})
    self.assertEqual(tf.ones([]).device, "")

  def test_the_callers_control_dependencies_hold_in_all_towers(self):
    before = tf.no_op(name="before")
    with tf.control_dependencies([before]):
      build()
    for index in range(2):
      needed, pending = set(), [tf.get_default_graph().get_operation_by_name(
          f"tower_{index}/product")]
      while pending:
        op = pending.pop()
        needed.add(op)
        pending.extend([x.op for x in op.inputs] + list(op.control_inputs))
      self.assertIn(before, needed)

  def test_the_callers_getters_hold_in_all_towers(self):
    asked = collections.Counter()

    def getter(getter, name, *args, **kwargs):
      asked[name] += 1
      return getter(name, *args, **kwargs)

    with tf.variable_scope("outer", custom_getter=getter,
                           initializer=tf.ones_initializer()):
      graph = build()
    self.assertEqual(asked, {"outer/w": 2})
    with testing.session(initialize=True) as sess:
      self.assertAllEqual(sess.run(graph.variables[0]), np.ones([4, 1]))

  @parameterized.parameters("model", "model.v1-2")
  def test_name(self, name):
    self.assertEqual([t.name_scope for t in build(name=name).towers],
                     [f"{name}_0/", f"{name}_1/"])


class ModelFunctionTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("tensor", lambda x: x, lambda a: a),
      ("tuple", lambda x: (x, x), lambda a, b: a + b),
      ("list", lambda x: [x, x], lambda a, b: a + b),
      ("dict", lambda x: {"x": x}, lambda a: a["x"]),
      ("nested", lambda x: (x, {"y": [x]}), lambda a, b: a + b["y"][0]))
  def test_takes_what_inputs_are(self, make_inputs, function):
    for num_towers in (1, 2):
      graph = build(lambda *args: tf.reduce_mean(function(*args)), num_towers,
                    inputs=make_inputs(tf.constant(batch())))
      self.assertEqual(graph.loss.shape, [])

  def test_takes_nothing_without_inputs(self):
    graph = build(lambda: tf.constant(3.0), inputs=None)
    with testing.session() as sess:
      self.assertEqual(sess.run(graph.loss), 3)

  def test_knows_its_tower(self):
    found = []
    build(lambda x: found.append(towers.current_tower()) or linear(x), 3)
    self.assertEqual([(t.index, t.count, t.device, t.weight) for t in found],
                     [(i, 3, f"/cpu:{i}", 2.0) for i in range(3)])

  def test_one_tower_is_built_in_the_callers_thread(self):
    found = []

    def model(x):
      found.append(threading.current_thread())
      return linear(x)

    threads = threading.active_count()
    build(model, 1)
    self.assertEqual(found, [threading.current_thread()])
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      build(model, 3)
    self.assertLen(set(found), 4)
    self.assertEqual(threading.active_count(), threads)


class PlainGraphTest(parameterized.TestCase, tf.test.TestCase):

  def ops_of(self, make, shape):
    with tf.Graph().as_default():
      make(tf.placeholder(tf.float32, shape, name="x"))
      return [(op.type, op.name, op.device, [x.name for x in op.inputs])
              for op in operations()]

  def test_one_tower_is_the_plain_graph(self):
    """Op for op, with batch norm and summaries; updates wait for the inputs."""
    def model(x):
      h = tf.matmul(x, tf.get_variable("w", [4, 4]))
      tf.summary.scalar("size", tf.reduce_mean(h))
      h = towers.batch_norm(h, training=True)
      return tf.reduce_mean(h**2)

    def plain(x):
      with tf.device("/cpu:0"), tf.name_scope("tower_0"):
        with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
          model(x)

    actual = self.ops_of(lambda x: build(model, 1, inputs=x), [5, 4])
    self.assertEqual([op for op in actual
                      if op[:2] != ("NoOp", "cross_tower/inputs_ready")],
                     self.ops_of(plain, [5, 4]))

  @parameterized.parameters(None, 5)
  def test_one_tower_meets_nobody(self, rows):
    def model(x):
      h = tf.matmul(x, tf.get_variable("w", [4, 4]))
      h = towers.batch_norm(towers.all_gather(h), training=True)
      gradient, = tf.gradients(tf.reduce_max(h), x)
      return towers.all_reduce(tf.reduce_mean(h**2)) + tf.reduce_sum(gradient)

    ops = self.ops_of(lambda x: build(model, 1, inputs=x).minimize(
        tf.train.AdamOptimizer()), [rows, 4])
    self.assertNotIn("IdentityN", [op[0] for op in ops])
    self.assertEmpty([op for op in ops if "towers_view" in op[1]])


class SecondBuildTest(parameterized.TestCase, tf.test.TestCase):

  def model(self, training):
    def model_fn(x):
      h = tf.matmul(x, tf.get_variable("w", [4, 3], tf.float64))
      h = towers.batch_norm(h, training=training, momentum=0.5, name="norm")
      loss = tf.reduce_mean(h**2 + h)
      tf.summary.scalar("loss", loss)
      return loss

    return model_fn

  @parameterized.product(num_towers=(1, 3), name=("tower", "eval"))
  def test_evaluates_beside_training(self, num_towers, name):
    """c072: the scopes stay apart, the variables are the same."""
    train = build(self.model(True), num_towers)
    made = variables()
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      evaluation = build(self.model(False), 2, name=name)
    self.assertEqual(variables(), made)
    prefix = "towers_2/" if name == "tower" else ""
    self.assertEqual([t.name_scope for t in evaluation.towers],
                     [f"{prefix}{name}_{i}/" for i in range(2)])
    self.assertCountEqual([v.op.name for v in evaluation.variables], made)
    self.assertEmpty(evaluation.update_ops)
    train_op = train.minimize(tf.train.GradientDescentOptimizer(0.125))
    with testing.session(initialize=True) as sess:
      first = sess.run(evaluation.loss)
      sess.run(train_op)
      self.assertNotAllClose(sess.run(evaluation.loss), first)
      w, mean, variance = (sess.run(v) for v in evaluation.variables
                           if v.op.name == "w" or "moving" in v.op.name)
      h = (batch() @ w - mean) / np.sqrt(variance + 1e-3)
      gamma, beta = (sess.run(v) for v in evaluation.variables
                     if v.op.name.endswith(("gamma", "beta")))
      h = gamma * h + beta
      self.assertAllClose(sess.run(evaluation.loss), (h**2 + h).mean(), 1e-9)

  @parameterized.parameters(1, 2)
  def test_layers_without_names(self, num_towers):
    """They get the same names in a named scope, as in plain code."""
    def model(x):
      h = towers.batch_norm(x, training=True)
      with tf.variable_scope(None, "layer"):
        return linear(h)

    for reuse in (False, True):
      with tf.variable_scope("model", reuse=reuse):
        graph = build(model, num_towers)
      self.assertEqual([v.op.name for v in graph.variables], variables())

  def test_third_build_of_the_same_name(self):
    for expected in ("tower_0/", "towers_2/tower_0/", "towers_3/tower_0/"):
      with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        self.assertEqual(build().towers[0].name_scope, expected)

  def test_other_numbers_of_towers_share_no_scope(self):
    """Also where only a later tower's scope is taken."""
    build(num_towers=2, name="a")
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      self.assertEqual(build(num_towers=1, name="a").towers[0].name_scope,
                       "as_2/a_0/")
      with tf.name_scope("b_1"):
        tf.no_op()
      self.assertEqual(build(num_towers=2, name="b").towers[0].name_scope,
                       "bs_2/b_0/")

  @parameterized.parameters(1, 2)
  def test_without_reuse_it_is_refused_as_plain_code_is(self, num_towers):
    build(num_towers=num_towers)
    with self.assertRaisesRegex(ValueError, "Variable w already exists"):
      build(num_towers=num_towers)

  def test_of_another_model_goes_on_with_the_names(self):
    def model(x):
      with tf.variable_scope(None, "layer"):
        return linear(x)

    found = []
    for num_towers in (1, 3):
      with tf.Graph().as_default():
        build(model, num_towers)
        build(model, num_towers, name="other")
        with tf.variable_scope(None, "layer"):
          tf.get_variable("w", [])
        found.append(variables())
    self.assertEqual(found[0], ["layer/w", "layer_1/w", "layer_2/w"])
    self.assertEqual(found[1], found[0])

  def test_scope_entered_twice_by_the_model(self):
    """c072: variables and ops of one scope, entered again."""
    def model(x):
      for reuse in (False, True):
        with tf.variable_scope("m", reuse=reuse):
          loss = linear(x)
      return loss

    build(model)
    self.assertEqual(variables(), ["m/w"])
    for index in range(2):
      self.assertContainsSubset(["m/product", "m_1/product"],
                                names_in(f"tower_{index}/"))


class CollectionsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(1, 2)
  def test_holds_what_one_tower_put_there(self, num_towers):
    def model(x):
      loss = linear(x)
      self.assertLen(tf.get_collection("mine"), 1)
      tf.losses.add_loss(loss)
      tf.add_to_collection("mine", loss)
      tf.add_to_collection(("yours", 3), "anything")
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.no_op())
      self.assertLen(tf.get_collection("mine"), 2)
      return loss

    tf.add_to_collection("mine", "before")
    graph = build(model, num_towers)
    first = graph.towers[0].loss
    self.assertEqual(tf.get_collection("mine"), ["before", first])
    self.assertEqual(tf.get_collection(tf.GraphKeys.LOSSES), [first])
    self.assertLen(tf.get_collection(tf.GraphKeys.UPDATE_OPS), 1)
    for tower in graph.towers:
      self.assertEqual(tower.collection("mine"), [tower.loss])
      self.assertEqual(tower.collection(tf.GraphKeys.LOSSES), [tower.loss])
      self.assertLen(tower.update_ops, 1)
      self.assertStartsWith(tower.update_ops[0].name, tower.name_scope)
      self.assertEmpty(tower.collection("unknown"))
    tower.collection("mine").append(1)
    self.assertLen(tower.collection("mine"), 1)

  @parameterized.parameters(1, 2)
  def test_what_the_model_removes_is_gone(self, num_towers):
    tf.add_to_collection("mine", "before")

    def model(x):
      del tf.get_collection_ref("mine")[:]
      tf.add_to_collection("mine", "new")
      return linear(x)

    graph = build(model, num_towers)
    self.assertEqual(tf.get_collection("mine"), ["new"])
    self.assertEqual(graph.towers[-1].collection("mine"), ["new"])

  def test_summaries_have_the_tags_of_the_plain_model(self):
    """c071: tower 0's in the collection, each tower's by `collection`."""
    def model(x):
      loss = linear(x)
      tf.summary.scalar("loss", loss)
      with tf.name_scope("layer"):
        tf.summary.histogram("x", x)
      tf.summary.scalar("loss", loss, family="all")
      tf.summary.image("image", tf.reshape(x, [1, -1, 1, 1]),
                       collections=["images"])
      return loss

    def tags(sess, items):
      summary = tf.Summary.FromString(sess.run(tf.summary.merge(items)))
      return [value.tag for value in summary.value]

    with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
      model(tf.constant(batch()[:1]))
    with testing.session(initialize=True) as sess:
      expected = tags(sess, tf.get_collection(tf.GraphKeys.SUMMARIES))
      self.assertEqual(expected, ["loss", "layer/x", "all/all/loss"])
    with tf.Graph().as_default():
      graph = build(model, 2, inputs=batch(2))
      self.assertLen(tf.get_collection("images"), 1)
      key = tf.GraphKeys.SUMMARIES
      with testing.session(initialize=True) as sess:
        self.assertEqual(tags(sess, tf.get_collection(key)), expected)
        self.assertLen(tags(sess, graph.towers[1].collection(key)), 3)
        images = [tags(sess, tower.collection("images"))
                  for tower in graph.towers]
        self.assertStartsWith(images[0][0], "image/image")
        self.assertStartsWith(images[1][0], "tower_1/image/image")
      with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        again = build(model, 2, inputs=batch(2), name="again")
      with testing.session(initialize=True) as sess:
        second = tags(sess, again.towers[0].collection(key))
        self.assertNoCommonElements(second, expected)
        self.assertNotIn("tower", "".join(second))


class RejectsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("function", dict(model=3), TypeError,
       "`model_fn` must be a function: got 3"),
      ("name", dict(name="/x"), ValueError,
       "`name` must be the beginning of a name scope: .* got '/x'"),
      ("no_name", dict(name=""), ValueError, "`name` must be .* got ''"),
      ("name_type", dict(name=1), ValueError, "`name` must be .* got 1"),
      ("update_ops", dict(update_ops="last"), ValueError,
       "`update_ops` must say whose update ops run: .* got 'last'"),
      ("devices", dict(num_towers=0), ValueError,
       "`devices` must name at least one device"),
      ("parameter_device", dict(parameter_device="nowhere:x"), ValueError,
       "`parameter_device` must be a device string"),
      ("nothing", dict(model=lambda x: None), ValueError,
       "`model_fn` must return a scalar loss, .*holds no tensor .tower 0"),
  )
  def test_arguments(self, options, error, message):
    before = len(operations())
    with self.assertRaisesRegex(error, message):
      build(**options)
    if "model" not in options or options["model"] == 3:
      self.assertLen(operations(), before)

  def test_a_build_inside_a_build(self):
    def model(x):
      if towers.current_tower().index == 1:
        build()
      return linear(x)

    with self.assertRaisesRegex(
        ValueError, "`build_towers` must not be called inside `model_fn`: got "
        "a call in tower 1"):
      build(model)

  def test_functions(self):
    @tf.function
    def function():
      return build().loss

    with self.assertRaisesRegex(
        ValueError, "`build_towers` must be called in graph mode: expected a "
        "tf.Graph, got a tf.function.*disable_v2_behavior"):
      function()

  def test_eager_execution(self):
    with mock.patch.object(tf, "executing_eagerly", lambda: True):
      with self.assertRaisesRegex(
          ValueError, "expected a tf.Graph, got eager execution"):
        build()

  @parameterized.named_parameters(
      ("cond", lambda f: tf.cond(tf.placeholder(tf.bool), f,
                                 lambda: tf.zeros([], tf.float64))),
      ("loop", lambda f: tf.while_loop(lambda i: i < 1, lambda i: f(),
                                       [tf.zeros([], tf.float64)])))
  def test_control_flow(self, enter):
    with self.assertRaisesRegex(
        ValueError, "`build_towers` must not be called inside `tf.cond` or a "
        "loop"):
      enter(lambda: build().loss)


if __name__ == "__main__":
  tf.test.main()
