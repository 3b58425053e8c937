"""Tests for towers.variables: variables exist once and serve all towers."""

import os

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import references
import testing
import towers


def batch(rows=7, columns=4):
  return np.random.RandomState(rows).normal(size=[rows, columns])


def weights(name, shape, dtype=tf.float64, **options):
  return tf.get_variable(name, shape, dtype, **options)


def build(model, num_towers=3, **options):
  """Builds `model`, which takes no inputs."""
  return towers.build_towers(model, testing.devices(num_towers), **options)


def names(variables=None):
  variables = tf.global_variables() if variables is None else variables
  return [v.op.name for v in variables]


def nested_scopes(x):
  with tf.variable_scope("outer"):
    x = tf.matmul(x, weights("w", [4, 4]))
    with tf.variable_scope("inner", reuse=tf.AUTO_REUSE):
      x = tf.matmul(x, weights("w", [4, 4]))
      x = tf.matmul(x, weights("w", [4, 4]))
  with tf.variable_scope("outer", reuse=True):
    x += weights("w", [4, 4])[0]
  return tf.reduce_mean(x**2)


def unnamed_scopes(x):
  for _ in range(3):
    with tf.variable_scope(None, "layer"):
      x = tf.matmul(x, weights("w", [4, 4]))
    with tf.variable_scope("again", reuse=tf.AUTO_REUSE):
      with tf.variable_scope(None, "layer"):
        x = tf.matmul(x, weights("w", [4, 4]))
  return tf.reduce_mean(x**2)


def scaled_by_a_getter(x):
  """The getter asks for a variable under another name."""
  def getter(getter, name, *args, **kwargs):
    value = getter(name, *args, **kwargs)
    return value * getter(f"{name}_scale", *args, **kwargs)

  with tf.variable_scope("layer", custom_getter=getter):
    return tf.reduce_mean(tf.matmul(x, weights("w", [4, 1]))**2)


def partitioned(x):
  with tf.variable_scope("layer",
                         partitioner=tf.fixed_size_partitioner(2)):
    w = weights("w", [4, 3])
  return tf.reduce_mean(tf.matmul(x, tf.convert_to_tensor(w))**2)


def plain_variables(x):
  """c016: `tf.Variable`, with a tensor, a function and no name."""
  w = tf.Variable(tf.random_normal([4, 2], dtype=tf.float64), name="w")
  with tf.name_scope("layer"):
    w2 = tf.Variable(tf.zeros([2, 2], tf.float64), name="w")
  with tf.variable_scope("layer"):
    b = tf.Variable(lambda: tf.zeros([2], tf.float64))
  same = [tf.Variable(np.zeros([2])) for _ in range(3)]
  return tf.reduce_mean((tf.matmul(tf.matmul(x, w), w2) + b + same[0] * same[1]
                         + same[2])**2)


def mixed(x):
  """The second kind of creation takes names from the first."""
  a = weights("w", [4, 4])
  b = tf.Variable(tf.zeros([4, 4], tf.float64), name="w")
  return tf.reduce_mean(tf.matmul(tf.matmul(x, a), b)**2)


def first_touched_in_a_loop(x):
  """c035: in a loop, with a caching device."""
  def step(i, h):
    with tf.variable_scope("loop", caching_device="/cpu:0"):
      return i + 1, tf.tanh(tf.matmul(h, weights("w", [4, 4])))

  _, h = tf.while_loop(lambda i, _: i < 3, step, [0, x])
  return tf.reduce_mean(h**2)


def first_touched_in_a_branch(x):
  h = tf.cond(tf.reduce_sum(x) < 1e9,
              lambda: tf.matmul(x, weights("then", [4, 4])),
              lambda: tf.matmul(x, weights("else", [4, 4])))
  return tf.reduce_mean(h**2)


def cached(x):
  with tf.variable_scope("cached", caching_device=lambda op: op.device):
    w = weights("w", [4, 4])
  return tf.reduce_mean(tf.matmul(x, tf.matmul(w, w))**2)


def not_trained(x):
  count = tf.get_variable("count", [], tf.int32, trainable=False,
                          initializer=tf.zeros_initializer())
  flag = tf.Variable(True, trainable=False, name="flag")
  words = tf.get_variable("words", initializer=tf.constant(["a", "b"]),
                          trainable=False)
  local = tf.get_variable("local", [2], tf.float64, trainable=False,
                          collections=[tf.GraphKeys.GLOBAL_VARIABLES, "mine"])
  known = tf.cast(flag, tf.float64) + tf.cast(tf.size(words), tf.float64)
  return tf.reduce_mean(tf.matmul(x, weights("w", [4, 1]))**2) * (
      known + tf.cast(count, tf.float64)) + tf.reduce_sum(local)


