"""Load, decide, compare-and-set, publish: what every request about a job comes down to.

The service holds nothing that another replica would need. Within one process
the decisions about a job queue up, so that only other replicas are raced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from mainstay_api.metrics import Metrics
from mainstay_api.settings import Settings
from mainstay_api.store import BeatReply, Change, Snapshot, Store, UnknownJobError
from mainstay_core import codec, coordinator
from mainstay_core.coordinator_events import (
    Action,
    AddFaults,
    Announce,
    EndJob,
    Event,
    Inject,
    PlanDurable,
    PublishPlan,
    RecordRecovery,
    StepsCommitted,
    TellFired,
    Transition,
)
from mainstay_core.errors import MainstayError, StoreConflictError
from mainstay_core.facts import Heartbeat
from mainstay_core.ids import JobUid, PodUid
from mainstay_core.jobspec import JobConfig
from mainstay_core.jobstate import CoordinatorState, uid_of
from mainstay_core.messages import LedgerEntry

logger = logging.getLogger(__name__)


class JobService:
    """Decides about jobs through a store.

    Args:
        store: where the jobs are.
        settings: bounds.
        metrics: what happened is counted there.
        clock: wall clock in seconds.
        draw_nonce: draws the random name of a plan.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        draw_nonce: Callable[[], str] = lambda: secrets.token_hex(6),
    ) -> None:
        self.store = store
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._draw_nonce = draw_nonce
        self._locks: dict[JobUid, asyncio.Lock] = {}
        self._known: dict[str, JobUid] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def create(self, config: JobConfig, manifest: dict[str, Any]) -> bool:
        """Store a new job; False when its uid is taken."""
        created = await self.store.create(coordinator.initial(config, self._clock()), manifest)
        if created:
            self._known.pop(config.name, None)
        return created

    async def resolve(self, job: str) -> JobUid | None:
        """Return the uid that ``job`` is, or names."""
        uid = self._known.get(job)
        if uid is None:
            uid = await self.store.resolve(job)
            if uid == job:
                # A uid never changes its meaning; a name moves on to the next job.
                self._known[job] = uid
        return uid

    def now_s(self) -> float:
        """Return the wall clock of this process."""
        return self._clock()

    async def load(self, uid: JobUid) -> CoordinatorState:
        """Return the job's state."""
        return (await self._load(uid)).state

    async def apply(self, uid: JobUid, event: Event) -> Transition:
        """Decide on an event, make the outcome durable and visible, and return it.

        Raises:
            ProtocolError: the job does not accept the event; nothing changed.
            StoreConflictError: others decided first, too often in a row.
            StoreUnavailableError: nothing is known to have changed; repeat.
        """
        async with self._locks.setdefault(uid, asyncio.Lock()):
            transition = await self._decide(uid, event)
        plan = transition.plan
        if plan is not None:
            durable = PlanDurable(quorum=plan.quorum, at_s=self._clock())
            task = asyncio.create_task(self._note_durable(uid, durable))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        return transition

    async def _decide(self, uid: JobUid, event: Event) -> Transition:
        conflict: StoreConflictError | None = None
        for _ in range(self._settings.max_conflicts):
            before = await self._load(uid)
            outcome = coordinator.step(before.state, event, self._clock(), self._draw_nonce())
            if not outcome.actions and outcome.state == before.state:
                return outcome
            try:
                await self.store.commit(
                    uid, before.version, change_of(before.state, outcome, self._clock())
                )
            except StoreConflictError as error:
                self._metrics.conflicts.inc()
                conflict = error
                continue
            self._tell(uid, outcome)
            return outcome
        raise StoreConflictError(
            f"{self._settings.max_conflicts} races lost in a row"
        ) from conflict

    async def _load(self, uid: JobUid) -> Snapshot:
        snapshot = await self.store.load(uid)
        if snapshot is None:
            self._known.clear()
            raise UnknownJobError(f"job {uid} has vanished from the store")
        return snapshot

    async def _note_durable(self, uid: JobUid, event: PlanDurable) -> None:
        """Record when the plan was durable: after it is out, so nobody waits for that."""
        try:
            await self.apply(uid, event)
        except MainstayError as error:
            logger.warning("the time of %s is not recorded: %s", event.quorum, error)

    async def aclose(self) -> None:
        """Wait for the records that are still being written."""
        await asyncio.gather(*self._background, return_exceptions=True)

    def _tell(self, uid: JobUid, outcome: Transition) -> None:
        recoveries = [a.recovery for a in outcome.actions if isinstance(a, RecordRecovery)]
        self._metrics.count_recoveries(uid, recoveries)
        for action in outcome.actions:
            if isinstance(action, Announce):
                level = logging.WARNING if action.warning else logging.INFO
                logger.log(level, "%s: %s: %s", uid, action.reason, action.message)

    async def beat(self, uid: JobUid, heartbeat: Heartbeat) -> BeatReply:
        """Note that a pod is alive."""
        reply = await self.store.beat(uid, heartbeat)
        if reply.known:
            self._metrics.heartbeats.labels(uid).inc()
        return reply

    async def add_to_ledger(self, uid: JobUid, entries: Sequence[LedgerEntry]) -> None:
        """Write entries; a step whose positions are all there is committed for the coordinator.

        A step that was committed before must come to the same bits: a difference
        is announced and the newer quorum's entry stands.
        """
        keys = [e.key for e in entries]
        known = await self.store.fetch_ledger(uid, keys)
        fresh = []
        for entry in entries:
            old = known.get(entry.key)
            if old == entry or (old is not None and old.quorum.id > entry.quorum.id):
                continue
            if old is not None and old.masters != entry.masters:
                await self._announce_mismatch(uid, old, entry)
            fresh.append(entry)
        await self.store.put_ledger(uid, fresh)
        if fresh:
            await self._commit_steps(uid, fresh)

    async def _commit_steps(self, uid: JobUid, fresh: Sequence[LedgerEntry]) -> None:
        positions = (await self.load(uid)).shape.positions
        for step in sorted({e.step for e in fresh}):
            entries = await self.store.fetch_ledger(uid, [(step, *p) for p in positions])
            if len(entries) < len(positions):
                continue
            newest = max(entries.values(), key=lambda e: (e.quorum.id, e.stage, e.inner))
            outcome = await self.apply(
                uid,
                StepsCommitted(
                    step=step,
                    quorum=newest.quorum,
                    committed_at_s=max(e.committed_at_s for e in entries.values()),
                    step_s=max(e.step_s for e in entries.values()),
                ),
            )
            self._metrics.count_step(uid, newest, outcome.state.step)

    async def _announce_mismatch(self, uid: JobUid, old: LedgerEntry, new: LedgerEntry) -> None:
        message = (
            f"step {new.step} of {_place(new)} came out differently: {new.masters} in "
            f"{new.quorum}, {old.masters} in {old.quorum}"
        )
        logger.error("%s: %s", uid, message)
        announce = Announce(reason="LedgerMismatch", message=message, warning=True)
        await self.store.append(uid, "event", history_line(announce, self._clock()))


