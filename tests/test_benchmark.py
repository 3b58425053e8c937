"""Tests for tools/benchmark.py."""

import contextlib
import dataclasses
import io
import json
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from tools import benchmark
from tools import benchmark_suites as suites
from tools import benchmark_workers as workers

SCRIPT = pathlib.Path(benchmark.__file__)


def call_main(*arguments):
  """Returns exit status, standard output and standard error."""
  with contextlib.redirect_stdout(io.StringIO()) as stdout, \
      contextlib.redirect_stderr(io.StringIO()) as stderr:
    status = benchmark.main(["benchmark.py", *arguments])
  return status, stdout.getvalue(), stderr.getvalue()


class FakeWorker:
  """Notes who is asked for what, and by its end whether it was ended."""

  log = []
  open_workers = 0

  def __init__(self, task):
    self.task = task

  def __enter__(self):
    FakeWorker.open_workers += 1
    return self

  def __exit__(self, *_):
    FakeWorker.open_workers -= 1

  def ask(self, request, **arguments):
    FakeWorker.log.append((request, self.task.contender))
    if request == "turn":
      return {"times": [1.0, 3.0, 50.0][:arguments["steps"]]}
    return {"build": 2.0} if request == "build" else {"ops": 7}


class MeasureTest(parameterized.TestCase, tf.test.TestCase):

  def setUp(self):
    super().setUp()
    FakeWorker.log = []
    self.enter_context(
        mock.patch.object(workers, "Worker", FakeWorker))

  def test_turns_alternate(self):
    comparison = suites.Comparison(
        "resnet8", 2, 4, ("one", "loop", "towers"), turns=2, steps=3)
    result = benchmark.measure(comparison, 0, lambda what: None)
    self.assertEqual(FakeWorker.log, [
        ("build", "one"), ("build", "loop"), ("build", "towers"),
        ("turn", "one"), ("turn", "loop"), ("turn", "towers"),
        ("turn", "loop"), ("turn", "towers"), ("turn", "one"),
        ("end", "one"), ("end", "loop"), ("end", "towers")])
    self.assertEqual(result["loop"],
                     [{"build": 2.0, "turns": [3.0, 3.0], "ops": 7}])
    self.assertEqual(FakeWorker.open_workers, 0)

  def test_builds_are_in_new_processes_and_some_take_part_once(self):
    comparison = suites.Comparison(
        "resnet8", 2, 4, ("mirrored", "towers"), builds=3, turns=1, steps=1,
        once=("mirrored",))
    result = benchmark.measure(comparison, 0, lambda what: None)
    self.assertEqual([len(runs) for runs in result.values()], [1, 3])
    self.assertEqual([c for do, c in FakeWorker.log if do == "build"],
                     ["mirrored", "towers", "towers", "towers"])

  def test_built_only(self):
    comparison = suites.Comparison("resnet8", 2, 4, ("towers",), runs=False)
    benchmark.measure(comparison, 0, lambda what: None)
    self.assertEqual([do for do, _ in FakeWorker.log], ["build", "end"])

  def test_files(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    status, stdout, stderr = call_main(
        "--model=resnet8", "--contenders=loop,towers", "--turns=2", "--steps=1",
        f"--json={folder / 'a.json'}", f"--markdown={folder / 'a.md'}",
        f"--plots={folder / 'plots'}")
    self.assertEqual(status, 0, stderr)
    self.assertIn("[1/1] resnet8, 2 towers of 32 rows: turn 2\n", stderr)
    self.assertIn("| step, s | 1.0000 | 1.0000 **1.00** |", stdout)
    self.assertEqual((folder / "a.md").read_text(), stdout)
    self.assertTrue((folder / "plots" / "step_time.png").exists())
    written = json.loads((folder / "a.json").read_text())
    self.assertEqual(written["machine"]["tensorflow"], tf.__version__)
    FakeWorker.log = []
    again = call_main(f"--read={folder / 'a.json'}")
    self.assertEqual(again, (0, stdout, ""))
    self.assertEmpty(FakeWorker.log)

  def test_failing_contender_ends_it(self):
    """What was measured before is in the file."""
    path = pathlib.Path(self.create_tempdir().full_path, "figures.json")
    failing = mock.Mock(side_effect=[{"one": []}, benchmark.UsageError("bad")])
    with mock.patch.object(benchmark, "measure", failing):
      status, stdout, stderr = call_main("--suite=rows", f"--json={path}")
    self.assertEqual((status, stdout), (2, ""))
    self.assertEndsWith(stderr, "benchmark.py: bad\n")
    self.assertLen(json.loads(path.read_text())["comparisons"], 1)


class FlagsTest(parameterized.TestCase, tf.test.TestCase):

  def test_defaults(self):
    self.assertEqual(benchmark.parse(["benchmark.py"]), benchmark.Options())

  def test_flags_make_one_comparison(self):
    options = benchmark.parse(
        ["benchmark.py", "--num_towers=3", "--contenders=loop,one",
         "--builds=2", "--threads=1"])
    self.assertEqual(options, benchmark.Options(
        comparisons=(suites.Comparison(
            num_towers=3, contenders=("loop", "one"), builds=2),), threads=1))

  def test_suite_with_other_numbers_of_turns(self):
    options = benchmark.parse(["benchmark.py", "--suite=rows", "--turns=1"])
    self.assertEqual(
        list(options.comparisons),
        [dataclasses.replace(c, turns=1) for c in suites.SUITES["rows"]])

  def test_help_names_every_flag(self):
    status, stdout, stderr = call_main("--help")
    self.assertEqual((status, stderr), (0, ""))
    self.assertIn("python tools/benchmark.py", stdout)
    for name in ("suite", "model", "num_towers", "rows", "builds", "turns",
                 "steps", "contenders", "threads", "json", "markdown", "plots",
                 "read"):
      self.assertRegex(stdout, rf"--{name}:")

  @parameterized.named_parameters(
      ("unknown_flag", ["--stepz=3"], "Unknown command line flag 'stepz'"),
      ("no_flag", ["resnet20"], "there must be flags only: got resnet20"),
      ("suite", ["--suite=fast"], "flag --suite=fast: .*<targets.models"),
      ("both", ["--suite=rows", "--rows=3"], "`--suite` must stand without"),
      ("model", ["--model=vgg"], "flag --model=vgg: .*<resnet8.resnet20"),
      ("no_towers", ["--num_towers=0"], "flag --num_towers=0: 0 is not a"),
      ("no_rows", ["--rows=0"], "flag --rows=0: 0 is not a positive"),
      ("steps", ["--steps=0"], "flag --steps=0: 0 is not a positive"),
      ("turns", ["--turns=-1"], "flag --turns=-1: .*non-negative"),
      ("builds", ["--builds=0"], "flag --builds=0: 0 is not"),
      ("contenders", ["--contenders=loop,horovod"],
       "`--contenders` must list different ones of one, loop, .*: got "),
      ("no_contenders", ["--contenders="], "`--contenders` must .*: got ''"),
      ("twice", ["--contenders=one,one"], "`--contenders` must .*'one,one'"),
      ("json", ["--json=/nowhere/a.json"],
       r"`--json` must be a file .* /nowhere/a.json \(No such file"),
      ("markdown", ["--markdown=/nowhere/a.md"], "`--markdown` must be a file"),
      ("plots", ["--plots=/dev/null/a"], "`--plots` must be a folder that can"),
      ("read", ["--read=/nowhere/a.json"],
       "`--read` must be a file that `--json` wrote: got /nowhere/a.json"))
  def test_rejects_in_one_line(self, arguments, message):
    status, stdout, stderr = call_main(*arguments)
    self.assertEqual((status, stdout), (2, ""))
    self.assertRegex(stderr, rf"^benchmark.py: {message}.*\n$")

  def test_script(self):
    """With processes of its own."""
    process = subprocess.run(
        [sys.executable, str(SCRIPT), "--model=unet_small", "--rows=1",
         "--turns=1", "--steps=1", "--contenders=towers", "--threads=1"],
        capture_output=True, text=True, timeout=300, check=False)
    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertStartsWith(process.stdout,
                          "| unet_small, 2 towers of 1 row | `towers` |\n")
    self.assertIn("1 threads", process.stdout)
    self.assertNotIn("Traceback", process.stderr)


if __name__ == "__main__":
  tf.test.main()
