"""Makes a position's state anew: each unit's newest copy, then the optimizer for each step since.

Nothing is computed but the optimizer, and only by who lost the state (MoEvement, section 3.3, with
logged gradients in the place of replayed micro-batches). Each step applies the units whose state is
there already. What the votes of a step said of the gradient and of the masters must come out again.
"""

from __future__ import annotations

from collections.abc import Callable

from mainstay_core.rank.events import LoadFailed, StateLoaded
from mainstay_core.rank.replaying import Replay
from mainstay_core.wire.votes import CommitRecord
from mainstay_train.compute.engine import Engine
from mainstay_train.snapshots.good_copies import GoodCopies, Unusable
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.snapshots.vote_checks import VoteChecks


class Replayer:
    """A replay of one position, by the trainer that lost its state or takes its place.

    Args:
        engine: whose state is made.
        units: of this state.
        copies: reads segments.
        learning_rate: of a step.
    """

    def __init__(
        self,
        engine: Engine,
        units: UnitBytes,
        copies: GoodCopies,
        learning_rate: Callable[[int], float],
    ) -> None:
        self._engine, self._units, self._copies = engine, units, copies
        self._learning_rate = learning_rate

    def run(self, replay: Replay) -> StateLoaded | LoadFailed:
        """Carry out a replay of this engine's position."""
        checks = VoteChecks(self._engine, self._copies, replay.position)
        last = replay.last
        # Of a commit whose votes are not known there is no entry to repeat.
        before = last if not replay.records and last is not None and last.gradients else None
        try:
            for unit in replay.units:
                self._copies.read_unit(self._units, unit.state, unit.state_holders)
            self._engine.state.refresh()
            for record in replay.records:
                self._apply(replay, record, checks, before)
                before = record
            masters = checks.digest_masters(before)
            if replay.next is not None:
                checks.compare_masters(replay.next, masters)
            checks.require_one()
        except Unusable as error:
            return LoadFailed(str(error))
        return StateLoaded(masters, replayed=tuple(checks.steps))

    def _apply(
        self,
        replay: Replay,
        record: CommitRecord,
        checks: VoteChecks,
        before: CommitRecord | None,
    ) -> None:
        """Apply one step to the units whose state is of its version.

        Args:
            replay: at hand.
            record: of the step.
            checks: of the whole, once all units are there.
            before: record of the step before; None if that was not applied here.
        """
        step = record.commit.step
        active = [unit for unit in replay.units if unit.state.version <= step]
        for unit in active:
            key, holders = unit.gradients[step - unit.state.version]
            self._copies.read_unit(self._units, key, holders)
        if len(active) == len(replay.units):
            checks.compare_masters(record, checks.digest_masters(before))
            checks.compare_gradient(record)
        names = [name for unit in active for name in self._units.parameters[unit.unit]]
        self._engine.apply_again(record.commit, self._learning_rate(step), names)
