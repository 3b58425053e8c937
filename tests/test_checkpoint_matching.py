"""Tests for towers.checkpoint_matching."""

from absl.testing import absltest
from absl.testing import parameterized

from towers import checkpoint_matching


def match(keys, names, **options):
  return checkpoint_matching.match(keys, names, **options)


class MatchTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("same", ["w", "b"], {"w": ["w"], "b": ["b"]}),
      ("towers", ["tower_1/w", "tower_0/w", "tower_10/w"],
       {"w": ["tower_0/w", "tower_1/w", "tower_10/w"]}),
      ("own_name_first", ["tower_0/w", "w"], {"w": ["w", "tower_0/w"]}),
      ("own_scope_is_no_tower", ["v1/w", "w"], {"w": ["w"], "v1/w": ["v1/w"]}),
      ("synonyms", ["bn/mean/EMA"], {"bn/moving_mean": ["bn/mean/EMA"]}),
      ("other_way", ["bn/moving_mean"], {"bn/mean/EMA": ["bn/moving_mean"]}),
      ("synonyms_in_towers", ["tower1/c/W", "c/W"],
       {"c/kernel": ["c/W", "tower1/c/W"]}),
      ("name_before_synonym", ["weights", "kernel"], {"kernel": ["kernel"]}),
      ("both_synonyms_are_names", ["tower_0/weights", "tower_0/kernel"],
       {"kernel": ["tower_0/kernel"], "weights": ["tower_0/weights"]}),
      ("nothing", ["x"], {}),
  )
  def test_names(self, keys, expected):
    names = list(expected) or ["w"]
    self.assertEqual(match(keys, names).keys, expected)

  @parameterized.named_parameters(
      ("second", 1, ["tower_1/w"], ["tower_0/w", "w"]),
      ("first", 0, ["w", "tower_0/w"], ["tower_1/w"]),
      ("all", None, ["w", "tower_0/w", "tower_1/w"], []),
  )
  def test_tower(self, tower, expected, dropped):
    got = match(["w", "tower_0/w", "tower_1/w"], ["w"], tower=tower)
    self.assertEqual(got, ({"w": expected}, dropped))

  def test_tower_leaves_what_has_one_copy(self):
    got = match(["step", "w", "w/replica_1", "v7/own"],
                ["step", "w", "v7/own"], tower=1)
    self.assertEqual(got.keys, {"step": ["step"], "w": ["w/replica_1"],
                                "v7/own": ["v7/own"]})

  @parameterized.named_parameters(
      ("second_model", ["conv2d", "conv2d_1"], ["conv2d_2", "conv2d_3"]),
      ("more_than_ten", ["dense_9", "dense_10"], ["dense", "dense_1"]),
      ("in_models", ["model_1/dense", "model_1/dense_1"],
       ["model/dense_4", "model/dense_5"]),
      ("in_a_tower", ["tower_1/dense_1", "tower_1/dense_2"],
       ["dense_3", "dense_4"]),
      ("other_kinds_between", ["dense_1", "a/dense", "conv2d"],
       ["dense", "a/dense", "conv2d_1"]),
  )
  def test_layers_follow_in_order(self, there, here):
    leaves = ("kernel", "bias", "kernel/Adam")
    got = match([f"{s}/{leaf}" for s in there for leaf in leaves],
                [f"{s}/{leaf}" for s in here for leaf in leaves])
    self.assertEqual(got.keys, {
        f"{name}/{leaf}": [f"{key}/{leaf}"]
        for key, name in zip(there, here) for leaf in leaves})

  def test_slots_need_not_be_there(self):
    got = match(["dense_1/kernel", "dense_1/kernel/Momentum"],
                ["dense/kernel", "dense/kernel/Adam"])
    self.assertEqual(got.keys, {"dense/kernel": ["dense_1/kernel"]})

  def test_named_layers_keep_their_numbers(self):
    self.assertEqual(match(["block_2/w"], ["block_1/w"]).keys, {})

  def test_towers_that_number_layers(self):
    """Each tower made layers of its own; this model is the first one's."""
    got = match(["dense/kernel", "dense_1/kernel", "dense_2/kernel"],
                ["dense/kernel"])
    self.assertEqual(got.keys, {"dense/kernel": ["dense/kernel"]})

  def test_overlap(self):
    keys = ["dense_1/kernel", "dense_2/kernel"]
    names = ["dense/kernel", "dense_1/kernel"]
    with self.assertRaisesRegex(
        ValueError, "`dense` layers must correspond: expected `dense`, "
        "`dense_1`, got `dense_1`, `dense_2` .* in part, and all by their "
        "order. Give `renumber_layers=True`"):
      match(keys, names)
    self.assertEqual(match(keys, names, renumber_layers=True).keys,
                     dict(zip(names, ([key] for key in keys))))
    self.assertEqual(match(keys, names, renumber_layers=False).keys,
                     {"dense_1/kernel": ["dense_1/kernel"]})

  def test_other_number_of_layers(self):
    keys, names = ["dense/kernel", "dense_1/kernel"], ["dense_2/kernel"]
    with self.assertRaisesRegex(
        ValueError, "expected `dense_2`, got `dense`, `dense_1` in the "
        "checkpoint, which are not as many. Say which is which by `renames`"):
      match(keys, names)
    self.assertEqual(match(keys, names, renumber_layers=False).keys, {})

  def test_one_layer_for_two(self):
    with self.assertRaisesRegex(
        ValueError, "expected `dense_1`, `dense_2`, got `dense` in"):
      match(["dense/kernel"], ["dense_1/kernel", "dense_2/kernel"])

  def test_one_key_for_two_variables(self):
    with self.assertRaisesRegex(
        ValueError, "`fc/W` of the checkpoint must fit one variable: it fits "
        "`fc/kernel`, `fc/weights`. Say which by `renames`"):
      match(["fc/W"], ["fc/kernel", "fc/weights"])

  def test_rejects_a_tower_that_is_not_there(self):
    with self.assertRaisesRegex(
        ValueError, r"`tower` must .*expected one of \[0, 2\], got 1"):
      match(["w", "tower_2/w"], ["w"], tower=1)


if __name__ == "__main__":
  absltest.main()
