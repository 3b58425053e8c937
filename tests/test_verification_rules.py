"""Tests for towers.verification_rules."""

from absl.testing import absltest
from absl.testing import parameterized

from towers import verification_rules as rules_lib
import verification_cases as cases


class RulesTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (name, rule) for name, rule in rules_lib.RULES.items())
  def test_reads_as_sentences(self, rule):
    self.assertRegex(rule.why, r"^[a-z].*[.]$")
    self.assertRegex(rule.remedy, r"^[A-Z].*[.]$")

  def test_planted_faults_are_of_most_rules(self):
    tested = {case.rule for case in cases.FAULTS.values()}
    self.assertContainsSubset(tested, rules_lib.RULES)
    self.assertGreater(len(tested), 16)


if __name__ == "__main__":
  absltest.main()
