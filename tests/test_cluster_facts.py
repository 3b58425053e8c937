"""Tests of what must be the same in all tasks."""

import pathlib
import sys
from unittest import mock

from absl.testing import absltest
import tensorflow.compat.v1 as tf
from towers import cluster_facts
from towers import cluster_network
from towers import cluster_spec

MEMBERS = cluster_spec.members({"worker": ["a:1"], "ps": ["b:1"]}, "ps", 0)


def collect(given=(), **arguments):
  return cluster_facts.collect(
      dict(given), MEMBERS, replication="in_graph", **arguments)


class FactsTest(absltest.TestCase):

  def test_same_facts(self):
    cluster_facts.check(collect({"seed": "1"}), collect({"seed": "1"}),
                        MEMBERS.own)

  def test_names_each_difference(self):
    with self.assertRaisesRegex(
        cluster_network.ClusterError,
        r"`facts` must be the same in all tasks: got differences in ps 0 "
        r"\(b:1\): more is none here and '2' at the chief; seed is '1' here "
        r"and '3' at the chief\. Start"):
      cluster_facts.check(collect({"seed": "1"}),
                          collect({"seed": "3", "more": "2"}), MEMBERS.own)

  def test_variables_where_there_is_a_graph(self):
    with tf.Graph().as_default():
      one = [tf.get_variable("a", [2], use_resource=True)]
    with tf.Graph().as_default():
      other = [tf.get_variable("a", [3], use_resource=True)]
    chief = collect(variables=one)
    cluster_facts.check(collect(variables=one), chief, MEMBERS.own)
    cluster_facts.check(collect(), chief, MEMBERS.own)
    with self.assertRaisesRegex(
        cluster_network.ClusterError,
        r"variable a is 'float32 \(3,\)' here and 'float32 \(2,\)' at"):
      cluster_facts.check(collect(variables=other), chief, MEMBERS.own)

  def test_other_program_of_the_same_name(self):
    programs = []
    for text in ("print(1)", "print(2)"):
      path = pathlib.Path(self.create_tempdir().full_path, "train.py")
      path.write_text(text)
      with mock.patch.object(sys, "argv", [str(path)]):
        programs.append(collect())
    with self.assertRaisesRegex(
        cluster_network.ClusterError,
        r"program is 'train.py \w{12}' here and 'train.py \w{12}' at"):
      cluster_facts.check(*programs, MEMBERS.own)


if __name__ == "__main__":
  absltest.main()
