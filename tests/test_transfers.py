"""Tests for towers.transfers, against what TensorFlow sends."""

import collections
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import resnet
import testing
import towers
from towers import graph_nodes
from towers import inspection
from towers import scopes as scopes_lib
from towers import transfers


def found_in(graph, *fetches):
  nodes = graph_nodes.read(graph)
  needed = graph_nodes.ancestors(
      [nodes.by_name[x.name] for x in fetches]) if fetches else None
  return transfers.between_devices(nodes, scopes_lib.Scopes(nodes), needed)


def model(images, labels):
  kernel = tf.get_variable("kernel", [3, 3, 3, 5])
  x = tf.nn.conv2d(images, kernel, strides=1, padding="SAME")
  x = tf.nn.relu(towers.batch_norm(x, training=True))
  logits = tf.matmul(tf.reduce_mean(x, [1, 2]), tf.get_variable("w", [5, 4]))
  return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels=labels, logits=logits))


def built(num_towers, rows=None, **options):
  images = tf.placeholder(tf.float32, [rows, 4, 4, 3], name="images")
  labels = tf.placeholder(tf.int64, [rows], name="labels")
  graph = towers.build_towers(
      model, testing.devices(num_towers), inputs=(images, labels), **options)
  return images, labels, graph


def traced_bytes(metadata):
  """Returns the bytes that a run sent from device to device.

  The partitions say which op's output is sent where, the trace how large it
  was.
  """
  sizes = {}
  for device in metadata.step_stats.dev_stats:
    for stats in device.node_stats:
      for output in stats.output:
        tensor = output.tensor_description
        elements = np.prod([axis.size for axis in tensor.shape.dim])
        sizes[device.device, stats.node_name, output.slot] = int(
            elements * tf.as_dtype(tensor.dtype).size)
  sent = collections.Counter()
  for part in metadata.partition_graphs:
    for node in part.node:
      if node.op == "_Send":
        source, target = (node.attr[end].s.decode()
                          for end in ("send_device", "recv_device"))
        name, _, port = node.input[0].partition(":")
        sent[source[-5:], target[-5:]] += sizes[source, name, int(port or 0)]
  return sent


