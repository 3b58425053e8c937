"""Rules about variables: whose they are, where they live, what changes them."""

import collections
from typing import Any, Dict, List, Optional, Set, Tuple

import tensorflow.compat.v1 as tf

from towers import findings
from towers import graph_nodes
from towers import scopes as scopes_lib
from towers import tower as tower_lib

Node = graph_nodes.Node

_PASSES_ON = frozenset(["NoOp", "Identity", "Merge", "Switch"])


def variables_not_shared(context: findings.Context,
                         towers: scopes_lib.TowerSet) -> findings.Found:
  """Finds trainable variables that each tower has for its own."""
  alike: Dict[Tuple[Any, ...], Dict[int, Node]] = collections.defaultdict(dict)
  for variable, users in findings.uses(context, towers).items():
    known = context.variables[variable.name]
    if known.trainable and len(users) == 1:
      key = (tower_lib.without_numbers(context.scopes.plain_name(variable)),
             str(known.shape), known.dtype)
      alike[key].setdefault(next(iter(users)), variable)
  alike = {key: own for key, own in alike.items() if len(own) > 1}
  if not alike:
    return
  # Copies that each get the gradients of all towers stay equal.
  behind = findings.towers_behind(context, towers)
  everybody = (1 << len(towers.nodes)) - 1
  in_step = {node.changed_variable for node in context.nodes.ordered
             if node.is_apply and behind[node] == everybody}
  own = [variable for copies in alike.values() for variable in copies.values()
         if variable not in in_step]
  if own:
    yield findings.Finding(
        "variables_not_shared",
        f"{len(own)} trainable variables of `{towers.name}` belong to one "
        f"tower each, such as `{own[0].name}`.", findings.names(own),
        "Each tower trains weights of its own, on its part of the data; a "
        "checkpoint holds them all, and evaluation uses those of one.",
        "Make variables by `tf.get_variable`, name the layers, and reuse the "
        "variable scope from the second tower on; or use "
        "`towers.build_towers`, which shares variables of any kind.")


def variables_on_tower_devices(
    context: findings.Context, towers: scopes_lib.TowerSet) -> findings.Found:
  """Finds variables that slipped from where the others are pinned."""
  devices: Set[str] = set()
  for members in towers.nodes.values():
    counts = collections.Counter(
        node.device for node in members
        if node.device and node.handle is None and node.value_of is None)
    devices.update(device for device, _ in counts.most_common(1))
  if len(devices) < 2:
    return
  uses = [variable for variable, users in findings.uses(context, towers).items()
          if len(users) > 1]
  local = set(context.nodes.collections.get(tf.GraphKeys.LOCAL_VARIABLES, ()))
  elsewhere = [v for v in uses if v.device and v.device not in devices
               and context.variables[v.name].trainable]
  on_towers = [v for v in uses if v.device in devices and v.name not in local]
  if elsewhere and on_towers:
    yield findings.Finding(
        "variables_on_tower_devices",
        f"{len(on_towers)} variables, such as `{on_towers[0].name}`, live on "
        f"`{on_towers[0].device}`, where a tower of `{towers.name}` computes; "
        f"others live on `{elsewhere[0].device}`.", findings.names(on_towers),
        "Every other tower reads them from that tower's device, which has the "
        "memory and the traffic of them all; usually a layer made them outside "
        "the reach of the code that pins variables.",
        "Pin variables by a device function that knows all their ops, "
        "`VarHandleOp` too; or use `parameter_device` of `build_towers`.")


def optimizer_slots(context: findings.Context) -> findings.Found:
  """Finds slots of an optimizer that a tower's scope names."""
  slots: Dict[Node, None] = {}
  for node in context.nodes.ordered:
    if node.is_apply and node.changed_variable is not None and (
        context.scopes.place(node.changed_variable) is None):
      for source, _ in node.inputs[1:]:
        slot = source.handle or source.value_of
        if slot is not None and context.scopes.place(slot) is not None:
          slots[slot] = None
  if slots:
    yield findings.Finding(
        "optimizer_slots_in_tower",
        f"{len(slots)} variables of an optimizer, such as "
        f"`{next(iter(slots)).name}`, are named by a tower.",
        findings.names(list(slots)),
        "A checkpoint with such names fits no other number of towers, and no "
        "single device.",
        "Call `apply_gradients` or `minimize` outside of the towers' scopes.")


