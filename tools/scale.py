"""Tells what a graph of towers on many hosts would cost, without the hosts.

  python tools/scale.py
  python tools/scale.py --model=resnet8 --hosts=2 --towers_per_host=2
  python tools/scale.py --placements=shared,servers+packed --link_gigabits=100

Builds the training graph for each placement of the variables, for devices such
as /job:worker/task:7/device:GPU:3, none of which has to exist, and runs none of
it. It tells how large the graph is, against the 2 GB that TensorFlow can send
to a session, how long it takes to build, what travels in a step, through which
link most, and how long a step should take. tools/scale_model.py has the formula
and what it assumes.

The placements:

-   shared: all variables on the CPU of the first host (worker 0);
-   servers: on --servers parameter servers, each on a host of its own;
-   balanced: spread over the devices of all towers;
-   replicated: on the device of tower 0, with a copy on each other's;
-   between_graph: on the servers, where each host has a graph with its own
    towers, and batch norm over its own rows. Ops and bytes are those of one
    host's graph.

With +packed behind it, small tensors travel in messages of --pack_bytes.

The compute time of a tower is measured here, in a session with one tower on all
cores, unless --step_seconds says it. So is nothing else: what the links do is
what the flags say. tools/scale_check.py compares the formula with runs of two
processes on this machine.
"""

import functools
import json
import pathlib
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence
from typing import Tuple

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
from tools import startup

startup.load_tensorflow()

from absl import flags
import numpy as np
import tensorflow.compat.v1 as tf

from tools import command_line
from tools import networks
from tools import scale_model
from tools import scale_tables
import towers

UsageError = command_line.UsageError

BETWEEN_GRAPH = "between_graph"
PACKED = "+packed"
# What each placement is to `build_towers`.
PLACEMENTS = {
    "shared": "shared", "servers": "shared", "balanced": "balanced",
    "replicated": "replicated", BETWEEN_GRAPH: "shared",
}
_DEFAULT = [
    "shared", "servers", "balanced", "replicated", "shared+packed",
    "servers+packed", "replicated+packed", BETWEEN_GRAPH
]


class Built(NamedTuple):
  """A graph, and the op of one step."""
  towers: towers.TowerGraph
  train_op: tf.Operation


class Row(NamedTuple):
  """What was found of one placement.

  Fields:
    placement: Its name.
    num_ops: Ops of the graph.
    graph_bytes: Bytes of the graph; None if they are more than TensorFlow can
      tell, which is 2 GB.
    build_seconds: How long it took to build.
    build_cpu_seconds: For how much of that there was work for a core; less
      where other processes had the cores.
    synced_layers: How many layers the towers meet in.
    chain: How many messages between hosts wait for each other.
    traffic: What travels.
    times: What a step should take.
  """
  placement: str
  num_ops: int
  graph_bytes: Optional[int]
  build_seconds: float
  build_cpu_seconds: float
  synced_layers: int
  chain: int
  traffic: scale_model.Traffic
  times: scale_model.Times


def make_flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = command_line.flag_values()
  text = functools.partial(flags.DEFINE_string, flag_values=values)
  count = functools.partial(
      flags.DEFINE_integer, lower_bound=1, flag_values=values)
  number = functools.partial(
      flags.DEFINE_float, lower_bound=0.0, flag_values=values)
  flags.DEFINE_enum("model", "resnet20", list(networks.NETWORKS),
                    "The network.", flag_values=values)
  count("hosts", 8, "Number of hosts (workers).")
  count("towers_per_host", 8, "Number of towers on each.")
  count("rows", 32, "Rows of the batch for each tower.")
  flags.DEFINE_list("placements", _DEFAULT, "Where variables live; any of "
                    f"{', '.join(PLACEMENTS)}, each also with {PACKED} but for "
                    f"{BETWEEN_GRAPH}.", flag_values=values)
  count("servers", None, "Number of parameter servers. Default: --hosts.")
  flags.DEFINE_enum("inputs", "hosts", ["hosts", "chief"], "Where the batch is "
                    "made: by each host for its own towers, or on the first "
                    "host for all.", flag_values=values)
  flags.DEFINE_enum("device_type", "GPU", ["GPU", "CPU"],
                    "What towers are on.", flag_values=values)
  flags.DEFINE_boolean("sync_batch_norm", True, "Batch norm over the whole "
                       "batch; otherwise over each tower's rows.",
                       flag_values=values)
  count("pack_bytes", 2**20, "Bytes of a message of packed tensors.")
  number("step_seconds", None,
         "Compute time of one tower in a step. Default: measured here.")
  number("link_gigabits", 10.0, "Speed of a host's network port, each way, in "
         "1e9 bits a second.")
  number("local_gigabytes", 10.0, "Speed of the bus of an accelerator, each "
         "way, in 1e9 bytes a second.")
  number("latency_microseconds", 100.0,
         "Time that a message takes from one host to another.")
  number("message_microseconds", 20.0,
         "Time that a message occupies a port, beside its bytes.")
  text("json", None, "File to write all that was found to, as JSON.")
  text("markdown", None, "File to write the tables to; they go to standard "
       "output in any case.")
  return values


