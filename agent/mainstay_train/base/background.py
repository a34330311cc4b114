"""A thread for what a trainer does while it trains: writing to the disk, reducing early.

Large writes, fsync and torch's kernels release the interpreter's lock, so the main
thread goes on. Its disk traffic has the lowest best-effort priority. It runs at the
process's own CPU priority on purpose: a thread that holds the interpreter's lock and
does not get the CPU would keep the main thread waiting.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the Linux system call, by machine."""
_THIS_THREAD = (1, 0)
_LOWEST_BEST_EFFORT = (2 << 13) | 7


class _Desk:
    """The jobs that wait, which the thread and whoever submits them share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.jobs: deque[Callable[[], None]] = deque()
        self.ended = False

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class Background:
    """Runs jobs one after the other in a daemon thread, started with the first one.

    A job handles its own failures: what it raises beyond them is a bug, and is logged.
    The thread ends after its jobs once nobody has this object any more.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._desk = _Desk()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._desk.end).atexit = False

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return bool(self._desk.jobs)

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` after those before it."""
        desk = self._desk
        with desk.changed:
            desk.jobs.append(job)
            desk.changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_serve, args=(desk, self._name), name=self._name, daemon=True
                )
                self._thread.start()

    def wait_idle(self) -> None:
        """Return once every job has run."""
        with self._desk.changed:
            self._desk.changed.wait_for(lambda: not self._desk.jobs)

    def end(self) -> None:
        """End the thread after its jobs, and wait for that. There may be no further one.

        A thread that still frees its tensors when the interpreter ends would abort the process.
        """
        self._desk.end()
        if self._thread is not None:
            self._thread.join()


def _serve(desk: _Desk, name: str) -> None:
    _give_way()
    while True:
        with desk.changed:
            desk.changed.wait_for(lambda: desk.jobs or desk.ended)
            if not desk.jobs:
                return
            job = desk.jobs[0]
        try:
            with torch.no_grad():
                job()
        except BaseException:  # torch's checkpoint library has one that is no Exception
            logger.exception("%s: a job failed", name)
        del job  # else the tensors that it is about would stay until the next one
        with desk.changed:
            desk.jobs.popleft()
            desk.changed.notify_all()


def _give_way() -> None:
    """Lower this thread's disk priority, where the system has such a thing."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(number, *_THIS_THREAD, _LOWEST_BEST_EFFORT)
