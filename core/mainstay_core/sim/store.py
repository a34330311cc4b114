"""The store: a job's state under compare-and-set, its stream, its heartbeats.

What ``mainstay_api.store`` has Redis do in one script is one event here. A call
takes a while each way; while the store is away it fails, and what was carried
out before the answer got lost stays carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from mainstay_core.errors import MainstayError, StoreConflictError
from mainstay_core.ids import QuorumId
from mainstay_core.jobstate import CoordinatorState, JobPhase
from mainstay_core.messages import LedgerEntry, LedgerKey, Plan
from mainstay_core.sim.checks import Checks
from mainstay_core.sim.engine import Engine, Signal, Steps
from mainstay_core.sim.network import Network

T = TypeVar("T")
NODE = "redis"


class StoreUnavailableError(MainstayError):
    """The store is not reached."""


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of the job's stream."""

    number: int
    kind: str
    body: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one decision makes visible."""

    state: CoordinatorState
    plan: Plan | None
    items: tuple[tuple[str, object], ...]
    arrived: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer to a heartbeat."""

    known: bool
    quorum: QuorumId | None
    phase: JobPhase


@dataclass(slots=True)
class Data:
    """What is stored."""

    state: CoordinatorState
    version: int = 1
    plan: Plan | None = None
    stream: list[Item] = field(default_factory=list)
    seen_s: dict[str, float] = field(default_factory=dict)
    ledger: dict[LedgerKey, LedgerEntry] = field(default_factory=dict)


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
        self.up = True
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
            data.version += 1
            data.state = change.state
            if change.plan is not None:
                data.plan = change.plan
                self._checks.published(change.plan)
            for kind, body in change.items:
                data.stream.append(Item(len(data.stream) + 1, kind, body))
            for pod in change.arrived:
                data.seen_s[pod] = self._engine.now_s
            for pod in change.gone:
                data.seen_s.pop(pod, None)
            if change.items:
                self.changed.fire()

        return script

    def beat(self, pod: str) -> Callable[[Data], Beat]:
        """Return the script that notes that a pod is alive."""

        def script(data: Data) -> Beat:
            known = pod in data.seen_s
            if known:
                data.seen_s[pod] = self._engine.now_s
            return Beat(known, data.plan.quorum if data.plan else None, data.state.phase)

        return script

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
