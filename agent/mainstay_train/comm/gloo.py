"""The gloo backend of process groups: sockets of this host, on CPU.

``ProcessGroupGloo.abort()`` does not interrupt a blocked collective, and in a ring only
the neighbours of a dead rank notice its death. Shutting the group's own established
sockets does interrupt it, within milliseconds, on whichever thread waits.

gloo loses an operation for ever, whatever is shut afterwards, if its event thread reads
that the peer is ready to receive and the write that follows fails at once. So only the
receiving side is shut: what is in the socket is still read, writes go on, and then comes
the end of the stream, which wakes everybody. A peer that was killed can still cause such
a write: a wait may hang, and whoever waits has to look.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from mainstay_train.comm.backend import Meet


class _Addresses(distributed.Store):
    """The addresses of a group as the store that gloo wants: each rank sets its own, gets all."""

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet = meet
        self._own = b""
        self._all: list[bytes] = []

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # C++ gives bytes
        """Take this rank's address; the key ends in its rank."""
        del key
        self._own = bytes(value)

    def get(self, key: str) -> bytes:
        """Return a rank's address."""
        self.wait([key])
        return self._all[int(key.rpartition("/")[2])]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ranks have set their addresses."""
        del keys, timeout  # the meeting ends with the group
        self._all = self._all or self._meet("addresses", self._own)


class Gloo:
    """Makes gloo's process groups; :class:`~mainstay_train.comm.backend.Backend`."""

    name = "gloo"
    ends_by_sockets = True
    waits_can_hang = True
    tells_sent = False

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
        """Make a process group whose ranks are connected."""
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = connect
        group = distributed.ProcessGroupGloo(_Addresses(meet), rank, size, options)
        group._set_default_timeout(operation)
        return group

    def connect(self, group: Any, connect: timedelta) -> None:
        """Do nothing: a group that is made is connected."""

    def together(
        self, group: Any, send: Callable[[], Any], receive: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Start one after the other: gloo starts each at once."""
        del group
        return send(), receive()

    def wait(self, work: Any, timeout: timedelta) -> None:
        """Wait until the operation is over."""
        work.wait(timeout)  # said each time: a receive would fall back on that of connecting

    def problem(self, group: Any) -> str:
        """Return that nothing is: a wait raises what is wrong."""
        del group
        return ""

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy in host memory if it lies on a GPU."""
        return tensor.cpu() if tensor.is_cuda else tensor

    def abort(self, group: Any) -> None:
        """Do nothing: the group's sockets are shut instead."""

    def finish_aborts(self, timeout: timedelta) -> bool:
        """Return that none is under way."""
        del timeout
        return True
