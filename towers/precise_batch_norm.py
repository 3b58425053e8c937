"""Moving statistics of batch norm, estimated anew with the weights fixed.

The moving statistics that training leaves are averages over its last steps, in
which the weights moved, too. They lag behind, and after few steps, with a high
learning rate, or with a momentum near 1, they may be far off. Before evaluation
or export they can be replaced by those of a number of batches, all with the
weights as they are now:

    graph = towers.build_towers(model_fn, devices, inputs=(images, labels))
    ...
    saver.restore(session, checkpoint)
    towers.precise_batch_norm.update(session, graph, 200)

For a graph that is finalized later, make a `PreciseBatchNorm(graph)` before.
The model must be the one for training, whose batch norm takes the moments of
the batch; what it shares variables with, such as a model for evaluation, reads
the new statistics.
"""

from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Union

import numpy as np
import tensorflow.compat.v1 as tf

from towers import graph as graph_lib
from towers import moving_statistics

Batches = Union[int, Iterable[Dict[Any, Any]]]

# How far a layer's own statistic of a batch may be from what it should be, in
# float16 sums and by formulas that lose digits.
_TOLERANCE = 2e-3


def update(session: tf.Session, graph: graph_lib.TowerGraph,
           batches: Batches) -> Dict[str, np.ndarray]:
  """Replaces all moving statistics by those of some batches.

  See `PreciseBatchNorm.update`.

  Raises:
    ValueError: If the graph of `session` is finalized; or as that.
  """
  if graph.graph.finalized:
    raise ValueError(
        "`graph` must be one that can still be added to: got a finalized one "
        f"({graph.graph}). Make a `towers.precise_batch_norm.PreciseBatchNorm` "
        "before.")
  return PreciseBatchNorm(graph).update(session, batches)


class Pooled(NamedTuple):
  """Moments over many rows, in float64.

  Fields:
    count: Over how many elements per channel, as a float.
    mean: Array of shape `[C]`.
    variance: Array of shape `[C]`, biased.
  """
  count: float  # type: ignore[assignment]  # Hides `tuple.count`.
  mean: np.ndarray
  variance: np.ndarray

  def with_bessel(self, correction: int) -> np.ndarray:
    """Returns the variance; unbiased if `correction` is 1."""
    return self.variance * self.count / max(self.count - correction, 1.0)


def pooled(parts: Iterable[Pooled]) -> Pooled:
  """Returns the moments over the elements of all `parts`.

  With `n_k`, `m_k` and `v_k` the count, mean and biased variance of part `k`:

      count    = sum_k(n_k)
      mean     = sum_k(n_k * m_k) / count
      variance = sum_k(n_k * (v_k + (m_k - mean)**2)) / count
  """
  parts = [part for part in parts if part.count]  # Others may be NaN.
  counts = np.array([part.count for part in parts], np.float64)
  means = np.stack([part.mean for part in parts]).astype(np.float64)
  variances = np.stack([part.variance for part in parts]).astype(np.float64)
  shares = (counts / counts.sum()).reshape([-1] + [1] * (means.ndim - 1))
  mean = (shares * means).sum(axis=0)
  variance = (shares * (variances + np.square(means - mean))).sum(axis=0)
  return Pooled(float(counts.sum()), mean, variance)


