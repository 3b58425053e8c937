"""Towers on several machines, on TensorFlow's own distributed runtime.

The same script runs on each host, and is told who is in the cluster and which
task it is: by `TF_CONFIG`, or by what it passes to `Cluster`.

    cluster = towers.cluster.Cluster(
        {"worker": ["host-a:2222", "host-b:2222"], "ps": ["host-a:2223"]},
        job="worker", index=0)
    cluster.start()
    if cluster.only_serves:
      cluster.serve()                        # Until training is done.
    else:
      graph = towers.build_towers(
          model_fn, cluster.tower_devices, inputs=...,
          parameter_device=cluster.parameter_devices)
      train_op = cluster.minimize(graph, optimizer, global_step=global_step)
      with cluster.session(graph, hooks=[tf.train.StopAtStepHook(last_step=N)],
                           checkpoint_dir=logdir) as session:
        while not session.should_stop():
          session.run(train_op)

There are two ways to spread the work:

-   `replication="in_graph"`: one graph, which the chief (the first worker)
    builds and runs, with towers on all workers' devices. It computes what one
    device would compute on the whole batch, batch norm included. The other
    workers only serve. The batch travels from the chief, unless the inputs are
    made on each host; see `Cluster.on_host`.
-   `replication="between_graph"`: each worker builds towers on its own devices,
    reads its own inputs and talks to the parameter servers only. With
    `sync=True` a step applies the gradient over the rows of all workers, as one
    device would; with `sync=False` each worker applies its own, without waiting
    for others. Batch norm takes the rows of one worker; the moving statistics
    are those of the chief's rows (with `sync=False`, of each worker in turn).

TensorFlow's servers (gRPC) know neither passwords nor encryption, and listen on
all network interfaces of their host, whatever address they are given: whoever
reaches the port can run any graph there, and with it read and write files. Run
clusters in a network of their own, or close the ports to others by a firewall.
"""

import contextlib
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple
from typing import Union

from absl import logging
import tensorflow.compat.v1 as tf

from towers import cluster_facts
from towers import cluster_network
from towers import cluster_session
from towers import cluster_spec
from towers import cluster_sync
from towers import cluster_talk
from towers import devices as devices_lib
from towers import graph as graph_lib

ClusterError = cluster_network.ClusterError
Task = cluster_spec.Task

REPLICATIONS = ("in_graph", "between_graph")


