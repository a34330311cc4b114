"""The meeting place of a group's ranks, where they tell each other how they are reached."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

RANK = struct.Struct("!I")
"""Before what a rank gives to the others."""


class Meeting(Protocol):
    """A place where the ranks of a group give each other bytes: a quorum's gather."""

    def meet(
        self, key: str, body: bytes, size: int, ended: Callable[[], str | None]
    ) -> list[bytes]:
        """Give this rank's bytes and return those of all ``size``; blocks until all are there.

        Raises:
            GroupEnded: ``ended`` gave a reason, or the quorum has ended.
        """
        ...

    def wake(self) -> None:
        """Have whoever meets here ask ``ended`` again."""
