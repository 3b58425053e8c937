"""Tests for towers.verification_runs."""

import collections

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

from towers import verification_runs as runs

X = np.arange(6, dtype=np.float32).reshape(3, 2)


def model_fn(x):
  w = tf.get_variable("w", [2, 1], initializer=tf.random_normal_initializer())
  tf.get_variable("unused", [], initializer=tf.ones_initializer())
  steps = tf.get_variable("steps", [], trainable=False,
                          initializer=tf.zeros_initializer())
  tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, steps.assign_add(1.0))
  scores = tf.matmul(x, w, name="scores")
  return {"loss": tf.reduce_mean(scores), "scores": scores}


def side(count, model=model_fn, **changes):
  arguments = dict(inputs=X, rows=None, seed=1, losses=None, options={})
  return runs.Side(model, [f"/cpu:{k}" for k in range(count)],
                   **{**arguments, **changes})


class SideTest(parameterized.TestCase, tf.test.TestCase):

  def test_same_values_give_the_same_results(self):
    one, many = side(1), side(2)
    one.initialize()
    many.initialize()
    values = one.values()
    self.assertCountEqual(values, ["w", "unused", "steps"])
    values["w"] = np.float32([[1.0], [2.0]])
    for own in (one, many):
      own.load(values)
      scores, loss = own.run([own.outputs["scores"], own.graph.loss], X, {})
      self.assertAllClose(scores, X @ values["w"])
      self.assertAllClose(loss, np.mean(X @ values["w"]))
      own.run(list(own.graph.update_ops), X, {})
      self.assertEqual(own.values()["steps"], 1.0)
    self.assertEqual(list(one.gradients), list(many.gradients))
    self.assertIsNone(many.gradients[runs.Gradient("unused", None)])
    one.close()
    many.close()

  def test_copies_follow_what_is_loaded(self):
    many = side(2, options={"variables": "replicated"})
    many.initialize()
    many.load({"w": np.float32([[3.0], [5.0]])})
    self.assertAllClose(many.run(many.outputs["scores"], X, {}),
                        X @ [[3.0], [5.0]])
    self.assertCountEqual(many.values(), ["w", "unused", "steps"])
    many.close()

  def test_counterparts(self):
    one, many = side(1), side(3)
    found = runs.counterparts(one.outputs["scores"], one, many)
    self.assertEqual([x.name for x in found],
                     [f"tower_{k}/scores:0" for k in range(3)])
    inputs = one.outputs["scores"].op.inputs[0]
    self.assertIsNone(runs.counterparts(inputs.op.inputs[0], one, many))
    one.close()
    many.close()

  def test_layers_of_keras_have_the_same_names_in_each_build(self):
    def keras_model(x):
      return {"loss": tf.reduce_mean(tf.keras.layers.Dense(1)(x))}

    sides = [side(count, keras_model) for count in (1, 2, 1)]
    for own in sides:
      self.assertEqual(list(own.variables), list(sides[0].variables))
      own.close()


class NamedTest(tf.test.TestCase):

  def test_names_leaves(self):
    pair = collections.namedtuple("Pair", ["one", "two"])
    nest = {"a": 1, "b": [2, (3,)], "c": pair(4, {"d": 5})}
    self.assertEqual(dict(runs.named(nest)), {
        "a": 1, "b/0": 2, "b/1/0": 3, "c/one": 4, "c/two/d": 5})

  def test_a_leaf_alone(self):
    self.assertEqual(list(runs.named(7)), [("outputs", 7)])


if __name__ == "__main__":
  tf.test.main()
