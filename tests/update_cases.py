"""Update ops and models that the tests of updates share."""

import tensorflow.compat.v1 as tf


def zeros(name, dtype=tf.float32, shape=()):
  return tf.get_variable(name, shape, dtype, trainable=False,
                         initializer=tf.zeros_initializer())


def count_calls(name="calls", by=1):
  """Makes an update op that counts; returns it."""
  op = zeros(name, tf.int32).assign_add(by)
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)
  return op


def linear(x):
  """Mean of `weight * x`, with a weight that starts at 0."""
  weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
  return tf.reduce_mean(weight * x)


def sgd(graph):
  return graph.minimize(tf.train.GradientDescentOptimizer(1.0),
                        global_step=tf.train.get_or_create_global_step())


def variable(name):
  return {v.op.name: v for v in tf.global_variables()}[name]
