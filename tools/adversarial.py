"""Learning to make images: a generator against a discriminator.

Both make a step at the same time, from the same batch, each by the gradient of
its own loss by its own variables.

How good the made images are is told by the Fréchet distance between them and
the test images: both are taken for Gaussian in the brightness of at most 8x8
cells per channel, of which the means `m` and covariances `S` tell everything:

    distance = |m - m'|**2 + trace(S + S' - 2 (S S')**(1/2))
    score = 1 / (1 + distance / trace(S))

where `S` is that of the test images. The score is 1 for images with the same
means and covariances, and at most 1/2 for a generator that makes a single
image. It sees neither what is finer than a cell nor how cells go together
beyond pairs: a good score is necessary for good images, not sufficient.

References:
  Radford, Metz and Chintala, "Unsupervised Representation Learning with Deep
    Convolutional Generative Adversarial Networks", 2015 (optimizer and noise),
    https://arxiv.org/abs/1511.06434
  Heusel et al., "GANs Trained by a Two Time-Scale Update Rule", 2017 (the
    distance, of a network's features), https://arxiv.org/abs/1706.08500
"""

import functools
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from models import dcgan
from tools import datasets
from tools import pictures
from tools import scores
from tools import task

MIN_SIZE = 8
NOISE_SIZE = 100

# Height and width of the map of cells that the score compares.
CELLS = 8

# How many made images are drawn.
DRAWN = 64

# Test noise must not be that of a training batch.
_TEST_SEED = -1


class Networks(NamedTuple):
  """The functions of a module such as `models.dcgan`."""
  losses: Callable[..., Dict[str, tf.Tensor]]
  generator: Callable[..., tf.Tensor]
  discriminator: Callable[..., tf.Tensor]


def networks(depth: int) -> Networks:
  """Returns DCGAN's networks, with so many filters."""
  return Networks(*(functools.partial(function, depth=depth) for function in (
      dcgan.losses, dcgan.generator, dcgan.discriminator)))


GENERATORS = {"dcgan": networks(depth=64)}


class Moments(NamedTuple):
  """Of made or real images; sums of several batches add up."""
  count: int
  total: np.ndarray  # [D], float64.
  squares: np.ndarray  # [D, D], float64.

  @property
  def mean(self) -> np.ndarray:
    """`[D]`."""
    return self.total / self.count

  @property
  def covariance(self) -> np.ndarray:
    """`[D, D]`, that which divides by the number of images."""
    return self.squares / self.count - np.outer(self.mean, self.mean)


class Found(NamedTuple):
  """What tests found.

  Fields:
    real: Moments of the test images.
    made: Moments of as many made images.
    real_right: Share of test images that the discriminator takes for real.
    made_right: Share of made images that it takes for made.
    images: The first made images, `[N, H, W, C]`, from -1 to 1.
  """
  real: Moments
  made: Moments
  real_right: float
  made_right: float
  images: np.ndarray


