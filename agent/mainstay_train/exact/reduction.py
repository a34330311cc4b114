"""The canonical reduction: bits that depend on shard types alone (design rule 3).

Reduce-scatter (an all-to-all and an ordered local sum of a cell's share), then a
gather: the bytes of a ring with one partial per rank, (p+1)/2 of it with p. The
order of summation is the table's: types in ascending order inside a lane, lanes
in ascending order, in fp32, whoever sent them.

The stage's chunks go in buckets of a set size, each by a fixed number of tensor
operations. While one bucket is summed, the next is on its way to its owners and the
one before on its way back; all cells start the exchanges in one order.

Partials are only read (protocol section 2, rule A): received bytes go to
scratch, sums into one separate buffer, so an interrupted reduction leaves
partials as they were. What is lost on the way may be written much later: an
interrupted reduction's buffers are never used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch

from mainstay_core.job.config import BUCKET_BYTES
from mainstay_core.job.sizes.reduction_sizes import IN_FLIGHT, keeps_own
from mainstay_core.planning.partials import grow
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.plan import Partial
from mainstay_train.comm.group import Group
from mainstay_train.comm.operations import Exchange
from mainstay_train.exact.buckets import Bucket, bounds, cut
from mainstay_train.exact.layout import StageLayout
from mainstay_train.exact.wire_sums import WireSums

PIECE_ELEMENTS = 1 << 16
"""Elements of a sum of types that a CPU adds at a time: they stay in a cache, with the copies that
checks make of them."""


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

    def join_run(self, shard_type: int, within: slice) -> None:
        """Add the run that a type extends to a finished piece of the type, in scratch.

        The run itself stays as it is: the type may still fail to become complete.
        """
        run = self._run(grow(self.partials, shard_type, self._shards_per_lane))
        if run is not None:
            for earlier, scratch in self._pieces(self.partials[run][within], self.scratch[within]):
                torch.add(earlier, scratch, out=scratch)

    def complete(self, shard_type: int, *, joined: bool = False) -> Partial:
        """Move the finished type from scratch into its partial; returns that partial.

        Args:
            shard_type: it is whole in scratch.
            joined: whether :meth:`join_run` has seen all of it.
        """
        grown = grow(self.partials, shard_type, self._shards_per_lane)
        run = self._run(grown)
        if run is not None and not joined:
            buffer = self.partials.pop(run)
            # Not atomic, but nobody else reads it: nothing of it is being sent.
            for earlier, scratch in self._pieces(buffer, self.scratch):
                earlier.add_(scratch)
            self.partials[grown] = buffer
        else:
            if run is not None:
                self.drop(run)
            self.partials[grown] = self.scratch
            self.scratch = self._take()
            self.scratch_views = self._layout.views(self.scratch)
        return grown

    def _pieces(
        self, first: torch.Tensor, second: torch.Tensor
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return what is added at a time of two flat tensors."""
        size = PIECE_ELEMENTS if first.is_cpu else max(1, first.numel())
        starts = range(0, first.numel(), size)
        return ((first[at : at + size], second[at : at + size]) for at in starts)

    @staticmethod
    def _run(grown: Partial) -> Partial | None:
        """The partial that a type extends when it grows into this one."""
        if grown.first == grown.last:
            return None
        return Partial(lane=grown.lane, first=grown.first, last=grown.last - 1)

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


Make = Callable[[torch.Tensor], None]
"""Writes a sum into a tensor, whatever that held."""
SumNow = Callable[[torch.Tensor, Make], Callable[[], None]]
"""Has a sum written into a tensor, and returns what is called once it is on its way to others."""


def _untouched(_: torch.Tensor) -> None:
    """What comes stays as it is."""


def _unheard(_: int) -> None:
    """Nobody wants to know of complete buckets."""


def _sum_once(into: torch.Tensor, make: Make) -> Callable[[], None]:
    """Have a sum written; nothing is to be done when it is on its way."""
    make(into)
    return _nothing


def _wait(group: Group, exchange: Exchange) -> None:
    """Wait for an exchange, and do nothing else."""
    group.finish_exchange(exchange)


def _nothing() -> None:
    """Nothing is to be done."""


