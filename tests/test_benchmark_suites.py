"""Tests for tools/benchmark_suites.py and benchmark_tables.py."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from tools import benchmark_suites as suites
from tools import benchmark_tables as tables
from tools import benchmark_workers as workers
from tools import networks

PAIR = suites.Comparison("resnet8", 2, 4, ("loop", "towers"))


def run(turns=(), **figures):
  return {"turns": list(turns), **figures}


def target(limit, figure="step", **changes):
  comparison = dataclasses.replace(PAIR, **changes)
  return suites.AtMost("text", limit,
                       suites.Point(comparison, "towers", figure),
                       suites.Point(comparison, "loop", figure))


class TargetsTest(parameterized.TestCase):

  def test_ratios_are_of_the_same_turn(self):
    results = {PAIR: {"loop": [run([1.0, 2.0]), run([4.0])],
                      "towers": [run([1.1, 2.4]), run([4.4])]}}
    measured = target(1.15).measured(results)
    self.assertEqual(measured.text, "1.100 (1.100 to 1.150); 3 turns")
    self.assertTrue(measured.met)
    self.assertFalse(target(1.05).measured(results).met)

  def test_builds_that_the_other_missed_are_to_its_median(self):
    results = {PAIR: {"loop": [run(build=4.0)],
                      "towers": [run(build=1.0), run(build=2.0)]}}
    self.assertEqual(target(1.0, "build").measured(results).text,
                     "0.375 (0.312 to 0.438); 2 builds")

  def test_how_long_it_was_measured_does_not_matter(self):
    results = {PAIR: {"loop": [run([1.0])], "towers": [run([1.0])]}}
    self.assertEqual(target(1.0, turns=99, steps=77).measured(results).text,
                     "1.000")
    self.assertIsNone(target(1.0, rows=5).measured(results))
    self.assertIsNone(target(1.0, runs=False).measured(results))

  def test_figures_themselves_and_of_other_comparisons(self):
    more = dataclasses.replace(PAIR, num_towers=8)
    results = {PAIR: {"towers": [run(merge_ops=0, build=1.0, ops=1000)]},
               more: {"towers": [run(merge_ops=3, build=6.0, ops=4000)]}}
    for comparison, text, met in ((PAIR, "0", True), (more, "3", False)):
      point = suites.Point(comparison, "towers", "merge_ops")
      self.assertEqual(suites.AtMost("text", 0, point).measured(results),
                       suites.Measured(text, met))
    per_op = [suites.Point(c, "towers", "build_per_op") for c in (more, PAIR)]
    self.assertEqual(suites.AtMost("text", 1.25, *per_op).measured(results),
                     suites.Measured("1.500", False))

  @parameterized.parameters(
      ([100, 120, 160], "2: 100, 4: 120, 8: 160", True),
      ([100, 120, 161], "2: 100, 4: 120, 8: 161 (the line says 160)", False),
      ([100, 121, 163], "2: 100, 4: 121, 8: 163 (the line says 160)", False))
  def test_linear(self, ops, text, met):
    comparisons = tuple(
        dataclasses.replace(PAIR, num_towers=n) for n in (2, 4, 8))
    linear = suites.Linear("text", "towers", comparisons, (2, 4, 8))
    results = {c: {"towers": [run(ops=n)]} for c, n in zip(comparisons, ops)}
    self.assertEqual(linear.measured(results), suites.Measured(text, met))
    del results[comparisons[1]]
    self.assertIsNone(linear.measured(results))


class SuitesTest(absltest.TestCase):

  def test_all_can_be_run(self):
    for suite in suites.SUITES.values():
      self.assertNotEmpty(suite)
      self.assertLen(set(suite), len(suite))
      for comparison in suite:
        self.assertIn(comparison.model, networks.NETWORKS)
        self.assertContainsSubset(comparison.contenders, workers.DESCRIPTIONS)
        self.assertContainsSubset(comparison.once, comparison.contenders)
        self.assertGreaterEqual(comparison.steps, 1)

  def test_the_suite_of_targets_measures_each_of_them(self):
    """A figure of 1 for everything gives a row for each."""
    figures = {**dict.fromkeys(tables.FIGURES, 1.0), "merge_ops": 0.0}
    results = {
        comparison: {name: [run([1.0], **figures)]
                     for name in comparison.contenders}
        for comparison in suites.SUITES["targets"]}
    rows = tables.target_table(results).splitlines()
    self.assertEqual(rows[0], "| target | asked | measured | met |")
    self.assertLen(rows, 2 + len(suites.TARGETS))

  def test_suites_vary_what_was_asked(self):
    every = suites.SUITES["all"]
    self.assertContainsSubset([1, 2, 4, 8], {c.num_towers for c in every})
    self.assertContainsSubset([1, 128], {c.rows for c in every})
    self.assertContainsSubset(["resnet20", "resnet110", "unet"],
                              {c.model for c in every})

  def test_who_takes_part_once(self):
    comparison = dataclasses.replace(PAIR, once=("loop",))
    self.assertEqual(comparison.in_build(0), ["loop", "towers"])
    self.assertEqual(comparison.in_build(1), ["towers"])

  def test_names(self):
    self.assertEqual(str(PAIR), "resnet8, 2 towers of 4 rows")
    self.assertEqual(str(suites.Comparison("unet", 1, 1, runs=False)),
                     "unet, 1 tower of 1 row, built only")


class TablesTest(absltest.TestCase):

  def test_medians_quartiles_and_ratios(self):
    result = {
        "loop": [run([0.5, 0.5], build=b, ops=10) for b in (1.0, 2.0, 4.0)],
        "towers": [run([0.5, 1.0], build=b, ops=20) for b in (3.0, 4.0, 4.0)],
    }
    lines = tables.table(PAIR, result).splitlines()
    self.assertEqual(
        lines[0], "| resnet8, 2 towers of 4 rows | `loop` | `towers` |")
    self.assertEqual(lines[1], "| --- | ---: | ---: |")
    self.assertIn("| build, s | 2.00 (1.50 to 3.00) | "
                  "4.00 (3.50 to 4.00) **2.00** |", lines)
    self.assertIn("| ops | 10 | 20 **2.00** |", lines)
    self.assertIn("| step, s | 0.5000 | 0.7500 (0.5000 to 1.0000) **1.50** |",
                  lines)
    self.assertIn("| examples/s | 16 | 12 (8 to 16) |", lines)
    self.assertLen(lines, 6)

  def test_base_is_one_where_no_loop_takes_part(self):
    comparison = dataclasses.replace(PAIR, contenders=("one", "towers"))
    result = {"one": [run(ops=10)], "towers": [run(ops=5)]}
    self.assertIn("| ops | 10 | 5 **0.50** |",
                  tables.table(comparison, result))

  def test_figures_that_a_contender_lacks_are_left_blank(self):
    result = {"loop": [run(ops=10)], "towers": [run()]}
    self.assertIn("| ops | 10 |  |", tables.table(PAIR, result))

  def test_report_says_what_was_measured_where(self):
    machine = tables.describe_machine(3)
    results = {PAIR: {"loop": [run([1.0])], "towers": [run([1.0])]}}
    text = tables.report(machine, results)
    self.assertRegex(text, r"\d+ cores \(.+\), 3 threads, TensorFlow \d")
    self.assertIn(f"NumPy {machine['numpy']}, Python {machine['python']}", text)
    self.assertIn("- `loop`: the tower loop of the CIFAR-10 tutorial", text)
    self.assertNotIn("asked", text)

  def test_json_and_back(self):
    results = {PAIR: {"loop": [run([1.0], ops=3)], "towers": [run([2.0])]}}
    machine = {"cores": 2}
    content = tables.to_json(machine, results)
    self.assertEqual(tables.from_json(content), (machine, results))

  def test_rejects_other_json(self):
    for content in ({}, [], {"comparisons": [{"model": 1}], "machine": {}},
                    {"comparisons": [{"results": {}, "x": 1}], "machine": {}}):
      with self.assertRaisesRegex(ValueError, "`content` must be what the"):
        tables.from_json(content)


if __name__ == "__main__":
  absltest.main()
