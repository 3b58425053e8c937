"""Checks that a model in N towers computes what it does on one device.

Most models do. This one, with a batch norm that keeps to its own tower, does
not, and is told where:

    report = towers.verification.verify(model_fn, (images, labels), 2)
    print(report)
    assert report.equal
"""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence
from typing import Tuple, Union

import numpy as np
import tensorflow.compat.v1 as tf

from towers import devices as devices_lib
from towers import verification_causes
from towers import verification_check as check_lib
from towers import verification_compare as compare
from towers import verification_random as random_lib
from towers import verification_report
from towers import verification_runs as runs

Cause = verification_causes.Cause
Difference = check_lib.Difference
Report = verification_report.Report
Tolerance = compare.Tolerance


def verify(model_fn: Callable[..., Any],
           inputs: Any = None,
           devices: Any = 2,
           *,
           rows: Optional[Sequence[int]] = None,
           losses: Optional[Sequence[str]] = None,
           hold_random: bool = True,
           tolerances: Optional[Mapping[Any, Union[
               float, Tolerance, Sequence[float]]]] = None,
           values: Optional[Mapping[str, Any]] = None,
           static_rows: Optional[bool] = None,
           seed: int = 1,
           **options: Any) -> Report:
  """Compares a model in towers with the same model on one device.

  It builds the model in two graphs of its own, in one tower and in N, with the
  same values of the variables, and compares loss, outputs, each gradient, and
  each variable after the update ops. It does so for batches that deal out
  evenly, unevenly, and to some towers not at all. Where something differs, it
  compares what is computed before, tensor by tensor, and names the layer in
  which towers first differ from one device, with the likely cause.

  Random numbers, as of dropout, differ between the sides, unless they are held
  equal: the model runs on one device, and each tower is fed what the random ops
  gave there for its rows. What that would hide is looked at before: random ops
  that draw the same numbers in each tower for different rows, or that draw
  numbers which do not belong to rows. A shuffle of rows is not held.

  Args:
    model_fn: See `towers.build_towers`. It is called in new graphs, so it must
      make all tensors, variables and layers that it uses.
    inputs: Nest of arrays of shape `[B, ...]`, the batch. None for a model that
      takes none; what it draws at random is then the same in each tower.
    devices: See `towers.build_towers`; two or more. One device is the first.
    rows: Sizes of the batches to compare, cut from the beginning of `inputs`.
      Default: `B`, the largest that deals out evenly, `B - 1`, one row less
      than towers, and 1, as far as they are there.
    losses: Names of scalar outputs whose gradients to compare; "loss" for the
      loss. Default: the loss; without one, all floating scalar outputs.
    hold_random: Whether to hold random numbers equal.
    tolerances: For types, such as `tf.float32`, the largest difference in terms
      of the largest number of the tensor; or a pair with what to add to it.
      Default: 1e-4 and 1e-5 for float32, 1e-9 and 1e-10 for float64, 2e-2 and
      2e-3 for float16. Types without one must be equal, as NaN equals NaN.
    values: By name, values of variables to use instead of initial ones, such as
      those of a checkpoint.
    static_rows: Whether the number of rows is known while the model is built,
      which takes two builds for each of `rows`. Default: only if it cannot be
      built otherwise.
    seed: The seed of both graphs.
    **options: Further arguments of `towers.build_towers`.

  Returns:
    A `Report`.

  Raises:
    TypeError: If an argument has another type, or as `towers.build_towers`.
    ValueError: If an argument is out of range; if the model cannot be built or
      run on one device; or if it draws random numbers where they cannot be held
      equal, in a loop, branch or function.
  """
  allowed = compare.tolerances(tolerances)
  own_devices = devices_lib.resolve(devices)
  if len(own_devices) < 2:
    raise ValueError(
        "`devices` must be two or more, to compare with one: got "
        f"{len(own_devices)}.")
  batch = None if inputs is None else tf.nest.map_structure(_array, inputs)
  sizes = _sizes(batch, rows, len(own_devices))
  verifier = _Verifier(
      model_fn, own_devices, batch, allowed=allowed, hold_random=hold_random,
      values=values, seed=seed, losses=None if losses is None else [
          None if name == "loss" else name for name in losses],
      options=options)
  return verifier.report(sizes, static_rows)


