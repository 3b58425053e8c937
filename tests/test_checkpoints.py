"""Tests for towers.checkpoints: restoring from other people's files."""

import os

from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import checkpoint_cases
from checkpoint_cases import value
import testing
import towers

OPTIMIZERS = {
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(0.01),
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
}

# What the model's variables are called, and their values.
MODEL = {
    "conv/kernel": value(1, [3, 3, 2, 4]),
    "conv/batch_normalization/gamma": value(2, [4]),
    "conv/batch_normalization/beta": value(3, [4]),
    "conv/batch_normalization/moving_mean": value(4, [4]),
    "conv/batch_normalization/moving_variance": 1 + value(5, [4])**2,
    "dense/kernel": value(6, [4, 3]),
    "dense/bias": value(7, [3]),
}
IMAGES = value(8, [5, 6, 6, 2])


def model(images):
  """Moving statistics normalise, so that the outputs show those as well."""
  with tf.variable_scope("conv"):
    kernel = tf.get_variable("kernel", [3, 3, 2, 4])
    x = tf.nn.conv2d(images, kernel, strides=1, padding="VALID")
    x = tf.nn.relu(towers.batch_norm(x, training=False))
  with tf.variable_scope("dense"):
    kernel = tf.get_variable("kernel", [4, 3])
    bias = tf.get_variable("bias", [3], initializer=tf.zeros_initializer())
    logits = tf.matmul(tf.reduce_mean(x, axis=[1, 2]), kernel) + bias
  return {"loss": tf.reduce_mean(logits**2), "logits": logits}


def expected_logits(images=IMAGES, values=None):
  """Float64 NumPy: what the model computes with `MODEL`."""
  v = {key: x.astype("float64") for key, x in (values or MODEL).items()}
  windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), (1, 2))
  x = np.einsum("bhwcij,ijco->bhwo", windows, v["conv/kernel"])
  scope = "conv/batch_normalization/"
  x = (x - v[scope + "moving_mean"]) / np.sqrt(
      v[scope + "moving_variance"] + 1e-3)
  x = np.maximum(x * v[scope + "gamma"] + v[scope + "beta"], 0)
  return x.mean((1, 2)) @ v["dense/kernel"] + v["dense/bias"]


def build(num_towers=2, optimizer="momentum"):
  """Builds the model and its training in the default graph."""
  graph = towers.build_towers(model, testing.devices(num_towers),
                              inputs=tf.constant(IMAGES))
  step = tf.train.get_or_create_global_step()
  graph.minimize(OPTIMIZERS[optimizer](), global_step=step)
  return graph


def with_towers(prefixes, keys=None):
  """Returns copies of `MODEL` under each prefix."""
  return {prefix + (keys or {}).get(key, key): x
          for prefix in prefixes for key, x in MODEL.items()}


TENSORPACK = {
    "conv/kernel": "conv/W",
    "conv/batch_normalization/moving_mean":
        "conv/batch_normalization/mean/EMA",
    "conv/batch_normalization/moving_variance":
        "conv/batch_normalization/variance/EMA",
    "dense/kernel": "dense/W",
    "dense/bias": "dense/b",
}
FOREIGN = {
    "plain": with_towers([""]),
    "tower_loop": with_towers(["tower_0/", "tower_1/"]),
    "first_tower_without": with_towers(["", "tower1/", "tower2/"]),
    "clones": with_towers(["clone_0/", "clone_1/"]),
    "one_of_benchmarks": with_towers(["v/"]),
    "copies_of_benchmarks": with_towers(["v0/", "v1/", "v2/", "v3/"]),
    "mirrored": {**MODEL, **{f"{key}/replica_{k}": x
                             for key, x in MODEL.items() for k in (1, 2)}},
    "tensorpack": with_towers([""], TENSORPACK),
    "tensorpack_replicated": with_towers(["", "tower1/"], TENSORPACK),
    "slim": with_towers([""], {"conv/kernel": "conv/weights",
                               "dense/kernel": "dense/weights",
                               "dense/bias": "dense/biases"}),
    "layers_of_a_second_model": with_towers([""], {
        key: key.replace("batch_normalization", "batch_normalization_7")
            .replace("dense", "dense_3") for key in MODEL}),
}


