"""Pictures of what the benchmark measured, one for each question."""

import pathlib
import statistics
from typing import Any, Callable, Dict, List, Optional, Tuple

from tools import benchmark_suites as suites
from tools import benchmark_tables as tables
from tools import command_line
from tools import networks

# One colour and one marker for each contender, in every picture.
_LOOKS = {
    "one": ("#555555", "s"), "loop": ("#1f77b4", "o"),
    "loop_unoptimized": ("#17becf", "o"), "cut": ("#9467bd", "v"),
    "mirrored": ("#d62728", "X"), "towers": ("#2ca02c", "D"),
    "per_tower": ("#8fce00", "^"), "converted": ("#e377c2", "P"),
    "balanced": ("#bcbd22", "<"), "replicated": ("#ff7f0e", ">"),
    "packed": ("#8c564b", "*"),
}

# From a place on the horizontal axis to the comparison there.
Line = Dict[float, suites.Comparison]


def check_available() -> None:
  """Checks that pictures can be drawn.

  Raises:
    UsageError: If matplotlib is not installed.
  """
  try:
    _figure(1, 1)
  except ImportError as error:
    raise command_line.UsageError(
        f"`--plots` must not be given without matplotlib: got {error}. Run: "
        "pip install matplotlib") from error


def _figure(width: float, height: float) -> Any:
  from matplotlib import figure  # Nothing else here needs it.
  return figure.Figure(figsize=(width, height), dpi=110,
                       layout="constrained")


def draw_all(results: tables.Results, folder: str) -> List[pathlib.Path]:
  """Draws each picture that there are figures for; returns the files."""
  drawn = {
      "step_time.png": _bars(
          results, "step", "time of a step, to that of {base}",
          relative=True),
      "memory.png": _bars(
          results, "step_memory", "peak memory of steps, MB",
          relative=False),
      "rows.png": _growth(
          results, lambda c: c.rows, "rows per tower",
          lambda c: (c.model, c.num_towers),
          ("step", "examples_per_second"), logarithmic=True),
      "growth_towers.png": _growth(
          results, lambda c: c.num_towers, "towers",
          lambda c: (c.model, c.rows), ("ops", "build")),
      "growth_depth.png": _growth(
          results, _depth, "layers with weights",
          lambda c: (c.num_towers, c.rows), ("ops", "build")),
  }
  paths = []
  for name, picture in drawn.items():
    if picture is not None:
      paths.append(pathlib.Path(folder, name))
      picture.savefig(paths[-1])
  return paths


def _depth(comparison: suites.Comparison) -> Optional[int]:
  if not comparison.model.startswith("resnet"):
    return None
  return networks.NETWORKS[comparison.model].batch_norms + 1


# --- Bars: contenders side by side --------------------------------------------


def _bars(results: tables.Results, figure: str, label: str, *,
          relative: bool) -> Optional[Any]:
  """Draws a panel for each comparison, with a bar for each contender."""
  panels = []
  for comparison, result in results.items():
    base = tables.base_of(comparison)
    bars = {}
    for contender in comparison.contenders:
      numbers = tables.figures_of(comparison, result, contender, figure)
      if relative and base is not None and numbers:
        numbers = ([1.0] if contender == base else
                   suites.ratios(result, contender, base, figure))
      if numbers:
        bars[contender] = numbers
    if len(bars) > 1:
      panels.append((comparison, base, bars))
  if not panels:
    return None
  rows = [len(bars) + 2 for _, _, bars in panels]
  picture = _figure(7.5, 0.29 * sum(rows) + 0.4)
  axes = picture.subplots(len(panels), 1, squeeze=False,
                          gridspec_kw={"height_ratios": rows})
  for axis, (comparison, base, bars) in zip(axes[:, 0], panels):
    _draw_bars(axis, bars, "{:.2f}" if relative else "{:.0f}")
    axis.set_title(str(comparison), loc="left", fontsize=10)
    axis.set_xlabel(label.format(base=f"`{base}`"), fontsize=8)
    if relative:
      axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
  return picture


