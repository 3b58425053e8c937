"""`build_towers`: one model function, built once for each device."""

import contextlib
import re
from typing import Any, Callable, ContextManager, Dict, Iterator, List
from typing import Optional, Sequence, Tuple, Union

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import build as build_lib
from towers import context
from towers import conversion as conversion_lib
from towers import devices as devices_lib
from towers import gradients
from towers import graph as graph_lib
from towers import inputs as inputs_lib
from towers import lockstep as lockstep_lib
from towers import metrics
from towers import model_gradients
from towers import outputs as outputs_lib
from towers import placement as placement_lib
from towers import seeds
from towers import tower as tower_lib
from towers import updates
from towers import variables as variables_lib


def build_towers(model_fn: Callable[..., Any],
                 devices: Union[int, Sequence[Union[str, Sequence[str]]]],
                 *,
                 inputs: Any = None,
                 parameter_device: Union[None, str, Sequence[str]] = None,
                 variables: str = "shared",
                 sync_batch_norm: bool = True,
                 update_ops: str = "first",
                 name: str = "tower") -> graph_lib.TowerGraph:
  """Builds `model_fn` once for each device; N towers compute what one would.

  Example:

      graph = towers.build_towers(model_fn, ["/gpu:0", "/gpu:1"],
                                  inputs=(images, labels))
      train_op = graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
      with tf.Session(config=graph.session_config()) as session:
        ...

  `model_fn` is code for one device and its batch. Each tower is built on its
  own device, with its rows of `inputs`, in a name scope of its own (`tower_0/`
  and so on). Variables exist once, on `parameter_device`, and carry no tower's
  name. After the build, the graph's collections hold what one tower put there,
  and what initialises the lookup tables and fills the queues of all; see
  `Tower.collection` for the others'.

  A second build in the same graph, for evaluation beside training, shares
  variables as TensorFlow's reuse rules have it: put it under
  `tf.variable_scope(tf.get_variable_scope(), reuse=True)`. Layers without names
  get new ones there, by the same rules; for these, open the same named variable
  scope around each build, the second time with `reuse=True`. Give the build a
  `name` of its own; under the same name its scopes are `towers_2/tower_0/` and
  so on.

  Random ops draw other numbers in each tower, and tower 0 those of one device;
  but an op with a `seed` of its own draws the same in all, which is warned of,
  unless the model adds `towers.current_tower().index` to it. Initial values are
  the same for every number of towers.

  With one device, the graph is the plain one, in a name scope.

  Args:
    model_fn: Called once per tower. A tuple or list of inputs becomes its
      arguments, anything else its one argument; without `inputs` it is called
      with none. It returns its loss (a scalar, the mean over its rows), or a
      dict of outputs with the loss as "loss", or a `towers.TowerSpec`.
    devices: List of device strings, one per tower; a tuple of strings for a
      tower that spans several. Or a number N, for the first N GPUs, or N
      logical CPU devices where there is no GPU.
    inputs: Nest of tensors of shape `[B, ...]`, the whole batch, of any size.
      Tower `t` of `N` gets `B // N` rows, in order, and one more where
      `t < B % N`. Or `towers.PerTower`, for inputs that each tower has for its
      own. Tensors that `model_fn` closes over are shared by all towers.
    parameter_device: Where variables live and gradients are averaged. Default:
      the first CPU of the first tower's host; for one tower, its own device. A
      list, such as of parameter servers: each variable lives, and is averaged,
      on the one that holds the fewest bytes so far; what belongs to no variable
      stands on the first. Batch moments meet on the first tower's device if all
      towers are on GPUs; else on the parameter device, or, where that is on no
      tower's host, on the first CPU of the first tower's host.
    variables: "shared": all variables live on `parameter_device`. "balanced":
      each lives on the tower's device that holds the fewest bytes so far, and
      is averaged and updated there; see `TowerGraph.placement`. "replicated":
      trained variables live on tower 0's device, and each other tower has a
      copy on its own, a local variable, which every update renews; see
      `TowerGraph.copy_variables`. Names and checkpoints are the same.
    sync_batch_norm: Whether `towers.batch_norm` and `towers.moments` take the
      rows of all towers together. If not, it is as if all of `model_fn` stood
      under `towers.no_sync()`.
    update_ops: Whose `UPDATE_OPS` a step runs: "first", those of tower 0, or
      "all". What `towers.batch_norm` updates is updated once in either case.
    name: Prefix of the towers' name scopes.

  Returns:
    A `towers.TowerGraph`.

  Raises:
    TypeError: If `model_fn` cannot be called, or an argument has another type.
    ValueError: If an argument is out of range; if the towers do not meet in the
      same layers, make other variables or return other structures; or if the
      loss is no floating scalar. The message names the tower. What `model_fn`
      raises arrives as it is. The graph's scopes, collections and seeds are
      then as before; ops and variables that were made stay, so start over with
      a new graph.
  """
  graph = _checked_graph(model_fn, name)
  tower_devices = devices_lib.resolve(devices)
  parameter_devices = devices_lib.parameter_devices(
      parameter_device, tower_devices)
  parameters = parameter_devices[0]
  updates.policy(update_ops)
  placement = placement_lib.policy(
      variables, parameter_devices, [own[0] for own in tower_devices])
  enclosing, scope = _scopes(graph, name, len(tower_devices))
  cross_scope = f"{scope}cross_{name}/"
  towers = [
      tower_lib.Tower(index=index, count=len(tower_devices), devices=own,
                      name_scope=f"{scope}{name}_{index}/",
                      enclosing_scope=enclosing, graph=graph)
      for index, own in enumerate(tower_devices)
  ]
  _tensorflow.ensure_variable_stores()
  first_op = len(graph.get_operations())
  saved = _tensorflow.snapshot_collections(graph)
  seeds_drawn = _tensorflow.seeds_drawn(graph)
  try:
    with tf.name_scope(scope):
      shards = inputs_lib.deal(inputs, len(towers))
    rows = inputs_lib.weights(shards)
    lockstep = None
    if len(towers) > 1:
      lockstep = lockstep_lib.Lockstep(
          graph, towers, rows=rows,
          inputs=[inputs_lib.ops_of(shard) for shard in shards],
          device=devices_lib.merge_device(tower_devices, parameters),
          home_device=devices_lib.home_device(tower_devices, parameters),
          name_scope=cross_scope)
    shared = variables_lib.SharedVariables(graph, towers, placement, lockstep)
    conversion = conversion_lib.Conversion(len(towers))

    def build_one(tower: tower_lib.Tower) -> Any:
      tower.weight = rows[tower.index]
      with _entered(tower, lockstep, conversion, shared, sync_batch_norm):
        returned = _call(model_fn, inputs, shards[tower.index].value)
        outputs_lib.take(tower, returned)

    with shared.installed(), _summary_tags(graph), metrics.passed_through():
      _build_all(graph, towers, lockstep, build_one)
      shared.check_same_in_all_towers()
    in_order = graph.get_operations()[first_op:]
    made = set(in_order)
    for tower in towers:
      tower.set_collections(_added(graph, tower, lockstep, saved))
      tower.update_ops = updates.of_tower(
          tower, conversion.assignments[tower.index], made)
    _keep_what_each_needs(graph, towers)
    with tf.name_scope(cross_scope), tf.device(parameters):
      loss, outputs = outputs_lib.together(towers, rows)
      chosen = updates.chosen(towers, update_ops, conversion.duplicates, made)
      # `chosen` has put ops of its own around those in conditionals.
      made.update(graph.get_operations()[first_op:])
      ready = updates.gate(made, inputs_lib.gate(shards), chosen)
    shared.publish_copies(updates.changes_in(towers, made))
    seeds.warn_of_shared(towers, in_order)
  except BaseException:
    _tensorflow.restore_collections(graph, saved)
    _tensorflow.set_seeds_drawn(graph, seeds_drawn)
    raise
  build = build_lib.Build(
      graph=graph, towers=towers, rows=rows, loss=loss, outputs=outputs,
      backward=gradients.Backward(
          shared.views, [tower.device for tower in towers], parameters),
      updates=updates.Updates(chosen, ready, made), cross_scope=cross_scope,
      own_statistics=conversion.own_statistics,
      borrows=(isinstance(inputs, inputs_lib.PerTower) and
               not all(isinstance(count, float) for count in rows)))
  return graph_lib.TowerGraph(
      build, synced_layers=conversion.layers, variables=shared.used())


