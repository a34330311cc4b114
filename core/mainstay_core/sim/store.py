"""The store of the api: one played Redis, with what it forgets and how it is reached.

What a script does to a job is said in :mod:`mainstay_core.control_plane.job_store`. A call takes a
while each way. While the store is away it fails, and what was carried out before the answer got
lost stays carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mainstay_core.base.errors import StoreConflictError
from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.control_plane.job_store import (
    PUSHED,
    BeatReply,
    Change,
    Lease,
    Seen,
    Snapshot,
    StoredJob,
    StoreUnavailableError,
    StreamEntry,
)
from mainstay_core.control_plane.stream import StreamItem, order
from mainstay_core.coordinator.events import PublishPlan
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.sim.engine import Awaited, Engine, Signal, Steps
from mainstay_core.sim.invariants.checks import Checks
from mainstay_core.sim.network import Network
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.plan import Plan

T = TypeVar("T")
NODE = "redis"
MAX_FORMER = 40


class Store:
    """One Redis for all api replicas.

    Args:
        engine: the clock; the store's own is the reference for silence.
        network: replicas reach the store through it.
        state: of a job that nobody has joined yet.
        checks: told of every plan that becomes durable.
    """

    def __init__(
        self, engine: Engine, network: Network, state: CoordinatorState, checks: Checks
    ) -> None:
        self._engine, self._network, self._checks = engine, network, checks
        self.job: StoredJob | None = StoredJob(state=state)
        """None: the job is not there."""
        self.last = state
        """Newest decision, whatever the store has lost since."""
        self.up = True
        self.remembers = False
        """Whether former states are kept, to fall back to."""
        self._former: list[StoredJob] = []
        self._num_servers = 1
        self.changed = Signal()
        """Fired when the stream grows."""
        self._lease = Lease()

    @property
    def state(self) -> CoordinatorState | None:
        """The job's state; None: the job is not there."""
        return None if self.job is None else self.job.state

    @property
    def server(self) -> str:
        """Name of the process."""
        return f"redis{self._num_servers}"

    @property
    def now_us(self) -> int:
        """The store's own clock."""
        return round(self._engine.now_s * 1e6)

    def call(self, node: str, work: Callable[[], T]) -> Steps[T]:
        """Carry ``work`` out in the store.

        Raises:
            StoreUnavailableError: not reached; it may have been carried out.
        """
        yield self._network.delay(node, NODE)
        self._check(node)
        result = work()
        yield self._network.delay(NODE, node)
        self._check(node)
        return result

    def _check(self, node: str) -> None:
        if not self.up or self._network.is_cut(node, NODE) or self._network.is_cut(NODE, node):
            raise StoreUnavailableError("Redis does not answer")

    def commit(self, revision: int, change: Change) -> None:
        """Make a decision durable and visible.

        Raises:
            StoreConflictError: somebody else decided first.
        """
        before = self.job
        if before is None:
            raise StoreConflictError("the job is gone")
        after = before.commit(revision, change, self.now_us)
        if self.remembers:
            self._former = [*self._former[-MAX_FORMER:], before]
        self._checks.committed(before.state, change.state)
        self.job, self.last = after, change.state
        if change.plan is not None:
            self._checks.published(change.plan)
        if any(entry.kind in PUSHED for entry in after.after(before.cursor)):
            self.changed.fire()

    def beat(self, heartbeat: Heartbeat) -> BeatReply:
        """Note that a pod is alive."""
        if self.job is None:
            return BeatReply(known=False, quorum=None, phase=None)
        self.job, reply = self.job.beat(heartbeat, self.now_us)
        return reply

    def create(self, state: CoordinatorState) -> bool:
        """Make the job, if it is not there."""
        if self.job is not None:
            return False
        self.job = StoredJob(state=state)
        return True

    def put_ledger(self, entries: Sequence[LedgerEntry]) -> None:
        """Write entries over what is there."""
        if self.job is not None:
            self.job = self.job.put_ledger(entries)

    def lose(self, draw: Callable[[int], int] | None) -> None:
        """Start the store again, empty, or with the former state that ``draw`` chooses."""
        self._num_servers += 1
        how = "empty" if draw is None else "from the past"
        self._engine.say(self.server, f"is started, {how}")
        if draw is None or not self._former:
            self.job = None
        else:
            number = draw(len(self._former))
            self.job = self._former[number]
            del self._former[number + 1 :]
        self.changed.fire()

    def fall_back_to(self, quorum: QuorumId) -> bool:
        """Start the store again, with the newest former state that has the plan of a quorum.

        Return whether one is remembered.
        """
        plans = [job.state.plan for job in self._former]
        known = [n for n, plan in enumerate(plans) if plan is not None and plan.quorum == quorum]
        if known:
            self.lose(lambda _: known[-1])
        return bool(known)

    def hold_lease(self, holder: str, lease_s: float) -> bool:
        """Take or renew the watcher's lease."""
        taken = self._lease.take(holder, round(lease_s * 1e6), self.now_us)
        self._lease = taken or self._lease
        return taken is not None


