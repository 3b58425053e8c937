"""Tests of who tells whom what, with the boards of real servers."""

import threading
import time

from absl.testing import absltest
import cluster_cases
import tensorflow.compat.v1 as tf
from towers import cluster_network
from towers import cluster_spec
from towers import cluster_talk


class TalkTest(absltest.TestCase):

  def talks(self, workers, **arguments):
    """Returns how the server and each worker of a new cluster talk."""
    addresses = cluster_cases.jobs(workers, 1)
    arguments.setdefault("time_limit", cluster_cases.TIME_LIMIT)
    talks = []
    for job, index in [("ps", 0)] + [("worker", i) for i in range(workers)]:
      members = cluster_spec.members(addresses, job, index)
      server = tf.train.Server(tf.train.ClusterSpec(addresses), job_name=job,
                               task_index=index)
      talks.append(cluster_talk.Talk(members, members.servers,
                                     target=server.target, **arguments))
    return talks

  def serving(self, talk, facts):
    """Serves in a thread; returns the thread and what ended it."""
    came_to = []

    def serve():
      try:
        talk.serve(facts)
        came_to.append("done")
      except cluster_network.ClusterError as error:
        came_to.append(str(error))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, came_to

  def test_serves_until_all_workers_have_ended(self):
    server, chief, other = self.talks(2)
    thread, came_to = self.serving(server, {"a": "1"})
    chief.begin({"a": "1"})
    other.begin({"a": "1"})
    self.assertFalse(other.has_ended())
    chief.end()
    self.assertTrue(other.has_ended())
    time.sleep(0.5)
    self.assertTrue(thread.is_alive())
    other.end()
    thread.join(cluster_cases.TIME_LIMIT)
    self.assertEqual(came_to, ["done"])

  def test_server_with_other_facts_ends(self):
    server, chief = self.talks(1)
    thread, came_to = self.serving(server, {"a": "2"})
    chief.begin({"a": "1"})
    thread.join(cluster_cases.TIME_LIMIT)
    self.assertRegex(came_to[0], r"differences in ps 0 .* a is '2' here and "
                                 "'1' at the chief")

  def test_notice_of_an_earlier_run_does_not_count(self):
    _, chief, other = self.talks(2, time_limit=1.0)
    chief.begin({})
    chief.end()
    with self.assertRaisesRegex(cluster_network.ClusterError,
                                "waited 1 s for the chief to begin: worker 0"):
      other.begin({})
    chief.begin({})
    self.assertFalse(other.has_ended())

  def test_worker_that_comes_back_after_the_end_is_told(self):
    _, chief, other = self.talks(2)
    chief.begin({})
    other.begin({})
    chief.end()
    with self.assertRaisesRegex(
        cluster_network.ClusterError,
        r"`Cluster.session` must be entered before training ends: got worker 1 "
        r"\(.*\), which has come back after that"):
      other.begin({})  # As its next process does.

  def test_chief_waits_until_workers_serve(self):
    """In one graph; their servers are up before they have their inputs."""
    addresses = cluster_cases.jobs(2, 0)
    chief, worker = [
        cluster_talk.Talk(
            members, members.workers[1:], target=tf.train.Server(
                tf.train.ClusterSpec(addresses), job_name="worker",
                task_index=members.own.index).target, time_limit=time_limit)
        for members, time_limit in (
            (cluster_spec.members(addresses, "worker", 0), 1.0),
            (cluster_spec.members(addresses, "worker", 1),
             cluster_cases.TIME_LIMIT))]
    with self.assertRaisesRegex(
        cluster_network.ClusterError,
        r"waited 1 s for tasks that do not serve: worker 1 \(.*\): it is up"):
      chief.begin({})
    thread, came_to = self.serving(worker, {})
    chief.begin({})
    chief.end()
    thread.join(cluster_cases.TIME_LIMIT)
    self.assertEqual(came_to, ["done"])


if __name__ == "__main__":
  absltest.main()
