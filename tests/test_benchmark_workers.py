"""Tests for tools/benchmark_workers.py: the benchmark's processes."""

import io
import json
import time

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from tools import benchmark_workers as workers
from tools import command_line

SMALL = workers.Task("towers", "unet_small", 2, 1, threads=1)


def served(task, *requests):
  """Returns the answers of a worker in this process."""
  answers = io.StringIO()
  lines = [json.dumps({"do": do, **arguments}) for do, arguments in requests]
  workers.serve(task, lines, answers)
  return [json.loads(line) for line in answers.getvalue().splitlines()]


class ServeTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(
      *[name for name in workers.DESCRIPTIONS if name != workers.MIRRORED])
  def test_every_figure_of_every_contender(self, contender):
    task = workers.Task(contender, "unet_small", 2, 1)
    build, turn, end = served(
        task, ("build", {}), ("turn", {"steps": 3}), ("end", {}))
    self.assertAlmostEqual(build["build_and_first_step"],
                           build["build"] + build["first_step"])
    self.assertLen(turn["times"], 3)
    for value in (*build.values(), *turn["times"], end["ops"],
                  end["graph_bytes"], end["peak_memory"]):
      self.assertGreater(value, 0)
    self.assertGreaterEqual(end["step_memory"], 0)
    self.assertEqual(end["bytes_between_devices"] > 0, contender != "one")

  @parameterized.parameters((1, 0), (2, 1))
  def test_merge_ops(self, num_towers, least):
    task = workers.Task("towers", "unet_small", num_towers, 1, runs=False)
    _, end = served(task, ("build", {}), ("end", {}))
    self.assertEqual(end["merge_ops"] >= least, True)
    self.assertEqual(end["merge_ops"] == 0, num_towers == 1)

  def test_without_runs_it_only_builds(self):
    task = workers.Task("towers", "unet_small", 2, 1, runs=False)
    build, end = served(task, ("build", {}), ("end", {}))
    self.assertEqual(list(build), ["build"])
    self.assertNotIn("step_memory", end)

  def test_peak_is_forgotten(self):
    before = workers.resident_memory()
    block = bytearray(300 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    self.assertGreater(workers.peak_memory(), before + 250)
    del block
    workers.forget_peak_memory()
    self.assertLess(workers.peak_memory(), before + 250)

  def test_batch_is_the_same_for_all(self):
    one, other = (workers.batch(workers.Task(name, "unet_small", 3, 2))
                  for name in ("one", "towers"))
    self.assertAllEqual(one[0], other[0])
    self.assertEqual(one[0].shape, (6, 8, 8, 3))
    self.assertEqual(one[1].shape, (6, 8, 8))


class WorkerTest(tf.test.TestCase):

  def test_two_processes_take_turns(self):
    mirrored = workers.Task("mirrored", "unet_small", 2, 1, threads=1)
    with workers.Worker(SMALL) as one, workers.Worker(mirrored) as other:
      for worker in (one, other):
        self.assertGreater(worker.ask("build")["first_step"], 0)
      for worker in (one, other, one):
        self.assertLen(worker.ask("turn", steps=2)["times"], 2)
      ends = [worker.ask("end") for worker in (one, other)]
      for end in ends:
        self.assertGreater(end["bytes_between_devices"], 0)
      # The processes are apart, and that of `mirrored` has another graph.
      self.assertNotEqual(ends[0]["ops"], ends[1]["ops"])

  def test_failing_process_is_told_in_one_line(self):
    task = workers.Task("towers", "unet_small", 2, 0)
    start = time.perf_counter()
    with workers.Worker(task) as worker:
      with self.assertRaisesRegex(
          command_line.UsageError, "^`towers` must run unet_small in 2 towers "
          r"of 0 rows: it ended with status 1 \(.+\)\.$"):
        worker.ask("build")
        worker.ask("end")
    self.assertLess(time.perf_counter() - start, 120)


if __name__ == "__main__":
  tf.test.main()
