"""tools/train.py with a network that is built fast, for tests of clusters."""

import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

# pylint: disable=wrong-import-position
from tools import train  # Loads TensorFlow, quietly.
import run_cases

if __name__ == "__main__":
  with run_cases.without_batch_norm():
    sys.exit(train.main(sys.argv))
