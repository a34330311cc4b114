"""Makes a position's state anew: each unit's newest copy, then the optimizer for each step since.

Nothing is computed but the optimizer, and only by who lost the state (MoEvement, section 3.3, with
logged gradients in the place of replayed micro-batches). Each step applies the units whose state is
there already. What the votes of a step said of the gradient and of the masters must come out again,
of each of these units, and of the whole once all are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mainstay_core.rank.events import LoadFailed, StateLoaded
from mainstay_core.rank.forks.histories import boosts_of
from mainstay_core.rank.replays.replaying import Replay, can_go_on, points_to_apply
from mainstay_core.wire.segments import SegmentKind
from mainstay_core.wire.votes import CommitRecord
from mainstay_train.compute.engine import Engine
from mainstay_train.snapshots.good_copies import GoodCopies, Unusable
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.snapshots.unit_checks import WRONG_APPLY, UnitChecks, name_some
from mainstay_train.snapshots.vote_checks import VoteChecks


class Replayer:
    """A replay of one position, by the trainer that lost its state or takes its place.

    If its quorum ends meanwhile, the next one's replay may go on where it was: what is in memory is
    right whatever was lost elsewhere. Copies that were read stay to blame until a step proves them.

    Args:
        engine: whose state is made.
        units: of this state.
        copies: reads segments.
        learning_rate: of a step.
        lineage: of the state.
        position: of the state.
        inner: inner rank of the position.
    """

    def __init__(
        self,
        engine: Engine,
        units: UnitBytes,
        copies: GoodCopies,
        learning_rate: Callable[[int], float],
        *,
        lineage: int,
        position: int,
        inner: int = 0,
    ) -> None:
        self._inner = inner
        self._engine, self.units, self.copies = engine, units, copies
        self._learning_rate = learning_rate
        self._place = lineage, position
        self._checks = VoteChecks(engine, copies, position)
        self._made: dict[int, int] = {}
        """Version at which each unit that was read is in memory."""
        self._before: CommitRecord | None = None
        """Of the newest step that was applied."""
        self._is_reading = False
        """Whether segments were missing when it ended, and not the proof that all is right."""

    def can_go_on(self, units: UnitBytes, lineage: int, replay: Replay) -> bool:
        """Return whether another quorum's replay can go on from here.

        Nothing else may have written the state meanwhile.
        """
        return (
            self._is_reading
            and not self.copies.differs
            and units is self.units
            and self._place == (lineage, replay.position)
            and can_go_on(replay, self._made)
        )

    def run(self, replay: Replay, told: UnitChecks) -> StateLoaded | LoadFailed:
        """Carry out a replay of this engine's position, from where this one was.

        Args:
            replay: of this position.
            told: compares its units.
        """
        checks, last = self._checks, replay.last
        records = {record.commit.step: record for record in replay.known}
        self._is_reading = True
        if not replay.records and last is not None and last.gradients:
            self._before = last  # of a commit whose votes are not known there is no entry to repeat
        try:
            for unit in replay.units:
                if unit.unit not in self._made:
                    why_wrong = partial(told.why_wrong, records.get(unit.state.version))
                    self.copies.read_unit(self.units, unit.state, unit.state_holders, why_wrong)
                    self._made[unit.unit] = unit.state.version
            with self._engine.checks.over_state():
                self._engine.state.refresh()
            first = min(self._made.values(), default=replay.version)
            for record in replay.records:
                if record.commit.step >= first:
                    made = self._apply(replay, record, told)
                    self._compare_made(made, record, records.get(record.commit.step + 1), told)
            self._is_reading = False
            masters = checks.digest_masters(self._before)
            if replay.next is not None:
                checks.compare_masters(replay.next, masters)
            checks.require_one()
        except Unusable as error:
            return LoadFailed(str(error))
        return StateLoaded(masters, replayed=tuple(checks.steps))

    def _apply(self, replay: Replay, record: CommitRecord, told: UnitChecks) -> list[int]:
        """Apply one step to the units whose state is of its version; return these."""
        step = record.commit.step
        active = [unit for unit in replay.units if self._made[unit.unit] == step]
        why_wrong = partial(told.why_wrong, record)
        for unit in active:
            key, holders = unit.gradients[step - unit.state.version]
            self.copies.read_unit(self.units, key, holders, why_wrong)
        self.copies.acquit(partial(told.prove, record))
        if len(active) == len(replay.units):
            self._checks.compare_masters(record, self._checks.digest_masters(self._before))
            self._checks.compare_gradient(record)
        names = [name for unit in active for name in self.units.parameters[unit.unit]]
        boosts = boosts_of(replay.history, step, self._inner)
        self._engine.apply_again(record.commit, self._learning_rate(step), names, boosts)
        made = [unit.unit for unit in active]
        self._made |= dict.fromkeys(made, step + 1)
        self._before = record
        return made

    def _compare_made(
        self,
        made: Sequence[int],
        record: CommitRecord,
        after: CommitRecord | None,
        told: UnitChecks,
    ) -> None:
        """Compare the masters of the units to which a step was applied with what votes told.

        Args:
            made: these units.
            record: of the step.
            after: of the next one, whose votes told what the masters were then.
            told: compares.

        Raises:
            Unusable: a unit differs. Its gradients are as votes told, and its masters were: what is
                wrong is the rest of the state that it started from, or how the step was applied.
        """
        differing = told.differing_masters(after, made)
        if differing:
            units, knows = {unit for unit, _ in differing}, told.is_known(record)
            blamed = self.copies.blame(
                lambda key: key.unit in units and (not knows or key.kind is SegmentKind.STATE),
                may_be_apply=points_to_apply(made, units),
            )
            whose = f"made of {blamed}" if blamed else WRONG_APPLY
            raise Unusable(f"replayed step {record.commit.step}: {name_some(differing)}; {whose}")
