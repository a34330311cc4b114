"""Imprints: what is left of a forward's tensors until its recompute makes them again.

An imprint is made of every tensor that a kernel makes, so it has to be cheap. On a CPU it is made
of sums of short runs of memory (:mod:`mainstay_train.sums.runs`), if there is compiled code,
in one pass. On a GPU it is the ledger's digest. On a CPU without compiled code it is a chain of
products of small integers, which runs three times as fast as the ledger's digest does there, and is
no weaker: bytes in rows of 1,024 are multiplied by 16 columns of keys. Every key is odd, so a
change of one byte changes all 16 sums of its row. For a change of several bytes a key of
theirs must have one value of 128, in each column, for the sums to stay (multilinear hashing: Lemire
and Kaser, "Strongly universal string hashing is fast", 2014, section 3): 2^-112, where the ledger's
digest has 2^-64. No sum overflows, so the products are exact on every processor.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache

import torch

from mainstay_core.base import digest
from mainstay_core.dmr.schedule import BATCHED_IMPRINT, COMPILED_IMPRINT, ImprintPrice
from mainstay_train.kernels.bits import words_of
from mainstay_train.sums import compiled, digests, runs

ROW_BYTES, NUM_KEYS = 1024, 16
FEW_BYTES = 8 * ROW_BYTES
"""So many bytes are hashed as they are, with no product of the chain."""
FEW_BYTES_COMPILED = 512
"""So many bytes are kept as they are, with compiled code or without: to copy them takes less than
to begin sums."""
MAX_LEVELS = 8
"""Each product leaves a sixteenth of the bytes: enough for any memory."""

Imprint = tuple[torch.dtype, torch.Size, bytes]
"""Type, shape, and digest of the bits; of few bytes those bytes."""


def imprint(tensor: torch.Tensor) -> Imprint:
    """Return the imprint of a tensor; waits for its device.

    With compiled code on a CPU the order counts in which its dimensions lie in memory, as they are
    not put into another one: a kernel that lays its output out otherwise the second time differs.
    """
    dtype, shape = tensor.dtype, tensor.shape
    if not tensor.is_cpu:
        sums = digests.tensor_sums("imprint", _packed(tensor)).tolist()
        return dtype, shape, repr(sums).encode()
    order = b""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        order = _order_of(tensor) if compiled.load() is not None else b""
        tensor = tensor if order else _packed(tensor)
    size = tensor.nbytes
    if size <= FEW_BYTES_COMPILED:
        return dtype, shape, ctypes.string_at(tensor.data_ptr(), size) + order
    found = runs.memory_sums(tensor.data_ptr(), size)
    if found is None:
        return dtype, shape, _digest(_packed(tensor).view(-1).view(torch.int8))
    return dtype, shape, found + order


def imprints(tensors: Sequence[torch.Tensor]) -> tuple[Imprint, ...]:
    """Return the imprints of several tensors."""
    return tuple([imprint(tensor) for tensor in tensors])  # a generator takes longer


def price() -> ImprintPrice:
    """Return what an imprint costs in this process, of a tensor in the host's memory."""
    return BATCHED_IMPRINT if compiled.load() is None else COMPILED_IMPRINT


def joined(several: Sequence[Imprint]) -> str:
    """Return one digest of several imprints."""
    return hashlib.blake2b(repr(tuple(several)).encode(), digest_size=16).hexdigest()


def _order_of(tensor: torch.Tensor) -> bytes:
    """Return the dimensions in the order in which a tensor lies in memory.

    Empty: its elements do not fill a run of memory, or mean something else than what lies there.
    """
    if tensor.is_conj() or tensor.is_neg():
        return b""
    return _dense_order(tensor.shape, tensor.stride())


@lru_cache(maxsize=1024)
def _dense_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    wide = [dim for dim, size in enumerate(sizes) if size > 1]
    dims, run = sorted(wide, key=strides.__getitem__), 1
    for dim in dims:
        if strides[dim] != run:
            return b""
        run *= sizes[dim]
    return bytes(dims)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return words_of(tensor.detach()).contiguous()


def _digest(raw: torch.Tensor) -> bytes:
    """Return a digest of bytes, int8 [n] in the host's memory."""
    hashed = hashlib.blake2b(digest_size=16)
    for level in range(MAX_LEVELS):
        if len(raw) <= FEW_BYTES:
            break
        whole = len(raw) - len(raw) % ROW_BYTES
        hashed.update(raw[whole:].numpy().data)
        rows = raw[:whole].view(-1, ROW_BYTES)
        raw = torch._int_mm(rows, _keys(level)).view(-1).view(torch.int8)
    hashed.update(raw.numpy().data)
    return hashed.digest()


@cache
def _keys(level: int) -> torch.Tensor:
    """Odd keys, int8 [bytes of a row, keys], of one level of the chain."""
    size = ROW_BYTES * NUM_KEYS
    return _drawn()[level * size : (level + 1) * size].view(ROW_BYTES, NUM_KEYS)


@cache
def _drawn() -> torch.Tensor:
    """The keys of all levels, one behind the other."""
    tables = (digest.element_keys(mixer).tobytes() for mixer in range(len(digest.MIXER_SEEDS)))
    drawn = torch.frombuffer(bytearray(b"".join(tables)), dtype=torch.int8).view(-1, 8)
    # Of a key of the ledger's the lowest byte is made odd; those above it are as they were drawn.
    return drawn[:, 1:5].reshape(-1) | 1
