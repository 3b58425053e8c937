"""Data sets by name, as batches that are the same for any number of towers.

  data = datasets.load("cifar10", "/data/cifar-10-python.tar.gz")
  batches = data.batches("train", 128, seed=0, skip=first_step)
  images, labels, weights = tf.data.make_initializable_iterator(
      batches).get_next()
"""

from tools.datasets.arrays import classification
from tools.datasets.arrays import Split
from tools.datasets.dataset import CLASSIFICATION
from tools.datasets.dataset import Dataset
from tools.datasets.dataset import SEGMENTATION
from tools.datasets.dataset import Share
from tools.datasets.dataset import WHOLE
from tools.datasets.errors import DatasetError
from tools.datasets.loading import load
from tools.datasets.loading import NAMES

__all__ = (
    "classification",
    "CLASSIFICATION",
    "Dataset",
    "DatasetError",
    "load",
    "NAMES",
    "SEGMENTATION",
    "Share",
    "Split",
    "WHOLE",
)
