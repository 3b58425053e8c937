"""Tests for tools/launch.py, with small programs in place of tools/train.py."""

import contextlib
import io
import json
import os
import pathlib
import re
import signal
import socket

from absl.testing import absltest
from absl.testing import parameterized

import process_cases
from tools import launch

SCRIPT = pathlib.Path(launch.__file__)

# What programs start with: their flags, and their task.
START = """
import os, pathlib, signal, socket, sys, time
flags = dict(flag.lstrip("-").partition("=")[::2] for flag in sys.argv[1:])
task = f"{flags['job_name']}-{flags['task_index']}"
here = pathlib.Path(flags["here"])
def say(*words):
  print(*words, flush=True)
def wait(name):
  end = time.monotonic() + 200
  while not (here / name).exists() and time.monotonic() < end:
    time.sleep(0.01)
  return (here / name).read_text()
def write(name, text=""):
  (here / "new").mkdir(exist_ok=True)
  (here / "new" / name).write_text(text)
  (here / "new" / name).rename(here / name)
"""


class LaunchTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def log(self, task):
    return self.folder / "run" / "logs" / f"{task}.log"

  def arguments(self, code, *own, flags=()):
    """Returns the arguments of a Python that launches a program."""
    program = self.folder / "program.py"
    program.write_text(f"{START}\n{code}")
    return [SCRIPT, f"--program={program}",
            f"--grace_seconds={process_cases.SECONDS}", *own, "--",
            f"--here={self.folder}", f"--logdir={self.folder / 'run'}", *flags]

  def launch(self, code, *own, **options):
    result = process_cases.run(*self.arguments(code, *own, **options))
    self.assertNotIn("Traceback", result.stderr)
    return result

  def main(self, *argv):
    """Returns status, standard output and error, for what starts nothing."""
    with contextlib.redirect_stdout(io.StringIO()) as out, \
        contextlib.redirect_stderr(io.StringIO()) as err:
      status = launch.main([str(SCRIPT), *argv])
    return status, out.getvalue(), err.getvalue()


class CommandsTest(LaunchTest):

  def test_what_each_task_gets(self):
    result = self.launch(
        "write(f'{task}.json', __import__('json').dumps(sys.argv[1:]))",
        "--workers=2", "--ps=2", "--evaluator", flags=["--sync", "--steps=3"])
    self.assertEqual((result.returncode, result.stderr), (0, ""))
    written = {path.stem: json.loads(path.read_text())
               for path in self.folder.glob("*.json")}
    self.assertCountEqual(
        written, ["ps-0", "ps-1", "worker-0", "worker-1", "evaluator-0"])
    hosts = written["ps-0"][2:4]
    self.assertRegex(hosts[0], r"^--worker_hosts=127.0.0.1:\d+,127.0.0.1:\d+$")
    self.assertRegex(hosts[1], r"^--ps_hosts=127.0.0.1:\d+,127.0.0.1:\d+$")
    self.assertLen(set(re.findall(r":(\d+)", " ".join(hosts))), 4)
    for name, arguments in written.items():
      job, index = name.split("-")
      self.assertEqual(arguments, [
          f"--job_name={job}", f"--task_index={index}", *hosts,
          f"--here={self.folder}", f"--logdir={self.folder / 'run'}", "--sync",
          "--steps=3"])
      self.assertTrue(self.log(name).exists())

  def test_least_of_all(self):
    result = self.launch("say(*sys.argv[1:5])", "--ps=0")
    self.assertRegex(
        result.stdout, r"^--job_name=worker --task_index=0 "
        r"--worker_hosts=127.0.0.1:\d+ --ps_hosts=\n$")

  def test_ports_are_free_and_different(self):
    hosts = launch.cluster(workers=20, ps=10)
    self.assertEqual({job: len(each) for job, each in hosts.items()},
                     {"worker": 20, "ps": 10})
    names = hosts["worker"] + hosts["ps"]
    self.assertLen(set(names), 30)
    for name in names:
      host, port = name.split(":")
      self.assertEqual(host, "127.0.0.1")
      socket.create_server((host, int(port))).close()

  def test_only_the_chief_is_shown(self):
    result = self.launch("say(task, 'out'); print(task, file=sys.stderr)",
                         "--workers=2", "--evaluator")
    self.assertEqual((result.returncode, result.stdout, result.stderr),
                     (0, "worker-0 out\n", "worker-0\n"))
    for task in ("worker-0", "worker-1", "ps-0", "evaluator-0"):
      self.assertCountEqual(self.log(task).read_text().splitlines()[1:],
                            [f"{task} out", task])

  def test_prints_are_not_held_back(self):
    """Also by a program that does not flush."""
    code = "print('unflushed'); wait('over')"
    environment = dict(os.environ)
    environment.pop("PYTHONUNBUFFERED", None)
    with process_cases.running(*self.arguments(code),
                               env=environment) as process:
      self.assertEqual(process.stdout.readline(), "unflushed\n")
      process_cases.wait_for_text(self.log("ps-0"), "\nunflushed\n")
      (self.folder / "over").touch()
      self.assertEqual(process.wait(process_cases.SECONDS), 0)


