"""Tests of what `minimize` does between gradients and variables.

Each option is compared with what it means on one device with the whole batch,
alone and with the other options.
"""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import towers
import training_cases as cases

OPTIMIZERS = {
    "momentum": lambda: tf.train.MomentumOptimizer(0.3, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(0.05),
}
SIZES = (7, 5, 2, 8)
EXTRA = ("skipped_steps", "loss_scale", "loss_scale_clean_steps")


def clipped(pairs, norm=0.2):
  """Clips as one device does, with the embedding's gradient as it is."""
  dense = [tf.convert_to_tensor(g) for g, _ in pairs]
  factor = norm / tf.maximum(tf.global_norm(dense), norm)
  result = []
  for gradient, variable in pairs:
    if isinstance(gradient, tf.IndexedSlices):
      gradient = tf.IndexedSlices(gradient.values * factor, gradient.indices,
                                  gradient.dense_shape)
    else:
      gradient *= factor
    result.append((gradient, variable))
  return result


def options_of(names):
  """Returns keyword arguments of `minimize` and `build_towers`."""
  minimize, build = {}, {}
  for name in names:
    if name == "clip_norm":
      minimize["clip_norm"] = 0.2
    elif name == "loss_scale":
      minimize["loss_scale"] = 512.0
    elif name == "dynamic":
      minimize["loss_scale"] = towers.DynamicLossScale(1024.0, 3)
    elif name == "skip_nonfinite":
      minimize["skip_nonfinite"] = True
    elif name == "accumulate":
      minimize["accumulate_steps"] = 2
    elif name == "pack_bytes":
      minimize["pack_bytes"] = 400
    elif name in ("balanced", "replicated"):
      build["variables"] = name
    elif name == "all":
      build["update_ops"] = "all"
  return minimize, build


OPTIONS = ("clip_norm", "loss_scale", "dynamic", "skip_nonfinite", "accumulate",
           "pack_bytes", "balanced", "replicated", "all")
EXCLUSIVE = ({"loss_scale", "dynamic"}, {"balanced", "replicated"})
PAIRS = [
    pair for pair in itertools.combinations(OPTIONS, 2)
    if set(pair) not in EXCLUSIVE
]


def assert_holds(got, expected):
  """Checks that the variables in `got` have the values in `expected`."""
  for name, value in expected.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-10, atol=1e-13,
                               err_msg=name)


class OptionsTest(parameterized.TestCase):

  def compare(self, names, num_towers, optimizer="momentum"):
    """Trains on four batches, or two that hold the rows of two each."""
    minimize, build = options_of(names)
    change = clipped if "clip_norm" in names else lambda pairs: pairs
    plain = cases.Trainer(
        None, cases.plain_step(OPTIMIZERS[optimizer], change))
    many = cases.Trainer(
        num_towers, cases.towers_step(OPTIMIZERS[optimizer], **minimize),
        **build)
    batches = [cases.batch(size, seed) for seed, size in enumerate(SIZES)]
    poisoned = cases.batch(6, 9)
    poisoned[0][5, 1] = np.inf
    with plain.session(), many.session():
      joined = batches
      if "accumulate" in names:
        joined = [
            [np.concatenate(parts) for parts in zip(*batches[k:k + 2])]
            for k in (0, 2)
        ]
      for values in joined:
        plain.step(values)
      for number, values in enumerate(batches):
        if {"dynamic", "skip_nonfinite"} & set(names) and number in (1, 2):
          many.step(poisoned)
        many.step(values)
      expected, got = plain.variables(), many.variables()
      if "replicated" in names:
        many.evaluate(many.graph.check_copies())
    if "accumulate" in names:  # Update ops have seen other batches.
      for variables in (expected, got):
        del variables["seen"]
    extra = set(got) - set(expected)
    self.assertContainsSubset(extra, EXTRA)
    self.assertEmpty(set(expected) - set(got))
    assert_holds(got, expected)

  @parameterized.parameters(*itertools.product(OPTIONS, (1, 2, 3, 4)))
  def test_option_equals_one_device(self, option, num_towers):
    self.compare([option], num_towers)

  @parameterized.parameters(*PAIRS)
  def test_options_combine(self, one, other):
    self.compare([one, other], 3)

  @parameterized.parameters(*OPTIONS)
  def test_optimizer_that_treats_sparse_gradients_apart(self, option):
    self.compare([option], 2, "adam")

  @parameterized.parameters(1, 2, 3, 4)
  def test_norm_that_the_graph_computes(self, num_towers):
    """A largest norm that falls with the steps, in another type."""
    norm = lambda: 0.2 / tf.cast(tf.train.get_global_step() + 1, tf.float32)
    plain = cases.Trainer(None, cases.plain_step(
        OPTIMIZERS["momentum"],
        lambda pairs: clipped(pairs, tf.cast(norm(), tf.float64))))
    many = cases.Trainer(num_towers, lambda graph, step: graph.minimize(
        OPTIMIZERS["momentum"](), global_step=step, clip_norm=norm()))
    with plain.session(), many.session():
      for seed, size in enumerate(SIZES):
        values = cases.batch(size, seed)
        plain.step(values)
        many.step(values)
      expected, got = plain.variables(), many.variables()
    self.assertEqual(set(got), set(expected))
    assert_holds(got, expected)

  def test_all_at_once(self):
    self.compare(["clip_norm", "dynamic", "skip_nonfinite", "accumulate",
                  "pack_bytes", "replicated", "all"], 4, "adam")


