"""CIFAR-10 and CIFAR-100 in their binary or Python form, unpacked or not.

An image is 3,072 bytes: 32 rows of 32 red, then green, then blue pixels. The
binary form puts its label before it, CIFAR-100 a coarse and then a fine one.
The Python form is a pickled dictionary; it is read without running what else a
pickle could hold.

References:
  Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
    https://www.cs.toronto.edu/~kriz/cifar.html
"""

import contextlib
import functools
import pathlib
import pickle
import tarfile
from typing import Iterator, NamedTuple, Sequence, Tuple

import numpy as np

from tools.datasets import arrays
from tools.datasets import augmentation
from tools.datasets import dataset
from tools.datasets import errors
from tools.datasets import pixels
from tools.datasets import restricted_pickle

PIXELS = 3 * 32 * 32


class Form(NamedTuple):
  """One of the forms in which a variant is published."""
  folder: str  # Where the archive unpacks to.
  archive: str
  train: Sequence[str]  # Names of files.
  test: str
  is_pickle: bool


class Variant(NamedTuple):
  """What tells CIFAR-10 and CIFAR-100 apart."""
  num_classes: int
  label_bytes: int  # Of a binary row; the last one is the label.
  label_key: bytes  # In a pickle.
  forms: Sequence[Form]


VARIANTS = {
    "cifar10": Variant(10, 1, b"labels", (
        Form("cifar-10-batches-bin", "cifar-10-binary.tar.gz",
             [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin",
             is_pickle=False),
        Form("cifar-10-batches-py", "cifar-10-python.tar.gz",
             [f"data_batch_{i}" for i in range(1, 6)], "test_batch",
             is_pickle=True))),
    "cifar100": Variant(100, 2, b"fine_labels", (
        Form("cifar-100-binary", "cifar-100-binary.tar.gz", ["train.bin"],
             "test.bin", is_pickle=False),
        Form("cifar-100-python", "cifar-100-python.tar.gz", ["train"], "test",
             is_pickle=True))),
}


def advice(name: str) -> str:
  """Returns where to get the files of a variant, for errors."""
  forms = VARIANTS[name].forms
  return (f"The CIFAR project publishes {forms[0].archive} and "
          f"{forms[1].archive}; give one, or its folder, in `data_dir`.")


def load(name: str, data_dir: errors.Path) -> dataset.Dataset:
  """Returns CIFAR-10 or CIFAR-100 (with its fine labels).

  Augmentation shifts by up to 4 pixels and mirrors.

  Args:
    name: A key of `VARIANTS`.
    data_dir: One of the published `.tar.gz` archives, the folder that it
      unpacks to, or a folder with either of them in it.

  Raises:
    DatasetError: If files are missing, damaged or of another kind.
  """
  variant = VARIANTS[name]
  form, place = _find(variant, pathlib.Path(data_dir), advice(name))
  train, test = _splits(variant, form, place, advice(name))
  scale = pixels.scale_of(train.images)
  return arrays.classification(
      name, train, test, num_classes=variant.num_classes,
      augment=functools.partial(
          augmentation.shift, padding=4, fill=scale.mean, flip=True))


def _find(variant: Variant, data_dir: pathlib.Path,
          hint: str) -> Tuple[Form, pathlib.Path]:
  """Returns the form that is there, and the archive or folder it is in."""
  expected = "an archive of CIFAR, or a folder with one or with its files"
  if not data_dir.exists():
    raise errors.unfit(
        data_dir, expected=expected, found="nothing there", advice=hint)
  if data_dir.is_file():
    with _archive(data_dir, hint) as archive:
      names = {pathlib.PurePath(name).name for name in archive.getnames()}
    for form in variant.forms:
      if names & {*form.train, form.test}:
        return form, data_dir
    raise errors.unfit(
        data_dir, expected=expected, found=f"an archive of {sorted(names)[:3]}",
        advice=hint)
  for form in variant.forms:
    for folder in (data_dir, data_dir / form.folder):
      if any((folder / name).is_file() for name in (*form.train, form.test)):
        return form, folder
  for form in variant.forms:
    if (data_dir / form.archive).is_file():
      return form, data_dir / form.archive
  raise errors.unfit(
      data_dir, expected=expected,
      found=f"{sorted(path.name for path in data_dir.iterdir())[:3]}",
      advice=hint)


@contextlib.contextmanager
def _archive(path: pathlib.Path, hint: str) -> Iterator[tarfile.TarFile]:
  expected = "a .tar.gz archive of CIFAR"
  with errors.reading(path, expected, hint):
    try:
      with tarfile.open(path) as archive:
        yield archive
    except tarfile.TarError as error:
      raise errors.unfit(
          path, expected=expected, found=f"a damaged or other file ({error})",
          advice=hint) from error


def _splits(variant: Variant, form: Form, place: pathlib.Path,
            hint: str) -> Tuple[arrays.Split, arrays.Split]:
  """Reads all files of a form, from an archive or a folder."""
  names = [*form.train, form.test]
  contents = {}
  if place.is_dir():
    for name in names:
      with errors.reading(place / name, "a file of CIFAR", hint):
        contents[name] = (place / name).read_bytes()
  else:
    with _archive(place, hint) as archive:
      for member in archive:
        name = pathlib.PurePath(member.name).name
        if member.isfile() and name in names:
          contents[name] = archive.extractfile(member).read()
    missing = [name for name in names if name not in contents]
    if missing:
      raise errors.unfit(place, expected=f"an archive with {names}",
                         found=f"none of the name {missing[0]}", advice=hint)
  parse = _parse_pickle if form.is_pickle else _parse_binary
  parts = []
  for name in names:
    part = parse(contents[name], variant, place / name, hint)
    if not len(part.labels):
      raise errors.unfit(
          place / name, expected="a file with images", found="none",
          advice=hint)
    if not 0 <= part.labels.min() <= part.labels.max() < variant.num_classes:
      raise errors.unfit(
          place / name,
          expected=f"a file with labels from 0 to {variant.num_classes - 1}",
          found=f"labels from {part.labels.min()} to {part.labels.max()}",
          advice=hint)
    parts.append(part)
  train = arrays.Split(*(np.concatenate(column)
                         for column in zip(*parts[:-1])))
  return train, parts[-1]


def _images(rows: np.ndarray) -> np.ndarray:
  """Brings rows of shape `[N, 3072]` into the shape `[N, 32, 32, 3]`."""
  return np.ascontiguousarray(
      rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _parse_binary(content: bytes, variant: Variant, path: pathlib.Path,
                  hint: str) -> arrays.Split:
  width = variant.label_bytes + PIXELS
  if len(content) % width:
    raise errors.unfit(path, expected=f"a file of {width} bytes for each image",
                       found=f"{len(content)} bytes", advice=hint)
  rows = np.frombuffer(content, np.uint8).reshape(-1, width)
  return arrays.Split(_images(rows[:, variant.label_bytes:]),
                      rows[:, variant.label_bytes - 1].astype(np.int64))


def _parse_pickle(content: bytes, variant: Variant, path: pathlib.Path,
                  hint: str) -> arrays.Split:
  key = variant.label_key
  expected = (f"a pickled dictionary with the {PIXELS} bytes of each image as "
              f"`data` and labels as `{key.decode()}`")
  try:
    found = restricted_pickle.loads(content)
  except pickle.UnpicklingError as error:
    raise errors.unfit(
        path, expected=expected, found=f"something else ({error})",
        advice=hint) from error
  if not isinstance(found, dict):
    raise errors.unfit(
        path, expected=expected, found=f"a {type(found).__name__}", advice=hint)
  # Python 3 wrote the keys of some copies as texts.
  found = {name.encode() if isinstance(name, str) else name: value
           for name, value in found.items()}
  if b"data" not in found or key not in found:
    raise errors.unfit(
        path, expected=expected, found=f"the keys {list(found)[:5]}",
        advice=hint)
  rows, labels = found[b"data"], np.asarray(found[key])
  if (not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or
      rows.shape != (len(rows), PIXELS)):
    raise errors.unfit(
        path, expected=expected,
        found=f"data of shape {np.shape(rows)} and type "
        f"{getattr(rows, 'dtype', type(rows).__name__)}", advice=hint)
  if labels.shape != (len(rows),) or (
      len(labels) and labels.dtype.kind not in "iu"):
    raise errors.unfit(
        path, expected=f"a file with {len(rows)} whole numbers as labels",
        found=f"labels of shape {labels.shape} and type {labels.dtype}",
        advice=hint)
  return arrays.Split(_images(rows), labels.astype(np.int64))
