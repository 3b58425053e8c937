"""Tests for towers.step_stats, on traces whose numbers are known."""

import json

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
from towers import step_stats

CPU_0 = "/job:localhost/replica:0/task:0/device:CPU:0"
CPU_1 = "/job:localhost/replica:0/task:0/device:CPU:1"


def trace(*ops):
  """Returns step stats of (device, op type, start, end), in milliseconds."""
  stats = tf.RunMetadata().step_stats
  by_device = {}
  for i, (device, op, start, end) in enumerate(ops):
    if device not in by_device:
      by_device[device] = stats.dev_stats.add(device=device)
    by_device[device].node_stats.add(
        node_name=f"op_{i}", timeline_label=f"op_{i} = {op}(a, b)",
        all_start_micros=10**15 + 1000 * start,
        all_end_rel_micros=1000 * (end - start))
  return stats


class InputWaitTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("none", [], 0, 0, 0),
      ("no_input", [(CPU_0, "MatMul", 0, 10)], 0, 10, 0),
      ("all_input", [(CPU_0, "IteratorGetNext", 5, 10)], 5, 5, 1),
      ("first_input", [(CPU_0, "IteratorGetNext", 0, 30),
                       (CPU_0, "MatMul", 30, 40)], 30, 40, 1),
      ("beside_other_work", [(CPU_0, "IteratorGetNext", 0, 30),
                             (CPU_1, "MatMul", 0, 40)], 0, 40, 1),
      ("longer_than_other_work", [(CPU_0, "QueueDequeueManyV2", 10, 40),
                                  (CPU_1, "MatMul", 0, 20),
                                  (CPU_0, "Add", 15, 25)], 15, 40, 1),
      ("work_in_the_middle", [(CPU_0, "Unstage", 0, 40),
                              (CPU_0, "MatMul", 10, 20)], 30, 40, 1),
      ("two_inputs", [(CPU_0, "IteratorGetNext", 0, 20),
                      (CPU_1, "IteratorGetNext", 10, 30),
                      (CPU_0, "MatMul", 30, 50)], 30, 50, 2),
      ("waiting_for_a_message", [(CPU_0, "IteratorGetNext", 0, 30),
                                 (CPU_1, "_Recv", 0, 35),
                                 (CPU_1, "MatMul", 35, 40)], 30, 40, 1),
      ("inside_a_function", [(CPU_0, "StatefulPartitionedCall", 0, 40),
                             (CPU_0, "IteratorGetNext", 0, 30),
                             (CPU_0, "MatMul", 30, 40)], 30, 40, 1),
  )
  def test_wait(self, ops, wait, step, input_ops):
    actual = step_stats.input_wait(trace(*ops))
    np.testing.assert_allclose(actual, [wait * 1e-3, step * 1e-3, input_ops])

  def test_equals_a_count_of_milliseconds(self):
    """For random traces: looks at each millisecond by itself."""
    random = np.random.RandomState(0)
    kinds = ["IteratorGetNext", "MatMul", "_Recv"]
    for _ in range(50):
      starts = random.randint(0, 50, size=8)
      ends = starts + random.randint(0, 20, size=8)
      ops = [(random.choice([CPU_0, CPU_1]), random.choice(kinds), start, end)
             for start, end in zip(starts, ends)]
      running = {kind: np.zeros(100, bool) for kind in kinds}
      for _, kind, start, end in ops:
        running[kind][start:end] = True
      actual = step_stats.input_wait(trace(*ops))
      expected = np.sum(running["IteratorGetNext"] & ~running["MatMul"])
      self.assertAlmostEqual(actual.wait, 1e-3 * expected)
      self.assertAlmostEqual(actual.step, 1e-3 * (max(ends) - min(starts)))


class ChromeTraceTest(parameterized.TestCase):

  def test_ops_that_overlap_stand_in_rows_of_their_own(self):
    events = step_stats.chrome_trace(trace(
        (CPU_1, "MatMul", 0, 10), (CPU_1, "Add", 5, 15), (CPU_1, "Mul", 10, 12),
        (CPU_0, "Sub", 3, 4)))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    self.assertEqual(list(names.values()), [CPU_0, CPU_1])
    rows = {e["name"]: (names[e["pid"]], e["tid"], e["dur"])
            for e in events if e["ph"] == "X"}
    self.assertEqual(rows, {
        "MatMul": (CPU_1, 0, 10000), "Add": (CPU_1, 1, 10000),
        "Mul": (CPU_1, 0, 2000), "Sub": (CPU_0, 0, 1000)})

  def test_op_without_a_label_of_the_usual_form(self):
    """As kernels on a GPU have it."""
    stats = trace((CPU_0, "MatMul", 0, 10))
    stats.dev_stats[0].node_stats[0].timeline_label = "edge_7"
    event = step_stats.chrome_trace(stats)["traceEvents"][-1]
    self.assertEqual(event["name"], "op_0")
    self.assertEqual(event["args"],
                     {"name": "op_0", "op": "", "inputs": ""})

  def test_of_a_real_step(self):
    with tf.Graph().as_default():
      with tf.device("/cpu:0"):
        x = tf.random.uniform([50, 50], name="x")
      with tf.device("/cpu:1"):
        y = tf.matmul(x, x, name="y")
      metadata = tf.RunMetadata()
      with testing.session() as sess:
        sess.run(y, options=tf.RunOptions(
            trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    trace_events = json.loads(json.dumps(
        step_stats.chrome_trace(metadata.step_stats)))["traceEvents"]
    devices = {e["pid"]: e["args"]["name"] for e in trace_events
               if e["ph"] == "M"}
    found = {e["args"]["name"]: (devices[e["pid"]], e) for e in trace_events
             if e["ph"] == "X"}
    device, event = found["y"]
    self.assertEqual(device, CPU_1)
    self.assertIn("MatMul", event["args"]["op"])  # oneDNN has names of its own.
    self.assertGreaterEqual(
        event["ts"],
        found["x/RandomUniform"][1]["ts"] + found["x/RandomUniform"][1]["dur"])


if __name__ == "__main__":
  absltest.main()
