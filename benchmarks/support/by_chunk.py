"""Reduces and digests chunk by chunk: the form that buckets are measured against.

The bits are those of ``mainstay_train.exact``, but for the last ones of norms; what differs is that
each chunk has its own views, sums and keys in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import torch

from mainstay_core.base import digest
from mainstay_core.base.digest import CHUNK, Digest
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.plan import Partial
from mainstay_train.exact.layout import StageLayout
from mainstay_train.sums import digests

_chunk_key = lru_cache(maxsize=1 << 16)(digest.chunk_key)


def digest_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Digest:
    """Return the sum of the digests of whole fp32 tensors on the CPU."""
    keys, key_sums = digests._tables(torch.device("cpu"))
    totals = [0, 0]
    for name, tensor in named:
        words = tensor.detach().contiguous().view(-1).view(torch.int32)
        starts = range(0, words.numel(), CHUNK)
        wide = torch.empty(min(CHUNK, words.numel()), dtype=torch.int64)
        sums = torch.empty(len(starts), len(totals), dtype=torch.int64)
        lengths = [min(CHUNK, words.numel() - start) for start in starts]
        for row, start, length in zip(sums.unbind(), starts, lengths, strict=True):
            piece = wide if length == CHUNK else wide[:length]
            piece.copy_(words[start : start + length])
            piece.bitwise_and_(0xFFFFFFFF)
            torch.mv(keys if length == CHUNK else keys[:, :length], piece, out=row)
        sums += key_sums[:, lengths].t()
        for chunk, row in enumerate(sums.tolist()):
            for mixer, value in enumerate(row):
                totals[mixer] += _chunk_key(name, chunk, mixer) * value
    return Digest(totals[0] % (1 << 64), totals[1] % (1 << 64))


def chunk_norms_sq(flat: torch.Tensor) -> list[float]:
    """Return each chunk's squared norm: a dot product of its own, whose order is the kernel's."""
    wide = (flat[at : at + CHUNK].to(torch.float64) for at in range(0, flat.numel(), CHUNK))
    return torch.stack([torch.dot(chunk, chunk) for chunk in wide]).tolist()


class ChunkReducer:
    """Reduces the partials of a stage over its cells, all of it in one exchange each way."""

    def __init__(self, layout: StageLayout) -> None:
        self._layout = layout
        self._buffers: dict[str, torch.Tensor] = {}
        self._spans: dict[int, list[list[tuple[int, int]]]] = {}
        self.reduced = layout.allocate()

    def reduce(
        self,
        group: Any,
        table: Sequence[Supply],
        members: Sequence[int],
        index: int,
        partials: Mapping[Partial, torch.Tensor],
    ) -> torch.Tensor:
        """Return the sum; arguments as of ``Reducer.reduce``."""
        rank, spans = members.index(index), self._owned(len(members))
        sizes = [sum(stop - start for start, stop in owned) for owned in spans]
        received: dict[int, torch.Tensor] = {}
        if group is not None:
            own = [partials[s.partial] for s in table if s.index == index]
            counts = [sum(1 for s in table if s.index == member) for member in members]
            sent = [[p[start:stop] for p in own for start, stop in owned] for owned in spans]
            sent_sizes = [len(own) * size for size in sizes]
            received_sizes = [count * sizes[rank] for count in counts]
            received = self._exchange(group, rank, sent, sent_sizes, received_sizes)
        total = self._sum(spans[rank], table, members, rank, partials, received)
        parts = {rank: total}
        if group is not None:
            sent = [[total]] * len(sizes)
            back = [total.numel()] * len(sizes)
            parts |= self._exchange(group, rank, sent, back, list(sizes))
        for peer, part in parts.items():
            begin = 0
            for start, stop in spans[peer]:
                self.reduced[start:stop] = part[begin : begin + stop - start]
                begin += stop - start
        return self.reduced

    def _owned(self, num_cells: int) -> list[list[tuple[int, int]]]:
        if num_cells not in self._spans:
            spans: list[list[tuple[int, int]]] = [[] for _ in range(num_cells)]
            offsets = self._layout.offsets
            for chunk in self._layout.chunks():
                base = offsets[chunk.block]
                spans[chunk.index % num_cells].append((base + chunk.start, base + chunk.stop))
            self._spans[num_cells] = spans
        return self._spans[num_cells]

    def _exchange(
        self,
        group: Any,
        rank: int,
        sent: Sequence[Sequence[torch.Tensor]],
        sent_sizes: list[int],
        received_sizes: list[int],
    ) -> dict[int, torch.Tensor]:
        peers = [peer for peer in range(len(sent)) if peer != rank]
        sent_sizes[rank] = received_sizes[rank] = 0
        packed = self._buffer("sent", sum(sent_sizes))
        if packed.numel():
            torch.cat([piece for peer in peers for piece in sent[peer]], out=packed)
        received = self._buffer("received", sum(received_sizes))
        started = group.start_exchange(received, packed, received_sizes, sent_sizes)
        group.finish_exchange(started)
        starts = list(accumulate(received_sizes, initial=0))
        return {peer: received[starts[peer] : starts[peer + 1]] for peer in peers}

    def _sum(
        self,
        spans: Sequence[tuple[int, int]],
        table: Sequence[Supply],
        members: Sequence[int],
        rank: int,
        partials: Mapping[Partial, torch.Tensor],
        received: Mapping[int, torch.Tensor],
    ) -> torch.Tensor:
        mine = sum(stop - start for start, stop in spans)
        total, lane_sum = self._buffer("total", mine), self._buffer("lane", CHUNK)
        taken = dict.fromkeys(received, 0)
        sources = []
        for supply in table:
            peer = members.index(supply.index)
            if peer == rank:
                sources.append((supply.partial.lane, True, partials[supply.partial]))
                continue
            part = received[peer][taken[peer] : taken[peer] + mine]
            taken[peer] += mine
            sources.append((supply.partial.lane, False, part))
        begin = 0
        for start, stop in spans:
            size = stop - start
            into, lane_into = total[begin : begin + size], lane_sum[:size]
            terms = [
                (lane, flat[start:stop] if own else flat[begin : begin + size])
                for lane, own, flat in sources
            ]
            for number, (_, of_lane) in enumerate(groupby(terms, key=itemgetter(0))):
                run = [term for _, term in of_lane]
                if number == 0:
                    _add_up(into, run)
                else:
                    into.add_(run[0] if len(run) == 1 else _add_up(lane_into, run))
            begin += size
        return total

    def _buffer(self, name: str, numel: int) -> torch.Tensor:
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < numel:
            kept = self._buffers[name] = torch.empty(numel)
        return kept[:numel]


def _add_up(into: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(terms) == 1:
        return into.copy_(terms[0])
    torch.add(terms[0], terms[1], out=into)
    for term in terms[2:]:
        into.add_(term)
    return into
