"""Tests for towers.tower, and for what is a tower's own: names and seeds."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


def model(x):
  """A model that leaves something in many collections."""
  weight = tf.get_variable(
      "weight", [2, 2],
      regularizer=lambda w: tf.reduce_sum(tf.square(w), name="decay"))
  y = tf.matmul(x, weight)
  loss = tf.losses.mean_squared_error(tf.zeros_like(y), y)
  tf.summary.scalar("error", loss)
  tf.summary.histogram("y", y)
  counter = tf.get_variable("counter", [], tf.int32, trainable=False,
                            initializer=tf.zeros_initializer())
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, counter.assign_add(1))
  tf.add_to_collection("own", towers.current_tower().index)
  return {"loss": loss, "y": y}


def build(count, **options):
  return towers.build_towers(
      model, [f"/cpu:{i % 4}" for i in range(count)], inputs=tf.ones([12, 2]),
      **options)


def names_of(items):
  return [getattr(item, "name", item) for item in items]


class CollectionsTest(parameterized.TestCase, tf.test.TestCase):

  KEYS = (tf.GraphKeys.LOSSES, tf.GraphKeys.REGULARIZATION_LOSSES,
          tf.GraphKeys.SUMMARIES, tf.GraphKeys.UPDATE_OPS,
          tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES)

  @parameterized.parameters(1, 2, 3)
  def test_graph_holds_what_one_tower_would_have_put_there(self, count):
    """c028: also regularisation losses, which stand in no tower's scope."""
    with tf.Graph().as_default():
      model(tf.ones([12, 2]))
      plain = {key: len(tf.get_collection(key)) for key in self.KEYS}
    graph = build(count)
    for key in self.KEYS:
      self.assertLen(tf.get_collection(key), plain[key], key)
      self.assertEqual(tf.get_collection(key), graph.towers[0].collection(key))
    self.assertEqual(tf.get_collection("own"), [0])

  @parameterized.parameters(2, 12)
  def test_each_tower_has_its_own(self, count):
    """c014, c028, c071: tracked by what a tower adds, not by its prefix."""
    graph = build(count)
    for key in self.KEYS:
      sizes = {len(tower.collection(key)) for tower in graph.towers}
      self.assertLen(sizes, 1, key)
      self.assertNotIn(0, sizes, key)
    for i, tower in enumerate(graph.towers):
      self.assertEqual(tower.collection("own"), [i])
      self.assertEmpty(tower.collection("nothing"))
      for key in (tf.GraphKeys.LOSSES, tf.GraphKeys.SUMMARIES):
        for item in tower.collection(key):
          self.assertStartsWith(item.op.name, f"tower_{i}/")
      self.assertEqual(
          names_of(tower.collection(tf.GraphKeys.GLOBAL_VARIABLES)),
          ["weight:0", "counter:0"])

  def test_a_copy_is_returned(self):
    tower = build(2).towers[1]
    tower.collection("own").append("more")
    self.assertEqual(tower.collection("own"), [1])

  def test_what_was_there_before_belongs_to_no_tower(self):
    tf.add_to_collection("own", "before")
    graph = build(2)
    tf.add_to_collection("own", "after")
    self.assertEqual(tf.get_collection("own"), ["before", 0, "after"])
    self.assertEqual([t.collection("own") for t in graph.towers], [[0], [1]])

  def test_summaries_have_the_tags_of_the_plain_model(self):
    x = tf.ones([12, 2])
    with tf.Graph().as_default():
      model(tf.ones([12, 2]))
      plain = self.tags(tf.summary.merge_all())
    del x
    build(3)
    self.assertEqual(self.tags(tf.summary.merge_all()), plain)

  def tags(self, summary):
    with testing.session(initialize=True) as sess:
      parsed = tf.Summary.FromString(sess.run(summary))
    return sorted(value.tag for value in parsed.value)


class NamesTest(parameterized.TestCase, tf.test.TestCase):

  def test_scopes(self):
    """c072: a second build stands apart, under a name that says so."""
    first = build(2)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      second, third = build(2), build(2, name="eval")
    with tf.name_scope("outer"), tf.variable_scope("", reuse=True):
      fourth = build(2)
    self.assertEqual(
        [[t.name_scope for t in graph.towers]
         for graph in (first, second, third, fourth)],
        [["tower_0/", "tower_1/"],
         ["towers_2/tower_0/", "towers_2/tower_1/"],
         ["eval_0/", "eval_1/"],
         ["outer/tower_0/", "outer/tower_1/"]])
    for graph in (first, second, third, fourth):
      for tower in graph.towers:
        self.assertStartsWith(tower.outputs["y"].name, tower.name_scope)
    self.assertEqual(names_of(tf.global_variables()), ["weight:0", "counter:0"])

  @parameterized.named_parameters(
      ("without_tower", "", "", "a/b:0", "a/b:0"),
      ("in_tower", "tower_0/", "", "tower_0/a/b:0", "a/b:0"),
      ("in_scope", "outer/tower_0/", "outer/", "outer/tower_0/a", "outer/a"),
      ("second_build", "towers_2/tower_0/", "", "towers_2/tower_0/a", "a"),
      ("under_a_variable_scope", "tower_0/", "", "v/tower_0/a", "v/a"),
      ("tower_1_is_not_tower_10", "tower_1/", "", "tower_10/a", "tower_10/a"),
      ("no_part_of_a_name", "tower_0/", "", "my_tower_0/a", "my_tower_0/a"),
      ("only_the_first", "tower_0/", "", "tower_0/a/tower_0/b", "a/tower_0/b"),
  )
  def test_plain_name(self, scope, enclosing, name, expected):
    tower = towers.Tower(index=0, count=2, devices=("/cpu:0",),
                         name_scope=scope, enclosing_scope=enclosing)
    self.assertEqual(tower.plain_name(name), expected)

  def test_repr_says_which_tower(self):
    self.assertEqual(
        repr(build(2).towers[1]), "Tower(index=1, count=2, "
        "devices=('/cpu:1',), name_scope='tower_1/')")

  def test_spec_has_no_weight_unless_given(self):
    self.assertEqual(towers.TowerSpec(), (None, None, None))
    self.assertEqual(towers.TowerSpec(1, {"y": 2}, 3),
                     towers.TowerSpec(loss=1, outputs={"y": 2}, weight=3))