MODELS = (nested_scopes, unnamed_scopes, scaled_by_a_getter, partitioned,
          plain_variables, mixed, first_touched_in_a_loop,
          first_touched_in_a_branch, cached)


class SharingTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(model=MODELS, num_towers=(1, 3))
  def test_equals_plain_code(self, model, num_towers):
    """Names and order of the variables, loss and gradients."""
    references.assert_equal(
        self, references.run(lambda: model, [batch()], num_towers),
        references.run(lambda: model, [batch()]))

  @parameterized.parameters(1, 3)
  def test_variables_that_do_not_train(self, num_towers):
    graph = build(lambda: not_trained(tf.constant(batch())), num_towers)
    self.assertEqual(names(), ["count", "flag", "words", "local", "w"])
    self.assertEqual(names(tf.get_collection("mine")), ["local"])
    self.assertEqual(names(graph.trainable_variables), ["w"])
    with testing.session(initialize=True) as sess:
      sess.run(graph.minimize(tf.train.GradientDescentOptimizer(0.1)))
      self.assertEqual(sess.run(tf.global_variables()[0]), 0)

  @parameterized.parameters(1, 2, 4)
  def test_reenters_scopes_from_elsewhere(self, num_towers):
    with tf.variable_scope("captured") as captured:
      pass

    def model():
      with tf.variable_scope("other"):
        with tf.variable_scope(captured):
          w = weights("w", [2])
      with tf.variable_scope(captured, reuse=True):
        return tf.reduce_sum(w * weights("w", [2]))

    build(model, num_towers)
    self.assertEqual(names(), ["captured/w"])

  def test_twelve_towers(self):
    """c014: tower 1 is not tower 10, and there is one set of variables."""
    def model():
      tf.add_to_collection("mine", tf.ones([]))
      return tf.reduce_sum(weights("w", [2]) + tf.Variable(
          tf.zeros([2], tf.float64), name="b"))

    graph = build(model, 12)
    self.assertEqual(names(), ["w", "b"])
    self.assertLen({t.name_scope for t in graph.towers}, 12)
    operations = tf.get_default_graph().get_operations()
    counts = [
        sum(op.name.startswith(t.name_scope) for op in operations)
        for t in graph.towers]
    self.assertLen(set(counts), 1)
    for tower in graph.towers:
      (item,) = tower.collection("mine")
      self.assertStartsWith(item.name, tower.name_scope)
    with testing.session(cpus=12, initialize=True) as sess:
      self.assertLen(sess.run([t.loss for t in graph.towers]), 12)

  @parameterized.parameters(1, 3)
  def test_a_second_request_is_refused_as_plain_code_has_it(self, num_towers):
    def model():
      weights("w", [2])
      return tf.reduce_sum(weights("w", [2]))

    with self.assertRaisesRegex(ValueError, "Variable w already exists"):
      build(model, num_towers)

  def test_initial_values_are_computed_once(self):
    def initial_value(*unused_args, **unused_kwargs):
      return tf.random_normal([3])

    def model():
      return tf.reduce_sum(
          tf.get_variable("a", [3], initializer=initial_value) +
          tf.Variable(initial_value, name="b"))

    build(model)
    types = [op.type for op in tf.get_default_graph().get_operations()]
    self.assertEqual(types.count("RandomStandardNormal"), 2)
    self.assertEqual(types.count("AssignVariableOp"), 2)

  def test_initial_values_are_those_of_one_tower(self):
    def model():
      towers.all_reduce(tf.ones([]))
      return (tf.reduce_sum(tf.get_variable("a", [3])) +
              tf.reduce_sum(tf.random_uniform([2])) +
              tf.reduce_sum(tf.Variable(tf.random_normal([3]), name="b")))

    found = []
    for num_towers in (1, 2, 4):
      with tf.Graph().as_default():
        tf.set_random_seed(7)
        graph = build(model, num_towers)
        with testing.session(initialize=True) as sess:
          found.append(np.concatenate(sess.run(graph.variables)))
    self.assertAllEqual(found[0], found[1])
    self.assertAllEqual(found[0], found[2])

  def test_global_step_made_inside(self):
    def model():
      step = tf.train.get_or_create_global_step()
      self.assertIs(step, tf.train.get_global_step())
      return tf.reduce_sum(weights("w", [2])) * tf.cast(step + 1, tf.float64)

    graph = build(model)
    step = tf.train.get_global_step()
    self.assertLen(tf.get_collection(tf.GraphKeys.GLOBAL_STEP), 1)
    train_op = graph.minimize(tf.train.AdamOptimizer(), global_step=step)
    with testing.session(initialize=True) as sess:
      sess.run(train_op)
      self.assertEqual(sess.run(step), 1)

  @parameterized.parameters(1, 3)
  def test_moving_average_of_a_loss(self, num_towers):
    """c018: one shadow variable, no tower in its name, updated once a step."""
    def model(x):
      loss = tf.reduce_mean(tf.matmul(x, weights("w", [4, 1])))
      average = tf.train.ExponentialMovingAverage(0.75)
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.apply([loss]))
      return {"loss": loss, "average": average.average(loss)}

    graph = build(model, num_towers, inputs=np.ones([6, 4]))
    self.assertEqual(names(), ["w", "Mean/ExponentialMovingAverage"])
    with testing.session(initialize=True) as sess:
      loss = sess.run(graph.loss)
      sess.run(graph.update_ops)
      self.assertAllClose(sess.run(graph.outputs["average"]), 0.25 * loss)

  @parameterized.parameters(1, 2)
  def test_moving_average_of_the_variables(self, num_towers):
    """c018: after the step, under the variables' own names."""
    graph = build(lambda x: tf.reduce_mean(tf.matmul(x, weights("w", [4, 1]))),
                  num_towers, inputs=np.ones([6, 4]))
    average = tf.train.ExponentialMovingAverage(0.75)
    w, = graph.trainable_variables
    with tf.control_dependencies(
        [graph.minimize(tf.train.GradientDescentOptimizer(0.5))]):
      train_op = average.apply(graph.trainable_variables)
    self.assertEqual(names(), ["w", "w/ExponentialMovingAverage"])
    with testing.session(initialize=True) as sess:
      before = sess.run(w)
      sess.run(train_op)
      self.assertAllClose(sess.run(average.average(w)), before - 0.25 * 0.5)

  def test_regularizers_count_once(self):
    """c028: by the collection, in each tower and in the graph."""
    key = tf.GraphKeys.REGULARIZATION_LOSSES

    def model(x):
      w = weights("w", [4, 1], regularizer=tf.nn.l2_loss)
      self.assertLen(tf.get_collection(key), 1)
      loss = tf.reduce_mean(tf.matmul(x, w))
      return loss + tf.losses.get_regularization_loss()

    graph = build(model, inputs=batch())
    self.assertLen(tf.get_collection(key), 1)
    self.assertNotIn("tower", tf.get_collection(key)[0].name)
    for tower in graph.towers:
      self.assertLen(tower.collection(key), 1)
    (gradient, w), = graph.gradients()
    with testing.session(initialize=True) as sess:
      gradient, loss, w = sess.run((gradient, graph.loss, w))
    self.assertAllClose(gradient, batch().mean(0)[:, None] + w)
    self.assertAllClose(loss, batch().mean(0) @ w[:, 0] + (w**2).sum() / 2)

  @parameterized.parameters(False, True)
  def test_reuse_does_not_leak(self, fails):
    """c065: the scope's reuse is as before, also after a failure."""
    def model():
      w = weights("w", [2])
      tf.get_variable_scope().reuse_variables()
      if fails:
        raise RuntimeError("as planned")
      return tf.reduce_sum(w * weights("w", [2]))

    for num_towers in (1, 2):
      with tf.Graph().as_default():
        if fails:
          with self.assertRaisesRegex(RuntimeError, "as planned"):
            build(model, num_towers)
        else:
          build(model, num_towers)
        self.assertFalse(tf.get_variable_scope().reuse)
        extra = tf.get_variable("extra", [1])
        tf.train.AdamOptimizer().minimize(extra**2)
        self.assertIn("extra/Adam", names())

  def test_checkpoint_keys(self):
    """c019, c021: the same for plain code and for 1, 2 and 4 towers."""
    def model(x):
      with tf.variable_scope("layer"):
        x = towers.batch_norm(tf.matmul(x, weights("A", [4, 4])), training=True)
      return tf.reduce_mean(x**2) + tf.reduce_mean(
          tf.Variable(tf.zeros([2], tf.float64), name="B"))

    found = {}
    for num_towers in (None, 1, 2, 4):
      with tf.Graph().as_default():
        optimizer = tf.train.AdamOptimizer()
        if num_towers is None:
          optimizer.minimize(model(tf.constant(batch())))
        else:
          graph = build(model, num_towers, inputs=batch())
          with tf.device("/cpu:1"):
            graph.minimize(optimizer)
        with testing.session(initialize=True) as sess:
          path = tf.train.Saver().save(
              sess, os.path.join(self.create_tempdir().full_path, "model"))
        found[num_towers] = sorted(tf.train.list_variables(path))
    self.assertIn(("beta1_power", []), found[None])
    for num_towers in (1, 2, 4):
      self.assertEqual(found[num_towers], found[None])


