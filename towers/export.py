"""Writes a trained model for serving: built once, without towers or devices.

    def serving_fn(images):
      logits = resnet.logits(images, num_classes=10, training=False)
      return {"logits": logits, "probabilities": tf.nn.softmax(logits)}

    towers.export.saved_model(
        serving_fn, "/tmp/run/model.ckpt-600", "/models/resnet/1",
        [tf.TensorSpec([None, 32, 32, 3], tf.float32, "images")])

The model is built as plain code on one device. Its variables have the names
that they have in any number of towers, so every checkpoint of a training run
will do; an optimizer's slots and other variables that the outputs do not need
are left out. What is written loads on a machine with one CPU:

    model = tf.saved_model.load("/models/resnet/1")  # TensorFlow 2.
    model.signatures["serving_default"](images=images)["logits"]

TensorFlow Serving looks for versions of a model in directories whose names are
numbers, so the last part of a path for it is one, as above. `frozen_graph`
writes a GraphDef with the values of the variables in it, for programs that need
one.
"""

import contextlib
import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple
import uuid

import tensorflow.compat.v1 as tf

from towers import checkpoint_files
from towers import checkpoint_targets
from towers import export_graph

# How many names an error lists before it counts the rest.
_SHOWN = 10


class Exported(NamedTuple):
  """What was written.

  Fields:
    path: The directory, or the file of a frozen graph.
    checkpoint: Prefix of the checkpoint that the values are from.
    inputs: For each input's key, the name of its tensor in the graph.
    outputs: For each output's key, the name of its tensor in the graph.
    variables: Names of the variables whose values were written.
  """
  path: str
  checkpoint: str
  inputs: Dict[str, str]
  outputs: Dict[str, str]
  variables: List[str]


def saved_model(model_fn: Callable[..., Any], checkpoint: str, directory: str,
                inputs: Any) -> Exported:
  """Writes a SavedModel with the signature `serving_default`.

  It appears at once, complete, or not at all: it is written beside `directory`
  and then renamed. Convolutions and other kernels that the model computes
  channels first (`NCHW`) compute channels last (`NHWC`) in it, which every CPU
  can, and give the same tensors; inputs and outputs keep the shapes that the
  model gives them.

  Args:
    model_fn: Builds the model for inference, with the moving statistics of
      batch norm. Called as by `towers.build_towers`: a tuple or list of inputs
      becomes its positional arguments, anything else its one argument. Returns
      a tensor, a nest of tensors, of which "loss" is left out, or a
      `towers.TowerSpec`. It must make the variables as in training; what it
      asks for by `tf.device` is dropped.
    checkpoint: Prefix of a checkpoint, as `tf.train.Saver` writes it in
      training with any number of towers; or a directory, for the last in it.
    directory: Where to write. Must not exist yet, or be empty.
    inputs: What the model takes: a nest of `tf.TensorSpec`, placeholders (of
      which only type and shape count), or pairs (type, shape). The shapes are
      `[None, ...]`, so that any batch size can be served. In a dict, the keys
      are those of the signature; in a list, and for a single input, names of
      specs or placeholders are, or else those of `model_fn`'s parameters.

  Returns:
    What was written. The keys of outputs are those of the dict, or "output" for
    a single tensor, "output_0" and so on for a list; parts of a deeper nest are
    joined by "_".

  Raises:
    TypeError: If inputs or outputs are nothing that can be exported.
    ValueError: If `directory` is not empty, or cannot be written.
    ValueError: If `checkpoint` does not exist, cannot be read, lacks variables,
      or has others of another shape or type.
    ValueError: If a batch size is not free, or outputs need what another
      process does not have (a placeholder that is no input, Python functions,
      a data set).
  """
  directory = os.fspath(directory).rstrip("/") or "/"
  _check_empty(directory)
  path = checkpoint_files.find(checkpoint)
  model = export_graph.build(model_fn, inputs)
  with _restored(model, path) as session:
    signature = tf.saved_model.predict_signature_def(
        model.inputs, model.outputs)
    with _written(directory, "directory") as temporary:
      builder = tf.saved_model.Builder(temporary)
      initializers = model.table_initializers
      builder.add_meta_graph_and_variables(
          session, [tf.saved_model.SERVING],
          {tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY: signature},
          assets_collection=model.assets,
          main_op=tf.group(*initializers) if initializers else None,
          clear_devices=True, strip_default_attrs=True, saver=model.saver)
      builder.save()
  return _exported(model, directory, path)


