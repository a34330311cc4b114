"""The processes that a run starts: all of them end with it, and no others.

Every child leads a process group of its own, so that Ctrl-C in a terminal
reaches only us and a child can be ended with all that it started. We are the
subreaper of our descendants: whoever loses its parent becomes our child, so at
the end the list of our children is the list of what is left, whatever died
before. For our own sudden death each child holds a pipe from us.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


class Child:
    """One process, ours or adopted; ``ended`` is done when it is gone, with its exit code.

    A code below zero is the signal that ended it.

    Args:
        pid: of the process.
        popen: of a process of ours.
        code: of an adopted one (a child of our child): its exit code, once its parent says so.
    """

    def __init__(
        self,
        pid: int,
        popen: subprocess.Popen[bytes] | None = None,
        code: asyncio.Future[int] | None = None,
    ) -> None:
        self.pid = pid
        self.popen = popen
        self._code = code
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._finish()
            return
        loop.add_reader(self._pidfd, self._on_end)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and all of its group."""
        # Only while its leader is not reaped is the group's number certainly its own.
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
            # One that was just forked may not have made its group yet.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # The rest of the group ends with its leader; before the leader is reaped, so that its
        # number cannot have gone to somebody else.
        if self.popen is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            if self.popen.stdin is not None:
                self.popen.stdin.close()
        self._finish()

    def _finish(self) -> None:
        if self.popen is not None:
            self.ended.set_result(self.popen.wait())
        else:
            assert self._code is not None
            self._code.add_done_callback(lambda code: self.ended.set_result(code.result()))


class ChildProcesses:
    """The processes of one run. Use as an asynchronous context manager."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._known: set[int] = set()
        self._others: set[int] = set()
        self._reserve = -1
        """A descriptor to give up at the end: without any, what is left could not be listed."""

    async def __aenter__(self) -> ChildProcesses:
        # What our process had started before is not the run's.
        self._others = _children_of(os.getpid())
        self._reserve = os.open(os.devnull, os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        return self

    async def __aexit__(self, *_: object) -> None:
        os.close(self._reserve)
        self.kill_all()

    def spawn(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> Child:
        """Start a command with the parent pipe as standard input and its output in ``log``."""
        with log.open("ab") as output:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=tuple(pass_fds),
                cwd=cwd,
                start_new_session=True,
            )
        try:
            child = Child(popen.pid, popen)
        except OSError:  # no descriptor left to watch it with
            os.killpg(popen.pid, signal.SIGKILL)
            popen.communicate()
            raise
        self._known.add(popen.pid)
        self._watch(child)
        return child

    def adopt(self, pid: int, code: asyncio.Future[int]) -> Child:
        """Watch a process that a child of ours started in a group of its own.

        Args:
            pid: of the process.
            code: its exit code, once that child of ours says so; negative for a signal.
        """
        child = Child(pid, code=code)
        self._watch(child)
        return child

    def _watch(self, child: Child) -> None:
        self._children.append(child)
        child.ended.add_done_callback(lambda _: self._drop(child))

    def _drop(self, child: Child) -> None:
        """One that is reaped is nothing to kill, and its number may become somebody else's."""
        self._children.remove(child)
        if child.popen is not None:
            self._known.discard(child.pid)

    def reap_orphans(self) -> None:
        """Collect descendants that ended after their own parent."""
        for pid in _children_of(os.getpid()) - self._known - self._others:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def kill_all(self) -> None:
        """Kill everything that is left of the run and wait until it is gone."""
        for child in self._children:
            child.signal_group(signal.SIGKILL)
        # Whoever is orphaned by a kill becomes our child, so this ends when nothing is left.
        while pids := _children_of(os.getpid()) - self._others:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _children_of(pid: int) -> set[int]:
    """Return the pids of all children, whichever thread started or inherited them."""
    pids: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids.update(int(text) for text in path.read_text().split())
    return pids
