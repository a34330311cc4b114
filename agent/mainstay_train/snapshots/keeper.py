"""Writes the segments that a plan asks of this trainer, and reads those that a lost state needs.

States are copied by a thread while the step is computed: only apply writes them, and it waits until
the copy has left. Gradients are copied by the main thread between the reduction and the vote.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from mainstay_core.base.ids import JobUid, Slot
from mainstay_core.job.config import SnapshotConfig
from mainstay_core.planning.program import Op
from mainstay_core.rank.authors import Authorship, authorship
from mainstay_core.rank.events import LoadFailed, Snapshot, StateLoaded
from mainstay_core.rank.replaying import Replay
from mainstay_core.snapshots.windows import Window, plan_instalments
from mainstay_core.wire.plan import Plan
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
from mainstay_train.compute.engine import Engine
from mainstay_train.exact.optimizer import StageState
from mainstay_train.snapshots.pace import Pace
from mainstay_train.snapshots.replayer import Replayer
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.state.segments import SegmentClient, StoreFull, StoreGone

logger = logging.getLogger(__name__)


class Wait:
    """A wait of the main thread for other pods, which ends with its quorum."""

    def __init__(self, client: SegmentClient) -> None:
        self._client = client
        self.ended = ""
        """Why it ended; empty while it goes on."""

    def shutdown(self, why: str) -> None:
        """End the wait (any thread)."""
        self.ended = why or "ended"
        self._client.poke()


@dataclass(frozen=True, slots=True)
class _Place:
    """The part of all keys and headers that this trainer writes in a quorum."""

    plan: Plan
    index: int
    lineage: int
    own: Authorship
    units: UnitBytes

    def key(self, name: str, kind: SegmentKind, version: int) -> SegmentKey:
        """Return the key of one of its units' segments."""
        return SegmentKey(
            lineage=self.lineage,
            position=self.plan.position_of(self.index),
            unit=self.units.numbers[name],
            kind=kind,
            version=version,
        )