def _array(value: Any) -> np.ndarray:
  if tf.is_tensor(value) or isinstance(value, tf.Variable):
    raise TypeError(
        f"`inputs` must hold arrays, not tensors: got {value!r}. Run it in a "
        "session before.")
  array = np.asarray(value)
  if array.dtype.kind in "US":
    array = array.astype(object)  # What a session is fed for texts.
  if not array.ndim or not len(array):
    raise ValueError(
        "`inputs` must hold arrays whose leading axis is the batch: got shape "
        f"{array.shape}.")
  return array


def _sizes(batch: Any, rows: Optional[Sequence[int]],
           count: int) -> List[Optional[int]]:
  """Returns the sizes of the batches to compare."""
  if batch is None:
    if rows is not None:
      raise ValueError(
          f"`rows` must not be given without `inputs`: got {rows!r}.")
    return [None]
  flat = tf.nest.flatten(batch)
  lengths = sorted({len(x) for x in flat})
  if len(lengths) != 1:
    raise ValueError(
        "`inputs` must hold arrays with the same number of rows, one or more: "
        f"got {lengths}.")
  whole = lengths[0]
  if rows is None:
    wanted = [whole, whole - whole % count, whole - 1, count - 1, 1]
    return list(dict.fromkeys(n for n in wanted if 1 <= n <= whole))
  wanted = [rows] if isinstance(rows, int) else list(rows)
  for size in wanted:
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or (
        not 1 <= size <= whole):
      raise ValueError(
          f"`rows` must be sizes of batches: expected 1 to {whole}, got "
          f"{size!r}.")
  if not wanted:
    raise ValueError(f"`rows` must hold at least one size: got {rows!r}.")
  return list(dict.fromkeys(map(int, wanted)))


