"""Tests that faults planted into random models are found, and no others.

Models are those of `random_models`, the same in each run.
"""

import warnings

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import tensorflow.compat.v1 as tf

import loop_cases
import random_models
import test_lint_variables
import testing
import towers
from towers import inspection
from towers import verification
import verification_cases

SETTINGS = dict(
    deadline=None, database=None, print_blob=False,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck))


def each(examples, seed, holds, **fixed):
  """Calls `holds` with random cases."""
  drawn = []

  # The first is the smallest, the same for each seed, and left out.
  @hypothesis.settings(max_examples=examples + 1, **SETTINGS)
  @hypothesis.seed(seed)
  @hypothesis.given(random_models.cases(**fixed))
  def check(case):
    # A model that is refused has no graph to look into.
    hypothesis.assume(not case.refused())
    drawn.append(case)
    if len(drawn) == 1:
      return
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      holds(case)

  check()


def model(case, plant=None, of_losses=None):
  return random_models.make_model(
      case, lambda: tf.constant(True), plant, of_losses)


def batch_size(x):
  return x * tf.cast(tf.shape(x)[0], x.dtype)


def by_position(x):
  return x * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, tf.newaxis]


def one_number(x):
  return x * tf.random.uniform([], dtype=x.dtype)


def gradient_by_rows(x):
  @tf.custom_gradient
  def same(y):
    rows = tf.cast(tf.shape(y)[0], x.dtype)
    return tf.identity(y), lambda slope: slope * rows
  # There must be a gradient that passes through.
  return same(x * tf.get_variable("before", [], x.dtype,
                                  initializer=tf.ones_initializer()))


def moving_average(x):
  average = tf.get_variable("average", x.shape[1:], x.dtype, trainable=False,
                            initializer=tf.zeros_initializer())
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.assign_sub(
      0.1 * (average - tf.reduce_mean(x, axis=0))))
  return x


def counter(x):
  steps = tf.get_variable("steps", [], trainable=False,
                          initializer=tf.zeros_initializer())
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, steps.assign_add(1.0))
  return x


def wrong_weight(losses, unused_weights):
  return towers.TowerSpec(tf.reduce_mean(losses),
                          weight=1.0 + towers.current_tower().index)


# What stands between the parts and the last layer, and what finds it.
IN_FEATURES = {
    "batch_norm": (verification_cases.own_batch_norm, "batch_norm_of_own_rows"),
    "moments": (verification_cases.own_moments, "batch_norm_of_own_rows"),
    "mean": (lambda x: x - tf.reduce_mean(x, axis=0), "statistic_of_own_rows"),
    "pairs": (verification_cases.of_pairs, "pairs_of_rows"),
    "batch_size": (batch_size, "batch_size"),
    "position": (by_position, "position_in_batch"),
    "reversed": (lambda x: x + x[::-1], "position_in_batch"),
    "tower_number": (verification_cases.tower_number, "tower_dependent"),
    "shuffle": (verification_cases.mixed, "shuffle_in_tower"),
    "seed": (lambda x: tf.nn.dropout(x, rate=0.5, seed=3),
             "same_random_numbers"),
    "one_number": (one_number, "random_numbers_for_whole_batch"),
    "gradient": (gradient_by_rows, "gradient_function"),
    "moving_average": (moving_average, "update_of_first_tower"),
    "counter": (counter, "update_in_each_tower"),
    "fixed_batch_size": (lambda x: tf.reshape(x, [7, x.shape[1]]),
                         "batch_size_fixed"),
}

IN_LOSS = {
    "sum": (lambda losses, _: tf.reduce_sum(losses) / 7.0, "sum_over_rows"),
    "wrong_weight": (wrong_weight, "weight_of_another_mean"),
    "root": (lambda losses, _: tf.sqrt(tf.reduce_mean(losses)),
             "function_of_batch_statistic"),
    "largest": (lambda losses, _: tf.reduce_max(losses), "reduction_over_rows"),
}


class VerifyTest(parameterized.TestCase):

  # In float64 what a fault changes stands out from rounding.
  FIXED = dict(rows=st.just(7), num_towers=st.just(2), double=st.just(True),
               penalty=st.just(False))

  def verify(self, case, **model_options):
    options = {}
    if model_options.get("plant") is counter:
      options["update_ops"] = "all"
    return verification.verify(model(case, **model_options), case.batch(), 2,
                               rows=[7], **options)

  @parameterized.named_parameters(
      (name, seed, *fault) for seed, (name, fault) in enumerate(
          IN_FEATURES.items()))
  def test_finds_in_features(self, seed, plant, rule):
    def holds(case):
      report = self.verify(case, plant=plant)
      where = [cause.operation for cause in report.causes
               if cause.rule == rule]
      self.assertRegex(" ".join(where), "planted|average|steps|before",
                       f"{case}\n{report}")
    each(1, seed, holds, loss=st.just("mean"), **self.FIXED)

  @parameterized.named_parameters(
      (name, 50 + seed, *fault) for seed, (name, fault) in enumerate(
          IN_LOSS.items()))
  def test_finds_in_the_loss(self, seed, of_losses, rule):
    def holds(case):
      report = self.verify(case, of_losses=of_losses)
      self.assertEqual([cause.rule for cause in report.causes][:1], [rule],
                       f"{case}\n{report}")
    each(1, seed, holds, **self.FIXED)

  def test_finds_nothing_in_sound_models(self):
    def holds(case):
      report = self.verify(case)
      self.assertTrue(report.equal, f"{case}\n{report}")
    each(6, 100, holds, **self.FIXED)