def _checked_graph(model_fn: Any, name: Any) -> tf.Graph:
  """Returns the graph to build in, if `model_fn` can be built there."""
  if not callable(model_fn):
    raise TypeError(f"`model_fn` must be a function: got {model_fn!r}.")
  if not isinstance(name, str) or not re.fullmatch(
      r"[A-Za-z0-9.][A-Za-z0-9_.\\-]*", name):
    raise ValueError(
        "`name` must be the beginning of a name scope: expected letters, "
        f"digits, '.', '_' or '-', got {name!r}.")
  outer = context.building()
  if outer is not None:
    raise ValueError(
        "`build_towers` must not be called inside `model_fn`: got a call in "
        f"tower {outer.index}. Build after the other build has "
        "ended.")
  graph = tf.get_default_graph()
  if tf.executing_eagerly() or not _tensorflow.is_plain_graph(graph):
    raise ValueError(
        "`build_towers` must be called in graph mode: expected a tf.Graph, got "
        f"{'eager execution' if tf.executing_eagerly() else 'a tf.function'}. "
        "Call `tf.disable_v2_behavior()` first, or use `with "
        "tf.Graph().as_default():`.")
  if any(_tensorflow.enclosing_control_flow(graph)):
    raise ValueError(
        "`build_towers` must not be called inside `tf.cond` or a loop: got a "
        "call in control flow. Call it outside.")
  return graph