class Reached:
    """The store as one node reaches it (the transactions' ``JobStore``).

    Args:
        store: of the job.
        node: whose calls these are.
    """

    def __init__(self, store: Store, node: str) -> None:
        self._store, self._node = store, node

    async def _call(self, work: Callable[[], T]) -> T:
        return await Awaited(self._store.call(self._node, work))

    async def _read(self, read: Callable[[StoredJob], T], without: T) -> T:
        store = self._store
        return await self._call(lambda: without if store.job is None else read(store.job))

    async def load(self) -> Snapshot | None:
        store = self._store
        return await self._read(
            lambda job: Snapshot(revision=job.revision, state=job.state, server=store.server), None
        )

    async def create(self, state: CoordinatorState) -> bool:
        return await self._call(lambda: self._store.create(state))

    async def commit(self, revision: int, change: Change) -> None:
        await self._call(lambda: self._store.commit(revision, change))

    async def beat(self, heartbeat: Heartbeat) -> BeatReply:
        return await self._call(lambda: self._store.beat(heartbeat))

    async def fetch_plan(self) -> tuple[Plan | None, str, str]:
        return await self._read(
            lambda job: (job.plan, f"{job.cursor}-0", job.state.phase.value), (None, "0-0", "")
        )

    async def read_stream(self, after: str, block_s: float | None) -> tuple[StreamItem, ...]:
        cursor, store = order(after)[0], self._store
        nothing: tuple[StreamEntry, ...] = ()
        entries = await self._read(lambda job: job.after(cursor), nothing)
        newest = store.job.cursor if store.job is not None else 0
        # Redis answers a blocked read at once if something came while the first answer travelled.
        if not entries and block_s is not None and newest <= cursor:
            await store.changed
        return tuple(
            StreamItem(id=f"{entry.number}-0", kind=entry.kind, data=_data(entry))
            for entry in entries
        )

    async def fetch_seen(self) -> Seen:
        store = self._store
        return await self._call(
            lambda: Seen(now_us=store.now_us, at_us={} if store.job is None else store.job.seen_us)
        )

    async def fetch_held(self, pods: Sequence[PodUid]) -> dict[PodUid, QuorumId | None]:
        return await self._read(
            lambda job: {p: job.beats[p].quorum for p in pods if p in job.beats}, {}
        )

    async def fetch_ledger(self, keys: Sequence[LedgerKey]) -> dict[LedgerKey, LedgerEntry]:
        return await self._read(lambda job: {k: job.ledger[k] for k in keys if k in job.ledger}, {})

    async def put_ledger(self, entries: Sequence[LedgerEntry]) -> None:
        await self._call(lambda: self._store.put_ledger(entries))

    async def hold_lease(self, holder: str, lease_s: float) -> bool:
        return await self._call(lambda: self._store.hold_lease(holder, lease_s))


def _data(entry: StreamEntry) -> Plan | None:
    return entry.action.plan if isinstance(entry.action, PublishPlan) else None
