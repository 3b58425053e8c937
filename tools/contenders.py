"""Who takes part in the benchmark: ways to train one model on several devices.

Each contender takes the network, the placeholders of the whole batch and the
number of towers. The first line of its docstring goes under the tables.
`MirroredStrategy`, which graph mode does not take, is in `mirrored`.
"""

from typing import List, NamedTuple, Sequence

import tensorflow.compat.v1 as tf
import towers

from tools import cut_loop
from tools import networks


class Built(NamedTuple):
  """What a contender builds: the op of one step, and a config to run it."""
  train_op: tf.Operation
  config: tf.ConfigProto


def one_device(network: networks.Network, images: tf.Tensor,
               labels: tf.Tensor, num_towers: int) -> Built:
  """plain code on one device, with the batch of all towers"""
  del num_towers
  loss = network.loss(images, labels)
  with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    train_op = optimizer().minimize(loss)
  return Built(train_op, tf.ConfigProto())


def tower_loop(network: networks.Network, images: tf.Tensor,
               labels: tf.Tensor, num_towers: int) -> Built:
  """the tower loop of the CIFAR-10 tutorial, batch norm by tower"""
  shards = zip(tf.split(images, num_towers), tf.split(labels, num_towers))
  opt = optimizer()
  tower_gradients, update_ops = [], None
  for i, (tower_images, tower_labels) in enumerate(shards):
    with tf.device(f"/cpu:{i}"), tf.name_scope(f"tower_{i}"):
      with tf.variable_scope(tf.get_variable_scope(), reuse=i > 0):
        loss = network.loss(tower_images, tower_labels)
      if update_ops is None:
        update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
      tower_gradients.append(opt.compute_gradients(loss))
  with tf.control_dependencies(update_ops):
    train_op = opt.apply_gradients(_averaged(tower_gradients))
  return Built(train_op, tf.ConfigProto(device_count={"CPU": num_towers}))


def _averaged(tower_gradients: Sequence[List]) -> List:
  """Averages as the tutorial does."""
  averaged = []
  for pairs in zip(*tower_gradients):
    gradients = [tf.expand_dims(gradient, 0) for gradient, _ in pairs]
    gradient = tf.reduce_mean(tf.concat(gradients, axis=0), 0)
    averaged.append((gradient, pairs[0][1]))
  return averaged


def cut_tower_loop(network: networks.Network, images: tf.Tensor,
                   labels: tf.Tensor, num_towers: int) -> Built:
  """a tower loop cut at each batch norm layer, which is gathered on the CPU"""
  losses = cut_loop.losses(network, images, labels, num_towers)
  opt = optimizer()
  tower_gradients = []
  for i, loss in enumerate(losses):
    with tf.device(f"/cpu:{i}"), tf.name_scope(f"tower_{i}"):
      tower_gradients.append(opt.compute_gradients(loss))
  with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    train_op = opt.apply_gradients(_averaged(tower_gradients))
  return Built(train_op, tf.ConfigProto(device_count={"CPU": num_towers}))


def unoptimized_loop(network: networks.Network, images: tf.Tensor,
                     labels: tf.Tensor, num_towers: int) -> Built:
  """`loop` with TensorFlow's graph optimizer off, as `towers` has it on CPUs"""
  built = tower_loop(network, images, labels, num_towers)
  built.config.graph_options.rewrite_options.disable_meta_optimizer = True
  return built


def built_towers(network: networks.Network, images: tf.Tensor,
                 labels: tf.Tensor, num_towers: int) -> Built:
  """`towers.build_towers`, batch norm over the whole batch"""
  return _towers(network, images, labels, num_towers)


def balanced_towers(network: networks.Network, images: tf.Tensor,
                    labels: tf.Tensor, num_towers: int) -> Built:
  """`towers` with variables spread over the devices by bytes"""
  return _towers(network, images, labels, num_towers, variables="balanced")


def replicated_towers(network: networks.Network, images: tf.Tensor,
                      labels: tf.Tensor, num_towers: int) -> Built:
  """`towers` with a copy of the variables on each device"""
  return _towers(network, images, labels, num_towers, variables="replicated")


def per_tower_towers(network: networks.Network, images: tf.Tensor,
                     labels: tf.Tensor, num_towers: int) -> Built:
  """`towers` with `sync_batch_norm=False`: batch norm by tower"""
  return _towers(network, images, labels, num_towers, sync_batch_norm=False)


def packed_towers(network: networks.Network, images: tf.Tensor,
                  labels: tf.Tensor, num_towers: int) -> Built:
  """`replicated` with small gradients and variables in messages of 1 MB"""
  return _towers(network, images, labels, num_towers, pack_bytes=2**20,
                 variables="replicated")


def _towers(network: networks.Network, images: tf.Tensor, labels: tf.Tensor,
            num_towers: int, *, pack_bytes: int = 0, **options) -> Built:
  devices = [f"/cpu:{i}" for i in range(num_towers)]
  graph = towers.build_towers(
      network.loss, devices, inputs=(images, labels), **options)
  train_op = graph.minimize(optimizer(), pack_bytes=pack_bytes)
  return Built(train_op, graph.session_config())


def converted_towers(network: networks.Network, images: tf.Tensor,
                     labels: tf.Tensor, num_towers: int) -> Built:
  """`towers` on the same model with `tf.nn.fused_batch_norm` in it"""
  own = towers.batch_norm
  # As if the model had never heard of `towers`.
  towers.batch_norm = library_batch_norm
  try:
    return built_towers(network, images, labels, num_towers)
  finally:
    towers.batch_norm = own


def library_batch_norm(x: tf.Tensor, *, training: bool,
                       momentum: float) -> tf.Tensor:
  """Batch norm as people write it on TensorFlow's op: `[B, H, W, C]`."""
  with tf.variable_scope(None, "batch_normalization"):
    shape = [x.shape[-1]]
    ones, zeros = tf.ones_initializer(), tf.zeros_initializer()
    gamma = tf.get_variable("gamma", shape, initializer=ones)
    beta = tf.get_variable("beta", shape, initializer=zeros)
    moving = [
        tf.get_variable("moving_mean", shape, initializer=zeros,
                        trainable=False),
        tf.get_variable("moving_variance", shape, initializer=ones,
                        trainable=False)
    ]
    y, *moments = tf.nn.fused_batch_norm(x, gamma, beta, is_training=training)
    for average, moment in zip(moving, moments):
      tf.add_to_collection(
          tf.GraphKeys.UPDATE_OPS,
          average.assign_sub((average - moment) * (1 - momentum)))
    return y


CONTENDERS = {
    "one": one_device,
    "loop": tower_loop,
    "loop_unoptimized": unoptimized_loop,
    "cut": cut_tower_loop,
    "towers": built_towers,
    "per_tower": per_tower_towers,
    "converted": converted_towers,
    "balanced": balanced_towers,
    "replicated": replicated_towers,
    "packed": packed_towers,
}


def optimizer() -> tf.train.Optimizer:
  return tf.train.MomentumOptimizer(0.01, 0.9)
