"""Tests for tools/inspect_graph.py."""

import contextlib
import io
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import loop_cases
from tools import inspect_graph

MODEL = """
import tensorflow.compat.v1 as tf

def loss_fn(x):
  return {"loss": tf.reduce_mean(tf.matmul(x, tf.get_variable("w", [4, 3])))}

def outputs_fn(x):
  return {"y": tf.matmul(x, tf.get_variable("w", [4, 3]))}

def broken_fn(x):
  return "loss"

def text_fn(x):
  return {"length": tf.strings.length(x)}

def failing_fn(x):
  check = tf.debugging.Assert(tf.reduce_sum(x) > 1e6, ["no such step"])
  with tf.control_dependencies([check]):
    return {"y": tf.identity(x)}
"""


def run(*arguments):
  """Returns status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = inspect_graph.main(["inspect_graph.py", *arguments])
  return status, out.getvalue(), err.getvalue()


class ModelTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir())
    self.file = self.create_tempfile("model.py", MODEL).full_path

  @parameterized.named_parameters(("two", 2), ("three", 3))
  def test_model_by_name(self, num_towers):
    status, out, err = run("--model=resnet8", f"--num_towers={num_towers}",
                           "--check", "--batch_size=7")
    self.assertEqual((status, err), (0, ""))
    self.assertIn(f"{num_towers} towers, 0 findings. Train op: Momentum.", out)
    self.assertRegex(out, r"(?m)^/CPU:0 +/CPU:1 +parameters +23 ")
    self.assertRegex(
        out, r"(?m)^conv/batch_normalization +towers.batch_norm +\[0, 1, 2\]$")

  @parameterized.parameters("resnet", "alexnet", "unet", "fcn", "simclr",
                            "dcgan")
  def test_every_kind_of_model(self, name):
    status, out, err = run(
        f"--model={name}", "--num_towers=2", "--batch_size=5", "--check")
    self.assertEqual((status, err), (0, ""), out)
    self.assertIn(" 2 towers, 0 findings.", out)

  def test_writes_files(self):
    paths = [self.folder / name for name in ("r.json", "r.png", "logs")]
    status, _, err = run("--model=convnet", "--image_size=8",
                         f"--json={paths[0]}", f"--picture={paths[1]}",
                         f"--logdir={paths[2]}")
    self.assertEqual((status, err), (0, ""))
    report = json.loads(paths[0].read_text(encoding="utf-8"))
    self.assertLen(report["towers"], 2)
    self.assertStartsWith(paths[1].read_bytes(), b"\x89PNG")
    events, = paths[2].iterdir()
    status, out, _ = run(f"--graph={events}")
    self.assertEqual(status, 0)
    self.assertStartsWith(out, f"{report['num_ops']:,} ops, 2 towers, ")

  @parameterized.named_parameters(
      ("by_name", ["--model=convnet", "--image_size=8", "--num_towers=3"],
       "towers/tower_2/"),
      ("loss", ["--model=FILE:loss_fn", "--inputs=float32[?,4]"],
       "towers/tower_1/MatMul"),
      ("outputs", ["--model=FILE:outputs_fn", "--inputs=float32[5,4]"],
       "towers/tower_1/MatMul"))
  def test_trace(self, arguments, name):
    """Times and memory stand under the names that the graph is shown with."""
    status, _, err = run(
        *(argument.replace("FILE", self.file) for argument in arguments),
        "--trace", f"--logdir={self.folder}/logs")
    self.assertEqual((status, err), (0, ""))
    path, = (self.folder / "logs").iterdir()
    graph, metadata = tf.GraphDef(), tf.RunMetadata()
    for event in tf.train.summary_iterator(str(path)):
      graph.MergeFromString(event.graph_def)
      if event.tagged_run_metadata.run_metadata:
        self.assertEqual(event.tagged_run_metadata.tag, "traced_step")
        metadata.MergeFromString(event.tagged_run_metadata.run_metadata)
    shown = {node.name for node in graph.node}
    ran = {node.node_name: node for device in metadata.step_stats.dev_stats
           for node in device.node_stats}
    found = [ran[key] for key in sorted(ran)
             if key in shown and key.startswith(name)]
    self.assertNotEmpty(found)
    self.assertGreater(sum(node.all_end_rel_micros for node in found), 0)
    self.assertTrue(any(node.memory for node in found))

  def test_function_of_a_file(self):
    status, out, err = run(f"--model={self.file}:loss_fn",
                           "--inputs=float32[?,4]", "--devices=/gpu:0,/gpu:1")
    self.assertEqual((status, err), (0, ""))
    self.assertRegex(out, r"(?m)^tower 1 +\d+  /GPU:1")
    self.assertRegex(out, r"(?m)^w +\[4, 3\] +float32 +48 B +/CPU:0")

  def test_function_without_a_loss(self):
    status, out, _ = run(f"--model={self.file}:outputs_fn",
                         "--inputs=float32[?,4]")
    self.assertEqual(status, 0)
    self.assertIn("No train op is known.", out)

  def test_help(self):
    status, out, _ = run("--help")
    self.assertEqual(status, 0)
    self.assertIn("python tools/inspect_graph.py --model=resnet20", out)
    self.assertIn("--[no]check", out)

  @parameterized.named_parameters(
      ("unknown_flag", ["--modle=x"], "Unknown command line flag 'modle'"),
      ("stray", ["resnet20"], "there must be flags only: got resnet20"),
      ("nothing", [], "`--model` or `--graph` must be given, and not both"),
      ("both", ["--model=resnet8", "--graph=x.pb"], "and --graph=x.pb"),
      ("no_model", ["--model=resnet21"],
       "`--model` must be one of convnet, .*, or a function as FILE.py:NAME: "
       "got resnet21"),
      ("no_file", ["--model=none.py:f"], "`model` must be a file or module"),
      ("no_towers", ["--model=resnet8", "--num_towers=0"], "num_towers"),
      ("two_counts", ["--model=resnet8", "--num_towers=1", "--devices=/cpu:0"],
       "`--num_towers` and `--devices` must not both be given"),
      ("bad_device", ["--model=convnet", "--devices=/xpu:x"], "`devices"),
      ("train_op", ["--model=convnet", "--train_op=x"],
       "`--train_op` must be given with `--graph` only"),
      ("trace", ["--model=convnet", "--trace"],
       "`--trace` must be given with --model and --logdir: got --model=convnet "
       "and --logdir=None"),
      ("pattern", ["--model=convnet", "--tower_pattern=tower"],
       "`tower_pattern` must have a group"),
      ("picture", ["--model=convnet", "--picture=towers.xyz"],
       "`path` must end in one of .png"),
      ("json", ["--model=convnet", "--json=/proc/none/r.json"],
       "must name what can be written: .*No such file"),
      ("logdir", ["--model=convnet", "--logdir=/proc/none/logs"],
       "must name what can be written"))
  def test_rejects(self, arguments, message):
    status, out, err = run(*arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^inspect_graph.py: .*{message}")
    self.assertLen(err.strip().splitlines(), 1)

  @parameterized.named_parameters(
      ("shape", "loss_fn", "--inputs=float32[8,?]",
       r"with inputs that are numbers, .*: got float32 of shape \(8, \?\)"),
      ("type", "text_fn", "--inputs=string[?]", "got string of shape"),
      ("step", "failing_fn", "--inputs=float32[?,4]",
       r"with a model that .* \(.*no such step"))
  def test_rejects_step_to_trace(self, name, inputs, message):
    status, out, err = run(f"--model={self.file}:{name}", inputs, "--trace",
                           f"--logdir={self.folder}/logs")
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^inspect_graph.py: `--trace` .*{message}")
    self.assertLen(err.strip().splitlines(), 1)

  @parameterized.named_parameters(
      ("inputs", "loss_fn", "--inputs=float33[4]", "got 'float33"),
      ("returns", "broken_fn", "--inputs=float32[?,4]", "`model_fn`"))
  def test_rejects_function(self, name, inputs, message):
    status, _, err = run(f"--model={self.file}:{name}", inputs)
    self.assertEqual(status, 2)
    self.assertRegex(err, message)
    self.assertLen(err.strip().splitlines(), 1)


class FileTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir())
    self.built = loop_cases.loop(lambda x, i: loop_cases.linear_loss(
        tf.nn.dropout(x, rate=0.5, seed=1), i), 3)

  def written(self, name):
    graph, folder = self.built.graph, str(self.folder)
    if name == "model.meta":
      tf.train.export_meta_graph(f"{folder}/{name}", graph=graph)
    elif name == "saved_model.pb":
      config = tf.ConfigProto(allow_soft_placement=True)
      with graph.as_default(), tf.Session(config=config) as sess:
        builder = tf.saved_model.Builder(f"{folder}/saved")
        sess.run(tf.global_variables_initializer())
        builder.add_meta_graph_and_variables(sess, ["train"])
        builder.save()
      return self.folder / "saved" / name
    elif name == "events":
      tf.summary.FileWriter(folder, graph).close()
      path, = self.folder.glob("*tfevents*")
      return path
    else:
      tf.io.write_graph(graph, folder, name, as_text=name.endswith("txt"))
    return self.folder / name

  @parameterized.named_parameters(
      ("binary", "graph.pb"), ("text", "graph.pbtxt"), ("meta", "model.meta"),
      ("events", "events"), ("saved", "saved_model.pb"))
  def test_reads(self, name):
    status, out, err = run(f"--graph={self.written(name)}")
    self.assertEqual((status, err), (0, ""))
    self.assertRegex(out, r"^\d+ ops, 3 towers, 1 findings\. Train op: Mom")
    self.assertIn("FINDING same_seed", out)

  def test_check(self):
    path = self.written("model.meta")
    self.assertEqual(run(f"--graph={path}", "--check")[0], 1)
    self.assertEqual(run(f"--graph={path}", "--nocheck")[0], 0)

  def test_train_op_and_pattern(self):
    path = self.written("graph.pb")
    _, out, _ = run(f"--graph={path}", "--train_op=Momentum:0",
                    r"--tower_pattern=tower_([02])/")
    self.assertIn("2 towers", out)
    self.assertIn("Train op: Momentum.", out)

  @parameterized.named_parameters(
      ("no_file", "none.pb", None, r"can be read: got .*none.pb \(No such"),
      ("no_events", "tfevents.1", None, "can be read: got"),
      ("garbage", "a.pb", b"\xff\xff\xff", "can be read: got"),
      ("garbage_meta", "a.meta", b"\xff\xff\xff", "can be read: got"),
      ("garbage_text", "a.pbtxt", b"node {", "can be read: got"),
      ("garbage_events", "tfevents.2", b"12345678901234567890",
       "can be read: got"),
      ("binary_as_text", "b.pbtxt", b"\xff\xfe\x00", "can be read: got"),
      ("empty", "c.pb", b"", "must be a file with a graph: there is no op"),
      ("ending", "c.txt", b"", "must be a file ending in .pb, .pbtxt or"),
      ("saved", "saved_model.pb", b"", "must be a file with a graph"))
  def test_rejects(self, name, content, message):
    path = self.folder / name
    if content is not None:
      path.write_bytes(content)
    status, out, err = run(f"--graph={path}")
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"^inspect_graph.py: `--graph` .*{message}")
    self.assertLen(err.strip().splitlines(), 1)

  def test_rejects_train_op(self):
    status, _, err = run(f"--graph={self.written('graph.pb')}",
                         "--train_op=none")
    self.assertEqual(status, 2)
    self.assertRegex(err, "`train_op` must be an op or tensor of .*'none'")


if __name__ == "__main__":
  absltest.main()
