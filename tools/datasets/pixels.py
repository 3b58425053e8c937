"""Mean and standard deviation of each channel, by which images are scaled."""

from typing import NamedTuple

import numpy as np

# Rows whose float64 copies are in memory at a time.
CHUNK = 1000


class Scale(NamedTuple):
  """What images are scaled by: `(image - mean) / deviation`."""
  mean: np.ndarray  # [C], float32, in the units of the files.
  deviation: np.ndarray  # [C], float32, above 0.


# Of the training images of ImageNet, in units of 0 to 255: the usual scale of
# photographs, whose own statistics would take a pass over all files.
PHOTOGRAPHS = Scale(np.array([123.675, 116.28, 103.53], np.float32),
                    np.array([58.395, 57.12, 57.375], np.float32))


def scale_of(images: np.ndarray) -> Scale:
  """Returns each channel's mean and standard deviation.

  A channel with a single value gets a deviation of 1e-6 in place of 0.

  Args:
    images: Array of shape `[N, H, W, C]` of any real type.
  """
  chunks = [images[start:start + CHUNK]
            for start in range(0, len(images), CHUNK)]
  count = images[..., 0].size
  mean = sum(chunk.sum(axis=(0, 1, 2), dtype=np.float64)
             for chunk in chunks) / count
  variance = sum(np.square(chunk - mean).sum(axis=(0, 1, 2))
                 for chunk in chunks) / count
  return Scale(mean.astype(np.float32),
               (np.sqrt(variance) + 1e-6).astype(np.float32))
