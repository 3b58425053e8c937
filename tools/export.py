"""Writes the network of a run of tools/train.py for serving, and tries it out.

  python tools/export.py --logdir=/tmp/resnet20 --export_dir=/models/resnet20/1

Writes a SavedModel, as TensorFlow 2 and TensorFlow Serving load it; the latter
wants a number as the last part of the path. The input `images` are pixels in
the units of the data set's files, `[B, H, W, C]` for any B (and for
segmentation any height and width): the scaling of the run is in the model.
The outputs are `logits`, `classes` and, for classification, `probabilities`.

A process of its own, which knows nothing of the model's code, then computes
them for random images. The largest difference to what the graph of the run
computes, in towers, is printed; it must be at most 1e-5, in units of 1 or of
the output's largest value, whichever is more (for runs in 16 bits: 1e-2,
bfloat16 1e-1). Else the exit status is 1.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
from absl import flags
import numpy as np

from tools import startup

startup.load_tensorflow()

import tensorflow.compat.v1 as tf
from tools import command_line
from tools import datasets
from tools import logdirs
from tools import run_flags
from tools import training_graph
from tools import training_options
import towers

Run = training_options.Run
UsageError = command_line.UsageError

PREDICT = pathlib.Path(__file__).with_name("predict.py")

# How much the two may differ, by the type in which the network computes. In 16
# bits it makes a difference which ops a process computes in one go.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}

# How many images are tried: none of 2, 3 and 4 towers divides them.
IMAGES = 5


def _flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = command_line.flag_values()
  run_flags.define_logdir(values)
  run_flags.define_checkpoint(values)
  flags.DEFINE_string(
      "export_dir", None, "Directory to write, which must not exist or be "
      "empty, such as /models/resnet20/1.", flag_values=values)
  flags.DEFINE_string(
      "frozen_graph", None, "File to write, besides, with a frozen GraphDef.",
      flag_values=values)
  return values


class Difference(NamedTuple):
  """The largest difference found, and in which output."""
  value: float
  output: str


def serving_fn(run: Run) -> Callable[[tf.Tensor], Dict[str, tf.Tensor]]:
  """Returns what builds the network of a run for serving.

  Its argument are images of shape `[B, H, W, C]`, in the units of the files.
  """
  network = training_graph.network_of(run.options, run)
  mean, deviation = (np.array(values, np.float32)
                     for values in (run.mean, run.deviation))

  def serve(images):
    logits = network((images - mean) / deviation, training=False)
    outputs = {"logits": logits, "classes": tf.argmax(logits, axis=-1)}
    if run.kind == datasets.CLASSIFICATION:
      outputs["probabilities"] = tf.nn.softmax(logits)
    return outputs

  return serve


def inputs(run: Run) -> List[tf.TensorSpec]:
  """Returns what the network takes."""
  height, width, channels = run.image_shape
  if run.kind == datasets.SEGMENTATION:
    height = width = None  # These networks take any.
  return [tf.TensorSpec([None, height, width, channels], tf.float32, "images")]


def random_images(run: Run) -> np.ndarray:
  """Returns images with the mean and deviation of those of the data set."""
  noise = np.random.RandomState(0).normal(size=(IMAGES, *run.image_shape))
  return (noise * run.deviation + run.mean).astype(np.float32)


def training_outputs(run: Run, checkpoint: str,
                     images: np.ndarray) -> Dict[str, np.ndarray]:
  """Returns what the graph of the run computes, in as many towers, on CPUs.

  Raises:
    UsageError: If the checkpoint does not fit.
  """
  count = len(run.options.devices or ()) or run.options.num_towers or 2
  with tf.Graph().as_default():
    graph = towers.build_towers(
        serving_fn(run), [f"/cpu:{index}" for index in range(count)],
        inputs=[tf.constant(images)])
    with tf.Session(config=graph.session_config()) as session:
      logdirs.restore_model(session, checkpoint)
      return session.run(graph.outputs)


def served_outputs(images: np.ndarray,
                   *arguments: str) -> Dict[str, np.ndarray]:
  """Returns what tools/predict.py computes in a process of its own.

  Args:
    images: Float32 array of shape `[B, H, W, C]`.
    *arguments: Flags that tell the model.

  Raises:
    UsageError: If that process fails.
  """
  with tempfile.TemporaryDirectory() as folder:
    source, target = (os.path.join(folder, name)
                      for name in ("images.npy", "outputs.npz"))
    np.save(source, images)
    done = subprocess.run(
        [sys.executable, str(PREDICT), f"--images={source}",
         f"--output={target}", *arguments],
        env=dict(os.environ, CUDA_VISIBLE_DEVICES=""), capture_output=True,
        text=True, check=False)
    if done.returncode:
      lines = done.stderr.strip().splitlines() or ["no message"]
      raise UsageError("`--export_dir` must hold a model that another process "
                       f"can load: status {done.returncode} ({lines[-1]}).")
    with np.load(target) as outputs:
      return dict(outputs)


def difference(served: Dict[str, np.ndarray],
               expected: Dict[str, np.ndarray]) -> Difference:
  """Returns the largest difference of scores.

  It is in units of the output's largest value, where that is above 1: a small
  score is what is left of large ones, and has their rounding errors.

  Classes count only as what the scores of the same process say: two scores that
  are equal but for rounding may make different ones.
  """
  found = [Difference(float(not np.array_equal(
      served["classes"], np.argmax(served["logits"], axis=-1))), "classes")]
  for key in sorted(expected.keys() - {"classes"}):
    apart = np.abs(served[key] - expected[key]).max()
    apart /= max(1.0, np.abs(expected[key]).max())
    # Not a number is no small number.
    found.append(Difference(float(np.nan_to_num(apart, nan=np.inf)), key))
  return max(found)


def compare(run: Run, checkpoint: str, exported: Any,
            frozen: Optional[Any]) -> Difference:
  """Returns the largest difference of what was written to the run's graph."""
  images = random_images(run)
  expected = training_outputs(run, checkpoint, images)
  arguments = [f"--saved_model={exported.path}"]
  if frozen:
    arguments += [f"--frozen_graph={frozen.path}",
                  f"--input={frozen.inputs['images']}",
                  f"--fetch={','.join(frozen.outputs.values())}"]
  served = served_outputs(images, *arguments)
  found = difference(served, expected)
  if frozen:
    found = max(found, difference(
        {key: served[name] for key, name in frozen.outputs.items()}, expected))
  return found


