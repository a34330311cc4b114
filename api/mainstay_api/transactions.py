"""Turns every request about a job into one transaction: load, decide, compare-and-set, publish.

This process holds nothing that another replica of the api would need. The decisions about one
job queue up within the process, so that it races only against other replicas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from mainstay_api.auth import JobName
from mainstay_api.metrics import Metrics
from mainstay_api.settings import Settings
from mainstay_api.store_protocol import (
    BeatReply,
    Change,
    Snapshot,
    Store,
    StoreUnavailableError,
    UnknownJobError,
)
from mainstay_core.base import codec
from mainstay_core.base.errors import MainstayError, StoreConflictError
from mainstay_core.base.ids import JobUid, QuorumId
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    Action,
    AddFaults,
    AddFired,
    Announce,
    EndJob,
    Event,
    Inject,
    JobSubmitted,
    PlanReported,
    PlanStored,
    PublishPlan,
    RecordRecovery,
    StepsCommitted,
    StopRequested,
    StoreReopened,
    Transition,
)
from mainstay_core.coordinator.state import CoordinatorState, pods_moved
from mainstay_core.coordinator.store_recovery import refuse_behind
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.ledger import LedgerEntry

logger = logging.getLogger(__name__)

NOTE_AFTER_S = 0.015
"""Until then a plan is on its way to the supervisors: another write would hold it up."""


class Transactions:
    """Applies events to jobs in the store, each as one transaction.

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
        self._names: dict[JobUid, JobName] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def create(self, config: JobConfig, manifest: dict[str, Any]) -> bool:
        """Store a new job; False when its uid is taken."""
        created = await self.store.create(machine.initial(config, self._clock()), manifest)
        if created:
            self._known.pop(str(_name_of(config)), None)
        return created

    async def submit(self, config: JobConfig, manifest: dict[str, Any]) -> bool:
        """Store a job, or what has changed in it since; False when it was there.

        Raises:
            InvalidSpecError: something differs that cannot change in a job that exists.
            DeletedJobError: it was deleted.
        """
        if await self.create(config, manifest):
            return True
        await self.apply(config.job, JobSubmitted(config=config))
        if manifest != await self.store.fetch_manifest(config.job):
            await self.store.put_manifest(config.job, manifest)
        return False

    async def delete(self, uid: JobUid) -> bool:
        """Stop a job and delete everything about it; False when there was nothing."""
        known = await self.store.load(uid) is not None
        if known:
            await self.apply(uid, StopRequested(who="whoever deleted it"))
        self._known.clear()
        self._locks.pop(uid, None)
        return await self.store.delete(uid) or known

    async def drop_deleted(self) -> None:
        """Drop what this process shows of jobs that are gone, whoever was asked to delete them."""
        shown = self._metrics.jobs
        try:
            gone = shown - frozenset(await self.store.list_uids()) if shown else ()
        except StoreUnavailableError as error:
            logger.warning("which jobs are gone is not known: %s", error)
            return
        for uid in sorted(gone):
            self._metrics.drop_job(uid)

    async def recover(
        self, config: JobConfig, manifest: dict[str, Any], report: PlanReported | None
    ) -> Transition | None:
        """Make a lost job again, or learn a plan that a supervisor holds and the store does not.

        Returns:
            What became of the plan; None without one (the job is to form anew).
        """
        if await self.create(config, manifest):
            logger.warning("job %s was not in the store: made again", config.job)
        return None if report is None else await self.apply(config.job, report)

    async def resolve(self, job: str) -> JobUid | None:
        """Return the uid that ``job`` is, or names: ``name``, in a cluster ``namespace:name``."""
        uid = self._known.get(job)
        if uid is None:
            uid = await self.store.resolve(job)
            if uid == job:
                # A uid never changes its meaning; a name moves on to the next job.
                self._known[job] = uid
        return uid

    async def fetch_name(self, uid: JobUid) -> JobName | None:
        """Return what the job is called where it was submitted, None when it is not known."""
        name = self._names.get(uid)
        if name is None:
            snapshot = await self.store.load(uid)
            if snapshot is not None:
                name = self._names[uid] = _name_of(snapshot.state.config)
        return name

    def now_s(self) -> float:
        """Return the wall clock of this process."""
        return self._clock()

    async def load(self, uid: JobUid) -> CoordinatorState:
        """Return the job's state."""
        return (await self._load(uid)).state

    async def apply(self, uid: JobUid, event: Event, held: QuorumId | None = None) -> Transition:
        """Decide on an event, make the outcome durable and visible, and return it.

        Args:
            uid: the job.
            event: what was learnt.
            held: the quorum of the newest plan that the teller holds.

        Raises:
            ProtocolError: the job does not accept the event; nothing changed.
            StoreBehindError: the teller's plan is not known here; nothing changed.
            StoreConflictError: others decided first, too often in a row.
            StoreUnavailableError: nothing is known to have changed; repeat.
        """
        try:
            # A store that hangs must not keep an ever longer queue waiting behind one request.
            async with (
                asyncio.timeout(2 * self._settings.redis_timeout_s),
                self._locks.setdefault(uid, asyncio.Lock()),
            ):
                transition = await self._decide(uid, event, held)
        except TimeoutError as error:
            raise StoreUnavailableError("no decision in time; the store hangs") from error
        plan = transition.plan
        if plan is not None:
            durable = PlanStored(quorum=plan.quorum, at_s=self._clock())
            task = asyncio.create_task(self._note_stored(uid, durable))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        return transition

    async def _decide(self, uid: JobUid, event: Event, held: QuorumId | None) -> Transition:
        conflict: StoreConflictError | None = None
        for _ in range(self._settings.max_conflicts):
            try:
                before = await self._load(uid)
                if before.state.server != before.server:
                    await self._step(uid, before, StoreReopened(server=before.server))
                    before = await self._load(uid)
                refuse_behind(before.state, held)
                return await self._step(uid, before, event)
            except StoreConflictError as error:
                self._metrics.conflicts.inc()
                conflict = error
        raise StoreConflictError(
            f"{self._settings.max_conflicts} races lost in a row"
        ) from conflict

    async def _step(self, uid: JobUid, before: Snapshot, event: Event) -> Transition:
        outcome = machine.step(before.state, event, self._clock(), self._draw_nonce())
        if outcome.actions or outcome.state != before.state:
            change = change_of(before.state, outcome, self._clock())
            await self.store.commit(uid, before.revision, change)
            self._tell(uid, outcome)
        return outcome

    async def _load(self, uid: JobUid) -> Snapshot:
        snapshot = await self.store.load(uid)
        if snapshot is None:
            raise self._vanished(uid)
        return snapshot

    def _vanished(self, uid: JobUid) -> UnknownJobError:
        self._known.clear()
        self._names.clear()
        return UnknownJobError(f"job {uid} has vanished from the store")

    async def _note_stored(self, uid: JobUid, event: PlanStored) -> None:
        """Record when the plan was durable: the plan is out by then, so nobody waits for this."""
        await asyncio.sleep(NOTE_AFTER_S)
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
        """Note that a pod is alive.

        Raises:
            StoreBehindError: it holds a plan that is not known here.
            UnknownJobError: the store has lost the job.
        """
        reply = await self.store.beat(uid, heartbeat)
        if reply.phase is None:
            raise self._vanished(uid)
        held = heartbeat.quorum
        if held is not None and (reply.quorum is None or held != _quorum_in(reply.quorum)):
            refuse_behind((await self._load(uid)).state, held)
        if reply.known:
            self._metrics.count_heartbeat(uid)
        return reply

    async def add_to_ledger(
        self, uid: JobUid, entries: Sequence[LedgerEntry], held: QuorumId | None = None
    ) -> None:
        """Write entries; a step whose positions are all there is committed for the coordinator.

        A step that was committed before must come to the same bits: a difference
        is announced and the newer quorum's entry stands.

        Raises:
            StoreBehindError: the teller's plan is not known here; nothing was written.
        """
        refuse_behind((await self._load(uid)).state, held)
        keys = [e.key for e in entries]
        known = await self.store.fetch_ledger(uid, keys)
        fresh = []
        for entry in entries:
            old = known.get(entry.key)
            if old is not None and (old.agrees_with(entry) or old.quorum.id > entry.quorum.id):
                continue
            if old is not None and old.masters != entry.masters:
                await self._announce_mismatch(uid, old, entry)
            fresh.append(entry)
        await self.store.put_ledger(uid, fresh)
        if fresh:
            await self._commit_steps(uid, fresh)

    async def _commit_steps(self, uid: JobUid, fresh: Sequence[LedgerEntry]) -> None:
        state = await self.load(uid)
        positions = state.shape.positions
        self._metrics.name_job(uid, state.config.namespace, state.config.name)
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


def _name_of(config: JobConfig) -> JobName:
    return JobName(namespace=config.namespace, name=config.name)


def _place(entry: LedgerEntry) -> str:
    return f"stage {entry.stage}" + (f", inner rank {entry.inner}" if entry.inner else "")


def _quorum_in(text: str) -> QuorumId:
    return codec.loads(QuorumId, text)


def change_of(before: CoordinatorState, outcome: Transition, now_s: float) -> Change:
    """Return what a transition makes visible."""
    arrived, gone = pods_moved(before, outcome.state)
    return Change(
        state=outcome.state,
        plan=outcome.plan,
        items=tuple(item for a in outcome.actions for item in _item(a, now_s)),
        recoveries=tuple(a.recovery for a in outcome.actions if isinstance(a, RecordRecovery)),
        arrived=arrived,
        gone=gone,
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
        case AddFired(fault=name):
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
