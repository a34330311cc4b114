"""The digest of ``mainstay_core.base.digest`` in torch: the same sums, a thousand times faster.

int64 arithmetic in torch wraps modulo 2^64 on CPU and CUDA alike, which is all the
definition needs. Elements are widened to int64 as unsigned words, a batch of chunks at a
time, and multiplied by the mixers' tables of element keys; then each chunk's sums are
multiplied by the chunk's own keys. The number of tensor operations grows with the
batches, never with the chunks. Where there is compiled code (``compiled`` on a CPU,
``gpu`` on a GPU), it goes over the words once and widens nothing.

:class:`FlatDigest` does that for flat buffers whose layout is known beforehand,
:func:`tensor_digest` for any tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch

from mainstay_core.base import digest
from mainstay_core.base.digest import CHUNK, Digest
from mainstay_core.base.errors import brief
from mainstay_train.base import device as devices
from mainstay_train.sums import compiled, products
from mainstay_train.sums.rows import Piece, Rows, batch_for, read, stretches

RowSums = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""From words, starts, positions and lengths of rows, and keys: see ``gpu.row_sums``."""

logger = logging.getLogger(__name__)

_FEW = 4
"""Keys of so many chunks are drawn in Python: cheaper than starting tensor operations for them."""

MAX_REDRAWS = 4
"""So often keys are drawn once more to see that they are the same."""

_CPU = torch.device("cpu")
_MASK = (1 << 64) - 1
_NUM_MIXERS = len(digest.MIXER_SEEDS)


def tensor_digest(name: str, tensor: torch.Tensor, offset: int = 0) -> Digest:
    """The digest of ``tensor``, a slice of the tensor called ``name``.

    Args:
        name: Identity in the sum, e.g. "master:layers.3.norm.weight".
        tensor: Any shape, elements of 1, 2, 4, 8 or 16 (complex) bytes; read in
            row-major order as bit patterns, so -0.0 and 0.0 differ and NaNs count.
        offset: Index of its first element in the whole tensor.
    """
    first, sums = _chunk_sums(tensor, offset)
    num_chunks = sums.shape[1]
    if num_chunks > _FEW:
        return added([_keyed(name, first, sums)])
    totals = [
        sum(digest.chunk_key(name, first + i, mixer) * value for i, value in enumerate(row))
        for mixer, row in enumerate(sums.tolist())
    ]
    return Digest(totals[0] & _MASK, totals[1] & _MASK)


