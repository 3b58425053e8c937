"""Tests for tools/visible_devices.py, which keeps GPUs out of a process."""

import contextlib
import io
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

from tools import places
from tools import training
from tools import training_options
from tools import visible_devices


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

  def with_gpus(self, count):
    gpus = [mock.Mock()] * count
    return mock.patch.object(tf.config, "list_physical_devices",
                             lambda kind=None: gpus if kind == "GPU" else [])

  def test_c085_train_py_puts_them_into_its_config_and_log(self):
    """Up to the session, for which it would take a machine with GPUs."""
    options = training_options.Options(
        devices=["/gpu:2", "/gpu:3"], logdir=self.create_tempdir().full_path)
    trainers, printed = [], io.StringIO()

    def trainer(graph, *unused_arguments):
      trainers.append(graph)
      raise training_options.UsageError("stopped here")

    with self.with_gpus(4), contextlib.redirect_stdout(printed), \
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
    with self.with_gpus(2):
      place = places.Places(training_options.Options(devices=["/gpu:1"]))
    self.assertEqual((place.devices, place.visible.gpus), (["/gpu:0"], (1,)))


if __name__ == "__main__":
  absltest.main()
