"""A report on a graph as text, in tables that fit a terminal."""

import textwrap
from typing import Any, Iterator, Sequence

_WIDTH = 80
# Rows of a table that says much the same in each; JSON holds all.
_MOST_ROWS = 100


def size(num_bytes: int) -> str:
  """Returns a number of bytes with its unit, such as "1.2 MB"."""
  if num_bytes < 1000:
    return f"{num_bytes} B"
  number, unit = float(num_bytes), "B"
  for unit in ("kB", "MB", "GB", "TB"):
    number /= 1000.0
    if number < 999.95:
      break
  return f"{number:.1f} {unit}"


def device_name(device: str) -> str:
  """Returns the name of a device, or what stands for none."""
  return device.replace("/device:", "/") or "(not set)"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """Returns a text table; numbers stand to the right."""
  shown = rows[:_MOST_ROWS]
  texts = [list(head)] + [
      [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row]
      for row in shown
  ]
  widths = [max(len(row[k]) for row in texts) for k in range(len(head))]
  right = [bool(shown) and isinstance(shown[0][k], int)
           for k in range(len(head))]
  lines = [
      "  ".join(cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right)).rstrip()
      for row in texts
  ]
  if len(rows) > _MOST_ROWS:
    lines.append(f"and {len(rows) - _MOST_ROWS:,} more")
  return "\n".join(lines)


def text(report: Any) -> str:
  """Returns the text of an `inspection.Report`."""
  return "\n\n".join(_sections(report)) + "\n"


def _sections(report: Any) -> Iterator[str]:
  yield _summary(report)
  yield table(
      ("device", "ops", "variables", "parameters", "bytes"),
      [(device_name(d.device), d.ops, d.variables, d.parameters,
        size(d.num_bytes)) for d in report.devices])
  if report.towers:
    yield table(
        ("tower", "ops", "devices", "against tower 0"),
        [(f"{t.towers} {t.index}", t.ops,
          ", ".join(map(device_name, t.devices)), _difference(t.difference))
         for t in report.towers])
    yield from _differences(report)
  yield _transfers(report)
  if report.synced_layers:
    yield table(
        ("layer in which towers meet", "kind", "axes"),
        [(layer.name, layer.kind, str(list(layer.axes)))
         for layer in report.synced_layers])
  if report.update_ops:
    yield table(("update op", "runs, to the optimizer"), report.update_ops)
  if report.variables:
    yield table(
        ("variable", "shape", "type", "bytes", "device", ""),
        [(v.name, _shape(v.shape), v.dtype,
          "?" if v.num_bytes is None else size(v.num_bytes),
          device_name(v.device), "trainable" if v.trainable else "")
         for v in report.variables])
  if report.collections:
    yield table(
        ("collection", "items", "in towers"),
        [(c.key, c.items, ", ".join(
            f"{label}: {n}" for label, n in c.in_towers.items()))
         for c in report.collections])
  yield _findings(report)


def _summary(report: Any) -> str:
  if not report.train_ops:
    step = "No train op is known."
  else:
    names = ", ".join(report.train_ops[:3])
    more = len(report.train_ops) - 3
    step = f"Train op: {names}" + (f" and {more} more" if more > 0 else "")
    step += "." if report.train_ops_given else " (not given, found)."
  return (f"{report.num_ops:,} ops, {len(report.towers)} towers, "
          f"{len(report.findings)} findings. {step}")


def _shape(shape: Any) -> str:
  if shape is None:
    return "?"
  return "[" + ", ".join("?" if n is None else str(n) for n in shape) + "]"


def _difference(difference: Any) -> str:
  if not difference.num_missing and not difference.num_extra:
    return "same"
  return (f"{difference.num_missing:,} ops missing, "
          f"{difference.num_extra:,} more")


def _differences(report: Any) -> Iterator[str]:
  """Yields the diff of the first tower that differs."""
  for tower in report.towers:
    missing, extra = tower.difference.missing, tower.difference.extra
    if missing or extra:
      lines = [f"{tower.towers} {tower.index} against tower 0:"]
      lines += [f"- {line}" for line in missing]
      lines += [f"+ {line}" for line in extra]
      yield "\n".join(line if len(line) <= 2 * _WIDTH else
                      line[:2 * _WIDTH - 3] + "..." for line in lines)
      return


def _transfers(report: Any) -> str:
  if not report.transfers:
    return "Nothing goes from one device to another."
  scope = "each step" if report.train_ops else "all ops of the graph"
  return f"What goes between devices in {scope}:\n" + table(
      ("from", "to", "what", "tensors", "bytes", "of unknown size"),
      [(device_name(t.source), device_name(t.target), t.purpose, t.tensors,
        size(t.num_bytes), t.unknown) for t in report.transfers])


def _findings(report: Any) -> str:
  if not report.findings:
    return "No findings."
  parts = []
  for finding in report.findings:
    where = ", ".join(finding.where[:5])
    more = len(finding.where) - 5
    where += f" and {more} more" if more > 0 else ""
    parts.append("\n".join([f"FINDING {finding.rule}"] + [
        textwrap.fill(line, _WIDTH, initial_indent="  ",
                      subsequent_indent="    ", break_long_words=False)
        for line in (finding.what, f"Where: {where}", f"Why: {finding.why}",
                     f"What to do: {finding.remedy}")]))
  return "\n\n".join(parts)
