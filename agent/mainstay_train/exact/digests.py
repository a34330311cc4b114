"""The digest of ``mainstay_core.base.digest`` in torch: the same sums, a thousand times faster.

int64 arithmetic in torch wraps modulo 2^64 on CPU and CUDA alike, which is all
the definition needs. Work goes by chunks of 65,536 elements that stay in cache:
widen to int64 as unsigned, multiply by the mixers' key tables and sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from mainstay_core.base import digest
from mainstay_core.base.digest import CHUNK, Digest

Spans = list[tuple[int, int, int]]
"""(chunk, first and one past the last position in it)."""

_MASK = (1 << 64) - 1
_NUM_MIXERS = len(digest.MIXER_SEEDS)
_BATCH = 32
"""Chunks per kernel launch on CUDA; bounds the int64 copy to 16 MiB."""


def tensor_digest(
    name: str, tensor: torch.Tensor, offset: int = 0, *, once: bool = False
) -> Digest:
    """The digest of ``tensor``, a slice of the tensor called ``name``.

    Args:
        name: Identity in the sum, e.g. "master:layers.3.norm.weight".
        tensor: Any shape, elements of 1, 2, 4, 8 or 16 (complex) bytes; read in
            row-major order as bit patterns, so -0.0 and 0.0 differ and NaNs count.
        offset: Index of its first element in the whole tensor.
        once: No other tensor will have this name: nothing is kept for the next one.
    """
    words, per_element = _words(tensor)
    if words.numel() == 0:
        return Digest.zero()
    start = offset * per_element
    spans, sums = (_digest_cuda if words.is_cuda else _digest_cpu)(words, start)
    return _combine(name, spans, sums, digest.chunk_key if once else _chunk_key)


def warm_up(device: str | torch.device = "cpu") -> None:
    """Make the key tables (0.1 s, once per process): for a parent whose children inherit them."""
    _tables(torch.device(device))


def rows_digest(name: str, rows: torch.Tensor, start: int, row_length: int) -> Digest:
    """The digest of some columns of a matrix called ``name``.

    Args:
        name: as of :func:`tensor_digest`.
        rows: [number of rows, number of columns], the part of each row that is there.
        start: Index of its first element in the whole tensor.
        row_length: Elements from a row's first to the next row's first in the whole tensor.
    """
    flat, per_element = _words(rows)
    if flat.numel() == 0:
        return Digest.zero()
    if rows.shape[0] == 1 or rows.shape[1] == row_length:
        return tensor_digest(name, rows, start)
    words = flat.view(rows.shape[0], -1)
    start, row_length = start * per_element, row_length * per_element
    keys, _ = _tables(words.device)
    last = start + (rows.shape[0] - 1) * row_length + words.shape[1]
    spans = [(chunk, 0, 0) for chunk in range(start // CHUNK, -(-last // CHUNK))]
    sums = torch.zeros(len(spans), _NUM_MIXERS, dtype=torch.int64, device=words.device)
    mask = _unsigned_mask(words)
    for row, (chunk, _, _) in enumerate(spans):
        for piece, offset in _pieces_in(words, start - chunk * CHUNK, row_length):
            wide = piece.to(torch.int64)
            if mask is not None:
                wide.bitwise_and_(mask)
            wide += 1
            for mixer in range(_NUM_MIXERS):
                factors = keys[mixer].as_strided(
                    piece.shape, (row_length, 1), keys[mixer].storage_offset() + offset
                )
                sums[row, mixer] += (wide * factors).sum()
    return _combine(name, spans, sums.tolist(), _chunk_key)


def _pieces_in(words: torch.Tensor, start: int, row_length: int) -> list[tuple[torch.Tensor, int]]:
    """Cut the part of ``words`` that lies in a chunk: (rows, position of the first word in it).

    Args:
        words: [rows, columns].
        start: position of the first word relative to the chunk's; may be negative.
        row_length: from a row's first word to the next row's.
    """
    count, width = words.shape
    first = max(0, -(start // row_length))  # the first row that begins in the chunk
    stop = min(count, max(first, (CHUNK - width - start) // row_length + 1))
    pieces = []
    before = start + (first - 1) * row_length
    if first > 0 and before + width > 0:
        end = min(width, CHUNK - before)
        pieces.append((words[first - 1 : first, -before:end], 0))
    if stop > first:
        pieces.append((words[first:stop], start + first * row_length))
    after = start + stop * row_length
    if stop < count and after < CHUNK:
        pieces.append((words[stop : stop + 1, : CHUNK - after], after))
    return pieces


def digest_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Digest:
    """The sum of the digests of whole tensors."""
    return digest.total(tensor_digest(name, tensor) for name, tensor in named)


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(flat integer words of at most 4 bytes, words per element)."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.contiguous().view(-1)
    size = tensor.element_size()
    if size == 1:
        return flat.view(torch.uint8), 1
    if size == 2:
        return flat.view(torch.int16), 1
    return flat.view(torch.int32), size // 4


def _digest_cpu(words: torch.Tensor, start: int) -> tuple[Spans, list[list[int]]]:
    keys, key_sums = _tables(words.device)
    spans = _spans(words.numel(), start)
    wide = torch.empty(min(CHUNK, words.numel()), dtype=torch.int64)
    sums = torch.empty(len(spans), _NUM_MIXERS, dtype=torch.int64)
    mask = _unsigned_mask(words)
    for row, (chunk, low, high) in zip(sums.unbind(), spans, strict=True):
        begin, whole = chunk * CHUNK + low - start, high - low == CHUNK
        piece = wide if whole else wide[: high - low]
        piece.copy_(words[begin : begin + high - low])
        if mask is not None:
            piece.bitwise_and_(mask)
        torch.mv(keys if whole else keys[:, low:high], piece, out=row)
    # sum K (bits + 1) = sum K bits + sum K; the second comes from running sums.
    ends = key_sums[:, [high for _, _, high in spans]]
    sums += (ends - key_sums[:, [low for _, low, _ in spans]]).t()
    return spans, sums.tolist()


def _digest_cuda(words: torch.Tensor, start: int) -> tuple[Spans, list[list[int]]]:
    keys, key_sums = _tables(words.device)
    spans = _spans(words.numel(), start)
    sums = torch.empty(len(spans), _NUM_MIXERS, dtype=torch.int64, device=words.device)
    mask = _unsigned_mask(words)
    row = 0
    while row < len(spans):
        chunk, low, high = spans[row]
        count = 1
        if high - low == CHUNK:  # whole chunks go together
            while row + count < len(spans) and count < _BATCH:
                if spans[row + count][2] != CHUNK:
                    break
                count += 1
        begin = chunk * CHUNK + low - start
        piece = words[begin : begin + count * (high - low)].view(count, high - low).to(torch.int64)
        if mask is not None:
            piece.bitwise_and_(mask)
        for mixer in range(_NUM_MIXERS):
            sums[row : row + count, mixer] = (piece * keys[mixer, low:high]).sum(1)
        sums[row : row + count] += key_sums[:, high] - key_sums[:, low]
        row += count
    return spans, sums.tolist()


def _spans(count: int, start: int) -> Spans:
    """What covers the words."""
    stop = start + count
    return [
        (chunk, max(start - chunk * CHUNK, 0), min(stop - chunk * CHUNK, CHUNK))
        for chunk in range(start // CHUNK, -(-stop // CHUNK))
    ]


def _combine(
    name: str, spans: Spans, sums: list[list[int]], chunk_key: Callable[[str, int, int], int]
) -> Digest:
    totals = [0] * _NUM_MIXERS
    for (chunk, _, _), row in zip(spans, sums, strict=True):
        for mixer, value in enumerate(row):
            totals[mixer] += chunk_key(name, chunk, mixer) * value
    return Digest(totals[0] & _MASK, totals[1] & _MASK)


_chunk_key = lru_cache(maxsize=1 << 16)(digest.chunk_key)


def _unsigned_mask(words: torch.Tensor) -> int | None:
    """What makes a sign-extended word unsigned again; bytes are unsigned already."""
    return {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}.get(words.dtype)


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Element keys [mixers, 65536] and their running sums [mixers, 65537], wrapped to int64."""
    keys = torch.stack(
        [
            torch.frombuffer(bytearray(digest.element_keys(mixer).tobytes()), dtype=torch.int64)
            for mixer in range(_NUM_MIXERS)
        ]
    )
    key_sums = torch.zeros(_NUM_MIXERS, CHUNK + 1, dtype=torch.int64)
    torch.cumsum(keys, 1, out=key_sums[:, 1:])
    return keys.to(device), key_sums.to(device)