def _scopes(graph: tf.Graph, name: str, count: int) -> Tuple[str, str]:
  """Returns the caller's name scope, and that in which towers get theirs.

  They are the same unless an earlier build has taken the towers' names.
  """
  enclosing = graph.get_name_scope()
  enclosing = enclosing + "/" if enclosing else ""

  def is_free(relative: str) -> bool:
    return graph.unique_name(relative,
                             mark_as_used=False) == enclosing + relative

  names = [f"{name}_{index}" for index in range(count)]
  if all(is_free(relative) for relative in names + [f"cross_{name}"]):
    for relative in names + [f"cross_{name}"]:
      graph.unique_name(relative)
    return enclosing, enclosing
  build = 2
  while not is_free(f"{name}s_{build}"):
    build += 1
  return enclosing, graph.unique_name(f"{name}s_{build}") + "/"


@contextlib.contextmanager
def _entered(tower: tower_lib.Tower, lockstep: Optional[lockstep_lib.Lockstep],
             conversion: conversion_lib.Conversion,
             shared: variables_lib.SharedVariables,
             sync_batch_norm: bool) -> Iterator[None]:
  """Enters all that model code of `tower` stands in."""
  with context.entered(tower, lockstep_of_tower=lockstep,
                       conversion_of_tower=conversion, sync=sync_batch_norm):
    with tf.device(tower.device), tf.name_scope(tower.name_scope):
      with shared.creator_scope(), conversion.installed(), metrics.of_tower():
        yield


def _call(model_fn: Callable[..., Any], inputs: Any, shard: Any) -> Any:
  if inputs is None:
    return model_fn()
  if isinstance(shard, (tuple, list)):
    return model_fn(*shard)
  return model_fn(shard)


def _build_all(graph: tf.Graph, towers: Sequence[tower_lib.Tower],
               lockstep: Optional[lockstep_lib.Lockstep],
               build: Callable[[tower_lib.Tower], None]) -> None:
  """Builds all towers; several of them side by side, in threads."""
  if lockstep is None:
    with _tensorflow.root_variable_scope_kept():
      build(towers[0])
    return
  scopes = _tensorflow.CallerScopes(graph)
  counts = []

  def build_in_thread(tower: tower_lib.Tower) -> Any:
    with graph.as_default(), scopes.entered():
      build(tower)
      if tower.index == 0:
        counts.append(scopes.counts())

  with scopes.thread_local_stacks(), model_gradients.installed():
    lockstep.run(build_in_thread)
  scopes.adopt_counts(counts[0])


def _added(graph: tf.Graph, tower: tower_lib.Tower,
           lockstep: Optional[lockstep_lib.Lockstep],
           saved: Dict[Any, List[Any]]) -> Dict[Any, List[Any]]:
  """Returns what `tower` put into each collection."""
  now = (
      _tensorflow.snapshot_collections(graph)
      if lockstep is None else lockstep.collections_of(tower))
  added = {}
  for key, items in now.items():
    before = set(map(id, saved.get(key, ())))
    added[key] = [item for item in items if id(item) not in before]
  return added


# What must run, once, for each tower that made it, or its ops cannot.
_NEEDED_BY_EACH = (tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.QUEUE_RUNNERS)


def _keep_what_each_needs(graph: tf.Graph,
                          towers: Sequence[tower_lib.Tower]) -> None:
  """Adds what the towers after the first need to the graph's collections."""
  for key in _NEEDED_BY_EACH:
    for tower in towers[1:]:
      for item in tower.collection(key):
        if not any(item is known for known in graph.get_collection_ref(key)):
          graph.add_to_collection(key, item)


def _summary_tags(graph: tf.Graph) -> ContextManager[None]:
  """Gives tower 0's summaries the tags of the plain model."""
  taken = _tensorflow.kept_with(graph, "_towers_summary_tags", set)

  def rename(tag: str) -> str:
    tower = context.building()
    if tower is None or tower.index:
      return tag
    tag = unique = tower.plain_name(tag)
    number = 0
    while unique in taken:  # By an earlier build in the graph.
      number += 1
      unique = f"{tag}_{number}"
    taken.add(unique)
    return unique

  return _tensorflow.summary_tags(rename)