def check(values: flags.FlagValues) -> None:
  """Checks flags before the work.

  Raises:
    UsageError: If they do not fit.
  """
  known = [name + end for name in PLACEMENTS for end in ("", PACKED)
           if name != BETWEEN_GRAPH or not end]
  if not values.placements or set(values.placements) - set(known):
    raise UsageError(
        f"`--placements` must list some of {', '.join(known)}: got "
        f"{','.join(values.placements) or 'nothing'}.")
  for name in ("step_seconds", "link_gigabits", "local_gigabytes"):
    if values[name].value is not None and not (
        0 < values[name].value < float("inf")):
      raise UsageError(
          f"`--{name}` must be a number above 0: got {values[name].value}.")
  if BETWEEN_GRAPH in values.placements and values.inputs == "chief":
    raise UsageError(
        f"`--inputs` must be hosts with {BETWEEN_GRAPH}, where each host makes "
        "its own batch: got chief.")
  command_line.check_writable("json", values.json)
  command_line.check_writable("markdown", values.markdown)


def build(values: flags.FlagValues, placement: str,
          make: Optional[Callable[..., Any]] = None) -> Built:
  """Builds the graph of one placement in the current graph.

  Args:
    values: The flags.
    placement: Its name.
    make: Makes images and labels, of the flags and the number of rows. Default:
      `placeholders`.
  """
  name, _, packed = placement.partition("+")
  if name == BETWEEN_GRAPH:
    return _build_between_graph(values)
  parameters: Any = None
  if name == "servers":
    parameters = servers(values)
  elif name == "shared":
    parameters = scale_model.HOME
  network = networks.NETWORKS[values.model]
  built = towers.build_towers(
      network.loss, tower_devices(values, range(values.hosts)),
      inputs=_inputs(values, range(values.hosts), make or placeholders),
      parameter_device=parameters, variables=PLACEMENTS[name],
      sync_batch_norm=values.sync_batch_norm)
  return Built(built, built.minimize(
      optimizer(), pack_bytes=values.pack_bytes if packed else 0))


def _build_between_graph(values: flags.FlagValues) -> Built:
  """Builds the graph of the first of the hosts, which is the chief."""
  cluster = towers.cluster.Cluster(
      # Nobody listens there, and nobody is called.
      {"worker": [f"worker-{k}:2222" for k in range(values.hosts)],
       "ps": [f"ps-{k}:2222" for k in range(len(servers(values)))]},
      job="worker", index=0,
      devices=[f"/{values.device_type}:{k}"
               for k in range(values.towers_per_host)])
  with tf.device(cluster.parameter_devices[0]):
    step = tf.get_variable("global_step", [], tf.int64, tf.zeros_initializer(),
                           trainable=False, use_resource=True)
  built = towers.build_towers(
      networks.NETWORKS[values.model].loss, cluster.tower_devices,
      inputs=_inputs(values, [0], placeholders),
      parameter_device=cluster.parameter_devices,
      sync_batch_norm=values.sync_batch_norm)
  return Built(built, cluster.minimize(built, optimizer(), global_step=step))


def optimizer() -> tf.train.Optimizer:
  """Returns the optimizer of training, which has a slot per variable."""
  return tf.train.MomentumOptimizer(0.1, 0.9)


def servers(values: flags.FlagValues) -> List[str]:
  """Returns the devices of the parameter servers."""
  return [f"/job:ps/task:{k}/device:CPU:0"
          for k in range(values.servers or values.hosts)]


def tower_devices(values: flags.FlagValues, hosts: Sequence[int]) -> List[str]:
  """Returns the devices of the towers on some hosts."""
  return [f"/job:worker/task:{host}/device:{values.device_type}:{k}"
          for host in hosts for k in range(values.towers_per_host)]


