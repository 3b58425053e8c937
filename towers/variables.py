"""Variables that exist once and serve all towers.

Tower 0 makes the variables. The others get the same objects: by name where the
model asks `tf.get_variable`, else (`tf.Variable`, Keras layers) in the order of
creation. While towers are built, the handle of a variable is another tensor in
each tower, an identity of the real one: the tower's view. The views change
nothing in what a model does with a variable, and one backward pass gives the
gradient of each tower apart.
"""

import contextlib
from typing import Any, Callable, ContextManager, Dict, Iterator, List
from typing import NamedTuple, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import _tensorflow
from towers import context
from towers import lockstep as lockstep_lib
from towers import placement as placement_lib
from towers import replicas
from towers import tower as tower_lib


class _Made(NamedTuple):
  """A variable that tower 0 made, and what that put into collections."""
  position: int
  name: str
  variable: Any
  by_name: bool
  additions: Dict[Any, List[Any]]


class _Extra(NamedTuple):
  """A variable that another tower made and tower 0 did not."""
  tower: int
  variable: Any


class SharedVariables:
  """The variables of one build.

  Attributes:
    views: For each variable (by `id`), the view of each tower that has one.
  """

  def __init__(self, graph: tf.Graph, towers: Sequence[tower_lib.Tower],
               placement: placement_lib.Shared,
               lockstep: Optional[lockstep_lib.Lockstep]):
    self._graph = graph
    self._count = len(towers)
    self._placement = placement
    self._replicas = replicas.of_graph(graph) if placement.replicated else None
    self._lockstep = lockstep
    self._made: List[_Made] = []
    self._made_by_name: Dict[str, _Made] = {}
    self._extras: List[_Extra] = []
    # For each tower, which of the variables in `_made` it has asked for.
    self._taken: List[set] = [set() for _ in towers]
    self._used: Dict[int, Any] = {}
    self._tower_aware: List[Any] = []
    self._in_get_variable = False
    self.views: Dict[int, Dict[int, tf.Tensor]] = {}

  @contextlib.contextmanager
  def installed(self) -> Iterator[None]:
    """Shares variables while towers are built; for the builder's thread."""
    with _tensorflow.intercepted_get_variable(
        single=self._get_single, partitioned=self._get_partitioned):
      try:
        known = _tensorflow.known_variables(self._graph)
        self._placement.count(known)
        for variable in known:
          self._make_tower_aware(variable)
        yield
      finally:
        for variable in self._tower_aware:
          _tensorflow.make_unaware(variable)

  def creator_scope(self) -> ContextManager[Any]:
    """A context that shares what its code creates; for each tower's thread."""
    return tf.variable_creator_scope(self._create)

  def used(self) -> List[Any]:
    """Returns the variables that the towers made or used, in that order."""
    return list(self._used.values())

  # --- Views ---

  def _make_tower_aware(self, variable: Any) -> None:
    if not _tensorflow.is_resource_variable(variable):
      return
    self._tower_aware.append(variable)
    _tensorflow.make_tower_aware(variable, self._handle, self._device)

  def _handle(self, variable: Any, handle: tf.Tensor) -> tf.Tensor:
    """Returns the handle that the building tower reads `variable` by."""
    tower = context.building()
    if tower is None:
      return handle
    self._used.setdefault(id(variable), variable)
    if self._count == 1:
      return handle
    views = self.views.setdefault(id(variable), {})
    if tower.index not in views:
      # Outside loops and branches, where the tower may read it first.
      with self._graph.as_default(), tf.control_dependencies(None):
        handle = self._where_tower_reads(tower, variable, handle)
        with self._graph.colocate_with(handle.op, ignore_existing=True):
          with tf.name_scope(tower.name_scope):
            views[tower.index] = tf.identity(
                handle, name=f"towers_view/{variable.op.name}")
    return views[tower.index]

  def _where_tower_reads(self, tower: tower_lib.Tower, variable: Any,
                         handle: tf.Tensor) -> tf.Tensor:
    """Returns the handle of the tower's own copy, or of the variable."""
    if self._replicas is None or not self._has_copy(tower, variable):
      return handle
    with context.outside(), self._graph.colocate_with(
        None, ignore_existing=True):
      with tf.name_scope(f"{tower.name_scope}towers_copy/"):
        return self._replicas.copy_on(variable, tower.device).handle

  def _device(self, variable: Any, device: str) -> str:
    """Returns the device where the building tower reads `variable`."""
    tower = context.building()
    if tower is not None and self._has_copy(tower, variable):
      return tower.device
    return device

  def _has_copy(self, tower: tower_lib.Tower, variable: Any) -> bool:
    return (self._replicas is not None and tower.index > 0 and
            variable.trainable)

  # --- Creation ---

  def _create(self, next_creator: Callable[..., Any],
              **kwargs: Any) -> Any:
    """The variable creator of all towers."""
    tower = context.building()
    if tower is None:
      return next_creator(**kwargs)
    if tower.index == 0:
      before = _tensorflow.collection_sizes(self._graph)
      name = self._wanted_name(tower, kwargs)
      variable = self._create_shared(next_creator, kwargs)
      if not self._in_get_variable:
        self._note(name, variable, False, before)
      return variable
    if not self._in_get_variable:
      made = self._next_unnamed(tower, kwargs)
      if made is not None:
        return self._take(made)
    variable = self._create_shared(next_creator, kwargs)
    self._extras.append(_Extra(tower.index, variable))
    return variable

  def _create_shared(self, next_creator: Callable[..., Any],
                     kwargs: Dict[str, Any]) -> Any:
    """Creates a variable on the parameter device, out of the tower's scope."""
    # Only these have a handle to view. The others, which plain TensorFlow 1
    # code gets, are also updated in place while gradients may still read them,
    # so not even one device gets the same numbers twice.
    kwargs["use_resource"] = True
    scope = self._graph.get_name_scope()
    if scope:
      scope = context.current_tower().plain_name(scope + "/").rstrip("/")
    # The reset also keeps a device scope or colocation inside the model from
    # moving the variable.
    device = self._device_for(kwargs)
    with self._graph.colocate_with(None, ignore_existing=True):
      with tf.device(device), context.not_watched():
        with tf.name_scope(scope + "/" if scope else None):
          variable = next_creator(**kwargs)
    self._make_tower_aware(variable)
    self._used[id(variable)] = variable
    return variable

  def _device_for(self, kwargs: Dict[str, Any]) -> str:

    def num_bytes() -> Optional[int]:
      looks = _looks(kwargs)
      return placement_lib.num_bytes_of(looks["shape"], looks["dtype"])

    return self._placement.device_for(num_bytes,
                                      kwargs.get("trainable") is not False)

  # --- tf.get_variable ---

  def _get_single(self, original: Callable[..., Any], *args: Any,
                  **kwargs: Any) -> Any:
    return self._get(original, args, kwargs)

  def _get_partitioned(self, original: Callable[..., Any], *args: Any,
                       **kwargs: Any) -> Any:
    return self._get(original, args, kwargs)

  def _get(self, original: Callable[..., Any], args: Sequence[Any],
           kwargs: Dict[str, Any]) -> Any:
    """Stands before `tf.get_variable`, where the full name is known."""
    tower = context.building()
    if tower is None or self._in_get_variable:  # The latter: a partition.
      return original(*args, **kwargs)
    if args:
      kwargs["name"], args = args[0], args[1:]
    name = kwargs["name"] = tower.plain_name(kwargs["name"])
    made = self._made_by_name.get(name) if tower.index > 0 else None
    if made is not None and made.position not in self._taken[tower.index]:
      kwargs["reuse"] = True
      if not callable(kwargs.get("initializer", callable)):
        # A value says its own type; TensorFlow asks it only if it makes one.
        kwargs["dtype"] = _value_type(kwargs["initializer"], kwargs["dtype"])
    before = _tensorflow.collection_sizes(self._graph)
    known = len(self._used)
    self._in_get_variable = True
    try:
      variable = original(*args, **kwargs)
    except ValueError as error:
      others = [
          extra.tower for extra in self._extras
          if f"{extra.variable.op.name}/".startswith(f"{name}/")
      ]
      if made is None and not others:
        raise
      if made is None:
        raise ValueError(
            "`model_fn` must make the same variables in each tower: tower "
            f"{others[0]} and tower {tower.index} make `{name}`, tower 0 does "
            "not.") from error
      raise ValueError(
          f"`model_fn` must make the same variables in each tower: tower "
          f"{tower.index} asks for `{name}` otherwise than tower 0. {error}"
      ) from error
    finally:
      self._in_get_variable = False
    if made is not None:
      return self._take(made)
    if tower.index == 0 and len(self._used) > known:
      self._note(name, variable, True, before)
    for part in _tensorflow.parts_of(variable):
      self._used.setdefault(id(part), part)
    return variable

  # --- Who made what ---

  def _next_unnamed(self, tower: tower_lib.Tower,
                    kwargs: Dict[str, Any]) -> Optional[_Made]:
    """Returns tower 0's counterpart of what `tower` is about to create.

    That is the first one not yet taken which was asked for by the same name;
    else by one that differs in its numbers, as a layer object that tower 0 has
    built for all may use up a number. What the tower has used already without
    having asked for it belongs to such an object.
    """
    wanted = _looks(kwargs)
    name = self._wanted_name(tower, kwargs)
    alike = [
        made for made in self._made
        if (not made.by_name and
            made.position not in self._taken[tower.index] and
            tower.index not in self.views.get(id(made.variable), {}) and
            tower_lib.without_numbers(made.name) == tower_lib.without_numbers(
                name) and _fits(made.variable, wanted))
    ]
    same = [made for made in alike if made.name == name]
    return next(iter(same or alike), None)

  def _wanted_name(self, tower: tower_lib.Tower, kwargs: Dict[str, Any]) -> str:
    """Returns the plain name of a variable before it is made unique."""
    scope = self._graph.get_name_scope()
    name = f"{scope}/{kwargs.get('name') or 'Variable'}".lstrip("/")
    return tower.plain_name(name)

  def _note(self, name: str, variable: Any, by_name: bool,
            before: Dict[Any, int]) -> None:
    """Notes what tower 0 made and put into collections since `before`."""
    additions = _tensorflow.added_to_collections(self._graph, before)
    # A model that asks for the global step looks for it before it makes one.
    for item in additions.pop(tf.GraphKeys.GLOBAL_STEP, ()):
      if self._lockstep is not None:
        self._lockstep.share_with_all(tf.GraphKeys.GLOBAL_STEP, item)
    made = _Made(len(self._made), name, variable, by_name, additions)
    self._made.append(made)
    self._taken[0].add(made.position)
    if by_name:
      self._made_by_name[name] = made

  def _take(self, made: _Made) -> Any:
    """Gives the building tower what tower 0 made, as if it had made it."""
    taken = self._taken[context.current_tower().index]
    if made.position not in taken:
      taken.add(made.position)
      for key, items in made.additions.items():
        for item in items:
          self._graph.add_to_collection(key, item)
    return made.variable

  def check_same_in_all_towers(self) -> None:
    """Checks, after the towers have ended, that none made other variables.

    Raises:
      ValueError: If one did; the message lists the difference.
    """
    for tower in range(1, self._count):
      extra = [e.variable for e in self._extras if e.tower == tower]
      missing = [
          made.variable
          for made in self._made
          if made.position not in self._taken[tower] and
          not self._used_alike(made.variable, tower)
      ]
      if extra or missing:
        raise ValueError(
            "`model_fn` must make the same variables in each tower: only tower "
            f"0 makes {_list(missing)}, only tower {tower} makes "
            f"{_list(extra)}. Make variables under the same names, or in the "
            "same order, in each tower.")

  def publish_copies(self, changes: Sequence[tf.Operation]) -> None:
    """Makes copies of variables known, after the towers have ended.

    Args:
      changes: The ops of the towers that change variables.

    Raises:
      ValueError: If one of these changes a variable that has copies.
    """
    if self._replicas is not None:
      self._replicas.check_unchanged(changes)
      self._replicas.publish(self._graph)

  def _used_alike(self, variable: Any, tower: int) -> bool:
    """Says whether `tower` reaches a variable that it did not ask for.

    It does where the towers share a layer object that tower 0 has built.
    """
    views = [
        self.views.get(id(part), {}) for part in _tensorflow.parts_of(variable)
    ]
    return all(tower in view for view in views if 0 in view) and any(views)