def _add_up(into: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The left-to-right sum of the terms, in ``into``."""
    if len(terms) == 1:
        return into.copy_(terms[0])
    torch.add(terms[0], terms[1], out=into)
    for term in terms[2:]:
        into.add_(term)
    return into


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
        compares_wire: whether senders state digests of what they send; equal on all cells.
    """

    def __init__(
        self,
        layout: StageLayout,
        device: torch.device | str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
        *,
        compares_wire: bool = False,
    ) -> None:
        self._device, self._bucket_bytes = device, bucket_bytes
        self._layout = layout
        self._lengths = [chunk.stop - chunk.start for chunk in layout.chunks()]
        self.bounds = bounds(self._lengths, bucket_bytes)
        """(first element, one past the last) of each bucket."""
        self._cut: tuple[int, tuple[Bucket, ...]] = (0, ())
        """The buckets of the newest number of cells."""
        self._buffers: dict[tuple[str, int, int], torch.Tensor] = {}
        self._started: list[Exchange] = []
        self._placed: Callable[[int], None] = _unheard
        self._within: AbstractContextManager[object] = nullcontext()
        self._wire = WireSums(device) if compares_wire else None
        self._arrived: Callable[[torch.Tensor], None] = _untouched
        self._sum_now: SumNow = _sum_once
        self._wait: Callable[[Group, Exchange], None] = _wait
        self.differing: tuple[torch.Tensor, ...] = ()
        """Of the last reduction one tensor, [cells], int64: in how many turns what came from a cell
        is not what it says it sent. Empty if nobody compared."""
        self.reduced = layout.allocate(device=device)
        """Sum over all types of the step; valid after :meth:`reduce`."""

    def compare_wire(self, *, compares_wire: bool) -> None:
        """Say whether senders state digests of what they send from now on; equal on all cells."""
        if compares_wire != (self._wire is not None):
            self._wire = WireSums(self._device) if compares_wire else None

    def reduce(
        self,
        group: Group | None,
        table: Sequence[Supply],
        members: Sequence[int],
        index: int,
        partials: Mapping[Partial, torch.Tensor],
        meanwhile: Callable[[], None] | None = None,
        await_piece: Callable[[int], None] | None = None,
        placed: Callable[[int], None] | None = None,
        within: AbstractContextManager[object] | None = None,
        arrived: Callable[[torch.Tensor], None] | None = None,
        sum_now: SumNow | None = None,
        wait: Callable[[Group, Exchange], None] | None = None,
    ) -> torch.Tensor:
        """Return the canonical sum over all supplies of the table, on every cell.

        Args:
            group: the stage's cells; None when there is only this one.
            table: supplies in canonical order.
            members: the cells' member indices, in the group's order.
            index: this cell's member index.
            partials: buffers of this cell, flat over the stage.
            meanwhile: called once, as soon as the first bucket is on its way.
            await_piece: called before something is sent, with the first element of it: returns
                once the partials are there from this element on.
            placed: called with the first element of each bucket whose sum is complete.
            within: entered for all that is computed, never for an exchange.
            arrived: called with all that comes from others, before it is looked at.
            sum_now: called for each sum that others get; what it returns is called while the sum is
                on its way.
            wait: waits for an exchange in the group's place.

        Raises:
            GroupEnded: the group ended before it completed; partials are as before.
        """
        self._within, self._arrived = within or nullcontext(), arrived or _untouched
        self._sum_now, self._wait = sum_now or _sum_once, wait or _wait
        self.differing = ()
        rank = members.index(index)
        turns = _Turns.of(table, members, rank, partials)
        buckets = self._buckets(len(members))
        self._placed = placed or _unheard
        if group is None:
            self._sum_alone(buckets, turns)
            if meanwhile is not None:
                meanwhile()
            return self.reduced
        try:
            self._reduce_together(group, buckets, turns, rank, meanwhile, await_piece)
        finally:
            if self._started:
                # Of a group that has ended. What is lost on the way may still arrive: in memory
                # that nobody uses any more.
                group.abandon(self._started)
                self._started.clear()
                self._buffers.clear()
                self.reduced = self._layout.allocate(device=self._device)
        return self.reduced

    def _sum_alone(self, buckets: Iterable[Bucket], turns: _Turns) -> None:
        for bucket in buckets:
            terms = [(lane, turns.own[turn][bucket.within]) for lane, _, turn in turns.terms]
            with self._within:
                self._sum(terms, self.reduced[bucket.within])
                self._placed(bucket.start)

    def _reduce_together(
        self,
        group: Group,
        buckets: Sequence[Bucket],
        turns: _Turns,
        rank: int,
        meanwhile: Callable[[], None] | None,
        await_piece: Callable[[int], None] | None,
    ) -> None:
        """Take every bucket through scatter, sum and gather, each a bucket behind.

        The last bucket comes first, on all cells: a backward pass yields its gradients so.
        """
        order = buckets[::-1]
        if self._wire is not None:
            self._wire.begin(turns.counts)
        scattered: dict[int, list[Exchange]] = {}
        gathered: dict[int, Exchange] = {}
        for number in range(len(buckets) + IN_FLIGHT):
            if number < len(order):
                if await_piece is not None:
                    await_piece(order[number].start)
                scattered[number] = self._scatter(group, order[number], turns, rank)
            if number == 0 and meanwhile is not None:
                meanwhile()
            summed, over = number - 1, number - 2
            if 0 <= summed < len(order):
                for turn, exchange in enumerate(scattered.pop(summed)):
                    self._finish(group, exchange)
                    self._look_at(order[summed], turns, turn, rank)
                with self._within:
                    check = self._sum_own(order[summed], turns, rank)
                gathered[summed] = self._gather(group, order[summed], rank)
                check()  # what it reads stays until the next bucket but one is scattered
            if over >= 0:
                self._finish(group, gathered.pop(over))
                with self._within:
                    self._placed(order[over].start)
        if self._wire is not None:
            self._compare(group, self._wire)

    def _look_at(self, bucket: Bucket, turns: _Turns, turn: int, rank: int) -> None:
        """Take the digests of what came for a bucket in one turn."""
        comes = self._received_from(bucket, turns, turn, rank)
        sizes = [bucket.sizes[rank] * peer for peer in comes]
        received = self._buffer("received", bucket, turn, sum(sizes))
        self._arrived(received)
        if self._wire is not None:
            with self._within:
                self._wire.receive(bucket.number, turn, received, sizes, rank)

    def _compare(self, group: Group, wire: WireSums) -> None:
        """Exchange the digests of what was sent, and compare them with those of what came."""
        stated = wire.stated()
        theirs = torch.empty_like(stated)
        sizes = [wire.words] * (stated.numel() // wire.words)
        self._finish(group, self._start(group, theirs, stated, sizes, sizes))
        with self._within:
            self.differing = (wire.differing(theirs),)

    def _scatter(self, group: Group, bucket: Bucket, turns: _Turns, rank: int) -> list[Exchange]:
        """Start to send every cell its share of what this one supplies."""
        own, exchanges = bucket.sizes[rank], []
        for turn in range(max(turns.counts, default=0)):
            sends = turns.senders(turn)[rank]
            sent = turns.own[turn][bucket.exchanged(rank)] if sends else self.reduced[:0]
            received_sizes = [own * peer for peer in self._received_from(bucket, turns, turn, rank)]
            received = self._buffer("received", bucket, turn, sum(received_sizes))
            sent_sizes = [size * sends for size in bucket.exchanged_sizes(rank)]
            exchanges.append(self._start(group, received, sent, received_sizes, sent_sizes))
            if self._wire is not None:
                with self._within:
                    self._wire.send(bucket.number, turn, sent, sent_sizes)
        return exchanges

    @staticmethod
    def _received_from(bucket: Bucket, turns: _Turns, turn: int, rank: int) -> list[bool]:
        """By rank: whether a share comes from it: not from this cell where its own stays."""
        keeps = keeps_own(rank, len(bucket.sizes))
        senders = turns.senders(turn)
        return [sends and not (keeps and peer == rank) for peer, sends in enumerate(senders)]

    def _sum_own(self, bucket: Bucket, turns: _Turns, rank: int) -> Callable[[], None]:
        """Ordered sum of this cell's share of a bucket, where it belongs.

        Returns:
            What is to be called when it is on its way to the other cells.
        """
        own, share = bucket.sizes[rank], bucket.share(rank)
        keeps = keeps_own(rank, len(bucket.sizes))
        comes = [
            self._received_from(bucket, turns, turn, rank)
            for turn in range(max(turns.counts, default=0))
        ]
        terms: list[tuple[int, torch.Tensor]] = []
        for lane, peer, turn in turns.terms:
            if keeps and peer == rank:
                terms.append((lane, turns.own[turn][share]))
                continue
            before = sum(comes[turn][:peer])
            received = self._buffer("received", bucket, turn, (before + 1) * own)
            terms.append((lane, received[before * own :]))
        return self._sum_now(self.reduced[share], lambda into: self._sum(terms, into))

    def _sum(self, terms: Iterable[tuple[int, torch.Tensor]], into: torch.Tensor) -> None:
        """Ordered sum of (lane, term), terms of a lane side by side.

        The first term is taken as it is, since 0 + x may change a sign of zero.
        """
        runs = [[term for _, term in run] for _, run in groupby(terms, key=itemgetter(0))]
        if len(runs) > 1 and len(runs[1]) == 1:
            # The next lane's only term goes on from the sum: two terms are added in one pass, and
            # the first one is not copied before.
            runs[:2] = [runs[0] + runs[1]]
        _add_up(into, runs[0])
        for run in runs[1:]:
            into.add_(run[0] if len(run) == 1 else _add_up(self._lane(into.numel()), run))

    def _gather(self, group: Group, bucket: Bucket, rank: int) -> Exchange:
        """Start to send all this cell's sum, and to receive theirs where they belong."""
        num_cells, own = len(bucket.sizes), bucket.sizes[rank]
        keeps = keeps_own(rank, num_cells)
        sent, copies = self.reduced[bucket.share(rank)], num_cells - keeps
        if copies != 1:  # to one other cell it is sent from where it belongs
            sums = self._buffer("sums", bucket, 0, own * copies)
            with self._within:
                sums.view(copies, own).copy_(sent)
            sent = sums
        received = self.reduced[bucket.exchanged(rank)]
        sent_sizes = [0 if keeps and cell == rank else own for cell in range(num_cells)]
        return self._start(group, received, sent, bucket.exchanged_sizes(rank), sent_sizes)

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
        self._wait(group, exchange)
        self._started.remove(exchange)

    def _buckets(self, num_cells: int) -> tuple[Bucket, ...]:
        if self._cut[0] != num_cells:
            self._cut = num_cells, cut(self._lengths, self._bucket_bytes, num_cells)
        return self._cut[1]

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
