"""Copies of trained variables on the towers' devices.

Each variable is trained once, on the device of the first tower: the optimizer
sees what it would see on one device. What comes out is then copied to the other
devices, bit for bit, and there the towers read it in the next step. (Had each
copy its own update, an optimizer that looks at all gradients together would see
each of them once per tower.) Copies are local variables: checkpoints do not
hold them.
"""

from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import context
from towers import local_variables
from towers import lockstep
from towers import packing
from towers import placement


class Replicas:
  """The copies of a graph's variables.

  Builds in one graph, such as one for training and one for evaluation, share
  them.
  """

  def __init__(self) -> None:
    self._copies: Dict[int, Dict[str, Any]] = {}
    self._variables: Dict[int, Any] = {}
    # The variables of train ops, which renew the copies that there are then.
    self._trained: Set[int] = set()
    # What computes gradients over all towers.
    self._whole: Set[tf.Operation] = set()
    self._too_late: List[str] = []

  def copy_on(self, variable: Any, device: str) -> Any:
    """Returns the copy of `variable` on `device`, made where it must be.

    Args:
      variable: The variable.
      device: The device; the variable's own has no copy, but the variable.
    """
    key = placement.same_spelling(device)
    if key == placement.same_spelling(variable.device):
      return variable
    copies = self._copies.setdefault(id(variable), {})
    if key not in copies:
      self._variables[id(variable)] = variable
      if id(variable) in self._trained:
        self._too_late.append(f"`{variable.op.name}` on {device}")
      copies[key] = local_variables.copy_of(
          variable, device=device, name=variable.op.name)
    return copies[key]

  def handles(self, variable: Any) -> List[tf.Tensor]:
    """Returns the handles of the copies of `variable`."""
    copies = self._copies.get(id(variable), {})
    return [copy.handle for copy in copies.values()]

  def note_trained(self, variables: Sequence[Any]) -> None:
    """Notes that there is a train op now that renews copies of `variables`."""
    self._trained.update(map(id, variables))

  def note_gradients(self, pairs: Sequence[Any]) -> None:
    """Notes gradients over all towers."""
    self._whole.update(pair.gradient.op for pair in pairs
                       if pair.gradient is not None)

  def check_whole(self, pairs: Sequence[Any],
                  made: Set[tf.Operation]) -> None:
    """Checks that gradients by copied variables are those over all towers.

    Args:
      pairs: Gradients and variables.
      made: The ops that the towers added to the graph.

    Raises:
      ValueError: If one comes from a tower by another way.
    """
    for gradient, variable in pairs:
      if gradient is None or id(variable) not in self._copies:
        continue
      found, pending, whole = set(), [gradient.op], False
      while pending and not whole:
        op = pending.pop()
        whole = op in self._whole
        if op not in found:
          found.add(op)
          pending.extend(x.op for x in op.inputs)
      if not whole and found & made:
        raise ValueError(
            "`grads_and_vars` must come from `graph.gradients` where variables "
            f"are replicated: got a gradient by `{variable.op.name}` of "
            "another origin, which lacks what its copies have a part in.")

  def has_any(self, variables: Sequence[Any]) -> bool:
    """Says whether one of `variables` has copies."""
    return any(id(variable) in self._copies for variable in variables)

  def publish(self, graph: tf.Graph) -> None:
    """Makes the copies known to `graph`, and protects what they copy.

    No optimizer may then change a variable that has copies without them. Each
    tower has collections of its own while it is built, so that comes after.
    """
    if self._too_late:
      raise ValueError(
          "`build_towers` with `variables='replicated'` must come before train "
          f"ops: got new copies of {', '.join(self._too_late)}, which the "
          "train op that was made before would not renew. Make all builds "
          "first.")
    known = set(map(id, graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES)))
    for variable, _, copy in self._all():
      if id(copy) not in known:
        graph.add_to_collection(tf.GraphKeys.LOCAL_VARIABLES, copy)
      _tensorflow.guard_updates(variable, _check_update)

  def check_unchanged(self, changes: Sequence[tf.Operation]) -> None:
    """Checks that model code leaves it to the optimizer to change variables.

    Args:
      changes: The ops in the towers that change a variable.

    Raises:
      ValueError: If one changes a variable that has copies, or a copy.
    """
    copied = {}
    for variable, _, copy in self._all():
      copied[variable.op] = copied[copy.op] = variable
    for change in changes:
      for x in change.inputs:
        variable = copied.get(lockstep.variable_op(x))
        if variable is not None and "/towers_copy/" not in change.name:
          raise ValueError(
              f"`{variable.op.name}` must not be changed by `model_fn` while "
              f"'replicated' variables have copies: got `{change.name}`. "
              "Change it outside and run `graph.copy_variables` then, make it "
              "not trainable, or build with `variables='shared'`.")

  def refreshed(self, variables: Sequence[Any],
                pack_bytes: int) -> tf.Operation:
    """Returns the op that copies what `variables` hold now.

    Args:
      variables: Those that may have changed.
      pack_bytes: See `packing`.
    """
    ops = []
    lanes: Dict[Tuple[Any, ...], List[Any]] = {}
    for variable in variables:
      copies = self._copies.get(id(variable), {})
      if copies:
        with tf.device(None), tf.device(variable.device):
          value = variable.read_value()
        for device, copy in copies.items():
          if not value.shape.is_fully_defined():
            ops.append(copy.assign(value, read_value=False))
            continue
          lane = (variable.device, device, variable.dtype.base_dtype)
          lanes.setdefault(lane, []).append((copy, value))
    for (source, target, _), items in lanes.items():
      values = [value for _, value in items]
      if pack_bytes:
        values = packing.transferred(values, source, target, pack_bytes)
      for (copy, _), value in zip(items, values):
        ops.append(copy.assign(value, read_value=False))
    return tf.group(*ops)

  def check(self) -> tf.Operation:
    """Returns the op that fails where a copy is not equal, bit for bit."""
    checks = []
    for variable, device, copy in self._all():
      with tf.device(device):
        alike = _bits_equal(variable.read_value(), copy.read_value())
        checks.append(tf.Assert(alike, [
            f"The copy of `{variable.op.name}` on {device} must equal it bit "
            "for bit, and does not. Was it changed by another op than "
            "`graph.minimize`? Then run `graph.copy_variables`."
        ]))
    return tf.group(*checks)

  def _all(self) -> Iterator[Tuple[Any, str, Any]]:
    for key, copies in self._copies.items():
      for device, copy in copies.items():
        yield self._variables[key], device, copy


def of_graph(graph: tf.Graph) -> Replicas:
  """Returns the copies of the variables of `graph`."""
  return _tensorflow.kept_with(graph, "_towers_replicas", Replicas)


def _check_update(variable: Any) -> None:
  if not context.applying():
    raise ValueError(
        f"`{variable.op.name}` must be updated with its copies: expected "
        "`graph.minimize` or `graph.apply_gradients`, got an optimizer's own "
        "`apply_gradients`. Call `graph.apply_gradients(optimizer, pairs)`, or "
        "build with `variables='shared'`.")


def _bits_equal(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
  if one.dtype.is_floating or one.dtype.is_complex:
    integers = {2: tf.uint16, 4: tf.int32, 8: tf.int64, 16: tf.int64}
    whole = integers[one.dtype.size]
    one, other = tf.bitcast(one, whole), tf.bitcast(other, whole)
  return tf.reduce_all(tf.equal(one, other))
