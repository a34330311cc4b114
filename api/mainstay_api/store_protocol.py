"""The interface of a store: its values, its failures, and one protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mainstay_core.base import codec
from mainstay_core.base.ids import JobUid, PodUid, QuorumId
from mainstay_core.control_plane.job_store import (
    STREAM_KINDS,
    BeatReply,
    Change,
    Seen,
    Snapshot,
    UnknownJobError,
)
from mainstay_core.control_plane.stream import StreamItem
from mainstay_core.coordinator.events import (
    Action,
    AddFaults,
    AddFired,
    Announce,
    EndJob,
    Inject,
    PublishPlan,
)
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.findings import MAX_KEPT, FindingsPage, ToldFinding
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.recoveries import Recovery
from mainstay_core.wire.stores import Doubts, StoreCheck, StoreReply, StoreStatus


class DeletedJobError(UnknownJobError):
    """The job was deleted: it is not made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFindings:
    """The outcome of findings that were put into the store."""

    fresh: tuple[ToldFinding, ...]
    """Those that were not known."""
    total: int
    """All that were ever told of the job."""


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
    async def commit(self, uid: JobUid, revision: int, change: Change) -> None: ...
    async def append(self, uid: JobUid, kind: str, data: str) -> None: ...
    async def beat(self, uid: JobUid, heartbeat: Heartbeat) -> BeatReply: ...
    async def fetch_seen(self, uid: JobUid) -> Seen: ...
    async def fetch_beats(self, uid: JobUid) -> dict[PodUid, Heartbeat]: ...
    async def put_store(self, uid: JobUid, status: StoreStatus) -> StoreReply: ...
    async def fetch_stores(self, uid: JobUid) -> dict[PodUid, StoreStatus]: ...
    async def fetch_checks(self, uid: JobUid) -> tuple[int, dict[PodUid, StoreCheck]]: ...
    async def put_doubts(
        self, uid: JobUid, check: int, doubts: Mapping[PodUid, Doubts]
    ) -> None: ...
    async def want_check(self, uid: JobUid) -> int: ...
    async def fetch_recoveries(self, uid: JobUid) -> tuple[Recovery, ...]: ...
    async def fetch_ledger(
        self, uid: JobUid, keys: Sequence[LedgerKey]
    ) -> dict[LedgerKey, LedgerEntry]: ...
    async def put_ledger(self, uid: JobUid, entries: Sequence[LedgerEntry]) -> None: ...
    async def put_findings(self, uid: JobUid, told: Sequence[ToldFinding]) -> NewFindings: ...
    async def fetch_findings(
        self, uid: JobUid, first: int = 0, newest: int = MAX_KEPT
    ) -> FindingsPage: ...
    async def read_stream(
        self, uid: JobUid, after: str, block_s: float | None
    ) -> tuple[StreamItem, ...]: ...
    async def hold_lease(self, holder: str, lease_s: float) -> bool: ...
    async def release_lease(self, holder: str) -> None: ...


class JobStore:
    """One job's part of the store.

    Args:
        store: of all jobs.
        uid: the job.
    """

    def __init__(self, store: Store, uid: JobUid) -> None:
        self._store, self._uid = store, uid

    async def load(self) -> Snapshot | None:
        return await self._store.load(self._uid)

    async def commit(self, revision: int, change: Change) -> None:
        await self._store.commit(self._uid, revision, change)

    async def beat(self, heartbeat: Heartbeat) -> BeatReply:
        return await self._store.beat(self._uid, heartbeat)

    async def fetch_plan(self) -> tuple[str | None, str, str]:
        return await self._store.fetch_plan(self._uid)

    async def read_stream(self, after: str, block_s: float | None) -> tuple[StreamItem, ...]:
        return await self._store.read_stream(self._uid, after, block_s)

    async def fetch_seen(self) -> Seen:
        return await self._store.fetch_seen(self._uid)

    async def fetch_held(self, pods: Sequence[PodUid]) -> dict[PodUid, QuorumId | None]:
        beats = await self._store.fetch_beats(self._uid)
        return {pod: beats[pod].quorum for pod in pods if pod in beats}

    async def fetch_ledger(self, keys: Sequence[LedgerKey]) -> dict[LedgerKey, LedgerEntry]:
        return await self._store.fetch_ledger(self._uid, keys)

    async def put_ledger(self, entries: Sequence[LedgerEntry]) -> None:
        await self._store.put_ledger(self._uid, entries)


def stream_items(action: Action, now_s: float) -> tuple[tuple[str, str], ...]:
    """Return an action's entry in the job's stream, as (kind, JSON), if it has one."""
    kind = STREAM_KINDS.get(type(action))
    return () if kind is None else ((kind, _data(action, now_s)),)


def _data(action: Action, now_s: float) -> str:
    match action:
        case PublishPlan(plan=plan):
            return codec.dumps(plan)
        case Inject(fault=fault, pod=pod):
            return json.dumps({**codec.encode(fault), "pod": pod})
        case AddFaults(faults=faults):
            return codec.dumps(faults)
        case AddFired(fault=name):
            return json.dumps({"fault": name})
        case EndJob(state=state, reason=reason):
            return json.dumps({"state": state.value, "reason": reason})
        case Announce():
            return history_line(action, now_s)
    raise AssertionError(f"{action} has no entry in the stream")


def history_line(announce: Announce, now_s: float) -> str:
    """Return an announcement as it stands in the job's history."""
    return json.dumps(
        {
            "at_s": now_s,
            "type": "Warning" if announce.warning else "Normal",
            "reason": announce.code,
            "message": announce.message,
        }
    )
