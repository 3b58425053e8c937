"""Tests for towers.conversion: batch norm of any library, as on one device."""

import sys

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

KERAS = tf.keras
# tf.layers exists where the Keras of this TensorFlow is version 2.
HAS_LAYERS = not getattr(KERAS, "__version__", "2").startswith("3")
CHANNELS = 6
BATCH_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 32)


def _gamma_beta():
  return (tf.get_variable("gamma", [CHANNELS]),
          tf.get_variable("beta", [CHANNELS]))


def fused(x, training):
  """Raw code with a moving average by hand, as people write it."""
  gamma, beta = _gamma_beta()
  moving = tf.get_variable("moving", [CHANNELS], trainable=False,
                           initializer=tf.zeros_initializer())

  def by_batch():
    return tf.nn.fused_batch_norm(x, gamma, beta, is_training=True)[:2]

  def by_moving():
    return tf.nn.fused_batch_norm(
        x, gamma, beta, moving + 0.0, tf.ones([CHANNELS]),
        is_training=False)[0], moving + 0.0

  if isinstance(training, bool):
    y, mean = by_batch() if training else by_moving()
  else:
    y, mean = tf.cond(training, by_batch, by_moving)
  if training is not False:
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                         moving.assign_sub((moving - mean) * 0.1))
  return y


def channels_first(x, training):
  del training
  y = tf.nn.fused_batch_norm(
      tf.transpose(x, [0, 3, 1, 2]), *_gamma_beta(), is_training=True,
      data_format="NCHW")[0]
  return tf.transpose(y, [0, 2, 3, 1])


def raw(name, **attributes):

  def layer(x, training):
    del training
    gamma, beta = _gamma_beta()
    return getattr(tf.raw_ops, name)(
        x=x, scale=gamma, offset=beta, mean=[], variance=[], is_training=True,
        **attributes).y

  return layer


def five_dimensions(x, training):
  y = raw("FusedBatchNormV3", data_format="NDHWC")(x[:, tf.newaxis], training)
  return y[:, 0]


def running_average(x, training):
  """Lets the kernel make the running average."""
  del training
  gamma, beta = _gamma_beta()
  moving = [
      tf.get_variable(name, [CHANNELS], trainable=False, initializer=value)
      for name, value in (("m", tf.zeros_initializer()),
                          ("v", tf.ones_initializer()))
  ]
  out = tf.raw_ops.FusedBatchNormV3(
      x=x, scale=gamma, offset=beta, mean=moving[0], variance=moving[1],
      exponential_avg_factor=0.1, is_training=True)
  for variable, value in zip(moving, (out.batch_mean, out.batch_variance)):
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, variable.assign(value))
  return out.y


def scale_of_the_tower(x, training):
  """A scale that is no variable, and whose ops differ between towers."""
  del training
  beta = tf.get_variable("beta", [CHANNELS])
  scale = 1.5 + 0.0 * tf.stop_gradient(tf.reduce_mean(x, axis=[0, 1, 2]))
  return tf.nn.fused_batch_norm(x, scale, beta, is_training=True)[0]


def plain_moments(x, training):
  del training
  mean, variance = tf.nn.moments(x, [0, 1, 2])
  return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def kept_moments(x, training):
  del training
  mean, variance = tf.nn.moments(x, [0, 1, 2], keepdims=True, name="stats")
  return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def weighted_moments(x, training):
  del training
  weights = tf.reduce_mean(tf.abs(x), axis=-1, keepdims=True)
  mean, variance = tf.nn.weighted_moments(x, [0, 1, 2], weights)
  return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def siamese(x, training):
  """One layer on two inputs."""
  del training
  with tf.variable_scope("shared", reuse=tf.AUTO_REUSE):
    gamma, beta = _gamma_beta()
    one = tf.nn.fused_batch_norm(x, gamma, beta, is_training=True)[0]
    return one + tf.nn.fused_batch_norm(
        x * x, gamma, beta, is_training=True)[0]


def moments_in_the_loss(x, training):
  """Uses the moments that the fused op returns: they carry no gradient."""
  del training
  y, mean, variance = tf.nn.fused_batch_norm(
      x, *_gamma_beta(), is_training=True)
  return 0.5 * y + x * mean * variance


