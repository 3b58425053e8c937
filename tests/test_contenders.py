"""Tests for the benchmark's contenders: they train the same network.

Tests tools/contenders.py, tools/networks.py, tools/cut_loop.py and
tools/mirrored.py against one device with the whole batch.
"""

import pathlib
import subprocess
import sys

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
from tools import benchmark_workers
from tools import contenders
from tools import cut_loop
from tools import mirrored
from tools import networks

ROOT = pathlib.Path(contenders.__file__).parents[1]

# Trains in a process of its own, where TensorFlow 2 behaves as such: prints
# nothing, but writes the weights from before and the losses.
MIRRORED = """
import sys
import numpy as np
import tensorflow as tf
sys.path.insert(0, sys.argv[1])
tf.keras.utils.set_random_seed(1)
from tools import mirrored, networks
data = np.load(sys.argv[2])
run = mirrored.Mirrored(networks.NETWORKS[sys.argv[3]], 2, 1)
run.build(data["images"], data["labels"])
weights = [v.numpy() for v in run.model.trainable_variables]
losses = [run.step() for _ in range(3)]
np.savez(sys.argv[4], *weights, losses=losses,
         sent=run.bytes_between_devices())
"""


def batch(model, num_towers=2, rows=2):
  return benchmark_workers.batch(
      benchmark_workers.Task("one", model, num_towers, rows))


def trained(contender, model, num_towers=2, weights=None, steps=3):
  """Returns losses on one device's terms, before each step, and the end."""
  network = networks.NETWORKS[model]
  data = batch(model)
  with tf.Graph().as_default():
    images, labels = (tf.placeholder(x.dtype, x.shape) for x in data)
    built = contenders.CONTENDERS[contender](
        network, images, labels, num_towers)
    variables = tf.trainable_variables()
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      loss = network.loss(images, labels)
    config = built.config
    with tf.Session(config=config) as sess:
      sess.run(tf.global_variables_initializer())
      if weights is None:
        rng = np.random.RandomState(1)
        weights = [rng.normal(0.0, 0.3, v.shape) for v in variables]
      for variable, value in zip(variables, weights):
        variable.load(value, sess)
      feed = {images: data[0], labels: data[1]}
      losses = []
      for _ in range(steps):
        losses.append(sess.run(loss, feed))
        sess.run(built.train_op, feed)
      values = sess.run(tf.global_variables(), feed)
      return losses, {
          v.op.name: value for v, value in zip(tf.global_variables(), values)}


class ContendersTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(
      contender=["cut", "towers", "converted", "balanced", "replicated",
                 "packed"],
      model=["resnet8", "unet_small"])
  def test_trains_as_one_device_does(self, contender, model):
    losses, end = trained("one", model)
    others, other_end = trained(contender, model)
    self.assertAllClose(losses, others, rtol=1e-4)
    self.assertAllInSet([name in other_end for name in end], [True])
    for name, value in end.items():
      self.assertAllClose(value, other_end[name], rtol=2e-3, atol=2e-4,
                          msg=name)

  @parameterized.parameters("loop", "loop_unoptimized", "per_tower")
  def test_batch_norm_by_tower_trains_otherwise(self, contender):
    """Else the test above could not tell."""
    losses, _ = trained("one", "resnet8")
    others, _ = trained(contender, "resnet8")
    self.assertAllClose(losses[0], others[0], rtol=1e-4)
    self.assertNotAllClose(losses[1:], others[1:], rtol=1e-4)

  @parameterized.parameters("resnet8", "unet_small")
  def test_mirrored_synchronises(self, model):
    """Its loss is that of one device on the whole batch."""
    folder = pathlib.Path(self.create_tempdir().full_path)
    images, labels = batch(model)
    np.savez(folder / "batch.npz", images=images, labels=labels)
    process = subprocess.run(
        [sys.executable, "-c", MIRRORED, str(ROOT), str(folder / "batch.npz"),
         model, str(folder / "end.npz")],
        capture_output=True, text=True, timeout=300, check=False)
    self.assertEqual(process.returncode, 0, process.stderr)
    with np.load(folder / "end.npz") as end:
      losses, sent = end["losses"], float(end["sent"])
      weights = [end[f"arr_{k}"] for k in range(len(end.files) - 2)]
    expected, _ = trained("one", model, weights=weights)
    self.assertAllClose(losses, expected, rtol=1e-4)
    by_tower, _ = trained("loop", model, weights=weights)
    # With some weights that makes little difference, but not that little.
    self.assertLess(10 * np.abs(np.subtract(losses, expected)).max(),
                    np.abs(np.subtract(losses, by_tower)).max())
    # All gradients go both ways, and four vectors for each layer.
    gradients = 4 * sum(w.size for w in weights)
    self.assertBetween(sent, 2 * gradients, 3 * gradients)

  def test_networks_are_those_of_models(self):
    for name, network in networks.NETWORKS.items():
      if name not in ("resnet8", "resnet20", "unet", "unet_small"):
        continue
      shapes = []
      for build in (lambda x, n=network: n.logits(x),
                    lambda x, n=network: n.of_layers(
                        cut_loop.ListLayers(1), [x])[0]):
        with tf.Graph().as_default():
          logits = build(tf.zeros([2, *network.image_shape]))
          self.assertEqual(logits.shape.as_list(),
                           [2, *network.labels_shape, networks.NUM_CLASSES])
          shapes.append([(v.op.name, v.shape.as_list())
                         for v in tf.global_variables()])
          self.assertLen(
              [v for v in tf.global_variables() if "moving_mean" in v.name],
              network.batch_norms)
      self.assertEqual(*shapes)

  def test_cut_loop_gathers_on_the_cpu(self):
    network = networks.NETWORKS["resnet8"]
    with tf.Graph().as_default() as graph:
      cut_loop.losses(network, tf.zeros([4, 32, 32, 3]),
                      tf.zeros([4], tf.int64), 2)
      ops = graph.get_operations()
    norms = [op for op in ops if op.type == "FusedBatchNormV3"]
    self.assertLen(norms, network.batch_norms)
    self.assertEqual({op.device for op in norms}, {"/device:CPU:0"})
    self.assertEqual({op.device for op in ops if op.type == "Conv2D"},
                     {"/device:CPU:0", "/device:CPU:1"})
    self.assertEqual({op.inputs[0].shape[0].value
                      if hasattr(op.inputs[0].shape[0], "value")
                      else op.inputs[0].shape[0] for op in norms}, {4})

  @parameterized.parameters(*contenders.CONTENDERS)
  def test_config_has_all_devices(self, contender):
    data = batch("unet_small")
    with tf.Graph().as_default():
      images, labels = (tf.placeholder(x.dtype, x.shape) for x in data)
      built = contenders.CONTENDERS[contender](
          networks.NETWORKS["unet_small"], images, labels, 2)
      with tf.Session(config=built.config) as sess:
        self.assertEqual(testing.num_cpus(sess), 1 if contender == "one" else 2)

  def test_all_have_a_description(self):
    self.assertEqual(set(benchmark_workers.DESCRIPTIONS),
                     {*contenders.CONTENDERS, "mirrored"})
    for text in [*benchmark_workers.DESCRIPTIONS.values(),
                 mirrored.DESCRIPTION]:
      self.assertNotEmpty(text)


if __name__ == "__main__":
  tf.test.main()
