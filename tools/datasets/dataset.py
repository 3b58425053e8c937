"""What all data sets look like to a training script: batches by `tf.data`."""

import dataclasses
from typing import Callable, NamedTuple, Optional, Tuple, Union

import numpy as np
import tensorflow.compat.v1 as tf

from tools.datasets import augmentation
from tools.datasets import order
from tools.datasets import pixels
from tools.datasets import tables

CLASSIFICATION = "classification"
SEGMENTATION = "segmentation"

SPLITS = ("train", "test")


class Share(NamedTuple):
  """Which rows of each batch: those of tower `index` of `count`.

  A batch is dealt out as `towers.build_towers` does.
  """
  index: int
  count: int

  def bounds(self, batch_size: int) -> Tuple[int, int]:
    """Returns the number of the first row, and of the one after the last."""
    size, more = divmod(batch_size, self.count)
    first = self.index * size + min(self.index, more)
    return first, first + size + (self.index < more)


WHOLE = Share(0, 1)

# Each seed and epoch must give numbers of their own in 64 bits.
MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """Images with labels, for training and for tests.

  Attributes:
    name: What the data set was loaded as.
    kind: `CLASSIFICATION` (one label per image) or `SEGMENTATION` (one label
      per pixel).
    image_shape: `(H, W, C)` of the images in batches.
    num_classes: Labels are from 0 to one less, or the void label.
    train: The rows to train on.
    test: The rows to test on.
    scale: Mean and standard deviation of the channels, in units of the files;
      images in batches are `(image - mean) / deviation`.
    augment: Changes a training image at random; takes image, label and seed as
      the functions of `augmentation` do.
    prepare: What happens to an image that is not augmented, such as a cut to
      the size of the batches.
    void_label: Label of pixels that count for nothing; None without such.
    class_names: One name per class; None where they are not known.
  """
  name: str
  kind: str
  image_shape: Tuple[int, int, int]
  num_classes: int
  train: tables.Table
  test: tables.Table
  scale: pixels.Scale
  augment: Callable[..., augmentation.ImageAndLabel] = augmentation.keep
  prepare: Callable[..., augmentation.ImageAndLabel] = (
      lambda image, label: (image, label))
  void_label: Optional[int] = None
  class_names: Optional[Tuple[str, ...]] = None

  def size(self, split: str) -> int:
    """Returns the number of images in the split `train` or `test`."""
    return len(self._table(split))

  def num_batches(self, split: str, batch_size: int, *,
                  remainder: Optional[str] = None) -> int:
    """Returns the number of batches in an epoch of `batches`."""
    if remainder is None:
      remainder = _default_remainder(split)
    return order.num_batches(self.size(split), batch_size, remainder)

  def batches(self, split: str, batch_size: int, *, seed: int = 0,
              augment: Optional[bool] = None, repeat: Optional[bool] = None,
              remainder: Optional[str] = None, shuffle: Optional[bool] = None,
              skip: Union[int, tf.Tensor] = 0,
              share: Share = WHOLE) -> tf.data.Dataset:
    """Makes batches of images that are ready for a model.

    The same arguments give the same batches, in every process: the order
    depends on the seed and the epoch alone, and how an image is augmented on
    the seed, the epoch and the image. Reading runs ahead of training, on the
    CPU.

    Args:
      split: `train` or `test`.
      batch_size: Number of images in a batch, of all towers together.
      seed: Chooses order and augmentation, from 0 to 2**31 - 1.
      augment: Whether images are changed at random. Default: for training.
      repeat: Whether epochs follow each other for ever. Default: for training.
      remainder: What becomes of the images that do not fill the last batch of
        an epoch: "keep" gives a short batch, "drop" leaves them out, "repeat"
        fills the batch with images of that epoch, at weight 0. Default: "drop"
        for training, "keep" for tests.
      shuffle: Whether each epoch has a new random order, in place of the order
        of the files. Default: for training.
      skip: Number of batches to leave out at the start, such as the steps that
        a run which continues has behind it; costs no reading. An int, or an
        int64 scalar tensor, with which the iterator must be initializable.
      share: Which rows of each batch to read, where the others are read
        elsewhere; with full batches only, so not with a remainder of "keep".

    Returns:
      A data set with elements `(images, labels, weights)`: float32 tensors of
      shape `[B, H, W, C]`, int64 labels of shape `[B]`, or `[B, H, W]` for
      segmentation, and float32 weights of shape `[B]`, 1 for each image but for
      those which only fill up a batch. B is static unless `remainder` is
      "keep".

    Raises:
      ValueError: If an argument is out of range, or no batch can be filled.
    """
    training = split == "train"
    augment = training if augment is None else augment
    repeat = training if repeat is None else repeat
    shuffle = training if shuffle is None else shuffle
    if remainder is None:
      remainder = _default_remainder(split)
    table = self._table(split)
    _check(table, batch_size, seed, remainder, skip)
    _check_share(share, batch_size, remainder)
    steps = order.num_batches(len(table), batch_size, remainder)
    skip = tf.cast(skip, tf.int64)
    first, end = share.bounds(batch_size)
    first_epoch, first_row = skip // steps, skip % steps * (end - first)

    def rows_of(epoch):
      found = order.epoch_rows(
          int(epoch), num_rows=len(table), batch_size=batch_size,
          remainder=remainder, seed=seed if shuffle else None)
      if share == WHOLE:
        return tuple(found)
      return tuple(values.reshape([-1, batch_size])[:, first:end].ravel()
                   for values in found)

    def batches_of(epoch):
      rows, weights = tf.numpy_function(
          rows_of, [epoch], [tf.int64, tf.float32])
      rows.set_shape([None])
      weights.set_shape([None])
      start = tf.cond(tf.equal(epoch, first_epoch), lambda: first_row,
                      lambda: tf.constant(0, tf.int64))
      numbers = tf.data.Dataset.from_tensor_slices(
          (rows[start:], weights[start:]))

      def finish(row, weight, *entries):
        image, label = table.decode(*entries)
        key = tf.stack([epoch + (seed << 32), row])
        return (*self._finish(image, label, key if augment else None), weight)

      return table.rows(numbers).map(
          finish, num_parallel_calls=tf.data.experimental.AUTOTUNE).batch(
              end - first, drop_remainder=remainder != "keep")

    last_epoch = np.iinfo(np.int64).max if repeat else 1
    epochs = tf.data.Dataset.range(first_epoch, last_epoch)
    options = tf.data.Options()
    options.experimental_deterministic = True
    return epochs.flat_map(batches_of).with_options(options).prefetch(
        tf.data.experimental.AUTOTUNE)

  def _table(self, split: str) -> tables.Table:
    if split not in SPLITS:
      raise ValueError(f"`split` must be one of {SPLITS}: got {split!r}.")
    return self.train if split == "train" else self.test

  def _finish(self, image: tf.Tensor, label: tf.Tensor,
              seed: Optional[tf.Tensor]) -> augmentation.ImageAndLabel:
    """Returns image and label of one row as they stand in a batch."""
    image, label = tf.cast(image, tf.float32), tf.cast(label, tf.int64)
    if seed is None:
      image, label = self.prepare(image, label)
    else:
      image, label = self.augment(image, label, seed)
    image = (image - self.scale.mean) / self.scale.deviation
    shape = self.image_shape[:2] if self.kind == SEGMENTATION else []
    return tf.ensure_shape(image, self.image_shape), tf.ensure_shape(
        label, shape)


