"""What folders of image files have in common: checks, classes, decoding."""

import pathlib
from typing import List, Optional, Tuple

import tensorflow.compat.v1 as tf

from tools.datasets import errors

# How files start, and what stands at their end.
MARKS = (
    (b"\xff\xd8\xff", b"\xff\xd9"),  # JPEG.
    (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"),  # PNG.
)
ENDINGS = (".jpg", ".jpeg", ".png")

# Names of the classes, one a line, in the order of the labels.
CLASS_FILE = "labels.txt"


def check_image(path: pathlib.Path, advice: str) -> None:
  """Checks that a file starts as JPEG or PNG and is not cut short.

  Cheap enough for all files of a large data set, since it decodes nothing.

  Raises:
    DatasetError: If it is missing, cut short or something else.
  """
  expected = "a JPEG or PNG image"
  with errors.reading(path, expected, advice), open(path, "rb") as file:
    head = file.read(8)
    end = next((end for start, end in MARKS if head.startswith(start)), None)
    if end is None:
      found = f"a file that starts with {head!r}" if head else "an empty file"
      raise errors.unfit(path, expected=expected, found=found, advice=advice)
    file.seek(0, 2)
    file.seek(-min(file.tell(), 64), 2)
    if end not in file.read():
      # Some programs write notes of their own after the end.
      file.seek(0)
      if end not in file.read():
        raise errors.unfit(
            path, expected=expected, found="a file that is cut short",
            advice=advice)


def class_names(folder: pathlib.Path, advice: str) -> Optional[Tuple[str, ...]]:
  """Returns the lines of `labels.txt`; None where there is no such file.

  Raises:
    DatasetError: If the file cannot be read or is empty.
  """
  path = folder / CLASS_FILE
  if not path.exists():
    return None
  expected = "a text with the name of one class on each line"
  lines = read_lines(path, expected, advice)
  if not lines:
    raise errors.unfit(
        path, expected=expected, found="an empty file", advice=advice)
  return tuple(lines)


def read_lines(path: pathlib.Path, expected: str, advice: str) -> List[str]:
  """Returns the lines of a text that are not blank, stripped.

  Raises:
    DatasetError: If the file is missing or no text.
  """
  with errors.reading(path, expected, advice):
    try:
      text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
      raise errors.unfit(
          path, expected=expected, found="a file that is no text",
          advice=advice) from error
  return [line.strip() for line in text.splitlines() if line.strip()]


def decode_colours(content: tf.Tensor) -> tf.Tensor:
  """Decodes a JPEG or PNG image to uint8 of shape `[H, W, 3]`."""
  image = tf.io.decode_image(content, channels=3, expand_animations=False)
  image.set_shape([None, None, 3])
  return image
