"""A model in a graph and a session of its own, for `verification`."""

import contextlib
import warnings
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple
from typing import Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers import _keras
from towers import builder
from towers import tower as tower_lib
from towers import updates


class Gradient(NamedTuple):
  """The gradient of a loss by a variable.

  Fields:
    variable: Name of the variable.
    loss: Name of the scalar output that is differentiated; None for the loss.
  """
  variable: str
  loss: Optional[str]


class Side:
  """One build of a model, on one device or in towers, and how it runs.

  Attributes:
    graph: The `towers.TowerGraph`.
    outputs: What the model returns beside the loss, by name.
    gradients: The gradients, dense; None for one that does not exist.
    variables: The global variables by name, in the order they were made in.
  """

  def __init__(self, model_fn: Callable[..., Any], devices: Any, *,
               inputs: Any, rows: Optional[int], seed: int,
               losses: Optional[Sequence[Optional[str]]],
               options: Mapping[str, Any]):
    """Builds the model.

    Args:
      model_fn: See `towers.build_towers`.
      devices: See `towers.build_towers`.
      inputs: Nest of arrays, of which types and shapes matter; or None.
      rows: The number of rows; None for one that the graph does not know.
      seed: The graph's seed.
      losses: Names of what to differentiate; None for the default.
      options: Go to `towers.build_towers`.
    """
    self._plain_graph = tf.Graph()
    with self._plain_graph.as_default(), warnings.catch_warnings(), \
        _layers_counted_anew():
      # Of seeds, which are reported; and of dense gradients.
      warnings.simplefilter("ignore")
      tf.set_random_seed(seed)
      self._placeholders = None
      if inputs is not None:
        self._placeholders = tf.nest.map_structure(
            lambda x: tf.placeholder(x.dtype, (rows, *x.shape[1:])), inputs)
      self.graph = builder.build_towers(
          model_fn, devices, inputs=self._placeholders, **options)
      self.outputs: Dict[str, tf.Tensor] = dict(
          named(self.graph.outputs)) if self.graph.outputs is not None else {}
      self.gradients: Dict[Gradient, Optional[tf.Tensor]] = {}
      for loss in self._losses(losses):
        for gradient, variable in self.graph.gradients(loss):
          self.gradients[Gradient(variable.op.name, loss)] = (
              None if gradient is None else tf.convert_to_tensor(gradient))
      self.variables = {v.op.name: v for v in tf.global_variables()}
      self._local = {v.op.name: v for v in tf.local_variables()}
      self._initialize = [tf.global_variables_initializer(),
                          tf.local_variables_initializer(),
                          tf.tables_initializer()]
      copies = options.get("variables") == "replicated"
      self._copy = self.graph.copy_variables if copies else None
    self._session = tf.Session(
        graph=self._plain_graph, config=self.graph.session_config())

  def close(self) -> None:
    """Closes the session."""
    self._session.close()

  def _losses(self, given: Optional[Sequence[Optional[str]]]
             ) -> List[Optional[str]]:
    if given is not None:
      return list(given)
    if self.graph.loss is not None:
      return [None]
    if not isinstance(self.graph.outputs, dict):
      return []
    return [name for name, x in self.graph.outputs.items()
            if isinstance(x, tf.Tensor) and x.shape.rank == 0 and
            x.dtype.is_floating]

  @property
  def towers(self) -> Sequence[tower_lib.Tower]:
    """The towers."""
    return self.graph.towers

  def roots(self) -> List[Any]:
    """Returns all tensors and ops that a step needs."""
    found = [*self.outputs.values(), *self.graph.update_ops]
    found += [g for g in self.gradients.values() if g is not None]
    found += [] if self.graph.loss is None else [self.graph.loss]
    found += [t.weight for t in self.towers if isinstance(t.weight, tf.Tensor)]
    return found

  def needed(self) -> List[tf.Operation]:
    """Returns the ops that a step runs, in the order they were made in."""
    ops = updates.ancestors(
        [x.op if isinstance(x, tf.Tensor) else x for x in self.roots()])
    return [op for op in self._plain_graph.get_operations() if op in ops]

  def function_definitions(self) -> Any:
    """Returns the functions of the graph, such as bodies of v2 loops."""
    return self._plain_graph.as_graph_def().library.function

  def find(self, name: str) -> Optional[tf.Operation]:
    """Returns the operation of that full name, if there is one."""
    try:
      return self._plain_graph.get_operation_by_name(name)
    except (KeyError, ValueError):
      return None

  def may_fetch(self, op: tf.Operation) -> bool:
    """Says whether a session may fetch the outputs of `op`."""
    # What enters a loop lives in the loop. On several devices, a session that
    # fetches it together with what leaves the loop never ends.
    return op.type not in ("Enter", "RefEnter") and (
        self._plain_graph.is_fetchable(op))

  def may_feed(self, tensor: tf.Tensor) -> bool:
    """Says whether a session may be fed a value for `tensor`."""
    return self._plain_graph.is_feedable(tensor)

  def initialize(self) -> None:
    """Gives all variables the initial values of the model."""
    self._session.run(self._initialize)

  def values(self) -> Dict[str, np.ndarray]:
    """Returns the values of the variables; local ones that towers share, too.
    """
    # A copy of a variable belongs to the towers and not to the model.
    local = {} if self._copy is not None else self._local
    return self._session.run({**local, **self.variables})

  def load(self, values: Mapping[str, np.ndarray]) -> None:
    """Sets variables; those that `values` lacks keep theirs."""
    known = [(variable.initializer, values[name])
             for name, variable in {**self._local, **self.variables}.items()
             if name in values]
    # All at once: each other set of fetches costs the session a new start.
    self._session.run([initializer for initializer, _ in known],
                      {op.inputs[1]: value for op, value in known})
    if self._copy is not None:
      self._session.run(self._copy)

  def run(self, fetches: Any, inputs: Any,
          held: Mapping[tf.Tensor, Any]) -> Any:
    """Returns `fetches` on a batch.

    Args:
      fetches: Nest of tensors and ops.
      inputs: Nest of arrays, or None for a model without inputs.
      held: Values that are fed for other tensors.
    """
    feeds = dict(held)
    if self._placeholders is not None:
      feeds.update(zip(tf.nest.flatten(self._placeholders),
                       tf.nest.flatten(inputs)))
    return self._session.run(fetches, feeds)


