"""Tests of whether tasks can be reached."""

import socket
import threading
import time
from unittest import mock

from absl.testing import absltest
import cluster_cases
from towers import cluster_network
from towers import cluster_spec


def task(address, index=0):
  return cluster_spec.Task("worker", index, address)


class OwnAddressTest(absltest.TestCase):

  def test_free_port(self):
    cluster_network.check_own_address(task(cluster_cases.free_addresses(1)[0]))

  def test_port_in_use(self):
    with socket.socket() as listening:
      listening.bind(("127.0.0.1", 0))
      listening.listen()
      port = listening.getsockname()[1]
      with self.assertRaisesRegex(
          cluster_network.ClusterError,
          rf"a free port: got worker 0 \(127.0.0.1:{port}\) \(Address already"):
        cluster_network.check_own_address(task(f"127.0.0.1:{port}"))

  def test_host_that_does_not_resolve(self):
    with self.assertRaisesRegex(
        cluster_network.ClusterError,
        r"hosts that can be found: got worker 0 \(nowhere.invalid:2222\)"):
      cluster_network.check_own_address(task("nowhere.invalid:2222"))

  def test_address_of_another_host(self):
    with self.assertRaisesRegex(
        cluster_network.ClusterError, "of its own host.*192.0.2.1:2222"):
      cluster_network.check_own_address(task("192.0.2.1:2222"))


class WaitTest(absltest.TestCase):

  def test_names_all_who_are_missing(self):
    closed, = cluster_cases.free_addresses(1)
    with socket.socket() as listening:
      listening.bind(("127.0.0.1", 0))
      listening.listen()
      port = listening.getsockname()[1]
      tasks = [task(closed), task(f"127.0.0.1:{port}", 1),
               task("nowhere.invalid:1", 2)]
      with self.assertRaisesRegex(
          cluster_network.ClusterError,
          r"`time_limit` must suffice.* waited [01] s for tasks that are not "
          r"up: worker 0 \(.*\): Connection refused, worker 2 "
          r"\(nowhere.invalid:1\): its host cannot be found: ") as caught:
        cluster_network.wait_until_up(tasks, 0.2)
    self.assertNotIn("worker 1", str(caught.exception))

  def test_waits_for_who_comes_late(self):
    address, = cluster_cases.free_addresses(1)
    late = task(address)
    with socket.socket() as listening:

      def start():
        time.sleep(0.3)
        listening.bind((late.host, late.port))
        listening.listen()

      thread = threading.Thread(target=start)
      thread.start()
      cluster_network.wait_until_up([late], 60.0)
      thread.join()
      self.assertIsNone(cluster_network.fault(late))
    self.assertEqual(cluster_network.state(late),
                     f"worker 0 ({address}): Connection refused")

  def test_watch_names_who_is_gone_for_too_long(self):
    closed, = cluster_cases.free_addresses(1)
    with mock.patch.object(cluster_network, "_LOOK_SECONDS", 0.0), \
        socket.socket() as listening:
      listening.bind(("127.0.0.1", 0))
      listening.listen()
      watch = cluster_network.Watch(
          [task(f"127.0.0.1:{listening.getsockname()[1]}"), task(closed, 1)],
          0.3)
      watch.check()
      time.sleep(0.4)
      with self.assertRaisesRegex(
          cluster_network.ClusterError,
          r"must suffice for a task to come back: worker 1 \(.*\) has been "
          r"gone for 0 s \(Connection refused\)\. Start it again"):
        watch.check()

  def test_watch_forgets_who_comes_back(self):
    address, = cluster_cases.free_addresses(1)
    late = task(address)
    with mock.patch.object(cluster_network, "_LOOK_SECONDS", 0.0), \
        socket.socket() as listening:
      watch = cluster_network.Watch([late], 0.5)
      watch.check()
      time.sleep(0.4)
      listening.bind((late.host, late.port))
      listening.listen()
      watch.check()
      time.sleep(0.4)
      watch.check()

  def test_watched_action_returns_raises_or_is_left(self):
    nobody = cluster_network.Watch([], 1.0)
    self.assertEqual(cluster_network.watched(lambda: 3, nobody), 3)
    with self.assertRaisesRegex(KeyError, "there"):
      cluster_network.watched(lambda: {}["there"], nobody)
    never = threading.Event()
    with self.assertRaisesRegex(cluster_network.Overdue, "`action` took more"):
      cluster_network.watched(never.wait, nobody, 0.2)
    closed, = cluster_cases.free_addresses(1)
    with mock.patch.object(cluster_network, "_LOOK_SECONDS", 0.0), \
        self.assertRaisesRegex(cluster_network.ClusterError, "has been gone"):
      cluster_network.watched(
          never.wait, cluster_network.Watch([task(closed)], 0.2))
    never.set()


if __name__ == "__main__":
  absltest.main()
