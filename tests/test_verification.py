"""Tests for towers.verification."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from models import convnet
from models import resnet
import towers
from towers import verification
import verification_cases as cases


def classifier(network, **arguments):
  """Returns the model function of a network with its loss."""
  def model_fn(images, labels):
    logits = network(images, num_classes=3, training=True, **arguments)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=logits))
    return {"loss": loss, "logits": logits}
  return model_fn


def images(rows, size=4):
  rng = np.random.RandomState(0)
  return (rng.normal(size=[rows, size, size, 3]).astype("f"),
          rng.randint(0, 3, rows))


class FaultsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      (name, case) for name, case in cases.FAULTS.items())
  def test_finds_and_names(self, case):
    options = {"rows": [7], **(case.options or {})}
    report = verification.verify(case.model, cases.batch(), 2, **options)
    self.assertFalse(report.equal)
    first = report.causes[0]
    self.assertEqual(first.rule, case.rule, str(report))
    self.assertIn(case.operation, first.operation)
    self.assertContainsSubset(case.kinds,
                              {d.kind for d in report.differences})
    text = str(report)
    self.assertStartsWith(
        text, "2 towers do not compute what one device computes.\n")
    self.assertIn(f"1. {case.rule}: ", text)

  @parameterized.named_parameters(
      (name, model) for name, model in cases.SOUND.items())
  def test_passes_a_sound_model(self, model):
    report = verification.verify(model, cases.batch(), 3)
    self.assertEmpty(report.differences, str(report))
    self.assertTrue(report.equal)
    self.assertEqual(report.rows, (7, 6, 2, 1))
    self.assertStartsWith(
        str(report), "3 towers compute what one device computes.\n")

  def test_names_the_first_layer_and_blames_all_on_it(self):
    def model_fn(features, labels):
      x = cases.dense(features, "first")
      with tf.variable_scope("good"):
        x = towers.batch_norm(x, training=True)
      for layer in ("bad", "worse"):
        with tf.variable_scope(layer):
          x = cases.own_batch_norm(x)
      return tf.reduce_mean(cases.squares(x, labels))

    report = verification.verify(model_fn, cases.batch(), 2, rows=[7])
    self.assertLen(report.causes[:1], 1)
    self.assertEqual(report.causes[0].rule, "batch_norm_of_own_rows")
    self.assertEqual(report.causes[0].layer, "bad/batch_normalization")
    changed = {d.name for d in report.differences if d.kind == "update"}
    self.assertContainsSubset(
        ["bad/batch_normalization/moving_variance",
         "worse/batch_normalization/moving_variance"], changed)
    self.assertEmpty([name for name in changed if "good" in name])
    gradient = next(d for d in report.differences if d.kind == "gradient")
    self.assertGreater(gradient.largest, gradient.allowed)
    self.assertEqual(gradient.cause, report.causes[0])

  def test_tells_two_faults_apart(self):
    def model_fn(features, labels):
      x = tf.nn.dropout(cases.dense(features, "first"), rate=0.5, seed=1)
      return tf.reduce_sum(cases.squares(x, labels), name="total")

    report = verification.verify(model_fn, cases.batch(), 2, rows=[7])
    self.assertEqual([cause.rule for cause in report.causes],
                     ["same_random_numbers", "sum_over_rows"])

  def test_fault_beside_a_loop(self):
    """What enters the loop must not be fetched with what leaves it."""
    def model_fn(x):
      weights = tf.get_variable("weights", x.shape[1:])
      _, y = tf.while_loop(lambda step, _: step < 2,
                           lambda step, y: (step + 1, tf.tanh(y * weights)),
                           [tf.constant(0), x])
      return tf.reduce_mean(tf.square(y - tf.reduce_mean(y, axis=0)))

    x = np.random.RandomState(0).normal(size=[7, 3]).astype(np.float32)
    report = verification.verify(model_fn, x, 2, rows=[7])
    self.assertFalse(report.equal)
    self.assertEqual([cause.rule for cause in report.causes],
                     ["statistic_of_own_rows"])

  def test_same_fault_in_batches_of_several_sizes_is_one_cause(self):
    report = verification.verify(
        cases.FAULTS["sum"].model, cases.batch(), 3)
    self.assertLen(report.causes, 1)
    # A batch of one row has one tower with rows.
    self.assertEqual({d.rows for d in report.differences}, {7, 6, 2})


class ModelsTest(parameterized.TestCase, tf.test.TestCase):

  def test_passes_convnet(self):
    report = verification.verify(
        classifier(convnet.logits), images(5), 2, rows=[5, 1])
    self.assertTrue(report.equal, str(report))
    self.assertEqual(report.compared, {
        "loss": 1, "output": 1, "gradient": 14, "update": 22})

  def test_passes_resnet(self):
    report = verification.verify(
        classifier(resnet.logits, depth=8), images(5), 2, rows=[5])
    self.assertTrue(report.equal, str(report))


class ArgumentsTest(parameterized.TestCase, tf.test.TestCase):

  def test_model_without_inputs(self):
    def model_fn():
      x = tf.get_variable("x", [3], initializer=tf.ones_initializer())
      noise = tf.random.normal([3])
      return tf.reduce_sum(tf.square(x + noise))

    report = verification.verify(model_fn, None, 2)
    self.assertTrue(report.equal, str(report))
    self.assertEqual(report.rows, ())
    self.assertLen(report.held, 1)

  def test_model_without_inputs_that_differs_between_towers(self):
    def model_fn():
      x = tf.get_variable("x", [3], initializer=tf.ones_initializer())
      return tf.reduce_sum(x) * (1.0 + towers.current_tower().index)

    report = verification.verify(model_fn, devices=2)
    self.assertEqual(report.causes[0].rule, "tower_dependent")

  @parameterized.named_parameters(
      ("balanced", "balanced"), ("replicated", "replicated"))
  def test_variables(self, policy):
    report = verification.verify(
        cases.SOUND["batch_norm"], cases.batch(5), 2, variables=policy,
        rows=[5])
    self.assertTrue(report.equal, str(report))

  def test_without_loss_takes_all_scalar_outputs(self):
    def model_fn(features, labels):
      x = cases.dense(features, "first")
      y = cases.dense(features, "second")
      return {"one": tf.reduce_mean(cases.squares(x, labels)),
              "two": tf.reduce_sum(cases.squares(y, labels)),
              "x": [x, {"y": y}]}

    report = verification.verify(model_fn, cases.batch(4), 2, rows=[4])
    self.assertEqual(report.compared["output"], 4)
    self.assertEqual(
        [(d.kind, d.name) for d in report.differences],
        [("output", "two"), ("gradient", "second/kernel by two")])
    only = verification.verify(model_fn, cases.batch(4), 2, rows=[4],
                               losses=["one"])
    self.assertEqual([d.name for d in only.differences], ["two"])

  def test_values_of_variables(self):
    def model_fn(features, labels):
      # Both scores are 0 with the initial value.
      scale = tf.get_variable("scale", [], initializer=tf.zeros_initializer())
      x = cases.dense(features, "first") * scale
      return {"loss": tf.reduce_mean(cases.squares(
          cases.own_batch_norm(x), labels))}

    blind = verification.verify(model_fn, cases.batch(), 2, rows=[7])
    found = verification.verify(model_fn, cases.batch(), 2, rows=[7],
                                values={"scale": 1.0})
    self.assertNotIn("loss", [d.kind for d in blind.differences])
    self.assertIn("loss", [d.kind for d in found.differences])

  def test_builds_for_known_sizes_where_the_model_needs_them(self):
    def model_fn(features, labels):
      rows = float(features.shape.as_list()[0])
      x = cases.dense(features, "first") * rows / 4.0
      return tf.reduce_mean(cases.squares(x, labels))

    report = verification.verify(model_fn, cases.batch(4), 2)
    self.assertIn("batch of unknown size", report.notes[0])
    self.assertEqual(report.rows, (4, 3, 1))
    self.assertEqual(report.causes[0].rule, "batch_size")

  def test_tolerances(self):
    model = cases.with_loss(lambda losses, _: tf.reduce_mean(losses) * (
        1.0 + 1e-3 * towers.current_tower().index))
    arguments = (model, cases.batch(), 2)
    self.assertFalse(verification.verify(*arguments, rows=[7]).equal)
    self.assertTrue(verification.verify(
        *arguments, rows=[7], tolerances={tf.float32: 1e-2}).equal)
    self.assertTrue(verification.verify(
        *arguments, rows=[7], tolerances={"float32": (1e-2, 0.0)}).equal)

  def test_batches_that_one_device_fails_on_are_noted(self):
    def model_fn(features, labels):
      x = cases.dense(features, "first")
      with tf.control_dependencies([tf.debugging.assert_greater(
          towers.all_reduce(tf.shape(x)[0]), 2, message="Too few.")]):
        return tf.reduce_mean(cases.squares(tf.identity(x), labels))

    report = verification.verify(model_fn, cases.batch(), 2, rows=[7, 2])
    self.assertTrue(report.equal, str(report))
    self.assertEqual(report.rows, (7,))
    self.assertRegex(report.notes[0], "Batches of 2 rows were not compared")

  def test_towers_that_cannot_be_built(self):
    def model_fn(features, labels):
      x = cases.dense(features, f"first_{towers.current_tower().index}")
      return tf.reduce_mean(cases.squares(x, labels))

    report = verification.verify(model_fn, cases.batch(), 2)
    self.assertEqual(report.causes[0].rule, "towers_differ")
    self.assertIn("first_1/kernel", str(report))

  def test_leaves_the_default_graph_alone(self):
    before = tf.get_default_graph()
    verification.verify(cases.SOUND["mean"], cases.batch(4), 2, rows=[4])
    self.assertIs(tf.get_default_graph(), before)
    self.assertEmpty(before.get_operations())

  @parameterized.named_parameters(
      ("one_tower", {"devices": 1}, "`devices` must be two or more.* got 1"),
      ("rows", {"rows": [8]}, "`rows` must be sizes.* 1 to 7, got 8"),
      ("no_rows", {"rows": []}, r"`rows` must hold at least one .* got \[\]"),
      ("values", {"values": {"last": 1.0}},
       "`values` must hold values.* got 'last' of shape"),
      ("shape_of_value", {"values": {"first/kernel": 1.0}},
       r"`values` .* got 'first/kernel' of shape \(\), expected shape"),
      ("scalar", {"inputs": (1.0, 2.0)}, "`inputs` must hold arrays whose"),
      ("lengths", {"inputs": (np.ones([2, 4]), np.ones([1, 3]))},
       r"`inputs` .* same number of rows.* got \[1, 2\]"),
      ("rows_without_inputs", {"inputs": None, "rows": [1]},
       r"`rows` must not be given without `inputs`: got \[1\]"),
      ("loss", {"losses": ["other"]}, "`loss` must name an output"),
      ("option", {"update_ops": "none"}, "`update_ops` must"),
  )
  def test_rejects(self, change, message):
    arguments = {"inputs": cases.batch(), "devices": 2, **change}
    with self.assertRaisesRegex(ValueError, message):
      verification.verify(cases.SOUND["dropout"], **arguments)

  def test_rejects_tensors(self):
    with self.assertRaisesRegex(TypeError, "`inputs` must hold arrays, not"):
      verification.verify(cases.SOUND["mean"], tf.zeros([3, 4]), 2)

  def test_rejects_a_model_that_fails_on_one_device(self):
    def model_fn(features, labels):
      x = tf.reshape(cases.dense(features, "first"), [5, 3])
      return tf.reduce_mean(cases.squares(x, labels))

    with self.assertRaisesRegex(
        ValueError, "`model_fn` must run on one device.* on 7 rows: .*5"):
      verification.verify(model_fn, cases.batch(), 2)

  def test_an_error_of_the_model_arrives_as_it_is(self):
    def model_fn(features, labels):
      raise ValueError("My own.")

    with self.assertRaisesRegex(ValueError, "My own."):
      verification.verify(model_fn, cases.batch(), 2)


if __name__ == "__main__":
  tf.test.main()
