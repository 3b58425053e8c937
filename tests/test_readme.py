"""Tests that what the README shows is what happens."""

import os
import pathlib
import re
import subprocess
import sys

from absl.testing import absltest
import towers

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

# (language, text) of every fenced block.
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands():
  """Returns the lines of all shell blocks."""
  return [line for language, text in BLOCKS if language == "sh"
          for line in text.splitlines()]


def run_python(source, folder):
  """Runs `source` in a process of its own and returns what it prints."""
  path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
  environment = dict(
      os.environ,
      PYTHONPATH=os.pathsep.join(filter(None, path)),
      TF_CPP_MIN_LOG_LEVEL="2")
  process = subprocess.run(
      [sys.executable, "-c", source],
      cwd=folder,
      env=environment,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      check=False)
  if process.returncode:
    raise RuntimeError(f"The README's example failed:\n{process.stderr}")
  return process.stdout


class CommandsTest(absltest.TestCase):

  def test_two_commands_one_line_each(self):
    self.assertEqual(commands(), [
        'pip install -e ".[train]" && python tools/train.py',
        'pip install -e ".[test]" && python -m pytest tests',
    ])

  def test_commands_stand_on_the_first_screen(self):
    self.assertLess(README.index(commands()[1]), README.index("\n## "))
    self.assertLessEqual(README[:README.index("\n## ")].count("\n"), 40)

  def test_ci_runs_these_commands(self):
    printed = subprocess.run(
        ["bash", str(ROOT / ".ci" / "run"), "commands"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True).stdout
    self.assertEqual(printed.splitlines(), commands())

  def test_commands_use_files_and_extras_that_exist(self):
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for command in commands():
      with self.subTest(command):
        extra = re.search(r'"\.\[(\w+)\]"', command).group(1)
        self.assertIn(f'"{extra}": ', setup)
        self.assertTrue((ROOT / command.split()[-1]).exists())


class ExampleTest(absltest.TestCase):

  def test_example_prints_its_output(self):
    languages = [language for language, _ in BLOCKS]
    self.assertEqual(languages.count("python"), 1)
    example = languages.index("python")
    self.assertEqual(languages[example + 1], "text")
    # From another folder: the example needs nothing of the checkout.
    printed = run_python(BLOCKS[example][1], self.create_tempdir().full_path)
    self.assertEqual(printed, BLOCKS[example + 1][1])

  def test_example_is_short_and_stands_near_the_top(self):
    example = next(text for language, text in BLOCKS if language == "python")
    self.assertLess(len(example.splitlines()), 30)
    self.assertLess(README[:README.index(example)].count("\n"), 60)


class PromisesTest(absltest.TestCase):

  def test_names_of_the_package_exist(self):
    for name in sorted(set(re.findall(r"\btowers\.(\w+)", README))):
      with self.subTest(name):
        self.assertTrue(hasattr(towers, name))

  def test_tested_versions_are_those_of_ci(self):
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    oldest = re.search(r"^readonly OLDEST=(\S+)$", script, re.MULTILINE)
    newest = re.search(r"^readonly NEWEST=(\S+)$", script, re.MULTILINE)
    self.assertIn(
        f"Tested with TensorFlow {oldest.group(1)} and {newest.group(1)}",
        README)


if __name__ == "__main__":
  absltest.main()
