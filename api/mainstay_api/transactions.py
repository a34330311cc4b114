"""Applies events to jobs as one replica of the api: each as one transaction, one job at a time.

This process holds nothing that another replica of the api would need. The decisions about one
job queue up within the process, so that it races only against other replicas. What a
transaction is, :mod:`mainstay_core.control_plane.transactions` says.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from mainstay_api.auth import JobName
from mainstay_api.findings import (
    FINDING_CODE,
    MAX_IN_HISTORY,
    check_finding,
    describe_findings,
    with_names,
)
from mainstay_api.long_work import beside, size_of
from mainstay_api.metrics import Metrics
from mainstay_api.settings import Settings
from mainstay_api.snapshot_metrics import JobLabels
from mainstay_api.snapshots import fetch_summary
from mainstay_api.store_protocol import JobStore, Store, history_line
from mainstay_core.base.errors import MainstayError, RemoteProtocolError
from mainstay_core.base.ids import JobUid, QuorumId
from mainstay_core.base.logs import about
from mainstay_core.control_plane.answers import SupervisorAnswers
from mainstay_core.control_plane.heartbeats import HeartbeatLag
from mainstay_core.control_plane.job_store import BeatReply, StoreUnavailableError, UnknownJobError
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    Announce,
    Event,
    JobSubmitted,
    RecordRecovery,
    StopRequested,
    Transition,
)
from mainstay_core.coordinator.intake.store_recovery import refuse_behind
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.api import HeldJob
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.findings import ToldFinding
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan

logger = logging.getLogger(__name__)

COUNT_PODS_S = 1.0
"""A count of a job's pods is used for so long."""
GIVE_WAY_S = 0.005
"""Processor time for which a transaction decides until others get a turn: some ten decisions."""
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
        self.settings = settings
        self.metrics = metrics
        self._clock = clock
        self.draw_nonce = draw_nonce
        self._jobs: dict[JobUid, _Job] = {}
        self._known: dict[str, JobUid] = {}
        self._names: dict[JobUid, JobName] = {}
        self._pods: dict[JobUid, tuple[int, float]] = {}
        """Number of each job's registered pods, and when it was looked at."""
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
        self._jobs.pop(uid, None)
        self._pods.pop(uid, None)
        return await self.store.delete(uid) or known

    async def refresh_metrics(self) -> None:
        """Show each job as it is in the store now, and drop those that are gone.

        Whichever replica was asked to commit or to delete: all show the same afterwards.
        """
        shown = self.metrics.jobs
        try:
            there = frozenset(await self.store.list_uids()) if shown else frozenset()
        except StoreUnavailableError as error:
            logger.warning("which jobs are gone is not known: %s", error)
            return
        for uid in sorted(shown):
            if uid not in there:
                self.metrics.drop_job(uid)
                continue
            # Whatever is wrong with one job, the others are shown all the same.
            try:
                await self._show(JobUid(uid))
            except MainstayError as error:
                self.metrics.unshown.inc()
                logger.warning("how the job is, is not known: %s", error, extra=about(uid=uid))
            except Exception:
                self.metrics.unshown.inc()
                logger.exception("how the job is, cannot be shown", extra=about(uid=uid))

    async def _show(self, uid: JobUid) -> None:
        """Show a job as it is in the store now."""
        snapshot = await self.store.load(uid)
        if snapshot is None:
            self.metrics.drop_job(uid)
            return
        self.metrics.show_job(snapshot.state)
        stores = await fetch_summary(self.store, snapshot.state)
        if stores is not None:
            config = snapshot.state.config
            labels = JobLabels(config.job, config.namespace, config.name)
            self.metrics.show_snapshots(labels, stores)

    async def recover(self, held: HeldJob) -> Plan | None:
        """Make a lost job again, or learn a plan that a supervisor holds and the store does not.

        Returns:
            The newest plan; None without one (the job is to form anew).
        """
        if await self.create(held.config, held.manifest):
            fields = about(uid=held.config.job)
            logger.warning("the job was not in the store: made again", extra=fields)
        return await self.job(held.config.job).take_held(held)

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

    async def count_pods(self, uid: JobUid) -> int:
        """Return how many pods of the job have registered and are not gone, a moment ago."""
        known, at_s = self._pods.get(uid, (0, -math.inf))
        now_s = time.monotonic()
        if now_s - at_s < COUNT_PODS_S:
            return known
        snapshot = await self.store.load(uid)
        count = 0 if snapshot is None else sum(not pod.gone for pod in snapshot.state.pods)
        self._pods[uid] = (count, now_s)
        return count

    def now_s(self) -> float:
        """Return the wall clock of this process."""
        return self._clock()

    async def load(self, uid: JobUid) -> CoordinatorState:
        """Return the job's state."""
        return (await self.job(uid).load()).state

    async def load_all(self) -> list[CoordinatorState]:
        """Return the states of all jobs; one that cannot be read is no reason to show none."""
        states = []
        for uid in await self.store.list_uids():
            try:
                states.append(await self.load(uid))
            except UnknownJobError:
                continue  # deleted since
            except RemoteProtocolError as error:
                logger.error("the state of job %s cannot be read: %s", uid, error)
        return states

    def job(self, uid: JobUid) -> SupervisorAnswers:
        """Return one job as its supervisors see it."""
        job = self._jobs.get(uid)
        if job is None:
            job = self._jobs[uid] = _Job(self, uid)
        return job

    async def add_findings(
        self, uid: JobUid, told: Sequence[ToldFinding], held: QuorumId | None = None
    ) -> None:
        """Keep what checks have found, and have the job's history tell of it.

        Args:
            uid: the job.
            told: findings, of each trainer in their order.
            held: the quorum of the newest plan that the teller holds.

        Raises:
            StoreBehindError: the teller's plan is not known here; nothing was written.
            RemoteProtocolError: a finding is of no step of the job; likewise.
            UnregisteredPodError: its pod is unknown or counts as gone; likewise.
        """
        state = await self.load(uid)
        refuse_behind(state, held)
        for one in told:
            check_finding(state, one.finding)
        outcome = await self.store.put_findings(uid, with_names(state, told))
        labels = JobLabels(uid, state.config.namespace, state.config.name)
        self.metrics.count_findings(labels, outcome.fresh)
        if not outcome.fresh or outcome.total - len(outcome.fresh) >= MAX_IN_HISTORY:
            return
        message = describe_findings(outcome.fresh)
        logger.warning("%s", message, extra=about(uid=uid, decision=FINDING_CODE))
        announce = Announce(code=FINDING_CODE, message=message, warning=True)
        await self.store.append(uid, "event", history_line(announce, self.now_s()))

    async def apply(self, uid: JobUid, event: Event, held: QuorumId | None = None) -> Transition:
        """Decide on an event, store the outcome and make it visible, and return it.

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
        return await self.job(uid).apply(event, held)

    def unknown_job(self, uid: JobUid) -> UnknownJobError:
        """Return the error of a job that has vanished, and forget what its names were."""
        self._known.clear()
        self._names.clear()
        self._pods.clear()
        return UnknownJobError(f"job {uid} has vanished from the store")

    def note_later(self, procedure: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a procedure a moment later, while nobody waits for it."""

        async def run() -> None:
            await asyncio.sleep(NOTE_AFTER_S)
            await procedure()

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def aclose(self) -> None:
        """Wait for the records that are still being written."""
        await asyncio.gather(*self._background, return_exceptions=True)

    async def look(self, uid: JobUid, silence: HeartbeatLag) -> Transition | None:
        """Look at a job for silence; None once it has ended."""
        return await self.job(uid).look(silence)