class LogsTest(LaunchTest):

  @parameterized.parameters(
      ([], None), (["--logdir=a"], "a"), (["--logdir", "a"], "a"),
      (["-logdir=a"], "a"), (["--logdir=a", "--logdir=b"], "b"),
      (["--logdir="], None), (["--logdir"], None), (["--logdirs=a"], None))
  def test_directory_of_the_run(self, flags, expected):
    self.assertEqual(launch.run_directory(flags), expected)

  def test_log_dir(self):
    self.launch("", f"--log_dir={self.folder / 'a' / 'b'}")
    self.assertCountEqual(os.listdir(self.folder / "a" / "b"),
                          ["worker-0.log", "ps-0.log"])

  def test_new_directory_is_printed(self):
    arguments = self.arguments("say('out')")
    arguments.pop()  # Its --logdir.
    result = process_cases.run(
        *arguments, env={**os.environ, "TMPDIR": str(self.folder)})
    self.assertEqual((result.returncode, result.stdout), (0, "out\n"))
    path = re.fullmatch(r"launch.py: logs are in (\S+)\n", result.stderr)[1]
    self.assertEqual(os.path.dirname(path), str(self.folder))
    self.assertCountEqual(os.listdir(path), ["worker-0.log", "ps-0.log"])


class EndTest(LaunchTest):

  def test_failing_worker(self):
    code = ("if task == 'worker-1':\n"
            "  raise SystemExit(wait('ready') or 'no memory')\n"
            "if task == 'ps-0': write('ready')\n"
            "wait('never')")
    result = self.launch(code, "--workers=2")
    self.assertEqual((result.returncode, result.stdout), (1, ""))
    self.assertEqual(
        result.stderr.splitlines()[0],
        "launch.py: worker 1 ended with status 1: no memory (log: "
        f"{self.log('worker-1')})")
    self.assertRegex(result.stderr, r"\ntask +ended with +log\nps 0 +SIGTERM .*"
                     r"\nworker 0 +SIGTERM .*\nworker 1 +status 1 .*\n$")

  def test_parameter_server_that_ends_by_a_signal(self):
    code = ("if task == 'ps-0': os.kill(os.getpid(), signal.SIGSEGV)\n"
            "wait('never')")
    result = self.launch(code)
    self.assertEqual(result.returncode, 128 + signal.SIGSEGV)
    self.assertStartsWith(result.stderr, "launch.py: ps 0 ended with SIGSEGV: ")

  def test_parameter_server_that_hangs(self):
    """The evaluator may take its time, the parameter server may not."""
    code = "if task in ('ps-0', 'evaluator-0'): wait('never')"
    result = self.launch(code, "--workers=2", "--evaluator",
                         "--grace_seconds=0.2")
    self.assertEqual(result.returncode, 1)
    self.assertIn(
        "launch.py: ps 0 must end within 0.2 seconds after worker 0, worker 1 "
        "ended with status 0: it still runs (log: ", result.stderr)

  def test_evaluator_may_end_after_all(self):
    code = "if task == 'evaluator-0': wait('over')"
    with process_cases.running(*self.arguments(
        code, "--ps=0", "--evaluator", "--grace_seconds=0.1")) as process:
      line = process.stderr.readline()
      (self.folder / "over").touch()
      self.assertEqual(process.wait(process_cases.SECONDS), 0)
      self.assertEqual(process.stderr.read(), "")
    self.assertEqual(line, "launch.py: still running: evaluator 0 (log: "
                     f"{self.log('evaluator-0')})\n")

  @parameterized.parameters("worker-1", "ps-0")
  def test_restart(self, failing):
    code = (f"if task == {failing!r} and not (here / 'second').exists():\n"
            "  write('second'); sys.exit('first')\n"
            f"if task == {failing!r}: write('third')\n"
            "wait('third')")
    result = self.launch(code, "--workers=2", "--restart=1")
    self.assertEqual((result.returncode, result.stdout), (0, ""))
    self.assertEqual(
        result.stderr, f"launch.py: {failing.replace('-', ' ')} ended with "
        f"status 1: first (log: {self.log(failing)}); starting it again, 1 of "
        "1\n")

  # Ends well, unless it is the chief's first time.
  FOLLOWERS = ("if task != 'worker-0':\n"
               "  again = '-again' if (here / task).exists() else ''\n"
               "  if task in waits: wait('second')\n"
               "  write(task + again, str(os.getpid()))\n"
               "elif (here / 'second').exists():\n"
               "  for other in others: wait(other + '-again')\n"
               "else:\n"
               "  for other in set(others) - waits:\n"
               "    while pathlib.Path('/proc', wait(other)).exists(): pass\n"
               "  write('second'); os.kill(os.getpid(), signal.SIGKILL)")

  @parameterized.named_parameters(
      ("before_it_fails", "set()", process_cases.SECONDS),
      ("after_it_fails", "{'ps-0'}", 2.0))
  @absltest.skipUnless(os.path.exists("/proc/self/stat"), "Needs /proc.")
  def test_who_ends_starts_again_with_the_chief(self, waits, grace):
    code = (f"others, waits = ('worker-1', 'ps-0'), {waits}\n"
            f"{self.FOLLOWERS}")
    result = self.launch(code, "--workers=2", "--restart=1",
                         f"--grace_seconds={grace}")
    self.assertEqual((result.returncode, result.stdout), (0, ""),
                     result.stderr)
    lines = result.stderr.splitlines()
    self.assertEqual(
        lines[0], "launch.py: worker 0 ended with SIGKILL: no output (log: "
        f"{self.log('worker-0')}); starting it again, 1 of 1")
    self.assertCountEqual(lines[1:], [
        "launch.py: starting worker 1 again, too",
        "launch.py: starting ps 0 again, too"])

  @absltest.skipUnless(os.path.exists("/proc/self/stat"), "Needs /proc.")
  def test_who_fails_when_the_chief_is_done_is_not_needed(self):
    code = ("if task == 'worker-0': write('chief', str(os.getpid()))\n"
            "else:\n"
            "  while pathlib.Path('/proc', wait('chief')).exists(): pass\n"
            "  if task == 'worker-1': sys.exit('lost it')")
    result = self.launch(code, "--workers=2", "--restart=1")
    self.assertEqual((result.returncode, result.stdout, result.stderr), (
        0, "", "launch.py: worker 1 ended with status 1: lost it (log: "
        f"{self.log('worker-1')}); it is no longer needed, as worker 0 is "
        "done\n"))

  def test_evaluator_is_not_started_again(self):
    code = "if task == 'evaluator-0': sys.exit(4)"
    result = self.launch(code, "--evaluator", "--restart=1")
    self.assertEqual(result.returncode, 4)
    self.assertNotIn("starting it again", result.stderr)

  def test_killed_launcher_leaves_nothing(self):
    code = "write(f'{task}.pid', str(os.getpid())); wait('never')"
    with process_cases.running(
        *self.arguments(code, "--workers=2", "--evaluator")) as process:
      pids = process_cases.wait_until(
          lambda: len(found := list(self.folder.glob("*.pid"))) == 4 and found,
          "four tasks")
      pids = [int(path.read_text()) for path in pids]
      process.kill()
      process.wait()
      process_cases.wait_for_end(pids)


