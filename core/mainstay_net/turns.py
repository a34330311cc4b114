"""Runs an acceptor or an entrance in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Turning(Protocol):
    """An acceptor, an entrance: whatever has turns."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to do."""

    def wait_s(self) -> float | None:
        """Return after how many seconds there is something to do in any case; None: never."""


class Turns:
    """Calls a function whenever something of its own is to be done, until it is closed.

    Args:
        turning: says when.
        turn: does it.
    """

    def __init__(self, turning: Turning, turn: Callable[[], None]) -> None:
        self._turning, self._turn = turning, turn
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._fd = turning.fileno()
        self._loop.add_reader(self._fd, self._run)

    def close(self) -> None:
        """Call no more."""
        self._loop.remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._turn()
        wait_s = self._turning.wait_s()
        if wait_s is not None:
            self._timer = self._loop.call_later(wait_s, self._run)
