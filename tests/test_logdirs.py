"""Tests for tools.logdirs."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from tools import logdirs
from tools import training_options
import towers

# Starts a run ten times and kills each at a random moment, then lets one come
# to its end. The processes are forked, since TensorFlow takes long to load.
KILLER = """
import os, random, signal, sys, time
sys.path.insert(0, {root!r})
from tools import train
random.seed({seed})
def start():
  child = os.fork()
  if not child:
    status = train.main(["train.py", "--logdir=" + {logdir!r}, "--steps=45",
                         "--evaluate_every=1", "--log_every=1",
                         "--batch_size=10", "--summarize_images=1"])
    os._exit(status)
  return child
for _ in range(10):
  child = start()
  deadline = time.time() + 60
  # The build takes seconds, what is written matters.
  first = random.random() < 0.3
  while not os.path.exists({logdir!r} + "/run.json") and (
      time.time() < deadline):
    time.sleep(0.01)
  time.sleep(random.uniform(0.0, {seconds}))
  os.kill(child, signal.SIGKILL)
  _, status = os.waitpid(child, 0)
  print("killed:", os.WIFSIGNALED(status), flush=True)
_, status = os.waitpid(start(), 0)
sys.exit(os.WEXITSTATUS(status))
"""


class LogdirsTest(parameterized.TestCase, tf.test.TestCase):

  def logdir(self):
    return self.create_tempdir().full_path

  def saved(self, steps=(1,)):
    """Returns a directory with checkpoints of a variable, and the variable."""
    logdir = self.logdir()
    with tf.Graph().as_default():
      tf.get_variable("v", [1000], initializer=tf.random_normal_initializer())
      saver = tf.train.Saver()
      with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        for step in steps:
          saver.save(sess, f"{logdir}/{logdirs.NAME}", step)
    return logdir

  def restore(self, logdir):
    with tf.Graph().as_default():
      tf.get_variable("v", [1000])
      with tf.Session() as sess:
        logdirs.restore(sess, tf.train.Saver(), logdirs.latest(logdir))

  def test_own_directory_by_default(self):
    parent = self.logdir()
    with mock.patch.object(tempfile, "tempdir", parent):
      made = [os.path.basename(logdirs.prepare(training_options.Options()))
              for _ in range(2)]
    self.assertCountEqual(os.listdir(parent), made)
    self.assertNotEqual(*made)

  def test_latest(self):
    self.assertIsNone(logdirs.latest(self.logdir()))
    logdir = self.saved(steps=(1, 5))
    self.assertEqual(logdirs.latest(logdir), f"{logdir}/model.ckpt-5")
    self.restore(logdir)

  @parameterized.parameters("missing", "short_index", "short_data", "flipped",
                            "state")
  def test_rejects_damage_and_names_the_last_good(self, damage):
    logdir = pathlib.Path(self.saved(steps=(1, 5)))
    data = logdir / "model.ckpt-5.data-00000-of-00001"
    index = logdir / "model.ckpt-5.index"
    if damage == "missing":
      index.unlink()
    elif damage == "short_index":
      index.write_bytes(index.read_bytes()[:20])
    elif damage == "short_data":
      data.write_bytes(data.read_bytes()[:20])
    elif damage == "flipped":
      content = bytearray(data.read_bytes())
      content[-7] ^= 255
      data.write_bytes(bytes(content))
    else:
      (logdir / "checkpoint").write_text("???")
    with self.assertRaisesRegex(
        training_options.UsageError,
        "`--logdir` must hold .*checkpoint.*(model.ckpt-5|checkpoint).*"
        f"last good one.*{logdir}/model.ckpt-"):
      self.restore(str(logdir))

  def test_best(self):
    logdir = self.logdir()
    self.assertIsNone(logdirs.read_best(logdir))
    with tf.Graph().as_default():
      variable = tf.get_variable("v", [])
      saver = tf.train.Saver(max_to_keep=1)
      with tf.Session() as sess:
        for step in (3, 8):
          variable.load(float(step), sess)
          logdirs.write_best(logdirs.Best(step, step / 10), sess, saver, logdir)
    self.assertEqual(logdirs.read_best(logdir), logdirs.Best(8, 0.8))
    folder = pathlib.Path(logdir, "best")
    self.assertEqual(tf.train.load_variable(str(folder), "v"), 8.0)
    self.assertLen(list(folder.glob("*.index")), 1)
    (folder / "score.json").write_text('{"step":')
    self.assertIsNone(logdirs.read_best(logdir))

  def test_killed_at_any_moment_a_run_continues(self):
    logdir = self.logdir()
    root = str(pathlib.Path(logdirs.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", KILLER.format(
            root=root, logdir=logdir, seed=os.getpid(), seconds=1.5)],
        capture_output=True, text=True, timeout=280)
    self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
    self.assertNotIn("Traceback", result.stderr)
    killed = result.stdout.count("killed: True")
    self.assertGreaterEqual(killed, 1, result.stdout)
    self.assertIn("test accuracy: ", result.stdout)
    self.assertEndsWith(logdirs.latest(logdir), "-45")
    run = json.loads(pathlib.Path(logdir, "run.json").read_text())
    self.assertEqual(run["options"]["steps"], 45)

  @parameterized.parameters(
      tf.errors.UnavailableError(None, None, "socket closed"),
      tf.errors.AbortedError(None, None, "just restarted"),
      towers.cluster.ClusterError("ps 0 has been gone"))
  def test_disk_is_not_to_blame_for_a_cluster(self, error):
    """A process that dies while a checkpoint is written is no full disk."""
    with self.assertRaisesRegex(type(error), "closed|restarted|gone"):
      with logdirs.writing("/logdir"):
        raise error
    with self.assertRaisesRegex(logdirs.UsageError, "must have room"):
      with logdirs.writing("/logdir"):
        raise tf.errors.ResourceExhaustedError(None, None, "no space")

  def test_full_disk_ends_with_one_line(self):
    """A limit on the size of files fails like a disk without room."""
    root = str(pathlib.Path(logdirs.__file__).parents[1])
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"sys.path.insert(0, {root!r})\n"
        "from tools import train\n"
        "sys.exit(train.main(['train.py', '--steps=1', '--batch_size=8', "
        f"'--logdir={self.logdir()}']))")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True,
                            text=True, timeout=120)
    self.assertEqual(result.returncode, 2, result.stderr)
    self.assertRegex(
        result.stderr.splitlines()[-1], "^train.py: `--logdir` must have room "
        r"and stay writable: could not write to .*\(.*\)\. What was saved")
    self.assertNotIn("Traceback", result.stderr)


if __name__ == "__main__":
  tf.test.main()
