"""Finds out which keys of a checkpoint are meant for which variable.

Four rules, each for what those before it left open:

1. The key is the variable's name.
2. It is, without what stands for a tower in it (`tower_1/`, `/replica_1`).
3. It is, where things that libraries name differently count as the same
   (`mean/EMA` and `moving_mean`, `W` and `kernel`).
4. Layers without names of their own follow in the same order: `conv2d_2` and
   `conv2d_3` there are `conv2d` and `conv2d_1` here.

So a model's own scope `v1/` is not taken for a tower: its variables' names are
in the file as they are.
"""

import collections
from typing import Dict, Iterable, List, NamedTuple, Optional, Set

from towers import checkpoint_names


class Matches(NamedTuple):
  """What fits what.

  Fields:
    keys: The keys that fit each variable, the best first; none is no entry.
    dropped: Keys of towers that were not asked for.
  """
  keys: Dict[str, List[str]]
  dropped: List[str]


def match(keys: Iterable[str], names: Iterable[str], *,
          tower: Optional[int] = None,
          renumber_layers: Optional[bool] = None) -> Matches:
  """Returns which of the `keys` of a file fit the variables `names`.

  Args:
    keys: The keys.
    names: The variables' names.
    tower: See `towers.checkpoints.plan`.
    renumber_layers: See `towers.checkpoints.plan`.

  Raises:
    ValueError: If no key has the number `tower`.
    ValueError: If one key fits two variables.
    ValueError: If it is open which layers correspond.
  """
  names = set(names)
  plain = {key: checkpoint_names.without_tower(key) for key in keys}
  dropped = _of_other_towers(plain, names, tower)
  text = {key: name.text for key, name in plain.items() if key not in dropped}
  owners = {key: key for key in text if key in names}
  for key in text.keys() - owners.keys():
    if text[key] in names:
      owners[key] = text[key]
  _match_synonyms(text, names, owners)
  _match_layers(text, names, owners, renumber_layers)

  found = collections.defaultdict(list)
  for key, name in owners.items():
    found[name].append(key)
  for name, fitting in found.items():
    fitting.sort(key=lambda key: (key != name, plain[key].tower or 0, key))
  return Matches(dict(found), sorted(dropped))


def _of_other_towers(plain: Dict[str, checkpoint_names.Name], names: Set[str],
                     tower: Optional[int]) -> Set[str]:
  """Returns the keys of towers other than `tower`."""
  if tower is None:
    return set()
  numbers = {name.tower for name in plain.values() if name.tower is not None}
  if tower not in numbers | {0}:
    raise ValueError(
        "`tower` must be one whose copies the checkpoint holds: expected one "
        f"of {sorted(numbers | {0})}, got {tower}.")
  # A name without a number is the first tower's where others have one.
  others = {name.text for name in plain.values() if name.tower == tower}
  return {key for key, name in plain.items() if (
      name.text in others and tower if name.tower is None
      else name.tower != tower and key not in names)}


def _match_synonyms(text: Dict[str, str], names: Set[str],
                    owners: Dict[str, str]) -> None:
  """Adds to `owners` by the third rule."""
  missing = collections.defaultdict(list)
  for name in sorted(names - set(owners.values())):
    missing[checkpoint_names.plain(name)].append(name)
  for key in sorted(text.keys() - owners.keys()):
    fitting = missing.get(checkpoint_names.plain(text[key]), [])
    if len(fitting) > 1:
      raise ValueError(
          f"`{key}` of the checkpoint must fit one variable: it fits "
          f"{_quoted(fitting)}. Say which by `renames`, such as "
          f"renames={{{'^' + key + '$'!r}: {fitting[0]!r}}}.")
    if fitting:
      owners[key] = fitting[0]


def _match_layers(text: Dict[str, str], names: Set[str],
                  owners: Dict[str, str], renumber: Optional[bool]) -> None:
  """Adds to `owners` by the fourth rule, or changes them if told to."""
  if renumber is False:
    return
  missing = names - set(owners.values())
  here = _layers(names)
  there = _layers(set(text.values()))
  for kind in sorted(here):
    ours = here[kind]
    leaves = {leaf for layer in ours.values() for leaf in layer}
    theirs = {scope: layer for scope, layer in there.get(kind, {}).items()
              if leaves & layer.keys()}
    lacking = [scope for scope in ours if scope not in theirs
               and missing & set(ours[scope].values())]
    spare = [scope for scope in theirs if scope not in ours]
    if not lacking or not spare:
      continue
    shared = ours.keys() & theirs.keys()
    if len(ours) == len(theirs) and (renumber or not shared):
      pairs = {
          theirs[there_scope][leaf]: ours[scope][leaf]
          for scope, there_scope in zip(ours, theirs)
          for leaf in ours[scope].keys() & theirs[there_scope].keys()
      }
      _own(text, owners, pairs, {name for layer in ours.values()
                                 for name in layer.values()})
    elif len(ours) == len(theirs) or not shared:
      raise ValueError(
          f"`{kind}` layers must correspond: expected {_quoted(ours)}, got "
          f"{_quoted(theirs)} in the checkpoint, which " + (
              "fit by name in part, and all by their order. Give "
              "`renumber_layers=True` to go by the order, or "
              "`renumber_layers=False` to go by names."
              if shared else "are not as many. Say which is which by "
              "`renames`, or give `renumber_layers=False` to leave them out."))


def _own(text: Dict[str, str], owners: Dict[str, str], pairs: Dict[str, str],
         names: Set[str]) -> None:
  """Gives the variables `names` the keys that `pairs` says, and no others."""
  for key in [key for key, name in owners.items() if name in names]:
    del owners[key]
  for key, stripped in text.items():
    if stripped in pairs:
      owners[key] = pairs[stripped]


def _layers(names: Iterable[str]) -> Dict[str, Dict[str, Dict[str, str]]]:
  """Returns names by kind of layer, layer (in order) and leaf."""
  found: Dict[str, Dict[str, Dict[str, str]]] = collections.defaultdict(
      lambda: collections.defaultdict(dict))
  order = {}
  for name in names:
    layer = checkpoint_names.layer(name)
    if layer:
      found[layer.kind][layer.scope][layer.leaf] = name
      order[layer.scope] = layer.order
  return {
      kind: {scope: layers[scope] for scope in sorted(
          layers, key=lambda scope: (order[scope], scope))}
      for kind, layers in found.items()
  }


def _quoted(names: Iterable[str]) -> str:
  return ", ".join(f"`{name}`" for name in names)
