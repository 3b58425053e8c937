"""Learning-rate schedules: the rate as a function of the step.

All of them begin with a warm-up, in which the rate grows linearly; `progress`
is the part of the steps that is done, half a step in, so that neither the first
step nor the last has a rate of 0.

References:
  Goyal et al., "Accurate, Large Minibatch SGD", 2017 (warm-up, and rates that
    grow with the batch), https://arxiv.org/abs/1706.02677
  Loshchilov and Hutter, "SGDR", 2016 (cosine),
    https://arxiv.org/abs/1608.03983
  He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2
    (a tenth after one half and after three quarters of the steps),
    https://arxiv.org/abs/1512.03385
"""

import math

import tensorflow.compat.v1 as tf

# By name, the factor of the highest rate at a `progress` from 0 to 1.
SCHEDULES = {
    "cosine": lambda progress: (1.0 + tf.cos(math.pi * progress)) / 2.0,
    "linear": lambda progress: 1.0 - progress,
    "steps": lambda progress: tf.where(
        progress < 0.5, 1.0, tf.where(progress < 0.75, 0.1, 0.01)),
    "constant": tf.ones_like,
}


def learning_rate(schedule: str, highest: float, *, global_step: tf.Variable,
                  steps: int, warm_up: float) -> tf.Tensor:
  """Returns the learning rate at `global_step`.

      progress = (global_step + 1/2) / steps
      rate = highest * min(progress / warm_up, 1) * factor(progress)

  Args:
    schedule: One of `SCHEDULES`.
    highest: The rate that the warm-up leads to.
    global_step: Number of steps done, of shape `[]`.
    steps: Number of steps in all.
    warm_up: Part of the steps in which the rate grows, from 0 (none) to 1.

  Returns:
    float32 tensor of shape `[]`.

  Raises:
    ValueError: If there is no such schedule, or `warm_up` is out of range.
  """
  if schedule not in SCHEDULES:
    raise ValueError(f"`schedule` must be one of {', '.join(SCHEDULES)}: got "
                     f"{schedule!r}.")
  if not 0.0 <= warm_up <= 1.0:
    raise ValueError("`warm_up` must be a part of the steps: expected a number "
                     f"from 0 to 1, got {warm_up}.")
  progress = (tf.cast(global_step, tf.float32) + 0.5) / steps
  rate = highest * SCHEDULES[schedule](progress)
  return rate * tf.minimum(progress / warm_up, 1.0) if warm_up else rate
