"""Tests for towers.checkpoint_files."""

import os
import pathlib

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import checkpoint_cases
from towers import checkpoint_files


class CheckpointFilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path

  def path(self, name):
    return os.path.join(self.folder, name)

  def write(self, name, seed=0, **options):
    return checkpoint_cases.write(
        self.path(name), {"w": checkpoint_cases.value(seed),
                          "step": np.int64(3)}, **options)

  def write_three(self):
    """Writes three and sets the times that they would have in training."""
    paths = [self.write(f"model.ckpt-{k}", k) for k in (1, 2, 10)]
    for k, path in enumerate(paths):
      os.utime(path + ".index", (1000 + k, 1000 + k))
    return paths

  def test_entries(self):
    file = checkpoint_files.File(self.write("model"))
    self.assertEqual(file.entries, {
        "step": ("step", [], tf.int64), "w": ("w", [2, 3], tf.float32)})
    np.testing.assert_array_equal(file.value("w"), checkpoint_cases.value(0))

  def test_the_older_format(self):
    path = self.write("old", write_version=tf.train.SaverDef.V1)
    self.assertFalse(os.path.exists(path + ".index"))
    file = checkpoint_files.File(path)
    np.testing.assert_array_equal(file.value("w"), checkpoint_cases.value(0))

  def test_object_based_checkpoint_goes_by_the_variables_names(self):
    with tf.Graph().as_default(), tf.Session() as sess:
      variable = tf.get_variable("layer/w", initializer=[1.0, 2.0])
      sess.run(variable.initializer)
      with sess.as_default():
        path = tf.train.Checkpoint(attribute=variable).save(self.path("object"))
    file = checkpoint_files.File(path)
    self.assertIn("layer/w", file.entries)
    self.assertStartsWith(file.entries["layer/w"].key, "attribute/")
    self.assertNotIn("_CHECKPOINTABLE_OBJECT_GRAPH", file.entries)
    np.testing.assert_array_equal(file.value("layer/w"), [1, 2])

  @parameterized.parameters("", ".index", ".data-00000-of-00001", ".meta")
  def test_finds(self, ending):
    path = self.write("model.ckpt-1")
    self.assertEqual(checkpoint_files.find(path + ending), path)
    self.assertEqual(checkpoint_files.find(pathlib.Path(path + ending)), path)

  @parameterized.parameters("", "/")
  def test_finds_the_last_in_a_directory(self, ending):
    paths = self.write_three()
    tf.train.update_checkpoint_state(self.folder, paths[1], paths)
    self.assertEqual(checkpoint_files.find(self.folder + ending), paths[1])

  def test_no_such_file(self):
    paths = self.write_three()
    with self.assertRaisesRegex(
        ValueError, rf"`checkpoint` must exist: got {self.path('model')}, and "
        rf"there is no {self.path('model')}.index. The last good one there is "
        f"{paths[2]}; give"):
      checkpoint_files.find(self.path("model"))

  def test_no_such_directory(self):
    with self.assertRaisesRegex(
        ValueError, "must exist: got .*/none/model, .* No checkpoint beside"):
      checkpoint_files.find(self.path("none/model"))

  def test_directory_without_a_checkpoint(self):
    with self.assertRaisesRegex(
        ValueError, f"a directory that lists one: got {self.folder}, whose "
        "file `checkpoint` is missing .* No checkpoint beside it"):
      checkpoint_files.find(self.folder)

  def test_directory_whose_list_is_gone(self):
    paths = self.write_three()
    os.remove(self.path("checkpoint"))
    with self.assertRaisesRegex(
        ValueError, f"The last good one there is {paths[2]}; give that"):
      checkpoint_files.find(self.folder)

  def test_directory_whose_last_checkpoint_is_gone(self):
    paths = self.write_three()
    os.remove(paths[2] + ".index")
    with self.assertRaisesRegex(
        ValueError, "or names files that are not there. The last good one "
        f"there is {paths[1]};"):
      checkpoint_files.find(self.folder)

  @parameterized.named_parameters(
      ("index_empty", "index", 0), ("index_cut", "index", 50),
      ("index_end_cut", "index", 130))
  def test_damaged_index(self, part, length):
    paths = self.write_three()
    checkpoint_cases.truncate(paths[2], part=part, length=length)
    checkpoint_cases.truncate(paths[1])
    with self.assertRaisesRegex(
        ValueError, f"`checkpoint` must be whole: {paths[2]} cannot be read "
        rf"\(.+\). The last good one there is {paths[0]}; give"):
      checkpoint_files.File(paths[2])

  def damage(self, path):
    data = path + ".data-00000-of-00001"
    content = bytearray(pathlib.Path(data).read_bytes())
    content[-3] ^= 1
    pathlib.Path(data).write_bytes(content)

  @parameterized.named_parameters(
      ("cut", checkpoint_cases.truncate),
      ("removed", lambda path: os.remove(path + ".data-00000-of-00001")),
      ("a_bit_flipped", None))
  def test_damaged_data(self, spoil):
    paths = self.write_three()
    (spoil or self.damage)(paths[2])
    with self.assertRaisesRegex(
        ValueError, f"must be whole: {paths[2]} cannot be read .* good one "
        f"there is {paths[1]}; give"):
      checkpoint_files.File(paths[2]).value("w")

  def test_other_errors_pass(self):
    with self.assertRaisesRegex(ValueError, "^as planned$"):
      with checkpoint_files.explained(self.write("model")):
        raise ValueError("as planned")


if __name__ == "__main__":
  tf.test.main()
