"""The canonical reduction: bits that depend on shard types alone (design rule 3).

Reduce-scatter to chunk owners (an all-to-all and an ordered local sum), then a
gather: the bytes of a ring with one partial per rank, (p+1)/2 of it with p. The
order of summation is the table's: types in ascending order inside a lane, lanes
in ascending order, in fp32, whoever sent them.

Partials are only read (protocol section 2, rule A): received bytes go to
scratch, the sum into one separate buffer, so an interrupted reduction leaves
everything as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

import torch

from mainstay_core.planning.partials import grow
from mainstay_core.rank.settle import Supply
from mainstay_core.wire.plan import Partial
from mainstay_train.comm.group import Group
from mainstay_train.exact.layout import CHUNK, StageLayout


class PartialStore:
    """The complete gradients that a cell holds of the current step, one flat buffer each.

    A type accumulates in ``scratch`` and enters a partial only when complete
    (design 13.1). Buffers are reused from step to step.
    """

    def __init__(
        self, layout: StageLayout, shards_per_lane: int, device: torch.device | str = "cpu"
    ) -> None:
        self._layout, self._shards_per_lane, self._device = layout, shards_per_lane, device
        self._free: list[torch.Tensor] = []
        self.partials: dict[Partial, torch.Tensor] = {}
        self.scratch = self._take()
        self.scratch_views = layout.views(self.scratch)

    def complete(self, shard_type: int) -> Partial:
        """Move the finished type from scratch into its partial; returns that partial."""
        grown = grow(self.partials, shard_type, self._shards_per_lane)
        if grown.first < grown.last:
            run = Partial(lane=grown.lane, first=grown.first, last=shard_type - 1)
            buffer = self.partials[run]
            # Not atomic, but nobody else reads it: a partial is only sent by this thread.
            buffer.add_(self.scratch)
            del self.partials[run]
            self.partials[grown] = buffer
        else:
            self.partials[grown] = self.scratch
            self.scratch = self._take()
            self.scratch_views = self._layout.views(self.scratch)
        return grown

    def held(self) -> tuple[Partial, ...]:
        """What is complete, sorted."""
        return tuple(sorted(self.partials))

    def clear(self) -> None:
        """Forget all partials; their buffers are reused."""
        self._free += self.partials.values()
        self.partials.clear()

    def _take(self) -> torch.Tensor:
        return self._free.pop() if self._free else self._layout.allocate(device=self._device)


@dataclass(frozen=True, slots=True)
class Grid:
    """The owner of each chunk of a stage's flat buffer."""

    spans: tuple[tuple[tuple[int, int], ...], ...]
    """By owner: (start, stop) in the stage's flat buffer."""
    sizes: tuple[int, ...]
    """By owner: elements owned."""

    @classmethod
    def of(cls, layout: StageLayout, num_cells: int) -> Grid:
        """Owner of a chunk = its index in the stage modulo the number of cells (design 13.2)."""
        spans: list[list[tuple[int, int]]] = [[] for _ in range(num_cells)]
        for chunk in layout.chunks():
            base = layout.offsets[chunk.block]
            spans[chunk.index % num_cells].append((base + chunk.start, base + chunk.stop))
        sizes = tuple(sum(stop - start for start, stop in owned) for owned in spans)
        return cls(tuple(tuple(owned) for owned in spans), sizes)


