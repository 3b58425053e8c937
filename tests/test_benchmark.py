"""Tests for tools/benchmark.py."""

import contextlib
import io
import json
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from tools import benchmark

SCRIPT = pathlib.Path(benchmark.__file__)
SMALL = benchmark.Setting("resnet8", num_towers=2, rows=2, steps=2)


def call_main(*arguments):
  """Returns exit status, standard output and standard error."""
  with contextlib.redirect_stdout(io.StringIO()) as stdout, \
      contextlib.redirect_stderr(io.StringIO()) as stderr:
    status = benchmark.main(["benchmark.py", *arguments])
  return status, stdout.getvalue(), stderr.getvalue()


def run_figures(**changes):
  return {**dict.fromkeys(benchmark.FIGURES, 1.0), **changes}


class MeasureTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.parameters(*benchmark.CONTENDERS)
  def test_every_figure_of_every_contender(self, contender):
    figures = benchmark.measure(contender, SMALL)
    self.assertCountEqual(figures, benchmark.FIGURES)
    for name, value in figures.items():
      self.assertGreater(value, 0, name)
    self.assertAlmostEqual(figures["examples_per_second"] * figures["step"], 4)
    self.assertAlmostEqual(figures["build_and_first_step"],
                           figures["build"] + figures["first_step"])

  @parameterized.parameters(*benchmark.CONTENDERS)
  def test_every_contender_trains_the_same_variables(self, contender):
    def loss_fn(images, labels):
      del labels
      return tf.reduce_mean(images * tf.get_variable("w", []))

    images = tf.placeholder(tf.float32, [None, 1])
    labels = tf.placeholder(tf.int64, [None])
    built = benchmark.CONTENDERS[contender](loss_fn, images, labels, 2)
    self.assertEqual([v.op.name for v in tf.global_variables()],
                     ["w", "w/Momentum"])
    variable = tf.global_variables()[0]
    with tf.Session(config=built.config) as sess:
      sess.run(tf.global_variables_initializer())
      before = sess.run(variable)
      sess.run(built.train_op, {images: [[1.0], [3.0]], labels: [0, 0]})
      # A step of 0.01 along the mean gradient, 2.
      self.assertAllClose(before - sess.run(variable), 0.02)

  def test_without_steps_there_is_no_time_of_a_step(self):
    figures = benchmark.measure(
        "one", benchmark.Setting("resnet8", 1, 1, steps=0))
    self.assertNotIn("step", figures)
    self.assertNotIn("| step, s |", benchmark.table(SMALL, {"one": [figures]}))

  def test_all_contenders_have_a_description(self):
    for function in benchmark.CONTENDERS.values():
      self.assertNotEmpty(function.__doc__.splitlines()[0])
    self.assertIn(benchmark.BASE, benchmark.CONTENDERS)


class TableTest(tf.test.TestCase):

  def test_medians_ranges_and_ratios_of_the_same_turn(self):
    result = {
        "loop": [run_figures(build=b) for b in (1.0, 2.0, 4.0)],
        "towers": [run_figures(build=b) for b in (3.0, 4.0, 4.0)],
    }
    lines = benchmark.table(SMALL, result).splitlines()
    self.assertEqual(lines[0],
                     "| resnet8, 2 towers of 2 rows | `loop` | `towers` |")
    self.assertEqual(lines[1], "| --- | ---: | ---: |")
    self.assertIn("| build, s | 2.00 (1.00 to 4.00) | "
                  "4.00 (3.00 to 4.00) **2.00** |", lines)
    self.assertIn("| ops | 1 | 1 **1.00** |", lines)
    self.assertLen(lines, 2 + len(benchmark.FIGURES))

  def test_legend_says_what_was_measured(self):
    options = benchmark.Options(settings=[SMALL], contenders=["one"])
    text = benchmark.legend(options, benchmark.describe_machine(3))
    self.assertIn(f"TensorFlow {tf.__version__}", text)
    self.assertRegex(text, r"\d+ cores \(\w+\), 3 threads")
    self.assertIn("- `one`: plain code on one device", text)
    self.assertNotIn("**", text)


