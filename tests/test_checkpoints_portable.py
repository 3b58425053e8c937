"""Tests that checkpoints are those of one device, whatever saves or restores.

`golden/` holds a small checkpoint and what the model below computes with it. It
must never change: that is how a renamed variable is found out. To write it
anew, where a name is to change on purpose:

    python tests/test_checkpoints_portable.py --write_golden
"""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
STEPS = 50
ROWS = 7  # Do not divide by 2, 3 or 4.
OPTIMIZERS = {
    "momentum": lambda: tf.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(0.01, epsilon=1e-3),
}

# What a checkpoint of plain code holds, by hand.
KEYS = {
    "conv/kernel": [3, 3, 2, 4],
    "conv/batch_normalization/gamma": [4],
    "conv/batch_normalization/beta": [4],
    "conv/batch_normalization/moving_mean": [4],
    "conv/batch_normalization/moving_variance": [4],
    "table": [5, 4],
    "dense/kernel": [4, 3],
    "global_step": [],
}
SLOTS = {
    "momentum": {f"{key}/Momentum": shape for key, shape in KEYS.items()
                 if "moving" not in key and shape},
    "adam": {"beta1_power": [], "beta2_power": [],
             **{f"{key}/{slot}": shape for key, shape in KEYS.items()
                for slot in ("Adam", "Adam_1")
                if "moving" not in key and shape}},
}

# Plain code of a user who has never heard of `towers`: the same variables by
# hand, the moving statistics of the checkpoint.
PLAIN = """
import json, sys
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
path, data, output = sys.argv[1:]
with np.load(data) as arrays:
  images, ids = arrays["images"], arrays["ids"]
dtype = tf.float64
kernel = tf.get_variable("conv/kernel", [3, 3, 2, 4], dtype)
with tf.variable_scope("conv/batch_normalization"):
  gamma, beta, mean, variance = [
      tf.get_variable(name, [4], dtype)
      for name in ("gamma", "beta", "moving_mean", "moving_variance")]
table = tf.get_variable("table", [5, 4], dtype)
dense = tf.get_variable("dense/kernel", [4, 3], dtype)
step = tf.train.get_or_create_global_step()
x = tf.nn.conv2d(images, kernel, strides=1, padding="VALID")
x = (x - mean) * tf.rsqrt(variance + 1e-3) * gamma + beta
x = tf.reduce_mean(tf.nn.relu(x), [1, 2]) + tf.nn.embedding_lookup(table, ids)
logits = tf.matmul(x, dense)
with tf.Session() as sess:
  tf.train.Saver().restore(sess, path)
  np.savez(output, logits=sess.run(logits), step=sess.run(step))
print(json.dumps(sorted(m for m in sys.modules if m.startswith("towers"))))
"""


def model(images, ids, labels, training):
  """Convolution, batch norm, an embedding; `training` is a bool."""
  dtype = images.dtype
  with tf.variable_scope("conv"):
    kernel = tf.get_variable("kernel", [3, 3, 2, 4], dtype)
    x = tf.nn.conv2d(images, kernel, strides=1, padding="VALID")
    x = tf.nn.relu(towers.batch_norm(x, training=training, momentum=0.9))
  x = tf.reduce_mean(x, axis=[1, 2])
  x += tf.nn.embedding_lookup(tf.get_variable("table", [5, 4], dtype), ids)
  logits = tf.matmul(x, tf.get_variable("dense/kernel", [4, 3], dtype))
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
      logits=logits, labels=labels)
  return {"loss": tf.reduce_mean(losses), "logits": logits}


def data(seed=0):
  """Returns images `[B, 5, 5, 2]`, ids `[B]` and labels `[B]`."""
  rng = np.random.RandomState(seed)
  return (rng.normal(1.0, 2.0, [ROWS, 5, 5, 2]), rng.randint(0, 5, [ROWS]),
          rng.randint(0, 3, [ROWS]))


