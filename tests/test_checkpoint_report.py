"""Tests for towers.checkpoint_report."""

from absl.testing import absltest

from towers import checkpoint_report


class ReportTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.report = checkpoint_report.Report(
        checkpoint="old/ckpt-7", sources={"a": "a", "b": "tower_0/b"},
        initial=("b/Adam",), excluded=("head",),
        different={"c": checkpoint_report.Difference(
            "c", "float32[3]", "float32[4]")},
        copies={"b": ("tower_1/b",)}, unused=("b/Momentum",))

  def test_restored_and_renamed(self):
    self.assertEqual(self.report.restored, ("a",))
    self.assertEqual(self.report.renamed, {"b": "tower_0/b"})

  def test_table(self):
    self.assertEqual(str(self.report).splitlines(), [
        "what           variable  key in the file",
        "restored       a         a",
        "renamed        b         tower_0/b",
        "equal copy     b         tower_1/b",
        "shape differs  c         c: float32[3], not float32[4]",
        "initial value  b/Adam",
        "excluded       head",
        "left over                b/Momentum",
        "1 restored, 1 renamed, 1 at their initial value, 1 of other shape, "
        "1 excluded, 1 left over in old/ckpt-7.",
    ])


if __name__ == "__main__":
  absltest.main()
