"""Tests for towers._tensorflow: what it replaces is put back."""

import copy
import importlib
import threading

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import testing
import towers

_tensorflow = importlib.import_module("towers._tensorflow")


def failing(*unused_inputs):
  towers.all_reduce(tf.ones([]))
  if towers.current_tower().index == 1:
    raise RuntimeError("as planned")
  towers.all_reduce(tf.ones([]))
  return tf.ones([])


def successful(*unused_inputs):
  w = tf.get_variable("w", [2])
  tf.summary.scalar("w", tf.reduce_sum(w))
  gradient, = tf.gradients(towers.all_reduce(tf.reduce_sum(w)), w)
  return tf.reduce_sum(gradient)


def state_of(graph):
  """Returns what must be after a build as it was before."""
  module = _tensorflow
  store = module.variable_scope._get_default_variable_store()
  scopes = module.variable_scope.get_variable_scope_store()
  return {
      "gradients": module.gradients_util._GradientsHelper,
      "zeros": module.control_flow_state.ZerosLike,
      "summaries": module.summary_op_util.summary_scope,
      "store": (store, type(store)),
      "current_scope": (scopes, scopes.current_scope,
                        scopes.current_scope.reuse),
      "switched": graph._stack_state_is_thread_local,
      "stacks": sorted(set(vars(graph._thread_local)) &
                       set(module._THREAD_STACKS)),
      "devices": graph._device_functions_outer_to_inner,
      "colocations": list(graph._colocation_stack.peek_objs()),
      "control": list(graph._control_dependencies_stack),
      "creators": list(graph._variable_creator_stack),
      "context": graph._get_control_flow_context(),
      "attributes": dict(graph._attr_scope_map),
      "overrides": dict(graph._gradient_override_map),
      "labels": dict(graph._op_to_kernel_label_map),
      "name_scope": graph.get_name_scope(),
      "collections": id(graph._collections),
      "callbacks": module.op_callbacks.should_invoke_op_callbacks(),
      "threads": threading.active_count(),
      "default": tf.get_default_graph(),
  }


class PutBackTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(model=(successful, failing), num_towers=(1, 2, 3))
  def test_all_is_as_before(self, model, num_towers):
    graph = tf.get_default_graph()
    tf.get_variable("before", [])
    with tf.variable_scope("outer"), tf.device("/cpu:0"):
      before = state_of(graph)
      if model is failing and num_towers > 1:
        with self.assertRaisesRegex(RuntimeError, "as planned"):
          towers.build_towers(model, testing.devices(num_towers))
      else:
        towers.build_towers(model, testing.devices(num_towers))
      self.assertEqual(state_of(graph), before)
      self.assertEqual(tf.get_variable("after", []).op.name, "outer/after")

  @parameterized.parameters(1, 2)
  def test_collections_are_as_before_a_failure(self, num_towers):
    def model():
      tf.add_to_collection("mine", 1)
      tf.add_to_collection("new", 1)
      tf.get_variable("w", [])
      raise RuntimeError("as planned")

    tf.add_to_collection("mine", 0)
    mine = tf.get_collection_ref("mine")
    tf.get_variable("before", [])
    graph = tf.get_default_graph()
    before = _tensorflow.snapshot_collections(graph)
    with self.assertRaisesRegex(RuntimeError, "as planned"):
      towers.build_towers(model, testing.devices(num_towers))
    after = _tensorflow.snapshot_collections(graph)
    self.assertEqual({k: v for k, v in after.items() if v},
                     {k: v for k, v in before.items() if v})
    self.assertIs(tf.get_collection_ref("mine"), mine)

  def test_outside_scopes_stay_usable_while_towers_build(self):
    """A scope that the caller holds open is closed by it in good order."""
    with tf.device("/cpu:3"), tf.control_dependencies([tf.no_op()]):
      with tf.name_scope("outer"):
        towers.build_towers(successful, testing.devices(2))
        x = tf.ones([], name="x")
    self.assertEqual((x.op.name, x.device), ("outer/x", "/device:CPU:3"))
    self.assertLen(x.op.control_inputs, 1)
    self.assertEqual(tf.ones([]).device, "")

  def test_a_graph_that_others_switched_stays_switched(self):
    graph = tf.get_default_graph()
    graph.switch_to_thread_local()
    with tf.device("/cpu:2"):
      towers.build_towers(successful, testing.devices(2))
      self.assertEqual(tf.ones([]).device, "/device:CPU:2")
    self.assertTrue(graph._stack_state_is_thread_local)


