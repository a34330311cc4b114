"""Waits for messages of the pipeline and of a reduction, and has checks executed meanwhile.

gloo does not say that a message has come before somebody waits for it. So where checks wait, a
thread of its own waits for the message, which takes no processor, and the main thread executes one
check after the other until it has come. Nothing else runs at the same time. Whoever ends the group
ends the thread's wait, and with it this one. Of a reduction's exchanges gloo does say that they are
over, so nobody else waits for them.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mainstay_train.checks.checker import Checks
from mainstay_train.checks.planned import Window
from mainstay_train.checks.waiting import WaitingChecks
from mainstay_train.comm.group import Group
from mainstay_train.comm.operations import Exchange, Pending
from mainstay_train.exact.early import BegunReduction


def finish(
    group: Group, pending: Pending, waiting: WaitingChecks, window: Window | None = None
) -> None:
    """Wait for a message as :meth:`Group.finish` does.

    Args:
        group: of the message.
        pending: the message.
        waiting: checks that are executed until it has come, and those that a plan has executed here
            even if it comes before.
        window: for the plan; None: there is none.

    Raises:
        GroupEnded: the peer is gone or the group was shut.
        UnreliableDeviceError: a check says so.
    """
    if not waiting:
        group.finish(pending)
        return
    has_come = threading.Event()
    errors: list[BaseException] = []
    waiter = _take_waiter()

    def wait() -> None:
        try:
            group.finish(pending)
        except BaseException as error:
            errors.append(error)  # raised where the message is waited for
        finally:
            has_come.set()

    waiter.run(wait)
    waiting.use(lambda: not has_come.is_set(), window, lambda: not errors)
    has_come.wait()
    _local.waiter = waiter  # not before: where a check raises it still waits
    if errors:
        raise errors[0]


class _Waiter:
    """A thread that waits for messages, one after the other, while its owner executes checks."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._jobs,), name="arrival", daemon=True).start()

    def __del__(self) -> None:
        self._jobs.put(None)

    def run(self, job: Callable[[], None]) -> None:
        """Have a job run that raises nothing."""
        self._jobs.put(job)


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # and the tensors that it knows


_local = threading.local()
"""Of each thread that waits, its idle waiter, if it has one."""


def _take_waiter() -> _Waiter:
    """Return a waiter of this thread; to start one takes longer than many a check."""
    waiter: _Waiter | None = getattr(_local, "waiter", None)
    _local.waiter = None
    if waiter is None or waiter.process != os.getpid():
        return _Waiter()
    return waiter


class ReductionWaits:
    """The waits of one reduction.

    Args:
        checks: those that wait are executed meanwhile.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self.waited_s = 0.0
        """In all of them, where a planner measures that."""

    def finish(self, group: Group, exchange: Exchange) -> None:
        """Wait for an exchange as :meth:`Group.finish_exchange` does.

        Raises:
            GroupEnded: a member is gone or the group was shut.
            UnreliableDeviceError: a check says so.
        """
        with self._waiting(lambda: not (exchange.is_over or group.ended is not None)):
            group.finish_exchange(exchange)

    def finish_begun(self, begun: BegunReduction) -> None:
        """Wait for a reduction that began while the last type was computed; raises likewise."""
        with self._waiting(lambda: not begun.is_over):
            begun.finish()

    @contextmanager
    def _waiting(self, is_open: Callable[[], bool]) -> Iterator[None]:
        began_s = self._checks.now_s()
        self._checks.waiting.use(is_open)
        yield
        self.waited_s += self._checks.now_s() - began_s