def on_cpu(getter, *args, **kwargs):
  """Puts variables beside those of `loop_cases`."""
  with tf.device("/cpu:0"):
    return getter(*args, **kwargs)


def random_loss(case, plant=loop_cases.linear_loss, rows=32):
  """Returns the loss of a tower in a loop: that of a random model, and `plant`.
  """
  def loss(images, index):
    values = case.batch()
    inputs = [tf.placeholder(v.dtype, [rows, *v.shape[1:]]) for v in values]
    with tf.variable_scope("model", custom_getter=on_cpu):
      returned = model(case)(*inputs)
    own = returned.loss if isinstance(returned, towers.TowerSpec) else (
        returned["loss"])
    return tf.cast(own, tf.float32) + plant(images, index)
  return loss


def all_losses(images, index):
  tf.add_to_collection("losses_so_far", loop_cases.linear_loss(images, index))
  return tf.add_n(tf.get_collection("losses_so_far"))


def same_dropout(images, index):
  return loop_cases.linear_loss(tf.nn.dropout(images, rate=0.5, seed=3), index)


def on_tower_device(images, index):
  cell = loop_cases.variable("cell", [4, 4], device=None)
  return loop_cases.linear_loss(tf.matmul(images, cell), index)


def normalised(images, unused_index):
  mean, variance = tf.nn.moments(images, [0])
  x = (images - mean) * tf.math.rsqrt(variance + 1e-3)
  return tf.reduce_mean(tf.square(tf.matmul(x, loop_cases.weights())))


def regularized(images, unused_index):
  kernel = loop_cases.weights(regularizer=lambda k: 0.1 * tf.nn.l2_loss(k))
  return tf.reduce_mean(tf.square(tf.matmul(images, kernel)))


class LoopsTest(parameterized.TestCase):
  """What is found in a loop written by hand."""

  @parameterized.named_parameters(
      ("variables", 0, test_lint_variables.with_own_bias,
       "variables_not_shared", {}),
      ("updates_of_all", 1, test_lint_variables.with_average,
       "updates_of_all_towers", {"update_ops": "all"}),
      ("no_updates", 2, test_lint_variables.with_average, "updates_not_run",
       {"update_ops": None}),
      ("losses_of_others", 3, all_losses, "reads_another_tower", {}),
      ("few_rows", 4, normalised, "batch_norm_of_few_rows", {"rows": 2}),
      ("seed", 5, same_dropout, "same_seed", {}),
      ("device", 6, on_tower_device, "variables_on_tower_devices", {}),
      ("slots", 7, loop_cases.linear_loss, "optimizer_slots_in_tower",
       {"apply_in_tower": True, "optimizer": "adam"}),
      ("decay", 8, regularized, "regularization_left_out", {}),
  )
  def test_finds(self, seed, plant, rule, options):
    def holds(case):
      arguments = dict(options)
      if "optimizer" in arguments:
        arguments["optimizer"] = tf.train.AdamOptimizer()
      built = loop_cases.loop(random_loss(case, plant), 2, **arguments)
      self.assertEqual(self.rules(built), [rule], str(case))
    # Decay of all variables would read those of other towers, too.
    self.each(2, seed, holds, update_ops=options.get("update_ops", "first"),
              decay=st.sampled_from(["none", "own"]))

  def test_finds_nothing_in_right_loops(self):
    def holds(case):
      built = loop_cases.loop(random_loss(case), case.num_towers)
      self.assertEmpty(self.rules(built), str(case))
    self.each(8, 200, holds)

  def test_finds_nothing_in_what_towers_builds(self):
    def holds(case):
      with tf.Graph().as_default():
        inputs = tuple(tf.placeholder(v.dtype, [None, *v.shape[1:]])
                       for v in case.batch())
        graph = towers.build_towers(
            model(case), testing.devices(case.num_towers), inputs=inputs,
            variables=case.variables)
        train_op = graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
      report = inspection.report(graph, train_op=train_op)
      self.assertEmpty(report.findings, str(case))
    each(8, 300, holds)

  def rules(self, built):
    report = inspection.report(built.graph, train_op=built.train_op)
    return sorted({finding.rule for finding in report.findings})

  def each(self, examples, seed, holds, update_ops="first", **fixed):
    def right(case):
      # `tf.Variable` makes a variable in each tower, which is a fault itself;
      # and so are batch norm updates that are not run, or run in all towers.
      hypothesis.assume(not any(
          getattr(part, "plain", False) for part in case.all_parts()))
      hypothesis.assume(update_ops == "first" or not any(
          isinstance(part, random_models.BatchNorm)
          for part in case.all_parts()))
      holds(case)
    extra = st.just(()) if update_ops is None else st.just(("frozen",))
    # Decay of all variables takes in those of `loop_cases`, in float32.
    each(examples, seed, right, extra=extra, double=st.just(False), **fixed)


if __name__ == "__main__":
  absltest.main()