class ViewTest(parameterized.TestCase, tf.test.TestCase):
  """What a model sees of a variable, against plain code."""

  def facts(self, variable):
    return {
        "type": isinstance(variable, tf.Variable),
        "class": type(variable).__name__,
        "module": type(variable).__module__,
        "name": variable.name,
        "op": (variable.op.name, variable.op.type),
        "shape": variable.shape.as_list(),
        "dtype": variable.dtype,
        "trainable": variable.trainable,
        "is_listed": (variable in tf.trainable_variables() and
                      variable in tf.global_variables()),
        "is_first": variable is tf.global_variables()[0],
        "hash": len({variable, tf.global_variables()[0]}),
        "graph": variable.graph is tf.get_default_graph(),
        "initializer": variable.initializer.name,
        "initial_value": variable.initial_value.op.type,
        "repr": repr(variable),
        "proto": variable.to_proto().variable_name,
        "read": variable.read_value().dtype,
        "as_graph_element": variable._as_graph_element().dtype,
    }

  @parameterized.parameters(1, 3)
  def test_is_the_plain_variable(self, num_towers):
    found = []

    def model():
      variable = tf.get_variable("scope/w", [2, 3], use_resource=True)
      found.append(self.facts(variable))
      return tf.reduce_sum(variable)

    with tf.Graph().as_default():
      model()
    expected = found.pop()
    build(model, num_towers)
    self.assertLen(found, num_towers)
    for facts in found:
      self.assertEqual(facts, expected)

  @parameterized.parameters(2, 3)
  def test_class_is_as_before_after_the_build(self, num_towers):
    outside = tf.get_variable("outside", [], use_resource=True)
    plain = type(outside)

    def model():
      self.assertIsNot(type(outside), plain)
      return outside + tf.get_variable("w", [])

    graph = build(model, num_towers)
    for variable in graph.variables:
      self.assertIs(type(variable), plain)

    def failing():
      tf.get_variable("v", [])
      raise RuntimeError("as planned")

    with self.assertRaisesRegex(RuntimeError, "as planned"):
      build(failing, num_towers)
    for variable in tf.global_variables():
      self.assertIs(type(variable), plain)

  def test_assigns(self):
    def model():
      w = tf.get_variable("w", [3], initializer=tf.zeros_initializer())
      ops = [w.assign_add(tf.ones([3])), tf.assign(w, 2 * w),
             tf.scatter_update(w, [1], [7.0]), w[2].assign(9.0)]
      self.assertEqual(w.device, "/device:CPU:4")
      return {"loss": tf.reduce_sum(w), "none": tf.stack([
          tf.cast(tf.size(op), tf.float32) for op in ops[:1]])}

    graph = build(model, 2, parameter_device="/cpu:4")
    w, = graph.variables
    changes = [op for op in tf.get_default_graph().get_operations()
               if op.name.startswith("tower_1/") and ("Assign" in op.type or
                                                      "Scatter" in op.type)]
    self.assertLen(changes, 4)
    with testing.session(initialize=True) as sess:
      for op in changes:
        sess.run(op)
      self.assertAllEqual(sess.run(w), [2, 7, 9])

  def test_saver_made_inside(self):
    savers = []

    def model():
      w = tf.get_variable("w", [2])
      savers.append(tf.train.Saver([w]))
      return tf.reduce_sum(w)

    graph = build(model, 2)
    with testing.session(initialize=True) as sess:
      path = savers[1].save(sess, os.path.join(
          self.create_tempdir().full_path, "model"))
      self.assertEqual(tf.train.list_variables(path), [("w", [2])])
      saved = sess.run(graph.variables)
      sess.run(tf.global_variables_initializer())
      savers[0].restore(sess, path)
      self.assertAllEqual(sess.run(graph.variables), saved)

  def test_one_tower_has_no_view(self):
    build(lambda: tf.reduce_sum(weights("w", [2])), 1)
    self.assertEmpty([op.name for op in tf.get_default_graph().get_operations()
                      if op.type == "Identity" and "w" in op.name and
                      op.inputs[0].dtype == tf.resource])


