"""Rewrites graphs that compute channels first to compute channels last.

Models that train on GPUs often keep images as `[B, C, H, W]` (`NCHW`), for
which many builds of TensorFlow for CPUs have no kernels. The kernels' other
order, `[B, H, W, C]` (`NHWC`), runs everywhere. Weights are the same for both.
"""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

_CHANNELS_LAST = {b"NCHW": b"NHWC", b"NCDHW": b"NDHWC"}
_RANKS = {b"NCHW": 4, b"NCDHW": 5}

_INT32 = tf.int32.as_datatype_enum

# Attributes with a number, or two, for each axis.
_BY_AXIS = ("strides", "dilations", "ksize", "explicit_paddings")


class _Kernel(NamedTuple):
  """Which inputs of an op are laid out by its `data_format`.

  Fields:
    images: The positions of those that are images. So is output 0.
    sizes: The position of one that holds the shape of an image, or None.
  """
  images: Sequence[int] = (0,)
  sizes: Optional[int] = None


_KERNELS = {
    **dict.fromkeys(
        ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "MaxPool3D",
         "AvgPool", "AvgPool3D", "BiasAdd", "FusedBatchNorm",
         "FusedBatchNormV2", "FusedBatchNormV3", "SpaceToDepth",
         "DepthToSpace"), _Kernel()),
    "Conv2DBackpropInput": _Kernel(images=(2,), sizes=0),
    "Conv3DBackpropInputV2": _Kernel(images=(2,), sizes=0),
}

# These do the same to each number, whatever the order of the axes.
_ANY_LAYOUT = frozenset((
    "Add", "AddN", "AddV2", "Elu", "Identity", "LeakyRelu", "Maximum",
    "Minimum", "Mul", "Relu", "Relu6", "Selu", "Sigmoid", "Softplus",
    "Sub", "Swish", "Tanh"))


def channels_last(graph: tf.GraphDef,
                  ranks: Mapping[str, Optional[int]]) -> tf.GraphDef:
  """Returns the graph with kernels that compute channels last.

  Names, shapes and values of all tensors stay. An op `name` that is rewritten
  becomes `name/channels_last`, between transpositions of which the last takes
  the name; from one such op to the next there are none. What is left over, and
  the bodies of functions, stay as they are.

  Args:
    graph: The graph. Nodes that nothing needs any more are for the caller to
      drop.
    ranks: Rank of the first output of each op, None where it is not known.
  """
  rewriter = _Rewriter(ranks)
  for node in graph.node:
    rewriter.add(node)
  result = tf.GraphDef()
  result.versions.CopyFrom(graph.versions)
  result.library.CopyFrom(graph.library)
  result.node.extend(rewriter.finished())
  return result


def channels_first_ops(graph: tf.GraphDef) -> List[str]:
  """Returns the names of ops that compute channels first, functions' too."""
  nodes = [*graph.node, *(node for function in graph.library.function
                          for node in function.node_def)]
  return [node.name for node in nodes if _data_format(node) in _CHANNELS_LAST]


class _Rewriter:
  """Rewrites one node after the other; those that it reads come before."""

  def __init__(self, ranks: Mapping[str, Optional[int]]):
    self._ranks = ranks
    self._nodes: List[tf.NodeDef] = []
    # Rank of the image, by the name of an op that was rewritten.
    self._rewritten: Dict[str, int] = {}

  def add(self, node: tf.NodeDef) -> None:
    """Adds `node`, rewritten if that can be."""
    data_format = _data_format(node)
    inputs = [name for name in node.input if not name.startswith("^")]
    if node.op in _KERNELS and data_format in _CHANNELS_LAST:
      rank = _RANKS[data_format]
      if node.op != "BiasAdd" or self._ranks.get(node.name) == rank:
        self._rewrite(node, _KERNELS[node.op], rank)
        return
    elif node.op in _ANY_LAYOUT and inputs:
      common, *others = {self._rewritten.get(name) for name in inputs}
      if common is not None and not others:
        self._rewrite(node, _Kernel(range(len(inputs))), common)
        return
    self._nodes.append(node)

  def finished(self) -> List[tf.NodeDef]:
    """Returns the new nodes."""
    for node in self._nodes:
      for index, name in enumerate(node.input):
        op, _, output = name.partition(":")
        if output not in ("", "0") and op in self._rewritten:
          node.input[index] = f"{_inner(op)}:{output}"
    return self._nodes

  def _rewrite(self, node: tf.NodeDef, kernel: _Kernel, rank: int) -> None:
    dtype = node.attr["T"].type
    new = tf.NodeDef()
    new.CopyFrom(node)
    new.name = _inner(node.name)
    for index in kernel.images:
      name = node.input[index]
      if self._rewritten.get(name) == rank:
        new.input[index] = _inner(name)  # No need to go there and back.
      else:
        new.input[index] = f"{new.name}/input_{index}"
        self._transpose(new.input[index], name, _to_last(rank), dtype)
    if kernel.sizes is not None:
      new.input[kernel.sizes] = self._permuted(
          f"{new.name}/input_{kernel.sizes}", node, kernel.sizes, rank)
    _set_channels_last(new, rank)
    new.attr.pop("_output_shapes", None)
    self._nodes.append(new)
    self._transpose(node.name, new.name, _to_first(rank), dtype)
    self._rewritten[node.name] = rank

  def _transpose(self, name: str, value: str, order: Sequence[int],
                 dtype: int) -> None:
    """Adds an op `name` that transposes `value`."""
    permutation = self._constant(f"{_inner(name)}/order", order)
    node = tf.NodeDef(
        name=name, op="Transpose", input=[value, permutation])
    node.attr["T"].type = dtype
    node.attr["Tperm"].type = _INT32
    self._nodes.append(node)

  def _permuted(self, name: str, node: tf.NodeDef, index: int,
                rank: int) -> str:
    """Adds an op `name` that puts the shape in input `index` in order."""
    node_type = node.attr["Tshape"].type if "Tshape" in node.attr else _INT32
    new = tf.NodeDef(
        name=name, op="GatherV2",
        input=[node.input[index],
               self._constant(f"{name}/order", _to_last(rank)),
               self._constant(f"{name}/axis", 0)])
    new.attr["Tparams"].type = node_type
    new.attr["Tindices"].type = _INT32
    new.attr["Taxis"].type = _INT32
    self._nodes.append(new)
    return name

  def _constant(self, name: str, value: Any) -> str:
    node = tf.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = _INT32
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int32))
    self._nodes.append(node)
    return name


def _set_channels_last(node: tf.NodeDef, rank: int) -> None:
  """Rewrites the attributes of `node` that tell or follow the layout."""
  if "data_format" in node.attr:
    node.attr["data_format"].s = _CHANNELS_LAST[node.attr["data_format"].s]
  for name in _BY_AXIS:
    values = list(node.attr[name].list.i) if name in node.attr else []
    if values:
      by_axis = np.reshape(values, [rank, -1])[_to_last(rank)]
      node.attr[name].list.i[:] = by_axis.ravel().tolist()


def _data_format(node: tf.NodeDef) -> bytes:
  # Asking for an attribute that is not there would make it.
  return node.attr["data_format"].s if "data_format" in node.attr else b""


def _inner(name: str) -> str:
  """Returns what the op `name` is called once it computes channels last."""
  return f"{name}/channels_last"


def _to_last(rank: int) -> List[int]:
  return [0, *range(2, rank), 1]


def _to_first(rank: int) -> List[int]:
  return [0, rank - 1, *range(1, rank - 1)]
