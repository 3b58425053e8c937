"""Optimizers of TensorFlow 1, on the gradients of all towers."""

import inspect
from typing import Any, List, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import gradients


def check(optimizer: Any) -> None:
  """Checks that `optimizer` is one of v1.

  Raises:
    TypeError: If it is not.
  """
  if not hasattr(optimizer, "apply_gradients") or not hasattr(
      optimizer, "compute_gradients"):
    raise TypeError(
        "`optimizer` must be a tf.train.Optimizer of tensorflow.compat.v1: "
        f"got {optimizer!r}. Keras optimizers do not work in such graphs.")


def compute_gradients(optimizer: tf.train.Optimizer,
                      backward: gradients.Backward, loss: tf.Tensor,
                      variables: Sequence[Any], *,
                      loss_scale: Optional[tf.Tensor] = None,
                      pack_bytes: int = 0
                     ) -> List[gradients.GradientAndVariable]:
  """Returns what `optimizer` makes of the gradient over all towers.

  An optimizer may override `compute_gradients`, to change what
  `tf.gradients` gives it. So it is asked; and the `tf.gradients` that it calls
  is the backward pass of the towers.

  Args:
    optimizer: The optimizer.
    backward: How the towers are differentiated.
    loss: Scalar, the loss over the whole batch.
    variables: What to differentiate by.
    loss_scale: See `gradients.averaged`.
    pack_bytes: See `gradients.averaged`.

  Raises:
    ValueError: If no variable has a gradient.
  """
  known = {variable.op: variable for variable in variables}
  inside: List[Any] = []

  def of_all_towers(original: Any, *args: Any, **kwargs: Any) -> List[Any]:
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    ys, xs = _as_list(arguments["ys"]), _as_list(arguments["xs"])
    asked = [known.get(getattr(x, "op", None)) for x in xs]
    if not inside and len(ys) > 1 and arguments.get("grad_ys") is None:
      ys = [tf.add_n(ys)]
    # Also other derivatives, which an optimizer may take beside.
    if inside or len(ys) != 1 or not all(v is not None for v in asked):
      return original(*args, **kwargs)
    inside.append(True)
    try:
      grad_ys = arguments.get("grad_ys")
      start = None if grad_ys is None else _as_list(grad_ys)[0]
      pairs = gradients.averaged(
          backward, ys[0], asked, loss_gradient=start, loss_scale=loss_scale,
          pack_bytes=pack_bytes)
    finally:
      inside.pop()
    return [pair.gradient for pair in pairs]

  pairs: List[Any] = []
  if variables:
    with _tensorflow.gradients_intercepted(of_all_towers):
      pairs = optimizer.compute_gradients(loss, var_list=list(variables))
  if all(gradient is None for gradient, _ in pairs):
    names = [variable.op.name for variable in variables]
    raise ValueError(
        "`loss` must depend on a variable to train: it has no gradient by "
        f"any of {names}. Check `var_list`, and for `tf.stop_gradient`.")
  return [gradients.GradientAndVariable(*pair) for pair in pairs]


def _as_list(value: Any) -> List[Any]:
  return list(value) if isinstance(value, (list, tuple)) else [value]
