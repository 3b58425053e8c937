"""Tests for towers.graph_nodes."""

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import loop_cases
from towers import graph_nodes


def chain(length):
  """Returns a `GraphDef` of a placeholder and ops that hand its value on."""
  definition = tf.GraphDef()
  first = definition.node.add(name="n0", op="Placeholder")
  first.attr["dtype"].type = tf.float32.as_datatype_enum
  for i in range(1, length):
    node = definition.node.add(name=f"n{i}", op="Identity", input=[f"n{i - 1}"])
    node.attr["T"].type = tf.float32.as_datatype_enum
  return definition


class ReadTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.built = loop_cases.loop()
    graph = self.built.graph
    self.forms = {
        "graph": graph,
        "meta": tf.train.export_meta_graph(graph=graph),
        "definition": graph.as_graph_def(),
    }

  @parameterized.named_parameters(
      ("graph", "graph"), ("meta", "meta"), ("definition", "definition"))
  def test_nodes(self, form):
    nodes = graph_nodes.read(self.forms[form])
    self.assertCountEqual(
        nodes.by_name, [op.name for op in self.built.graph.get_operations()])
    for op in self.built.graph.get_operations():
      node = nodes.by_name[op.name]
      self.assertEqual(node.op, op.type)
      self.assertEqual([(s.name, k) for s, k in node.inputs],
                       [(x.op.name, x.value_index) for x in op.inputs])
      self.assertCountEqual([s.name for s in node.controls],
                            [x.name for x in op.control_inputs])
      for output in op.outputs:
        dtype, shape = nodes.output_shape(node, output.value_index)
        self.assertEqual(dtype, output.dtype.base_dtype)
        self.assertEqual(str(shape), str(output.shape))

  @parameterized.named_parameters(("graph", "graph"), ("meta", "meta"))
  def test_collections(self, form):
    nodes = graph_nodes.read(self.forms[form])
    self.assertEqual(nodes.collections["trainable_variables"], ["weights"])
    self.assertEqual(nodes.collections["variables"],
                     ["weights", "weights/Momentum"])
    self.assertEqual(nodes.collections["train_op"], [self.built.train_op.name])

  @parameterized.named_parameters(
      ("graph", "graph"), ("meta", "meta"), ("definition", "definition"))
  def test_variables(self, form):
    nodes = graph_nodes.read(self.forms[form])
    self.assertEqual(nodes.variables(), [
        graph_nodes.Variable("weights", [4, 3], "float32", 48, "/device:CPU:0",
                             trainable=True),
        graph_nodes.Variable("weights/Momentum", [4, 3], "float32", 48,
                             "/device:CPU:0", trainable=False)])

  def test_each_node_stands_after_what_it_needs(self):
    nodes = graph_nodes.read(self.forms["graph"])
    done = set()
    for node in nodes.ordered:
      self.assertContainsSubset([s for s, _ in node.inputs], done)
      self.assertContainsSubset(node.controls, done)
      done.add(node)

  def test_while_loop(self):
    with tf.Graph().as_default() as graph:
      weights = loop_cases.weights()
      result = tf.while_loop(
          lambda i, x: i < 3, lambda i, x: (i + 1, tf.matmul(x, x)),
          [0, weights[:3] + 0.0])[1]
    nodes = graph_nodes.read(graph)
    self.assertLen(nodes.ordered, len(graph.get_operations()))
    self.assertEqual(nodes.by_name[result.op.name].origin,
                     graph_nodes.FROM_VARIABLE)

  def test_finalized_graph_stays_as_it_is(self):
    with tf.Graph().as_default() as graph:
      loop_cases.weights(regularizer=tf.nn.l2_loss)
    graph.finalize()
    names = [op.name for op in graph.get_operations()]
    self.assertLen(graph_nodes.read(graph).ordered, len(names))
    self.assertEqual([op.name for op in graph.get_operations()], names)

  def test_ops_of_a_library_that_is_not_loaded(self):
    definition = chain(3)
    node = definition.node.add(name="own", op="OpOfSomeLibrary", input=["n2"])
    node.attr["T"].type = tf.float32.as_datatype_enum
    nodes = graph_nodes.read(definition)
    self.assertLen(nodes.ordered, 4)
    self.assertIsNone(nodes.output_bytes(nodes.by_name["own"], 0))

  def test_what_is_no_graph(self):
    with self.assertRaisesRegex(TypeError, "`graph` must be a `towers.Tower"):
      graph_nodes.read("graph.pb")

  def test_part_of_a_graph(self):
    definition = chain(3)
    del definition.node[1]
    with self.assertRaisesRegex(ValueError, "`n2` reads `n1`, which is not"):
      graph_nodes.read(definition)

  def test_many_nodes_without_shapes(self):
    nodes = graph_nodes.read(chain(20001))
    self.assertLen(nodes.ordered, 20001)
    self.assertIsNone(nodes.output_bytes(nodes.by_name["n7"], 0))


