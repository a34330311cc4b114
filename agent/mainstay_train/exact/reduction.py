"""The canonical reduction: bits that depend on shard types alone (design rule 3).

Reduce-scatter to chunk owners (an all-to-all and an ordered local sum), then a
gather: the bytes of a ring with one partial per rank, (p+1)/2 of it with p. The
order of summation is the table's: types in ascending order inside a lane, lanes
in ascending order, in fp32, whoever sent them.

The stage's chunks go in buckets of a set size, each by a fixed number of tensor
operations. While one bucket is summed, the next is on its way to its owners and the
one before on its way back; all cells start the exchanges in one order.

Partials are only read (protocol section 2, rule A): received bytes go to
scratch, the sum into one separate buffer, so an interrupted reduction leaves
everything as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import torch

from mainstay_core.job.config import BUCKET_BYTES
from mainstay_core.planning.partials import grow
from mainstay_core.rank.settle import Supply
from mainstay_core.wire.plan import Partial
from mainstay_train.comm.group import Exchange, Group
from mainstay_train.exact.layout import CHUNK, StageLayout

_IN_FLIGHT = 2
"""Sets of scratch: a bucket may be on its way while the one before it is summed."""


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

    def drop(self, partial: Partial) -> None:
        """Forget one partial; its buffer is reused."""
        self._free.append(self.partials.pop(partial))

    def held(self) -> tuple[Partial, ...]:
        """What is complete, sorted."""
        return tuple(sorted(self.partials))

    def clear(self) -> None:
        """Forget all partials; their buffers are reused."""
        self._free += self.partials.values()
        self.partials.clear()

    def _take(self) -> torch.Tensor:
        return self._free.pop() if self._free else self._layout.allocate(device=self._device)


class Ordering(NamedTuple):
    """The order in which a bucket's chunks travel, as one of the cells sees it.

    ``granule`` elements move together: the largest number of which all chunks of the
    bucket are multiples.
    """

    sizes: tuple[int, ...]
    """Elements by owner."""
    granule: int
    outward: torch.Tensor
    """Of each granule its place in the bucket: one's own first, then by owner."""
    home: torch.Tensor
    """The inverse."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        first: int,
        num_cells: int,
        rank: int,
        device: torch.device | str = "cpu",
    ) -> Ordering:
        """Owner of a chunk = its index in the stage modulo the number of cells (design 13.2).

        Args:
            lengths: elements of the bucket's chunks.
            first: owner of the first chunk.
            num_cells: cells that share the bucket.
            rank: whose view it is.
            device: where the gradient lives.
        """
        granule = math.gcd(*lengths)
        owners = [(first + i) % num_cells for i in range(len(lengths))]
        order = sorted(range(len(lengths)), key=lambda i: (owners[i] != rank, owners[i]))
        counts = torch.tensor([lengths[i] // granule for i in order])
        starts = torch.tensor([*accumulate(lengths, initial=0)])[order] // granule
        # Within a chunk granules stay in order: each place moves as far as its chunk does.
        moves = (starts - counts.cumsum(0) + counts).repeat_interleave(counts)
        outward = moves + torch.arange(len(moves))
        sizes = [0] * num_cells
        for owner, length in zip(owners, lengths, strict=True):
            sizes[owner] += length
        return cls(
            sizes=tuple(sizes),
            granule=granule,
            outward=outward.to(device),
            home=torch.argsort(outward).to(device),
        )


class Bucket(NamedTuple):
    """A run of a stage's chunks that is reduced together."""

    number: int
    start: int
    """First element in the stage's flat buffer."""
    stop: int
    ordering: Ordering

    @property
    def slot(self) -> int:
        """Which set of scratch it uses."""
        return self.number % _IN_FLIGHT

    def pack(self, flat: torch.Tensor, first: int, stop: int, into: torch.Tensor) -> None:
        """Copy a part of the bucket on its way outward.

        Args:
            flat: the stage's flat buffer.
            first: first element of the part, in outward order.
            stop: one past its last.
            into: flat, as long as the part.
        """
        granule = self.ordering.granule
        order = self.ordering.outward[first // granule : stop // granule]
        rows = _rows(flat[self.start : self.stop], granule)
        torch.index_select(rows, 0, order, out=_rows(into, granule))


def cut(
    lengths: Sequence[int],
    bucket_bytes: int,
    num_cells: int,
    rank: int,
    device: torch.device | str = "cpu",
) -> tuple[Bucket, ...]:
    """Cut a stage's chunks, of these lengths, into buckets of at most so many bytes, or one chunk.

    Buckets whose chunks have the same lengths share their ordering, so the indices of a large
    stage take no memory to speak of.
    """
    starts = [*accumulate(lengths, initial=0)]
    step = max(1, bucket_bytes // (CHUNK * torch.float32.itemsize))
    orderings: dict[tuple[int, ...], Ordering] = {}
    buckets = []
    for number, first in enumerate(range(0, len(lengths), step)):
        within = tuple(lengths[first : first + step])
        key = (first % num_cells, *within)
        if key not in orderings:
            orderings[key] = Ordering.of(within, first % num_cells, num_cells, rank, device)
        stop = starts[first + len(within)]
        buckets.append(Bucket(number, starts[first], stop, orderings[key]))
    return tuple(buckets)


def bounds(lengths: Sequence[int], bucket_bytes: int) -> tuple[tuple[int, int], ...]:
    """(first element, one past the last) of the buckets that :func:`cut` makes."""
    starts = [*accumulate(lengths, initial=0)]
    step = max(1, bucket_bytes // (CHUNK * torch.float32.itemsize))
    return tuple(pairwise([*starts[:-1:step], starts[-1]]))


def _unheard(_: int) -> None:
    """Nobody wants to know of complete buckets."""


def _add_up(into: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The left-to-right sum of the terms, in ``into``."""
    if len(terms) == 1:
        return into.copy_(terms[0])
    torch.add(terms[0], terms[1], out=into)
    for term in terms[2:]:
        into.add_(term)
    return into


def _rows(flat: torch.Tensor, length: int) -> torch.Tensor:
    """A view of a flat tensor, which may be empty, as rows of ``length``."""
    return flat.view(flat.numel() // length, length)


class _Turns(NamedTuple):
    """The partials of a table by turns: in turn k every member sends its k-th one."""

    own: tuple[torch.Tensor, ...]
    """This cell's, flat over the stage."""
    counts: tuple[int, ...]
    """Partials by rank."""
    terms: tuple[tuple[int, int, int], ...]
    """(lane, rank, turn) in the table's order."""

    @classmethod
    def of(
        cls,
        table: Sequence[Supply],
        members: Sequence[int],
        rank: int,
        partials: Mapping[Partial, torch.Tensor],
    ) -> _Turns:
        ranks = {member: place for place, member in enumerate(members)}
        counts = [0] * len(members)
        terms = []
        for supply in table:
            peer = ranks[supply.index]
            terms.append((supply.partial.lane, peer, counts[peer]))
            counts[peer] += 1
        own = tuple(partials[s.partial] for s in table if s.index == members[rank])
        return cls(own, tuple(counts), tuple(terms))

    def senders(self, turn: int) -> tuple[bool, ...]:
        """By rank: whether it sends something in that turn."""
        return tuple(turn < count for count in self.counts)


class Reducer:
    """Reduces the partials of one stage over its cells.

    Args:
        layout: the stage's flat layout.
        device: where gradients live.
        bucket_bytes: what is packed, exchanged and summed at a time; equal on all cells.
    """

    def __init__(
        self,
        layout: StageLayout,
        device: torch.device | str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._device, self._bucket_bytes = device, bucket_bytes
        self._lengths = [chunk.stop - chunk.start for chunk in layout.chunks()]
        self.bounds = bounds(self._lengths, bucket_bytes)
        """(first element, one past the last) of each bucket."""
        self._cut: dict[tuple[int, int], tuple[Bucket, ...]] = {}
        self._buffers: dict[tuple[str, int, int], torch.Tensor] = {}
        self._started: list[Exchange] = []
        self._placed: Callable[[int], None] = _unheard
        self.reduced = layout.allocate(device=device)
        """Sum over all types of the step; valid after :meth:`reduce`."""

    def reduce(
        self,
        group: Group | None,
        table: Sequence[Supply],
        members: Sequence[int],
        index: int,
        partials: Mapping[Partial, torch.Tensor],
        meanwhile: Callable[[], None] | None = None,
        placed: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Return the canonical sum over all supplies of the table, on every cell.

        Args:
            group: the stage's cells; None when there is only this one.
            table: supplies in canonical order.
            members: the cells' member indices, in the group's order.
            index: this cell's member index.
            partials: buffers of this cell, flat over the stage.
            meanwhile: called once, as soon as the first bucket is on its way.
            placed: called with the first element of each bucket whose sum is complete.

        Raises:
            GroupEnded: the group ended before it completed; partials are as before.
        """
        rank = members.index(index)
        turns = _Turns.of(table, members, rank, partials)
        buckets = self._buckets(len(members), rank)
        self._placed = placed or _unheard
        if group is None:
            self._sum_alone(buckets, turns)
            if meanwhile is not None:
                meanwhile()
            return self.reduced
        try:
            self._reduce_together(group, buckets, turns, rank, meanwhile)
        finally:
            if self._started:
                # Of a group that has ended. What is lost on the way may still arrive: in memory
                # that nobody uses any more.
                group.abandon(self._started)
                self._started.clear()
                self._buffers.clear()
        return self.reduced

    def _sum_alone(self, buckets: Iterable[Bucket], turns: _Turns) -> None:
        for bucket in buckets:
            within = slice(bucket.start, bucket.stop)
            terms = [(lane, turns.own[turn][within]) for lane, _, turn in turns.terms]
            self._sum(terms, self.reduced[within])
            self._placed(bucket.start)

    def _reduce_together(
        self,
        group: Group,
        buckets: Sequence[Bucket],
        turns: _Turns,
        rank: int,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        """Take every bucket through scatter, sum, gather and placing, each a bucket behind."""
        scattered: dict[int, list[Exchange]] = {}
        gathered: dict[int, Exchange] = {}
        for number in range(len(buckets) + _IN_FLIGHT):
            if number < len(buckets):
                scattered[number] = self._scatter(group, buckets[number], turns, rank)
            if number == 0 and meanwhile is not None:
                meanwhile()
            summed, placed = number - 1, number - 2
            if 0 <= summed < len(buckets):
                for exchange in scattered.pop(summed):
                    self._finish(group, exchange)
                self._sum_own(buckets[summed], turns, rank)
                gathered[summed] = self._gather(group, buckets[summed], rank)
            if placed >= 0:
                self._finish(group, gathered.pop(placed))
                self._place(buckets[placed])
                self._placed(buckets[placed].start)

    def _scatter(self, group: Group, bucket: Bucket, turns: _Turns, rank: int) -> list[Exchange]:
        """Start to send every other cell its chunks of what this one supplies."""
        ordering, own = bucket.ordering, bucket.ordering.sizes[rank]
        exchanges = []
        for turn in range(max(turns.counts, default=0)):
            senders = turns.senders(turn)
            packed = self._buffer("packed", bucket, turn, bucket.stop - bucket.start)
            if senders[rank]:
                bucket.pack(turns.own[turn], own, bucket.stop - bucket.start, packed[own:])
            received_sizes = [own * sends for sends in senders]
            sent_sizes = [size * senders[rank] for size in ordering.sizes]
            sent_sizes[rank] = received_sizes[rank] = 0
            sent = packed[own : own + sum(sent_sizes)]
            received = self._buffer("received", bucket, turn, sum(received_sizes))
            exchanges.append(self._start(group, received, sent, received_sizes, sent_sizes))
        return exchanges

    def _sum_own(self, bucket: Bucket, turns: _Turns, rank: int) -> None:
        """Ordered sum of this cell's chunks of a bucket, in the first part of its "parts"."""
        own = bucket.ordering.sizes[rank]
        parts = self._buffer("parts", bucket, 0, bucket.stop - bucket.start)
        terms: list[tuple[int, torch.Tensor]] = []
        for lane, peer, turn in turns.terms:
            if peer == rank:  # not packed before now, so that it is in a cache
                term = self._buffer("packed", bucket, turn, own) if terms else parts[:own]
                bucket.pack(turns.own[turn], 0, own, term)
            else:
                senders = turns.senders(turn)
                before = sum(senders[other] for other in range(peer) if other != rank)
                received = self._buffer("received", bucket, turn, (before + 1) * own)
                term = received[before * own :]
            terms.append((lane, term))
        self._sum(terms, parts[:own])

    def _sum(self, terms: Iterable[tuple[int, torch.Tensor]], into: torch.Tensor) -> None:
        """Ordered sum of (lane, term), terms of a lane side by side.

        The first term is taken as it is, since 0 + x may change a sign of zero.
        """
        for number, (_, of_lane) in enumerate(groupby(terms, key=itemgetter(0))):
            run = [term for _, term in of_lane]
            if number == 0:
                _add_up(into, run)
            elif len(run) == 1:
                into.add_(run[0])
            else:
                into.add_(_add_up(self._lane(into.numel()), run))

    def _gather(self, group: Group, bucket: Bucket, rank: int) -> Exchange:
        """Start to send all others this cell's sum, and to receive theirs."""
        sizes = [*bucket.ordering.sizes]
        own, sizes[rank] = sizes[rank], 0
        parts = self._buffer("parts", bucket, 0, bucket.stop - bucket.start)
        sent = self._buffer("sums", bucket, 0, own * (len(sizes) - 1))
        sent.view(len(sizes) - 1, own).copy_(parts[:own])
        sent_sizes = [own * (peer != rank) for peer in range(len(sizes))]
        return self._start(group, parts[own:], sent, sizes, sent_sizes)

    def _place(self, bucket: Bucket) -> None:
        """Put what was gathered where it belongs."""
        granule = bucket.ordering.granule
        parts = self._buffer("parts", bucket, 0, bucket.stop - bucket.start)
        torch.index_select(
            _rows(parts, granule),
            0,
            bucket.ordering.home,
            out=_rows(self.reduced[bucket.start : bucket.stop], granule),
        )

    def _start(
        self,
        group: Group,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Exchange:
        exchange = group.start_exchange(received, sent, received_sizes, sent_sizes)
        self._started.append(exchange)
        return exchange

    def _finish(self, group: Group, exchange: Exchange) -> None:
        group.finish_exchange(exchange)
        self._started.remove(exchange)

    def _buckets(self, num_cells: int, rank: int) -> tuple[Bucket, ...]:
        if (num_cells, rank) not in self._cut:
            buckets = cut(self._lengths, self._bucket_bytes, num_cells, rank, self._device)
            self._cut = {(num_cells, rank): buckets}  # memberships that are gone seldom come back
        return self._cut[num_cells, rank]

    def _lane(self, numel: int) -> torch.Tensor:
        return self._scratch(("lane", 0, 0), numel)

    def _buffer(self, name: str, bucket: Bucket, turn: int, numel: int) -> torch.Tensor:
        """Scratch of a bucket's set, at least ``numel`` elements; the same at every call."""
        return self._scratch((name, bucket.slot, turn), numel)

    def _scratch(self, key: tuple[str, int, int], numel: int) -> torch.Tensor:
        kept = self._buffers.get(key)
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=torch.float32, device=self._device)
            self._buffers[key] = kept
        return kept[:numel]
