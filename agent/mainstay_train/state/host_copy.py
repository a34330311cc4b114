"""A stage's state, copied to host memory at a step's boundary.

The copy is what a background thread writes while the state goes on changing. Its
buffers are allocated once and used again: one host copy of the stage's state, on the
rank that writes.
"""

from __future__ import annotations

import torch

from mainstay_train.base import device as devices
from mainstay_train.base.device import Moment
from mainstay_train.exact.optimizer import StageState, StateTensor


class HostCopy:
    """Host buffers of one stage's state, and views of them by tensor.

    On CUDA the buffers are pinned and the copy is enqueued on the current stream: what
    writes the state next comes after it by stream order, so nobody waits for it but
    whoever reads the buffers.

    Args:
        state: whose shapes to take; later copies must be of the same one.
    """

    def __init__(self, state: StageState) -> None:
        self._state = state
        self._flats = [(named.tensor, _buffer(named.tensor)) for named in state.flats()]
        self._views = [t._replace(tensor=self._view(t.tensor)) for t in state.state_tensors()]
        self._copied: Moment | None = None

    def is_of(self, state: StageState) -> bool:
        """Whether these buffers fit ``state``."""
        return self._state is state

    @property
    def size_bytes(self) -> int:
        """Size of the copied tensors together."""
        return sum(t.tensor.numel() * t.tensor.element_size() for t in self._views)

    def take(self) -> None:
        """Copy the state as it is now."""
        with torch.no_grad():
            for source, buffer in self._flats:
                buffer.copy_(source, non_blocking=True)
        if self._flats:
            self._copied = devices.moment(self._flats[0][0].device)

    def tensors(self) -> list[StateTensor]:
        """The copied tensors, in the state's order; waits until the copy is there."""
        if self._copied is not None:
            self._copied.wait()
        return list(self._views)

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a buffer that is the copy of ``tensor``, a view of one of the flats."""
        start = tensor.data_ptr()
        for source, buffer in self._flats:
            size_bytes = source.numel() * source.element_size()
            skip = start - source.data_ptr()
            if source.dtype == tensor.dtype and 0 <= skip < size_bytes:
                return buffer.as_strided(
                    tensor.size(), tensor.stride(), skip // source.element_size()
                )
        raise AssertionError("a tensor of the state lies in none of its flat buffers")


def _buffer(source: torch.Tensor) -> torch.Tensor:
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