class SkippedStepTest(parameterized.TestCase):

  @parameterized.parameters(
      (1, np.inf, "adam", "shared"), (2, np.nan, "momentum", "shared"),
      (3, np.inf, "adam", "balanced"), (4, np.nan, "adam", "replicated"))
  def test_leaves_no_trace(self, num_towers, value, optimizer, variables):
    trainer = cases.Trainer(
        num_towers, cases.towers_step(OPTIMIZERS[optimizer],
                                      skip_nonfinite=True),
        variables=variables)
    poisoned = cases.batch(5)
    poisoned[0][4, 0] = value  # In the last tower.
    with trainer.session():
      trainer.step(cases.batch(6))
      before = trainer.variables()
      trainer.step(poisoned)
      after = trainer.variables()
      if variables == "replicated":
        trainer.evaluate(trainer.graph.check_copies())
      trainer.step(cases.batch(6))
      self.assertEqual(trainer.evaluate(trainer.graph.skipped_steps), 1)
      self.assertEqual(trainer.evaluate(trainer.global_step), 2)
    self.assertEqual(before.pop("skipped_steps"), 0)
    self.assertEqual(after.pop("skipped_steps"), 1)
    self.assertEqual(before.keys(), after.keys())
    for name in before:
      np.testing.assert_array_equal(before[name], after[name], name)

  def test_sparse_gradient_counts(self):
    """An infinity that reaches the embedding alone skips the step."""

    def model(features, ids, labels):
      del labels
      table = tf.get_variable("table", [4], features.dtype,
                              initializer=tf.ones_initializer())
      return tf.reduce_mean(tf.gather(table, ids) * features[:, 0])

    trainer = cases.Trainer(
        2, cases.towers_step(OPTIMIZERS["momentum"], skip_nonfinite=True),
        model_fn=model)
    values = [np.ones([3, 3]), np.array([0, 1, 1]), np.zeros([3])]
    values[0][2, 0] = np.nan
    with trainer.session():
      trainer.step(values)
      np.testing.assert_array_equal(trainer.variables()["table"], np.ones([4]))
      self.assertEqual(trainer.variables()["skipped_steps"], 1)

  def test_without_it_plain_code_is_followed(self):
    trainer = cases.Trainer(2, cases.towers_step(OPTIMIZERS["momentum"]))
    values = cases.batch(4)
    values[0][3] = np.nan
    with trainer.session():
      trainer.step(values)
      self.assertTrue(np.isnan(trainer.variables()["weights"]).any())

  @parameterized.parameters(1, 2, 3)
  def test_batch_norm_statistics_stay(self, num_towers):
    def model(features, ids, labels):
      del ids, labels
      x = towers.batch_norm(features, training=True, momentum=0.5)
      w = tf.get_variable("w", [3], features.dtype)
      return tf.reduce_mean(tf.square(x * w - features))

    trainer = cases.Trainer(
        num_towers, cases.towers_step(OPTIMIZERS["adam"], loss_scale="dynamic"),
        model_fn=model)
    values = cases.batch(4)
    values[0][1] = np.nan
    with trainer.session():
      trainer.step(cases.batch(5))
      before = trainer.variables()
      trainer.step(values)
      after = trainer.variables()
    for name in before:
      if name not in EXTRA:
        np.testing.assert_array_equal(before[name], after[name], name)
    self.assertEqual(after["loss_scale"], before["loss_scale"] / 2)

  @parameterized.parameters("assign", "scatter", "maximum", "conditional",
                            "branch", "outside")
  def test_other_update_ops_are_undone(self, kind):
    def model(features, ids, labels):
      del ids, labels
      state = tf.get_variable("state", [4], features.dtype, trainable=False,
                              initializer=tf.ones_initializer())
      if kind == "assign":
        with tf.control_dependencies([state.assign([1.0, 2.0, 3.0, 4.0])]):
          update = state.assign_add(state)
      elif kind == "scatter":
        update = state.scatter_sub(
            tf.IndexedSlices(features[:1, 0], tf.constant([2])))
      elif kind == "maximum":
        update = state.scatter_nd_max([[0]], 2.0 + features[:1, 0])
      elif kind == "branch":
        inside = []

        def branch():
          inside.append(state.assign_add(state).op)
          return tf.identity(state)

        tf.cond(tf.reduce_sum(features) < 1e9, branch, lambda: state + 0.0)
        update = inside[0]
      elif kind == "conditional":
        update = tf.cond(tf.constant(True), lambda: state.assign_add(state),
                         lambda: state + 0.0)
      else:
        update = tf.assign_add(outside, 1.0)
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
      return tf.reduce_mean(features * tf.get_variable("w", [], tf.float64))

    outside = None

    def model_and_outside(*inputs):
      nonlocal outside
      if kind == "outside" and outside is None:
        with tf.init_scope():
          outside = tf.get_variable("outside", [], use_resource=False,
                                    trainable=False,
                                    initializer=tf.zeros_initializer())
      return model(*inputs)

    trainer = cases.Trainer(
        2, cases.towers_step(OPTIMIZERS["momentum"], skip_nonfinite=True),
        model_fn=model_and_outside)
    bad = cases.batch(4)
    bad[0][1] = -np.inf
    with trainer.session():
      trainer.step(cases.batch(4))
      before = trainer.variables()
      trainer.step(bad)
      after = trainer.variables()
      more = cases.batch(4)
      more[0] += 10.0
      trainer.step(more)
      moved = trainer.variables()
    name = "outside" if kind == "outside" else "state"
    np.testing.assert_array_equal(before[name], after[name])
    if kind != "assign":
      self.assertTrue(np.any(moved[name] != after[name]))
    self.assertEqual(after["skipped_steps"], 1)

  def test_update_op_that_cannot_be_undone_is_refused(self):
    def model(features, ids, labels):
      del ids, labels
      queue = tf.FIFOQueue(10, [features.dtype])
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                           queue.enqueue([features[0, 0]]))
      return tf.reduce_mean(features * tf.get_variable("w", [], tf.float64))

    with self.assertRaisesRegex(
        ValueError, "`UPDATE_OPS` must change variables only.*QueueEnqueue"):
      cases.Trainer(
          2, cases.towers_step(OPTIMIZERS["momentum"], skip_nonfinite=True),
          model_fn=model)