def updates_of_all_towers(context: findings.Context,
                          towers: scopes_lib.TowerSet) -> findings.Found:
  """Finds variables that several towers set in one step."""
  if context.needed is None:
    return
  by_variable: Dict[Optional[Node], Dict[int, Node]] = (
      collections.defaultdict(dict))
  for index, members in towers.nodes.items():
    for node in members:
      # What only adds, such as a counter, may well do so in each tower.
      if node.op in ("Assign", "AssignSub", "AssignVariableOp",
                     "AssignSubVariableOp") and node in context.needed:
        value = node.inputs[1][0] if len(node.inputs) > 1 else node
        if value.origin & graph_nodes.FROM_INPUT or (
            node in context.update_ops):
          by_variable[node.changed_variable][index] = node
  several = {variable: changes for variable, changes in by_variable.items()
             if variable is not None and len(changes) > 1}
  if several:
    yield findings.Finding(
        "updates_of_all_towers",
        f"{len(several)} variables, such as `{next(iter(several)).name}`, are "
        f"changed by {max(map(len, several.values()))} towers of "
        f"`{towers.name}` in each step.", findings.names(list(several)),
        "The changes do not average: a moving average moves up to N times too "
        "far, and the result depends on the order of threads.",
        "Run the update ops of one tower only, or let the towers' statistics "
        "meet first, as `towers.build_towers` does.")


def updates_not_run(context: findings.Context) -> findings.Found:
  """Finds update ops that the training step leaves out."""
  if context.needed is None:
    return
  left: Dict[Node, List[Node]] = collections.defaultdict(list)
  updated = set()
  for op in context.update_ops:
    for change in _changes_behind(op):
      if change.changed_variable is None:
        continue
      if change in context.needed:
        updated.add(change.changed_variable)
      else:
        left[change.changed_variable].append(op)
  left = {v: ops for v, ops in left.items() if v not in updated}
  dead = [v for v, ops in left.items()
          if not any(_is_run_by_others(op) for op in ops)]
  others = [v for v in left if v not in set(dead)]
  why = ("Moving statistics stay at their initial values, or behind; a model "
         "that trains well then evaluates badly.")
  if dead:
    yield findings.Finding(
        "updates_not_run",
        f"No op of the graph runs the update ops of {len(dead)} variables, "
        f"such as `{dead[0].name}`.", findings.names(dead), why,
        "Make the train op under `tf.control_dependencies(update_ops)`, with "
        "the collection `UPDATE_OPS` read after the towers are built, or use "
        "`graph.minimize`.")
  if others:
    yield findings.Finding(
        "train_op_skips_updates",
        f"The train op does not wait for the update ops of {len(others)} "
        f"variables, such as `{others[0].name}`; other ops do.",
        findings.names(others),
        why + " They change when something else is run.",
        "Make a new op under `tf.control_dependencies(update_ops)` and run "
        "that as the train op: one that was made before waits for nothing.")


def _is_run_by_others(op: Node) -> bool:
  """Says whether anything but reading the variable again comes after `op`."""
  return any(reader.value_of is None or _is_run_by_others(reader)
             for reader in op.readers + op.followers)


def _changes_behind(op: Node) -> List[Node]:
  """Returns the ops that change variables, for which `op` may stand."""
  found, pending, seen = [], [op], set()
  while pending:
    node = pending.pop()
    if node in seen:
      continue
    seen.add(node)
    if node.changed_variable is not None:
      found.append(node)
    elif node.op in _PASSES_ON:
      pending.extend(source for source, _ in node.inputs)
      pending.extend(node.controls)
  return found
