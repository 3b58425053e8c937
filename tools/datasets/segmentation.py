"""Photographs with a class for each pixel, in the folders of Pascal VOC.

  JPEGImages/NAME.jpg            an image
  SegmentationClass/NAME.png     its mask: a palette PNG, whose indices (and not
                                 colours) are the classes; 255 is void
  ImageSets/Segmentation/train.txt, val.txt    the names of each split

References:
  Everingham et al., "The Pascal Visual Object Classes Challenge", 2010,
    http://host.robots.ox.ac.uk/pascal/VOC/
"""

from concurrent import futures
import functools
import pathlib
from typing import List, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from tools.datasets import augmentation
from tools.datasets import dataset
from tools.datasets import errors
from tools.datasets import files
from tools.datasets import pixels
from tools.datasets import tables

IMAGE_SIZE = 512  # No image of Pascal VOC is larger than 500 pixels.
SCALES = (0.5, 2.0)
VOID_LABEL = 255

CLASS_NAMES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus",
    "car", "cat", "chair", "cow", "dining table", "dog", "horse", "motorbike",
    "person", "potted plant", "sheep", "sofa", "train", "tv monitor")

ADVICE = ("The Pascal VOC project publishes VOCtrainval_11-May-2012.tar; give "
          "the folder with JPEGImages, SegmentationClass and ImageSets in "
          "`data_dir`.")


def load(data_dir: errors.Path, *,
         image_size: int = IMAGE_SIZE) -> dataset.Dataset:
  """Returns a data set in the form of Pascal VOC.

  Training scales by 0.5 to 2, cuts or pads to `image_size`, and mirrors. For
  tests, images are padded below and to the right, and shrunk if they are larger
  than `image_size`. What lies outside an image has the void label.

  Classes are those of Pascal VOC, or the lines of a file `labels.txt` in the
  folder, the background first. Loading reads all masks, to check them.

  Args:
    data_dir: The folder, or one with `VOCdevkit/VOC2012` in it.
    image_size: Height and width of the images in batches.

  Raises:
    DatasetError: If files are missing, damaged or do not fit together, or if
      Pillow is not installed.
  """
  root = _root(data_dir)
  names = files.class_names(root, ADVICE) or CLASS_NAMES
  if len(names) > VOID_LABEL:
    raise errors.unfit(root / files.CLASS_FILE,
                       expected=f"a list of at most {VOID_LABEL} classes",
                       found=f"{len(names)}", advice=ADVICE)
  train, test = (_table(root, split, len(names)) for split in ("train", "val"))
  common = dict(size=(image_size, image_size), fill=pixels.PHOTOGRAPHS.mean,
                void_label=VOID_LABEL)
  return dataset.Dataset(
      name=str(data_dir), kind=dataset.SEGMENTATION,
      image_shape=(image_size, image_size, 3), num_classes=len(names),
      train=train, test=test, scale=pixels.PHOTOGRAPHS,
      augment=functools.partial(
          augmentation.scale_and_place, scales=SCALES, **common),
      prepare=functools.partial(augmentation.fit, **common),
      void_label=VOID_LABEL, class_names=names)


def _root(data_dir: errors.Path) -> pathlib.Path:
  root = errors.directory(data_dir, "a folder in the form of Pascal VOC",
                          ADVICE)
  for folder in (root, root / "VOC2012", root / "VOCdevkit" / "VOC2012"):
    if (folder / "SegmentationClass").is_dir():
      return folder
  raise errors.unfit(root, expected="a folder in the form of Pascal VOC",
                     found="no SegmentationClass in it", advice=ADVICE)


def _table(root: pathlib.Path, split: str, num_classes: int) -> tables.Table:
  """Returns the checked files of one split."""
  path = root / "ImageSets" / "Segmentation" / f"{split}.txt"
  expected = "a list of the names of images"
  lines = files.read_lines(path, expected, ADVICE)
  if not lines:
    raise errors.unfit(
        path, expected=expected, found="an empty file", advice=ADVICE)
  pairs = [(root / "JPEGImages" / f"{line}.jpg",
            root / "SegmentationClass" / f"{line}.png") for line in lines]
  _check(pairs, num_classes)
  image_paths, mask_paths = zip(*pairs)
  return tables.Table((tables.bytes_column(image_paths),
                       tables.bytes_column(mask_paths)), _decode)


def _check(pairs: List[Tuple[pathlib.Path, pathlib.Path]],
           num_classes: int) -> None:
  """Checks all images and masks; Pillow decodes in several threads at a time.
  """
  _pillow()

  def check(pair):
    image_path, mask_path = pair
    files.check_image(image_path, ADVICE)
    mask = read_mask(mask_path)
    size = _image_size(image_path)
    if mask.shape != size:
      raise errors.unfit(
          mask_path,
          expected=f"a mask of the size of its image, {size[0]}x{size[1]}",
          found=f"{mask.shape[0]}x{mask.shape[1]}", advice=ADVICE)
    counts = np.bincount(mask.ravel(), minlength=256)
    counts[:num_classes] = counts[VOID_LABEL] = 0
    if counts.any():
      raise errors.unfit(
          mask_path,
          expected=f"a mask with classes from 0 to {num_classes - 1} and "
          f"{VOID_LABEL} for void", found=f"the class {counts.argmax()}",
          advice=ADVICE)

  with futures.ThreadPoolExecutor() as pool:
    for _ in pool.map(check, pairs):
      pass


def read_mask(path: errors.Path) -> np.ndarray:
  """Returns the class of each pixel, uint8 of shape `[H, W]`.

  TensorFlow decodes a palette PNG to colours; Pillow gives the indices.

  Raises:
    DatasetError: If it is not an image of indices, or cut short.
  """
  expected = "a PNG mask of one index a pixel, with a palette or grey"
  with errors.reading(path, expected, ADVICE):
    try:
      with _pillow().open(path) as image:
        mode, mask = image.mode, np.array(image)
    except (SyntaxError, ValueError) as error:  # Pillow's, of damaged files.
      raise errors.unfit(
          path, expected=expected, found=f"a damaged file ({error})",
          advice=ADVICE) from error
  if mode not in ("P", "L"):
    raise errors.unfit(
        path, expected=expected, found=f"an image of the mode {mode}",
        advice=ADVICE)
  return mask


def _image_size(path: pathlib.Path) -> Tuple[int, int]:
  """Returns height and width, from the file's header."""
  with errors.reading(path, "a JPEG image", ADVICE), \
      _pillow().open(path) as image:
    return image.size[::-1]


def _pillow():
  """Returns Pillow's module `Image`, which no other data set needs."""
  try:
    from PIL import Image
  except ImportError as error:
    raise errors.DatasetError(
        f"`Pillow` must be installed to read masks: got {error}. "
        "`pip install pillow` installs it.") from error
  return Image


def _decode(image_path: tf.Tensor, mask_path: tf.Tensor):
  mask = tf.numpy_function(lambda path: read_mask(path.decode()), [mask_path],
                           tf.uint8)
  return (files.decode_colours(tf.io.read_file(image_path)),
          tf.ensure_shape(mask, [None, None]))
