"""What a build returns: the graph of all towers, and how it trains."""

import functools
import operator
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow.compat.v1 as tf

from towers import asynchronous
from towers import build as build_lib
from towers import devices as devices_lib
from towers import gradients
from towers import loss_scale as loss_scale_lib
from towers import optimizers
from towers import packing
from towers import placement
from towers import replicas
from towers import tower as tower_lib
from towers import train_step

Loss = Union[None, str, tf.Tensor]


class TowerGraph:
  """The towers of one build, and what they make together.

  Attributes:
    graph: The `tf.Graph` that the towers stand in.
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
    loss_scales: List of the variables of the dynamic loss scales, in the order
      of the calls of `minimize` that asked for one.
  """

  def __init__(self, build: build_lib.Build, *, synced_layers: Sequence[Any],
               variables: Sequence[Any]):
    self.graph = build.graph
    self.towers = tuple(build.towers)
    self.loss = build.loss
    self.outputs = build.outputs
    self.update_ops = tuple(build.updates.ops)
    self.synced_layers = tuple(synced_layers)
    self.variables = tuple(variables)
    trainable = set(
        map(id, build.graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)))
    self.trainable_variables = tuple(
        v for v in variables if id(v) in trainable)
    self.loss_scales: List[Any] = []
    self._build = build
    self._parameter_device = build.backward.parameter_device
    self._skipped_steps: Optional[Any] = None
    self._copy_variables: Optional[tf.Operation] = None
    self._regularization_loss: Optional[tf.Tensor] = None

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

  def tower(self, index: int) -> tower_lib.Tower:
    """Returns the tower of that number, as `towers[index]` does.

    Raises:
      TypeError: If `index` is no whole number.
      ValueError: If there is no such tower.
    """
    try:
      number = operator.index(index)
    except TypeError as error:
      raise TypeError(
          f"`index` must be the number of a tower: got {index!r}.") from error
    if not 0 <= number < len(self.towers):
      raise ValueError(
          "`index` must be the number of a tower: expected 0 to "
          f"{len(self.towers) - 1}, got {index}.")
    return self.towers[number]

  def tensors(self, name: str) -> Tuple[tf.Tensor, ...]:
    """Returns what the model on one device calls `name`, of each tower.

    Args:
      name: See `Tower.tensor`.

    Returns:
      A tensor per tower, in order, to fetch: with the rows of that tower, or
      the one row that a tower without rows has borrowed. For rows in the order
      of the batch in one tensor, return it as an output of the model.

    Raises:
      TypeError: If `name` is no text.
      ValueError: If a tower has no such tensor.
    """
    return tuple(tower.tensor(name) for tower in self.towers)

  def feeds(self, values: Dict[str, Any]) -> Dict[tf.Tensor, Any]:
    """Returns a feed dict of values for tensors named as on one device.

    For what the model makes itself, such as a placeholder for a dropout rate,
    which each tower then has one of; all get the same value:

        session.run(graph.loss, graph.feeds({"dropout/rate": 0.0}))

    Args:
      values: For each name (see `Tower.tensor`) the value to feed. For values
        of a tower's own, use `graph.tower(i).tensor(name)` as a key instead.

    Raises:
      TypeError: If a name is no text.
      ValueError: If a tower has no such tensor, or a session cannot be fed a
        value for it, as for a variable.
    """
    return {tower.names.to_feed(name): value for name, value in values.items()
            for tower in self.towers}

  def placement(self) -> List[placement.Placement]:
    """Returns the variables of the graph with their bytes and devices.

    Copies (see `copy_variables`) are not among them.
    """
    return placement.table(self.variables)

  @property
  def regularization_loss(self) -> tf.Tensor:
    """Scalar tensor, the sum of the regularisation losses.

    That is what `tf.GraphKeys.REGULARIZATION_LOSSES` of one device add up to; 0
    without any. Terms that are means over a tower's rows are averaged over the
    towers. For models that do not add them to their loss:

        loss = graph.loss + graph.regularization_loss
        train_op = graph.minimize(optimizer, loss=loss)
    """
    if self._regularization_loss is None:
      with self.graph.as_default(), tf.device(self._parameter_device):
        with tf.name_scope(f"{self._build.cross_scope}regularization_loss/"):
          self._regularization_loss = self._build.regularization_loss()
    return self._regularization_loss

  def gradients(self, loss: Loss = None,
                var_list: Optional[Sequence[Any]] = None, *,
                pack_bytes: int = 0) -> List[gradients.GradientAndVariable]:
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
      pack_bytes: Up to how many bytes of small dense gradients travel from a
        tower to the device of their variables in one message; 0 for a message
        each. It pays between machines, not between devices of one.

    Returns:
      List of `(gradient, variable)`, for `apply_gradients`. The gradient is
      None where the loss does not depend on the variable.

    Raises:
      TypeError: If `var_list` holds something else than variables.
      ValueError: If there is no such loss, or it is no floating scalar, or
        `pack_bytes` is negative.
    """
    pack_bytes = packing.checked_bytes(pack_bytes)
    variables = self._build.variables_to_train(var_list)
    with self.graph.as_default():
      return gradients.averaged(self._build.backward, self._build.scalar(loss),
                                variables, pack_bytes=pack_bytes)

  def apply_gradients(self, optimizer: tf.train.Optimizer,
                      grads_and_vars: Sequence[Any], *,
                      global_step: Optional[Any] = None) -> tf.Operation:
    """Returns the op that runs the update ops and then applies gradients.

    For gradients that were changed on their way, as `minimize` does otherwise:

        pairs = graph.gradients()
        pairs = [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs]
        train_op = graph.apply_gradients(optimizer, pairs)

    With `variables="replicated"` it also renews the copies.

    Args:
      optimizer: A `tf.train.Optimizer`.
      grads_and_vars: Pairs as `gradients` returns them.
      global_step: Variable to add one to.

    Raises:
      TypeError: If `optimizer` is no `tf.train.Optimizer`.
      ValueError: If variables are replicated and a gradient does not come from
        `gradients`.
    """
    optimizers.check(optimizer)
    self._build.check_current_graph()
    pairs = [gradients.GradientAndVariable(g, v) for g, v in grads_and_vars]
    replicas.of_graph(self.graph).check_whole(pairs, self._build.updates.made)
    with self.graph.as_default():
      before = train_step.everything_before(self._build.updates, pairs)
      with tf.control_dependencies(before):
        return self._build.applied(
            optimizer, pairs, global_step=global_step,
            name_scope=self._build.name_scope())

  def minimize(self, optimizer: tf.train.Optimizer, *, loss: Loss = None,
               var_list: Optional[Sequence[Any]] = None,
               global_step: Optional[Any] = None, clip_norm: Any = None,
               loss_scale: loss_scale_lib.LossScale = None,
               accumulate_steps: int = 1, skip_nonfinite: bool = False,
               update_ops: Optional[Sequence[tf.Operation]] = None,
               pack_bytes: int = 0) -> tf.Operation:
    """Returns the op that makes one step of training.

    Running it runs `graph.update_ops` first, once each, and then applies the
    gradient over the whole batch, once. No other op of the graph changes
    variables. Call it outside of other name scopes, as the optimizer's
    variables are named by it.

    The order is: divide by the loss scale, average over the towers, check that
    all is finite, accumulate, clip, apply. An optimizer that overrides
    `compute_gradients` does so after the average.

    Args:
      optimizer: A `tf.train.Optimizer`.
      loss: See `gradients`.
      var_list: See `gradients`.
      global_step: Variable to add one to in each step.
      clip_norm: Largest global norm of the gradient; if it is larger, all of it
        is scaled down to that. A number, a scalar tensor, or None. Rows of a
        sparse gradient that occur twice are added up before.
      loss_scale: What the loss is multiplied by before the backward pass and
        the gradients are divided by after it, which keeps small gradients of
        float16 from vanishing. A number; or "dynamic" or a
        `towers.DynamicLossScale`, which halves it at a gradient that is not
        finite and skips that step, see `skip_nonfinite`.
      accumulate_steps: How many runs make one update, by the mean of their
        gradients, weighted as one batch of all their rows. `global_step` moves
        once per update; update ops run in each run, so batch norm sees, and
        averages over, the batches of the runs. Sums of an update that is not
        complete are local variables, which no checkpoint holds.
      skip_nonfinite: Whether a step with an infinity or NaN in any averaged
        gradient leaves no trace: variables, slots, moving statistics and the
        step stay as they were, and `graph.skipped_steps` counts it.
      update_ops: Those of `graph.update_ops` to run. Default: all. With two
        losses, such as of a generator and a discriminator, each step may run
        those of its own part only.
      pack_bytes: See `gradients`. With `variables="replicated"`, the new values
        of small variables travel to the copies likewise.

    Raises:
      TypeError: If `optimizer` is no `tf.train.Optimizer`, or as `gradients`.
      ValueError: If no variable has a gradient, an option is out of range, a
        step that may be skipped has update ops that cannot be undone, or as
        `gradients`.
    """
    optimizers.check(optimizer)
    self._build.check_current_graph()
    options = train_step.checked(clip_norm, loss_scale, accumulate_steps,
                                 skip_nonfinite)
    pack_bytes = packing.checked_bytes(pack_bytes)
    updates = self._build.updates.only(update_ops)
    variables = self._build.variables_to_train(var_list)
    with self.graph.as_default():
      total, scale = self._build.scalar(loss), None
      if options.loss_scale is not None:
        scale = loss_scale_lib.Scale(options.loss_scale, self._parameter_device)
      pairs = optimizers.compute_gradients(
          optimizer, self._build.backward, total, variables,
          loss_scale=None if scale is None else scale.value,
          pack_bytes=pack_bytes)
      if scale is not None and scale.variable is not None:
        self.loss_scales.append(scale.variable)
      apply = functools.partial(
          self._build.applied, optimizer, global_step=global_step,
          name_scope=self._build.name_scope(), pack_bytes=pack_bytes)
      step = train_step.TrainStep(
          pairs=pairs, apply=apply, weight=self._build.weight(),
          updates=updates, scale=scale, device=self._parameter_device)
      return train_step.train_op(step, options, lambda: self.skipped_steps)

  @property
  def skipped_steps(self) -> Any:
    """Scalar int64 variable that counts the steps that were skipped.

    It is saved, and made when it is first asked for.
    """
    if self._skipped_steps is None:
      with self.graph.as_default(), tf.control_dependencies(None):
        with tf.name_scope(None), tf.device(self._parameter_device):
          self._skipped_steps = tf.Variable(
              0, dtype=tf.int64, trainable=False, use_resource=True,
              name="skipped_steps")
    return self._skipped_steps

  def minimize_async(self, optimizer: tf.train.Optimizer, *,
                     loss: Optional[str] = None,
                     var_list: Optional[Sequence[Any]] = None,
                     global_step: Optional[Any] = None,
                     scale_by_towers: bool = True
                    ) -> asynchronous.AsyncTraining:
    """Returns train ops with which towers do not wait for each other.

    Each applies the gradient of its tower's own loss to the shared variables,
    and runs the tower's own update ops. Use it with inputs that each tower has
    for its own (`towers.PerTower`, in batches of a known size); a tower whose
    rows are part of one batch takes a whole batch in each step and leaves the
    other rows unused.

        training = graph.minimize_async(optimizer)
        training.run(session, steps=1000)

    What N towers compute so is not what one device would compute.

    Args:
      optimizer: A `tf.train.Optimizer`.
      loss: Name of one of the scalar outputs. Default: the loss.
      var_list: See `gradients`.
      global_step: Variable to add one to in the step of each tower, and
        exactly one: it is locked meanwhile. The optimizer is not told of it.
      scale_by_towers: Whether gradients are multiplied by 1/N, so that one step
        of each of N towers changes the variables by about as much as one step
        of `minimize` does.

    Raises:
      TypeError: If `optimizer` is no `tf.train.Optimizer`, or as `gradients`.
      ValueError: If the towers' losses depend on each other, as with batch norm
        over the whole batch; if variables are replicated; or as `gradients`.
    """
    optimizers.check(optimizer)
    self._build.check_current_graph()
    variables = self._build.variables_to_train(var_list)
    with self.graph.as_default():
      losses = [self._build.tower_scalar(tower, loss) for tower in self.towers]
      apply = functools.partial(
          self._build.applied, optimizer, global_step=None,
          name_scope=self._build.name_scope())
      return asynchronous.training(
          self._build, losses, variables, apply, global_step=global_step,
          factor=1.0 / len(self.towers) if scale_by_towers else 1.0)

  # --- Copies of variables ---

  @property
  def copy_variables(self) -> tf.Operation:
    """Op that makes the towers' copies equal to the variables.

    With `variables="replicated"`. Initialisers set the copies, and so does
    `tf.local_variables_initializer()`, which `MonitoredTrainingSession` runs
    after restoring; `minimize` and `apply_gradients` renew them. Run this op
    after other changes: `saver.restore` in a plain session, or your own
    `variable.assign`. Otherwise it does nothing.
    """
    if self._copy_variables is None:
      with self.graph.as_default(), tf.control_dependencies(None):
        own = replicas.of_graph(self.graph)
        self._copy_variables = own.refreshed(self.variables, 0)
    return self._copy_variables

  def check_copies(self) -> tf.Operation:
    """Returns an op that fails unless all copies equal their variables.

    Bit for bit; for debugging, with `variables="replicated"`. It raises
    `tf.errors.InvalidArgumentError`, which names the variable, in the session.
    """
    with self.graph.as_default(), tf.control_dependencies(None):
      return replicas.of_graph(self.graph).check()
