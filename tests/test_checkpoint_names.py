"""Tests for towers.checkpoint_names."""

from absl.testing import absltest
from absl.testing import parameterized

from towers import checkpoint_names


class CheckpointNamesTest(parameterized.TestCase):

  @parameterized.parameters(
      ("conv/kernel", "conv/kernel", None),
      ("tower_0/conv/kernel", "conv/kernel", 0),
      ("tower_12/conv/kernel", "conv/kernel", 12),
      ("tower3/conv/W", "conv/W", 3),
      ("Tower_1/w", "w", 1),
      ("clone_1/conv/weights", "conv/weights", 1),
      ("replica_2/w", "w", 2),
      ("gpu_1/w", "w", 1),
      ("GPU0/w", "w", 0),
      ("v/cg/conv0/kernel", "cg/conv0/kernel", None),
      ("v0/cg/conv0/kernel", "cg/conv0/kernel", 0),
      ("v10/cg/conv0/kernel", "cg/conv0/kernel", 10),
      ("w/replica_1", "w", 1),
      ("w/replica_1/Momentum", "w/Momentum", 1),
      ("tower_1_1/beta1_power", "beta1_power", 1),
      ("tower_1/tower_1/w/Momentum", "w/Momentum", 1),
      ("model/tower_1/w", "model/w", 1),
      ("conv/v1/w", "conv/v1/w", None),
      ("towers/w", "towers/w", None),
      ("tower/w", "tower/w", None),
      ("my_tower_1/w", "my_tower_1/w", None),
      ("v", "v", None),
      ("gpu0", "gpu0", None),
  )
  def test_without_tower(self, name, text, tower):
    self.assertEqual(checkpoint_names.without_tower(name), (text, tower))

  @parameterized.parameters(
      ("bn/mean/EMA", "bn/moving_mean"),
      ("bn/variance/EMA", "bn/moving_variance"),
      ("mean/EMA", "moving_mean"),
      ("bn/running_mean", "bn/moving_mean"),
      ("bn/running_var", "bn/moving_variance"),
      ("fc/W/Momentum", "fc/kernel/Momentum"),
      ("fc/weights", "fc/kernel"),
      ("fc/b", "fc/bias"),
      ("fc/biases", "fc/bias"),
      ("fc/weights_norm", "fc/weights_norm"),
      ("mean/EMA_2", "mean/EMA_2"),
      ("loss/EMA", "loss/EMA"),
  )
  def test_plain(self, name, expected):
    self.assertEqual(checkpoint_names.plain(name), expected)

  @parameterized.parameters(
      ("tower_1/bn/mean/EMA", "bn/moving_mean"),
      ("tower_1/fc/W", "fc/W"),
      ("bn/running_mean", "bn/running_mean"),
  )
  def test_cleaned(self, name, expected):
    self.assertEqual(checkpoint_names.cleaned(name), expected)

  @parameterized.parameters(
      ("conv2d/kernel", "conv2d", "conv2d", (0,), "kernel"),
      ("conv2d_12/kernel", "conv2d_12", "conv2d", (12,), "kernel"),
      ("conv2d_transpose_1/bias", "conv2d_transpose_1", "conv2d_transpose",
       (1,), "bias"),
      ("net/dense_2/kernel/Adam", "net/dense_2", "net/dense", (2,),
       "kernel/Adam"),
      ("model_1/dense_2/kernel", "model_1/dense_2", "model/dense", (1, 2),
       "kernel"),
      ("block_1/dense/kernel", "block_1/dense", "block_1/dense", (0,),
       "kernel"),
  )
  def test_layer(self, name, *expected):
    self.assertEqual(checkpoint_names.layer(name), tuple(expected))

  @parameterized.parameters("w", "conv_1/kernel", "net/dense", "a-b/w",
                            "dense_x/w")
  def test_no_layer(self, name):
    self.assertIsNone(checkpoint_names.layer(name))

  def test_optimizer_names(self):
    names = ["w", "w/Momentum", "training/w/Adam", "beta1_power",
             "training/beta2_power", "global_step", "bn/moving_mean",
             "scope/w2", "w_1"]
    self.assertEqual(
        [name for name, is_one
         in checkpoint_names.optimizer_names(names).items() if is_one],
        ["w/Momentum", "training/w/Adam", "beta1_power",
         "training/beta2_power", "global_step"])


if __name__ == "__main__":
  absltest.main()