def _inputs(values: flags.FlagValues, hosts: Sequence[int],
            make: Callable[..., Any]) -> Any:
  """Returns images and labels for `build_towers`, each where it is made."""
  if values.inputs == "chief":
    with tf.device(scale_model.HOME):
      return make(values, values.rows * len(hosts) * values.towers_per_host)
  shards = []
  for host in hosts:
    with tf.device(f"/job:worker/task:{host}/device:CPU:0"):
      shards += [make(values, values.rows)
                 for _ in range(values.towers_per_host)]
  return towers.PerTower(shards)


def placeholders(values: flags.FlagValues,
                 rows: int) -> Tuple[tf.Tensor, tf.Tensor]:
  """Makes the placeholders of so many images and their labels."""
  network = networks.NETWORKS[values.model]
  return (tf.placeholder(tf.float32, (rows, *network.image_shape)),
          tf.placeholder(tf.int64, (rows, *network.labels_shape)))


def measured_step(values: flags.FlagValues, steps: int = 5) -> float:
  """Returns the seconds of a step of one tower here: the median of `steps`."""
  random = np.random.RandomState(0)
  network = networks.NETWORKS[values.model]
  with tf.Graph().as_default():
    inputs = placeholders(values, values.rows)
    built = towers.build_towers(network.loss, ["/cpu:0"], inputs=inputs)
    train_op = built.minimize(optimizer())
    feeds = {
        inputs[0]: random.normal(size=inputs[0].shape.as_list()),
        inputs[1]: random.randint(networks.NUM_CLASSES,
                                  size=inputs[1].shape.as_list()),
    }
    with tf.Session(config=built.session_config()) as session:
      session.run(tf.global_variables_initializer())
      return median_step(lambda: session.run(train_op, feeds), steps)


def median_step(step: Callable[[], Any], steps: int) -> float:
  """Returns the median time of calls of `step`, without the first two."""
  return float(np.median(step_times(step, steps)))


def step_times(step: Callable[[], Any], steps: int) -> List[float]:
  """Returns the seconds of calls of `step`, without the first two."""
  seconds = []
  for _ in range(steps + 2):
    start = time.perf_counter()
    step()
    seconds.append(time.perf_counter() - start)
  return seconds[2:]


def speeds_of(values: flags.FlagValues) -> scale_model.Speeds:
  """Returns what the flags say of the machines; measures what they do not."""
  compute = values.step_seconds
  return scale_model.Speeds(
      compute=measured_step(values) if compute is None else compute,
      network=values.link_gigabits * 1e9 / 8, bus=values.local_gigabytes * 1e9,
      latency=values.latency_microseconds * 1e-6,
      message=values.message_microseconds * 1e-6)


def look(values: flags.FlagValues, placement: str,
         speeds: scale_model.Speeds) -> Row:
  """Builds the graph of one placement and looks at it."""
  with tf.Graph().as_default() as graph:
    start = time.perf_counter(), time.process_time()
    built = build(values, placement)
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    try:
      graph_bytes = graph.as_graph_def().ByteSize()
    except ValueError:  # It cannot be written down.
      graph_bytes = None
    report = towers.inspection.report(built.towers, train_op=built.train_op)
    transfers = report.transfers
    if placement == BETWEEN_GRAPH:
      transfers = scale_model.on_all_hosts(transfers, values.hosts)
    found = scale_model.traffic(transfers)
    chain = scale_model.longest_chain([built.train_op])
    return Row(placement, report.num_ops, graph_bytes, *seconds,
               len(built.towers.synced_layers), chain, found,
               scale_model.times(found, chain, speeds))


def run(values: flags.FlagValues) -> Tuple[scale_model.Speeds, List[Row]]:
  """Returns what the flags ask for.

  Raises:
    UsageError: If they do not fit.
  """
  check(values)
  speeds = speeds_of(values)
  return speeds, [look(values, placement, speeds)
                  for placement in values.placements]


def facts(values: flags.FlagValues) -> Dict[str, Any]:
  """Returns what the tables depend on, by the flags' names."""
  names = ("model", "hosts", "towers_per_host", "rows", "inputs", "device_type",
           "sync_batch_norm", "pack_bytes", "link_gigabits", "local_gigabytes",
           "latency_microseconds", "message_microseconds")
  return {**{name: values[name].value for name in names},
          "servers": len(servers(values))}


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()

  def action(values):
    speeds, rows = run(values)
    text = scale_tables.text(facts(values), speeds, rows)
    print(text)
    if values.markdown is not None:
      pathlib.Path(values.markdown).write_text(text + "\n", encoding="utf-8")
    if values.json is not None:
      found = scale_tables.plain(facts(values), speeds, rows)
      pathlib.Path(values.json).write_text(
          json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0

  return command_line.main(argv, make_flags(), text=__doc__, action=action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
