"""Tests of evaluation and prediction in towers: outputs only, nothing moves."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import references
import testing
import towers


def images(rows):
  return np.random.RandomState(rows).normal(
      size=[rows, 6, 6, 3]).astype("f")


def network(x, training):
  kernel = tf.get_variable("kernel", [3, 3, 3, 8])
  x = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
  x = tf.nn.relu(towers.batch_norm(x, training=training, name="bn"))
  weights = tf.get_variable("weights", [8, 5])
  return tf.matmul(tf.reduce_mean(x, axis=[1, 2]), weights)


def predict(x):
  """What evaluation needs: no loss, and outputs of several kinds."""
  logits = network(x, training=False)
  return {"logits": logits, "classes": tf.argmax(logits, axis=1),
          "names": tf.as_string(tf.reduce_sum(x, axis=[1, 2, 3])),
          "pair": (x[:, 0, 0, 0], tf.nn.softmax(logits))}


class Prediction:
  """A graph that predicts; `None` towers for plain code on one device."""

  def __init__(self, num_towers, **options):
    self.graph = tf.Graph()
    with self.graph.as_default():
      self.x = tf.placeholder(tf.float32, [None, 6, 6, 3])
      self.towers = None
      if num_towers is None:
        with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
          self.outputs = predict(self.x)
      else:
        self.towers = towers.build_towers(
            predict, testing.devices(num_towers), inputs=self.x, **options)
        self.outputs = self.towers.outputs

  def session(self):
    return testing.session(self.graph, intra_op_parallelism_threads=1)

  def run(self, batches, outputs=None):
    """Returns the outputs for each batch."""
    with self.session() as sess:
      references.initialize(sess)
      sess.run(tf.local_variables_initializer())
      return [sess.run(self.outputs if outputs is None else outputs,
                       {self.x: batch}) for batch in batches]


class PredictionTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(num_towers=(1, 2, 3, 4),
                         variables=("shared", "replicated"))
  def test_equals_one_device_for_any_number_of_rows(self, num_towers,
                                                    variables):
    """In order; c082: also with fewer rows than towers, by the same code."""
    batches = [images(rows) for rows in (1, 2, 3, 4, 5, 7, 8)]
    expected = Prediction(None).run(batches)
    actual = Prediction(num_towers, variables=variables).run(batches)
    for batch, one, many in zip(batches, expected, actual):
      with self.subTest(rows=len(batch)):
        self.assertLen(many["classes"], len(batch))
        self.assertAllClose(many["logits"], one["logits"], 1e-5, 1e-6)
        self.assertAllEqual(many["classes"], one["classes"])
        self.assertAllEqual(many["pair"][0], batch[:, 0, 0, 0])
        self.assertAllClose(many["pair"][1], one["pair"][1], 1e-5, 1e-6)
        self.assertAllClose(many["names"].astype(float), batch.sum((1, 2, 3)),
                            1e-4, 1e-4)

  @parameterized.product(num_towers=(1, 2, 3, 4), rows=(1, 3))
  def test_equals_one_device_bit_for_bit_at_equal_shard_sizes(
      self, num_towers, rows):
    """Kernels may round otherwise for another number of rows, not else."""
    batch = images(num_towers * rows)
    shards = np.split(batch, num_towers)
    one = Prediction(None)
    expected = np.concatenate(one.run(shards, one.outputs["logits"]))
    many = Prediction(num_towers)
    actual, = many.run([batch], many.outputs["logits"])
    self.assertEqual(actual.tobytes(), expected.tobytes())

  @parameterized.parameters(1, 2, 3)
  def test_batch_norm_is_frozen(self, num_towers):
    prediction = Prediction(num_towers)
    self.assertIsNone(prediction.towers.loss)
    self.assertEmpty(prediction.towers.update_ops)
    self.assertEmpty(prediction.towers.synced_layers)
    with prediction.session() as sess:
      references.initialize(sess)
      before = sess.run(tf.global_variables())
      sess.run([prediction.outputs, *prediction.towers.update_ops],
               {prediction.x: images(4)})
      for a, b in zip(before, sess.run(tf.global_variables())):
        self.assertAllEqual(a, b)

  def test_no_rows_at_all(self):
    prediction = Prediction(2)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "`inputs`"):
      prediction.run([images(1)[:0]])

  def test_what_all_towers_share_is_an_output_once(self):
    """One device has it once, too; also where it has an axis for no rows."""
    names = tf.constant(["cat", "dog", "owl"])

    def model(x):
      return {"names": names, "all": towers.all_gather(x),
              "mean": towers.all_reduce(tf.reduce_mean(x, axis=0), "mean"),
              "scalar": towers.all_reduce(tf.reduce_mean(x), "mean")}

    x = tf.placeholder(tf.float32, [None, 2])
    batch = np.arange(10.0).reshape(5, 2)
    for num_towers in (1, 2, 3):
      graph = towers.build_towers(model, testing.devices(num_towers), inputs=x)
      with testing.session() as sess:
        outputs = sess.run(graph.outputs, {x: batch})
      self.assertAllEqual(outputs["names"], [b"cat", b"dog", b"owl"])
      self.assertAllEqual(outputs["all"], batch)
      self.assertAllClose(outputs["mean"], batch.mean(axis=0))
      self.assertAllClose(outputs["scalar"], batch.mean())


class BesideTrainingTest(parameterized.TestCase, tf.test.TestCase):

  def build(self, num_towers, evaluation_towers):
    x = tf.placeholder(tf.float32, [None, 6, 6, 3])
    labels = tf.placeholder(tf.int32, [None])

    def train(x, labels):
      return tf.losses.sparse_softmax_cross_entropy(
          labels, network(x, training=True))

    def evaluate(x, labels):
      classes = tf.argmax(network(x, training=False), axis=1)
      accuracy, update = tf.metrics.accuracy(labels, classes)
      return {"classes": classes, "accuracy": accuracy, "update": update}

    training = towers.build_towers(
        train, testing.devices(num_towers), inputs=(x, labels))
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      evaluation = towers.build_towers(
          evaluate, testing.devices(evaluation_towers), inputs=(x, labels),
          name="test")
    train_op = training.minimize(tf.train.GradientDescentOptimizer(0.1))
    return x, labels, train_op, evaluation

  @parameterized.parameters(1, 2, 3, 4)
  def test_c013_reads_the_statistics_of_all_towers(self, evaluation_towers):
    """Trained on sorted data in two towers; evaluated in any number of them.

    The accuracy over 11 rows is that of NumPy with the moving statistics of
    the whole batches, which evaluation leaves as they are.
    """
    x, labels, train_op, evaluation = self.build(2, evaluation_towers)
    reset = tf.variables_initializer(
        tf.get_collection(tf.GraphKeys.METRIC_VARIABLES))
    data = np.concatenate([images(6), 4.0 + images(5)])
    answers = np.arange(11) % 5
    with testing.session() as sess:
      tf.set_random_seed(1)
      sess.run(tf.global_variables_initializer())
      for _ in range(3):
        sess.run(train_op, {x: data, labels: answers})
      variables = {v.op.name: v for v in tf.global_variables()}
      before = sess.run(variables)
      for _ in range(2):
        sess.run(reset)
        classes = []
        for rows in (slice(0, 4), slice(4, 8), slice(8, 11)):
          outputs = sess.run(
              {k: evaluation.outputs[k] for k in ("classes", "update")},
              {x: data[rows], labels: answers[rows]})
          classes.extend(outputs["classes"])
        accuracy = sess.run(evaluation.outputs["accuracy"])
      after = sess.run(variables)
    for name, value in before.items():
      self.assertAllEqual(after[name], value)
    self.assertAllEqual(classes, self.oracle(data, before))
    self.assertEqual(accuracy, np.float32(np.mean(classes == answers)))

  def oracle(self, data, values):
    """Returns the classes of the network, from NumPy, in float64."""
    padded = np.pad(data.astype(np.float64), [(0, 0), (1, 1), (1, 1), (0, 0)])
    y = sum(padded[:, i:i + 6, j:j + 6] @ values["kernel"][i, j]
            for i in range(3) for j in range(3))
    y = (y - values["bn/moving_mean"]) / np.sqrt(
        values["bn/moving_variance"] + 1e-3)
    y = np.maximum(y * values["bn/gamma"] + values["bn/beta"], 0)
    return (y.mean(axis=(1, 2)) @ values["weights"]).argmax(axis=1)


if __name__ == "__main__":
  tf.test.main()