class TerminalTest(LaunchTest):

  def terminal(self, code, *own, **options):
    return process_cases.Terminal(*self.arguments(code, *own), **options)

  def test_one_progress_bar(self):
    """Of the terminal's width, in one line, and nothing of the others."""
    code = ("import tqdm\n"
            "print(task, sys.stderr.isatty(), os.get_terminal_size(2).columns"
            " if sys.stderr.isatty() else '')\n"
            "for _ in tqdm.tqdm(range(5), desc=task, dynamic_ncols=True,\n"
            "                   mininterval=0): pass\n"
            "print(task, 'over')")
    with self.terminal(code, "--workers=2", columns=57) as terminal:
      self.assertEqual(terminal.status(), 0, terminal.shown)
    lines = terminal.shown.split("\r\n")
    self.assertLen(lines, 4, terminal.shown)
    self.assertEqual((lines[0], lines[2], lines[3]),
                     ("worker-0 True 57", "worker-0 over", ""))
    drawn = lines[1].split("\r")
    self.assertGreater(len(drawn), 5)
    self.assertTrue(all(len(bar) <= 57 for bar in drawn), drawn)
    self.assertStartsWith(drawn[-1], "worker-0: 100%")
    self.assertIn("worker-1: 100%", self.log("worker-1").read_text())
    self.assertIn("worker-0: 100%", self.log("worker-0").read_text())

  def test_interrupt_reaches_each_task_once(self):
    code = ("def note(*unused): say('got it')\n"
            "signal.signal(signal.SIGINT, note)\n"
            "say('ready'); wait('over')")
    tasks = ("worker-0", "worker-1", "ps-0")
    with self.terminal(code, "--workers=2") as terminal:
      for task in tasks:
        process_cases.wait_for_text(self.log(task), "\nready\n")
      terminal.press(b"\x03")
      for task in tasks:
        process_cases.wait_for_text(self.log(task), "\ngot it\n")
      (self.folder / "over").touch()
      self.assertEqual(terminal.status(), 130, terminal.shown)
    for task in tasks:
      self.assertEndsWith(self.log(task).read_text(), "\nready\ngot it\n")
    self.assertEqual(terminal.shown, "ready\r\n^Cgot it\r\n")

  def test_second_interrupt_kills(self):
    code = ("def note(*unused): say('got it')\n"
            "signal.signal(signal.SIGINT, note)\n"
            "say('ready'); wait('never')")
    with self.terminal(code, "--grace_seconds=1000") as terminal:
      for task in ("worker-0", "ps-0"):
        process_cases.wait_for_text(self.log(task), "\nready\n")
      terminal.press(b"\x03")
      for task in ("worker-0", "ps-0"):
        process_cases.wait_for_text(self.log(task), "\ngot it\n")
      terminal.press(b"\x03")
      self.assertEqual(terminal.status(), 130, terminal.shown)
    self.assertIn("launch.py: killed ps 0, worker 0: a second Ctrl-C\r\n",
                  terminal.shown)

  def test_size_follows_the_terminal(self):
    code = ("say('ready')\n"
            "while os.get_terminal_size(2).columns != 44: time.sleep(0.01)")
    with self.terminal(code, "--ps=0") as terminal:
      process_cases.wait_until(lambda: terminal.has_shown("ready"), "a start")
      terminal.resize(44)
      self.assertEqual(terminal.status(), 0, terminal.shown)


