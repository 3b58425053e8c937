"""Tests for tools.startup."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]


class LoadTensorflowTest(absltest.TestCase):

  def test_nothing_is_written_but_standard_error_stays_open(self):
    environment = dict(os.environ)
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # Set by the tests.
    result = subprocess.run(
        [sys.executable, "-c",
         "import sys\n"
         "from tools import startup\n"
         "startup.load_tensorflow()\n"
         "import tensorflow.compat.v1 as tf\n"
         "tf.disable_v2_behavior()\n"
         "with tf.Session() as sess:\n"
         "  sess.run(tf.zeros([]))\n"
         "print('open', file=sys.stderr)\n"],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True,
        check=True)
    self.assertEqual(result.stdout, "")
    self.assertEqual(result.stderr, "open\n")


if __name__ == "__main__":
  absltest.main()
