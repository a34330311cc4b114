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

import torch

from mainstay_core.messages import Partial
from mainstay_core.partials import grow
from mainstay_core.settle import Supply
from mainstay_train.groups import Group
from mainstay_train.layout import StageLayout


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
    """Who owns which chunk of a stage's flat buffer."""

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
        grid = self._grid(len(members))
        segments = self._scatter(group, grid, table, members, index, partials)
        total = self._sum(table, segments)
        self._gather(group, grid, total)
        return self.reduced

    def _scatter(
        self,
        group: Group | None,
        grid: Grid,
        table: Sequence[Supply],
        members: Sequence[int],
        index: int,
        partials: Mapping[Partial, torch.Tensor],
    ) -> list[torch.Tensor]:
        """All-to-all: this cell's owned elements of every supply, in the table's order."""
        own = [partials[s.partial] for s in table if s.index == index]
        mine = grid.sizes[members.index(index)]
        pieces = [p[a:b] for owned in grid.spans for p in own for a, b in owned]
        sent = self._buffer("sent", sum(p.numel() for p in pieces))
        if pieces:
            torch.cat(pieces, out=sent)
        counts = {m: sum(1 for s in table if s.index == m) for m in members}
        received_sizes = [counts[m] * mine for m in members]
        received = sent
        if group is not None:
            received = self._buffer("received", sum(received_sizes))
            group.exchange(received, sent, received_sizes, [len(own) * n for n in grid.sizes])
        starts: dict[int, int] = {}
        offset = 0
        for member, size in zip(members, received_sizes, strict=True):
            starts[member] = offset
            offset += size
        segments = []
        for supply in table:
            start = starts[supply.index]
            segments.append(received[start : start + mine])
            starts[supply.index] = start + mine
        return segments

    @staticmethod
    def _sum(table: Sequence[Supply], segments: Sequence[torch.Tensor]) -> torch.Tensor:
        """Ordered sum; the first term is taken as it is, since 0 + x may change a sign of zero."""
        total: torch.Tensor | None = None
        lane_sum: torch.Tensor | None = None
        lane = -1
        for supply, segment in zip(table, segments, strict=True):
            if supply.partial.lane == lane:
                assert lane_sum is not None
                lane_sum.add_(segment)
                continue
            if lane_sum is not None:
                total = lane_sum if total is None else total.add_(lane_sum)
            lane, lane_sum = supply.partial.lane, segment
        assert lane_sum is not None, "a table has at least one supply"
        return lane_sum if total is None else total.add_(lane_sum)

    def _gather(self, group: Group | None, grid: Grid, total: torch.Tensor) -> None:
        gathered = total
        if group is not None:
            num_cells = len(grid.sizes)
            sent = self._buffer("sent", total.numel() * num_cells)
            torch.cat([total] * num_cells, out=sent)
            gathered = self._buffer("received", sum(grid.sizes))
            group.exchange(gathered, sent, grid.sizes, [total.numel()] * num_cells)
        offset = 0
        for owned in grid.spans:
            for start, stop in owned:
                self.reduced[start:stop] = gathered[offset : offset + stop - start]
                offset += stop - start

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
