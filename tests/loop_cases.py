"""Tower loops written by hand, as in old tutorials, for tests that judge them.

With its defaults a loop is right. Each option makes one mistake.
"""

import contextlib
from typing import Any, Callable, NamedTuple, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import inspection


class Loop(NamedTuple):
  """A loop's graph and the op of a training step."""
  graph: tf.Graph
  train_op: tf.Operation


def variable(name: str, shape: Sequence[int], resource: bool = True,
             device: Optional[str] = "/cpu:0",
             **arguments: Any) -> tf.Variable:
  """Makes a variable; without `device` it lies where the loop happens to be."""
  with tf.device(device) if device else contextlib.nullcontext():
    return tf.get_variable(name, shape, use_resource=resource, **arguments)


def weights(resource: bool = True, **arguments: Any) -> tf.Variable:
  return variable("weights", [4, 3], resource, **arguments)


def inputs(rows: Optional[int] = 32) -> tf.Tensor:
  return tf.placeholder(tf.float32, [rows, 4], name="images")


def linear_loss(images: tf.Tensor, index: int) -> tf.Tensor:
  """The loss of a tower of one layer."""
  del index
  return tf.reduce_mean(tf.square(tf.matmul(images, weights())))


def average_gradients(tower_gradients: Any) -> Any:
  pairs = []
  for group in zip(*tower_gradients):
    grads = [tf.expand_dims(g, 0) for g, _ in group if g is not None]
    if grads:
      pairs.append((tf.reduce_mean(tf.concat(grads, 0), 0), group[0][1]))
  return pairs


def loop(tower_loss: Callable[[tf.Tensor, int], tf.Tensor] = linear_loss,
         num_towers: int = 2, *, scope: str = "tower", device: str = "gpu",
         reuse: bool = True, own_gradients: bool = False,
         rows: Optional[int] = 32, update_ops: Optional[str] = "first",
         optimizer: Optional[tf.train.Optimizer] = None,
         apply_in_tower: bool = False) -> Loop:
  """Builds towers and a training step that averages their gradients.

  Args:
    tower_loss: Returns the loss of a tower from its images and its number.
    num_towers: Number of towers.
    scope: What the towers' scopes start with.
    device: Kind of the towers' devices.
    reuse: Whether towers share variables made by `tf.get_variable`.
    own_gradients: Whether each tower's variables get its own gradients only.
    rows: Rows of each tower.
    update_ops: Whose update ops the step waits for: "first", "all" or None.
    optimizer: The optimizer.
    apply_in_tower: Whether gradients are applied in the scope of the last
      tower.
  """
  optimizer = optimizer or tf.train.MomentumOptimizer(0.1, 0.9)
  gradients, first_updates = [], []
  with tf.Graph().as_default() as graph:
    with tf.variable_scope(tf.get_variable_scope()) as variables:
      for i in range(num_towers):
        with tf.device(f"/{device}:{i}"), tf.name_scope(f"{scope}_{i}"):
          loss = tower_loss(inputs(rows), i)
          if reuse:
            variables.reuse_variables()
          gradients.append(optimizer.compute_gradients(loss))
          if i == 0:
            first_updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    updates = {"first": first_updates, None: [],
               "all": tf.get_collection(tf.GraphKeys.UPDATE_OPS)}[update_ops]
    with tf.device("/cpu:0"), tf.control_dependencies(updates):
      if own_gradients:
        pairs = [(g, v) for group in gradients for g, v in group
                 if g is not None]
      else:
        pairs = average_gradients(gradients)
      with tf.name_scope(f"{scope}_{num_towers - 1}/" if apply_in_tower
                         else None):
        train_op = optimizer.apply_gradients(pairs)
  return Loop(graph, train_op)


def rules(built: Loop, **arguments: Any) -> Sequence[str]:
  """Returns which rules find something, looked at in every form of the graph.
  """
  report = inspection.report(built.graph, train_op=built.train_op, **arguments)
  found = sorted({finding.rule for finding in report.findings})
  meta = tf.train.export_meta_graph(graph=built.graph)
  again = inspection.report(meta, train_op=built.train_op.name, **arguments)
  if sorted({finding.rule for finding in again.findings}) != found:
    raise AssertionError(f"MetaGraph: {again.findings}, graph: {found}.")
  return found