class OriginTest(parameterized.TestCase):

  @parameterized.named_parameters(("reference", False), ("resource", True))
  def test_where_values_come_from(self, resource):
    with tf.Graph().as_default() as graph:
      weights = loop_cases.weights(resource)
      image = loop_cases.inputs()
      noise = tf.random.normal([3])
      names = {
          "value": tf.identity(weights), "data": tf.matmul(image, weights),
          "noise": noise * 2.0, "constant": tf.constant(1.0) + 1.0,
          "all": tf.matmul(image, weights) + noise,
          "assigned": tf.assign(weights, weights * 2.0).op}
    nodes = graph_nodes.read(graph)
    found = {key: nodes.by_name[getattr(x, "op", x).name]
             for key, x in names.items()}
    self.assertEqual(
        {key: node.origin for key, node in found.items()},
        {"value": 2, "data": 3, "noise": 4, "constant": 0, "all": 7,
         "assigned": 2})
    self.assertEqual(found["value"].value_of, nodes.by_name["weights"])
    self.assertIsNone(found["data"].value_of)

  @parameterized.named_parameters(("reference", False), ("resource", True))
  def test_what_changes_variables(self, resource):
    with tf.Graph().as_default() as graph:
      weights = loop_cases.weights(resource)
      ops = [
          tf.assign(weights, tf.zeros([4, 3]), name="a"),
          tf.assign_sub(weights, tf.zeros([4, 3]), name="b"),
          tf.scatter_add(weights, [0], tf.zeros([1, 3]), name="c"),
          tf.train.AdamOptimizer().apply_gradients(
              [(tf.zeros([4, 3]), weights)])]
      del ops
    nodes = graph_nodes.read(graph)
    changing = [n for n in nodes.ordered
                if n.changed_variable is nodes.by_name["weights"]]
    self.assertLen(changing, 5)  # With the initialiser.
    self.assertLen([node for node in changing if node.is_apply], 1)

  def test_reads_stand_where_the_variable_is(self):
    with tf.Graph().as_default() as graph:
      weights = loop_cases.weights()
      with tf.device("/job:localhost/replica:0/task:0/cpu:2"):
        read = weights.read_value()
        tf.identity(read, name="copy")
    nodes = graph_nodes.read(graph)
    self.assertEqual(nodes.by_name["weights"].device, "/device:CPU:0")
    self.assertEqual(nodes.by_name["copy"].device, "/device:CPU:2")
    for node in nodes.ordered:
      if node.op == "ReadVariableOp":
        self.assertEqual(node.device, "/device:CPU:0")

  def test_backward(self):
    nodes = graph_nodes.read(loop_cases.loop().graph)
    names = [node.name for node in nodes.ordered if node.is_backward]
    self.assertNotEmpty(names)
    for name in names:
      self.assertIn("gradients/", name)


class AncestorsTest(absltest.TestCase):

  def test_data_and_control(self):
    with tf.Graph().as_default() as graph:
      a = tf.constant(1.0, name="a")
      with tf.control_dependencies([tf.no_op(name="before")]):
        b = tf.add(a, 1.0, name="b")
      tf.add(b, 1.0, name="c")
    nodes = graph_nodes.read(graph)
    found = graph_nodes.ancestors([nodes.by_name["b"]])
    self.assertCountEqual([n.name for n in found], ["a", "b", "b/y", "before"])


if __name__ == "__main__":
  absltest.main()
