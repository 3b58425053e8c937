"""Computes the outputs of an exported model, on one CPU, without its code.

  python tools/predict.py --saved_model=/models/resnet20/1 \\
    --images=images.npy --output=outputs.npz

The images are an array `[B, H, W, C]` as `numpy.save` writes it, as the model
takes them: tools/export.py makes models that take pixels in the units of the
data set's files. The outputs are written as `numpy.savez` does, by the names of
the signature (those of a frozen graph by the names of its tensors). Neither
`towers` nor the model's code is loaded, as in a server.
"""

import functools
import pathlib
import sys
from typing import Dict, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
from absl import flags
import numpy as np

from tools import startup

startup.load_tensorflow()

import tensorflow as tf

from tools import command_line


def _flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = command_line.flag_values()
  text = functools.partial(flags.DEFINE_string, flag_values=values)
  text("saved_model", None, "Directory of the model.")
  text("frozen_graph", None, "File of a frozen graph, besides or in place of "
       "--saved_model.")
  text("input", "serving_default_images:0", "Name of the tensor to feed; for "
       "--frozen_graph.")
  flags.DEFINE_list("fetch", [], "Names of the tensors to fetch; for "
                    "--frozen_graph.", flag_values=values)
  text("images", None, "File with the images.")
  text("output", None, "File to write.")
  return values


def of_saved_model(directory: str, images: np.ndarray) -> Dict[str, np.ndarray]:
  """Returns the outputs of a SavedModel with one input, by their keys.

  Raises:
    ValueError: If there is no such model, or it takes other inputs.
  """
  try:
    signature = tf.saved_model.load(directory).signatures["serving_default"]
  except (OSError, KeyError, tf.errors.OpError) as error:
    raise ValueError(
        "`--saved_model` must be the directory of a SavedModel with the "
        f"signature serving_default: got {directory} ({error}).") from error
  specs = signature.structured_input_signature[1]
  if len(specs) != 1:
    raise ValueError("`--saved_model` must take one input: got "
                     f"{sorted(specs)}.")
  [(key, spec)] = specs.items()
  if not spec.shape.is_compatible_with(images.shape):
    raise ValueError(f"`--images` must hold an array of shape {spec.shape}: "
                     f"got {images.shape}.")
  outputs = signature(**{key: tf.constant(images, spec.dtype)})
  return {key: value.numpy() for key, value in outputs.items()}


def of_frozen_graph(path: str, images: np.ndarray, feed: str,
                    fetches: Sequence[str]) -> Dict[str, np.ndarray]:
  """Returns the tensors `fetches` of a frozen graph, by their names.

  Raises:
    ValueError: If there is no such file, or it lacks a tensor.
  """
  graph_def = tf.compat.v1.GraphDef()
  try:
    graph_def.ParseFromString(pathlib.Path(path).read_bytes())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      tf.import_graph_def(graph_def, name="")
      return dict(zip(fetches, session.run(list(fetches), {feed: images})))
  except Exception as error:  # Protocol buffers raise errors of their own.
    raise ValueError(
        f"`--frozen_graph` must be a graph with {feed} and "
        f"{', '.join(fetches)}: got {path} ({error}).") from error


def predict(values: flags.FlagValues) -> str:
  """Does what the flags say; returns a line that tells so.

  Raises:
    ValueError: If they do not fit.
  """
  if not values.images or not values.output:
    raise ValueError("`--images` and `--output` must be given: got "
                     f"{values.images} and {values.output}.")
  if not values.saved_model and not values.frozen_graph:
    raise ValueError("`--saved_model` or `--frozen_graph` must be given: got "
                     f"{values.saved_model} and {values.frozen_graph}.")
  try:
    images = np.load(values.images)
    if not isinstance(images, np.ndarray):
      raise ValueError("an archive of arrays")
  except Exception as error:  # NumPy has many ways to fail on a strange file.
    raise ValueError("`--images` must be a file as `numpy.save` writes it: got "
                     f"{values.images} ({error}).") from error
  outputs = {}
  if values.saved_model:
    outputs.update(of_saved_model(values.saved_model, images))
  if values.frozen_graph:
    outputs.update(of_frozen_graph(values.frozen_graph, images, values.input,
                                   values.fetch))
  try:
    with open(values.output, "wb") as file:
      np.savez(file, **outputs)
  except OSError as error:
    raise ValueError("`--output` must be a file that can be written: got "
                     f"{values.output} ({error.strerror}).") from error
  shapes = ", ".join(f"{key} {list(x.shape)}" for key, x in outputs.items())
  return f"Wrote {values.output}: {shapes}."


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""

  def action(values):
    try:
      print(predict(values))
    except ValueError as error:
      raise command_line.UsageError(" ".join(str(error).split())) from error
    return 0

  return command_line.main(argv, _flags(), text=__doc__, action=action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
