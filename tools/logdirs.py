"""The directory of a run: that it can be written to, and its checkpoints.

Whenever a run ends, killed or not, what is there can be continued:
TensorFlow's saver writes a checkpoint beside the last one and then names it in
the file `checkpoint`, by renaming; other files are renamed into place, too.

    LOGDIR/run.json               what the run was asked to do
    LOGDIR/model.ckpt-STEP.*      its last checkpoints, for continuing
    LOGDIR/best/model.ckpt-STEP.* that with the best score on the test images
    LOGDIR/best/score.json        the score
"""

import contextlib
import json
import os
import pathlib
import tempfile
import threading
from typing import Iterator, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from tools import command_line
from tools import training_options
import towers

UsageError = command_line.UsageError

NAME = "model.ckpt"


def prepare(options: training_options.Options) -> str:
  """Returns the directory of the run, which exists and can be written to.

  Without `--logdir` it is a new one under the system's temporary directory, so
  that no run continues another by accident.

  Raises:
    UsageError: If nothing can be written there.
  """
  if options.logdir is None:
    return tempfile.mkdtemp(prefix=f"towers-{options.model}-")
  try:
    pathlib.Path(options.logdir).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.logdir).close()
  except OSError as error:
    raise UsageError(
        "`--logdir` must be a directory that can be written to: got "
        f"{options.logdir} ({error.strerror}).") from error
  return options.logdir


@contextlib.contextmanager
def writing(logdir: str) -> Iterator[None]:
  """Turns failures to write, such as of a full disk, into a `UsageError`."""
  try:
    yield
  except (tf.errors.AbortedError, tf.errors.UnavailableError,
          tf.errors.DeadlineExceededError, towers.cluster.ClusterError):
    raise  # Another process of a cluster is gone; the disk is not to blame.
  except (OSError, tf.errors.OpError, RuntimeError, ValueError,
          IndexError) as error:  # TensorFlow's C++ raises the last three.
    raise UsageError(
        "`--logdir` must have room and stay writable: could not write to "
        f"{logdir} ({command_line.first_line(error)}). What was saved before "
        "is whole; to continue from there, make room and give the same flags."
    ) from error


@contextlib.contextmanager
def event_writer(logdir: str, step: int) -> Iterator[tf.summary.FileWriter]:
  """A context with a writer for TensorBoard, of a run that is at `step`.

  Raises:
    UsageError: If it cannot write.
  """
  with _quiet_writer_thread():
    with writing(logdir):
      # A run that starts within the same second must not write over that file.
      writer = tf.summary.FileWriter(logdir, filename_suffix=f".{step}")
      # TensorBoard drops what a killed run wrote after its last checkpoint.
      writer.add_session_log(
          tf.SessionLog(status=tf.SessionLog.START), step + 1)
      writer.flush()
    try:
      yield writer
    finally:
      with writing(logdir):
        writer.close()


@contextlib.contextmanager
def _quiet_writer_thread() -> Iterator[None]:
  """Lets no traceback of the writer's thread out; `close` raises its error."""
  before, level = threading.excepthook, tf.logging.get_verbosity()

  def hook(arguments):
    if arguments.thread.name != "EventLoggerThread":
      before(arguments)

  threading.excepthook = hook
  tf.logging.set_verbosity(tf.logging.FATAL)
  try:
    yield
  finally:
    threading.excepthook = before
    tf.logging.set_verbosity(level)


def latest(logdir: str) -> Optional[str]:
  """Returns the prefix of the last checkpoint; None if there is none.

  Raises:
    UsageError: If it is not there, or not whole. Names the last one that is.
  """
  state = pathlib.Path(logdir, "checkpoint")
  if not state.exists():
    return None
  try:
    path = tf.train.latest_checkpoint(logdir)
  except ValueError:  # It is no text.
    path = None
  good = towers.checkpoints.latest_good(logdir)
  if path is not None and path == good:
    return path
  what = f"the one that {state} names is not there" if path is None else (
      f"{path} is damaged")
  if good is None:
    advice = "No other is good; give another `--logdir`."
  else:
    line = f'model_checkpoint_path: "{os.path.basename(good)}"'
    advice = (f"The last good one there is {good}; to go on from it, let the "
              f"file {state} hold the line {line}")
  raise UsageError("`--logdir` must hold a last checkpoint that can be read: "
                   f"{what}. {advice}")


def restore(session: tf.Session, saver: tf.train.Saver, path: str) -> None:
  """Gives the variables their values from a checkpoint, to continue a run.

  Raises:
    UsageError: If the checkpoint cannot be read or has other variables.
  """
  _restore(session, saver, path, complete=True)


def restore_model(session: tf.Session, path: str) -> None:
  """The same, but the checkpoint may have more, such as an optimizer's slots.

  Raises:
    UsageError: If the checkpoint cannot be read or lacks a variable.
  """
  _restore(session, towers.checkpoints.Saver(), path, complete=False)


def _restore(session: tf.Session, saver: tf.train.Saver, path: str, *,
             complete: bool) -> None:
  try:
    saved = dict(tf.train.list_variables(path))
    built = {variable.op.name: variable.shape.as_list()
             for variable in tf.global_variables()}
    names = saved.keys() | built.keys() if complete else built.keys()
    different = sorted(name for name in names
                       if saved.get(name) != built.get(name))
    if not different:
      saver.restore(session, path)
      return
  except (tf.errors.OpError, ValueError) as error:
    raise UsageError(f"{path} must be a checkpoint that can be read: "
                     f"{command_line.first_line(error)}") from error
  name = different[0]
  raise UsageError(
      "`--logdir` must hold a checkpoint of the same model, dataset and "
      f"optimizer: {path} differs in {len(different)} variables, such as "
      f"{name} (shape {saved.get(name, 'none')} there, "
      f"{built.get(name, 'none')} here). Give the flags that it was trained "
      "with, or another `--logdir`.")


class Best(NamedTuple):
  """The best score so far, and the step that had it."""
  step: int
  value: float


def read_best(logdir: str) -> Optional[Best]:
  """Returns what `write_best` wrote last; None if that cannot be read."""
  try:
    text = pathlib.Path(logdir, "best", "score.json").read_text(
        encoding="utf-8")
    return Best(**json.loads(text))
  except (OSError, ValueError, TypeError):
    return None  # The next score is the best one then.


def write_best(best: Best, session: tf.Session, saver: tf.train.Saver,
               logdir: str) -> None:
  """Saves the variables as those with the best score."""
  folder = pathlib.Path(logdir, "best")
  folder.mkdir(exist_ok=True)
  saver.save(session, str(folder / NAME), best.step, write_meta_graph=False)
  temporary = folder / "score.tmp"
  temporary.write_text(json.dumps(best._asdict()) + "\n", encoding="utf-8")
  os.replace(temporary, folder / "score.json")
