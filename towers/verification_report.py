"""The report of `verification`, and its text."""

import textwrap
from typing import Any, Iterator, List, Mapping, NamedTuple, Sequence

import numpy as np

from towers import report_text
from towers import verification_causes as causes_lib
from towers import verification_check as check_lib

_WIDTH = 80
# One fault changes every gradient before it.
_MOST_ROWS = 8


class Report(NamedTuple):
  """What a check has found; `str(report)` is for people.

  Fields:
    num_towers: How many towers were compared with one device.
    rows: The sizes of the batches, in the order they were compared in; empty
      for a model without inputs.
    compared: How many results of each kind a batch has: "loss", "output",
      "gradient", "update" (variables that the update ops may change).
    held: Names of the random operations whose numbers were held equal.
    differences: `Difference`s, those that share a cause side by side, in the
      order in which a step comes to the causes.
    notes: What else is to be known, in sentences.
  """
  num_towers: int
  rows: Sequence[int]
  compared: Mapping[str, int]
  held: Sequence[str]
  differences: Sequence[check_lib.Difference]
  notes: Sequence[str]

  @property
  def equal(self) -> bool:
    """Whether the towers compute what one device computes."""
    return not self.differences

  @property
  def causes(self) -> List[causes_lib.Cause]:
    """The causes, each once; the layer of the first comes first."""
    return list(dict.fromkeys(d.cause for d in self.differences))

  def __str__(self) -> str:
    return "\n".join(_lines(self)) + "\n"


def _lines(report: Report) -> Iterator[str]:
  verb = "compute" if report.equal else "do not compute"
  yield f"{report.num_towers} towers {verb} what one device computes."
  yield ""
  counted = [_number(n, kind) for kind, n in report.compared.items() if n]
  rows = (f", for batches of {_listed(report.rows)} rows" if report.rows else
          "")
  if counted:
    yield from _wrapped(f"Compared: {_listed(counted)}{rows}.")
  if report.held:
    more = " and more" if len(report.held) > _MOST_ROWS else ""
    listed = _listed(report.held[:_MOST_ROWS])
    yield from _wrapped(f"Random numbers held equal: {listed}{more}.")
  for note in report.notes:
    yield from _wrapped(f"Note: {note}")
  for number, cause in enumerate(report.causes, start=1):
    yield ""
    yield from _wrapped(f"{number}. {cause.rule}: {cause}")
    yield from _wrapped(f"   {cause.remedy}", "   ")
    yield ""
    own = [d for d in report.differences if d.cause == cause]
    table = report_text.table(
        ("rows", "what differs", "name", "difference", "allowed", "at"),
        [_row(d) for d in own[:_MOST_ROWS]])
    yield textwrap.indent(table, "   ")
    if len(own) > _MOST_ROWS:
      yield f"   and {len(own) - _MOST_ROWS} more"
    for message in dict.fromkeys(d.message for d in own if d.message):
      yield from _wrapped(f"   {message}", "   ")


def _row(difference: check_lib.Difference) -> Sequence[str]:
  def number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2g}"

  return ("" if difference.rows is None else str(difference.rows),
          difference.kind, difference.name, number(difference.largest),
          number(difference.allowed) if difference.allowed else "",
          str(list(difference.index)) if difference.index else "")


def _number(count: int, kind: str) -> str:
  if kind == "loss":
    return "the loss"
  name = "variable" if kind == "update" else kind
  after = " after the update ops" if kind == "update" else ""
  return f"{count} {name}{'' if count == 1 else 's'}{after}"


def _listed(items: Sequence[Any]) -> str:
  texts = [str(item) for item in items]
  if len(texts) < 2:
    return "".join(texts)
  return ", ".join(texts[:-1]) + f" and {texts[-1]}"


def _wrapped(text: str, indent: str = "") -> List[str]:
  return textwrap.wrap(text, _WIDTH, subsequent_indent=indent,
                       break_long_words=False, break_on_hyphens=False)
