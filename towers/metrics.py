"""Streaming metrics (`tf.metrics`) that count each row once, in any tower.

A metric adds up over the runs of a test set. Called in each tower, it would add
up a part in each. So inside a model function, the rows of all towers are put
together first and `tf.metrics` is called once: one set of variables, under the
names that they have on one device, and one update op, which each tower gets.
Whichever tower's is run, the whole batch counts, and once; the row of a tower
that only borrowed it does not count. No line of the model changes:

    def model_fn(images, labels):
      predictions = ...
      accuracy, update = tf.metrics.accuracy(labels, predictions)
      return {"accuracy": accuracy, "update": update}

    graph = towers.build_towers(model_fn, devices, inputs=(images, labels))
    reset = tf.variables_initializer(
        tf.get_collection(tf.GraphKeys.METRIC_VARIABLES))

    session.run(reset)
    for ...:
      session.run(graph.outputs["update"])
    print(session.run(graph.outputs["accuracy"]))

Functions of the same kind from elsewhere go through `streaming`. What makes
metric variables in a tower by any other way (a metric of Keras) is refused.
Outside the model function there is nothing to mind: metrics made of
`graph.outputs` after the build are those of one device.
"""

import contextlib
import functools
import inspect
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import collectives
from towers import context
from towers import metric_arguments
from towers import tower as tower_lib


class _Local(threading.local):
  """What is known of the tower that the thread builds."""

  def __init__(self) -> None:
    super().__init__()
    # The metrics whose values were averaged by rows.
    self.by_rows: List[str] = []


_local = _Local()


