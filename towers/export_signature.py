"""What an exported model takes and returns, and by which names."""

import inspect
import re
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence
from typing import Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers import tower as tower_lib

# TensorFlow 2 calls placeholders so, and no model calls a variable so: a name
# that is taken would change that of a variable, and its key in checkpoints.
_PREFIX = "serving_default_"

# Where an input or output stands in its nest: keys, fields and positions.
_Path = Tuple[Any, ...]


class Inputs(NamedTuple):
  """Placeholders for what a model takes.

  Fields:
    nest: The placeholders, nested as the model takes them.
    by_key: The placeholders by their key in the signature.
  """
  nest: Any
  by_key: Dict[str, tf.Tensor]


def placeholders(inputs: Any, model_fn: Callable[..., Any]) -> Inputs:
  """Makes a placeholder for each input, in the current graph.

  Args:
    inputs: See `towers.export.saved_model`.
    model_fn: Its parameters name inputs that have no name of their own.

  Raises:
    TypeError: If `inputs` holds something that tells no type and shape.
    ValueError: If it holds nothing, a batch size is not free, or two inputs
      have one key.
  """
  specs: List[Tuple[str, tf.TensorSpec]] = []
  parameters = _parameters(model_fn)

  def take(path: Any, value: Any) -> int:
    spec = _spec(value)
    key = _input_key(path, spec, parameters)
    _check_free(key, spec)
    specs.append((key, spec))
    return len(specs) - 1

  nest = _map(take, inputs, _is_spec)
  if not specs:
    raise ValueError(f"`inputs` must hold at least one input: got {inputs!r}.")
  _check_unique("inputs", [key for key, _ in specs])
  made = [tf.placeholder(spec.dtype, spec.shape, _PREFIX + _op_name(key))
          for key, spec in specs]
  nest = _map(lambda _, index: made[index], nest,
              lambda value: isinstance(value, int))
  return Inputs(nest, {key: x for (key, _), x in zip(specs, made)})


def called(model_fn: Callable[..., Any], nest: Any) -> Any:
  """Returns what `model_fn` returns, called as `towers.build_towers` does."""
  return model_fn(*nest) if isinstance(nest, (tuple, list)) else model_fn(nest)


def outputs(returned: Any) -> Dict[str, tf.Tensor]:
  """Returns the outputs that a model function returned, by key.

  Each is an op of its own, in the current graph, whose name is its key if that
  is free.

  Args:
    returned: A nest of tensors, with or without a loss, or a
      `towers.TowerSpec`.

  Raises:
    TypeError: If it holds something else than dense tensors.
    ValueError: If it holds no output, or two have one key.
  """
  nest = returned
  if isinstance(returned, tower_lib.TowerSpec):
    nest = returned.outputs
  elif isinstance(returned, Mapping):
    nest = {key: x for key, x in returned.items() if key != "loss"}
  found: List[Tuple[str, tf.Tensor]] = []

  def take(path: Any, value: Any) -> None:
    key = "_".join(map(str, path)) or "output"
    if path and isinstance(path[0], int):
      key = f"output_{key}"
    found.append((key, _tensor(key, value)))

  if nest is not None:
    _map(take, nest, lambda value: not isinstance(value, (Mapping, tuple,
                                                          list)))
  if not found or nest is returned and _is_scalar(returned):
    raise ValueError(
        "`model_fn` must return outputs to export: got "
        f"{returned!r}, which is no more than a loss. Return a tensor with "
        "rows, such as the logits, a dict of tensors, or "
        "`towers.TowerSpec(outputs=...)`.")
  _check_unique("outputs", [key for key, _ in found])
  return {key: tf.identity(x, name=_op_name(key)) for key, x in found}


