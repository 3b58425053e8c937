"""Tests that a build which fails ends its threads and leaves no trace."""

import _thread
import threading
import time
import traceback

from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import testing
import towers


class ModelError(Exception):
  """What only a model raises."""


class ModelExit(BaseException):
  """What a model raises to get past `except Exception`."""


def index():
  return towers.current_tower().index


def summed(x):
  return towers.merge(tf.add_n, x)


def layer_that_fails(error, in_tower):
  """A layer of a model, whose name must stand in the traceback."""
  if index() == in_tower:
    raise error


def raised_by(function, *args, **kwargs):
  """Returns what `function` raises, with its traceback."""
  try:
    function(*args, **kwargs)
  except BaseException as error:  # pylint: disable=broad-except
    return error
  raise AssertionError("Nothing was raised.")


def functions_in(error):
  """Returns the names of the functions in the traceback of `error`."""
  return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def state(graph):
  """Returns all that a build could leave changed."""
  scope = tf.get_variable_scope()
  probe = tf.random_uniform([], name="probe").op
  # pylint: disable-next=protected-access
  control_flow = graph._get_control_flow_context()
  # This draws one seed itself.
  return {
      "name_scope": graph.get_name_scope(),
      "variable_scope": (scope.name, scope.reuse, scope.original_name_scope),
      "collections": {key: list(graph.get_collection_ref(key))
                      for key in graph.get_all_collection_keys()
                      if graph.get_collection_ref(key)},
      "default_graph": tf.get_default_graph(),
      "tower": (towers.current_tower().index, towers.current_tower().count),
      "device": probe.device,
      "control_inputs": list(probe.control_inputs),
      "gradient": probe.node_def.attr.get("_gradient_op_type"),
      "control_flow": control_flow,
      "seed": probe.get_attr("seed2"),
  }


