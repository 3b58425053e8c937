"""Tests for towers.export_signature."""

import collections

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from towers import export_signature as signature
import towers

Pair = collections.namedtuple("Pair", ["image", "size"])

SPEC = tf.TensorSpec([None, 3], tf.float32)
NAMED = tf.TensorSpec([None, 3], tf.float32, "pixels")


def model_fn(images, sizes=None):
  return images, sizes


class InputsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(tf.Graph().as_default())

  @parameterized.named_parameters(
      ("single", SPEC, ["images"]),
      ("single_named", NAMED, ["pixels"]),
      ("list", [SPEC, NAMED], ["images", "pixels"]),
      ("tuple", (SPEC, SPEC), ["images", "sizes"]),
      ("more_than_parameters", [SPEC] * 3, ["images", "sizes", "input_2"]),
      ("dict", {"b": NAMED, "a": SPEC}, ["b", "a"]),
      ("nested", {"x": {"y": SPEC, "z": [SPEC, SPEC]}},
       ["x_y", "x_z_0", "x_z_1"]),
      ("named_tuple", Pair(SPEC, NAMED), ["image", "size"]),
      ("list_of_dicts", [{"x": SPEC}, {"x": SPEC}], ["images_x", "sizes_x"]),
      ("pairs", [(tf.float32, [None, 3]), ("int64", (None,))],
       ["images", "sizes"]),
      ("pair", (tf.float32, tf.TensorShape([None, 3])), ["images"]),
      ("unknown_rank", (tf.float32, None), ["images"]),
  )
  def test_keys(self, inputs, keys):
    made = signature.placeholders(inputs, model_fn)
    self.assertEqual(list(made.by_key), keys)
    self.assertEqual([x.op.name for x in made.by_key.values()],
                     [f"serving_default_{key}" for key in keys])
    self.assertEqual({x.op.type for x in made.by_key.values()}, {"Placeholder"})
    self.assertCountEqual(map(id, tf.nest.flatten(made.nest)),
                          map(id, made.by_key.values()))

  def test_nest_types_and_shapes(self):
    made = signature.placeholders(
        {"a": (tf.int64, [None, 2]), "b": Pair(SPEC, [NAMED])}, model_fn)
    self.assertEqual(made.nest["a"].dtype, tf.int64)
    self.assertEqual(made.nest["a"].shape.as_list(), [None, 2])
    self.assertIsInstance(made.nest["b"], Pair)
    self.assertIsInstance(made.nest["b"].size, list)

  def test_placeholders_of_another_graph(self):
    with tf.Graph().as_default(), tf.name_scope("scope"):
      other = tf.placeholder(tf.uint8, [None, 3], "pixels")
    made = signature.placeholders([other], model_fn)
    self.assertEqual(list(made.by_key), ["pixels"])
    self.assertIsNot(made.nest[0], other)
    self.assertEqual(made.nest[0].dtype, tf.uint8)

  def test_called_as_in_a_build(self):
    calls = lambda *x, **y: (x, y)
    self.assertEqual(signature.called(calls, [1, 2]), ((1, 2), {}))
    self.assertEqual(signature.called(calls, (1,)), ((1,), {}))
    self.assertEqual(signature.called(calls, {"a": 1}), (({"a": 1},), {}))
    self.assertEqual(signature.called(calls, 1), ((1,), {}))

  @parameterized.named_parameters(
      ("nothing", [], ValueError, r"`inputs` must hold at least one input: got "
       r"\[\]"),
      ("fixed", [tf.TensorSpec([4, 3])], ValueError,
       r"`inputs` must leave the batch size free: expected \[None, 3\] for "
       r"`images`, got \[4, 3\]"),
      ("scalar", {"rate": (tf.float32, [])}, ValueError,
       r"expected \[None\] for `rate`, got \[\]"),
      ("no_spec", {"x": 3.0}, TypeError, r"`inputs` must be a nest of .*got 3"),
      ("no_type", [("float33", [None])], TypeError,
       r"`inputs` must hold types with shapes: .*got \('float33', \[None\]\)"),
      ("twice", {"a": {"b": SPEC}, "a_b": SPEC}, ValueError,
       r"`inputs` must have a key each: several would have \['a_b'\]"),
  )
  def test_rejects(self, inputs, error, message):
    with self.assertRaisesRegex(error, message):
      signature.placeholders(inputs, model_fn)


class OutputsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(tf.Graph().as_default())

  def test_keys(self):
    x, y = tf.zeros([2, 3]), tf.zeros([])
    for returned, keys in (
        (x, ["output"]),
        ({"loss": y, "a": x, "b": {"c": y, "d": [x, x]}},
         ["a", "b_c", "b_d_0", "b_d_1"]),
        ([x, x], ["output_0", "output_1"]),
        (Pair(x, y), ["image", "size"]),
        (towers.TowerSpec(loss=y, outputs={"a": x}), ["a"]),
        (towers.TowerSpec(outputs=x), ["output"]),
        ({"a": 3}, ["a"])):
      with self.subTest(str(keys)):
        self.assertEqual(list(signature.outputs(returned)), keys)

  def test_each_is_an_op_of_its_own(self):
    x = tf.zeros([2, 3])
    outputs = signature.outputs({"a": x, "b c/d": x})
    self.assertLen({y.op.name for y in outputs.values()}, 2)
    self.assertEqual(outputs["a"].op.name, "a")

  def test_rejects(self):
    loss = tf.zeros([])
    for returned in (None, loss, {"loss": loss}, towers.TowerSpec(loss=loss)):
      with self.assertRaisesRegex(
          ValueError, "`model_fn` must return outputs to export: got"):
        signature.outputs(returned)
    sparse = tf.SparseTensor([[0, 0]], [1.0], [2, 3])
    for wrong in (sparse, object(), None, tf.no_op()):
      with self.assertRaisesRegex(
          TypeError, "`model_fn` must return dense tensors: got .* as `a`"):
        signature.outputs({"a": wrong})
    with self.assertRaisesRegex(ValueError, "`outputs` must have a key each"):
      signature.outputs({"a": {"b": loss}, "a_b": loss})


if __name__ == "__main__":
  absltest.main()
