"""Tests for tools/export.py and tools/predict.py."""

import contextlib
import io
import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import checkpoint_cases
import export_cases as cases
import run_cases
from tools import datasets
from tools import export
from tools import predict
from tools import training
from tools import training_options


def call(tool, *arguments):
  """Returns status, standard output and standard error of a tool."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = tool.main([tool.__file__, *arguments])
  return status, out.getvalue(), err.getvalue()


def served_here(images, flag):
  """Takes the place of another process, which costs seconds."""
  return cases.serve(flag.partition("=")[2], {"images": images})


class ExportTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.logdir = str(self.folder / "run")
    self.directory = str(self.folder / "served" / "1")

  def write_run(self, *, kind=datasets.CLASSIFICATION, shape=(8, 8, 1),
                **options):
    """Writes a run that was not trained, with random values; returns it."""
    run = self.write_notes(kind, shape, **options)
    cases.trained(lambda x: export.serving_fn(run)(x)["logits"],
                  [export.random_images(run)], self.logdir, extra=["slots"])
    return run

  def write_notes(self, kind=datasets.CLASSIFICATION, shape=(8, 8, 1),
                  **options):
    """Writes what a run notes, and no checkpoint."""
    run = training_options.Run(
        training_options.Options(logdir=self.logdir, **options), kind, shape, 3,
        None, None, mean=(100.0,) * shape[-1], deviation=(40.0,) * shape[-1])
    os.makedirs(self.logdir)
    training_options.save_run(run, self.logdir)
    return run

  def export(self, *arguments):
    return call(export, f"--logdir={self.logdir}",
                f"--export_dir={self.directory}", *arguments)

  def test_a_run_of_train_in_another_process(self):
    data = run_cases.small_dataset()
    with mock.patch.object(datasets, "load", lambda *_, **__: data), \
        run_cases.without_batch_norm():
      with contextlib.redirect_stdout(io.StringIO()):
        training.run(training_options.Options(
            logdir=self.logdir, steps=2, batch_size=9, num_towers=2))
      frozen = self.folder / "new" / "frozen.pb"
      status, out, err = self.export(f"--frozen_graph={frozen}")
    self.assertEqual((status, err), (0, ""))
    self.assertRegex(
        out, r"^checkpoint: .*/run/model.ckpt-2\n"
        r"Wrote .*/served/1: logits, classes, probabilities of images.\n"
        r"Wrote .*/frozen.pb: feed serving_default_images:0, fetch logits:0, "
        r"classes:0, probabilities:0.\n"
        r"largest difference in another process: \d\.\de-\d\d \(\w+\)\n$")
    images = 20.0 * cases.images(3, (4, 4, 1))
    served = cases.serve(self.directory, {"images": images})
    np.testing.assert_allclose(served["probabilities"].sum(axis=-1), 1.0,
                               rtol=1e-5)
    np.testing.assert_array_equal(served["classes"],
                                  served["logits"].argmax(axis=-1))

  @parameterized.named_parameters(
      ("unet", dict(model="unet", kind=datasets.SEGMENTATION,
                    shape=(12, 10, 3))),
      ("float16", dict(precision="float16", num_towers=3)),
      ("bfloat16", dict(precision="bfloat16", devices=["/gpu:0"])),
      ("float32", dict(num_towers=4)),
  )
  @mock.patch("tools.export.served_outputs", served_here)
  def test_models(self, options):
    run = self.write_run(**options)
    status, out, err = self.export()
    self.assertEqual((status, err), (0, ""))
    self.assertRegex(out, "largest difference in another process: .*e[-+]")
    images = export.random_images(run)
    served = cases.serve(self.directory, {"images": images})
    self.assertEqual(served["logits"].dtype, np.float32)
    self.assertGreater(np.ptp(served["logits"]), 1e-3)
    if run.kind == datasets.SEGMENTATION:
      self.assertCountEqual(served, ["logits", "classes"])
      self.assertEqual(served["classes"].shape, (5, 12, 10))
      other = cases.serve(self.directory, {"images": images[:2, :7, :9]})
      self.assertEqual(other["logits"].shape, (2, 7, 9, 3))

  def test_a_difference_is_an_error(self):
    self.write_run()

    def wrong(images, flag):
      outputs = served_here(images, flag)
      return {**outputs, "probabilities": outputs["probabilities"] + 2e-5}

    with mock.patch.object(export, "served_outputs", wrong):
      status, out, err = self.export()
    self.assertEqual(status, 1)
    self.assertRegex(out, r"another process: 2\.\de-05 \(probabilities\)\n$")
    self.assertRegex(err, r"^export.py: .* must agree with that of the run to "
                     r"1e-05: got 2\.\de-05 in probabilities\. Do not use ")

  @parameterized.named_parameters(
      ("classes", {"classes": np.array([1])}, 1.0, "classes"),
      ("not_a_number", {"logits": np.array([[np.nan, 1.0]])}, np.inf, "logits"),
      ("relative", {"logits": np.array([[102.0, 1.0]])}, 0.02, "logits"),
      ("of_a_small_value", {"logits": np.array([[100.0, 2.0]])}, 0.01,
       "logits"),
      ("absolute", {"probabilities": np.array([0.6])}, 0.1, "probabilities"),
  )
  def test_difference(self, changes, value, output):
    right = {"logits": np.array([[100.0, 1.0]]), "classes": np.array([0]),
             "probabilities": np.array([0.5])}
    self.assertEqual(export.difference(right, right).value, 0.0)
    found = export.difference({**right, **changes}, right)
    self.assertAlmostEqual(found.value, value)
    self.assertEqual(found.output, output)

  @mock.patch("tools.export.served_outputs", served_here)
  def test_checkpoint_that_is_asked_for(self):
    self.write_run()
    other = checkpoint_cases.write(self.folder / "other", {
        name: 0.0 * value for name, value in
        checkpoint_cases.read(f"{self.logdir}/model.ckpt").items()})
    status, out, _ = self.export(f"--checkpoint={other}")
    self.assertEqual(status, 0)
    self.assertStartsWith(out, f"checkpoint: {other}\n")
    logits = cases.serve(self.directory, {
        "images": cases.images(2, (8, 8, 1))})["logits"]
    np.testing.assert_array_equal(logits, 0.0)

  @parameterized.named_parameters(
      ("unknown_flag", ["--modle=x"], "Unknown command line flag 'modle'"),
      ("positional", ["stray"], "there must be flags only: got stray"),
      ("no_logdir", ["--logdir="], "`--logdir` must be given"),
      ("no_export_dir", ["--export_dir="], "`--export_dir` must be given"),
      ("no_run", ["--logdir=/none"], "must be the directory of a run of train"),
      ("no_checkpoint", ["--checkpoint=/none/m"], "`--checkpoint` must be the"),
      ("no_best", ["--best"], "`--logdir` must hold a checkpoint: found none"),
      ("not_empty", ["--export_dir=/"], "`directory` must not exist or be"),
      ("checkpoint_of_another_model", [], "`checkpoint` must hold the variabl"),
      ("frozen", [f"--frozen_graph={__file__}"], "`--frozen_graph` must not "),
  )
  def test_rejects(self, arguments, message):
    self.write_notes()
    checkpoint_cases.write(f"{self.logdir}/model.ckpt", {"w": np.ones([2])})
    tf.train.update_checkpoint_state(
        self.logdir, f"{self.logdir}/model.ckpt")
    status, out, err = self.export(*arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^export.py: .*{message}")
    self.assertLen(err.splitlines(), 1)
    self.assertFalse(os.path.exists(self.directory))

  def test_rejects_a_damaged_checkpoint(self):
    self.write_run()
    checkpoint_cases.truncate(f"{self.logdir}/model.ckpt")
    status, out, err = self.export()
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(
        err, "^export.py: `--logdir` must hold a last checkpoint that can be "
        "read: .*model.ckpt is damaged")
    self.assertFalse(os.path.exists(self.directory))


class PredictTest(parameterized.TestCase):
  """What works, in a process of its own, is tested with tools/export.py."""

  @parameterized.named_parameters(
      ("no_images", ["--saved_model=x"], "`--images` and `--output` must be"),
      ("no_model", [], "`--saved_model` or `--frozen_graph` must be given"),
      ("missing_file", ["--saved_model=x", "--images=/none.npy"],
       "`--images` must be a file as `numpy.save` writes it: got /none.npy"),
      ("missing_model", ["--saved_model=/none"],
       "`--saved_model` must be the directory of a SavedModel.*got /none"),
      ("no_graph", [f"--frozen_graph={__file__}", "--fetch=logits:0"],
       "`--frozen_graph` must be a graph with serving_default_images:0 and "
       "logits:0: got .*test_export_tool.py"),
  )
  def test_rejects(self, arguments, message):
    folder = self.create_tempdir().full_path
    np.save(f"{folder}/images.npy", cases.images())
    given = [] if "no_images" in self.id() else [
        f"--images={folder}/images.npy", f"--output={folder}/out.npz"]
    status, out, err = call(predict, *given, *arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^predict.py: {message}")
    self.assertLen(err.splitlines(), 1)


if __name__ == "__main__":
  absltest.main()
