"""Tests for tools/import_checkpoint.py."""

import contextlib
import io
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import checkpoint_cases
from checkpoint_cases import value
from tools import import_checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONVNET = f"--model={ROOT}/models/convnet.py:logits"
IMAGES = "--inputs=float32[?,8,8,1]"
ARGUMENTS = '--arguments={"num_classes": 3, "training": true}'

MODEL = """
import tensorflow.compat.v1 as tf

def small(x):
  return tf.matmul(x, tf.get_variable("dense/kernel", [3, 2]))

def nothing(x):
  return x

def fails(x):
  raise KeyError("as planned")
"""


def run(*arguments):
  """Returns status, standard output and standard error."""
  import_checkpoint.FLAGS.unparse_flags()
  for name in list(import_checkpoint.FLAGS):
    import_checkpoint.FLAGS[name].unparse()
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = import_checkpoint.main(["import_checkpoint.py", *arguments])
  return status, out.getvalue(), err.getvalue()


class ImportCheckpointTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    self.file = self.create_tempfile("model.py", MODEL).full_path
    self.output = os.path.join(self.folder, "out", "model.ckpt-7")

  def write(self, values, name="in"):
    return checkpoint_cases.write(os.path.join(self.folder, name), values)

  def test_a_model_of_the_checkout(self):
    with tf.Graph().as_default():
      from models import convnet  # pylint: disable=import-outside-toplevel
      convnet.logits(tf.zeros([2, 8, 8, 1]), num_classes=3, training=True)
      shapes = {v.op.name: v.shape.as_list() for v in tf.global_variables()}
    values = {name: value(k, shape)
              for k, (name, shape) in enumerate(shapes.items())}
    path = self.write({
        **{f"tower_{k}/{name}": x for name, x in values.items()
           for k in (0, 1)},
        "tower_0/dense/kernel/Momentum": value(1)})
    status, out, err = run(f"--checkpoint={path}", f"--output={self.output}",
                           CONVNET, IMAGES, ARGUMENTS)
    self.assertEqual((status, err), (0, ""))
    self.assertRegex(out, r"renamed +dense/kernel +tower_0/dense/kernel\n")
    self.assertRegex(out, r"left over +tower_0/dense/kernel/Momentum\n")
    self.assertIn(f"\n0 restored, {len(values)} renamed, ", out)
    self.assertEndsWith(out, f"\nWrote {self.output}.\n")
    got = checkpoint_cases.read(self.output)
    self.assertCountEqual(got, values)
    for name, x in values.items():
      np.testing.assert_array_equal(got[name], x)

  def test_like_another_checkpoint(self):
    path = self.write({"v0/w": value(0), "v0/w/Adam": value(1),
                       "v1/w": value(0)})
    like = self.write({"w": value(2), "w/Adam": value(2)}, "like")
    self.assertEqual(run(f"--checkpoint={path}", f"--output={self.output}",
                         f"--like={like}")[0], 0)
    got = checkpoint_cases.read(self.output)
    np.testing.assert_array_equal(got["w/Adam"], value(1))
    self.assertCountEqual(got, ["w", "w/Adam"])

  def test_names_alone(self):
    path = self.write({"tower_0/bn/mean/EMA": value(0), "step": np.int64(1)})
    status, out, _ = run(f"--checkpoint={path}")
    self.assertEqual(status, 0)
    self.assertRegex(out, r"renamed +bn/moving_mean +tower_0/bn/mean/EMA\n")
    self.assertNotIn("Wrote", out)
    self.assertEqual(run(f"--checkpoint={path}", f"--output={self.output}")[0],
                     0)
    self.assertCountEqual(checkpoint_cases.read(self.output),
                          ["bn/moving_mean", "step"])

  def test_options(self):
    path = self.write({"tower_0/net/w": value(0), "tower_1/net/w": value(1),
                       "tower_0/net/x": value(2)})
    status, _, err = run(
        f"--checkpoint={path}", f"--output={self.output}", "--tower=1",
        "--rename=^(tower_.)/net/=>\\1/model/", "--exclude=x$")
    self.assertEqual((status, err), (0, ""))
    got = checkpoint_cases.read(self.output)
    self.assertCountEqual(got, ["model/w"])
    np.testing.assert_array_equal(got["model/w"], value(1))

  def test_renumbers_layers(self):
    path = self.write({"dense_1/kernel": value(0, [3, 2])})
    flags = (f"--checkpoint={path}", f"--model={self.file}:small",
             "--inputs=float32[?,3]")
    self.assertEqual(run(*flags)[0], 0)
    status, _, err = run(*flags, "--norenumber_layers")
    self.assertEqual(status, 2)
    self.assertIn("lacks 1: `dense/kernel`", err)

  def test_overwrite(self):
    path = self.write({"tower_0/w": value(0)})
    flags = (f"--checkpoint={path}", f"--output={self.output}")
    run(*flags)
    status, out, err = run(*flags)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, f"`output` must not exist: got {self.output}")
    self.assertEqual(run(*flags, "--overwrite")[0], 0)

  @parameterized.named_parameters(
      ("unknown_flag", ["--modle=x"], "Unknown command line flag 'modle'"),
      ("positional", ["stray"], "`stray` is no flag"),
      ("no_file", ["--checkpoint=none/model"], "`checkpoint` must exist: got"),
      ("no_like", ["--like=none/model"], "`checkpoint` must exist: got none"),
      ("no_model", ["--model=none.py:f"], "`model` must be a file or module"),
      ("both", ["--model=a:b", "--like=c"], "`--model` and `--like` must not"),
      ("no_rename", ["--rename=a"], "`--rename` must be .* got 'a'"),
      ("bad_pattern", ["--include=("], "`include` must be regular expressions"),
      ("no_json", ["--model=a:b", "--arguments=x"], "`--arguments` must be a"),
      ("tower", ["--tower=x"], "flag --tower=x"),
      ("differ", [], "several, which differ, for 1: `w` by `tower_0/w`, `t"),
  )
  def test_rejects(self, arguments, message):
    path = self.write({"tower_0/w": value(0), "tower_1/w": value(1)})
    status, out, err = run(f"--checkpoint={path}", *arguments)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, message)
    self.assertLen(err.strip().splitlines(), 1)

  def test_rejects_no_checkpoint(self):
    status, _, err = run(f"--output={self.output}")
    self.assertEqual(status, 2)
    self.assertIn("`--checkpoint` must be given", err)

  @parameterized.parameters(
      ("small", ["--inputs=float32[?,4]"], "`model` must build .* ValueError"),
      ("small", [], "`model` must build .* got TypeError"),
      ("fails", ["--inputs=float32[3]"], "must build .* KeyError .'as plan"),
      ("nothing", ["--inputs=float32[3]"], "`model` must make variables"),
  )
  def test_rejects_a_model(self, name, inputs, message):
    path = self.write({"w": value(0)})
    status, _, err = run(f"--checkpoint={path}", f"--model={self.file}:{name}",
                         *inputs)
    self.assertEqual(status, 2)
    self.assertRegex(err, message)

  @parameterized.parameters(
      ("index", "`checkpoint` must be whole"),
      ("data-00000-of-00001", "must be whole: .* good one there is .*/other;"))
  def test_rejects_a_damaged_file(self, part, message):
    self.write({"w": value(0)}, "other")
    path = self.write({"w": value(0)})
    checkpoint_cases.truncate(path, part=part)
    status, _, err = run(f"--checkpoint={path}", f"--output={self.output}")
    self.assertEqual(status, 2)
    self.assertRegex(err, message)
    self.assertLen(err.strip().splitlines(), 1)
    self.assertFalse(os.path.exists(self.output + ".index"))

  def test_as_a_script(self):
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "import_checkpoint.py"),
         "--checkpoint=none/model"],
        cwd=self.folder, capture_output=True, text=True, check=False)
    self.assertEqual((result.returncode, result.stdout), (2, ""))
    self.assertStartsWith(result.stderr, "import_checkpoint: `checkpoint` must")
    self.assertLen(result.stderr.splitlines(), 1)


if __name__ == "__main__":
  absltest.main()
