"""Helpers for tests of clusters: all tasks in threads of one process.

Each task has a server of TensorFlow's own and a graph of its own, and they talk
over loopback as processes on several hosts would.
"""

import contextlib
import socket
import threading
import time
from typing import Any, Callable, Dict, List

import numpy as np
import tensorflow.compat.v1 as tf
import towers
from towers import cluster as cluster_lib

TIME_LIMIT = 60.0

# Towers and gradients are built by one thread at a time.
_BUILDING = threading.Lock()


def free_addresses(count: int) -> List[str]:
  """Returns addresses on loopback with ports that are free now."""
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for each in sockets:
      each.bind(("127.0.0.1", 0))
    return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def jobs(workers: int, servers: int) -> Dict[str, List[str]]:
  """Returns the addresses of a new cluster."""
  addresses = free_addresses(workers + servers)
  found = {"worker": addresses[:workers]}
  if servers:
    found["ps"] = addresses[workers:]
  return found


def run_tasks(addresses: Dict[str, List[str]],
              work: Callable[[cluster_lib.Cluster], Any],
              **arguments: Any) -> Dict[str, Any]:
  """Runs all tasks until they have ended; returns what they came to.

  Args:
    addresses: Of the cluster.
    work: What a task does that builds a graph, in a graph of its own.
    **arguments: Of `Cluster`.

  Returns:
    By "worker 0" and so on: what `work` returned, "served" for tasks that only
    serve, or the exception that ended the task.
  """
  arguments.setdefault("time_limit", TIME_LIMIT)
  results: Dict[str, Any] = {}

  def run(job, index):
    name = f"{job} {index}"
    try:
      cluster = cluster_lib.Cluster(addresses, job=job, index=index,
                                    **arguments)
      cluster.start()
      if cluster.only_serves:
        cluster.serve()
        results[name] = "served"
      else:
        with tf.Graph().as_default():
          results[name] = work(cluster)
    except Exception as error:  # pylint: disable=broad-except
      results[name] = error

  threads = [
      threading.Thread(target=run, args=(job, index), daemon=True)
      for job, entries in addresses.items() for index in range(len(entries))
  ]
  for thread in threads:
    thread.start()
  end = time.monotonic() + 2 * TIME_LIMIT
  for thread in threads:
    thread.join(max(end - time.monotonic(), 0.0))
  for thread in threads:
    assert not thread.is_alive(), f"A task hangs; the others came to {results}."
  return results


def values(results: Dict[str, Any], name: str) -> Any:
  """Returns the result of a task; raises what ended it."""
  if isinstance(results[name], Exception):
    raise results[name]
  return results[name]


# --- A model ------------------------------------------------------------------

STEPS = 20
ROWS = 7


def batch(step: int) -> List[np.ndarray]:
  """Returns the whole batch of a step, `[ROWS, 3]` and `[ROWS, 1]`."""
  random = np.random.RandomState(step)
  return [random.normal(size=[ROWS, 3]), random.normal(size=[ROWS, 1])]


def rows_of(cluster: cluster_lib.Cluster) -> slice:
  """Returns which rows of a batch this process feeds."""
  if cluster.replication == "in_graph":
    return slice(None)
  bounds = [ROWS * worker // len(cluster.workers)
            for worker in range(len(cluster.workers) + 1)]
  return slice(*bounds[cluster.task.index:cluster.task.index + 2])


def model_fn(with_batch_norm: bool) -> Callable[..., tf.Tensor]:
  """Returns a model with dense and sparse gradients."""

  def model(x, y):
    weights = tf.get_variable("w", [3, 4], tf.float64, tf.ones_initializer())
    table = tf.get_variable(
        "table", [5, 4], tf.float64, tf.random_normal_initializer(seed=3))
    rows = tf.cast(tf.abs(x[:, 0]) * 2.0, tf.int32) % 5
    hidden = tf.tanh(x @ weights + tf.nn.embedding_lookup(table, rows))
    if with_batch_norm:
      hidden = towers.batch_norm(hidden, training=True, name="norm")
    out = hidden @ tf.get_variable("v", [4, 1], tf.float64,
                                   tf.ones_initializer())
    return tf.reduce_mean((out - y)**2)

  return model


def placeholders() -> List[tf.Tensor]:
  return [tf.placeholder(tf.float64, [None, 3]),
          tf.placeholder(tf.float64, [None, 1])]


def global_step(cluster: cluster_lib.Cluster) -> Any:
  """Makes the global step where all workers share it."""
  with tf.device(cluster.parameter_devices[0]):
    return tf.get_variable(
        "global_step", [], tf.int64, tf.zeros_initializer(), trainable=False,
        use_resource=True, collections=[tf.GraphKeys.GLOBAL_VARIABLES,
                                        tf.GraphKeys.GLOBAL_STEP])


def trained(cluster: cluster_lib.Cluster, *, steps: int = STEPS,
            with_batch_norm: bool = False, optimizer: Any = None,
            sync: bool = True, checkpoint_dir: Any = None,
            **options: Any) -> Dict[str, np.ndarray]:
  """Trains as one task; returns the variables that the chief sees at the end.

  Args:
    cluster: The cluster.
    steps: The global step to stop at.
    with_batch_norm: Whether the model has batch norm.
    optimizer: Default: momentum.
    sync: See `Cluster.minimize`.
    checkpoint_dir: See `Cluster.session`; saved every 5 steps.
    **options: Of `minimize`.
  """
  with _BUILDING:
    x, y = placeholders()
    graph = towers.build_towers(
        model_fn(with_batch_norm), cluster.tower_devices, inputs=(x, y),
        parameter_device=cluster.parameter_devices)
    train_op = cluster.minimize(
        graph, optimizer or tf.train.MomentumOptimizer(0.05, 0.9),
        global_step=global_step(cluster), sync=sync, **options)
  rows, found = rows_of(cluster), {}
  variables = {v.op.name: v for v in tf.global_variables()}
  step = tf.train.get_global_step()
  with cluster.session(
      graph, hooks=[tf.train.StopAtStepHook(last_step=steps)],
      checkpoint_dir=checkpoint_dir, save_checkpoint_steps=5) as session:
    while not session.should_stop():
      at = session.run_step_fn(
          lambda step_context: step_context.session.run(step))
      values_of_step = batch(int(at))
      session.run(train_op, {x: values_of_step[0][rows],
                             y: values_of_step[1][rows]})
    if cluster.is_chief:
      found = session.run_step_fn(
          lambda step_context: step_context.session.run(variables))
  return found


def on_one_device(*, steps: int = STEPS, with_batch_norm: bool = False,
                  optimizer: Any = None,
                  clip_norm: Any = None) -> Dict[str, np.ndarray]:
  """Returns the variables of the same training in plain code."""
  with tf.Graph().as_default():
    x, y = placeholders()
    loss = model_fn(with_batch_norm)(x, y)
    step = tf.train.get_or_create_global_step()
    optimizer = optimizer or tf.train.MomentumOptimizer(0.05, 0.9)
    pairs = optimizer.compute_gradients(loss)
    if clip_norm is not None:
      clipped, _ = tf.clip_by_global_norm(
          [tf.convert_to_tensor(gradient) for gradient, _ in pairs], clip_norm)
      pairs = list(zip(clipped, [variable for _, variable in pairs]))
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
      train_op = optimizer.apply_gradients(pairs, global_step=step)
    with tf.Session() as session:
      session.run(tf.global_variables_initializer())
      for number in range(steps):
        session.run(train_op, dict(zip([x, y], batch(number))))
      return session.run({v.op.name: v for v in tf.global_variables()})
