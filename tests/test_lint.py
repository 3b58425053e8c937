"""Tests for towers.lint."""

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import loop_cases
import towers
from towers import inspection

loop = loop_cases.loop
Loop = loop_cases.Loop


def finding(built):
  """Returns the one finding."""
  found, = inspection.report(built.graph, train_op=built.train_op).findings
  return found


def add_losses(images, index):
  loss = loop_cases.linear_loss(images, index)
  tf.add_to_collection(tf.GraphKeys.LOSSES, loss)
  return loss


class OtherTowersTest(parameterized.TestCase):

  @parameterized.named_parameters(("two", 2), ("three", 3))
  def test_losses_of_all_towers_so_far(self, num_towers):
    def loss(images, index):
      add_losses(images, index)
      return tf.add_n(tf.get_collection(tf.GraphKeys.LOSSES))

    built = loop(loss, num_towers)
    self.assertEqual(loop_cases.rules(built), ["reads_another_tower"])
    self.assertIn("tower 1 reads tower 0, for one", finding(built).what)

  def test_losses_of_the_own_scope(self):
    def loss(images, index):
      add_losses(images, index)
      return tf.add_n(tf.get_collection(
          tf.GraphKeys.LOSSES, f"tower_{index}/"))

    self.assertEmpty(loop_cases.rules(loop(loss, 3)))

  def test_constants_of_another_tower_are_harmless(self):
    shared = []

    def loss(images, index):
      if not shared:
        shared.append(tf.constant(2.0) * 3.0)
      return loop_cases.linear_loss(images, index) * shared[0]

    self.assertEmpty(loop_cases.rules(loop(loss)))

  def test_decay_that_tower_0_made(self):
    """As `tf.layers` names it; each tower's loss has it once."""
    def loss(images, index):
      if index == 0:
        tf.add_to_collection("decay", tf.nn.l2_loss(loop_cases.weights()))
        tf.get_variable_scope().reuse_variables()
      decay, = tf.get_collection("decay")
      return loop_cases.linear_loss(images, index) + decay

    self.assertEmpty(loop_cases.rules(loop(loss, 3)))

  def test_what_merges_outside_of_the_towers(self):
    with tf.Graph().as_default() as graph:
      losses = []
      for i in range(2):
        with tf.name_scope(f"tower_{i}"), tf.variable_scope("", reuse=i > 0):
          losses.append(loop_cases.linear_loss(loop_cases.inputs(), i))
      train_op = tf.train.GradientDescentOptimizer(0.1).minimize(
          tf.add_n(losses) / 2.0)
    self.assertEmpty(loop_cases.rules(Loop(graph, train_op)))


class ScopePrefixTest(parameterized.TestCase):

  def summed(self, num_towers, scope):
    """Sums the losses of each tower after the loop, found by `scope`."""
    built = loop(add_losses, num_towers)
    with built.graph.as_default():
      for i in range(num_towers):
        found = tf.get_collection(tf.GraphKeys.LOSSES, scope.format(i))
        tf.add_n(found, name=f"total_{i}")
    return built

  def test_scope_without_its_slash_c014(self):
    built = self.summed(12, "tower_{}")
    self.assertEqual(loop_cases.rules(built), ["scope_prefix"])
    self.assertEqual(finding(built).where, ("total_1",))
    self.assertIn("tower 10 did", finding(built).what)

  @parameterized.named_parameters(
      ("slash", 12, "tower_{}/"), ("ten_towers", 10, "tower_{}"))
  def test_right(self, num_towers, scope):
    self.assertEmpty(loop_cases.rules(self.summed(num_towers, scope)))

  def test_group_of_update_ops(self):
    def loss(images, index):
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.no_op())
      return loop_cases.linear_loss(images, index)

    built = loop(loss, 11)
    with built.graph.as_default():
      updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS, "tower_1")
      train_op = tf.group(built.train_op, tf.group(*updates, name="updates"))
    built = Loop(built.graph, train_op)
    self.assertEqual(loop_cases.rules(built), ["scope_prefix"])
    self.assertEqual(finding(built).where, ("updates",))


