"""The ground a cluster stands on: its folder, the processes, network namespaces and cgroups that
bear its name, and the janitor that clears all of it away, however the owner ended.

The janitor is a process of its own. It holds the folder's lock, reads from a pipe until the owner
closes it (or dies), and then cleans. Should somebody kill the janitor too, the lock is free and the
next run's `sweep` cleans. Only what is found under the cluster's own name is ever killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NETWORKS = Path("/run/netns")
GIVE_UP_S = 30.0
POLL_S = 0.02


def clusters_dir() -> Path:
    """Where all clusters of this user have their folders."""
    return Path(tempfile.gettempdir()) / f"mainstay-clusters-{os.getuid()}"


class Ground:
    """One cluster's folder; entering it starts the janitor, leaving it waits until all is clean."""

    def __init__(self) -> None:
        sweep()
        self.id = secrets.token_hex(3)
        self.dir = clusters_dir() / self.id
        self.dir.mkdir(parents=True, mode=0o700)
        self._janitor = subprocess.Popen(
            [sys.executable, __file__, str(self.dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._janitor.stdout is not None
        assert self._janitor.stdout.readline() == b"ready\n", "no janitor for the cluster"

    def name(self, part: str) -> str:
        """The name of a network namespace or cgroup of this cluster."""
        return named(self.id, part)

    def spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a process of the cluster; its output goes to `name`.log."""
        with (self.dir / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.dir,
            )
        self.record(process.pid)
        return process

    def record(self, pid: int) -> None:
        """Have the janitor end this process too."""
        with (self.dir / "pids").open("a") as pids:
            pids.write(f"{pid} {start_time(pid)}\n")

    def close(self) -> None:
        """Have everything cleaned, and wait for it."""
        if self._janitor.poll() is not None:
            return
        assert self._janitor.stdin is not None
        assert self._janitor.stdout is not None
        self._janitor.stdin.close()
        self._janitor.wait()
        self._janitor.stdout.close()


def named(cluster: str, part: str) -> str:
    return f"mainstay-{cluster}-{part}"


def start_time(pid: int) -> str:
    """The kernel's start time of a process: with the pid it names one process for ever."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def sweep() -> None:
    """Clean after predecessors whose janitor was killed with them."""
    for folder in clusters_dir().glob("*/"):
        with contextlib.suppress(OSError), hold(folder):
            clean(folder)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a cluster's lock; BlockingIOError if another process does."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def clean(folder: Path) -> None:
    """End everything of a cluster and remove what it left."""
    prefix = named(folder.name, "")
    deadline = time.monotonic() + GIVE_UP_S
    while (pids := _recorded(folder) | find_pids(prefix)) and time.monotonic() < deadline:
        kill(pids)
        time.sleep(POLL_S)
    for network in NETWORKS.glob(prefix + "*"):
        subprocess.run(["ip", "netns", "del", network.name], check=False)
    while (groups := list(_cgroups(prefix))) and time.monotonic() < deadline:
        for group in groups:
            remove_cgroup(group)
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def find_pids(prefix: str) -> set[int]:
    """Processes in network namespaces and cgroups whose names begin with ``prefix``."""
    found: set[int] = set()
    for network in NETWORKS.glob(prefix + "*"):
        listed = subprocess.run(
            ["ip", "netns", "pids", network.name], check=False, capture_output=True, text=True
        )
        found |= {int(pid) for pid in listed.stdout.split()}
    for group in _cgroups(prefix):
        for procs in group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in procs.read_text().split()}
    return found


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove_cgroup(group: Path) -> None:
    """Remove an empty cgroup and those below it; deepest first."""
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def _recorded(folder: Path) -> set[int]:
    with contextlib.suppress(OSError):
        lines = [line.split() for line in (folder / "pids").read_text().splitlines()]
        return {
            int(line[0])
            for line in lines
            if len(line) == 2 and start_time(int(line[0])) == line[1] and not _is_zombie(line[0])
        }
    return set()


def _is_zombie(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def _cgroups(prefix: str) -> Iterator[Path]:
    """The cgroups of that name: one below every controller, or one in all with version 2."""
    yield from CGROUPS.glob(prefix + "*")
    yield from CGROUPS.glob(f"*/{prefix}*")


def main() -> None:
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with hold(folder):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()
        clean(folder)


if __name__ == "__main__":
    main()
