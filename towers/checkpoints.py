"""Restores variables from other people's checkpoints, and says what it did.

The checkpoints of `towers` are those of one device, and `tf.train.Saver` reads
them. Those of hand-written tower loops carry the towers in their names, other
libraries name things differently, a new optimizer finds no slots. For these:

    graph = towers.build_towers(model_fn, devices, inputs=(images, labels))
    train_op = graph.minimize(tf.train.AdamOptimizer())
    with tf.Session(config=graph.session_config()) as session:
      print(towers.checkpoints.restore(session, "old/model.ckpt-1000"))

or, with `tf.train.MonitoredTrainingSession`, which restores from its own
directory if it can and calls `init_fn` if it cannot:

    scaffold = tf.train.Scaffold(
        init_fn=towers.checkpoints.init_fn("old/model.ckpt-1000", log=print),
        saver=towers.checkpoints.Saver())

`plan` tells beforehand, without a session, what would be done; `write_cleaned`
writes the file anew under the names of one device. `checkpoint_matching` has
the rules by which names match. Where it is open what is meant, nothing is
guessed: the error lists what could be.

`latest_good` finds the latest checkpoint of a directory that is whole, where
`tf.train.latest_checkpoint` looks at names only.

With `build_towers(..., variables="replicated")`, run `graph.copy_variables`
after restoring in a plain session, as after `tf.train.Saver.restore`.
"""

import numbers
import os
from typing import Any, Callable, Dict, List, Optional

import tensorflow.compat.v1 as tf

from towers import checkpoint_files
from towers import checkpoint_plan
from towers import checkpoint_report
from towers import checkpoint_targets

Report = checkpoint_report.Report
latest_good = checkpoint_files.latest_good
plan = checkpoint_plan.plan
cleaned_names = checkpoint_plan.cleaned_names


def restore(session: tf.Session, checkpoint: str, *,
            log: Optional[Callable[[str], None]] = None,
            **options: Any) -> Report:
  """Restores variables; initialises the others that have no value yet.

  Args:
    session: The session; its graph must not be finalized.
    checkpoint: Prefix of the checkpoint, or a directory, for the last in it.
    log: Called with the report as text, such as `print`.
    **options: `variables`, `include`, `exclude` and so on, see `plan`.

  Returns:
    The report.

  Raises:
    ValueError: If the graph is finalized.
    ValueError: See `plan`. No variable has changed then.
    ValueError: If the file turns out to be damaged; likewise.
  """
  graph = session.graph
  if graph.finalized:
    raise ValueError(
        "`session` must have a graph that can still be added to: got a "
        f"finalized one ({graph}). Restore before, or pass "
        "`towers.checkpoints.init_fn(...)` to `tf.train.Scaffold`.")
  with graph.as_default():
    restorer = init_fn(checkpoint, log=log, **options)
    restorer(None, session)
    _initialize(session, restorer.others)
  return restorer.report


def init_fn(checkpoint: str, *, log: Optional[Callable[[str], None]] = None,
            **options: Any) -> "Restorer":
  """Returns an `init_fn` for `tf.train.Scaffold` that restores variables.

  Call it when the graph is complete, the train op included: it restores what
  variables there are. The scaffold initialises all variables before.

  Args:
    checkpoint: See `restore`.
    log: Called with the report as text, each time it restores.
    **options: `variables`, `include`, `exclude` and so on, see `plan`.

  Returns:
    A function of a scaffold and a session; its `report` tells what it restores.

  Raises:
    ValueError: See `plan`.
  """
  targets = checkpoint_targets.targets(options.pop("variables", None))
  report = plan(checkpoint, variables=targets, **options)
  return Restorer(report, targets, log)


class Restorer:
  """Gives variables their values from a checkpoint; made by `init_fn`.

  Attributes:
    report: What it restores.
    others: The variables that it was given and leaves as they are.
  """

  def __init__(self, report: Report,
               targets: Dict[str, checkpoint_targets.Target],
               log: Optional[Callable[[str], None]]):
    self.report = report
    self.others = [variable for name, target in targets.items()
                   if name not in report.sources
                   for variable in target.variables]
    self._log = log
    pieces = [(report.sources[name], piece) for name in report.sources
              for piece in targets[name].pieces()]
    # The file is read where the session is, whatever is around.
    with tf.control_dependencies(None), tf.device(None), tf.device("/cpu:0"):
      values = _read(report.checkpoint, [source for source, _ in pieces],
                     [piece.spec for _, piece in pieces])
      with tf.control_dependencies(values):  # All of them can be read.
        self._restore = tf.group(*[
            _assign(piece.variable, value)
            for (_, piece), value in zip(pieces, values)])

  def __call__(self, scaffold: Any, session: tf.Session) -> None:
    """Restores.

    Raises:
      ValueError: If the file is damaged. No variable has changed then.
    """
    del scaffold
    with checkpoint_files.explained(self.report.checkpoint):
      session.run(self._restore)
    if self._log:
      self._log(str(self.report))