def penalised(layer):
  """Puts a gradient into what is differentiated, as a gradient penalty does."""

  def with_gradient(x, training):
    y = layer(x, training)
    scores = tf.reduce_sum(y**3, axis=[1, 2, 3])
    return y + 0.1 * tf.gradients(scores, [x])[0]

  return with_gradient


def keras_layer(x, training):
  return KERAS.layers.BatchNormalization(momentum=0.9)(x, training=training)


def keras_synchronized(x, training):
  layer = KERAS.layers.BatchNormalization(momentum=0.9, synchronized=True)
  return layer(x, training=training)


def keras_mask(x, training):
  options = {"fused": False} if HAS_LAYERS else {}
  layer = KERAS.layers.BatchNormalization(momentum=0.9, **options)
  return layer(x, training=training, mask=x[..., 0] > -1.0)


def layers(**options):

  def layer(x, training):
    return tf.layers.batch_normalization(
        x, training=training, momentum=0.9, **options)

  return layer


LIBRARIES = {
    "fused": fused,
    "channels_first": channels_first,
    "raw_1": raw("FusedBatchNorm"),
    "raw_2": raw("FusedBatchNormV2"),
    "raw_3": raw("FusedBatchNormV3"),
    "five_dimensions": five_dimensions,
    "running_average": running_average,
    "scale_of_the_tower": scale_of_the_tower,
    "moments": plain_moments,
    "kept_moments": kept_moments,
    "weighted_moments": weighted_moments,
    "siamese": siamese,
    "moments_in_the_loss": moments_in_the_loss,
    "penalised_fused": penalised(fused),
    "penalised_moments": penalised(plain_moments),
    "keras": keras_layer,
    "keras_synchronized": keras_synchronized,
    "keras_mask": keras_mask,
    "penalised_keras": penalised(keras_layer),
}
PHASES = {"fused": fused}
if HAS_LAYERS:
  LIBRARIES.update(
      layers=layers(), layers_unfused=layers(fused=False),
      layers_axis_1=lambda x, training: layers(axis=1)(x, training),
      keras_unfused=lambda x, training: KERAS.layers.BatchNormalization(
          momentum=0.9, fused=False)(x, training=training))
  PHASES.update(layers=layers(), layers_unfused=layers(fused=False),
                keras=keras_layer)


class Trained:
  """A small network with `layer` in it, built for some towers."""

  def __init__(self, layer, num_towers, *, training=True, **options):
    testing.clear_keras()
    self.graph = tf.Graph()
    with self.graph.as_default():
      tf.set_random_seed(1)
      self.images = tf.placeholder(tf.float32, [None, 3, 4, 2])
      self.labels = tf.placeholder(tf.int64, [None])
      self.training = tf.placeholder(tf.bool, [])
      phase = self.training if isinstance(training, str) else training
      if training == "tensor":
        phase = tf.logical_not(tf.logical_not(phase))

      def model(images, labels):
        phase_here = phase
        if training == "own_tensor":  # Each tower has ops of its own for it.
          phase_here = tf.logical_not(tf.logical_not(phase))
        kernel = tf.get_variable("kernel", [3, 3, 2, CHANNELS])
        x = tf.nn.conv2d(images, kernel, strides=1, padding="SAME")
        x = tf.nn.relu(layer(x, phase_here) + 0.1)
        weights = tf.get_variable("weights", [CHANNELS, 3])
        logits = tf.matmul(tf.reduce_mean(x, axis=[1, 2]), weights)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            logits=logits, labels=labels)
        return {"loss": tf.reduce_mean(losses), "logits": logits}

      self.built = towers.build_towers(
          model, testing.devices(num_towers), inputs=(self.images, self.labels),
          **options)
      self.pairs = [p for p in self.built.gradients() if p[0] is not None]
      self.train = self.built.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
      self.variables = tf.global_variables()
      self.initializers = [v.initializer for v in self.variables]
      self.session = tf.Session(config=self.built.session_config(
          device_count={"CPU": testing.NUM_CPUS},
          graph_options=testing.config().graph_options))

  def feed(self, batch_size, training=True):
    rng = np.random.RandomState(batch_size)
    return {
        self.images: rng.normal(1.0, 2.0, [batch_size, 3, 4, 2]),
        self.labels: rng.randint(0, 3, [batch_size]),
        self.training: training
    }

  def run(self, batch_size, training=True, steps=3):
    """Returns loss, outputs and gradients, and all variables after steps."""
    feed = self.feed(batch_size, training)
    # The same values in each graph, whatever was drawn at random before.
    values = {}
    for k, variable in enumerate(self.variables):
      shape = variable.shape.as_list()
      value = np.linspace(0.1, 1.0, int(np.prod(shape))).reshape(shape)
      values[variable.initializer.inputs[1]] = np.sin(value * (k + 3)) + 1.1
    self.session.run(self.initializers, values)
    fetched = self.session.run(
        (self.built.loss, self.built.outputs, [g for g, _ in self.pairs]), feed)
    for _ in range(steps):
      self.session.run(self.train, feed)
    names = [v.op.name for v in self.variables]
    return fetched, dict(zip(names, self.session.run(self.variables)))


