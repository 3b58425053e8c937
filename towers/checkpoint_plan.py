"""Decides which variable gets which value of a checkpoint."""

import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Union

import tensorflow.compat.v1 as tf

from towers import checkpoint_files
from towers import checkpoint_matching
from towers import checkpoint_names
from towers import checkpoint_report
from towers import checkpoint_targets

Patterns = Union[str, Sequence[str]]

# How many names an error lists before it counts the rest.
_SHOWN = 10


def plan(checkpoint: str, *, variables: Any = None, include: Patterns = (),
         exclude: Patterns = (), renames: Optional[Mapping[str, str]] = None,
         tower: Optional[int] = None, renumber_layers: Optional[bool] = None,
         allow_missing: bool = False,
         allow_different_shapes: bool = False) -> checkpoint_report.Report:
  """Returns what a restore would do; needs no session and changes nothing.

  Reads values only where several keys fit one variable, to compare them.

  Args:
    checkpoint: Prefix of the checkpoint, or a directory, for the last in it.
    variables: What to restore: variables, a mapping of names in the file to
      variables, a mapping of names to shapes, or another checkpoint with the
      names to match. Default: the graph's global variables.
    include: Regular expressions; only variables whose name one of them finds
      are restored. Default: all.
    exclude: Regular expressions; variables whose name one of them finds are not
      restored, and such keys of the file are not looked at.
    renames: Regular expressions and what to put in place of what they find,
      done in this order to the keys of the file before all else.
    tower: Whose copy to take, where the file holds copies of several towers.
      Default: they must be equal in every bit.
    renumber_layers: Whether layers that Keras or `tf.layers` named (`dense_3`)
      match by their order where their numbers differ. Default: if none of the
      numbers is the same, and there are as many; where it could be meant either
      way, it is an error. False: never.
    allow_missing: Whether the file may lack trainable variables, and others of
      the model. (Slots and other variables of optimizers, and scalars that are
      not trained, it may lack in any case.)
    allow_different_shapes: Whether variables whose shape or type differs from
      that in the file are left as they are.

  Returns:
    The report.

  Raises:
    TypeError: If `variables` is nothing of the kind.
    ValueError: If the checkpoint does not exist or cannot be read. The message
      names the last good one in its directory.
    ValueError: If a pattern is no regular expression, `include` finds nothing,
      `renames` makes two keys the same, or no key is of `tower`.
    ValueError: If two keys fit one variable and their values differ, or one key
      fits two variables. The message lists them.
    ValueError: If shapes or types differ.
    ValueError: If the file lacks variables of the model, or has none of all.
  """
  included, excluded = _compiled("include", include), _compiled("exclude",
                                                                exclude)
  compiled = _compiled_renames(renames or {})
  file = checkpoint_files.File(checkpoint)
  targets = checkpoint_targets.targets(variables)
  names = _selected(targets, included, excluded)
  keys = _renamed(file.entries, compiled)
  matches = checkpoint_matching.match(
      [key for key in keys if not _finds(excluded, key)],
      targets.keys() | _others(targets), tower=tower,
      renumber_layers=renumber_layers)

  # Names as in the file from here on.
  fitting = {name: [keys[key] for key in matches.keys[name]]
             for name in names if name in matches.keys}
  _check_one_value(file, fitting)
  different = {}
  for name, candidates in fitting.items():
    there, here = targets[name].difference(file.entries[candidates[0]])
    if there:
      different[name] = checkpoint_report.Difference(candidates[0], there, here)
  if different and not allow_different_shapes:
    _raise_different(file.path, different)
  used = {key for candidates in fitting.values() for key in candidates}
  report = checkpoint_report.Report(
      checkpoint=file.path,
      sources={name: fitting[name][0] for name in names
               if name in fitting and name not in different},
      initial=tuple(name for name in names if name not in fitting),
      excluded=tuple(name for name in targets if name not in names),
      different=different,
      copies={name: tuple(candidates[1:])
              for name, candidates in fitting.items()
              if len(candidates) > 1 and name not in different},
      unused=tuple(key for key in file.entries if key not in used))
  _check_found(report, [] if allow_missing else [
      name for name in report.initial if targets[name].required])
  return report


def cleaned_names(
    checkpoint: str, *, renames: Optional[Mapping[str, str]] = None
) -> Dict[str, checkpoint_targets.Target]:
  """Returns what a checkpoint holds, names cleaned of towers, as `variables`.

  For `plan`, where there is no model to tell the names: what stands for a tower
  is dropped wherever it stands, `mean/EMA` and `variance/EMA` become
  `moving_mean` and `moving_variance`.

  Args:
    checkpoint: See `plan`.
    renames: See `plan`, which must be given the same.

  Raises:
    ValueError: If the checkpoint does not exist or cannot be read.
    ValueError: If `renames` does not fit, see `plan`.
  """
  compiled = _compiled_renames(renames or {})
  keys = _renamed(checkpoint_files.File(checkpoint).entries, compiled)
  return checkpoint_targets.anything(map(checkpoint_names.cleaned, keys))


