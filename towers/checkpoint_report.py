"""What a restore from a checkpoint did, or would do."""

from typing import Any, Dict, List, NamedTuple, Tuple


class Difference(NamedTuple):
  """A variable whose value in the file is of another shape or type.

  Fields:
    key: The key in the file.
    there: Shape and type in the file.
    here: Shape and type of the variable.
  """
  key: str
  there: str
  here: str


class Report(NamedTuple):
  """Which variable gets which value; `str` makes a text table of it.

  Fields:
    checkpoint: Prefix of the file.
    sources: For each variable that is restored, its key in the file.
    initial: Variables that the file has no value for. They keep the value that
      they have, or get their initial one.
    excluded: Variables that were not to be restored.
    different: Variables left as they are since their shape or type differs.
    copies: For each variable restored, the keys of further towers' copies, all
      equal to it in every bit.
    unused: Keys of the file that no variable takes.
  """
  checkpoint: str
  sources: Dict[str, str]
  initial: Tuple[str, ...] = ()
  excluded: Tuple[str, ...] = ()
  different: Dict[str, Difference] = {}
  copies: Dict[str, Tuple[str, ...]] = {}
  unused: Tuple[str, ...] = ()

  @property
  def restored(self) -> Tuple[str, ...]:
    """The variables whose key in the file is their own name."""
    return tuple(name for name, key in self.sources.items() if name == key)

  @property
  def renamed(self) -> Dict[str, str]:
    """The variables with another key in the file, and that key."""
    return {name: key for name, key in self.sources.items() if name != key}

  def __str__(self) -> str:
    rows: List[Tuple[Any, ...]] = [("what", "variable", "key in the file")]
    rows += [("restored", name, name) for name in self.restored]
    rows += [("renamed", name, key) for name, key in self.renamed.items()]
    rows += [("equal copy", name, key) for name, keys in self.copies.items()
             for key in keys]
    rows += [("shape differs", name, f"{d.key}: {d.there}, not {d.here}")
             for name, d in self.different.items()]
    rows += [("initial value", name, "") for name in self.initial]
    rows += [("excluded", name, "") for name in self.excluded]
    rows += [("left over", "", key) for key in self.unused]
    widths = [max(len(row[k]) for row in rows) for k in range(2)]
    lines = [f"{row[0].ljust(widths[0])}  {row[1].ljust(widths[1])}  {row[2]}"
             for row in rows]
    lines.append(
        f"{len(self.restored)} restored, {len(self.renamed)} renamed, "
        f"{len(self.initial)} at their initial value, {len(self.different)} of "
        f"other shape, {len(self.excluded)} excluded, {len(self.unused)} left "
        f"over in {self.checkpoint}.")
    return "\n".join(line.rstrip() for line in lines)