class SeedsTest(parameterized.TestCase, tf.test.TestCase):

  def random_model(self, x=None):
    if x is None:
      x = tf.ones([4, 6])
    weight = tf.get_variable("a/kernel", [6, 3])
    other = tf.get_variable("b/kernel", [3, 2],
                            initializer=tf.random_normal_initializer())
    fixed = tf.get_variable("c", [3],
                            initializer=tf.random_normal_initializer(seed=7))
    third = tf.Variable(tf.random_uniform([2]), name="d")
    mask = tf.nn.dropout(x, rate=0.5)
    later = tf.get_variable("later", [4])
    y = tf.matmul(mask, weight) + fixed
    return {"loss": tf.reduce_mean(tf.matmul(y, other) + third) +
                    tf.reduce_sum(later),
            "mask": mask}

  def initial_values(self, build):
    with tf.Graph().as_default():
      tf.set_random_seed(5)
      build()
      after = tf.get_variable("after", [3])
      del after
      with testing.session(initialize=True) as sess:
        return {v.op.name: sess.run(v) for v in tf.global_variables()}

  def test_initial_values_do_not_depend_on_the_number_of_towers(self):
    expected = self.initial_values(self.random_model)
    self.assertLen(expected, 6)
    for count in (1, 2, 3, 4):
      got = self.initial_values(lambda count=count: towers.build_towers(
          self.random_model, testing.devices(count)))
      self.assertCountEqual(got, expected)
      for name, value in expected.items():
        self.assertAllEqual(got[name], value, msg=f"{name}, {count} towers")

  def masks(self, count, seed=None, repeat=1):
    """Returns each tower's dropout masks in runs of a fresh session."""
    with tf.Graph().as_default():
      tf.set_random_seed(7)

      def model(x):
        return towers.TowerSpec(outputs=[tf.nn.dropout(x, rate=0.5,
                                                       seed=seed)])

      x = tf.ones([64 * count])
      if count:
        graph = towers.build_towers(model, testing.devices(count), inputs=x)
        outputs = [t.outputs[0] for t in graph.towers]
      else:
        outputs = model(tf.ones([64])).outputs
      with testing.session() as sess:
        return [sess.run(outputs) for _ in range(repeat)]

  def test_masks_differ_between_towers_and_repeat(self):
    """c036: with the graph's seed alone."""
    first, second = self.masks(4, repeat=3), self.masks(4, repeat=3)
    self.assertAllEqual(first, second)
    every = np.reshape(first, [12, 64])
    self.assertLen(np.unique(every, axis=0), 12)

  @parameterized.parameters(None, 1)
  def test_masks_of_tower_0_are_those_of_the_plain_graph(self, seed):
    """c036: one tower draws what plain code draws."""
    plain = self.masks(0, seed, repeat=2)
    self.assertAllEqual(self.masks(1, seed, repeat=2), plain)
    several = self.masks(3, seed, repeat=2)
    self.assertAllEqual([run[:1] for run in several], plain)

  def test_seed_of_an_op_is_left_alone(self):
    """c036: as documented; the model may add the tower's index itself."""
    alike = self.masks(2, seed=1)[0]
    self.assertAllEqual(alike[0], alike[1])
    self.assertRegex(towers.build_towers.__doc__,
                     r"(?s)`seed` of its own.*`towers.current_tower\(\)")
    with tf.Graph().as_default():
      graph = towers.build_towers(
          lambda: towers.TowerSpec(outputs=[tf.random_uniform(
              [9], seed=1 + towers.current_tower().index)]),
          testing.devices(2))
      with testing.session() as sess:
        first, second = sess.run([t.outputs[0] for t in graph.towers])
      self.assertFalse(np.any(first == second))

  def test_meetings_do_not_shift_what_comes_after(self):
    """What a merge draws comes in the sequence of one device."""

    def drawn(count):
      def model():
        noise = towers.merge(lambda v: tf.random_uniform([3]),
                             tf.constant(1.0))
        own = tf.random_uniform([3])
        return towers.TowerSpec(outputs={"noise": noise, "own": own})

      with tf.Graph().as_default():
        tf.set_random_seed(3)
        graph = towers.build_towers(model, testing.devices(count))
        after = tf.random_uniform([3])
        with testing.session() as sess:
          return sess.run((graph.towers[0].outputs, after))

    self.assertAllEqual(drawn(1)[0]["noise"], drawn(3)[0]["noise"])
    self.assertAllEqual(drawn(1)[0]["own"], drawn(3)[0]["own"])
    self.assertAllEqual(drawn(1)[1], drawn(3)[1])


if __name__ == "__main__":
  tf.test.main()
