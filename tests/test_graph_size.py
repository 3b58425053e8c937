"""A guard against graphs that grow: exact ops and bytes of ResNet-20.

Counts are exact, so any change of what a build makes shows here, and no slow
machine does.
"""

import functools
import json

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import testing
import towers
from models import resnet

SETTINGS = {
    "sync": {},
    "per_tower": {"sync_batch_norm": False},
    "balanced": {"variables": "balanced"},
    "replicated": {"variables": "replicated"},
}

# Number of ops and bytes of the graph, in 1, 2 and 4 towers.
SIZES = {
    "2.15": {
        "sync": [[1661, 436176], [3483, 938758], [4757, 1321116]],
        "per_tower": [[1661, 436176], [3459, 825540], [5295, 1268121]],
        "balanced": [[1661, 436176], [3485, 949343], [4761, 1342305]],
        "replicated": [[1661, 436176], [5010, 1557355], [8910, 2477821]],
    },
    "2.21": {
        "sync": [[1661, 436260], [3483, 938926], [4757, 1321452]],
        "per_tower": [[1661, 436260], [3459, 825708], [5295, 1268457]],
        "balanced": [[1661, 436260], [3485, 949511], [4761, 1342641]],
        "replicated": [[1661, 436260], [5010, 1557523], [8910, 2478157]],
    },
}

RENEW = """
The graph of ResNet-20 in training has another size than the table says.
If the change is not meant, find what adds ops: compare the graphs of before and
after by the scopes of their ops. If it is meant, renew the line for TensorFlow
{version} in `SIZES` of tests/test_graph_size.py (and that of the other version,
by running this test there), say in CHANGELOG.md what grew and why, and let
`python tools/benchmark.py --suite=targets` show what it costs:
    "{setting}": {measured},
"""


def loss_fn(images, labels, depth=20):
  logits = resnet.logits(images, num_classes=10, training=True, depth=depth)
  return tf.losses.sparse_softmax_cross_entropy(labels, logits)


@functools.cache
def size(num_towers, setting, depth=20):
  """Returns how many ops and bytes a graph of training has."""
  with tf.Graph().as_default() as graph:
    images = tf.placeholder(tf.float32, [None, 32, 32, 3])
    labels = tf.placeholder(tf.int64, [None])
    built = towers.build_towers(
        functools.partial(loss_fn, depth=depth), testing.devices(num_towers),
        inputs=(images, labels), **SETTINGS[setting])
    built.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
    definition = graph.as_graph_def()
  # The version of the producer is a number whose bytes TensorFlow chooses.
  definition.ClearField("versions")
  return [len(definition.node), definition.ByteSize()]


def plain_ops(depth):
  """Returns how many ops the plain model has."""
  with tf.Graph().as_default() as graph:
    images = tf.placeholder(tf.float32, [None, 32, 32, 3])
    labels = tf.placeholder(tf.int64, [None])
    loss = loss_fn(images, labels, depth)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
      tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    return len(graph.get_operations())


class GraphSizeTest(parameterized.TestCase):

  @parameterized.parameters(*SETTINGS)
  def test_ops_and_bytes_are_those_of_the_table(self, setting):
    version = ".".join(tf.__version__.split(".")[:2])
    if version not in SIZES:
      self.skipTest(f"There is no table for TensorFlow {version}.")
    measured = [size(count, setting) for count in (1, 2, 4)]
    self.assertEqual(
        SIZES[version].get(setting), measured,
        RENEW.format(version=version, setting=setting,
                     measured=json.dumps(measured)))

  @parameterized.parameters(*SETTINGS)
  def test_each_further_tower_adds_the_same_ops(self, setting):
    self.check_line([2, 3, 4, 8], lambda n: size(n, setting, depth=8)[0])

  @parameterized.parameters("sync", "replicated")
  def test_each_further_layer_adds_the_same_ops(self, setting):
    self.check_line([20, 38, 56], lambda depth: size(2, setting, depth)[0])

  def check_line(self, places, count):
    """Checks that counts lie on one line, to the last op."""
    counts = [count(place) for place in places]
    slopes = [(counts[k] - counts[0]) / (places[k] - places[0])
              for k in range(1, len(places))]
    self.assertEqual(slopes, slopes[:1] * len(slopes),
                     f"Ops at {places}: {counts}.")

  def test_one_tower_has_nothing_more_per_layer_than_the_plain_model(self):
    plain, built = [[count(depth) for depth in (8, 20)] for count in (
        plain_ops, lambda depth: size(1, "sync", depth)[0])]
    self.assertLessEqual(built[1] - built[0], plain[1] - plain[0])
    self.assertLess(built[0] - plain[0], 40)


if __name__ == "__main__":
  absltest.main()
