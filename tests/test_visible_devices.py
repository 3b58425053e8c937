"""Tests for tools/visible_devices.py, which keeps GPUs out of a process."""

import contextlib
import io
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from tools import cluster_run
from tools import places
from tools import training
from tools import training_options
from tools import visible_devices


def with_gpus(count):
  gpus = [mock.Mock()] * count
  return mock.patch.object(tf.config, "list_physical_devices",
                           lambda kind=None: gpus if kind == "GPU" else [])


class AskedForTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("one", ["/gpu:1"], ["/gpu:0"], "1"),
      ("two", ["/gpu:2", "/gpu:3"], ["/gpu:0", "/gpu:1"], "2,3"),
      ("order", ["/device:GPU:3", "/gpu:1"], ["/gpu:0", "/gpu:1"], "3,1"),
      ("shared", ["/gpu:2", "/gpu:2"], ["/gpu:0", "/gpu:0"], "2"),
      ("with_cpu", ["/cpu:1", "/gpu:3"], ["/cpu:1", "/gpu:0"], "3"),
      ("number", 3, ["/gpu:0", "/gpu:1", "/gpu:2"], "0,1,2"))
  def test_c085_only_what_is_asked_for_is_visible(self, asked, devices, gpus):
    found = visible_devices.asked_for(asked, num_gpus=4)
    self.assertEqual(found.devices, devices)
    config = tf.ConfigProto(**found.session_options())
    self.assertEqual(config.gpu_options.visible_device_list, gpus)
    self.assertNotIn("GPU", config.device_count)

  @parameterized.named_parameters(
      ("devices", ["/cpu:0", "/cpu:1"], 4), ("number", 2, 0))
  def test_c085_towers_on_cpus_see_no_gpu(self, asked, num_gpus):
    found = visible_devices.asked_for(asked, num_gpus)
    self.assertEqual(found, (asked, ()))
    config = tf.ConfigProto(**found.session_options())
    self.assertEqual(config.device_count["GPU"], 0)
    self.assertEqual(config.gpu_options.visible_device_list, "")
    self.assertEqual(str(found), "no GPU is used")

  @parameterized.named_parameters(
      ("devices", ["/gpu:0", "/gpu:4"]), ("number", 5), ("none", 0))
  def test_leaves_to_the_build_what_is_not_there(self, asked):
    found = visible_devices.asked_for(asked, num_gpus=4)
    self.assertEqual(found, (asked, None))
    self.assertEqual(found.session_options(), {})

  def test_c085_numbers_within_the_process_are_told(self):
    found = visible_devices.asked_for(["/gpu:2", "/gpu:3"], num_gpus=4)
    self.assertEqual(str(found), "/gpu:0 is GPU 2 of this machine, "
                     "/gpu:1 is GPU 3 of this machine")


class TrainTest(absltest.TestCase):

  def test_c085_train_py_puts_them_into_its_config_and_log(self):
    """Up to the session, for which it would take a machine with GPUs."""
    options = training_options.Options(
        devices=["/gpu:2", "/gpu:3"], logdir=self.create_tempdir().full_path)
    trainers, printed = [], io.StringIO()

    def trainer(graph, *unused_arguments):
      trainers.append(graph)
      raise training_options.UsageError("stopped here")

    with with_gpus(4), contextlib.redirect_stdout(printed), \
        mock.patch.object(training, "Trainer", trainer):
      with self.assertRaisesRegex(training_options.UsageError, "stopped here"):
        training.run(options)
    graph, = trainers
    self.assertEqual(graph.config.gpu_options.visible_device_list, "2,3")
    self.assertEqual([tower.device for tower in graph.train.towers],
                     ["/gpu:0", "/gpu:1"])
    self.assertEqual(
        printed.getvalue().splitlines()[0], "/gpu:0 is GPU 2 of this machine, "
        "/gpu:1 is GPU 3 of this machine")

  def test_places_has_them(self):
    with with_gpus(2):
      place = places.Places(training_options.Options(devices=["/gpu:1"]))
    self.assertEqual((place.devices, place.visible.gpus), (["/gpu:0"], (1,)))


class ClusterTest(absltest.TestCase):
  """Up to the server, for which it would take a machine with GPUs."""

  def started(self, job, num_gpus, devices=("/gpu:2", "/gpu:3")):
    """Returns a task's place and the config of its server."""
    options = training_options.Options(
        devices=list(devices), logdir=self.create_tempdir().full_path)
    cluster = cluster_run.ClusterOptions(
        job_name=job, worker_hosts=["localhost:1", "localhost:2"],
        ps_hosts=["localhost:3"])
    with with_gpus(num_gpus), mock.patch.object(tf.train, "Server") as server:
      place = cluster_run.started(cluster, options)
    return place, server.call_args.kwargs["config"]

  def test_c085_worker_sees_what_is_asked_for(self):
    place, config = self.started("worker", num_gpus=4)
    self.assertEqual(config.gpu_options.visible_device_list, "2,3")
    self.assertEqual(place.devices, [
        f"/job:worker/task:{task}/device:GPU:{gpu}"
        for task in range(2) for gpu in range(2)])
    # Its tests run in a session of their own, for which it must be the same.
    self.assertEqual(place.visible.gpus, (2, 3))

  def test_c085_worker_on_its_cpu_sees_none(self):
    _, config = self.started("worker", num_gpus=4, devices=["/cpu:0", "/cpu:1"])
    self.assertEqual(dict(config.device_count), {"CPU": 2, "GPU": 0})

  def test_c085_parameter_server_sees_none(self):
    for num_gpus in (0, 4):
      _, config = self.started("ps", num_gpus)
      self.assertEqual(dict(config.device_count), {"CPU": 1, "GPU": 0})

  def test_devices_that_are_not_on_a_workers_host(self):
    with self.assertRaisesRegex(
        training_options.UsageError,
        "`--devices` must be on every worker's host: got /gpu:2,/gpu:3, not "
        "all of which are on this one, which has 3 GPUs."):
      self.started("worker", num_gpus=3)


if __name__ == "__main__":
  absltest.main()
