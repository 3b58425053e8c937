"""Where a run computes, and what goes with that: here, on this machine."""

from typing import Any, Callable, ContextManager, NamedTuple, Optional
from typing import Sequence, Tuple

import tensorflow.compat.v1 as tf

from tools import datasets
from tools import training_options
from tools import visible_devices
import towers


class Inputs(NamedTuple):
  """The batches of a run.

  Fields:
    start: Goes to the first batch.
    inputs: What `build_towers` takes.
    batch: `(images, labels, weights)` of what this process sees of a batch.
  """
  start: tf.Operation
  inputs: Any
  batch: Tuple[tf.Tensor, tf.Tensor, tf.Tensor]


class Places:
  """A run of one process on the devices of its machine.

  Attributes:
    devices: For `build_towers`.
    parameter_device: For `build_towers`.
    visible: The GPUs that a process here sees, those of `devices` alone.
    is_chief: Whether this process saves and tests.
    is_evaluator: Whether it only tests the checkpoints of another one.
    only_reads: Whether it reads images for towers that the chief runs here. It
      builds the graph for that: TensorFlow finds a Python function of an input
      pipeline by its number in the process where the pipeline runs.
  """
  parameter_device: Any = None
  is_chief = True
  is_evaluator = False
  only_reads = False

  def __init__(self, options: training_options.Options,
               visible: Optional[visible_devices.Visible] = None):
    self.visible = visible or visible_devices.asked_for(
        options.devices or options.num_towers or 2)
    self.devices = self.visible.devices

  def inputs(self, batches: Callable[[datasets.Share], tf.data.Dataset]
            ) -> Inputs:
    """Makes the iterators of training.

    Args:
      batches: Makes the batches, or a share of the rows of each.
    """
    iterator = tf.data.make_initializable_iterator(batches(datasets.WHOLE))
    inputs = iterator.get_next()
    return Inputs(iterator.initializer, inputs, inputs[:3])

  def global_step(self) -> Any:
    """Makes the global step."""
    return tf.train.get_or_create_global_step()

  def minimize(self, train: towers.TowerGraph, optimizer: tf.train.Optimizer,
               **arguments: Any) -> tf.Operation:
    """Returns a train op; arguments as of `towers.TowerGraph.minimize`."""
    return train.minimize(optimizer, **arguments)

  def session(self, train: towers.TowerGraph, scaffold: tf.train.Scaffold, *,
              hooks: Sequence[tf.train.SessionRunHook],
              config: tf.ConfigProto) -> ContextManager[Any]:
    """Returns a context with a session, in which variables have values."""
    del train
    return tf.train.MonitoredSession(
        tf.train.ChiefSessionCreator(scaffold, config=config), hooks=hooks)

  def seed(self, seed: int) -> int:
    """Returns the seed of the order of this process's images."""
    return seed

  def first_batch(self, batches: int) -> int:
    """Returns where a run goes on that has so many batches behind it."""
    return batches

  def goes_on(self, step: int, reached: int) -> bool:
    """Whether the next batch is the right one after a step to `reached`."""
    del step, reached
    return True

  def reached(self, step_after: Any, read: Callable[[], int]) -> int:
    """Returns the global step after a run of the train op.

    Args:
      step_after: What `Training.step_after` gave in that run.
      read: Reads the global step.
    """
    del read
    return int(step_after)
