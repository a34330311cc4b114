"""Waits for what is left of process groups that have ended, and lets go of them."""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mainstay_train.comm.backend import Backend

logger = logging.getLogger(__name__)

LOOK = timedelta(seconds=0.05)
"""Between two looks at what keeps a device from coming to an end."""
EXIT_BLOCKED = 5
"""Of a process that cannot be got out of a group that has ended."""


def destroy(held: list[Any]) -> None:
    """Drop the process groups in a list, which nothing else may hold, in a thread of its own.

    The destructor waits for every operation that was started, whether anybody waits for it or not.
    """
    # If no thread is to be had, the caller's list goes when it returns. Not threading.Thread: this
    # is called while objects are freed, in the midst of anything, so it must take no lock.
    with contextlib.suppress(RuntimeError):
        _thread.start_new_thread(held.clear, ())


def wait_for_aborts(
    backend: Backend, timeout: timedelta, look: Callable[[], None] = lambda: None
) -> None:
    """Wait until the operations of ended groups are over on this process's device.

    They may write to their tensors until then, and what comes next uses these again. A process
    whose device does not get there in time ends itself: another trainer takes its slot, and heals.

    Args:
        backend: of the groups.
        timeout: how long it may take.
        look: called again and again meanwhile: ends what stands before them on the device and
            would never come to an end.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    while not backend.finish_aborts(LOOK):
        if time.monotonic() > deadline_s:
            logger.error("operations of ended groups are not over; this trainer ends itself")
            os._exit(EXIT_BLOCKED)
        look()