@contextlib.contextmanager
def _layers_counted_anew() -> Iterator[None]:
  """Lets Keras name layers as in a new process.

  Keras 3 counts them by thread: what one side calls `dense`, the next would
  call `dense_1`.
  """
  counts = _keras.counts_by_thread()
  _keras.set_counts_by_thread({})
  try:
    yield
  finally:
    _keras.set_counts_by_thread(counts or {})


def named(nest: Any, prefix: str = "") -> Iterator[Tuple[str, Any]]:
  """Yields the leaves of `nest` with names such as "boxes/0"."""
  if isinstance(nest, Mapping):
    pairs = [(str(key), nest[key]) for key in nest]
  elif hasattr(nest, "_asdict"):
    pairs = list(nest._asdict().items())
  elif isinstance(nest, (tuple, list)):
    pairs = [(str(k), value) for k, value in enumerate(nest)]
  else:
    yield prefix or "outputs", nest
    return
  for name, value in pairs:
    yield from named(value, f"{prefix}/{name}" if prefix else name)


def counterparts(tensor: tf.Tensor, one: Side,
                 many: Side) -> Optional[List[tf.Tensor]]:
  """Returns what each tower has of a tensor of one device; None if it has not.
  """
  scope = one.towers[0].name_scope
  if not tensor.op.name.startswith(scope):
    return None
  plain, found = tensor.op.name[len(scope):], []
  for tower in many.towers:
    op = many.find(tower.name_scope + plain)
    if op is None or op.type != tensor.op.type or not many.may_fetch(op):
      return None
    own = op.outputs[tensor.value_index]
    found.append(tower.names.replaced.get(own.name, own))
  return found
