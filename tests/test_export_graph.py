"""Tests for towers.export_graph."""

import warnings

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import export_cases as cases
import testing
import towers
from towers import export_graph

SPEC = cases.spec(4, 4, 3)
FIRST = cases.spec(3, 4, 6)


def classifier(x, *, axis, filters=5, training=False):
  """Convolution, pooling and two kinds of batch norm, in either layout."""
  data_format = "NCHW" if axis == 1 else "NHWC"
  x = tf.nn.conv2d(x, tf.get_variable("kernel", [3, 3, 3, filters]), strides=1,
                   padding="SAME", data_format=data_format)
  x = towers.batch_norm(x, training=training, axis=axis)
  x = tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "SAME", data_format=data_format)
  x = towers.batch_norm(x, training=training, axis=axis)
  return tf.matmul(tf.reduce_mean(x, [2, 3] if axis == 1 else [1, 2]),
                   tf.get_variable("weights", [filters, 2]))


def run(model, feeds, values):
  """Runs the outputs with variables that have these values by name."""
  with testing.session(model.graph) as session:
    for variable in model.variables:
      with model.graph.as_default():
        value = tf.placeholder(variable.dtype, variable.shape)
        session.run(variable.assign(value),
                    {value: values[variable.op.name]})
    return session.run(model.outputs, {
        model.inputs[key]: x for key, x in feeds.items()})


