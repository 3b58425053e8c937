"""Helpers for tests that need more than one device on a machine with CPUs."""

import contextlib
import inspect
from typing import Any, Iterator, List, Optional

import tensorflow.compat.v1 as tf

# As many devices as the tests see by default. A test that needs more towers
# passes its own number; one that needs fewer still sees all of these, so that a
# tower on a wrong device is found out.
NUM_CPUS = 5


def config(num_cpus: int = NUM_CPUS,
           *,
           optimize: bool = False,
           **overrides: Any) -> tf.ConfigProto:
  """Returns a session config that shows `num_cpus` logical CPU devices.

  A session without a config of ours places softly: an op pinned to `/cpu:3`
  would run quietly on CPU 0, and a test of several towers on one device.

  Args:
    num_cpus: Number of logical CPU devices.
    optimize: Whether TensorFlow rewrites the graph before its first step. That
      takes longer than all that most tests run; those of whole training steps
      ask for it, and scripts that tests start have it, as users do.
    **overrides: Further fields of the `ConfigProto`.

  Returns:
    A `ConfigProto`.
  """
  result = tf.ConfigProto(device_count={"CPU": num_cpus}, **overrides)
  result.graph_options.rewrite_options.disable_meta_optimizer = not optimize
  return result


def devices(num_towers: int) -> List[str]:
  """Returns the names of the first `num_towers` logical CPU devices."""
  return [f"/cpu:{i}" for i in range(num_towers)]


def num_cpus(sess: tf.Session) -> int:
  """Returns how many CPU devices `sess` sees."""
  return sum(d.device_type == "CPU" for d in sess.list_devices())


@contextlib.contextmanager
def session(graph: Optional[tf.Graph] = None,
            *,
            cpus: int = NUM_CPUS,
            initialize: bool = False,
            **overrides: Any) -> Iterator[tf.Session]:
  """Opens a session that sees `cpus` CPU devices, and checks that it does.

  Args:
    graph: The graph to run; the default graph if `None`.
    cpus: Number of logical CPU devices.
    initialize: Whether to initialise the graph's global variables first.
    **overrides: Further fields of the `ConfigProto`.

  Yields:
    The session, as the default one.
  """
  graph = graph or tf.get_default_graph()
  with graph.as_default(), tf.Session(config=config(cpus, **overrides)) as sess:
    if num_cpus(sess) != cpus:
      raise AssertionError(
          f"The session must see {cpus} CPU devices, it sees {num_cpus(sess)}.")
    if initialize:
      sess.run(tf.global_variables_initializer())
    yield sess


def clear_keras() -> None:
  """Makes Keras name its layers as if none had been made before.

  Keras 3 would also collect garbage, which takes longer than most of the tests
  that call this: it looks at all that the tests before have imported and built.
  """
  clear = tf.keras.backend.clear_session
  if "free_memory" in inspect.signature(clear).parameters:
    clear(free_memory=False)
  else:
    clear()