def _others(targets: Mapping[str, checkpoint_targets.Target]) -> Iterable[str]:
  """Returns the names of the graph's variables, if there is a graph.

  A key that is the name of one of these is meant for it, restored or not.
  """
  variables = [target.variables[0] for target in targets.values()
               if target.variables]
  if not variables:
    return set()
  with variables[0].graph.as_default():
    return checkpoint_targets.targets(tf.global_variables()).keys()


def _compiled(argument: str, patterns: Patterns) -> List[re.Pattern]:
  if isinstance(patterns, str):
    patterns = [patterns]
  try:
    return [re.compile(pattern) for pattern in patterns]
  except re.error as error:
    raise ValueError(
        f"`{argument}` must be regular expressions: got {error.pattern!r} "
        f"({error}).") from error


def _compiled_renames(renames: Mapping[str, str]) -> Dict[re.Pattern, str]:
  found = dict(zip(_compiled("renames", list(renames)), renames.values()))
  for pattern, text in found.items():
    try:
      # Compiles the replacement even where nothing is found.
      re.compile(pattern.pattern + "|").sub(text, "")
    except (re.error, IndexError) as error:
      raise ValueError(
          "`renames` must map regular expressions to what takes their place: "
          f"got {text!r} for {pattern.pattern!r} ({error}).") from error
  return found


def _finds(patterns: Iterable[re.Pattern], name: str) -> bool:
  return any(pattern.search(name) for pattern in patterns)


def _selected(names: Iterable[str], include: List[re.Pattern],
              exclude: List[re.Pattern]) -> List[str]:
  """Returns the names that are to be restored."""
  for pattern in include:
    if not any(pattern.search(name) for name in names):
      raise ValueError(
          "`include` must find the name of a variable: got "
          f"{pattern.pattern!r}, which finds none of {_listed(names)}.")
  return [name for name in names if not _finds(exclude, name)
          and (not include or _finds(include, name))]


def _renamed(keys: Iterable[str],
             renames: Dict[re.Pattern, str]) -> Dict[str, str]:
  """Returns the keys of the file by what `renames` makes of them."""
  found: Dict[str, str] = {}
  for key in keys:
    new = key
    for pattern, text in renames.items():
      new = pattern.sub(text, new)
    if found.setdefault(new, key) != key:
      raise ValueError(
          "`renames` must leave each key a name of its own: it makes "
          f"{_listed([found[new], key])} the same, `{new}`.")
  return found


def _check_one_value(file: checkpoint_files.File,
                     fitting: Mapping[str, Sequence[str]]) -> None:
  """Raises an error where candidates differ in any bit."""
  wrong = [name for name, keys in fitting.items()
           if not all(_same(file, keys[0], key) for key in keys[1:])]
  if wrong:
    candidates = "; ".join(
        f"`{name}` by {_listed(fitting[name])}" for name in wrong[:_SHOWN])
    raise ValueError(
        f"`checkpoint` must hold one value for each variable: {file.path} has "
        f"several, which differ, for {len(wrong)}: {candidates}. Say whose to "
        "take by `tower`, such as `tower=0`, or leave keys out by `exclude`.")


def _same(file: checkpoint_files.File, key: str, other: str) -> bool:
  if file.entries[key][1:] != file.entries[other][1:]:
    return False
  # Not by `==`: NaN equals NaN here, and 0 is not -0.
  value, another = file.value(key), file.value(other)
  if file.entries[key].dtype == tf.string:
    return value.tolist() == another.tolist() if hasattr(
        value, "tolist") else value == another
  return value.tobytes() == another.tobytes()


def _raise_different(
    path: str, different: Mapping[str, checkpoint_report.Difference]) -> None:
  text = "; ".join(
      f"`{name}` ({d.here}) by `{d.key}` ({d.there})"
      for name, d in list(different.items())[:_SHOWN])
  raise ValueError(
      f"`checkpoint` must hold values of the variables' shapes and types: "
      f"{path} has others for {len(different)}: {text}. Leave them out by "
      "`exclude`, or pass `allow_different_shapes=True` to leave all such as "
      "they are.")


def _check_found(report: checkpoint_report.Report,
                 missing: Sequence[str]) -> None:
  if missing:
    raise ValueError(
        "`checkpoint` must hold the variables of the model: "
        f"{report.checkpoint} lacks {len(missing)}: {_listed(missing)}. Left "
        f"over are {len(report.unused)} keys: {_listed(report.unused)}. Map "
        "names by `renames`, leave variables out by `exclude`, or pass "
        "`allow_missing=True`.")
  if not report.sources:
    raise ValueError(
        "`checkpoint` must hold at least one of the variables: "
        f"{report.checkpoint} holds {_listed(report.unused)}, and asked for is "
        f"{_listed(report.initial)}. Map names by `renames`.")


def _listed(names: Iterable[str]) -> str:
  names = [f"`{name}`" for name in names]
  more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
  return (", ".join(names[:_SHOWN]) or "none") + more
