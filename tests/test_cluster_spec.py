"""Tests of who is in a cluster."""

import json

from absl.testing import absltest
from absl.testing import parameterized
from towers import cluster_spec

JOBS = {"worker": ["a:1", "b:1"], "ps": ["[::1]:2"]}


class MembersTest(parameterized.TestCase):

  def test_first_worker_is_chief(self):
    found = cluster_spec.members(JOBS, "worker", 1)
    self.assertEqual(found.chief, cluster_spec.Task("worker", 0, "a:1"))
    self.assertEqual(found.own, cluster_spec.Task("worker", 1, "b:1"))
    self.assertEqual(found.addresses(), JOBS)
    self.assertEqual(found.workers[1].device(2, "GPU"),
                     "/job:worker/task:1/device:GPU:2")

  def test_chief_of_its_own_job_comes_first(self):
    found = cluster_spec.members(
        {"worker": ["a:1"], "chief": ["b:1"]}, "worker", 0)
    self.assertEqual([str(task) for task in found.workers],
                     ["chief 0 (b:1)", "worker 0 (a:1)"])

  def test_host_and_port(self):
    task = cluster_spec.members(JOBS, "ps", 0).own
    self.assertEqual((task.host, task.port), ("::1", 2))

  def test_evaluator_is_not_in_the_cluster(self):
    found = cluster_spec.members(JOBS, "evaluator", 0)
    self.assertEqual(str(found.own), "evaluator 0")
    self.assertNotIn("evaluator", found.addresses())

  @parameterized.named_parameters(
      ("no_mapping", [], "worker", 0, TypeError, "`jobs` must hold lists"),
      ("unknown_job", {"wrker": ["a:1"]}, "worker", 0, ValueError,
       "`jobs` must hold the jobs worker, ps and chief only: got 'wrker'"),
      ("text", {"worker": "a:1"}, "worker", 0, TypeError,
       r"`jobs\['worker'\]` must be a list of addresses: got 'a:1'"),
      ("no_port", {"worker": ["a"]}, "worker", 0, ValueError,
       r"addresses as host:port.* got 'a' \(worker 0\)"),
      ("port_0", {"worker": ["a:0"]}, "worker", 0, ValueError, "got 'a:0'"),
      ("high_port", {"worker": ["a:65536"]}, "worker", 0, ValueError,
       "from 1 to 65535: got 'a:65536'"),
      ("scheme", {"worker": ["grpc://a:1"]}, "worker", 0, ValueError,
       "got 'grpc://a:1'"),
      ("number", {"worker": [2222]}, "worker", 0, ValueError, "got 2222"),
      ("twice", {"worker": ["a:1"], "ps": ["a:1"]}, "worker", 0, ValueError,
       "each address once: got a:1 for worker 0 and for ps 0"),
      ("two_chiefs", {"chief": ["a:1", "b:1"]}, "chief", 0, ValueError,
       "at most one chief: got 2"),
      ("no_worker", {"ps": ["a:1"]}, "ps", 0, ValueError,
       "`jobs` must hold a worker"),
      ("own_job", JOBS, "chef", 0, ValueError,
       "`job` must be one of chief, worker, ps, evaluator: got 'chef'"),
      ("own_index", JOBS, "worker", 2, ValueError,
       "of the job 'worker': expected less than 2, .* got 2"),
      ("negative_index", JOBS, "worker", -1, ValueError,
       "expected 0 or more, got -1"),
  )
  def test_errors(self, jobs, job, index, error, message):
    with self.assertRaisesRegex(error, message):
      cluster_spec.members(jobs, job, index)


class TfConfigTest(parameterized.TestCase):

  def test_reads_cluster_and_task(self):
    text = json.dumps({"cluster": JOBS, "task": {"type": "ps", "index": 0}})
    self.assertEqual(cluster_spec.from_tf_config(text),
                     cluster_spec.members(JOBS, "ps", 0))

  def test_master_is_the_chief(self):
    text = json.dumps({"cluster": {"master": ["a:1"], "worker": ["b:1"]},
                       "task": {"type": "master", "index": 0}})
    found = cluster_spec.from_tf_config(text)
    self.assertEqual(found.own, found.chief)
    self.assertEqual(str(found.own), "chief 0 (a:1)")

  @parameterized.named_parameters(
      ("missing", None), ("no_json", "{"), ("no_task", '{"cluster": {}}'),
      ("no_type", '{"cluster": {}, "task": {}}'), ("list", "[]"),
      ("other_task", '{"cluster": {}, "task": 1}'))
  def test_errors(self, text):
    with self.assertRaisesRegex(ValueError, "`TF_CONFIG` must be JSON such"):
      cluster_spec.from_tf_config(text)


if __name__ == "__main__":
  absltest.main()