class TowerStateTest(parameterized.TestCase, tf.test.TestCase):

  def test_stays_in_its_tower_across_a_meeting(self):
    """Scopes that are open while a tower waits are not another's."""
    graph = tf.get_default_graph()
    outside = tf.constant(1.0)
    found = []

    def model():
      index = towers.current_tower().index
      with graph.gradient_override_map({"Identity": f"Mine{index}"}):
        with graph._attr_scope({"mine": _tensorflow.attr_value_pb2.AttrValue(
            i=index)}):
          with tf.device(f"/cpu:{index + 2}"), tf.name_scope("open"):
            with tf.control_dependencies([tf.no_op(name="first")]):
              towers.all_reduce(tf.ones([]))
              x = tf.identity(outside, name="x")
      found.append((x.op.name, x.device, x.op.get_attr("mine"),
                    x.op.get_attr("_gradient_op_type"),
                    [op.name for op in x.op.control_inputs]))
      return x

    towers.build_towers(model, testing.devices(2))
    self.assertEqual(found, [
        (f"tower_{i}/open/x", f"/device:CPU:{i + 2}", i, f"Mine{i}".encode(),
         [f"tower_{i}/open/first"]) for i in range(2)])
    merged = [op for op in graph.get_operations()
              if op.name.startswith("cross_tower/")]
    for op in merged:
      self.assertNotIn("mine", op.node_def.attr)
      self.assertEmpty(op.control_inputs)

  def test_towers_draw_other_random_numbers(self):
    """And so do two ops of one tower; two runs of one graph do not differ."""
    def values(num_towers):
      with tf.Graph().as_default():
        tf.set_random_seed(3)

        def model():
          first = tf.random_uniform([4])
          towers.all_reduce(tf.ones([]))
          return {"x": tf.stack([first, tf.random_uniform([4])])}

        graph = towers.build_towers(model, testing.devices(num_towers))
        with testing.session() as sess:
          return sess.run(graph.outputs["x"])

    first = values(3)
    self.assertLen({tuple(row) for row in first}, 6)
    self.assertAllEqual(first, values(3))
    self.assertAllEqual(first[:2], values(1))

  def test_what_comes_after_draws_as_after_one_tower(self):
    def next_value(num_towers):
      with tf.Graph().as_default():
        tf.set_random_seed(3)
        towers.build_towers(lambda: tf.reduce_sum(tf.random_uniform([4])),
                            testing.devices(num_towers))
        with testing.session() as sess:
          return sess.run(tf.random_uniform([4]))

    self.assertAllEqual(next_value(1), next_value(3))


