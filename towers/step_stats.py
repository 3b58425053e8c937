"""What a traced step tells: where it waited for input, and its Chrome trace.

A step that runs with `tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)`
notes, for each op, the device and when it started and ended. Everything here
reads that from the public protocol buffer `tf.RunMetadata.step_stats`.
"""

import re
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Tuple

# Ops at which a step waits for the next element of its input.
INPUT_OPS = frozenset([
    "IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional",
    "MultiDeviceIteratorGetNextFromShard",
    "QueueDequeue", "QueueDequeueV2", "QueueDequeueMany", "QueueDequeueManyV2",
    "QueueDequeueUpTo", "QueueDequeueUpToV2", "Unstage", "MapUnstage",
    "OrderedMapUnstage", "MapUnstageNoKey", "OrderedMapUnstageNoKey",
    "ReaderRead", "ReaderReadV2", "ReaderReadUpTo", "ReaderReadUpToV2",
    "RecordInput",
])

# Ops that last as long as what they wait for, or what runs inside them (which
# is noted as well): while one runs, its device may have nothing to do.
_IDLE_OPS = frozenset([
    "_Recv", "_HostRecv", "Recv", "HostRecv", "NoOp", "PartitionedCall",
    "StatefulPartitionedCall", "RemoteCall", "If", "StatelessIf", "While",
    "StatelessWhile", "Case", "StatelessCase",
])

# As TensorFlow writes it: `[cpu 0.2MB] name = Op(input, input)`.
_LABEL = re.compile(r"= (?P<op>\w+)\((?P<inputs>.*)\)", re.DOTALL)


class Node(NamedTuple):
  """One run of one op.

  Fields:
    device: Full name of the device.
    name: Name of the op in the graph.
    op: Its type; "" where the trace does not tell, as of a GPU's kernels.
    inputs: The names of its inputs, in one text.
    start: When it started, in microseconds since some point in the past.
    end: When it ended, likewise.
  """
  device: str
  name: str
  op: str
  inputs: str
  start: int
  end: int


class InputWait(NamedTuple):
  """How long a step waited for input.

  Fields:
    wait: Seconds in which an input op was pending and no device computed.
    step: Seconds from the start of the step's first op to the end of its last.
    input_ops: How many input ops ran.
  """
  wait: float
  step: float
  input_ops: int


def nodes(step_stats: Any) -> List[Node]:
  """Returns what ran in a traced step, in order of start.

  Args:
    step_stats: The field of that name of a `tf.RunMetadata`.
  """
  found = []
  for device_stats in step_stats.dev_stats:
    for node in device_stats.node_stats:
      if node.node_name in ("_SOURCE", "_SINK"):
        continue  # TensorFlow's own start and end of a graph.
      label = _LABEL.search(node.timeline_label)
      start = node.all_start_micros
      found.append(Node(
          device=device_stats.device, name=node.node_name,
          op=label["op"] if label else "",
          inputs=label["inputs"] if label else "",
          start=start, end=start + max(node.all_end_rel_micros, 0)))
  return sorted(found, key=lambda node: (node.start, node.end))


def input_wait(step_stats: Any) -> InputWait:
  """Returns how long a traced step waited for its input.

  A step waits while an input op is pending and nothing else runs, on no device:
  that is what a faster input would save. An input op that runs beside other
  work, such as one that fetches the next step's data meanwhile, costs nothing.

  Args:
    step_stats: The field of that name of a `tf.RunMetadata`.
  """
  ran = nodes(step_stats)
  if not ran:
    return InputWait(0.0, 0.0, 0)
  pending = [(n.start, n.end) for n in ran if n.op in INPUT_OPS]
  busy = [(n.start, n.end) for n in ran
          if n.op not in INPUT_OPS and n.op not in _IDLE_OPS]
  # |pending without busy| = |pending or busy| - |busy|.
  wait = _length(pending + busy) - _length(busy)
  span = max(n.end for n in ran) - ran[0].start
  return InputWait(wait * 1e-6, span * 1e-6, len(pending))


def chrome_trace(step_stats: Any) -> Dict[str, Any]:
  """Returns a traced step as a Chrome trace, ready for `json.dump`.

  Each device is a process with the device's name; ops that overlap stand in
  rows of their own. For `chrome://tracing` or https://ui.perfetto.dev.

  Args:
    step_stats: The field of that name of a `tf.RunMetadata`.
  """
  devices = sorted(stats.device for stats in step_stats.dev_stats)
  events = [
      {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": device}}
      for pid, device in enumerate(devices)
  ]
  pids = {device: pid for pid, device in enumerate(devices)}
  for node, row in _in_rows(nodes(step_stats)):
    events.append({
        "ph": "X", "name": node.op or node.name, "cat": "Op",
        "pid": pids[node.device], "tid": row,
        "ts": node.start, "dur": node.end - node.start,
        "args": {"name": node.name, "op": node.op, "inputs": node.inputs},
    })
  return {"traceEvents": events}


def _in_rows(ran: Iterable[Node]) -> Iterator[Tuple[Node, int]]:
  """Yields each node with the first row of its device that is free by then."""
  ends: Dict[str, List[int]] = {}
  for node in ran:
    rows = ends.setdefault(node.device, [])
    row = next((i for i, end in enumerate(rows) if end <= node.start),
               len(rows))
    rows[row:row + 1] = [node.end]
    yield node, row


def _length(intervals: Iterable[Tuple[int, int]]) -> int:
  """Returns the length of the union of intervals."""
  total, reached = 0, None
  for start, end in sorted(intervals):
    if reached is not None:
      start = max(start, reached)
    if end > start:
      total += end - start
      reached = end
  return total