class BuildTest(parameterized.TestCase):

  @parameterized.product(filters=(5, 65), num_towers=(2, 3))
  def test_c041_channels_first_serves_as_channels_last(self, filters,
                                                       num_towers):
    """Trained in towers, channels first; both layouts then serve the same."""
    images = cases.images(7, (3, 4, 6))
    with tf.Graph().as_default():
      tf.set_random_seed(1)
      built = towers.build_towers(
          lambda x: tf.reduce_mean(tf.square(
              classifier(x, axis=1, filters=filters, training=True) - 1.0)),
          testing.devices(num_towers), inputs=[tf.constant(images)])
      train_op = built.minimize(tf.train.GradientDescentOptimizer(0.1))
      with testing.session(initialize=True) as session:
        session.run([train_op])
        session.run([train_op])
        values = {v.op.name: session.run(v) for v in tf.global_variables()}
    self.assertEqual(values["batch_normalization/moving_mean"].shape,
                     (filters,))
    first = export_graph.build(
        lambda x: classifier(x, axis=1, filters=filters), [FIRST])
    last = export_graph.build(
        lambda x: classifier(x, axis=-1, filters=filters),
        [cases.spec(4, 6, 3)])
    formats = {op.node_def.attr["data_format"].s
               for op in first.graph.get_operations()
               if "data_format" in op.node_def.attr}
    self.assertEqual(formats, {b"NHWC"})
    got = run(first, {"images": images}, values)["output"]
    expected = run(last, {"images": images.transpose([0, 2, 3, 1])}, values)
    self.assertTrue(np.isfinite(got).all())
    self.assertGreater(np.ptp(got), 1e-2)
    np.testing.assert_allclose(got, expected["output"], rtol=1e-5, atol=1e-5)

  def test_variables_have_the_names_of_training(self):
    """Whatever the names of inputs are, which are made before them."""
    model = export_graph.build(cases.small, [cases.spec(4, 4, 3,
                                                        name="kernel")])
    self.assertEqual(list(model.inputs), ["kernel"])
    self.assertIn("kernel", [v.op.name for v in model.variables])

  def test_variables_of_every_kind(self):
    def model_fn(x):
      with tf.variable_scope("scope", use_resource=False):
        x *= tf.get_variable("old", [3])
      x += tf.Variable([1.0, 2.0, 3.0], name="plain", trainable=False)
      return x * tf.get_variable("local", [3], collections=["own"])

    model = export_graph.build(model_fn, [cases.spec(3)])
    self.assertCountEqual([v.op.name for v in model.variables],
                          ["scope/old", "plain", "local"])
    types = {op.type for op in model.graph.get_operations()}
    self.assertNoCommonElements(types, ["Variable", "VariableV2"])
    trainable = model.graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
    self.assertEqual([v.op.name for v in trainable],
                     ["scope/old", "local"])
    got = run(model, {"images": np.ones([2, 3])}, {
        "scope/old": [1, 2, 3], "plain": [1, 1, 1], "local": [2, 2, 2]})
    np.testing.assert_allclose(got["output"], [[4, 6, 8]] * 2)

  def test_gradients_of_its_own_are_left_out(self):
    """A process without `towers` has not registered them."""
    model = export_graph.build(
        lambda x: classifier(x, axis=-1), [cases.spec(4, 6, 3)])
    self.assertEmpty([op.name for op in model.graph.get_operations()
                      if "_gradient_op_type" in op.node_def.attr])

  @parameterized.named_parameters(
      ("placeholder", lambda x: x * tf.placeholder(tf.float32, [], "rate"),
       "they need the Placeholder `rate`, and what to feed it with is no input"
       ".*Pass it in by `inputs`"),
      ("python", lambda x: tf.py_func(lambda y: y, [x], tf.float32),
       "they need the PyFunc `PyFunc`, and only this process has"),
      ("numpy", lambda x: tf.numpy_function(lambda y: y, [x], tf.float32),
       "they need the PyFunc.*, and only this process has"),
      ("data", lambda x: x + tf.data.make_one_shot_iterator(
          tf.data.Dataset.from_tensors([1.0, 2.0, 3.0])).get_next(),
       "they need the Iterator.*, and the model reads data of its own"),
      ("fixed", lambda x: tf.reshape(x, [4, 3]), "`model_fn` must leave the "
       r"batch size free: expected \[None, ...\] for the output `output`, got "
       r"\[4, 3\]"),
      ("no_variables", lambda x: x, r"`model_fn` must make variables for its "
       r"outputs: got \['output'\], which need none"),
  )
  def test_rejects(self, model_fn, message):
    with self.assertRaisesRegex(ValueError, message):
      export_graph.build(model_fn, [cases.spec(3)])

  def test_fixed_outputs_that_are_no_rows(self):
    def model_fn(x):
      weights = tf.get_variable("weights", [3, 2])
      rate = tf.placeholder_with_default(0.5, [], "rate")
      return {"scores": rate * tf.matmul(x, weights), "weights": weights}

    model = export_graph.build(model_fn, [cases.spec(3)])
    got = run(model, {"images": np.ones([1, 3])}, {"weights": np.ones([3, 2])})
    np.testing.assert_allclose(got["scores"], [[1.5, 1.5]])
    self.assertEqual(got["weights"].shape, (3, 2))

  def test_warns_of_batch_norm_in_training(self):
    def model_fn(x):
      kernel = tf.get_variable("kernel", [1, 1, 3, 2])
      x = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
      return tf.nn.fused_batch_norm(x, [1.0, 1.0], [0.0, 0.0], name="bn")[0]

    with self.assertWarnsRegex(
        UserWarning, "depend on which rows share a batch.*`bn`"):
      export_graph.build(model_fn, [SPEC])
    with warnings.catch_warnings():
      warnings.simplefilter("error", UserWarning)
      export_graph.build(cases.small, [SPEC])

  def test_warns_of_channels_first_that_stays(self):
    def model_fn(x):
      x = tf.ensure_shape(x * tf.get_variable("scale", []), None)
      return tf.raw_ops.BiasAdd(value=x, bias=[1.0, 2.0, 3.0],
                                data_format="NCHW", name="bias")

    with self.assertWarnsRegex(UserWarning, "channels first.*`bias`"):
      export_graph.build(model_fn, [tf.TensorSpec(None, tf.float32, "x")])

  def test_leaves_the_caller_as_it_was(self):
    with tf.Graph().as_default() as graph:
      cases.small(tf.zeros([2, 4, 4, 3]))
      before = len(graph.get_operations()), len(tf.global_variables())
      model = export_graph.build(cases.small, [SPEC])
      self.assertIs(tf.get_default_graph(), graph)
      self.assertEqual(
          (len(graph.get_operations()), len(tf.global_variables())), before)
    self.assertLen(model.variables, 6)

  def test_an_error_of_the_model_passes_as_it_is(self):
    def model_fn(x):
      raise KeyError("of the model")

    with self.assertRaisesRegex(KeyError, "of the model"):
      export_graph.build(model_fn, [SPEC])


if __name__ == "__main__":
  absltest.main()
