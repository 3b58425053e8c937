"""Small data sets in the forms of the real ones, for tests."""

import gzip
import io
import pathlib
import pickle
import struct
import tarfile

import numpy as np
from PIL import Image
import tensorflow.compat.v1 as tf

import testing

PALETTE = np.random.RandomState(0).permutation(768).astype(np.uint8).tolist()


def run(batches, count=None, initializable=True):
  """Returns the first `count` batches (default: all) as lists of arrays."""
  if initializable:
    iterator = tf.data.make_initializable_iterator(batches)
  else:
    iterator = tf.data.make_one_shot_iterator(batches)
  batch, found = iterator.get_next(), []
  with tf.Session(config=testing.config()) as sess:
    if initializable:
      sess.run(iterator.initializer)
    while count is None or len(found) < count:
      try:
        found.append(sess.run(batch))
      except tf.errors.OutOfRangeError:
        break
  return found


def column(batches, index):
  """Returns one component of all batches, concatenated."""
  return np.concatenate([batch[index] for batch in batches])


def original(data, images):
  """Returns images of batches in the units of the files."""
  return np.asarray(images) * data.scale.deviation + data.scale.mean


def write(path, content):
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content)


def idx(array, *, magic=None):
  """Returns the bytes of an IDX file."""
  array = np.asarray(array, np.uint8)
  return (magic or bytes([0, 0, 8, array.ndim])) + struct.pack(
      f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist(folder, *, rows=7, test_rows=3, compress=False, mark="-"):
  """Writes the four files; returns training images and labels."""
  rng = np.random.RandomState(0)
  found = []
  for prefix, count in (("train", rows), ("t10k", test_rows)):
    images = rng.randint(256, size=[count, 28, 28])
    labels = np.arange(count) % 10
    for name, array in (("images", images), ("labels", labels)):
      content = idx(array)
      file = f"{prefix}-{name}{mark}idx{array.ndim}-ubyte"
      if compress:
        content, file = gzip.compress(content), file + ".gz"
      write(pathlib.Path(folder, file), content)
    found += [images, labels]
  return found


def cifar_files(name, *, is_pickle, rows=2, wrong_label=None):
  """Returns `{file name: bytes}`, training images and labels."""
  rng = np.random.RandomState(0)
  num_classes = int(name[5:])
  if name == "cifar10":
    files = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
  else:
    files = ["train", "test"]
  contents, images, labels = {}, [], []
  for number, file in enumerate(files):
    planes = rng.randint(256, size=[rows, 3, 32, 32]).astype(np.uint8)
    numbers = (np.arange(rows) + 7 * number) % num_classes
    if wrong_label is not None:
      numbers[-1] = wrong_label
    flat = planes.reshape(rows, -1)
    if is_pickle:
      # As Python 2 wrote them: texts become bytes.
      contents[file] = pickle.dumps({
          b"batch_label": file.encode(), b"data": flat,
          b"labels" if name == "cifar10" else b"fine_labels":
              numbers.tolist()}, protocol=2)
    else:
      heads = [numbers] if name == "cifar10" else [numbers * 0 + 19, numbers]
      contents[file + ".bin"] = np.concatenate(
          [*np.array(heads, np.uint8)[..., None], flat], axis=1).tobytes()
    if "test" not in file:
      images.append(planes.transpose(0, 2, 3, 1))
      labels.append(numbers)
  return contents, np.concatenate(images), np.concatenate(labels)


def archive(path, contents, folder="cifar"):
  """Writes a .tar.gz archive with the files in a folder."""
  with tarfile.open(path, "w:gz") as file:
    for name, content in contents.items():
      info = tarfile.TarInfo(f"{folder}/{name}")
      info.size = len(content)
      file.addfile(info, io.BytesIO(content))


def encode(pixels, form="PNG"):
  """Returns the bytes of a JPEG or PNG file; `[H, W]` is a palette PNG."""
  image = Image.fromarray(np.asarray(pixels, np.uint8))
  if image.mode == "L" and form == "PNG":
    image = image.convert("P")
    image.putdata(np.asarray(pixels, np.uint8).ravel().tolist())
    image.putpalette(PALETTE)
  buffer = io.BytesIO()
  image.save(buffer, form, **({"quality": 98} if form == "JPEG" else {}))
  return buffer.getvalue()


def plain(height, width, colour):
  """Returns an image of one colour, which JPEG keeps (nearly) as it is."""
  return np.full([height, width, 3], colour, np.uint8)


def folders(root):
  """Writes two classes: cats of value 50 and up, dogs of value 150 and up."""
  for name, value, form in (
      ("train/cat/1.jpg", 50, "JPEG"), ("train/cat/2.png", 60, "PNG"),
      ("train/dog/3.jpeg", 150, "JPEG"), ("train/dog/4.PNG", 160, "PNG"),
      ("train/dog/5.png", 170, "PNG"), ("val/cat/6.jpg", 70, "JPEG"),
      ("val/dog/7.png", 180, "PNG")):
    write(pathlib.Path(root, name),
          encode(plain(40 + value % 7, 50, value), form))
  write(pathlib.Path(root, "train/cat/notes.txt"), b"no image")


def example(image, label):
  """Returns a serialised example as the scripts for ImageNet write them."""
  feature = {}
  if image is not None:
    feature["image/encoded"] = tf.train.Feature(
        bytes_list=tf.train.BytesList(value=[image]))
  if label is not None:
    feature["image/class/label"] = tf.train.Feature(
        int64_list=tf.train.Int64List(value=[label]))
  return tf.train.Example(
      features=tf.train.Features(feature=feature)).SerializeToString()


def records(path, examples):
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  with tf.io.TFRecordWriter(str(path)) as writer:
    for content in examples:
      writer.write(content)


def record_files(root):
  """Writes two files to train on and one to test on."""
  for name, values in (("train-00000-of-00002", (10, 20, 30)),
                       ("train-00001-of-00002", (40, 50)),
                       ("validation-00000-of-00001", (60, 70))):
    records(pathlib.Path(root, name), [
        example(encode(plain(40, 36, value)), value // 10 % 3)
        for value in values])


def voc(root, *, sizes=((40, 30), (30, 40), (36, 36), (20, 50))):
  """Writes one test image and the rest for training; returns all masks."""
  rng = np.random.RandomState(0)
  masks = []
  for number, (height, width) in enumerate(sizes):
    mask = rng.randint(21, size=[height, width])
    mask[0] = 255
    image = np.repeat(mask[..., None], 3, axis=2)
    write(pathlib.Path(root, "JPEGImages", f"image_{number}.jpg"),
          encode(image, "JPEG"))
    write(pathlib.Path(root, "SegmentationClass", f"image_{number}.png"),
          encode(mask))
    masks.append(mask)
  names = [f"image_{number}\n" for number in range(len(sizes))]
  lists = pathlib.Path(root, "ImageSets", "Segmentation")
  write(lists / "train.txt", "".join(names[1:]).encode())
  write(lists / "val.txt", names[0].encode())
  return masks
