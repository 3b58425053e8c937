"""What every task says: what to train with, and what to count in tests.

All else about a run, such as its towers, its checkpoints and its flags, is the
same for all tasks, and knows of them only what `Task` has.
"""

import functools
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Optional
from typing import Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from tools import datasets
from tools import pictures
from tools import precision
from tools import scores

# Constructors that take the learning rate, and its default.
OPTIMIZERS = {
    "momentum": (functools.partial(tf.train.MomentumOptimizer, momentum=0.9),
                 0.1),
    "adam": (tf.train.AdamOptimizer, 0.001),
    "sgd": (tf.train.GradientDescentOptimizer, 0.1),
}


class Part(NamedTuple):
  """What is trained by a loss of its own.

  Fields:
    loss: Name of the loss, one of `Losses.values`.
    scope: Variable scope of what it trains; "" for all.
  """
  loss: str
  scope: str = ""

  def has(self, name: str) -> bool:
    """Whether a variable or op of this name belongs to the part."""
    return not self.scope or f"/{self.scope}/" in f"/{name}"


class Losses(NamedTuple):
  """What a tower's batch comes to, without weight decay.

  Fields:
    values: Scalar tensors by name, means over what counts.
    weight: Scalar tensor, how much counts, so that towers with unequal shares
      make the loss of the whole batch; None for the number of images.
  """
  values: Dict[str, tf.Tensor]
  weight: Optional[tf.Tensor] = None


# A test batch: labels, and the outputs of the network by name.
Rows = Tuple[np.ndarray, Dict[str, np.ndarray]]


class Task:
  """What is learned, and how; a subclass for each way to learn.

  `options` are always `training_options.Options`, and `data` the data set.

  Attributes:
    kind: The kind of data set that it takes.
    networks: By name, the networks that learn it.
    parts: What is trained by which loss, all in the same step.
    batch_size: How many images a step takes by default.
    optimizer: Name of the default optimizer.
    optimizers: Constructors and default learning rates.
    summarize_images: How many pictures to show by default.
    test_splits: The splits that tests run over, in order.
  """
  kind: str = datasets.CLASSIFICATION
  networks: Mapping[str, Any] = {}
  parts: Tuple[Part, ...] = (Part("loss"),)
  batch_size: int = 64
  optimizer: str = "momentum"
  optimizers: Mapping[str, Tuple[Callable[..., Any], float]] = OPTIMIZERS
  summarize_images: int = 0
  test_splits: Tuple[str, ...] = ("test",)

  # --- What fits ---

  def misfit(self, model: str, data: datasets.Dataset) -> Optional[str]:
    """Returns why `model` cannot learn `data`, in one line; None if it can.

    The kind of the data set is the task's.
    """
    del model, data
    return None

  def refusal(self, options: Any) -> Optional[str]:
    """Returns which option makes no sense, in one line; None without such."""
    del options
    return None

  # --- Training ---

  def batches(self, data: datasets.Dataset, options: Any,
              first_batch: tf.Tensor,
              share: datasets.Share) -> tf.data.Dataset:
    """Makes training batches from the number `first_batch` on, or a share.

    Returns:
      A data set with elements `(images, labels, weights, *others)`, all of
      which have a row per image and are dealt out among the towers.
    """
    return data.batches(
        "train", options.batch_size, seed=options.seed, augment=options.augment,
        remainder=options.remainder, skip=first_batch, share=share)

  def losses(self, data: datasets.Dataset, options: Any,
             *batch: tf.Tensor) -> Losses:
    """Returns the losses of a tower's part of a batch of `batches`."""
    raise NotImplementedError

  # --- Tests ---

  def test_batches(self, data: datasets.Dataset, options: Any,
                   split: str) -> tf.data.Dataset:
    """Makes batches of all images of a split, each once, in one order.

    Returns:
      A data set with elements `(images, labels, *others)`.
    """
    batches = data.batches(
        split, options.batch_size, augment=False, repeat=False, shuffle=False,
        remainder="keep")
    return batches.map(lambda images, labels, weights: (images, labels))

  def outputs(self, data: datasets.Dataset, options: Any, images: tf.Tensor,
              *others: tf.Tensor) -> Dict[str, tf.Tensor]:
    """Returns what tests are to know of a tower's images, with a row each."""
    raise NotImplementedError

  def measure(self, rows: Callable[[str], Iterator[Rows]],
              data: datasets.Dataset) -> Any:
    """Returns what was found, for `score` and `draw`.

    Args:
      rows: Takes a name of `test_splits` and yields its batches.
      data: The data set.
    """
    raise NotImplementedError

  def score(self, found: Any, data: datasets.Dataset) -> scores.Score:
    """Returns the score of what `measure` found."""
    raise NotImplementedError

  def draw(self, found: Any, logdir: str,
           data: datasets.Dataset) -> Optional[str]:
    """Draws what `measure` found; returns the path, None if it cannot."""
    return pictures.draw_confusion(found, logdir, data=data)

  def summary(self, images: tf.Tensor, labels: tf.Tensor,
              outputs: Dict[str, tf.Tensor], data: datasets.Dataset,
              count: int) -> tf.Tensor:
    """Makes an image summary of the first images of a test batch."""
    return pictures.summary(
        images, labels, predictions=outputs.get("predictions"), data=data,
        count=count)

  # --- What subclasses share ---

  def network(self, options: Any,
              data: Any) -> Optional[Callable[..., tf.Tensor]]:
    """Returns what makes class scores, in float32, of images.

    None if the task has no classes.
    """
    del options, data
    return None

  def computed(self, options: Any, network: Callable[..., tf.Tensor]
              ) -> Callable[..., tf.Tensor]:
    """Returns the network in the precision that the options ask for."""
    return precision.computed_in(options.precision, network)