class _Verifier:
  """What is the same for all sizes of the batch."""

  def __init__(self, model_fn: Callable[..., Any],
               devices: Sequence[Tuple[str, ...]], batch: Any, *,
               allowed: Mapping[Any, Tolerance], hold_random: bool,
               values: Optional[Mapping[str, Any]], seed: int,
               losses: Optional[Sequence[Optional[str]]],
               options: Mapping[str, Any]):
    self._model_fn, self._devices, self._batch = model_fn, devices, batch
    self._allowed, self._hold_random = allowed, hold_random
    self._given, self._losses = values, losses
    self._seed, self._options = seed, options
    self._initial: Any = None  # The values of variables, once they are known.
    self._differences: List[Difference] = []
    self._notes: List[str] = []
    self._compared: Dict[str, int] = {}
    self._held: Dict[str, None] = {}
    self._done: List[int] = []

  def report(self, sizes: Sequence[Optional[int]],
             static: Optional[bool]) -> Report:
    """Compares batches of all `sizes`."""
    if not static:
      try:
        one = self._build(self._devices[:1], None)
      except (TypeError, ValueError):
        if static is not None or self._batch is None:
          raise
        self._build(self._devices[:1], sizes[0]).close()  # Or raises that.
        self._notes.append(
            "The model cannot be built for a batch of unknown size, so each "
            "size was built by itself.")
        static = True
      else:
        self._compare(one, None, sizes, sizes)
    if static:
      for size in sizes:
        try:
          one = self._build(self._devices[:1], size)
        except (TypeError, ValueError) as error:
          self._skip(size, sizes, error)
        else:
          self._compare(one, size, [size], sizes)
    return Report(
        len(self._devices), tuple(self._done), self._compared,
        tuple(self._held), _in_order(self._differences), tuple(self._notes))

  def _build(self, devices: Sequence[Any], rows: Optional[int]) -> runs.Side:
    return runs.Side(
        self._model_fn, list(devices), inputs=self._batch, rows=rows,
        seed=self._seed, losses=self._losses, options=self._options)

  def _compare(self, one: runs.Side, static_rows: Optional[int],
               sizes: Sequence[Optional[int]],
               all_sizes: Sequence[Optional[int]]) -> None:
    """Builds the towers, and compares batches of `sizes`."""
    many = None
    try:
      try:
        many = self._build(self._devices, static_rows)
      except (TypeError, ValueError) as error:
        self._take_values(one)
        self._done += [size for size in sizes if size is not None]
        self._differences.append(check_lib.failed_build(error, static_rows))
        return
      self._take_values(one)
      many.initialize()
      self._note_variables(one, many)
      draws = random_lib.find(one, many) if self._hold_random else []
      self._held.update(dict.fromkeys(
          draw.name.partition(":")[0] for draw in draws))
      pair = check_lib.Pair(one, many, draws, self._initial, self._allowed)
      for size in sizes:
        inputs = self._batch if size is None else tf.nest.map_structure(
            lambda x, size=size: x[:size], self._batch)
        try:
          self._differences += check_lib.check(pair, inputs, size)
        except check_lib.OneDeviceError as error:
          self._skip(size, all_sizes, error)
        else:
          self._done += [] if size is None else [size]
    finally:
      one.close()
      if many is not None:
        many.close()

  def _skip(self, size: Optional[int], sizes: Sequence[Optional[int]],
            error: Exception) -> None:
    """Notes that one device fails on a size, if it is not the first."""
    if size == sizes[0]:
      raise ValueError(
          "`model_fn` must run on one device: it fails there on "
          f"{'no inputs' if size is None else f'{size} rows'}: "
          f"{check_lib.message_of(error)}") from error
    self._notes.append(
        f"Batches of {size} rows were not compared: one device fails on them: "
        f"{check_lib.message_of(error)}")

  def _take_values(self, one: runs.Side) -> None:
    """Keeps the values that the variables of all sides get."""
    one.initialize()
    if self._initial is not None:
      return
    self._initial = one.values()
    for name, value in (self._given or {}).items():
      known = self._initial.get(name)
      if known is None or np.shape(value) != known.shape:
        raise ValueError(
            "`values` must hold values of variables by their names: got "
            f"{name!r} of shape {np.shape(value)}, expected " + (
                f"shape {known.shape}." if known is not None else
                f"one of {sorted(self._initial)}."))
      self._initial[name] = np.asarray(value, known.dtype)

  def _note_variables(self, one: runs.Side, many: runs.Side) -> None:
    """Notes what is compared, and variables that one side alone has."""
    self._compared = {
        "loss": int(one.graph.loss is not None),
        "output": len(one.outputs),
        "gradient": sum(g is not None for g in one.gradients.values()),
        "update": len(one.variables)}
    for name in {**one.variables, **many.variables}:
      if (name in one.variables) != (name in many.variables):
        side = "one device" if name in one.variables else "the towers"
        self._differences.append(Difference(
            "variable", name, None, float("nan"), 0.0, (),
            verification_causes.make("towers_differ", name),
            f"Only {side} has it."))


def _in_order(differences: Sequence[Difference]) -> List[Difference]:
  """Sorts by cause, and by the order in which they were found."""
  # The same layer in batches of another size is the same cause.
  unique: Dict[Any, Cause] = {}
  result = [
      d._replace(cause=unique.setdefault(
          (d.cause.rule, d.cause.operation), d.cause)) for d in differences]
  place: Dict[Cause, int] = {}
  for difference in result:
    place.setdefault(difference.cause, len(place))
  # Those that are known by a variable only come last.
  return sorted(result, key=lambda d: (
      not d.cause.op_type, d.cause.order, place[d.cause]))
