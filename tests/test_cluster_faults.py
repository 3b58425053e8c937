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
KILLS = 5  # In each run.
# A cluster may be through before the last kill when the machine is busy.
ATTEMPTS = 3


@absltest.skipUnless(os.path.exists("/proc/self/environ"), "Needs /proc.")
class KillTest(parameterized.TestCase):

  def killed(self, flags, steps=fault_cases.STEPS):
    """Trains in a cluster of which tasks are killed.

    Args:
      flags: Those of train.py.
      steps: How many the run makes.

    Returns:
      The last checkpoint, which evaluation reads as well, and who was killed
      when.
    """
    seeds = [SEED + 1000 * attempt for attempt in range(ATTEMPTS)]
    for seed in seeds:
      try:
        return self.killed_once(flags, steps, seed)
      except fault_cases.EndedBefore:
        pass
    return self.fail(f"all ended before the last kill, with seeds {seeds}")

  def killed_once(self, flags, steps, seed):
    folder = self.create_tempdir().full_path
    with fault_cases.Cluster(folder, flags) as cluster:
      done = fault_cases.kill_at_random(cluster, seed, KILLS, steps)
      what = f"seed {seed}: {done}"
      self.assertEqual(cluster.status(), 0, f"{what}\n{cluster.output()}")
      fault_cases.wait_until(lambda: not cluster.all_processes(),
                             f"the end of all processes; {what}")
    with run_cases.without_batch_norm():
      self.assertEqual(
          evaluate.main(["evaluate.py", f"--logdir={cluster.logdir}"]), 0)
    return run_cases.checkpoint(cluster.logdir), what

  def alone(self, flags):
    """Trains in this process; returns the last checkpoint."""
    logdir = self.create_tempdir().full_path
    with run_cases.without_batch_norm():
      training.run(train.parse(["train.py", *flags, f"--logdir={logdir}"]))
    return run_cases.checkpoint(logdir)

  @parameterized.parameters("between_graph", "in_graph")
  def test_killed_run_ends_as_one_that_is_left_alone(self, replication):
    """What is lost are the steps since a checkpoint; they are made again."""
    flags = fault_cases.flags(self.create_tempdir().full_path)
    found, what = self.killed([*flags, f"--replication={replication}"])
    expected = self.alone(flags)
    self.assertEqual(found["global_step"], fault_cases.STEPS, what)
    self.assertCountEqual(found, expected)
    for name, value in expected.items():
      np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4,
                                 err_msg=f"{name}; {what}")

  def test_killed_run_without_sync_ends_and_has_learnt(self):
    """Workers that do not wait for each other make no same run twice."""
    steps = 1000  # They are fast.
    folder = self.create_tempdir().full_path
    flags = fault_cases.flags(folder, steps)
    found, what = self.killed(
        [*flags, "--replication=between_graph", "--nosync"], steps)
    # Each worker may be in the midst of a step when the last one is made.
    self.assertBetween(found["global_step"], steps, steps + 1, what)
    self.assertCountEqual(found, self.alone([*flags, "--steps=1"]), what)
    loss = fault_cases.loss(folder, found["kernel"])
    self.assertLess(loss, 0.5, what)  # 1.1 by chance, 0.1 when left alone.


if __name__ == "__main__":
  absltest.main()
