"""Tests of the texts on a task's device."""

from absl.testing import absltest
import cluster_cases
import tensorflow.compat.v1 as tf
from towers import cluster_notice
from towers import cluster_spec


class BoardTest(absltest.TestCase):

  def test_tasks_see_what_others_write(self):
    addresses = cluster_cases.jobs(2, 1)
    members = cluster_spec.members(addresses, "worker", 0)
    spec = tf.train.ClusterSpec(addresses)
    targets = [
        tf.train.Server(spec, job_name=job, task_index=0).target
        for job in ("worker", "ps")
    ]
    # Worker 1 is not there, which must not matter.
    boards = [cluster_notice.Board(members.servers[0], target, members.workers)
              for target in targets]
    self.assertIsNone(boards[1].read())
    self.assertEmpty(boards[1].not_ended())
    notice = cluster_notice.Notice(cluster_notice.TRAINING, {"seed": "\u2116"})
    boards[0].write(notice)
    self.assertEqual(boards[1].read(), notice)
    boards[0].write_end(members.workers[0], False)
    self.assertEqual(boards[1].not_ended(), [members.workers[0]])
    boards[0].write_end(members.workers[0], True)
    self.assertEmpty(boards[1].not_ended())
    for board in boards:
      board.close()


if __name__ == "__main__":
  absltest.main()
