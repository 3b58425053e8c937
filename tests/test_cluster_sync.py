"""Tests of one update of all workers' mean, round by round."""

from absl.testing import absltest
from absl.testing import parameterized
import cluster_cases
import numpy as np
import tensorflow.compat.v1 as tf
import towers
from towers import cluster_spec
from towers import cluster_sync

WORKERS = cluster_spec.members(
    {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "worker", 0)


class RoundsTest(parameterized.TestCase):
  """Both workers' ops in one session, so that a test orders what they do."""

  def setUp(self):
    super().setUp()
    # One process plays all tasks: all devices are those of one server.
    address, = cluster_cases.free_addresses(1)
    self.target = tf.train.Server(
        tf.train.ClusterSpec({"localhost": [address]}),
        job_name="localhost", task_index=0).target

  def worker(self, index, learning_rate=1.0):
    """Returns the ops of one worker, in a graph of its own."""
    graph = tf.Graph()
    with graph.as_default():
      x = tf.placeholder(tf.float64, [None, 2], name="x")

      def model(x):
        w = tf.get_variable("w", [2], tf.float64, tf.zeros_initializer())
        table = tf.get_variable("table", [4, 1], tf.float64,
                                tf.zeros_initializer())
        rows = tf.gather(table, tf.cast(x[:, 0], tf.int32))
        return tf.reduce_mean(tf.reduce_sum(x * w, 1) +
                              tf.reduce_sum(rows, 1) * 10.0)

      here = "/job:localhost/task:0/device:CPU:0"
      built = towers.build_towers(model, [here], inputs=x,
                                  parameter_device=here)
      with tf.device(here):
        step = tf.get_variable("global_step", [], tf.int64,
                               tf.zeros_initializer(), use_resource=True,
                               trainable=False)
      task = cluster_spec.Task("worker", index, f"{'ab'[index]}:1")
      local = _Local(*task)
      members = WORKERS._replace(
          own=local, workers=tuple(_Local(*w) for w in WORKERS.workers))
      mean = cluster_sync.WorkersMean(
          built, tf.train.GradientDescentOptimizer(learning_rate),
          members=members, device=here, global_step=step)
      session = tf.Session(self.target, graph=graph)
      session.run(tf.local_variables_initializer())
      if not index:
        session.run(tf.global_variables_initializer())
    return mean, session, members

  def send(self, worker, stamp, rows):
    mean, session, _ = worker
    session.run(mean.send, {**mean.feeds(stamp), "x:0": rows})

  def values(self, worker):
    return worker[1].run(["w/Read/ReadVariableOp:0", "global_step/Read/"
                          "ReadVariableOp:0", "table/Read/ReadVariableOp:0"])

  def test_mean_is_weighted_by_rows(self):
    workers = [self.worker(0), self.worker(1)]
    mean, session, members = workers[0]
    stamp = mean.begin(session)
    self.assertEqual(workers[1][0].current(workers[1][1]), stamp)
    self.send(workers[0], stamp, [[1.0, 2.0]])
    self.assertEqual(mean.missing(session), [members.workers[1]])
    self.send(workers[1], stamp, [[3.0, 4.0], [3.0, 0.0]])
    self.assertEmpty(mean.missing(session))
    session.run(mean.update)
    w, step, table = self.values(workers[1])
    np.testing.assert_allclose(w, [-7.0 / 3.0, -2.0])
    np.testing.assert_allclose(table[:, 0], [0.0, -10 / 3, 0.0, -20 / 3])
    self.assertEqual(step, 1)
    self.assertEqual(mean.current(session), stamp)  # Until the chief goes on.
    session.run(mean.next_round)
    self.assertEqual(mean.current(session), stamp + 1)
    self.assertLen(mean.missing(session), 2)

  def test_late_gradients_are_dropped(self):
    workers = [self.worker(0), self.worker(1)]
    mean, session, members = workers[0]
    stamp = mean.begin(session)
    self.send(workers[1], stamp - 1, [[2.0, 99.0]])
    self.assertLen(mean.missing(session), 2)
    for worker in workers:
      self.send(worker, stamp, [[1.0, 1.0]])
    session.run(mean.update)
    self.send(workers[1], stamp, [[2.0, 99.0]])
    self.assertEqual(mean.missing(session), list(members.workers))
    for worker in workers:
      self.send(worker, stamp + 1, [[2.0, 2.0]])
    session.run(mean.update)
    np.testing.assert_allclose(self.values(workers[0])[0], [-3.0, -3.0])

  def test_worker_that_comes_back_sends_the_same_twice(self):
    workers = [self.worker(0), self.worker(1)]
    mean, session, _ = workers[0]
    stamp = mean.begin(session)
    for _ in range(2):
      self.send(workers[1], stamp, [[3.0, 4.0], [2.0, 0.0], [3.0, 0.0]])
    self.send(workers[0], stamp, [[1.0, 2.0]])
    session.run(mean.update)
    w, _, table = self.values(workers[0])
    np.testing.assert_allclose(w, [-9.0 / 4.0, -6.0 / 4.0])
    np.testing.assert_allclose(table[:, 0], [0.0, -10 / 4, -10 / 4, -20 / 4])

  def test_chief_that_comes_back_begins_anew(self):
    workers = [self.worker(0), self.worker(1)]
    mean, session, _ = workers[0]
    stamp = mean.begin(session)
    self.send(workers[1], stamp, [[2.0, 99.0]])
    again = mean.begin(session)
    self.assertGreater(again, stamp)
    self.assertLen(mean.missing(session), 2)
    self.send(workers[1], stamp, [[2.0, 99.0]])  # From before.
    for worker in workers:
      self.send(worker, again, [[1.0, 1.0]])
    session.run(mean.update)
    np.testing.assert_allclose(self.values(workers[0])[0], [-1.0, -1.0])

  def test_send_needs_its_session(self):
    mean, session, _ = self.worker(0)
    with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError,
        "`train_op` must run in a session of `Cluster.session`"):
      session.run(mean.send, {"x:0": [[1.0, 1.0]]})


