"""How long a step takes on many machines, by what has to travel.

Takes what `towers.inspection` says that goes from one device to another in a
step, sorts it by the links that it goes through, and adds up times:

    step = compute + network + bus + latency

    network = sum over kinds of the largest, over all network ports, of
              (bytes / network speed + messages * time of a message)
    bus     = sum over kinds of the largest, over all buses, of
              bytes / bus speed
    latency = messages that wait for each other * time of travel

What that assumes:

-   `compute` is what one tower needs for its rows, forward and backward, and is
    the same for all towers.
-   Each host has a port that sends and receives at full speed at once, into a
    switch without limits of its own. So the busiest port decides.
-   Each accelerator has a bus of its own, each way, over which all goes that it
    sends or receives, also to and from other hosts. What travels between the
    CPU devices of one host costs nothing: it stays where it is in memory.
-   The kinds (`parameters`, `gradients`, `moments`, `inputs`, `other` and
    `control`) come one after the other, and nothing travels while towers
    compute. In truth much of it overlaps: `least` is the time in which all of
    it does, the largest of the compute time, that of the busiest port or bus,
    and the latency. A step should take between `least` and `step`.
-   `latency` counts the longest chain of messages between hosts in the graph,
    each of which is sent when the one before has come. A batch norm layer over
    the whole batch adds a way to the merge and back, forward and backward: four
    for each layer.
-   Sums, updates and the runtime's own work cost nothing.
"""

import collections
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence
from typing import Set, Tuple

import tensorflow.compat.v1 as tf

# In the order in which they are shown; see `towers.inspection`.
KINDS = ("parameters", "gradients", "moments", "inputs", "other", "control")

HOME = "/job:worker/task:0/device:CPU:0"


class Speeds(NamedTuple):
  """What the machines can do.

  Fields:
    compute: Seconds in which one tower computes its part of a step.
    network: Bytes a second through a host's port, each way.
    bus: Bytes a second between an accelerator and its host, each way.
    latency: Seconds that a message takes from one host to another.
    message: Seconds that a port is taken by a message, beside its bytes.
  """
  compute: float
  network: float
  bus: float
  latency: float
  message: float


class Load(NamedTuple):
  """What goes through a link in a step: messages, and their bytes."""
  messages: int = 0
  num_bytes: int = 0

  def __add__(self, other: Any) -> "Load":
    return Load(self.messages + other.messages,
                self.num_bytes + other.num_bytes)


# The loads of each link, by kind. A link is named by whose it is and the
# direction: "worker 0 sends", "worker 1 GPU:3 receives".
Links = Dict[str, Dict[str, Load]]


class Traffic(NamedTuple):
  """What travels in a step.

  Fields:
    between: What goes from one host to another: the load by kind, for each
      pair of hosts.
    ports: The network ports of hosts.
    buses: The buses of accelerators.
    unknown: How many tensors have a size that is not known.
  """
  between: Dict[Tuple[str, str], Dict[str, Load]]
  ports: Links
  buses: Links
  unknown: int


class Times(NamedTuple):
  """The seconds of a step and of its parts; see the module."""
  compute: float
  network: float
  bus: float
  latency: float
  step: float
  least: float


def host_of(device: str) -> str:
  """Returns the name of a device's host, such as "worker 0"."""
  spec = tf.DeviceSpec.from_string(device or HOME)
  return f"{spec.job} {spec.task}"


def on_all_hosts(transfers: Sequence[Any], hosts: int) -> List[Any]:
  """Returns the transfers of all workers, by those of the first.

  Args:
    transfers: What one worker, number 0, and the parameter servers exchange.
    hosts: How many workers there are.
  """
  def moved(device, host):
    return (device or HOME).replace("/job:worker/task:0/",
                                    f"/job:worker/task:{host}/")

  return [t._replace(source=moved(t.source, host), target=moved(t.target, host))
          for host in range(hosts) for t in transfers]


