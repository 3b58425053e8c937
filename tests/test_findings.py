"""Tests for towers.findings."""

from absl.testing import absltest
import tensorflow.compat.v1 as tf

import loop_cases
from towers import findings
from towers import graph_nodes
from towers import scopes as scopes_lib


def context(graph):
  nodes = graph_nodes.read(graph)
  return findings.Context(nodes, scopes_lib.Scopes(nodes), None, [],
                          {v.name: v for v in nodes.variables()})


class UsesTest(absltest.TestCase):

  def test_uses(self):
    def loss(images, index):
      result = loop_cases.linear_loss(images, index)
      if index == 1:
        result += tf.reduce_sum(loop_cases.variable("extra", [2]))
      return result

    with tf.Graph().as_default() as graph:
      for i in range(3):
        with tf.name_scope(f"tower_{i}"), tf.variable_scope(
            "", reuse=tf.AUTO_REUSE):
          loss(loop_cases.inputs(), i)
    found = context(graph)
    towers, = found.scopes.sets
    uses = {variable.name: users
            for variable, users in findings.uses(found, towers).items()}
    self.assertEqual(uses, {"weights": {0, 1, 2}, "extra": {1}})

  def test_towers_behind(self):
    with tf.Graph().as_default() as graph:
      parts = []
      for i in range(3):
        with tf.name_scope(f"tower_{i}"):
          parts.append(tf.square(loop_cases.inputs()))
      tf.add_n(parts, name="all")
      tf.add(parts[0], parts[2], name="some")
      tf.constant(1.0, name="none")
    found = context(graph)
    towers, = found.scopes.sets
    behind = findings.towers_behind(found, towers)
    self.assertEqual([behind[found.nodes.by_name[name]]
                      for name in ("all", "some", "none")], [0b111, 0b101, 0])

  def test_names_are_not_too_many(self):
    nodes = context(loop_cases.loop().graph).nodes.ordered
    self.assertEqual(findings.names(nodes),
                     tuple(node.name for node in nodes[:20]))
    self.assertEqual(findings.names(nodes[:2]),
                     (nodes[0].name, nodes[1].name))


if __name__ == "__main__":
  absltest.main()