def streaming(metric: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Calls a function like those of `tf.metrics` once, with all towers' rows.

  For model code, where the function is not called as `tf.metrics.*` (which is
  passed through here by itself):

      value, update_op = towers.metrics.streaming(
          my_metric, labels, predictions, weights=weights)

  What becomes of an argument, for one or more towers:

  * A tensor with rows, of shape `[B_t, ...]`, becomes `[B, ...]`: the rows of
    all towers in batch order, without those that were only borrowed.
  * A tensor that is the same one in each tower (from outside of the model, or
    from `towers.all_gather` and the like) stays.
  * A scalar that towers differ in, such as a loss, becomes its mean weighted by
    rows. If `weights` is such a scalar too (a number of pixels, say), it weighs
    the mean, and the sum of it is passed on.
  * `weights` that are one for all rows of a tower are repeated for each.
  * All else stays.

  Args:
    metric: Takes tensors; makes variables, and returns nests of tensors and
      operations. Of its arguments, `weights` is known by its name.
    *args: Its arguments.
    **kwargs: Its arguments by name.

  Returns:
    What `metric` returned, the same in each tower.

  Raises:
    ValueError: If an argument has no known rank, rows that are not those of the
      tower, or is a scalar where others have rows; inside a `tf.cond` or a
      loop; where `towers.merge` raises it; or as `metric`.
    TypeError: If `metric` does not take such arguments, or one is ragged; or as
      `metric`.
  """
  lockstep = context.lockstep()
  if lockstep is None:
    return metric(*args, **kwargs)
  name = getattr(metric, "__name__", type(metric).__name__)
  kind = f"`tf.metrics.{name}`" if hasattr(tf.metrics, name) else (
      f"streaming metric `{name}`")
  _check_place(lockstep.graph, kind)
  bound = inspect.signature(metric).bind(*args, **kwargs)
  whole = _whole(kind, name, bound.arguments)
  bound.arguments.update(whole)
  result = lockstep.once(lambda: _call(metric, bound))
  flat = tf.nest.flatten(result)
  tensors = [k for k, x in enumerate(flat) if isinstance(x, tf.Tensor)]
  # Of no tower, as what towers make together. Each passes alone: a value must
  # not wait for an update.
  passed = lockstep.merge(
      kind, _name(name), lambda values: [tf.identity(x) for x in values[0]],
      [flat[k] for k in tensors], [flat[k].dtype.name for k in tensors])
  for k, x in zip(tensors, passed):
    flat[k] = x
  return tf.nest.pack_sequence_as(result, flat)


def _check_place(graph: tf.Graph, kind: str) -> None:
  branches, loops = _tensorflow.enclosing_control_flow(graph)
  if branches or loops or tf.get_default_graph() is not graph:
    where = loops[0] if loops else "a `tf.cond`" if branches else "a function"
    raise ValueError(
        f"{kind} must not stand inside control flow in a tower: got a call in "
        f"{where} (tower {context.current_tower().index}). Call it outside.")


def _name(metric: str) -> str:
  scope = tf.get_default_graph().get_name_scope() + "/"
  scope = context.current_tower().plain_name(scope).strip("/")
  return f"{scope}/{metric}" if scope else metric


def _whole(kind: str, metric: str, arguments: Dict[str, Any]) -> Dict[str, Any]:
  """Returns those arguments that hold tensors, of all towers together."""
  found = metric_arguments.of_tensors(kind, arguments)
  if not found:
    return {}
  tensors = metric_arguments.Tensors(kind, metric, found)
  result = collectives.meet(kind, _name(metric), tensors.together,
                            tensors.components)
  if tensors.averaged_by_rows:
    _local.by_rows.append(metric)
  return tensors.packed(result)


def _call(metric: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
  """Calls the metric, in the thread of tower 0 and as if in the plain model."""
  tower, lockstep = context.current_tower(), context.lockstep()
  graph = lockstep.graph

  def create(next_creator: Any, **kwargs: Any) -> Any:
    kwargs["use_resource"] = True
    _without_tower(tower, kwargs)
    scope = tower.plain_name(graph.get_name_scope() + "/").strip("/")
    with graph.colocate_with(None, ignore_existing=True):
      with tf.device(None), tf.device(lockstep.home_device):
        with tf.name_scope(scope + "/" if scope else None):
          return next_creator(**kwargs)

  with context.outside(), tf.variable_creator_scope(create):
    with tf.device(None), tf.device(lockstep.home_device):
      result = metric(*bound.args, **bound.kwargs)
      return tf.nest.map_structure(
          lambda x: x if isinstance(x, tf.Operation) else
          tf.convert_to_tensor(x), result)


@contextlib.contextmanager
def passed_through() -> Iterator[None]:
  """A context in which `tf.metrics` is called as by `streaming` in towers."""

  def wrapped(metric: Any) -> Any:

    @functools.wraps(metric)
    def function(*args: Any, **kwargs: Any) -> Any:
      # Metrics are made of others: the outermost counts.
      if context.building() is None:
        return metric(*args, **kwargs)
      return streaming(metric, *args, **kwargs)

    return function

  originals = {name: getattr(tf.metrics, name) for name in dir(tf.metrics)
               if not name.startswith("_")}
  try:
    _put({name: wrapped(value) for name, value in originals.items()})
    yield
  finally:
    _put(originals)


def _put(functions: Dict[str, Callable[..., Any]]) -> None:
  for module in _tensorflow.METRIC_MODULES:
    for name, function in functions.items():
      setattr(module, name, function)


@contextlib.contextmanager
def of_tower() -> Iterator[None]:
  """A context for the model code of a tower, which checks its metrics.

  Raises:
    ValueError: If a metric is made in another way than by `streaming`; or took
      the mean of a scalar by rows, where the loss counts by another weight.
  """
  tower, _local.by_rows = context.current_tower(), []
  rows = tower.weight
  with tf.variable_creator_scope(_checked):
    yield
  if tower.weight is not rows and _local.by_rows:
    raise ValueError(
        f"`values` of `{_local.by_rows[0]}` must have rows, "
        "or `weights`, where the loss has a `weight` of its own: got a scalar, "
        f"which would count by rows (tower {tower.index}). Pass the weight of "
        "the loss as `weights` of the metric.")


def _without_tower(tower: tower_lib.Tower, kwargs: Dict[str, Any]) -> None:
  """Takes the tower off where a metric's scope is its variable's full name."""
  name = kwargs.get("name")
  if name and name.endswith("/"):
    kwargs["name"] = tower.plain_name(name)


def _checked(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
  """A variable creator that refuses to count a part of the batch."""
  if context.building() is not None:
    _without_tower(context.current_tower(), kwargs)
  if context.lockstep() is not None and context.building() is not None:
    collections: Optional[Sequence[str]] = kwargs.get("collections")
    if tf.GraphKeys.METRIC_VARIABLES in (collections or ()) or (
        kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ and
        kwargs.get("aggregation") == tf.VariableAggregation.SUM):
      tower = context.current_tower()
      name = tower.plain_name(
          f"{tf.get_default_graph().get_name_scope()}/{kwargs.get('name')}")
      raise ValueError(
          "A metric in `model_fn` must count the rows of all towers: got the "
          f"variable `{name}`, which would count those of one (tower "
          f"{tower.index}). Call `tf.metrics.*` by that name, pass the "
          "function to `towers.metrics.streaming`, or make the metric after "
          "the build, with `graph.outputs`.")
  return next_creator(**kwargs)