class CheckpointsTest(parameterized.TestCase):

  def path(self, name="model"):
    return os.path.join(self.create_tempdir().full_path, name)

  def write(self, values):
    return checkpoint_cases.write(self.path(), values)

  def check_outputs(self, sess, graph, values=None):
    np.testing.assert_allclose(
        sess.run(graph.outputs["logits"]), expected_logits(values=values),
        rtol=1e-4, atol=1e-5)


class RestoreTest(CheckpointsTest):

  @parameterized.named_parameters(*FOREIGN.items())
  def test_outputs_are_those_of_the_model(self, values):
    path = self.write(values)
    for num_towers in (1, 2, 3, 4) if values is FOREIGN["mirrored"] else (2,):
      with tf.Graph().as_default(), testing.session() as sess:
        graph = build(num_towers)
        report = towers.checkpoints.restore(sess, path)
        self.check_outputs(sess, graph)
        self.assertCountEqual(report.sources, MODEL)
        self.assertEmpty(report.unused)
        self.assertCountEqual(
            report.initial,
            ["global_step"] + [f"{key}/Momentum" for key in MODEL
                               if "moving" not in key])
        self.assertEmpty(sess.run(tf.report_uninitialized_variables()))

  def test_c019_another_optimizer(self):
    """Saved with momentum in 2 towers, restored with Adam in 1."""
    with tf.Graph().as_default(), testing.session() as sess:
      build(2, "momentum")
      sess.run(tf.global_variables_initializer())
      for variable in tf.global_variables():
        if variable.op.name in MODEL:
          sess.run(variable.assign(MODEL[variable.op.name]))
      sess.run(tf.train.get_global_step().assign(7))
      path = tf.train.Saver().save(sess, self.path())
    with tf.Graph().as_default(), testing.session() as sess:
      graph = build(1, "adam")
      report = towers.checkpoints.restore(sess, path)
      self.check_outputs(sess, graph)
      trained = [v.op.name for v in tf.trainable_variables()]
      self.assertCountEqual(report.restored, [*MODEL, "global_step"])
      self.assertCountEqual(report.initial, [
          "beta1_power", "beta2_power",
          *[f"{name}/{slot}" for name in trained for slot in ("Adam", "Adam_1")]
      ])
      self.assertCountEqual(report.unused,
                            [f"{name}/Momentum" for name in trained])
      values = sess.run({v.op.name: v for v in tf.global_variables()})
      self.assertEqual(values["global_step"], 7)
      np.testing.assert_allclose(values["beta2_power"], 0.999)
      np.testing.assert_array_equal(values["dense/kernel/Adam_1"], 0)

  @parameterized.parameters(True, False)
  def test_c019_the_strict_restore_says_so(self, ours):
    path = self.write({**MODEL, "global_step": np.int64(1)})
    with tf.Graph().as_default(), testing.session() as sess:
      build(2, "momentum")
      if ours:
        with self.assertRaisesRegex(
            ValueError, f"`save_path` must hold every variable: {path} lacks 5 "
            "of 13: `conv/kernel/Momentum`, .*`dense/bias/Momentum`.* use "
            r"`towers.checkpoints.restore\(session, save_path\)`, or"):
          towers.checkpoints.Saver().restore(sess, path)
      else:  # That of TensorFlow is what it was.
        with self.assertRaisesRegex(tf.errors.NotFoundError, "Momentum"):
          tf.train.Saver().restore(sess, path)

  def test_slots_follow_their_variables(self):
    slots = {f"tower_{k}/{key}/Momentum": 2 * x
             for k in (0, 1) for key, x in MODEL.items() if "moving" not in key}
    path = self.write({**FOREIGN["tower_loop"], **slots,
                       "tower_0/global_step": np.int64(9)})
    with tf.Graph().as_default(), testing.session() as sess:
      build(2)
      report = towers.checkpoints.restore(sess, path)
      self.assertEmpty(report.initial)
      got = sess.run({v.op.name: v for v in tf.global_variables()})
    np.testing.assert_array_equal(got["dense/kernel/Momentum"],
                                  2 * MODEL["dense/kernel"])
    self.assertEqual(got["global_step"], 9)

  def test_what_is_not_restored_keeps_its_value(self):
    path = self.write(MODEL)
    with tf.Graph().as_default(), testing.session(initialize=False) as sess:
      graph = build(2)
      sess.run(tf.global_variables_initializer())
      sess.run([v.assign(tf.fill(v.shape, tf.cast(5, v.dtype)))
                for v in tf.global_variables()])
      report = towers.checkpoints.restore(sess, path, exclude="dense/bias")
      got = sess.run({v.op.name: v for v in tf.global_variables()})
      self.check_outputs(sess, graph, {**MODEL, "dense/bias": np.full([3], 5)})
    self.assertEqual(report.excluded, ("dense/bias", "dense/bias/Momentum"))
    self.assertEqual(got["global_step"], 5)
    np.testing.assert_array_equal(got["dense/kernel/Momentum"], 5)

  @parameterized.parameters(0, 1)
  def test_one_tower_of_several_that_differ(self, tower):
    values = {f"tower_{k}/{key}": x + k if "mean" in key else x
              for k in (0, 1) for key, x in MODEL.items()}
    path = self.write(values)
    mean = "conv/batch_normalization/moving_mean"
    with tf.Graph().as_default(), testing.session() as sess:
      graph = build(2)
      with self.assertRaisesRegex(
          ValueError, f"`{mean}` by `tower_0/{mean}`, `tower_1/{mean}`"):
        towers.checkpoints.restore(sess, path)
      towers.checkpoints.restore(sess, path, tower=tower)
      self.check_outputs(sess, graph, {**MODEL, mean: MODEL[mean] + tower})

  def test_variables_by_their_names_in_the_file(self):
    """As `ExponentialMovingAverage.variables_to_restore` makes them."""
    path = self.write({"w/ExponentialMovingAverage": value(0), "w": value(1)})
    with tf.Graph().as_default(), testing.session() as sess:
      w = tf.get_variable("w", [2, 3])
      average = tf.train.ExponentialMovingAverage(0.9)
      towers.checkpoints.restore(
          sess, path, variables=average.variables_to_restore([w]))
      np.testing.assert_array_equal(sess.run(w), value(0))

  @parameterized.parameters(True, False)
  def test_partitioned_variables(self, use_resource):
    path = self.write({"tower_0/w": value(0, [5, 3])})
    with tf.Graph().as_default(), testing.session() as sess:
      w = tf.get_variable("w", [5, 3], use_resource=use_resource,
                          partitioner=tf.fixed_size_partitioner(2))
      self.assertEqual(towers.checkpoints.restore(sess, path).renamed,
                       {"w": "tower_0/w"})
      np.testing.assert_array_equal(sess.run(w.as_tensor()), value(0, [5, 3]))

  @parameterized.parameters(True, False)
  def test_within_other_scopes_and_devices(self, use_resource):
    """c086: reading stays on a CPU, assigning on the variable's device."""
    path = self.write({"w": value(0)})
    with tf.Graph().as_default() as graph, testing.session() as sess:
      with tf.device("/cpu:3"):
        w = tf.get_variable("w", [2, 3], use_resource=use_resource)
      never_fed = tf.placeholder(tf.float32, [])
      with tf.device("/cpu:2"), tf.control_dependencies([never_fed]):
        towers.checkpoints.restore(sess, path)
      np.testing.assert_array_equal(sess.run(w), value(0))
      ops = {op.type: op for op in graph.get_operations()}
      self.assertEqual(ops["RestoreV2"].device, "/device:CPU:0")
      assign = ops["AssignVariableOp" if use_resource else "Assign"]
      self.assertEqual(assign.device, "/device:CPU:3")

  def test_object_based_checkpoint(self):
    with tf.Graph().as_default(), tf.Session() as sess:
      w = tf.get_variable("w", initializer=value(0))
      sess.run(w.initializer)
      with sess.as_default():
        path = tf.train.Checkpoint(weights=w).save(self.path())
    with tf.Graph().as_default(), testing.session() as sess:
      w = tf.get_variable("w", [2, 3])
      self.assertEqual(towers.checkpoints.restore(sess, path).restored, ("w",))
      np.testing.assert_array_equal(sess.run(w), value(0))

  def test_the_older_format(self):
    path = checkpoint_cases.write(self.path(), {"tower_0/w": value(0)},
                                  write_version=tf.train.SaverDef.V1)
    with tf.Graph().as_default(), testing.session() as sess:
      w = tf.get_variable("w", [2, 3])
      towers.checkpoints.restore(sess, path)
      np.testing.assert_array_equal(sess.run(w), value(0))

  def test_copies_of_replicated_variables(self):
    """As after `tf.train.Saver.restore`, `copy_variables` renews them."""
    path = self.write(FOREIGN["tower_loop"])
    with tf.Graph().as_default(), testing.session() as sess:
      graph = towers.build_towers(model, testing.devices(3),
                                  inputs=tf.constant(IMAGES),
                                  variables="replicated")
      towers.checkpoints.restore(sess, path)
      sess.run(graph.copy_variables)
      self.check_outputs(sess, graph)

  def test_log(self):
    lines = []
    with tf.Graph().as_default(), testing.session() as sess:
      build(1)
      report = towers.checkpoints.restore(sess, self.write(MODEL),
                                          log=lines.append)
    self.assertEqual(lines, [str(report)])

  def test_damaged_file_changes_nothing(self):
    path = self.write(MODEL)
    checkpoint_cases.truncate(path, length=50)
    with tf.Graph().as_default(), testing.session() as sess:
      build(2)
      sess.run(tf.global_variables_initializer())
      before = sess.run(tf.global_variables())
      with self.assertRaisesRegex(
          ValueError, f"`checkpoint` must be whole: {path} cannot be read"):
        towers.checkpoints.restore(sess, path)
      for one, other in zip(before, sess.run(tf.global_variables())):
        np.testing.assert_array_equal(one, other)

  def test_rejects_a_finalized_graph(self):
    path = self.write(MODEL)
    with tf.Graph().as_default() as graph, testing.session() as sess:
      build(1)
      graph.finalize()
      with self.assertRaisesRegex(
          ValueError, "`session` must have a graph that can still be added to:"
          r".* `towers.checkpoints.init_fn\(...\)`"):
        towers.checkpoints.restore(sess, path)

  def test_an_ended_session_says_so_itself(self):
    path = self.write(MODEL)
    with tf.Graph().as_default():
      build(1)
      with testing.session() as sess:
        pass
      with self.assertRaisesRegex(RuntimeError, "closed"):
        towers.checkpoints.restore(sess, path)


