"""Tests for towers.display_names: which box each op is shown in."""

import collections

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import loop_cases
import testing
import towers
from towers import display_names
from towers import graph_nodes

BOXES = {"input", "towers", "cross_tower", "gradients", "average", "apply",
         "variables"}


def model(x, y):
  h = tf.matmul(x, tf.get_variable("w", [4, 8]))
  h = tf.nn.relu(towers.batch_norm(h, training=True, name="norm"))
  with tf.variable_scope("head"):
    logits = tf.matmul(h, tf.get_variable("w", [8, 3]))
  loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels=y, logits=logits))
  tf.summary.scalar("loss", loss)
  return {"loss": loss, "logits": logits}


def build(num_towers, *, placeholders=False, **kwargs):
  if placeholders:
    inputs = (tf.placeholder(tf.float32, [None, 4], "x"),
              tf.placeholder(tf.int64, [None], "y"))
  else:
    data = tf.data.Dataset.from_tensors((tf.ones([7, 4]), [1] * 7)).repeat()
    inputs = tf.data.make_one_shot_iterator(data).get_next()
  with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
    return towers.build_towers(
        model, testing.devices(num_towers), inputs=inputs, **kwargs)


def shown(pattern=None):
  """Returns (name for display, node) by the names of the default graph."""
  nodes = graph_nodes.Nodes(tf.get_default_graph().as_graph_def(), {}, None)
  found = display_names.names(
      nodes, display_names.Towers(nodes, pattern))
  return {name: (found[name], nodes.by_name[name]) for name in nodes.by_name}


def top(names):
  return {name.partition("/")[0] for name, _ in names.values()}


def within(names, box):
  """Returns (name, type, inputs) in `box`, as seen from there."""
  return sorted(
      (name[len(box):], node.op, len(node.inputs))
      for name, node in names.values() if name.startswith(box))


class BoxesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    graph = tf.Graph().as_default()
    graph.__enter__()
    self.addCleanup(graph.__exit__, None, None, None)

  @parameterized.product(num_towers=(1, 2, 3, 4), placeholders=(False, True))
  def test_few_boxes(self, num_towers, placeholders):
    graph = build(num_towers, placeholders=placeholders)
    graph.minimize(tf.train.AdamOptimizer(), clip_norm=1.0)
    tf.global_variables_initializer()
    tf.train.Saver()
    names = shown()
    boxes = top(names)
    if num_towers == 1 and not placeholders:
      boxes |= {"cross_tower"}
    if num_towers == 1:
      boxes |= {"average"}
    self.assertEqual(boxes, BOXES)
    self.assertLen({name for name, _ in names.values()}, len(names))
    for variable in tf.global_variables():
      self.assertEqual(names[variable.op.name][0],
                       f"variables/{variable.op.name}")
    for op in (graph.loss.op, graph.outputs["logits"].op):
      self.assertStartsWith(
          names[op.name][0], "cross_tower/" if num_towers > 1 else "towers/")

  @parameterized.parameters("shared", "balanced", "replicated")
  def test_towers_are_alike(self, variables):
    """Op for op, forward and backward; one alone makes updates, say."""
    build(3, variables=variables).minimize(tf.train.AdamOptimizer())
    names = shown()
    for box in ("towers", "gradients"):
      first = within(names, f"{box}/tower_0/")
      self.assertGreater(len(first), 15)
      for i in (1, 2):
        self.assertEqual(within(names, f"{box}/tower_{i}/"), first)

  def test_by_what_ops_do(self):
    graph = build(2)
    graph.minimize(
        tf.train.MomentumOptimizer(tf.train.exponential_decay(
            0.1, tf.train.create_global_step(), 10, 0.9), 0.9),
        clip_norm=1.0, skip_nonfinite=True,
        loss=graph.loss + 0.1 * tf.nn.l2_loss(graph.variables[0]))
    classes = tf.argmax(graph.outputs["logits"], axis=1, name="classes")
    names = {name: found for name, (found, _) in shown().items()}
    self.assertEqual(names["IteratorGetNext"], "input/IteratorGetNext")
    self.assertEqual(names["tower_1/Relu"], "towers/tower_1/Relu")
    self.assertEqual(names["L2Loss"], "cross_tower/L2Loss")
    self.assertEqual(names["gradients/tower_1/Relu_grad/ReluGrad"],
                     "gradients/tower_1/Relu_grad/ReluGrad")
    self.assertEqual(names["average_gradients/AddN"], "average/AddN")
    self.assertEqual(names["ExponentialDecay"], "apply/ExponentialDecay")
    self.assertEqual(names["w/Momentum"], "variables/w/Momentum")
    self.assertEqual(names[classes.op.name], "outputs/classes")
    for update in graph.update_ops:
      self.assertStartsWith(names[update.name], "apply/tower_0/norm/")

  @parameterized.parameters("tower", "eval")
  def test_second_build_has_its_own_box(self, name):
    """c072: train and eval stand apart, also when they are shown."""
    build(2).minimize(tf.train.AdamOptimizer())
    build(3, name=name)
    names = shown()
    box = "towers_2" if name == "tower" else "eval"
    self.assertEqual(top(names), BOXES | {box})
    inside = {found.split("/")[1] for found, _ in names.values()
              if found.startswith(f"{box}/")}
    self.assertContainsSubset([f"{name}_{i}" for i in range(3)], inside)
    self.assertContainsSubset([f"cross_{name}"], inside)
    self.assertEqual(within(names, f"{box}/{name}_1/"),
                     within(names, f"{box}/{name}_2/"))

  def test_scope_entered_again_stays_in_one_tower(self):
    """c072: a model that enters a variable scope twice makes no new box."""
    def twice(x):
      for reuse in (False, True):
        with tf.variable_scope("m", reuse=reuse):
          x = tf.matmul(x, tf.get_variable("w", [4, 4]))
      return tf.reduce_mean(x)

    towers.build_towers(twice, testing.devices(2), inputs=tf.ones([6, 4]))
    names = shown()
    self.assertEqual(top(names), {"input", "towers", "cross_tower",
                                  "variables"})
    for i in range(2):
      self.assertEqual(names[f"tower_{i}/m_1/MatMul"][0],
                       f"towers/tower_{i}/m_1/MatMul")

  def test_two_losses(self):
    graph = build(2)
    for loss in (graph.loss, 2 * graph.loss):
      graph.minimize(tf.train.GradientDescentOptimizer(0.1), loss=loss)
    names = shown()
    self.assertEqual(top(names), BOXES | {"outputs"})
    self.assertEqual(within(names, "gradients/gradients_1/tower_0/"),
                     within(names, "gradients/gradients_1/tower_1/"))

  def test_inside_another_scope(self):
    with tf.name_scope("train"):
      build(2).minimize(tf.train.AdamOptimizer())
    names = {name: found for name, (found, _) in shown().items()}
    self.assertEqual({name.partition("/")[0] for name in names.values()},
                     BOXES)
    self.assertEqual(names["train/tower_0/Relu"], "towers/train/tower_0/Relu")

  def test_gradients_inside_a_tower_stay_there(self):
    def penalty(x):
      w = tf.get_variable("w", [4, 1])
      slope, = tf.gradients(tf.nn.sigmoid(tf.matmul(x, w)), [x])
      return tf.reduce_mean(slope**2)

    towers.build_towers(penalty, testing.devices(2), inputs=tf.ones([6, 4]))
    found = collections.Counter(
        "/".join(name.split("/")[:3]) for name, _ in shown().values())
    self.assertGreater(found["towers/tower_0/gradients"], 2)
    self.assertEqual(found["towers/tower_0/gradients"],
                     found["towers/tower_1/gradients"])

  @parameterized.parameters(None, r"tower_(\d)/")
  def test_loop_written_by_hand(self, pattern):
    graph = loop_cases.loop(loop_cases.linear_loss, 3).graph
    with graph.as_default():
      names = shown(pattern)
    self.assertContainsSubset(top(names), BOXES | {"outputs"})
    self.assertContainsSubset({"towers", "apply", "variables"}, top(names))
    inside = {name.split("/")[1] for name, _ in names.values()
              if name.startswith("towers/")}
    self.assertEqual(inside, {"tower_0", "tower_1", "tower_2"})

  def test_without_towers(self):
    """The model's own scopes are its boxes."""
    loss = model(tf.ones([3, 4]), [0, 1, 2])["loss"]
    tf.train.AdamOptimizer().minimize(loss)
    names = shown()
    self.assertEqual(names["Relu"][0], "Relu")
    self.assertEqual(names["head/MatMul"][0], "head/MatMul")
    self.assertEqual(names["head/w"][0], "variables/head/w")
    self.assertEqual(names["gradients/Relu_grad/ReluGrad"][0],
                     "gradients/Relu_grad/ReluGrad")

  def test_names_that_boxes_have_already(self):
    for name in ("input/x", "towers/x", "variables", "apply", "x"):
      tf.placeholder(tf.float32, [2], name=name)
    build(2)
    names = [name for name, _ in shown().values()]
    self.assertLen(set(names), len(names))
    self.assertContainsSubset(
        ["input/x", "input/x_", "input/towers/x", "input/apply"], names)


if __name__ == "__main__":
  absltest.main()