class SegmentKeeper:
    """The segments of one trainer.

    Args:
        job: to which the segments belong.
        slot: of this trainer.
        config: how the job's state is kept.
        client: of the store of this trainer's pod.
        engine: returns that of the adopted plan's stage.
        learning_rate: of a step.
        hook: returns what the copying thread calls before it says that an instalment is copied.
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
        self._job, self._slot, self._fingerprint = job, slot, ""
        self._config, self._client, self._engine = config, client, engine
        self._learning_rate, self._hook = learning_rate, hook
        self._pace = Pace()
        self._worker = Background("snapshot")
        self._changed = threading.Condition()
        """Guards what follows."""
        self._to_copy = 0
        """Units whose state must not be written yet."""
        self._states: dict[SegmentKey, bool] = {}
        """States of the window in flight that are not known to be at their holders; whether they
        were given to the store."""
        self._window: Window | None = None
        self._cached: tuple[StageState, torch.Tensor, UnitBytes] | None = None
        self._at: _Place | None = None
        self._keep_from = 0
        self._bad: list[BadSegment] = []
        self._last_vote_s: float | None = None

    def start(self, fingerprint: Mapping[str, str]) -> None:
        """Note the numerics fingerprint that all segments of this trainer name."""
        told = json.dumps(dict(fingerprint), sort_keys=True)
        self._fingerprint = hashlib.sha256(told.encode()).hexdigest()[:32]

    def forget_state(self) -> None:
        """Finish what is being copied: another state comes, and this one's memory is freed."""
        self.wait_copied()
        self._at = self._cached = None

    # What is told ------------------------------------------------------------------

    def begin_wait(self) -> Wait:
        """Return what ends a wait, from any thread."""
        return Wait(self._client)

    async def report(self, lineage: int, *, whole: bool) -> StoreReport:
        """Return which segments were found damaged here, and what the pod's store holds."""
        bad = tuple(b for b in self._bad if b.key.lineage == lineage)
        if not whole:
            return StoreReport(pod=self._slot.pod, address="", lineage=lineage, bad=bad)
        try:
            held = self._client.report(lineage)
        except StoreGone:  # with its supervisor, and so this trainer ends too
            held = StoreReport(pod=self._slot.pod, address="", lineage=lineage)
        return replace(held, bad=bad)

    def status(self, version: int, *, logged: bool) -> SnapshotStatus:
        """Return what to say of segments in the vote on the step at ``version``."""
        now_s = time.monotonic()
        if self._last_vote_s is not None:
            self._pace.note_step(now_s - self._last_vote_s)
        self._last_vote_s = now_s
        own = self._at.own.units if self._at else ()
        with self._changed:
            unheld = self._client.pending()
            self._states = {
                key: given for key, given in self._states.items() if not given or key in unheld
            }
            pending = [key.version for key in self._states]
        return SnapshotStatus(
            logged=logged,
            copied=min(pending, default=version + 1),
            wanted_instalments=self._pace.wanted_instalments(own),
        )

    def record(self, record: CommitRecord) -> None:
        """Give the pod's store a commit, before it is applied."""
        with suppress(StoreGone):  # with its supervisor, and so this trainer ends too
            self._client.record(record)

    def keep_from(self, lineage: int, version: int) -> None:
        """Tell the pod's store that nothing before ``version`` is needed any more."""
        self._keep_from = version
        with suppress(StoreGone):
            self._client.keep_from(lineage, version)

    def go_back(self, lineage: int, version: int, *, drops_later: bool) -> None:
        """Tell the pod's store that the job goes on from a version that may be an older one."""
        # Only of a checkpoint's version is nothing older needed.
        self._keep_from = version if drops_later else min(self._keep_from, version)
        with suppress(StoreGone):
            self._client.keep_from(lineage, version, may_go_back=True, drops_later=drops_later)

    # What is written ------------------------------------------------------------------

    def snapshot(self, plan: Plan, index: int, lineage: int, action: Snapshot) -> None:
        """Begin to copy this member's units of an instalment, in the background."""
        place = self._place(plan, index, lineage)
        number = action.window.number_of(action.version)
        assert number is not None
        instalment = plan_instalments(place.own.units, action.window.length)[number]
        keys = [place.key(name, SegmentKind.STATE, action.version) for name in instalment.full]
        with self._changed:
            if self._window != action.window:
                # What is left of another window is worth nothing: this one copies everything anew.
                self._window, self._states = action.window, {}
            self._states |= dict.fromkeys(keys, False)
            self._to_copy += len(keys)
        for key in keys:
            self._worker.submit(lambda key=key: self._copy_state(place, key))  # type: ignore[misc]
        hook = self._hook()
        self._worker.submit(lambda: hook(Op.SNAPSHOT_COPIED))

    def _copy_state(self, place: _Place, key: SegmentKey) -> None:
        try:
            self._write(place, key, left=self._has_left)
        except (StoreFull, StoreGone) as error:
            # The window is never complete then, which the votes tell; training goes on.
            logger.warning("no snapshot: %s", error)
            return
        with self._changed:
            if key in self._states:
                self._states[key] = True

    def _has_left(self) -> None:
        with self._changed:
            self._to_copy -= 1
            self._changed.notify_all()

    def wait_copied(self) -> None:
        """Wait until what is being copied has left the state: it is about to be written."""
        with self._changed:
            self._changed.wait_for(lambda: self._to_copy == 0)

    async def log(self, wait: Wait, plan: Plan, index: int, lineage: int, step: int) -> bool:
        """Copy this member's part of the reduced gradient, and wait until its holders have it."""
        place = self._place(plan, index, lineage)
        keys = [place.key(unit.name, SegmentKind.GRADIENT, step) for unit in place.own.units]
        began_s, size = time.monotonic(), 0
        try:
            for key in keys:
                self._write(place, key)
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
        self._pace.note_copy("holders", size, time.monotonic() - began_s)
        return True

    def _write(
        self, place: _Place, key: SegmentKey, left: Callable[[], None] = lambda: None
    ) -> None:
        """Write a segment and give it to the store.

        Args:
            place: this trainer's, as the plan says.
            key: of the segment.
            left: called once what is copied may change again, whatever comes of it.

        Raises:
            StoreFull: there is no room for it.
            StoreGone: the store has ended.
        """
        units = place.units
        try:
            room = self._client.room(units.size_bytes(key.unit, key.kind))
            began_s = time.monotonic()
            try:
                units.write(key.unit, key.kind, room.memory)
            except RuntimeError:  # of the device
                self._client.give_back(room)
                raise
        finally:
            left()
        self._pace.note_copy("store", room.memory.nbytes, time.monotonic() - began_s)
        header = SegmentHeader(
            key=key,
            job=self._job,
            fingerprint=self._fingerprint,
            unit_name=units.names[key.unit],
            num_units=len(units.names),
            nonce=place.plan.quorum.nonce,
            window=self._window.first if self._window else 0,
            num_instalments=self._window.length if self._window else 0,
            size_bytes=room.memory.nbytes,
            digest=units.digest(key.unit, key.kind, room.memory),
        )
        self._client.written(room, header, place.own.holders, self._keep_from)

    # What is read ------------------------------------------------------------------------

    async def replay(self, wait: Wait, replay: Replay) -> StateLoaded | LoadFailed:
        """Make the state anew; every replayed step has the digests that its votes told."""
        self.wait_copied()
        engine = self._engine()
        logger.info(
            "position %d is made anew at version %d, with the steps from %d on",
            replay.position,
            replay.version,
            replay.first_step,
        )
        pod, units = self._slot.pod, self._units()
        replayer = Replayer(engine, units, self._client, pod, self._learning_rate)
        outcome = replayer.run(replay, lambda: wait.ended)
        self._bad = [*self._bad, *replayer.bad][-MAX_BAD:]
        return outcome

    # Helpers -----------------------------------------------------------------------------

    def _units(self) -> UnitBytes:
        engine = self._engine()
        # A reduction that broke leaves its buffer to whoever may still write there.
        state, reduced = engine.state, engine.reducer.reduced
        if self._cached is None or self._cached[0] is not state or self._cached[1] is not reduced:
            self._cached = (state, reduced, UnitBytes(state, reduced))
        return self._cached[2]

    def _place(self, plan: Plan, index: int, lineage: int) -> _Place:
        units = self._units()
        if self._at is None or self._at.plan.quorum != plan.quorum or self._at.units is not units:
            order = tuple(reversed(units.prices))
            own = authorship(
                plan, index, order, peers=self._config.peers, domains=self._config.domains
            )
            self._at = _Place(plan, index, lineage, own, units)
        return self._at