class InitFnTest(CheckpointsTest):

  def scaffold(self, path, **options):
    """Returns a scaffold and the graph that it is for."""
    graph = build(2, "adam")
    init_fn = towers.checkpoints.init_fn(path, **options)
    return tf.train.Scaffold(init_fn=init_fn,
                             saver=towers.checkpoints.Saver()), graph, init_fn

  def test_fresh_then_continued(self):
    """Its own directory comes first, as soon as there is a checkpoint."""
    path = self.write(FOREIGN["tower_loop"])
    folder, lines = self.create_tempdir().full_path, []
    for step in (0, 1):
      with tf.Graph().as_default():
        scaffold, graph, init_fn = self.scaffold(path, log=lines.append)
        more = tf.train.get_global_step().assign_add(1)
        with tf.train.MonitoredTrainingSession(
            scaffold=scaffold, checkpoint_dir=folder, log_step_count_steps=None,
            config=testing.config()) as sess:
          self.assertEqual(sess.run(tf.train.get_global_step()), step)
          self.check_outputs(sess, graph)
          sess.run(more)
    self.assertEqual(lines, [str(init_fn.report)])

  def test_replicated_variables_need_nothing_more(self):
    path = self.write(FOREIGN["tower_loop"])
    with tf.Graph().as_default():
      graph = towers.build_towers(model, testing.devices(3),
                                  inputs=tf.constant(IMAGES),
                                  variables="replicated")
      with tf.train.MonitoredTrainingSession(
          scaffold=tf.train.Scaffold(
              init_fn=towers.checkpoints.init_fn(path)),
          config=testing.config()) as sess:
        self.check_outputs(sess, graph)

  def test_c019_its_own_directory_holds_another_optimizer(self):
    folder = self.create_tempdir().full_path
    with tf.Graph().as_default(), testing.session() as sess:
      build(2, "momentum")
      sess.run(tf.global_variables_initializer())
      tf.train.Saver().save(sess, os.path.join(folder, "model.ckpt"),
                            tf.train.get_global_step())
    with tf.Graph().as_default():
      build(1, "adam")
      with self.assertRaisesRegex(
          ValueError, "model.ckpt-0 lacks 12 of 20: `beta1_power`, "
          "`beta2_power`, `conv/kernel/Adam`, .*init_fn"):
        tf.train.MonitoredTrainingSession(
            scaffold=tf.train.Scaffold(saver=towers.checkpoints.Saver()),
            checkpoint_dir=folder, config=testing.config())

  def test_damaged_file(self):
    path = self.write(MODEL)
    checkpoint_cases.truncate(path)
    with tf.Graph().as_default():
      scaffold, _, _ = self.scaffold(path)
      with self.assertRaisesRegex(
          ValueError, f"must be whole: {path} cannot be read"):
        tf.train.MonitoredTrainingSession(scaffold=scaffold,
                                          config=testing.config())


