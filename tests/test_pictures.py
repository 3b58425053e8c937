"""Tests for tools.pictures; what it shows of a run is tested with training."""

import os
import pathlib
from unittest import mock

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import run_cases
from tools import logdirs
from tools import pictures


def write(logdir, step, values):
  """Writes as a run that starts at `step`."""
  with logdirs.event_writer(logdir, step) as writer:
    for at, value in values.items():
      writer.add_summary(tf.Summary(value=[
          tf.Summary.Value(tag="loss", simple_value=value)]), at)


class PicturesTest(parameterized.TestCase, tf.test.TestCase):

  def test_curves_of_a_run_that_was_killed(self):
    """What it wrote after its last checkpoint, step 4, was done again."""
    logdir = self.create_tempdir().full_path
    with mock.patch("time.time", return_value=1e9):
      write(logdir, 0, {2: 1.0, 4: 2.0, 6: 3.0, 7: 9.0})
    with mock.patch("time.time", return_value=1e9 + 50):
      write(logdir, 4, {6: 4.0, 8: 5.0})
    curves = pictures.read_curves(logdir)
    self.assertCountEqual(curves, ["loss"])
    self.assertAllEqual(curves["loss"], [[2, 4, 6, 8], [1.0, 2.0, 4.0, 5.0]])

  def test_curves_of_a_file_that_was_cut(self):
    logdir = self.create_tempdir().full_path
    write(logdir, 0, {2: 1.0, 4: 2.0})
    path, = pathlib.Path(logdir).glob("events.*")
    path.write_bytes(path.read_bytes()[:-3])
    self.assertAllEqual(pictures.read_curves(logdir)["loss"], [[2], [1.0]])

  def test_draws(self):
    logdir = self.create_tempdir().full_path
    self.assertIsNone(pictures.draw_curves(logdir))
    write(logdir, 0, {2: 1.0, 4: 2.0})
    paths = [pictures.draw_curves(logdir),
             pictures.draw_confusion(np.array([[3, 0], [1, 0]]), logdir,
                                     data=run_cases.small_dataset()),
             pictures.draw_confusion(np.eye(50), logdir,
                                     data=run_cases.small_dataset())]
    for path in paths:
      with open(path, "rb") as file:
        image = tf.io.decode_png(file.read())
      with self.session() as sess:
        pixels = sess.run(image)
      self.assertGreater(pixels[..., :3].std(), 5.0)
    self.assertCountEqual(
        [name for name in os.listdir(logdir) if name.endswith("png")],
        ["curves.png", "confusion.png"])

  def test_draws_nothing_without_matplotlib(self):
    logdir = self.create_tempdir().full_path
    write(logdir, 0, {2: 1.0})
    with mock.patch.dict("sys.modules", matplotlib=None):
      self.assertIsNone(pictures.draw_curves(logdir))
      self.assertIsNone(pictures.draw_confusion(
          np.eye(2), logdir, data=run_cases.small_dataset()))
    self.assertLen(os.listdir(logdir), 1)


if __name__ == "__main__":
  tf.test.main()
