"""Tests for towers.metrics."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

CLASSES = 3
# 10 rows in batches of 4: the last has 2, fewer than some numbers of towers.
SIZES = (4, 4, 2)
ROWS = sum(SIZES)


def dataset(rows=ROWS):
  rng = np.random.RandomState(0)
  return {"labels": rng.randint(CLASSES, size=rows),
          "scores": rng.uniform(size=[rows, CLASSES]).astype("f"),
          "weights": rng.randint(3, size=rows).astype("f")}


def batches(data):
  first = 0
  for size in SIZES:
    yield {key: value[first:first + size] for key, value in data.items()}
    first += size


def all_metrics(labels, scores, weights):
  """Calls each function of `tf.metrics` that takes rows."""
  m = tf.metrics
  guess = tf.argmax(scores, axis=1)
  yes, chance = tf.equal(labels, 1), scores[:, 1]
  column = lambda x: tf.expand_dims(x, 1)
  found = {
      "accuracy": m.accuracy(labels, guess),
      "accuracy_weighted": m.accuracy(labels, guess, weights),
      "auc": m.auc(yes, chance, num_thresholds=20),
      "iou": m.mean_iou(labels, guess, CLASSES, weights=weights),
      "per_class": m.mean_per_class_accuracy(labels, guess, CLASSES),
      "loss": m.mean(-tf.log(scores)),
      "loss_weighted": m.mean(scores, column(weights)),
      "absolute": m.mean_absolute_error(scores, tf.square(scores)),
      "squared": m.mean_squared_error(scores, tf.square(scores),
                                      weights=column(weights)),
      "root": m.root_mean_squared_error(scores, tf.square(scores)),
      "relative": m.mean_relative_error(scores, tf.square(scores), scores),
      "cosine": m.mean_cosine_distance(scores, tf.square(scores), 1),
      "below": m.percentage_below(chance, 0.5),
      "precision": m.precision(yes, chance > 0.5, name="named"),
      "recall": m.recall(yes, chance > 0.5, weights),
      "precisions": m.precision_at_thresholds(yes, chance, [0.2, 0.6]),
      "recalls": m.recall_at_thresholds(yes, chance, [0.2, 0.6]),
      "sensitivity": m.sensitivity_at_specificity(yes, chance, 0.5),
      "specificity": m.specificity_at_sensitivity(yes, chance, 0.5),
      "precision_at_2": m.precision_at_k(labels, scores, 2),
      "recall_at_2": m.recall_at_k(column(labels), scores, 2, weights=weights),
      "top_1": m.precision_at_top_k(
          column(labels), tf.nn.top_k(scores, 1).indices, k=1),
      "average_at_2": m.average_precision_at_k(column(labels), scores, 2),
  }
  for name in ("true_positives", "false_positives", "true_negatives",
               "false_negatives"):
    found[name] = getattr(m, name)(yes, chance > 0.5)
    found[name + "_at"] = getattr(m, name + "_at_thresholds")(
        yes, chance, [0.3, 0.7])
  return found


def placeholders(data):
  return {key: tf.placeholder(value.dtype, [None, *value.shape[1:]])
          for key, value in data.items()}


class Evaluation:
  """A model's metrics over the test set, in some number of towers.

  With `None` towers, it is plain code on one device.
  """

  def __init__(self, make_metrics, num_towers, data, **options):
    self.data = data
    self.graph = tf.Graph()
    with self.graph.as_default():
      self.inputs = placeholders(data)

      def model(inputs):
        found = make_metrics(**inputs)
        return {"value": {k: v for k, (v, _) in found.items()},
                "update": {k: u for k, (_, u) in found.items()}}

      if num_towers is None:
        with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
          outputs = model(self.inputs)
      else:
        self.towers = towers.build_towers(
            model, testing.devices(num_towers), inputs=self.inputs, **options)
        outputs = self.towers.outputs
      self.value, self.update = outputs["value"], outputs["update"]
      self.variables = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
      self.reset = tf.variables_initializer(self.variables)

  def run(self, fetch=None, times=1):
    """Returns the last update's values, and the values at the end."""
    fetch = self.update if fetch is None else fetch
    with testing.session(self.graph) as sess:
      for _ in range(times):
        sess.run(self.reset)
        for batch in batches(self.data):
          last = sess.run(fetch, {
              self.inputs[key]: batch[key] for key in batch})
      # Values need no data.
      return last, sess.run(self.value)

  def names(self):
    return [v.op.name for v in self.variables]


