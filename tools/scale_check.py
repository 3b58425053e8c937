"""Compares the formula of tools/scale.py with runs over a network of loopback.

  python tools/scale_check.py
  python tools/scale_check.py --model=resnet20 --placements=shared,replicated

Two servers of TensorFlow run in this process, as on two hosts, with one tower
on each. They talk by gRPC over the loopback device. First this measures what
the link does: how long a message takes, how long many small ones, and a large
one. Then it says how long a step should take, with the compute time of two
towers on two logical CPU devices, which do without gRPC; and then it measures
steps.

Both towers have to share the cores of this machine with gRPC, of which the
formula knows nothing. The servers listen in a network namespace of this
process, which nothing outside reaches; where the system has none, give
--noprivate_network, and close their ports to others.
"""

import functools
import pathlib
import socket
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

# The checkout's `models` and `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
from tools import startup

startup.load_tensorflow()

from absl import flags
import tensorflow.compat.v1 as tf

from tools import command_line
from tools import networks
from tools import private_network
from tools import scale
from tools import scale_model
import towers

UsageError = command_line.UsageError

_DEVICES = [f"/job:worker/task:{host}/device:CPU:0" for host in range(2)]
_CHAIN, _MESSAGES, _BYTES = 40, 400, 2**25


def make_flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = command_line.flag_values()
  count = functools.partial(
      flags.DEFINE_integer, lower_bound=1, flag_values=values)
  flags.DEFINE_enum("model", "resnet8", list(networks.NETWORKS), "The network.",
                    flag_values=values)
  count("rows", 8, "Rows of the batch for each tower.")
  count("steps", 10, "Steps to take the median of.")
  flags.DEFINE_list(
      "placements", ["shared", "balanced", "replicated", "shared+packed",
                     "replicated+packed"],
      "See tools/scale.py; those without servers.", flag_values=values)
  flags.DEFINE_boolean("private_network", True, "Runs in a network namespace "
                       "with a loopback device only. Linux only.",
                       flag_values=values)
  return values


def started() -> List[Any]:
  """Starts two servers and returns them."""
  sockets = [socket.socket() for _ in _DEVICES]
  for each in sockets:
    each.bind(("127.0.0.1", 0))
  addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
  for each in sockets:
    each.close()
  spec = tf.train.ClusterSpec({"worker": addresses})
  return [tf.train.Server(spec, job_name="worker", task_index=host)
          for host in range(len(_DEVICES))]


def _session(target: str) -> tf.Session:
  config = tf.ConfigProto()
  # It would compute what is to be sent where it is wanted.
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return tf.Session(target, config=config)


def _run_time(target: str, build: Callable[[], tf.Operation],
              steps: int) -> float:
  """Returns the shortest time of a run of what `build` builds."""
  with tf.Graph().as_default():
    op = build()
    with _session(target) as session:
      return min(scale.step_times(lambda: session.run(op), steps))


def _chain(length: int) -> tf.Operation:
  """Builds a number that goes to and fro."""
  with tf.device(_DEVICES[0]):
    x = tf.random.uniform([])
  for k in range(length):
    with tf.device(_DEVICES[(k + 1) % 2]):
      x = x + 1.0
  return x.op


def _many(count: int, size: int, reader: str) -> tf.Operation:
  """Builds `count` tensors of `size` numbers, of which `reader` reads one."""
  with tf.device(_DEVICES[0]):
    tensors = [tf.fill([size], tf.random.uniform([])) for _ in range(count)]
  with tf.device(reader):
    return tf.group(*[x[0] for x in tensors])


