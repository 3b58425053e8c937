"""What the benchmark measures: comparisons, suites of them, and targets."""

import dataclasses
import statistics
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

# For each contender, the figures of each of its builds. A build's "turns" has,
# for each of its turns, the median time of a step in seconds.
Result = Dict[str, List[Dict[str, Any]]]

ALL = ("one", "loop", "cut", "mirrored", "towers", "per_tower", "balanced",
       "replicated")


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Contenders that take turns at the same work.

  Fields:
    model: One of `networks.NETWORKS`.
    num_towers: Number of towers.
    rows: Rows of the batch for each tower.
    contenders: Who takes part.
    builds: How many times all is built, each in new processes.
    turns: How many turns each contender has after each build.
    steps: Timed steps of a turn.
    once: Contenders that take part in the first build only.
    runs: Whether steps are run, the first one at least; otherwise all is built
      only.
  """
  model: str = "resnet20"
  num_towers: int = 2
  rows: int = 32
  contenders: Tuple[str, ...] = ALL
  builds: int = 1
  turns: int = 8
  steps: int = 5
  once: Tuple[str, ...] = ()
  runs: bool = True

  def __str__(self) -> str:
    towers = "1 tower" if self.num_towers == 1 else f"{self.num_towers} towers"
    rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
    built = "" if self.runs else ", built only"
    return f"{self.model}, {towers} of {rows}{built}"

  @property
  def work(self) -> Tuple[Any, ...]:
    """What is done, however often and by whomever."""
    return self.model, self.num_towers, self.rows, self.runs

  def in_build(self, build: int) -> List[str]:
    """Returns who takes part in a build."""
    return [name for name in self.contenders
            if build == 0 or name not in self.once]


class Point(NamedTuple):
  """A figure of a contender in a comparison."""
  comparison: Comparison
  contender: str
  figure: str


class Measured(NamedTuple):
  """What came of a target: text, and whether that is what was asked."""
  text: str
  met: bool


def values(result: Result, contender: str, figure: str) -> List[Any]:
  """Returns a figure, one per build (None where it is lacking).

  The figure "step" has one value per turn instead; "build_per_op" is the time
  to build, per op, in milliseconds.
  """
  runs = result.get(contender, [])
  if figure == "step":
    return [time for run in runs for time in run.get("turns", ())]
  if figure == "build_per_op":
    return [1000 * run["build"] / run["ops"] if "ops" in run else None
            for run in runs]
  return [run.get(figure) for run in runs]


def ratios(result: Result, contender: str, base: str,
           figure: str) -> List[float]:
  """Returns ratios to another contender, in the same turn or build.

  Where the other took part in fewer builds, the rest are to its median.
  """
  ours = [v for v in values(result, contender, figure) if v is not None]
  theirs = [v for v in values(result, base, figure) if v is not None]
  if not theirs or not all(theirs):
    return []
  middle = statistics.median(theirs)
  padded = theirs + [middle] * (len(ours) - len(theirs))
  return [a / b for a, b in zip(ours, padded)]


def found_in(results: Dict[Comparison, Result], point: Point) -> Result:
  """Returns the result that a point is in, however long it was measured."""
  wanted = point.comparison
  for comparison, result in results.items():
    if (comparison.work == wanted.work and
        point.contender in comparison.contenders):
      return result
  return {}


def spread(numbers: Sequence[float], form: str = "{:.2f}") -> str:
  """Writes the median, and the quartiles where there are several numbers."""
  middle = form.format(statistics.median(numbers))
  if len(numbers) < 2:
    return middle
  low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
  low, high = form.format(low), form.format(high)
  return middle if low == high else f"{middle} ({low} to {high})"


@dataclasses.dataclass(frozen=True)
class AtMost:
  """Asks that a figure be at most so much, or so many times that of `base`."""
  text: str
  limit: float
  of: Point
  base: Optional[Point] = None

  @property
  def asked(self) -> str:
    return (f"at most {self.limit:.2f}" if self.base else
            f"at most {self.limit:g}")

  def measured(self, results: Dict[Comparison, Result]) -> Optional[Measured]:
    """Returns what was measured; None if nothing was."""
    result = found_in(results, self.of)
    ours = [v for v in values(result, self.of.contender, self.of.figure)
            if v is not None]
    form = "{:.3f}"
    if self.base is None:
      found, form = ours, "{:g}"
    elif self.base.comparison == self.of.comparison:
      found = ratios(result, self.of.contender, self.base.contender,
                     self.of.figure)
    else:
      other = found_in(results, self.base)
      theirs = [v for v in values(other, self.base.contender, self.base.figure)
                if v is not None]
      found = [v / statistics.median(theirs) for v in ours if theirs]
    if not found:
      return None
    kind = "turns" if self.of.figure == "step" else "builds"
    number = f"; {len(found)} {kind}" if len(found) > 1 else ""
    return Measured(spread(found, form) + number,
                    statistics.median(found) <= self.limit)


@dataclasses.dataclass(frozen=True)
class Linear:
  """Asks that the ops at the last point lie on the line through the others.

  The line goes through the first two of at least three points.
  """
  text: str
  contender: str
  comparisons: Tuple[Comparison, ...]
  sizes: Tuple[int, ...]
  asked: str = "as many as the line says"

  def measured(self, results: Dict[Comparison, Result]) -> Optional[Measured]:
    """Returns what was measured; None if a point is missing."""
    ops = []
    for comparison in self.comparisons:
      point = Point(comparison, self.contender, "ops")
      found = values(found_in(results, point), self.contender, "ops")
      if not found or found[0] is None:
        return None
      ops.append(found[0])
    a, b = self.sizes[:2]
    each, rest = divmod(ops[1] - ops[0], b - a)
    said = [ops[0] + each * (size - a) for size in self.sizes]
    text = ", ".join(f"{size}: {number:,}"
                     for size, number in zip(self.sizes, ops))
    if rest or said != ops:
      text += f" (the line says {said[-1]:,})"
    return Measured(text, not rest and said == ops)


# --- The suites ---------------------------------------------------------------

ONE_TOWER = Comparison(num_towers=1, contenders=("one", "towers"),
                       turns=30, steps=8)
SMALL = Comparison(rows=32, turns=16, steps=6)
LARGE = Comparison(rows=128, turns=9, steps=3)
DEEP = Comparison("resnet110", 8, 4, ("one", "loop", "mirrored", "towers"),
                  builds=3, turns=1, steps=2, once=("mirrored",))


def _built(model: str, num_towers: int) -> Comparison:
  return Comparison(model, num_towers, 4, ("towers",), runs=False, builds=3)


# Ops and time to build of `towers` alone.
BY_TOWERS = tuple(_built("resnet110", n) for n in (2, 4, 8, 64))
BY_DEPTH = tuple(_built(f"resnet{depth}", 2) for depth in (20, 56, 110))


def _ratio(text: str, limit: float, comparison: Comparison, base: str,
           figure: str = "step") -> AtMost:
  return AtMost(text, limit, Point(comparison, "towers", figure),
                Point(comparison, base, figure))


TARGETS = (
    _ratio("one tower, step time, to plain code", 1.01, ONE_TOWER, "one"),
    AtMost("one tower, merge ops", 0, Point(ONE_TOWER, "towers", "merge_ops")),
    _ratio("step time, 2 towers of 128 rows, to `loop`", 1.10, LARGE, "loop"),
    _ratio("step time, 2 towers of 32 rows, to `loop`", 1.15, SMALL, "loop"),
    _ratio("step time, 2 towers of 128 rows, to `one`", 1.10, LARGE, "one"),
    _ratio("step time, 2 towers of 32 rows, to `mirrored`", 0.70, SMALL,
           "mirrored"),
    _ratio("step time, 2 towers of 128 rows, to `mirrored`", 0.80, LARGE,
           "mirrored"),
    _ratio("ResNet-110 in 8 towers, build and first step, to `mirrored`", 0.10,
           DEEP, "mirrored", "build_and_first_step"),
    _ratio("ResNet-110 in 8 towers, build and first step, to `loop`", 1.00,
           DEEP, "loop", "build_and_first_step"),
    _ratio("ResNet-110 in 8 towers, peak memory, to `mirrored`", 0.45, DEEP,
           "mirrored", "peak_memory"),
    Linear("ops of ResNet-110 by towers", "towers", BY_TOWERS, (2, 4, 8, 64)),
    Linear("ops in 2 towers by layers", "towers", BY_DEPTH, (20, 56, 110)),
    AtMost("ResNet-110, build time per op, 64 towers to 8", 1.25,
           Point(BY_TOWERS[3], "towers", "build_per_op"),
           Point(BY_TOWERS[2], "towers", "build_per_op")),
    AtMost("2 towers, build time per op, ResNet-110 to ResNet-20", 1.25,
           Point(BY_DEPTH[2], "towers", "build_per_op"),
           Point(BY_DEPTH[0], "towers", "build_per_op")),
    _ratio("peak memory of a step, 2 towers of 128 rows, to `loop`", 1.05,
           LARGE, "loop", "step_memory"),
)

_GROWING = ("one", "loop", "towers", "per_tower", "replicated")

SUITES = {
    "targets": tuple(dict.fromkeys(
        (ONE_TOWER, SMALL, LARGE, DEEP, *BY_DEPTH, *BY_TOWERS))),
    "models": (
        Comparison("resnet20", 2, 32),
        Comparison("unet", 2, 4),
        Comparison("resnet110", 2, 8, turns=4, steps=3)),
    "rows": tuple(
        Comparison("resnet20", 2, rows, turns=6, steps=max(2, 64 // rows // 4))
        for rows in (1, 4, 8, 16, 32, 64, 128)),
    "towers": tuple(
        Comparison("resnet20", n, 8, _GROWING, turns=4, steps=4)
        for n in (1, 2, 4, 8)),
    "depth": tuple(
        Comparison(f"resnet{depth}", 2, 8, _GROWING, turns=3, steps=3)
        for depth in (20, 32, 44, 56, 110)),
}
SUITES["all"] = tuple(dict.fromkeys(
    comparison for suite in list(SUITES.values()) for comparison in suite))
