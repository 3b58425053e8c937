"""Tests that every small model in towers equals one device, or is refused.

Models, numbers of towers and batches are drawn, the same in each run;
`python tests/nightly.py` draws others, and many more.
"""

import collections

from absl.testing import absltest
import hypothesis
from hypothesis import strategies as st

import property_cases
import random_models

# The first failure is told; what hypothesis would do to shrink it can take
# minutes, and `tests/nightly.py` does it as well.
SETTINGS = dict(
    deadline=None, database=None, derandomize=True, print_blob=False,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck))


class EveryModelTest(absltest.TestCase):

  def check(self, examples, **fixed):
    outcomes = collections.Counter()

    @hypothesis.settings(max_examples=examples, **SETTINGS)
    @hypothesis.given(random_models.cases(**fixed))
    def holds(case):
      outcomes[property_cases.check(case)] += 1

    holds()
    return outcomes

  def test_equals_one_device_or_is_refused(self):
    outcomes = self.check(150, double=st.just(True))
    self.assertGreater(outcomes["equal"], 100)
    self.assertGreater(outcomes["refused"], 0)

  def test_equals_one_device_in_float32(self):
    outcomes = self.check(60, double=st.just(False))
    self.assertGreater(outcomes["equal"], 40)


if __name__ == "__main__":
  absltest.main()
