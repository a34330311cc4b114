"""Makes a position's state anew by computing its steps again, from a window and boundary logs.

The lost stage loads the first instalment of a window and runs the step of that version again, with
what its neighbours sent then (MoEvement, arXiv 2412.15411, sections 3.3 and 3.4). Units whose full
state is not there yet are frozen: they run forward and pass gradients on with the compute weights
of that version, and skip their own. All shard types are computed here and added in canonical order;
scale, rate and statistics come from the step's commit. What the votes of each step said of the
gradient and of the masters must come out again: of each unit that is not frozen, and of the whole
as soon as none is.

The inner ranks of a cell replay in step, over the cell's own group. Whoever gives up ends that
group, so that nobody waits for it there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch

from mainstay_core.planning.program import Action, Op
from mainstay_core.rank.events import LoadFailed, StateLoaded
from mainstay_core.rank.forks.histories import boosts_of
from mainstay_core.rank.replays.boundaries import (
    BoundaryReplay,
    BoundaryStep,
    Relay,
    UnitLoad,
    logged_again,
)
from mainstay_core.rank.replays.replaying import points_to_apply
from mainstay_core.wire.segments import Holders, SegmentKey, SegmentKind, boundary_key
from mainstay_core.wire.votes import CommitRecord
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.compute.engine import Engine
from mainstay_train.snapshots.good_copies import GoodCopies, Unusable
from mainstay_train.snapshots.inputs import Inputs, Wanted
from mainstay_train.snapshots.sent_log import SentLogs, flow_digest, kinds_of
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.snapshots.unit_checks import WRONG_APPLY, Differing, UnitChecks, name_some
from mainstay_train.snapshots.vote_checks import VoteChecks
from mainstay_train.snapshots.writer import Place

logger = logging.getLogger(__name__)

READS = {Op.READ_F: SegmentKind.ACTIVATION, Op.READ_B: SegmentKind.INPUT_GRADIENT}
"""What each action that reads logs reads."""
WRONG_OTHERS = "what others have computed may be what is wrong"
"""Why no copy is to blame."""


class BoundaryReplayer:
    """A replay of one position, by a trainer that lost its state or takes its place.

    Args:
        engine: whose state is made.
        units: of this state.
        copies: reads segments.
        learning_rate: of a step.
        cell: groups over which the blocks compute; None where a cell has one rank.
    """

    def __init__(
        self,
        engine: Engine,
        units: UnitBytes,
        copies: GoodCopies,
        learning_rate: Callable[[int], float],
        cell: ChainGroups | None = None,
    ) -> None:
        self._engine, self._units, self._copies = engine, units, copies
        self._learning_rate, self._cell = learning_rate, cell

    def run(
        self, replay: BoundaryReplay, logs: SentLogs, place: Place, told: UnitChecks
    ) -> StateLoaded | LoadFailed:
        """Carry out a replay.

        Args:
            replay: of this engine's position.
            logs: keep again what this position sent.
            place: this trainer's, as the plan says.
            told: compares its units.

        Raises:
            GroupEnded: another rank of the cell is gone, or has given up.
        """
        checks = VoteChecks(self._engine, self._copies, replay.position)
        before: CommitRecord | None = None
        logs.begin_replay()
        inputs = Inputs(
            self._wanted(replay, place), self._engine.make_activation, self._copies.interrupt
        )

        def why_not() -> str:
            if inputs.closed:
                return "the replay is over"
            # Neighbours in the stretch wait for what could not be kept, and this one for them.
            return logs.problem if replay.relays else ""

        self._copies.give_up_if(why_not)
        if replay.relays:  # else an interrupt would end reads of a replay that can go on
            logs.on_problem = self._copies.interrupt
        inputs.start()
        try:
            records = {record.commit.step: record for record in replay.known}
            for step in replay.steps:
                self._load(step.loads, step.record, told)
                if not step.frozen:
                    checks.compare_masters(step.record, checks.digest_masters(before))
                self._compute(step, inputs, logs, place)
                self._compare_gradients(step, told)
                if not step.frozen:
                    checks.compare_gradient(step.record)
                self._apply(step, replay)
                self._compare_made(step, records.get(step.record.commit.step + 1), told)
                before = step.record
            self._load(replay.loads, replay.next, told)
            masters = checks.digest_masters(before)
            if replay.next is not None:
                checks.compare_masters(replay.next, masters)
            checks.require_one()
            self._settle_logs(replay, logs, place)
        except Unusable as error:
            return LoadFailed(str(error))
        finally:
            logs.on_problem = None
            inputs.close()
        return StateLoaded(masters, replayed=tuple(checks.steps))

    def _load(
        self, loads: Sequence[UnitLoad], record: CommitRecord | None, told: UnitChecks
    ) -> None:
        """Load what a step begins with. Compute weights come last: full states renew them all."""
        full = [load for load in loads if load.key.kind is SegmentKind.STATE]
        compute = [load for load in loads if load.key.kind is not SegmentKind.STATE]
        why_wrong = partial(told.why_wrong, record)
        for load in full:
            self._copies.read_unit(self._units, load.key, load.holders, why_wrong)
        if full:
            with self._engine.checks.over_state():
                self._engine.state.refresh()
        for load in compute:
            self._copies.read_unit(self._units, load.key, load.holders, why_wrong)
        self._copies.acquit(partial(told.prove, record))

    def _wanted(self, replay: BoundaryReplay, place: Place) -> Iterator[Wanted]:
        """Yield what neighbours sent, in the order in which it is needed."""
        engine, copies, nonce = self._engine, self._copies, place.plan.quorum.nonce
        relays = {relay.kind: relay for relay in replay.relays}
        reads = [action for action in engine.program_again() if action.op in READS]
        for step in replay.steps:
            holders = dict(step.inputs)
            for action in reads:
                key = _key_of(action, place, step.record.commit.step, engine)
                relay = relays.get(key.kind)

                def read(
                    tensor: torch.Tensor,
                    key: SegmentKey = key,
                    relay: Relay | None = relay,
                    holders: Mapping[SegmentKey, Holders] = holders,
                ) -> None:
                    memory = _memory_of(tensor)
                    if relay is None:
                        found = copies.holders_of(key, holders)
                        copies.read(key, found, memory, lambda: flow_digest(key, tensor))
                        return
                    holder = relay.holders[key.shard_type]
                    copies.read_awaited(
                        key, nonce, holder, memory, lambda: flow_digest(key, tensor)
                    )

                yield Wanted(key, read)

    def _compute(self, step: BoundaryStep, inputs: Inputs, logs: SentLogs, place: Place) -> None:
        """Compute a step again."""
        commit = step.record.commit
        again = _Again(self._engine, self._units, step, inputs, place)
        log = logs.of_step(place, commit.step, logged_again(place.plan, place.index))
        self._engine.compute_again(commit.step, again, log, self._cell)

    def _active(self, step: BoundaryStep) -> list[int]:
        """Return the units that have their full state."""
        frozen = frozenset(step.frozen)
        return [n for n in range(len(self._units.names)) if n not in frozen]

    def _compare_gradients(self, step: BoundaryStep, told: UnitChecks) -> None:
        """Compare the gradients of active units with what votes told of each.

        Raises:
            Unusable: one differs. The masters of these units are as votes told, so what is wrong is
                what was computed with beside them. Where nothing of that was read, all copies are
                to blame: if none were, the members would meet again for the same replay.
        """
        differing = told.differing_gradients(step.record, self._active(step))
        if differing:
            at, states = step.record.commit.step, SegmentKind.STATE
            blamed = self._copies.blame(lambda key: key.version == at and key.kind is not states)
            blamed = blamed or self._copies.blame()
            raise Unusable(_tell(step, differing, blamed))

    def _compare_made(
        self, step: BoundaryStep, after: CommitRecord | None, told: UnitChecks
    ) -> None:
        """Compare the masters of the units to which a step was applied with what votes told.

        Args:
            step: that was applied.
            after: record of the next one, whose votes told what the masters were then.
            told: compares.

        Raises:
            Unusable: a unit differs. If its gradient is known to be as votes told, and its masters
                were, what is wrong is the rest of the state that it started from, or how the step
                was applied.
        """
        differing = told.differing_masters(after, self._active(step))
        if differing and told.is_known(step.record):
            units, states = {unit for unit, _ in differing}, SegmentKind.STATE
            blamed = self._copies.blame(
                lambda key: key.unit in units and key.kind is states,
                is_certain=True,
                may_be_apply=points_to_apply(self._active(step), units),
            )
            raise Unusable(_tell(step, differing, blamed, WRONG_APPLY))
        if differing:
            raise Unusable(_tell(step, differing, self._copies.blame()))

    def _apply(self, step: BoundaryStep, replay: BoundaryReplay) -> None:
        """Apply a step to the units that have their full state."""
        commit, active = step.record.commit, self._active(step)
        names = [name for number in active for name in self._units.parameters[number]]
        boosts = boosts_of(replay.history, commit.step, self._engine.inner.index)
        self._engine.apply_again(commit, self._learning_rate(commit.step), names, boosts)

    def _settle_logs(self, replay: BoundaryReplay, logs: SentLogs, place: Place) -> None:
        """Have what was logged again count for the steps that it is of.

        Raises:
            Unusable: something that others of the stretch have read could not be kept.
        """
        engine, types = self._engine, logged_again(place.plan, place.index)
        kinds = kinds_of(engine.stage, engine.num_stages)
        for step in replay.steps:
            record = step.record
            at = record.commit.step
            why_not = logs.settle(
                place, at, record.certified_in, kinds, types, engine.micro_batches
            )
            if why_not and replay.relays:
                raise Unusable(why_not)
            if why_not:
                logger.warning("what was sent in step %d is not kept again: %s", at, why_not)
                return


class _Again:
    """The particulars of a step that is computed again (see the interpreter)."""

    def __init__(
        self,
        engine: Engine,
        units: UnitBytes,
        step: BoundaryStep,
        inputs: Inputs,
        place: Place,
    ) -> None:
        self._inputs, self._engine, self._place = inputs, engine, place
        self._step = step.record.commit.step
        blocks = engine.state.blocks
        # Not what is frozen here alone: all inner ranks run the same operations.
        skipped = {units.names[number] for number in step.skipped}
        self._skipped = [units.skippable(block, skipped) for block in range(len(blocks))]
        active = [n for n, block in enumerate(blocks) if not skipped.issuperset(block.units)]
        # What is below gets no gradient that anybody uses, where no stage comes before this one
        # (MoEvement, appendix E).
        self.lowest = 0 if engine.stage else min(active, default=len(blocks))
        """The lowest block through which the backward goes."""

    def skipped(self, block: int) -> Collection[str]:
        """Units of a block whose weight gradients are left out."""
        return self._skipped[block]

    def read(self, action: Action, into: torch.Tensor) -> None:
        """Read what a neighbour sent.

        Raises:
            Unusable: there is no good copy of it.
        """
        self._inputs.take(_key_of(action, self._place, self._step, self._engine), into)


def _tell(
    step: BoundaryStep, differing: Sequence[Differing], blamed: str, else_wrong: str = WRONG_OTHERS
) -> str:
    made_of = f"made of {blamed}" if blamed else else_wrong
    return f"replayed step {step.record.commit.step}: {name_some(differing)}; {made_of}"


def _key_of(action: Action, place: Place, step: int, engine: Engine) -> SegmentKey:
    """Return the key of what an action reads."""
    kind, distance = READS[action.op], engine.inner.size
    sender = place.position + (distance if action.op is Op.READ_B else -distance)
    return boundary_key(place.lineage, sender, kind, step, action.type, action.micro_batch)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
