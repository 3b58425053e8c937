"""Tests for towers.picture."""

import pathlib
import sys
from unittest import mock
from xml.etree import ElementTree

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import loop_cases
import towers
from towers import inspection


def report_of(num_towers):
  with tf.Graph().as_default():
    graph = towers.build_towers(
        lambda x: tf.reduce_mean(tf.matmul(
            towers.batch_norm(x, training=True), loop_cases.weights())),
        [f"/cpu:{i}" for i in range(num_towers)],
        inputs=loop_cases.inputs(2 * num_towers))
    train_op = graph.minimize(tf.train.MomentumOptimizer(0.1, 0.9))
    return inspection.report(graph, train_op=train_op)


class PictureTest(parameterized.TestCase):

  @parameterized.named_parameters(("png", ".png", b"\x89PNG"),
                                  ("svg", ".svg", b"<?xml"),
                                  ("pdf", ".pdf", b"%PDF"))
  def test_formats(self, ending, start):
    path = pathlib.Path(self.create_tempdir(), f"towers{ending}")
    report_of(2).draw(str(path))
    self.assertStartsWith(path.read_bytes(), start)

  @parameterized.named_parameters(("one", 1), ("three", 3), ("many", 12))
  def test_shows_devices_towers_and_flows(self, num_towers):
    path = str(pathlib.Path(self.create_tempdir(), "towers.svg"))
    report = report_of(num_towers)
    report.draw(path)
    # Matplotlib writes each text into a comment before its outlines.
    parser = ElementTree.XMLParser(
        target=ElementTree.TreeBuilder(insert_comments=True))
    comments = [node.text.strip() for node in
                ElementTree.parse(path, parser).iter(ElementTree.Comment)]
    for i in range(num_towers):
      self.assertContainsSubset([f"/CPU:{i}"], "\n".join(comments).split())
    flows = [t for t in report.transfers if t.purpose == "parameters"]
    self.assertLen(flows, num_towers - 1)
    self.assertEqual(comments.count("80 B"), sum(
        t.num_bytes == 80 and not t.unknown for t in report.transfers))

  def test_ending(self):
    with self.assertRaisesRegex(
        ValueError, "`path` must end in one of .png, .svg, .pdf.*'towers.xyz'"):
      report_of(1).draw("towers.xyz")

  def test_without_matplotlib(self):
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
      with self.assertRaisesRegex(
          ImportError, "`matplotlib` must be installed to draw a report"):
        report_of(1).draw("towers.png")


if __name__ == "__main__":
  absltest.main()
