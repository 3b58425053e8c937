"""Which tower the running code builds."""

import contextlib
import threading
from typing import Any, Iterator, Optional

from towers import tower as tower_lib


class _Local(threading.local):
  """What is known by thread; every thread starts outside any tower."""

  def __init__(self) -> None:
    super().__init__()
    self.tower: Optional[tower_lib.Tower] = None
    self.lockstep: Any = None
    self.conversion: Any = None
    self.merging: Any = None
    self.sync_batch_norm = True
    self.unwatched = False
    self.applying = False


_local = _Local()


def current_tower() -> tower_lib.Tower:
  """Returns the tower that the calling code is building.

  Outside `towers.build_towers` it returns a tower that is alone: index 0 of 1,
  without device and name scope. So a model that asks runs without `towers` too.
  """
  if _local.tower is not None:
    return _local.tower
  return tower_lib.Tower(index=0, count=1, devices=("",), name_scope="")


def building() -> Optional[tower_lib.Tower]:
  """Returns the tower that is being built, or None outside a model function."""
  return _local.tower


def lockstep() -> Any:
  """Returns the lockstep that the running tower is part of.

  None outside a build, and in a build of a single tower.
  """
  return _local.lockstep


def conversion() -> Any:
  """Returns what keeps account of the layers in which towers meet."""
  return _local.conversion


def merging() -> Any:
  """Returns the lockstep whose towers are meeting, in the builder's thread."""
  return _local.merging


@contextlib.contextmanager
def meeting_of(lockstep_of_towers: Any) -> Iterator[None]:
  """A context for what the builder's thread makes of a meeting."""
  _local.merging = lockstep_of_towers
  try:
    yield
  finally:
    _local.merging = None


def sync_batch_norm() -> bool:
  """Says whether batch norm shares its statistics between towers here."""
  return _local.sync_batch_norm


def unwatched() -> bool:
  """Says whether ops are made that no conversion must look at."""
  return _local.unwatched


@contextlib.contextmanager
def not_watched() -> Iterator[None]:
  """A context for ops that no conversion must look at.

  A layer of `towers` meets by itself; and the assignment of an initial value is
  no update.
  """
  saved = _local.unwatched
  _local.unwatched = True
  try:
    yield
  finally:
    _local.unwatched = saved


@contextlib.contextmanager
def outside() -> Iterator[None]:
  """A context for what a tower's thread makes that belongs to no tower."""
  saved = _local.tower
  _local.tower = None
  try:
    with not_watched():
      yield
  finally:
    _local.tower = saved


def applying() -> bool:
  """Says whether an optimizer is at work for `towers`."""
  return _local.applying


@contextlib.contextmanager
def applies() -> Iterator[None]:
  """A context in which an optimizer may update variables that have copies."""
  _local.applying = True
  try:
    yield
  finally:
    _local.applying = False


@contextlib.contextmanager
def entered(tower: Optional[tower_lib.Tower], *, lockstep_of_tower: Any,
            conversion_of_tower: Any, sync: bool) -> Iterator[None]:
  """Makes `tower` the one that the calling thread builds."""
  saved = dict(_local.__dict__)
  _local.tower = tower
  _local.lockstep = lockstep_of_tower
  _local.conversion = conversion_of_tower
  _local.sync_batch_norm = sync
  try:
    yield
  finally:
    _local.__dict__.update(saved)


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
  """A context in which batch norm keeps to the statistics of its own tower.

  For `towers.batch_norm` called inside it. Each tower then normalises with the
  moments of its own rows. The moving statistics stay shared and are updated
  once a step, with the mean of the towers' statistics, weighted by their
  element counts. Outside `towers.build_towers` it has no effect.
  """
  saved = _local.sync_batch_norm
  _local.sync_batch_norm = False
  try:
    yield
  finally:
    _local.sync_batch_norm = saved
