"""Tests that tools on damaged files and odd flags end with one clear line.

What is drawn is the same in each run; `python tests/nightly.py --what=tools`
draws others, and many more.
"""

import collections

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
import numpy as np

import fuzzed_tools


def each(examples, draw):
  """Checks what is drawn; returns how many inputs succeeded or were refused."""
  outcomes = collections.Counter()

  @hypothesis.settings(
      max_examples=examples, deadline=None, database=None, derandomize=True,
      print_blob=False, phases=[hypothesis.Phase.generate],
      suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(draw)
  def holds(case):
    outcomes[fuzzed_tools.check(case) == "success"] += 1

  holds()
  return outcomes


class FuzzedToolsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (name.replace(".", "_"), name) for name in fuzzed_tools.TARGETS)
  def test_whole_files_are_read(self, target):
    """Else what follows would test no more than that a file is missing."""
    said = fuzzed_tools.check(fuzzed_tools.Damaged(target, ()))
    if target in ("evaluate", "export", "precise_batch_norm"):
      # These would take long; the run's checkpoint is of another model.
      self.assertRegex(said, "must hold")
    else:
      self.assertEqual(said, "success")

  def test_damaged_files(self):
    outcomes = each(500, fuzzed_tools.damages())
    self.assertGreater(min(outcomes.values()), 40)

  def test_command_lines(self):
    outcomes = each(400, fuzzed_tools.command_lines())
    self.assertGreater(outcomes[False], 200)

  # What was found by drawing, and must stay found.
  @parameterized.named_parameters(
      ("empty_array", "predict", 1, "empty", 0, 0),
      ("header_of_array", "predict", 1, "insert", 407, 153),
      ("figures", "benchmark", 0, "other_json", 27, 21),
      ("machine", "benchmark", 0, "other_json", 0, 5),
  )
  def test_refuses(self, target, file, kind, place, value):
    edit = fuzzed_tools.Edit(file, kind, place, value)
    said = fuzzed_tools.check(fuzzed_tools.Damaged(target, (edit,)))
    self.assertRegex(said, "^[a-z_]*.py: `--[a-z]+` must ")


class CheckTest(absltest.TestCase):
  """The check itself must be able to fail."""

  def check(self, run):
    fuzzed_tools.TARGETS["mine"] = (
        lambda folder: np.save(folder / "a.npy", np.ones(3)), run)
    self.addCleanup(fuzzed_tools.TARGETS.pop, "mine")
    return fuzzed_tools.check(fuzzed_tools.Damaged("mine", ()))

  def test_passes_success(self):
    self.assertEqual(self.check(lambda folder: 0), "success")

  def test_status_without_a_line(self):
    with self.assertRaisesRegex(AssertionError, "must succeed, or end with"):
      self.check(lambda folder: 2)

  def test_changed_file(self):
    def run(folder):
      (folder / "a.npy").write_bytes(b"")
      return 0
    with self.assertRaisesRegex(AssertionError, r"it changed \['a.npy'\]"):
      self.check(run)

  def test_traceback(self):
    def run(folder):
      raise KeyError(str(folder.name))
    with self.assertRaisesRegex(KeyError, "tmp"):
      self.check(run)


if __name__ == "__main__":
  absltest.main()
