"""Session hooks that watch training, with or without towers.

They work in every `tf.train.MonitoredTrainingSession` (pass them as `hooks`).
To them a step is one `session.run`. What must not count, such as a look at a
variable, can be run with `session.run_step_fn`.

    hooks = [towers.hooks.InputStarvationHook(),
             towers.hooks.StopOnNanHook(graph.loss)]
    with tf.train.MonitoredTrainingSession(
        hooks=hooks, config=graph.session_config()) as session:
      while not session.should_stop():
        session.run(train_op)
"""

import contextlib
import json
import os
import time
from typing import Any, Iterable, Iterator, List, Optional, Sequence
from typing import Union, cast

from absl import logging
import numpy as np
import tensorflow.compat.v1 as tf

from towers import step_stats

_TRACE = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)

# Value of a flag variable while all was finite.
_NO_STEP = -1


class InputStarvationHook(tf.train.SessionRunHook):
  """Measures which share of their time the devices wait for input.

  One step in `trace_steps` runs with TensorFlow's tracing, which tells when
  each op ran. The step waited while the `get_next` of a `tf.data` iterator (or
  the like of a queue, whose short waits are not all seen) was pending and no
  device computed. Other steps cost nothing. Every `log_steps` steps it logs

      share = sum of waits / sum of durations

  over the traced steps since then: the share of the time within `session.run`
  that a perfect input would save. Traced steps are spread out: after one, the
  input has caught up.

  Data that come by `feed_dict` are made outside `session.run`, unseen; then
  there is no input op and the share is 0, which the log tells.

  Attributes:
    share: The share at the last log, 0 to 1; None before. For a progress line.
  """

  def __init__(self, *, log_steps: int = 100, trace_steps: int = 10,
               threshold: float = 0.1):
    """Makes the hook.

    Args:
      log_steps: After how many steps to log, and to begin anew.
      trace_steps: One in so many steps is traced, never the first one.
      threshold: From which share on the log is a warning with advice.

    Raises:
      ValueError: If `log_steps` is not a positive number of steps,
        `trace_steps` is not or is larger, or `threshold` is not in 0 to 1.
    """
    self._log_steps = _positive("log_steps", log_steps)
    self._trace_steps = _positive("trace_steps", trace_steps)
    if trace_steps > log_steps:
      raise ValueError(
          "`trace_steps` must be at most `log_steps`, so that each log has "
          f"something to tell: expected {log_steps} or less, got "
          f"{trace_steps}.")
    if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
      raise ValueError("`threshold` must be a share: expected a number from 0 "
                       f"to 1, got {threshold!r}.")
    self._threshold = threshold
    self._waits: List[step_stats.InputWait] = []
    self.share: Optional[float] = None

  def after_create_session(self, *unused: Any) -> None:
    self._steps, self._waits = 0, []

  def before_run(self, unused_run_context: Any) -> Any:
    # The last of each `trace_steps`: the first step of all is slow by itself.
    if (self._steps + 1) % self._trace_steps == 0:
      return tf.train.SessionRunArgs(None, options=_TRACE)
    return None

  def after_run(self, unused_run_context: Any, run_values: Any) -> None:
    self._steps += 1
    if self._steps % self._trace_steps == 0:
      self._waits.append(
          step_stats.input_wait(run_values.run_metadata.step_stats))
    if self._steps == self._log_steps:
      self._log()
      self._steps, self._waits = 0, []

  def _log(self) -> None:
    total = sum(wait.step for wait in self._waits)
    self.share = sum(w.wait for w in self._waits) / total if total else 0.0
    if not any(wait.input_ops for wait in self._waits):
      logging.info("The %d steps measured had no input op: what `feed_dict` "
                   "costs is not seen.", len(self._waits))
    elif self.share < self._threshold:
      logging.info("Devices waited for input %.0f %% of the time (%d steps "
                   "measured).", 100 * self.share, len(self._waits))
    else:
      logging.warning(
          "Devices waited for input %.0f %% of the time (%d steps measured). "
          "To feed them faster: end the `tf.data` pipeline with "
          "`prefetch(tf.data.AUTOTUNE)`; give `map` and `interleave` "
          "`num_parallel_calls=tf.data.AUTOTUNE`, without `py_function`, of "
          "which one runs at a time; `cache()` before random changes; `batch` "
          "before cheap `map`s. A large `shuffle` buffer costs time where it "
          "fills, at the start of each epoch.",
          100 * self.share, len(self._waits))