def tensor_sums(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Both sums of a whole tensor, [mixers], where it is: see :func:`added`."""
    return _keyed(name, *_chunk_sums(tensor, 0))


def _chunk_sums(tensor: torch.Tensor, offset: int) -> tuple[int, torch.Tensor]:
    """(The first chunk, [mixers, chunks]) of a tensor that begins at ``offset`` of the whole."""
    words, per_element = _words(tensor)
    if words.numel() == 0:
        return 0, torch.zeros(_NUM_MIXERS, 0, dtype=torch.int64, device=words.device)
    start = offset * per_element
    first = start // CHUNK
    num_chunks = -(-(start + words.numel()) // CHUNK) - first
    keys, key_sums = _tables(words.device)
    if words.device.type == "cpu" and compiled.load() is not None:
        borders = torch.arange(first, first + num_chunks + 1, device="cpu").mul_(CHUNK).sub_(start)
        borders.clamp_(0, words.numel())
        positions = torch.zeros(num_chunks, dtype=torch.int64, device="cpu")
        positions[0] = start % CHUNK
        return first, _row_sums(words, borders[:-1], positions, borders.diff())
    sums = torch.empty(_NUM_MIXERS, num_chunks, dtype=torch.int64, device=words.device)
    for row, count, low, high in stretches(words.numel(), start, batch_for(words.device)):
        begin = (first + row) * CHUNK + low - start
        piece = words[begin : begin + count * (high - low)].view(count, high - low)
        into = sums[:, row : row + count]
        products.multiply(products.widened(piece), keys[:, low:high], into)
        # sum K (bits + 1) = sum K bits + sum K; the second comes from running sums.
        into += (key_sums[:, high] - key_sums[:, low]).unsqueeze(1)
    return first, sums


def _row_sums(
    words: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """The sum of key times word plus one, by mixer and row: see ``compiled.row_sums``."""
    keys, key_sums = _tables(words.device)
    sums = compiled.row_sums(words, starts, positions, lengths, keys)
    return sums.add_(key_sums[:, positions + lengths]).sub_(key_sums[:, positions])


def warm_up(device: str | torch.device = "cpu") -> None:
    """Make the key tables and compile what is compiled (0.2 s, once per process).

    It is for a parent whose children inherit both.
    """
    _tables(torch.device(device))
    compiled.load()


def element_keys() -> torch.Tensor:
    """Return the table of element keys in the host's memory, int64 [mixers, 65536]; made once."""
    return _tables(_CPU)[0]


def rows_sums(name: str, rows: torch.Tensor, start: int, row_length: int) -> torch.Tensor:
    """Both sums of some columns of a matrix called ``name``, [mixers]: see :func:`added`.

    Args:
        name: as of :func:`tensor_digest`.
        rows: [number of rows, number of columns], the part of each row that is there.
        start: Index of its first element in the whole tensor.
        row_length: Elements from a row's first to the next row's first in the whole tensor.
    """
    flat, per_element = _words(rows)
    if flat.numel() == 0 or rows.shape[0] == 1 or rows.shape[1] == row_length:
        return _keyed(name, *_chunk_sums(rows, start))
    words = flat.view(rows.shape[0], -1)
    start, row_length = start * per_element, row_length * per_element
    keys, _ = _tables(words.device)
    last = start + (rows.shape[0] - 1) * row_length + words.shape[1]
    first = start // CHUNK
    num_chunks = -(-last // CHUNK) - first
    sums = torch.zeros(_NUM_MIXERS, num_chunks, dtype=torch.int64, device=words.device)
    if words.device.type == "cpu" and compiled.load() is not None:
        for chunks, starts, positions, lengths in _runs(words, start - first * CHUNK, row_length):
            sums.index_add_(1, chunks, _row_sums(flat, starts, positions, lengths))
        return _keyed(name, first, sums)
    for chunk in range(num_chunks):
        for piece, offset in _pieces_in(words, start - (first + chunk) * CHUNK, row_length):
            wide = piece.to(torch.int64)
            wide += 1
            for mixer in range(_NUM_MIXERS):
                factors = keys[mixer].as_strided(
                    piece.shape, (row_length, 1), keys[mixer].storage_offset() + offset
                )
                sums[mixer, chunk] += (wide * factors).sum()
    return _keyed(name, first, sums)


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


def _runs(
    words: torch.Tensor, start: int, row_length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Cut rows of words at the borders of chunks, first the first run of each row.

    Args:
        words: [rows, columns].
        start: position of the first word relative to the first chunk.
        row_length: from a row's first word to the next row's.

    Yields:
        Of each run its chunk, its first word in the flat words, and its first position in the
        chunk and its length.
    """
    count, width = words.shape
    numbers = torch.arange(count, device="cpu")
    begins = numbers * row_length + start
    for further in range(-(-width // CHUNK) + 1):
        chunks = begins // CHUNK + further
        low = torch.maximum(begins, chunks * CHUNK)
        lengths = torch.minimum(begins + width, (chunks + 1) * CHUNK) - low
        there = lengths > 0
        starts = numbers * width + (low - begins)
        yield (
            chunks[there],
            starts[there],
            (low - chunks * CHUNK)[there],
            lengths[there],
        )


def digest_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Digest:
    """The sum of the digests of whole tensors."""
    return digest.total(tensor_digest(name, tensor) for name, tensor in named)


class FlatDigest:
    """The digest of the pieces of a flat buffer, for all buffers of one layout.

    Chunks of all pieces go together, longest first, so that one batch holds as many
    small pieces as large ones take. Keys come with the layout: they are drawn once.

    Args:
        pieces: what lies in the buffer; the rest of it does not count.
        device: where the buffers are.
        batch: elements that are widened at a time, unless as many as suit the device.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        device: torch.device | str = "cpu",
        batch: int | None = None,
    ) -> None:
        self._device = torch.device(device)
        pieces = [*pieces]
        self._rows = Rows(pieces, self._device, batch)
        rows = self._rows.rows
        self._num_rows = len(rows)
        self._end = max((row.start + row.length for row in rows), default=0)
        bases = [_bases(piece.name) for piece in pieces]
        self._keys = _drawn(
            self._tensor(
                [_signed(bases[row.piece][m]) for row in rows] for m in range(_NUM_MIXERS)
            ),
            self._tensor([row.chunk for row in rows]),
        )
        _, key_sums = _tables(self._device)
        # Made once: what a step makes may come out wrong, and compiled code finds memory by it.
        self._positions = positions = self._tensor([row.position for row in rows])
        self._fused = _fused(self._device)
        self._starts = self._tensor([row.start for row in rows])
        self._lengths = lengths = self._tensor([row.length for row in rows])
        self._num_pieces = len(pieces)
        self._piece_of = self._tensor([row.piece for row in rows])
        # sum K (bits + 1) = sum K bits + sum K, and the second is the layout's.
        zeros = key_sums[:, positions + lengths] - key_sums[:, positions]
        self._of_zeros = self._keys * zeros
        self._has_parts = [
            any(row.position for row in rows[batch.first : batch.stop])
            for batch in self._rows.batches
        ]
        """Of each batch whether some row begins within a chunk."""

    def _tensor(self, values: Iterable[object]) -> torch.Tensor:
        return devices.sent(torch.tensor([*values], dtype=torch.int64), self._device)

    def sums(self, flat: torch.Tensor) -> torch.Tensor:
        """Both sums, [mixers], where the buffer is: see :func:`added`.

        Args:
            flat: elements of 4 bytes, contiguous, a whole number of granules.
        """
        return self._of_rows(flat).sum(1)

    def sums_of_pieces(self, flat: torch.Tensor) -> torch.Tensor:
        """Both sums of each piece by itself, [mixers, pieces]; argument as of :meth:`sums`."""
        found = torch.zeros(_NUM_MIXERS, self._num_pieces, dtype=torch.int64, device=self._device)
        return found.index_add_(1, self._piece_of, self._of_rows(flat))

    def _of_rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Both sums of each row, [mixers, rows]."""
        if not self._num_rows:
            return torch.zeros(_NUM_MIXERS, 0, dtype=torch.int64, device=self._device)
        keys, _ = _tables(self._device)
        words = flat.detach().view(torch.int32)
        assert words.numel() >= self._end, "compiled code looks at no size"
        if self._fused is not None:
            sums = self._fused(words, self._starts, self._positions, self._lengths, keys)
        else:
            sums = self._by_batch(words, keys)
        return torch.addcmul(self._of_zeros, sums, self._keys)

    def _by_batch(self, words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The sum of key times word, [mixers, rows]."""
        sums = torch.empty(_NUM_MIXERS, self._num_rows, dtype=torch.int64, device=self._device)
        for batch, has_parts in zip(self._rows.batches, self._has_parts, strict=True):
            wide = products.widened(read(words, batch).view(torch.uint32))
            into = sums[:, batch.first : batch.stop]
            if has_parts:
                products.multiply_at(wide, keys, self._positions[batch.first : batch.stop], into)
            else:
                products.multiply(wide, keys[:, : batch.width], into)
        return sums

    def is_like(self, other: FlatDigest) -> bool:
        """Return whether keys and places came out the same as those of another one."""
        mine, others = self._kept(), other._kept()
        return len(mine) == len(others) and all(map(torch.equal, mine, others))

    def _kept(self) -> list[torch.Tensor]:
        """All that the sums of any buffer are made by, but the tables of the process."""
        kept = [self._keys, self._of_zeros, self._starts, self._lengths, self._piece_of]
        kept.append(self._positions)
        for batch in self._rows.batches:
            kept += [batch.granules] if batch.lengths is None else [batch.granules, batch.lengths]
        return kept

    def digest(self, flat: torch.Tensor) -> Digest:
        """The digest of a buffer; argument as of :meth:`sums`."""
        return added([self.sums(flat)])


def drawn_twice(pieces: Sequence[Piece], device: torch.device | str = "cpu") -> FlatDigest:
    """Return a digest for good that is made where a device may be wrong, in a step for instance.

    One wrong bit in a key would make each of its sums wrong, after any heal. So it is made until
    it comes out the same twice in a row. Where that never happens the last one is returned: its
    digests are in dispute, as they should be of a device that is wrong so often.

    Args:
        pieces: as of :class:`FlatDigest`.
        device: where the buffers are.
    """
    known = FlatDigest(pieces, device)
    for _ in range(MAX_REDRAWS):
        before, known = known, FlatDigest(pieces, device)
        if known.is_like(before):
            break
    return known


def _fused(device: torch.device) -> RowSums | None:
    """The form that makes one pass over a buffer there; None where there is none."""
    if device.type == "cpu":
        return compiled.row_sums if compiled.load() is not None else None
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return _of_triton(device)


@lru_cache(maxsize=16)
def _of_triton(device: torch.device) -> RowSums | None:
    """The form of a GPU; None where it does not work.

    It is tried before it is used, since it calls a C compiler and writes to a cache of its own.
    """
    keys, _ = _tables(device)
    words = torch.arange(-3000, 3000, dtype=torch.int32, device=device) * 699_967
    # A row of several programs, and one that ends its chunk.
    places = [(32, 7, 4500), (5000, CHUNK - 900, 900)]
    starts, positions, lengths = torch.tensor(places, device=device).t().contiguous()
    expected = torch.empty(_NUM_MIXERS, len(places), dtype=torch.int64, device=device)
    for row, (start, position, length) in enumerate(places):
        wide = products.widened(words[start : start + length].view(torch.uint32).view(1, -1))
        key = keys[:, position : position + length]
        products.multiply(wide, key, expected[:, row : row + 1])
    try:
        from mainstay_train.sums.gpu import row_sums

        found = row_sums(words, starts, positions, lengths, keys)
    except (
        Exception
    ) as error:  # of its compiler, its cache or its driver, each by a kind of its own
        logger.warning("digests on %s go without Triton: %s", device, brief(error))
        return None
    if not torch.equal(found, expected):
        logger.warning("digests on %s go without Triton: its sums are wrong", device)
        return None
    return row_sums


def added(sums: Sequence[torch.Tensor]) -> Digest:
    """The digest that several :meth:`FlatDigest.sums` make up: the only look at the device."""
    if not sums:
        return Digest.zero()
    first, second = torch.stack([*sums]).sum(0).tolist()
    return Digest(first & _MASK, second & _MASK)


def fetched(parts: Sequence[Callable[[], torch.Tensor]]) -> Digest:
    """The digest that several sums make up, once their readout has been fetched."""
    return added([part() for part in parts])


def of_pieces(sums: torch.Tensor) -> list[Digest]:
    """The digests that :meth:`FlatDigest.sums_of_pieces` makes up, of each piece one."""
    firsts, seconds = sums.tolist()
    return [Digest(a & _MASK, b & _MASK) for a, b in zip(firsts, seconds, strict=True)]


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(flat unsigned words of at most 4 bytes, words per element)."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.contiguous().view(-1)
    size = tensor.element_size()
    if size == 1:
        return flat.view(torch.uint8), 1
    if size == 2:
        return flat.view(torch.uint16), 1
    return flat.view(torch.uint32), size // 4


def _keyed(name: str, first: int, sums: torch.Tensor) -> torch.Tensor:
    """Both sums of consecutive chunks of one tensor, [mixers], from theirs, [mixers, chunks]."""
    bases = devices.sent(torch.tensor([[_signed(b)] for b in _bases(name)]), sums.device)
    chunks = torch.arange(first, first + sums.shape[1], device=sums.device)
    return (sums * _drawn(bases, chunks)).sum(1)


def _bases(name: str) -> tuple[int, ...]:
    """What a tensor's chunk keys are drawn from, by mixer."""
    key = digest.tensor_key(name)
    return tuple(digest.splitmix64(key ^ seed) for seed in digest.MIXER_SEEDS)


def _drawn(bases: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """``digest.chunk_key`` of many chunks: [mixers, n] from [mixers, n or 1] and [n]."""
    z = bases + chunks + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int64 to the right as if it were unsigned."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number."""
    return value - (1 << 64) if value >> 63 else value


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Element keys [mixers, 65536] and their running sums [mixers, 65537], wrapped to int64."""
    keys = torch.stack(
        [
            torch.frombuffer(bytearray(digest.element_keys(mixer).tobytes()), dtype=torch.int64)
            for mixer in range(_NUM_MIXERS)
        ]
    )
    key_sums = torch.zeros(_NUM_MIXERS, CHUNK + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(keys, 1, out=key_sums[:, 1:])
    return keys.to(device), key_sums.to(device)
