"""Tests for tools.processes and tools.children."""

import json
import os
import pathlib
import re
import signal
import sys

from absl.testing import absltest
from absl.testing import parameterized

import process_cases
from tools import children

# Runs the commands that are its first argument.
DRIVER = """
import json, signal, sys
{preparation}
from tools import children, processes
{change}
commands = [processes.Command(**each) for each in json.loads(sys.argv[1])]
tasks = processes.Tasks(commands, title="driver", grace_seconds={grace})
status = tasks.run()
sys.stderr.write(tasks.table())
sys.exit(status)
"""

# What commands do. `wait(name)` waits until there is a file of that name.
START = """
import os, pathlib, signal, subprocess, sys, time
def say(*words):
  print(*words, flush=True)
def wait(name="never"):
  end = time.monotonic() + 200
  while not os.path.exists(name) and time.monotonic() < end:
    time.sleep(0.01)
came = []
def note(number, frame):
  say("got", signal.Signals(number).name)
  came.append(number)
def wait_for_signal():
  while not came:
    time.sleep(0.01)
def sleeper(**options):
  return subprocess.Popen(
      [sys.executable, "-S", "-c", "import time; time.sleep(200)"], **options)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
  signal.signal(number, note)
"""

LINUX = sys.platform.startswith("linux")


class ProcessesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def path(self, name):
    return self.folder / name

  def log(self, name):
    return self.path(f"{name}.log").read_text()

  def command(self, name, code, **options):
    """Returns a command that runs code in the test's folder."""
    code = f"{START}\nos.chdir({str(self.folder)!r})\n{code}"
    return {"name": name, "arguments": [sys.executable, "-S", "-c", code],
            "log": str(self.path(f"{name}.log")), **options}

  def driver(self, *commands, grace=process_cases.SECONDS, preparation="",
             change=""):
    """Returns the arguments of a Python that runs commands."""
    return ["-c", DRIVER.format(grace=grace, preparation=preparation,
                                change=change), json.dumps(commands)]

  def run_all(self, *commands, **options):
    result = process_cases.run(*self.driver(*commands, **options))
    self.assertNotIn("Traceback", result.stderr)
    return result

  def running(self, *commands, **options):
    return process_cases.running(*self.driver(*commands, **options))

  def pids_of(self, name, count=1):
    """Returns the ids that a command says, once it has said them all."""
    self.path(f"{name}.log").touch()

    def said():
      found = re.findall(r"^pid (\d+)$", self.log(name), re.MULTILINE)
      return found if len(found) == count else None

    return list(map(int, process_cases.wait_until(said, f"pids of {name}")))


