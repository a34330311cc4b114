"""Names what this machine has run out of: room on a disk, or descriptors.

Programs say it in many ways: an errno, a line of a log, or nothing but an end (Redis on a full disk
tells of a short write). Users get one sentence, which says what lacks, where, and what to do.
"""

from __future__ import annotations

import enum
import errno
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

MIB = 1024 * 1024
LOW_DISK_MIB = 8
"""With less than this a disk is called full: Redis, logs and checkpoints write pieces of MiB."""


class Shortage(enum.Enum):
    """A thing that a machine can run out of."""

    DISK = "disk"
    DESCRIPTORS = "descriptors"


_ERRNOS = {
    errno.ENOSPC: Shortage.DISK,
    errno.EDQUOT: Shortage.DISK,
    errno.EMFILE: Shortage.DESCRIPTORS,
    errno.ENFILE: Shortage.DESCRIPTORS,
}
_PHRASES = {
    **{os.strerror(number): shortage for number, shortage in _ERRNOS.items()},
    # Redis, which says no more than this of a file that takes a part of what it writes.
    "Short write while writing to the AOF file": Shortage.DISK,
}


def find_in(text: str) -> Shortage | None:
    """Return the shortage that a log tells of last, if it tells of one."""
    places = {text.rfind(phrase): shortage for phrase, shortage in _PHRASES.items()}
    newest = max(places)
    return places[newest] if newest >= 0 else None


def of_error(error: BaseException) -> Shortage | None:
    """Return the shortage that an exception, or what caused it, tells of."""
    for each in _causes(error, set()):
        if isinstance(each, OSError) and each.errno in _ERRNOS:
            return _ERRNOS[each.errno]
    return None


def find_full(places: Iterable[Path]) -> list[tuple[Path, int]]:
    """Return the directories that are on a full disk, one for each disk, with their free MiB."""
    full: dict[int, tuple[Path, int]] = {}
    for place in places:
        mib = free_mib(place)
        if mib < LOW_DISK_MIB:
            full.setdefault(_existing(place).stat().st_dev, (place, mib))
    return list(full.values())


def free_mib(directory: Path) -> int:
    """Return what a user's program may still write at a directory, in MiB.

    For a directory that does not exist yet, the nearest one above it is asked.
    """
    return shutil.disk_usage(_existing(directory)).free // MIB


def explain(shortage: Shortage, places: Iterable[Path]) -> str:
    """Return a sentence that says what lacks and what to do.

    Args:
        shortage: what lacks.
        places: directories that the run writes to.
    """
    if shortage is Shortage.DESCRIPTORS:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        infinite = resource.RLIM_INFINITY
        if soft == infinite:
            return "too few descriptors on this machine: allow more (fs.file-max), start it again"
        more = f"ulimit -n {2 * soft if hard == infinite else hard}"
        if soft == hard:
            more = f"ulimit -Hn {2 * hard}, which needs root, and ulimit -n {2 * hard}"
        most = "none" if hard == infinite else str(hard)
        return (
            f"too few descriptors: {soft} are allowed (hard limit {most}); start it again after "
            f"{more}"
        )
    full = find_full(places)
    if full:
        return f"no space left on the disk: {_describe(full)}; free some"
    # Somebody has made room since, or a quota is used up, of which a disk says nothing.
    now = _describe([(place, free_mib(place)) for place in places])
    return f"no space was left on the disk or of a quota: {now} now"


def _describe(free: Iterable[tuple[Path, int]]) -> str:
    return " and ".join(f"{place} has {mib} MiB free" for place, mib in free)


def _existing(directory: Path) -> Path:
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory


def _causes(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """An exception, those of its group, and those from which it came."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _causes(each, seen)
    yield from _causes(error.__cause__, seen)
    yield from _causes(error.__context__, seen)