class PreciseBatchNorm:
  """Estimates the moving statistics of a model for training.

  Attributes:
    names: Tuple of the names of the variables that are estimated.
  """

  def __init__(self, graph: graph_lib.TowerGraph):
    """Adds what it needs to the graph.

    Args:
      graph: What `towers.build_towers` returned for the model for training.

    Raises:
      ValueError: If no layer updates a moving statistic; or if there is no
        telling how a layer does: it is used twice in a step, stands in a
        `tf.cond`, or takes other than the moments of its input.
    """
    self._graph = graph.graph
    build = graph._build  # pylint: disable=protected-access
    with self._graph.as_default(), tf.control_dependencies(None):
      with tf.name_scope("precise_batch_norm/"), tf.device(
          build.backward.parameter_device):
        self._statistics = moving_statistics.find(
            graph.towers, graph.update_ops, graph.variables)
        if not self._statistics:
          raise ValueError(
              "`graph` must have batch norm layers that update their moving "
              "statistics: got none among its update ops "
              f"{[op.name for op in graph.update_ops]}. Build the model for "
              "training.")
        self._moments = {
            source: _moments_of_towers(source, build.rows)
            for source in {s.source for s in self._statistics}
        }
        self._values = [
            tf.placeholder(s.variable.dtype.base_dtype, s.variable.shape)
            for s in self._statistics
        ]
        self._assign = tf.group(*[
            s.variable.assign(value, read_value=False)
            for s, value in zip(self._statistics, self._values)
        ])
    self._copy_variables = graph.copy_variables
    self.names = tuple(s.name for s in self._statistics)

  def update(self, session: tf.Session,
             batches: Batches) -> Dict[str, np.ndarray]:
    """Replaces all moving statistics by those over all rows of some batches.

    The model runs as in training, so each layer normalises by the moments of
    its batch, over all towers. No update op and no optimizer runs: weights,
    counters and the step stay. With `n_k`, `m_k` and `v_k` the element count,
    mean and biased variance of the input of a layer in batch `k`, and
    `N = sum_k(n_k)`:

        moving_mean     = sum_k(n_k * m_k) / N
        moving_variance = sum_k(n_k * (v_k + (m_k - moving_mean)**2)) / N

    These are the moments over all rows of the batches, in towers of any number
    and of any sizes. Where the layer itself gives the unbiased variance of the
    batch to its moving variance (`towers.batch_norm` and fused batch norm do),
    that is multiplied by `N / (N - 1)`.

    Under `towers.no_sync()` a layer normalises by the moments of its tower; the
    moving statistics are those over the rows of all towers here, too.

    Args:
      session: Session whose variables have their values.
      batches: How many batches to take, where the inputs of the model come from
        an iterator or a queue; or a feed dict for each batch.

    Returns:
      The new values, by the names of the variables. If anything fails, none has
      changed.

    Raises:
      ValueError: If `session` is that of another graph; if there are fewer
        batches; if a layer is not in training mode; or if what a layer gives
        its moving statistics are not the moments of its input.
      TypeError: If `batches` is neither a number nor a list of feed dicts.

    References:
      Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021, section 3,
        https://arxiv.org/abs/2105.07576
    """
    if session.graph is not self._graph:
      raise ValueError(
          "`session` must run the graph of the towers: expected "
          f"{self._graph}, got {session.graph}.")
    session.run(self._copy_variables)
    parts: Dict[Any, List[Pooled]] = {source: [] for source in self._moments}
    roles: List[_Role] = []
    for feed in _feeds(batches):
      first = not roles
      moments, values = self._run_batch(session, feed, batches, parts, first)
      for source, of_towers in moments.items():
        parts[source].append(pooled(Pooled(*part) for part in of_towers))
      if first:
        for statistic, value in zip(self._statistics, values):
          roles.append(_role(statistic, value, [
              Pooled(*part) for part in moments[statistic.source]]))
    if not roles:
      raise ValueError(
          f"`batches` must be at least one: got {batches!r}. Give a number, or "
          "a list of feed dicts.")
    results = {}
    for statistic, role in zip(self._statistics, roles):
      total = pooled(parts[statistic.source])
      value = total.mean
      if role.variance:
        value = total.with_bessel(role.correction)
      results[statistic.name] = value.reshape(
          statistic.variable.shape.as_list()).astype(
              statistic.variable.dtype.base_dtype.as_numpy_dtype)
    session.run(self._assign, {
        placeholder: results[statistic.name]
        for statistic, placeholder in zip(self._statistics, self._values)
    })
    return results

  def _run_batch(self, session: tf.Session, feed: Dict[Any, Any],
                 batches: Batches, parts: Dict[Any, List[Pooled]],
                 first: bool) -> Any:
    """Returns the moments of a batch, and on the first, the layers' own."""
    fetches = [self._moments, []]
    if first:
      fetches[1] = [s.batch_value for s in self._statistics]
      for statistic in self._statistics:
        for read in statistic.reads:
          feed[read] = np.zeros(read.shape.as_list(),
                                read.dtype.as_numpy_dtype)
    try:
      return session.run(fetches, feed)
    except tf.errors.OutOfRangeError as error:
      done = len(next(iter(parts.values())))
      raise ValueError(
          f"`batches` must be at most as many as there are: expected {done} or "
          f"fewer, got {batches!r}. No moving statistic has changed."
      ) from error


