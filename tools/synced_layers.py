"""Prints which batch norm layers of a model would meet across towers.

    python tools/synced_layers.py --model=models/resnet.py:logits \\
        --inputs='float32[8,32,32,3]' \\
        --arguments='{"num_classes": 10, "training": true}'

Builds the model for a number of towers and lists what `graph.synced_layers`
holds; trains nothing. A layer that cannot be converted ends the tool with the
library's own message, which names it.
"""

import ast
import importlib
import importlib.util
import json
import pathlib
import re
import sys
from typing import Any, Callable, Dict, List, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

# pylint: disable=wrong-import-position
from absl import flags

from tools import startup

startup.load_tensorflow()

import tensorflow.compat.v1 as tf
import towers

FLAGS = flags.FlagValues()
flags.DEFINE_string(
    "model", None, "The model function: a file or module, a colon, and the "
    "name of the function, such as models/resnet.py:logits.", flag_values=FLAGS)
flags.DEFINE_list(
    "inputs", [], "Type and shape of each input, such as float32[8,32,32,3]. A "
    "? stands for a size that is not known. None for a model that makes its "
    "own.", flag_values=FLAGS)
flags.DEFINE_string(
    "arguments", "{}", "Further keyword arguments of the function, as JSON.",
    flag_values=FLAGS)
flags.DEFINE_integer("num_towers", 2, "Number of towers.", flag_values=FLAGS)


def load(model: str) -> Callable[..., Any]:
  """Returns the function that `model` names.

  Raises:
    ValueError: If there is no such file, module or function.
  """
  source, _, name = model.rpartition(":")
  try:
    if source.endswith(".py"):
      spec = importlib.util.spec_from_file_location(
          pathlib.Path(source).stem, source)
      module = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
    else:
      module = importlib.import_module(source)
    return getattr(module, name)
  except (ImportError, OSError, AttributeError, SyntaxError,
          ValueError) as error:
    raise ValueError(
        "`model` must be a file or module and a function in it: expected for "
        f"example models/resnet.py:logits, got {model!r} ({error}).") from error


def placeholders(inputs: Sequence[str]) -> List[tf.Tensor]:
  """Makes a placeholder for each of `inputs`, such as "float32[8,?,3]".

  Raises:
    ValueError: If one is no type and shape.
  """
  result = []
  for entry in inputs:
    match = re.fullmatch(r"\s*(\w+)\s*\[([\d,?\s]*)\]\s*", entry)
    try:
      sizes = match[2].replace("?", "None")
      shape = ast.literal_eval(f"[{sizes}]")
      result.append(tf.placeholder(tf.as_dtype(match[1]), shape))
    except (TypeError, SyntaxError, ValueError) as error:
      raise ValueError(
          "`inputs` must be types and shapes: expected for example "
          f"float32[8,32,32,3], got {entry!r}.") from error
  return result


def split_list(text: Sequence[str]) -> List[str]:
  """Joins the parts of a comma list that stand inside brackets."""
  return re.findall(r"[^,\[]+(?:\[[^\]]*\]?)?", ",".join(text))


def synced_layers(function: Callable[..., Any], inputs: Sequence[str],
                  arguments: Dict[str, Any], num_towers: int) -> Sequence[Any]:
  """Builds `function` in a graph of its own; returns the layers that meet."""
  with tf.Graph().as_default():
    tensors = tuple(placeholders(inputs))

    def model(*values):
      result = function(*values, **arguments)
      # Whatever it returns: loss, scores, or a dict of both.
      flat = tf.nest.flatten(getattr(result, "_asdict", lambda: result)())
      return {str(k): x for k, x in enumerate(flat) if x is not None}

    return towers.build_towers(
        model, num_towers, inputs=tensors or None).synced_layers


def table(layers: Sequence[Any]) -> str:
  """Returns the layers as a text table, one a line, and their number."""
  rows = [("layer", "kind", "axes", "towers")]
  rows += [(layer.name, layer.kind, str(list(layer.axes)), str(layer.towers))
           for layer in layers]
  widths = [max(len(row[k]) for row in rows) for k in range(4)]
  lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths))
           for row in rows]
  lines.append(f"{len(layers)} layers meet.")
  return "\n".join(line.rstrip() for line in lines)


def main(argv: Sequence[str]) -> int:
  """Runs the tool; returns its exit status."""
  try:
    rest = FLAGS(argv)[1:]
    if rest:
      raise ValueError(f"`{rest[0]}` is no flag. See --help.")
    if not FLAGS.model:
      raise ValueError("`--model` must be given, such as "
                       "--model=models/resnet.py:logits.")
    try:
      arguments = json.loads(FLAGS.arguments)
      dict(**arguments)
    except (TypeError, ValueError) as error:
      raise ValueError(
          "`--arguments` must be a JSON object of keyword arguments: got "
          f"{FLAGS.arguments!r} ({error}).") from error
    layers = synced_layers(
        load(FLAGS.model), split_list(FLAGS.inputs), arguments,
        FLAGS.num_towers)
  except (flags.Error, ValueError, TypeError) as error:
    print(f"synced_layers: {error}", file=sys.stderr)
    return 2
  print(table(layers))
  return 0


if __name__ == "__main__":
  tf.disable_v2_behavior()
  if "--help" in sys.argv or "-h" in sys.argv:
    print(__doc__ + FLAGS.main_module_help())
    sys.exit(0)
  sys.exit(main(sys.argv))