def _add_up(into: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The left-to-right sum of the terms, in ``into``."""
    if len(terms) == 1:
        return into.copy_(terms[0])
    torch.add(terms[0], terms[1], out=into)
    for term in terms[2:]:
        into.add_(term)
    return into


class Reducer:
    """Reduces the partials of one stage over its cells.

    Args:
        layout: the stage's flat layout.
        device: where gradients live.
    """

    def __init__(self, layout: StageLayout, device: torch.device | str = "cpu") -> None:
        self._layout, self._device = layout, device
        self._grids: dict[int, Grid] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self.reduced = layout.allocate(device=device)
        """Sum over all types of the step; valid after :meth:`reduce`."""

    def reduce(
        self,
        group: Group | None,
        table: Sequence[Supply],
        members: Sequence[int],
        index: int,
        partials: Mapping[Partial, torch.Tensor],
    ) -> torch.Tensor:
        """Return the canonical sum over all supplies of the table, on every cell.

        Args:
            group: the stage's cells; None when there is only this one.
            table: supplies in canonical order.
            members: the cells' member indices, in the group's order.
            index: this cell's member index.
            partials: buffers of this cell, flat over the stage.

        Raises:
            GroupEnded: the group ended before it completed; partials are as before.
        """
        grid, rank = self._grid(len(members)), members.index(index)
        received = self._scatter(group, grid, table, members, rank, partials)
        total = self._sum(grid.spans[rank], table, members, rank, partials, received)
        self._gather(group, grid, rank, total)
        return self.reduced

    def _scatter(
        self,
        group: Group | None,
        grid: Grid,
        table: Sequence[Supply],
        members: Sequence[int],
        rank: int,
        partials: Mapping[Partial, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Send every other cell its chunks of what this one supplies; returns what came, by rank.

        A received tensor holds one supply after the other, in the table's order.
        """
        if group is None:
            return {}
        own = [partials[s.partial] for s in table if s.index == members[rank]]
        counts = [sum(1 for s in table if s.index == member) for member in members]
        sent = [[p[start:stop] for p in own for start, stop in spans] for spans in grid.spans]
        sent_sizes = [len(own) * size for size in grid.sizes]
        received_sizes = [count * grid.sizes[rank] for count in counts]
        return self._exchange(group, rank, sent, sent_sizes, received_sizes)

    def _exchange(
        self,
        group: Group,
        rank: int,
        sent: Sequence[Sequence[torch.Tensor]],
        sent_sizes: list[int],
        received_sizes: list[int],
    ) -> dict[int, torch.Tensor]:
        """All-to-all of pieces by destination; what is this cell's own stays where it is."""
        peers = [peer for peer in range(len(sent)) if peer != rank]
        sent_sizes[rank] = received_sizes[rank] = 0
        packed = self._buffer("sent", sum(sent_sizes))
        if packed.numel():
            torch.cat([piece for peer in peers for piece in sent[peer]], out=packed)
        received = self._buffer("received", sum(received_sizes))
        group.exchange(received, packed, received_sizes, sent_sizes)
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
        """Ordered sum of this cell's chunks, chunk by chunk: what is summed stays in cache.

        The first term is taken as it is, since 0 + x may change a sign of zero.
        """
        mine = sum(stop - start for start, stop in spans)
        total, lane_sum = self._buffer("total", mine), self._buffer("lane", CHUNK)
        sources = self._sources(table, members, rank, partials, received, mine)
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

    @staticmethod
    def _sources(
        table: Sequence[Supply],
        members: Sequence[int],
        rank: int,
        partials: Mapping[Partial, torch.Tensor],
        received: Mapping[int, torch.Tensor],
        mine: int,
    ) -> list[tuple[int, bool, torch.Tensor]]:
        """Per supply: its lane, and either the own partial (True) or what was received of it."""
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
        return sources

    def _gather(self, group: Group | None, grid: Grid, rank: int, total: torch.Tensor) -> None:
        parts = {rank: total}
        if group is not None:
            sent_sizes = [total.numel()] * len(grid.sizes)
            sent = [[total]] * len(grid.sizes)
            parts |= self._exchange(group, rank, sent, sent_sizes, list(grid.sizes))
        for peer, part in parts.items():
            begin = 0
            for start, stop in grid.spans[peer]:
                self.reduced[start:stop] = part[begin : begin + stop - start]
                begin += stop - start

    def _grid(self, num_cells: int) -> Grid:
        if num_cells not in self._grids:
            self._grids[num_cells] = Grid.of(self._layout, num_cells)
        return self._grids[num_cells]

    def _buffer(self, name: str, numel: int) -> torch.Tensor:
        """Scratch of at least ``numel`` elements; one per use, grown as needed."""
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=torch.float32, device=self._device)
            self._buffers[name] = kept
        return kept[:numel]
