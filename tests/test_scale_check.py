"""Tests for tools/scale_check.py: the formula against runs over loopback."""

import contextlib
import io
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tools import private_network
from tools import scale_check


def run(*arguments):
  """Returns status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = scale_check.main(["scale_check.py", *arguments])
  return status, out.getvalue(), err.getvalue()


class ScaleCheckTest(parameterized.TestCase):

  def test_measures_and_predicts(self):
    status, out, err = run(
        "--noprivate_network", "--model=unet_small", "--rows=2", "--steps=3",
        "--placements=shared,replicated+packed")
    self.assertEqual((status, err), (0, ""))
    self.assertRegex(
        out, r"^unet_small, 2 towers of 2 rows\. The link: \d+ us from host to "
        r"host, [\d.]+ us a message, [\d.]+ Gbit/s\. Compute: \d+\.\d{4} s\.")
    rows = [line.split(" | ") for line in out.splitlines()[4:]]
    self.assertEqual([row[0] for row in rows],
                     ["| shared", "| replicated+packed"])
    for _, messages, chain, predicted, measured in rows:
      least, most = map(float, predicted.split(" to "))
      self.assertGreater(int(messages), int(chain))
      self.assertGreaterEqual(most, least)
      self.assertGreater(float(measured.rstrip(" |")), 0.0)

  @parameterized.named_parameters(
      ("servers", ["--placements=shared,servers+packed"],
       "`--placements` must be without servers, .*: got servers.packed"),
      ("unknown", ["--placements=other"], "`--placements` must list some of"),
      ("rows", ["--rows=0"], "rows"))
  def test_rejects(self, arguments, message):
    status, out, err = run(*arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^scale_check.py: .*{message}")
    self.assertLen(err.strip().splitlines(), 1)

  def test_rejects_where_there_is_no_private_network(self):
    refused = mock.patch.object(private_network, "enter",
                                side_effect=OSError("not permitted"))
    with refused:
      status, _, err = run("--placements=shared")
    self.assertEqual(status, 2)
    self.assertRegex(err, "`--private_network` must be possible here: got an "
                     r"error \(not permitted\)\. Give `--noprivate_network`")


if __name__ == "__main__":
  absltest.main()