def _value_type(value: Any, default: Any) -> Any:
  return default if value is None else tf.convert_to_tensor(value).dtype


def _looks(kwargs: Dict[str, Any]) -> Dict[str, Any]:
  """Returns what is known of a variable before it exists."""
  value = kwargs.get("initial_value")
  shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
  if shape is None or dtype is None:
    if not (isinstance(value, tf.Tensor) or _tensorflow.is_variable(value)):
      value = _tried(value if callable(value) else lambda: value, dtype)
    if value is not None:
      shape = value.shape if shape is None else shape
      dtype = value.dtype if dtype is None else dtype
  return {
      "shape": tf.TensorShape(shape),
      "dtype": None if dtype is None else tf.as_dtype(dtype).base_dtype,
  }


def _tried(initial_value: Callable[[], Any],
           dtype: Optional[tf.DType]) -> Optional[tf.Tensor]:
  """Returns what `initial_value` makes, in a graph that is thrown away."""
  with context.not_watched(), tf.Graph().as_default():
    try:
      return tf.convert_to_tensor(initial_value(), dtype)
    except Exception:  # pylint: disable=broad-except
      return None  # It needs tensors of the model.


def _fits(variable: Any, wanted: Dict[str, Any]) -> bool:
  return (wanted["shape"].is_compatible_with(variable.shape) and
          wanted["dtype"] in (None, variable.dtype.base_dtype))


def _list(variables: Sequence[Any]) -> str:
  if not variables:
    return "none"
  return ", ".join(f"`{part.op.name}` {part.shape} {part.dtype.name}"
                   for variable in variables
                   for part in _tensorflow.parts_of(variable))
