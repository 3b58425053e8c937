"""Tests for towers.inputs."""

import collections

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import inputs

Pair = collections.namedtuple("Pair", ["first", "second"])

DTYPES = (tf.bool, tf.string, tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32,
          tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64,
          tf.complex64, tf.complex128)


def expected_sizes(rows, count):
  """Returns how many of `rows` rows each of `count` towers gets."""
  return [rows // count + (t < rows % count) for t in range(count)]


def values_of(dtype, rows):
  """Returns an array of shape `[rows, 2]`, rows of which differ."""
  numbers = np.arange(2 * rows).reshape(rows, 2)
  if dtype == tf.string:
    return np.array([str(x).encode() for x in numbers.flat],
                    object).reshape(rows, 2)
  if dtype == tf.bool:
    return numbers % 3 == 0
  return numbers.astype(dtype.as_numpy_dtype)


def regression(x):
  """A model with a variable, statistics and an update in each step."""
  weight = tf.get_variable("weight", [], initializer=tf.ones_initializer())
  decayed = tf.get_variable("decayed", [], initializer=tf.ones_initializer())
  steps = tf.get_variable("steps", [], tf.int32, trainable=False,
                          initializer=tf.zeros_initializer())
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, steps.assign_add(1))
  y = towers.batch_norm(x * weight, training=True, momentum=0.0)
  return {
      "loss": tf.reduce_mean(x * weight) + tf.nn.l2_loss(decayed),
      "mean": tf.reduce_mean(x),
      "y": y,
      "x": x
  }


class DealTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(count=(1, 2, 3, 4), known=(True, False))
  def test_deals_out_any_batch(self, count, known):
    """c082: the code of the model does not change for short batches."""
    batches = [np.arange(rows) for rows in range(1, 2 * count + 2)]
    fed = tf.placeholder(tf.int64, [None])
    sources = [tf.constant(b) for b in batches] if known else [fed]
    shards = [inputs.deal(source, count) for source in sources]
    with testing.session() as sess:
      for k, batch in enumerate(batches):
        own = shards[k] if known else shards[0]
        values, rows = sess.run(([s.value for s in own],
                                 [tf.convert_to_tensor(s.rows) for s in own]),
                                {fed: batch})
        sizes = expected_sizes(len(batch), count)
        with self.subTest(rows=len(batch)):
          self.assertAllEqual(rows, sizes)
          kept = [v[:size] for v, size in zip(values, sizes)]
          self.assertAllEqual(np.concatenate(kept), batch)
          # A tower without rows borrows one that is there.
          self.assertAllEqual([len(v) for v in values],
                              [max(size, 1) for size in sizes])
          self.assertTrue(np.isin(np.concatenate(values), batch).all())

  def test_known_rows_are_numbers_and_shapes_static(self):
    shards = inputs.deal({"x": tf.zeros([5, 2])}, 3)
    self.assertEqual([s.rows for s in shards], [2, 2, 1])
    self.assertEqual([s.value["x"].shape.as_list() for s in shards],
                     [[2, 2], [2, 2], [1, 2]])
    self.assertEqual(inputs.weights(shards), [2.0, 2.0, 1.0])
    self.assertTrue(all(isinstance(w, float) for w in inputs.weights(shards)))

  def test_unknown_rows_keep_the_other_axes_static(self):
    x = tf.placeholder(tf.float32, [None, 3, None, 2])
    for count in (1, 3):
      for shard in inputs.deal(x, count):
        self.assertEqual(shard.value.shape.as_list(), [None, 3, None, 2])

  def test_unknown_rank(self):
    shards = inputs.deal(tf.placeholder(tf.float32, name="any"), 2)
    with testing.session() as sess:
      first, second = sess.run([s.value for s in shards],
                               {"any:0": np.ones([3, 1, 4])})
    self.assertEqual((first.shape, second.shape), ((2, 1, 4), (1, 1, 4)))

  @parameterized.parameters((1, True, 2), (1, False, 2), (3, True, 5),
                            (3, False, 5), (3, False, 2))
  def test_all_types_and_structures(self, count, known, rows):
    arrays = {t.name: values_of(t, rows) for t in DTYPES}
    feed = {}

    def tensor(array, dtype):
      if known:
        return tf.constant(array, dtype)
      placeholder = tf.placeholder(dtype, [None, 2])
      feed[placeholder] = array
      return placeholder

    tensors = {t.name: tensor(arrays[t.name], t) for t in DTYPES}
    nest = (tensors, [Pair(tensors["bool"], (tensors["string"],))])
    got = []

    def model(by_name, rest):
      self.assertIsInstance(rest[0], Pair)
      got.append((rest[0].first.dtype, rest[0].second[0].dtype))
      return towers.TowerSpec(outputs={"all": by_name, "rest": rest})

    graph = towers.build_towers(model, testing.devices(count), inputs=nest)
    self.assertEqual(got, [(tf.bool, tf.string)] * count)
    with testing.session() as sess:
      outputs = sess.run(graph.outputs, feed)
    self.assertCountEqual(outputs["all"], arrays)
    for name, array in arrays.items():
      self.assertAllEqual(outputs["all"][name], array, msg=name)
    self.assertAllEqual(outputs["rest"][0].second[0], arrays["string"])

  @parameterized.named_parameters(
      ("tuple", lambda x, y: (x, y), "xy"),
      ("list", lambda x, y: [x, y], "xy"),
      ("dict", lambda x, y: {"x": x, "y": y}, "d"),
      ("tensor", lambda x, y: x, "x"),
      ("array", lambda x, y: np.ones([4, 2]), "x"),
      ("named_tuple", Pair, "xy"),
  )
  def test_how_the_model_is_called(self, make, expected):
    calls = []

    def model(*arguments):
      calls.append(arguments)
      return tf.reduce_mean(tf.nest.flatten(arguments)[0])

    nest = make(tf.ones([4, 2]), tf.zeros([4]))
    towers.build_towers(model, testing.devices(2), inputs=nest)
    for arguments in calls:
      self.assertLen(arguments, len(expected))
      self.assertEqual(isinstance(arguments[0], dict), expected == "d")

  def test_slices_are_made_where_the_batch_is(self):
    with tf.device("/cpu:4"):
      x = tf.placeholder(tf.float32, [None, 2])
    inputs.deal(x, 2)
    slices = [op.device for op in tf.get_default_graph().get_operations()
              if op.type == "StridedSlice" and op.inputs[0] is x]
    self.assertEqual(slices, ["/device:CPU:4"] * 2)

  @parameterized.named_parameters(
      ("none", [None], TypeError, "`inputs` must hold dense .* got None"),
      ("sparse", tf.SparseTensor([[0, 0]], [1.0], [2, 2]), TypeError,
       "`inputs` must hold dense tensors .* SparseTensor"),
      ("nothing", {"x": []}, ValueError, "`inputs` must hold at least one "
       r"tensor: got {'x': \[\]}"),
      ("empty", (), ValueError, r"at least one tensor: got \(\)"),
      ("no_rows", np.zeros([0, 2]), ValueError,
       "at least one row: got a batch of 0 rows"),
      ("scalar", (np.ones([2]), 1.0), ValueError,
       r"leading axis is the batch: got scalars \["),
      ("differ", (np.ones([2]), np.ones([3])), ValueError,
       r"the same number of rows: got {.*: 2, .*: 3}"),
  )
  def test_rejects(self, nest, error, message):
    for count in (1, 2):
      with self.assertRaisesRegex(error, message):
        towers.build_towers(lambda *x: 0.0, testing.devices(count), inputs=nest)

  @parameterized.parameters(1, 2, 3)
  def test_differing_sizes_are_refused_at_run_time(self, count):
    x = tf.placeholder(tf.float32, [None, 1], name="x")
    y = tf.placeholder(tf.float32, None, name="y")

    def model(x, y):
      loss = regression(x)["loss"]
      return loss + 0.0 * tf.reduce_sum(y)

    graph = towers.build_towers(model, testing.devices(count), inputs=(x, y))
    step = graph.minimize(tf.train.GradientDescentOptimizer(0.1))
    with testing.session(initialize=True) as sess:
      before = sess.run(graph.variables)
      with self.assertRaisesRegex(
          tf.errors.InvalidArgumentError, "`inputs` must hold tensors with the "
          "same number of rows, but `y:0` and `x:0` differ"):
        sess.run(step, {x: np.ones([4, 1]), y: np.ones([5])})
      self.assertAllEqual(sess.run(graph.variables), before)
      sess.run(step, {x: np.ones([4, 1]), y: np.ones([4])})

  @parameterized.product(count=(1, 2, 3), updates=(True, False))
  def test_no_rows_are_refused_before_any_variable_changes(self, count,
                                                           updates):
    """c001: also what depends on no row, such as weight decay, stays."""
    x = tf.placeholder(tf.float32, [None, 1])

    def model(x):
      if updates:
        return regression(x)["loss"]
      weight = tf.get_variable("weight", [])
      decayed = tf.get_variable("decayed", [])
      return tf.reduce_mean(weight * x) + tf.nn.l2_loss(decayed)

    graph = towers.build_towers(model, testing.devices(count), inputs=x)
    step = graph.minimize(tf.train.GradientDescentOptimizer(0.1),
                          global_step=tf.train.get_or_create_global_step())
    with testing.session(initialize=True) as sess:
      before = sess.run(tf.global_variables())
      for fetch in [step, graph.loss] + [graph.update_ops] * updates:
        for _ in range(8):
          with self.assertRaisesRegex(
              tf.errors.InvalidArgumentError,
              "`inputs` must hold at least one row: got a batch of 0 rows"):
            sess.run(fetch, {x: np.ones([0, 1])})
      self.assertAllEqual(sess.run(tf.global_variables()), before)


class BorrowedRowTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(
      rows_and_count=((1, 2), (1, 4), (2, 3), (3, 4), (3, 2)),
      known=(True, False))
  def test_changes_nothing(self, rows_and_count, known):
    """c001, c053: fewer rows than towers, equal to one device."""
    rows, count = rows_and_count
    batch = np.arange(1, rows + 1, dtype=np.float32)[:, None] ** 2
    x = tf.constant(batch) if known else tf.placeholder(tf.float32, [None, 1])
    graph = towers.build_towers(regression, testing.devices(count), inputs=x)
    gradients = {v.op.name: g for g, v in graph.gradients()}
    with testing.session(initialize=True) as sess:
      feed = {} if known else {x: batch}
      loss, outputs, gradient, weights = sess.run(
          (graph.loss, graph.outputs, gradients["weight"],
           [tf.convert_to_tensor(t.weight) for t in graph.towers]), feed)
      sess.run(graph.update_ops, feed)
      moving = {v.op.name: sess.run(v) for v in graph.variables}
    self.assertAllEqual(weights, expected_sizes(rows, count))
    self.assertAllClose(loss, batch.mean() + 0.5)
    self.assertAllClose(outputs["mean"], batch.mean())
    self.assertAllEqual(outputs["x"], batch)
    self.assertAllClose(
        outputs["y"],
        (batch - batch.mean()) / np.sqrt(batch.var() + 1e-3), atol=1e-5)
    self.assertAllClose(gradient, batch.mean())
    self.assertAllClose(moving["batch_normalization/moving_mean"],
                        [batch.mean()])
    unbiased = batch.var() * rows / max(rows - 1, 1)
    self.assertAllClose(moving["batch_normalization/moving_variance"],
                        [unbiased])
    self.assertEqual(moving["steps"], 1)

  def test_loss_that_is_not_finite_on_it_does_not_count(self):
    """c053: the loss over nothing is 0 with weight 0, never NaN."""
    x = tf.placeholder(tf.float32, [None])

    def model(x):
      tower = towers.current_tower()
      return {"loss": tf.reduce_mean(x) / (2.0 - tower.index),
              "other": tf.reduce_mean(x) / (2.0 - tower.index)}

    graph = towers.build_towers(model, testing.devices(3), inputs=x)
    with testing.session() as sess:
      loss, outputs, own = sess.run(
          (graph.loss, graph.outputs, graph.towers[2].loss), {x: [2.0, 4.0]})
    self.assertAllClose((loss, outputs["other"], own), (2.5, 2.5, 0.0))


class PerTowerTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters(
      ("even", (2, 2)), ("uneven", (1, 5)), ("first_empty", (0, 3)),
      ("last_empty", (3, 2, 0)), ("all_but_one", (0, 0, 1, 0)))
  def test_equals_one_device_on_all_rows(self, sizes):
    """c005, c039: weighted by rows, not the mean of the towers' means."""
    rng = np.random.RandomState(0)
    shards = [rng.normal(3.0, 2.0, [n, 1]).astype("f") for n in sizes]
    batch = np.concatenate(shards)
    fed = [tf.placeholder(tf.float32, [None, 1]) for _ in sizes]
    for known in (True, False):
      with self.subTest(known=known):
        with tf.variable_scope(f"known_{known}"):
          graph = towers.build_towers(
              regression, testing.devices(len(sizes)),
              inputs=towers.PerTower(shards if known else fed))
        gradients = {v.op.name.split("/")[1]: g for g, v in graph.gradients()
                     if g is not None}
        with testing.session(initialize=True) as sess:
          feed = dict(zip(fed, shards))
          loss, outputs, gradient, weights = sess.run(
              (graph.loss, graph.outputs, gradients["weight"],
               [tf.convert_to_tensor(t.weight) for t in graph.towers]), feed)
          sess.run(graph.update_ops, feed)
          moving = {v.op.name.split("/")[-1]: sess.run(v)
                    for v in graph.variables}
        self.assertAllEqual(weights, sizes)
        self.assertAllClose(loss, batch.mean() + 0.5)
        self.assertAllClose(gradient, batch.mean())
        self.assertAllEqual(outputs["x"], batch)
        self.assertAllClose(outputs["mean"], batch.mean())
        self.assertAllClose(moving["moving_mean"], [batch.mean()])
        self.assertAllClose(
            moving["moving_variance"],
            [batch.var() * len(batch) / max(len(batch) - 1, 1)], rtol=1e-5)

  def test_images_of_other_sizes_in_each_tower(self):
    """c039: 300x300 images in one tower, 500x500 in the other."""
    fed = [tf.placeholder(tf.float32, [None, None, None, 2]) for _ in range(2)]

    def model(x):
      return tf.reduce_mean(towers.moments(x, [0, 1, 2]).mean)

    graph = towers.build_towers(model, testing.devices(2),
                                inputs=towers.PerTower(fed))
    with testing.session() as sess:
      loss = sess.run(graph.loss, {fed[0]: np.full([2, 3, 3, 2], 1.0),
                                   fed[1]: np.full([1, 6, 6, 2], 4.0)})
      self.assertAllClose(loss, (18 * 1.0 + 36 * 4.0) / 54)
      loss = sess.run(graph.loss, {fed[0]: np.ones([0, 3, 3, 2]),
                                   fed[1]: np.full([1, 6, 6, 2], 4.0)})
      self.assertAllClose(loss, 4.0)

  @parameterized.product(sizes=((2, 3), (0, 2, 3), (2, 0, 3), (3, 2, 0)),
                         known=(True, False))
  def test_one_row_is_borrowed_of_the_first_tower_with_rows(self, sizes, known):
    ends = np.cumsum(sizes)
    x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    feed, nests = {}, []
    for size, end in zip(sizes, ends):
      nest = {"x": x[end - size:end], "y": (y[end - size:end],)}
      if not known:
        feed[tf.placeholder(tf.float64, [None, 2])] = nest["x"]
        feed[tf.placeholder(tf.int64, [None])] = nest["y"][0]
        nest = {"x": list(feed)[-2], "y": (list(feed)[-1],)}
      nests.append(nest)
    shards = inputs.deal(towers.PerTower(nests), len(sizes))
    with testing.session() as sess:
      values, rows = sess.run(([s.value for s in shards],
                               [tf.convert_to_tensor(s.rows) for s in shards]),
                              feed)
    self.assertAllEqual(rows, sizes)
    for size, end, value in zip(sizes, ends, values):
      kept = slice(end - size, end) if size else slice(1)
      self.assertAllEqual(value["x"], x[kept])
      self.assertAllEqual(value["y"][0], y[kept])

  def test_shapes_stay_those_of_the_tower(self):
    fed = [tf.placeholder(tf.float32, [None, size]) for size in (2, None)]
    shards = inputs.deal(towers.PerTower(fed), 2)
    self.assertEqual([s.value.shape.as_list() for s in shards],
                     [[None, 2], [None, None]])

  @parameterized.parameters(tf.string, tf.bool, tf.int64)
  def test_empty_tower_of_any_type(self, dtype):
    fed = [tf.placeholder(dtype, [None, 2]) for _ in range(2)]
    graph = towers.build_towers(lambda x: towers.TowerSpec(outputs=[x]),
                                testing.devices(2),
                                inputs=towers.PerTower(fed))
    self.assertEqual(graph.towers[0].outputs[0].shape.as_list(), [None, 2])
    with testing.session() as sess:
      for sizes in ((0, 2), (2, 0), (1, 2)):
        feed = {x: values_of(dtype, n) for x, n in zip(fed, sizes)}
        self.assertAllEqual(sess.run(graph.outputs[0], feed),
                            np.concatenate(list(feed.values())))

  def test_empty_in_all_towers_is_refused_at_run_time(self):
    fed = [tf.placeholder(tf.float32, [None, 1]) for _ in range(2)]
    graph = towers.build_towers(regression, testing.devices(2),
                                inputs=towers.PerTower(fed))
    step = graph.minimize(tf.train.GradientDescentOptimizer(0.1))
    with testing.session(initialize=True) as sess:
      before = sess.run(graph.variables)
      for _ in range(10):
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError,
                                    "at least one row: got a batch of 0 rows"):
          sess.run(step, {x: np.zeros([0, 1]) for x in fed})
      self.assertAllEqual(sess.run(graph.variables), before)

  @parameterized.named_parameters(
      ("too_few", [1.0], ValueError, "one nest per tower: expected 2 in "
       "`towers.PerTower`, got 1"),
      ("too_many", [1.0] * 3, ValueError, "expected 2 .* got 3"),
      ("structure", [{"x": [1.0]}, {"y": [1.0]}], ValueError,
       "same structure for each tower: that of tower 1 differs"),
      ("scalar", [[np.ones(2)], [1.0]], ValueError,
       r"`inputs.nests\[1\]` .*got scalars"),
      ("nothing", [(), ()], ValueError,
       r"`inputs.nests\[0\]` must hold at least one tensor"),
      ("none", [[None], [None]], TypeError,
       r"`inputs.nests\[0\]` must hold dense tensors"),
      ("rows_differ", [[np.ones(2), np.ones(2)], [np.ones(2), np.ones(3)]],
       ValueError, r"`inputs.nests\[1\]` must hold tensors with the same "
       "number of rows"),
      ("no_rows", [np.ones([0, 2])] * 2, ValueError,
       "^`inputs` must hold at least one row: got a batch of 0 rows"),
  )
  def test_rejects(self, nests, error, message):
    with self.assertRaisesRegex(error, message):
      towers.build_towers(lambda *x: 0.0, testing.devices(2),
                          inputs=towers.PerTower(nests))


if __name__ == "__main__":
  tf.test.main()