def export(values: flags.FlagValues) -> int:
  """Does what the flags say; returns the exit status of the process.

  Raises:
    UsageError: If they, or the files, do not fit.
    ValueError: If the library says so.
  """
  run = run_flags.run(values)
  if not values.export_dir:
    raise UsageError("`--export_dir` must be given: got none.")
  checkpoint = run_flags.checkpoint(values)
  if values.frozen_graph and os.path.exists(values.frozen_graph):
    raise UsageError("`--frozen_graph` must not exist: got "
                     f"{values.frozen_graph}. Give another, or remove it.")
  exported = towers.export.saved_model(
      serving_fn(run), checkpoint, values.export_dir, inputs(run))
  print(f"checkpoint: {checkpoint}\nWrote {exported.path}: "
        f"{', '.join(exported.outputs)} of {', '.join(exported.inputs)}.")
  frozen = None
  if values.frozen_graph:
    frozen = towers.export.frozen_graph(
        serving_fn(run), checkpoint, values.frozen_graph, inputs(run))
    print(f"Wrote {frozen.path}: feed {', '.join(frozen.inputs.values())}, "
          f"fetch {', '.join(frozen.outputs.values())}.")
  found = compare(run, checkpoint, exported, frozen)
  limit = TOLERANCES[run.options.precision]
  print(f"largest difference in another process: {found.value:.1e} "
        f"({found.output})")
  if found.value > limit:
    print(f"export.py: the exported model must agree with that of the run to "
          f"{limit:.0e}: got {found.value:.1e} in {found.output}. Do not use "
          f"{exported.path}.", file=sys.stderr)
    return 1
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()

  def action(values):
    try:
      return export(values)
    except (ValueError, TypeError) as error:  # The library's own texts.
      raise UsageError(" ".join(str(error).split())) from error

  return command_line.main(argv, _flags(), text=__doc__, action=action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
