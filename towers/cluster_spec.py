"""Who is in a cluster: its tasks, their addresses, and which one this is."""

import json
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence
from typing import Tuple

# Jobs of a cluster. The evaluator is started with the others, but is not in the
# cluster: it only reads checkpoints.
CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
JOBS = (CHIEF, WORKER, SERVER, EVALUATOR)


class Task(NamedTuple):
  """One process of a cluster.

  Fields:
    job: "worker", "ps" (a parameter server), "chief" (a first worker that is
      called so) or "evaluator".
    index: Its number in its job.
    address: "host:port"; empty for an evaluator.
  """
  job: str
  index: int  # type: ignore[assignment]  # Hides `tuple.index`.
  address: str

  def __str__(self) -> str:
    return f"{self.job} {self.index} ({self.address})" if self.address else (
        f"{self.job} {self.index}")

  @property
  def host(self) -> str:
    """The host of the address, without the brackets of IPv6."""
    return self.address.rpartition(":")[0].strip("[]")

  @property
  def port(self) -> int:
    """The port of the address."""
    return int(self.address.rpartition(":")[2])

  def device(self, number: int = 0, kind: str = "CPU") -> str:
    """Returns the name of one of the task's devices."""
    return f"/job:{self.job}/task:{self.index}/device:{kind}:{number}"


class Members(NamedTuple):
  """All tasks of a cluster, and this process's own.

  Fields:
    workers: Those that build towers, the chief first.
    servers: The parameter servers.
    own: The task of this process.
  """
  workers: Tuple[Task, ...]
  servers: Tuple[Task, ...]
  own: Task

  @property
  def chief(self) -> Task:
    """The worker that initialises, saves and restores variables."""
    return self.workers[0]

  def others(self) -> Tuple[Task, ...]:
    """Returns all tasks but this process's own."""
    return tuple(task for task in self.servers + self.workers
                 if task != self.own)

  def addresses(self) -> Dict[str, List[str]]:
    """Returns the addresses by job, as `tf.train.ClusterSpec` takes them."""
    jobs: Dict[str, List[str]] = {}
    for task in self.workers + self.servers:
      jobs.setdefault(task.job, []).append(task.address)
    return jobs


def members(jobs: Mapping[str, Sequence[str]], job: str,
            index: int) -> Members:
  """Returns the tasks of a cluster.

  Args:
    jobs: Addresses ("host:port") by job, as in `tf.train.ClusterSpec`.
    job: The job of this process.
    index: Its number in the job.

  Raises:
    TypeError: If an argument has another type.
    ValueError: If an address is no address or occurs twice, a job is unknown,
      there is no worker, or no task of that job and number.
  """
  if not isinstance(jobs, Mapping):
    raise TypeError("`jobs` must hold lists of addresses by job: expected for "
                    "example {'worker': ['host:2222'], 'ps': ['host:2223']}, "
                    f"got {jobs!r}.")
  tasks = []
  for name, addresses in jobs.items():
    if name not in (CHIEF, WORKER, SERVER):
      raise ValueError("`jobs` must hold the jobs worker, ps and chief only: "
                       f"got {name!r}. An evaluator is in no cluster.")
    if isinstance(addresses, str) or not isinstance(addresses, Sequence):
      raise TypeError(f"`jobs[{name!r}]` must be a list of addresses: got "
                      f"{addresses!r}.")
    tasks += [Task(name, number, _checked_address(address, f"{name} {number}"))
              for number, address in enumerate(addresses)]
  _check_distinct(tasks)
  chiefs, workers, servers = (
      tuple(task for task in tasks if task.job == name)
      for name in (CHIEF, WORKER, SERVER))
  if len(chiefs) > 1:
    raise ValueError("`jobs` must hold at most one chief: got "
                     f"{len(chiefs)}. Make the others workers.")
  if not chiefs + workers:
    raise ValueError(f"`jobs` must hold a worker: got {dict(jobs)!r}.")
  return Members(chiefs + workers, servers, _own(tasks, job, index))


def _own(tasks: Sequence[Task], job: str, index: int) -> Task:
  if job not in JOBS:
    raise ValueError(f"`job` must be one of {', '.join(JOBS)}: got {job!r}.")
  if isinstance(index, bool) or not isinstance(index, int) or index < 0:
    raise ValueError("`index` must be the number of a task: expected 0 or "
                     f"more, got {index!r}.")
  if job == EVALUATOR:
    return Task(EVALUATOR, index, "")
  own = [task for task in tasks if task.job == job]
  if index >= len(own):
    raise ValueError(
        f"`index` must be the number of a task of the job {job!r}: expected "
        f"less than {len(own)}, as many as there are addresses, got {index}.")
  return own[index]


def _checked_address(address: Any, where: str) -> str:
  """Returns an address that has a host and a port."""
  host, _, port = address.rpartition(":") if isinstance(address, str) else (
      "", "", "")
  if not host or "/" in host or not port.isdecimal() or not (
      0 < int(port) < 2**16):
    raise ValueError(
        "`jobs` must hold addresses as host:port, the port from 1 to 65535: "
        f"got {address!r} ({where}).")
  return address


def _check_distinct(tasks: Sequence[Task]) -> None:
  seen: Dict[str, Task] = {}
  for task in tasks:
    other = seen.setdefault(task.address, task)
    if other is not task:
      raise ValueError(
          "`jobs` must hold each address once: got "
          f"{task.address} for {other.job} {other.index} and for {task.job} "
          f"{task.index}.")


def from_tf_config(text: Optional[str]) -> Members:
  """Returns the tasks that a `TF_CONFIG` names.

  Args:
    text: Its JSON, with the entries `cluster` (addresses by job) and `task`
      (`type` and `index`).

  Raises:
    ValueError: If it is not there, is no JSON, or lacks an entry; or as
      `members`.
  """
  try:
    parsed = json.loads(text or "")
    jobs, task = dict(parsed["cluster"]), parsed["task"]
    job, index = task["type"], task.get("index", 0)
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(
        "`TF_CONFIG` must be JSON such as {\"cluster\": {\"worker\": "
        "[\"host:2222\"], \"ps\": [\"host:2223\"]}, \"task\": {\"type\": "
        f"\"worker\", \"index\": 0}}}}: got {text!r}.") from error
  # What `tf.estimator` called the chief in earlier versions.
  if "master" in jobs:
    jobs[CHIEF] = jobs.pop("master")
  return members(jobs, CHIEF if job == "master" else job, index)
