"""Tests that graphs are freed once nobody needs them, with what is in them."""

import gc
import weakref

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


def model(x):
  w = tf.get_variable("w", [3, 4])
  tf.get_variable("not_named", initializer=tf.zeros([]), trainable=False)
  h = towers.batch_norm(tf.matmul(x, w), training=True)
  return {"loss": tf.reduce_mean(h**2), "h": h}


def build(**options):
  x = tf.placeholder(tf.float32, [None, 3], name="x")
  return towers.build_towers(model, testing.devices(3), inputs=x, **options)


def optimizer():
  return tf.train.MomentumOptimizer(0.1, 0.9)


def trained(**options):
  train_op = build().minimize(optimizer(), **options)
  with testing.session(initialize=True) as sess:
    sess.run(train_op, {"x:0": np.ones([5, 3])})


def async_training():
  parts = [tf.placeholder(tf.float32, [2, 3]) for _ in range(3)]
  towers.build_towers(
      model, testing.devices(3), inputs=towers.PerTower(parts),
      sync_batch_norm=False, update_ops="all").minimize_async(optimizer())


def evaluation():
  x = tf.placeholder(tf.float32, [None, 3])
  with tf.variable_scope("model"):
    build()
  with tf.variable_scope("model", reuse=True):
    towers.build_towers(lambda x: {"h": model(x)["h"]}, testing.devices(2),
                        inputs=x)


def with_a_model_that_fails():
  def fails(x):
    model(x)
    raise RuntimeError("on purpose")

  x = tf.placeholder(tf.float32, [None, 3])
  try:
    towers.build_towers(fails, testing.devices(2), inputs=x)
  except RuntimeError:
    pass


class FreedTest(parameterized.TestCase):
  """TensorFlow keeps, for as long as a process lives, all classes it has seen.

  Some of what a build needs must not hang on such things: who builds one graph
  after the other would run out of memory.
  """

  @parameterized.named_parameters(
      ("built", build),
      ("replicated", lambda: build(variables="replicated")),
      ("trained", trained),
      ("clipped", lambda: trained(clip_norm=1.0)),
      ("accumulated", lambda: trained(accumulate_steps=2)),
      ("scaled", lambda: trained(loss_scale=towers.DynamicLossScale())),
      ("replicated_trained",
       lambda: build(variables="replicated").minimize(optimizer())),
      ("async", async_training),
      ("inspected", lambda: towers.inspection.report(build())),
      ("evaluation", evaluation),
      ("failed", with_a_model_that_fails))
  def test_graph(self, work):
    graph = tf.Graph()
    with graph.as_default():
      work()
    freed = weakref.ref(graph)
    del graph
    gc.collect()
    self.assertIsNone(freed())

  def test_variables_stay_what_they_were(self):
    with tf.Graph().as_default():
      graph = build(variables="replicated")
      plain = tf.get_variable("plain", [], use_resource=True)
      copied, = [v for v in graph.variables if v.op.name == "w"]
      moving = [v for v in graph.variables if "moving" in v.op.name]
      self.assertIs(type(moving[0]), type(plain))
      self.assertIsInstance(copied, type(plain))
    with tf.Graph().as_default():
      graph = build(variables="replicated")
      again, = [v for v in graph.variables if v.op.name == "w"]
      # One class for all, as TensorFlow keeps each.
      self.assertIs(type(copied), type(again))


if __name__ == "__main__":
  absltest.main()
