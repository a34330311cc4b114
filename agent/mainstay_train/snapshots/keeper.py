"""Writes the segments that a plan asks of this trainer, and reads those that a lost state needs.

States are copied by a thread while the step is computed: only apply writes them, and it waits until
the copy has left. Gradients are copied by the main thread between the reduction and the vote.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import torch

from mainstay_core.base.errors import MainstayError, brief
from mainstay_core.base.ids import JobUid, PodUid, Slot
from mainstay_core.job.config import LogKind, SnapshotConfig
from mainstay_core.planning.program import Op
from mainstay_core.rank.events import LoadFailed, Snapshot, StateLoaded
from mainstay_core.rank.replays.authors import authorship
from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.replays.replaying import Replay, UnfinishedReplay
from mainstay_core.segments.evictions import COPIES
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.plan import OtherStore, Plan
from mainstay_core.wire.segments import (
    MAX_BAD,
    BadSegment,
    SegmentHeader,
    SegmentKey,
    SegmentKind,
    StoreReport,
)
from mainstay_core.wire.votes import CommitRecord, SnapshotStatus
from mainstay_train.base.background import Background
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.compute.boundaries import SentLog
from mainstay_train.compute.engine import Engine
from mainstay_train.exact.fingerprint import digest_of
from mainstay_train.exact.optimizer import StageState
from mainstay_train.snapshots.boundary_replayer import BoundaryReplayer
from mainstay_train.snapshots.good_copies import GoodCopies
from mainstay_train.snapshots.measurements import Leg, Measurements
from mainstay_train.snapshots.replayer import Replayer
from mainstay_train.snapshots.sent_log import SentLogs, kinds_of
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.snapshots.unit_checks import (
    StageChecks,
    ToldUnits,
    digests_of_step,
    holders_of,
)
from mainstay_train.snapshots.writer import Place, SegmentWriter
from mainstay_train.state.rooms import StoreFull
from mainstay_train.state.segments import SegmentClient
from mainstay_train.state.store_connection import StoreGone

logger = logging.getLogger(__name__)

_Attempt = tuple[SegmentKey, str]
"""The key of a copy, and the nonce of the quorum in which it is written."""


class Wait:
    """A wait of the main thread for other pods, which ends with its quorum."""

    def __init__(self, client: SegmentClient, changed: threading.Condition) -> None:
        self._client, self._changed = client, changed
        self.ended = ""
        """Why it ended; empty while it goes on."""

    def shutdown(self, why: str) -> None:
        """End the wait (any thread)."""
        self.ended = why or "ended"
        self._client.interrupt()
        with self._changed:
            self._changed.notify_all()


class SegmentKeeper:
    """The segments of one trainer.

    Args:
        job: to which the segments belong.
        slot: of this trainer.
        config: how the job's state is kept.
        client: of the store of this trainer's pod.
        engine: returns that of the adopted plan's stage.
        learning_rate: of a step.
        hook: returns what the copying thread calls once an instalment is copied, and once it is at
            all its holders.
    """

    def __init__(
        self,
        *,
        job: JobUid,
        slot: Slot,
        config: SnapshotConfig,
        client: SegmentClient,
        engine: Callable[[], Engine],
        learning_rate: Callable[[int], float],
        hook: Callable[[], Callable[[Op], None]],
    ) -> None:
        self._slot, self._config, self._client, self._engine = slot, config, client, engine
        self._learning_rate, self._hook = learning_rate, hook
        self._measurements = Measurements()
        self._writer = SegmentWriter(job, client, self._measurements.note_copy)
        self._logs_boundary = config.log is LogKind.BOUNDARY
        self._sent = SentLogs(client, self._writer)
        if self._logs_boundary:  # which goes to no other pod: what copies take is measured
            client.note_sent = partial(self._measurements.note_copy, Leg.NETWORK)
        self._worker = Background("snapshot")
        self._changed = threading.Condition()
        """Guards what follows."""
        self._to_copy = 0
        """Units whose state must not be written yet."""
        self._states: dict[_Attempt, bool] = {}
        """States of the window in flight that are not known to be at their holders; whether they
        were given to the store."""
        self._window_of: tuple[Window, str] | None = None
        """That window, and the nonce of its quorum: the next one may begin the same anew."""
        self._sending: dict[_Attempt, tuple[set[_Attempt], Callable[[Op], None]]] = {}
        """With each state of the window in flight those of its instalment that are not known to be
        at their holders, and what is called once none is left. The copying thread's."""
        self._window_sent: tuple[Window, str] | None = None
        """To which these belong, as before. The copying thread's."""
        self._cached: tuple[StageState, torch.Tensor, UnitBytes] | None = None
        self._at: Place | None = None
        self._bad: list[BadSegment] = []
        self._differed: set[tuple[int, int, int]] = set()
        """Lineage, position and first step of replays that came out differently."""
        self._is_full = False
        """Whether one of these found no room for what others of the stretch read."""
        self._unfinished = UnfinishedReplay[Replayer]()
        self._last_vote_ns: int | None = None

    def start(self, fingerprint: Mapping[str, str]) -> None:
        """Note the numerics fingerprint that all segments of this trainer name."""
        self._writer.fingerprint = digest_of(fingerprint)
        self._client.note_held = self._note_held
        logger.info(
            "lost states are made anew from logs of %s, as %s",
            self._config.log,
            self._config.log_reason,
        )

    def forget_state(self) -> None:
        """Finish what is being copied: another state comes, and this one's memory is freed."""
        self.wait_copied()
        self._at = self._cached = None

    # What is told ------------------------------------------------------------------

    def begin_wait(self) -> Wait:
        """Return what ends a wait, from any thread."""
        return Wait(self._client, self._changed)

    async def report(self, lineage: int, *, whole: bool) -> StoreReport:
        """Return which segments were found damaged here, and what the pod's store holds."""
        bad = tuple(b for b in self._bad if b.key.lineage == lineage)
        if not whole:
            return StoreReport(
                pod=self._slot.pod, address="", lineage=lineage, bad=bad, is_full=self._is_full
            )
        try:
            held = self._client.report(lineage)
        except StoreGone:  # with its supervisor, and so this trainer ends too
            held = StoreReport(pod=self._slot.pod, address="", lineage=lineage)
        return replace(held, bad=bad, is_full=self._is_full)

    async def ask_others(
        self, wait: Wait, lineage: int, others: Sequence[OtherStore]
    ) -> tuple[StoreReport, ...]:
        """Return what stores of other pods hold; one that does not answer in time is empty."""
        limit_s, found = self._config.ask_s, dict[PodUid, StoreReport]()

        def empty(other: OtherStore, problem: str) -> StoreReport:
            return StoreReport(pod=other.pod, address="", lineage=lineage, problem=problem)

        def ask(other: OtherStore) -> None:
            try:
                report = self._client.report_of(other.address, lineage, limit_s)
                if report.pod != other.pod:
                    report = empty(other, f"{report.pod} answers at {other.address}")
            except (OSError, ValueError, OverflowError, MainstayError) as error:
                report = empty(other, brief(error))
            with self._changed:
                found[other.pod] = report
                self._changed.notify_all()

        for other in others:
            name = f"ask-{other.pod}"
            threading.Thread(target=ask, args=(other,), name=name, daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: len(found) == len(others) or bool(wait.ended), limit_s)
            late = f"it did not answer within {limit_s:g} s"
            return tuple(found.get(other.pod) or empty(other, late) for other in others)

    def status(self, version: int, *, logged: bool) -> SnapshotStatus:
        """Return what to say of segments in the vote on the step at ``version``."""
        now_ns = time.monotonic_ns()
        if self._last_vote_ns is not None:
            self._measurements.note_step(now_ns - self._last_vote_ns)
        self._last_vote_ns = now_ns
        with self._changed:
            unheld = self._client.pending()
            self._states = {
                attempt: given
                for attempt, given in self._states.items()
                if not given or attempt[0] in unheld
            }
            pending = [key.version for key, _ in self._states]
        return SnapshotStatus(
            logged=logged,
            copied=min(pending, default=version + 1),
            measures=None if self._config.num_instalments else self._measurements.told(),
        )

    def record(self, record: CommitRecord) -> None:
        """Give the pod's store a commit, and what its step made of units, before it is applied."""
        with suppress(StoreGone):  # with its supervisor, and so this trainer ends too
            self._client.record(record)
            at = self._at
            told = digests_of_step(self._engine(), record, at.position) if at is not None else None
            if at is not None and told is not None:
                self._client.digests.keep(told, at.own.holders)

    def keep_from(self, lineage: int, version: int) -> None:
        """Tell the pod's store that nothing before ``version`` is needed any more."""
        self._writer.keep_from = version
        self._is_full = False  # there is room again
        with suppress(StoreGone):
            self._client.keep_from(lineage, version)

    def go_back(self, lineage: int, version: int, *, drops_later: bool) -> None:
        """Tell the pod's store that the job goes on from a version that may be an older one."""
        # Only of a checkpoint's version is nothing older needed.
        writer = self._writer
        writer.keep_from = version if drops_later else min(writer.keep_from, version)
        if drops_later:  # what comes after is written anew
            self._unfinished.forget()
            self._bad = [bad for bad in self._bad if bad.key.version < version]
            self._is_full = False
        with suppress(StoreGone):
            self._client.keep_from(lineage, version, may_go_back=True, drops_later=drops_later)

    # What is written ------------------------------------------------------------------

    def snapshot(self, plan: Plan, index: int, lineage: int, action: Snapshot) -> None:
        """Begin to copy this member's units of an instalment, in the background."""
        place = self._place(plan, index, lineage)
        keys = [place.key(unit.name, unit.kind, action.version) for unit in action.units]
        places = {key: unit.place for key, unit in zip(keys, action.units, strict=True)}
        attempts = [(key, plan.quorum.nonce) for key in keys]
        window, hook = (action.window, plan.quorum.nonce), self._hook()
        self._worker.submit(lambda: self._begin_instalment(window, attempts, hook))
        with self._changed:
            self._writer.window = action.window
            if self._window_of != window:
                # What is left of another window is worth nothing: this one copies everything anew.
                self._window_of, self._states = window, {}
            self._states |= dict.fromkeys(attempts, False)
            self._to_copy += len(keys)
        for key in keys:
            copy = partial(self._copy_state, place, key, action.window, places[key])
            self._worker.submit(copy)
        self._worker.submit(lambda: hook(Op.SNAPSHOT_COPIED))

    def _begin_instalment(
        self, window: tuple[Window, str], attempts: Sequence[_Attempt], hook: Callable[[Op], None]
    ) -> None:
        if window != self._window_sent:
            self._window_sent, self._sending = window, {}
        self._sending |= dict.fromkeys(attempts, (set(attempts), hook))

    def _note_held(self, header: SegmentHeader) -> None:
        """Note that all holders have a segment. The thread that reads calls this, with its lock."""
        if header.key.kind in COPIES:
            self._worker.submit(lambda: self._end_sending((header.key, header.nonce)))

    def _end_sending(self, attempt: _Attempt) -> None:
        found = self._sending.pop(attempt, None)
        if found is None:
            return  # it is of another window, or of another quorum that copied the same
        left, hook = found
        left.discard(attempt)
        if not left:
            hook(Op.SNAPSHOT_HELD)

    def _copy_state(
        self, place: Place, key: SegmentKey, window: Window, place_in_order: int
    ) -> None:
        try:
            self._writer.write_unit(
                place, key, self._has_left, place_in_order=place_in_order, window=window
            )
        except (StoreFull, StoreGone) as error:
            # The window is never complete then, which the votes tell; training goes on.
            logger.warning("no snapshot: %s", error)
            return
        attempt = key, place.plan.quorum.nonce
        with self._changed:
            if attempt in self._states:
                self._states[attempt] = True

    def _has_left(self) -> None:
        with self._changed:
            self._to_copy -= 1
            self._changed.notify_all()

    def wait_copied(self) -> None:
        """Wait until what is being copied has left the state: it is about to be written."""
        self._unfinished.forget()
        with self._changed:
            self._changed.wait_for(lambda: self._to_copy == 0)

    def sent_log(self, plan: Plan, index: int, lineage: int, step: int) -> SentLog | None:
        """Return what takes what this member sends to its neighbours; None if nothing is kept."""
        if not self._logs_boundary:
            return None
        return self._sent.of_step(self._place(plan, index, lineage), step)

    def withdraw(
        self, plan: Plan, index: int, lineage: int, step: int, types: Sequence[int]
    ) -> None:
        """Have nothing count of what this member sent for types that it no longer holds.

        Another one may compute them in the same quorum. A vote of before rests on these logs, and
        a replay could not tell them from those of what was committed.
        """
        if self._logs_boundary:
            engine = self._engine()
            kinds = kinds_of(engine.stage, engine.num_stages)
            place = self._place(plan, index, lineage)
            self._sent.withdraw(place, step, kinds, types, engine.micro_batches)

    async def log(
        self, wait: Wait, plan: Plan, index: int, lineage: int, step: int, types: Sequence[int]
    ) -> bool:
        """Keep what a replay of the step needs from this member, and wait until it is kept."""
        place = self._place(plan, index, lineage)
        if self._logs_boundary:
            why_not = self._sent.settle(
                place,
                step,
                str(plan.quorum),
                kinds_of(self._engine().stage, self._engine().num_stages),
                types,
                self._engine().micro_batches,
            )
            if why_not:
                logger.warning("what was sent in step %d is not kept: %s", step, why_not)
            return not why_not
        keys = [place.key(unit.name, SegmentKind.GRADIENT, step) for unit in place.own.units]
        known = self._engine().gradient_digests_of_units()
        began_ns, size = time.monotonic_ns(), 0
        try:
            with closing(self._writer.rooms(place, keys)) as rooms:
                for key, room in zip(keys, rooms, strict=True):
                    digest = known.get(place.units.names[key.unit])
                    self._writer.write_unit(place, key, digest=digest, asked=room)
                    size += place.units.size_bytes(key.unit, key.kind)
        except (StoreFull, StoreGone) as error:
            logger.warning("the gradient of step %d is not kept: %s", step, error)
            return False
        why_not = self._client.wait_held(keys, lambda: bool(wait.ended))
        if wait.ended:
            return False
        if why_not:
            logger.warning("the gradient of step %d is not kept: %s", step, why_not)
            return False
        sent = size * len(place.own.holders)
        self._measurements.note_copy(Leg.NETWORK, sent, time.monotonic_ns() - began_ns)
        return True

    # What is read ------------------------------------------------------------------------

    async def replay(
        self,
        wait: Wait,
        plan: Plan,
        index: int,
        replay: Replay | BoundaryReplay,
        chain: ChainGroups | None,
    ) -> StateLoaded | LoadFailed:
        """Make the state anew; every replayed step has the digests that its votes told.

        Raises:
            GroupEnded: another rank of the cell is gone, or has given up.
        """
        before = self._unfinished.take(plan)
        self.wait_copied()
        engine = self._engine()
        logger.info(
            "position %d is made anew from %s at version %d, with the steps from %d on",
            replay.position,
            self._config.log,
            replay.version,
            replay.first_step,
        )
        pod, units = self._slot.pod, self._units()
        copies, num_known = GoodCopies(self._client, pod, lambda: wait.ended), 0
        start = plan.lineage, replay.position, replay.first_step
        found = ToldUnits(
            self._client.digests,
            replay.position,
            [holder for holder in holders_of(replay) if holder.pod != pod],
            self._config.ask_s,
            lambda: wait.ended,
        )
        told = StageChecks(engine, units, found)
        try:
            if isinstance(replay, BoundaryReplay):
                # What a neighbour in the stretch sent, or another rank of the cell computed, may be
                # what is wrong: try once more, before good copies are given up.
                copies.is_alone = not replay.relays and plan.ranks_per_stage == 1
                copies.has_differed = start in self._differed
                again = BoundaryReplayer(engine, units, copies, self._learning_rate, chain)
                place = self._place(plan, index, plan.lineage)
                outcome = again.run(replay, self._sent, place, told)
                self._is_full = bool(replay.relays and self._sent.problem)
            else:
                replayer = self._replayer(before, copies, plan, replay)
                copies = replayer.copies
                copies.go_on(lambda: wait.ended)
                copies.has_differed = start in self._differed
                num_known = len(copies.bad)
                outcome = replayer.run(replay, told)
                if isinstance(outcome, LoadFailed) and wait.ended:
                    self._unfinished.keep(plan, replayer)
        finally:
            self._bad = [*self._bad, *copies.bad[num_known:]][-MAX_BAD:]
            if copies.differs:
                self._differed.add(start)
        if isinstance(outcome, StateLoaded):
            return replace(outcome, num_damaged=len(copies.bad))
        return outcome

    def _replayer(
        self,
        before: Replayer | None,
        copies: GoodCopies,
        plan: Plan,
        replay: Replay,
    ) -> Replayer:
        """Return what goes on with an unfinished replay, or begins one."""
        units = self._units()
        if before is not None and before.can_go_on(units, plan.lineage, replay):
            logger.info("it goes on where the replay before was when its quorum ended")
            return before
        return Replayer(
            self._engine(),
            units,
            copies,
            self._learning_rate,
            lineage=plan.lineage,
            position=replay.position,
            inner=replay.position % plan.ranks_per_stage,
        )

    # Helpers -----------------------------------------------------------------------------

    def _units(self) -> UnitBytes:
        engine = self._engine()
        # A reduction that broke leaves its buffer to whoever may still write there.
        state, reduced = engine.state, engine.reducer.reduced
        if self._cached is None or self._cached[0] is not state or self._cached[1] is not reduced:
            self._cached = (state, reduced, UnitBytes(state, reduced))
        return self._cached[2]

    def _place(self, plan: Plan, index: int, lineage: int) -> Place:
        units = self._units()
        if self._at is None or self._at.plan.quorum != plan.quorum or self._at.units is not units:
            order = tuple(reversed(units.prices))
            own = authorship(
                plan, index, order, peers=self._config.peers, domains=self._config.domains
            )
            self._at = Place(plan, index, lineage, own, units)
        return self._at
