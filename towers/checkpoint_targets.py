"""What a checkpoint is to be restored to: variables, or their names alone."""

import os
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional
from typing import Tuple

import tensorflow.compat.v1 as tf

from towers import checkpoint_files
from towers import checkpoint_names


class Piece(NamedTuple):
  """A variable, and which part of the tensor in the file it holds.

  Fields:
    variable: The variable.
    spec: The part, as TensorFlow's `RestoreV2` takes it; "" for all of it.
  """
  variable: Any
  spec: str


class Target(NamedTuple):
  """What one tensor of a file goes to.

  Fields:
    shape: Its shape; None if it may be any.
    dtype: Its type; None if it may be any.
    required: Whether a restore without it is an error.
    variables: The variable; several if it is partitioned, none if only its name
      is known.
  """
  shape: Optional[Tuple[int, ...]]
  dtype: Optional[tf.DType]
  required: bool
  variables: Tuple[Any, ...] = ()

  def pieces(self) -> List[Piece]:
    """Returns the variables and their parts of the tensor."""
    slices = [_slice_info(variable) for variable in self.variables]
    return [Piece(variable, info.spec if info else "")
            for variable, info in zip(self.variables, slices)]

  def difference(self, entry: checkpoint_files.Entry) -> Tuple[str, str]:
    """Returns shape and type there and here; ("", "") if they agree."""
    shape = tf.TensorShape(self.shape)
    if (shape.is_compatible_with(entry.shape)
        and self.dtype in (None, entry.dtype)):
      return "", ""
    here = f"{(self.dtype or entry.dtype).name}{_text(shape)}"
    return f"{entry.dtype.name}{_text(tf.TensorShape(entry.shape))}", here


def targets(variables: Any) -> Dict[str, Target]:
  """Returns the targets by name.

  Args:
    variables: See `towers.checkpoints.plan`; or what this function returned.

  Raises:
    TypeError: If it is nothing of the kind.
    ValueError: If two variables have one name.
  """
  if variables is None:
    variables = tf.global_variables()
  if isinstance(variables, (str, os.PathLike)):
    entries = checkpoint_files.File(os.fspath(variables)).entries
    return _by_shape({name: (entry.shape, entry.dtype)
                      for name, entry in entries.items()})
  if not isinstance(variables, Mapping):
    return _by_variable(_named(variables))
  if all(isinstance(value, Target) for value in variables.values()):
    return dict(variables)
  shapes = {name: value for name, value in variables.items()
            if not _is_variable(value)}
  if shapes and len(shapes) < len(variables):
    raise TypeError(
        "`variables` must be all variables or all shapes: got a shape for "
        f"{sorted(shapes)}.")
  if shapes:
    return _by_shape({name: (shape, None) for name, shape in shapes.items()})
  return _by_variable(
      (name, part) for name, value in variables.items()
      for part in _parts(value))


def faults(wanted: Mapping[str, Target],
           entries: Mapping[str, checkpoint_files.Entry], *,
           shown: Optional[int] = None) -> str:
  """Returns what a file lacks for all targets, in words; "" for nothing.

  Args:
    wanted: The targets by name.
    entries: What the file has.
    shown: How many names to tell of each kind; None for all.
  """
  missing = [f"`{name}`" for name in wanted if name not in entries]
  different = [
      f"`{name}` ({there}, not {here})"
      for name, target in wanted.items() if name in entries
      for there, here in [target.difference(entries[name])] if there]

  def text(what: str, names: List[str]) -> str:
    listed = ", ".join(names[:shown])
    more = len(names) - len(names[:shown])
    return (f"{what} {len(names)} of {len(wanted)}: {listed}" +
            (f" and {more} more" if more else ""))

  return " and ".join(
      text(what, names) for what, names in (
          ("lacks", missing), ("has other shapes in", different)) if names)


def anything(names: Iterable[str]) -> Dict[str, Target]:
  """Returns targets of these names that take a tensor of any shape and type."""
  return {name: Target(None, None, False) for name in names}


def _named(variables: Iterable[Any]) -> List[Tuple[str, Any]]:
  found = []
  for variable in variables:
    if not _is_variable(variable):
      raise TypeError(
          "`variables` must be variables, a mapping of names to variables or "
          f"shapes, or a checkpoint: got {variable!r} among them.")
    for part in _parts(variable):
      info = _slice_info(part)
      found.append((info.full_name if info else part.op.name, part))
  return found


def _by_variable(named: Iterable[Tuple[str, Any]]) -> Dict[str, Target]:
  groups: Dict[str, List[Any]] = {}
  for name, variable in named:
    group = groups.setdefault(name, [])
    if not any(variable is other for other in group):
      group.append(variable)
  optimizers = checkpoint_names.optimizer_names(list(groups))
  found = {}
  for name, group in groups.items():
    slices = [_slice_info(variable) for variable in group]
    if len(group) > 1 and None in slices:
      raise ValueError(
          f"`variables` must have names of their own: {name} is that of "
          f"{len(group)}. Pass a mapping of names in the file to variables.")
    shape = _known(tf.TensorShape(
        slices[0].full_shape if slices[0] else group[0].shape))
    # Of what is not trained, scalars count steps or scale losses; others
    # that are no slots, such as moving statistics, belong to the model.
    found[name] = Target(
        shape, group[0].dtype.base_dtype,
        bool(group[0].trainable or not optimizers[name] and shape != ()),
        tuple(group))
  return found


def _by_shape(shapes: Mapping[str, Tuple[Any, Any]]) -> Dict[str, Target]:
  optimizers = checkpoint_names.optimizer_names(list(shapes))
  return {
      name: Target(_known(tf.TensorShape(shape)), dtype, not optimizers[name])
      for name, (shape, dtype) in shapes.items()
  }


def _is_variable(value: Any) -> bool:
  # Resource variables are no `tf.Variable` of v1; partitioned ones are none.
  return hasattr(value, "initializer") or hasattr(value, "_variable_list")


def _parts(variable: Any) -> List[Any]:
  """Returns what a partitioned variable is made of, or the variable."""
  return list(getattr(variable, "_variable_list", [variable]))


def _slice_info(variable: Any) -> Any:
  # Savers ask variables in this way which part of the whole they are.
  return getattr(variable, "_get_save_slice_info", lambda: None)()


def _known(shape: tf.TensorShape) -> Optional[Tuple[Any, ...]]:
  return None if shape.rank is None else tuple(shape.as_list())


def _text(shape: tf.TensorShape) -> str:
  if shape.rank is None:
    return "[...]"
  return f"[{', '.join(str(size or '?') for size in shape.as_list())}]"