class MainTest(parameterized.TestCase, tf.test.TestCase):

  def test_defaults(self):
    self.assertEqual(benchmark.parse(["benchmark.py"]), benchmark.Options())

  def test_flags_make_one_setting(self):
    options = benchmark.parse(
        ["benchmark.py", "--num_towers=3", "--contenders=loop,one",
         "--repetitions=2", "--threads=1"])
    self.assertEqual(
        options,
        benchmark.Options(settings=(benchmark.Setting(num_towers=3),),
                          contenders=("loop", "one"), repetitions=2, threads=1))

  def test_steps_alone_keep_the_settings(self):
    settings = benchmark.parse(["benchmark.py", "--steps=0"]).settings
    self.assertEqual([s.model for s in settings],
                     [s.model for s in benchmark.DEFAULT_SETTINGS])
    self.assertEqual({s.steps for s in settings}, {0})

  def test_help_names_every_flag(self):
    status, stdout, stderr = call_main("--help")
    self.assertEqual((status, stderr), (0, ""))
    self.assertIn("python tools/benchmark.py", stdout)
    for name in ("model", "num_towers", "rows", "steps", "repetitions",
                 "contenders", "threads", "json"):
      self.assertRegex(stdout, rf"--{name}:")

  @parameterized.named_parameters(
      ("unknown_flag", ["--stepz=3"], "Unknown command line flag 'stepz'"),
      ("no_flag", ["resnet20"], "there must be flags only: got resnet20"),
      ("model", ["--model=vgg"], "flag --model=vgg: .*<resnet8.resnet20"),
      ("no_towers", ["--num_towers=0"], "flag --num_towers=0: 0 is not a"),
      ("no_rows", ["--rows=0"], "flag --rows=0: 0 is not a positive"),
      ("steps", ["--steps=-1"], "flag --steps=-1: .*non-negative"),
      ("repetitions", ["--repetitions=0"], "flag --repetitions=0: 0 is not"),
      ("contenders", ["--contenders=loop,horovod"],
       "`--contenders` must list different ones of one, loop, .*: got "),
      ("no_contenders", ["--contenders="], "`--contenders` must .*: got ''"),
      ("twice", ["--contenders=one,one"], "`--contenders` must .*'one,one'"),
      ("several_here", ["--here"], "`--here` must come with one of"),
      ("json", ["--json=/nowhere/a.json"],
       r"`--json` must be a file .* /nowhere/a.json \(No such file"))
  def test_rejects_in_one_line(self, arguments, message):
    status, stdout, stderr = call_main(*arguments)
    self.assertEqual((status, stdout), (2, ""))
    self.assertRegex(stderr, rf"^benchmark.py: {message}.*\n$")

  def test_contenders_take_turns_and_the_file_has_every_run(self):
    calls = []

    def run_apart(contender, setting, threads):
      calls.append((setting, contender, threads))
      return run_figures(build=float(len(calls)))

    path = pathlib.Path(self.create_tempdir().full_path, "figures.json")
    with mock.patch.object(benchmark, "run_apart", run_apart):
      status, stdout, stderr = call_main(
          "--model=resnet8", "--contenders=loop,towers", "--repetitions=2",
          f"--json={path}")
    self.assertEqual(status, 0)
    self.assertEqual([c for _, c, _ in calls], ["loop", "towers"] * 2)
    self.assertIn("[4/4] resnet8, 2 towers of 32 rows: towers\n", stderr)
    self.assertIn("| build, s | 2.00 (1.00 to 3.00) |", stdout)
    written = json.loads(path.read_text())
    self.assertEqual(written["machine"]["tensorflow"], tf.__version__)
    self.assertEqual(
        [run["build"] for run in written["settings"][0]["contenders"]["loop"]],
        [1.0, 3.0])

  def test_failing_contender_ends_it(self):
    """What was measured before is in the file."""
    path = pathlib.Path(self.create_tempdir().full_path, "figures.json")
    turns = [run_figures(), benchmark.UsageError("`loop` must run")]
    with mock.patch.object(benchmark, "run_apart", side_effect=turns):
      status, stdout, stderr = call_main("--model=resnet8", f"--json={path}")
    self.assertEqual((status, stdout), (2, ""))
    self.assertEndsWith(stderr, "\nbenchmark.py: `loop` must run\n")
    written = json.loads(path.read_text())["settings"][0]["contenders"]
    self.assertEqual([len(runs) for runs in written.values()],
                     [1] + [0] * (len(benchmark.DEFAULT_CONTENDERS) - 1))

  def test_failing_process_is_shown_in_one_line(self):
    fail = subprocess.CompletedProcess([], 1, "", "Traceback\nKilled: memory\n")
    with mock.patch.object(subprocess, "run", return_value=fail):
      status, stdout, stderr = call_main("--model=resnet8")
    self.assertEqual((status, stdout), (2, ""))
    self.assertEqual(
        stderr.splitlines()[-1], "benchmark.py: `one` must run in resnet8, 2 "
        "towers of 32 rows: it ended with status 1 (Killed: memory).")

  def test_script(self):
    """In processes of their own, with the flags that reach these."""
    process = subprocess.run(
        [sys.executable, str(SCRIPT), "--model=resnet8", "--rows=1",
         "--steps=1", "--repetitions=1", "--contenders=towers", "--threads=1"],
        capture_output=True, text=True, timeout=300, check=False)
    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertStartsWith(process.stdout,
                          "| resnet8, 2 towers of 1 rows | `towers` |\n")
    self.assertIn("1 threads", process.stdout)
    self.assertEqual(process.stderr,
                     "[1/1] resnet8, 2 towers of 1 rows: towers\n")


if __name__ == "__main__":
  tf.test.main()
