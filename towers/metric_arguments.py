"""The arguments of a streaming metric: from those of all towers to one's.

See `metrics.streaming` for the rules.
"""

from typing import Any, Dict, List, NamedTuple, Sequence

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import collectives
from towers import context
from towers import lockstep as lockstep_lib

# Metrics whose arguments have no rows: they add up what they get as it is.
_WITHOUT_ROWS = ("mean_tensor",)


def of_tensors(kind: str, arguments: Dict[str, Any]) -> Dict[str, Any]:
  """Returns those of the arguments that hold tensors.

  Raises:
    TypeError: If one holds tensors of a kind that cannot be put together.
  """
  found = {}
  for name, value in arguments.items():
    if _tensorflow.is_variable(value):
      value = tf.convert_to_tensor(value)
    flat = tf.nest.flatten(value)
    for x in flat:
      if isinstance(x, (tf.RaggedTensor, tf.IndexedSlices)):
        raise TypeError(
            f"`{name}` of {kind} must be made of tensors or sparse tensors: "
            f"got a {type(x).__name__} (tower "
            f"{context.current_tower().index}). Convert it first.")
    if any(isinstance(x, (tf.Tensor, tf.SparseTensor)) for x in flat):
      found[name] = value
  return found


class _Row(NamedTuple):
  """One tensor of the arguments in all towers.

  Fields:
    argument: The argument that it stands in.
    values: Of each tower.
  """
  argument: str
  values: Sequence[Any]

  def same(self) -> bool:
    """Says whether it is the same tensor in each tower."""
    first = self.values[0]
    if all(_identity(v) == _identity(first) for v in self.values):
      return True
    if isinstance(first, tf.SparseTensor):
      return False
    # The model may make it in each, of a constant or of what is the same.
    common: List[tf.Tensor] = []
    return all(
        lockstep_lib.same_value(first, v, common=common)
        for v in self.values) and bool(
            not self.rank() or common or first.op.type == "Const" and
            not context.merging().towers[0].plain_name(first.name) ==
            first.name)

  def rank(self) -> int:
    value = self.values[0]
    return 1 if isinstance(value, tf.SparseTensor) else value.shape.rank


def _identity(value: Any) -> Any:
  if isinstance(value, tf.SparseTensor):
    return id(value.indices), id(value.values), id(value.dense_shape)
  return id(value)