class SaverTest(CheckpointsTest):

  def test_saves_and_restores_as_that_of_tensorflow(self):
    with tf.Graph().as_default(), testing.session() as sess:
      w = tf.get_variable("w", initializer=value(0))
      sess.run(w.initializer)
      saver = towers.checkpoints.Saver({"weights": w}, max_to_keep=1)
      path = saver.save(sess, self.path(), global_step=3)
      self.assertEqual(tf.train.list_variables(path), [("weights", [2, 3])])
      sess.run(w.assign(value(1)))
      saver.restore(sess, path)
      np.testing.assert_array_equal(sess.run(w), value(0))
      self.assertEqual(saver.last_checkpoints, [path])

  @parameterized.named_parameters(
      ("missing", {"a": [2, 3], "b": [3], "c": [3]},
       "lacks 2 of 3: `b`, `c`. To restore what fits"),
      ("shape", {"a": [3, 2]}, "has other shapes in 1 of 1: `a` "
       r"\(float32\[2, 3\], not float32\[3, 2\]\). To"),
      ("both", {"a": [3], "b": [3]}, "lacks 1 of 2: `b` and has other shapes "
       "in 1 of 2: `a`"),
  )
  def test_rejects(self, shapes, message):
    path = self.write({"a": value(0)})
    with tf.Graph().as_default(), testing.session() as sess:
      for name, shape in shapes.items():
        tf.get_variable(name, shape)
      with self.assertRaisesRegex(ValueError, message):
        towers.checkpoints.Saver().restore(sess, path)

  def test_damaged_and_missing_files(self):
    path = self.write({"a": value(0)})
    good = checkpoint_cases.write(path + "-good", {"a": value(0)})
    checkpoint_cases.truncate(path)
    with tf.Graph().as_default(), testing.session() as sess:
      tf.get_variable("a", [2, 3])
      saver = towers.checkpoints.Saver()
      with self.assertRaisesRegex(
          ValueError, f"whole: {path} cannot be read .* there is {good};"):
        saver.restore(sess, path)
      with self.assertRaisesRegex(
          ValueError, f"must exist: got {path}-2, .* there is {good};"):
        saver.restore(sess, path + "-2")
      with self.assertRaisesRegex(ValueError, "save_path when it is None"):
        saver.restore(sess, None)


