"""Reads pickles of arrays and plain types, and refuses all others.

A pickle may name any function of any module, which unpickling calls. Here it
may name only those that NumPy's arrays and Python's bytes are stored with.
"""

import io
import pickle
from typing import Any

import numpy as np

_EMPTY = np.zeros([0])


def _encode(text: str, encoding: str) -> bytes:
  """Does what protocols below 3 store bytes as, and nothing else."""
  if encoding not in ("latin1", "latin-1"):
    raise pickle.UnpicklingError(
        f"`encoding` must be latin1: got {encoding!r}.")
  return text.encode("latin1")


# Taken from an array, since the modules that they stand in have moved.
_FUNCTIONS = {
    "_reconstruct": _EMPTY.__reduce__()[0],
    "scalar": np.float64(0).__reduce__()[0],
    "_frombuffer": _EMPTY.__reduce_ex__(5)[0],
}
_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.{module}", name): function
       for core in ("core", "_core") for module in ("multiarray", "numeric")
       for name, function in _FUNCTIONS.items()},
}


class _Unpickler(pickle.Unpickler):
  """Finds what `_ALLOWED` lists only."""

  def find_class(self, module: str, name: str) -> Any:
    try:
      return _ALLOWED[module, name]
    except KeyError:
      raise pickle.UnpicklingError(
          f"`{module}.{name}` must not stand in a pickle of arrays and plain "
          f"types: expected {sorted('.'.join(key) for key in _ALLOWED)[:3]} "
          "or the like.") from None


def loads(content: bytes) -> Any:
  """Returns the object in a pickle of Python 2 or 3, with texts of 2 as bytes.

  Raises:
    pickle.UnpicklingError: If it holds more than arrays and plain types, or is
      damaged.
  """
  try:
    return _Unpickler(io.BytesIO(content), encoding="bytes").load()
  except pickle.UnpicklingError:
    raise
  except Exception as error:  # Damaged pickles fail in many ways.
    raise pickle.UnpicklingError(
        f"`content` must be a whole pickle: got {error!r}.") from error