def write_cleaned(checkpoint: str, output: str, *, overwrite: bool = False,
                  log: Optional[Callable[[str], None]] = None,
                  **options: Any) -> Report:
  """Writes a checkpoint anew, under the names that the variables have here.

  `tf.train.Saver` can restore the new one. Values keep their bits. It becomes
  the last checkpoint of its directory if that has none.

  Args:
    checkpoint: See `restore`.
    output: Prefix of the new checkpoint; its directory is made if need be.
    overwrite: Whether it may replace another one.
    log: Called with the report as text.
    **options: See `plan`. Without `variables`, all that the file holds is
      written, its names cleaned of towers as far as names tell (and of
      `mean/EMA` and `variance/EMA`).

  Returns:
    The report; what it lists as restored or renamed is what was written.

  Raises:
    ValueError: See `plan`.
    ValueError: If `output` exists, and `overwrite` is not set.
    ValueError: If `output` is `checkpoint`.
    ValueError: If `output` cannot be written.
    ValueError: If the file turns out to be damaged.
  """
  output = os.fspath(output)
  if options.get("variables") is None:
    options["variables"] = cleaned_names(
        checkpoint, renames=options.get("renames"))
  report = plan(checkpoint, **options)
  if os.path.abspath(output) == os.path.abspath(report.checkpoint):
    raise ValueError(
        f"`output` must be another file than `checkpoint`: got {output}. Give "
        "it a name of its own.")
  if checkpoint_files.exists(output) and not overwrite:
    raise ValueError(
        f"`output` must not exist: got {output}. Give another name, or "
        "`overwrite=True`.")
  _write(report, output)
  if log:
    log(str(report))
  return report


class Saver(tf.train.Saver):
  """A `tf.train.Saver`, as strict, that says what is wrong with a file.

  Where `tf.train.Saver` tells the first key that is missing, it names all of
  them, and the way to restore what is there. And whenever its process is
  killed, `tf.train.latest_checkpoint` finds one that is whole: also where a
  checkpoint of the same name is written over, as `MonitoredTrainingSession`
  does when it continues.
  """

  def __init__(self, var_list: Any = None, **options: Any):
    """See `tf.train.Saver`, all of whose options it takes by name."""
    self._wanted = var_list
    super().__init__(var_list, **options)

  def save(self, sess: tf.Session, save_path: str, global_step: Any = None,
           latest_filename: Optional[str] = None, *args: Any,
           **options: Any) -> Optional[str]:
    """Saves all variables; see `tf.train.Saver.save`."""
    path = os.fspath(save_path)
    if global_step is not None:
      if not isinstance(global_step, numbers.Integral):
        global_step = tf.train.global_step(sess, global_step)
      padded = getattr(self, "_pad_step_number", False)
      path += f"-{global_step:08d}" if padded else f"-{global_step}"
    with checkpoint_files.replacing(path, latest_filename):
      return super().save(sess, save_path, global_step, latest_filename, *args,
                          **options)

  def restore(self, sess: tf.Session, save_path: str) -> None:
    """Restores all variables.

    Args:
      sess: The session.
      save_path: Prefix of the checkpoint.

    Raises:
      ValueError: If there is no such checkpoint, or it cannot be read; or if it
        lacks variables, or their shapes or types are others.
    """
    try:
      super().restore(sess, save_path)
    except checkpoint_files.READ_ERRORS as error:
      if save_path is None:
        raise
      text = _differences(sess.graph, self._wanted, save_path)
      if not text:
        raise
      raise ValueError(
          f"`save_path` must hold every variable: {save_path} {text}. To "
          "restore what fits and leave slots of another optimizer at their "
          "initial values, use `towers.checkpoints.restore(session, "
          "save_path)`, or `towers.checkpoints.init_fn(save_path)` in a "
          "`tf.train.Scaffold`.") from error


def _differences(graph: tf.Graph, wanted: Any, path: str) -> str:
  """Returns how variables and file differ; "" if they do not.

  Raises:
    ValueError: If the file cannot be read.
  """
  file = checkpoint_files.File(path)
  with checkpoint_files.explained(path):
    for name in file.entries:
      file.value(name)  # Raises if it is damaged.
  with graph.as_default():
    targets = checkpoint_targets.targets(wanted)
  return checkpoint_targets.faults(targets, file.entries)


def _read(path: str, names: List[str], specs: List[str]) -> List[tf.Tensor]:
  """Returns tensors of a file, read by one op."""
  if not names:
    return []
  entries = checkpoint_files.File(path).entries
  return tf.raw_ops.RestoreV2(
      prefix=path, tensor_names=[entries[name].key for name in names],
      shape_and_slices=specs, dtypes=[entries[name].dtype for name in names])


def _assign(variable: Any, value: tf.Tensor) -> Any:
  with tf.device(None), tf.device(variable.device):
    return variable.assign(value, read_value=False)


def _initialize(session: tf.Session, variables: List[Any]) -> None:
  """Initialises those of the `variables` that have no value."""
  if variables:
    empty = session.run(tf.report_uninitialized_variables(variables))
    session.run([variable.initializer for variable in variables
                 if variable.op.name.encode() in empty])


def _write(report: Report, output: str) -> None:
  names = sorted(report.sources)
  folder = os.path.dirname(output) or "."
  try:
    tf.io.gfile.makedirs(folder)
    with tf.Graph().as_default(), tf.Session() as session:
      values = _read(report.checkpoint, [report.sources[n] for n in names],
                     [""] * len(names))
      with checkpoint_files.explained(report.checkpoint):
        session.run(tf.raw_ops.SaveV2(
            prefix=output, tensor_names=names,
            shape_and_slices=[""] * len(names), tensors=values))
    if tf.train.get_checkpoint_state(folder) is None:
      tf.train.update_checkpoint_state(folder, output)
  except (tf.errors.OpError, OSError) as error:
    text = getattr(error, "message", str(error)).strip().splitlines()[0]
    raise ValueError(
        "`output` must be a prefix of files that can be written: got "
        f"{output} ({text}).") from error
