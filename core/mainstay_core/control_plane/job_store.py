"""Defines what a store keeps of one job, and what its scripts do to that.

A store carries out each script in one step, whatever else is asked of it. ``mainstay_api.store``
has them in Redis, written in Lua. :class:`StoredJob` says on values what they do: the simulation
stores jobs so, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mainstay_core.base.errors import MainstayError, StoreConflictError
from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.base.values import replace
from mainstay_core.coordinator.events import (
    Action,
    AddFaults,
    AddFired,
    Announce,
    EndJob,
    Inject,
    PublishPlan,
    RecordRecovery,
    Transition,
)
from mainstay_core.coordinator.state import CoordinatorState, pods_moved
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.recoveries import Recovery

STREAM_KINDS: Mapping[type, str] = {
    PublishPlan: "plan",
    Inject: "inject",
    AddFaults: "faults",
    AddFired: "fired",
    EndJob: "stop",
    Announce: "event",
}
"""The actions that have an entry in the job's stream, and the entry's kind."""
PUSHED = frozenset({"plan", "inject", "faults", "fired", "stop"})
"""Kinds of entries that supervisors get; the others are history."""


class UnknownJobError(MainstayError):
    """The store has no such job (any more)."""


class StoreUnavailableError(MainstayError):
    """The store is not reached: nothing was decided, ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job's state and the revision that a change of it must name."""

    revision: int
    state: CoordinatorState
    server: str
    """Name of the store's process that it was read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The changes that one decision stores and shows, at once or not at all."""

    state: CoordinatorState
    plan: Plan | None = None
    shown: tuple[Action, ...] = ()
    """Actions, some of which are entries of the job's stream."""
    recoveries: tuple[Recovery, ...] = ()
    arrived: tuple[PodUid, ...] = ()
    """Pods that count as heard now."""
    gone: tuple[PodUid, ...] = ()
    """Pods whose heartbeats are refused from now on."""
    at_s: float = 0.0
    """Wall clock of the decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReply:
    """The store's answer when a heartbeat is noted."""

    known: bool
    """False: the pod has to register first."""
    quorum: QuorumId | None
    """Of the newest plan."""
    phase: JobPhase | None
    """None: there is no such job."""
    restored_at_s: float = 0.0
    """When the job was last restored from a supervisor's plan; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The times at which a store heard of pods, in microseconds of its own clock."""

    now_us: int
    """When this was read."""
    at_us: Mapping[PodUid, int]
    """Of the last heartbeat of each pod that is not gone."""

    def by_clock(self, now_s: float) -> dict[str, float]:
        """Return for each pod when it was heard, by a clock that showed ``now_s`` at the reading.

        The store's clock may differ from that one.
        """
        return {pod: now_s - (self.now_us - at_us) / 1e6 for pod, at_us in self.at_us.items()}


class JobStore(Protocol):
    """A store of one job, as its transactions need it.

    Every method may raise StoreUnavailableError.
    """

    async def load(self) -> Snapshot | None: ...

    async def commit(self, revision: int, change: Change) -> None:
        """Store a change, if the state still has ``revision``.

        Raises:
            StoreConflictError: somebody else decided first.
        """

    async def beat(self, heartbeat: Heartbeat) -> BeatReply: ...

    async def fetch_plan(self) -> tuple[Any, str, str]:
        """Return (plan as the store keeps it, stream position where it is current, phase)."""

    async def fetch_seen(self) -> Seen: ...
    async def fetch_held(self, pods: Sequence[PodUid]) -> Mapping[PodUid, QuorumId | None]: ...
    async def fetch_ledger(self, keys: Sequence[LedgerKey]) -> Mapping[LedgerKey, LedgerEntry]: ...
    async def put_ledger(self, entries: Sequence[LedgerEntry]) -> None: ...


def change_of(before: CoordinatorState, outcome: Transition, now_s: float) -> Change:
    """Return what a transition stores and shows."""
    arrived, gone = pods_moved(before, outcome.state)
    return Change(
        state=outcome.state,
        plan=outcome.plan,
        shown=outcome.actions,
        recoveries=tuple(a.recovery for a in outcome.actions if isinstance(a, RecordRecovery)),
        arrived=arrived,
        gone=gone,
        at_s=now_s,
    )