class ThroughputHook(tf.train.SessionRunHook):
  """Measures examples per second.

  The clock runs all the time but in `paused()`, so that what happens between
  steps (checkpoints, summaries, your own code) counts. The first `warmup_steps`
  steps after each start of the session do not, as TensorFlow prepares in them.

  Attributes:
    examples_per_second: The rate at the last log; None before.
  """

  def __init__(self, examples_per_step: Union[float, tf.Tensor], *,
               log_steps: int = 100, warmup_steps: int = 5,
               summary_directory: Optional[str] = None,
               summary_tag: str = "examples_per_second"):
    """Makes the hook.

    Args:
      examples_per_step: How many examples a step takes, of all towers together:
        a positive number, or a scalar tensor (such as `tf.shape(labels)[0]`),
        which is fetched in every step.
      log_steps: After how many steps to log, and to begin anew. What is left
        at the end of the session is logged then.
      warmup_steps: How many steps to leave out.
      summary_directory: Where to write the rate as a scalar summary, at the
        global step, or at the count of steps where there is none.
      summary_tag: The tag of that summary.

    Raises:
      ValueError: If a number is out of range, or `examples_per_step` is a
        tensor of another shape.
    """
    examples = self._examples_per_step = cast(Any, examples_per_step)
    if tf.is_tensor(examples):
      if not examples.shape.is_compatible_with([]):
        raise ValueError(
            "`examples_per_step` must be a number or a scalar tensor: got "
            f"`{examples.name}` of shape {examples.shape}.")
    elif not (isinstance(examples, (int, float, np.number)) and
              0 < examples < np.inf):
      raise ValueError(
          "`examples_per_step` must be how many examples a step takes: "
          "expected a positive number or a scalar tensor, got "
          f"{examples!r}.")
    self._log_steps = _positive("log_steps", log_steps)
    self._warmup_steps = _positive("warmup_steps", warmup_steps, least=0)
    self._directory, self._tag = summary_directory, summary_tag
    self.examples_per_second: Optional[float] = None
    self._global_step: Optional[Any] = None
    self._total_steps, self._start = 0, time.perf_counter()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """A context whose time does not count, such as that of an evaluation."""
    start = time.perf_counter()
    yield
    self._start += time.perf_counter() - start

  def begin(self) -> None:
    self._global_step = tf.train.get_global_step()

  def after_create_session(self, *unused: Any) -> None:
    self._warm, self._steps, self._examples = 0, 0, 0.0
    self._start = time.perf_counter()

  def before_run(self, unused_run_context: Any) -> Any:
    if tf.is_tensor(self._examples_per_step):
      return tf.train.SessionRunArgs(self._examples_per_step)
    return None

  def after_run(self, run_context: Any, run_values: Any) -> None:
    self._total_steps += 1
    if self._warm < self._warmup_steps:
      self._warm += 1
      self._start = time.perf_counter()
      return
    fetched = run_values.results
    self._examples += float(
        self._examples_per_step if fetched is None else fetched)
    self._steps += 1
    if self._steps == self._log_steps:
      self._log(run_context.session)

  def end(self, session: tf.Session) -> None:
    if self._steps:
      self._log(session)

  def _log(self, session: tf.Session) -> None:
    now = time.perf_counter()
    rate = self._examples / max(now - self._start, 1e-9)
    self.examples_per_second = rate
    logging.info("%.4g examples per second (%d steps, %.3g s per step).", rate,
                 self._steps, (now - self._start) / self._steps)
    if self._directory is not None:
      step = self._total_steps
      if self._global_step is not None:
        step = session.run(self._global_step)
      summary = tf.Summary(value=[
          tf.Summary.Value(tag=self._tag, simple_value=rate)])
      writer = tf.summary.FileWriterCache.get(self._directory)
      writer.add_summary(summary, int(step))
      writer.flush()
    self._steps, self._examples, self._start = 0, 0.0, now


