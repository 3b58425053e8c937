"""What the names in other people's checkpoints stand for.

Hand-written tower loops and libraries put a tower's number into the names of
variables, and name alike things differently:

    tower_1/conv/kernel      tower loops; also clone_1/, replica_1/, gpu_1/
    v1/conv/kernel, v/conv   copies, and the one, of benchmark scripts
    conv/kernel/replica_1    mirrored variables
    bn/mean/EMA              moving averages of tensorpack
    conv2d_3/kernel          the fourth layer without a name of tf.layers, Keras

Everything here works on names alone.
"""

import re
from typing import Dict, List, NamedTuple, Optional, Tuple

_TOWER = re.compile(r"(?:tower|clone|replica|gpu)_?(\d+)(?:_\d+)?",
                    re.IGNORECASE)
_COPY = re.compile(r"v(\d*)")

# Each side is brought to the last form, so that they match both ways.
_SYNONYMS = (
    (re.compile(r"(^|/)mean/EMA(?=/|$)"), r"\1moving_mean"),
    (re.compile(r"(^|/)variance/EMA(?=/|$)"), r"\1moving_variance"),
    (re.compile(r"(^|/)running_mean(?=/|$)"), r"\1moving_mean"),
    (re.compile(r"(^|/)running_var(?:iance)?(?=/|$)"), r"\1moving_variance"),
    (re.compile(r"(^|/)(?:W|weights)(?=/|$)"), r"\1kernel"),
    (re.compile(r"(^|/)(?:b|biases)(?=/|$)"), r"\1bias"),
)

# Layers whose names TensorFlow and Keras make themselves, with a number from
# the second on.
_LAYERS = frozenset("""
    activation batch_normalization bidirectional conv1d conv1d_transpose conv2d
    conv2d_transpose conv3d conv3d_transpose conv_lstm2d dense depthwise_conv1d
    depthwise_conv2d einsum_dense embedding functional group_normalization gru
    layer_normalization lstm model multi_head_attention p_re_lu
    separable_conv1d separable_conv2d sequential simple_rnn
    sync_batch_normalization time_distributed unit_normalization
    """.split())
_NUMBERED = re.compile(r"(\w+?)(?:_(\d+))?")

_OPTIMIZER_NAMES = re.compile(r"(^|/)(beta[12]_power|global_step)(_\d+)?$")
_STATISTICS = re.compile(r"(^|/)moving_(mean|variance)$")


class Name(NamedTuple):
  """A name without its tower.

  Fields:
    text: The rest of the name.
    tower: The number of the tower; None where the name has none.
  """
  text: str
  tower: Optional[int]


class Layer(NamedTuple):
  """A name with a numbered layer in it.

  Fields:
    scope: The name up to the last such layer.
    kind: The same without the numbers: layers of one kind follow in order.
    order: The numbers, 0 where a layer has none.
    leaf: The rest of the name.
  """
  scope: str
  kind: str
  order: Tuple[int, ...]
  leaf: str


def without_tower(name: str) -> Name:
  """Returns `name` without what stands for a tower in it."""
  parts, tower = [], None
  for position, part in enumerate(name.split("/")):
    match = _TOWER.fullmatch(part) or (
        _COPY.fullmatch(part) if position == 0 else None)
    if match is None:
      parts.append(part)
    elif tower is None and match[1]:
      tower = int(match[1])
  # A variable may be called so itself: `v`, or `gpu0`.
  return Name("/".join(parts), tower) if parts else Name(name, None)


def plain(name: str) -> str:
  """Returns the form of `name` that its synonyms share."""
  for pattern, text in _SYNONYMS:
    name = pattern.sub(text, name)
  return name


def cleaned(name: str) -> str:
  """Returns `name` as a model without towers has it, as far as names tell."""
  name = without_tower(name).text
  for pattern, text in _SYNONYMS[:2]:  # The others may be a model's own.
    name = pattern.sub(text, name)
  return name


def layer(name: str) -> Optional[Layer]:
  """Takes apart a name with a layer that TensorFlow or Keras named."""
  parts = name.split("/")
  kinds, order, end = [], [], 0
  for position, part in enumerate(parts[:-1], start=1):
    match = _NUMBERED.fullmatch(part)
    if match and match[1] in _LAYERS:
      kinds.append(match[1])
      order.append(int(match[2] or 0))
      end = position
    else:
      kinds.append(part)
  if not end:
    return None
  return Layer("/".join(parts[:end]), "/".join(kinds[:end]), tuple(order),
               "/".join(parts[end:]))


def is_statistic(name: str) -> bool:
  """Returns whether a variable of that name is a moving mean or variance."""
  return _STATISTICS.search(plain(name)) is not None


def optimizer_names(names: List[str]) -> Dict[str, bool]:
  """Tells of each name whether it is that of an optimizer's variable.

  Slots stand under their variable's name (`w/Momentum`), with the name of their
  scope before it where there is one.
  """
  known = set(names)
  return {name: bool(_OPTIMIZER_NAMES.search(name)) or _is_slot(name, known)
          for name in names}


def _is_slot(name: str, known: set) -> bool:
  parent = name.rpartition("/")[0].split("/")
  return any("/".join(parent[start:]) in known for start in range(len(parent)))
