"""Tests for towers.model_gradients: `tf.gradients` inside model functions.

The reference is the same model as plain code on one device, in float64.
"""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import references
import testing
import towers


def batch(rows, dtype=np.float64):
  return np.random.RandomState(rows).normal(1.0, 2.0, [rows, 4]).astype(dtype)


def weights(name, shape, dtype=tf.float64):
  return tf.get_variable(name, shape, dtype)


def features(x):
  """A layer with batch norm, under the same variables at each call."""
  with tf.variable_scope("features", reuse=tf.AUTO_REUSE):
    h = tf.matmul(x, weights("kernel", [4, 3], x.dtype))
    return tf.tanh(towers.batch_norm(h, training=True, name="norm"))


def score(x):
  """One number per row, which depends on all rows of the batch."""
  with tf.variable_scope("score", reuse=tf.AUTO_REUSE):
    return tf.matmul(features(x), weights("kernel", [3, 1], x.dtype))[:, 0]


def adversarial(x):
  """The raw gradient of a mean loss, not only its sign."""
  loss = tf.reduce_mean(tf.square(score(x)))
  gradient, = tf.gradients(loss, x)
  nearby = score(x + 0.5 * tf.stop_gradient(gradient))
  return {"loss": loss + tf.reduce_mean(tf.square(nearby)),
          "gradient": gradient}


def virtual_adversarial(x):
  """Differentiates by a perturbation that begins as zeros."""
  noise = tf.zeros_like(x) + 0.1
  loss = tf.reduce_mean(tf.square(score(x + noise) - score(x)))
  gradient, = tf.gradients(loss, noise)
  return {"loss": tf.reduce_mean(tf.square(score(x + gradient))),
          "gradient": gradient}


def saliency_of_rows(x):
  scores = tf.exp(score(x) / 10)
  gradient, = tf.gradients(scores, x)
  return {"loss": tf.reduce_mean(scores * tf.reduce_sum(gradient**2, 1)),
          "gradient": gradient}


def saliency_of_sum(x):
  scores = score(x)
  gradient, = tf.gradients(tf.reduce_sum(scores), x)
  return {"loss": tf.reduce_mean(scores + tf.reduce_sum(gradient**2, 1)),
          "gradient": gradient}


def gradient_penalty(x):
  """As in WGAN-GP: the gradient is differentiated again."""
  scores = score(x)
  gradient, = tf.gradients(scores, x)
  norm = tf.sqrt(tf.reduce_sum(gradient**2, 1) + 1e-3)
  return {"loss": tf.reduce_mean((norm - 1)**2) - tf.reduce_mean(scores),
          "gradient": gradient}


def inner_steps(x):
  """As in MAML: two steps by gradients, then the loss that counts."""
  w = weights("w", [4, 1])
  for _ in range(2):
    loss = tf.reduce_mean(tf.tanh(tf.matmul(x, w) - 1)**2)
    w = w - 0.1 * tf.gradients(loss, w)[0]
  return tf.reduce_mean((tf.matmul(x, w) - 1)**2)


def second_derivative(x):
  w = weights("w", [4, 1])
  loss = tf.reduce_mean(tf.tanh(tf.matmul(x, w))**3)
  first, = tf.gradients(loss, w)
  second, = tf.gradients(tf.reduce_sum(first**2), w)
  return {"loss": loss + tf.reduce_sum(second**2),
          "norm": tf.reduce_sum(second**2)}


def by_an_optimizer(x):
  loss = tf.reduce_mean(score(x)**2) + 0.1 * tf.add_n(
      [tf.nn.l2_loss(v) for v in tf.trainable_variables()])
  pairs = tf.train.GradientDescentOptimizer(0.1).compute_gradients(loss)
  return loss + tf.add_n([tf.reduce_sum(g**2) for g, _ in pairs])


def sparse(x):
  """The gradient by a table, which TensorFlow keeps as `IndexedSlices`."""
  table = weights("table", [7, 4])
  ids = tf.cast(tf.abs(x[:, 0]), tf.int32) % 7
  loss = tf.reduce_mean(tf.square(tf.gather(table, ids) * x))
  gradient, = tf.gradients(loss, table)
  assert isinstance(gradient, tf.IndexedSlices)
  return loss + tf.reduce_sum(tf.convert_to_tensor(gradient)**3)


def through_merge(x):
  h = tf.matmul(x, weights("w", [4, 3]))
  total = towers.merge(tf.add_n, tf.reduce_sum(tf.tanh(h), axis=0))
  rows = tf.reduce_sum(tf.square(h - total), axis=1)
  gradient, = tf.gradients(rows, x)
  return {"loss": tf.reduce_mean(rows + tf.reduce_sum(gradient**2, 1)),
          "gradient": gradient}


