"""The order in which batches take the rows of a data set.

Everything here is a function of its arguments alone, so that a run can stop and
continue anywhere, in another process, without reading what lies before.
"""

from typing import NamedTuple, Optional

import numpy as np

# What becomes of the rows that do not fill a last batch; see `Dataset.batches`.
REMAINDERS = ("keep", "drop", "repeat")


class EpochRows(NamedTuple):
  """What one epoch reads, batch after batch."""
  rows: np.ndarray  # [M], int64, numbers of rows.
  weights: np.ndarray  # [M], float32, 0 for rows that only fill a batch up.


def num_batches(num_rows: int, batch_size: int, remainder: str) -> int:
  """Returns how many batches an epoch has."""
  if remainder == "drop":
    return num_rows // batch_size
  return -(-num_rows // batch_size)


def epoch_rows(epoch: int, *, num_rows: int, batch_size: int, remainder: str,
               seed: Optional[int]) -> EpochRows:
  """Returns which rows an epoch takes, in order.

  Args:
    epoch: Number of the epoch, from 0.
    num_rows: Number of rows in all.
    batch_size: Number of rows in a batch.
    remainder: One of `REMAINDERS`.
    seed: Chooses the order, another one each epoch; None for the order of the
      files, the same each epoch.
  """
  if seed is None:
    rows = np.arange(num_rows, dtype=np.int64)
  else:
    # NumPy promises the same numbers from this generator for ever.
    rows = np.random.RandomState([seed, epoch]).permutation(num_rows)
  size = num_rows
  if remainder != "keep":
    size = batch_size * num_batches(num_rows, batch_size, remainder)
  weights = np.arange(size) < num_rows
  # Longer than the epoch, the rows start again from the first.
  return EpochRows(np.resize(rows, size).astype(np.int64),
                   weights.astype(np.float32))
