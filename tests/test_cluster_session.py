"""Tests of sessions that wait for the others."""

import threading
from unittest import mock

from absl.testing import absltest
import cluster_cases
import tensorflow.compat.v1 as tf
from towers import cluster_network
from towers import cluster_session
from towers import cluster_spec


class CreatorTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    address, = cluster_cases.free_addresses(1)
    self.members = cluster_spec.members({"worker": [address]}, "worker", 0)
    self.target = tf.train.Server(
        tf.train.ClusterSpec(self.members.addresses()), job_name="worker",
        task_index=0).target
    self.order = []

  def creator(self, kind, **arguments):
    def prepare():
      self.order.append("prepared")
      return cluster_network.Watch([], 1.0)

    return kind(prepare, tf.train.Scaffold(), target=self.target,
                config=tf.ConfigProto(), **arguments)

  def test_chief_initialises_then_worker_goes_on(self):
    with tf.Graph().as_default():
      v = tf.get_variable("v", [], initializer=tf.ones_initializer(),
                          use_resource=True)
      change, read = v.assign(2.0).op, v.value()
      chief = self.creator(cluster_session.ChiefCreator, checkpoint_dir=None)
      worker = self.creator(
          cluster_session.WorkerCreator, chief=self.members.chief,
          time_limit=cluster_cases.TIME_LIMIT)
      with chief.create_session() as session:
        self.assertEqual(session.run(read), 1.0)
        session.run(change)
        with worker.create_session() as other:
          self.assertEqual(other.run(read), 2.0)
    self.assertEqual(self.order, ["prepared", "prepared"])

  def test_worker_says_for_whom_it_waited(self):
    with tf.Graph().as_default():
      tf.get_variable("v", [], use_resource=True)
      worker = self.creator(cluster_session.WorkerCreator,
                            chief=self.members.chief, time_limit=1.0)
      with self.assertRaisesRegex(
          cluster_network.ClusterError,
          r"waited 1 s for worker 0 \(.*\) to initialise the variables \(it is "
          r"up\)"):
        worker.create_session()

  def test_run_that_waits_without_end_names_the_others(self):
    members = self.members._replace(
        servers=(cluster_spec.Task("ps", 0, cluster_cases.free_addresses(1)[0]),
                ))
    config = tf.ConfigProto(operation_timeout_in_ms=500)
    with tf.Graph().as_default():
      empty = tf.FIFOQueue(1, [tf.float32]).dequeue()
      with tf.Session(self.target, config=config) as session, \
          self.assertRaisesRegex(
              cluster_network.ClusterError,
              r"`time_limit` must suffice for each run of a session: one took "
              r"more than 2 s; ps 0 \(.*\): Connection refused\. Start"):
        with cluster_session.explained(members, 2.0):
          session.run(empty)

  def test_close_does_not_wait_without_end(self):
    never, closed = threading.Event(), []

    def close():
      closed.append(True)
      never.wait()

    close_once = cluster_session._closing(close)
    with mock.patch.object(cluster_session, "_CLOSE_SECONDS", 0.2):
      for _ in range(2):
        close_once()
    self.assertLen(closed, 1)
    never.set()

  def test_saves_only_where_it_is_told(self):
    with tf.Graph().as_default():
      tf.train.get_or_create_global_step()
      scaffold = tf.train.Scaffold()
      self.assertEmpty(cluster_session.saver_hook(scaffold, None, 5))
      folder = self.create_tempdir().full_path
      self.assertEmpty(cluster_session.saver_hook(scaffold, folder, None))
      self.assertLen(cluster_session.saver_hook(scaffold, folder, 5), 1)


if __name__ == "__main__":
  absltest.main()