class SentTest(parameterized.TestCase):

  @parameterized.product(num_towers=(1, 2, 3, 4),
                         variables=("shared", "balanced", "replicated"))
  def test_equals_what_a_step_sends(self, num_towers, variables):
    """TensorFlow's own partition of a step has an op for each message."""
    with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
      images, labels, build = built(num_towers, variables=variables)
      train_op = build.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
      metadata = tf.RunMetadata()
      with tf.Session(config=build.session_config()) as sess:
        sess.run([tf.global_variables_initializer(),
                  tf.local_variables_initializer()])
        sess.run(train_op,
                 {images: np.zeros([7, 4, 4, 3]), labels: np.zeros([7])},
                 options=tf.RunOptions(output_partition_graphs=True),
                 run_metadata=metadata)
    # TensorFlow 2.15 sends these, later versions copy them.
    constants = {
        op.name for op in graph.get_operations()
        if op.type == "Const" and op.outputs[0].shape.num_elements() <= 16
        and len({x.device for x in op.outputs[0].consumers()}) > 1}
    expected = collections.Counter()
    for part in metadata.partition_graphs:
      for node in part.node:
        name = node.attr["tensor_name"].s.decode()
        if node.op == "_Recv" and name.split("_", 2)[-1] not in constants:
          expected[tuple(node.attr[end].s.decode()[-5:] for end in
                         ("send_device", "recv_device"))] += 1
    actual = collections.Counter()
    for transfer in found_in(graph, train_op):
      source, target = transfer.source[-5:], transfer.target[-5:]
      actual[source or "CPU:0", target or "CPU:0"] += transfer.tensors
    actual.pop(("CPU:0", "CPU:0"), None)
    self.assertEqual(actual, expected)
    self.assertGreaterEqual(len(actual), 2 * (num_towers - 1))

  @parameterized.named_parameters(
      ("two_towers", 2, False), ("four_towers", 4, False),
      ("converted", 2, True))
  def test_bytes_equal_those_of_a_traced_step(self, num_towers, converted):
    """Within 1 percent, for ResNet-20; once with batch norm to convert."""
    rows = 2 * num_towers + 1

    def layer(x, **unused_options):
      scale, offset = (tf.get_variable(name, [x.shape[-1]])
                       for name in ("gamma", "beta"))
      return tf.nn.fused_batch_norm(x, scale, offset, is_training=True)[0]

    def resnet20(images, labels):
      return tf.losses.sparse_softmax_cross_entropy(
          labels, resnet.logits(images, num_classes=10, training=True))

    inputs = (np.zeros([rows, 8, 8, 3], np.float32), np.zeros([rows], np.int64))
    metadata = tf.RunMetadata()
    with tf.Graph().as_default(), mock.patch.object(
        towers, "batch_norm", layer if converted else towers.batch_norm):
      build = towers.build_towers(
          resnet20, testing.devices(num_towers), inputs=inputs)
      train_op = build.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
      with tf.Session(config=build.session_config()) as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(train_op, run_metadata=metadata, options=tf.RunOptions(
            trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True))
      report = inspection.report(build, train_op=train_op)
    expected, actual = traced_bytes(metadata), collections.Counter()
    for transfer in report.transfers:
      self.assertEqual(transfer.unknown, 0)
      # TensorFlow puts what says no device on the first one.
      ends = tuple(end[-5:] or "CPU:0"
                   for end in (transfer.source, transfer.target))
      if ends[0] != ends[1]:
        actual[ends] += transfer.num_bytes
    ways = [way for i in range(1, num_towers)
            for way in (("CPU:0", f"CPU:{i}"), (f"CPU:{i}", "CPU:0"))]
    self.assertCountEqual(expected, ways)
    self.assertCountEqual(actual, ways)
    for way in ways:
      # Each way, at least the parameters or their gradients.
      self.assertGreater(expected[way], 4 * 269000)
      self.assertBetween(actual[way] / expected[way], 0.99, 1.01)

  def test_once_for_each_device(self):
    with tf.Graph().as_default() as graph:
      with tf.device("/cpu:0"):
        x = tf.zeros([5, 2], name="x") + 1.0
      for device in ("/cpu:1", "/cpu:1", "/cpu:2"):
        with tf.device(device):
          tf.add(x, x)
    self.assertEqual(found_in(graph), [
        transfers.Transfer("/device:CPU:0", "/device:CPU:1", "other", 1, 40, 0),
        transfers.Transfer("/device:CPU:0", "/device:CPU:2", "other", 1, 40, 0)
    ])

  def test_each_output(self):
    with tf.Graph().as_default() as graph:
      with tf.device("/cpu:0"):
        parts = tf.split(tf.zeros([6]) + 1.0, 3)
      with tf.device("/cpu:1"):
        tf.add_n(parts[:2])
    found, = found_in(graph)
    self.assertEqual((found.tensors, found.num_bytes), (2, 16))

  def test_only_what_a_step_needs(self):
    with tf.Graph().as_default() as graph:
      with tf.device("/cpu:0"):
        x = tf.zeros([5]) + 1.0
      with tf.device("/cpu:1"):
        tf.square(x)
        y = tf.zeros([3])
    self.assertEmpty(found_in(graph, y.op))
    self.assertLen(found_in(graph), 1)


