"""One backward pass for all towers, and the average of their gradients.

Whole-batch statistics tie the towers together, so a backward pass for each
tower would walk through all towers. Here the weighted total loss is
differentiated once, by each tower's views of the variables; what comes out is
each tower's share of the gradient, and the sum of these is the gradient.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import packing
from towers import replicas


class GradientAndVariable(NamedTuple):
  """An averaged gradient (None where there is none) and its variable."""
  gradient: Any
  variable: Any


class Backward(NamedTuple):
  """How the towers of a build are differentiated.

  Fields:
    views: For each variable (by `id`), the handle that each tower reads it by.
    tower_devices: The device of each tower.
    parameter_device: Where ops go that belong to no tower.
    sum_device: Where the towers' shares are added up; None for the device of
      each variable.
  """
  views: Dict[int, Dict[int, tf.Tensor]]
  tower_devices: Sequence[str]
  parameter_device: str
  sum_device: Optional[str] = None


def averaged(backward: Backward, loss: tf.Tensor, variables: Sequence[Any], *,
             loss_gradient: Optional[tf.Tensor] = None,
             loss_scale: Optional[tf.Tensor] = None,
             pack_bytes: int = 0) -> List[GradientAndVariable]:
  """Differentiates `loss` by `variables`.

  Args:
    backward: How.
    loss: Scalar, the weighted mean of the towers' losses; so the towers' shares
      only have to be added up.
    variables: The variables.
    loss_gradient: Scalar that the gradient starts from; 1 if None.
    loss_scale: Scalar float32 tensor that the loss is multiplied by before the
      backward pass, and that the towers' shares are divided by after it.
    pack_bytes: Up to how many bytes of small gradients travel from a tower to a
      variable's device in one message; 0 for a message each.

  Returns:
    One pair for each variable. Sparse gradients stay `tf.IndexedSlices`.
  """
  handles_of = []  # All handles of each variable: its own, and its views.
  towers_of = []  # The tower of each view.
  # The views end there, so that the real handle gets what reaches it otherwise:
  # what model code computed from the variable outside the towers.
  stops: List[tf.Tensor] = []
  for variable in variables:
    real = (variable.handle if _tensorflow.is_resource_variable(variable) else
            variable)
    own = backward.views.get(id(variable), {})
    # Another build in the graph has views of its own: by the copies' handles
    # comes what the loss owes to them.
    copies = replicas.of_graph(loss.graph).handles(variable)
    towers_of.append([None] * (1 + len(copies)) + sorted(own))
    handles_of.append([real] + copies + [own[t] for t in sorted(own)])
    stops += handles_of[-1][1 + len(copies):]
  flat = [handle for group in handles_of for handle in group]
  with tf.device(backward.parameter_device):
    start = _start(loss, loss_gradient, loss_scale)
    with _tensorflow.no_zeros_for_batch_norm():
      gradients = tf.gradients(
          loss, flat, grad_ys=start, stop_gradients=stops,
          colocate_gradients_with_ops=True)
  position, shares_of = 0, []
  for group in handles_of:
    shares_of.append(gradients[position:position + len(group)])
    position += len(group)
  with tf.name_scope("average_gradients"):
    if loss_scale is not None:
      shares_of = _unscaled(shares_of, variables, loss_scale)
    if pack_bytes:
      shares_of = packing.sent_together(
          shares_of, towers_of, variables, backward.tower_devices, pack_bytes)
    pairs = [
        GradientAndVariable(
            _added_up_at(backward.sum_device or variable.device, shares),
            variable) for variable, shares in zip(variables, shares_of)
    ]
  replicas.of_graph(loss.graph).note_gradients(pairs)
  return pairs


def _start(loss: tf.Tensor, loss_gradient: Optional[tf.Tensor],
           loss_scale: Optional[tf.Tensor]) -> Optional[tf.Tensor]:
  """Returns the gradient that the backward pass starts with; None for 1."""
  if loss_scale is None:
    return loss_gradient
  scale = tf.cast(loss_scale, loss.dtype)
  return scale if loss_gradient is None else scale * loss_gradient


def _unscaled(shares_of: Sequence[List[Any]], variables: Sequence[Any],
              loss_scale: tf.Tensor) -> List[List[Any]]:
  """Divides the towers' shares by the loss scale, on the variables' devices."""
  inverse = tf.math.reciprocal(loss_scale)

  def unscaled(values: tf.Tensor) -> tf.Tensor:
    if values.dtype in (tf.float16, tf.bfloat16):  # They hold no small inverse.
      wide = tf.cast(values, tf.float32) * inverse
      return tf.cast(wide, values.dtype)
    return values * tf.cast(inverse, values.dtype)

  result = []
  for variable, shares in zip(variables, shares_of):
    with tf.device(None), tf.device(variable.device):
      result.append([with_values(share, unscaled) for share in shares])
  return result


def _added_up_at(device: str, shares: Sequence[Any]) -> Optional[Any]:
  with tf.device(None), tf.device(device):
    return add_up(shares)


def add_up(shares: Sequence[Any]) -> Optional[Any]:
  """Adds up gradients; None counts for nothing, sparse ones stay sparse.

  Returns:
    None if all are None, `tf.IndexedSlices` if all others are, else a tensor.
  """
  present = [share for share in shares if share is not None]
  if len(present) < 2:
    return present[0] if present else None
  sparse = [isinstance(share, tf.IndexedSlices) for share in present]
  if all(sparse):
    return tf.IndexedSlices(
        tf.concat([share.values for share in present], axis=0),
        tf.concat(_indices_alike(present), axis=0), present[0].dense_shape)
  return tf.add_n([tf.convert_to_tensor(share) for share in present])


def _indices_alike(slices: Sequence[tf.IndexedSlices]) -> List[tf.Tensor]:
  """Returns the indices in one integer type."""
  if len({s.indices.dtype for s in slices}) == 1:
    return [s.indices for s in slices]
  return [tf.cast(s.indices, tf.int64) for s in slices]


# --- What is done to averaged gradients ---------------------------------------


def values_of(gradient: Any) -> tf.Tensor:
  """Returns the values of a sparse gradient; a dense one as it is."""
  return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Any, function: Any) -> Any:
  """Returns a gradient with `function` of its values; None stays None."""
  if gradient is None:
    return None
  if isinstance(gradient, tf.IndexedSlices):
    return tf.IndexedSlices(
        function(gradient.values), gradient.indices, gradient.dense_shape)
  return function(gradient)


def all_finite(pairs: Sequence[GradientAndVariable]) -> tf.Tensor:
  """Returns whether no gradient holds an infinity or NaN, a scalar bool."""
  finite = []
  for gradient, variable in pairs:
    if gradient is not None:
      with tf.device(None), tf.device(variable.device):
        finite.append(tf.reduce_all(tf.math.is_finite(values_of(gradient))))
  return tf.reduce_all(tf.stack(finite))


def clip_by_global_norm(pairs: Sequence[GradientAndVariable],
                        clip_norm: Any) -> List[GradientAndVariable]:
  """Scales all gradients down such that their global norm is `clip_norm`.

  With `g` all gradients as one vector, each is multiplied by

      clip_norm / max(norm(g), clip_norm)

  If the norm is infinite or NaN, all gradients become NaN.

  Rows of a sparse gradient that occur several times are added up first, so that
  the norm is that of the same gradient as a dense one, for every number of
  towers. (`tf.clip_by_global_norm` takes the norm of the rows as they came.)

  Args:
    pairs: Gradients and variables.
    clip_norm: Positive scalar.
  """
  summed = []
  for gradient, variable in pairs:
    if isinstance(gradient, tf.IndexedSlices):
      with tf.device(None), tf.device(variable.device):
        gradient = rows_once(gradient)
    summed.append(GradientAndVariable(gradient, variable))
  squares = []
  for gradient, variable in summed:
    if gradient is not None:
      values = values_of(gradient)
      wide = tf.float64 if values.dtype == tf.float64 else tf.float32
      with tf.device(None), tf.device(variable.device):
        squares.append(tf.nn.l2_loss(tf.cast(values, wide)))
  wide = tf.float64 if any(s.dtype == tf.float64 for s in squares) else (
      tf.float32)
  norm = tf.sqrt(2.0 * tf.add_n([tf.cast(s, wide) for s in squares]))
  limit = (tf.cast(clip_norm, wide) if isinstance(clip_norm, tf.Tensor) else
           tf.constant(clip_norm, wide))
  # Beyond the largest number nothing can be scaled down to `clip_norm`.
  factor = tf.where_v2(
      tf.math.is_finite(norm), limit / tf.maximum(norm, limit), np.nan)

  def clipped(values: tf.Tensor) -> tf.Tensor:
    return values * tf.cast(factor, values.dtype)

  result = []
  for gradient, variable in summed:
    with tf.device(None), tf.device(variable.device):
      result.append(
          GradientAndVariable(with_values(gradient, clipped), variable))
  return result


def rows_once(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
  """Returns a sparse gradient in which each row occurs once."""
  indices, positions = tf.unique(gradient.indices)
  values = tf.math.unsorted_segment_sum(gradient.values, positions,
                                        tf.shape(indices)[0])
  return tf.IndexedSlices(values, indices, gradient.dense_shape)
