"""The benchmark's figures as Markdown, and as JSON and back."""

import dataclasses
import os
import pathlib
import platform
import statistics
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf
import towers

from tools import benchmark_suites as suites
from tools import benchmark_workers as workers

Results = Dict[suites.Comparison, suites.Result]

# Who the ratios are to: the first of these that takes part.
BASES = ("loop", "one")


class Figure(NamedTuple):
  """A line of the tables: heading, and how to write a value."""
  heading: str
  form: str = "{:.2f}"
  scale: float = 1.0


FIGURES = {
    "step": Figure("step, s", "{:.4f}"),
    "examples_per_second": Figure("examples/s", "{:.0f}"),
    "build": Figure("build, s"),
    "first_step": Figure("first step, s"),
    "build_and_first_step": Figure("build + first step, s"),
    "ops": Figure("ops", "{:,.0f}"),
    "graph_bytes": Figure("graph, MB", scale=2.0**-20),
    "peak_memory": Figure("peak memory, MB", "{:.0f}"),
    "step_memory": Figure("peak memory of steps, MB", "{:.0f}"),
    "bytes_between_devices": Figure("between devices, MB a step",
                                    scale=2.0**-20),
}


def base_of(comparison: suites.Comparison) -> Optional[str]:
  """Returns the contender that ratios are to."""
  return next((b for b in BASES if b in comparison.contenders), None)


def figures_of(comparison: suites.Comparison, result: suites.Result,
               contender: str, figure: str) -> List[float]:
  """Returns the values of one cell, one per turn or build."""
  if figure == "examples_per_second":
    rows = comparison.rows * comparison.num_towers
    return [rows / time for time in suites.values(result, contender, "step")]
  return [v for v in suites.values(result, contender, figure) if v is not None]


def table(comparison: suites.Comparison, result: suites.Result) -> str:
  """Returns a comparison's figures as a Markdown table."""
  base = base_of(comparison)
  lines = [[str(comparison)] + [f"`{name}`" for name in comparison.contenders],
           ["---"] + ["---:"] * len(comparison.contenders)]
  for name, figure in FIGURES.items():
    cells = []
    for contender in comparison.contenders:
      numbers = figures_of(comparison, result, contender, name)
      ratios = []
      if base != contender and name != "examples_per_second":
        ratios = suites.ratios(result, contender, base, name) if base else []
      cells.append(_cell(figure, numbers, ratios))
    if any(cells):
      lines.append([figure.heading] + cells)
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(figure: Figure, numbers: Sequence[float],
          ratios: Sequence[float]) -> str:
  if not numbers:
    return ""
  text = suites.spread([n * figure.scale for n in numbers], figure.form)
  if ratios:
    text += f" **{statistics.median(ratios):.2f}**"
  return text


def target_table(results: Results) -> str:
  """Returns a row for each target of which anything was measured."""
  lines = ["| target | asked | measured | met |", "| --- | --- | --- | --- |"]
  for target in suites.TARGETS:
    measured = target.measured(results)
    if measured is not None:
      met = "yes" if measured.met else "**no**"
      lines.append(
          f"| {target.text} | {target.asked} | {measured.text} | {met} |")
  return "\n".join(lines) if len(lines) > 2 else ""


def report(machine: Dict[str, Any], results: Results) -> str:
  """Returns all tables, and what there is to know about them."""
  parts = [target_table(results)]
  parts += [table(*item) for item in results.items()]
  names = dict.fromkeys(
      name for comparison in results for name in comparison.contenders)
  parts.append("\n".join(
      f"- `{name}`: {workers.DESCRIPTIONS[name]}" for name in names))
  parts.append(
      "Medians (quartiles), of turns for the time of a step and of builds for "
      "the rest. In bold the ratio to `loop`, or to `one` where that does not "
      "take part: the median of the ratios in the same turn or build. Peak "
      "memory is that of the process; that of steps is the peak from the first "
      "step on, less what was resident before it. What travels between devices "
      "is what the graph says; for `mirrored`, what a ring sends.")
  parts.append(
      f"{machine['cores']} cores ({machine['processor']}), "
      f"{machine['threads']} threads, TensorFlow {machine['tensorflow']}, "
      f"NumPy {machine['numpy']}, Python {machine['python']}, towers "
      f"{machine['towers']}; load before: {machine['load_before']}; took "
      f"{machine.get('minutes', 0):.1f} minutes.")
  return "\n\n".join(part for part in parts if part)


def describe_machine(threads: int) -> Dict[str, Any]:
  """Returns what the figures depend on beside the code."""
  cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
           else os.cpu_count())
  return {
      "cores": cores,
      "processor": _processor(),
      "tensorflow": tf.__version__,
      "numpy": np.__version__,
      "python": platform.python_version(),
      "towers": towers.__version__,
      "threads": threads or cores,
      "load_before": round(os.getloadavg()[0], 2),
  }


def _processor() -> str:
  try:
    for line in pathlib.Path("/proc/cpuinfo").read_text("utf-8").splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  except OSError:
    pass
  return platform.machine()


def to_json(machine: Dict[str, Any], results: Results) -> Dict[str, Any]:
  """Returns everything in a form for `json.dump`."""
  return {
      "machine": machine,
      "comparisons": [
          {**dataclasses.asdict(comparison), "results": result}
          for comparison, result in results.items()
      ],
  }


def from_json(content: Dict[str, Any]) -> Any:
  """Returns the machine and the results that `to_json` had.

  Raises:
    ValueError: If `content` is something else.
  """
  results = {}
  try:
    for entry in content["comparisons"]:
      fields = {key: tuple(value) if isinstance(value, list) else value
                for key, value in entry.items() if key != "results"}
      results[suites.Comparison(**fields)] = entry["results"]
    return content["machine"], results
  except (KeyError, TypeError) as error:
    raise ValueError("`content` must be what the benchmark wrote: got another "
                     f"structure ({error}).") from error
