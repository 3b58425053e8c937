"""A small model with trained values, which the tests of exporting share."""

import os
import pathlib
import re

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import saved_model_pb2

import testing
import towers


def spec(*shape, name="images"):
  """Returns what a batch of float32 rows of this shape is given as."""
  return tf.TensorSpec([None, *shape], tf.float32, name)


def images(rows=5, shape=(4, 4, 3), seed=0):
  return np.random.RandomState(seed).normal(size=[rows, *shape]).astype("f")


def small(x):
  """Returns scores `[B, 2]`, by moving statistics."""
  x = tf.nn.conv2d(x, tf.get_variable("kernel", [3, 3, 3, 5]), strides=1,
                   padding="SAME")
  x = tf.nn.relu(towers.batch_norm(x, training=False))
  return tf.matmul(tf.reduce_mean(x, axis=[1, 2]),
                   tf.get_variable("weights", [5, 2]))


def trained(model_fn, inputs, folder, *, num_towers=2, name="model.ckpt",
            extra=()):
  """Writes a checkpoint of random values; returns it, and what towers infer.

  Args:
    model_fn: Builds the model, and returns a tensor of rows.
    inputs: Arrays, its arguments.
    folder: Where to write.
    num_towers: In how many towers the model is built.
    name: Name of the checkpoint.
    extra: Names of further variables in it.
  """
  rng = np.random.RandomState(1)
  with tf.Graph().as_default():
    tensors = [tf.constant(x) for x in inputs]
    graph = towers.build_towers(
        lambda *x: {"scores": model_fn(*x)}, testing.devices(num_towers),
        inputs=tensors)
    for other in extra:
      tf.get_variable(other, [3])
    assigned = []
    for variable in tf.global_variables():
      feed = tf.placeholder(variable.dtype.base_dtype)
      assigned.append((variable.assign(feed), feed, _random(rng, variable)))
    # As who serves it does, so that sums are taken in the same order.
    with testing.session(optimize=True) as session:
      session.run([op for op, _, _ in assigned],
                  {feed: value for _, feed, value in assigned})
      path = tf.train.Saver().save(session, os.path.join(folder, name))
      return path, session.run(graph.outputs["scores"])


def _random(rng, variable):
  """Returns values with which activations keep their size from layer to layer.
  """
  if variable.shape.rank > 1:
    return rng.normal(size=variable.shape) * np.sqrt(
        2.0 / np.prod(variable.shape[:-1].as_list()))
  low = 0.5 if re.search("variance|gamma", variable.name) else -0.5
  return rng.uniform(low, low + 1.0, variable.shape)


def meta_graph(directory):
  """Returns the one meta graph of a SavedModel."""
  proto = saved_model_pb2.SavedModel()
  proto.ParseFromString(pathlib.Path(directory, "saved_model.pb").read_bytes())
  [meta] = proto.meta_graphs
  return meta


def nodes(graph_def):
  """Returns the nodes of a graph, and those of its functions."""
  return [*graph_def.node, *(node for function in graph_def.library.function
                             for node in function.node_def)]


def serve(directory, feeds, **session_options):
  """Returns the outputs of a SavedModel by key, as TensorFlow 1 serves it."""
  with tf.Graph().as_default(), testing.session(**session_options) as session:
    meta = tf.saved_model.load(session, ["serve"], os.fspath(directory))
    signature = meta.signature_def["serving_default"]
    return session.run(
        {key: info.name for key, info in signature.outputs.items()},
        {signature.inputs[key].name: x for key, x in feeds.items()})


def run_frozen(exported, feeds):
  """Returns the outputs of a frozen graph by key."""
  graph_def = tf.GraphDef()
  graph_def.ParseFromString(pathlib.Path(exported.path).read_bytes())
  with tf.Graph().as_default(), testing.session() as session:
    tf.import_graph_def(graph_def, name="")
    return session.run(exported.outputs, {
        exported.inputs[key]: x for key, x in feeds.items()})
