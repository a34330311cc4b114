"""Worker processes that talk to their test over pipes, and the store where they meet.

They are forked in a process of their own (:mod:`tests.train.nursery`), never in the test's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.support.groups import StoreMeeting
from torch.distributed import TCPStore

from mainstay_train.comm.group import BACKENDS, Group

ADDRESS = "127.0.0.1"
ROOT = Path(__file__).parents[2]
ENDS_MS = 10_000
"""Within this a process has ended whose pipe has."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker raised."""

    text: str


class Worker:
    """One forked process, at the other end of ``pipe``: its first message is its pid.

    Raises:
        AssertionError: there is no such process; the message says why.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._pid: int | None = None
        self._pid = self.hear()
        # Stays this process's own whoever reaps it. The nursery does so when it is asked for the
        # next one: until then the pid is nobody else's.
        self._pidfd = os.pidfd_open(self._pid)

    def hear(self) -> Any:
        """The worker's next message.

        Raises:
            AssertionError: it raised something; or it ended, and the message says how.
        """
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the worker says nothing more: {self._how_it_ended()}") from None
        assert not isinstance(message, Failure), message.text
        return message

    def _how_it_ended(self) -> str:
        """How the process ended, as far as the kernel still tells."""
        if self._pid is None:
            return "it never said its pid"
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if not ended.poll(ENDS_MS):
            return "it closed its pipe and lives"
        try:
            # The last field, which a process has until it is reaped: the status of wait(2).
            status = int(Path(f"/proc/{self._pid}/stat").read_text().split()[-1])
        except OSError:
            return "it has ended, and was reaped"
        if number := status & 0x7F:
            return f"it was ended by {signal.Signals(number).name}"
        return f"it ended with code {status >> 8}"

    def say(self, message: Any = None) -> None:
        self.pipe.send(message)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait_end()

    def wait_end(self) -> None:
        """Wait until it has ended."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        ended.poll()

    def end(self) -> None:
        """Kill it and close what leads to it."""
        self.kill()
        self.pipe.close()
        os.close(self._pidfd)


class Nursery:
    """The process that forks the workers of a session of tests; use as a context manager."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A program of its own: nothing of this process is inherited but the line and the
            # outputs. In a session of its own: Ctrl-C is for the tests, and they end it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.train.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                start_new_session=True,
            )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._process.wait()

    def fork(self, run: Callable[..., None], *args: Any) -> Worker:
        """Run ``run(pipe, *args)`` in a new process; all of it must be picklable."""
        pipe, theirs = multiprocessing.Pipe()
        with theirs:
            socket.send_fds(self._line, [run.__module__.encode()], [theirs.fileno()])
        worker = Worker(pipe)
        worker.say((run, args))
        return worker


class Crew:
    """The workers of one test."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._workers: list[Worker] = []

    @cached_property
    def store(self) -> str:
        """``host:port`` of the store where they meet, in a process of its own."""
        return f"{ADDRESS}:{self.fork(_host_store).hear()}"

    def fork(self, run: Callable[..., None], *args: Any) -> Worker:
        """Run ``run(pipe, *args)`` in a new process: a function of a module, and what pickles."""
        worker = self._nursery.fork(run, *args)
        self._workers.append(worker)
        return worker

    def end(self) -> None:
        for worker in reversed(self._workers):  # the store, which the others need, goes last
            worker.end()


def _host_store(pipe: Connection) -> None:
    store = TCPStore(ADDRESS, 0, None, True, timedelta(seconds=100), wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()  # never: it is killed with its crew


def make_group(
    store: str,
    rank: int,
    size: int,
    name: str = "test",
    connect_s: float = 30.0,
    backend: str = "gloo",
) -> Group:
    """A group that is not connected yet.

    Args:
        store: ``host:port`` of the store where its ranks meet.
        rank: of this process.
        size: number of ranks.
        name: key prefix.
        connect_s: how long connecting may take.
        backend: one of the product's, or ``strict``.
    """
    if backend == "strict":
        from tests.strict.group import Strict

        BACKENDS.setdefault(backend, Strict())
    return Group(
        name=name,
        meeting=StoreMeeting(store),
        rank=rank,
        size=size,
        address=ADDRESS,
        backend=backend,
        timeout_s=200,
        connect_s=connect_s,
    )
