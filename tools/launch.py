"""Runs a whole TensorFlow cluster on this machine, one process per task.

  python tools/launch.py --workers=2 --ps=1 -- --dataset=digits --steps=200 \\
    --replication=between_graph
  python tools/launch.py --workers=4 --ps=2 --evaluator --restart=1 -- \\
    --logdir=/tmp/run --sync

Starts tools/train.py once for each task, with the flags that follow `--` and,
of its own, --job_name, --task_index, --worker_hosts and --ps_hosts: free ports
of this machine. Worker 0 is the chief.

What the chief writes goes to standard output and standard error as it comes,
byte by byte, so that its progress bar is the only one, and stays in its line:
through a pseudo-terminal of the same width where there is a terminal, else
through a pipe. Each task, the chief too, has all of its output in a log file of
its own, such as worker-0.log.

Ends with 0 when all tasks have. When one fails, this tells which and why, ends
the others, and ends with the status of that one (128 + signal for a signal). A
worker or parameter server that fails when the chief is done is only told of. If
it is the chief that --restart starts again, so are the tasks that have ended.
Ctrl-C, SIGTERM and SIGHUP are passed on to all tasks, once, so that they can
save; a second Ctrl-C kills them. No task is left behind, not even where this
process is killed: see tools/children.py for how, and for what is different
where there is no Linux.

TensorFlow's servers listen on all network interfaces and do what anyone asks
them to: outside of a network that you trust, use --private_network.
"""

import signal
import sys

if __name__ == "__main__":
  # Ctrl-C ends the process without a traceback, also before the first task;
  # then `processes.Tasks` takes over.
  signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import functools
import os
import pathlib
import socket
import tempfile
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

# The checkout's `tools` are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import flags

from tools import command_line
from tools import private_network
from tools import processes

UsageError = command_line.UsageError

NAME = "launch.py"
PROGRAM = pathlib.Path(__file__).resolve().with_name("train.py")

CHIEF = "worker 0"

# What this adds to the flags of each task.
OWN_FLAGS = ("job_name", "task_index", "worker_hosts", "ps_hosts")


class Task(NamedTuple):
  """One task of the cluster."""
  job: str
  index: int

  def __str__(self) -> str:
    return f"{self.job} {self.index}"


def _flags() -> flags.FlagValues:
  """Returns the flags, with their defaults."""
  values = command_line.flag_values()
  text = functools.partial(flags.DEFINE_string, flag_values=values)
  switch = functools.partial(flags.DEFINE_boolean, flag_values=values)
  count = functools.partial(flags.DEFINE_integer, flag_values=values)
  count("workers", 1, "Number of workers; worker 0 is the chief.",
        lower_bound=1)
  count("ps", 1, "Number of parameter servers.", lower_bound=0)
  switch("evaluator", False,
         "Runs one more task, which tests the checkpoints of the others.")
  text("log_dir", None,
       "Folder of the log files; a file that is there is added to. Default: "
       "the folder logs in the --logdir behind `--`; without that, a new "
       "temporary one, which is printed.")
  text("program", str(PROGRAM), "The Python program to start.")
  count("restart", 0,
        "How often a worker or a parameter server is started again that was "
        "ended by a signal or with another status than 0 and 2 (wrong flags).",
        lower_bound=0)
  flags.DEFINE_float(
      "grace_seconds", 10.0,
      "How long tasks have to end by themselves, before they are killed, once "
      "one has failed or after Ctrl-C; and parameter servers once all workers "
      "have ended.", lower_bound=0.0, flag_values=values)
  switch("private_network", False,
         "Runs everything in a network namespace that holds a loopback device "
         "only: nothing outside can reach the servers, and the tasks reach "
         "nothing outside. Linux only.")
  return values


def split(argv: Sequence[str]) -> Tuple[List[str], List[str]]:
  """Returns the command line up to `--`, and the flags behind it."""
  argv = list(argv)
  middle = argv.index("--") if "--" in argv else len(argv)
  return argv[:middle], argv[middle + 1:]


def check_program_flags(program_flags: Sequence[str]) -> None:
  """Refuses flags that each task gets from here.

  Raises:
    UsageError: If there is one.
  """
  for argument in program_flags:
    name = _flag_name(argument)
    if name in OWN_FLAGS:
      raise UsageError(
          f"`--{name}` must not stand behind `--`: got {argument}. It is "
          f"another one for each task, and set by {NAME}.")


