"""A simulated trainer that computes a lost stage's steps again, from boundary logs.

The program of a step runs as ever (:mod:`mainstay_core.sim.compute`). Where a group would carry
what crosses a boundary, :class:`LogGroup` reads it from stores, and writes it for others. What the
inner ranks of a cell exchange goes over the cell's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mainstay_core.planning.program import Action
from mainstay_core.rank.forks.histories import boosts_of
from mainstay_core.rank.replays.boundaries import (
    BoundaryReplay,
    BoundaryStep,
    UnitLoad,
    logged_again,
)
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.sim import terms
from mainstay_core.sim.compute import BACKWARD, FORWARD, Compute
from mainstay_core.sim.engine import Awaited, Steps
from mainstay_core.sim.groups import Group
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import Holder, SegmentKey, SegmentKind, boundary_key

Tag = int | tuple[object, ...]
"""Of what crosses a boundary, or of what inner ranks of a cell exchange."""


class UnusableError(Exception):
    """No good copy of a segment is left, the quorum has ended, or what comes out is another."""


class DiffersError(UnusableError):
    """A replay comes out differently than votes told."""


class Segments(Protocol):
    """The keeper of a trainer's segments, as far as a replay needs it."""

    async def read(self, key: SegmentKey, holders: Sequence[Holder]) -> terms.UnitTerm:
        """Read a segment from the first holder whose copy is good.

        Raises:
            UnusableError: no copy is good, or the quorum has ended.
        """

    async def read_new(self, key: SegmentKey, holder: Holder) -> terms.UnitTerm:
        """Read what a holder gets in this quorum; wait until it has it.

        Raises:
            UnusableError: it is not good, or the quorum has ended.
        """

    def write(self, key: SegmentKey, content: str) -> None:
        """Write what a replayed stage sends into the own store."""

    async def hook(self, action: Action) -> None:
        """A place before an action of the program."""

    async def point(self, name: str) -> None:
        """A place after an action of a replay."""


