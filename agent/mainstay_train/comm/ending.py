"""Waits for what is left of process groups that have ended, and lets go of them."""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
from datetime import timedelta
from typing import Any

from mainstay_train.comm.backend import Backend

logger = logging.getLogger(__name__)

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


def wait_for_aborts(backend: Backend, timeout: timedelta) -> None:
    """Wait until the operations of ended groups are over on this process's device.

    They may write to their tensors until then, and what comes next uses these again. A process
    whose device does not get there in time ends itself: another trainer takes its slot, and heals.
    """
    if not backend.finish_aborts(timeout):
        logger.error("operations of ended groups are not over; this trainer ends itself")
        os._exit(EXIT_BLOCKED)
