"""Tests for towers.verification_report."""

from absl.testing import absltest

from towers import verification_causes as causes
from towers import verification_check as check
from towers import verification_report

NAN = float("nan")
COMPARED = {"loss": 1, "output": 0, "gradient": 2, "update": 1}


class ReportTest(absltest.TestCase):

  def test_equal(self):
    report = verification_report.Report(
        3, (7, 6, 2, 1), COMPARED, ("dropout/RandomUniform",), (),
        ("Something else.",))
    self.assertTrue(report.equal)
    self.assertEmpty(report.causes)
    self.assertEqual(str(report), """\
3 towers compute what one device computes.

Compared: the loss, 2 gradients and 1 variable after the update ops, for batches
of 7, 6, 2 and 1 rows.
Random numbers held equal: dropout/RandomUniform.
Note: Something else.
""")

  def test_differs(self):
    mean = causes.make("statistic_of_own_rows", "layer/Mean", "Mean", 3)
    error = causes.make("towers_differ", "")
    differences = [
        check.Difference("loss", "loss", 7, 0.25, 1e-5, (), mean),
        check.Difference("gradient", "w", 7, NAN, 0.0, (3, 1), mean),
        check.Difference("error", "towers", None, NAN, 0.0, (), error, "No.")]
    report = verification_report.Report(2, (7,), COMPARED, (), differences, ())
    self.assertFalse(report.equal)
    self.assertEqual(report.causes, [mean, error])
    self.assertEqual(str(report), """\
2 towers do not compute what one device computes.

Compared: the loss, 2 gradients and 1 variable after the update ops, for batches
of 7 rows.

1. statistic_of_own_rows: `layer/Mean` (Mean) takes a statistic over the rows of
a tower, which then goes into each of its rows; one device takes it over the
whole batch.
   Use `towers.moments`, `towers.all_reduce` or `towers.all_gather`.

   rows  what differs  name  difference  allowed  at
   7     loss          loss  0.25        1e-05
   7     gradient      w                          [3, 1]

2. towers_differ: The model cannot be built in towers.
   Follow the message; the model must take the same path in each tower.

   rows  what differs  name    difference  allowed  at
         error         towers
   No.
""")

  def test_many_differences_of_a_cause_are_counted(self):
    cause = causes.make("sum_over_rows", "Sum", "Sum")
    differences = [
        check.Difference("gradient", f"w_{k}", 7, 1.0, 0.1, (), cause)
        for k in range(30)]
    text = str(verification_report.Report(2, (7,), COMPARED, (), differences,
                                          ()))
    self.assertIn("   and 22 more\n", text)


if __name__ == "__main__":
  absltest.main()
