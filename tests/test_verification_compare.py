"""Tests for towers.verification_compare."""

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from towers import verification_compare as compare

ALLOWED = compare.tolerances(None)
NAN, INF = float("nan"), float("inf")


def floats(*values):
  return np.array(values, np.float32)


class GapTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("equal", floats(1, 2), floats(1, 2)),
      ("within_relative", floats(1000, 0), floats(1000, 0.09)),
      ("within_absolute", floats(0, 0), floats(0, 9e-6)),
      ("nan", floats(NAN, 1), floats(NAN, 1)),
      ("infinity", floats(INF, -INF), floats(INF, -INF)),
      ("nothing", floats(), floats()),
      ("integers", np.array([1, 2]), np.array([1, 2])),
      ("texts", np.array([b"a"], object), np.array([b"a"], object)),
      ("bfloat16", np.array([1.0]).astype(tf.bfloat16.as_numpy_dtype),
       np.array([1.01]).astype(tf.bfloat16.as_numpy_dtype)),
      ("complex", np.array([1j], np.complex64), np.array([1j], np.complex64)),
  )
  def test_equal(self, expected, actual):
    self.assertIsNone(compare.gap(expected, actual, ALLOWED))

  @parameterized.named_parameters(
      ("value", floats(1, 2, 3), floats(1, 2.5, 3), 0.5, (1,)),
      ("beyond_relative", floats(1000, 0), floats(1000, 0.2), 0.2, (1,)),
      ("nan_in_one", floats(1, NAN), floats(1, 1), NAN, (1,)),
      ("sign_of_infinity", floats(INF), floats(-INF), NAN, (0,)),
      ("nan_beside_a_value", floats(NAN, 1), floats(NAN, 3), 2.0, (1,)),
      ("shape", floats(1), floats(1, 1), NAN, ()),
      ("type", floats(1), np.array([1.0]), NAN, ()),
      ("integers", np.array([1, 2]), np.array([1, 5]), 3.0, (1,)),
      ("booleans", np.array(True), np.array(False), 1.0, ()),
      ("texts", np.array([b"a"], object), np.array([b"b"], object), NAN, (0,)),
  )
  def test_differs(self, expected, actual, largest, index):
    found = compare.gap(expected, actual, ALLOWED)
    np.testing.assert_allclose(found.largest, largest, rtol=1e-5)
    self.assertEqual(found.index, index)

  def test_tolerances_are_put_in(self):
    allowed = compare.tolerances({tf.float32: 0.5, "int32": (0.0, 1.0)})
    self.assertEqual(allowed[tf.float32], (0.5, 1e-5))
    self.assertEqual(allowed[tf.float64], compare.DEFAULTS[tf.float64])
    self.assertIsNone(compare.gap(np.int32(4), np.int32(5), allowed))
    self.assertIsNotNone(compare.gap(np.int32(4), np.int32(6), allowed))

  def test_rejects_tolerances(self):
    with self.assertRaisesRegex(TypeError, "`tolerances` must map.* got 0.1"):
      compare.tolerances(0.1)
    with self.assertRaisesRegex(TypeError, "`tolerances` .* type 'none'"):
      compare.tolerances({"none": 0.1})
    for value in (-1.0, "x", (1.0, 2.0, 3.0)):
      with self.assertRaisesRegex(
          ValueError, "`tolerances` .* of 0 or more: got .*float32"):
        compare.tolerances({tf.float32: value})


class SharesTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("even", 6, 3, [(0, 2, 2), (2, 4, 2), (4, 6, 2)]),
      ("uneven", 7, 3, [(0, 3, 3), (3, 5, 2), (5, 7, 2)]),
      ("short", 2, 3, [(0, 1, 1), (1, 2, 1), (1, 2, 0)]),
      ("one_row", 1, 2, [(0, 1, 1), (0, 1, 0)]),
      ("no_inputs", None, 2, [(0, 1, 1), (1, 2, 1)]),
  )
  def test_deals_rows(self, rows, count, expected):
    self.assertEqual(compare.shares(rows, count), expected)

  @parameterized.named_parameters(
      ("rows", [7, 2], 0, 1), ("second_axis", [4, 7, 2], 1, 1),
      ("several_places", [21, 2], 0, 3))
  def test_cut_and_joined_are_inverse(self, shape, axis, factor):
    dealt = compare.shares(7, 3)
    value = np.arange(np.prod(shape)).reshape(shape)
    parts = compare.cut(value, (axis, factor), dealt)
    self.assertEqual(
        compare.layout(shape, [part.shape for part in parts], dealt),
        (axis, factor))
    np.testing.assert_array_equal(
        compare.joined(parts, (axis, factor), dealt)[0], value)

  def test_borrowed_rows_are_left_out(self):
    dealt = compare.shares(2, 3)
    value = np.arange(2)
    parts = compare.cut(value, (0, 1), dealt)
    self.assertEqual([list(part) for part in parts], [[0], [1], [1]])
    np.testing.assert_array_equal(
        compare.joined(parts, (0, 1), dealt)[0], value)


class RelationTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("equal", floats(1), [floats(1), floats(1)], compare.EQUAL),
      ("rows", floats(1, 2, 3), [floats(1, 2), floats(3)], compare.ROWS),
      ("second_axis", floats([1, 2, 3]), [floats([1, 2]), floats([3])],
       compare.ROWS),
      ("blocks", floats(1, 2, 3, 4, 5, 6), [floats(1, 2, 4, 5), floats(3, 6)],
       compare.ROWS),
      ("some_rows", floats(1, 3), [floats(1), floats(3)], compare.ROWS),
      ("none_of_them", floats(1, 3), [floats(1, 3), floats()], compare.ROWS),
      ("mean", floats(2), [floats(1), floats(4)], compare.MEAN),
      ("mean_of_nan", floats(NAN), [floats(1), floats(NAN)], compare.MEAN),
      ("sum", floats(5), [floats(1), floats(4)], compare.SUM),
      ("number_of_rows", np.array(3), [np.array(2), np.array(1)], compare.SUM),
      ("other_rows", floats(1, 2, 3), [floats(1, 2), floats(2)],
       compare.OTHER_ROWS),
      ("order", floats(1, 2, 3), [floats(2, 1), floats(3)],
       compare.OTHER_ROWS),
      ("pairs", np.ones([3, 3]), [np.ones([2, 2]), np.ones([1, 1])],
       compare.OTHER_SHAPE),
      ("other", floats(7), [floats(1), floats(4)], compare.OTHER),
      ("booleans", np.array(True), [np.array(False), np.array(True)],
       compare.OTHER),
  )
  def test_of_two_towers_with_two_rows_and_one(self, whole, parts, expected):
    relation = compare.relation(whole, parts, compare.shares(3, 2), ALLOWED)
    self.assertEqual(relation.kind, expected)
    self.assertEqual(relation.gap is None, expected in (
        compare.EQUAL, compare.ROWS, compare.OTHER_SHAPE))

  def test_mean_by_weights(self):
    relation = compare.relation(
        floats(3.0), [floats(1.0), floats(4.0)], compare.shares(3, 2), ALLOWED,
        weights=[1.0, 2.0])
    self.assertEqual(relation.kind, compare.MEAN)

  def test_a_tower_without_rows_does_not_matter(self):
    relation = compare.relation(
        floats(1, 2), [floats(1), floats(2), floats(9)], compare.shares(2, 3),
        ALLOWED)
    self.assertEqual(relation.kind, compare.ROWS)


if __name__ == "__main__":
  tf.test.main()
