"""Tests for towers.outputs."""

import collections

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers

Pair = collections.namedtuple("Pair", ["first", "second"])


def build(model, count=2, inputs=None):
  return towers.build_towers(model, testing.devices(count), inputs=inputs)


def by_tower(*values):
  """Returns a model that returns another of `values` in each tower."""

  def model(*_):
    value = values[towers.current_tower().index]
    return value() if callable(value) else value

  return model


def masked_loss(x, mask):
  """Mean of `weight * x` over what `mask` lets through, as TensorFlow's are."""
  weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
  valid = tf.reduce_sum(mask)
  total = tf.reduce_sum(weight * x * mask)
  return towers.TowerSpec(loss=tf.math.divide_no_nan(total, valid),
                          outputs={"ratio": total / valid, "valid": valid},
                          weight=valid)


class RowsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(count=(1, 2, 3, 4), known=(True, False))
  def test_stand_in_batch_order(self, count, known):
    fed = tf.placeholder(tf.float32, [None, 2])

    def model(x):
      return {"loss": tf.reduce_mean(x), "twice": [2.0 * x],
              "pair": Pair(x[:, 0], tf.as_string(x)), "positive": x > 3.0}

    batches = [np.arange(2.0 * rows, dtype="f").reshape(rows, 2)
               for rows in range(1, 2 * count + 2)]
    graphs = [build(model, count, tf.constant(b)) for b in batches] if (
        known) else [build(model, count, fed)] * len(batches)
    with testing.session() as sess:
      for graph, batch in zip(graphs, batches):
        loss, outputs = sess.run((graph.loss, graph.outputs),
                                 {} if known else {fed: batch})
        with self.subTest(rows=len(batch)):
          self.assertAllClose(loss, batch.mean())
          self.assertCountEqual(outputs, ["twice", "pair", "positive"])
          self.assertAllEqual(outputs["twice"][0], 2.0 * batch)
          self.assertAllEqual(outputs["pair"].first, batch[:, 0])
          self.assertAllEqual(outputs["pair"].second.astype(float), batch)
          self.assertAllEqual(outputs["positive"], batch > 3.0)

  def test_one_tower_can_be_fetched_alone(self):
    x = tf.placeholder(tf.float32, [None])
    graph = build(lambda x: {"loss": tf.reduce_mean(x), "y": x + 1.0}, 3, x)
    with testing.session() as sess:
      self.assertAllEqual(
          sess.run(graph.towers[1].outputs["y"], {x: np.arange(5.0)}),
          [3.0, 4.0])

  def test_names_and_devices(self):
    x = tf.placeholder(tf.float32, [None])
    graph = build(lambda x: {"loss": tf.reduce_mean(x), "y": x + 1.0}, 2, x)
    for tensor in (graph.loss, graph.outputs["y"]):
      self.assertStartsWith(tensor.name, "cross_tower/")
      self.assertEqual(tensor.device, "/device:CPU:0")
    self.assertStartsWith(graph.towers[1].outputs["y"].name, "tower_1/")

  def test_one_tower_adds_nothing(self):
    x = tf.ones([3])
    got = []

    def model(x):
      got.append({"loss": tf.reduce_mean(x), "n": tf.size(x)})
      return got[0]

    graph = build(model, 1, x)
    self.assertIs(graph.loss, got[0]["loss"])
    self.assertIs(graph.outputs["n"], got[0]["n"])
    self.assertIs(graph.towers[0].loss, graph.loss)


class ScalarsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(known=(True, False))
  def test_are_averaged_by_rows(self, known):
    """c005: 3 rows and 2 rows, not the mean of two means."""
    batch = np.arange(1.0, 6.0, dtype="f")
    fed = tf.placeholder(tf.float32, [None])

    def model(x):
      weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
      return {
          "loss": tf.reduce_mean(weight * x),
          "float": tf.reduce_mean(x),
          "double": tf.reduce_mean(tf.cast(x, tf.float64)),
          "half": tf.cast(tf.reduce_mean(x), tf.float16),
          "complex": tf.cast(tf.reduce_mean(x), tf.complex64),
          "int": tf.size(x),
          "long": tf.size(x, out_type=tf.int64) * 10**12,
          "bool": tf.size(x) > 2,
      }

    graph = build(model, 2, tf.constant(batch) if known else fed)
    gradient = graph.gradients()[0].gradient
    with testing.session(initialize=True) as sess:
      loss, outputs, gradient = sess.run((graph.loss, graph.outputs, gradient),
                                         {} if known else {fed: batch})
    self.assertAllClose((loss, gradient), (3.0, 3.0))
    for key in ("float", "double", "complex"):
      self.assertAllClose(outputs[key], 3.0, msg=key)
    self.assertAllClose(outputs["half"], 3.0, rtol=1e-3)
    self.assertAllClose(outputs["int"], 0.6 * 3 + 0.4 * 2)
    self.assertAllClose(outputs["long"], 2.6e12)
    self.assertAllClose(outputs["bool"], 0.6)
    self.assertEqual(
        {key: tensor.dtype for key, tensor in graph.outputs.items()},
        {"float": tf.float32, "double": tf.float64, "half": tf.float16,
         "complex": tf.complex64, "int": tf.float64, "long": tf.float64,
         "bool": tf.float64})

  @parameterized.named_parameters(
      ("valid_pixels", [[1, 0, 1], [1, 1, 1]]),
      ("none_in_one", [[0, 0, 0], [1, 0, 1]]),
      ("none_in_the_other", [[1, 0, 1], [0, 0, 0]]),
  )
  def test_are_averaged_by_the_weight_that_the_model_gives(self, mask):
    mask = np.array(mask, np.float32)
    x = np.arange(1.0, 7.0, dtype="f").reshape(2, 3)
    graph = build(masked_loss, 2, (tf.constant(x), tf.constant(mask)))
    pairs = graph.gradients()
    with testing.session(initialize=True) as sess:
      loss, outputs, gradient, weights = sess.run(
          (graph.loss, graph.outputs, pairs[0].gradient,
           [t.weight for t in graph.towers]))
    expected = (x * mask).sum() / mask.sum()
    self.assertAllEqual(weights, mask.sum(axis=1))
    self.assertAllClose((loss, gradient), (expected, expected))
    # A ratio over nothing is no number, and must not count.
    self.assertAllClose(outputs["ratio"], expected)
    self.assertAllClose(outputs["valid"], (mask.sum(1)**2).sum() / mask.sum())

  @parameterized.named_parameters(
      ("quotient", lambda x, m: tf.reduce_sum(x * m) / tf.reduce_sum(m)),
      ("quotients", lambda x, m: tf.reduce_sum(x * m / tf.reduce_sum(m))),
      ("with_decay", lambda x, m: 0.0 * tf.nn.l2_loss(
          tf.trainable_variables()[0]) + tf.reduce_sum(x * m) /
       tf.reduce_sum(m)),
      ("mean_of_kept", lambda x, m: tf.reduce_mean(tf.boolean_mask(x, m > 0))),
      ("average", lambda x, m: tf.losses.compute_weighted_loss(x, m)),
  )
  def test_gradient_of_a_mean_over_nothing_is_0(self, mean):
    """A tower without valid pixels makes no gradient NaN, as on one device."""
    x = np.arange(1.0, 7.0, dtype="f").reshape(2, 3)
    mask = np.array([[0, 0, 0], [1, 0, 1]], np.float32)

    def model(x, mask):
      weight = tf.get_variable("w", [], initializer=tf.ones_initializer())
      y = towers.batch_norm(x, training=True, epsilon=1e-9, scale=False)
      return towers.TowerSpec(mean(tf.square(weight) * (x + 0.0 * y), mask),
                              weight=tf.reduce_sum(mask))

    graph = build(model, 2, (tf.constant(x), tf.constant(mask)))
    gradients = {v.op.name: g for g, v in graph.gradients()}
    with testing.session(initialize=True) as sess:
      loss, gradient = sess.run((graph.loss, gradients["w"]))
    self.assertAllClose((loss, gradient), (5.0, 10.0))

  def test_weight_of_0_in_all_towers_gives_0(self):
    x, mask = tf.ones([4, 3]), tf.zeros([4, 3])
    graph = build(masked_loss, 2, (x, mask))
    gradient = graph.gradients()[0].gradient
    with testing.session(initialize=True) as sess:
      self.assertAllEqual(
          sess.run((graph.loss, gradient, graph.outputs["ratio"])), (0, 0, 0))

  def test_borrowed_row_has_no_weight(self):
    """c053: also where the model gives a weight."""
    x = tf.placeholder(tf.float32, [None, 3])
    graph = build(masked_loss, 3, (x, tf.ones_like(x)))
    with testing.session(initialize=True) as sess:
      loss, weights = sess.run((graph.loss, [t.weight for t in graph.towers]),
                               {x: [[1.0] * 3, [5.0] * 3]})
    self.assertAllClose(loss, 3.0)
    self.assertAllEqual(weights, [3.0, 3.0, 0.0])

  @parameterized.named_parameters(
      ("numbers", (1, 3.0)),
      ("numpy", (np.float32(1), np.int64(3))),
      ("constants", (lambda: tf.constant(1), lambda: tf.constant(3.0))),
      ("int_tensors", (lambda: tf.size(tf.ones([1])),
                       lambda: tf.size(tf.ones([3]), out_type=tf.int64))),
      ("mixed", (1, lambda: tf.reduce_sum(tf.ones([3])))),
      ("half_that_would_overflow", (
          lambda: tf.random_uniform([], 1e5, 1e5),
          lambda: tf.random_uniform([], 3e5, 3e5))),
  )
  def test_weights_of_any_type(self, weights):
    loss_type = tf.float16 if callable(weights[0]) else tf.float32

    def model():
      index = towers.current_tower().index
      weight = weights[index]
      return towers.TowerSpec(loss=tf.constant(8.0 * index, loss_type),
                              weight=weight() if callable(weight) else weight)

    graph = build(model)
    with testing.session() as sess:
      self.assertAllClose(sess.run(graph.loss), 6.0)
    self.assertEqual(graph.loss.dtype, loss_type)

  @parameterized.parameters(0, 0.0)
  def test_static_weight_of_0(self, weight):
    """What is not finite in a tower that does not count must not count."""

    def model():
      index = towers.current_tower().index
      return towers.TowerSpec(
          loss=tf.log(tf.constant(float(index))), outputs={
              "inverse": 1.0 / tf.constant(float(index))},
          weight=index and 2.0 or weight)

    graph = build(model)
    with testing.session() as sess:
      loss, inverse, own = sess.run(
          (graph.loss, graph.outputs["inverse"], graph.towers[0].loss))
    self.assertAllClose((loss, inverse, own), (0.0, 1.0, 0.0))

  def test_weight_that_is_a_variable(self):

    def model():
      weight = tf.get_variable("w", [], initializer=tf.ones_initializer())
      return towers.TowerSpec(float(towers.current_tower().index),
                              weight=weight)

    graph = build(model)
    with testing.session(initialize=True) as sess:
      self.assertAllClose(sess.run(graph.loss), 0.5)

  def test_without_inputs_towers_count_alike(self):
    graph = build(lambda: float(towers.current_tower().index), 4)
    self.assertEqual([t.weight for t in graph.towers], [1.0] * 4)
    with testing.session() as sess:
      self.assertAllClose(sess.run(graph.loss), 1.5)


class RejectedTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("nothing", lambda: None, ValueError,
       r"`model_fn` must return .*: got None, which holds no tensor .*tower 0"),
      ("empty_dict", dict, ValueError, "got {}, which holds no tensor"),
      ("empty_spec", towers.TowerSpec, ValueError, "which holds no tensor"),
      ("loss_none", lambda: {"loss": None}, ValueError, "holds no tensor"),
      ("tuple", lambda: (tf.ones([]), tf.ones([])), TypeError,
       r"`model_fn` must return a scalar loss, a dict .* got \(.*tower 0"),
      ("list", lambda: [tf.ones([])], TypeError, r"must return .* got \["),
      ("operation", tf.no_op, TypeError, "must return .* got <tf.Operation"),
      ("object", object, TypeError,
       "must return tensors: got <object .* as the loss .*tower 0"),
      ("function", lambda: len, TypeError, "must return tensors: got <built"),
      ("output_none", lambda: {"y": None, "z": 1.0}, TypeError,
       "must return tensors: got None as an output"),
      ("output_object", lambda: {"y": [object()]}, TypeError,
       "must return tensors: got <object .* as an output"),
      ("sparse", lambda: {"y": tf.SparseTensor([[0]], [1.0], [2])}, TypeError,
       "must return tensors: got SparseTensor.* as an output"),
      ("loss_vector", lambda: tf.ones([3]), ValueError,
       r"`loss` of `model_fn` must be a scalar of a floating type.* float32 "
       r"and shape \(3,\) \(tower 0\).*tf.reduce_mean"),
      ("loss_integer", lambda: tf.constant(1), ValueError,
       "`loss` of `model_fn` must be .* type int32"),
      ("loss_bool", lambda: {"loss": tf.constant(True)}, ValueError,
       "`loss` of `model_fn` must be .* type bool"),
      ("loss_complex", lambda: tf.constant(1j), ValueError,
       "`loss` of `model_fn` must be .* type complex128"),
      ("loss_string", lambda: tf.constant("low"), ValueError,
       "`loss` of `model_fn` must be .* type string"),
      ("unknown_rank", lambda: {"y": tf.placeholder(tf.float32)}, ValueError,
       "`outputs` of `model_fn` must have a known rank.*`tower_0/.*set_shape"),
      ("string_scalar", lambda: {"y": tf.constant("name")}, ValueError,
       "`outputs` of `model_fn` must be .* got the string `tower_0/Const"),
      ("weight_vector", lambda: towers.TowerSpec(1.0, weight=tf.ones([2])),
       ValueError, "`weight` of `towers.TowerSpec` must be a scalar number"),
      ("weight_bool", lambda: towers.TowerSpec(1.0, weight=True), ValueError,
       r"must be a scalar number: got True \(tower 0\)"),
      ("weight_bool_array", lambda: towers.TowerSpec(1.0, weight=np.True_),
       ValueError, "must be a scalar number: got .*True"),
      ("weight_text", lambda: towers.TowerSpec(1.0, weight="2"), ValueError,
       "`weight` of `towers.TowerSpec` must be a scalar number: got '2'"),
      ("weight_negative", lambda: towers.TowerSpec(1.0, weight=-1), ValueError,
       r"must not be negative: got -1 \(tower 0\)"),
      ("weight_negative_constant",
       lambda: towers.TowerSpec(1.0, weight=tf.constant(-1.0)), ValueError,
       "must not be negative: got -1.0"),
      ("weight_bool_tensor", lambda: towers.TowerSpec(
          1.0, weight=tf.placeholder(tf.bool, [])), ValueError,
       "must be a scalar number: got `tower_0/.* of type bool"),
      ("weight_bool_constant", lambda: towers.TowerSpec(
          1.0, weight=tf.constant(True)), ValueError,
       "must be a scalar number: got .*bool"),
      ("weight_unknown_vector", lambda: towers.TowerSpec(
          1.0, weight=tf.placeholder(tf.float32, [None])), ValueError,
       r"must be a scalar number: got `tower_0/.* shape \(\?,\)|\(None,\)"),
  )
  def test_returned(self, model, error, message):
    for count in (1, 2):
      with tf.Graph().as_default(), self.assertRaisesRegex(error, message):
        build(model, count)

  @parameterized.named_parameters(
      ("loss", lambda: {"loss": 1.0, "y": 1.0}, lambda: {"y": 1.0},
       "tower 0 returned a loss, tower 1 none"),
      ("no_loss", lambda: {"y": 1.0}, lambda: {"loss": 1.0, "y": 1.0},
       "tower 1 returned a loss, tower 0 none"),
      ("outputs", lambda: 1.0, lambda: {"loss": 1.0, "y": 2.0},
       "the outputs of tower 1 differ"),
      ("keys", lambda: {"x": 1.0}, lambda: {"y": 1.0},
       "the outputs of tower 1 differ"),
      ("length", lambda: {"x": [1.0]}, lambda: {"x": [1.0, 1.0]},
       "the outputs of tower 1 differ"),
      ("type", lambda: {"x": 1.0}, lambda: {"x": 1},
       "got `.*` float32 of shape .* in tower 0, `.*` int32 .* in tower 1"),
      ("loss_type", lambda: 1.0, lambda: tf.constant(1.0, tf.float64),
       "float32 .* in tower 0, .* float64 .* in tower 1"),
      ("rank", lambda: {"x": tf.ones([2])}, lambda: {"x": tf.ones([2, 1])},
       r"of shape \(2,\) in tower 0, `.*` float32 of shape \(2, 1\) in tower 1"
      ),
      ("shape", lambda: {"x": tf.ones([2, 3])}, lambda: {"x": tf.ones([2, 4])},
       r"of shape \(2, 3\) in tower 0, `.*` float32 of shape \(2, 4\) in tower"
      ),
  )
  def test_structures_that_differ(self, first, second, message):
    with self.assertRaisesRegex(
        ValueError, f"`model_fn` must return .* in each tower.*{message}"):
      build(by_tower(first, second))

  def test_error_names_the_tower(self):
    with self.assertRaisesRegex(ValueError, r"which holds no tensor \(tower 2"):
      build(by_tower(1.0, 1.0, None), 3)


if __name__ == "__main__":
  tf.test.main()
