"""Tests for towers.export."""

import contextlib
import json
import os
import pathlib
import stat
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import checkpoint_cases
import export_cases as cases
from models import resnet
from models import unet
import testing
import towers
from towers import export

ROOT = str(pathlib.Path(towers.__file__).resolve().parents[1])

SERVER = """
import json, sys
import numpy as np
import tensorflow as tf

for folder in json.loads(sys.argv[1]):
  model = tf.saved_model.load(folder + "/1")
  serve = model.signatures["serving_default"]
  images = np.load(folder + "/images.npy")
  np.savez(folder + "/served.npz", *[
      serve(images=tf.constant(images[:rows]))["scores"] for rows in (5, 1, 4)])
assert "towers" not in sys.modules

# Export where TensorFlow 2 runs eagerly.
sys.path.append(sys.argv[2])
from towers import export
checkpoint = sys.argv[3]
export.saved_model(
    lambda x: x * tf.compat.v1.get_variable("scale", [3]), checkpoint,
    checkpoint + "_served", [tf.TensorSpec([None, 3], tf.float32, "x")])
export.frozen_graph(
    lambda x: x * tf.compat.v1.get_variable("scale", [3]), checkpoint,
    checkpoint + ".pb", [tf.TensorSpec([None, 3], tf.float32, "x")])
model = tf.saved_model.load(checkpoint + "_served")
scaled = model.signatures["serving_default"](x=tf.ones([2, 3]))["output"]
np.testing.assert_array_equal(scaled, [[1, 2, 3]] * 2)
"""


def resnet20(x):
  return resnet.logits(x, num_classes=10, training=False)


def small_unet(x):
  return unet.logits(x, num_classes=4, training=False, width=4)


def with_key(model_fn):
  return lambda x: {"scores": model_fn(x), "loss": tf.reduce_mean(x)}


class ServedTest(parameterized.TestCase):

  def test_resnet20_and_unet_in_a_fresh_process(self):
    """Both agree with inference in the towers of the training graph."""
    expected = {}
    for name, model_fn, shape in (("resnet20", resnet20, (8, 8, 3)),
                                  ("unet", small_unet, (10, 6, 3))):
      folder = self.create_tempdir(name).full_path
      images = cases.images(shape=shape)
      path, expected[folder] = cases.trained(model_fn, [images], folder)
      np.save(os.path.join(folder, "images.npy"), images)
      export.saved_model(with_key(model_fn), path, f"{folder}/1",
                         [cases.spec(*shape)])
    scale = checkpoint_cases.write(
        os.path.join(self.create_tempdir("eager").full_path, "scale"),
        {"scale": np.array([1, 2, 3], "f")})
    subprocess.run(
        [sys.executable, "-c", SERVER, json.dumps(list(expected)), ROOT, scale],
        check=True, env=dict(os.environ, CUDA_VISIBLE_DEVICES=""), timeout=120)
    for folder, scores in expected.items():
      self.assertGreater(np.ptp(scores), 0.1)
      served = np.load(f"{folder}/served.npz")
      for name, rows in (("arr_0", 5), ("arr_1", 1), ("arr_2", 4)):
        np.testing.assert_allclose(served[name], scores[:rows], rtol=1e-5,
                                   atol=1e-5)


class SavedModelTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.directory = self.folder / "models" / "7"
    self.images = cases.images()

  def trained(self, model_fn=cases.small, **options):
    path, scores = cases.trained(
        model_fn, [self.images], str(self.folder), **options)
    return path, scores

  def export(self, path, model_fn=cases.small, inputs=None):
    return export.saved_model(model_fn, path, str(self.directory),
                              inputs or [cases.spec(4, 4, 3)])

  @parameterized.parameters(1, 2, 3, 4)
  def test_checkpoints_of_any_number_of_towers(self, num_towers):
    path, scores = self.trained(num_towers=num_towers, extra=["step", "a/Adam"])
    exported = self.export(path)
    self.assertEqual(exported, export.Exported(
        str(self.directory), path, {"images": "serving_default_images:0"},
        {"output": "output:0"},
        ["batch_normalization/beta", "batch_normalization/gamma",
         "batch_normalization/moving_mean",
         "batch_normalization/moving_variance", "kernel", "weights"]))
    for rows in (5, 1, 3):
      served = cases.serve(self.directory, {"images": self.images[:rows]})
      np.testing.assert_allclose(served["output"], scores[:rows], atol=1e-6)

  def test_a_training_run_with_slots(self):
    def train_fn(x):
      return tf.reduce_mean(tf.square(cases.small(x) - 1.0))

    graph = towers.build_towers(train_fn, testing.devices(3),
                                inputs=[tf.constant(self.images)])
    train_op = graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
    with testing.session(initialize=True) as session:
      for _ in range(2):
        session.run(train_op)
      path = tf.train.Saver().save(session, str(self.folder / "run" / "m"), 2)
      loss = session.run(graph.loss)
    self.export(str(self.folder / "run"))  # The last one there.
    served = cases.serve(self.directory, {"images": self.images})["output"]
    np.testing.assert_allclose(np.mean(np.square(served - 1.0)), loss,
                               rtol=1e-5)
    self.assertNotIn(
        "Momentum", str(tf.train.list_variables(
            str(self.directory / "variables" / "variables"))))
    self.assertEndsWith(path, "m-2")

  def test_signature(self):
    def model_fn(features):
      scores = cases.small(features["image"])
      return towers.TowerSpec(
          loss=tf.reduce_mean(scores),
          outputs={"scores": scores * features["scale"],
                   "parts": [scores[:, 0], scores[:, 1]]})

    path, scores = self.trained()
    self.export(path, model_fn, {"image": (tf.float32, [None, 4, 4, 3]),
                                 "scale": ("float32", (None, 1))})
    meta = cases.meta_graph(self.directory)
    self.assertEqual(list(meta.meta_info_def.tags), ["serve"])
    self.assertCountEqual(
        meta.signature_def, ["serving_default", "__saved_model_init_op"]
        if "__saved_model_init_op" in meta.signature_def
        else ["serving_default"])
    signature = meta.signature_def["serving_default"]
    self.assertEqual(signature.method_name, "tensorflow/serving/predict")
    self.assertEqual([d.size for d in signature.inputs["image"].tensor_shape
                      .dim], [-1, 4, 4, 3])
    served = cases.serve(self.directory, {
        "image": self.images, "scale": np.full([5, 1], 2.0)})
    self.assertCountEqual(served, ["scores", "parts_0", "parts_1"])
    np.testing.assert_allclose(served["scores"], 2 * scores, atol=1e-6)
    np.testing.assert_allclose(served["parts_1"], scores[:, 1], atol=1e-6)

  def test_c086_nothing_of_the_caller_leaks_in(self):
    """Exports, and serves without soft placement, where there is no GPU."""
    path, scores = self.trained()
    with contextlib.ExitStack() as around:
      enter = around.enter_context
      enter(tf.Graph().as_default())
      cases.small(tf.zeros([2, 4, 4, 3]))  # The same names, not initialised.
      enter(testing.session())
      enter(tf.variable_scope("outer"))
      enter(tf.device("/device:GPU:0"))
      enter(tf.control_dependencies([tf.no_op("before")]))
      exported = self.export(path)
      frozen = export.frozen_graph(cases.small, path,
                                   str(self.folder / "frozen.pb"),
                                   [cases.spec(4, 4, 3)])
    meta = cases.meta_graph(self.directory)
    nodes = cases.nodes(meta.graph_def)
    saving = [node.op for node in nodes if node.name.startswith("save/")]
    self.assertContainsSubset(["SaveV2", "RestoreV2"], saving)
    self.assertNotIn("save_1", str([node.name for node in nodes]))
    self.assertEqual({node.device for node in nodes}, {""})
    self.assertEmpty([node.name for node in nodes if "_class" in node.attr
                      and not node.name.startswith("save/")])
    self.assertNotIn("before", {node.name for node in nodes})
    self.assertIn("kernel", exported.variables)
    served = cases.serve(self.directory, {"images": self.images})
    np.testing.assert_allclose(served["output"], scores, atol=1e-6)
    np.testing.assert_allclose(
        cases.run_frozen(frozen, {"images": self.images})["output"], scores,
        atol=1e-6)

  def test_c086_neighbour_devices_of_the_model_and_its_functions(self):
    """A model split over GPUs, one of them asked for inside a function."""
    @tf.function
    def half(x):
      with tf.device("/device:GPU:1"):
        return 0.5 * x

    def model_fn(x):
      with tf.device("/job:worker/task:3/device:GPU:0"):
        return half(cases.small(x))

    path, scores = self.trained()
    self.export(path, model_fn)
    nodes = cases.nodes(cases.meta_graph(self.directory).graph_def)
    self.assertEqual({node.device for node in nodes}, {""})
    self.assertLess(len(nodes), 120)
    served = cases.serve(self.directory, {"images": self.images})
    np.testing.assert_allclose(served["output"], 0.5 * scores, atol=1e-6)

  def test_only_what_the_outputs_need(self):
    def model_fn(x):
      scores = cases.small(x)
      labels = tf.placeholder(tf.int64, [None], "labels")
      unknown = tf.get_variable("not_in_the_checkpoint", [2])
      loss = tf.losses.sparse_softmax_cross_entropy(labels, scores + unknown)
      return {"loss": loss, "scores": scores}

    path, scores = self.trained()
    exported = self.export(path, model_fn)
    self.assertLen(exported.variables, 6)
    nodes = cases.nodes(cases.meta_graph(self.directory).graph_def)
    self.assertNoCommonElements([node.name for node in nodes],
                                ["labels", "not_in_the_checkpoint"])
    served = cases.serve(self.directory, {"images": self.images})
    np.testing.assert_allclose(served["scores"], scores, atol=1e-6)

  def test_partitioned_variables(self):
    def model_fn(x):
      weights = tf.get_variable(
          "parts", [48, 2], partitioner=tf.fixed_size_partitioner(3))
      return tf.matmul(tf.reshape(x, [-1, 48]), tf.convert_to_tensor(weights))

    value = checkpoint_cases.value(0, [48, 2])
    path = checkpoint_cases.write(self.folder / "parts", {"parts": value})
    self.assertEqual(self.export(path, model_fn).variables, ["parts"])
    served = cases.serve(self.directory, {"images": self.images})["output"]
    np.testing.assert_allclose(
        served, self.images.reshape([5, 48]) @ value, rtol=1e-4, atol=1e-5)

  def test_lookup_tables_and_their_files(self):
    words = self.create_tempfile("words.txt", "cat\ndog\n").full_path

    def model_fn(word):
      table = tf.lookup.StaticVocabularyTable(
          tf.lookup.TextFileInitializer(
              words, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64,
              tf.lookup.TextFileIndex.LINE_NUMBER), num_oov_buckets=1)
      tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS,
                           tf.no_op("of_another_table"))
      vectors = tf.get_variable("vectors", [3, 2])
      return tf.nn.embedding_lookup(vectors, table.lookup(word))

    value = checkpoint_cases.value(0, [3, 2])
    path = checkpoint_cases.write(self.folder / "words", {"vectors": value})
    self.export(path, model_fn, [tf.TensorSpec([None], tf.string)])
    os.remove(words)  # It has been copied.
    served = cases.serve(self.directory, {"word": ["dog", "cow"]})["output"]
    np.testing.assert_allclose(served, value[1:], rtol=1e-6)

  def test_readable_by_others_and_alone_in_its_folder(self):
    self.directory.mkdir(parents=True)  # Empty.
    umask = os.umask(0o022)
    self.addCleanup(os.umask, umask)
    self.export(self.trained()[0])
    self.assertEqual(stat.S_IMODE(self.directory.stat().st_mode), 0o755)
    self.assertEqual(os.listdir(self.directory.parent), ["7"])

  def test_a_failure_while_writing_leaves_nothing(self):
    path, _ = self.trained()
    full = OSError(28, "No space left on device")
    with mock.patch.object(tf.saved_model.Builder, "save", side_effect=full):
      with self.assertRaisesRegex(
          ValueError, "`directory` must be a path that can be written to: got "
          ".*/7 .*No space left"):
        self.export(path)
    self.assertEmpty(os.listdir(self.directory.parent))


class FrozenGraphTest(parameterized.TestCase):

  @parameterized.parameters(1, 3)
  def test_equals_inference_in_towers(self, num_towers):
    folder = self.create_tempdir().full_path
    images = cases.images()
    path, scores = cases.trained(cases.small, [images], folder,
                                 num_towers=num_towers)
    exported = export.frozen_graph(
        cases.small, path, os.path.join(folder, "new", "model.pb"),
        [cases.spec(4, 4, 3)])
    self.assertEqual(exported.outputs, {"output": "output:0"})
    for rows in (5, 1):
      got = cases.run_frozen(exported, {"images": images[:rows]})
      np.testing.assert_allclose(got["output"], scores[:rows], atol=1e-6)
    self.assertEqual(os.listdir(os.path.join(folder, "new")), ["model.pb"])
    graph_def = tf.GraphDef()
    graph_def.ParseFromString(pathlib.Path(exported.path).read_bytes())
    self.assertNoCommonElements({node.op for node in graph_def.node}, [
        "VarHandleOp", "ReadVariableOp", "VariableV2", "RestoreV2"])
    self.assertEqual({node.device for node in graph_def.node}, {""})


if __name__ == "__main__":
  absltest.main()