class ClipTest(parameterized.TestCase):

  def test_infinite_norm_is_no_empty_step(self):
    def model(features, ids, labels):
      del ids, labels
      one = tf.get_variable("one", [], initializer=tf.ones_initializer())
      two = tf.get_variable("two", [], initializer=tf.ones_initializer())
      return tf.reduce_mean(features) * (one * 1e20 + two)

    trainer = cases.Trainer(
        2, cases.towers_step(OPTIMIZERS["momentum"], clip_norm=1.0),
        model_fn=model, dtype=tf.float32)
    with trainer.session():
      trainer.step([np.ones([4, 3]), np.zeros(4), np.zeros(4)])
      self.assertTrue(np.isnan(trainer.variables()["two"]))


class OrderTest(parameterized.TestCase):

  def test_documented_order(self):
    """Unscale and average, then check, accumulate, clip, apply.

    A clip of single runs would clip both; a clip before unscaling would clip to
    next to nothing; a check after accumulating would lose the first run.
    """

    def model(features, ids, labels):
      del ids, labels
      w = tf.get_variable("w", [], features.dtype,
                          initializer=tf.zeros_initializer())
      return tf.reduce_mean(w * features[:, 0])

    trainer = cases.Trainer(
        2, cases.towers_step(
            lambda: tf.train.GradientDescentOptimizer(1.0), clip_norm=1.0,
            loss_scale=1024.0, accumulate_steps=2, skip_nonfinite=True),
        model_fn=model)
    rows = lambda value: [np.full([4, 3], value), np.zeros(4), np.zeros(4)]
    with trainer.session():
      trainer.step(rows(3.0))
      trainer.step(rows(np.inf))  # Not counted.
      self.assertEqual(trainer.variables()["w"], 0.0)
      trainer.step(rows(-2.6))
      np.testing.assert_allclose(trainer.variables()["w"], -0.2)  # Unclipped.
      trainer.step(rows(4.0))
      trainer.step(rows(2.0))
      np.testing.assert_allclose(trainer.variables()["w"], -1.2)  # Clipped.


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(clip_norm=0), "`clip_norm` must be the largest.*got 0"),
      (dict(clip_norm=float("nan")), "`clip_norm` must be.*got nan"),
      (dict(clip_norm="1"), "`clip_norm` must be"),
      (dict(loss_scale=-1.0), "`loss_scale` must be.*got -1.0"),
      (dict(loss_scale="auto"), "`loss_scale` must be.*got 'auto'"),
      (dict(loss_scale=towers.DynamicLossScale(growth_steps=0)),
       "`growth_steps`.*expected at least 1, got 0"),
      (dict(accumulate_steps=0), "`accumulate_steps` must be.*got 0"),
      (dict(accumulate_steps=1.5), "`accumulate_steps` must be.*got 1.5"),
      (dict(pack_bytes=-1), "`pack_bytes` must be.*got -1"),
      (dict(update_ops=["x"]), "`update_ops` must be ops from"),
  )
  def test_bad_values(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      cases.Trainer(2, cases.towers_step(OPTIMIZERS["adam"], **options))

  @parameterized.parameters((tf.float32, [2]), (tf.int32, []))
  def test_norm_of_another_shape_or_type(self, dtype, shape):
    make = lambda graph, step: graph.minimize(
        OPTIMIZERS["adam"](), global_step=step,
        clip_norm=tf.ones(shape, dtype))
    with self.assertRaisesRegex(
        ValueError, "`clip_norm` must be the largest.*a scalar tensor of a "
        "floating type.*got <tf.Tensor 'ones"):
      cases.Trainer(2, make)

  @parameterized.parameters(
      (dict(skip_nonfinite=1), "`skip_nonfinite` must be True or False"),
      (dict(update_ops="all"), "`update_ops` must be a list"),
  )
  def test_bad_types(self, options, message):
    with self.assertRaisesRegex(TypeError, message):
      cases.Trainer(2, cases.towers_step(OPTIMIZERS["adam"], **options))


if __name__ == "__main__":
  absltest.main()
