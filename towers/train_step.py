"""From averaged gradients to changed variables: the steps of a training step.

The order is: unscale, average (both in `gradients.averaged`), check that all is
finite, accumulate, clip, apply. Update ops run at each step, before. A step
whose gradients are not all finite ends at the check; it then leaves no trace,
for what the update ops have changed is put back.
"""

import math
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from towers import accumulation
from towers import gradients
from towers import loss_scale as loss_scale_lib
from towers import updates as updates_lib

Pairs = List[gradients.GradientAndVariable]


class Options(NamedTuple):
  """What `TowerGraph.minimize` was asked for; see there."""
  clip_norm: Any
  loss_scale: Any
  accumulate_steps: int
  skip_nonfinite: bool


def checked(clip_norm: Any, loss_scale: Any, accumulate_steps: Any,
            skip_nonfinite: Any) -> Options:
  """Returns the options of `minimize`, checked.

  Raises:
    TypeError: If `skip_nonfinite` is no bool.
    ValueError: If another is out of its range.
  """
  if not isinstance(skip_nonfinite, (bool, np.bool_)):
    raise TypeError("`skip_nonfinite` must be True or False: got "
                    f"{skip_nonfinite!r}.")
  if isinstance(accumulate_steps, bool) or not isinstance(
      accumulate_steps, (int, np.integer)) or accumulate_steps < 1:
    raise ValueError(
        "`accumulate_steps` must be how many runs make one update: expected 1 "
        f"or more, got {accumulate_steps!r}.")
  return Options(_checked_norm(clip_norm), loss_scale_lib.checked(loss_scale),
                 int(accumulate_steps), bool(skip_nonfinite))


def _checked_norm(clip_norm: Any) -> Any:
  if clip_norm is None:
    return None
  value = clip_norm
  if isinstance(clip_norm, tf.Tensor):
    if clip_norm.shape.rank in (0, None) and clip_norm.dtype.is_floating:
      value = 1.0
    else:
      value = None
  if (isinstance(value, bool) or
      not isinstance(value, (int, float, np.integer, np.floating)) or
      not math.isfinite(value) or value <= 0):
    raise ValueError(
        "`clip_norm` must be the largest global norm of the gradient: expected "
        "a positive number, a scalar tensor of a floating type, or None, got "
        f"{clip_norm!r}.")
  return clip_norm


class TrainStep(NamedTuple):
  """What a training step is made of.

  Fields:
    pairs: The averaged gradients and their variables.
    apply: Makes the op that applies such pairs.
    weight: Scalar tensor or number, the weight of the whole batch.
    updates: The update ops, and what they wait for.
    scale: The loss scale, if there is one.
    device: Where ops go that belong to no variable.
  """
  pairs: Pairs
  apply: Callable[[Pairs], tf.Operation]
  weight: Any
  updates: updates_lib.Updates
  scale: Optional[loss_scale_lib.Scale]
  device: str


def train_op(step: TrainStep, options: Options,
             skipped_steps: Callable[[], Any]) -> tf.Operation:
  """Returns the op that makes `step`.

  Args:
    step: The step.
    options: What to do between the averaged gradients and the variables.
    skipped_steps: Returns the variable that counts skipped steps.
  """
  rest = _rest_of_step(step, options)
  scale = step.scale
  if scale is not None and scale.variable is None:
    scale = None  # It stays as it is.
  before = everything_before(step.updates, step.pairs)
  if not (options.skip_nonfinite or scale is not None):
    with tf.control_dependencies(before):
      return rest()
  undo = updates_lib.Undo(step.updates)
  with tf.device(step.device), tf.name_scope("finite"):
    finite = gradients.all_finite(step.pairs)
    # Decided after the updates, so that what follows comes after them, too.
    with tf.control_dependencies(before):
      finite = tf.identity(finite)
    ops = [
        run_if(finite, rest),
        run_if(tf.math.logical_not(finite), undo.put_back),
        skipped_steps().assign_add(
            tf.cast(tf.math.logical_not(finite), tf.int64), read_value=False),
    ]
    if scale is not None:
      ops.append(scale.adjusted(finite))
  return tf.group(*ops)


def everything_before(updates: updates_lib.Updates,
                      pairs: Sequence[Any]) -> List[tf.Operation]:
  """Returns what must have run before any variable changes.

  Also all gradients: one that is ready early must not change a variable that
  another tower has yet to read, for the gradient of another variable.

  Args:
    updates: The update ops.
    pairs: The gradients that will be applied, and their variables.
  """
  values = [gradients.values_of(gradient)
            for gradient, _ in pairs if gradient is not None]
  return updates.before() + [
      value.op for value in values if isinstance(value, tf.Tensor)
  ]


def _rest_of_step(step: TrainStep,
                  options: Options) -> Callable[[], tf.Operation]:
  """Returns the function that makes what follows the finite check."""

  def clip_and_apply(pairs: Pairs) -> tf.Operation:
    if options.clip_norm is not None:
      with tf.device(step.device), tf.name_scope("clip"):
        pairs = gradients.clip_by_global_norm(pairs, options.clip_norm)
    return step.apply(pairs)

  if options.accumulate_steps == 1:
    return lambda: clip_and_apply(step.pairs)
  accumulator = accumulation.Accumulator(step.pairs, step.device)

  def update() -> tf.Operation:
    applied = clip_and_apply(accumulator.mean())
    with tf.control_dependencies([applied]):
      return accumulator.clear()

  def accumulate() -> tf.Operation:
    with tf.device(step.device), tf.name_scope("accumulate"):
      added = accumulator.add(tf.convert_to_tensor(step.weight))
      with tf.control_dependencies([added]):
        enough = (accumulator.count.read_value() >=
                  options.accumulate_steps)
      return run_if(enough, update)

  return accumulate


def run_if(predicate: tf.Tensor,
           make: Callable[[], tf.Operation]) -> tf.Operation:
  """Returns an op that runs what `make` makes where `predicate` holds.

  In v1 control flow: an optimizer's variables are made in the graph itself.
  """
  v2 = tf.control_flow_v2_enabled()
  tf.disable_control_flow_v2()
  try:
    with tf.device(None):
      return tf.group(tf.cond(predicate, make, tf.no_op))
  finally:
    if v2:
      tf.enable_control_flow_v2()
