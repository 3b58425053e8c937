"""One backward pass for all towers, and the average of their gradients.

Whole-batch statistics tie the towers together, so a backward pass for each
tower would walk through all towers. Here the weighted total loss is
differentiated once, by each tower's views of the variables; what comes out is
each tower's share of the gradient, and the sum of these is the gradient.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import _tensorflow


class GradientAndVariable(NamedTuple):
  """An averaged gradient (None where there is none) and its variable."""
  gradient: Any
  variable: Any


def averaged(loss: tf.Tensor, variables: Sequence[Any],
             views: Dict[int, Dict[int, tf.Tensor]],
             parameter_device: str) -> List[GradientAndVariable]:
  """Differentiates `loss` by `variables`.

  Args:
    loss: Scalar, the weighted mean of the towers' losses; so the towers' shares
      only have to be added up.
    variables: The variables.
    views: For each variable (by `id`), the handle that each tower reads it by.
    parameter_device: Where ops go that belong to no tower.

  Returns:
    One pair for each variable. Sparse gradients stay `tf.IndexedSlices`.
  """
  handles = [v.handle if _tensorflow.is_resource_variable(v) else v
             for v in variables]
  handles_of = []  # All handles of each variable.
  for variable, handle in zip(variables, handles):
    own = views.get(id(variable), {})
    handles_of.append([handle] + [own[tower] for tower in sorted(own)])
  flat = [handle for group in handles_of for handle in group]
  # The views end there, so that the real handle gets what reaches it otherwise:
  # what model code computed from the variable outside the towers.
  stops = [handle for group in handles_of for handle in group[1:]]
  with tf.device(parameter_device), _tensorflow.no_zeros_for_batch_norm():
    gradients = tf.gradients(
        loss, flat, stop_gradients=stops, colocate_gradients_with_ops=True)
  pairs, position = [], 0
  with tf.name_scope("average_gradients"):
    for variable, group in zip(variables, handles_of):
      shares = gradients[position:position + len(group)]
      position += len(group)
      with tf.device(None), tf.device(variable.device):
        total = add_up(shares)
      pairs.append(GradientAndVariable(total, variable))
  return pairs


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
