"""Dealing out the rows of a batch to the towers."""

from typing import Any, List, NamedTuple, Sequence, Set

import tensorflow.compat.v1 as tf


class PerTower(NamedTuple):
  """Inputs that each tower has for its own, for `towers.build_towers`.

  Fields:
    nests: One nest of tensors per tower, all of the same structure. The leading
      axis of a tower's tensors is its own batch.
  """
  nests: Sequence[Any]


class Shard(NamedTuple):
  """What one tower gets.

  Fields:
    value: Nest of tensors of shape `[B_t, ...]`, with `B_t` at least 1.
    rows: How many of these rows count: `B_t`, or 0 where the tower got none and
      borrowed one. A number where it is known, else a scalar int32 tensor.
  """
  value: Any
  rows: Any


def deal(inputs: Any, count: int) -> List[Shard]:
  """Deals out rows contiguously, as evenly as can be.

  Of `B` rows, tower `t` gets `B // count`, and one more where
  `t < B % count`. A tower that gets none borrows one row, since most ops do not
  work on none.

  Args:
    inputs: Nest of tensors of shape `[B, ...]`, with `B` known or not; or a
      `PerTower`; or None for no inputs.
    count: Number of towers.

  Returns:
    One `Shard` per tower.

  Raises:
    TypeError: If `inputs` holds something that is no dense tensor.
    ValueError: If `inputs` holds nothing or a scalar, if leading sizes differ,
      if there are no rows, or if `PerTower` does not fit the towers.
  """
  if inputs is None:
    return [Shard(None, 1) for _ in range(count)]
  with tf.name_scope("inputs"):
    if isinstance(inputs, PerTower):
      return _own(inputs, count)
    flat = _tensors(inputs, "inputs")
    rows = _leading_size(flat, "inputs")
    if isinstance(rows, int):
      return _deal_known(inputs, flat, rows, count)
    return _deal_unknown(inputs, flat, rows, count)


def _deal_known(inputs: Any, flat: Sequence[tf.Tensor], rows: int,
                count: int) -> List[Shard]:
  if count == 1:
    return [Shard(tf.nest.pack_sequence_as(inputs, flat), rows)]
  share, extra = divmod(rows, count)
  shards = []
  for tower in range(count):
    size = share + (tower < extra)
    begin = min(tower * share + min(tower, extra), rows - 1)
    own = slice(begin, begin + max(size, 1))
    pieces = [_on_device_of(x, lambda x=x, own=own: x[own]) for x in flat]
    shards.append(Shard(tf.nest.pack_sequence_as(inputs, pieces), size))
  return shards


def _deal_unknown(inputs: Any, flat: Sequence[tf.Tensor], rows: tf.Tensor,
                  count: int) -> List[Shard]:
  if count == 1:
    with tf.control_dependencies([rows]):  # Nothing runs on an empty batch.
      flat = [_on_device_of(x, lambda x=x: tf.identity(x)) for x in flat]
    return [Shard(tf.nest.pack_sequence_as(inputs, flat), rows)]
  tower = tf.range(count)
  share, extra = rows // count, rows % count
  sizes = share + tf.cast(tower < extra, tf.int32)
  begins = tf.minimum(tower * share + tf.minimum(tower, extra), rows - 1)
  ends = begins + tf.maximum(sizes, 1)
  shards = []
  for index in range(count):
    begin, end = begins[index:index + 1], ends[index:index + 1]
    pieces = [
        _on_device_of(x, lambda x=x, begin=begin, end=end: tf.strided_slice(
            x, begin, end)) for x in flat
    ]
    for piece, x in zip(pieces, flat):
      if x.shape.rank is not None:
        piece.set_shape([None] + x.shape.as_list()[1:])
    shards.append(
        Shard(tf.nest.pack_sequence_as(inputs, pieces), sizes[index]))
  return shards


def _own(inputs: PerTower, count: int) -> List[Shard]:
  """Takes inputs that each tower has for its own."""
  nests = list(inputs.nests)
  if len(nests) != count:
    raise ValueError(
        f"`inputs` must hold one nest per tower: expected {count} in "
        f"`towers.PerTower`, got {len(nests)}.")
  flats = []
  for index, nest in enumerate(nests):
    try:
      tf.nest.assert_same_structure(nests[0], nest)
    except (TypeError, ValueError) as error:
      raise ValueError(
          "`inputs` must have the same structure for each tower: that of tower "
          f"{index} differs from that of tower 0. {error}") from error
    flats.append(_tensors(nest, f"inputs.nests[{index}]"))
  sizes = [
      _leading_size(flat, f"inputs.nests[{index}]", may_be_empty=True)
      for index, flat in enumerate(flats)
  ]
  if all(isinstance(size, int) for size in sizes):
    if not any(sizes):
      raise ValueError(
          "`inputs` must hold at least one row: got a batch of 0 rows.")
    if all(sizes):
      return [
          Shard(tf.nest.pack_sequence_as(nest, flat), size)
          for nest, flat, size in zip(nests, flats, sizes)
      ]
  total = tf.add_n([tf.convert_to_tensor(size, tf.int32) for size in sizes])
  with tf.control_dependencies([_assert_rows(total)]):
    sizes = [tf.identity(tf.convert_to_tensor(size)) for size in sizes]
  borrowed = [_lent(sizes, values) for values in zip(*flats)]
  return [
      Shard(
          tf.nest.pack_sequence_as(nest, [
              _or_borrowed(size, x, row) for x, row in zip(flat, borrowed)
          ]), size) for nest, flat, size in zip(nests, flats, sizes)
  ]


