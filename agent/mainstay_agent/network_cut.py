"""An injected loss of the supervisor's network, which needs no rights and no network of its own.

While it lasts every established TCP connection of the process is shut as soon as
it is seen (the api's, members of the gather rooms that meet here, other
supervisors'), and new ones are refused before they start. Unix sockets stay: the
lines of launcher and trainers are inside the pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time

SWEEP_S = 0.005
"""A connection that others open to us lives at most about this long."""


class NetworkCut:
    """A switch that cuts the pod's network. It is used in one event loop."""

    def __init__(self) -> None:
        self._until_s = 0.0

    @property
    def is_cut(self) -> bool:
        """Whether it is cut now."""
        return time.monotonic() < self._until_s

    async def run(self, for_s: float) -> None:
        """Cut the network, and return when it is back."""
        running = self.is_cut
        self._until_s = max(self._until_s, time.monotonic() + for_s)
        while self.is_cut and not running:
            shut_connections()
            await asyncio.sleep(SWEEP_S)


def shut_connections() -> None:
    """Shut every established TCP connection of this process; listeners go on."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                _shut(int(name))


def _shut(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            duplicate.getpeername()
            duplicate.shutdown(socket.SHUT_RDWR)