def frozen_graph(model_fn: Callable[..., Any], checkpoint: str, path: str,
                 inputs: Any) -> Exported:
  """Writes a GraphDef in which the variables are constants.

  `tf.import_graph_def` and the tools for small devices read it. Where there is
  a choice, use `saved_model`, which tells what its inputs and outputs are.

  Args:
    model_fn: See `saved_model`.
    checkpoint: See `saved_model`.
    path: The file to write, such as "model.pb". Must not exist yet.
    inputs: See `saved_model`.

  Returns:
    What was written, with the names of the tensors to feed and to fetch.

  Raises:
    TypeError: See `saved_model`.
    ValueError: See `saved_model`; `path` is in place of `directory`.
    ValueError: If outputs need lookup tables, which a GraphDef cannot fill.
  """
  path = os.fspath(path)
  if tf.io.gfile.exists(path):
    raise ValueError(f"`path` must not exist: got {path}. Give another, or "
                     "remove it.")
  prefix = checkpoint_files.find(checkpoint)
  model = export_graph.build(model_fn, inputs)
  if model.table_initializers:
    raise ValueError(
        "`model_fn` must not need lookup tables for a frozen graph, which "
        f"cannot fill them: got {model.table_initializers[0].name}. Use "
        "`saved_model`.")
  with _restored(model, prefix) as session:
    graph_def = tf.graph_util.convert_variables_to_constants(
        session, model.graph.as_graph_def(),
        [x.op.name for x in [*model.outputs.values(), *model.inputs.values()]])
  with _written(path, "path") as temporary:
    with tf.io.gfile.GFile(temporary, "wb") as file:
      file.write(graph_def.SerializeToString(deterministic=True))
  return _exported(model, path, prefix)


def _exported(model: export_graph.InferenceGraph, path: str,
              checkpoint: str) -> Exported:
  names = lambda tensors: {key: x.name for key, x in tensors.items()}
  return Exported(path, checkpoint, names(model.inputs), names(model.outputs),
                  sorted(checkpoint_targets.targets(model.variables)))


def _check_empty(directory: str) -> None:
  if not tf.io.gfile.exists(directory):
    return
  if not tf.io.gfile.isdir(directory):
    raise ValueError(f"`directory` must be a directory: got {directory}, which "
                     "is a file. Give another.")
  held = tf.io.gfile.listdir(directory)
  if held:
    raise ValueError(
        f"`directory` must not exist or be empty: got {directory}, which holds "
        f"{held[0]}{' and more' if len(held) > 1 else ''}. Give a new one, "
        "such as that of the next version.")


def _check_variables(file: checkpoint_files.File, variables: List[Any]) -> None:
  """Checks that the checkpoint has a value for each variable."""
  faults = checkpoint_targets.faults(
      checkpoint_targets.targets(variables), file.entries, shown=_SHOWN)
  if faults:
    raise ValueError(
        "`checkpoint` must hold the variables that the outputs need: "
        f"{file.path} {faults}. Build `model_fn` as in "
        "training; if only names differ, `towers.checkpoints.write_cleaned` "
        "writes the checkpoint anew.")


@contextlib.contextmanager
def _restored(model: export_graph.InferenceGraph,
              path: str) -> Iterator[tf.Session]:
  """Opens a session in which the variables have the values of a checkpoint."""
  _check_variables(checkpoint_files.File(path), model.variables)
  # Not on GPUs, which may be in use by training.
  config = tf.ConfigProto(device_count={"GPU": 0})
  with model.graph.as_default(), tf.Session(config=config) as session:
    with checkpoint_files.explained(path):
      model.saver.restore(session, path)
    yield session


@contextlib.contextmanager
def _written(path: str, argument: str) -> Iterator[str]:
  """Yields the path to write to, which is renamed to `path` in the end.

  Raises:
    ValueError: If something cannot be written. What was is removed.
  """
  folder, name = os.path.split(path)
  # Not one of `tempfile`, which the user of a server could not read.
  temporary = os.path.join(folder, f"{name}.{uuid.uuid4().hex[:8]}.tmp")
  try:
    tf.io.gfile.makedirs(folder or ".")
    yield temporary
    tf.io.gfile.rename(temporary, path, overwrite=True)
  except (tf.errors.OpError, OSError) as error:
    text = getattr(error, "message", str(error)).strip().splitlines()[0]
    raise ValueError(
        f"`{argument}` must be a path that can be written to: got {path} "
        f"({text}).") from error
  finally:
    with contextlib.suppress(tf.errors.OpError, OSError):
      if tf.io.gfile.isdir(temporary):
        tf.io.gfile.rmtree(temporary)
      elif tf.io.gfile.exists(temporary):
        tf.io.gfile.remove(temporary)
