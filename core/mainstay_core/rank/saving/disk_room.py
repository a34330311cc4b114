"""Decides what is removed from a directory of checkpoints, so that the next attempt has room.

Abandoned attempts are removed in any case, before this is asked. If what is free then is not
enough, damaged versions go. If that is still not enough, the oldest complete versions go, as
without room nothing has been saved ever again. Nothing complete is removed in vain, the newest
version always stays, and it is read and checked before the last of the others goes. The newest
exact version stays as long as a newer one is approximate, and in a job with a witness the newest
one before which no device can turn out to have been wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One version in the directory."""

    name: str
    version: int
    size_bytes: int
    complete: bool
    """Whether it can be gone on from, at first sight. False: it was put aside as damaged."""
    exact: bool = True
    """Whether it contains no fork (:mod:`mainstay_core.rank.forks`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPlan:
    """The entries to remove, in this order, and why."""

    remove: tuple[str, ...] = ()
    verify_first: str = ""
    """The only complete version that would be left: unless it is sound, no complete one goes."""
    reason: str = ""


def find_clean(stored: Sequence[Stored], clean_at: int | None) -> int | None:
    """Return the newest version that no device has tainted; None if there is none.

    It stays, as a device may be named later: then nothing else leads back to before it was wrong.

    Args:
        stored: the versions.
        clean_at: newest one in which each device was witnessed; None: there is no witness.
    """
    if clean_at is None:
        return None
    return max((s.version for s in stored if s.complete and s.version <= clean_at), default=None)


def find_way_back(stored: Sequence[Stored]) -> int | None:
    """Return the newest exact version, if the newest version is approximate; else None.

    It stays as long as the job is approximate: nothing else leads back to an exact course.
    """
    complete = sorted((s for s in stored if s.complete), key=lambda s: s.version)
    if not complete or complete[-1].exact:
        return None
    return max((s.version for s in complete if s.exact), default=None)


def plan_room(
    stored: Sequence[Stored], needed_bytes: int, free_bytes: int, clean_at: int | None = None
) -> RoomPlan:
    """Return what to remove before an attempt of ``needed_bytes`` begins.

    Args:
        stored: the versions; ties go by name.
        needed_bytes: of the attempt as a whole.
        free_bytes: on the storage.
        clean_at: as of :func:`find_clean`.
    """
    if free_bytes >= needed_bytes:
        return RoomPlan()
    ordered = sorted(stored, key=lambda s: (s.version, s.name))
    damaged = [s for s in ordered if not s.complete]
    stay = {find_way_back(stored), find_clean(stored, clean_at)}
    complete = [s for s in ordered if s.complete]
    candidates = [s for s in complete[:-1] if s.version not in stay]
    short = f"the next checkpoint needs {needed_bytes} bytes, and {free_bytes} are free"
    free_bytes += sum(s.size_bytes for s in damaged)
    older: list[Stored] = []
    for candidate in candidates:
        if free_bytes >= needed_bytes:
            break
        older.append(candidate)
        free_bytes += candidate.size_bytes
    if free_bytes < needed_bytes:
        older = []
    alone = complete[-1].name if older and len(older) == len(candidates) else ""
    remove = tuple(s.name for s in (*damaged, *older))
    return RoomPlan(remove=remove, verify_first=alone, reason=short)
