"""Tests for towers.inspection."""

import json
import time

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import loop_cases
import testing
import towers
from towers import inspection


def decayed(kernel):
  return 1e-4 * tf.nn.l2_loss(kernel)


def model(images):
  kernel = tf.get_variable("kernel", [4, 3], regularizer=decayed)
  x = towers.batch_norm(tf.matmul(images, kernel), training=True)
  return tf.reduce_mean(tf.square(x)) + tf.add_n(
      tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES))


def build(num_towers, rows=7, **options):
  graph = towers.build_towers(
      model, testing.devices(num_towers), inputs=loop_cases.inputs(rows),
      **options)
  return graph, graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))


class ReportTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("one", 1), ("two", 2), ("three", 3), ("four", 4))
  def test_of_towers(self, num_towers):
    with tf.Graph().as_default() as graph:
      built, train_op = build(num_towers)
      report = inspection.report(built, train_op=train_op)
    ops = graph.get_operations()
    self.assertEqual(report.num_ops, len(ops))
    self.assertEqual(sum(d.ops for d in report.devices), len(ops))
    # Kernel 12, scale and offset 3 each; moving mean and variance; Momentum.
    first = {d.device: d for d in report.devices}["/device:CPU:0"]
    self.assertEqual((first.variables, first.parameters, first.num_bytes),
                     (8, 18, 4 * (18 + 6 + 18)))
    self.assertEqual(sum(d.parameters for d in report.devices), 18)
    self.assertLen(report.variables, 8)
    self.assertEqual(
        [v.name for v in report.variables if v.trainable],
        ["kernel", "batch_normalization/gamma", "batch_normalization/beta"])
    self.assertEmpty(report.findings)
    self.assertEqual({op.runs for op in report.update_ops}, {"before"})
    self.assertLen(report.update_ops, 2)
    self.assertLen(report.regularization_losses, 1)
    self.assertEqual([t.index for t in report.towers], list(range(num_towers)))
    for tower in report.towers:
      self.assertEqual(tower.devices[0], f"/device:CPU:{tower.index}")
      self.assertEqual(tower.difference[:2], (0, 0))
    self.assertLen(report.synced_layers, 1 if num_towers > 1 else 0)

  @parameterized.named_parameters(
      ("graph", lambda graph: graph),
      ("meta", lambda graph: tf.train.export_meta_graph(graph=graph)))
  def test_other_forms(self, form):
    with tf.Graph().as_default() as graph:
      built, train_op = build(3)
      expected = inspection.report(built, train_op=train_op)
      actual = inspection.report(form(graph), train_op=train_op.name)
    self.assertIsNone(actual.synced_layers)
    self.assertEqual(actual._replace(synced_layers=expected.synced_layers),
                     expected)

  def test_definition_has_no_collections(self):
    with tf.Graph().as_default() as graph:
      built, train_op = build(2)
      expected = inspection.report(built, train_op=train_op)
      actual = inspection.report(graph.as_graph_def())
    self.assertEqual(actual.train_ops, (train_op.name,))
    self.assertFalse(actual.train_ops_given)
    self.assertEqual(actual.transfers, expected.transfers)
    self.assertEqual(actual.towers, expected.towers)
    self.assertEqual(actual.variables, expected.variables)
    self.assertEmpty(actual.collections)
    self.assertEmpty(actual.findings)

  def test_training_and_evaluation_in_one_graph(self):
    with tf.Graph().as_default():
      built, train_op = build(2)
      with tf.variable_scope("", reuse=True):
        towers.build_towers(
            lambda x: {"y": tf.matmul(x, tf.get_variable("kernel", [4, 3]))},
            testing.devices(2), inputs=loop_cases.inputs(7), name="test_tower")
      report = inspection.report(built, train_op=train_op)
    self.assertEqual([(t.towers, t.index) for t in report.towers],
                     [("tower", 0), ("tower", 1),
                      ("test_tower", 0), ("test_tower", 1)])
    self.assertEmpty(report.findings)

  def test_two_train_ops(self):
    def gan(images):
      with tf.variable_scope("a"):
        one = tf.reduce_mean(towers.batch_norm(images, training=True) *
                             tf.get_variable("w", [4]))
      with tf.variable_scope("b"):
        two = tf.reduce_mean(towers.batch_norm(images, training=True) *
                             tf.get_variable("w", [4]))
      return {"one": one, "two": two}

    with tf.Graph().as_default():
      built = towers.build_towers(gan, 2, inputs=loop_cases.inputs(7))
      steps = [
          built.minimize(
              tf.train.GradientDescentOptimizer(0.1), loss=loss,
              var_list=tf.trainable_variables(scope), update_ops=[
                  op for op in built.update_ops if f"/{scope}/" in op.name])
          for loss, scope in (("one", "a"), ("two", "b"))]
      both = inspection.report(built, train_op=steps)
      first = inspection.report(built, train_op=steps[0])
    self.assertEmpty(both.findings)
    self.assertEqual([op.runs for op in first.update_ops],
                     ["before"] * 2 + ["never"] * 2)

  def test_update_ops_in_conditionals(self):
    with tf.Graph().as_default():
      training = tf.placeholder_with_default(True, [])

      def tower(images):
        return tf.reduce_mean(tf.square(
            towers.batch_norm(images, training=training) *
            tf.get_variable("w", [4])))

      built = towers.build_towers(tower, 2, inputs=loop_cases.inputs(7))
      train_op = built.minimize(tf.train.AdamOptimizer())
      report = inspection.report(built, train_op=train_op)
    self.assertEmpty(report.findings)

  @parameterized.named_parameters(
      ("loss_scale", {"loss_scale": "dynamic"}),
      ("accumulate", {"accumulate_steps": 2}),
      ("nonfinite", {"skip_nonfinite": True}), ("clip", {"clip_norm": 1.0}),
      ("pack", {"pack_bytes": 1000}))
  def test_options_of_minimize(self, options):
    with tf.Graph().as_default() as graph:
      built = towers.build_towers(model, testing.devices(3),
                                  inputs=loop_cases.inputs(7))
      train_op = built.minimize(tf.train.AdamOptimizer(), **options)
      report = inspection.report(built, train_op=train_op)
      found = inspection.report(graph.as_graph_def())
    self.assertEmpty(report.findings)
    self.assertEmpty(found.findings)

  def test_json(self):
    with tf.Graph().as_default():
      built, train_op = build(2)
      report = inspection.report(built, train_op=train_op)
    decoded = json.loads(report.to_json())
    self.assertEqual(list(decoded), list(report._fields))
    self.assertEqual(decoded["towers"][1]["devices"],
                     list(report.towers[1].devices))
    self.assertEqual(decoded["transfers"][0]["num_bytes"],
                     report.transfers[0].num_bytes)
    self.assertEqual(decoded["synced_layers"][0]["name"],
                     "batch_normalization")

  def test_names_of_train_op(self):
    built = loop_cases.loop()
    for train_op in (built.train_op, built.train_op.name, [built.train_op]):
      report = inspection.report(built.graph, train_op=train_op)
      self.assertEqual(report.train_ops, (built.train_op.name,))
    with self.assertRaisesRegex(
        ValueError, "`train_op` must be an op or tensor of `graph`.*'none'"):
      inspection.report(built.graph, train_op="none")

  def test_rejects_other_things(self):
    with self.assertRaisesRegex(TypeError, "`graph` must be a `towers.Tower"):
      inspection.report([])


