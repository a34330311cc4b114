"""The interface of a store: its values, its failures, and one protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.recoveries import Recovery


class UnknownJobError(MainstayError):
    """The store has no such job (any more)."""


class DeletedJobError(UnknownJobError):
    """The job was deleted: it is not made again."""


class StoreUnavailableError(MainstayError):
    """The store is not reached: nothing was decided, ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job's state and the version that a change of it must name."""

    revision: int
    state: CoordinatorState
    server: str
    """Name of the Redis process that it was read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamItem:
    """One entry of a job's stream."""

    id: str
    kind: str
    """``plan``, ``inject``, ``stop`` or ``event``."""
    data: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The changes that one decision makes visible."""

    state: CoordinatorState
    plan: Plan | None = None
    items: tuple[tuple[str, str], ...] = ()
    """(kind, JSON) in order."""
    recoveries: tuple[Recovery, ...] = ()
    arrived: tuple[PodUid, ...] = ()
    """Pods that count as heard now."""
    gone: tuple[PodUid, ...] = ()
    """Pods whose heartbeats are refused from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReply:
    """The answer to a heartbeat."""

    known: bool
    """False: the pod has to register first."""
    quorum: str | None
    """JSON of the newest quorum's id."""
    phase: str | None
    """None: there is no such job."""
    restored_at_s: float = 0.0
    """When the job was last restored from a supervisor's plan; 0: never."""


class Store(Protocol):
    """A store of jobs. Every method may raise StoreUnavailableError."""

    async def ping(self) -> None: ...
    async def aclose(self) -> None: ...
    async def create(self, state: CoordinatorState, manifest: Mapping[str, Any]) -> bool: ...
    async def delete(self, uid: JobUid) -> bool: ...
    async def put_manifest(self, uid: JobUid, manifest: Mapping[str, Any]) -> None: ...
    async def resolve(self, job: str) -> JobUid | None: ...
    async def list_uids(self) -> tuple[JobUid, ...]: ...
    async def load(self, uid: JobUid) -> Snapshot | None: ...
    async def fetch_manifest(self, uid: JobUid) -> dict[str, Any]: ...
    async def fetch_plan(self, uid: JobUid) -> tuple[str | None, str, str]: ...
    async def commit(self, uid: JobUid, version: int, change: Change) -> None: ...
    async def append(self, uid: JobUid, kind: str, data: str) -> None: ...
    async def beat(self, uid: JobUid, heartbeat: Heartbeat) -> BeatReply: ...
    async def fetch_seen(self, uid: JobUid) -> dict[PodUid, int]: ...
    async def fetch_beats(self, uid: JobUid) -> dict[PodUid, Heartbeat]: ...
    async def fetch_recoveries(self, uid: JobUid) -> tuple[Recovery, ...]: ...
    async def fetch_ledger(
        self, uid: JobUid, keys: Sequence[LedgerKey]
    ) -> dict[LedgerKey, LedgerEntry]: ...
    async def put_ledger(self, uid: JobUid, entries: Sequence[LedgerEntry]) -> None: ...
    async def read_stream(
        self, uid: JobUid, after: str, block_s: float | None
    ) -> tuple[StreamItem, ...]: ...
    async def hold_lease(self, holder: str, lease_s: float) -> bool: ...
    async def release_lease(self, holder: str) -> None: ...
