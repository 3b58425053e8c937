"""Tests of a cluster on hosts of their own, whose link is cut.

The hosts are network namespaces of Linux, joined by a pair of virtual devices.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

from absl.testing import absltest
import numpy as np

import fault_cases
import process_cases
import run_cases
from tools import train
from tools import training

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TASKS = {"ps 0": 0, "worker 0": 0, "worker 1": 1}  # On which host each runs.
HOLD = ("sleep", "600")


class Hosts:
  """Two hosts with a link between them; a context manager."""

  def __init__(self):
    """Makes them.

    Raises:
      OSError, subprocess.CalledProcessError: If the system does not allow it.
    """
    self._holders = []
    try:
      # They vanish with the processes that hold them.
      as_user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
      self._hold("unshare", *as_user, "--net", *HOLD)
      self._enter_first = ("nsenter", *self._target(0), "--net", *(
          ("--user", "--preserve-credentials") if as_user else ()))
      self._hold(*self._enter_first, "unshare", "--net", *HOLD)
      self._ip(0, "link", "add", "link0", "type", "veth", "peer", "name",
               "link1", "netns", str(self._holders[1].pid))
      for host, address in enumerate(ADDRESSES):
        self._ip(host, "link", "set", "lo", "up")
        self._ip(host, "address", "add", f"{address}/24", "dev", f"link{host}")
        self._ip(host, "link", "set", f"link{host}", "up")
    except (OSError, subprocess.CalledProcessError):
      self.close()
      raise

  def close(self):
    for holder in self._holders:
      holder.kill()
      holder.wait()

  def _target(self, host):
    return ("--target", str(self._holders[host].pid))

  def _hold(self, *command):
    """Starts a process, and waits until it holds its namespace."""
    own = os.readlink("/proc/self/ns/net")
    before = {own} | {os.readlink(f"/proc/{holder.pid}/ns/net")
                      for holder in self._holders}
    holder = subprocess.Popen(command, stdin=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    self._holders.append(holder)

    def holds():
      if holder.poll() is not None:
        raise OSError(f"`{' '.join(command)}` ended")
      with contextlib.suppress(OSError):
        line = pathlib.Path(f"/proc/{holder.pid}/cmdline").read_bytes()
        return line.startswith(b"sleep") and os.readlink(
            f"/proc/{holder.pid}/ns/net") not in before

    process_cases.wait_until(holds, f"`{' '.join(command)}`")

  def on(self, host, *command):
    """Returns a command that runs another one on a host."""
    enter = self._enter_first
    if host:
      enter = (*enter, "nsenter", *self._target(host), "--net")
    return [*enter, *command]

  def _ip(self, host, *arguments):
    subprocess.run(self.on(host, "ip", *arguments), check=True,
                   stdin=subprocess.DEVNULL, capture_output=True)

  def cut(self):
    self._ip(1, "link", "set", "link1", "down")

  def heal(self):
    self._ip(1, "link", "set", "link1", "up")


class LinkTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    for name in ("ip", "unshare", "nsenter"):
      if shutil.which(name) is None:
        self.skipTest(f"There is no program `{name}`.")
    try:
      self.hosts = Hosts()
    except (OSError, subprocess.CalledProcessError) as error:
      self.skipTest(f"This system allows no hosts of our own: {error}, "
                    f"{getattr(error, 'stderr', '')}")
    self.addCleanup(self.hosts.close)
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.flags = fault_cases.flags(self.folder)
    self.logdir = self.folder / "run"

  def start(self, time_limit):
    """Starts all tasks; returns their processes."""
    workers = f"{ADDRESSES[0]}:2222,{ADDRESSES[1]}:2222"
    started = {}
    for name, host in TASKS.items():
      job, index = name.split()
      with self.log(name).open("wb") as log:
        process = subprocess.Popen(
            self.hosts.on(
                host, sys.executable, str(fault_cases.PROGRAM),
                f"--job_name={job}", f"--task_index={index}",
                f"--worker_hosts={workers}", f"--ps_hosts={ADDRESSES[0]}:2223",
                f"--logdir={self.logdir}", f"--time_limit={time_limit}",
                "--replication=between_graph", *self.flags),
            cwd=process_cases.CHECKOUT, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log)
      started[name] = process
      self.addCleanup(process.wait)
      self.addCleanup(process.kill)
    return started

  def log(self, name):
    return self.folder / f"{name.replace(' ', '-')}.log"

  def logs(self):
    return "\n".join(self.log(name).read_text() for name in TASKS)

  def wait_for_step(self, step):
    fault_cases.wait_until(
        lambda: fault_cases.saved_step(self.logdir) >= step,
        f"step {step}: {self.logs()}")

  def wait_for_ends(self, started):
    return {name: process.wait(fault_cases.SECONDS)
            for name, process in started.items()}

  def test_training_goes_on_when_the_link_heals(self):
    started = self.start(fault_cases.TIME_LIMIT)
    self.wait_for_step(8)
    self.hosts.cut()
    time.sleep(1.0)
    step = fault_cases.saved_step(self.logdir)
    time.sleep(3.0)
    self.assertEqual(fault_cases.saved_step(self.logdir), step)
    self.assertLess(step, fault_cases.STEPS)
    self.hosts.heal()
    self.assertEqual(self.wait_for_ends(started), dict.fromkeys(TASKS, 0),
                     self.logs())
    logdir = self.create_tempdir().full_path
    with run_cases.without_batch_norm():
      training.run(train.parse(
          ["train.py", *self.flags, f"--logdir={logdir}"]))
    found, expected = map(run_cases.checkpoint, (self.logdir, logdir))
    self.assertEqual(found["global_step"], fault_cases.STEPS)
    for name, value in expected.items():
      np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4,
                                 err_msg=name)

  def test_all_end_and_say_why_when_it_does_not(self):
    started = self.start(time_limit=12)
    self.wait_for_step(8)
    self.hosts.cut()
    self.assertEqual(self.wait_for_ends(started), dict.fromkeys(TASKS, 2),
                     self.logs())
    last = {name: self.log(name).read_text().splitlines()[-1]
            for name in TASKS}
    self.assertRegex(
        last["worker 0"], r"small_train.py: `time_limit` must suffice for the "
        r"others: waited 1\d s for gradients of worker 1 \(10.77.0.2:2222\): ")
    self.assertRegex(
        last["ps 0"], r"small_train.py: `time_limit` must suffice for a task "
        r"to come back: worker 0 \(10.77.0.1:2222\) has been gone for 1\d s")
    self.assertRegex(last["worker 1"],
                     r"small_train.py: `time_limit` must suffice for .* ps 0 "
                     r"\(10.77.0.1:2223\)")


if __name__ == "__main__":
  absltest.main()
