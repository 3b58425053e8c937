"""What a build returns: the graph of all towers, and how it trains."""

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import devices as devices_lib
from towers import gradients
from towers import tower as tower_lib


class TowerGraph:
  """The towers of one build, and what they make together.

  Attributes:
    towers: Tuple of `Tower`, one per device.
    loss: Scalar tensor, the mean of the towers' losses weighted by
      `Tower.weight`, which is the loss over the whole batch; None without one.
    outputs: The towers' outputs put together, in the structure that the model
      function returned: tensors with rows concatenated in batch order, without
      the rows that a tower only borrowed; scalars averaged by weight.
    update_ops: Tuple of the ops that a step runs before the variables change.
    synced_layers: Tuple of `SyncedLayer`, one for each use of a layer in which
      the towers meet: its `name`, `kind`, `axes`, and number of `towers`.
    variables: Tuple of the variables that the towers made or used.
    trainable_variables: Tuple of those among them that are trainable.
  """

  def __init__(self, *, towers: Sequence[tower_lib.Tower],
               loss: Optional[tf.Tensor], outputs: Any,
               update_ops: Sequence[Any], synced_layers: Sequence[Any],
               variables: Sequence[Any],
               views: Dict[int, Dict[int, tf.Tensor]], parameter_device: str,
               inputs_ready: Sequence[tf.Operation], graph: tf.Graph):
    self.towers = tuple(towers)
    self.loss = loss
    self.outputs = outputs
    self.update_ops = tuple(update_ops)
    self.synced_layers = tuple(synced_layers)
    self.variables = tuple(variables)
    trainable = set(
        map(id, graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)))
    self.trainable_variables = tuple(
        v for v in variables if id(v) in trainable)
    self._views = views
    self._parameter_device = parameter_device
    self._inputs_ready = list(inputs_ready)
    self._graph = graph

  def session_config(self, **overrides: Any) -> tf.ConfigProto:
    """Returns a config for sessions in which all devices of the graph exist.

    Use it for `tf.Session` and `MonitoredTrainingSession`. It asks for as many
    logical CPU devices as the towers name, and lets ops without a kernel on
    their tower's device run elsewhere. Where all devices are CPUs, it switches
    TensorFlow's graph optimizer off, which takes most of the time to the first
    step of a deep model and makes its steps no faster.

    Args:
      **overrides: Fields of `tf.ConfigProto`, such as
        `log_device_placement=True`.

    Raises:
      ValueError: If a device of the graph would not exist, or a field is
        unknown.
    """
    named = [device for tower in self.towers for device in tower.devices]
    return devices_lib.session_config(named + [self._parameter_device],
                                      overrides)

  def gradients(self,
                loss: Union[None, str, tf.Tensor] = None,
                var_list: Optional[Sequence[Any]] = None
               ) -> List[gradients.GradientAndVariable]:
    """Returns the gradient of the loss over the whole batch.

    With `w_t` the weight and `L_t` the loss of tower `t`, it is the gradient of

        sum_t(w_t * L_t) / sum_t(w_t)

    by each variable, made in one backward pass. The towers' shares are added up
    on the device of the variable. Sparse gradients stay `tf.IndexedSlices`.

    Args:
      loss: Name of one of the scalar outputs, such as `"generator_loss"`; or a
        scalar tensor made from `graph.loss` and `graph.outputs`. Default
        `graph.loss`.
      var_list: Variables to differentiate by. Default: all trainable variables.

    Returns:
      List of `(gradient, variable)`, as `optimizer.apply_gradients` takes it.
      The gradient is None where the loss does not depend on the variable.

    Raises:
      TypeError: If `var_list` holds something else than variables.
      ValueError: If there is no such loss, or it is no floating scalar.
    """
    if var_list is None:
      var_list = self._graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
    variables = [
        part for v in tf.nest.flatten(list(var_list))
        for part in _tensorflow.parts_of(v)
    ]
    for variable in variables:
      if not _tensorflow.is_variable(variable):
        raise TypeError(f"`var_list` must hold variables: got {variable!r}.")
    with self._graph.as_default():
      return gradients.averaged(self._loss(loss), variables, self._views,
                                self._parameter_device)

  def minimize(self,
               optimizer: tf.train.Optimizer,
               *,
               loss: Union[None, str, tf.Tensor] = None,
               var_list: Optional[Sequence[Any]] = None,
               global_step: Optional[Any] = None) -> tf.Operation:
    """Returns the op that makes one step of training.

    Running it runs `graph.update_ops` first, once each, and then applies the
    gradient over the whole batch, once. No other op of the graph changes
    variables. Call it outside of other name scopes, as the optimizer's
    variables are named by it.

    Args:
      optimizer: A `tf.train.Optimizer`.
      loss: See `gradients`.
      var_list: See `gradients`.
      global_step: Variable to add one to in each step.

    Raises:
      TypeError: If `optimizer` is no `tf.train.Optimizer`, or as `gradients`.
      ValueError: If no variable has a gradient, or as `gradients`.
    """
    if not hasattr(optimizer, "apply_gradients") or not hasattr(
        optimizer, "compute_gradients"):
      raise TypeError(
          "`optimizer` must be a tf.train.Optimizer of tensorflow.compat.v1: "
          f"got {optimizer!r}. Keras optimizers do not work in such graphs.")
    pairs = self.gradients(loss, var_list)
    if all(pair.gradient is None for pair in pairs):
      names = [pair.variable.op.name for pair in pairs]
      raise ValueError(
          "`loss` must depend on a variable to train: it has no gradient by "
          f"any of {names}. Check `var_list`, and for `tf.stop_gradient`.")
    # Also what no update and no row has a part in waits for the data: if they
    # are at their end, no variable moves.
    before = list(self.update_ops) + self._inputs_ready
    with self._graph.as_default(), tf.control_dependencies(before):
      return optimizer.apply_gradients(pairs, global_step=global_step)

  def _loss(self, loss: Union[None, str, tf.Tensor]) -> tf.Tensor:
    """Returns the scalar that `loss` stands for."""
    if loss is None or isinstance(loss, str) and loss == "loss":
      if self.loss is None:
        raise ValueError(
            "`model_fn` must return a loss to train with: it returned outputs "
            f"only, {self._output_names()}. Return a scalar, a dict with "
            "'loss', or `towers.TowerSpec(loss=...)`, or name a scalar output "
            "by `loss`.")
      return self.loss
    if isinstance(loss, str):
      if not isinstance(self.outputs, dict) or loss not in self.outputs:
        raise ValueError(
            f"`loss` must name an output of `model_fn`: expected one of "
            f"{self._output_names()}, got {loss!r}.")
      loss = self.outputs[loss]
    if not isinstance(loss, tf.Tensor) or loss.shape.rank != 0 or (
        not loss.dtype.is_floating):
      raise ValueError(
          "`loss` must be a scalar of a floating type: got "
          f"{getattr(loss, 'dtype', type(loss))} of shape "
          f"{getattr(loss, 'shape', None)}.")
    return loss

  def _output_names(self) -> List[str]:
    return sorted(self.outputs) if isinstance(self.outputs, dict) else []