class WriteCleanedTest(CheckpointsTest):

  @parameterized.named_parameters(*FOREIGN.items())
  def test_saver_restores_it(self, values):
    path, output = self.write(values), self.path("new/cleaned")
    report = towers.checkpoints.write_cleaned(
        path, output, variables={key: x.shape for key, x in MODEL.items()})
    self.assertCountEqual(report.sources, MODEL)
    got = checkpoint_cases.read(output)
    self.assertCountEqual(got, MODEL)
    for key in MODEL:
      self.assertEqual(got[key].tobytes(), MODEL[key].tobytes())
    self.assertEqual(tf.train.latest_checkpoint(os.path.dirname(output)),
                     output)
    with tf.Graph().as_default(), testing.session() as sess:
      graph = towers.build_towers(model, testing.devices(2),
                                  inputs=tf.constant(IMAGES))
      tf.train.Saver().restore(sess, output)
      self.check_outputs(sess, graph)

  def test_without_variables_names_are_cleaned(self):
    path, output = self.write({
        "tower_0/bn/mean/EMA": value(0), "tower_1/bn/mean/EMA": value(0),
        "tower_0/fc/W": value(1), "step": np.int64(5), "text": np.array(b"a"),
    }), self.path()
    towers.checkpoints.write_cleaned(path, output)
    got = checkpoint_cases.read(output)
    self.assertCountEqual(got, ["bn/moving_mean", "fc/W", "step", "text"])
    np.testing.assert_array_equal(got["bn/moving_mean"], value(0))
    self.assertEqual(got["step"], 5)
    self.assertEqual(got["text"], b"a")

  def test_like_another_checkpoint(self):
    path, output = self.write({"v0/w": value(0), "v0/x": value(1)}), self.path()
    other, lines = self.write({"w": value(3), "w/Adam": value(3)}), []
    report = towers.checkpoints.write_cleaned(path, output, variables=other,
                                              log=lines.append)
    self.assertEqual(report.initial, ("w/Adam",))
    self.assertEqual(report.unused, ("v0/x",))
    self.assertEqual(lines, [str(report)])
    np.testing.assert_array_equal(checkpoint_cases.read(output)["w"], value(0))

  def test_never_replaces_another(self):
    path, output = self.write({"tower_0/w": value(0)}), self.write(
        {"w": value(1)})
    with self.assertRaisesRegex(
        ValueError, f"`output` must not exist: got {output}. Give another"):
      towers.checkpoints.write_cleaned(path, output)
    np.testing.assert_array_equal(checkpoint_cases.read(output)["w"], value(1))
    towers.checkpoints.write_cleaned(path, output, overwrite=True)
    np.testing.assert_array_equal(checkpoint_cases.read(output)["w"], value(0))

  def test_leaves_the_list_of_a_directory(self):
    latest = self.write({"w": value(1)})
    output = os.path.join(os.path.dirname(latest), "cleaned")
    towers.checkpoints.write_cleaned(self.write({"v0/w": value(0)}), output)
    self.assertEqual(
        tf.train.latest_checkpoint(os.path.dirname(latest)), latest)

  def test_rejects_itself(self):
    path = self.write({"tower_0/w": value(0)})
    with self.assertRaisesRegex(
        ValueError, f"`output` must be another file than .*: got {path}"):
      towers.checkpoints.write_cleaned(path, path, overwrite=True)

  def test_rejects_what_cannot_be_written(self):
    path = self.write({"tower_0/w": value(0)})
    with self.assertRaisesRegex(
        ValueError, "`output` must be a prefix of files that can be written: "
        r"got .*model\.index/x"):
      towers.checkpoints.write_cleaned(path, path + ".index/x")

  def test_damaged_file_leaves_nothing_behind(self):
    path, output = self.write({"tower_0/w": value(0)}), self.path()
    checkpoint_cases.truncate(path)
    with self.assertRaisesRegex(ValueError, f"whole: {path} cannot be read"):
      towers.checkpoints.write_cleaned(path, output)
    self.assertFalse(os.path.exists(output + ".index"))


if __name__ == "__main__":
  tf.test.main()
