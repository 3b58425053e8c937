"""What must be the same in all tasks: flags, program, variables."""

import hashlib
import pathlib
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers import cluster_network
from towers import cluster_spec

# Only tasks that build a graph know of variables.
_VARIABLE = "variable "


def collect(given: Mapping[str, str], members: cluster_spec.Members, *,
            replication: str,
            variables: Optional[Sequence[Any]] = None) -> Dict[str, str]:
  """Returns what must be the same, by name.

  Args:
    given: What the caller says must be.
    members: The tasks.
    replication: How the work is spread.
    variables: The variables of the graph; None in a task that builds none.
  """
  facts = dict(given)
  facts["version of TensorFlow"] = tf.__version__
  facts["program"] = _program()
  facts["replication"] = replication
  for job, addresses in members.addresses().items():
    facts[f"addresses of {job}"] = ", ".join(addresses)
  for variable in variables or ():
    facts[f"{_VARIABLE}{variable.op.name}"] = (
        f"{variable.dtype.base_dtype.name} {variable.shape}")
  return facts


def _program() -> str:
  """Returns the name of the program, and a hash of what stands in it."""
  path = pathlib.Path(sys.argv[0] or "-")
  try:
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
  except OSError:
    return path.name


def check(own: Mapping[str, str], chief: Mapping[str, str],
          task: cluster_spec.Task) -> None:
  """Checks the facts of this task against the chief's.

  Args:
    own: The facts of `task`, with variables if it builds a graph.
    chief: Those of the chief.
    task: Whom to name.

  Raises:
    ClusterError: If there are differences; it lists them.
  """
  if not any(name.startswith(_VARIABLE) for name in own):
    chief = {name: value for name, value in chief.items()
             if not name.startswith(_VARIABLE)}
  different = _differences(own, chief)
  if different:
    raise cluster_network.ClusterError(
        "`facts` must be the same in all tasks: got differences in "
        f"{task}: {'; '.join(different)}. Start all tasks with the same "
        "program and flags.")


def _differences(own: Mapping[str, str],
                 chief: Mapping[str, str]) -> List[str]:
  def value(facts: Mapping[str, str], name: str) -> str:
    return repr(facts[name]) if name in facts else "none"

  return [
      f"{name} is {value(own, name)} here and {value(chief, name)} at the chief"
      for name in sorted(own.keys() | chief.keys())
      if own.get(name) != chief.get(name)
  ]