def _place(entry: LedgerEntry) -> str:
    return f"stage {entry.stage}" + (f", inner rank {entry.inner}" if entry.inner else "")


def change_of(before: CoordinatorState, outcome: Transition, now_s: float) -> Change:
    """Return what a transition makes visible."""
    was_gone = {uid_of(p) for p in before.pods if p.gone}
    was_there = {uid_of(p) for p in before.pods} - was_gone
    is_gone = {uid_of(p) for p in outcome.state.pods if p.gone}
    is_there = {uid_of(p) for p in outcome.state.pods} - is_gone
    arrived: list[PodUid] = sorted(is_there - was_there)
    gone: list[PodUid] = sorted(is_gone - was_gone)
    return Change(
        state=outcome.state,
        plan=outcome.plan,
        items=tuple(item for a in outcome.actions for item in _item(a, now_s)),
        recoveries=tuple(a.recovery for a in outcome.actions if isinstance(a, RecordRecovery)),
        arrived=tuple(arrived),
        gone=tuple(gone),
    )


def _item(action: Action, now_s: float) -> tuple[tuple[str, str], ...]:
    """Return an action's entry in the stream, if it has one."""
    match action:
        case PublishPlan(plan=plan):
            return (("plan", codec.dumps(plan)),)
        case Inject(fault=fault, pod=pod):
            return (("inject", json.dumps({**codec.encode(fault), "pod": pod})),)
        case AddFaults(faults=faults):
            return (("faults", codec.dumps(faults)),)
        case TellFired(fault=name):
            return (("fired", json.dumps({"fault": name})),)
        case EndJob(state=state, reason=reason):
            return (("stop", json.dumps({"state": state.value, "reason": reason})),)
        case Announce():
            return (("event", history_line(action, now_s)),)
    return ()


def history_line(announce: Announce, now_s: float) -> str:
    """Return an announcement as it stands in the job's history."""
    return json.dumps(
        {
            "at_s": now_s,
            "type": "Warning" if announce.warning else "Normal",
            "reason": announce.reason,
            "message": announce.message,
        }
    )