class Tensors:
  """The tensors in the arguments of one tower, and what all make of theirs."""

  def __init__(self, kind: str, metric: str, arguments: Dict[str, Any]):
    """Takes the arguments that hold tensors, as `of_tensors` returned them.

    Args:
      kind: What errors call the metric.
      metric: Its name.
      arguments: Nests by the name of the argument.

    Raises:
      ValueError: If the rank of a tensor is not known.
    """
    self._kind = kind
    self._metric = metric
    self._arguments = arguments
    # Where each tensor stands, and for a sparse one, its three parts.
    self._places = [(name, k) for name, value in arguments.items()
                    for k, x in enumerate(tf.nest.flatten(value))
                    if isinstance(x, (tf.Tensor, tf.SparseTensor))]
    self.components = [_parts(self._at(place)) for place in self._places]
    self.averaged_by_rows = False
    for place in self._places:
      x = self._at(place)
      if isinstance(x, tf.Tensor) and x.shape.rank is None:
        raise ValueError(
            f"`{place[0]}` of {kind} must have a known rank, to tell rows "
            f"from scalars: `{x.name}` has none (tower "
            f"{context.current_tower().index}). Set it with `set_shape`.")

  def _at(self, place: Any) -> Any:
    name, k = place
    return tf.nest.flatten(self._arguments[name])[k]

  def packed(self, components: List[List[tf.Tensor]]) -> Dict[str, Any]:
    """Returns the arguments with other tensors in them."""
    flat = {name: tf.nest.flatten(value)
            for name, value in self._arguments.items()}
    for (name, k), parts in zip(self._places, components):
      flat[name][k] = _assembled(parts)
    return {name: tf.nest.pack_sequence_as(value, flat[name])
            for name, value in self._arguments.items()}

  def together(self, towers: List[List[List[tf.Tensor]]]) -> Any:
    """Puts the tensors of all towers together; for a meeting.

    Args:
      towers: The `components` of each tower.

    Returns:
      Components of the same structure.

    Raises:
      ValueError: If a tensor that differs in the towers has no rows, and there
        is no telling what it is over the whole batch.
    """
    tensors = [
        _Row(name, [_assembled(tower[k]) for tower in towers])
        for k, (name, _) in enumerate(self._places)
    ]
    apart = [x for x in tensors if not x.same()]
    rows = [x for x in apart if x.rank() and x.argument != "weights"]
    weights = [x for x in apart if x.argument == "weights"]
    scalars = [x for x in apart if not x.rank() and x.argument != "weights"]
    for x in rows + weights:
      self._check_rows(x)
    if scalars and (rows or any(w.rank() for w in weights) or
                    any(x.argument != "values" for x in scalars)):
      raise ValueError(
          f"`{scalars[0].argument}` of {self._kind} must have rows: got the "
          f"scalar `{scalars[0].values[0].name}`, of another value in each "
          "tower. Pass what it was made of, or make it the same in all with "
          "`towers.all_reduce`.")
    results = []
    for x in tensors:
      if x not in apart:
        result = x.values[0]
      elif x in scalars:
        result = self._mean(x, weights)
      elif x in weights:
        result = self._weights(x, rows)
      else:
        result = _gathered(x.values)
      results.append(_parts(result))
    return results

  def _check_rows(self, x: _Row) -> None:
    """Refuses what has no rows of the batch."""
    for tower, (value, count) in enumerate(
        zip(x.values, context.merging().rows)):
      if isinstance(value, tf.SparseTensor) or not value.shape.rank:
        continue
      size = tf.dimension_value(value.shape[0])
      if x.argument == "weights" and size == 1:
        continue
      known = isinstance(count, float)
      if self._metric in _WITHOUT_ROWS:
        raise ValueError(
            f"`{x.argument}` of {self._kind} must be the same in all towers, "
            f"as it has no rows: got `{value.name}` in tower {tower}, another "
            "in each. Take the mean over the batch before, with "
            "`towers.all_reduce(x, \"mean\")`.")
      strange = size is not None and (
          count > 0 and size % count if known else True)
      if strange:
        raise ValueError(
            f"`{x.argument}` of {self._kind} must have the rows of its tower "
            f"on the leading axis: got `{value.name}` of shape {value.shape} "
            f"in tower {tower}, which has {count if known else 'any number of'}"
            " rows. Make it the same in all towers before, with "
            "`towers.all_reduce(x, \"mean\")`, say; or call the metric after "
            "the build, with `graph.outputs`.")

  def _mean(self, x: _Row, weights: Sequence[_Row]) -> tf.Tensor:
    """Returns the mean of a scalar over the towers."""
    dtype = x.values[0].dtype
    dtype = dtype if dtype.is_floating else tf.float32
    amounts = context.merging().rows
    if weights:
      amounts = _where_rows(weights[0].values)
    else:
      self.averaged_by_rows = True
    shares = collectives.shares_of(amounts, dtype)
    return tf.add_n([
        tf.math.multiply_no_nan(tf.cast(value, dtype), share)
        for value, share in zip(x.values, shares)])

  def _weights(self, x: _Row, rows: Sequence[_Row]) -> tf.Tensor:
    dense = [other for other in rows
             if not isinstance(other.values[0], tf.SparseTensor)]
    if not dense:
      if x.rank():
        return _gathered(x.values)
      return tf.add_n([tf.cast(w, tf.float32) for w in _where_rows(x.values)])
    repeated = []
    for weight, other in zip(x.values, dense[-1].values):
      if not weight.shape.rank:
        weight = tf.reshape(weight, [1] * other.shape.rank)
      if tf.dimension_value(weight.shape[0]) == 1:
        shape = tf.concat([tf.shape(other)[:1], tf.shape(weight)[1:]], 0)
        weight = tf.broadcast_to(weight, shape)
      repeated.append(weight)
    return _gathered(repeated)


def _parts(value: Any) -> List[tf.Tensor]:
  if isinstance(value, tf.SparseTensor):
    return [value.indices, value.values, value.dense_shape]
  return [value]


def _assembled(parts: Sequence[tf.Tensor]) -> Any:
  return tf.SparseTensor(*parts) if len(parts) == 3 else parts[0]


def _where_rows(values: Sequence[tf.Tensor]) -> List[tf.Tensor]:
  """Returns a scalar of each tower, 0 for those without rows."""
  result = []
  for value, count in zip(values, context.merging().rows):
    nothing = tf.zeros_like(value)
    if isinstance(count, float):
      result.append(value if count else nothing)
    else:
      result.append(tf.where_v2(count > 0, value, nothing))
  return result


def _gathered(values: Sequence[Any]) -> Any:
  """Returns the rows of all towers, but for those that were borrowed."""
  rows = context.merging().rows
  if not isinstance(values[0], tf.SparseTensor):
    return collectives.concat_rows(values, rows)
  kept = []
  for value, count in zip(values, rows):
    size = value.dense_shape * tf.concat(
        [[tf.cast(count > 0, tf.int64)],
         tf.ones_like(value.dense_shape[1:])], 0)
    own = tf.sparse.retain(value, value.indices[:, 0] < size[0])
    kept.append(tf.SparseTensor(own.indices, own.values, size))
  # The lists of labels of two towers need not be of the same length.
  return tf.sparse.concat(0, kept, expand_nonconcat_dim=True)