def _lent(sizes: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> tf.Tensor:
  """Returns a row of the first tower that has one.

  The towers' rows may differ in size, so nothing may bring them together.
  """
  row = values[-1][:1]
  for size, x in list(zip(sizes, values))[-2::-1]:
    row = tf.cond(size > 0, lambda x=x: x[:1], lambda row=row: tf.identity(row))
  return row


def _or_borrowed(size: tf.Tensor, x: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
  """Returns `x`, or `row` where `x` is empty."""
  result = tf.cond(size > 0, lambda: tf.identity(x), lambda: tf.identity(row))
  if x.shape.rank is not None:
    result.set_shape([None] + x.shape.as_list()[1:])
  return result


def _on_device_of(x: tf.Tensor, function: Any) -> tf.Tensor:
  """Calls `function` where `x` is, so that only its result travels."""
  with tf.device(None), tf.device(x.device):
    return function()


def _tensors(nest: Any, argument: str) -> List[tf.Tensor]:
  flat = tf.nest.flatten(nest)
  if not flat:
    raise ValueError(
        f"`{argument}` must hold at least one tensor: got {nest!r}. For a "
        "model that makes its own inputs, leave `inputs` out.")
  for value in flat:
    if value is None or isinstance(
        value, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
      raise TypeError(
          f"`{argument}` must hold dense tensors with a row per example: got "
          f"{value!r}. Make it dense, or close over it in `model_fn`, where "
          "all towers share it.")
  return [tf.convert_to_tensor(value) for value in flat]


def _leading_size(flat: Sequence[tf.Tensor], argument: str,
                  may_be_empty: bool = False) -> Any:
  """Returns the number of rows that all tensors have, and checks that it is.

  Returns:
    A number where it is known now; else a scalar int32 tensor, which fails in
    the session where sizes differ or are 0.
  """
  scalars = [x.name for x in flat if x.shape.rank == 0]
  if scalars:
    raise ValueError(
        f"`{argument}` must hold tensors whose leading axis is the batch: got "
        f"scalars {scalars}. Close over them in `model_fn`, where all towers "
        "share them.")
  known = {
      x.name: tf.dimension_value(x.shape[0])
      for x in flat
      if x.shape.rank is not None and x.shape[0] is not None
  }
  known = {name: size for name, size in known.items() if size is not None}
  if len(set(known.values())) > 1:
    raise ValueError(
        f"`{argument}` must hold tensors with the same number of rows: got "
        f"{known}.")
  if known and len(known) == len(flat):
    size = next(iter(known.values()))
    if not size and not may_be_empty:
      raise ValueError(
          f"`{argument}` must hold at least one row: got a batch of 0 rows.")
    return size
  return _checked_size(flat, argument, may_be_empty)


def _checked_size(flat: Sequence[tf.Tensor], argument: str,
                  may_be_empty: bool) -> tf.Tensor:
  sizes = [_on_device_of(x, lambda x=x: tf.shape(x)[0]) for x in flat]
  checks = [
      tf.debugging.assert_equal(
          size,
          sizes[0],
          message=f"`{argument}` must hold tensors with the same number of "
          f"rows, but `{x.name}` and `{flat[0].name}` differ.")
      for size, x in zip(sizes[1:], flat[1:])
  ]
  if not may_be_empty:
    checks.append(_assert_rows(sizes[0]))
  with tf.control_dependencies(checks):
    return tf.identity(sizes[0], name="rows")


def _assert_rows(rows: tf.Tensor) -> tf.Operation:
  return tf.debugging.assert_positive(
      rows,
      message="`inputs` must hold at least one row: got a batch of 0 rows.")


def weights(shards: Sequence[Shard]) -> List[Any]:
  """Returns each tower's number of rows, as numbers or float32 scalars."""
  return [
      float(shard.rows) if isinstance(shard.rows, int) else tf.cast(
          shard.rows, tf.float32) for shard in shards
  ]


def gate(shards: Sequence[Shard]) -> List[tf.Operation]:
  """Returns the ops that have run once every tower has its inputs."""
  ops = set()
  for shard in shards:
    if not isinstance(shard.rows, int):
      ops.add(shard.rows.op)
    ops |= ops_of(shard)
  return sorted(ops, key=lambda op: op.name)


def ops_of(shard: Shard) -> Set[tf.Operation]:
  """Returns the ops that hold the rows of one tower."""
  return {
      x.op for x in tf.nest.flatten(shard.value) if isinstance(x, tf.Tensor)
  }