def measured_link(target: str, steps: int) -> Tuple[float, float, float]:
  """Returns what the link between the servers does.

  Args:
    target: Of a session.
    steps: How many runs to take the shortest of.

  Returns:
    The seconds of a message, the seconds that a small message among many
    occupies it, and its bytes a second.
  """
  def crossing(count, size):
    """Returns the time that is due to crossing from one server to another."""
    away, here = (
        _run_time(target, functools.partial(_many, count, size, reader), steps)
        for reader in (_DEVICES[1], _DEVICES[0]))
    return max(away - here, 1e-9)

  latency = (_run_time(target, lambda: _chain(_CHAIN), steps) -
             _run_time(target, lambda: _chain(2), steps)) / (_CHAIN - 2)
  message = crossing(_MESSAGES, 16) / _MESSAGES
  return latency, message, _BYTES / crossing(1, _BYTES // 4)


def _batch(values: flags.FlagValues, rows: int) -> Tuple[tf.Tensor, tf.Tensor]:
  """Makes random images and labels of no class but the first."""
  network = networks.NETWORKS[values.model]
  return (tf.random.uniform((rows, *network.image_shape)),
          tf.zeros((rows, *network.labels_shape), tf.int64))


def local_step(values: flags.FlagValues) -> float:
  """Returns the time of a step of two towers without gRPC."""
  with tf.Graph().as_default():
    devices = ["/cpu:0", "/cpu:1"]
    shards = []
    for device in devices:
      with tf.device(device):
        shards.append(_batch(values, values.rows))
    built = towers.build_towers(networks.NETWORKS[values.model].loss, devices,
                                inputs=towers.PerTower(shards))
    train_op = built.minimize(scale.optimizer())
    with tf.Session(config=built.session_config()) as session:
      session.run(tf.global_variables_initializer())
      return scale.median_step(lambda: session.run(train_op), values.steps)


def _scale_flags(values: flags.FlagValues) -> flags.FlagValues:
  """Returns the flags of tools/scale.py for these two hosts."""
  found = scale.make_flags()
  found(["scale.py", f"--model={values.model}", "--hosts=2",
         "--towers_per_host=1", f"--rows={values.rows}", "--device_type=CPU",
         f"--placements={','.join(values.placements)}"])
  scale.check(found)
  refused = [name for name in values.placements
             if name.startswith(("servers", scale.BETWEEN_GRAPH))]
  if refused:
    raise UsageError("`--placements` must be without servers, of which there "
                     f"are none here: got {','.join(refused)}.")
  return found


def compare(values: flags.FlagValues, placement: str, target: str,
            speeds: scale_model.Speeds) -> Dict[str, float]:
  """Returns what the formula says of a placement, and what a step takes."""
  scale_values = _scale_flags(values)
  with tf.Graph().as_default():
    built = scale.build(scale_values, placement, _batch)
    report = towers.inspection.report(built.towers, train_op=built.train_op)
    found = scale_model.traffic(report.transfers)
    chain = scale_model.longest_chain([built.train_op])
    times = scale_model.times(found, chain, speeds)
    with _session(target) as session:
      session.run(tf.global_variables_initializer())
      session.run(tf.local_variables_initializer())
      measured = scale.median_step(
          lambda: session.run(built.train_op), values.steps)
  return {"least": times.least, "most": times.step, "measured": measured,
          "chain": chain,
          "messages": max(scale_model.total(loads).messages
                          for loads in found.ports.values())}


def run(values: flags.FlagValues) -> str:
  """Returns a table of what was said and what was measured.

  Raises:
    UsageError: If the flags do not fit, or there can be no such network.
  """
  _scale_flags(values)
  if values.private_network:
    try:
      private_network.enter()
    except OSError as error:
      raise UsageError(
          "`--private_network` must be possible here: got an error "
          f"({error}). Give `--noprivate_network` where others cannot reach "
          "the ports of this machine.") from error
  target = started()[0].target
  latency, message, rate = measured_link(target, values.steps)
  speeds = scale_model.Speeds(local_step(values), rate, rate, latency, message)
  lines = [
      f"{values.model}, 2 towers of {values.rows} rows. The link: "
      f"{1e6 * latency:.0f} us from host to host, {1e6 * message:.1f} us a "
      f"message, {8e-9 * rate:.1f} Gbit/s. Compute: {speeds.compute:.4f} s. "
      f"TensorFlow {tf.__version__}.", "",
      "| placement | messages | one after another | predicted, s | measured, s "
      "|", "| --- | ---: | ---: | ---: | ---: |"]
  for placement in values.placements:
    found = compare(values, placement, target, speeds)
    lines.append(
        f"| {placement} | {found['messages']} | {found['chain']} | "
        f"{found['least']:.4f} to {found['most']:.4f} | "
        f"{found['measured']:.4f} |")
  return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  tf.disable_v2_behavior()

  def action(values):
    print(run(values))
    return 0

  return command_line.main(argv, make_flags(), text=__doc__, action=action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
