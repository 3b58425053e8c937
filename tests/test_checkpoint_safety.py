"""Tests that whoever is killed while writing leaves a good checkpoint."""

import os
import pathlib
import subprocess
import sys

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import checkpoint_cases
import testing
import towers
from towers import checkpoint_files

# Saves in a loop, each time other values; is killed at a moment that differs in
# each round. All rounds share the time that it takes to import TensorFlow.
_WRITER = """
import os, sys, time
import tensorflow.compat.v1 as tf
import towers

tf.disable_v2_behavior()
folder, rounds = sys.argv[1], int(sys.argv[2])

def write(path):
  w = tf.get_variable("w", [500, 500], initializer=tf.zeros_initializer())
  others = [tf.get_variable(f"w{k}", [500, 500]) for k in range(4)]
  step = tf.train.get_or_create_global_step()
  move = tf.group(tf.assign_add(step, 1), tf.assign_add(w, tf.ones_like(w)))
  saver = towers.checkpoints.Saver(max_to_keep=2)
  with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    while True:
      sess.run(move)
      # Now one name for each step, now one for two.
      saver.save(sess, path, sess.run(step) // 2, write_meta_graph=False)

for k in range(rounds):
  path = os.path.join(folder, str(k), "model.ckpt")
  os.makedirs(os.path.dirname(path))
  child = os.fork()
  if not child:
    try:
      write(path)
    finally:
      os._exit(1)
  while not os.path.exists(os.path.join(folder, str(k), "checkpoint")):
    time.sleep(0.01)
  time.sleep(0.05 + 0.06 * k)
  os.kill(child, 9)
  os.waitpid(child, 0)
"""


class _Killed(BaseException):
  """Stands for the end of the process."""


class KilledWriterTest(parameterized.TestCase, tf.test.TestCase):

  def test_at_any_moment(self):
    folder = self.create_tempdir().full_path
    rounds = 3
    root = pathlib.Path(towers.__file__).resolve().parent.parent
    subprocess.run(
        [sys.executable, "-c", _WRITER, folder, str(rounds)], check=True,
        timeout=120, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(root)})
    for k in range(rounds):
      last = tf.train.latest_checkpoint(os.path.join(folder, str(k)))
      self.assertIsNotNone(last)
      values = checkpoint_cases.read(last)  # Raises if it is not whole.
      self.assertAllEqual(values["w"],
                          np.full([500, 500], values["global_step"]))
      self.assertEqual(
          towers.checkpoints.latest_good(os.path.join(folder, str(k))), last)


class ReplacingTest(parameterized.TestCase, tf.test.TestCase):
  """A checkpoint that is written over one of the same name."""

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    self.w = tf.get_variable("w", initializer=[1.0, 2.0])
    self.saver = towers.checkpoints.Saver()

  def path(self, name):
    return os.path.join(self.folder, name)

  def files(self):
    return sorted(os.listdir(self.folder))

  def restored(self):
    """Returns `w` of what TensorFlow takes for the last checkpoint."""
    last = tf.train.latest_checkpoint(self.folder)
    return checkpoint_cases.read(last)["w"]

  def kill_while_writing(self, damage):
    """Lets the process end when `damage` has become of the files."""
    original = tf.train.Saver.save

    def save(saver, sess, path, step=None, *unused, **options):
      del saver, sess, unused, options
      damage(path if step is None else f"{path}-{step}")
      raise _Killed()

    tf.train.Saver.save = save
    self.addCleanup(setattr, tf.train.Saver, "save", original)
    return lambda: setattr(tf.train.Saver, "save", original)

  @parameterized.product(
      step=(None, 7),
      damage=(
          lambda path: os.remove(path + ".index"),
          checkpoint_cases.truncate,
          # New values beside an index of old ones.
          lambda path: pathlib.Path(path + ".data-00000-of-00001").write_bytes(
              np.array([8.0, 9.0], "f").tobytes())))
  def test_the_old_one_stays_the_last_until_the_new_one_is_whole(
      self, step, damage):
    with testing.session(initialize=True) as sess:
      self.saver.save(sess, self.path("model.ckpt"), step)
      before = self.files()
      sess.run(self.w.assign([3.0, 4.0]))
      undo = self.kill_while_writing(damage)
      with self.assertRaisesRegex(_Killed, "^$"):
        self.saver.save(sess, self.path("model.ckpt"), step)
      self.assertAllEqual(self.restored(), [1, 2])
      self.assertEqual(
          checkpoint_cases.read(towers.checkpoints.latest_good(self.folder)
                               )["w"].tolist(), [1, 2])
      undo()
      self.saver.save(sess, self.path("model.ckpt"), step)
      self.assertAllEqual(self.restored(), [3, 4])
      self.assertEqual(self.files(), before)  # No spare is left.

  def test_nothing_is_copied_for_a_new_name(self):
    with testing.session(initialize=True) as sess:
      self.saver.save(sess, self.path("model.ckpt"), 1)
      undo = self.kill_while_writing(lambda path: None)
      with self.assertRaisesRegex(_Killed, "^$"):
        self.saver.save(sess, self.path("model.ckpt"), 2)
      undo()
      self.assertNotIn("spare", " ".join(self.files()))

  def test_a_session_that_continues(self):
    """It saves the step that it has restored once more, by the same name."""
    for _ in range(2):
      tf.reset_default_graph()
      step = tf.train.get_or_create_global_step()
      tf.get_variable("w", initializer=[1.0, 2.0])
      scaffold = tf.train.Scaffold(saver=towers.checkpoints.Saver())
      with tf.train.MonitoredTrainingSession(
          checkpoint_dir=self.folder, scaffold=scaffold,
          config=testing.config(), save_checkpoint_steps=100) as sess:
        sess.run(step)
    self.assertNotIn("spare", " ".join(self.files()))
    self.assertAllEqual(self.restored(), [1, 2])

  @parameterized.parameters(0, np.int64(0), "tensor")
  def test_kinds_of_steps(self, step):
    saver = towers.checkpoints.Saver(pad_step_number=True)
    step = tf.constant(0) if step == "tensor" else step
    with testing.session(initialize=True) as sess:
      for _ in range(2):
        path = saver.save(sess, self.path("model"), step, "list",
                          write_state=True, write_meta_graph=False)
        self.assertEqual(path, self.path("model-00000000"))
    self.assertEqual(self.files(), [
        "list", "model-00000000.data-00000-of-00001", "model-00000000.index"])
    self.assertEqual(tf.train.latest_checkpoint(self.folder, "list"), path)

  def test_without_a_list(self):
    with testing.session(initialize=True) as sess:
      path = self.saver.save(sess, self.path("model"))
      self.saver.save(sess, self.path("model"), write_state=False)
    self.assertEqual(tf.train.latest_checkpoint(self.folder), path)
    self.assertAllEqual(self.restored(), [1, 2])


class LatestGoodTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    self.paths = []
    for k in (1, 2, 10):
      path = os.path.join(self.folder, f"model.ckpt-{k}")
      self.paths.append(
          checkpoint_cases.write(path, {"w": checkpoint_cases.value(k)}))
      os.utime(path + ".index", (1000 + k, 1000 + k))

  def latest_good(self):
    return towers.checkpoints.latest_good(self.folder)

  def test_is_the_last_in_the_list(self):
    self.assertEqual(self.latest_good(), self.paths[2])
    tf.train.update_checkpoint_state(self.folder, self.paths[1], self.paths)
    self.assertEqual(self.latest_good(), self.paths[1])

  def test_else_the_newest_that_is_whole(self):
    checkpoint_cases.truncate(self.paths[2])
    self.assertEqual(self.latest_good(), self.paths[1])
    os.remove(self.paths[1] + ".data-00000-of-00001")
    self.assertEqual(self.latest_good(), self.paths[0])
    checkpoint_cases.truncate(self.paths[0], part="index", length=40)
    self.assertIsNone(self.latest_good())

  def test_no_directory(self):
    self.assertIsNone(
        towers.checkpoints.latest_good(os.path.join(self.folder, "none")))

  @parameterized.named_parameters(
      ("missing", None), ("empty", b""), ("no_text", b"\xff\xfe\x00\x01"),
      ("cut_off", b'model_checkpoint_path: "mod'),
      ("names_another", b'model_checkpoint_path: "model.ckpt-9"'))
  def test_a_damaged_list(self, content):
    state = pathlib.Path(self.folder, "checkpoint")
    os.remove(state)
    if content is not None:
      state.write_bytes(content)
    self.assertEqual(self.latest_good(), self.paths[2])
    with self.assertRaisesRegex(
        ValueError, f"got {self.folder}, whose file `checkpoint` is missing "
        f"or damaged, or names .* good one there is {self.paths[2]}; give"):
      checkpoint_files.find(self.folder)

  def test_no_flipped_bit_passes(self):
    """TensorFlow's checksums cover all that makes a difference."""
    path, expected = self.paths[2], checkpoint_cases.value(10)
    errors = 0
    for part in ("index", "data-00000-of-00001"):
      file = pathlib.Path(f"{path}.{part}")
      good = file.read_bytes()
      for k in range(len(good)):
        file.write_bytes(good[:k] + bytes([good[k] ^ 4]) + good[k + 1:])
        try:
          np.testing.assert_array_equal(
              checkpoint_files.File(path).value("w"), expected)
        except ValueError as error:
          errors += 1
          self.assertRegex(
              str(error), f"must be whole: {path} cannot be read .* The last "
              f"good one there is {self.paths[1]}; give")
      file.write_bytes(good)
    self.assertGreater(errors, 50)


if __name__ == "__main__":
  tf.test.main()
