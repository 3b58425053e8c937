"""Tests that kill processes of clusters while they train."""

import os

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

import fault_cases
import run_cases
from tools import evaluate
from tools import train
from tools import training

# Another number kills at other moments.
SEED = int(os.environ.get("TOWERS_FAULT_SEED", "1"))


@absltest.skipUnless(os.path.exists("/proc/self/environ"), "Needs /proc.")
class KillTest(parameterized.TestCase):

  def alone(self, flags):
    """Trains in this process; returns the last checkpoint."""
    logdir = self.create_tempdir().full_path
    training.run(train.parse(["train.py", *flags, f"--logdir={logdir}"]))
    return run_cases.checkpoint(logdir)

  @parameterized.named_parameters(
      ("between_graph", "between_graph", 5), ("in_graph", "in_graph", 5))
  def test_killed_run_ends_as_one_that_is_left_alone(self, replication, kills):
    """What is lost are the steps since a checkpoint; they are made again."""
    folder = self.create_tempdir().full_path
    flags = fault_cases.flags(folder)
    with fault_cases.Cluster(
        folder, [*flags, f"--replication={replication}"]) as cluster:
      killed = fault_cases.kill_at_random(cluster, SEED, kills)
      status = cluster.status()
      what = f"seed {SEED}: {killed}"
      self.assertEqual(status, 0, f"{what}\n{cluster.output()}")
      fault_cases.wait_until(lambda: not cluster.all_processes(),
                               f"the end of all processes; {what}")
    with run_cases.without_batch_norm():
      self.assertEqual(
          evaluate.main(["evaluate.py", f"--logdir={cluster.logdir}"]), 0)
      expected = self.alone(flags)
    found = run_cases.checkpoint(cluster.logdir)
    self.assertEqual(found["global_step"], fault_cases.STEPS, what)
    self.assertCountEqual(found, expected)
    for name, value in expected.items():
      np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4,
                                 err_msg=f"{name}; {what}")


if __name__ == "__main__":
  absltest.main()
