"""Tests for towers.scopes."""

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from towers import graph_nodes
from towers import scopes as scopes_lib


def graph_of(names):
  """Returns the nodes of a graph of constants of these names."""
  definition = tf.GraphDef()
  for name in names:
    node = definition.node.add(name=name, op="Const")
    node.attr["dtype"].type = tf.float32.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(1.0))
  return graph_nodes.read(definition)


def sets_of(names, *arguments):
  scopes = scopes_lib.Scopes(graph_of(names), *arguments)
  return {s.name: {i: [n.name for n in nodes] for i, nodes in s.nodes.items()}
          for s in scopes.sets}


class ScopesTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("towers", "tower_{}/a", "tower"), ("slim", "clone_{}/a", "clone"),
      ("replica", "replica_{}/a", "replica"), ("gpu", "gpu_{}/a", "gpu"),
      ("no_line", "tower{}/a", "tower"), ("upper", "Tower_{}/a", "Tower"),
      ("inside", "train/tower_{}/a", "train/tower"),
      ("own_name", "test_tower_{}/a", "test_tower"),
      ("gradient", "gradients/tower_{}/a_grad/b", "tower"),
      ("gradient_of_inside", "gradients_2/train/tower_{}/a", "train/tower"),
      ("again", "tower_{}_1/a", "tower_*_1"))
  def test_finds(self, form, name):
    names = [form.format(i) for i in range(12)]
    self.assertEqual(sets_of(names + ["other/a"]),
                     {name: {i: [names[i]] for i in range(12)}})

  @parameterized.named_parameters(
      ("numbered_layers", ["conv_0/a", "conv_1/a"]),
      ("merges", ["cross_tower_1/a", "cross_tower_2/a"]),
      ("no_first", ["tower_1/a", "tower_2/a"]),
      ("optimizer", ["Adam/update_tower_0/b/a", "Adam/update_tower_1/b/a"]),
      ("views", ["towers_view/a", "towers_constants/a"]))
  def test_finds_none(self, names):
    self.assertEmpty(sets_of(names))

  def test_several_sets(self):
    names = ["tower_0/a", "tower_1/a", "eval/tower_0/a", "eval/tower_1/a"]
    self.assertEqual(sets_of(names), {
        "tower": {0: ["tower_0/a"], 1: ["tower_1/a"]},
        "eval/tower": {0: ["eval/tower_0/a"], 1: ["eval/tower_1/a"]}})

  def test_gradients_belong_to_their_tower(self):
    names = ["tower_0/a", "tower_0/gradients/tower_0/a_grad/b",
             "gradients/tower_0/a_grad/b"]
    self.assertEqual(sets_of(names), {"tower": {0: names}})

  def test_known_scopes(self):
    names = ["part_0/a", "part_1/a", "part_10/a", "gradients/part_1/a"]
    self.assertEqual(
        sets_of(names, None, ["part_0/", "part_1/"]),
        {"part": {0: names[:1], 1: [names[1], names[3]]}})

  @parameterized.named_parameters(
      ("named", r"part-(?P<index>\d+)/"), ("first", r"part-(\d+)/"))
  def test_pattern(self, pattern):
    found = sets_of(["part-0/a", "b/part-1/a", "part-0b/a"], pattern)
    self.assertEqual([list(x) for x in found.values()], [[0]])

  def test_plain_name(self):
    nodes = graph_of(["tower_0/a", "gradients/tower_0/b", "c"])
    scopes = scopes_lib.Scopes(nodes)
    self.assertEqual([scopes.plain_name(n) for n in nodes.ordered],
                     ["a", "gradients/b", "c"])
    self.assertIsNone(scopes.place(nodes.by_name["c"]))

  @parameterized.named_parameters(
      ("expression", "part_(", "must be a regular expression: got 'part_\\('"),
      ("group", r"part_\d+/", "must have a group around the tower's number"))
  def test_rejects_pattern(self, pattern, message):
    with self.assertRaisesRegex(ValueError, "`tower_pattern` " + message):
      scopes_lib.Scopes(graph_of(["a"]), pattern)


class DifferenceTest(parameterized.TestCase):

  def difference(self, tower):
    with tf.Graph().as_default() as graph:
      images = tf.placeholder(tf.float32, [4, 3], name="images")
      for i in range(2):
        with tf.name_scope(f"tower_{i}"):
          tower(images, i)
    scopes = scopes_lib.Scopes(graph_nodes.read(graph))
    towers, = scopes.sets
    return scopes_lib.difference(
        *[scopes_lib.signatures(scopes, towers.nodes[i]) for i in range(2)])

  def test_same(self):
    self.assertEqual(
        self.difference(lambda x, i: tf.nn.relu(x + 1.0)), (0, 0, (), ()))

  def test_numbers_of_names_do_not_matter(self):
    def tower(x, i):
      with tf.name_scope(f"dense_{i}" if i else "dense"):
        tf.nn.relu(x)

    self.assertEqual(self.difference(tower), (0, 0, (), ()))

  def test_other_type(self):
    found = self.difference(
        lambda x, i: tf.nn.elu(x, name="y") if i else tf.nn.relu(x, name="y"))
    self.assertEqual(found, (
        1, 1, ("y = Relu(images)",), ("y = Elu(images)",)))

  def test_other_input(self):
    found = self.difference(
        lambda x, i: tf.nn.relu(tf.abs(x) if i else tf.square(x), name="y"))
    self.assertEqual(found.missing, ("Square = Square(images)",
                                     "y = Relu(Square)"))
    self.assertEqual(found.extra, ("Abs = Abs(images)", "y = Relu(Abs)"))

  def test_one_more(self):
    def tower(x, i):
      for _ in range(1 + i):
        x = tf.nn.relu(x)

    found = self.difference(tower)
    self.assertEqual((found.num_missing, found.num_extra), (0, 1))

  def test_state_of_one_tower_does_not_matter(self):
    def tower(x, i):
      mean = tf.get_variable("mean", [3]) if not i else None
      result = tf.nn.relu(x)
      tf.square(result)
      if mean is not None:
        tf.assign_sub(mean, 0.1 * tf.reduce_mean(result, 0))

    self.assertEqual(self.difference(tower), (0, 0, (), ()))


if __name__ == "__main__":
  absltest.main()