class PrivateNetworkTest(LaunchTest):
  # Worker 0 listens on all interfaces, until worker 1 and the test are done.
  CODE = ("address = flags['worker_hosts'].split(',')[0].split(':')\n"
          "if task == 'worker-0':\n"
          "  server = socket.create_server(('', int(address[1])))\n"
          "  write('address', ':'.join(address)); wait('over')\n"
          "if task == 'worker-1':\n"
          "  wait('address')\n"
          "  socket.create_connection(('127.0.0.1', int(address[1])))\n"
          "  say('inside'); wait('over')\n")

  @parameterized.parameters(False, True)
  def test_server_can_be_reached_from_inside_only(self, private):
    arguments = self.arguments(self.CODE, "--workers=2", "--ps=0",
                               f"--private_network={private}")
    with process_cases.running(*arguments) as process:
      process_cases.wait_until(
          lambda: self.log("worker-1").exists() and "\ninside\n" in
          self.log("worker-1").read_text() or process.poll() is not None,
          "a connection")
      if private and process.poll() == 2:
        message = process.stderr.read()
        self.assertRegex(message, r"^launch.py: `--private_network` must be "
                         r"allowed on this system: got .*\n$")
        self.skipTest(message)
      port = int((self.folder / "address").read_text().split(":")[1])
      with socket.socket() as outside:
        self.assertEqual(outside.connect_ex(("127.0.0.1", port)) == 0,
                         not private)
      (self.folder / "over").touch()
      self.assertEqual(process.wait(process_cases.SECONDS), 0)

  def test_system_that_does_not_allow_it(self):
    code = ("import sys\n"
            "from tools import launch, private_network\n"
            "def refuse(what):\n"
            "  raise PermissionError(1, 'Operation not permitted')\n"
            "private_network._unshare = refuse\n"
            "sys.exit(launch.main(['launch.py', '--private_network']))")
    result = process_cases.run("-c", code)
    self.assertEqual((result.returncode, result.stdout, result.stderr), (
        2, "", "launch.py: `--private_network` must be allowed on this system: "
        "got Operation not permitted. Leave it out, and do without its "
        "protection.\n"))