def _feeds(batches: Batches) -> Iterator[Dict[Any, Any]]:
  if isinstance(batches, (int, np.integer)) and not isinstance(batches, bool):
    batches = [{}] * int(batches)
  elif isinstance(batches, (dict, str, bool)):
    raise TypeError(
        "`batches` must be a number, or a feed dict for each batch: got "
        f"{batches!r}. Put a single feed dict into a list.")
  for feed in batches:
    yield dict(feed)


def _moments_of_towers(source: moving_statistics.Source,
                       rows: Any) -> List[List[tf.Tensor]]:
  """Returns count, mean and variance of a layer's input, for each tower."""
  result = []
  for x, own_rows in zip(source.inputs, rows):
    with tf.device(None), tf.device(x.device):
      axes = list(source.axes)
      x = x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
      mean = tf.reduce_mean(x, axes, keepdims=True)
      variance = tf.reduce_mean(tf.squared_difference(x, mean), axes)
      count = tf.reduce_prod(tf.cast(
          tf.gather(tf.shape(x), axes), tf.float64))
      present = tf.cast(tf.convert_to_tensor(own_rows) > 0, tf.float64)
      result.append([count * present, tf.squeeze(mean, axes), variance])
  return result


class _Role(NamedTuple):
  """Whether it is a variance, and what is then subtracted from the count."""
  variance: bool
  correction: int


def _role(statistic: moving_statistics.Statistic, value: np.ndarray,
          towers: List[Pooled]) -> _Role:
  """Returns what a moving statistic is, told by what its layer makes it of.

  Args:
    statistic: The statistic.
    value: The layer's own value for a batch.
    towers: The moments of the towers' inputs in that batch.

  Raises:
    ValueError: If it is neither mean nor variance.
  """
  whole = pooled(towers)
  value = np.reshape(value, whole.mean.shape)
  scale = whole.variance + 1e-4 * np.square(whole.mean) + 1e-12
  distances = {
      _Role(False, 0): _distance(value - whole.mean, np.sqrt(scale))}
  counts = [part.count for part in towers]
  for correction in (0, 1):
    # Under `no_sync`, it is the mean of the towers' variances.
    apart = [np.zeros_like(whole.mean) if not part.count else
             part.with_bessel(correction) for part in towers]
    variances = [whole.with_bessel(correction),
                 np.average(apart, axis=0, weights=counts)]
    distances[_Role(True, correction)] = min(
        _distance(value - variance, scale) for variance in variances)
  named = "var" in statistic.name.rpartition("/")[2].lower()
  # Of a layer whose input is 0, all are 0 and only the name can tell.
  role = min(distances, key=lambda r: (distances[r] > _TOLERANCE, r.variance !=
                                       named, distances[r]))
  if not distances[role] <= _TOLERANCE:
    if not np.all(np.isfinite(value)):
      raise ValueError(
          f"`{statistic.name}` must move in training: got a layer that does "
          "not move it in this batch. Feed what puts batch norm into training "
          "mode.")
    raise ValueError(
        f"`{statistic.name}` must move by the mean or the variance of "
        f"`{statistic.source.inputs[0].name}`: got {value} for a batch of mean "
        f"{whole.mean} and variance {whole.variance}. Leave the moving "
        "statistics of this layer as training made them.")
  return role


def _distance(difference: np.ndarray, scale: np.ndarray) -> float:
  """Returns the largest difference in terms of `scale`; NaN counts as such."""
  return float(np.max(np.abs(difference) / scale))
