"""Fetches small results from a device with one wait.

Each look at a value on a device (``item``, ``tolist``, ``float``) waits until the device has done
all that it was given before. So sums of losses, norms and digests stay where they were computed,
and are looked at together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from mainstay_train.base import device as devices
from mainstay_train.base.device import Moment

Later = Callable[[], torch.Tensor]
"""Returns what was read, in host memory; once it is fetched."""


class Readout:
    """Results that are fetched together."""

    def __init__(self) -> None:
        self._wanted: list[torch.Tensor] = []
        self._read: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> Later:
        """Have a tensor fetched with the others; return what gives its copy.

        Args:
            tensor: of any shape, elements of 8 bytes (int64 or float64). It stays as it is until
                the fetch.
        """
        number = len(self._wanted)
        self._wanted.append(tensor.detach())
        return lambda: self._read[number]

    def add_all(self, tensors: Iterable[torch.Tensor]) -> list[Later]:
        """Have several tensors fetched, as :meth:`add` does each of them."""
        return [self.add(tensor) for tensor in tensors]

    def fetch(self, wait: Callable[[Moment], None] | None = None) -> None:
        """Copy everything to host memory; the only wait for the device.

        Args:
            wait: waits until a moment is over; as the moment does if left out.
        """
        self._read = list(self._wanted)
        there = [i for i, tensor in enumerate(self._wanted) if tensor.device.type != "cpu"]
        if not there:
            return
        flat = [self._wanted[i].reshape(-1).view(torch.int64) for i in there]
        packed = torch.cat(flat)
        # Page-locked, so that the copy is on its way and the wait has a bound.
        host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=packed.is_cuda)
        host.copy_(packed, non_blocking=packed.is_cuda)
        now = devices.moment(packed.device)
        now.wait() if wait is None else wait(now)
        sizes = [part.numel() for part in flat]
        for i, piece in zip(there, torch.split(host, sizes), strict=True):
            wanted = self._wanted[i]
            self._read[i] = piece.view(wanted.dtype).view(wanted.shape)
