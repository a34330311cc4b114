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
from collections import deque
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the Linux system call, by machine."""
_THIS_THREAD = (1, 0)
_LOWEST_BEST_EFFORT = (2 << 13) | 7


class Background:
    """Runs jobs one after the other in a daemon thread, started with the first one.

    A job handles its own failures: what it raises beyond them is a bug, and is logged.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return bool(self._jobs)

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` after those before it."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wait_idle(self) -> None:
        """Return once every job has run."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    def end(self) -> None:
        """End the thread after its jobs, and wait for that. There may be no further one.

        A thread that still frees its tensors when the interpreter ends would abort the process.
        """
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        _give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._ended)
                if not self._jobs:
                    return
                job = self._jobs[0]
            try:
                with torch.no_grad():
                    job()
            except BaseException:  # torch's checkpoint library has one that is no Exception
                logger.exception("%s: a job failed", self._name)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()


def _give_way() -> None:
    """Lower this thread's disk priority, where the system has such a thing."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(number, *_THIS_THREAD, _LOWEST_BEST_EFFORT)
