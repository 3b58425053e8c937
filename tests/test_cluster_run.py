"""Tests of train.py on clusters, as processes that launch.py starts."""

import os
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import cluster_cases
import numpy as np
import run_cases
from tools import cluster_run
from tools import train
from tools import training
from tools import training_options

ROOT = pathlib.Path(__file__).resolve().parents[1]

# At this rate, rounding does not grow within so few steps.
FLAGS = ("--steps=12", "--evaluate_every=6", "--batch_size=17",
         "--optimizer=adam", "--learning_rate=0.0003", "--model=resnet8")


class ClusterRunTest(parameterized.TestCase):

  def launched(self, launch_flags, flags):
    """Runs a cluster; returns its logdir and what it printed."""
    logdir = self.create_tempdir().full_path
    done = subprocess.run(
        [sys.executable, "tools/launch.py", *launch_flags, "--",
         f"--logdir={logdir}", *flags], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=500,
        check=False)
    logs = "".join(path.read_text(errors="replace")
                   for path in sorted(pathlib.Path(logdir, "logs").iterdir()))
    self.assertEqual(done.returncode, 0, done.stdout + logs)
    return logdir, done.stdout + logs

  def alone(self, *flags):
    logdir = self.create_tempdir().full_path
    training.run(train.parse(["train.py", *FLAGS, *flags,
                              f"--logdir={logdir}"]))
    return logdir

  def assert_same_run(self, logdir, other):
    found, expected = map(run_cases.checkpoint, (logdir, other))
    self.assertCountEqual(found, expected)
    for name, value in expected.items():
      np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4,
                                 err_msg=name)

  def test_in_graph_with_an_evaluator_is_the_run_of_one_process(self):
    logdir, text = self.launched(["--workers=2", "--ps=1", "--evaluator"],
                                 FLAGS)
    self.assertRegex(text, "step 12: test accuracy: 0")
    self.assert_same_run(logdir, self.alone())

  def test_between_graph_trains_together(self):
    """Convnet has batch norm over a worker's images: it is another run."""
    flags = (*FLAGS, "--replication=between_graph")
    logdir, text = self.launched(["--workers=2", "--ps=2"], flags)
    self.assertRegex(text, "test accuracy: 0")
    self.assertEqual(run_cases.checkpoint(logdir)["global_step"], 12)
    # A run of one process goes on from its checkpoint.
    result = training.run(train.parse(
        ["train.py", *FLAGS, f"--logdir={logdir}", "--steps=13"]))
    self.assertEqual(result.step, 13)

  def test_async_learns_the_digits(self):
    _, text = self.launched(
        ["--workers=2", "--ps=1"],
        ["--replication=between_graph", "--nosync", "--steps=500",
         "--evaluate_every=500"])
    accuracy = float(text.rpartition("test accuracy: ")[2].split()[0])
    self.assertGreaterEqual(accuracy, 0.97)


class FlagsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("no_logdir", dict(logdir=None), {}, "`--logdir` must be given on a"),
      ("keep", dict(remainder="keep"), {}, "`--remainder` must be drop or"),
      ("copies", dict(variables="replicated"), {},
       "`--variables` must be shared on a cluster: got replicated"),
      ("async_in_graph", {}, dict(replication="in_graph", sync=False),
       "`--nosync` must come with `--replication=between_graph`"),
      ("accumulation", dict(accumulate_steps=2), {},
       "must not be given with --accumulate_steps as they are"),
      ("two_optimizers", dict(model="dcgan"), {}, "with --model as they are"),
      ("no_workers", {}, dict(worker_hosts=None),
       "the flags must describe a cluster: `jobs` must hold a worker"),
      ("bad_address", {}, dict(worker_hosts=["a"]),
       "the flags must describe a cluster: `jobs` must hold addresses as host"),
  )
  def test_errors(self, options, cluster, message):
    options = training_options.Options(**{"logdir": "/tmp", **options})
    cluster = cluster_run.ClusterOptions(**{
        "job_name": "worker", "worker_hosts": ["a:1"], "ps_hosts": ["b:1"],
        "replication": "between_graph", **cluster})
    with self.assertRaisesRegex(training_options.UsageError, message):
      cluster_run.started(cluster, options)

  def test_port_in_use_and_missing_tasks_are_one_line(self):
    addresses = cluster_cases.jobs(1, 1)
    cluster = cluster_run.ClusterOptions(
        job_name="worker", worker_hosts=addresses["worker"],
        ps_hosts=addresses["ps"], time_limit=1.0)
    logdir = self.create_tempdir().full_path
    options = training_options.Options(logdir=logdir, steps=1)
    with self.assertRaisesRegex(training_options.UsageError,
                                "waited 1 s for tasks that are not up: ps 0"):
      training.run(options, cluster)
    with self.assertRaisesRegex(training_options.UsageError,
                                "a free port: got worker 0"):
      training.run(options, cluster)

  def test_tf_config(self):
    text = '{"cluster": {"worker": ["a"]}, "task": {"type": "worker"}}'
    with mock.patch.dict(os.environ, TF_CONFIG=text):
      cluster = cluster_run.ClusterOptions()
      self.assertTrue(cluster.in_use)
      with self.assertRaisesRegex(training_options.UsageError, "got 'a'"):
        cluster_run.started(
            cluster, training_options.Options(logdir="/tmp"))


if __name__ == "__main__":
  absltest.main()
