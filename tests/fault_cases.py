"""Clusters of processes for tests that kill them; not a test itself."""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import uuid

import numpy as np

import process_cases

TESTS = pathlib.Path(__file__).resolve().parent
PROGRAM = TESTS / "small_train.py"
STEPS = 100
CHIEF, WORKER, SERVER = ("worker", 0), ("worker", 1), ("ps", 0)

# Found in the environment of all that a cluster starts, whoever its parent is.
_MARK = "TOWERS_TEST_CLUSTER"

# For how long a cluster may run in all, on a slow machine.
SECONDS = 300

# A machine that is busy starts processes slowly.
TIME_LIMIT = 90


def flags(folder, steps=STEPS):
  """Returns flags of a training run on a new data set in `folder`.

  Args:
    folder: A directory.
    steps: How long it is; twenty checkpoints are written on the way.
  """
  path = pathlib.Path(folder, "data.npz")
  rng = np.random.RandomState(0)
  labels = np.arange(60) % 3
  images = rng.normal(size=[60, 4, 4, 1]) + labels[:, None, None, None] - 1.0
  np.savez(path, x_train=images[:48], y_train=labels[:48],
           x_test=images[48:], y_test=labels[48:])
  return [f"--dataset={path}", f"--steps={steps}", "--batch_size=6",
          f"--evaluate_every={steps // 20}", "--learning_rate=0.01"]


def loss(folder, kernel):
  """Returns the cross-entropy of a linear network on the rows of `flags`."""
  with np.load(pathlib.Path(folder, "data.npz")) as data:
    images, labels = data["x_train"], data["y_train"]
  logits = images.reshape([len(images), -1]) @ kernel
  log_sum = np.log(np.exp(logits).sum(axis=1))
  return np.mean(log_sum - logits[np.arange(len(labels)), labels])


def wait_until(condition, what, pause=0.01):
  """Waits as `process_cases.wait_until` does, but for longer."""
  return process_cases.wait_until(condition, what, pause=pause,
                                  seconds=SECONDS)


def saved_step(logdir):
  """Returns the step of the last checkpoint; 0 before the first."""
  try:
    text = pathlib.Path(logdir, "checkpoint").read_text()
  except OSError:
    return 0
  match = re.match(r'model_checkpoint_path: ".*-(\d+)"', text)
  return int(match[1]) if match else 0


class EndedBefore(Exception):
  """A cluster has come to its end, all well, before what was waited for."""


class Cluster:
  """A cluster in which any process may be killed; a context manager."""

  def __init__(self, folder, program_flags):
    """Starts it; its logdir is `run` in `folder`.

    Args:
      folder: A directory.
      program_flags: Those of train.py.
    """
    self.logdir = pathlib.Path(folder, "run")
    self._output = pathlib.Path(folder, "output")
    self._mark = f"{_MARK}={uuid.uuid4()}".encode()
    name, _, value = self._mark.decode().partition("=")
    with self._output.open("wb") as output:
      self._launcher = subprocess.Popen(
          [sys.executable, "tools/launch.py", f"--program={PROGRAM}",
           "--workers=2", "--restart=20", "--", f"--logdir={self.logdir}",
           f"--time_limit={TIME_LIMIT}", *program_flags],
          cwd=process_cases.CHECKOUT, stdin=subprocess.DEVNULL, stdout=output,
          stderr=output, env={**os.environ, name: value})

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self._launcher.kill()  # Which ends all others.
    self._launcher.wait()

  def output(self):
    """Returns all that was written, for a message."""
    logs = sorted(self.logdir.glob("logs/*"))
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}"
                     for path in [self._output, *logs])

  def status(self):
    """Waits for the end; returns the exit status."""
    return self._launcher.wait(SECONDS)

  def all_processes(self):
    """Returns the ids of all processes of the cluster, the launcher too."""
    return [pid for pid in _pids() if self._mark in _proc(pid, "environ")]

  def processes(self):
    """Returns the process ids of the tasks that run, by job and index."""
    found = {}
    for pid in self.all_processes():
      line = _proc(pid, "cmdline").decode()
      match = re.search(r"--job_name=(\w+)\0--task_index=(\d+)\0", line)
      if match and process_cases.is_alive(pid):
        found[match[1], int(match[2])] = pid
    return found

  def kill(self, tasks):
    """Kills tasks, once all of them run."""
    pids = self._wait_until(
        lambda: (found := self.processes()).keys() >= set(tasks) and [
            found[task] for task in tasks], f"{tasks} to run")
    for pid in pids:
      os.kill(pid, signal.SIGKILL)

  # --- Moments ---

  def wait_for_step(self, step):
    """Waits for a checkpoint of that step or a later one."""
    self._wait_until(lambda: saved_step(self.logdir) >= step, f"step {step}")

  def wait_for_saving(self):
    """Waits until a checkpoint is being written."""
    self._wait_until(
        lambda: any("tempstate" in path.name for path in self.logdir.iterdir()),
        "a checkpoint", pause=0.0002)

  def _wait_until(self, condition, what, **arguments):
    """Waits, but not when the cluster has ended."""

    def is_so():
      value = condition()
      if not value and self._launcher.poll() is not None:
        if self._launcher.returncode == 0:
          raise EndedBefore(what)
        raise AssertionError(f"the cluster has failed before: {what}")
      return value

    try:
      return wait_until(is_so, what, **arguments)
    except AssertionError as error:
      raise AssertionError(f"{error}\n{self.output()}") from error


def _pids():
  return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _proc(pid, name):
  try:
    return pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
  except OSError:  # It has ended.
    return b""


def kill_at_random(cluster, seed, kills, steps=STEPS):
  """Kills tasks in all phases of a run, alone or two at once.

  Args:
    cluster: The cluster, which has just been started.
    seed: Decides on the moments, and who is killed when.
    kills: How many to kill; 5 or more.
    steps: How many the run makes.

  Returns:
    What was done, as a list of phases and tasks.

  Raises:
    EndedBefore: If the cluster was through before the last kill.
  """
  chance = random.Random(seed)
  victims = []
  while len(victims) < kills:
    victims += chance.sample([CHIEF, WORKER, SERVER], 3)
  del victims[kills:]
  done = []

  def kill(phase, count, wait):
    # Twice the same at once would be one kill.
    tasks = [victims.pop()]
    if count > 1:
      tasks.append(next(task for task in victims if task != tasks[0]))
      victims.remove(tasks[1])
    wait()
    cluster.kill(tasks)
    done.append((phase, *tasks))

  kill("start", 1, lambda: time.sleep(chance.uniform(0.0, 5.0)))
  at = chance.randrange(1, steps // 4)
  while len(victims) > 3:
    kill("training", 2 if len(victims) > 4 else 1, lambda at=at: (
        cluster.wait_for_step(at), time.sleep(chance.uniform(0.0, 0.2))))
    at += chance.randrange(steps // 8)
  cluster.wait_for_step(at)
  kill("saving", 1, cluster.wait_for_saving)
  kill("end", 2, lambda: (cluster.wait_for_step(steps),
                          time.sleep(chance.uniform(0.0, 0.3))))
  return done
