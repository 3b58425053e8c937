"""Settings that must hold before any test builds a graph."""

import os
import pathlib
import signal
import sys

# TensorFlow reads this when it is imported; it keeps start-up noise away.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Shells start what runs in the background with Ctrl-C ignored, and `nohup` what
# it runs with SIGHUP ignored, which the processes of tests would inherit. What
# has a handler here is no longer ignored there.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
  signal.signal(signal.SIGHUP, lambda *unused: None)

TESTS = pathlib.Path(__file__).resolve().parent

# `models` and `tools` are not installed, they run from the checkout; `testing`
# lies beside this file. Entries that are there already are left where they are.
sys.path[:0] = [
    folder for folder in (str(TESTS), str(TESTS.parent))
    if folder not in sys.path
]

# pylint: disable=wrong-import-position
from absl import flags
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

# Absl's own `main` would parse the flags; under pytest nobody does, and without
# it `create_tempdir` fails. All flags have their defaults.
flags.FLAGS.mark_as_parsed()
