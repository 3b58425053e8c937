"""Checks that a random model in towers equals itself on one device.

A case has two outcomes: equality, or a refusal that `docs/errors.md` tells of
and that the case is known to deserve.
"""

import functools
import re
import warnings
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import random_models
import references
import test_docs_errors
import testing
import towers

TOLERANCE = {tf.float64: 1e-9, tf.float32: 3e-3}

OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    # What has no gradient but for rounding must not take a whole step.
    "adam": lambda: tf.train.AdamOptimizer(0.01, epsilon=1e-3),
}
CLIP_NORM = 0.7


class Step(NamedTuple):
  """What one step of training gives."""
  loss: Any
  outputs: Dict[str, Any]
  gradients: Dict[str, Any]
  names: List[str]
  variables: Dict[str, Any]


class Built(NamedTuple):
  """What a session runs: two fetches, one after the other, and variables."""
  before: Any
  step: Any
  variables: Any
  gradients: Any = ()


def _build_plain(case: random_models.Case, model_fn: Any,
                 inputs: Any) -> Built:
  with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
    returned = model_fn(*inputs)
  if isinstance(returned, towers.TowerSpec):
    loss, outputs = returned.loss, returned.outputs
  else:
    outputs = dict(returned)
    loss = outputs.pop("loss")
  variables = tf.global_variables()
  updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
  trained = tf.trainable_variables()
  gradients = tf.gradients(loss, trained)
  pairs = [(g, v) for g, v in zip(gradients, trained) if g is not None]
  if case.optimizer is None:
    return Built((loss, outputs), updates, variables, list(
        zip(gradients, trained)))
  if case.clip and pairs:
    # That of the gradient as a dense one, as `TowerGraph.minimize` has it:
    # TensorFlow's own knows nothing of rows that occur several times.
    norm = tf.linalg.global_norm([tf.convert_to_tensor(g) for g, _ in pairs])
    clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], CLIP_NORM, norm)
    pairs = list(zip(clipped, [v for _, v in pairs]))
  with tf.control_dependencies(updates):
    step = OPTIMIZERS[case.optimizer]().apply_gradients(pairs)
  return Built((loss, outputs), step, variables)


def _build_towers(case: random_models.Case, model_fn: Any,
                  inputs: Any) -> Built:
  graph = towers.build_towers(
      model_fn, testing.devices(case.num_towers), inputs=inputs,
      variables=case.variables, update_ops=case.update_ops)
  variables = tf.global_variables()
  fetched = graph.loss, graph.outputs
  if case.optimizer is None:
    return Built(fetched, graph.update_ops, variables, graph.gradients())
  return Built(fetched, graph.minimize(
      OPTIMIZERS[case.optimizer](),
      clip_norm=CLIP_NORM if case.clip else None), variables)


def run(case: random_models.Case, in_towers: bool) -> Step:
  """Builds the case in a new graph and does one step from fixed values."""
  values = case.batch()
  build = _build_towers if in_towers else _build_plain
  with tf.Graph().as_default():
    inputs = tuple(
        tf.placeholder(v.dtype, v.shape if case.known_rows else
                       [None, *v.shape[1:]]) for v in values)
    training = tf.placeholder_with_default(case.training, [])
    built = build(case, random_models.make_model(case, training), inputs)
    gradients = {v.op.name: g if g is None else tf.convert_to_tensor(g)
                 for g, v in built.gradients}
    present = {name: g for name, g in gradients.items() if g is not None}
    everything = {v.op.name: v for v in tf.global_variables()}
    # A loop on one device cannot keep what it reads from a variable on another
    # for its gradient, with strict placement.
    config = testing.config(allow_soft_placement=True)
    with tf.Session(config=config) as sess:
      sess.run([v.initializer for v in everything.values()],
               {v.initializer.inputs[1]: references.value_for(v)
                for v in built.variables})
      if tf.local_variables():
        sess.run(tf.local_variables_initializer())
      feed = dict(zip(inputs, values))
      (loss, outputs), present = sess.run((built.before, present), feed)
      sess.run(built.step, feed)
      after = sess.run(everything)
  return Step(loss, outputs, {k: present.get(k) for k in gradients},
              list(everything), after)


def differences(case: random_models.Case, actual: Step,
                expected: Step) -> List[str]:
  """Returns a line for each way in which two steps differ."""
  found = []
  for part in ("names", "gradients", "outputs"):
    one, other = list(getattr(actual, part)), list(getattr(expected, part))
    if sorted(one) != sorted(other) or (part != "outputs" and one != other):
      found.append(f"{part}: {one}, expected {other}")
  if found:
    return found
  for part in ("loss", "outputs", "gradients", "variables"):
    one, other = getattr(actual, part), getattr(expected, part)
    if part == "loss":
      one, other = {"": one}, {"": other}
    for name in other:
      found += _compare(f"{part} {name}", one[name], other[name],
                        TOLERANCE[case.dtype])
  return found


def _compare(what: str, one: Any, other: Any, tolerance: float) -> List[str]:
  if one is None or other is None:
    return [] if one is other else [f"{what}: {one}, expected {other}"]
  one, other = np.asarray(one), np.asarray(other)
  if one.shape != other.shape or one.dtype != other.dtype:
    return [f"{what}: {one.dtype}{one.shape}, expected "
            f"{other.dtype}{other.shape}"]
  if not np.isfinite(other).all():
    return [f"{what}: one device gives {other}"]
  largest = np.abs(one - other).max() if one.size else 0
  if not largest <= tolerance * max(1.0, np.abs(other).max(initial=0)):
    return [f"{what}: differs by {largest}; {one}, expected {other}"]
  return []


@functools.cache
def _documented() -> Any:
  page = test_docs_errors.PAGE.read_text(encoding="utf-8")
  texts = [".*".join(map(re.escape, text.split(test_docs_errors.HOLE)))
           for text in test_docs_errors.entries_of(page)]
  return re.compile("|".join(texts), re.DOTALL)


def is_documented(error: Exception) -> bool:
  """Whether `docs/errors.md` has an entry for the error."""
  return bool(_documented().match(" ".join(str(error).split())))


def check(case: random_models.Case) -> str:
  """Returns "equal" or "refused".

  Raises:
    AssertionError: If it is neither, or refused without need.
  """
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    expected = run(case, in_towers=False)
    refusal: Optional[Exception] = None
    try:
      actual = run(case, in_towers=True)
    except (TypeError, ValueError) as error:
      if not is_documented(error):
        raise
      refusal = error
  if (refusal is not None) != case.refused():
    raise AssertionError(
        f"`case` must {'' if case.refused() else 'not '}be refused: got "
        f"{refusal!r}.") from refusal
  if refusal is not None:
    return "refused"
  found = differences(case, actual, expected)
  if found:
    raise AssertionError("\n".join(["towers differ from one device:", *found]))
  return "equal"
