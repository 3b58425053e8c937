"""Loads TensorFlow for scripts without its start-up messages on the screen."""

import importlib
import os


def load_tensorflow() -> None:
  """Imports TensorFlow, with standard error closed to it while it loads.

  Call it before the script's own `import tensorflow`. A failing import raises
  as usual. `TF_CPP_MIN_LOG_LEVEL` may be set in the environment to see the
  messages that TensorFlow writes later.
  """
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  # TensorFlow 2.21 ignores that variable for what its shared libraries write
  # while they are loaded, straight to file descriptor 2.
  standard_error = os.dup(2)
  try:
    with open(os.devnull, "w") as nowhere:
      os.dup2(nowhere.fileno(), 2)
    tf = importlib.import_module("tensorflow.compat.v1")
  finally:
    os.dup2(standard_error, 2)
    os.close(standard_error)
  # Python warnings of deprecated names: graph mode is what these scripts want.
  tf.logging.set_verbosity(tf.logging.ERROR)
