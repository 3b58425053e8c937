"""What a build leaves behind for the steps of training."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Union

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import context
from towers import gradients
from towers import outputs
from towers import replicas
from towers import tower as tower_lib
from towers import updates as updates_lib


class Build(NamedTuple):
  """The towers of one build, and how they train.

  Fields:
    graph: The graph.
    towers: The towers.
    rows: How many rows each tower has, a number or scalar tensor; 0 for one
      that borrowed a row.
    loss: Scalar tensor, the loss over the whole batch; None without one.
    outputs: The towers' outputs put together.
    backward: How the towers are differentiated.
    updates: The update ops of a step.
    cross_scope: Name scope of what the towers make together.
    own_statistics: See `conversion.Conversion`.
    borrows: Whether a tower without rows of its own would take one of another
      tower's.
  """
  graph: tf.Graph
  towers: Sequence[tower_lib.Tower]
  rows: Sequence[Any]
  loss: Optional[tf.Tensor]
  outputs: Any
  backward: gradients.Backward
  updates: updates_lib.Updates
  cross_scope: str
  own_statistics: Dict[int, Dict[str, tf.Tensor]]
  borrows: bool

  def variables_to_train(self, var_list: Optional[Sequence[Any]]) -> List[Any]:
    """Returns the variables that `var_list` stands for; None for all.

    Raises:
      TypeError: If it holds something else than variables.
    """
    if var_list is None:
      var_list = self.graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
    variables = [
        part for v in tf.nest.flatten(list(var_list))
        for part in _tensorflow.parts_of(v)
    ]
    for variable in variables:
      if not _tensorflow.is_variable(variable):
        raise TypeError(f"`var_list` must hold variables: got {variable!r}.")
    return variables

  def weight(self) -> Any:
    """Returns the weight of the whole batch, a number or scalar tensor."""
    weights = [tower.weight for tower in self.towers]
    if all(isinstance(weight, float) for weight in weights):
      return sum(weights)
    return tf.add_n([tf.cast(weight, tf.float64) for weight in weights])

  def applied(self, optimizer: tf.train.Optimizer,
              grads_and_vars: Sequence[Any], *, global_step: Optional[Any],
              name_scope: str, pack_bytes: int = 0) -> tf.Operation:
    """Returns the op that applies gradients and renews the copies.

    Args:
      optimizer: The optimizer.
      grads_and_vars: Averaged gradients and their variables.
      global_step: See `TowerGraph.minimize`.
      name_scope: The caller's scope, from which the optimizer's variables have
        their names, with a trailing slash; "" for none.
      pack_bytes: See `TowerGraph.minimize`.
    """
    grads_and_vars = list(grads_and_vars)
    with context.applies(), tf.name_scope(name_scope or None):
      applied = optimizer.apply_gradients(
          grads_and_vars, global_step=global_step)
    copies = replicas.of_graph(self.graph)
    trained = [v for g, v in grads_and_vars if g is not None]
    copies.note_trained(trained)
    if not copies.has_any(trained):
      return applied
    with tf.control_dependencies([applied]):
      return copies.refreshed(trained, pack_bytes)

  def regularization_loss(self) -> tf.Tensor:
    """Returns the sum of the regularisation losses, as one device has it."""
    terms = [
        tower.collection(tf.GraphKeys.REGULARIZATION_LOSSES)
        for tower in self.towers
    ]
    if not terms[0]:
      return tf.constant(0.0)
    # Those of variables are made once for all towers.
    if all(list(map(id, other)) == list(map(id, terms[0])) for other in terms):
      return tf.add_n(terms[0])
    return outputs.mean_by_weight([tf.add_n(own) for own in terms],
                                  [tower.weight for tower in self.towers])

  def check_current_graph(self) -> None:
    """Checks that a train op may be made where the caller is.

    Raises:
      ValueError: If that is inside a function or a branch of v2 control flow.
    """
    current = tf.get_default_graph()
    if current is not self.graph and not _tensorflow.is_plain_graph(current):
      raise ValueError(
          "A train op must not be made inside a `tf.function` or a branch of "
          f"v2 control flow: got a call in `{current.name}`, where the step "
          "would run whether the branch is taken or not. Make it outside.")

  def name_scope(self) -> str:
    """Returns the current name scope, with a trailing slash; "" for none."""
    scope = self.graph.get_name_scope()
    return f"{scope}/" if scope else ""

  def tower_scalar(self, tower: tower_lib.Tower,
                   loss: Optional[str]) -> tf.Tensor:
    """Returns what `loss` names in one tower.

    Raises:
      ValueError: As `scalar`; or if `loss` is a tensor, of no one tower.
    """
    if loss is not None and not isinstance(loss, str):
      raise ValueError(
          "`loss` of `minimize_async` must be the name of an output of "
          f"`model_fn`, which each tower has: got {loss!r}.")
    self.scalar(loss)  # Raises what is wrong with it.
    return tower.loss if loss in (None, "loss") else tower.outputs[loss]

  def scalar(self, loss: Union[None, str, tf.Tensor]) -> tf.Tensor:
    """Returns the scalar over the whole batch that `loss` stands for.

    Raises:
      ValueError: If there is none, or it is no floating scalar.
    """
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