class StopOnNanHook(tf.train.SessionRunHook):
  """Stops training at a loss that is NaN or infinite, and saves nothing of it.

  `tf.train.NanTensorHook` looks at the loss when the step is over, lets
  infinity pass, and does not say where it was. By then the variables are
  spoilt, and the `CheckpointSaverHook` of a `MonitoredTrainingSession`, whose
  turn comes before that of `hooks`, may have saved them; told to stop without
  an error, it always saves them in the end. This hook

  * makes the step itself fail (`fail=True`), so that no hook sees it, whatever
    their order, and the session ends without a last checkpoint; or requests a
    stop after it (`fail=False`);
  * notes in a local variable that a step went wrong, and lets savers save
    nothing from then on: those in the collection `tf.GraphKeys.SAVERS`, where
    that of a `MonitoredTrainingSession` is, and those in `savers`.

  So with `fail=False`, or if you catch the error inside the session's `with`,
  a saver of your own in a `tf.train.Scaffold` must be passed as `savers`, too.
  A `local_init_op` of your own there must initialise that variable.

  The variables themselves may have changed in the bad step. To keep them, see
  `skip_nonfinite` of `TowerGraph.minimize`.
  """

  def __init__(self, loss: tf.Tensor, *, fail: bool = True,
               savers: Sequence[tf.train.Saver] = ()):
    """Makes the hook.

    Args:
      loss: Floating tensor of any shape, all of which must be finite. It is
        fetched in every step.
      fail: Whether the step raises `tf.errors.InvalidArgumentError`, which
        names the global step; otherwise the session is asked to stop.
      savers: Savers to guard that are not in `tf.GraphKeys.SAVERS`.

    Raises:
      ValueError: If `loss` is no floating tensor; and in `begin`, if the graph
        has no global step.
    """
    if not tf.is_tensor(loss) or not loss.dtype.is_floating:
      raise ValueError("`loss` must be a floating tensor of the graph: got "
                       f"{loss!r}.")
    self._loss, self._fail, self._savers = loss, fail, tuple(savers)
    self._bad_step: Optional[Any] = None
    self._check: Optional[tf.Tensor] = None

  def begin(self) -> None:
    step = tf.train.get_global_step()
    if step is None:
      raise ValueError(
          f"`tf.train.get_global_step()` must name a step: got {step}. Call "
          "`tf.train.get_or_create_global_step()` first, and pass it to "
          "`minimize`.")
    with tf.name_scope("stop_on_nan"), tf.control_dependencies(None):
      # Local, so that no checkpoint holds it and each session starts afresh.
      self._bad_step = tf.Variable(
          np.int64(_NO_STEP), trainable=False, use_resource=True,
          collections=[tf.GraphKeys.LOCAL_VARIABLES], name="bad_step")
      # Without inputs, so it is read at the start, before the step moves on.
      # A copy, as the memory of a variable that is no resource moves on, too.
      step = tf.cast(tf.raw_ops.DeepCopy(x=step), tf.int64)
      finite = tf.reduce_all(tf.math.is_finite(self._loss))
      # The first one stays: it may have spoilt the variables for all others.
      first = self._bad_step.read_value()
      noted = self._bad_step.assign(
          tf.where(tf.logical_or(finite, first >= 0), first, step))
      self._check = tf.identity(noted)
      if self._fail:
        # After an error that was caught, the loss of now may be a good one.
        values = tf.strings.reduce_join(
            tf.strings.as_string(tf.reshape(self._loss, [-1])), separator=", ")
        text = tf.strings.join([
            f"`{self._loss.name}` must be finite: got ",
            tf.where(finite, "NaN or infinity", values),
            " in the step after global step ",
            tf.strings.as_string(self._check),
            ". No checkpoint holds that step. Try a smaller learning rate, "
            "gradient clipping, or `skip_nonfinite=True` in `minimize`."])
        # On what was noted: a run after the error, if caught, fails as well.
        with tf.control_dependencies(
            [tf.debugging.Assert(self._check < 0, [text])]):
          self._check = tf.identity(self._check)

  def after_create_session(self, *unused: Any) -> None:
    for saver in [*tf.get_collection(tf.GraphKeys.SAVERS), *self._savers]:
      _guard(saver, self._bad_step)

  def before_run(self, unused_run_context: Any) -> Any:
    return tf.train.SessionRunArgs([self._check, self._loss])

  def after_run(self, run_context: Any, run_values: Any) -> None:
    bad_step, loss = run_values.results
    if bad_step != _NO_STEP:
      logging.error("`%s` must be finite: got %s in the step after global step "
                    "%d. Training stops; no checkpoint holds that step.",
                    self._loss.name, loss, bad_step)
      run_context.request_stop()