class EndTest(ProcessesTest):

  def test_all_end_well(self):
    result = self.run_all(
        self.command("one", "say('out'); print('err', file=sys.stderr)",
                     is_shown=True),
        self.command("two", "say('hidden'); print('too', file=sys.stderr)"))
    self.assertEqual((result.returncode, result.stdout, result.stderr),
                     (0, "out\n", "err\n"))
    self.assertRegex(self.log("one").splitlines()[0],
                     rf"^\[\d+-\d\d-\d\d .*\] {re.escape(sys.executable)} -S")
    self.assertCountEqual(self.log("one").splitlines()[-2:], ["out", "err"])
    self.assertEndsWith(self.log("two"), "\nhidden\ntoo\n")

  def test_log_is_added_to(self):
    self.path("one.log").write_text("before\n")
    self.run_all(self.command("one", "say('after')"))
    self.assertRegex(self.log("one"), r"(?s)^before\n\[.*\nafter\n$")

  def test_bytes_are_passed_on_as_they_are(self):
    """Also when they are more than a pipe holds, and no text."""
    data = bytes(range(256)) * 1000
    with self.running(
        self.command("one", f"sys.stdout.buffer.write({data[:256]!r} * 1000)",
                     is_shown=True)) as process:
      written = process.stdout.buffer.read()
      self.assertEqual(process.wait(process_cases.SECONDS), 0)
    self.assertEqual(written, data)
    self.assertEndsWith(self.path("one.log").read_bytes(), b"\n" + data)

  def test_one_that_fails_ends_the_others(self):
    result = self.run_all(
        self.command("one", "say('ready'); wait_for_signal(); sys.exit(5)"),
        self.command("two", "wait('one.log')\n"
                     "while 'ready\\n' not in open('one.log').read(): pass\n"
                     "say('why', 'it failed', '\\n'); sys.exit(3)"))
    self.assertEqual((result.returncode, result.stdout), (3, ""))
    lines = result.stderr.splitlines()
    self.assertEqual(lines[0], "driver: two ended with status 3: why it failed "
                     f"(log: {self.path('two.log')})")
    self.assertLen(lines, 4)
    self.assertEqual(lines[1].split(), ["task", "ended", "with", "log"])
    self.assertRegex(lines[2], r"^one   status 5    *\S*one.log$")
    self.assertRegex(lines[3], r"^two   status 3    *\S*two.log$")
    self.assertEndsWith(self.log("one"), "\nready\ngot SIGTERM\n")

  def test_signal_that_ends_one(self):
    result = self.run_all(
        self.command("one", "os.kill(os.getpid(), signal.SIGKILL)"))
    self.assertEqual(result.returncode, 128 + 9)
    self.assertIn("driver: one ended with SIGKILL: no output (log: ",
                  result.stderr)

  def test_message_stands_below_a_progress_bar(self):
    result = self.run_all(self.command(
        "one", "sys.stderr.write('\\r 50%'); sys.exit(1)", is_shown=True))
    self.assertStartsWith(result.stderr, "\n 50%\ndriver: one ended with "
                          "status 1: 50% (log: ")

  def test_one_that_cannot_be_started(self):
    command = {"name": "two", "arguments": ["/no/such"],
               "log": str(self.path("two.log"))}
    result = self.run_all(self.command("one", "wait()"), command,
                          self.command("three", ""), grace=0.2)
    self.assertEqual(result.returncode, 1)
    self.assertStartsWith(result.stderr, "driver: two could not be started: No "
                          "such file or directory (log: ")
    self.assertRegex(result.stderr, "\nthree +not started")

  def test_log_that_cannot_be_written(self):
    command = self.command("one", "")
    command["log"] = "/no/such.log"
    result = self.run_all(command)
    self.assertEqual(result.returncode, 1)
    self.assertStartsWith(result.stderr, "driver: one could not be started: ")

  def test_one_that_does_not_end_in_time_is_killed(self):
    result = self.run_all(
        self.command("one", "say('ready'); wait()"),
        self.command("two", "wait('one.log')\n"
                     "while 'ready\\n' not in open('one.log').read(): pass\n"
                     "sys.exit(3)"), grace=0.2)
    self.assertEqual(result.returncode, 3)
    self.assertIn("\ndriver: killed one: still running after 0.2 seconds\n",
                  result.stderr)
    self.assertRegex(result.stderr, r"\none +SIGKILL +\S+one.log")

  @absltest.skipUnless(os.path.exists("/dev/full"), "There is no /dev/full.")
  def test_full_log(self):
    command = self.command("one", "say('out')", is_shown=True)
    self.path("one.log").symlink_to("/dev/full")
    result = self.run_all(command)
    self.assertEqual(result.returncode, 1)
    self.assertIn("No space left", result.stderr)


class FollowTest(ProcessesTest):

  def test_one_that_follows_in_time(self):
    result = self.run_all(
        self.command("server", "wait('over')", after=["one", "two"]),
        self.command("one", ""),
        self.command("two", "pathlib.Path('over').touch()"))
    self.assertEqual((result.returncode, result.stderr), (0, ""))

  def test_one_that_does_not_follow(self):
    result = self.run_all(
        self.command("server", "wait()", after=["one"]),
        self.command("one", ""), self.command("other", "wait()"),
        grace=0.2)
    self.assertEqual(result.returncode, 1)
    self.assertStartsWith(
        result.stderr, "driver: server must end within 0.2 seconds after one "
        f"ended with status 0: it still runs (log: {self.path('server.log')})")
    self.assertRegex(result.stderr, r"\none +status 0")


class NoticeTest(ProcessesTest):

  def test_says_once_what_still_runs_when_nothing_is_shown(self):
    with self.running(
        self.command("one", "wait('ready')", is_shown=True),
        self.command("two", "pathlib.Path('ready').touch(); wait('over')"),
        grace=0.1) as process:
      line = process.stderr.readline()
      self.path("over").touch()
      self.assertEqual(process.wait(process_cases.SECONDS), 0)
      self.assertEqual(process.stderr.read(), "")
    self.assertEqual(line, "driver: still running: two (log: "
                     f"{self.path('two.log')})\n")


