"""Tests for tools/scale.py, with bytes that are counted by hand."""

import contextlib
import io
import json
import os
import pathlib
import re
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import cluster_cases
from tools import networks
from tools import scale
from tools import scale_model
from towers import transfers

HOSTS, TOWERS = 2, 2  # Towers of each host.
SMALL = ("--model=unet_small", f"--hosts={HOSTS}",
         f"--towers_per_host={TOWERS}", "--rows=3", "--step_seconds=0.5")


def parameters_of(name):
  """Returns the bytes and the number of a network's trained variables."""
  with tf.Graph().as_default():
    network = networks.NETWORKS[name]
    network.loss(tf.zeros([1, *network.image_shape]),
                 tf.zeros([1, *network.labels_shape], tf.int64))
    variables = tf.trainable_variables()
  return (sum(4 * v.shape.num_elements() for v in variables), len(variables))


BYTES, VARIABLES = parameters_of("unet_small")


def look(placement, *more):
  """Returns what is found of a placement, and the flags."""
  values = scale.make_flags()
  values(["scale.py", *SMALL, f"--placements={placement}", *more])
  _, (row,) = scale.run(values)
  return row


def run(*arguments):
  """Returns status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = scale.main(["scale.py", *arguments])
  return status, out.getvalue(), err.getvalue()


class BytesTest(parameterized.TestCase):

  def check_load(self, links, link, kind, num_bytes, *, messages=None,
                 scalars=8):
    """Checks bytes but for a few numbers that are sent along."""
    load = links[link][kind]
    self.assertBetween(load.num_bytes, num_bytes, num_bytes + 4 * scalars)
    if messages is not None:
      self.assertBetween(load.messages, messages, messages + scalars)

  def test_shared(self):
    """Each tower reads all variables, and sends a gradient of each."""
    row = look("shared")
    ports, buses = row.traffic.ports, row.traffic.buses
    # Towers of the other host; those of the first do not use its port.
    self.check_load(ports, "worker 0 sends", "parameters", BYTES * TOWERS,
                    messages=VARIABLES * TOWERS)
    # Those of scale and offset travel as sums, see test_transfers.
    norms = row.synced_layers * 2
    sums = ports["worker 0 receives"]["moments"].num_bytes
    gradients = ports["worker 0 receives"]["gradients"]
    self.assertBetween(gradients.num_bytes, BYTES * TOWERS - sums,
                       BYTES * TOWERS + 32)
    self.assertBetween(gradients.messages, (VARIABLES - norms) * TOWERS,
                       VARIABLES * TOWERS)
    for host in range(HOSTS):
      for tower in range(TOWERS):
        self.check_load(buses, f"worker {host} GPU:{tower} receives",
                        "parameters", BYTES, messages=VARIABLES)
    self.assertEqual(row.traffic.unknown, 0)

  def test_bytes_grow_with_the_towers(self):
    more = look("shared", "--towers_per_host=3").traffic.ports
    self.check_load(more, "worker 0 sends", "parameters", BYTES * 3)

  def test_inputs(self):
    """By default no batch leaves its host; from the chief, rows do."""
    image = 4 * 8 * 8 * 3 + 8 * 8 * 8  # An image and its labels.
    row = look("shared")
    self.assertNotIn("inputs", row.traffic.ports["worker 0 sends"])
    self.check_load(row.traffic.buses, "worker 1 GPU:1 receives", "inputs",
                    3 * image, scalars=0)
    row = look("shared", "--inputs=chief")
    self.check_load(row.traffic.ports, "worker 0 sends", "inputs",
                    TOWERS * 3 * image)

  def test_servers_share_the_load(self):
    row = look("servers", "--servers=2")
    loads = [row.traffic.ports[f"ps {k} sends"]["parameters"].num_bytes
             for k in range(2)]
    self.assertBetween(sum(loads), BYTES * HOSTS * TOWERS,
                       BYTES * HOSTS * TOWERS + 64)
    self.assertLess(max(loads), 0.7 * sum(loads))
    one = look("servers", "--servers=1")
    self.check_load(one.traffic.ports, "ps 0 sends", "parameters",
                    BYTES * HOSTS * TOWERS)

  def test_replicated_sends_new_values_to_each_copy(self):
    row = look("replicated")
    self.check_load(row.traffic.ports, "worker 0 sends", "parameters",
                    BYTES * TOWERS, messages=VARIABLES * TOWERS)
    self.check_load(row.traffic.buses, "worker 0 GPU:0 sends", "parameters",
                    BYTES * (HOSTS * TOWERS - 1))

  def test_balanced_sends_each_variable_from_where_it_is(self):
    row = look("balanced")
    sent = [load["parameters"].num_bytes for link, load in
            row.traffic.buses.items() if link.endswith("sends")]
    self.assertLen(sent, HOSTS * TOWERS)
    total = BYTES * (HOSTS * TOWERS - 1)
    self.assertBetween(sum(sent), total, total + 64)

  @parameterized.parameters("shared", "servers", "replicated")
  def test_packed_bytes_are_the_same_in_fewer_messages(self, placement):
    plain = look(placement, "--servers=1").traffic.ports
    packed = look(f"{placement}+packed", "--servers=1").traffic.ports
    port = "ps 0 receives" if placement == "servers" else "worker 0 receives"
    before, after = plain[port]["gradients"], packed[port]["gradients"]
    self.assertEqual(after.num_bytes, before.num_bytes)
    self.assertLess(after.messages, before.messages / 2)
    if placement == "replicated":
      before, after = (ports["worker 0 sends"]["parameters"]
                       for ports in (plain, packed))
      self.assertEqual(after.num_bytes, before.num_bytes)
      self.assertEqual(after.messages, TOWERS)

  def test_between_graph_counts_all_hosts(self):
    row = look("between_graph", "--servers=1")
    loads = row.traffic.ports["ps 0 sends"]["parameters"]
    self.assertBetween(loads.num_bytes, BYTES * HOSTS * TOWERS,
                       BYTES * HOSTS * TOWERS + 64)
    self.assertEqual(row.traffic.ports["worker 0 receives"],
                     row.traffic.ports["worker 1 receives"])
    # Its towers meet on their own host.
    self.assertEmpty([hosts for hosts in row.traffic.between
                      if not any(host.startswith("ps") for host in hosts)])

  def test_no_batch_norm_over_towers_no_moments(self):
    row = look("shared", "--nosync_batch_norm")
    self.assertNotIn("moments", row.traffic.ports["worker 0 sends"])
    self.assertEqual(row.synced_layers, 0)
    self.assertEqual(
        look("shared").chain - row.chain, 4 * look("shared").synced_layers)

  def test_graph(self):
    """It is the graph that is built, in one piece."""
    values = scale.make_flags()
    values(["scale.py", *SMALL])
    row = look("shared")
    with tf.Graph().as_default() as graph:
      scale.build(values, "shared")
      self.assertEqual(row.num_ops, len(graph.get_operations()))
      self.assertEqual(row.graph_bytes, graph.as_graph_def().ByteSize())
    self.assertGreater(row.build_seconds, 0)
    self.assertGreater(row.build_cpu_seconds, 0)


class ModelTest(parameterized.TestCase):

  SPEEDS = scale_model.Speeds(compute=0.25, network=1000.0, bus=8000.0,
                              latency=0.5, message=0.01)

  def transfer(self, source, target, purpose, tensors, num_bytes, unknown=0):
    device = lambda host, name: f"/job:worker/task:{host}/device:{name}"
    return transfers.Transfer(device(*source), device(*target), purpose,
                              tensors, num_bytes, unknown)

  def test_formula(self):
    found = scale_model.traffic([
        self.transfer((0, "CPU:0"), (1, "GPU:0"), "parameters", 3, 400),
        self.transfer((0, "CPU:0"), (2, "GPU:0"), "parameters", 3, 400),
        self.transfer((1, "GPU:0"), (0, "CPU:0"), "gradients", 2, 300),
        self.transfer((1, "GPU:0"), (1, "GPU:1"), "other", 5, 1600),
        self.transfer((0, "CPU:0"), (0, "CPU:1"), "other", 9, 99999),
    ])
    self.assertEqual(scale_model.busiest(found.ports),
                     ("worker 0 sends", scale_model.Load(6, 800)))
    self.assertEqual(
        found.between[("worker 0", "worker 1")],
        {"parameters": scale_model.Load(3, 400)})
    times = scale_model.times(found, 4, self.SPEEDS)
    # Parameters leave worker 0, then gradients come back to it.
    self.assertAlmostEqual(times.network, 0.8 + 0.06 + 0.3 + 0.02)
    # Parameters into GPU 0 of worker 1, gradients out of it, then the rest.
    self.assertAlmostEqual(times.bus, (400 + 300 + 1600) / 8000)
    self.assertAlmostEqual(times.latency, 4 * 0.5)
    self.assertAlmostEqual(
        times.step, 0.25 + times.network + times.bus + times.latency)
    self.assertAlmostEqual(times.least, 2.0)
    self.assertAlmostEqual(
        scale_model.times(found, 0, self.SPEEDS).least, 0.8 + 0.06)

  def test_nothing_travels(self):
    times = scale_model.times(scale_model.traffic([]), 0, self.SPEEDS)
    self.assertEqual(times, (0.25, 0.0, 0.0, 0.0, 0.25, 0.25))
    self.assertEqual(scale_model.busiest({}), (None, (0, 0)))

  def test_what_has_no_device_is_on_the_first_host(self):
    found = scale_model.traffic([
        transfers.Transfer("", "/job:worker/task:1/device:CPU:0", "other", 1, 8,
                           2)])
    self.assertEqual(found.ports["worker 0 sends"]["other"], (1, 8))
    self.assertEqual(found.unknown, 2)

  def test_longest_chain(self):
    with tf.Graph().as_default():
      x = tf.constant(1.0)
      for host in (0, 1, 1, 2, 0):
        with tf.device(f"/job:worker/task:{host}/device:CPU:0"):
          x = x + 1.0
      with tf.device("/job:worker/task:3/device:CPU:0"):
        with tf.control_dependencies([x]):
          last = tf.no_op()
        tf.square(x)  # Nothing that a step needs.
      self.assertEqual(scale_model.longest_chain([last]), 4)
      self.assertEqual(scale_model.longest_chain([x.op, x.op]), 3)


class CommandTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir())

  def test_tables_and_files(self):
    status, out, err = run(
        *SMALL, "--placements=shared,balanced", f"--json={self.folder}/a.json",
        f"--markdown={self.folder}/a.md")
    self.assertEqual((status, err), (0, ""))
    self.assertEqual((self.folder / "a.md").read_text("utf-8"), out)
    self.assertStartsWith(
        out, "unet_small, 4 towers of 3 rows on GPUs of 2 hosts")
    self.assertRegex(out, r"\| shared \| [\d,]+ \| [\d.]+ \| 0\.\d\d % \|")
    self.assertIn("| worker 0 sends |", out)
    found = json.loads((self.folder / "a.json").read_text("utf-8"))
    shared, balanced = found["placements"]
    self.assertEqual(balanced["placement"], "balanced")
    pair, = (pair for pair in shared["between"]
             if (pair["source"], pair["target"]) == ("worker 0", "worker 1"))
    self.assertEqual(shared["ports"]["worker 0 sends"], pair["loads"])
    self.assertGreaterEqual(pair["loads"]["parameters"][1], BYTES * TOWERS)
    self.assertEqual(found["flags"]["hosts"], 2)

  def test_measures_the_compute_time(self):
    values = scale.make_flags()
    values(["scale.py", "--model=unet_small", "--rows=2"])
    with mock.patch.object(scale, "median_step", wraps=scale.median_step) as m:
      self.assertGreater(scale.speeds_of(values).compute, 1e-5)
    m.assert_called_once()

  def test_median_leaves_out_the_first_two(self):
    clock = iter([0, 100, 100, 200, 200, 203, 203, 204, 204, 206])
    with mock.patch.object(scale.time, "perf_counter", lambda: next(clock)):
      self.assertEqual(scale.median_step(lambda: None, 3), 2.0)

  def test_help(self):
    status, out, _ = run("--help")
    self.assertEqual(status, 0)
    self.assertIn("python tools/scale.py --model=resnet8", out)

  @parameterized.named_parameters(
      ("unknown_flag", ["--hots=2"], "Unknown command line flag 'hots'"),
      ("placement", ["--placements=shared,other"],
       "`--placements` must list some of shared, shared.packed, .*: got "
       "shared,other"),
      ("no_placement", ["--placements="],
       "`--placements` must .*: got nothing"),
      ("packed", ["--placements=between_graph+packed"], "`--placements` must"),
      ("speed", ["--link_gigabits=0"],
       "`--link_gigabits` must be a number above 0: got 0.0"),
      ("compute", ["--step_seconds=inf"], "`--step_seconds` must be a number"),
      ("hosts", ["--hosts=0"], "hosts"),
      ("model", ["--model=resnet21"], "model"),
      ("inputs", ["--placements=between_graph", "--inputs=chief"],
       "`--inputs` must be hosts with between_graph, .*: got chief"),
      ("json", ["--json=/proc/none/a.json"],
       "`--json` must be a file that can be written to"))
  def test_rejects(self, arguments, message):
    status, out, err = run(*arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^scale.py: .*{message}")
    self.assertLen(err.strip().splitlines(), 1)


class DocumentationTest(absltest.TestCase):

  def blocks(self, language):
    root = pathlib.Path(scale.__file__).resolve().parent.parent
    page = (root / "docs" / "several_machines.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", page,
                      re.MULTILINE | re.DOTALL)

  def test_script_trains_on_a_cluster_of_one(self):
    source, = self.blocks("python")
    config = {"cluster": cluster_cases.jobs(1, 0),
              "task": {"type": "worker", "index": 0}}
    names = {"__name__": "__main__"}
    with tf.Graph().as_default(), mock.patch.dict(
        os.environ, TF_CONFIG=json.dumps(config)):
      code = compile(source, "<documentation>", "exec")
      exec(code, names)  # pylint: disable=exec-used
    self.assertLen(names["graph"].towers, 2)
    self.assertLen(names["graph"].synced_layers, 1)
    self.assertBetween(names["loss"], 0.0, 100.0)


if __name__ == "__main__":
  absltest.main()
