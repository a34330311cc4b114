"""Says what a library must offer that carries a group's tensors.

What callers may rely on is more, and what of it a backend lacks is made up for by
:class:`mainstay_train.comm.group.Group`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

Meet = Callable[[str, bytes], list[bytes]]
"""Gives every rank of a group this one's bytes under a key, and returns those of all, by rank."""


class Backend(Protocol):
    """A library that carries a group's tensors."""

    @property
    def name(self) -> str:
        """Its name, as in ``runtime.backend``."""

    @property
    def ends_by_sockets(self) -> bool:
        """Whether operations end when the group's sockets are shut; else :meth:`abort` ends them.

        The sockets then also tell whether a peer is gone.
        """

    @property
    def waits_can_hang(self) -> bool:
        """Whether a wait may never end although the group was ended."""

    @property
    def tells_sent(self) -> bool:
        """Whether a send says that it is over before anybody has waited for it."""

    def create(
        self,
        meet: Meet,
        rank: int,
        size: int,
        *,
        address: str,
        connect: timedelta,
        operation: timedelta,
    ) -> Any:
        """Make torch's process group. An end of the meeting, or of its sockets, ends the making.

        Args:
            meet: tells all ranks how to reach each other.
            rank: this process's number in the group.
            size: number of ranks.
            address: local address to bind data sockets to.
            connect: how long connecting may take.
            operation: how long one operation may take.
        """

    def connect(self, group: Any, connect: timedelta) -> None:
        """Wait until all ranks have met, as far as :meth:`create` has not; :meth:`abort` ends it.

        Raises:
            RuntimeError: not within ``connect``.
        """

    def together(
        self, group: Any, send: Callable[[], Any], receive: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Start a send and a receive so that neither waits for the other; return their works."""

    def wait(self, work: Any, timeout: timedelta) -> None:
        """Wait until an operation's result may be used by what comes next on its device.

        Raises:
            RuntimeError: it failed.
        """

    def problem(self, group: Any) -> str:
        """Return what is wrong with a process group's connections, if no operation tells; or ""."""

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor where the backend can reach it: itself, or a copy in host memory."""

    def abort(self, group: Any) -> None:
        """Begin to end a process group's operations by the backend's own means, if it has any.

        Returns at once: the device may wait for another group, which is ended next.
        """

    def finish_aborts(self, timeout: timedelta) -> bool:
        """Wait until the operations that :meth:`abort` ends are over; return whether they are.

        Until then they may write to their tensors.
        """
