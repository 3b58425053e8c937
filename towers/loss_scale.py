"""The factor that keeps gradients of 16 bits from vanishing.

Small gradients round to zero in float16. The loss is multiplied by a large
factor before the backward pass, and the gradients are divided by it after. A
factor that is too large shows in gradients that are not finite.

References:
  Micikevicius et al., "Mixed Precision Training", 2018,
  https://arxiv.org/abs/1710.03740
"""

import math
from typing import Any, NamedTuple, Union

import numpy as np
import tensorflow.compat.v1 as tf


class DynamicLossScale(NamedTuple):
  """A loss scale that finds its own size.

  A step whose gradients are not all finite is skipped, and halves the scale
  (but never below 1). After `growth_steps` steps in a row with finite
  gradients, it doubles. It is a saved variable, not trained.

  Fields:
    initial: The scale to begin with.
    growth_steps: After how many clean steps the scale doubles.
  """
  initial: float = 2.0**15
  growth_steps: int = 2000


LossScale = Union[None, str, int, float, DynamicLossScale]


def checked(loss_scale: Any) -> Union[None, float, DynamicLossScale]:
  """Returns `loss_scale` as a number, as a `DynamicLossScale`, or None.

  Raises:
    ValueError: If it is neither of these nor "dynamic".
  """
  if loss_scale is None:
    return None
  if isinstance(loss_scale, str) and loss_scale == "dynamic":
    return DynamicLossScale()
  value = loss_scale
  if isinstance(loss_scale, DynamicLossScale):
    value = loss_scale.initial
    steps = loss_scale.growth_steps
    if isinstance(steps, bool) or not isinstance(
        steps, (int, np.integer)) or steps < 1:
      raise ValueError(
          "`growth_steps` of a dynamic loss scale must be a number of steps: "
          f"expected at least 1, got {steps!r}.")
  if (isinstance(value, bool) or
      not isinstance(value, (int, float, np.integer, np.floating)) or
      not math.isfinite(value) or value <= 0):
    raise ValueError(
        "`loss_scale` must be what the loss is multiplied by: expected a "
        "positive number, 'dynamic', a `towers.DynamicLossScale` or None, got "
        f"{loss_scale!r}.")
  if isinstance(loss_scale, DynamicLossScale):
    return loss_scale
  return float(value)


class Scale:
  """The loss scale of one `minimize`.

  Attributes:
    value: Scalar float32 tensor, what the step that runs multiplies by.
    variable: The saved variable of a dynamic scale, else None.
  """

  def __init__(self, loss_scale: Union[float, DynamicLossScale], device: str):
    self.variable: Any = None
    self._clean_steps: Any = None
    self._growth_steps = 0
    with tf.device(device):
      if not isinstance(loss_scale, DynamicLossScale):
        self.value = tf.constant(loss_scale, tf.float32, name="loss_scale")
        return
      self._growth_steps = loss_scale.growth_steps
      self.variable = tf.Variable(
          float(loss_scale.initial), dtype=tf.float32, trainable=False,
          use_resource=True, name="loss_scale")
      self._clean_steps = tf.Variable(
          0, dtype=tf.int64, trainable=False, use_resource=True,
          name="loss_scale_clean_steps")
      self.value = self.variable.read_value()

  def adjusted(self, finite: tf.Tensor) -> tf.Operation:
    """Returns the op that halves or doubles a dynamic scale, or leaves it.

    Args:
      finite: Scalar bool, whether the gradients of this step are finite.
    """
    with tf.device(None), tf.device(self.variable.device):
      clean = tf.where_v2(finite, self._clean_steps.read_value() + 1, 0)
      grown = clean >= self._growth_steps
      larger = tf.where_v2(grown, self.value * 2.0, self.value)
      # Beyond the largest float32 there is nothing to double to.
      larger = tf.where_v2(tf.math.is_finite(larger), larger, self.value)
      smaller = tf.maximum(self.value * 0.5, tf.minimum(self.value, 1.0))
      return tf.group(
          self.variable.assign(
              tf.where_v2(finite, larger, smaller), read_value=False),
          self._clean_steps.assign(
              tf.where_v2(grown, tf.zeros_like(clean), clean),
              read_value=False))