class ConversionTest(parameterized.TestCase, tf.test.TestCase):

  def assert_equal_to_one_device(self, layer, *, batch_sizes, num_towers=(2, 3),
                                 phases=(True,), **options):
    one = Trained(layer, 1, training=options.get("training", True))
    for count in num_towers:
      many = Trained(layer, count, **options)
      for phase in phases:
        for batch_size in batch_sizes:
          with self.subTest(towers=count, rows=batch_size, training=phase):
            expected = one.run(batch_size, phase)
            actual = many.run(batch_size, phase)
            self.assertAllClose(expected, actual, rtol=2e-5, atol=2e-5)
      many.session.close()
    one.session.close()

  @parameterized.named_parameters((name, name) for name in LIBRARIES)
  def test_equals_one_device(self, name):
    self.assert_equal_to_one_device(
        LIBRARIES[name], batch_sizes=BATCH_SIZES, num_towers=(2, 3, 4))

  @parameterized.product(
      name=tuple(PHASES), training=("placeholder", "tensor", "own_tensor"))
  def test_equals_one_device_in_both_phases(self, name, training):
    self.assert_equal_to_one_device(
        PHASES[name], batch_sizes=(1, 5, 8), phases=(True, False),
        training=training)

  @parameterized.product(
      name=tuple(n for n in ("fused", "keras", "layers") if n in LIBRARIES),
      num_towers=(2, 3))
  def test_policy_all_updates_once(self, name, num_towers):
    """c057: moving statistics are not applied once per tower."""
    self.assert_equal_to_one_device(
        LIBRARIES[name], batch_sizes=(6,), num_towers=(num_towers,),
        update_ops="all")

  @parameterized.product(
      name=tuple(n for n in ("keras", "layers", "layers_unfused")
                 if n in LIBRARIES),
      policy=("first", "all"))
  def test_without_sync_moving_statistics_take_the_mean_of_towers(
      self, name, policy):
    layer = LIBRARIES[name]
    trained = Trained(layer, 2, sync_batch_norm=False, update_ops=policy)
    self.assertEmpty(trained.built.synced_layers)
    before = trained.run(6, steps=0)[1]
    after = trained.run(6, steps=1)[1]
    moving = next(n for n in before if n.endswith("moving_mean"))
    kernel = before["kernel"]
    with tf.Graph().as_default(), testing.session() as sess:
      images = trained.feed(6)[trained.images].astype("f")
      x = sess.run(tf.nn.conv2d(images, kernel, 1, "SAME"))
    mean = x.astype(np.float64).mean(axis=(0, 1, 2))
    expected = before[moving] * 0.9 + 0.1 * mean
    self.assertAllClose(after[moving], expected, rtol=1e-5, atol=1e-5)

  def test_without_sync_each_tower_normalises_by_its_rows(self):
    """Guards against a sync that cannot be switched off."""
    with tf.Graph().as_default():
      x = tf.constant([[0.0], [1.0], [10.0], [11.0]])

      def model(x):
        mean, _ = tf.nn.moments(x, [0])
        return {"y": x - mean}

      synced = towers.build_towers(model, 2, inputs=x)
      apart = towers.build_towers(model, 2, inputs=x, sync_batch_norm=False)
      with testing.session() as sess:
        synced, apart = sess.run((synced.outputs["y"], apart.outputs["y"]))
    self.assertAllClose(synced, [[-5.5], [-4.5], [4.5], [5.5]])
    self.assertAllClose(apart, [[-0.5], [0.5], [-0.5], [0.5]])

  def test_no_sync_leaves_a_single_layer_alone(self):
    with tf.Graph().as_default():

      def model(x):
        with towers.no_sync():
          mean, _ = tf.nn.moments(x, [0])
        return {"mean": mean[tf.newaxis]}

      built = towers.build_towers(
          model, 2, inputs=tf.constant([[0.0], [1.0], [10.0], [11.0]]))
      with testing.session() as sess:
        means = sess.run(built.outputs["mean"])
    self.assertAllClose(means, [[0.5], [10.5]])
    self.assertEmpty(built.synced_layers)

  def test_other_norms_stay_untouched(self):
    """Layer, instance and group norm do not reduce the batch axis."""

    def model(x):
      for axes in ([1, 2], [1, 2, 3], [3], [-1]):
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        x = (x - mean) * tf.math.rsqrt(variance + 1e-3)
      grouped = tf.reshape(x, [-1, 3, 4, 2, 3])
      mean, _ = tf.nn.moments(grouped, [1, 2, 4], keepdims=True)
      return {"y": grouped - mean}

    with tf.Graph().as_default() as graph:
      images = tf.placeholder(tf.float32, [None, 3, 4, CHANNELS])
      built = towers.build_towers(model, 2, inputs=images)
      merges = [op for op in graph.get_operations()
                if op.type == "IdentityN"]
    self.assertEmpty(built.synced_layers)
    self.assertEmpty(merges)

  @parameterized.product(batch_size=(None, 6, 2))
  def test_norms_by_the_fused_kernel_stay_untouched(self, batch_size):
    """Layer and instance norm, with the rows among the kernel's channels."""

    def instance_norm(x):
      size = tf.shape(x)
      folded = tf.reshape(tf.transpose(x, [0, 3, 1, 2]), [1, -1, 3, 4])
      if batch_size:
        folded.set_shape([1, x.shape[0] * CHANNELS, 3, 4])
      ones = tf.ones([size[0] * CHANNELS])
      y = tf.nn.fused_batch_norm(folded, ones, 0 * ones, is_training=True,
                                 data_format="NCHW")[0]
      y = tf.reshape(y, [-1, CHANNELS, 3, 4])
      return tf.transpose(y, [0, 2, 3, 1])

    def model(x):
      layer = KERAS.layers.LayerNormalization()
      return {"layer": layer(x), "instance": instance_norm(x)}

    values = np.random.RandomState(0).normal(
        size=[batch_size or 5, 3, 4, CHANNELS])
    with tf.Graph().as_default():
      images = tf.placeholder(tf.float32, [batch_size, 3, 4, CHANNELS])
      if batch_size == 2:  # One row, and a leading 1: who knows?
        with self.assertRaisesRegex(
            ValueError, r"`x` of a batch norm must show which axis is the "
            r"batch: got .* shape \(1, 6, 3, 4\), reshaped .* \(tower 0\)"):
          towers.build_towers(model, 2, inputs=images)
        return
      built = towers.build_towers(model, 2, inputs=images)
      with testing.session(initialize=True) as sess:
        outputs = sess.run(built.outputs, {images: values})
    self.assertEmpty(built.synced_layers)
    for name, axes in (("layer", 3), ("instance", (1, 2))):
      mean = values.mean(axis=axes, keepdims=True)
      variance = values.var(axis=axes, keepdims=True)
      self.assertAllClose(outputs[name], (values - mean) / np.sqrt(
          variance + 1e-3), rtol=1e-4, atol=1e-4)

  def test_a_mean_that_is_no_moment_stays_untouched(self):

    def model(x):
      return {"mean": tf.reduce_mean(x, axis=0, keepdims=True, name="mean")}

    with tf.Graph().as_default():
      built = towers.build_towers(
          model, 2, inputs=tf.constant([[0.0], [1.0], [10.0], [11.0]]))
      with testing.session() as sess:
        self.assertAllClose(sess.run(built.outputs["mean"]), [[0.5], [10.5]])

  def test_names_shapes_and_types_of_the_model_stay(self):
    """Twenty tensors looked up by name are those of the plain model."""
    names = []

    def model(x):
      tensors = []
      for k in range(5):
        with tf.variable_scope(f"block_{k}"):
          y = fused(x, True)
          mean, variance = tf.nn.moments(y, [0, 1, 2], name="stats")
          x = tf.nn.relu(y * tf.math.rsqrt(variance + 1.0) - mean, name="out")
          tensors += [y, mean, variance, x]
      names.append([(t.name, t.shape.as_list(), t.dtype) for t in tensors])
      return {"x": x}

    def build(count):
      with tf.Graph().as_default() as graph:
        images = tf.placeholder(tf.float32, [None, 3, 4, CHANNELS])
        scope = tf.get_variable_scope()
        with tf.variable_scope(scope, use_resource=True):
          tf.set_random_seed(1)
          if count:
            built = towers.build_towers(model, count, inputs=images)
            x = built.outputs["x"]
          else:
            x = model(images)["x"]
        return graph, images, x

    values = np.random.RandomState(0).normal(size=[4, 3, 4, CHANNELS])
    plain, images, _ = build(0)
    expected = names.pop()
    with testing.session(plain, initialize=True) as sess:
      variables = {v.op.name: sess.run(v) for v in plain.get_collection(
          tf.GraphKeys.GLOBAL_VARIABLES)}
      plain_values = sess.run([n for n, _, _ in expected], {images: values})
    graph, images, _ = build(2)
    with testing.session(graph, initialize=True) as sess:
      for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        variable.load(variables[variable.op.name], sess)
      for k in range(2):
        with self.subTest(tower=k):
          renamed = [(f"tower_{k}/{n}", s, t) for n, s, t in expected]
          self.assertEqual(sorted(map(str, names[k])),
                           sorted(map(str, renamed)))
          found = sess.run([n for n, _, _ in renamed], {images: values})
          for (name, shape, _), a, b in zip(expected, plain_values, found):
            a = a[2 * k:2 * k + 2] if len(shape) == 4 else a
            self.assertAllClose(a, b, rtol=1e-4, atol=1e-4, msg=name)

  @parameterized.named_parameters(
      ("fused", "fused", "FusedBatchNormV3", "tf.nn.fused_batch_norm"),
      ("moments", "moments", "moments", "tf.nn.moments"),
      ("keras", "keras", "batch_normalization", "BatchNormalization"))
  def test_lists_the_layers(self, library, name, kind):
    built = Trained(LIBRARIES[library], 3).built
    self.assertLen(built.synced_layers, 1)
    layer = built.synced_layers[0]
    self.assertStartsWith(layer.name, name)
    self.assertIn(kind, layer.kind)
    self.assertEqual(layer.axes, (0, 1, 2))
    self.assertEqual(layer.towers, 3)

  def test_lists_own_layers_once(self):
    layer = lambda x, training: towers.batch_norm(x, training=training)
    built = Trained(layer, 2).built
    self.assertEqual([tuple(layer) for layer in built.synced_layers],
                     [("batch_normalization", "towers.batch_norm",
                       (0, 1, 2), 2)])

  def test_frozen_layers_meet_nowhere(self):
    """c010: a frozen layer changes nothing and adds no cross-tower op."""
    trained = Trained(fused, 2, training=False)
    self.assertEmpty(trained.built.synced_layers)
    self.assertEmpty(trained.built.update_ops)
    self.assertNotIn("IdentityN",
                     {op.type for op in trained.graph.get_operations()})

  def test_stable_at_large_mean(self):
    rng = np.random.RandomState(0)
    x = rng.normal(1000.0, 0.1, [64, 3]).astype("f")

    def model(x):
      y, mean, variance = tf.nn.fused_batch_norm(
          x[:, tf.newaxis, tf.newaxis], tf.ones([3]), tf.zeros([3]),
          epsilon=1e-5, is_training=True)
      _, by_moments = tf.nn.moments(x, [0])
      return {
          "y": y,
          "mean": mean[tf.newaxis],
          "variance": variance[tf.newaxis],
          "moments": by_moments[tf.newaxis]
      }

    with tf.Graph().as_default():
      built = towers.build_towers(model, 3, inputs=tf.constant(x))
      with testing.session() as sess:
        outputs = sess.run(built.outputs)
    variance = x.astype(np.float64).var(axis=0)
    self.assertAllClose(outputs["moments"][0], variance, rtol=1e-3)
    self.assertAllClose(outputs["variance"][0], variance * 64 / 63, rtol=1e-3)

  @parameterized.named_parameters(("float16", tf.float16),
                                  ("bfloat16", tf.bfloat16))
  def test_half_precision_keeps_float32_statistics(self, dtype):
    """c044: values of 300, whose squares are no float16."""
    x = np.random.RandomState(0).normal(300.0, 8.0, [9, 2, 2, 3])

    def model(x):
      y, mean, variance = tf.nn.fused_batch_norm(
          x, tf.ones([3]), tf.zeros([3]), is_training=True)
      return {
          "y": y,
          "mean": mean[tf.newaxis],
          "variance": variance[tf.newaxis]
      }

    with tf.Graph().as_default():
      built = towers.build_towers(
          model, 2, inputs=tf.cast(tf.constant(x), dtype))
      with testing.session() as sess:
        y, mean, variance = sess.run([
            tf.cast(built.outputs["y"], tf.float32), built.outputs["mean"],
            built.outputs["variance"]
        ])
    self.assertEqual(built.outputs["y"].dtype, dtype)
    self.assertAllClose(mean[0], x.mean(axis=(0, 1, 2)), rtol=1e-2)
    self.assertAllClose(
        variance[0], x.var(axis=(0, 1, 2), ddof=1), rtol=5e-2)
    self.assertAllClose(y, (x - x.mean(axis=(0, 1, 2))) / x.std(axis=(0, 1, 2)),
                        atol=0.2)

  # --- Refusals ---

  def build(self, layer, **options):
    testing.clear_keras()
    with tf.Graph().as_default():
      images = tf.placeholder(tf.float32, [None, 3, 4, CHANNELS])
      return towers.build_towers(
          lambda x: {"y": layer(x)}, 2, inputs=images, **options)

  def test_rejects_a_while_loop(self):

    def layer(x):
      return tf.while_loop(lambda i, _: i < 2,
                           lambda i, x: (i + 1, plain_moments(x, True)),
                           [0, x])[1]

    with self.assertRaisesRegex(
        ValueError, r"batch statistics `while/moments` \(tower 0\) must not "
        "stand inside a while loop"):
      self.build(layer)

  def test_rejects_v2_control_flow(self):
    """A program that only called `tf.disable_eager_execution()`."""
    tf.enable_control_flow_v2()
    self.addCleanup(tf.disable_control_flow_v2)

    def layer(x):
      training = tf.placeholder_with_default(True, [])
      return tf.cond(training, lambda: plain_moments(x, True), lambda: x)

    with self.assertRaisesRegex(
        ValueError, r"batch statistics .* \(tower 0\) must not stand inside a "
        r"function or a branch of v2 control flow.*disable_control_flow_v2"):
      self.build(layer)

  def test_rejects_axes_that_are_not_known(self):

    def layer(x):
      mean, _ = tf.nn.moments(
          x, tf.placeholder_with_default([0, 1], [None]), keepdims=True)
      return x - mean

    with self.assertRaisesRegex(
        ValueError, r"`axes` of tf.nn.moments must be known .* tower 0"):
      self.build(layer)

  def test_rejects_towers_that_meet_in_other_layers(self):

    def layer(x):
      scope = "one" if towers.current_tower().index == 0 else "other"
      with tf.name_scope(scope):
        return plain_moments(x, True)

    with self.assertRaisesRegex(
        ValueError, "tower 0 waits in batch statistics `one/moments`, tower 1 "
        "in batch statistics `other/moments`"):
      self.build(layer)

  def test_rejects_channels_that_are_not_known(self):

    def layer(x):
      scale = tf.placeholder_with_default(tf.ones([CHANNELS]), [None])
      return tf.nn.fused_batch_norm(x, scale, scale, is_training=True)[0]

    with self.assertRaisesRegex(
        ValueError, "`scale` of a fused batch norm must have a static size: "
        ".* tower 0"):
      self.build(layer)

  @parameterized.named_parameters(("renorm", {"renorm": True}),
                                  ("virtual_batch_size",
                                   {"virtual_batch_size": 2}))
  def test_rejects_what_would_not_equal_one_device(self, options):
    argument = next(iter(options))
    try:
      layer = KERAS.layers.BatchNormalization(**options)
    except (TypeError, ValueError):  # This Keras has no such option.
      layer = tf.layers.BatchNormalization(**options) if HAS_LAYERS else None
    if layer is None:
      with self.assertRaisesRegex((TypeError, ValueError), argument):
        KERAS.layers.BatchNormalization(**options)
      return
    with self.assertRaisesRegex(
        ValueError, f"`{argument}` of a batch norm layer must be .*layer `.*"
        "tower 0"):
      self.build(lambda x: layer(x[:4], training=True))

  def test_rejects_a_second_derivative_from_outside(self):
    trained = Trained(fused, 2)
    with trained.graph.as_default():
      gradient = next(g for g, v in trained.pairs if v.op.name == "kernel")
      with self.assertRaisesRegex(
          ValueError, "`tf.gradients` must not differentiate a gradient "
          "through batch norm that was taken outside `model_fn`"):
        tf.gradients(gradient, trained.built.trainable_variables)

  # --- What stays behind ---

  def test_nothing_stays_behind(self):
    seen = []

    def count_callbacks():
      callback = lambda *args, **kwargs: seen.append(args)
      from_tensorflow = sys.modules[
          "tensorflow.python.framework.op_callbacks"]
      self.assertFalse(from_tensorflow.should_invoke_op_callbacks())
      del callback

    def failing(x):
      plain_moments(x, True)
      raise RuntimeError("No more layers.")

    self.build(lambda x: plain_moments(x, True))
    count_callbacks()
    with self.assertRaisesRegex(RuntimeError, "No more layers"):
      self.build(failing)
    count_callbacks()

  def test_deep_model_converts_with_few_ops(self):
    """110 layers, at most 1.4 times the ops of towers without conversion."""

    def model(x):
      for k in range(110):
        with tf.variable_scope(f"layer_{k}"):
          kernel = tf.get_variable("kernel", [1, 1, CHANNELS, CHANNELS])
          x = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
          x = tf.nn.relu(tf.nn.fused_batch_norm(
              x, *_gamma_beta(), is_training=True)[0])
      return tf.reduce_mean(x)

    def loop(images):
      """The tower loop that people write, with per-tower batch norm."""
      optimizer = tf.train.GradientDescentOptimizer(0.1)
      pairs = []
      for k, shard in enumerate(tf.split(images, 2)):
        scope = tf.get_variable_scope()
        with tf.device(f"/cpu:{k}"), tf.name_scope(f"tower_{k}"):
          with tf.variable_scope(scope, reuse=k > 0):
            pairs.append(optimizer.compute_gradients(model(shard)))
      return optimizer.apply_gradients([
          (tf.reduce_mean(tf.stack([g for g, _ in group]), 0), group[0][1])
          for group in zip(*pairs)
      ])

    counts = {}
    for name in ("loop", "towers"):
      with tf.Graph().as_default() as graph:
        images = tf.placeholder(tf.float32, [8, 3, 4, CHANNELS])
        if name == "loop":
          loop(images)
        else:
          built = towers.build_towers(model, 2, inputs=images)
          built.minimize(tf.train.GradientDescentOptimizer(0.1))
          self.assertLen(built.synced_layers, 110)
        counts[name] = len(graph.get_operations())
    self.assertLess(counts["towers"], 1.4 * counts["loop"])


if __name__ == "__main__":
  tf.test.main()
