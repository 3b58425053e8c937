"""Tests for towers.devices."""

from unittest import mock

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import devices


def model(x=None):
  """Returns the mean of `weight * x`."""
  weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
  return tf.reduce_mean(weight * (1.0 if x is None else x))


def with_gpus(count):
  """Makes this machine look like one with `count` GPUs."""
  return mock.patch.object(tf.config, "list_physical_devices",
                           lambda kind=None: ["a GPU"] * count)


def devices_of(op_type):
  """Returns the devices of the ops of a type, in order of creation."""
  return [op.device for op in tf.get_default_graph().get_operations()
          if op.type == op_type]


class ResolveTest(parameterized.TestCase, tf.test.TestCase):

  def test_one_tower_for_each_string(self):
    self.assertEqual(devices.resolve(["/gpu:0", "/job:worker/task:1/cpu:2"]),
                     (("/gpu:0",), ("/job:worker/task:1/cpu:2",)))

  def test_tuple_is_one_tower(self):
    self.assertEqual(
        devices.resolve([("/cpu:0", "/cpu:1"), ["/cpu:2"], "/cpu:3"]),
        (("/cpu:0", "/cpu:1"), ("/cpu:2",), ("/cpu:3",)))

  def test_number_without_gpus_means_cpus(self):
    with with_gpus(0):
      self.assertEqual(devices.resolve(2),
                       (("/device:CPU:0",), ("/device:CPU:1",)))

  def test_number_with_gpus_means_the_first_of_them(self):
    with with_gpus(3):
      self.assertEqual(devices.resolve(2),
                       (("/device:GPU:0",), ("/device:GPU:1",)))

  def test_rejects_more_gpus_than_there_are(self):
    with with_gpus(2), self.assertRaisesRegex(
        ValueError, "`devices` must not ask for more GPUs .* at most 2, got 3"):
      towers.build_towers(model, 3)

  @parameterized.named_parameters(
      ("string", "/gpu:0", TypeError, "must be a list .* got '/gpu:0'"),
      ("bytes", b"/gpu:0", TypeError, "must be a list .* got b'/gpu:0'"),
      ("bool", True, TypeError, "must be a list .* got True"),
      ("float", 2.0, TypeError, "must be a list .* got 2.0"),
      ("none", None, TypeError, "must be a list .* got None"),
      ("set", {"/cpu:0"}, TypeError, "must be a list .* got {'/cpu:0'}"),
      ("empty", [], ValueError, "at least one device.* got none"),
      ("zero", 0, ValueError, "expected a positive number, got 0"),
      ("negative", -1, ValueError, "expected a positive number, got -1"),
      ("number_in_list", ["/cpu:0", 1], TypeError,
       r"`devices\[1\]` must be a device string.* got 1"),
      ("none_in_list", [None], TypeError, r"`devices\[0\]` must be .* None"),
      ("empty_tuple", ["/cpu:0", ()], TypeError, r"`devices\[1\]` .* got \(\)"),
      ("number_in_tuple", [("/cpu:0", 1)], TypeError, r"`devices\[0\]` must"),
      ("nonsense", ["/cpu:0", "second"], ValueError,
       r"`devices\[1\]` must be a device string such as .* got 'second'"),
      ("index_no_number", ["/cpu:one"], ValueError,
       r"`devices\[0\]` must be .* got '/cpu:one'"),
      ("nonsense_in_tuple", [("/cpu:0", "/what:ever:0")], ValueError,
       r"`devices\[0\]` must be .* got '/what:ever:0'"),
  )
  def test_rejects(self, value, error, message):
    with self.assertRaisesRegex(error, message):
      towers.build_towers(model, value)
    self.assertEmpty(tf.get_default_graph().get_operations())


class PlacementTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("first_cpu_of_the_host", ["/gpu:1", "/gpu:2"], "/device:CPU:0"),
      ("of_the_first_towers_host",
       ["/job:worker/task:1/gpu:3", "/job:worker/task:0/gpu:0"],
       "/job:worker/task:1/device:CPU:0"),
      ("own_of_one_tower", ["/gpu:1"], "/gpu:1"),
  )
  def test_default_parameter_device(self, names, expected):
    self.assertEqual(
        devices.parameter_devices(None, devices.resolve(names)), (expected,))

  def test_several_parameter_devices_are_balanced_by_bytes(self):

    def wide(x):
      for name, size in (("a", 10), ("b", 4), ("c", 4), ("d", 4)):
        x = x * tf.reduce_sum(tf.get_variable(name, [size]))
      return tf.reduce_mean(x)

    graph = towers.build_towers(wide, testing.devices(3), inputs=tf.ones([4]),
                                parameter_device=["/cpu:3", "/cpu:4"])
    graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
    self.assertEqual(
        [(place.variable, place.device) for place in graph.placement()],
        [("a", "/device:CPU:3"), ("b", "/device:CPU:4"),
         ("c", "/device:CPU:4"), ("d", "/device:CPU:4")])
    self.assertCountEqual(devices_of("ResourceApplyMomentum"),
                          ["/device:CPU:3"] + 3 * ["/device:CPU:4"])

  @parameterized.named_parameters(
      ("same_host", ["/cpu:1", "/gpu:0"], "/cpu:2", "/cpu:2"),
      ("on_a_host_of_towers",
       ["/job:worker/task:1/cpu:1", "/job:worker/task:0/cpu:0"],
       "/job:worker/task:0/cpu:0", "/job:worker/task:0/cpu:0"),
      ("on_a_parameter_server",
       ["/job:worker/task:1/cpu:1", "/job:worker/task:1/cpu:0"],
       "/job:ps/task:0/cpu:0", "/job:worker/task:1/device:CPU:0"),
  )
  def test_home_device(self, names, parameters, expected):
    self.assertEqual(
        devices.home_device(devices.resolve(names), parameters), expected)

  def test_requested_parameter_device(self):
    graph = towers.build_towers(model, testing.devices(2), inputs=tf.ones([4]),
                                parameter_device="/cpu:3")
    graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
    self.assertEqual(set(devices_of("VarHandleOp")), {"/device:CPU:3"})
    self.assertEqual(set(devices_of("ResourceApplyMomentum")),
                     {"/device:CPU:3"})

  @parameterized.named_parameters(
      ("number", 0, TypeError, "`parameter_device` must be .* got 0"),
      ("nonsense", "here", ValueError, "`parameter_device` must .* 'here'"),
      ("empty", [], ValueError, "`parameter_device` must .* empty list"),
      ("of_numbers", ["/cpu:0", 1], TypeError, "`parameter_device` must .* 1"),
  )
  def test_rejects_parameter_device(self, device, error, message):
    with self.assertRaisesRegex(error, message):
      towers.build_towers(model, ["/cpu:0"], parameter_device=device)

  def test_ops_stand_on_the_device_of_their_tower(self):
    """c038: variables on the parameter device, whatever the model's scopes."""

    def scoped(x):
      with tf.device("/cpu:2"):
        return model(x) + tf.tanh(0.0)

    towers.build_towers(scoped, testing.devices(2), inputs=tf.ones([4]))
    self.assertEqual(devices_of("VarHandleOp"), ["/device:CPU:0"])
    self.assertEqual(devices_of("Tanh"), ["/device:CPU:2"] * 2)
    tf.reset_default_graph()
    towers.build_towers(lambda x: tf.tanh(model(x)), testing.devices(3),
                        inputs=tf.ones([4]))
    self.assertEqual(devices_of("Tanh"),
                     [f"/device:CPU:{i}" for i in range(3)])

  def test_tower_over_several_devices(self):

    def parallel(x):
      tower = towers.current_tower()
      for device in tower.devices:
        with tf.device(device):
          x = tf.tanh(x)
      return model(x)

    pairs = [("/cpu:0", "/cpu:1"), ("/cpu:2", "/cpu:3")]
    graph = towers.build_towers(parallel, pairs, inputs=tf.ones([4]))
    self.assertEqual([t.devices for t in graph.towers], pairs)
    self.assertEqual([t.device for t in graph.towers], ["/cpu:0", "/cpu:2"])
    self.assertEqual(devices_of("Tanh"),
                     [f"/device:CPU:{i}" for i in range(4)])
    with tf.Session(config=graph.session_config()) as sess:
      self.assertEqual(testing.num_cpus(sess), 4)


class SessionConfigTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("plain", ["/cpu:0"], None, 1),
      ("several", ["/cpu:0", "/cpu:1", "/cpu:2"], None, 3),
      ("by_highest_index", ["/cpu:0", "/device:CPU:6"], None, 7),
      ("without_index", ["/cpu", "/cpu:1"], None, 2),
      ("upper_case", ["CPU:0", "cpu:1"], None, 2),
      ("parameter_device", ["/cpu:0", "/cpu:1"], "/cpu:4", 5),
      ("localhost", ["/job:localhost/replica:0/task:0/device:CPU:2"], None, 3),
  )
  def test_all_devices_exist(self, names, parameters, expected):
    graph = towers.build_towers(model, names, parameter_device=parameters)
    config = graph.session_config()
    self.assertEqual(dict(config.device_count), {"CPU": expected})
    with tf.Session(config=config) as sess:
      self.assertEqual(testing.num_cpus(sess), expected)
      sess.run(tf.global_variables_initializer())
      self.assertEqual(sess.run(graph.loss), 1.0)

  def test_towers_run_on_their_devices(self):
    graph = towers.build_towers(model, 3, inputs=tf.ones([6]))
    config = graph.session_config(log_device_placement=False)
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    metadata = tf.RunMetadata()
    with tf.Session(config=config) as sess:
      sess.run(tf.global_variables_initializer())
      sess.run(graph.loss, options=options, run_metadata=metadata)
    used = {stats.device.rpartition("/")[2]
            for stats in metadata.step_stats.dev_stats}
    self.assertContainsSubset([f"device:CPU:{i}" for i in range(3)], used)

  def test_monitored_session_sees_the_devices(self):
    graph = towers.build_towers(model, 4, inputs=tf.ones([6]))
    creator = tf.train.ChiefSessionCreator(config=graph.session_config())
    with tf.train.MonitoredSession(creator) as sess:
      self.assertEqual(sess.run(graph.loss), 1.0)

  def test_overrides_are_merged(self):
    graph = towers.build_towers(model, testing.devices(2))
    options = tf.GPUOptions(allow_growth=True)
    counts = {"GPU": 0, "CPU": 4}
    config = graph.session_config(
        allow_soft_placement=False, intra_op_parallelism_threads=3,
        gpu_options=options, device_count=counts)
    self.assertFalse(config.allow_soft_placement)
    self.assertTrue(config.gpu_options.allow_growth)
    self.assertEqual(config.intra_op_parallelism_threads, 3)
    self.assertEqual(dict(config.device_count), {"CPU": 4, "GPU": 0})
    self.assertEqual(counts, {"GPU": 0, "CPU": 4})
    config = graph.session_config(device_count={"GPU": 0})
    self.assertEqual(dict(config.device_count), {"CPU": 2, "GPU": 0})
    self.assertTrue(graph.session_config().allow_soft_placement)

  @parameterized.named_parameters(
      ("unknown_field", dict(soft_placement=True),
       "`overrides` must be fields of tf.ConfigProto .*soft_placement"),
      ("wrong_type", dict(allow_soft_placement="yes"),
       "`overrides` must be fields of tf.ConfigProto .*yes"),
      ("too_few_cpus", dict(device_count={"CPU": 2}),
       "`device_count` must leave every device of the graph: expected at "
       r"least 3 CPU devices, got 2, which lacks \['/cpu:2'\]"),
  )
  def test_rejects_override(self, overrides, message):
    graph = towers.build_towers(model, testing.devices(3))
    with self.assertRaisesRegex(ValueError, message):
      graph.session_config(**overrides)

  @parameterized.named_parameters(
      ("none_there", 0, ["/gpu:0", "/gpu:1"], {},
       r"expected 2 GPUs, got 0, which lacks \['/gpu:0', '/gpu:1'\]"),
      ("one_there", 1, ["/gpu:0", ("/gpu:1", "/device:GPU:2")], {},
       r"expected 3 GPUs, got 1, .*\['/gpu:1', '/device:GPU:2'\]"),
      ("hidden", 2, ["/gpu:0", "/gpu:1"], dict(device_count={"GPU": 1}),
       r"expected 2 GPUs, got 1, which lacks \['/gpu:1'\]"),
  )
  def test_rejects_gpus_that_do_not_exist(self, there, names, overrides,
                                          message):
    graph = towers.build_towers(model, names)
    with with_gpus(there), self.assertRaisesRegex(
        ValueError, f"`devices` must exist on this machine: {message}"):
      graph.session_config(**overrides)

  def test_gpus_of_other_machines_are_not_looked_for_here(self):
    graph = towers.build_towers(
        model, ["/job:worker/task:0/gpu:0", "/job:worker/task:1/gpu:0"])
    with with_gpus(0):
      self.assertEqual(dict(graph.session_config().device_count), {"CPU": 1})


if __name__ == "__main__":
  tf.test.main()