class Adversarial(task.Task):
  """Images that a discriminator cannot tell from real ones."""
  networks = GENERATORS
  parts = (task.Part("discriminator_loss", "discriminator"),
           task.Part("generator_loss", "generator"))
  optimizer = "adam"
  optimizers = {**task.OPTIMIZERS, "adam": (
      functools.partial(tf.train.AdamOptimizer, beta1=0.5), 0.0002)}
  summarize_images = 16

  def misfit(self, model: str, data: datasets.Dataset) -> Optional[str]:
    """Returns why `model` cannot learn `data`, in one line; None if it can."""
    height, width, _ = data.image_shape
    if height == width >= MIN_SIZE:
      return None
    return (f"`--model={model}` must have square images of "
            f"{MIN_SIZE}x{MIN_SIZE} or more: {data.name} has {height}x{width}. "
            "Choose another `--model` or `--dataset`.")

  def refusal(self, options: Any) -> Optional[str]:
    """Returns which option makes no sense, in one line; None without such."""
    if options.label_smoothing:
      return (f"`--label_smoothing` must be 0 for {options.model}, which "
              "learns without labels: got "
              f"{options.label_smoothing}. Leave it out.")
    if options.precision != "float32":
      return (f"`--precision` must be float32 for {options.model}: got "
              f"{options.precision}. Leave it out.")
    if options.may_skip:
      return ("`--skip_nonfinite` and `--loss_scale=dynamic` must not be given "
              f"for {options.model}, of whose two networks one could skip a "
              f"batch without the other: got {options.skip_nonfinite} and "
              f"{options.loss_scale}. Leave them out.")
    return None

  def batches(self, data: datasets.Dataset, options: Any,
              first_batch: tf.Tensor,
              share: datasets.Share) -> tf.data.Dataset:
    """Makes batches with noise, `[B, N]`, that depends on their number."""
    first, end = share.bounds(options.batch_size)
    numbers = tf.data.Dataset.range(first_batch, np.iinfo(np.int64).max)

    def with_noise(batch, number):
      noise = tf.random.stateless_uniform(
          [options.batch_size, NOISE_SIZE], [options.seed, number], -1.0,
          1.0)[first:end]
      if options.remainder == "keep":
        noise = noise[:tf.shape(batch[0])[0]]
      return (*batch, noise)

    return tf.data.Dataset.zip(
        (super().batches(data, options, first_batch, share),
         numbers)).map(with_noise)

  def losses(self, data: datasets.Dataset, options: Any,
             *batch: tf.Tensor) -> task.Losses:
    """Returns the losses of both networks."""
    images, _, _, noise = batch
    losses = self.networks[options.model].losses(
        _from_minus_1_to_1(images, data), noise)
    return task.Losses({part.loss: losses[part.loss] for part in self.parts})

  def test_batches(self, data: datasets.Dataset, options: Any,
                   split: str) -> tf.data.Dataset:
    """Makes batches with noise, the same for every size of batches."""
    noise = tf.data.Dataset.range(data.size(split)).map(
        lambda row: tf.random.stateless_uniform(
            [NOISE_SIZE], [_TEST_SEED, row], -1.0, 1.0))
    return tf.data.Dataset.zip((
        super().test_batches(data, options, split),
        noise.batch(options.batch_size))).map(
            lambda batch, noise: (*batch, noise))

  def outputs(self, data: datasets.Dataset, options: Any, images: tf.Tensor,
              *others: tf.Tensor) -> Dict[str, tf.Tensor]:
    """Returns real and made images, `real` and `made`, and their scores."""
    size, channels = data.image_shape[1:]
    _, generator, discriminator = self.networks[options.model]
    real = _from_minus_1_to_1(images, data)
    made = generator(others[0], training=False, size=size, channels=channels)
    real_scores = discriminator(real, training=False)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
      made_scores = discriminator(made, training=False)
    return {"real": real, "made": made, "real_scores": real_scores,
            "made_scores": made_scores}

  def measure(self, rows: Callable[[str], Iterator[task.Rows]],
              data: datasets.Dataset) -> Found:
    """Returns the moments of real and made images, and who was fooled."""
    real, made, shares, images = [], [], [], []
    for _, outputs in rows("test"):
      real.append(moments(outputs["real"]))
      made.append(moments(outputs["made"]))
      shares.append([np.sum(outputs["real_scores"] > 0),
                     np.sum(outputs["made_scores"] <= 0)])
      if sum(map(len, images)) < DRAWN:
        images.append(outputs["made"])
    real, made = (Moments(*map(sum, zip(*each))) for each in (real, made))
    return Found(real, made, *(np.sum(shares, axis=0) / real.count),
                 np.concatenate(images)[:DRAWN])

  def score(self, found: Found, data: datasets.Dataset) -> scores.Score:
    """Returns how near the moments are, as the module says."""
    unit = max(np.trace(found.real.covariance), np.finfo(np.float64).tiny)
    value = 1.0 / (1.0 + frechet_distance(found.real, found.made) / unit)
    return scores.Score(
        "likeness", "likeness of made images", float(value),
        f"discriminator: takes {found.real_right:.1%} of the test images for "
        f"real, {found.made_right:.1%} of the made images for made")

  def draw(self, found: Found, logdir: str, data: datasets.Dataset) -> str:
    """Draws made images into `made.png`; returns its path."""
    return pictures.draw_grid((found.images + 1.0) / 2.0, logdir)

  def summary(self, images: tf.Tensor, labels: tf.Tensor,
              outputs: Dict[str, tf.Tensor], data: datasets.Dataset,
              count: int) -> tf.Tensor:
    """Makes an image summary of the first made images."""
    made = pictures.visible((outputs["made"][:count] + 1.0) / 2.0)
    return tf.summary.image("made_images", made, max_outputs=count)


def _from_minus_1_to_1(images: tf.Tensor, data: datasets.Dataset) -> tf.Tensor:
  """Returns images of a batch with the least pixel -1 and the largest 1."""
  low, high = _pixel_range(data)
  images = images * data.scale.deviation + data.scale.mean
  return (images - low) * (2.0 / (high - low)) - 1.0


def _pixel_range(data: datasets.Dataset) -> np.ndarray:
  """Returns the least and the largest value of pixels in the files."""
  pixels = data.train.columns[0]
  if pixels.ndim != 4:  # Files that are read later hold bytes.
    return np.array([0.0, 255.0], np.float32)
  low, high = float(pixels.min()), float(pixels.max())
  return np.array([low, max(high, low + 1e-6)], np.float32)


def moments(images: np.ndarray) -> Moments:
  """Returns the moments of the cells of images, `[B, H, W, C]`."""
  cells = images.astype(np.float64)
  for axis in (1, 2):
    parts = np.array_split(cells, min(CELLS, cells.shape[axis]), axis=axis)
    cells = np.stack([part.mean(axis=axis) for part in parts], axis=axis)
  cells = cells.reshape([len(cells), -1])
  return Moments(len(cells), cells.sum(axis=0), cells.T @ cells)


def frechet_distance(first: Moments, second: Moments) -> float:
  """Returns the squared distance of two Gaussians with these moments."""
  values, vectors = np.linalg.eigh(first.covariance)
  root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
  # The product of both covariances is not symmetric; this is, and has the same
  # eigenvalues.
  values = np.linalg.eigvalsh(root @ second.covariance @ root)
  between = np.sqrt(np.maximum(values, 0.0)).sum()
  return float(np.sum((first.mean - second.mean)**2) + np.trace(
      first.covariance + second.covariance) - 2.0 * between)
