"""Runs of train.py on a cluster: its flags, its places, and its roles."""

import contextlib
import dataclasses
import os
from typing import Any, Callable, ContextManager, Iterator, List, Optional
from typing import Sequence

from absl import flags
import tensorflow.compat.v1 as tf

from tools import command_line
from tools import datasets
from tools import places
from tools import tasks
from tools import training_options
from tools import visible_devices
import towers

UsageError = command_line.UsageError

_JOBS = ("worker", "ps", "chief", "evaluator")


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
  """Which task of a cluster this is; the flags of the same names say more."""
  job_name: Optional[str] = None
  task_index: int = 0
  worker_hosts: Optional[Sequence[str]] = None
  ps_hosts: Optional[Sequence[str]] = None
  replication: str = "in_graph"
  sync: bool = True
  time_limit: float = 300.0

  @property
  def in_use(self) -> bool:
    """Whether there is a cluster."""
    return self.job_name is not None or "TF_CONFIG" in os.environ


def define_flags(values: flags.FlagValues) -> None:
  """Adds the flags of clusters."""
  defaults = ClusterOptions()
  flags.DEFINE_enum(
      "job_name", defaults.job_name, _JOBS,
      "What this process is in a cluster: a worker, of which number 0 is the "
      "chief; a parameter server (ps); or the evaluator, which tests each "
      "checkpoint as it comes. Start the same command with the same flags for "
      "each; only --job_name and --task_index differ. Or set TF_CONFIG instead "
      "of the four flags. tools/launch.py starts a cluster on this machine. "
      "TensorFlow's servers know no passwords: close their ports to others.",
      flag_values=values)
  flags.DEFINE_integer(
      "task_index", defaults.task_index, "Number of this process in its job.",
      lower_bound=0, flag_values=values)
  flags.DEFINE_list("worker_hosts", defaults.worker_hosts,
                    "Addresses of the workers, host:port, the chief first.",
                    flag_values=values)
  flags.DEFINE_list("ps_hosts", defaults.ps_hosts,
                    "Addresses of the parameter servers, host:port.",
                    flag_values=values)
  flags.DEFINE_enum(
      "replication", defaults.replication, ["in_graph", "between_graph"],
      "in_graph: the chief builds towers on the devices of all workers, with "
      "batch norm over the whole batch. between_graph: each worker builds "
      "towers on its own devices, with batch norm over its own images; it "
      "needs parameter servers. --num_towers and --devices are those of each "
      "worker; 1 tower by default.", flag_values=values)
  flags.DEFINE_boolean(
      "sync", defaults.sync,
      "Between graphs: whether the workers make their steps together, with the "
      "batch dealt out among them, which is what one device would compute. "
      "With --nosync each worker makes steps of --batch_size images of its "
      "own, without waiting for the others.", flag_values=values)
  flags.DEFINE_float(
      "time_limit", defaults.time_limit,
      "For how many seconds to wait for another process of the cluster.",
      lower_bound=1.0, flag_values=values)


def options_of(values: flags.FlagValues) -> ClusterOptions:
  """Returns the options that flags say."""
  return ClusterOptions(**{
      field.name: values[field.name].value
      for field in dataclasses.fields(ClusterOptions)})


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
  """Makes what goes wrong between the tasks a `UsageError`."""
  try:
    yield
  except towers.cluster.ClusterError as error:
    raise UsageError(str(error)) from error


def started(cluster_options: ClusterOptions,
            options: training_options.Options) -> "Cluster":
  """Returns this process's view of the cluster, its server started.

  Raises:
    UsageError: If the flags do not make a cluster, or the server cannot start.
  """
  _check(cluster_options, options)
  facts = dataclasses.asdict(options)
  for of_each_host in ("logdir", "data_dir"):
    del facts[of_each_host]
  visible = visible_devices.asked_for(
      options.devices or options.num_towers or 1)
  arguments = dict(
      replication=cluster_options.replication, devices=visible.devices,
      facts=dict(facts, sync=cluster_options.sync),
      time_limit=cluster_options.time_limit)
  try:
    if cluster_options.job_name is None:
      cluster = towers.cluster.Cluster.from_environment(
          os.environ["TF_CONFIG"], **arguments)
    else:
      jobs = {"worker": cluster_options.worker_hosts or []}
      if cluster_options.ps_hosts:
        jobs["ps"] = cluster_options.ps_hosts
      cluster = towers.cluster.Cluster(
          jobs, job=cluster_options.job_name,
          index=cluster_options.task_index, **arguments)
  except ValueError as error:
    raise UsageError(f"the flags must describe a cluster: {error}") from error
  if cluster.task in cluster.workers and visible.gpus is None:
    # The chief would build there what is on its own host.
    raise UsageError(
        "`--devices` must be on every worker's host: got "
        f"{','.join(visible.devices)}, not all of which are on this one, which "
        f"has {len(tf.config.list_physical_devices('GPU'))} GPUs.")
  with _one_line():
    cluster.start(**visible.session_options())
  return Cluster(cluster, options, visible, sync=cluster_options.sync,
                 time_limit=cluster_options.time_limit)


