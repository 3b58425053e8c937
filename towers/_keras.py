"""What Keras keeps by graph or by thread, kept by tower.

Keras numbers unnamed layers: Keras 2 by graph, Keras 3 by thread. Towers share
the graph and have threads of their own. For each tower to name its layers as
the model would on one device, each counts for itself, from where the caller
stands. Its settings (such as the policy for types), which Keras 3 keeps by
thread too, are taken over. Keras is looked for among the loaded modules, never
imported.
"""

import collections
import copy
import sys
from typing import Any, Dict, Optional

import tensorflow.compat.v1 as tf

_KERAS_2 = ("keras.src.backend", "tf_keras.src.backend")
_KERAS_3 = "keras.src.backend.common.global_state"
_KERAS_3_COUNTS = "object_name_uids"
_KERAS_3_SETTINGS = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")

# Counts of Keras 2, by module: how often each name was given.
Counts = Dict[str, Dict[str, int]]


def counts_by_graph(graph: tf.Graph) -> Counts:
  """Returns the counts of Keras 2 for `graph`, as they are kept."""
  return {
      name: by_graph[graph]
      for name, by_graph in _keras_2().items()
      if graph in by_graph
  }


def set_counts_by_graph(graph: tf.Graph, counts: Counts) -> None:
  """Lets Keras 2 go on counting in `counts`."""
  for name, by_graph in _keras_2().items():
    by_graph[graph] = counts.setdefault(name, collections.defaultdict(int))


def copy_of(counts: Counts) -> Counts:
  """Returns counts that go on by themselves from `counts`."""
  return {
      name: collections.defaultdict(int, by_name)
      for name, by_name in counts.items()
  }


def _keras_2() -> Dict[str, Any]:
  found = {}
  for name in _KERAS_2:
    by_graph = getattr(
        sys.modules.get(name), "PER_GRAPH_OBJECT_NAME_UIDS", None)
    if by_graph is not None:
      found[name] = by_graph
  return found


def counts_by_thread() -> Optional[Dict[Any, int]]:
  """Returns a copy of the counts of Keras 3 in the calling thread."""
  state = sys.modules.get(_KERAS_3)
  counts = state and state.get_global_attribute(_KERAS_3_COUNTS)
  return None if counts is None else collections.defaultdict(int, counts)


def set_counts_by_thread(counts: Optional[Dict[Any, int]]) -> None:
  """Lets Keras 3 go on counting from `counts` in the calling thread."""
  state = sys.modules.get(_KERAS_3)
  if state is not None and counts is not None:
    state.set_global_attribute(_KERAS_3_COUNTS,
                               collections.defaultdict(int, counts))


def settings_of_thread() -> Dict[str, Dict[str, Any]]:
  """Returns a copy of all else that Keras 3 keeps for the calling thread."""
  state = sys.modules.get(_KERAS_3)
  settings = {}
  for name in _KERAS_3_SETTINGS:
    kept = vars(getattr(state, name)) if hasattr(state, name) else {}
    settings[name] = {
        key: copy.copy(value) if isinstance(value, (dict, list)) else value
        for key, value in kept.items()
        if key != _KERAS_3_COUNTS
    }
  return settings


def take_settings(settings: Dict[str, Dict[str, Any]]) -> None:
  """Lets Keras 3 have `settings` in the calling thread, a new one."""
  state = sys.modules.get(_KERAS_3)
  for name, kept in settings.items():
    if kept:
      vars(getattr(state, name)).update({
          key: copy.copy(value) if isinstance(value, (dict, list)) else value
          for key, value in kept.items()
      })
