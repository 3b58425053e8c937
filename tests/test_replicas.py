"""Tests of copies of variables on the towers' devices."""

import os

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers
from towers import placement
import training_cases as cases

ADAM = lambda: tf.train.AdamOptimizer(0.05)


def locals_of(trainer):
  with trainer._graph.as_default():
    return tf.local_variables()


class ReplicatedTest(parameterized.TestCase):

  def trainer(self, num_towers=3, **options):
    return cases.Trainer(num_towers, cases.towers_step(ADAM, **options),
                         variables="replicated")

  @parameterized.parameters((2, 0), (3, 0), (4, 0), (3, 300))
  def test_copies_stay_bitwise_equal(self, num_towers, pack_bytes):
    trainer = self.trainer(num_towers, pack_bytes=pack_bytes)
    with trainer.session():
      check = trainer.graph.check_copies()
      for number in range(100):
        trainer.step(cases.batch(1 + number % 9, number))
        trainer.evaluate(check)
      copies = [v for v in locals_of(trainer) if "towers_copy" in v.op.name]
      values = trainer.variables()
      for copy in copies:
        np.testing.assert_array_equal(
            trainer.evaluate(copy),
            values[copy.op.name.partition("towers_copy/")[2]])

  def test_load_sets_the_copies(self):
    """`Variable.load` feeds the initialiser."""
    trainer = self.trainer(3, accumulate_steps=2)
    with trainer.session():
      weights = trainer.graph.variables[0]
      with trainer._graph.as_default():
        weights.load(np.full([3, 4], 7.0), trainer._session)
      trainer.evaluate(trainer.graph.check_copies())
      copies = [v for v in locals_of(trainer)
                if "towers_copy" in v.op.name and "weights" in v.op.name]
      self.assertLen(copies, 2)
      for variable in [weights, *copies]:
        np.testing.assert_array_equal(
            trainer.evaluate(variable), np.full([3, 4], 7.0))

  @parameterized.parameters(1, 2, 3, 4)
  def test_one_copy_on_each_other_device(self, num_towers):
    trainer = self.trainer(num_towers)
    found = {}
    for variable in locals_of(trainer):
      if "towers_copy" in variable.op.name:
        found.setdefault(placement.same_spelling(variable.device),
                         set()).add(variable.op.name.rpartition("/")[2])
        self.assertFalse(variable.trainable)
    self.assertEqual(
        found, {
            f"/device:CPU:{k}": {"weights", "bias", "table", "last"}
            for k in range(1, num_towers)
        })

  def test_towers_read_on_their_own_device(self):
    trainer = self.trainer(3)
    for op in trainer._graph.get_operations():
      for k in range(3):
        if op.name.startswith(f"tower_{k}/") and op.type in (
            "ReadVariableOp", "ResourceGather") and "copy" not in op.name:
          source = op.inputs[0].op
          while source.type == "Identity":
            source = source.inputs[0].op
          if source.name != "seen":
            self.assertEqual(placement.same_spelling(source.device),
                             f"/device:CPU:{k}", op.name)

  def test_checkpoint_is_that_of_shared(self):
    names = {}
    for variables in ("shared", "replicated"):
      trainer = cases.Trainer(3, cases.towers_step(ADAM), variables=variables)
      with trainer.session(), trainer._graph.as_default():
        path = os.path.join(self.create_tempdir().full_path, "model")
        tf.train.Saver().save(trainer._session, path)
        names[variables] = tf.train.list_variables(path)
    self.assertEqual(names["shared"], names["replicated"])

  def test_monitored_session_restores_the_copies(self):
    directory = self.create_tempdir().full_path
    values = []
    for number in (1, 2):
      trainer = self.trainer(3)
      with trainer._graph.as_default():
        check = trainer.graph.check_copies()
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=directory, config=testing.config()) as sess:
          sess.run(check)
          if number == 2:
            values.append(sess.run(trainer.graph.variables[0]))
          for k in range(3):
            sess.run(trainer.train_op,
                     dict(zip(trainer._inputs, cases.batch(5, k))))
          sess.run(check)
          if number == 1:
            values.append(sess.run(trainer.graph.variables[0]))
    np.testing.assert_array_equal(*values)

  @parameterized.parameters("local", "copy_variables")
  def test_after_restoring_in_a_plain_session_one_call(self, how):
    trainer = self.trainer(3)
    with trainer.session(), trainer._graph.as_default():
      saver = tf.train.Saver()
      path = os.path.join(self.create_tempdir().full_path, "model")
      saver.save(trainer._session, path)
      expected = trainer.run(trainer.loss, cases.batch(6))
      trainer.step(cases.batch(6))
      saver.restore(trainer._session, path)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError,
                                  "The copy of .* must equal it bit"):
        trainer.evaluate(trainer.graph.check_copies())
      trainer.evaluate(tf.local_variables_initializer() if how == "local" else
                       trainer.graph.copy_variables)
      trainer.evaluate(trainer.graph.check_copies())
      self.assertEqual(trainer.run(trainer.loss, cases.batch(6)), expected)

  @parameterized.parameters("one", "both", "group")
  def test_initialisers_alone_or_together(self, how):
    trainer = self.trainer(3)
    with trainer._graph.as_default(), testing.session() as sess:
      everything = tf.global_variables_initializer()
      if how == "group":
        everything = tf.group(everything, tf.local_variables_initializer())
      sess.run(everything)
      if how == "both":
        sess.run(tf.local_variables_initializer())
      sess.run(trainer.graph.check_copies())

  def test_an_optimizers_own_apply_is_refused(self):
    trainer = self.trainer(2)
    with trainer._graph.as_default():
      pairs = trainer.graph.gradients()
      with self.assertRaisesRegex(
          ValueError, "`weights` must be updated with its copies: expected "
          "`graph.minimize` or `graph.apply_gradients`"):
        ADAM().apply_gradients(pairs)

  def test_apply_gradients_renews_the_copies(self):
    trainer = self.trainer(3)
    with trainer._graph.as_default():
      pairs = [(tf.clip_by_value(tf.convert_to_tensor(g), -0.1, 0.1), v)
               for g, v in trainer.graph.gradients()]
      trainer.train_op = trainer.graph.apply_gradients(
          tf.train.GradientDescentOptimizer(1.0), pairs)
    with trainer.session():
      before = trainer.variables()["weights"]
      trainer.step(cases.batch(6))
      trainer.evaluate(trainer.graph.check_copies())
      after = trainer.variables()["weights"]
    self.assertTrue(np.any(before != after))

  def test_assigning_model_code_is_refused_or_right(self):
    """A tower that assigns to a copy would leave the others behind."""

    def model(features, ids, labels):
      del ids, labels
      w = tf.get_variable("w", [], features.dtype)
      tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, w.assign(w * 0.5))
      return tf.reduce_mean(features * w)

    with self.assertRaisesRegex(
        ValueError, "`w` must not be changed by `model_fn`.*replicated"):
      cases.Trainer(3, cases.towers_step(ADAM), model_fn=model,
                    variables="replicated")

  def test_pairs_may_be_a_zip(self):
    trainer = self.trainer(3)
    with trainer._graph.as_default():
      values, variables = zip(*trainer.graph.gradients())
      trainer.train_op = trainer.graph.apply_gradients(
          tf.train.GradientDescentOptimizer(1.0), zip(values, variables))
    with trainer.session():
      trainer.step(cases.batch(6))
      trainer.evaluate(trainer.graph.check_copies())

  def test_gradients_of_another_origin_are_refused(self):
    trainer = self.trainer(2)
    with trainer._graph.as_default():
      optimizer = tf.train.GradientDescentOptimizer(1.0)
      pairs = optimizer.compute_gradients(trainer.graph.loss)
      with self.assertRaisesRegex(
          ValueError, "`grads_and_vars` must come from `graph.gradients`.*by "
          "`weights` of another"):
        trainer.graph.apply_gradients(optimizer, pairs)

  def test_loss_of_two_builds(self):
    results = []
    for variables in ("shared", "replicated"):
      with tf.Graph().as_default():
        def model(x):
          return tf.reduce_mean(x * tf.get_variable("w", []))

        x = tf.constant([1.0, 2.0, 3.0])
        graph = towers.build_towers(model, testing.devices(2), inputs=x,
                                    variables=variables)
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
          other = towers.build_towers(model, testing.devices(2), inputs=x,
                                      variables=variables, name="other")
        (gradient, _), = graph.gradients(graph.loss + other.loss)
        with testing.session(initialize=True) as sess:
          results.append(sess.run(gradient))
    self.assertEqual(results, [4.0, 4.0])

  def test_build_with_new_copies_after_the_train_op_is_refused(self):
    with tf.Graph().as_default():
      inputs = tf.constant([1.0, 2.0, 3.0])
      model = lambda x: tf.reduce_mean(x * tf.get_variable("w", []))
      graph = towers.build_towers(model, testing.devices(2), inputs=inputs,
                                  variables="replicated")
      graph.minimize(ADAM())
      with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        towers.build_towers(model, testing.devices(2), inputs=inputs,
                            variables="replicated", name="same")
        with self.assertRaisesRegex(
            ValueError, "must come before train ops: got new copies of `w` on "
            "/cpu:2"):
          towers.build_towers(model, testing.devices(3), inputs=inputs,
                              variables="replicated", name="more")

  def test_initialising_again_in_one_run(self):
    with tf.Graph().as_default():
      def model(x):
        total = x
        for k in range(4):
          total *= tf.reduce_sum(tf.get_variable(f"w{k}", [200, 200]))
        return tf.reduce_mean(total)

      graph = towers.build_towers(model, testing.devices(2),
                                  inputs=tf.ones([4]), variables="replicated")
      check = graph.check_copies()
      both = [tf.global_variables_initializer(),
              tf.local_variables_initializer()]
      with testing.session() as sess:
        for _ in range(20):
          sess.run(both)
          sess.run(check)

  def test_packing_leaves_unknown_shapes_alone(self):
    with tf.Graph().as_default():
      def model(x):
        size = tf.placeholder_with_default(2, [])
        w = tf.get_variable("w", initializer=tf.ones([size]),
                            validate_shape=False)
        return tf.reduce_mean(x) * tf.reduce_sum(w)

      graph = towers.build_towers(model, testing.devices(2),
                                  inputs=tf.ones([4]), variables="replicated")
      train_op = graph.minimize(tf.train.GradientDescentOptimizer(1.0),
                                pack_bytes=1000)
      with testing.session(initialize=True) as sess:
        sess.run(train_op)
        sess.run(graph.check_copies())

  def test_second_build_shares_the_copies(self):
    with tf.Graph().as_default():
      inputs = (tf.placeholder(tf.float64, [None, 3]),
                tf.placeholder(tf.int64, [None]),
                tf.placeholder(tf.int64, [None]))
      graph = towers.build_towers(cases.model, testing.devices(2),
                                  inputs=inputs, variables="replicated")
      count = len(tf.local_variables())
      with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        towers.build_towers(cases.model, testing.devices(2), inputs=inputs,
                            variables="replicated", name="evaluation")
      self.assertLen(tf.local_variables(), count)
      graph.minimize(ADAM())


if __name__ == "__main__":
  absltest.main()
