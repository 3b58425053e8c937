"""Segmentation models in towers and as plain code, for the tests of both."""

import functools

import numpy as np
import tensorflow.compat.v1 as tf

from models import segmentation
import testing
import towers

NUM_CLASSES = 3
VOID = segmentation.VOID_LABEL
STEPS = 2
TOLERANCE = 1e-10

# Each level of a model has an odd size to crop.
HEIGHT, WIDTH = 9, 10

# Whose pixels are void, beside a share of the others that differs by image.
VOIDS = {
    "uneven": lambda size: slice(0, 0),
    # All of the first tower, if there are two or more and two or more images.
    "first_tower": lambda size: slice(0, (size + 1) // 2 if size > 1 else 0),
    "all": lambda size: slice(0, size),
}


def batch(size, voids="uneven"):
  """Returns `size` images and masks."""
  rng = np.random.RandomState(size)
  images = rng.normal(1.0, 2.0, [size, HEIGHT, WIDTH, 2])
  labels = rng.randint(0, NUM_CLASSES, [size, HEIGHT, WIDTH])
  for image in range(size):
    share = 0.9 * (image + 1) / size
    void = rng.uniform(size=[HEIGHT, WIDTH]) < share
    void[0, 0] = False
    labels[image][void] = VOID
  labels[VOIDS[voids](size)] = VOID
  return images, labels.astype(np.uint8)


def model_fn(module, training=True, **options):
  """Returns a model function with the loss and outputs of a segmentation."""

  def fn(images, labels):
    logits = module.logits(images, num_classes=NUM_CLASSES, training=training,
                           **options)
    loss, weight = segmentation.loss(logits, labels, num_classes=NUM_CLASSES)
    confusion = segmentation.confusion_matrix(
        labels, tf.argmax(logits, axis=-1), num_classes=NUM_CLASSES)
    outputs = {"logits": logits, "confusion": confusion}
    return towers.TowerSpec(loss, outputs, weight=weight)

  return fn


class Built:
  """One graph with a model in it; plain code if `num_towers` is None."""

  def __init__(self, fn, num_towers=None, dtype=tf.float64):
    self._graph = tf.Graph()
    with self._graph.as_default():
      tf.set_random_seed(1)
      self.inputs = (tf.placeholder(dtype, [None, None, None, 2]),
                      tf.placeholder(tf.uint8, [None, None, None]))
      optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
      if num_towers is None:
        # Without resource variables, gradients race with the update in place.
        with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
          self.loss, self.outputs, _ = fn(*self.inputs)
        pairs = optimizer.compute_gradients(self.loss)
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(updates):
          self.train_op = optimizer.apply_gradients(pairs)
      else:
        graph = towers.build_towers(fn, testing.devices(num_towers),
                                    inputs=self.inputs)
        self.loss, self.outputs = graph.loss, graph.outputs
        pairs = graph.gradients()
        self.train_op = graph.apply_gradients(optimizer, pairs)
      self.gradients = {v.op.name: g for g, v in pairs}
      self.variables = tf.global_variables()
      self._initializers = [v.initializer for v in self.variables]
      self.values = {v.op.name: v.read_value() for v in self.variables}
    self.session = tf.Session(graph=self._graph, config=testing.config())
    if testing.num_cpus(self.session) != testing.NUM_CPUS:
      raise AssertionError("The session lacks devices.")
    self.session.run(self._initializers)
    self._initial = {v.initializer.inputs[1]: value for v, value in zip(
        self.variables, self.session.run(self.variables))}

  def run(self, values, steps=STEPS):
    """Returns loss, outputs and gradients, and the variables after `steps`."""
    feed = dict(zip(self.inputs, values))
    self.session.run(self._initializers, self._initial)
    result = self.session.run(
        {"loss": self.loss, "outputs": self.outputs,
         "gradients": self.gradients}, feed)
    for _ in range(steps):
      self.session.run(self.train_op, feed)
    return dict(result, variables=self.session.run(self.values))


def batches():
  """Yields a name for each batch, and its images and masks."""
  for size in range(1, 6):
    yield f"uneven_{size}", batch(size)
  for size in (2, 3, 5):
    yield f"first_tower_{size}", batch(size, "first_tower")
  yield "all_void", batch(3, "all")


@functools.cache
def results(module, num_towers=None, **options):
  """Returns what the model comes to for each of the batches."""
  built = Built(model_fn(module, **options), num_towers)
  with built.session:
    return {name: built.run(values) for name, values in batches()}


def _assert_close(test, expected, actual):
  """Compares each array by its largest value, so that small ones count too."""
  tf.nest.assert_same_structure(expected, actual)
  for one, other in zip(tf.nest.flatten(expected), tf.nest.flatten(actual)):
    test.assertAllClose(one, other, rtol=0,
                        atol=TOLERANCE * np.abs(one).max())


def assert_equals_one_device(test, module, num_towers, **options):
  """Fails `test` unless towers compute what plain code does, on all batches."""
  expected = results(module, **options)
  actual = results(module, num_towers, **options)
  for name, (_, labels) in batches():
    for part, one in expected[name].items():
      with test.subTest(part, batch=name):
        _assert_close(test, one, actual[name][part])
    with test.subTest("pixels", batch=name):
      test.assertEqual(actual[name]["outputs"]["confusion"].sum(),
                       (labels != VOID).sum())
    with test.subTest("finite", batch=name):
      for value in tf.nest.flatten(actual[name]):
        test.assertTrue(np.isfinite(value).all())
    with test.subTest("void", batch=name):
      largest = max(np.abs(gradient).max()
                    for gradient in actual[name]["gradients"].values())
      test.assertEqual(actual[name]["loss"] == 0, name == "all_void")
      test.assertEqual(largest == 0, name == "all_void")