def _guard(saver: tf.train.Saver, bad_step: Any) -> None:
  """Lets `saver` save nothing once `bad_step` names a step."""
  save = saver.save
  if getattr(save, "guards", None) is bad_step:  # The session began again.
    return

  def guarded(sess: tf.Session, *args: Any, **kwargs: Any) -> Any:
    try:
      step = sess.run(bad_step)
    except tf.errors.FailedPreconditionError:
      step = _NO_STEP  # A session that never heard of the hook.
    if step == _NO_STEP:
      return save(sess, *args, **kwargs)
    logging.warning("Not saved: the step after global step %d had a loss that "
                    "is not finite.", step)
    return None

  guarded.guards = bad_step  # type: ignore[attr-defined]  # Our own mark.
  saver.save = guarded


class TraceHook(tf.train.SessionRunHook):
  """Writes Chrome traces of chosen steps: what ran when, on which device.

  Each device, and so each tower, is a process of its own with the device's
  name. Open the files in `chrome://tracing` or https://ui.perfetto.dev.

  Attributes:
    paths: The files that were written.
  """

  def __init__(self, directory: str, *, steps: Iterable[int] = (10,)):
    """Makes the hook.

    Args:
      directory: Where to write `trace-STEP.json`; it is made if need be.
      steps: Which steps to trace, counted from 1 since the hook was made. The
        first ones show how TensorFlow prepares rather than how it works.

    Raises:
      ValueError: If `steps` are not positive numbers of steps.
    """
    self._directory = directory
    self._wanted = frozenset(_positive("steps", step) for step in steps)
    self._step = 0
    self.paths: List[str] = []

  def before_run(self, unused_run_context: Any) -> Any:
    if self._step + 1 in self._wanted:
      return tf.train.SessionRunArgs(None, options=_TRACE)
    return None

  def after_run(self, unused_run_context: Any, run_values: Any) -> None:
    self._step += 1
    if self._step not in self._wanted:
      return
    trace = step_stats.chrome_trace(run_values.run_metadata.step_stats)
    tf.gfile.MakeDirs(self._directory)
    path = os.path.join(self._directory, f"trace-{self._step}.json")
    with tf.gfile.Open(path, "w") as file:
      json.dump(trace, file)
    self.paths.append(path)
    logging.info("Wrote the trace of step %d to %s.", self._step, path)


def _positive(argument: str, value: Any, least: int = 1) -> int:
  """Returns `value` as an int.

  Raises:
    ValueError: If it is no whole number, or less than `least`.
  """
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or (
      value < least):
    raise ValueError(f"`{argument}` must be a number of steps: expected "
                     f"{least} or more, got {value!r}.")
  return int(value)