class _Job(SupervisorAnswers):
    """One job's transactions, one after the other in this process.

    Args:
        transactions: have the store, the clock and the metrics.
        uid: the job.
    """

    def __init__(self, transactions: Transactions, uid: JobUid) -> None:
        super().__init__(JobStore(transactions.store, uid), transactions.settings.max_conflicts)
        self._transactions, self._uid = transactions, uid
        self._lock = asyncio.Lock()
        self._uncounted = 0
        """Heartbeats that were taken and are not in the metrics yet."""
        self._told_uncounted = False
        self._since_s = 0.0
        """Processor time of this thread when others had their last turn before a decision."""

    def now_s(self) -> float:
        return self._transactions.now_s()

    async def beat(self, heartbeat: Heartbeat) -> BeatReply:
        reply = await super().beat(heartbeat)
        if reply.known:
            self._uncounted += 1
            await self._count_heartbeats()
        return reply

    async def _count_heartbeats(self) -> None:
        """Count the heartbeats that were taken; later, if what the job is called is not known now.

        They are in the store: whoever sends one must not hear that it was not taken.
        """
        try:
            name = await self._transactions.fetch_name(self._uid)
        except MainstayError as error:
            if not self._told_uncounted:
                self.warn(f"heartbeats are counted when the job can be read: {error}")
            self._told_uncounted = True
            return
        if name is not None:
            labels, number = JobLabels(self._uid, name.namespace, name.name), self._uncounted
            self._uncounted, self._told_uncounted = 0, False
            self._transactions.metrics.count_heartbeats(labels, number)

    async def add_to_ledger(
        self, entries: Sequence[LedgerEntry], held: QuorumId | None = None
    ) -> None:
        await super().add_to_ledger(entries, held)
        # Not only by the replica that commits a step: others show how the job is as well.
        self._transactions.metrics.note_job(self._uid)

    def entered(self, state: CoordinatorState, entries: Sequence[LedgerEntry]) -> None:
        labels = JobLabels(self._uid, state.config.namespace, state.config.name)
        waited_s = sum(entry.copy_wait_s for entry in entries)
        self._transactions.metrics.count_copy_waits(labels, waited_s)

    async def step(self, state: CoordinatorState, event: Event) -> Transition:
        # Many events may be decided in one transaction. Others who have asked get turns meanwhile,
        # but not before each: where many ask, a turn of them all takes longer than a decision, and
        # those who wait for all decisions of a transaction give up after a bound.
        if time.thread_time() - self._since_s > GIVE_WAY_S:
            await asyncio.sleep(0)
            self._since_s = time.thread_time()
        nonce, now_s = self._transactions.draw_nonce(), self.now_s()
        return await beside(size_of(state), machine.step, state, event, now_s, nonce)

    def turn(self) -> asyncio.Lock:
        return self._lock

    async def in_turn(
        self, events: Sequence[Event], held: QuorumId | None
    ) -> list[Transition | Exception]:
        try:
            # A store that hangs must not keep an ever longer queue waiting behind one request.
            async with asyncio.timeout(2 * self._transactions.settings.redis_timeout_s):
                return await super().in_turn(events, held)
        except TimeoutError as error:
            raise StoreUnavailableError("no decision in time; the store hangs") from error

    def note_later(self, procedure: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._transactions.note_later(procedure)

    def warn(self, text: str) -> None:
        logger.warning("%s", text, extra=about(uid=self._uid))

    def conflicted(self) -> None:
        self._transactions.metrics.conflicts.inc()

    def unknown_job(self) -> UnknownJobError:
        return self._transactions.unknown_job(self._uid)

    def decided(self, before: CoordinatorState, outcome: Transition) -> None:
        metrics, config = self._transactions.metrics, outcome.state.config
        labels = JobLabels(self._uid, config.namespace, config.name)
        recoveries = [a.recovery for a in outcome.actions if isinstance(a, RecordRecovery)]
        metrics.count_recoveries(labels, recoveries)
        # Only the replica whose decision is stored comes here, so the steps count once.
        metrics.count_steps(labels, outcome.state.progress.steps - before.progress.steps)
        for action in outcome.actions:
            if isinstance(action, Announce):
                level = logging.WARNING if action.warning else logging.INFO
                fields = about(uid=self._uid, decision=action.code)
                logger.log(level, "%s", action.message, extra=fields)

    async def contradicted(self, old: LedgerEntry, new: LedgerEntry) -> None:
        message = (
            f"step {new.step} of {_place(new)} came out differently: {new.masters} in "
            f"{new.quorum}, {old.masters} in {old.quorum}"
        )
        logger.error("%s", message, extra=about(uid=self._uid))
        announce = Announce(code="LedgerMismatch", message=message, warning=True)
        line = history_line(announce, self.now_s())
        await self._transactions.store.append(self._uid, "event", line)


def _name_of(config: JobConfig) -> JobName:
    return JobName(namespace=config.namespace, name=config.name)


def _place(entry: LedgerEntry) -> str:
    return f"stage {entry.stage}" + (f", inner rank {entry.inner}" if entry.inner else "")
