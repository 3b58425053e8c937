"""Tests for tools.command_line."""

import contextlib
import io

from absl import flags
from absl.testing import absltest
from absl.testing import parameterized

from tools import command_line


def call(*arguments, action=lambda values: values.number):
  """Returns status, standard output and standard error of a small tool."""
  values = command_line.flag_values()
  flags.DEFINE_integer("number", 3, "How many.", flag_values=values)
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = command_line.main(
        ["/tools/small.py", *arguments], values, text="Counts.\n",
        action=action)
  return status, out.getvalue(), err.getvalue()


class CommandLineTest(parameterized.TestCase):

  def test_status_is_that_of_the_action(self):
    self.assertEqual(call(), (3, "", ""))
    self.assertEqual(call("--number=5"), (5, "", ""))

  @parameterized.parameters("--help", "-h")
  def test_help(self, flag):
    status, out, err = call(flag, action=lambda values: self.fail())
    self.assertEqual((status, err), (0, ""))
    self.assertStartsWith(out, "Counts.\n")
    self.assertIn("--number: How many.", out)

  @parameterized.parameters(
      ("--numbers=2", "Unknown command line flag 'numbers'"),
      ("--number=x", "flag --number=x: "),
      ("x", "there must be flags only: got x. Write --flag=value."))
  def test_bad_flags_are_one_line(self, argument, message):
    status, out, err = call(argument, action=lambda values: self.fail())
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^small.py: {message}.*\n$")

  def test_usage_error_of_the_action(self):

    def action(unused_values):
      raise command_line.UsageError("`--number` must be prime: got 4.")

    self.assertEqual(
        call(action=action),
        (2, "", "small.py: `--number` must be prime: got 4.\n"))

  def test_check_writable(self):
    folder = self.create_tempdir().full_path
    command_line.check_writable("json", None)
    command_line.check_writable("json", f"{folder}/new.json")
    with self.assertRaisesRegex(
        command_line.UsageError, "`--json` must be a file that can be written "
        r"to: got .*/no/file \(No such file or directory\)"):
      command_line.check_writable("json", f"{folder}/no/file")


if __name__ == "__main__":
  absltest.main()