class LargeTest(parameterized.TestCase):

  def test_64_towers_and_100000_ops(self):
    definition, towers_ = tf.GraphDef(), 64
    float_type = tf.float32.as_datatype_enum
    shape = tf.TensorShape([8]).as_proto()

    def add(name, op, inputs=(), device="/cpu:0"):
      node = definition.node.add(name=name, op=op, input=inputs, device=device)
      node.attr["T"].type = float_type
      node.attr["_output_shapes"].list.shape.add().CopyFrom(shape)
      return node

    add("x", "Placeholder").attr["dtype"].type = float_type
    kernel = add("kernel", "VariableV2")
    kernel.attr["dtype"].type = float_type
    kernel.attr["shape"].shape.CopyFrom(shape)
    add("rate", "Const").attr["value"].tensor.CopyFrom(
        tf.make_tensor_proto(0.1))
    add("kernel/read", "Identity", ["kernel"])
    for t in range(towers_):
      last = "x"
      for k in range(1560):
        name = f"tower_{t}/part_{k}/Add"
        add(name, "AddV2", [last, "kernel/read"], f"/gpu:{t}")
        last = name
      add(f"gradients/tower_{t}/g", "Square", [last], f"/gpu:{t}")
    add("mean", "AddN", [f"gradients/tower_{t}/g" for t in range(towers_)])
    add("train", "ApplyGradientDescent", ["kernel", "rate", "mean"])
    self.assertGreater(len(definition.node), 99_000)

    start = time.perf_counter()
    report = inspection.report(definition)
    self.assertLess(time.perf_counter() - start, 30.0)
    self.assertLen(report.towers, towers_)
    self.assertEqual({t.difference[:2] for t in report.towers}, {(0, 0)})
    sums = {}
    for transfer in report.transfers:
      entry = sums.setdefault(transfer.purpose, [0, 0])
      entry[0] += transfer.tensors
      entry[1] += transfer.num_bytes
    # Each goes once to each tower, whose ops read it 1560 times.
    self.assertEqual(sums, {"parameters": [64, 64 * 32],
                            "inputs": [64, 64 * 32],
                            "gradients": [64, 64 * 32]})
    self.assertEmpty(report.findings)
    self.assertIn("64 towers", str(report))


if __name__ == "__main__":
  absltest.main()
