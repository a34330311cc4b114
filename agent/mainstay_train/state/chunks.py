"""Cuts a state into chunks of a fixed size, which are copied one by one.

A chunk passes through host memory on its way: through memory that is pinned where the state
lies on a GPU. Source and joiner need one chunk of it for each connection, whatever the size of
the state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from mainstay_train.exact.optimizer import StageState, StateTensor
from mainstay_train.exact.portions import Portion
from mainstay_train.sums import digests

CHUNK_BYTES = 4 << 20
"""Size of a chunk; the last one of a flat buffer is smaller. Large enough that asking for it and
digesting it cost little beside sending it; small enough that what a lost source owed is soon sent
by another one."""


class Chunk(NamedTuple):
    """Consecutive elements of one flat buffer of a state."""

    flat: StateTensor
    start: int
    """Its first element."""
    stop: int

    @property
    def tensor(self) -> torch.Tensor:
        """Its elements, where the state is."""
        return self.flat.tensor[self.start : self.stop]

    @property
    def size_bytes(self) -> int:
        """Number of bytes that travel."""
        return (self.stop - self.start) * self.flat.tensor.element_size()

    def digest(self) -> str:
        """Digest of its elements at their places in the state: waits for the device."""
        return digests.tensor_digest(self.flat.id, self.tensor, self.start).hex()


def flats_of(
    state: StageState | Portion, *, masters_only: bool = False, everything: bool = False
) -> list[StateTensor]:
    """Return the flat buffers of a state that travel.

    Args:
        state: of a stage.
        masters_only: whether the optimizer's state is left out.
        everything: whether what is computed with comes, too, where that is a copy.
    """
    flats = state.everything() if everything else state.flats()
    return [flat for flat in flats if flat.kind == "master"] if masters_only else flats


def cut(flats: Iterable[StateTensor], size_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Return the chunks of a state, in order."""
    chunks = []
    for flat in flats:
        step = size_bytes // flat.tensor.element_size()
        numel = flat.tensor.numel()
        chunks += [Chunk(flat, i, min(i + step, numel)) for i in range(0, numel, step)]
    return chunks


def cut_tensors(tensors: Iterable[StateTensor], size_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Return the chunks of tensors of any shape, in the order of their bytes in a file."""
    flat = (t._replace(tensor=t.tensor.detach().reshape(-1)) for t in tensors)
    return cut(flat, size_bytes)


def shape_of(chunks: Sequence[Chunk]) -> str:
    """Return what source and joiner must have in common: a digest of names, types and sizes."""
    listing = [[c.flat.id, str(c.flat.tensor.dtype), c.start, c.stop] for c in chunks]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


class Staging:
    """Host memory for one chunk, between a socket and a state.

    Args:
        device: where the state is.
        size_bytes: of the largest chunk.
        is_written: whether the device has done all that writes the state. Else what happens beside
            the trainer waits for all that the device was given so far, and so also for messages
            that a peer has not received yet.
    """

    def __init__(self, device: torch.device, size_bytes: int, *, is_written: bool = False) -> None:
        is_cuda = device.type == "cuda"
        self._bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._stream: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        if self._stream is not None and not is_written:
            # What wrote the state may still be under way; what computes with it need not wait.
            self._stream.wait_stream(torch.cuda.default_stream(device))

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the device works beside what the trainer computes."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def memory(self, size_bytes: int) -> memoryview:
        """Return the memory that a chunk of a size takes."""
        return memoryview(self._bytes.numpy())[:size_bytes]  # type: ignore[arg-type]

    def read(self, chunk: Chunk) -> memoryview:
        """Return the bytes of a chunk of a state, copied here from a device; until the next one."""
        if self._stream is None:
            return memoryview(chunk.tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
        self._view(chunk).copy_(chunk.tensor)  # waits for the device
        return self.memory(chunk.size_bytes)

    def write(self, chunk: Chunk) -> None:
        """Copy what is here to a chunk of a state."""
        chunk.tensor.copy_(self._view(chunk))  # waits for the device

    def _view(self, chunk: Chunk) -> torch.Tensor:
        return self._bytes[: chunk.size_bytes].view(chunk.flat.tensor.dtype)
