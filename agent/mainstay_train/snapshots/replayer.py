"""Makes a position's state anew: each unit's newest copy, then the optimizer for each step since.

Nothing is computed but the optimizer, and only by who lost the state (MoEvement, section 3.3, with
logged gradients in the place of replayed micro-batches). Each step applies the units whose state is
there already. What the votes of a step said of the gradient and of the masters must come out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mainstay_core.rank.events import LoadFailed, ReplayedStep, StateLoaded
from mainstay_core.rank.replaying import Replay
from mainstay_core.wire.votes import CommitRecord
from mainstay_train.compute.engine import Engine
from mainstay_train.snapshots.good_copies import GoodCopies, Unusable
from mainstay_train.snapshots.unit_bytes import UnitBytes


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
        self._num_checks = 0
        """Steps at which the whole was compared with what votes told."""
        self._steps: list[ReplayedStep] = []
        self._before: tuple[CommitRecord, str] | None = None
        """The step before the one at hand, and the digest of its gradient."""

    def run(self, replay: Replay) -> StateLoaded | LoadFailed:
        """Carry out a replay of this engine's position."""
        try:
            for unit in replay.units:
                self._copies.read_unit(self._units, unit.state, unit.state_holders)
            self._engine.state.refresh()
            if not replay.records:
                self._note_step(replay, replay.last)
            for record in replay.records:
                self._apply(replay, record)
            masters = self._digest_masters()
            if replay.next is not None:
                self._compare(
                    replay.next, {"masters": (masters, replay.next.states[replay.position])}
                )
            if not self._num_checks:
                raise Unusable("no vote has told what the state must be: nothing can be compared")
        except Unusable as error:
            return LoadFailed(str(error))
        return StateLoaded(masters, replayed=tuple(self._steps))

    def _apply(self, replay: Replay, record: CommitRecord) -> None:
        """Apply one step to the units whose state is of its version."""
        step = record.commit.step
        active = [unit for unit in replay.units if unit.state.version <= step]
        for unit in active:
            key, holders = unit.gradients[step - unit.state.version]
            self._copies.read_unit(self._units, key, holders)
        gradient = self._check(replay, record) if len(active) == len(replay.units) else ""
        names = [name for unit in active for name in self._units.parameters[unit.unit]]
        self._engine.apply_again(record.commit, self._learning_rate(step), names)
        self._note_step(replay, record, gradient)

    def _check(self, replay: Replay, record: CommitRecord) -> str:
        """Compare the whole with what the votes said.

        Returns:
            The digest of the reduced gradient.

        Raises:
            Unusable: they differ, though each segment is as it was written.
        """
        masters, gradient = self._digest_masters(), self._engine.gradient_digest()
        self._compare(
            record,
            {
                "masters": (masters, record.states[replay.position]),
                "reduced gradient": (gradient, record.gradients[replay.position]),
            },
        )
        return gradient

    def _compare(self, record: CommitRecord, digests: Mapping[str, tuple[str, str]]) -> None:
        """Compare digests with those that the votes on a step told.

        Args:
            record: of the step.
            digests: found and told, by what they are of.

        Raises:
            Unusable: they differ, though each segment is as it was written.
        """
        for what, (found, told) in digests.items():
            if found != told:
                self._copies.blame()
                raise Unusable(
                    f"replayed step {record.commit.step}: the {what} have digest {found}, its "
                    f"votes told {told}"
                )
        self._num_checks += 1

    def _note_step(self, replay: Replay, record: CommitRecord | None, gradient: str = "") -> None:
        """Take note of the step after which the masters are as they are now.

        Args:
            replay: at hand.
            record: of the step.
            gradient: digest of the whole gradient; empty if only a part of it was there.
        """
        if record is not None and record.gradients:
            gradient = record.gradients[replay.position]
        self._before = (record, gradient) if record is not None and gradient else None

    def _digest_masters(self) -> str:
        """Return the digest of the whole masters; the step before has its entry of the ledger."""
        masters = self._engine.state.masters_digest().whole.hex()
        if self._before is not None:
            record, gradient = self._before
            counted = self._engine.counted_masters(masters)
            self._steps.append(ReplayedStep(record.commit, gradient, counted))
            self._before = None
        return masters
