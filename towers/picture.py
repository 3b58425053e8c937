"""Draws the devices of a graph, the towers on them, and what flows between.

Needs matplotlib, which is imported only here and only when something is drawn.
"""

import importlib
import pathlib
from typing import Any, Dict, List, Tuple

from towers import report_text

_FORMATS = (".png", ".svg", ".pdf")
_COLORS = {
    "parameters": "#1f77b4",
    "gradients": "#d62728",
    "moments": "#2ca02c",
    "inputs": "#9467bd",
    "other": "#7f7f7f",
    "control": "#c7c7c7",
}
_BOX_WIDTH, _BOX_HEIGHT = 2.6, 0.8
_COLUMN, _ROW = 6.5, 1.5  # Distances between boxes, in inches as the rest.
_NAMES_IN_BOX = 4


def draw(report: Any, path: str) -> None:
  """Draws an `inspection.Report` to a file.

  Args:
    report: The report.
    path: The file.

  Raises:
    ImportError: If matplotlib is not installed.
    ValueError: If the file's ending is no known format.
  """
  if pathlib.Path(path).suffix.lower() not in _FORMATS:
    raise ValueError(
        f"`path` must end in one of {', '.join(_FORMATS)}, which says the "
        f"format: got {path!r}.")
  figure_lib = _matplotlib("figure")
  patches = _matplotlib("patches")
  places = _places(report)
  left = min(x for x, _ in places.values())
  height = _ROW / 2 + max(y for _, y in places.values())
  figure = figure_lib.Figure(
      figsize=(_COLUMN - left + _BOX_WIDTH + 0.6, height + 0.6))
  axes = figure.add_axes([0, 0, 1, 1])
  axes.set_xlim(left - 0.3, _COLUMN + _BOX_WIDTH + 0.3)
  axes.set_ylim(height, -0.6)
  axes.set_axis_off()
  _draw_boxes(report, places, axes, patches)
  _draw_flows(report, places, axes, patches)
  axes.legend(
      handles=[patches.Patch(color=color, label=purpose)
               for purpose, color in _COLORS.items()],
      loc="upper center", ncol=len(_COLORS), frameon=False, fontsize=8)
  figure.savefig(path, dpi=100)


def _matplotlib(module: str) -> Any:
  try:
    return importlib.import_module(f"matplotlib.{module}")
  except ImportError as error:
    raise ImportError(
        "`matplotlib` must be installed to draw a report: expected "
        f"matplotlib.{module}, got {error}. Install it with `pip install "
        "matplotlib`.") from error


def _places(report: Any) -> Dict[str, Tuple[float, float]]:
  """Returns left edge and middle height of each device's box.

  Devices of towers stand on the right, below each other; on the left the one
  that has most of the variables, and those without towers.
  """
  towers = {tower.devices[0] for tower in report.towers if tower.devices}
  most = max(report.devices, key=lambda d: (d.num_bytes, d.ops)).device
  left = [most] + [d.device for d in report.devices
                   if d.device not in towers and d.device != most]
  right = [d.device for d in report.devices if d.device not in left]
  rows = max(len(left), len(right))
  places = {}
  for x, devices in ((0.0, left), (_COLUMN, right)):
    for k, device in enumerate(devices):
      places[device] = (x, (k + 0.5) * rows / len(devices) * _ROW)
  return places


def _draw_boxes(report: Any, places: Dict[str, Tuple[float, float]],
                axes: Any, patches: Any) -> None:
  towers: Dict[str, List[str]] = {}
  for tower in report.towers:
    if tower.devices:
      towers.setdefault(tower.devices[0], []).append(
          f"{tower.towers} {tower.index}")
  for use in report.devices:
    x, y = places[use.device]
    here = towers.get(use.device, [])
    names = ", ".join(here[:_NAMES_IN_BOX])
    if len(here) > _NAMES_IN_BOX:
      names += f" and {len(here) - _NAMES_IN_BOX} more"
    lines = [report_text.device_name(use.device), names,
             f"{use.ops:,} ops, variables of "
             f"{report_text.size(use.num_bytes)}"]
    axes.add_patch(patches.FancyBboxPatch(
        (x, y - _BOX_HEIGHT / 2), _BOX_WIDTH, _BOX_HEIGHT,
        boxstyle="round,pad=0.05", facecolor="#fff3d6" if here else "#eeeeee",
        edgecolor="black"))
    axes.text(x + _BOX_WIDTH / 2, y, "\n".join(filter(None, lines)),
              ha="center", va="center", fontsize=8)


def _draw_flows(report: Any, places: Dict[str, Tuple[float, float]],
                axes: Any, patches: Any) -> None:
  drawn: Dict[Tuple[str, str], int] = {}
  for flow in report.transfers:
    number = drawn.get((flow.source, flow.target), 0)
    drawn[flow.source, flow.target] = number + 1
    start = _side(places, flow.source, flow.target)
    end = _side(places, flow.target, flow.source)
    bend = 0.08 + 0.1 * number
    color = _COLORS[flow.purpose]
    axes.add_patch(patches.FancyArrowPatch(
        start, end, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>",
        mutation_scale=10, color=color, linewidth=1.0))
    unknown = f" + {flow.unknown} unknown" if flow.unknown else ""
    # The middle of the arc, as `arc3` bends it.
    (x0, y0), (x1, y1) = start, end
    middle = ((x0 + x1) / 2 - bend / 2 * (y1 - y0),
              (y0 + y1) / 2 + bend / 2 * (x1 - x0))
    axes.text(*middle, report_text.size(flow.num_bytes) + unknown,
              color=color, fontsize=7, ha="center", va="center",
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})


def _side(places: Dict[str, Tuple[float, float]], device: str,
          other: str) -> Tuple[float, float]:
  """Returns where an arrow between `device` and `other` touches `device`."""
  x, y = places[device]
  if places[other][0] > x or places[other][0] == x == 0.0:
    x += _BOX_WIDTH
  return x, y
