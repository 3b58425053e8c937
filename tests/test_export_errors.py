"""Tests for what towers.export refuses, before it writes anything."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import checkpoint_cases
import export_cases as cases
from towers import export


class ErrorsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.out = self.folder / "out"

  def check(self, error, message, path, model_fn=cases.small, inputs=None):
    inputs = inputs or [cases.spec(4, 4, 3)]
    for write in (export.saved_model, export.frozen_graph):
      with self.assertRaisesRegex(error, message):
        write(model_fn, path, str(self.out), inputs)
      self.assertFalse(self.out.exists())
      self.assertEmpty(list(self.folder.glob("out*")))

  def write(self, **changes):
    """Returns a checkpoint of the small model, with some variables changed."""
    values = {
        "kernel": np.ones([3, 3, 3, 5], "f"), "weights": np.ones([5, 2], "f"),
        **{f"batch_normalization/{name}": np.ones([5], "f") for name in (
            "gamma", "beta", "moving_mean", "moving_variance")}, **changes}
    return checkpoint_cases.write(self.folder / "in" / "model", {
        key: x for key, x in values.items() if x is not None})

  @parameterized.named_parameters(
      ("missing", dict(weights=None, kernel=None),
       r"`checkpoint` must hold the variables that the outputs need: .*/model "
       r"lacks 2 of 6: `kernel`, `weights`. Build `model_fn` as in training"),
      ("shape", dict(weights=np.ones([5, 3], "f")),
       r"has other shapes in 1 of 6: `weights` \(float32\[5, 3\], "
       r"not float32\[5, 2\]\)"),
      ("type", dict(weights=np.ones([5, 2])),
       r"`weights` \(float64\[5, 2\], not float32\[5, 2\]\)"),
      ("scalar_that_is_not_trained", dict(weights=None),
       "lacks 1 of 6: `weights`"),
  )
  def test_checkpoint_that_does_not_fit(self, changes, message):
    self.check(ValueError, message, self.write(**changes))

  @parameterized.parameters(
      ("index", "`checkpoint` must be whole: .*/model cannot be read"),
      ("data-00000-of-00001", "`checkpoint` must be whole: .*/model cannot"))
  def test_damaged_checkpoint(self, part, message):
    path = self.write()
    checkpoint_cases.truncate(path, part=part)
    self.check(ValueError, message, path)

  def test_missing_checkpoint(self):
    self.check(ValueError, "`checkpoint` must exist: got .*/none", str(
        self.folder / "none"))

  def test_directory_that_is_not_empty(self):
    path = self.write()
    self.out.mkdir()
    (self.out / "saved_model.pb").write_text("old")
    with self.assertRaisesRegex(
        ValueError, "`directory` must not exist or be empty: got .*/out, which "
        "holds saved_model.pb. Give a new one"):
      export.saved_model(cases.small, path, str(self.out),
                         [cases.spec(4, 4, 3)])
    self.assertEqual((self.out / "saved_model.pb").read_text(), "old")
    with self.assertRaisesRegex(ValueError, "`directory` must be a directory"):
      export.saved_model(cases.small, path, str(self.out / "saved_model.pb"),
                         [cases.spec(4, 4, 3)])

  def test_file_of_a_frozen_graph_that_exists(self):
    self.out.write_text("old")
    with self.assertRaisesRegex(ValueError, "`path` must not exist: got .*out"):
      export.frozen_graph(cases.small, self.write(), str(self.out),
                          [cases.spec(4, 4, 3)])
    self.assertEqual(self.out.read_text(), "old")

  def test_directory_that_cannot_be_made(self):
    self.out.write_text("a file")
    path = str(self.out / "model" / "1")
    with self.assertRaisesRegex(ValueError, "`directory` must be a path that "
                                "can be written to: got .*/out/model/1"):
      export.saved_model(cases.small, self.write(), path,
                         [cases.spec(4, 4, 3)])

  def test_model(self):
    self.check(ValueError, r"`inputs` must leave the batch size free: expected "
               r"\[None, 4, 4, 3\] for `images`, got \[8, 4, 4, 3\]",
               self.write(), inputs=[tf.TensorSpec([8, 4, 4, 3], tf.float32,
                                                   "images")])
    self.check(ValueError, "`model_fn` must make variables for its outputs: got"
               r" \['output'\]", self.write(), lambda x: 2 * x)

  def test_lookup_table_in_a_frozen_graph(self):
    def model_fn(x):
      table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(
          tf.constant(["a"]), tf.constant([0])), 1)
      return tf.gather(tf.get_variable("weights", [5, 2]), table.lookup(x))

    with self.assertRaisesRegex(
        ValueError, "`model_fn` must not need lookup tables for a frozen gr"):
      export.frozen_graph(model_fn, self.write(), str(self.out),
                          [tf.TensorSpec([None], tf.string)])
    self.assertFalse(self.out.exists())


if __name__ == "__main__":
  absltest.main()
