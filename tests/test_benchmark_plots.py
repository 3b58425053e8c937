"""Tests for tools/benchmark_plots.py."""

import dataclasses
import pathlib
import sys
from unittest import mock

from absl.testing import absltest

from tools import benchmark_plots as plots
from tools import benchmark_suites as suites
from tools import benchmark_tables as tables
from tools import benchmark_workers as workers
from tools import command_line

BASE = suites.Comparison("resnet20", 2, 8, ("one", "loop", "towers"))


def result(comparison, factor=1.0):
  """Returns figures that grow with towers, rows and `factor`."""
  size = comparison.num_towers * factor
  return {
      name: [{**dict.fromkeys(tables.FIGURES, size * (k + 1)),
              "turns": [size * comparison.rows * (k + 1), size]}]
      for k, name in enumerate(comparison.contenders)}


class PlotsTest(absltest.TestCase):

  def draw(self, comparisons):
    folder = self.create_tempdir().full_path
    results = {c: result(c) for c in comparisons}
    paths = plots.draw_all(results, folder)
    for path in paths:
      self.assertEqual(path.read_bytes()[1:4], b"PNG")
    self.assertCountEqual(paths, pathlib.Path(folder).iterdir())
    return [path.name for path in paths]

  def test_one_comparison(self):
    self.assertEqual(self.draw([BASE]), ["step_time.png", "memory.png"])

  def test_growth_where_there_are_three_points(self):
    towers = [dataclasses.replace(BASE, num_towers=n) for n in (1, 2, 8)]
    self.assertIn("growth_towers.png", self.draw(towers))
    self.assertNotIn("growth_towers.png", self.draw(towers[1:]))
    self.assertIn("rows.png", self.draw(
        [dataclasses.replace(BASE, rows=n) for n in (1, 2, 8)]))
    self.assertIn("growth_depth.png", self.draw(
        [dataclasses.replace(BASE, model=f"resnet{n}")
         for n in (20, 32, 110)]))

  def test_bars_are_ratios_of_the_same_turn(self):
    results = {BASE: {
        "loop": [{"turns": [1.0, 2.0]}], "towers": [{"turns": [3.0, 6.0]}]}}
    picture = plots._bars(results, "step", "{base}", relative=True)
    widths = [bar.get_width() for bar in picture.axes[0].patches]
    self.assertEqual(widths, [1.0, 3.0])

  def test_lines_are_medians_at_their_places(self):
    comparisons = [dataclasses.replace(BASE, num_towers=n) for n in (2, 4, 8)]
    picture = plots._growth(
        {c: result(c) for c in comparisons}, lambda c: c.num_towers, "towers",
        lambda c: c.rows, ("ops", "build"))
    line = picture.axes[0].get_lines()[1]
    self.assertEqual(line.get_label(), "loop")
    self.assertEqual(list(line.get_xdata()), [2, 4, 8])
    self.assertEqual(list(line.get_ydata()), [4, 8, 16])

  def test_every_contender_has_a_look(self):
    self.assertCountEqual(plots._LOOKS, workers.DESCRIPTIONS)
    self.assertLen(set(plots._LOOKS.values()), len(plots._LOOKS))

  def test_without_matplotlib(self):
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
      with self.assertRaisesRegex(
          command_line.UsageError, "`--plots` must not be given without "
          "matplotlib: got .* pip install matplotlib"):
        plots.check_available()


if __name__ == "__main__":
  absltest.main()