def _flag_name(argument: str) -> Optional[str]:
  if not argument.startswith("-"):
    return None
  return argument.lstrip("-").partition("=")[0]


def run_directory(program_flags: Sequence[str]) -> Optional[str]:
  """Returns the value of the last `--logdir`; None if there is none."""
  found = None
  for argument, following in zip(program_flags, [*program_flags[1:], ""]):
    if _flag_name(argument) == "logdir":
      found = argument.partition("=")[2] if "=" in argument else following
  return found or None


def log_directory(log_dir: Optional[str], program_flags: Sequence[str]) -> str:
  """Returns the folder for log files, which exists.

  Raises:
    UsageError: If nothing can be written there.
  """
  run = run_directory(program_flags)
  if log_dir is None and run is None:
    log_dir = tempfile.mkdtemp(prefix="towers-logs-")
    print(f"{NAME}: logs are in {log_dir}", file=sys.stderr, flush=True)
  path = os.path.join(run, "logs") if log_dir is None else log_dir
  try:
    os.makedirs(path, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()
  except OSError as error:
    raise UsageError("`--log_dir` must be a directory that can be written to: "
                     f"got {path} ({error.strerror}).") from error
  return path


def cluster(workers: int, ps: int) -> Dict[str, List[str]]:
  """Returns hosts and ports for each job, with ports that are free now.

  They are free on all interfaces, as TensorFlow's servers listen on all.
  """
  with contextlib.ExitStack() as stack:
    # Held all at once, so that no two are the same.
    sockets = [stack.enter_context(socket.socket())
               for _ in range(workers + ps)]
    for each in sockets:
      each.bind(("", 0))
    hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
  return {"worker": hosts[:workers], "ps": hosts[workers:]}


def tasks_of(hosts: Dict[str, List[str]], evaluator: bool) -> List[Task]:
  """Returns the tasks in the order to start them."""
  tasks = [Task(job, index)
           for job in ("ps", "worker") for index in range(len(hosts[job]))]
  return tasks + [Task("evaluator", 0)] * evaluator


def commands(values: flags.FlagValues, hosts: Dict[str, List[str]],
             log_dir: str, program_flags: Sequence[str]
            ) -> List[processes.Command]:
  """Returns what to run, for each task."""
  tasks = tasks_of(hosts, values.evaluator)
  workers = [str(task) for task in tasks if task.job == "worker"]
  return [
      processes.Command(
          name=str(task),
          arguments=[
              sys.executable, values.program, f"--job_name={task.job}",
              f"--task_index={task.index}",
              f"--worker_hosts={','.join(hosts['worker'])}",
              f"--ps_hosts={','.join(hosts['ps'])}", *program_flags],
          log=os.path.join(log_dir, f"{task.job}-{task.index}.log"),
          is_shown=str(task) == CHIEF,
          restarts=0 if task.job == "evaluator" else values.restart,
          after=workers if task.job == "ps" else (),
          leader=None if str(task) in (CHIEF, "evaluator 0") else CHIEF)
      for task in tasks]


def launch(values: flags.FlagValues, program_flags: Sequence[str]) -> int:
  """Does what the flags say; returns the exit status of the process.

  Raises:
    UsageError: If they do not fit this machine.
  """
  check_program_flags(program_flags)
  if not os.path.isfile(values.program):
    raise UsageError("`--program` must be a Python file: got "
                     f"{values.program}.")
  if values.private_network:
    try:
      private_network.enter()
    except OSError as error:
      raise UsageError(
          "`--private_network` must be allowed on this system: got "
          f"{error.strerror or error}. Leave it out, and do without its "
          "protection.") from error
  log_dir = log_directory(values.log_dir, program_flags)
  running = processes.Tasks(
      commands(values, cluster(values.workers, values.ps), log_dir,
               program_flags),
      title=NAME, grace_seconds=values.grace_seconds,
      # Lines are in the logs, and on the terminal, when they are printed.
      environment={**os.environ, "PYTHONUNBUFFERED": "1"})
  status = running.run()
  if running.table():
    print(running.table(), file=sys.stderr)
  return status


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit status of the process."""
  own, program_flags = split(argv)
  values = _flags()

  def action():
    try:
      go_on = command_line.read(values, own, __doc__)
    except UsageError as error:
      raise UsageError(
          f"{error} (flags of the program follow `--`)") from error
    return launch(values, program_flags) if go_on else 0

  return command_line.ended(argv, action)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
