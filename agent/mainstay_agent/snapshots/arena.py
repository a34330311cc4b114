"""Allocates the memory in which a pod keeps segments, and finds out first whether it is there."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from pathlib import Path

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import show_bytes
from mainstay_core.segments.spans import PAGE_BYTES

FIELD = "spec.snapshots.memory"
RESERVE_BYTES = 64 << 20
"""Left to the supervisor itself beside the arena, and to whatever else is in its container."""
CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
OWN_CGROUP = Path("/proc/self/cgroup")


class Arena:
    """Memory of a fixed size, without a name, that others map by its descriptor.

    It is allocated whole, and can neither grow nor shrink: whoever has it mapped never touches a
    page that is not there.

    Args:
        size_bytes: its size, rounded down to whole pages.

    Raises:
        InvalidSpecError: the memory is not there.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        if not self.size_bytes:
            raise InvalidSpecError(FIELD, f"is {size_bytes} bytes, must be at least {PAGE_BYTES}")
        _require(self.size_bytes, memory_left())
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.fd = os.memfd_create("mainstay-segments", flags)
        try:
            os.posix_fallocate(self.fd, 0, self.size_bytes)
            seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self.view = memoryview(mmap.mmap(self.fd, self.size_bytes))
        except OSError as error:
            os.close(self.fd)
            problem = f"{show_bytes(self.size_bytes)} cannot be allocated: {error.strerror}"
            raise InvalidSpecError(FIELD, problem) from error

    def close(self) -> None:
        """Close the descriptor. The memory is free once nobody has it mapped, here or elsewhere."""
        os.close(self.fd)


def memory_left() -> int:
    """Return the bytes that this process may still take: of the machine, and of its cgroups.

    The kernel ends a process that takes more, so asking is the only way to hear of it as an error.
    """
    left = [_available_bytes()]
    path = re.search(r"^0::(/.*)$", _read(OWN_CGROUP), re.MULTILINE)
    if path is not None:
        directory = CGROUPS / path[1].lstrip("/")
        left += [_left_in(d) for d in (directory, *directory.parents) if d.is_relative_to(CGROUPS)]
    return min((number for number in left if number is not None), default=1 << 62)


def _require(size_bytes: int, left_bytes: int) -> None:
    """Refuse an arena that does not fit.

    Raises:
        InvalidSpecError: it says how much would, and how much more is needed for this one.
    """
    missing = size_bytes + RESERVE_BYTES - left_bytes
    if missing <= 0:
        return
    most = max(0, left_bytes - RESERVE_BYTES)
    raise InvalidSpecError(
        FIELD,
        f"is {show_bytes(size_bytes)}, but the memory that is left to the pod's supervisor is "
        f"{show_bytes(left_bytes)}; must be at most {show_bytes(most)}, or the supervisor (its "
        f"container's memory limit, or the machine) needs {show_bytes(missing)} more",
    )


def _available_bytes() -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(MEMINFO), re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


def _left_in(cgroup: Path) -> int | None:
    """Return what is left of a cgroup's memory limit; None if it has none."""
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return None
    # Pages of files that nobody used of late are given up as soon as memory is short.
    cached = re.search(r"^inactive_file (\d+)$", _read(cgroup / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def _read(path: Path) -> str:
    """Return a file's text; empty where the system has none."""
    try:
        return path.read_text()
    except OSError:
        return ""