class FailedBuildTest(parameterized.TestCase, tf.test.TestCase):

  @parameterized.product(
      in_tower=(0, 1, 2), after_merge=(False, True),
      error=(ModelError("no"), KeyboardInterrupt("no"), ModelExit("no"),
             SystemExit("no"), GeneratorExit("no"), StopIteration("no")))
  def test_error_of_the_model_arrives_as_it_was(self, in_tower, after_merge,
                                                error):
    def the_model():
      if after_merge:
        summed(tf.constant(1.0))
      layer_that_fails(error, in_tower)
      return summed(tf.constant(1.0))

    threads = threading.enumerate()
    caught = raised_by(towers.build_towers, the_model, testing.devices(3))
    self.assertIs(caught, error)
    self.assertContainsSubset(["the_model", "layer_that_fails"],
                              functions_in(error))
    self.assertCountEqual(threading.enumerate(), threads)
    error.__traceback__ = None

  @parameterized.parameters(
      *[(count, fails_in, where) for where in ("scopes", "cond", "while")
        for count, fails_in in ((1, 0), (2, 0), (2, 1), (3, 1))],
      (2, 0, "mismatch"), (3, 1, "mismatch"))
  def test_leaves_the_graph_as_it_was(self, count, fails_in, where):
    """c065: scopes, reuse, collections, control flow and seeds."""
    graph = tf.get_default_graph()
    tf.set_random_seed(3)
    tf.add_to_collection("own", "kept")
    with tf.device("/cpu:2"):
      waited_for = tf.no_op(name="waited_for")
    error = ModelError("no")

    def fail():
      tf.get_variable("made", [2])
      tf.add_to_collection("own", f"by tower {index()}")
      tf.add_to_collection("other", f"by tower {index()}")
      tf.get_variable_scope().reuse_variables()
      if where != "while":
        summed(tf.constant(1.0))
      if where == "mismatch" and index() == fails_in:
        towers.all_reduce(1.0)
      layer_that_fails(error, fails_in)
      return summed(tf.constant(1.0))

    def model():
      tf.random_uniform([])
      with tf.variable_scope("deep"), tf.device("/cpu:1"):
        overrides = {"RandomUniform": "Other"}
        with tf.name_scope("deeper"), graph.gradient_override_map(overrides):
          with tf.control_dependencies([tf.no_op()]):
            if where == "cond":
              return tf.cond(p, fail, lambda: 0.0)
            if where == "while":
              return tf.while_loop(lambda x: x < 2.0, lambda x: x + fail(),
                                   [0.0])
            return fail()

    p = tf.placeholder(tf.bool, [])
    with tf.name_scope("outer"), tf.variable_scope("scope"):
      with tf.device("/cpu:3"), tf.control_dependencies([waited_for]):
        own = graph.get_collection_ref("own")
        before = state(graph)
        threads = threading.enumerate()
        with self.assertRaisesRegex(
            (ModelError, ValueError), "^no$|must meet in the same|while loop"):
          towers.build_towers(model, testing.devices(count))
        after = state(graph)
        self.assertIs(graph.get_collection_ref("own"), own)
    self.assertEqual(before.pop("seed") + 1, after.pop("seed"))
    self.assertEqual(before, after)
    self.assertCountEqual(threading.enumerate(), threads)
    tf.get_variable("extra", [1])

  @parameterized.parameters(1, 2)
  def test_interrupt_from_outside(self, in_tower):
    """It neither hangs nor leaves the graph in the hands of a tower."""
    graph = tf.get_default_graph()
    tf.add_to_collection("own", "kept")
    p = tf.placeholder(tf.bool, [])

    def slow():
      tf.add_to_collection("own", "by a tower")
      summed(tf.constant(1.0))
      if index() == in_tower:
        _thread.interrupt_main()
        for _ in range(30):  # As long as it takes to arrive.
          time.sleep(0.01)
      return summed(tf.constant(1.0))

    before, threads = state(graph), threading.enumerate()
    own = graph.get_collection_ref("own")
    start = time.time()
    with self.assertRaisesRegex(KeyboardInterrupt, ""):
      towers.build_towers(lambda: tf.cond(p, slow, lambda: 0.0),
                          testing.devices(3))
    self.assertLess(time.time() - start, 10.0)
    self.assertIs(graph.get_collection_ref("own"), own)
    after = state(graph)
    self.assertEqual(before.pop("seed") + 1, after.pop("seed"))
    self.assertEqual(before, after)
    self.assertCountEqual(threading.enumerate(), threads)
    # An op made inside the branch would not run.
    with testing.session() as sess:
      self.assertEqual(sess.run(tf.constant(1.0) + 1.0, {p: False}), 2.0)

  def test_model_that_catches_every_exception(self):
    """What wraps each layer must not keep its thread alive."""

    def model():
      for _ in range(3):
        try:
          summed(tf.constant(1.0))
        except Exception:  # pylint: disable=broad-except
          pass
        if index() == 1:
          try:
            towers.all_reduce(1.0)
          except Exception:  # pylint: disable=broad-except
            pass
      return 1.0

    threads = threading.enumerate()
    with self.assertRaisesRegex(ValueError, "tower 0 waits in towers.merge, "
                                "tower 1 in towers.all_reduce"):
      towers.build_towers(model, testing.devices(2))
    self.assertCountEqual(threading.enumerate(), threads)

  def test_cleanup_of_the_other_towers_runs(self):
    ended = []

    def model():
      try:
        layer_that_fails(ModelError("no"), 1)
        summed(tf.constant(1.0))
      finally:
        ended.append(index())
      return 1.0

    with self.assertRaisesRegex(ModelError, "no"):
      towers.build_towers(model, testing.devices(3))
    # Tower 2 had not begun.
    self.assertCountEqual(ended, [0, 1])

  def test_graph_can_be_used_again(self):
    fails = [True]

    def model(x):
      weight = tf.get_variable("w", [], initializer=tf.ones_initializer())
      total = summed(tf.reduce_sum(x * weight))
      if fails[0]:
        layer_that_fails(ModelError("no"), 1)
      return total

    x = tf.constant([1.0, 2.0])
    with self.assertRaisesRegex(ModelError, "no"):
      towers.build_towers(model, testing.devices(2), inputs=x)
    fails[0] = False
    # The variable of the failed build is still there.
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
      graph = towers.build_towers(model, testing.devices(2), inputs=x)
    with testing.session() as sess:
      sess.run([v.initializer for v in graph.variables])
      self.assertEqual(sess.run(graph.loss), 3.0)


if __name__ == "__main__":
  tf.test.main()
