"""Copies a stage's state through a bounded piece of host memory to whoever writes it to the disk.

At a step's boundary as many chunks are copied as there is memory for. Where that is all of the
state, it may change at once. Else the rest is copied chunk by chunk as those before are written,
and until the last one has left the state, nobody may change it: whoever is about to, waits
(:meth:`HostCopy.wait_left`), and gives the copy up when that takes too long.

The memory is a ring: chunks take it in the order of the file, and leave it in the same order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from mainstay_train.base import device as devices
from mainstay_train.base.device import Moment
from mainstay_train.exact.layout import ALIGNMENT_BYTES
from mainstay_train.exact.optimizer import StageState
from mainstay_train.state.chunks import CHUNK_BYTES, Chunk, cut_tensors


class CopyGivenUpError(OSError):
    """The state had to change before all of it was copied: the storage was too slow for that."""


class _Copied(NamedTuple):
    """A chunk that is on the host, or on its way there."""

    chunk: Chunk
    tensor: torch.Tensor
    there: Moment


class Ring:
    """Places in a piece of memory for chunks that come and go in one order.

    Args:
        size_bytes: of the memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._taken: deque[tuple[int, int]] = deque()
        """(start, end) of each chunk, the oldest first."""

    def take(self, size_bytes: int) -> int | None:
        """Return where a chunk begins; None while there is no room for it."""
        first = self._taken[0][0] if self._taken else 0
        last = self._taken[-1][1] if self._taken else 0
        wraps = bool(self._taken) and last <= first
        start = last
        if not wraps and last + size_bytes > self._size:
            start, wraps = 0, True
        if start + size_bytes > (first if wraps else self._size):
            return None
        self._taken.append((start, start + size_bytes))
        return start

    def free(self) -> None:
        """Let the oldest chunk go."""
        self._taken.popleft()


class HostCopy:
    """A copy of one stage's state on its way to the disk.

    On CUDA the memory is pinned and copies are enqueued on the current stream: what writes the
    state next comes after them by stream order, so nobody waits for the device but whoever reads
    the memory.

    Args:
        state: what is copied; later copies are of the same one.
        limit_bytes: bound of the memory, a chunk at least.
        chunk_bytes: size of a chunk.
    """

    def __init__(self, state: StageState, limit_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        assert limit_bytes >= chunk_bytes
        self._state = state
        self.tensors = tuple(state.state_tensors())
        """What is copied, in the order of the file."""
        self._chunks = cut_tensors(self.tensors, chunk_bytes)
        self.size_bytes = sum(chunk.size_bytes for chunk in self._chunks)
        self.memory_bytes = min(sum(map(_room, self._chunks)), limit_bytes)
        """Host memory in use: as much as the state, where that is within the bound."""
        is_cuda = any(t.tensor.is_cuda for t in self.tensors)
        self._memory = torch.empty(self.memory_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._changed = threading.Condition()
        """Guards what follows, and the state while a chunk is copied."""
        self._ring = Ring(self.memory_bytes)
        self._to_come: deque[Chunk] = deque()
        self._there: deque[_Copied] = deque()
        self._given_up = ""
        self._is_read = False

    def is_of(self, state: StageState) -> bool:
        """Whether this copies ``state``."""
        return self._state is state

    def begin(self) -> None:
        """Copy what there is memory for, of the state as it is now."""
        with self._changed:
            assert not self._is_read, "whoever read the copy before has ended it"
            self._is_read = True
            self._ring = Ring(self.memory_bytes)
            self._to_come, self._there = deque(self._chunks), deque()
            self._given_up = ""
            self._fill()

    def chunks(self) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Yield each chunk with its copy, which is there until the next one is asked for.

        Raises:
            CopyGivenUpError: the state changed before all was copied.
        """
        while True:
            with self._changed:
                if self._given_up:
                    raise CopyGivenUpError(self._given_up)
                if not self._there:
                    return
                copied = self._there[0]
            copied.there.wait()
            yield copied.chunk, copied.tensor
            with self._changed:
                if self._there:
                    self._there.popleft()
                    self._ring.free()
                    self._fill()

    def wait_left(self, timeout_s: float) -> bool:
        """Return once the state may change; whether that took a wait.

        Args:
            timeout_s: after so long the copy is given up.
        """
        with self._changed:
            if not self._to_come:
                return False
            if not self._changed.wait_for(lambda: not self._to_come, timeout_s):
                self._given_up = (
                    f"the next step waited {timeout_s:g} s for the storage, with "
                    f"{sum(c.size_bytes for c in self._to_come)} of {self.size_bytes} bytes still "
                    "to be copied; raise checkpoint.copyMebibytes, or use faster storage"
                )
                self._to_come.clear()
            return True

    def end(self) -> None:
        """Copy nothing more: nobody reads it."""
        with self._changed:
            self._is_read = False
            self._to_come.clear()
            self._there.clear()
            self._changed.notify_all()

    def _fill(self) -> None:
        with torch.no_grad():
            while self._to_come:
                chunk = self._to_come[0]
                start = self._ring.take(_room(chunk))
                if start is None:
                    return
                place = self._memory[start : start + chunk.size_bytes].view(chunk.tensor.dtype)
                place.copy_(chunk.tensor, non_blocking=True)
                there = devices.moment(chunk.tensor.device)
                self._there.append(_Copied(chunk, place, there))
                self._to_come.popleft()
        self._changed.notify_all()


def _room(chunk: Chunk) -> int:
    return -(-chunk.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