def _draw_bars(axis: Any, bars: Dict[str, List[float]], form: str) -> None:
  names = list(bars)
  middles = [statistics.median(bars[name]) for name in names]
  errors = [[middle - _quartiles(bars[name])[0] for name, middle in
             zip(names, middles)],
            [_quartiles(bars[name])[1] - middle for name, middle in
             zip(names, middles)]]
  axis.barh(names, middles, height=0.7,
            color=[_LOOKS[name][0] for name in names])
  if any(map(any, errors)):
    axis.errorbar(middles, names, xerr=errors, fmt="none", ecolor="black",
                  elinewidth=1, capsize=2)
  most = max(middle + error for middle, error in zip(middles, errors[1]))
  for place, (middle, error) in enumerate(zip(middles, errors[1])):
    axis.text(middle + error + most * 0.012, place, form.format(middle),
              va="center", fontsize=8, zorder=3,
              bbox={"color": "white", "pad": 0.6})
  axis.set_xlim(0, most * 1.1)
  axis.invert_yaxis()
  axis.tick_params(labelsize=8)
  for side in ("top", "right"):
    axis.spines[side].set_visible(False)


def _quartiles(numbers: List[float]) -> Tuple[float, float]:
  if len(numbers) < 2:
    return numbers[0], numbers[0]
  low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
  return low, high


# --- Lines: growth with one thing ---------------------------------------------


def _growth(results: tables.Results,
            place: Callable[[suites.Comparison], Any], label: str,
            others: Callable[[suites.Comparison], Any],
            figures: Tuple[str, str], *,
            logarithmic: bool = False) -> Optional[Any]:
  """Draws figures by one thing, where all others are the same.

  Args:
    results: What was measured.
    place: Returns the place on the horizontal axis; None for none.
    label: What that is.
    others: Returns what must be the same along a line.
    figures: What to draw, one panel each.
    logarithmic: Whether both axes are logarithmic. Otherwise they start at 0,
      so that what grows linearly is a straight line.
  """
  lines: Dict[Any, Line] = {}
  for comparison in results:
    if place(comparison) is not None:
      key = (others(comparison), comparison.runs)
      lines.setdefault(key, {})[place(comparison)] = comparison
  lines = {key: line for key, line in lines.items() if len(line) > 2}
  if not lines:
    return None
  picture = _figure(9, 3.4 * len(lines))
  axes = picture.subplots(len(lines), 2, squeeze=False)
  for row, line in zip(axes, lines.values()):
    for axis, figure in zip(row, figures):
      _draw_lines(axis, results, line, figure)
      _set_axes(axis, sorted(line), logarithmic)
      axis.set_xlabel(label)
      axis.set_title(_title(line, figure), loc="left", fontsize=10)
    row[0].legend(fontsize=8)
  return picture


def _draw_lines(axis: Any, results: tables.Results, line: Line,
                figure: str) -> None:
  names = dict.fromkeys(
      name for comparison in line.values() for name in comparison.contenders)
  scale = tables.FIGURES[figure].scale
  for name in names:
    points = []
    for place in sorted(line):
      numbers = tables.figures_of(line[place], results[line[place]], name,
                                  figure)
      if numbers:
        points.append((place, scale * statistics.median(numbers)))
    colour, marker = _LOOKS[name]
    if points:
      axis.plot(*zip(*points), color=colour, marker=marker, label=name,
                markersize=5, linewidth=1.4)


def _set_axes(axis: Any, places: List[float], logarithmic: bool) -> None:
  shown = places
  if logarithmic:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.minorticks_off()
  else:
    axis.set_xlim(0, places[-1] * 1.05)
    axis.set_ylim(bottom=0)
    # Labels of places that lie close together would cover each other.
    shown = [
        place for place, following in zip(places, places[1:] + [None])
        if following is None or following - place > places[-1] * 0.04]
  axis.set_xticks(shown, [str(place) for place in shown])
  axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
  axis.grid(alpha=0.3)
  axis.tick_params(labelsize=8)


def _title(line: Line, figure: str) -> str:
  comparisons = list(line.values())
  parts = []
  for text, key in (("{}", "model"), ("{} towers", "num_towers"),
                    ("{} rows", "rows")):
    found = {getattr(comparison, key) for comparison in comparisons}
    if len(found) == 1:
      parts.append(text.format(*found))
  return f"{tables.FIGURES[figure].heading}: {', '.join(parts)}"