def _map(function: Callable[[_Path, Any], Any], value: Any,
         is_leaf: Callable[[Any], bool], path: _Path = ()) -> Any:
  """Returns the nest with `function(path, leaf)` in place of each leaf."""
  if is_leaf(value):
    return function(path, value)
  inner = lambda key, x: _map(function, x, is_leaf, (*path, key))
  if isinstance(value, Mapping):
    return {key: inner(key, x) for key, x in value.items()}
  if hasattr(value, "_fields"):  # A named tuple.
    return type(value)(*map(inner, value._fields, value))
  if isinstance(value, (tuple, list)):
    return type(value)(inner(index, x) for index, x in enumerate(value))
  raise TypeError(
      "`inputs` must be a nest of `tf.TensorSpec`, placeholders or pairs "
      f"(type, shape): got {value!r} in it.")


def _is_spec(value: Any) -> bool:
  return isinstance(value, (tf.TensorSpec, tf.Tensor)) or (
      isinstance(value, (tuple, list)) and len(value) == 2
      and isinstance(value[0], (str, type, np.dtype, tf.DType)))


def _spec(value: Any) -> tf.TensorSpec:
  if isinstance(value, tf.TensorSpec):
    return value
  if isinstance(value, tf.Tensor):
    return tf.TensorSpec(value.shape, value.dtype,
                         value.op.name.split("/")[-1])
  try:
    return tf.TensorSpec(value[1], tf.as_dtype(value[0]))
  except (TypeError, ValueError) as error:
    raise TypeError(
        "`inputs` must hold types with shapes: expected for example "
        f"(tf.float32, [None, 32, 32, 3]), got {value!r} ({error}).") from error


def _input_key(path: _Path, spec: tf.TensorSpec,
               parameters: Sequence[str]) -> str:
  """Returns the key of an input, from where it stands or what it is called."""
  if not path or len(path) == 1 and isinstance(path[0], int):
    index = path[0] if path else 0
    if spec.name:
      return spec.name
    if index < len(parameters):
      return parameters[index]
  if path and isinstance(path[0], int):
    path = (parameters[path[0]] if path[0] < len(parameters)
            else f"input_{path[0]}", *path[1:])
  return "_".join(map(str, path)) or "input"


def _parameters(model_fn: Callable[..., Any]) -> List[str]:
  """Returns the names of the positional parameters, as far as they are known.
  """
  try:
    parameters = inspect.signature(model_fn).parameters.values()
  except (TypeError, ValueError):
    return []
  return [parameter.name for parameter in parameters
          if parameter.kind in (parameter.POSITIONAL_ONLY,
                                parameter.POSITIONAL_OR_KEYWORD)]


def _check_free(key: str, spec: tf.TensorSpec) -> None:
  shape = spec.shape
  if shape.rank is None or shape.rank and shape[:1].as_list() == [None]:
    return
  expected = [None, *shape.as_list()[1:]]
  raise ValueError(
      f"`inputs` must leave the batch size free: expected {expected} for "
      f"`{key}`, got {shape.as_list()}. The first axis is that of the batch.")


def _check_unique(what: str, keys: Sequence[str]) -> None:
  twice = sorted({key for key in keys if keys.count(key) > 1})
  if twice:
    raise ValueError(
        f"`{what}` must have a key each: several would have {twice}. Nest them "
        "in a dict whose keys, joined by \"_\", differ.")


def _tensor(key: str, value: Any) -> tf.Tensor:
  try:
    if value is None or isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
      raise TypeError("`tf.sparse.to_dense` or `to_tensor` makes dense ones.")
    return tf.convert_to_tensor(value)
  except (TypeError, ValueError) as error:
    raise TypeError(
        f"`model_fn` must return dense tensors: got {value!r} as `{key}`. "
        f"{error}") from error


def _is_scalar(value: Any) -> bool:
  shape = getattr(value, "shape", None)
  return isinstance(shape, tf.TensorShape) and shape.rank == 0


def _op_name(key: str) -> str:
  """Returns `key` with what names of ops may not hold replaced."""
  return re.sub(r"[^A-Za-z0-9_.\-]", "_", key).lstrip("_-") or "x"