def numpy_logits(values, images, ids):
  """Float64 NumPy: what the model computes with moving statistics."""
  windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), (1, 2))
  x = np.einsum("bhwcij,ijco->bhwo", windows, values["conv/kernel"])
  scope = "conv/batch_normalization/"
  x = (x - values[scope + "moving_mean"]) / np.sqrt(
      values[scope + "moving_variance"] + 1e-3)
  x = np.maximum(x * values[scope + "gamma"] + values[scope + "beta"], 0)
  return (x.mean((1, 2)) + values["table"][ids]) @ values["dense/kernel"]


def session(graph, **options):
  """Opens a session that does not spend time on optimising the graph."""
  return testing.session(graph, **options)


class Built:
  """A graph with the model, as plain code (`num_towers` is None) or towers."""

  def __init__(self, num_towers, *, optimizer="momentum", training=True,
               **options):
    self.graph = tf.Graph()
    with self.graph.as_default():
      tf.set_random_seed(1)
      self.inputs = tuple(
          tf.placeholder(x.dtype, [None, *x.shape[1:]]) for x in data())
      step = tf.train.get_or_create_global_step()
      self.train_op = None
      if num_towers is None:
        with tf.variable_scope("", use_resource=True):
          outputs = model(*self.inputs, training)
        if training:
          with tf.control_dependencies(
              tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            self.train_op = OPTIMIZERS[optimizer]().minimize(
                outputs["loss"], global_step=step)
      else:
        graph = towers.build_towers(
            lambda *inputs: model(*inputs, training),
            testing.devices(num_towers), inputs=self.inputs, **options)
        outputs = graph.outputs
        if training:
          self.train_op = graph.minimize(OPTIMIZERS[optimizer](),
                                         global_step=step)
      self.logits = outputs["logits"]
      self.saver = tf.train.Saver()

  def train(self, sess, steps):
    """Trains on data that follow from the step, as an input pipeline would."""
    first = int(sess.run(tf.train.get_global_step(self.graph)))
    for k in range(first, first + steps):
      sess.run(self.train_op, dict(zip(self.inputs, data(k))))

  def variables(self, sess):
    return sess.run({v.op.name: v for v in tf.global_variables()})


def tensors(path):
  """Returns the values in a checkpoint by key."""
  reader = tf.train.load_checkpoint(str(path))
  return {key: reader.get_tensor(key)
          for key in reader.get_variable_to_shape_map()}


def write_golden():
  """Writes the golden checkpoint and what the model computes with it."""
  GOLDEN.mkdir(exist_ok=True)
  built = Built(2, optimizer="momentum")
  with session(built.graph, initialize=True) as sess:
    built.train(sess, 3)
    built.saver.save(sess, str(GOLDEN / "model"), write_meta_graph=False,
                     write_state=False)
  images, ids, _ = data(99)
  logits = numpy_logits(tensors(GOLDEN / "model"), images, ids)
  (GOLDEN / "logits.json").write_text(
      json.dumps(logits.tolist(), indent=1) + "\n", encoding="utf-8")


class KeysTest(parameterized.TestCase):

  @parameterized.parameters(
      *[("adam", n) for n in (None, 1, 2, 3, 4)], ("momentum", None),
      ("momentum", 3))
  def test_c021_keys_of_a_saver(self, optimizer, num_towers):
    built = Built(num_towers, optimizer=optimizer)
    with session(built.graph, initialize=True) as sess:
      path = built.saver.save(
          sess, os.path.join(self.create_tempdir().full_path, "model"))
    self.assertEqual(dict(tf.train.list_variables(path)),
                     {**KEYS, **SLOTS[optimizer]})

  @parameterized.parameters(
      (1, "shared"), (2, "shared"), (3, "shared"), (4, "shared"),
      (3, "balanced"), (3, "replicated"))
  def test_c021_keys_of_a_monitored_session(self, num_towers, variables):
    folder = self.create_tempdir().full_path
    built = Built(num_towers, optimizer="adam", variables=variables,
                  parameter_device="/cpu:4" if variables == "shared" else None)
    with built.graph.as_default():
      with tf.train.MonitoredTrainingSession(
          checkpoint_dir=folder, save_checkpoint_steps=1,
          save_summaries_steps=None, log_step_count_steps=None,
          config=testing.config()) as sess:
        sess.run(built.train_op, dict(zip(built.inputs, data())))
    self.assertEqual(dict(tf.train.list_variables(folder)),
                     {**KEYS, **SLOTS["adam"]})


class GoldenTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = str(GOLDEN / "model")
    self.expected = np.array(
        json.loads((GOLDEN / "logits.json").read_text(encoding="utf-8")))

  def test_is_small_and_has_its_keys(self):
    self.assertEqual(dict(tf.train.list_variables(self.path)),
                     {**KEYS, **SLOTS["momentum"]})
    self.assertLess(sum(f.stat().st_size for f in GOLDEN.iterdir()), 20_000)

  def test_outputs_by_numpy(self):
    images, ids, _ = data(99)
    np.testing.assert_allclose(
        numpy_logits(tensors(self.path), images, ids), self.expected,
        rtol=1e-12)

  @parameterized.parameters(None, 1, 2, 4)
  def test_outputs_in_towers(self, num_towers):
    built = Built(num_towers, training=False)
    with session(built.graph) as sess:
      built.saver.restore(sess, self.path)
      logits = sess.run(built.logits, dict(zip(built.inputs, data(99))))
    np.testing.assert_allclose(logits, self.expected, rtol=1e-10, atol=1e-12)

  @parameterized.parameters(1, 3)
  def test_training_goes_on(self, num_towers):
    """Slots, moving statistics and the step come from the file as well."""
    whole = Built(None)
    with session(whole.graph) as sess:
      whole.saver.restore(sess, self.path)
      self.assertEqual(sess.run(tf.train.get_global_step()), 3)
      whole.train(sess, 2)
      expected = whole.variables(sess)
    built = Built(num_towers)
    with session(built.graph) as sess:
      built.saver.restore(sess, self.path)
      built.train(sess, 2)
      got = built.variables(sess)
    self.assertEqual(got.keys(), expected.keys())
    for key, value in expected.items():
      np.testing.assert_allclose(got[key], value, rtol=1e-10, atol=1e-12,
                                 err_msg=key)

  def test_outputs_in_a_process_without_towers(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    images, ids, _ = data(99)
    np.savez(folder / "data.npz", images=images, ids=ids)
    result = subprocess.run(
        [sys.executable, "-c", PLAIN, self.path, str(folder / "data.npz"),
         str(folder / "output.npz")],
        cwd=folder, capture_output=True, text=True, check=True)
    self.assertEqual(json.loads(result.stdout.splitlines()[-1]), [])
    with np.load(folder / "output.npz") as output:
      np.testing.assert_allclose(output["logits"], self.expected, rtol=1e-10,
                                 atol=1e-12)
      self.assertEqual(output["step"], 3)


class ContinuedTest(parameterized.TestCase):

  @parameterized.parameters(("adam", (None, 1, 2, 4)), ("momentum", (2,)))
  def test_50_steps_in_3_towers_then_50_elsewhere(self, optimizer, continued):
    built = Built(3, optimizer=optimizer)
    with session(built.graph, initialize=True) as sess:
      built.train(sess, STEPS)
      path = built.saver.save(
          sess, os.path.join(self.create_tempdir().full_path, "model"))
      half = tensors(path)
      built.train(sess, STEPS)
      expected = built.variables(sess)
    self.assertEqual(half["global_step"], STEPS)
    # Otherwise the second half would show nothing.
    self.assertGreater(
        np.abs(half["dense/kernel"] - expected["dense/kernel"]).max(), 1e-3)
    for num_towers in continued:
      built = Built(num_towers, optimizer=optimizer)
      with session(built.graph) as sess:
        built.saver.restore(sess, path)
        built.train(sess, STEPS)
        got = built.variables(sess)
      self.assertEqual(got.keys(), expected.keys())
      for key, value in expected.items():
        with self.subTest(key, num_towers=num_towers):
          np.testing.assert_allclose(got[key], value, rtol=1e-10, atol=1e-10)


class MovingStatisticsTest(parameterized.TestCase):

  @parameterized.parameters(
      (True, 5.0),   # 1 within, 4 between the towers.
      (False, 1.0))  # The mean of what each tower sees.
  def test_c013_what_the_checkpoint_of_sorted_data_holds(self, sync, variance):
    """The first tower sees N(0, 1), the second N(4, 1)."""
    with tf.Graph().as_default():
      x = tf.placeholder(tf.float64, [64, 1])
      graph = towers.build_towers(
          lambda x: {"y": towers.batch_norm(x, training=True, momentum=0.9)},
          testing.devices(2), inputs=x, sync_batch_norm=sync)
      rng = np.random.RandomState(0)
      with testing.session(initialize=True) as sess:
        for _ in range(100):
          rows = rng.normal(size=[64, 1]) + np.repeat([[0.0], [4.0]], 32, 0)
          sess.run(graph.update_ops, {x: rows})
        path = tf.train.Saver().save(
            sess, os.path.join(self.create_tempdir().full_path, "model"))
    values = tensors(path)
    np.testing.assert_allclose(values["batch_normalization/moving_mean"], [2.0],
                               atol=0.1)
    np.testing.assert_allclose(values["batch_normalization/moving_variance"],
                               [variance], atol=0.3)
    with tf.Graph().as_default(), testing.session() as sess:
      y = towers.batch_norm(tf.constant(rows), training=False)
      tf.train.Saver().restore(sess, path)
      np.testing.assert_allclose(
          sess.run(y), (rows - values["batch_normalization/moving_mean"]) /
          np.sqrt(values["batch_normalization/moving_variance"] + 1e-3))


class KerasTest(parameterized.TestCase):

  def template(self):
    return tf.keras.Sequential([
        tf.keras.layers.Conv2D(4, 3, activation="relu"),
        tf.keras.layers.Flatten(), tf.keras.layers.Dense(3)])

  @parameterized.parameters(1, 2, 3)
  def test_c068_weights_of_a_template(self, num_towers):
    """By TensorFlow's saver and by `save_weights`, back on one device.

    Keras 3 does not save weights in graph mode at all.
    """
    folder = self.create_tempdir().full_path
    images = data()[0].astype("float32")
    files = [os.path.join(folder, "model")]
    keras_2 = hasattr(tf.keras.backend, "set_session")
    with tf.Graph().as_default():
      template = self.template()

      def scores(x):
        y = template(x)
        return {"scores": y, "loss": tf.reduce_mean(y**2)}

      graph = towers.build_towers(scores, testing.devices(num_towers),
                                  inputs=tf.constant(images))
      train_op = graph.minimize(tf.train.GradientDescentOptimizer(0.1))
      names = [v.op.name for v in tf.global_variables()]
      with testing.session(initialize=True) as sess:
        sess.run(train_op)
        expected = sess.run(graph.outputs["scores"])
        tf.train.Saver().save(sess, files[0])
        if keras_2:
          files.append(os.path.join(folder, "weights.h5"))
          tf.keras.backend.set_session(sess)
          template.save_weights(files[1])
    self.assertLen(names, 4)
    self.assertEmpty([name for name in names if "tower" in name])
    for file in files:
      with tf.Graph().as_default():
        plain = self.template()
        outputs = plain(tf.constant(images))
        with testing.session() as sess:
          if file.endswith(".h5"):
            tf.keras.backend.set_session(sess)
            plain.load_weights(file)
          else:
            report = towers.checkpoints.restore(sess, file)
            self.assertLen(report.sources, 4)
          np.testing.assert_allclose(sess.run(outputs), expected, rtol=1e-5,
                                     atol=1e-6)


if __name__ == "__main__":
  if "--write_golden" in sys.argv:
    tf.disable_v2_behavior()
    write_golden()
  else:
    absltest.main()