# What the scripts do -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEntry:
    """One entry of a job's stream."""

    number: int
    kind: str
    action: Action
    """What it tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """One job as a store keeps it. Times are microseconds by the store's own clock."""

    state: CoordinatorState
    revision: int = 1
    plan: Plan | None = None
    stream: tuple[StreamEntry, ...] = ()
    recoveries: Mapping[int, Recovery] = field(default_factory=dict)
    """By id of their quorum."""
    seen_us: Mapping[PodUid, int] = field(default_factory=dict)
    """When each pod was heard last; a pod that is not here has to register."""
    beats: Mapping[PodUid, Heartbeat] = field(default_factory=dict)
    ledger: Mapping[LedgerKey, LedgerEntry] = field(default_factory=dict)

    @property
    def cursor(self) -> int:
        """Return the number of the stream's last entry."""
        return self.stream[-1].number if self.stream else 0

    def after(self, cursor: int) -> tuple[StreamEntry, ...]:
        """Return the stream's entries after ``cursor``."""
        if self.cursor <= cursor:
            return ()
        return tuple(entry for entry in self.stream if entry.number > cursor)

    def is_current(self, revision: int) -> bool:
        """Return whether a decision from ``revision`` is one from the newest state."""
        return self.revision == revision

    def commit(self, revision: int, change: Change, now_us: int) -> StoredJob:
        """Return the job with a change.

        Raises:
            StoreConflictError: somebody else decided first.
        """
        if not self.is_current(revision):
            raise StoreConflictError(f"the job is not at revision {revision} any more")
        seen_us = {**self.seen_us, **dict.fromkeys(change.arrived, now_us)}
        told = {r.quorum.id: r for r in change.recoveries}
        return replace(
            self,
            state=change.state,
            revision=self.revision + 1,
            plan=change.plan or self.plan,
            stream=(*self.stream, *self._entries(change.shown, now_us)),
            recoveries={**self.recoveries, **told},
            seen_us={p: at_us for p, at_us in seen_us.items() if p not in change.gone},
            beats={p: beat for p, beat in self.beats.items() if p not in change.gone},
        )

    def _entries(self, shown: Sequence[Action], now_us: int) -> tuple[StreamEntry, ...]:
        """Return the entries of actions, numbered by time: no number ever comes again."""
        kept = [action for action in shown if type(action) in STREAM_KINDS]
        first = max(now_us, self.cursor + 1)
        return tuple(
            StreamEntry(number=number, kind=STREAM_KINDS[type(action)], action=action)
            for number, action in enumerate(kept, first)
        )

    def beat(self, heartbeat: Heartbeat, now_us: int) -> tuple[StoredJob, BeatReply]:
        """Return the job with a heartbeat noted, if its pod is registered; and the answer."""
        known = heartbeat.pod in self.seen_us
        reply = BeatReply(
            known=known,
            quorum=self.plan.quorum if self.plan else None,
            phase=self.state.phase,
            restored_at_s=self.state.restored_at_s,
        )
        if not known:
            return self, reply
        seen_us = {**self.seen_us, heartbeat.pod: now_us}
        return replace(self, seen_us=seen_us, beats={**self.beats, heartbeat.pod: heartbeat}), reply

    def put_ledger(self, entries: Sequence[LedgerEntry]) -> StoredJob:
        """Return the job with entries written over what is there."""
        return replace(self, ledger={**self.ledger, **{e.key: e for e in entries}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one replica of the api to watch for silence."""

    holder: str = ""
    until_us: int = 0

    def take(self, holder: str, lease_us: int, now_us: int) -> Lease | None:
        """Return the lease taken or renewed by ``holder``; None while another one has it."""
        if self.holder != holder and self.until_us > now_us:
            return None
        return Lease(holder=holder, until_us=now_us + lease_us)