class PlacementTest(parameterized.TestCase, tf.test.TestCase):

  def test_devices_inside_the_model_do_not_move_variables(self):
    """c038: variables on the parameter device, compute on the towers."""
    def model(x):
      with tf.device("/cpu:2"):
        x = tf.matmul(x, weights("a", [4, 4]), name="there")
        with tf.device(lambda op: "/cpu:3"):
          x += tf.Variable(tf.zeros([4], tf.float64), name="b")
        with tf.colocate_with(x.op):
          x += weights("c", [4])
      return tf.reduce_mean(tf.matmul(x, weights("d", [4, 1]), name="here"))

    graph = towers.build_towers(model, ["/cpu:0", "/cpu:1"], inputs=batch(),
                                parameter_device="/cpu:4")
    graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
    for variable in tf.global_variables():
      with self.subTest(variable.op.name):
        self.assertEqual(variable.device, "/device:CPU:4")
        self.assertEqual(variable.initializer.device, "/device:CPU:4")
    operation = tf.get_default_graph().get_operation_by_name
    for index in range(2):
      self.assertEqual(operation(f"tower_{index}/there").device,
                       "/device:CPU:2")
      self.assertEqual(operation(f"tower_{index}/here").device,
                       f"/device:CPU:{index}")
    with testing.session(initialize=True) as sess:
      sess.run(graph.loss)

  @parameterized.parameters(1, 2)
  def test_default_device(self, num_towers):
    graph = towers.build_towers(lambda: tf.reduce_sum(weights("w", [2])),
                                ["/cpu:3", "/cpu:1"][:num_towers])
    self.assertEqual(graph.variables[0].device,
                     "/device:CPU:3" if num_towers == 1 else "/device:CPU:0")


class RejectsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("names", lambda i: weights("v" if i == 2 else "w", [2]),
       r"only tower 0 makes `w` \(2,\) float64, only tower 2 makes `v` \(2,\)"),
      ("missing", lambda i: weights("w", [2]) if i < 1 else tf.zeros([2]),
       r"only tower 0 makes `w` .*, only tower 1 makes none"),
      ("extra", lambda i: weights("w", [2]) if i == 1 else tf.zeros([2]),
       r"only tower 0 makes none, only tower 1 makes `w`"),
      ("extra_in_several", lambda i: weights("w", [2]) if i else tf.zeros([2]),
       r"tower 1 and tower 2 make `w`, tower 0 does not"),
      ("unnamed", lambda i: tf.Variable(tf.zeros([2 + i])),
       r"only tower 0 makes `Variable` \(2,\) float32, only tower 1 makes "
       r"`Variable_1` \(3,\) float32.*Make variables under the same names, or"),
      ("made_by_functions",
       lambda i: tf.Variable(lambda: tf.zeros([2 + i]), name="w"),
       r"only tower 0 makes `w` \(2,\) float32, only tower 1 makes `w_1`"),
      ("types", lambda i: tf.Variable(np.zeros([2], ["f4", "f8", "f4"][i])),
       r"only tower 0 makes `Variable` \(2,\) float32, only tower 1 makes "
       r"`Variable_1` \(2,\) float64"),
  )
  def test_towers_that_make_other_variables(self, make, message):
    with self.assertRaisesRegex(
        ValueError, "`model_fn` must make the same variables in each tower: " +
        message):
      build(lambda: tf.reduce_sum(make(towers.current_tower().index)))

  @parameterized.named_parameters(
      ("shape", lambda i: weights("w", [2 + i]), "shape"),
      ("dtype", lambda i: weights("w", [2], [tf.float32, tf.float64][i]),
       "dtype"),
  )
  def test_towers_that_ask_for_a_variable_otherwise(self, make, message):
    with self.assertRaisesRegex(
        ValueError, "`model_fn` must make the same variables in each tower: "
        f"tower 1 asks for `w` otherwise than tower 0. .*{message}"):
      build(lambda: tf.reduce_sum(make(towers.current_tower().index)), 2)


if __name__ == "__main__":
  tf.test.main()
