"""`tf.distribute.MirroredStrategy` with Keras' synchronised batch norm.

For a process of its own, in which TensorFlow 2 behaves as such: the strategy
fails in graph mode. The networks have the widths, initial distributions, loss
and optimizer of the other contenders; this is the only tool that uses Keras.
"""

from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tools import networks

DESCRIPTION = ("`MirroredStrategy` in a `tf.function`, Keras' batch norm with "
               "`synchronized=True`")


class KerasLayers:
  """Layers of symbolic tensors; see `networks.Layers`."""

  def conv(self, x: Any, filters: int, strides: int, name: str) -> Any:
    del name
    x = tf.keras.layers.Conv2D(
        filters, 3, strides=strides, padding="same", use_bias=False,
        kernel_initializer=tf.keras.initializers.VarianceScaling(
            2.0, distribution="untruncated_normal"))(x)
    return tf.keras.layers.BatchNormalization(
        momentum=0.9, epsilon=1e-3, synchronized=True)(x)

  def relu(self, x: Any) -> Any:
    return tf.keras.layers.ReLU()(x)

  def add(self, x: Any, y: Any) -> Any:
    return tf.keras.layers.Add()([x, y])

  def shortcut(self, x: Any, filters: int, strides: int) -> Any:
    added = filters - x.shape[-1]
    padding = [[0, 0], [0, 0], [0, 0], [0, added]]
    return tf.keras.layers.Lambda(
        lambda x: tf.pad(x[:, ::strides, ::strides, :], padding))(x)

  def pool(self, x: Any) -> Any:
    return tf.keras.layers.MaxPooling2D(2, padding="same")(x)

  def up(self, x: Any, skip: Any, filters: int, name: str) -> Any:
    del name
    x = tf.keras.layers.Conv2DTranspose(
        filters, 2, strides=2, padding="same",
        kernel_initializer=tf.keras.initializers.RandomNormal(
            stddev=x.shape[-1]**-0.5))(x)
    return tf.keras.layers.Concatenate()([skip, x])

  def mean(self, x: Any) -> Any:
    return tf.keras.layers.GlobalAveragePooling2D()(x)

  def dense(self, x: Any, units: int, name: str) -> Any:
    del name
    initializer = tf.keras.initializers.VarianceScaling()
    if len(x.shape) == 4:
      return tf.keras.layers.Conv2D(
          units, 1, kernel_initializer=initializer)(x)
    return tf.keras.layers.Dense(units, kernel_initializer=initializer)(x)


class Mirrored:
  """A network on several logical CPU devices; call `build` first, and once.

  Attributes:
    model: The Keras model.
    graph: The graph of one step.
  """

  def __init__(self, network: networks.Network, num_towers: int, threads: int):
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * num_towers)
    self._network = network
    self._num_towers = num_towers
    self._strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_towers)])
    self.model: Any = None
    self.graph: Optional[tf.Graph] = None
    self._batch: Any = None
    self._step: Any = None

  def build(self, images: np.ndarray, labels: np.ndarray) -> None:
    """Makes the variables and traces a step on this batch."""
    self._batch = self._distributed(images), self._distributed(labels)
    with self._strategy.scope():
      inputs = tf.keras.Input(self._network.image_shape)
      self.model = tf.keras.Model(
          inputs, self._network.of_layers(KerasLayers(), inputs))
      optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
      optimizer.build(self.model.trainable_variables)

    def in_replica(images, labels):
      variables = self.model.trainable_variables
      with tf.GradientTape() as tape:
        loss = networks.cross_entropy(
            self.model(images, training=True), labels) / self._num_towers
      gradients = tape.gradient(loss, variables)
      optimizer.apply_gradients(zip(gradients, variables))
      return loss

    @tf.function
    def step(images, labels):
      losses = self._strategy.run(in_replica, args=(images, labels))
      return self._strategy.reduce("sum", losses, axis=None)

    self.graph = step.get_concrete_function(*self._batch).graph
    self._step = step

  def _distributed(self, values: np.ndarray) -> Any:
    shards = np.split(values, self._num_towers)

    def of_replica(context):
      index = context.replica_id_in_sync_group
      with tf.device(f"CPU:{index}"):
        return tf.constant(shards[index])

    return self._strategy.experimental_distribute_values_from_function(
        of_replica)

  def step(self) -> float:
    """Trains on the batch; returns the loss before."""
    return float(self._step(*self._batch))

  def bytes_between_devices(self) -> float:
    """Returns what a step sends from one device to another.

    The strategy's collective ops add up over all N devices in a ring, in which
    each sends `2 * (N - 1) / N` times the size of its tensor.
    """
    reduced = sum(
        op.inputs[0].shape.num_elements() * op.inputs[0].dtype.size
        for op in self.graph.get_operations()
        if op.type.startswith("CollectiveReduce"))
    return reduced * 2 * (self._num_towers - 1) / self._num_towers