def _default_remainder(split: str) -> str:
  return "drop" if split == "train" else "keep"


def _check(table: tables.Table, batch_size: int, seed: int, remainder: str,
           skip: Union[int, tf.Tensor]) -> None:
  """Checks the arguments of `Dataset.batches`."""
  if remainder not in order.REMAINDERS:
    raise ValueError(
        f"`remainder` must be one of {order.REMAINDERS}: got {remainder!r}.")
  if batch_size < 1:
    raise ValueError(f"`batch_size` must be at least 1: got {batch_size}.")
  if remainder == "drop" and batch_size > len(table):
    raise ValueError(
        "`batch_size` must be at most the number of images where `remainder` "
        f"is \"drop\": expected 1 to {len(table)}, got {batch_size}.")
  if not 0 <= seed <= MAX_SEED:
    raise ValueError(f"`seed` must be from 0 to {MAX_SEED}: got {seed}.")
  if not tf.is_tensor(skip) and skip < 0:
    raise ValueError(f"`skip` must be at least 0: got {skip}.")


def _check_share(share: Share, batch_size: int, remainder: str) -> None:
  if share == WHOLE:
    return
  if not 0 <= share.index < share.count <= batch_size:
    raise ValueError(
        "`share` must have a row of each batch: expected an index below the "
        f"count, and that at most the batch size of {batch_size}, got {share}.")
  if remainder == "keep":
    raise ValueError("`share` must be of full batches: got `remainder` "
                     f"{remainder!r} with {share}. Use \"drop\" or \"repeat\".")