class LogGroup:
    """The logs that connect a replayed stage to those beside it, in the place of a group.

    Args:
        replay: that runs.
        step: of it.
        own_types: shard types whose messages this member logs again.
        micro_batches: of each type.
        segments: reads and writes.
        cell: its inner ranks; None where there is one.
    """

    def __init__(
        self,
        replay: BoundaryReplay,
        step: BoundaryStep,
        own_types: Sequence[int],
        micro_batches: int,
        segments: Segments,
        cell: Group | None,
    ) -> None:
        self._replay, self._step, self._own_types = replay, step.record.commit.step, own_types
        self._lineage, self._micro_batches = step.record.lineage, micro_batches
        self._segments, self._cell = segments, cell
        self._inputs = dict(step.inputs)
        self._relays = {(relay.position, relay.kind): relay for relay in replay.relays}

    def receive(self, peer: int, tag: Tag) -> Steps[str]:
        """Read what a neighbour sent with a tag, or take what another inner rank sends."""
        if isinstance(tag, int):
            return (yield from self._read(self._key(peer, tag)).__await__())
        assert self._cell is not None
        content: str = yield from self._cell.receive(peer % self._cell.size, tag)
        return content

    async def _read(self, key: SegmentKey) -> str:
        relay = self._relays.get((key.position, key.kind))
        if relay is None:
            _, content = await self._segments.read(key, self._inputs.get(key, ()))
        else:
            _, content = await self._segments.read_new(key, relay.holders[key.shard_type])
        await self._segments.point("flow-read")
        return content

    def send(self, content: str, peer: int, tag: Tag) -> None:
        """Log what this stage sends, if it is of a type of this member; inner ranks get it."""
        if not isinstance(tag, int):
            assert self._cell is not None
            self._cell.send(content, peer % self._cell.size, tag)
            return
        key = self._key(self._replay.position, tag)
        if key.shard_type in self._own_types:
            self._segments.write(key, content)

    def finish(self, peer: int, tag: int) -> Steps[None]:
        """Wait for nothing: who reads it asks the store."""
        del peer, tag
        yield from self._segments.point("flow-written").__await__()

    def _key(self, sender: int, tag: int) -> SegmentKey:
        assert tag % 2 in (FORWARD, BACKWARD)
        forward = tag % 2 == FORWARD
        shard_type, micro_batch = divmod(tag // 2, self._micro_batches)
        kind = SegmentKind.ACTIVATION if forward else SegmentKind.INPUT_GRADIENT
        return boundary_key(self._lineage, sender, kind, self._step, shard_type, micro_batch)


class BoundaryReplayer:
    """One replay of a position.

    Args:
        plan: that is adopted.
        index: of the member.
        replay: what is read and computed.
        segments: reads and writes.
        shards_per_lane: types of a lane.
        micro_batches: of each type.
        cell: the inner ranks of this member's cell; None where there is one.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        replay: BoundaryReplay,
        segments: Segments,
        shards_per_lane: int,
        micro_batches: int,
        cell: Group | None,
    ) -> None:
        self._replay, self._segments, self._cell = replay, segments, cell
        self._width = plan.ranks_per_stage
        self._num_stages, self._num_types = plan.num_stages, len(plan.suppliers)
        self._shards_per_lane, self._micro_batches = shards_per_lane, micro_batches
        self.own_types = logged_again(plan, index)
        self._units: dict[int, terms.UnitTerm] = {}

    async def run(self) -> str:
        """Return the state at the replay's version.

        Raises:
            UnusableError: what is read is not good, or what comes out is not what was told.
            GroupEnded: another inner rank of the cell is gone, or has given up.
        """
        for step in self._replay.steps:
            await self._load(step.loads)
            params = self._params()
            reduced = await self._compute(step, params)
            self._compare(step, params, reduced)
            for unit in self.active(step):
                gradient = terms.unit_of(unit, reduced)
                scale = self.scale(step)
                boosts = self._boosts(step)
                self._units[unit] = terms.unit_applied(self._units[unit], gradient, scale, boosts)
            await self._segments.point("step-replayed")
        await self._load(self._replay.loads)
        return terms.whole_of([self._units[unit] for unit in sorted(self._units)])

    async def _load(self, loads: Sequence[UnitLoad]) -> None:
        for load in loads:
            self._units[load.key.unit] = await self._segments.read(load.key, load.holders)
            await self._segments.point("unit-loaded")

    def _params(self) -> str:
        """Return the parameters with which the stage computes."""
        copies = [self._units[unit] for unit in sorted(self._units)]
        return terms.whole_of([terms.computed_with(copy) for copy in copies])

    async def _compute(self, step: BoundaryStep, params: str) -> str:
        """Return the sum of all types' gradients, in canonical order."""
        segments = self._segments
        cell = Compute(
            self._replay.position,
            self._num_stages,
            self._width,
            self._shards_per_lane,
            self._micro_batches,
            lambda action: segments.hook(action).__await__(),
        )
        cell.params = params
        group = LogGroup(
            self._replay, step, self.own_types, self._micro_batches, segments, self._cell
        )
        types = range(self._num_types)
        await Awaited(cell.run(types, step.record.commit.step, group, None, is_again=True))
        table = tuple(Supply(partial=partial, index=0) for partial in cell.held())
        await Awaited(cell.reduce(None, table, (0,), 0, _nothing))
        assert cell.reduced is not None
        return cell.reduced

    def active(self, step: BoundaryStep) -> list[int]:
        """Return the units that a step is applied to: those in full."""
        return [unit for unit in sorted(self._units) if unit not in step.frozen]

    def scale(self, step: BoundaryStep) -> float:
        """Return the scale of a step: the commit's, as the norm is of all stages."""
        return step.record.commit.scale

    def _boosts(self, step: BoundaryStep) -> terms.Boosts:
        stage, inner = divmod(self._replay.position, self._width)
        blocks = terms.blocks_of(stage, self._num_stages)
        at = step.record.commit.step
        return terms.boosts_in(blocks, boosts_of(self._replay.history, at, inner))

    def _compare(self, step: BoundaryStep, params: str, reduced: str) -> None:
        if step.frozen:
            return
        record, position = step.record, self._replay.position
        told = record.states[position], record.gradients[position]
        if (params, terms.gradient_digest(reduced)) != told:
            at = record.commit.step
            raise DiffersError(f"replayed step {at} comes out differently than it was told")


def _nothing() -> Steps[None]:
    yield from ()
