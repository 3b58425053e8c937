"""Tests for towers.tower_names: a model's names in the graph of its towers."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

KERAS = tf.keras
ROWS = 5


def images(rows=ROWS):
  return np.random.RandomState(rows).normal(size=[rows, 4, 4, 3]).astype("f")


def small_kernel(*unused_args, **unused_options):
  return tf.constant(np.linspace(-1.0, 1.0, 54), tf.float32, [3, 3, 3, 2])


def model(x):
  """A model with names of all kinds."""
  with tf.variable_scope("conv1"):
    kernel = tf.get_variable("kernel", [3, 3, 3, 2], initializer=small_kernel)
    x = tf.nn.relu(tf.nn.conv2d(x, kernel, strides=1, padding="SAME"))
  scale = tf.get_variable("scale", [2], initializer=tf.ones_initializer())
  offset = tf.get_variable("offset", [2], initializer=tf.zeros_initializer())
  x, _, _ = tf.nn.fused_batch_norm(x, scale, offset, is_training=True,
                                   name="BatchNorm")
  with tf.variable_scope("bn2"):
    x = towers.batch_norm(x, training=True)
  mean, _ = tf.nn.moments(x, [0, 1, 2], name="statistics")
  rate = tf.placeholder_with_default(0.0, [], name="rate")
  tf.split(x, 2, axis=3, name="halves")
  y = tf.identity(tf.reduce_sum(x - mean, [1, 2, 3]) * (1.0 - rate), name="y")
  return {"loss": tf.reduce_mean(y, name="loss"), "y": y}


def build(num_towers, rows=ROWS, **options):
  return towers.build_towers(model, testing.devices(num_towers),
                             inputs=images(rows), **options)


class FoundTest(parameterized.TestCase, tf.test.TestCase):

  OF_ROWS = ("conv1/Conv2D", "conv1/Relu:0", "BatchNorm", "halves:1", "y",
             "bn2/batch_normalization/FusedBatchNormV3")
  OF_ALL = ("BatchNorm:1", "BatchNorm:2", "statistics/mean",
            "statistics/variance", "conv1/kernel", "conv1/kernel:0",
            "conv1/kernel/read:0", "scale/read", "rate",
            "bn2/batch_normalization/FusedBatchNormV3:1",
            "bn2/batch_normalization/FusedBatchNormV3:2",
            "bn2/batch_normalization/moving_mean")

  def plain(self):
    with tf.Graph().as_default() as graph:
      model(tf.constant(images()))
      tensors = [
          graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
          for name in self.OF_ROWS + self.OF_ALL
      ]
      with testing.session(initialize=True) as sess:
        return dict(zip(self.OF_ROWS + self.OF_ALL, sess.run(tensors)))

  @parameterized.parameters(1, 2, 3, 4)
  def test_fetches_by_plain_name_equal_one_device(self, num_towers):
    expected = self.plain()
    graph = build(num_towers)
    fetches = {name: graph.tensors(name) for name in expected}
    with testing.session(initialize=True) as sess:
      found = sess.run(fetches)
    for name in self.OF_ROWS:
      self.assertAllClose(np.concatenate(found[name]), expected[name],
                          rtol=1e-4, atol=1e-5, msg=name)
    for name in self.OF_ALL:
      for value in found[name]:
        self.assertAllClose(value, expected[name], rtol=1e-4, atol=1e-5,
                            msg=name)

  @parameterized.parameters(1, 3)
  def test_is_of_the_tower_and_its_graph(self, num_towers):
    graph = build(num_towers)
    with tf.Graph().as_default():  # Another one is current.
      for i in range(num_towers):
        relu = graph.tower(i).tensor("conv1/Relu")
        self.assertEqual(relu.name, f"tower_{i}/conv1/Relu:0")
        self.assertIs(relu.graph, graph.graph)
        self.assertIs(graph.tower(i).operation("conv1/Relu"), relu.op)
        self.assertIs(graph.tower(i).tensor(relu.name), relu)
    self.assertLen(set(graph.tensors("y")), num_towers)

  def test_more_than_ten_towers(self):
    graph = towers.build_towers(
        lambda x: tf.reduce_mean(x, name="loss"),
        [f"/cpu:{i % 4}" for i in range(12)], inputs=tf.ones([12]))
    self.assertEqual([x.op.name for x in graph.tensors("loss")],
                     [f"tower_{i}/loss" for i in range(12)])

  def test_each_build_finds_its_own(self):
    """c072: where the scopes are not those that one would guess."""
    builds = [build(2)]
    with tf.variable_scope("", reuse=True):
      builds += [build(2), build(2, name="eval")]
      with tf.name_scope("outer"):
        builds.append(build(2))
    self.assertEqual(
        [graph.tower(1).operation("conv1/Relu").name for graph in builds],
        ["tower_1/conv1/Relu", "towers_2/tower_1/conv1/Relu",
         "eval_1/conv1/Relu", "outer/tower_1/conv1/Relu"])
    kernels = {graph.tower(1).operation("conv1/kernel") for graph in builds}
    self.assertLen(kernels, 1)

  def test_names_may_hold_the_scope_around_the_build(self):
    with tf.variable_scope("net"):
      tower = build(2).tower(1)
    for name in ("conv1/Relu", "net/conv1/Relu", "net/tower_1/conv1/Relu"):
      self.assertEqual(tower.operation(name).name, "net/tower_1/conv1/Relu")
    for name in ("conv1/kernel", "net/conv1/kernel"):
      self.assertEqual(tower.operation(name).name, "net/conv1/kernel")

  def test_copy_of_a_variable_is_what_the_tower_reads(self):
    graph = build(2, variables="replicated")
    first, second = graph.tensors("conv1/kernel")
    self.assertEqual(first.op.device, "/device:CPU:0")
    self.assertEqual(second.op.device, "/device:CPU:1")
    self.assertIs(graph.tower(1).tensor("conv1/kernel/read"), second)
    # Not trained, so without a copy.
    name = "bn2/batch_normalization/moving_mean"
    self.assertIs(*graph.tensors(name))
    kernel, = [v for v in graph.variables if v.op.name == "conv1/kernel"]
    assign = kernel.assign(tf.zeros([3, 3, 3, 2]))
    with testing.session(initialize=True) as sess:
      sess.run(assign.op)
      self.assertNotAllClose(sess.run(second), sess.run(first))
      sess.run(graph.copy_variables)
      self.assertAllEqual(sess.run(second), np.zeros([3, 3, 3, 2]))

  def test_statistics_of_the_tower_alone_where_asked_for(self):
    graph = build(2, rows=4, sync_batch_norm=False)
    with testing.session(initialize=True) as sess:
      relu, means = sess.run([graph.tensors("conv1/Relu"),
                              graph.tensors("BatchNorm:1")])
    for own, mean in zip(relu, means):
      self.assertAllClose(mean, own.mean(axis=(0, 1, 2)))

  def test_layers_of_keras(self):
    """Keras 3 puts a layer's ops into a scope `hidden_1`: also in towers."""

    def layers(x):
      x = KERAS.layers.Dense(4, name="hidden")(x)
      return tf.reduce_mean(KERAS.layers.Dense(4)(x))

    testing.clear_keras()
    with tf.Graph().as_default() as plain:
      layers(tf.ones([6, 3]))
    names = [op.name for op in plain.get_operations()
             if op.type in ("MatMul", "BiasAdd")]
    self.assertLen(names, 4)
    testing.clear_keras()
    graph = towers.build_towers(layers, 3, inputs=tf.ones([6, 3]))
    for name in names:
      self.assertEqual([x.op.name for x in graph.tensors(name)],
                       [f"tower_{i}/{name}" for i in range(3)])
    self.assertIs(graph.tower(1).operation("hidden/kernel"),
                  graph.tower(2).operation("hidden/kernel"))

  def test_inside_and_outside_of_a_build(self):
    """A model may ask for its own names, and then runs without towers."""

    def asks(x):
      tf.square(x, name="squares")
      return tf.reduce_mean(towers.current_tower().tensor("squares"))

    graph = towers.build_towers(asks, 2, inputs=tf.constant([1.0, 3.0]))
    alone = asks(tf.constant([1.0, 3.0]))
    with testing.session() as sess:
      self.assertEqual(sess.run([graph.loss, alone]), [5.0, 5.0])


class FedTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(1, 2, 3)
  def test_a_value_for_all_towers(self, num_towers):
    """c080: one feed for a placeholder that each tower makes."""
    graph = build(num_towers)
    with testing.session(initialize=True) as sess:
      full = sess.run(graph.outputs["y"])
      half = sess.run(graph.outputs["y"], graph.feeds({"rate": 0.5}))
    self.assertGreater(np.abs(full).max(), 0.0)
    self.assertAllClose(half, full / 2)

  def test_a_value_for_one_tower(self):
    graph = build(2, rows=4)
    with testing.session(initialize=True) as sess:
      full = sess.run(graph.outputs["y"])
      half = sess.run(graph.outputs["y"], {graph.tower(1).tensor("rate"): 0.5})
    self.assertAllClose(half, full * [1.0, 1.0, 0.5, 0.5])

  def test_what_stands_outside_is_fed_once(self):
    x = tf.placeholder(tf.float32, [None], name="x")
    scale = tf.placeholder(tf.float32, [], name="scale")
    graph = towers.build_towers(
        lambda x: {"y": x * scale, "loss": tf.reduce_mean(x)}, 2, inputs=x)
    feeds = graph.feeds({"x": [1.0, 2.0, 3.0], "scale:0": 2.0})
    self.assertEqual(set(feeds), {x, scale})
    with testing.session() as sess:
      self.assertAllEqual(sess.run(graph.outputs["y"], feeds), [2.0, 4.0, 6.0])

  @parameterized.named_parameters(
      ("variable", "conv1/kernel",
       r"must not be a variable: got 'conv1/kernel' \(tower 0\).*Assign the"),
      ("read", "conv1/kernel/read:0", "must not be a variable"),
      ("unknown", "rates", r"found none for 'rates'\. Names like it: 'rate'"),
  )
  def test_rejects(self, name, message):
    graph = build(2)
    with self.assertRaisesRegex(ValueError, message):
      graph.feeds({name: 1.0})

  def test_rejects_what_cannot_be_fed(self):
    graph = build(2)
    graph.graph.prevent_feeding(graph.tower(1).tensor("y"))
    with self.assertRaisesRegex(
        ValueError, r"`name` of what is fed .* got 'y', which is `tower_1/y:0` "
        r"\(tower 1\)"):
      graph.feeds({"y": 1.0})


class RejectedTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("misspelt", "conv1/Rleu", r"an operation of tower 1: found none for "
       r"'conv1/Rleu'\. Names like it: 'conv1/Relu'"),
      ("only_the_end", "Relu:0", "Names like it: 'conv1/Relu'"),
      ("variable", "conv/kernel", "Names like it: 'conv1/kernel'"),
      ("read_of_no_variable", "conv2/read", "found none for 'conv2/read'"),
      ("nothing_like_it", "zzz", "Names are those of the model on one device, "
       "such as '.*'"),
      ("no_name_at_all", "a b", "found none for 'a b'"),
      ("other_tower", "tower_0/conv1/Relu", r"stands in `tower_0/`\. Leave the "
       "scope of the tower out: 'conv1/Relu'"),
      ("no_such_output", "conv1/Relu:1",
       r"got 'conv1/Relu:1', while `tower_1/conv1/Relu` has 1 outputs"),
      ("no_output", "conv1/kernel/Assign",
       "has 0 outputs .* Ask for the operation"),
      ("of_tower_0_alone", "bn2/batch_normalization/update_moving_mean/sub",
       r"Tower 0 has it alone"),
      ("no_number", "conv1/Relu:x", "must end in the number of an output"),
  )
  def test_tensor(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      build(2).tower(1).tensor(name)

  def test_operation_with_an_output(self):
    with self.assertRaisesRegex(
        ValueError, "operation must not have an output: got 'conv1/Relu:0'"):
      build(2).tower(1).operation("conv1/Relu:0")

  def test_no_operations_at_all(self):
    with self.assertRaisesRegex(ValueError, "It has no operations"):
      towers.current_tower().tensor("y")

  @parameterized.parameters("tensor", "operation")
  def test_no_text(self, method):
    with self.assertRaisesRegex(TypeError, "`name` must be text.*got 3"):
      getattr(build(1).tower(0), method)(3)

  def test_says_which_tower_lacks_it(self):

    def differing(x):
      if towers.current_tower().index == 0:
        tf.square(x, name="extra")
      return tf.reduce_mean(x)

    graph = towers.build_towers(differing, 2, inputs=tf.ones([4]))
    self.assertEqual(graph.tower(0).tensor("extra").op.name, "tower_0/extra")
    with self.assertRaisesRegex(ValueError, "operation of tower 1: found none"):
      graph.tensors("extra")


class TowerTest(parameterized.TestCase, tf.test.TestCase):

  def test_is_one_of_the_towers(self):
    graph = build(3)
    for i in (0, 2, np.int64(1)):
      self.assertIs(graph.tower(i), graph.towers[i])

  @parameterized.parameters(-1, 2, 10)
  def test_rejects_numbers_out_of_range(self, index):
    with self.assertRaisesRegex(
        ValueError, f"`index` must be .*: expected 0 to 1, got {index}"):
      build(2).tower(index)

  @parameterized.parameters("0", 1.0, None)
  def test_rejects_other_things(self, index):
    with self.assertRaisesRegex(TypeError, "`index` must be .*: got "):
      build(2).tower(index)


if __name__ == "__main__":
  tf.test.main()
