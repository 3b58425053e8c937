"""Tests for towers.checkpoint_plan, by `towers.checkpoints.plan`."""

import os

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import checkpoint_cases
from checkpoint_cases import value
from towers import checkpoint_plan

plan = checkpoint_plan.plan
W = {"w": [2, 3]}


class PlanTest(parameterized.TestCase):

  def write(self, values):
    return checkpoint_cases.write(
        os.path.join(self.create_tempdir().full_path, "model"), values)

  def test_needs_no_session_and_adds_no_ops(self):
    path = self.write({"tower_0/w": value(0), "tower_1/w": value(0),
                       "tower_0/w/Momentum": value(1)})
    with tf.Graph().as_default() as graph:
      tf.get_variable("w", [2, 3])
      tf.get_variable("w/Adam", [2, 3], trainable=False)
      before = len(graph.get_operations())
      report = plan(path)
      self.assertLen(graph.get_operations(), before)
    self.assertEqual(report.checkpoint, path)
    self.assertEqual(report.renamed, {"w": "tower_0/w"})
    self.assertEqual(report.initial, ("w/Adam",))
    self.assertEqual(report.copies, {"w": ("tower_1/w",)})
    self.assertEqual(report.unused, ("tower_0/w/Momentum",))

  @parameterized.named_parameters(
      ("not_a_number", np.float32([np.nan, 1]), np.float32([np.nan, 1]), True),
      ("minus_zero", np.float32([0]), np.float32([-0.0]), False),
      ("one_bit", np.float32([1]), np.nextafter(np.float32([1]), 2), False),
      ("text", np.array([b"a", b"b"]), np.array([b"a", b"b"]), True),
      ("other_text", np.array([b"a", b"b"]), np.array([b"a", b"c"]), False),
      ("one_text", np.array(b"a"), np.array(b"a"), True),
      ("other_type", np.float32([1]), np.float64([1]), False),
      ("other_shape", np.float32([1]), np.float32([[1]]), False),
  )
  def test_copies_must_be_equal_in_every_bit(self, one, other, equal):
    path = self.write({"tower_0/w": one, "tower_1/w": other})
    variables = {"w": one.shape}
    if equal:
      self.assertEqual(plan(path, variables=variables).copies,
                       {"w": ("tower_1/w",)})
    else:
      with self.assertRaisesRegex(
          ValueError, "`checkpoint` must hold one value for each variable: "
          f"{path} has several, which differ, for 1: `w` by `tower_0/w`, "
          "`tower_1/w`. Say whose to take by `tower`"):
        plan(path, variables=variables)
    self.assertEqual(
        plan(path, variables=variables, tower=0).sources, {"w": "tower_0/w"})

  def test_a_name_without_a_tower_competes_too(self):
    path = self.write({"w": value(0), "tower_1/w": value(1)})
    with self.assertRaisesRegex(ValueError, "differ, .* by `w`, `tower_1/w`"):
      plan(path, variables=W)
    self.assertEqual(plan(path, variables=W, tower=1).sources,
                     {"w": "tower_1/w"})
    self.assertEqual(plan(path, variables=W, exclude="tower_1").sources,
                     {"w": "w"})

  def test_another_variable_of_the_graph_keeps_its_value(self):
    """Here `v1/w` is no copy of `w`, whichever of them is restored."""
    path = self.write({"w": value(0), "v1/w": value(1)})
    with tf.Graph().as_default():
      w = tf.get_variable("w", [2, 3])
      tf.get_variable("v1/w", [2, 3])
      self.assertEqual(plan(path, variables=[w]).sources, {"w": "w"})
      self.assertEqual(plan(path, include="^w").sources, {"w": "w"})

  def test_include_and_exclude(self):
    path = self.write({"net/a": value(0), "net/b": value(1), "head": value(2)})
    shapes = {"net/a": [2, 3], "net/b": [2, 3], "head": [7]}
    report = plan(path, variables=shapes, include="^net/", exclude=["b$"])
    self.assertEqual(report.sources, {"net/a": "net/a"})
    self.assertEqual(report.excluded, ("net/b", "head"))
    self.assertEqual(report.unused, ("head", "net/b"))

  def test_renames(self):
    path = self.write({"tower_0/resnet/w": value(0), "x": value(1)})
    report = plan(path, variables={"model/w": [2, 3]},
                  renames={"resnet": "net", "(^|/)net/": r"\1model/"})
    self.assertEqual(report.sources, {"model/w": "tower_0/resnet/w"})

  def test_cleaned_names(self):
    path = self.write({"tower_0/bn/mean/EMA": value(0), "v1/x": value(1)})
    renames = {"bn": "norm"}
    variables = checkpoint_plan.cleaned_names(path, renames=renames)
    report = plan(path, variables=variables, renames=renames)
    self.assertEqual(report.sources, {
        "norm/moving_mean": "tower_0/bn/mean/EMA", "x": "v1/x"})

  def test_other_shapes(self):
    path = self.write({"a": value(0), "tower_0/w": value(0), "b": value(0)})
    shapes = {"a": [2, 3], "w": [3, 2], "b": [2]}
    with self.assertRaisesRegex(
        ValueError, "must hold values of the variables' shapes and types: "
        rf"{path} has others for 2: `w` \(float32\[3, 2\]\) by `tower_0/w` "
        r"\(float32\[2, 3\]\); `b` .*Leave them out by `exclude`"):
      plan(path, variables=shapes)
    report = plan(path, variables=shapes, allow_different_shapes=True)
    self.assertEqual(report.sources, {"a": "a"})
    self.assertEqual(report.different["w"],
                     ("tower_0/w", "float32[2, 3]", "float32[3, 2]"))
    self.assertEmpty(report.initial)
    self.assertEmpty(report.unused)

  def test_other_types(self):
    path = self.write({"w": value(0).astype("float64")})
    with tf.Graph().as_default():
      tf.get_variable("w", [2, 3])
      with self.assertRaisesRegex(
          ValueError, r"`w` \(float32\[2, 3\]\) by `w` \(float64\[2, 3\]\)"):
        plan(path)

  def test_missing_variables_of_the_model(self):
    path = self.write({"a": value(0), "c": value(1)})
    shapes = {"a": [2, 3], "b": [2, 3], "b/Adam": [2, 3]}
    with self.assertRaisesRegex(
        ValueError, f"must hold the variables of the model: {path} lacks 1: "
        "`b`. Left over are 1 keys: `c`. Map names by `renames`, .*or pass "
        "`allow_missing=True`"):
      plan(path, variables=shapes)
    report = plan(path, variables=shapes, allow_missing=True)
    self.assertEqual(report.initial, ("b", "b/Adam"))

  def test_nothing_found(self):
    path = self.write({"a": value(0)})
    with self.assertRaisesRegex(
        ValueError, f"must hold at least one of the variables: {path} holds "
        "`a`, and asked for is `w`"):
      plan(path, variables=W, allow_missing=True)

  def test_long_lists_are_cut(self):
    path = self.write({"a": value(0)})
    with self.assertRaisesRegex(ValueError, "lacks 13: `w0`, .* and 3 more. L"):
      plan(path, variables={f"w{k}": [1] for k in range(13)})

  @parameterized.named_parameters(
      ("include", dict(include="("), r"`include` must be regular .* got '\('"),
      ("exclude", dict(exclude=["a", "["]), r"`exclude` must .* got '\['"),
      ("include_finds_nothing", dict(include=["w", "x"]),
       "`include` must find the name of a variable: got 'x', .* none of `w`"),
      ("renames", dict(renames={"*": ""}), "`renames` must be regular"),
      ("replacement", dict(renames={"w": r"\3"}),
       r"`renames` must map .*: got '\\\\3' for 'w'"),
      ("renames_to_one", dict(renames={"^.*$": "w"}),
       "`renames` must leave each key a name of its own: it makes `a`, `w` "
       "the same, `w`"),
      ("tower", dict(tower=5), "`tower` must be one whose copies"),
  )
  def test_rejects(self, options, message):
    path = self.write({"a": value(0), "w": value(1)})
    with self.assertRaisesRegex(ValueError, message):
      plan(path, variables=W, **options)


if __name__ == "__main__":
  tf.test.main()
