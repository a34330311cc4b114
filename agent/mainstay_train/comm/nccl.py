"""The NCCL backend of process groups: GPUs. No test has run it on a GPU yet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore


class Nccl:
    """Makes NCCL's process groups; :class:`~mainstay_train.comm.group.Backend`."""

    name = "nccl"
    connects_at_once = False
    waits_can_hang = False

    def create(
        self,
        store: PrefixStore,
        rank: int,
        size: int,
        *,
        address: str,
        connect: timedelta,
        operation: timedelta,
    ) -> Any:
        """Make a process group whose ranks connect in their first operation."""
        del address, connect
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = operation
        return distributed.ProcessGroupNCCL(store, rank, size, options)

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself: NCCL reads GPU memory."""
        return tensor

    def abort(self, group: Any) -> None:
        """End the group's operations."""
        group.abort()

    def keys(self, rank: int) -> Sequence[str]:
        """None that would have to be deleted."""
        del rank
        return ()
