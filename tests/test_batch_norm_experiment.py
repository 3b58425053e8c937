"""Tests for tools/batch_norm_experiment.py."""

import contextlib
import io
import json
import pathlib
from unittest import mock

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from tools import batch_norm_experiment
from tools import batch_norm_runs

# Final scores of made-up runs.
LEVELS = {"one device": 0.8, "whole batch": 0.7, "per tower": 0.5}


def call_main(*arguments):
  """Returns exit status, standard output and standard error."""
  with contextlib.redirect_stdout(io.StringIO()) as stdout, \
      contextlib.redirect_stderr(io.StringIO()) as stderr:
    status = batch_norm_experiment.main(
        ["batch_norm_experiment.py", *arguments])
  return status, stdout.getvalue(), stderr.getvalue()


def made_up(setting, contender, seed, data):
  """Stands in for `measure`: a line from 0 to the level, and 0.01 a seed."""
  del data
  level = LEVELS[contender] + 0.01 * seed
  scores = [level * point / setting.steps for point in setting.points]
  return batch_norm_runs.Run(
      batch_norm_runs.key_of(setting, contender, seed), scores, scores, 1.0)


def fake_measure():
  return mock.patch.object(batch_norm_runs, "measure", side_effect=made_up)


class ExperimentTest(parameterized.TestCase, tf.test.TestCase):

  def path(self, name):
    return str(pathlib.Path(self.create_tempdir().full_path, name))

  def test_real_runs_write_table_scores_and_picture(self):
    output, picture = self.path("runs.json"), self.path("curves.png")
    small = batch_norm_runs.Setting("digits", rows=2, steps=1, num_towers=2)
    with mock.patch.dict(batch_norm_experiment.SETTINGS, digits_2=small):
      status, stdout, stderr = call_main(
          "--settings=digits_2", "--seeds=1", "--steps=1",
          f"--output={output}", f"--picture={picture}")
    self.assertEqual(status, 0, stderr)
    lines = stdout.splitlines()
    self.assertLen(lines, 3)
    self.assertEqual(lines[0], "| setting | step | `one device` | "
                     "`whole batch` | `per tower` |")
    self.assertRegex(
        lines[2], r"^\| ResNet-8 on digits, 2 towers of 2 images: accuracy "
        r"\| 1 \| 0\.\d{3} \| 0\.\d{3} \| 0\.\d{3} \|$")
    self.assertLen(stderr.splitlines(), 3)
    runs = json.loads(pathlib.Path(output).read_text())
    losses = {run["key"]["contender"]: run["losses"][0] for run in runs}
    self.assertAllClose(losses["one device"], losses["whole batch"], rtol=1e-4)
    self.assertNotAllClose(losses["one device"], losses["per tower"], rtol=1e-2)
    self.assertTrue(pathlib.Path(picture).read_bytes().startswith(b"\x89PNG"))

  def test_table_has_means_and_ranges_at_equal_steps(self):
    with fake_measure():
      status, stdout, stderr = call_main(
          "--settings=digits_2,shapes_1", "--steps=8")
    self.assertEqual(status, 0, stderr)
    self.assertEqual(stdout.splitlines()[1:7], [
        "| --- | ---: | ---: | ---: | ---: |",
        "| ResNet-8 on digits, 8 towers of 2 images: accuracy | 2 "
        "| 0.203 (0.200 to 0.205) | 0.177 (0.175 to 0.180) "
        "| 0.128 (0.125 to 0.130) |",
        "|  | 4 | 0.405 (0.400 to 0.410) | 0.355 (0.350 to 0.360) "
        "| 0.255 (0.250 to 0.260) |",
        "|  | 6 | 0.608 (0.600 to 0.615) | 0.532 (0.525 to 0.540) "
        "| 0.383 (0.375 to 0.390) |",
        "|  | 8 | 0.810 (0.800 to 0.820) | 0.710 (0.700 to 0.720) "
        "| 0.510 (0.500 to 0.520) |",
        "| U-Net on shapes, 8 towers of 1 image: mean IoU | 2 "
        "| 0.203 (0.200 to 0.205) | 0.177 (0.175 to 0.180) "
        "| 0.128 (0.125 to 0.130) |"])

  def test_all_settings_are_drawn_on_one_picture(self):
    picture = self.path("curves.png")
    with fake_measure() as measure:
      status, _, stderr = call_main(f"--picture={picture}")
    self.assertEqual(status, 0, stderr)
    self.assertEqual(measure.call_count, 27)
    content = pathlib.Path(picture).read_bytes()
    self.assertTrue(content.startswith(b"\x89PNG"))
    self.assertBetween(len(content), 10_000, 150_000)

  def test_goes_on_where_it_was_interrupted(self):
    output = self.path("runs.json")
    flags = ["--settings=digits_2", "--seeds=2", f"--output={output}"]
    with fake_measure() as measure:
      measure.side_effect = [
          made_up(batch_norm_experiment.SETTINGS["digits_2"], contender, 0,
                  None) for contender in ("one device", "whole batch")
      ] + [KeyboardInterrupt]
      with self.assertRaisesRegex(KeyboardInterrupt, "^$"):
        call_main(*flags)
    with fake_measure() as measure:
      status, stdout, stderr = call_main(*flags)
    self.assertEqual(status, 0, stderr)
    self.assertEqual([call.args[1:3] for call in measure.call_args_list],
                     [("per tower", 0), ("one device", 1), ("whole batch", 1),
                      ("per tower", 1)])
    self.assertStartsWith(stderr, "[3/6] ResNet-8 on digits")
    self.assertLen(json.loads(pathlib.Path(output).read_text()), 6)
    with fake_measure() as measure:
      self.assertEqual(call_main(*flags), (0, stdout, ""))
      measure.assert_not_called()
      # Another number of steps is another run.
      call_main(*flags, "--steps=9")
      self.assertEqual(measure.call_count, 6)

  def test_defaults(self):
    options = batch_norm_experiment.parse(["batch_norm_experiment.py"])
    self.assertEqual(options, batch_norm_experiment.Options())
    self.assertEqual(options.seeds, 3)
    self.assertEqual([(setting.dataset, setting.num_towers, setting.rows)
                      for setting in options.settings],
                     [("shapes", 8, 1), ("shapes", 8, 2), ("digits", 8, 2)])

  def test_help(self):
    status, stdout, stderr = call_main("--help")
    self.assertEqual((status, stderr), (0, ""))
    self.assertIn("python tools/batch_norm_experiment.py", stdout)
    for name in ("settings", "seeds", "steps", "output", "picture"):
      self.assertIn(f"--{name}:", stdout)

  @parameterized.named_parameters(
      ("unknown_flag", ["--seedz=3"], "Unknown command line flag 'seedz'"),
      ("no_flag", ["digits_2"], "there must be flags only: got digits_2"),
      ("no_seeds", ["--seeds=0"], "flag --seeds=0: 0 is not a positive"),
      ("no_steps", ["--steps=0"], "flag --steps=0: 0 is not a positive"),
      ("setting", ["--settings=digits_2,x"],
       "`--settings` must list .* shapes_1, .*got 'digits_2,x'"),
      ("no_setting", ["--settings="], "`--settings` must list .*: got ''"),
      ("twice", ["--settings=digits_2,digits_2"],
       "`--settings` must list different .*got 'digits_2,digits_2'"),
      ("output", ["--output=/no/where.json"],
       "`--output` must be a file that can be written to: got /no/where.json"),
      ("picture", ["--picture=/no/where.png"],
       "`--picture` must be a file that can be written to: got /no/where.png"),
      ("type", ["--picture=curves.xyz"],
       "`--picture` must end in .*, png, .*: got curves.xyz"),
  )
  def test_rejects_in_one_line(self, arguments, message):
    with fake_measure() as measure:
      status, stdout, stderr = call_main(*arguments)
    measure.assert_not_called()
    self.assertEqual((status, stdout), (2, ""))
    self.assertRegex(stderr, rf"^batch_norm_experiment.py: {message}.*\n$")

  @parameterized.parameters("{", "[1]", "{\"seed\": 1}", "[{\"key\": 1}]", "3")
  def test_rejects_a_file_of_something_else(self, text):
    """And leaves it as it is."""
    path = pathlib.Path(self.path("other.json"))
    path.write_text(text)
    status, stdout, stderr = call_main(f"--output={path}")
    self.assertEqual((status, stdout), (2, ""))
    self.assertRegex(stderr, "^batch_norm_experiment.py: `--output` must be a "
                     rf"new file, or one of an .*: got {path} .*\n$")
    self.assertEqual(path.read_text(), text)

  def test_needs_matplotlib_for_the_picture_only(self):
    with mock.patch.dict("sys.modules", {"matplotlib": None}), fake_measure():
      status, stdout, stderr = call_main("--picture=curves.png")
      self.assertEqual((status, stdout), (2, ""))
      self.assertRegex(
          stderr, "^batch_norm_experiment.py: `--picture` must not be given "
          r"without matplotlib: got curves.png .* pip install matplotlib\n$")
      self.assertEqual(call_main("--settings=digits_2")[0], 0)


if __name__ == "__main__":
  tf.test.main()