class PurposeTest(parameterized.TestCase):

  @parameterized.named_parameters(("two", 2), ("three", 3))
  def test_bytes_of_each_purpose(self, num_towers):
    """Per tower: what a hand count of the layers gives."""
    rows = 3 * num_towers
    with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
      _, _, build = built(num_towers, rows)
      train_op = build.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
    found = {(t.source[-5:], t.target[-5:], t.purpose): t
             for t in found_in(graph, train_op)}
    kernels, channels = 4 * (3 * 3 * 3 * 5 + 5 * 4), 4 * 5
    for i in range(1, num_towers):
      back, out = (f"CPU:{i}", "CPU:0"), ("CPU:0", f"CPU:{i}")
      # Kernels, scale and offset.
      self.assertEqual(found[(*out, "parameters")].num_bytes,
                       kernels + 2 * channels)
      # Those of scale and offset are the sums that the layer sends anyway.
      self.assertEqual(found[(*back, "gradients")].num_bytes, kernels)
      self.assertEqual(found[(*out, "inputs")].num_bytes,
                       3 * (4 * 4 * 3 * 4 + 8))
      moments = [found[(*way, "moments")] for way in (back, out)]
      for transfer in moments:
        # Mean and variance there, sums of the backward pass back, or turned.
        self.assertBetween(transfer.num_bytes, 4 * channels, 6 * channels)
        self.assertEqual(transfer.unknown, 0)

  @parameterized.parameters(("shared", 2 * 4 * 5), ("replicated", 0))
  def test_packed_tensors_keep_their_purpose(self, variables, more):
    """Bytes by purpose are the same in one message as in many.

    But for the gradients of scale and offset, where these travel as sums too.
    """
    sums = []
    for pack_bytes in (0, 2**20):
      with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
        _, _, build = built(2, 6, variables=variables)
        train_op = build.minimize(tf.train.MomentumOptimizer(0.1, 0.9),
                                  pack_bytes=pack_bytes)
      sums.append({
          (t.source, t.target, t.purpose): t.num_bytes
          for t in found_in(graph, train_op) if t.purpose in (
              transfers.PARAMETERS, transfers.GRADIENTS)})
    sums[0]["/device:CPU:1", "/device:CPU:0", "gradients"] += more
    self.assertEqual(*sums)

  def test_concat_by_that_name_of_something_else(self):
    with tf.Graph().as_default() as graph:
      with tf.device("/cpu:0"):
        x = tf.concat([tf.zeros([2]) + 1.0, tf.zeros([1])], 0, name="packed")
      with tf.device("/cpu:1"):
        tf.square(x)
    found, = found_in(graph)
    self.assertEqual((found.purpose, found.num_bytes), (transfers.OTHER, 12))

  def test_what_an_accumulator_gets(self):
    with tf.Graph().as_default() as graph:
      with tf.device("/cpu:0"):
        x = tf.zeros([20]) + 1.0
      with tf.device("/cpu:1"):
        tf.ConditionalAccumulator(tf.float32, [20]).apply_grad(x)
    found, = found_in(graph)
    self.assertEqual((found.purpose, found.num_bytes),
                     (transfers.GRADIENTS, 80))

  def test_what_is_only_waited_for(self):
    with tf.Graph().as_default() as graph:
      with tf.device("/cpu:0"):
        done = tf.no_op()
      with tf.device("/cpu:1"), tf.control_dependencies([done]):
        tf.zeros([5]) + tf.ones([5])  # pylint: disable=expression-not-assigned
    self.assertEqual(found_in(graph), [transfers.Transfer(
        "/device:CPU:0", "/device:CPU:1", "control", 1, 0, 0)])

  def test_small_constants_are_copied(self):
    with tf.Graph().as_default() as graph:
      for size in (16, 17):
        with tf.device("/cpu:0"):
          x = tf.constant([0.0] * size)
          tf.square(x)
        with tf.device("/cpu:1"):
          tf.add(x, x)
    found, = found_in(graph)
    self.assertEqual(found.num_bytes, 17 * 4)

  def test_shapes_that_are_not_known(self):
    with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
      _, _, build = built(2)
    found = {t.purpose: t for t in found_in(graph, build.loss.op)
             if (t.source[-5:], t.target[-5:]) == ("CPU:0", "CPU:1")}
    # Images and labels; how many there are is one number.
    self.assertEqual(found["inputs"].unknown, 2)
    self.assertEqual(found["parameters"].unknown, 0)


if __name__ == "__main__":
  absltest.main()
