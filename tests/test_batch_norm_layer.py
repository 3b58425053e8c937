"""Tests for the layer towers.batch_norm: names, graph, errors."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import batch_norm_cases as cases
import testing
import towers


class NamesTest(cases.LayerTestCase):

  def test_names_are_those_of_tf_layers(self):
    def model(x):
      x = towers.batch_norm(x, training=True)
      x = towers.batch_norm(x, training=False)
      with tf.variable_scope("block"):
        x = towers.batch_norm(x, training=True)
        x = towers.batch_norm(x, training=True, name="bn")
      return {"y": towers.batch_norm(x, training=True)}

    built = towers.build_towers(
        model, testing.devices(3), inputs=tf.ones([4, 3]))
    layers = ["batch_normalization", "batch_normalization_1",
              "block/batch_normalization", "block/bn", "batch_normalization_2"]
    suffixes = ["gamma", "beta", "moving_mean", "moving_variance"]
    self.assertEqual([v.op.name for v in built.variables],
                     [f"{a}/{b}" for a in layers for b in suffixes])
    self.assertEqual([v.op.name for v in built.trainable_variables],
                     [f"{a}/{b}" for a in layers for b in suffixes[:2]])
    with testing.session(initialize=True) as sess:
      for v, value in zip(built.variables, sess.run(list(built.variables))):
        start = float(v.op.name.endswith(("gamma", "variance")))
        self.assertAllEqual(value, [start] * 3)

  @parameterized.parameters(1, 2, 3)
  def test_one_layer_on_two_inputs(self, num_towers):
    """Siamese: each call has its own moments, all share the variables."""
    x, z = np.random.RandomState(0).normal(2.0, 3.0, [2, 5, 3]).astype("f")

    def model(x, z):
      with tf.variable_scope("twin"):
        y = towers.batch_norm(x, training=True, name="bn")
      with tf.variable_scope("twin", reuse=True):
        return {"y": y, "z": towers.batch_norm(z, training=True, name="bn")}

    built = towers.build_towers(
        model, testing.devices(num_towers), inputs=(x, z))
    self.assertLen(built.variables, 4)
    self.assertLen(built.update_ops, 4)
    with testing.session(initialize=True) as sess:
      outputs, _ = sess.run([built.outputs, built.update_ops])
      mean = sess.run(built.variables[2])
    self.assertAllClose(outputs["y"], cases.oracle(x).y, rtol=1e-5, atol=1e-5)
    self.assertAllClose(outputs["z"], cases.oracle(z).y, rtol=1e-5, atol=1e-5)
    # The two updates run in any order, as on one device.
    self.assertAllClose(
        mean, 0.01 * (cases.oracle(x).mean + cases.oracle(z).mean), atol=1e-3)

  def test_second_build_shares_the_layer(self):
    x = np.random.RandomState(0).normal(2.0, 3.0, [5, 3]).astype("f")
    train = towers.build_towers(
        lambda x: {"y": towers.batch_norm(x, training=True, momentum=0.0,
                                          name="bn")},
        testing.devices(2), inputs=x)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      test = towers.build_towers(
          lambda x: {"y": towers.batch_norm(x, training=False, name="bn")},
          testing.devices(3), inputs=x, name="test")
    self.assertEqual(train.variables, test.variables)
    self.assertEmpty(test.update_ops)
    with testing.session(initialize=True) as sess:
      sess.run(train.update_ops)
      expected = cases.oracle(x)
      self.assertAllClose(
          sess.run(test.outputs["y"]),
          (x - expected.mean) / np.sqrt(expected.unbiased + cases.EPSILON),
          rtol=1e-4, atol=1e-4)

  def test_outside_a_build_it_is_a_plain_layer(self):
    x = np.random.RandomState(0).normal(2.0, 3.0, [5, 3]).astype("f")
    with towers.no_sync():
      y = towers.batch_norm(x, training=True, momentum=0.0)
    self.assertLen(tf.get_collection(tf.GraphKeys.UPDATE_OPS), 2)
    self.assertEmpty([op.name for op in tf.get_default_graph().get_operations()
                      if "tower" in op.name or op.device])
    with testing.session(initialize=True) as sess:
      self.assertAllClose(sess.run(y), cases.oracle(x).y, rtol=1e-5, atol=1e-5)
      sess.run(tf.get_collection(tf.GraphKeys.UPDATE_OPS))
      self.assertAllClose(
          sess.run(tf.global_variables()[-2:]),
          [cases.oracle(x).mean, cases.oracle(x).unbiased], rtol=1e-5)


class GraphTest(cases.LayerTestCase):

  def ops(self, layer, prefix):
    return [op for op in layer.graph.get_operations()
            if op.name.startswith(prefix)]

  @parameterized.product(layout=("image_last", "image_first", "image_middle"),
                         num_towers=(2, 4))
  def test_where_ops_stand(self, layout, num_towers):
    layer = self.layer(num_towers, *cases.LAYOUTS[layout],
                       parameter_device="/cpu:4", name="bn")
    merge = self.ops(layer, "cross_tower/bn/")
    self.assertLen([op for op in merge if op.type == "IdentityN"], 1)
    self.assertEqual({op.device for op in merge}, {"/device:CPU:4"})
    for index in range(num_towers):
      scope = f"tower_{index}/"
      # Reads of variables and updates go to the variables' device.
      devices = {op.device for op in self.ops(layer, scope)
                 if op.type != "ReadVariableOp" and "/update_" not in op.name
                 and "_view/" not in op.name}
      self.assertEqual(devices, {f"/device:CPU:{index}"})
    for op in layer.built.update_ops:
      self.assertEqual(op.device, "/device:CPU:4")

  @parameterized.parameters(1, 2, 4)
  def test_one_merge_and_one_pair_of_updates_per_layer(self, num_towers):
    def model(x):
      for _ in range(3):
        x = towers.batch_norm(x, training=True)
      return {"y": x}

    built = towers.build_towers(
        model, testing.devices(num_towers), inputs=tf.ones([9, 3]),
        update_ops="all")
    ops = tf.get_default_graph().get_operations()
    self.assertLen([op for op in ops if op.type == "IdentityN"],
                   3 if num_towers > 1 else 0)
    self.assertLen([op for op in ops if op.type == "AssignSubVariableOp"], 6)
    self.assertLen(built.update_ops, 6)
    self.assertLen(tf.get_collection(tf.GraphKeys.UPDATE_OPS), 6)
    for tower in built.towers:
      self.assertEqual(tower.update_ops, built.towers[0].update_ops)

  def test_no_merge_in_inference(self):
    layer = self.layer(3, [4, 5, 3], training=False)
    self.assertEmpty(layer.built.update_ops)
    self.assertEmpty(self.ops(layer, "cross_tower/batch_normalization"))
    self.assertEmpty([op for op in layer.graph.get_operations()
                      if op.type == "IdentityN"])

  @parameterized.named_parameters(
      ("training", lambda: True), ("inference", lambda: False),
      ("either", lambda: tf.placeholder(tf.bool, [])))
  def test_shapes_are_kept(self, make_training):
    training = make_training()
    for shape, axis in cases.LAYOUTS.values():
      x = tf.placeholder(tf.float32, [None, *shape])
      built = towers.build_towers(
          lambda x, axis=axis: {
              "y": towers.batch_norm(x, training=training, axis=axis)},
          testing.devices(2), inputs=x)
      self.assertEqual(built.towers[1].outputs["y"].shape.as_list(),
                       x.shape.as_list())


class ErrorsTest(cases.LayerTestCase):

  @parameterized.named_parameters(
      ("integers", TypeError, dict(x=tf.int32),
       "`x` must be of a floating type: got int32"),
      ("unknown_rank", ValueError, dict(shape=None),
       "`x` must have a known rank: `x:0` has none"),
      ("vector", ValueError, dict(shape=[3]), "expected rank 2 or more, got"),
      ("batch_axis", ValueError, dict(axis=0),
       "expected one of 1 to 2 or -1 to -2, got 0"),
      ("batch_axis_from_the_end", ValueError, dict(axis=-3), "got -3"),
      ("axis", ValueError, dict(axis=3), "`axis` must be the channel .* got 3"),
      ("unknown_channels", ValueError, dict(shape=[2, 3, None]),
       r"static size on its channel axis 2: `x:0` has shape \(2, 3, .*\)"),
      ("momentum", ValueError, dict(momentum=1.5),
       "`momentum` must lie between 0.0 and 1.0: got 1.5"),
      ("negative_momentum", ValueError, dict(momentum=-0.5), "got -0.5"),
      ("epsilon", ValueError, dict(epsilon=-1e-3), "`epsilon` must .* -0.001"),
      ("no_number", ValueError, dict(epsilon=float("nan")), "got nan"),
      ("training_none", TypeError, dict(training=None),
       "`training` must be a bool or a bool tensor: got None"),
      ("training_number", TypeError, dict(training=2), "type int32 and shape"),
      ("training_string", TypeError, dict(training="yes"), "of type string"),
      ("training_vector", TypeError, dict(training=[True, False]),
       r"`training` must be a bool or a scalar .* shape \(2,\)"),
  )
  def test_rejects(self, error, changes, message):
    x = tf.placeholder(changes.pop("x", tf.float32),
                       changes.pop("shape", [2, 4, 3]), name="x")
    with self.assertRaisesRegex(error, message):
      towers.batch_norm(x, **{"training": True, **changes})
    self.assertEmpty(tf.global_variables())

  def build(self, model):
    return towers.build_towers(model, testing.devices(2),
                               inputs=tf.ones([4, 3]))

  def test_refused_in_a_while_loop(self):
    with self.assertRaisesRegex(
        ValueError, r"batch norm `bn` \(tower 0\) must not .* inside a while "
        "loop, got `tower_0/while/while_context`"):
      self.build(lambda x: tf.while_loop(
          lambda i, _: i < 2, lambda i, x: (i + 1, towers.batch_norm(
              x, training=True, name="bn")), [0, x])[1])

  @parameterized.parameters(True, False)
  def test_refused_in_v2_control_flow(self, by_user):
    tf.enable_control_flow_v2()
    self.addCleanup(tf.disable_control_flow_v2)
    phase = tf.placeholder(tf.bool, [])
    training = True if by_user else phase
    layer = lambda x: towers.batch_norm(x, training=training, name="bn")
    with self.assertRaisesRegex(
        ValueError, r"batch norm `bn` \(tower 0\) must not stand inside a func"
        r".*Call `tf.disable_control_flow_v2\(\)`"):
      self.build(lambda x: tf.cond(phase, lambda: layer(x), lambda: x)
                 if by_user else layer(x))

  def test_other_channels_in_another_tower(self):
    with self.assertRaisesRegex(
        ValueError, "tower 1 asks for `bn/gamma` otherwise than tower 0"):
      self.build(lambda x: towers.batch_norm(
          x[:, towers.current_tower().index:], training=True, name="bn"))

  def test_other_type_in_another_tower(self):
    types = [tf.float16, tf.float32]
    with self.assertRaisesRegex(
        ValueError, r"batch norm `bn` must meet with values alike .*float16.*"
        "float32.* in tower 1"):
      self.build(lambda x: towers.batch_norm(
          tf.cast(x, types[towers.current_tower().index]), training=True,
          name="bn"))

  def test_other_layer_in_another_tower(self):
    with self.assertRaisesRegex(
        ValueError, "tower 0 waits in batch norm `bn_0`, tower 1 in batch norm "
        "`bn_1`"):
      self.build(lambda x: towers.batch_norm(
          x, training=True, name=f"bn_{towers.current_tower().index}"))

  def test_phase_of_its_own_in_each_tower(self):
    with self.assertRaisesRegex(
        ValueError, "batch norm `batch_normalization` must stand in the same "
        "branch .*Compute the predicate outside `model_fn`"):
      self.build(lambda x: towers.batch_norm(x, training=x[0, 0] > 0))


if __name__ == "__main__":
  tf.test.main()