class Cluster:
  """The tasks of a cluster, as one of them sees them.

  Attributes:
    task: The `Task` of this process, with `job`, `index` and `address`.
    workers: Tuple of the tasks that train, the chief first.
    servers: Tuple of the parameter servers.
    replication: "in_graph" or "between_graph".
    target: The session target of this process; "" before `start`.
  """

  def __init__(self, jobs: Mapping[str, Sequence[str]], *, job: str,
               index: int = 0, replication: str = "between_graph",
               devices: Union[int, Sequence[str]] = 1,
               facts: Optional[Mapping[str, Any]] = None,
               time_limit: float = 300.0):
    """Describes the cluster; starts nothing.

    Args:
      jobs: For "worker" and "ps", and "chief" where the first worker is called
        so, a list of addresses, "host:port". The same in all tasks.
      job: The job of this process; or "evaluator", which is not in the cluster.
      index: Its number in the job.
      replication: "in_graph" or "between_graph", see the module.
      devices: The devices of each worker for its towers, as for `build_towers`:
        a number, or device strings without job and task, such as "/gpu:0".
      facts: What must be the same in all tasks, such as the flags; differences
        end a task with an error that names them. The versions of TensorFlow and
        of this library, the program and the addresses are looked at, too.
      time_limit: For how many seconds to wait for another task, be it at the
        start or later. No run of a session may take longer.

    Raises:
      TypeError: If an argument has another type.
      ValueError: If an address or device is none, or the task is not in the
        cluster; if there are several workers between graphs and no server.
    """
    self._members = cluster_spec.members(jobs, job, index)
    if replication not in REPLICATIONS:
      raise ValueError("`replication` must be one of "
                       f"{', '.join(REPLICATIONS)}: got {replication!r}.")
    self.task = self._members.own
    self.workers, self.servers = self._members.workers, self._members.servers
    self.replication = replication
    if not self._in_graph and len(self.workers) > 1 and not self.servers:
      raise ValueError(
          "`jobs` must hold a parameter server (\"ps\") for several workers "
          f"between graphs: got {len(self.workers)} workers and none. Add one, "
          "or use `replication=\"in_graph\"`.")
    if not time_limit > 0:
      raise ValueError("`time_limit` must be a number of seconds above 0: got "
                       f"{time_limit!r}.")
    self._time_limit = time_limit
    self._local = [devices_lib.without_task(own)
                   for own in devices_lib.resolve(devices)]
    self._facts = {name: str(value) for name, value in (facts or {}).items()}
    self._mean: Optional[cluster_sync.WorkersMean] = None
    self.target = ""

  @classmethod
  def from_environment(cls, text: Optional[str], **arguments: Any) -> "Cluster":
    """Returns the cluster that a `TF_CONFIG` describes.

    Args:
      text: `os.environ["TF_CONFIG"]`: JSON with `cluster` (addresses by job)
        and `task` (`type` and `index`).
      **arguments: The other arguments of `Cluster`.

    Raises:
      ValueError: If it is no such JSON; or as `Cluster`.
    """
    found = cluster_spec.from_tf_config(text)
    return cls(found.addresses(), job=found.own.job, index=found.own.index,
               **arguments)

  # --- Who does what ---

  @property
  def _in_graph(self) -> bool:
    return self.replication == "in_graph"

  @property
  def is_chief(self) -> bool:
    """Whether this process initialises, saves and restores variables."""
    return self.task == self._members.chief

  @property
  def is_evaluator(self) -> bool:
    """Whether this process is in no cluster, and only reads checkpoints."""
    return self.task.job == cluster_spec.EVALUATOR

  @property
  def only_serves(self) -> bool:
    """Whether this process builds no graph, but should `serve`."""
    return self.task in self.servers or (
        self._in_graph and self.task in self.workers and not self.is_chief)

  @property
  def tower_devices(self) -> Tuple[str, ...]:
    """The devices to build towers on in this process, for `build_towers`."""
    builders = self.workers if self._in_graph else (self.task,)
    return tuple(device for task in builders for device in self.on_host(task))

  @property
  def parameter_devices(self) -> Tuple[str, ...]:
    """The servers' devices, or the chief's CPU, for `build_towers`."""
    owners = self.servers or (self._members.chief,)
    return tuple(task.device() for task in owners)

  def on_host(self, task: Task) -> Tuple[str, ...]:
    """Returns the devices of one worker's towers.

    With `replication="in_graph"`, make the inputs of each worker's towers on
    its own host, so that no batch travels:

        shards = []
        for worker in cluster.workers:
          with tf.device(worker.device()):
            shards += [batches_of(worker) for _ in cluster.on_host(worker)]
        inputs = towers.PerTower(shards)
    """
    return tuple(
        f"/job:{task.job}/task:{task.index}{local}" for local in self._local)

  # --- The server ---

  def start(self, **overrides: Any) -> None:
    """Starts TensorFlow's server of this task; an evaluator has none.

    It ends with the process. A parameter server sees no GPU: it would take all
    of their memory.

    Args:
      **overrides: Fields of the server's `ConfigProto`, such as `gpu_options`.

    Raises:
      ClusterError: If the host of the address cannot be found or is another
        one, or if the port is in use.
    """
    if self.is_evaluator or self.target:
      return
    cluster_network.check_own_address(self.task)
    config = tf.ConfigProto(**overrides)
    config.device_count["CPU"] = max(
        1, config.device_count.get("CPU", 1),
        *[tf.DeviceSpec.from_string(local).device_index + 1
          for local in self._local if "CPU" in local])
    if self.task in self.servers:
      config.device_count.update({"CPU": 1, "GPU": 0})
    try:
      server = tf.train.Server(
          tf.train.ClusterSpec(self._members.addresses()),
          job_name=self.task.job, task_index=self.task.index, config=config)
    except tf.errors.OpError as error:
      raise ClusterError(
          f"`jobs` must let the server of {self.task} start: {error.message}"
      ) from error
    self.target = server.target
    logging.info("%s listens, on all interfaces of this host.", self.task)

  def serve(self) -> None:
    """Serves until training is done; for tasks that build no graph.

    Raises:
      ClusterError: If the chief's facts differ, or it is not up for longer than
        `time_limit`.
      ValueError: If this task has a graph to build.
    """
    if not self.only_serves:
      raise ValueError("`serve` must be called in tasks that only serve: got "
                       f"{self.task} with {self.replication} replication. "
                       "Build towers there.")
    self._talk().serve(self._all_facts())

  def check_chief(self) -> None:
    """Checks that the chief is up, for an evaluator that waits for it.

    Raises:
      ClusterError: If it is not.
    """
    why = cluster_network.fault(self._members.chief)
    if why is not None:
      raise ClusterError("`jobs` must have a chief that is up: got "
                         f"{self._members.chief} ({why}). Start it again.")

  def _talk(self) -> cluster_talk.Talk:
    """Returns how this task and the others tell each other what they do."""
    if not self.target:
      raise ValueError("`start` must be called before: got no server in "
                       f"{self.task}.")
    told = self.servers + (self.workers[1:] if self._in_graph else ())
    return cluster_talk.Talk(self._members, told, target=self.target,
                             time_limit=self._time_limit)

  def _all_facts(self, variables: Optional[Sequence[Any]] = None
                ) -> Dict[str, str]:
    return cluster_facts.collect(
        self._facts, self._members, replication=self.replication,
        variables=variables)

  # --- Training ---

  def minimize(self, graph: graph_lib.TowerGraph,
               optimizer: tf.train.Optimizer, *, global_step: Any,
               sync: bool = True, **options: Any) -> tf.Operation:
    """Returns the op that makes one step of training.

    In one graph it is `graph.minimize`. Between graphs, with `sync`, running it
    sends the worker's gradient; `session` then has all workers' mean applied,
    weighted by rows, and moves to the next step. So one run is one step, and
    each worker must run it once per step. Without `sync` each worker applies
    its own gradient when it is ready, to variables that others may have changed
    meanwhile.

    Args:
      graph: What `build_towers` returned.
      optimizer: A `tf.train.Optimizer`.
      global_step: The global step; stop by it and not by a worker's own count
        of steps. A resource variable on `parameter_devices[0]`.
      sync: Whether workers make their steps together.
      **options: Those of `TowerGraph.minimize`; between graphs with `sync`,
        `loss`, `var_list` and `clip_norm`.

    Raises:
      TypeError: If an option is unknown, or as `TowerGraph.minimize`.
      ValueError: If a variable to train is not on `parameter_devices`; or as
        `TowerGraph.minimize`.
    """
    if self._in_graph:
      return graph.minimize(optimizer, global_step=global_step, **options)
    self._check_shared([*graph.trainable_variables, global_step])
    if not sync:
      return graph.minimize(optimizer, global_step=global_step, **options)
    unknown = sorted(options.keys() - {"loss", "var_list", "clip_norm"})
    if unknown:
      raise TypeError(
          "`options` must be loss, var_list and clip_norm between graphs with "
          f"`sync=True`: got {', '.join(unknown)}. Leave them out, or use "
          "`replication=\"in_graph\"`.")
    mean = cluster_sync.WorkersMean(
        graph, optimizer, members=self._members,
        device=self.parameter_devices[0], global_step=global_step, **options)
    self._mean = mean
    return mean.send

  def _check_shared(self, variables: Sequence[Any]) -> None:
    """Checks that all workers would change the same variables."""
    devices = set(map(_canonical, self.parameter_devices))
    for variable in variables:
      if _canonical(variable.device) not in devices or not hasattr(
          variable, "handle"):
        raise ValueError(
            "`global_step` and all variables to train must be resource "
            f"variables on {', '.join(self.parameter_devices)}, for all "
            f"workers to share them: got {variable.op.name} on "
            f"{variable.device or 'no device'}. Pass "
            "`parameter_device=cluster.parameter_devices` to `build_towers`, "
            "and make the global step on the first of these, with "
            "`use_resource=True`.")

  @contextlib.contextmanager
  def session(self, graph: graph_lib.TowerGraph, *,
              hooks: Sequence[tf.train.SessionRunHook] = (),
              scaffold: Optional[tf.train.Scaffold] = None,
              checkpoint_dir: Optional[str] = None,
              save_checkpoint_steps: Optional[int] = None,
              **overrides: Any) -> Iterator[tf.train.MonitoredSession]:
    """A context with a session that trains, for workers that build a graph.

    It waits for who is needed: the servers and the chief's initialisation; in
    one graph, all workers. Where one of them dies and comes back, training goes
    on from the last checkpoint. When the context is left as it should be, the
    other tasks are told that training is done.

    Args:
      graph: What `build_towers` returned.
      hooks: Session hooks, for this process.
      scaffold: As in `tf.train.MonitoredTrainingSession`.
      checkpoint_dir: Where the chief restores from and saves to. It must be a
        directory that all chiefs to come can read.
      save_checkpoint_steps: After how many steps to save; None for not at all.
      **overrides: Fields of `tf.ConfigProto`.

    Yields:
      A `tf.train.MonitoredSession`.

    Raises:
      ClusterError: If a task that is needed does not come up in time, or has
        other facts; if a run takes longer than `time_limit`, as when the
        network is down; if training has ended while this task was away.
    """
    talk = self._talk()
    scaffold = scaffold or tf.train.Scaffold()
    config = self._session_config(graph, overrides)
    hooks = list(hooks)
    if self._mean is not None:
      hooks.insert(0, cluster_sync.SyncHook(
          self._mean, self._members, talk.has_ended,
          time_limit=self._time_limit))
    variables = graph.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    prepare = lambda: talk.begin(self._all_facts(variables))
    if self.is_chief:
      creator = cluster_session.ChiefCreator(
          prepare, scaffold, target=self.target, config=config,
          checkpoint_dir=checkpoint_dir)
      hooks += cluster_session.saver_hook(
          scaffold, checkpoint_dir, save_checkpoint_steps)
    else:
      creator = cluster_session.WorkerCreator(
          prepare, scaffold, target=self.target, config=config,
          chief=self._members.chief, time_limit=self._time_limit)
    with cluster_session.explained(self._members, self._time_limit), \
        tf.train.MonitoredSession(creator, hooks=hooks) as session:
      yield session
    talk.end()

  def _session_config(self, graph: graph_lib.TowerGraph,
                      overrides: Dict[str, Any]) -> tf.ConfigProto:
    # What waits for a host that is out of reach does so without end, else.
    overrides.setdefault("operation_timeout_in_ms",
                         int(min(1000 * self._time_limit, 2**31 - 1)))
    config = graph.session_config(**overrides)
    if not self._in_graph:
      # Else a session waits for all other workers, also for those that have
      # ended.
      config.device_filters.extend(
          [f"/job:{cluster_spec.SERVER}",
           f"/job:{self.task.job}/task:{self.task.index}"])
    return config


def _canonical(device: str) -> str:
  return tf.DeviceSpec.from_string(device or "").to_string()