class FlagsTest(LaunchTest):

  @parameterized.named_parameters(
      ("unknown", ["--steps=3"], r"Unknown command line flag 'steps'.* "
       r"\(flags of the program follow `--`\)"),
      ("no_flag", ["train"], "there must be flags only: got train"),
      ("workers", ["--workers=0"], "flag --workers=0: 0 is not a positive"),
      ("ps", ["--ps=-1"], "flag --ps=-1: .*non-negative"),
      ("restart", ["--restart=-1"], "flag --restart=-1: .*non-negative"),
      ("grace", ["--grace_seconds=-1"], "flag --grace_seconds=-1.*non-neg"),
      ("program", ["--program=/no/such.py"],
       "`--program` must be a Python file: got /no/such.py"),
      ("log_dir", ["--log_dir=/dev/null/logs"], "`--log_dir` must be a "
       r"directory that can be written to: got /dev/null/logs \(Not a"),
      ("job_name", ["--", "--job_name=ps"],
       "`--job_name` must not stand behind `--`: got --job_name=ps. It is"),
      ("task_index", ["--", "-task_index", "3"], "`--task_index` must not"),
      ("worker_hosts", ["--", "--worker_hosts="], "`--worker_hosts` must not"),
      ("ps_hosts", ["--", "--steps=3", "--ps_hosts=a"], "`--ps_hosts` must"),
  )
  def test_rejects_in_one_line(self, arguments, message):
    status, out, err = self.main(*arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, rf"^launch.py: {message}.*\n$")

  def test_help(self):
    status, out, err = self.main("--help")
    self.assertEqual((status, err), (0, ""))
    self.assertStartsWith(out, "Runs a whole TensorFlow cluster")
    for name in ("workers", "ps", r"\[no\]evaluator", "log_dir", "program",
                 "restart", "grace_seconds", r"\[no\]private_network"):
      self.assertRegex(out, rf"\n  --{name}: \w")

  def test_program_is_that_of_training(self):
    self.assertTrue(launch.PROGRAM.samefile(SCRIPT.parent / "train.py"))

  def test_needs_no_tensorflow(self):
    result = process_cases.run(
        "-c", "import sys; from tools import launch; "
        "print([name for name in sys.modules if 'tensorflow' in name])")
    self.assertEqual(result.stdout, "[]\n", result.stderr)


if __name__ == "__main__":
  absltest.main()
