"""Tests of the session hooks, in sessions as users make them."""

import glob
import inspect
import json
import os
import time

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import testing
import towers


def elements(dataset):
  """Returns the next element; the session initialises the iterator."""
  options = tf.data.Options()
  # TensorFlow would put a `prefetch` of its own at the end of a slow pipeline.
  options.experimental_optimization.inject_prefetch = False
  options.autotune.enabled = False
  dataset = dataset.with_options(options)
  iterator = tf.data.make_initializable_iterator(dataset)
  tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
  return iterator.get_next()


def sleeping(x, seconds):
  """Returns `x` after a while, as an input or a computation that takes long."""

  def sleep(value):
    time.sleep(seconds)
    return value

  y = tf.numpy_function(sleep, [x], x.dtype)
  y.set_shape(x.shape)
  return y


def linear(x):
  w = tf.get_variable("w", [], initializer=tf.ones_initializer())
  return tf.reduce_mean(w * x)


def train(x, num_towers, model=linear):
  """Returns loss and train op, of plain code for 0 towers."""
  optimizer = tf.train.GradientDescentOptimizer(0.1)
  step = tf.train.get_or_create_global_step()
  if num_towers:
    graph = towers.build_towers(model, testing.devices(num_towers), inputs=x)
    return graph.loss, graph.minimize(optimizer, global_step=step)
  loss = model(x)
  return loss, optimizer.minimize(loss, global_step=step)


def monitored(hooks, **kwargs):
  # With as many threads, nothing that sleeps keeps others from it.
  config = testing.config(inter_op_parallelism_threads=8)
  return tf.train.MonitoredTrainingSession(
      hooks=hooks, config=config, log_step_count_steps=None, **kwargs)


class HooksTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(tf.Graph().as_default())

  def test_names_are_pinned(self):
    public = {name for name, value in vars(towers.hooks).items()
              if inspect.isclass(value) and value.__module__ == "towers.hooks"}
    self.assertEqual(public, {"InputStarvationHook", "StopOnNanHook",
                              "ThroughputHook", "TraceHook"})

  @parameterized.parameters(0, 2)
  def test_all_together(self, num_towers):
    x = elements(tf.data.Dataset.from_tensors(tf.ones([7])).repeat())
    loss, train_op = train(x, num_towers)
    directory = self.create_tempdir().full_path
    hooks = [towers.hooks.InputStarvationHook(log_steps=4, trace_steps=2),
             towers.hooks.ThroughputHook(7, log_steps=4, warmup_steps=1),
             towers.hooks.StopOnNanHook(loss),
             towers.hooks.TraceHook(directory, steps=[2, 5])]
    with monitored(hooks) as session:
      for _ in range(6):
        session.run(train_op)
    self.assertBetween(hooks[0].share, 0, 1)
    self.assertGreater(hooks[1].examples_per_second, 7)
    self.assertLen(hooks[3].paths, 2)


class InputStarvationHookTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(tf.Graph().as_default())

  def measured(self, x, num_towers, compute_seconds, *, steps=6, trace_steps=2,
               **options):
    """Returns the hook after a few steps, and what it logged."""
    model = lambda x: linear(sleeping(x, compute_seconds))
    _, train_op = train(x, num_towers, model)
    hook = towers.hooks.InputStarvationHook(
        log_steps=steps, trace_steps=trace_steps, **options)
    with monitored([hook]) as session:
      with self.assertLogs(level="INFO") as logs:
        for _ in range(steps):
          session.run(train_op)
    return hook, [line for line in logs.output if "measured" in line]

  @parameterized.named_parameters(
      # The share is exact by construction: (wait, compute, prefetch, share).
      ("plain_half", 0, 0.03, 0.03, False, 1 / 2),
      ("towers_half", 2, 0.03, 0.03, False, 1 / 2),
      ("towers_most", 2, 0.08, 0.02, False, 4 / 5),
      ("plain_hidden", 0, 0.02, 0.06, True, 0),
      ("towers_hidden", 2, 0.02, 0.06, True, 0),
      ("towers_partly_hidden", 2, 0.06, 0.03, True, 1 / 2),
  )
  def test_share_of_known_sleeps(self, num_towers, wait, compute, prefetch,
                                 share):
    dataset = tf.data.Dataset.from_tensors(tf.ones([4])).repeat()
    dataset = dataset.map(lambda x: sleeping(x, wait))
    if prefetch:
      dataset = dataset.prefetch(1)
    # A prefetched element gets ahead while a trace is written up.
    hook, logged = self.measured(elements(dataset), num_towers, compute,
                                 steps=15, trace_steps=5)
    self.assertAlmostEqual(hook.share, share, delta=0.2)
    self.assertLen(logged, 1)
    self.assertEqual("prefetch(tf.data.AUTOTUNE)" in logged[0], share > 0)
    self.assertIn(f"{100 * hook.share:.0f} %", logged[0])
    self.assertIn("3 steps measured", logged[0])

  def test_iterator_of_each_tower(self):
    """Both towers wait for the one with the slow input."""
    datasets = [tf.data.Dataset.from_tensors(tf.ones([4])).repeat().map(
        lambda x, s=seconds: sleeping(x, s)) for seconds in (0.0, 0.06)]
    x = towers.PerTower([elements(dataset) for dataset in datasets])
    hook, _ = self.measured(x, 2, 0.02)
    # 20 ms of tower 0's work fall into the 60 ms; 20 ms of tower 1's follow.
    self.assertAlmostEqual(hook.share, 40 / 80, delta=0.2)

  def test_threshold(self):
    dataset = tf.data.Dataset.from_tensors(tf.ones([4])).repeat()
    dataset = dataset.map(lambda x: sleeping(x, 0.02))
    hook, logged = self.measured(elements(dataset), 0, 0.02, threshold=0.9)
    self.assertBetween(hook.share, 0.3, 0.7)
    self.assertNotIn("prefetch", logged[0])

  def test_without_input_ops(self):
    hook, logged = self.measured(tf.ones([4]), 2, 0.0)
    self.assertEqual(hook.share, 0)
    self.assertIn("no input op", logged[0])

  def test_only_measured_steps_are_traced(self):
    hook = towers.hooks.InputStarvationHook(log_steps=6, trace_steps=3)
    traced = []

    class Spy(tf.train.SessionRunHook):

      def after_run(self, run_context, run_values):
        traced.append(bool(run_values.run_metadata.step_stats.dev_stats))

    _, train_op = train(tf.ones([4]), 2)
    with monitored([hook, Spy()]) as session:
      self.assertIsNone(hook.share)
      for _ in range(9):
        session.run(train_op)
    self.assertEqual(traced, 3 * [False, False, True])

  @parameterized.named_parameters(
      ("log_steps", dict(log_steps=0), "`log_steps` .* 1 or more, got 0"),
      ("bool", dict(log_steps=True), "`log_steps` .* got True"),
      ("trace_steps", dict(trace_steps=1.5), "`trace_steps` .* got 1.5"),
      ("too_rare", dict(log_steps=3, trace_steps=4),
       "`trace_steps` must be at most `log_steps`.* 3 or less, got 4"),
      ("threshold", dict(threshold=2), "`threshold` .* 0 to 1, got 2"),
  )
  def test_rejects(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      towers.hooks.InputStarvationHook(**options)


class ThroughputHookTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(tf.Graph().as_default())

  @parameterized.product(num_towers=(0, 2), as_tensor=(False, True))
  def test_rate_of_known_steps(self, num_towers, as_tensor):
    """Steps take 50 ms, the first two 200 ms, which do not count."""
    slow = iter([0.2, 0.2])

    def pause(x):
      time.sleep(next(slow, 0.05))
      return x

    x = tf.ensure_shape(tf.numpy_function(pause, [tf.ones([6])], tf.float32),
                        [6])
    _, train_op = train(x, num_towers)
    count = tf.size(x) if as_tensor else 6
    hook = towers.hooks.ThroughputHook(count, log_steps=5, warmup_steps=2)
    with monitored([hook]) as session:
      for step in range(7):
        self.assertIsNone(hook.examples_per_second, step)
        session.run(train_op)
      # Never faster than the sleeps allow; slower on a machine at work.
      self.assertBetween(hook.examples_per_second, 60, 6 / 0.05)

  def test_batches_that_differ(self):
    """Examples are added up: sizes 1, 2, 3 in 3 x 50 ms are 40 a second."""
    x = elements(tf.data.Dataset.range(1, 4).map(
        lambda n: tf.ones(tf.stack([n]))))
    count = tf.shape(x)[0]
    _, train_op = train(sleeping(x, 0.05), 2)
    hook = towers.hooks.ThroughputHook(count, log_steps=3, warmup_steps=0)
    start = time.perf_counter()
    with monitored([hook]) as session:
      for _ in range(3):
        session.run(train_op)
      elapsed = time.perf_counter() - start
    self.assertBetween(hook.examples_per_second, 6 / elapsed, 6 / 0.15)

  def test_rest_is_logged_at_the_end(self):
    _, train_op = train(tf.ones([4]), 2)
    hook = towers.hooks.ThroughputHook(4, log_steps=100, warmup_steps=1)
    with self.assertLogs(level="INFO") as logs:
      with monitored([hook]) as session:
        for _ in range(3):
          session.run(train_op)
        self.assertIsNone(hook.examples_per_second)
    self.assertGreater(hook.examples_per_second, 0)
    self.assertRegex("\n".join(logs.output),
                     r"examples per second \(2 steps, ")

  def test_summary(self):
    _, train_op = train(tf.ones([4]), 2)
    directory = self.create_tempdir().full_path
    hook = towers.hooks.ThroughputHook(4, log_steps=2, warmup_steps=1,
                                       summary_directory=directory)
    with monitored([hook]) as session:
      for _ in range(5):
        session.run(train_op)
    written = {
        event.step: value.simple_value
        for path in glob.glob(os.path.join(directory, "events*"))
        for event in tf.train.summary_iterator(path)
        for value in event.summary.value if value.tag == "examples_per_second"
    }
    self.assertEqual(sorted(written), [3, 5])
    np.testing.assert_allclose(written[5], hook.examples_per_second, rtol=1e-6)

  @parameterized.named_parameters(
      ("zero", 0, {}, "`examples_per_step` .* positive .* got 0"),
      ("nan", np.nan, {}, "`examples_per_step` .* positive .* got nan"),
      ("text", "7", {}, "`examples_per_step` .* positive .* got '7'"),
      ("log_steps", 1, dict(log_steps=-1), "`log_steps` .* got -1"),
      ("warmup_steps", 1, dict(warmup_steps=-1), "`warmup_steps` .* got -1"),
  )
  def test_rejects(self, examples, options, message):
    with self.assertRaisesRegex(ValueError, message):
      towers.hooks.ThroughputHook(examples, **options)

  def test_rejects_a_tensor_that_is_no_scalar(self):
    with self.assertRaisesRegex(ValueError,
                                r"`examples_per_step` .* `x:0` of shape \(3,"):
      towers.hooks.ThroughputHook(tf.ones([3], name="x"))


class StopOnNanHookTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(tf.Graph().as_default())
    self.directory = self.create_tempdir().full_path
    # Plain code may read the variable of a loss before or after it changes.
    self.message = (r"must be finite: got (nan|-?inf) in the step after global "
                    r"step 3\.")

  def training(self, num_towers, value=np.nan):
    """Returns loss and train op, whose fourth loss is `value`."""
    rows = np.ones([8, 5], np.float32)
    rows[3, -1] = value
    x = elements(tf.data.Dataset.from_tensor_slices(rows))
    # So that the global step does not move before the hook has read it.
    return train(sleeping(x, 0.005), num_towers)

  def run_to_the_end(self, hooks, train_op, **kwargs):
    steps = 0
    with monitored(hooks, checkpoint_dir=self.directory,
                   save_checkpoint_steps=1, **kwargs) as session:
      while not session.should_stop():
        session.run(train_op)
        steps += 1
    return steps

  def saved(self):
    """Returns the checkpoints' steps and the last one's variable."""
    steps = sorted(int(path.split("-")[-1].split(".")[0]) for path in glob.glob(
        os.path.join(self.directory, "model.ckpt-*.index")))
    path = tf.train.latest_checkpoint(self.directory)
    return steps, tf.train.load_variable(path, "w")

  @parameterized.parameters((0, np.nan), (0, np.inf), (1, np.nan), (2, -np.inf),
                            (2, np.nan), (3, np.inf))
  def test_fails_and_saves_nothing(self, num_towers, value):
    loss, train_op = self.training(num_towers, value)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError,
                                self.message):
      self.run_to_the_end([towers.hooks.StopOnNanHook(loss)], train_op)
    steps, w = self.saved()
    self.assertEqual(steps, [0, 1, 2, 3])
    np.testing.assert_allclose(w, 1 - 3 * 0.1, rtol=1e-6)

  @parameterized.parameters(
      (0, np.nan, "hooks"), (0, np.inf, "chief_only_hooks"),
      (2, -np.inf, "hooks"), (2, np.nan, "chief_only_hooks"))
  def test_stops_and_saves_nothing(self, num_towers, value, where):
    loss, train_op = self.training(num_towers, value)
    hook = towers.hooks.StopOnNanHook(loss, fail=False)
    hooks = {"hooks": [], where: [hook]}
    with self.assertLogs(level="WARNING") as logs:
      steps = self.run_to_the_end(train_op=train_op, **hooks)
    self.assertEqual(steps, 4)
    steps, w = self.saved()
    self.assertEqual(steps, [0, 1, 2, 3])
    np.testing.assert_allclose(w, 1 - 3 * 0.1, rtol=1e-6)
    text = "\n".join(logs.output)
    self.assertRegex(text, self.message)
    self.assertIn("Not saved: the step after global step 3", text)

  def test_the_hook_of_tensorflow_saves_it(self):
    """Otherwise the tests above would test nothing."""
    loss, train_op = self.training(2)
    self.run_to_the_end([tf.train.NanTensorHook(loss, fail_on_nan_loss=False)],
                        train_op)
    steps, w = self.saved()
    self.assertEqual(steps[-1], 4)
    self.assertTrue(np.isnan(w))

  def test_error_that_is_caught_in_the_session(self):
    """Then the session ends as if all were well, and would save."""
    loss, train_op = self.training(2)
    hook = towers.hooks.StopOnNanHook(loss)
    with monitored([hook], checkpoint_dir=self.directory,
                   save_checkpoint_steps=1) as session:
      for _ in range(3):
        session.run(train_op)
      for _ in range(2):  # Also where the loss is finite again.
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError,
                                    "after global step 3"):
          session.run(train_op)
    self.assertEqual(self.saved()[0], [0, 1, 2, 3])

  @parameterized.parameters(True, False)
  def test_saver_of_a_scaffold(self, fail):
    loss, train_op = self.training(2)
    saver = tf.train.Saver(max_to_keep=20)
    hook = towers.hooks.StopOnNanHook(loss, fail=fail,
                                      savers=[] if fail else [saver])
    scaffold = tf.train.Scaffold(saver=saver)
    if fail:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError,
                                  "after global step 3"):
        self.run_to_the_end([hook], train_op, scaffold=scaffold)
    else:
      self.run_to_the_end([hook], train_op, scaffold=scaffold)
    self.assertEqual(self.saved()[0], [0, 1, 2, 3])

  @parameterized.parameters(True, False)
  def test_goes_on_from_the_last_good_step(self, fail):
    """In a session of the same graph, with other data."""
    loss, train_op = self.training(2)
    hook = towers.hooks.StopOnNanHook(loss, fail=fail)
    try:
      self.run_to_the_end([hook], train_op)
    except tf.errors.InvalidArgumentError:
      self.assertTrue(fail)
    with tf.Graph().as_default():
      loss, train_op = train(tf.ones([5]), 2)
      hooks = [towers.hooks.StopOnNanHook(loss, fail=fail),
               tf.train.StopAtStepHook(last_step=6)]
      self.assertEqual(self.run_to_the_end(hooks, train_op), 3)
    steps, w = self.saved()
    self.assertEqual(steps[-1], 6)
    np.testing.assert_allclose(w, 1 - 6 * 0.1, rtol=1e-6)

  def test_saver_still_saves_outside_the_session(self):
    loss, train_op = self.training(2)
    self.run_to_the_end([towers.hooks.StopOnNanHook(loss, fail=False)],
                        train_op)
    saver, = tf.get_collection(tf.GraphKeys.SAVERS)
    with testing.session() as session:
      session.run(tf.global_variables_initializer())
      path = saver.save(session, os.path.join(self.directory, "by_hand"))
    self.assertEqual(tf.train.load_variable(path, "w"), 1)

  def test_per_example_losses(self):
    _, train_op = train(tf.ones([2]), 2)
    losses = tf.placeholder_with_default([1.0, np.inf, np.nan], [3])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError,
                                "got 1.0*, inf, nan in the step"):
      self.run_to_the_end([towers.hooks.StopOnNanHook(losses)], train_op)

  def test_adds_no_saved_variable(self):
    loss, _ = self.training(2)
    names = [v.name for v in tf.global_variables()]
    towers.hooks.StopOnNanHook(loss).begin()
    self.assertEqual([v.name for v in tf.global_variables()], names)
    self.assertEqual([v.name for v in tf.local_variables()],
                     ["stop_on_nan/bad_step:0"])

  def test_rejects_a_graph_without_global_step(self):
    hook = towers.hooks.StopOnNanHook(linear(tf.ones([2])))
    with self.assertRaisesRegex(ValueError,
                                r"`tf.train.get_global_step\(\)` .* got None"):
      hook.begin()

  @parameterized.named_parameters(
      ("number", lambda: 1.0, "`loss` must be a floating tensor .* got 1.0"),
      ("integers", lambda: tf.constant(3, name="x"), "`loss` .* got <.*x:0"),
  )
  def test_rejects(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      towers.hooks.StopOnNanHook(make())


class TraceHookTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(tf.Graph().as_default())
    self.directory = os.path.join(self.create_tempdir().full_path, "new")

  def traced(self, num_towers, **options):
    # No constant, which TensorFlow would compute the step from ahead of time.
    _, train_op = train(tf.random.uniform([7]), num_towers)
    hook = towers.hooks.TraceHook(self.directory, **options)
    with monitored([hook]) as session:
      for _ in range(5):
        session.run(train_op)
    return hook

  def events(self, path):
    """Returns the names of the ops in a file, by the names of devices."""
    with open(path, encoding="utf-8") as file:
      events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events
             if e["ph"] == "M" and e["name"] == "process_name"}
    found = {name: set() for name in names.values()}
    for event in events:
      if event["ph"] == "X":
        self.assertGreaterEqual(event["dur"], 0)
        found[names[event["pid"]]].add(event["args"]["name"])
    return {name[-5:]: ops for name, ops in found.items()}

  @parameterized.parameters(1, 2, 3)
  def test_shows_the_device_of_every_tower(self, num_towers):
    hook = self.traced(num_towers, steps=[3])
    found = self.events(hook.paths[0])
    self.assertContainsSubset([f"CPU:{i}" for i in range(num_towers)], found)
    if num_towers > 1:
      for i in range(num_towers):
        own = [op for op in found[f"CPU:{i}"] if f"tower_{i}/" in op]
        self.assertNotEmpty(own)
        for j in set(range(num_towers)) - {i}:
          self.assertEmpty([op for op in found[f"CPU:{i}"]
                            if op.startswith(f"tower_{j}/")])

  def test_plain_code(self):
    hook = self.traced(0, steps=[3])
    self.assertNotEmpty(self.events(hook.paths[0])["CPU:0"])

  def test_only_the_chosen_steps(self):
    hook = self.traced(2, steps=[2, 4, 100])
    self.assertEqual([os.path.basename(path) for path in hook.paths],
                     ["trace-2.json", "trace-4.json"])
    self.assertCountEqual(os.listdir(self.directory),
                          ["trace-2.json", "trace-4.json"])

  @parameterized.parameters(([0], "got 0"), ([3, -1], "got -1"),
                            (["3"], "got '3'"))
  def test_rejects(self, steps, message):
    with self.assertRaisesRegex(ValueError, f"`steps` must be .* {message}"):
      towers.hooks.TraceHook(self.directory, steps=steps)


if __name__ == "__main__":
  absltest.main()
