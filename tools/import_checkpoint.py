r"""Writes other people's checkpoints anew, under the names of one device.

    python tools/import_checkpoint.py --checkpoint=old/model.ckpt-1000 \
        --output=clean/model.ckpt-1000 --model=models/resnet.py:logits \
        --inputs='float32[8,32,32,3]' \
        --arguments='{"num_classes": 10, "training": true}'

What the variables are to be called is told by a model (`--model`), by another
checkpoint (`--like`, which keeps an optimizer's slots), or by neither: then the
towers' numbers are dropped from all names, and tensorpack's moving averages get
their usual ones. Prints which variable got what, and what was left over;
without `--output`, that is all. `tf.train.Saver` restores what it writes.
"""

import json
import pathlib
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

# pylint: disable=wrong-import-position
from absl import flags

from tools import startup

startup.load_tensorflow()

import tensorflow.compat.v1 as tf
import towers
from tools import synced_layers

FLAGS = flags.FlagValues()
flags.DEFINE_string(
    "checkpoint", None, "Prefix of the checkpoint, or a directory, for the "
    "last one there.", flag_values=FLAGS)
flags.DEFINE_string(
    "output", None, "Prefix of the checkpoint to write. Without it, nothing is "
    "written.", flag_values=FLAGS)
flags.DEFINE_bool(
    "overwrite", False, "Whether the output may replace a checkpoint.",
    flag_values=FLAGS)
flags.DEFINE_string(
    "model", None, "The function whose variables to look for: a file or "
    "module, a colon, and the name of the function, such as "
    "models/resnet.py:logits.", flag_values=FLAGS)
flags.DEFINE_list(
    "inputs", [], "Type and shape of each of its inputs, such as "
    "float32[8,32,32,3]. A ? stands for a size that is not known.",
    flag_values=FLAGS)
flags.DEFINE_string(
    "arguments", "{}", "Further keyword arguments of the function, as JSON.",
    flag_values=FLAGS)
flags.DEFINE_string(
    "like", None, "Another checkpoint, whose names to look for.",
    flag_values=FLAGS)
flags.DEFINE_multi_string(
    "include", [], "Regular expression; only variables whose name it finds are "
    "written. May be repeated.", flag_values=FLAGS)
flags.DEFINE_multi_string(
    "exclude", [], "Regular expression; variables and keys of the file that it "
    "finds are left out. May be repeated.", flag_values=FLAGS)
flags.DEFINE_multi_string(
    "rename", [], "REGULAR_EXPRESSION=>TEXT: what to put in place of what the "
    "expression finds in the keys of the file. May be repeated.",
    flag_values=FLAGS)
flags.DEFINE_integer(
    "tower", None, "Whose copy to take where those of several towers differ.",
    flag_values=FLAGS)
flags.DEFINE_bool(
    "renumber_layers", None, "Whether layers such as dense_3 match by their "
    "order where numbers differ. By default, where that is not ambiguous.",
    flag_values=FLAGS)
flags.DEFINE_bool(
    "allow_missing", False, "Whether the file may lack variables of the model.",
    flag_values=FLAGS)
flags.DEFINE_bool(
    "allow_different_shapes", False, "Whether to leave out variables whose "
    "shape differs.", flag_values=FLAGS)


def model_shapes(function: Callable[..., Any], inputs: Sequence[str],
                 arguments: Dict[str, Any]) -> Dict[str, List[int]]:
  """Builds `function` as plain code; returns its variables' shapes by name.

  Raises:
    ValueError: If it fails, or makes no variables.
  """
  with tf.Graph().as_default():
    tensors = synced_layers.placeholders(inputs)
    try:
      function(*tensors, **arguments)
    except Exception as error:  # Whatever a model may raise.
      raise ValueError(
          "`model` must build with the given `inputs` and `arguments`: got "
          f"{type(error).__name__} ({error}).") from error
    variables = tf.global_variables()
    if not variables:
      raise ValueError(
          f"`model` must make variables: {function} makes none.")
    return {variable.op.name: variable.shape.as_list()
            for variable in variables}


def renames(entries: Sequence[str]) -> Dict[str, str]:
  """Returns what `--rename` says, by regular expression.

  Raises:
    ValueError: If an entry has no `=>`.
  """
  pairs: List[Tuple[str, ...]] = [
      tuple(entry.split("=>", 1)) for entry in entries]
  for entry, pair in zip(entries, pairs):
    if len(pair) != 2:
      raise ValueError(
          "`--rename` must be REGULAR_EXPRESSION=>TEXT: expected for example "
          f"'^resnet/=>net/', got {entry!r}.")
  return dict(pairs)


def import_checkpoint() -> str:
  """Does what the flags say; returns the report.

  Raises:
    ValueError: If they, or the files, do not fit.
    TypeError: If a flag has a value of the wrong type.
  """
  if not FLAGS.checkpoint:
    raise ValueError("`--checkpoint` must be given, such as "
                     "--checkpoint=old/model.ckpt-1000.")
  if FLAGS.model and FLAGS.like:
    raise ValueError("`--model` and `--like` must not both be given: either "
                     "tells the names of the variables.")
  options = {name: FLAGS[name].value for name in (
      "include", "exclude", "tower", "renumber_layers", "allow_missing",
      "allow_different_shapes")}
  options["renames"] = renames(FLAGS.rename)
  if FLAGS.model:
    try:
      arguments = json.loads(FLAGS.arguments)
      dict(**arguments)
    except (TypeError, ValueError) as error:
      raise ValueError(
          "`--arguments` must be a JSON object of keyword arguments: got "
          f"{FLAGS.arguments!r} ({error}).") from error
    options["variables"] = model_shapes(
        synced_layers.load(FLAGS.model),
        synced_layers.split_list(FLAGS.inputs), arguments)
  elif FLAGS.like:
    options["variables"] = FLAGS.like
  if FLAGS.output:
    report = towers.checkpoints.write_cleaned(
        FLAGS.checkpoint, FLAGS.output, overwrite=FLAGS.overwrite, **options)
    return f"{report}\nWrote {FLAGS.output}."
  if "variables" not in options:
    options["variables"] = towers.checkpoints.cleaned_names(
        FLAGS.checkpoint, renames=options["renames"])
  return str(towers.checkpoints.plan(FLAGS.checkpoint, **options))


def main(argv: Sequence[str]) -> int:
  """Runs the tool; returns its exit status."""
  try:
    rest = FLAGS(argv)[1:]
    if rest:
      raise ValueError(f"`{rest[0]}` is no flag. See --help.")
    report = import_checkpoint()
  except (flags.Error, ValueError, TypeError) as error:
    text = " ".join(str(error).split())
    print(f"import_checkpoint: {text}", file=sys.stderr)
    return 2
  print(report)
  return 0


if __name__ == "__main__":
  tf.disable_v2_behavior()
  if "--help" in sys.argv or "-h" in sys.argv:
    print(__doc__ + FLAGS.main_module_help())
    sys.exit(0)
  sys.exit(main(sys.argv))
