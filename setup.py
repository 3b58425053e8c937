"""Installs the package `towers` as the distribution `tf-towers`."""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).resolve().parent

# What draws curves, and the report of `towers.inspection`.
PICTURE = [
    "matplotlib",
]

# What `tools/train.py` uses beside the package itself.
TRAIN = [
    "scikit-learn",
    "tqdm",
    *PICTURE,
]

# What reads the masks of Pascal VOC.
MASKS = [
    "pillow",
]

# What shows a graph in a browser, and drives the browser in tests. Old releases
# of TensorBoard import `pkg_resources`, which later setuptools do not have.
TENSORBOARD = [
    "tensorboard",
    "selenium",
    "setuptools<81",
]

# What makes web pages of the docstrings, see `tools/api_reference.py`.
DOCS = [
    "pdoc",
]

# What checks the sources, see `setup.cfg` and `ruff.toml`. A new minor release
# of either may find more.
LINT = [
    "mypy==2.4.*",
    "ruff==0.17.*",
]


def read_version() -> str:
  """Reads the version as text, since importing `towers` needs TensorFlow."""
  text = (HERE / "towers" / "__init__.py").read_text(encoding="utf-8")
  match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
  if match is None:
    raise ValueError("`towers/__init__.py` must hold a line `__version__ = "
                     '"X.Y.Z"`, found none.')
  return match.group(1)


setuptools.setup(
    name="tf-towers",
    version=read_version(),
    description=("Builds a graph-mode TensorFlow model once per device, equal "
                 "to one device on the whole batch."),
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=["towers"],
    package_data={"towers": ["py.typed"]},
    python_requires=">=3.9",
    install_requires=[
        "absl-py",
        "numpy",
        "tensorflow>=2.15,<2.22",
    ],
    # `tf-keras` is left out of `test` on purpose: every release of it asks for
    # one minor version of TensorFlow, no marker can express "the one that is
    # installed", and pip would replace an older TensorFlow by the newest.
    extras_require={
        "train": TRAIN,
        "voc": MASKS,
        "picture": PICTURE,
        "tensorboard": TENSORBOARD,
        "docs": DOCS,
        "lint": LINT,
        "test": ["pytest", "hypothesis", *TRAIN, *MASKS, *TENSORBOARD],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
