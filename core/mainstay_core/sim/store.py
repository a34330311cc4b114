"""The store: a job's state under compare-and-set, its stream, its heartbeats.

What ``mainstay_api.store`` has Redis do in one script is one event here. A call
takes a while each way; while the store is away it fails, and what was carried
out before the answer got lost stays carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mainstay_core.base.errors import StoreConflictError
from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.coordinator.events import Action, EndJob, PublishPlan
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.coordinator.transactions import (
    BeatReply,
    Change,
    Snapshot,
    StoreUnavailableError,
)
from mainstay_core.sim.checks import Checks
from mainstay_core.sim.engine import Awaited, Engine, Signal, Steps
from mainstay_core.sim.network import Network
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.plan import Plan

T = TypeVar("T")
NODE = "redis"
MAX_FORMER = 40


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of the job's stream."""

    number: int
    kind: str
    body: object


@dataclass(slots=True)
class Data:
    """The contents of the store."""

    state: CoordinatorState | None
    """None: the job is not there."""
    server: str = "redis1"
    """Name of the process."""
    version: int = 1
    plan: Plan | None = None
    stream: list[Item] = field(default_factory=list)
    seen_s: dict[str, float] = field(default_factory=dict)
    beats: dict[str, QuorumId | None] = field(default_factory=dict)
    """By pod: the plan that its last heartbeat named."""
    ledger: dict[LedgerKey, LedgerEntry] = field(default_factory=dict)

    @property
    def cursor(self) -> int:
        """Number of the stream's last entry."""
        return self.stream[-1].number if self.stream else 0

    def after(self, cursor: int) -> list[Item]:
        """Return the stream's entries after ``cursor``."""
        if self.cursor <= cursor:
            return []
        return [item for item in self.stream if item.number > cursor]


class Store:
    """One Redis for all api replicas.

    Args:
        engine: the clock; the store's own is the reference for silence.
        network: replicas reach the store through it.
        state: of a job that nobody has joined yet.
        checks: told of every plan that becomes durable.
    """

    compare_and_set = True
    """Whether commits are refused when somebody else was first; tests switch it off."""

    def __init__(
        self, engine: Engine, network: Network, state: CoordinatorState, checks: Checks
    ) -> None:
        self._engine, self._network, self._checks = engine, network, checks
        self.data = Data(state)
        self.last = state
        """Newest decision, whatever the store has lost since."""
        self.up = True
        self.remembers = False
        """Whether former states are kept, to fall back to."""
        self._former: list[Data] = []
        self._servers = 1
        self._items = 0
        self.changed = Signal()
        """Fired when the stream grows."""
        self._lease: tuple[str, float] = ("", 0.0)

    def call(self, node: str, work: Callable[[Data], T]) -> Steps[T]:
        """Carry ``work`` out in the store.

        Raises:
            StoreUnavailableError: not reached; it may have been carried out.
        """
        yield self._network.delay(node, NODE)
        self._check(node)
        result = work(self.data)
        yield self._network.delay(NODE, node)
        self._check(node)
        return result

    def _check(self, node: str) -> None:
        if not self.up or self._network.is_cut(node, NODE) or self._network.is_cut(NODE, node):
            raise StoreUnavailableError("Redis does not answer")

    def commit(self, version: int, change: Change) -> Callable[[Data], None]:
        """Return the script that makes a decision durable and visible.

        It raises StoreConflictError when somebody else decided first.
        """

        def script(data: Data) -> None:
            if data.version != version and self.compare_and_set:
                raise StoreConflictError("somebody else decided first")
            if data.state is None:
                raise StoreConflictError("the job is gone")
            if self.remembers:
                self._former = [*self._former[-MAX_FORMER:], _copy(data)]
            data.version += 1
            self._checks.committed(data.state, change.state)
            data.state = self.last = change.state
            if change.plan is not None:
                data.plan = change.plan
                self._checks.published(change.plan)
            items = [item for action in change.shown for item in _shown(action)]
            for kind, body in items:
                # By time, as Redis numbers them: never again the same number.
                self._items += 1
                data.stream.append(Item(self._items, kind, body))
            for pod in change.arrived:
                data.seen_s[pod] = self._engine.now_s
            for pod in change.gone:
                data.seen_s.pop(pod, None)
                data.beats.pop(pod, None)
            if items:
                self.changed.fire()

        return script

    def beat(self, pod: str, held: QuorumId | None) -> Callable[[Data], BeatReply]:
        """Return the script that notes that a pod is alive."""

        def script(data: Data) -> BeatReply:
            if data.state is None:
                return BeatReply(known=False, quorum=None, phase=None)
            known = pod in data.seen_s
            if known:
                data.seen_s[pod], data.beats[pod] = self._engine.now_s, held
            return BeatReply(
                known=known,
                quorum=data.plan.quorum if data.plan else None,
                phase=data.state.phase,
                restored_at_s=data.state.restored_at_s,
            )

        return script

    def create(self, state: CoordinatorState) -> Callable[[Data], bool]:
        """Return the script that makes the job, if it is not there."""

        def script(data: Data) -> bool:
            if data.state is not None:
                return False
            data.state, data.version = state, 1
            return True

        return script

    def lose(self, draw: Callable[[int], int] | None) -> None:
        """Start the store again, empty, or with the former state that ``draw`` chooses."""
        self._servers += 1
        server = f"redis{self._servers}"
        self._engine.say(server, "is started, " + ("empty" if draw is None else "from the past"))
        if draw is None or not self._former:
            self.data = Data(None, server)
        else:
            number = draw(len(self._former))
            self.data = replace(_copy(self._former[number]), server=server)
            del self._former[number + 1 :]
        self.changed.fire()

    def hold_lease(self, holder: str, lease_s: float) -> Callable[[Data], bool]:
        """Return the script that takes or renews the watcher's lease."""

        def script(data: Data) -> bool:
            del data
            owner, until_s = self._lease
            if owner != holder and until_s > self._engine.now_s:
                return False
            self._lease = (holder, self._engine.now_s + lease_s)
            return True

        return script


