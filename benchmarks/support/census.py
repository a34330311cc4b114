"""Counts what the processes of a local run hold: memory, threads, descriptors, files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One process at one moment."""

    pid: int
    uss_kib: int
    """Private pages that were written: clean ones are files, shared with whoever maps them too."""
    threads: int
    fds: int
    sockets: int


def hold(pid: int) -> Holding:
    """Look at a process.

    Raises:
        OSError: it is gone.
    """
    rollup = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        rollup[name] = int(rest.split()[0])
    fds = os.listdir(f"/proc/{pid}/fd")
    sockets = 0
    for fd in fds:
        with contextlib.suppress(OSError):
            sockets += stat.S_ISSOCK(os.stat(f"/proc/{pid}/fd/{fd}").st_mode)
    return Holding(
        pid=pid,
        uss_kib=rollup["Private_Dirty"],
        threads=len(os.listdir(f"/proc/{pid}/task")),
        fds=len(fds),
        sockets=sockets,
    )


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used so far, threads that ended among it.

    Raises:
        OSError: it is gone.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quiet(looks: Sequence[Holding]) -> Holding:
    """Return the least of several looks: a thread or a connection may be about to end."""
    return replace(
        looks[-1],
        threads=min(look.threads for look in looks),
        fds=min(look.fds for look in looks),
        sockets=min(look.sockets for look in looks),
    )


def roles(run_pid: int, members: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Pids by role, pods named by their lowest rank.

    ``members`` are the ranks of the api; a pod is a launcher with its trainers, and a supervisor;
    the forge of trainers is the launchers' parent.
    """
    parents = _parents()
    found = {"local run": run_pid}
    by_pod = supervisors()
    for pid in parents:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if parents[pid] == run_pid or parents.get(parents[pid]) == run_pid:
                # Some are started through a guard that waits for them.
                for role, part in (("api", b"mainstay_api"), ("redis", b"redis-server")):
                    if any(part in word for word in command) and b"-I" not in command:
                        found[role] = pid
    for member in members:
        rank, trainer = f"r{member['replica']}.s{member['stage']}", int(member["pid"])
        launcher = parents[trainer]
        found[f"trainer {rank}"] = trainer
        found[f"launcher {rank}"] = launcher
        found[f"supervisor {rank}"] = by_pod[str(member["pod"])]
        found["forge"] = parents[launcher]
    return found


def supervisors() -> dict[str, int]:
    """Pids of all supervisors of local runs, by the UIDs of their pods.

    They are forked, so what tells them apart is the file that takes their output.
    """
    found: dict[str, int] = {}
    for pid in _parents():
        with contextlib.suppress(OSError):
            log = Path(os.readlink(f"/proc/{pid}/fd/1"))
            if log.name == "supervisor.log":
                found[log.parent.name] = pid
    return found


def _parents() -> dict[int, int]:
    parents = {}
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            text = (directory / "stat").read_text()
            parents[int(directory.name)] = int(text.rpartition(")")[2].split()[1])
    return parents


def count_files(directory: Path) -> tuple[int, int]:
    """Return (files, bytes) under a directory."""
    number, size = 0, 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                number += 1
                size += os.lstat(os.path.join(root, name)).st_size
    return number, size