class AllMetricsTest(parameterized.TestCase, tf.test.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.expected = Evaluation(all_metrics, None, dataset())
    cls.updates, cls.values = cls.expected.run()

  @parameterized.parameters(1, 3)
  def test_equal_one_device(self, num_towers):
    """All functions, on uneven batches and one of fewer rows than towers."""
    actual = Evaluation(all_metrics, num_towers, dataset())
    updates, values = actual.run(times=2)  # The reset leaves nothing.
    self.assertAllClose(values, self.values, 1e-6, 1e-6)
    self.assertAllClose(updates, self.updates, 1e-6, 1e-6)
    self.assertEqual(actual.names(), self.expected.names())
    self.assertEqual(values["true_positives"] + values["false_positives"] +
                     values["true_negatives"] + values["false_negatives"], 10)

  def test_no_function_is_forgotten(self):
    known = {name for name in dir(tf.metrics) if not name.startswith("_")}
    source = open(__file__, encoding="utf-8").read()
    self.assertEmpty({
        name for name in known if f"m.{name}(" not in source and not
        name.startswith(("true_", "false_", "sparse_")) and
        name not in ("mean_tensor", "recall_at_top_k")})


def accuracy_and_counts(labels, scores, weights):
  del weights
  guess = tf.argmax(scores, axis=1)
  yes, guessed = tf.equal(labels, 1), tf.equal(guess, 1)
  return {
      "accuracy": tf.metrics.accuracy(labels, guess),
      "tp": tf.metrics.true_positives(yes, guessed),
      "fp": tf.metrics.false_positives(yes, guessed),
      "tn": tf.metrics.true_negatives(yes, guessed),
      "fn": tf.metrics.false_negatives(yes, guessed),
  }


def numpy_results(data):
  guess = data["scores"].argmax(axis=1)
  yes, guessed = data["labels"] == 1, guess == 1
  return {
      "accuracy": np.float32(np.mean(guess == data["labels"])),
      "tp": np.sum(yes & guessed), "fp": np.sum(~yes & guessed),
      "tn": np.sum(~yes & ~guessed), "fn": np.sum(yes & ~guessed)}


class StreamingTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters((1, "shared"), (2, "shared"), (3, "replicated"),
                            (4, "shared"))
  def test_c047_each_row_counts_once_in_any_number_of_towers(
      self, num_towers, variables):
    """10 rows in batches of 4, 4 and 2; to the bit, and as in NumPy."""
    evaluation = Evaluation(accuracy_and_counts, num_towers, dataset(),
                            variables=variables)
    _, values = evaluation.run()
    self.assertEqual(values, numpy_results(dataset()))
    self.assertLen(evaluation.variables, 6)  # One set.

  @parameterized.parameters(0, 2)
  def test_whose_update_is_run_does_not_matter(self, tower):
    """c047's neighbour: fetching one tower's op counted its rows alone."""
    evaluation = Evaluation(accuracy_and_counts, 3, dataset())
    own = evaluation.towers.towers[tower].outputs["update"]
    _, values = evaluation.run(own)
    self.assertEqual(values, numpy_results(dataset()))

  def test_all_towers_updates_in_one_run_count_once(self):
    evaluation = Evaluation(accuracy_and_counts, 3, dataset())
    _, values = evaluation.run(
        [tower.outputs["update"] for tower in evaluation.towers.towers])
    self.assertEqual(values, numpy_results(dataset()))

  @parameterized.parameters(1, 3)
  def test_a_value_does_not_wait_for_an_update(self, num_towers):
    evaluation = Evaluation(accuracy_and_counts, num_towers, dataset())
    with testing.session(evaluation.graph) as sess:
      sess.run(evaluation.reset)
      batch = next(batches(evaluation.data))
      feed = {evaluation.inputs[key]: batch[key] for key in batch}
      self.assertEqual(sess.run(evaluation.value["tn"], feed), 0)
      sess.run(evaluation.update["tn"], feed)
      before = sess.run(evaluation.value["tn"])
      self.assertGreater(before, 0)
      self.assertEqual(sess.run(evaluation.value["tn"], feed), before)

  @parameterized.parameters(2, 3, 5)
  def test_c082_towers_without_rows_do_not_count(self, num_towers):
    """One row in all; the others compute on it, too."""
    data = {key: value[:1] for key, value in dataset().items()}
    evaluation = Evaluation(accuracy_and_counts, num_towers, data)
    with testing.session(evaluation.graph) as sess:
      sess.run(evaluation.reset)
      sess.run(evaluation.update, {
          evaluation.inputs[key]: data[key] for key in data})
      self.assertEqual(sess.run(evaluation.value), numpy_results(data))

  @parameterized.parameters(None, 1, 3)
  def test_collections_and_names(self, num_towers):

    def make(labels, scores, weights):
      del weights
      return {k: tf.metrics.accuracy(
          labels, tf.argmax(scores, 1), metrics_collections="values",
          updates_collections=tf.GraphKeys.UPDATE_OPS) for k in "ab"}

    evaluation = Evaluation(make, num_towers, dataset())
    self.assertEqual(evaluation.names(), [
        "accuracy/total", "accuracy/count", "accuracy_1/total",
        "accuracy_1/count"])
    with evaluation.graph.as_default():
      self.assertLen(tf.get_collection("values"), 2)
      self.assertLen(tf.get_collection(tf.GraphKeys.UPDATE_OPS), 2)
      self.assertEqual([v.op.name for v in tf.local_variables()],
                       evaluation.names())
      self.assertEmpty(tf.global_variables())
    ops = list(evaluation.update.values()) if num_towers is None else list(
        evaluation.towers.update_ops)
    _, values = evaluation.run(ops)
    self.assertEqual(values["a"], numpy_results(dataset())["accuracy"])

  def test_variables_live_on_the_parameter_device(self):
    evaluation = Evaluation(accuracy_and_counts, 2, dataset(),
                            parameter_device="/cpu:4")
    self.assertEqual({v.device for v in evaluation.variables},
                     {"/device:CPU:4"})

  @parameterized.parameters(None, 1, 3)
  def test_outside_of_the_model(self, num_towers):
    """The documented other way: `tf.metrics` of `graph.outputs`."""
    data = dataset()
    inputs = placeholders(data)
    model = lambda labels, scores, weights: {"guess": tf.argmax(scores, 1)}
    if num_towers is None:
      outputs = model(**inputs)
    else:
      outputs = towers.build_towers(
          lambda inputs: model(**inputs), testing.devices(num_towers),
          inputs=inputs).outputs
    value, update = tf.metrics.accuracy(inputs["labels"], outputs["guess"])
    with testing.session() as sess:
      sess.run(tf.local_variables_initializer())
      for batch in batches(data):
        sess.run(update, {inputs[key]: batch[key] for key in batch})
      self.assertEqual(sess.run(value), numpy_results(data)["accuracy"])

  @parameterized.parameters(1, 3)
  def test_functions_from_elsewhere(self, num_towers):

    def hits(weights, *, labels, guess, names):
      """Makes one variable, and nests of results."""
      count = tf.get_local_variable("hits", [], tf.float32,
                                    initializer=tf.zeros_initializer())
      new = tf.reduce_sum(tf.cast(tf.equal(labels, guess), tf.float32) *
                          weights)
      return {"names": names, "value": count.read_value()}, tf.group(
          count.assign_add(new))

    made = []

    def model(inputs):
      value, update = towers.metrics.streaming(
          hits, inputs["weights"], labels=inputs["labels"],
          guess=tf.argmax(inputs["scores"], 1), names=tf.constant(["n", "m"]))
      made.append(update)
      return value

    data = dataset()
    inputs = placeholders(data)
    graph = towers.build_towers(
        model, testing.devices(num_towers), inputs=inputs)
    self.assertEqual([v.op.name for v in tf.local_variables()], ["hits"])
    with testing.session() as sess:
      sess.run(tf.local_variables_initializer())
      for batch in batches(data):
        sess.run(made[-1], {inputs[key]: batch[key] for key in batch})
      right = data["scores"].argmax(axis=1) == data["labels"]
      self.assertAllClose(sess.run(graph.outputs["value"]),
                          np.sum(right * data["weights"]))
      if num_towers == 1:
        self.assertAllEqual(sess.run(graph.outputs["names"]), [b"n", b"m"])

  def test_nothing_stays_behind(self):
    before = {name: getattr(tf.metrics, name) for name in dir(tf.metrics)}
    Evaluation(accuracy_and_counts, 2, dataset())
    self.assertEqual(
        before, {name: getattr(tf.metrics, name) for name in dir(tf.metrics)})


class RefusedTest(parameterized.TestCase, tf.test.TestCase):

  def build(self, model, count=2, x=None):
    x = tf.placeholder(tf.float32, [None, 3]) if x is None else x
    return towers.build_towers(model, testing.devices(count), inputs=x)

  def test_metric_variables_by_another_way(self):

    def model(x):
      tf.get_variable("total", [], collections=[
          tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES])
      return tf.reduce_mean(x)

    with self.assertRaisesRegex(
        ValueError, r"A metric in `model_fn` must count the rows of all towers:"
        r" got the variable `.*total`, .* \(tower 0\). Call `tf.metrics"):
      self.build(model)
    tf.reset_default_graph()
    self.build(model, count=1)

  def test_a_function_that_was_taken_before(self):
    accuracy = tf.metrics.accuracy

    def model(x):
      return {"update": accuracy(x[:, 0], x[:, 1])[1]}

    with self.assertRaisesRegex(
        ValueError, "`accuracy/total`.*`towers.metrics.streaming`"):
      self.build(model)

    def right(x):
      return {"update": towers.metrics.streaming(
          accuracy, x[:, 0], predictions=x[:, 1])[1]}

    tf.reset_default_graph()
    self.assertEqual(self.build(right).outputs["update"].shape.rank, 0)

  def test_a_metric_of_keras(self):
    """Its updates count the rows of one tower each, and run for one."""
    keras = tf.keras

    def model(x):
      metric = keras.metrics.Mean()
      metric.update_state(x)
      return tf.reduce_mean(x)

    with self.assertRaisesRegex(ValueError, "must count the rows of all"):
      self.build(model)

  @parameterized.named_parameters(
      ("cond", lambda f, x: tf.cond(x[0, 0] > 0, lambda: f(x), lambda: 0.0),
       "in a `tf.cond`"),
      ("loop", lambda f, x: tf.while_loop(
          lambda k: k < 1.0, lambda k: k + f(x), [0.0]), "in .*while"))
  def test_control_flow(self, inside, where):

    def model(x):
      result = inside(lambda x: tf.metrics.mean(x)[1], x)
      return {"value": result}

    with self.assertRaisesRegex(
        ValueError, "`tf.metrics.mean` must not stand inside control "
        f"flow in a tower: got a call {where}"):
      self.build(model)

  def test_a_mean_by_rows_of_a_loss_by_pixels(self):

    def model(x, weights=None):
      loss = tf.reduce_mean(x)
      value, update = tf.metrics.mean(loss, weights)
      return towers.TowerSpec(loss, {"value": value, "update": update},
                              weight=tf.reduce_sum(x))

    with self.assertRaisesRegex(
        ValueError, r"`values` of `mean` must have rows, or "
        r"`weights`, .*\(tower 0\). Pass the weight"):
      self.build(model)
    tf.reset_default_graph()
    self.build(lambda x: model(x, weights=tf.reduce_sum(x)))

  def test_arguments_that_it_does_not_take(self):
    with self.assertRaisesRegex(TypeError, "label"):
      self.build(lambda x: {"value": tf.metrics.mean(x, label=1)[0]})

  @parameterized.parameters(1, 2)
  def test_what_the_metric_itself_raises(self, count):
    with self.assertRaisesRegex(ValueError, "Curve must be either ROC or PR"):
      self.build(lambda x: {"v": tf.metrics.auc(x > 0, x, curve="X")[0]}, count)


if __name__ == "__main__":
  tf.test.main()