def traffic(transfers: Iterable[Any]) -> Traffic:
  """Sorts transfers by the links that they go through.

  Args:
    transfers: As `towers.inspection.Report.transfers`. What has no device is
      where TensorFlow puts it: on the first host's CPU.
  """
  between: Dict[Tuple[str, str], Dict[str, Load]] = {}
  ports: Links = {}
  buses: Links = {}
  unknown = 0
  for transfer in transfers:
    source = transfer.source or HOME
    target = transfer.target or HOME
    if source == target:
      continue
    load = Load(transfer.tensors, transfer.num_bytes)
    unknown += transfer.unknown
    hosts = host_of(source), host_of(target)
    if hosts[0] != hosts[1]:
      _add(between, hosts, transfer.purpose, load)
      _add(ports, f"{hosts[0]} sends", transfer.purpose, load)
      _add(ports, f"{hosts[1]} receives", transfer.purpose, load)
    for device, verb in ((source, "sends"), (target, "receives")):
      name = _accelerator(device)
      if name is not None:
        _add(buses, f"{name} {verb}", transfer.purpose, load)
  return Traffic(between, ports, buses, unknown)


def _accelerator(device: str) -> Optional[str]:
  spec = tf.DeviceSpec.from_string(device)
  if spec.device_type == "CPU":
    return None
  return f"{host_of(device)} {spec.device_type}:{spec.device_index}"


def _add(links: Dict[Any, Dict[str, Load]], link: Any, kind: str,
         load: Load) -> None:
  loads = links.setdefault(link, {})
  loads[kind] = loads.get(kind, Load()) + load


def total(loads: Dict[str, Load]) -> Load:
  """Returns what goes through a link, of all kinds."""
  return sum(loads.values(), Load())


def busiest(links: Links) -> Tuple[Optional[str], Load]:
  """Returns the link with the most bytes, and its load; None without any."""
  if not links:
    return None, Load()
  name = max(links, key=lambda link: total(links[link])[::-1])
  return name, total(links[name])


def largest(links: Links, kind: str) -> Load:
  """Returns the load, of one kind, of the link with the most bytes of it."""
  return max((loads.get(kind, Load()) for loads in links.values()),
             key=lambda load: load[::-1], default=Load())


def times(found: Traffic, chain: int, speeds: Speeds) -> Times:
  """Returns the time of a step; see the module.

  Args:
    found: What travels.
    chain: How many messages wait for each other, see `longest_chain`.
    speeds: What the machines can do.
  """
  def port_time(load):
    return load.num_bytes / speeds.network + load.messages * speeds.message

  def bus_time(load):
    return load.num_bytes / speeds.bus

  network, network_least = _link_times(found.ports, port_time)
  bus, bus_least = _link_times(found.buses, bus_time)
  latency = chain * speeds.latency
  return Times(
      speeds.compute, network, bus, latency,
      step=speeds.compute + network + bus + latency,
      least=max(speeds.compute, network_least, bus_least, latency))


def _link_times(links: Links, time_of: Any) -> Tuple[float, float]:
  """Returns the time if kinds come one after the other, and if all overlap."""
  one_by_one = sum(
      max((time_of(loads.get(kind, Load())) for loads in links.values()),
          default=0.0)
      for kind in KINDS)
  together = max((time_of(total(loads)) for loads in links.values()),
                 default=0.0)
  return one_by_one, together


def longest_chain(ends: Iterable[tf.Operation]) -> int:
  """Returns how many messages between hosts wait for each other at most.

  Args:
    ends: The ops that a step runs; their graph must hold no loop.
  """
  hosts: Dict[str, str] = {}

  def host(op):
    return hosts.setdefault(op.device, host_of(op.device))

  chain: Dict[tf.Operation, int] = {}
  for op in _in_order(ends):
    own = host(op)
    chain[op] = max((chain[other] + (host(other) != own)
                     for other in _before(op)), default=0)
  return max(chain.values(), default=0)


def _before(op: tf.Operation) -> List[tf.Operation]:
  return [x.op for x in op.inputs] + list(op.control_inputs)


def _in_order(ends: Iterable[tf.Operation]) -> List[tf.Operation]:
  """Returns all that `ends` need, each op after those that it waits for."""
  ordered: List[tf.Operation] = []
  seen: Set[tf.Operation] = set()
  # Ops, and what each still has to wait for.
  pending = collections.deque([iter(ends)])
  waiting: List[tf.Operation] = []
  while pending:
    op = next(pending[-1], None)
    if op is None:
      pending.pop()
      if waiting:
        ordered.append(waiting.pop())
    elif op not in seen:
      seen.add(op)
      waiting.append(op)
      pending.append(iter(_before(op)))
  return ordered