def through_all_reduce(x):
  h = tf.matmul(x, weights("w", [4, 3]))
  mean = towers.all_reduce(tf.reduce_mean(h, axis=0), "mean")
  total = towers.all_reduce(tf.reduce_sum(tf.tanh(h), axis=0))
  rows = tf.reduce_sum((h - mean)**2 * total, axis=1)
  gradient, = tf.gradients(tf.reduce_mean(rows), x)
  return {"loss": tf.reduce_mean(rows + tf.reduce_sum(gradient**2, 1)),
          "gradient": gradient}


def through_all_gather(x):
  """A contrastive loss: each row against all rows."""
  h = tf.matmul(x, weights("w", [4, 3]))
  logits = tf.matmul(h, towers.all_gather(h), transpose_b=True) / 10
  loss = tf.reduce_mean(tf.reduce_logsumexp(logits, axis=1))
  gradient, = tf.gradients(loss, h)
  return {"loss": loss + tf.reduce_mean(gradient**2), "gradient": gradient}


def through_moments(x):
  h = tf.matmul(x, weights("w", [4, 3]))
  mean, variance = towers.moments(h, 0)
  loss = tf.reduce_mean((h - mean)**4 / (variance + 0.1))
  gradient, = tf.gradients(loss, x)
  return {"loss": loss + tf.reduce_mean(gradient**2), "gradient": gradient}


def of_what_all_towers_have(x):
  """A number made by a merge is the same in all towers, and counts once."""
  h = tf.tanh(tf.matmul(x, weights("w", [4, 3])))
  deviation = tf.sqrt(towers.all_reduce(tf.reduce_mean(h**2), "mean"))
  gradient, = tf.gradients(deviation, x)
  return {"loss": deviation + tf.reduce_mean(gradient**2),
          "gradient": gradient}


def several_at_once(x):
  w, v = weights("w", [4, 1]), weights("v", [4, 1])
  rows = tf.matmul(x, w)**2
  ys = [tf.reduce_mean(rows), 0.3 * tf.reduce_sum(tf.matmul(x, v)**2),
        tf.reduce_mean(rows, axis=0), w * v, tf.nn.l2_loss(w)]
  gradients = tf.gradients(
      ys, [w, v], grad_ys=[None, None, tf.constant([2.0], tf.float64), w,
                           tf.constant(3.0, tf.float64)])
  return {"loss": tf.add_n([tf.reduce_sum(g**2) for g in gradients]) +
                  tf.reduce_mean(rows),
          "gradients": tf.concat(gradients, axis=0)[tf.newaxis, :, 0][0, 0]}


def stopped(x):
  w, v = weights("w", [4, 4]), weights("v", [4, 1])
  h = tf.matmul(x, w)
  loss = tf.reduce_mean(tf.matmul(h, v)**2)
  by_w, by_v = tf.gradients(loss, [w, v], stop_gradients=[w, v, h],
                            unconnected_gradients="zero")
  return loss + tf.reduce_sum(by_w) + tf.reduce_sum(by_v**2)


def kinds_of_means(x):
  """Means and sums as they are written in models."""
  rows = tf.cast(tf.shape(x)[0], x.dtype)
  h = tf.matmul(x, weights("w", [4, 3]))
  losses = tf.reduce_sum(h**2, axis=1)
  scalars = [
      tf.reduce_sum(losses) / rows,
      tf.reduce_sum(losses) * (1 / rows),
      tf.reduce_sum(losses / rows),
      -0.5 * tf.reduce_mean(losses),
      1.0 - tf.reduce_mean(losses)[tf.newaxis],
      tf.stack([tf.reduce_mean(losses), tf.reduce_mean(h)]),
      tf.reduce_mean(h, axis=0)[1],
      tf.reduce_sum(tf.reduce_mean(h**2, axis=0)),
      tf.reduce_sum(tf.reduce_mean(h**2, axis=1)),
      tf.nn.l2_loss(h) / 7.0,
      tf.nn.l2_loss(h) / tf.cast(tf.size(h), x.dtype),
      0.3 * tf.reduce_sum(losses),
      tf.reduce_mean(losses) + 0.1 * tf.nn.l2_loss(weights("b", [2])),
  ]
  gradients = [tf.gradients(y, x)[0] for y in scalars]
  return {"loss": tf.reduce_mean(tf.stack(gradients, 1)**2 * 0.1 + x[:, None]),
          "gradients": tf.stack(gradients, axis=1)}


