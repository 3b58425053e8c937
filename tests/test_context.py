"""Tests for towers.context."""

import threading

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


class CurrentTowerTest(parameterized.TestCase, tf.test.TestCase):

  def test_outside_a_build_it_is_alone(self):
    tower = towers.current_tower()
    self.assertIsInstance(tower, towers.Tower)
    self.assertEqual((tower.index, tower.count, tower.device, tower.devices,
                      tower.name_scope), (0, 1, "", ("",), ""))
    self.assertIsNone(tower.loss)
    self.assertEmpty(tower.collection(tf.GraphKeys.GLOBAL_VARIABLES))
    with tf.device(tower.device):  # As models place their ops.
      self.assertEqual(tf.constant(1.0).device, "")

  @parameterized.parameters(1, 2, 12)
  def test_inside_a_build(self, count):
    """c014: tower 1 is not tower 10."""
    seen = []

    def model():
      seen.append(towers.current_tower())
      return 0.0

    names = [f"/cpu:{i % 4}" for i in range(count)]
    graph = towers.build_towers(model, names)
    self.assertEqual([t.index for t in seen], list(range(count)))
    self.assertEqual([t.device for t in seen], names)
    self.assertEqual({t.count for t in seen}, {count})
    self.assertEqual([t.name_scope for t in seen],
                     [f"tower_{i}/" for i in range(count)])
    self.assertEqual(tuple(seen), graph.towers)
    self.assertEqual(towers.current_tower().count, 1)

  def test_is_the_same_before_and_after_a_meeting(self):

    def model():
      before = towers.current_tower()
      towers.all_reduce(1.0)
      self.assertIs(towers.current_tower(), before)
      return 0.0

    towers.build_towers(model, testing.devices(3))

  @parameterized.parameters(1, 2)
  def test_is_alone_again_after_a_model_that_raises(self, count):

    def model():
      raise RuntimeError("from the model")

    with self.assertRaisesRegex(RuntimeError, "from the model"):
      towers.build_towers(model, testing.devices(count))
    self.assertEqual(towers.current_tower().count, 1)
    self.assertEqual(towers.current_tower().name_scope, "")

  def test_other_threads_are_outside(self):
    seen = []

    def look():
      seen.append(towers.current_tower().count)

    def model():
      thread = threading.Thread(target=look)
      thread.start()
      thread.join()
      return 0.0

    towers.build_towers(model, testing.devices(2))
    self.assertEqual(seen, [1, 1])

  @parameterized.parameters(1, 2)
  def test_refuses_a_build_inside_a_build(self, count):

    def model():
      return towers.build_towers(lambda: 0.0, testing.devices(2)).loss

    with self.assertRaisesRegex(
        ValueError, "`build_towers` must not be called inside `model_fn`: got "
        "a call in tower 0"):
      towers.build_towers(model, testing.devices(count))

  def test_function_of_a_merge_belongs_to_no_tower(self):
    seen = []

    def fn(values):
      seen.append(towers.current_tower().count)
      # What it uses of the library works as outside a build.
      return towers.all_reduce(tf.add_n(values))

    graph = towers.build_towers(lambda: towers.merge(fn, tf.constant(1.0)),
                                testing.devices(2))
    self.assertEqual(seen, [1])
    with testing.session() as sess:
      self.assertEqual(sess.run(graph.loss), 2.0)


class NoSyncTest(parameterized.TestCase, tf.test.TestCase):

  SHARDS = (np.array([[1.0], [3.0], [8.0]]), np.array([[10.0], [14.0]]))

  def build(self, around, **options):
    x = tf.constant(np.concatenate(self.SHARDS), tf.float32)

    def model(x):
      with around():
        y = towers.batch_norm(x, training=True, momentum=0.0, epsilon=1e-6)
      return {"loss": tf.reduce_mean(y), "y": y,
              "mean": towers.moments(x, 0).mean[0]}

    return towers.build_towers(model, testing.devices(2), inputs=x, **options)

  def normalised(self, *batches):
    return np.concatenate([(b - b.mean()) / np.sqrt(b.var() + 1e-6)
                           for b in batches])

  def run_graph(self, graph):
    moving = {v.op.name.split("/")[-1]: v for v in graph.variables}
    with testing.session(initialize=True) as sess:
      outputs = sess.run(graph.outputs)
      sess.run(graph.update_ops)
      return outputs, sess.run(moving["moving_mean"])

  def test_each_tower_normalises_by_its_own_rows(self):
    outputs, mean = self.run_graph(self.build(towers.no_sync))
    self.assertAllClose(outputs["y"], self.normalised(*self.SHARDS), atol=1e-4)
    # The moving statistics are shared: the mean, weighted by rows.
    self.assertAllClose(mean, [36.0 / 5.0])
    # It ends with its context.
    self.assertAllClose(outputs["mean"], 36.0 / 5.0)

  def test_for_the_whole_model(self):
    graph = self.build(tf.no_op().graph.as_default, sync_batch_norm=False)
    outputs, mean = self.run_graph(graph)
    self.assertAllClose(outputs["y"], self.normalised(*self.SHARDS), atol=1e-4)
    self.assertAllClose(mean, [36.0 / 5.0])
    # The mean, weighted by rows, of each tower's own moments.
    self.assertAllClose(outputs["mean"], 0.6 * 4.0 + 0.4 * 12.0)

  def test_without_it(self):
    outputs, mean = self.run_graph(self.build(tf.no_op().graph.as_default))
    self.assertAllClose(
        outputs["y"], self.normalised(np.concatenate(self.SHARDS)), atol=1e-4)
    self.assertAllClose(mean, [36.0 / 5.0])

  def test_ends_when_its_body_raises(self):

    def model(x):
      try:
        with towers.no_sync():
          raise RuntimeError("from the model")
      except RuntimeError:
        pass
      return towers.moments(x, 0).mean

    graph = towers.build_towers(model, testing.devices(2),
                                inputs=tf.constant([1.0, 2.0, 6.0]))
    with testing.session() as sess:
      self.assertAllClose(sess.run([t.loss for t in graph.towers]), [3.0, 3.0])

  def test_stays_in_its_tower(self):
    """A tower that stops inside it leaves the others as they are."""

    def model(x):
      own = towers.moments(x, 0).mean
      with towers.no_sync():
        towers.all_reduce(1.0)  # The other tower's turn.
        apart = towers.moments(x, 0).mean
      return {"loss": own, "apart": apart}

    graph = towers.build_towers(model, testing.devices(2),
                                inputs=tf.constant([1.0, 2.0, 6.0]))
    with testing.session() as sess:
      self.assertAllClose(sess.run([t.loss for t in graph.towers]), [3.0, 3.0])
      self.assertAllClose(
          sess.run([t.outputs["apart"] for t in graph.towers]), [1.5, 6.0])

  def test_has_no_effect_outside_a_build(self):
    x = tf.constant([[1.0], [3.0]])
    with towers.no_sync():
      y = towers.batch_norm(x, training=True, epsilon=1e-6)
    with testing.session(initialize=True) as sess:
      self.assertAllClose(sess.run(y), [[-1.0], [1.0]], atol=1e-4)


if __name__ == "__main__":
  tf.test.main()
