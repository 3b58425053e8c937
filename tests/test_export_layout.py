"""Tests for towers.export_layout."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
from towers import export_layout

CHANNELS = 5


def value(*shape):
  return np.random.RandomState(len(shape)).normal(size=shape).astype("f")


def bias(x, data_format):
  return tf.nn.bias_add(x, value(x.shape[data_format.index("C")]), data_format)


def batch_norm(x, data_format):
  channels = x.shape[data_format.index("C")]
  y, _, _ = tf.nn.fused_batch_norm(
      x, value(channels), value(channels), mean=value(channels),
      variance=1.0 + value(channels)**2, is_training=False,
      data_format=data_format)
  return y


def convolution(x, data_format):
  return tf.nn.conv2d(
      x, value(3, 2, CHANNELS, 7), strides=[1, 1, 2, 1] if
      data_format == "NHWC" else [1, 1, 1, 2], padding="VALID",
      data_format=data_format)


def padded_convolution(x, data_format):
  paddings = {"N": [0, 0], "C": [0, 0], "H": [2, 1], "W": [0, 3]}
  return tf.nn.conv2d(
      x, value(3, 3, CHANNELS, 7), strides=1, data_format=data_format,
      padding=[paddings[axis] for axis in data_format])


def depthwise(x, data_format):
  return tf.nn.depthwise_conv2d(
      x, value(3, 3, CHANNELS, 2), strides=[1, 1, 1, 1], padding="SAME",
      data_format=data_format)


def transposed_convolution(x, data_format):
  sizes = {"N": tf.shape(x)[0], "C": 4, "H": 12, "W": 14}
  return tf.nn.conv2d_transpose(
      x, value(2, 2, 4, CHANNELS), [sizes[axis] for axis in data_format],
      strides=2, data_format=data_format)


def pooling(x, data_format):
  size = {"N": 1, "C": 1, "H": 3, "W": 2}
  size = [size[axis] for axis in data_format]
  y = tf.nn.max_pool2d(x, size, size, "SAME", data_format=data_format)
  return y + tf.nn.avg_pool2d(x, size, size, "SAME", data_format=data_format)


def residual(x, data_format):
  """What an image goes through that need not be transposed in between."""
  kernel = value(1, 1, CHANNELS, CHANNELS)
  for _ in range(2):
    y = tf.nn.conv2d(x, kernel, strides=1, padding="SAME",
                     data_format=data_format)
    x = tf.nn.relu(batch_norm(y, data_format) + bias(y, data_format))
  return x


LAYERS = {layer.__name__: layer for layer in (
    bias, batch_norm, convolution, padded_convolution, depthwise,
    transposed_convolution, pooling, residual)}


def run(graph_def, feed, fetch="y:0"):
  with tf.Graph().as_default(), testing.session() as session:
    tf.import_graph_def(graph_def, name="")
    return session.run(fetch, {"x:0": feed})


def rewritten(graph):
  ranks = {op.name: op.outputs[0].shape.rank
           for op in graph.get_operations() if op.outputs}
  return export_layout.channels_last(graph.as_graph_def(), ranks)


class ChannelsLastTest(parameterized.TestCase):

  @parameterized.named_parameters(*LAYERS.items())
  def test_c041_neighbour_layer_equals_its_transpose(self, layer):
    """No size is that of another axis, so that a mix-up would fail."""
    images = value(2, 6, 7, CHANNELS)
    with tf.Graph().as_default() as last, testing.session() as session:
      expected = session.run(layer(tf.constant(images), "NHWC"))
    del last
    with tf.Graph().as_default() as graph:
      x = tf.placeholder(tf.float32, [None, CHANNELS, 6, 7], name="x")
      y = tf.identity(layer(x, "NCHW"), name="y")
    new = rewritten(graph)
    self.assertNotEmpty(export_layout.channels_first_ops(graph.as_graph_def()))
    self.assertEmpty(export_layout.channels_first_ops(new))
    got = run(new, images.transpose([0, 3, 1, 2]))
    np.testing.assert_allclose(got.transpose([0, 2, 3, 1]), expected,
                               rtol=1e-5, atol=1e-5)
    self.assertEqual(got.shape[1:], tuple(y.shape.as_list()[1:]))

  def test_three_dimensions(self):
    images, kernel = value(2, 3, 4, 6, CHANNELS), value(2, 2, 3, CHANNELS, 7)
    with tf.Graph().as_default(), testing.session() as session:
      expected = session.run(tf.nn.conv3d(
          images, kernel, strides=[1, 1, 2, 1, 1], padding="SAME"))
    with tf.Graph().as_default() as graph:
      x = tf.placeholder(tf.float32, [None, CHANNELS, 3, 4, 6], name="x")
      # The shape of no kernel for CPUs; only the rewritten one is run.
      tf.identity(tf.nn.conv3d(x, kernel, strides=[1, 1, 1, 2, 1],
                               padding="SAME", data_format="NCDHW"), name="y")
    got = run(rewritten(graph), images.transpose([0, 4, 1, 2, 3]))
    np.testing.assert_allclose(got.transpose([0, 2, 3, 4, 1]), expected,
                               rtol=1e-5, atol=1e-5)

  def test_other_outputs_of_an_op(self):
    """Mean and variance of batch norm are read where they now are."""
    images = value(2, CHANNELS, 6, 7)
    with tf.Graph().as_default() as graph:
      x = tf.placeholder(tf.float32, images.shape, name="x")
      _, mean, variance = tf.nn.fused_batch_norm(
          x, tf.ones([CHANNELS]), tf.zeros([CHANNELS]), data_format="NCHW")
      tf.stack([mean, variance], name="y")
    mean, variance = run(rewritten(graph), images)
    np.testing.assert_allclose(mean, images.mean(axis=(0, 2, 3)), atol=1e-5)
    np.testing.assert_allclose(variance, images.var(axis=(0, 2, 3), ddof=1),
                               rtol=1e-5)

  def test_transposes_only_at_both_ends(self):
    with tf.Graph().as_default() as graph:
      x = tf.placeholder(tf.float32, [None, CHANNELS, 6, 7], name="x")
      tf.identity(residual(x, "NCHW"), name="y")
    new = rewritten(graph)
    inputs = {node.name: [name.partition(":")[0].lstrip("^")
                          for name in node.input] for node in new.node}
    needed, pending = set(), ["y"]
    while pending:
      name = pending.pop()
      if name not in needed:
        needed.add(name)
        pending += inputs[name]
    self.assertLen([node.name for node in new.node
                    if node.op == "Transpose" and node.name in needed], 2)

  def test_leaves_what_it_cannot_tell(self):
    with tf.Graph().as_default() as graph:
      x = tf.placeholder(tf.float32, None, name="x")
      tf.raw_ops.BiasAdd(value=x, bias=value(CHANNELS), data_format="NCHW",
                         name="bias")
      tf.nn.relu(x)
    new = rewritten(graph)
    self.assertEqual(export_layout.channels_first_ops(new), ["bias"])
    self.assertEqual(list(new.node), list(graph.as_graph_def().node))


if __name__ == "__main__":
  absltest.main()