MODELS = (
    adversarial, virtual_adversarial, saliency_of_rows, saliency_of_sum,
    gradient_penalty, inner_steps, second_derivative, by_an_optimizer, sparse,
    through_merge, through_all_reduce, through_all_gather, through_moments,
    of_what_all_towers_have, several_at_once, stopped, kinds_of_means)


class ModelGradientsTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.named_parameters((m.__name__, m) for m in MODELS)
  def test_equals_one_device(self, model):
    values = [batch(7)]
    expected = references.run(lambda: model, values)
    for num_towers, known_size in ((2, False), (3, True)):
      with self.subTest(num_towers=num_towers, known_size=known_size):
        references.assert_equal(
            self, references.run(lambda: model, values, num_towers,
                                 known_size=known_size), expected)

  @parameterized.product(
      model=(adversarial, gradient_penalty), num_towers=(1, 4))
  def test_equals_one_device_for_few_and_many(self, model, num_towers):
    references.assert_equal(
        self, references.run(lambda: model, [batch(7)], num_towers),
        references.run(lambda: model, [batch(7)]))

  @parameterized.named_parameters(
      (m.__name__, m, m is kinds_of_means)
      for m in (saliency_of_sum, inner_steps, through_all_reduce,
                kinds_of_means))
  def test_borrowed_rows_do_not_count(self, model, known_size):
    """Two rows in three towers: the third has one that is not its own."""
    values = [batch(2)]
    expected = references.run(lambda: model, values)
    references.assert_equal(
        self, references.run(lambda: model, values, 3, known_size=known_size),
        expected)

  @parameterized.named_parameters(
      (m.__name__, m) for m in (adversarial, gradient_penalty))
  def test_equals_one_device_on_fused_kernels(self, model):
    values = [batch(7, np.float32)]
    expected = references.run(lambda: model, values)
    references.assert_equal(
        self, references.run(lambda: model, values, 3), expected, 2e-3)

  @parameterized.parameters(2, 4)
  def test_own_inputs_of_each_tower_are_its_rows(self, num_towers):
    """Arrays become tensors first, so that they are known for rows."""
    values = batch(8)
    expected = references.run(lambda: kinds_of_means, [values])
    graph = towers.build_towers(
        lambda x: kinds_of_means(x), testing.devices(num_towers),
        inputs=towers.PerTower([[v] for v in np.split(values, num_towers)]))
    with testing.session() as sess:
      references.initialize(sess)
      self.assertAllClose(sess.run(graph.outputs["gradients"]),
                          expected.outputs["gradients"], 1e-9, 1e-9)

  @parameterized.parameters(2, 3)
  def test_by_what_the_towers_close_over(self, num_towers):
    def make_model():
      shared = weights("shared", [4, 3])
      hidden = tf.tanh(shared)

      def model(x):
        loss = tf.reduce_mean(tf.matmul(x, hidden)**2)
        by_hidden, by_shared = tf.gradients(loss, [hidden, shared])
        return (loss + tf.reduce_sum(by_hidden**2) +
                tf.reduce_sum(by_shared**2))

      return model

    references.assert_equal(
        self, references.run(make_model, [batch(5)], num_towers),
        references.run(make_model, [batch(5)]))

  def test_by_a_variable_with_a_caching_device(self):
    def model(x):
      with tf.variable_scope("cached", caching_device="/cpu:1"):
        w = weights("w", [4, 1])
      loss = tf.reduce_mean(tf.matmul(x, w)**2)
      return loss + tf.reduce_sum(tf.gradients(loss, w)[0]**2)

    references.assert_equal(self, references.run(lambda: model, [batch(5)], 3),
                            references.run(lambda: model, [batch(5)]))

  @parameterized.parameters(False, True)
  def test_by_losses_of_tensorflow(self, known_size):
    """These are divided by a number of elements, and are float32."""
    def model(x):
      h = tf.matmul(x, weights("w", [4, 3]))
      loss = tf.losses.mean_squared_error(tf.ones_like(h), h)
      gradient, = tf.gradients(loss, x)
      return {"loss": tf.reduce_mean(x), "gradient": gradient}

    references.assert_equal(
        self, references.run(lambda: model, [batch(7)], 3,
                             known_size=known_size),
        references.run(lambda: model, [batch(7)]), 1e-5)

  def test_noise_over_rows_is_the_towers_own(self):
    """As in a GAN, whose generator makes its rows itself."""
    def model(x):
      noise = tf.random_normal(tf.shape(x), dtype=x.dtype)
      gradient, = tf.gradients(tf.reduce_sum(tf.square(noise + 0 * x)), noise)
      by_mean, = tf.gradients(tf.reduce_mean(noise[:, 0]), noise)
      return {"loss": tf.reduce_mean(x), "ratio": gradient / noise,
              "by_mean": by_mean}

    outputs = references.run(lambda: model, [batch(5)], 2).outputs
    self.assertAllClose(outputs["ratio"], np.full([5, 4], 2.0))
    self.assertAllClose(outputs["by_mean"][:, 0], np.full([5], 1 / 5))

  @parameterized.named_parameters(
      ("largest", lambda h: tf.reduce_max(h), "Max"),
      ("root_of_mean", lambda h: tf.sqrt(tf.reduce_mean(h**2)), "Sqrt"),
      ("root_of_means", lambda h: tf.sqrt(tf.reduce_mean(h**2, axis=0)),
       "Sqrt"),
      ("log_of_sum", lambda h: tf.log(tf.reduce_sum(h**2)), "Log"),
      ("product", lambda h: tf.reduce_mean(h) * tf.reduce_sum(h**2), "Mul"),
      ("ratio", lambda h: tf.reduce_sum(h) / tf.reduce_sum(h**2), "RealDiv"),
      ("sum_and_mean", lambda h: tf.reduce_sum(h) + tf.reduce_mean(h), "AddV2"),
      ("one_row", lambda h: h[0, 0], "StridedSlice"),
      ("means_squared", lambda h: tf.reduce_mean(h, 0) * tf.reduce_mean(h, 0),
       "Mul"),
      ("mean_of_mean", lambda h: tf.reduce_mean(
          h / tf.cast(tf.shape(h)[0], h.dtype)), "Mean"),
      ("sum_and_decay",
       lambda h: tf.reduce_sum(h) + tf.nn.l2_loss(weights("b", [3])), "AddV2"),
  )
  def test_refuses_what_takes_the_batch_at_once(self, function, op_type):
    x = tf.placeholder(tf.float64, [None, 4])

    def model(x):
      y = function(tf.matmul(x, weights("w", [4, 3])))
      return tf.reduce_mean(tf.gradients(y, x)[0])

    with self.assertRaisesRegex(
        ValueError, "`ys` of `tf.gradients` in `model_fn` must be tensors with "
        rf"a value per row.* depends on rows by `tower_0/.*` \({op_type}\)"):
      towers.build_towers(model, testing.devices(2), inputs=x)

  def test_refuses_a_number_that_may_be_the_size(self):
    """Half a sum, or the mean of two rows?"""
    def model(x):
      y = tf.reduce_sum(tf.matmul(x, weights("w", [4, 1]))[:, 0]) / 2.0
      return tf.reduce_mean(tf.gradients(y, x)[0])

    with self.assertRaisesRegex(ValueError, r"depends on rows by .*RealDiv"):
      towers.build_towers(model, testing.devices(2), inputs=batch(4))

  def test_refuses_hessians(self):
    """They differentiate in a loop, where towers cannot meet."""
    def model(x):
      w = weights("w", [4])
      loss = tf.reduce_mean(tf.tanh(tf.linalg.matvec(x, w)))
      return loss + tf.reduce_sum(tf.hessians(loss, w)[0])

    with self.assertRaisesRegex(
        ValueError, "tf.gradients of a merge .*must not stand inside a while "
        "loop"):
      towers.build_towers(model, testing.devices(2), inputs=batch(4))

  def test_refuses_a_second_derivative_outside_through_batch_norm(self):
    x = tf.placeholder(tf.float32, [None, 2, 2, 4])

    def model(x):
      return tf.reduce_mean(towers.batch_norm(x, training=True)**3)

    graph = towers.build_towers(model, testing.devices(2), inputs=x)
    gradient, = tf.gradients(graph.loss, x)
    with self.assertRaisesRegex(
        ValueError, "`tf.gradients` must not differentiate a gradient through "
        "batch norm .* outside `model_fn`.*`towers.no_sync"):
      tf.gradients(tf.reduce_sum(gradient**2), x)

  def test_one_tower_differentiates_plainly(self):
    def model(x):
      y = tf.reduce_max(tf.matmul(x, weights("w", [4, 1])))
      return y + tf.reduce_sum(tf.gradients(y, x)[0])

    references.assert_equal(self, references.run(lambda: model, [batch(5)], 1),
                            references.run(lambda: model, [batch(5)]))


if __name__ == "__main__":
  tf.test.main()