class HelpersTest(parameterized.TestCase, tf.test.TestCase):

  def test_is_plain_graph(self):
    found = []
    graph = tf.get_default_graph()
    self.assertTrue(_tensorflow.is_plain_graph(graph))
    tf.function(lambda: found.append(_tensorflow.is_plain_graph(
        tf.get_default_graph())))()
    self.assertEqual(found, [False])

  def test_kinds_of_variables(self):
    old = tf.get_variable("old", [], use_resource=False)
    new = tf.get_variable("new", [], use_resource=True)
    parts = tf.get_variable("parts", [4], use_resource=True,
                            partitioner=tf.fixed_size_partitioner(2))
    for variable, is_resource in ((old, False), (new, True)):
      self.assertTrue(_tensorflow.is_variable(variable))
      self.assertEqual(_tensorflow.is_resource_variable(variable), is_resource)
      self.assertEqual(_tensorflow.parts_of(variable), [variable])
    self.assertFalse(_tensorflow.is_variable(tf.ones([])))
    self.assertLen(_tensorflow.parts_of(parts), 2)

  def test_known_variables_are_in_collections_or_in_the_store(self):
    listed = tf.get_variable("listed", [])
    stored = tf.get_variable("stored", [], collections=[])
    mine = tf.Variable(1.0, collections=["mine"])
    self.assertCountEqual(
        map(id, _tensorflow.known_variables(tf.get_default_graph())),
        map(id, [listed, stored, mine]))

  def test_additions_to_collections(self):
    graph = tf.get_default_graph()
    tf.add_to_collection("a", 1)
    sizes = _tensorflow.collection_sizes(graph)
    tf.add_to_collection("a", 2)
    tf.add_to_collection("b", 3)
    self.assertEqual(_tensorflow.added_to_collections(graph, sizes),
                     {"a": [2], "b": [3]})

  def test_kept_with_is_made_once_for_each_graph(self):
    one, other = tf.Graph(), tf.Graph()
    made = _tensorflow.kept_with(one, "_for_this_test", list)
    self.assertIs(_tensorflow.kept_with(one, "_for_this_test", list), made)
    self.assertIsNot(_tensorflow.kept_with(other, "_for_this_test", list), made)

  def test_enclosing_control_flow(self):
    graph = tf.get_default_graph()
    predicate = tf.placeholder(tf.bool)
    found = []

    def note(x):
      found.append(_tensorflow.enclosing_control_flow(graph))
      return x

    self.assertEqual(_tensorflow.enclosing_control_flow(graph), ([], []))
    tf.while_loop(
        lambda i: i < 3, lambda i: tf.cond(
            predicate, lambda: note(i + 1), lambda: note(i)), [0], name="loop")
    (then, loops), (otherwise, _) = found
    self.assertEqual([branch.taken_when for branch in then], [1])
    self.assertEqual([branch.taken_when for branch in otherwise], [0])
    self.assertLen(loops, 1)
    self.assertStartsWith(loops[0], "loop")

  def test_ops_in_branches_are_lifted(self):
    """What stands for an op runs it if its branch is taken, and itself ever."""
    predicate, inner = tf.placeholder(tf.bool), tf.placeholder(tf.bool)
    count = tf.get_variable("count", [], use_resource=True,
                            initializer=tf.zeros_initializer())
    ops = []

    def add():
      ops.append(count.assign_add(1, read_value=False))
      with tf.control_dependencies(ops):
        return tf.constant(1)

    tf.cond(predicate, lambda: tf.cond(inner, add, lambda: tf.constant(2)),
            lambda: tf.constant(3))
    lifted = _tensorflow.lift_out_of_conditionals(ops[0])
    self.assertEqual(_tensorflow.control_flow_of(lifted), ([], []))
    with tf.control_dependencies([lifted]):
      after = tf.constant(5)
    with testing.session(initialize=True) as sess:
      for outer_value in (True, False):
        for inner_value in (True, False):
          before = sess.run(count)
          feed = {predicate: outer_value, inner: inner_value}
          self.assertEqual(sess.run(after, feed), 5)
          self.assertEqual(sess.run(count) - before,
                           outer_value and inner_value)

  @parameterized.parameters((3, "i"), (0.5, "f"))
  def test_attributes_survive_an_export(self, value, field):
    x = tf.ones([], name="x")
    _tensorflow.set_attribute(x.op, "_towers_test", value)
    graph_def = copy.deepcopy(tf.get_default_graph().as_graph_def())
    with tf.Graph().as_default():
      tf.import_graph_def(graph_def, name="")
      op = tf.get_default_graph().get_operation_by_name("x")
      self.assertEqual(getattr(op.node_def.attr["_towers_test"], field), value)

  def test_shared_constants(self):
    """Made once for each value, device and scope, outside of control flow."""
    def two(device="/cpu:1", dtype=tf.float32):
      return _tensorflow.shared_constant(2.0, dtype, device, "tower_0/")

    made = []
    tf.while_loop(lambda i: i < 3, lambda i: made.append(two()) or i + 1, [0])
    self.assertIs(two(), made[0])
    self.assertIsNot(two(device="/cpu:2"), made[0])
    self.assertIsNot(two(dtype=tf.float64), made[0])
    self.assertStartsWith(made[0].name, "tower_0/")
    self.assertEqual(made[0].device, "/device:CPU:1")
    self.assertEqual(_tensorflow.control_flow_of(made[0].op), ([], []))

  def test_zeros_that_nothing_reads(self):
    """Fewer ops for batch norm, the same gradients; others get their zeros."""
    x = tf.placeholder(tf.float32, [None, 2, 2, 3])

    def count_of_zeros():
      y, mean, _ = tf.nn.fused_batch_norm(x, tf.ones([3]), tf.zeros([3]))
      first, _ = tf.unstack(tf.stack([mean, mean]))
      before = set(tf.get_default_graph().get_operations())
      gradient, = tf.gradients(tf.reduce_sum(y**3) + tf.reduce_sum(first), x)
      self.assertIsNotNone(gradient)
      added = set(tf.get_default_graph().get_operations()) - before
      return sum(op.type == "ZerosLike" for op in added)

    plain = count_of_zeros()
    with _tensorflow.no_zeros_for_batch_norm():
      self.assertLess(count_of_zeros(), plain)
      self.assertGreater(count_of_zeros(), 0)
    self.assertEqual(count_of_zeros(), plain)

  def test_op_callback_sees_ops_and_may_replace_their_outputs(self):
    seen = []

    def watch(op):
      seen.append(op.type)
      return [tf.negative(op.outputs[0])] if op.type == "Square" else None

    with _tensorflow.op_callback(watch):
      y = tf.square(tf.constant(3.0)) + 1
      tf.no_op()
    tf.square(1.0)
    self.assertEqual(seen, ["Const", "Square", "Const", "AddV2", "NoOp"])
    with testing.session() as sess:
      self.assertEqual(sess.run(y), -8)

  def test_values_are_put_back(self):
    for use_resource in (False, True):
      with self.subTest(use_resource=use_resource):
        variable = tf.get_variable(f"v{use_resource}", [2],
                                   use_resource=use_resource,
                                   initializer=tf.ones_initializer())
        now = _tensorflow.value_now(variable.op)
        self.assertEqual(now.shape.as_list(), [2])
        change = variable.assign_add([1.0, 2.0]).op
        _tensorflow.add_control_inputs(change, [now.op])
        with tf.control_dependencies([change]):
          back = _tensorflow.assign_value(variable.op, now)
        with testing.session(initialize=True) as sess:
          sess.run(back)
          self.assertAllEqual(sess.run(variable), [1, 1])

  def test_what_is_a_reference(self):
    ref = tf.get_variable("ref", [], use_resource=False)
    resource = tf.get_variable("resource", [], use_resource=True)
    self.assertTrue(_tensorflow.is_reference(ref.op.outputs[0]))
    self.assertTrue(_tensorflow.is_reference(resource.handle))
    self.assertFalse(_tensorflow.is_reference(tf.ones([])))

  def test_copy_of_an_op(self):
    with tf.device("/cpu:1"):
      x = tf.reduce_sum(tf.ones([2, 3]), axis=1, keepdims=True)
    first = tf.no_op()
    copy_ = _tensorflow.copy_op(x.op, [2 * tf.ones([2, 3]), x.op.inputs[1]],
                                [first])
    self.assertEqual((copy_.type, copy_.device), ("Sum", x.op.device))
    self.assertTrue(copy_.get_attr("keep_dims"))
    self.assertEqual(list(copy_.control_inputs), [first])
    with testing.session() as sess:
      self.assertAllEqual(sess.run(copy_.outputs[0]), [[6], [6]])

  def test_initializers(self):
    one = tf.get_variable("one", [], use_resource=True)
    other = tf.get_variable("other", [], use_resource=True)
    _tensorflow.set_initializer(one, one.assign(3.0, read_value=False))
    _tensorflow.extend_initializer(one, [other.initializer])
    with testing.session() as sess:
      sess.run(one.initializer)
      self.assertEqual(sess.run(one), 3)
      self.assertEmpty(sess.run(tf.report_uninitialized_variables()))

  def test_optimizers_ask_the_guard(self):
    asked = []
    variable = tf.get_variable("v", [3], use_resource=True)
    cls = type(variable)
    _tensorflow.guard_updates(variable, asked.append)
    _tensorflow.guard_updates(variable, asked.append)  # Once is enough.
    self.assertIsInstance(variable, cls)
    for loss in (tf.reduce_sum(variable),
                 tf.reduce_sum(tf.gather(variable, [1]))):
      before = len(asked)
      tf.train.AdamOptimizer().minimize(loss, var_list=[variable])
      self.assertGreater(len(asked), before)
    self.assertEqual(set(map(id, asked)), {id(variable)})

  def test_summary_tags(self):
    with _tensorflow.summary_tags(lambda tag: f"my_{tag}"):
      summary = tf.summary.scalar("x", 1.0)
    with testing.session() as sess:
      value, = tf.Summary.FromString(sess.run(summary)).value
    self.assertEqual(value.tag, "my_x")

  def test_lookups_stand_where_the_variable_is(self):
    """TensorFlow would refuse their gradients with strict placement."""
    def model(ids):
      table = tf.get_variable("table", [5, 2])
      return tf.reduce_mean(tf.gather(table, ids) +
                            tf.gather_nd(table, ids[:, tf.newaxis]))

    graph = towers.build_towers(model, ["/cpu:1", "/cpu:2"],
                                inputs=tf.constant([0, 1, 2]))
    for op in tf.get_default_graph().get_operations():
      if op.type in ("ResourceGather", "ResourceGatherNd"):
        self.assertNotIn("CPU:2", op.device)
    train_op = graph.minimize(tf.train.GradientDescentOptimizer(0.1))
    with testing.session(initialize=True) as sess:
      sess.run(train_op)


if __name__ == "__main__":
  tf.test.main()
