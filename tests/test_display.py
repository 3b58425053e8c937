"""Tests for towers.display: the graph that TensorBoard gets."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import display


def model(x):
  w = tf.get_variable("w", [4, 3], initializer=tf.ones_initializer)
  h = tf.matmul(x, w)
  h = towers.batch_norm(h + tf.range(3, dtype=tf.float32), training=True)
  with tf.name_scope("deep"), tf.name_scope("loss"):
    return tf.reduce_mean(tf.square(h - 1.0))


def build(num_towers):
  """Returns a graph of towers, and its train op."""
  x = tf.placeholder(tf.float32, [None, 4], name="x")
  graph = towers.build_towers(
      model, testing.devices(num_towers), inputs=x)
  return graph, graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))


def by_name(definition):
  return {node.name: node for node in definition.node}


class DisplayTest(parameterized.TestCase):

  @parameterized.product(num_towers=(1, 2, 3), batch_size=(5, 6))
  def test_computes_the_same(self, num_towers, batch_size):
    """Three steps under the names for display, against the real ones."""
    x = np.random.RandomState(0).randn(batch_size, 4)
    with tf.Graph().as_default():
      graph, train_op = build(num_towers)
      init = tf.global_variables_initializer()
      definition = display.display_graph(tf.get_default_graph())
      names = {node.attr[display.REAL_NAME].s.decode() or node.name: node.name
               for node in definition.node}
      wanted = [op.name for op in (init, train_op, graph.loss.op)]
      with testing.session() as sess:
        expected = self.losses(sess, wanted, "x:0", x)
    with tf.Graph().as_default():
      tf.import_graph_def(definition, name="")
      with testing.session() as sess:
        actual = self.losses(sess, [names[name] for name in wanted],
                             names["x"] + ":0", x)
    np.testing.assert_array_equal(actual, expected)
    self.assertGreater(expected[0], expected[-1])

  def losses(self, sess, names, feed, x):
    init, train_op, loss = names
    sess.run(init)
    found = []
    for _ in range(3):
      found.append(sess.run(f"{loss}:0", {feed: x}))
      sess.run(train_op, {feed: x})
    return found

  def test_devices_colocation_and_shapes(self):
    with tf.Graph().as_default():
      build(2)
      real = by_name(tf.get_default_graph().as_graph_def())
      shown = display.display_graph(tf.get_default_graph())
    names = by_name(shown)
    for node in shown.node:
      original = real[node.attr[display.REAL_NAME].s.decode()
                      if display.REAL_NAME in node.attr else node.name]
      self.assertEqual((node.op, node.device), (original.op, original.device))
      for label in node.attr["_class"].list.s:
        self.assertIn(label.decode()[len("loc:@"):], names)
    matmul = names["towers/tower_1/MatMul"]
    self.assertIn("CPU:1", matmul.device)
    dims = matmul.attr["_output_shapes"].list.shape[0].dim
    self.assertEqual([dim.size for dim in dims], [-1, 3])

  @parameterized.named_parameters(
      ("graph", lambda graph: graph),
      ("graph_def", lambda graph: graph.as_graph_def()),
      ("meta_graph", lambda graph: tf.train.export_meta_graph(graph=graph)))
  def test_real_names_come_back(self, form):
    with tf.Graph().as_default() as graph:
      build(2)
      shown = display.display_graph(form(graph))
      expected = by_name(graph.as_graph_def(add_shapes=True))
    actual = by_name(display.real_graph(shown))
    self.assertEqual(actual.keys(), expected.keys())
    for name, node in expected.items():
      self.assertEqual(actual[name], node)
    plain = graph.as_graph_def()
    self.assertIs(display.real_graph(plain), plain)

  def test_op_that_tensorflow_does_not_know(self):
    """Is shown without shapes."""
    definition = tf.GraphDef()
    definition.node.add(name="tower_0/x", op="NoSuchOp", device="/cpu:0")
    definition.node.add(name="tower_0/y", op="NoOp", input=["^tower_0/x"])
    shown = by_name(display.display_graph(definition))
    self.assertEqual(list(shown["towers/tower_0/y"].input),
                     ["^towers/tower_0/x"])

  def test_long_constants_are_left_out(self):
    with tf.Graph().as_default() as graph:
      tf.constant(np.arange(1000.0), name="long")
      tf.constant([b"a" * 2000], name="text")
      tf.constant([1.0, 2.0], name="short")
      shown = display.display_graph(graph)
    found = by_name(shown)
    self.assertLess(shown.ByteSize(), 1000)
    with tf.Graph().as_default(), testing.session() as sess:
      tf.import_graph_def(shown, name="")
      self.assertEqual(sess.run("long:0").shape, (1000,))
      self.assertEqual(list(sess.run("short:0")), [1.0, 2.0])
    for name in ("long", "text"):
      self.assertEqual(found[name].attr["_too_large_attrs"].list.s, [b"value"])
    self.assertNotIn("_too_large_attrs", found["short"].attr)

  def test_functions_stay(self):
    with tf.Graph().as_default() as graph:
      data = tf.data.Dataset.range(3).map(lambda x: x + 1)
      tf.data.make_one_shot_iterator(data).get_next()
      shown = display.display_graph(graph)
      self.assertEqual(shown.library, graph.as_graph_def(
          add_shapes=True).library)

  def test_order_of_types_differs_between_towers(self):
    """So that no two are compared before what is in them; see `_ordered`."""
    with tf.Graph().as_default() as graph:
      build(4)
      shown = display.display_graph(graph)
    for box in ("towers", "gradients"):
      orders = set()
      for i in range(4):
        ops = [node.op for node in shown.node
               if node.name.startswith(f"{box}/tower_{i}/")]
        orders.add(tuple(dict.fromkeys(ops)))
      self.assertLen(orders, 4)

  def test_run(self):
    with tf.Graph().as_default() as graph:
      built, train_op = build(2)
      shown = display.display_graph(graph)
      metadata = tf.RunMetadata()
      # Of which graph optimizers leave all ops as they are.
      with tf.Session(config=built.session_config()) as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(train_op, {"x:0": np.ones([5, 4])}, options=tf.RunOptions(
            trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    before = metadata.SerializeToString()
    ran = {}
    for device in display.display_run(metadata, shown).step_stats.dev_stats:
      for node in device.node_stats:
        ran[node.node_name] = device.device
    self.assertEqual(metadata.SerializeToString(), before)
    self.assertEndsWith(ran["towers/tower_1/MatMul"], "CPU:1")
    stray = {name for name in ran if name not in by_name(shown)}
    # What TensorFlow adds, such as messages between devices.
    self.assertEmpty([name for name in stray if name.startswith("tower")])
    self.assertGreater(len(ran) - len(stray), 50)

  def test_run_with_names_of_other_forms(self):
    """A GPU's kernels, and what was computed before the step."""
    with tf.Graph().as_default() as graph:
      build(2)
      shown = display.display_graph(graph)
    metadata = tf.RunMetadata()
    stats = metadata.step_stats.dev_stats.add(device="/gpu:0/stream:all")
    for name in ("tower_0/MatMul:MatMul", "edge_7_x",
                 "tower_0/MatMul/_3__cf__3"):
      stats.node_stats.add(node_name=name)
    found = display.display_run(metadata, shown).step_stats.dev_stats[0]
    self.assertEqual([node.node_name for node in found.node_stats],
                     ["towers/tower_0/MatMul:MatMul", "edge_7_x",
                      "towers/tower_0/MatMul"])

  def test_rejects(self):
    with self.assertRaisesRegex(TypeError, "`graph` must be .*: got .*str"):
      display.display_graph("graph.pb")
    definition = tf.GraphDef()
    definition.node.add(name="y", op="NoOp", input=["^x"])
    with self.assertRaisesRegex(ValueError, "`graph` must hold every op"):
      display.display_graph(definition)
    with self.assertRaisesRegex(ValueError, "`tower_pattern` must have a gro"):
      display.display_graph(tf.Graph(), tower_pattern="tower")

  def test_rejects_a_graph_over_the_limit(self):
    """Without making 2 GB."""
    class Huge(tf.Graph):

      def as_graph_def(self, **unused):
        raise ValueError("GraphDef cannot be larger than 2GB.")

    with self.assertRaisesRegex(
        ValueError, r"`graph` must fit into .*larger than 2GB.*Feed large"):
      display.display_graph(Huge())


if __name__ == "__main__":
  absltest.main()