class RestartTest(ProcessesTest):
  # Fails until it has run three times.
  CODE = ("runs = len(os.listdir()); pathlib.Path(f'{runs}').touch()\n"
          "say('run', runs)\n")

  @parameterized.parameters("sys.exit(7)",
                            "os.kill(os.getpid(), signal.SIGKILL)")
  def test_is_started_again(self, failure):
    result = self.run_all(self.command(
        "one", f"{self.CODE}if runs < 3: {failure}", restarts=2, is_shown=True))
    self.assertEqual((result.returncode, result.stdout),
                     (0, "run 1\nrun 2\nrun 3\n"))
    self.assertRegex(
        result.stderr, r"^driver: one ended with .*: run 1 \(log: .*\); "
        r"starting it again, 1 of 2\n.*: run 2 .* again, 2 of 2\n$")
    self.assertEqual(re.findall("^run .", self.log("one"), re.MULTILINE),
                     ["run 1", "run 2", "run 3"])

  def test_not_more_often_than_allowed(self):
    result = self.run_all(self.command(
        "one", f"{self.CODE}sys.exit(10 + runs)", restarts=1))
    self.assertEqual(result.returncode, 12)
    self.assertIn("driver: one ended with status 12: run 2 (log:",
                  result.stderr)

  def test_not_after_a_usage_error(self):
    result = self.run_all(self.command("one", f"{self.CODE}sys.exit(2)",
                                       restarts=3))
    self.assertEqual(result.returncode, 2)
    self.assertEqual(self.log("one").count("\nrun "), 1)


class SignalTest(ProcessesTest):

  @parameterized.parameters("SIGINT", "SIGTERM", "SIGHUP")
  def test_is_forwarded_once(self, name):
    """And what follows but is no second Ctrl-C changes nothing."""
    code = "say('ready'); wait('over')"
    with self.running(self.command("one", code),
                      self.command("two", code)) as process:
      for task in ("one", "two"):
        process_cases.wait_for_text(self.path(f"{task}.log"), "\nready\n")
      process.send_signal(signal.Signals[name])
      for task in ("one", "two"):
        process_cases.wait_for_text(self.path(f"{task}.log"), f"got {name}\n")
      process.send_signal(signal.SIGTERM)
      process.send_signal(signal.SIGHUP)
      self.path("over").touch()
      out, err = process.communicate(timeout=process_cases.SECONDS)
    self.assertEqual((process.returncode, out, err),
                     (128 + signal.Signals[name], "", ""))
    for task in ("one", "two"):
      self.assertEndsWith(self.log(task), f"\nready\ngot {name}\n")

  def test_second_interrupt_kills(self):
    code = "say('pid', os.getpid()); wait()"
    with self.running(self.command("one", code),
                      self.command("two", code)) as process:
      pids = self.pids_of("one") + self.pids_of("two")
      process.send_signal(signal.SIGINT)
      process_cases.wait_for_text(self.path("one.log"), "got SIGINT\n")
      process.send_signal(signal.SIGINT)
      out, err = process.communicate(timeout=process_cases.SECONDS)
    self.assertEqual((process.returncode, out), (130, ""))
    self.assertStartsWith(err, "driver: killed one, two: a second Ctrl-C\ntask")
    process_cases.wait_for_end(pids)

  def test_interrupt_kills_after_the_grace_time(self):
    with self.running(self.command("one", "say('ready'); wait()"),
                      grace=0.2) as process:
      process_cases.wait_for_text(self.path("one.log"), "\nready\n")
      process.send_signal(signal.SIGINT)
      _, err = process.communicate(timeout=process_cases.SECONDS)
    self.assertEqual(process.returncode, 130)
    self.assertStartsWith(
        err, "driver: killed one: still running after 0.2 seconds\n")

  def test_interrupted_tasks_are_not_started_again(self):
    with self.running(self.command(
        "one", "say('ready'); wait_for_signal(); sys.exit(130)",
        restarts=5)) as process:
      process_cases.wait_for_text(self.path("one.log"), "\nready\n")
      process.send_signal(signal.SIGINT)
      _, err = process.communicate(timeout=process_cases.SECONDS)
    self.assertEqual((process.returncode, err), (130, ""))

  def test_hangup_is_ignored_if_it_was(self):
    """As under `nohup`."""
    ignore = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with self.running(self.command("one", "say('ready'); wait('over')"),
                      preparation=ignore) as process:
      process_cases.wait_for_text(self.path("one.log"), "\nready\n")
      process.send_signal(signal.SIGHUP)
      self.path("over").touch()
      self.assertEqual(process.wait(process_cases.SECONDS), 0)
    self.assertNotIn("got SIGHUP", self.log("one"))

  @absltest.skipUnless(LINUX, "Only Linux shows the state in /proc.")
  def test_suspend_stops_all(self):

    def state(pid):
      text = pathlib.Path(f"/proc/{pid}/stat").read_text()
      return text.rpartition(")")[2].split()[0]

    with self.running(self.command(
        "one", "say('pid', os.getpid()); wait('over')")) as process:
      pids = [*self.pids_of("one"), process.pid]
      process.send_signal(signal.SIGTSTP)
      process_cases.wait_until(lambda: {state(pid) for pid in pids} == {"T"},
                               "all to stop")
      process.send_signal(signal.SIGCONT)
      self.path("over").touch()
      self.assertEqual(process.wait(process_cases.SECONDS), 0)


