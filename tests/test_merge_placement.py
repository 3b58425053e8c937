"""Tests of the devices on which batch moments meet, by device strings alone."""

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import towers
from models import resnet
from towers import placement

GPUS = [f"/gpu:{index}" for index in range(4)]


def loss_fn(images, labels):
  logits = resnet.logits(images, num_classes=10, training=True, depth=20)
  return tf.losses.sparse_softmax_cross_entropy(labels, logits)


def build(devices, **options):
  """Returns the names and device types of all ops of a training graph."""
  images = tf.placeholder(tf.float32, [None, 32, 32, 3])
  labels = tf.placeholder(tf.int64, [None])
  graph = towers.build_towers(
      loss_fn, devices, inputs=(images, labels), **options)
  graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
  return {
      op.name: placement.same_spelling(op.device)
      for op in graph.graph.get_operations()
  }


def of_moments(devices):
  """Returns those of the ops that serve the moments of batch norm."""
  return {
      name: device for name, device in devices.items()
      if "whole_batch" in name or
      "cross_tower/" in name and "batch_normalization" in name
  }


class MergePlacementTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("default", {}),
      ("first_gpu", {"parameter_device": "/gpu:0"}),
      ("cpu", {"parameter_device": "/cpu:0"}),
      ("balanced", {"variables": "balanced"}),
      ("replicated", {"variables": "replicated"}))
  def test_no_moments_on_a_cpu_if_all_towers_are_gpus(self, options):
    with tf.Graph().as_default():
      moments = of_moments(build(GPUS, **options))
    # Forward and backward, 19 layers.
    self.assertGreater(sum("gradients/" in name for name in moments), 19 * 8)
    self.assertGreater(sum("gradients/" not in name for name in moments),
                       19 * 8)
    self.assertEqual({name: device for name, device in moments.items()
                      if "GPU" not in device}, {})
    merges = {device for name, device in moments.items()
              if "cross_tower/" in name}
    self.assertEqual(merges, {"/device:GPU:0"})

  def test_variables_stay_on_the_parameter_device(self):
    with tf.Graph().as_default():
      build(GPUS)
      self.assertEqual(
          {placement.same_spelling(v.device) for v in tf.global_variables()},
          {"/device:CPU:0"})

  @parameterized.named_parameters(
      ("mixed", ["/gpu:0", "/cpu:0"], "/device:CPU:0"),
      ("cpus", ["/cpu:1", "/cpu:2"], "/device:CPU:0"),
      ("other_gpus", ["/gpu:2", "/gpu:1"], "/device:GPU:2"),
      ("workers", ["/job:worker/task:1/gpu:0", "/job:worker/task:0/gpu:0"],
       "/job:worker/task:1/device:GPU:0"),
      ("spanning", [("/gpu:0", "/gpu:1"), ("/gpu:2", "/gpu:3")],
       "/device:GPU:0"))
  def test_where_moments_meet(self, devices, expected):
    with tf.Graph().as_default():
      x = tf.placeholder(tf.float32, [None, 4, 4, 3])
      graph = towers.build_towers(
          lambda x: tf.reduce_mean(towers.batch_norm(x, training=True)),
          devices, inputs=x)
      merges = {
          placement.same_spelling(op.device)
          for op in graph.graph.get_operations()
          if "cross_tower/batch_normalization" in op.name
      }
    self.assertEqual(merges, {expected})

  def test_metrics_stay_with_the_variables(self):
    def model_fn(x):
      tf.metrics.mean(x)
      return tf.reduce_mean(x)

    with tf.Graph().as_default():
      towers.build_towers(model_fn, GPUS, inputs=tf.ones([4, 3]))
      metric_variables = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
      self.assertLen(metric_variables, 2)
      self.assertEqual(
          {placement.same_spelling(v.device) for v in metric_variables},
          {"/device:CPU:0"})


if __name__ == "__main__":
  absltest.main()
