"""Makes a lost state anew from units' copies and logged gradients, as terms.

As ``mainstay_train.snapshots.replayer``. A replay whose quorum has ended is gone on with, if the
next one may (:func:`mainstay_core.rank.replays.replaying.can_go_on`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mainstay_core.rank.forks.histories import boosts_of
from mainstay_core.rank.replays.replaying import Replay, can_go_on
from mainstay_core.sim import terms
from mainstay_core.sim.trainers.boundary_replayer import DiffersError
from mainstay_core.wire.reinitialisation import BlockOutline
from mainstay_core.wire.segments import Holder, SegmentKey
from mainstay_core.wire.votes import CommitRecord


class Segments(Protocol):
    """The segments that a replay reads in one quorum."""

    async def read(self, key: SegmentKey, holders: Sequence[Holder]) -> terms.UnitTerm:
        """Read a segment from the first holder whose copy is good."""

    async def applied(self) -> None:
        """A step is applied: a place at which things happen, and some time."""


class Replayer:
    """A replay of one position, over as many quorums as it takes.

    Args:
        lineage: of the state.
        position: of the state.
        blocks: of its stage.
        inner: inner rank of the position.
    """

    def __init__(
        self, lineage: int, position: int, blocks: Sequence[BlockOutline] = (), inner: int = 0
    ) -> None:
        self._place = lineage, position
        self._blocks, self._inner = blocks, inner
        self._units: dict[int, terms.UnitTerm] = {}
        self._made: dict[int, int] = {}
        """Version at which each unit is in memory."""

    @property
    def has_begun(self) -> bool:
        """Whether something is in memory."""
        return bool(self._made)

    def can_go_on(self, lineage: int, replay: Replay) -> bool:
        """Return whether another quorum's replay can go on from here."""
        return self._place == (lineage, replay.position) and can_go_on(replay, self._made)

    async def run(self, replay: Replay, segments: Segments) -> str:
        """Carry out a replay from where this one was; return the state.

        Raises:
            UnusableError: no copy of a segment is good, or the quorum has ended.
            DiffersError: something comes out differently than votes told.
        """
        for unit in replay.units:
            if unit.unit not in self._made:
                self._units[unit.unit] = await segments.read(unit.state, unit.state_holders)
                self._made[unit.unit] = unit.state.version
        first = min(self._made.values(), default=replay.version)
        for record in replay.records:
            if record.commit.step >= first:
                await self._apply(replay, record, segments)
        return self._whole()

    def _whole(self) -> str:
        return terms.whole_of([self._units[n] for n in sorted(self._units)])

    async def _apply(self, replay: Replay, record: CommitRecord, segments: Segments) -> None:
        """Apply one step to the units whose state is of its version."""
        step = record.commit.step
        active = [unit for unit in replay.units if self._made[unit.unit] == step]
        gradients = {
            unit.unit: await segments.read(*unit.gradients[step - unit.state.version])
            for unit in active
        }
        if len(active) == len(replay.units) and record.states:
            reduced = terms.whole_of([gradients[n] for n in sorted(gradients)])
            told = record.states[replay.position], record.gradients[replay.position]
            if (self._whole(), terms.gradient_digest(reduced)) != told:
                raise DiffersError(f"replayed step {step} comes out differently than it was told")
        boosts = terms.boosts_in(self._blocks, boosts_of(replay.history, step, self._inner))
        for unit, gradient in gradients.items():
            scale = record.commit.scale
            self._units[unit] = terms.unit_applied(self._units[unit], gradient, scale, boosts)
            self._made[unit] = step + 1
        await segments.applied()