class Reached:
    """The store as one node reaches it (the transactions' ``JobStore``).

    Args:
        store: of the job.
        node: whose calls these are.
    """

    def __init__(self, store: Store, node: str) -> None:
        self._store, self._node = store, node

    async def call(self, work: Callable[[Data], T]) -> T:
        """Carry ``work`` out in the store."""
        return await Awaited(self._store.call(self._node, work))

    async def load(self) -> Snapshot | None:
        """Return the job's state."""

        def read(data: Data) -> Snapshot | None:
            if data.state is None:
                return None
            return Snapshot(revision=data.version, state=data.state, server=data.server)

        return await self.call(read)

    async def create(self, state: CoordinatorState) -> bool:
        """Make the job, if it is not there."""
        return await self.call(self._store.create(state))

    async def commit(self, version: int, change: Change) -> None:
        """Make a change durable and visible."""
        await self.call(self._store.commit(version, change))

    async def beat(self, heartbeat: Heartbeat) -> BeatReply:
        """Note that a pod is alive."""
        return await self.call(self._store.beat(heartbeat.pod, heartbeat.quorum))

    async def fetch_seen(self) -> dict[PodUid, int]:
        """Return when each pod was last heard, in microseconds."""
        seen_s = await self.call(lambda data: dict(data.seen_s))
        return {PodUid(pod): round(at_s * 1e6) for pod, at_s in seen_s.items()}

    async def fetch_held(self, pods: Sequence[PodUid]) -> dict[PodUid, QuorumId | None]:
        """Return what the pods' last heartbeats named, where there are any."""
        return await self.call(lambda d: {p: d.beats[p] for p in pods if p in d.beats})

    async def fetch_ledger(self, keys: Sequence[LedgerKey]) -> dict[LedgerKey, LedgerEntry]:
        """Return the entries that there are."""
        return await self.call(lambda d: {k: d.ledger[k] for k in keys if k in d.ledger})

    async def put_ledger(self, entries: Sequence[LedgerEntry]) -> None:
        """Write entries over what is there."""
        await self.call(lambda data: data.ledger.update({e.key: e for e in entries}))

    async def hold_lease(self, holder: str, lease_s: float) -> bool:
        """Take or renew the watcher's lease."""
        return await self.call(self._store.hold_lease(holder, lease_s))


def _shown(action: Action) -> tuple[tuple[str, object], ...]:
    """An action's entry in the stream, if supervisors have any use for it."""
    match action:
        case PublishPlan(plan=plan):
            return (("plan", plan),)
        case EndJob(state=state):
            return (("stop", state),)
    return ()


def _copy(data: Data) -> Data:
    return replace(
        data,
        stream=list(data.stream),
        seen_s=dict(data.seen_s),
        beats=dict(data.beats),
        ledger=dict(data.ledger),
    )