class TrafficTest(parameterized.TestCase):

  @parameterized.parameters(1, 2, 3)
  def test_one_gradient_goes_to_the_server(self, num_towers):
    """However many towers the worker has."""
    server, = WORKERS.servers
    with tf.Graph().as_default() as graph:
      x = tf.placeholder(tf.float32, [None, 2])

      def model(x):
        w = tf.get_variable("w", [2, 3])
        table = tf.get_variable("table", [4, 3])
        rows = tf.gather(table, tf.cast(x[:, 0], tf.int32))
        return tf.reduce_mean((tf.matmul(x, w) + rows)**2)

      built = towers.build_towers(
          model, [WORKERS.own.device(i) for i in range(num_towers)], inputs=x,
          parameter_device=server.device())
      with tf.device(server.device()):
        step = tf.train.get_or_create_global_step()
      cluster_sync.WorkersMean(
          built, tf.train.GradientDescentOptimizer(1.0), members=WORKERS,
          device=server.device(), global_step=step)
    sent = {
        tensor for op in graph.get_operations() for tensor in op.inputs
        if _job(op) == "ps" and _job(tensor.op) == "worker"
    }
    # Of `w`, and the values, indices and shape of that of `table`.
    self.assertCountEqual(
        [(tensor.dtype.name, *tensor.shape.as_list()) for tensor in sent
         if tensor.shape.rank],
        [("float32", 2, 3), ("float32", None, 3), ("int64", None),
         ("int64", 2)])


def _job(op):
  return tf.DeviceSpec.from_string(op.device).job


class _Local(cluster_spec.Task):
  """A task whose devices are those of the one server of the test."""

  def device(self, number=0, kind="CPU"):
    return f"/job:localhost/task:0/device:{kind}:{number}"


if __name__ == "__main__":
  absltest.main()