class FewRowsTest(parameterized.TestCase):

  def loss(self, kind):
    def tower_loss(images, index):
      del index
      x = tf.matmul(images, loop_cases.weights())
      if kind == "fused":
        scale = loop_cases.variable("scale", [3])
        x = tf.nn.fused_batch_norm(
            tf.reshape(x, [images.shape[0], 1, 1, 3]), scale, scale)[0]
      elif kind == "moments":
        mean, variance = tf.nn.moments(x, [0])
        x = (x - mean) * tf.math.rsqrt(variance + 1e-3)
      elif kind == "layer":
        mean, variance = tf.nn.moments(x, [1], keepdims=True)
        x = (x - mean) * tf.math.rsqrt(variance + 1e-3)
      elif kind == "inference":
        scale = loop_cases.variable("scale", [3])
        x = tf.nn.fused_batch_norm(
            tf.reshape(x, [images.shape[0], 1, 1, 3]), scale, scale,
            tf.zeros([3]), tf.ones([3]), is_training=False)[0]
      return tf.reduce_mean(tf.square(x))

    return tower_loss

  @parameterized.named_parameters(
      ("fused", "fused", 2), ("moments", "moments", 15))
  def test_few(self, kind, rows):
    built = loop(self.loss(kind), 2, rows=rows)
    self.assertEqual(loop_cases.rules(built), ["batch_norm_of_few_rows"])
    self.assertIn(f"as few as {rows} rows", finding(built).what)
    self.assertLen(finding(built).where, 2)

  @parameterized.named_parameters(
      ("many", "fused", 16), ("many_moments", "moments", 16),
      ("over_features", "layer", 2), ("inference", "inference", 2),
      ("none", "", 2))
  def test_right(self, kind, rows):
    self.assertEmpty(loop_cases.rules(loop(self.loss(kind), rows=rows)))

  def test_rows_that_are_not_known(self):
    built = loop(self.loss("moments"), rows=None)
    self.assertEmpty(loop_cases.rules(built))

  @parameterized.product(
      kind=("fused", "moments", "layer"), num_towers=(1, 2, 3, 4))
  def test_towers_that_meet(self, kind, num_towers):
    with tf.Graph().as_default() as graph:
      built = towers.build_towers(
          lambda images: self.loss(kind)(images, 0), num_towers,
          inputs=loop_cases.inputs(9))
      train_op = built.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
    self.assertEmpty(loop_cases.rules(Loop(graph, train_op)))
    self.assertEmpty(
        inspection.report(built, train_op=train_op).findings)


class SeedsTest(parameterized.TestCase):

  def loss(self, seed, stateless=False):
    def tower_loss(images, index):
      if stateless:
        images *= tf.random.stateless_uniform(tf.shape(images), seed(index))
      else:
        images = tf.nn.dropout(images, rate=0.5, seed=seed(index))
      return loop_cases.linear_loss(images, index)

    return tower_loss

  @parameterized.named_parameters(
      ("op", lambda i: 1, False, None),
      ("op_and_graph", lambda i: 1, False, 7),
      ("stateless", lambda i: [1, 2], True, None))
  def test_same_c036(self, seed, stateless, graph_seed):
    with tf.Graph().as_default():
      tf.set_random_seed(graph_seed)
    built = loop(self.loss(seed, stateless), 3)
    self.assertEqual(loop_cases.rules(built), ["same_seed"])
    self.assertLen(finding(built).where, 3)

  @parameterized.named_parameters(
      ("none", lambda i: None, False), ("of_tower", lambda i: 1 + i, False),
      ("stateless_of_tower", lambda i: [1, i], True))
  def test_different(self, seed, stateless):
    self.assertEmpty(loop_cases.rules(loop(self.loss(seed, stateless), 3)))

  def test_without_a_train_op(self):
    """Initial values do not count, although they have seeds."""
    def build(seed):
      with tf.Graph().as_default() as graph:
        for i in range(2):
          with tf.name_scope(f"tower_{i}"), tf.variable_scope("", reuse=i > 0):
            tf.random.normal([4, 3], seed=1, name="initial")
            loop_cases.variable("v", [2], initializer=(
                tf.random_normal_initializer(seed=1)))
            self.loss(seed)(loop_cases.inputs(), i)
      return [f.rule for f in inspection.report(graph).findings]

    self.assertEmpty(build(lambda i: None))
    self.assertEqual(build(lambda i: 1), ["same_seed"])


class FormsTest(parameterized.TestCase):

  def test_scopes_of_slim(self):
    built = loop(lambda images, i: loop_cases.linear_loss(
        tf.nn.dropout(images, rate=0.5, seed=1), i), scope="clone")
    self.assertEqual(loop_cases.rules(built), ["same_seed"])
    self.assertIn("`clone`", finding(built).what)

  def test_scopes_by_a_pattern(self):
    built = loop(lambda images, i: loop_cases.linear_loss(
        tf.nn.dropout(images, rate=0.5, seed=1), i), scope="part")
    self.assertEmpty(loop_cases.rules(built))
    self.assertEqual(
        loop_cases.rules(built, tower_pattern=r"part_(\d+)/"), ["same_seed"])

  def test_each_rule_says_what_why_and_what_to_do(self):
    built = loop(self.wrong, own_gradients=True, rows=2)
    report = inspection.report(built.graph, train_op=built.train_op)
    self.assertGreater(len(report.findings), 2)
    for found in report.findings:
      for text in (found.what, found.why, found.remedy):
        self.assertEndsWith(text, ".")
        self.assertNotIn("  ", text)
      self.assertIn(f"FINDING {found.rule}", str(report))

  def wrong(self, images, index):
    images = tf.nn.dropout(images, rate=0.5, seed=1)
    bias = tf.Variable(tf.zeros([4]), name="bias", use_resource=True)
    mean, _ = tf.nn.moments(images, [0])
    return loop_cases.linear_loss(images - mean + bias, index)


if __name__ == "__main__":
  absltest.main()
