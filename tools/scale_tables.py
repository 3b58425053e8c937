"""What tools/scale.py found, as tables and as plain values."""

from typing import Any, Dict, List, Sequence

import tensorflow.compat.v1 as tf

from tools import scale_model

LIMIT = 2**31


def text(facts: Dict[str, Any], speeds: scale_model.Speeds,
         rows: Sequence[Any]) -> str:
  """Returns the tables in Markdown.

  Args:
    facts: The flags.
    speeds: Of the machines.
    rows: The `scale.Row` of each placement.
  """
  parts = [_head(facts, speeds), _graphs(rows)]
  for title, whose in (("between hosts, busiest port", "ports"),
                       ("within hosts, busiest bus", "buses")):
    if any(getattr(row.traffic, whose) for row in rows):
      parts.append(_links(title, whose, rows))
  parts.append(_times(facts, rows))
  unknown = max(row.traffic.unknown for row in rows)
  if unknown:
    parts.append(f"Not counted: up to {unknown} tensors of unknown size.")
  return "\n\n".join(parts)


def _head(facts: Dict[str, Any], speeds: scale_model.Speeds) -> str:
  towers = facts["hosts"] * facts["towers_per_host"]
  return (
      f"{facts['model']}, {towers} towers of {facts['rows']} rows on "
      f"{facts['device_type']}s of {facts['hosts']} hosts, "
      f"{facts['servers']} servers. A tower computes for {speeds.compute:.4f} "
      f"s; ports of {facts['link_gigabits']:g} Gbit/s, buses of "
      f"{facts['local_gigabytes']:g} GB/s, "
      f"{facts['latency_microseconds']:g} us from host to host, "
      f"{facts['message_microseconds']:g} us a message. TensorFlow "
      f"{tf.__version__}.")


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  rule = ["---"] + ["---:"] * (len(head) - 1)
  return "\n".join(
      "| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def _graphs(rows: Sequence[Any]) -> str:
  lines = []
  for row in rows:
    size = ["> 2 GB", "> 100 %"]
    if row.graph_bytes is not None:
      size = [f"{row.graph_bytes / 1e6:.1f}",
              f"{100 * row.graph_bytes / LIMIT:.2f} %"]
    lines.append([row.placement, f"{row.num_ops:,}", *size,
                  f"{row.build_seconds:.1f}",
                  f"{row.build_cpu_seconds:.1f}", str(row.synced_layers)])
  return _markdown(["graph", "ops", "MB", "of 2 GB", "build, s",
                    "CPU, s", "synced layers"], lines)


def _links(title: str, whose: str, rows: Sequence[Any]) -> str:
  """Returns a table of the bytes of each kind through its busiest link."""
  kinds = [
      kind for kind in scale_model.KINDS if any(
          scale_model.largest(getattr(row.traffic, whose), kind).num_bytes
          for row in rows)
  ]
  lines = []
  for row in rows:
    links = getattr(row.traffic, whose)
    name, load = scale_model.busiest(links)
    lines.append(
        [row.placement] +
        [megabytes(scale_model.largest(links, kind).num_bytes)
         for kind in kinds] +
        [name or "none", megabytes(load.num_bytes), f"{load.messages:,}"])
  return _markdown([f"MB a step {title}", *kinds, "busiest of all", "MB",
                    "messages"], lines)


def megabytes(num_bytes: int) -> str:
  """Returns a number of bytes in megabytes, with three digits or so."""
  number = num_bytes / 1e6
  return f"{number:.3f}" if number < 10 else f"{number:.1f}"


def _times(facts: Dict[str, Any], rows: Sequence[Any]) -> str:
  towers = facts["hosts"] * facts["towers_per_host"]
  lines = []
  for row in rows:
    times = row.times
    lines.append([
        row.placement, f"{times.compute:.4f}", f"{times.network:.4f}",
        f"{times.bus:.4f}", f"{times.latency:.4f} ({row.chain})",
        f"{times.least:.4f} to {times.step:.4f}",
        f"{facts['rows'] * towers / times.step:,.0f}",
        f"{100 * times.compute / times.step:.0f} %"])
  return _markdown(
      ["seconds a step", "compute", "network", "bus", "latency (messages)",
       "step, least to most", "rows/s at most time", "of it compute"], lines)


def plain(facts: Dict[str, Any], speeds: scale_model.Speeds,
          rows: Sequence[Any]) -> Dict[str, Any]:
  """Returns all that was found in what JSON knows."""
  return {
      "flags": dict(facts),
      "tensorflow": tf.__version__,
      "speeds": speeds._asdict(),
      "placements": [_plain_row(row) for row in rows],
  }


def _plain_row(row: Any) -> Dict[str, Any]:
  fields = row._asdict()
  found = fields.pop("traffic")
  fields["times"] = row.times._asdict()
  fields["between"] = [
      {"source": source, "target": target, "loads": _plain_loads(loads)}
      for (source, target), loads in sorted(found.between.items())]
  for name in ("ports", "buses"):
    fields[name] = {
        link: _plain_loads(loads)
        for link, loads in sorted(getattr(found, name).items())}
  fields["unknown"] = found.unknown
  return fields


def _plain_loads(loads: Dict[str, scale_model.Load]) -> Dict[str, List[int]]:
  """Returns messages and bytes by kind."""
  return {kind: list(load) for kind, load in loads.items()}