def _check(cluster_options: ClusterOptions,
           options: training_options.Options) -> None:
  """Checks that the options make sense on a cluster."""
  if options.logdir is None:
    raise UsageError(
        "`--logdir` must be given on a cluster: a directory that the chief and "
        "the evaluator reach, also after a restart.")
  if options.remainder == "keep":
    raise UsageError(
        "`--remainder` must be drop or repeat on a cluster, where each process "
        "reads its part of full batches: got keep.")
  if options.variables != "shared":
    raise UsageError("`--variables` must be shared on a cluster: got "
                     f"{options.variables}.")
  if cluster_options.replication == "in_graph" and not cluster_options.sync:
    raise UsageError("`--nosync` must come with "
                     "`--replication=between_graph`: got in_graph.")
  if cluster_options.replication == "in_graph" or not cluster_options.sync:
    return
  refused = [name for name, given in (
      ("accumulate_steps", options.accumulate_steps > 1),
      ("loss_scale", options.loss_scale is not None or
       options.precision == "float16"),
      ("skip_nonfinite", options.skip_nonfinite),
      ("model", len(tasks.of_model(options.model).parts) > 1)) if given]
  if refused:
    raise UsageError(
        "`--replication=between_graph` must not be given with "
        f"{', '.join('--' + name for name in refused)} as they are: got flags "
        "that only work in one graph. Use `--replication=in_graph`.")


class Cluster(places.Places):
  """A run whose towers are on a cluster; what this process does in it."""

  def __init__(self, cluster: towers.cluster.Cluster,
               options: training_options.Options,
               visible: visible_devices.Visible, *, sync: bool,
               time_limit: float):
    super().__init__(options, visible)
    self.cluster = cluster
    self._sync, self._time_limit = sync, time_limit
    self._in_graph = cluster.replication == "in_graph"
    self.is_evaluator, self.is_server = cluster.is_evaluator, False
    if self.is_evaluator:
      return  # It works here.
    self.devices = list(cluster.tower_devices)
    self.parameter_device = list(cluster.parameter_devices)
    self.is_chief = cluster.is_chief
    self.is_server = cluster.task in cluster.servers
    self.only_reads = cluster.only_serves and not self.is_server

  def serve(self) -> None:
    """Serves until training is done.

    Raises:
      UsageError: If a flag differs from the chief's, or that is gone.
    """
    with _one_line():
      self.cluster.serve()

  def check_chief(self, silent_seconds: float) -> None:
    """Checks, for the evaluator, that checkpoints can still come.

    Args:
      silent_seconds: Since when none has come.

    Raises:
      UsageError: If that is too long and the chief is not up.
    """
    if silent_seconds > self._time_limit:
      with _one_line():
        self.cluster.check_chief()

  @property
  def _number(self) -> int:
    return self.cluster.workers.index(self.cluster.task)

  def inputs(self, batches: Callable[[datasets.Share], tf.data.Dataset]
            ) -> places.Inputs:
    """Makes the iterators of training, each on the host that needs it."""
    if self._in_graph:
      return self._inputs_of_hosts(batches)
    share = datasets.WHOLE
    if self._sync:
      share = datasets.Share(self._number, len(self.cluster.workers))
    return self._made_on(self.cluster.task, batches, share)

  def _made_on(self, task: towers.cluster.Task,
               batches: Callable[[datasets.Share], tf.data.Dataset],
               share: datasets.Share) -> places.Inputs:
    with tf.device(task.device()):
      return super().inputs(lambda unused_whole: batches(share))

  def _inputs_of_hosts(
      self, batches: Callable[[datasets.Share], tf.data.Dataset]
  ) -> places.Inputs:
    """Makes an iterator per tower, so that no batch travels."""
    made: List[places.Inputs] = []
    for worker in self.cluster.workers:
      for _ in self.cluster.on_host(worker):
        made.append(self._made_on(
            worker, batches, datasets.Share(len(made), len(self.devices))))
    images, labels, _ = made[0].batch
    weights = tf.concat([each.batch[2] for each in made], axis=0)
    return places.Inputs(
        tf.group(*[each.start for each in made]),
        towers.PerTower([each.inputs for each in made]),
        (images, labels, weights))

  def global_step(self) -> Any:
    """Makes the global step where all workers share it."""
    with tf.device(self.parameter_device[0]):
      return tf.get_variable(
          "global_step", [], tf.int64, tf.zeros_initializer(),
          trainable=False, use_resource=True,
          collections=[tf.GraphKeys.GLOBAL_VARIABLES,
                       tf.GraphKeys.GLOBAL_STEP])

  def minimize(self, train: towers.TowerGraph, optimizer: tf.train.Optimizer,
               **arguments: Any) -> tf.Operation:
    """Returns a train op; arguments as of `towers.TowerGraph.minimize`."""
    if self._in_graph or not self._sync:
      return self.cluster.minimize(train, optimizer, sync=False, **arguments)
    return self.cluster.minimize(
        train, optimizer, global_step=arguments["global_step"],
        clip_norm=arguments["clip_norm"])

  def session(self, train: towers.TowerGraph, scaffold: tf.train.Scaffold, *,
              hooks: Sequence[tf.train.SessionRunHook],
              config: tf.ConfigProto) -> ContextManager[Any]:
    """Returns a context with a session of the cluster."""
    del config
    return _one_line_around(self.cluster.session(
        train, hooks=hooks, scaffold=scaffold))

  def seed(self, seed: int) -> int:
    """Returns the seed of the order of this process's images."""
    return seed if self._sync else (seed + self._number) % 2**31

  def first_batch(self, batches: int) -> int:
    """Returns where a run goes on that has so many batches behind it."""
    if self._sync:
      return batches
    # Each worker has made about its part of them.
    return batches // len(self.cluster.workers)

  def goes_on(self, step: int, reached: int) -> bool:
    """Whether the next batch is the right one after a step to `reached`.

    Between graphs it is not when the chief went back to a checkpoint, of which
    this session knows nothing.
    """
    return self._in_graph or not self._sync or reached == step + 1

  def reached(self, step_after: Any, read: Callable[[], int]) -> int:
    """Returns the global step after a run of the train op."""
    if self._in_graph:
      return int(step_after)
    return read()  # The update came after that run.


@contextlib.contextmanager
def _one_line_around(context: ContextManager[Any]) -> Iterator[Any]:
  with _one_line():
    with context as value:
      yield value
