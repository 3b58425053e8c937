"""Made-up images of overlapping shapes, with a class for each pixel.

Segmentation to try a model on, without a file. The class of a pixel is the form
of the topmost shape there. How a shape differs in colour from what lies around
it gives a hint, which is often wrong. Light and contrast change from image to
image, there is noise, and pixels on an outline are void, as in Pascal VOC.
"""

import functools
from typing import Tuple

import numpy as np

from tools.datasets import augmentation
from tools.datasets import dataset
from tools.datasets import pixels
from tools.datasets import tables

IMAGE_SIZE = 64
NUM_TRAIN = 1000
NUM_TEST = 200
SCALES = (0.8, 1.25)
VOID_LABEL = 255

CLASS_NAMES = ("background", "disc", "square", "triangle", "ring", "cross")

# For each class, in which direction its colours tend to differ from those of
# the background: to red, green, blue, light or dark.
_TENDENCIES = np.array([[2, -1, -1], [-1, 2, -1], [-1, -1, 2],
                        [1.4, 1.4, 1.4], [-1.4, -1.4, -1.4]]) / np.sqrt(6.0)


def load(*, image_size: int = IMAGE_SIZE, num_train: int = NUM_TRAIN,
         num_test: int = NUM_TEST, seed: int = 0) -> dataset.Dataset:
  """Draws the images; the same arguments give the same images.

  Args:
    image_size: Height and width, at least 32.
    num_train: Number of images to train on.
    num_test: Number of images to test on.
    seed: Chooses the images.

  Raises:
    ValueError: If the images are too small, or there are none.
  """
  if image_size < 32:
    raise ValueError(f"`image_size` must be at least 32: got {image_size}.")
  if num_train < 1 or num_test < 1:
    raise ValueError("`num_train` and `num_test` must be at least 1: got "
                     f"{num_train} and {num_test}.")
  images, masks = zip(*(draw(image_size, [seed, index])
                        for index in range(num_train + num_test)))
  images, masks = np.stack(images), np.stack(masks)
  scale = pixels.scale_of(images[:num_train])
  return dataset.Dataset(
      name="shapes", kind=dataset.SEGMENTATION,
      image_shape=(image_size, image_size, 3), num_classes=len(CLASS_NAMES),
      train=tables.Table((images[:num_train], masks[:num_train])),
      test=tables.Table((images[num_train:], masks[num_train:])), scale=scale,
      augment=functools.partial(
          augmentation.scale_and_place, size=(image_size, image_size),
          scales=SCALES, fill=scale.mean, void_label=VOID_LABEL),
      void_label=VOID_LABEL, class_names=CLASS_NAMES)


def draw(size: int, seed) -> Tuple[np.ndarray, np.ndarray]:
  """Draws one image.

  Args:
    size: Height and width.
    seed: Integers that choose the image.

  Returns:
    The image, uint8 of shape `[size, size, 3]`, and the class of each pixel,
    uint8 of shape `[size, size]`.
  """
  rng = np.random.RandomState(seed)
  rows, columns = np.mgrid[:size, :size] / (size - 1.0)
  slope = rng.uniform(-0.3, 0.3, size=[2, 3])
  colour = rng.uniform(0.2, 0.8, size=3)
  image = colour + (rows[..., None] - 0.5) * slope[0] + (
      columns[..., None] - 0.5) * slope[1]
  mask = np.zeros([size, size], np.uint8)
  owner = np.zeros([size, size], np.int64)  # Number of the topmost shape.
  for number in range(1, rng.randint(3, 6) + 1):
    label = rng.randint(1, len(CLASS_NAMES))
    inside = _inside(label, rows, columns, rng)
    # Not too near to the background's colour.
    step = rng.normal(scale=0.4, size=3) + _TENDENCIES[label - 1]
    step *= rng.uniform(0.35, 0.6) / np.linalg.norm(step)
    image[inside] = colour + step
    mask[inside] = label
    owner[inside] = number
  outline = np.zeros([size, size], bool)
  outline[1:] |= owner[1:] != owner[:-1]
  outline[:, 1:] |= owner[:, 1:] != owner[:, :-1]
  mask[outline] = VOID_LABEL
  light, contrast = rng.uniform(0.3, 0.7), rng.uniform(0.4, 0.9)
  image = light + contrast * (image - 0.5)
  image += rng.normal(scale=0.05, size=image.shape)
  return np.clip(np.round(255 * image), 0, 255).astype(np.uint8), mask


def _inside(label: int, rows: np.ndarray, columns: np.ndarray,
            rng: np.random.RandomState) -> np.ndarray:
  """Returns which pixels a random shape of the given class covers."""
  centre = rng.uniform(0.1, 0.9, size=2)
  radius = rng.uniform(0.14, 0.26)
  angle = rng.uniform(0.0, 2.0 * np.pi)
  down, right = (rows - centre[0]) / radius, (columns - centre[1]) / radius
  x = np.cos(angle) * right + np.sin(angle) * down
  y = np.cos(angle) * down - np.sin(angle) * right
  distance = np.hypot(x, y)
  name = CLASS_NAMES[label]
  if name == "disc":
    return distance < 0.85
  if name == "ring":
    return (0.5 < distance) & (distance < 1.0)
  if name == "square":
    return np.maximum(abs(x), abs(y)) < 0.75
  if name == "cross":
    return (np.minimum(abs(x), abs(y)) < 0.27) & (
        np.maximum(abs(x), abs(y)) < 1.0)
  # Equilateral, with its corners at distance 1.2: three lines bound it.
  corners = np.array([0.0, 2.0, 4.0]) * np.pi / 3.0
  return np.max([np.cos(corner) * x + np.sin(corner) * y
                 for corner in corners], axis=0) < 0.6
