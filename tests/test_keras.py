"""Tests for towers._keras: names of unnamed Keras layers, tower by tower."""

import collections

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import _keras

KERAS = tf.keras


def model(x):
  """Unnamed layers, with a meeting between their creation."""
  for _ in range(2):
    x = KERAS.layers.Dense(4)(x)
    x = KERAS.layers.BatchNormalization()(x, training=True)
  x = KERAS.layers.Dense(4)(x)
  return tf.reduce_mean(x)


def names(num_towers, before=0):
  """Returns the names of all variables of `model`, in towers or plain."""
  testing.clear_keras()
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [None, 4])
    for _ in range(before):
      KERAS.layers.Dense(4)(x)
    if num_towers:
      towers.build_towers(model, testing.devices(num_towers), inputs=x)
    else:
      model(x)
    after = KERAS.layers.Dense(4)
    return [v.op.name for v in tf.global_variables()], after.name


class KerasTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(num_towers=(1, 2, 3), before=(0, 2))
  def test_layers_are_named_as_on_one_device(self, num_towers, before):
    """In the lock step, towers make their layers in turn."""
    self.assertEqual(names(num_towers, before), names(0, before))

  def test_every_tower_counts_for_itself(self):
    testing.clear_keras()
    seen = {}

    def named(x):
      layers = []
      for _ in range(2):
        layers.append(KERAS.layers.Dense(2).name)
        x = towers.merge(lambda values: values[0], x)
      seen[towers.current_tower().index] = layers
      return tf.reduce_mean(x)

    with tf.Graph().as_default():
      towers.build_towers(named, 3, inputs=tf.zeros([3, 2]))
    self.assertEqual(seen, {k: ["dense", "dense_1"] for k in range(3)})

  def test_copies_go_on_by_themselves(self):
    counts = {"keras": collections.defaultdict(int, dense=2)}
    copy = _keras.copy_of(counts)
    copy["keras"]["dense"] += 1
    copy["keras"]["conv"] += 1
    self.assertEqual(counts, {"keras": {"dense": 2}})

  def test_keras_is_not_imported(self):
    """What is not loaded has no counts, and sets none."""
    loaded = dict(_keras.sys.modules)
    try:
      for name in _keras._KERAS_2 + (_keras._KERAS_3,):
        _keras.sys.modules.pop(name, None)
      self.assertEmpty(_keras.counts_by_graph(tf.Graph()))
      self.assertIsNone(_keras.counts_by_thread())
      _keras.set_counts_by_thread({"dense": 1})
      _keras.set_counts_by_graph(tf.Graph(), {})
    finally:
      _keras.sys.modules.update(loaded)


if __name__ == "__main__":
  tf.test.main()