class LeftBehindTest(ProcessesTest):
  # Says its own id and that of a process that it starts.
  CODE = "say('pid', os.getpid()); say('pid', sleeper().pid)\n"

  @parameterized.named_parameters(
      ("with_both", ""),
      ("with_guard_alone", "children._killed_with_parent = lambda: None"))
  def test_killed_parent_leaves_nothing(self, change):
    with self.running(self.command("one", self.CODE + "wait()", is_shown=True),
                      self.command("two", self.CODE + "wait()"),
                      change=change) as process:
      pids = self.pids_of("one", 2) + self.pids_of("two", 2)
      self.assertTrue(all(map(process_cases.is_alive, pids)))
      process.kill()
      process.wait()
      process_cases.wait_for_end(pids)

  @absltest.skipUnless(LINUX, "Only Linux kills children with their parent.")
  def test_killed_parent_without_guard_leaves_no_command(self):
    change = ("class Guard(children.Guard):\n"
              "  def __init__(self):\n"
              "    super().__init__()\n"
              "    self._process.kill()\n"
              "    self._process.wait()\n"
              "children.Guard = Guard")
    with self.running(self.command("one", "say('pid', os.getpid()); wait()"),
                      change=change) as process:
      pids = self.pids_of("one")
      process.kill()
      process.wait()
      process_cases.wait_for_end(pids)

  def test_what_a_task_started_ends_with_it(self):
    result = self.run_all(self.command("one", self.CODE, is_shown=True))
    self.assertEqual((result.returncode, result.stderr), (0, ""))
    process_cases.wait_for_end(self.pids_of("one", 2))

  def test_one_that_left_its_session_does_not_hang(self):
    """Though it still has the pipe to write to."""
    code = "say('pid', sleeper(start_new_session=True).pid)"
    result = self.run_all(self.command("one", code, is_shown=True))
    self.assertEqual(result.returncode, 0)
    os.kill(self.pids_of("one")[0], signal.SIGKILL)

  def test_reader_that_goes_away(self):
    """Commands go on, and logs have it all."""
    code = ("say('ready'); wait('over')\n"
            "for i in range(20000): print(i)\n")
    with self.running(self.command("one", code, is_shown=True)) as process:
      process.stdout.readline()
      process.stdout.close()
      self.path("over").touch()
      self.assertEqual(process.wait(process_cases.SECONDS), 0)
      self.assertEqual(process.stderr.read(), "")
      process.stdout = None
    self.assertEndsWith(self.log("one"), "\n19998\n19999\n")


class WordsTest(parameterized.TestCase):

  @parameterized.parameters((0, "status 0", 0), (3, "status 3", 3),
                            (-9, "SIGKILL", 137), (-63, "signal 63", 191))
  def test_status(self, status, words, code):
    self.assertEqual(children.describe(status), words)
    self.assertEqual(children.exit_status(status), code)


if __name__ == "__main__":
  absltest.main()
