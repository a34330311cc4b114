"""A store of jobs in memory that keeps text, as Redis does: what is loaded was read from text.

It is a value with copies, so every input begins with the same jobs. What the scripts in Redis do is
said in :mod:`mainstay_core.control_plane.job_store`; here is as much of it as one api process sees.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from mainstay_api.findings import read_findings
from mainstay_api.store_protocol import NewFindings, stream_items
from mainstay_core.base import codec
from mainstay_core.base.errors import StoreConflictError
from mainstay_core.base.ids import JobUid, PodUid, QuorumId
from mainstay_core.control_plane.job_store import BeatReply, Change, Seen, Snapshot
from mainstay_core.control_plane.stream import StreamItem
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.findings import MAX_KEPT, FindingsPage, ToldFinding
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.recoveries import Recovery
from mainstay_core.wire.stores import Doubts, StoreCheck, StoreReply, StoreStatus

SERVER = "the store's process"


@dataclass(slots=True)
class _Record:
    """One job, as text."""

    name: str
    manifest: str
    state: str
    revision: int = 1
    plan: str | None = None
    stream: tuple[StreamItem, ...] = ()
    recoveries: dict[int, str] = field(default_factory=dict)
    ledger: dict[LedgerKey, str] = field(default_factory=dict)
    findings: dict[str, str] = field(default_factory=dict)
    seen: dict[PodUid, int] = field(default_factory=dict)
    beats: dict[PodUid, str] = field(default_factory=dict)
    stores: dict[PodUid, str] = field(default_factory=dict)
    checks: dict[PodUid, str] = field(default_factory=dict)
    doubts: dict[PodUid, str] = field(default_factory=dict)
    check: int = 0

    def fork(self) -> _Record:
        other = copy.copy(self)
        for name in (
            "recoveries",
            "ledger",
            "findings",
            "seen",
            "beats",
            "stores",
            "checks",
            "doubts",
        ):
            setattr(other, name, dict(getattr(self, name)))
        return other


class TextStore:
    """Jobs by uid."""

    def __init__(self, records: Mapping[JobUid, _Record] | None = None) -> None:
        self._records = dict(records or {})
        self._now_us = 1_700_000_000_000_000

    def fork(self) -> TextStore:
        """Return a copy that changes by itself."""
        return TextStore({uid: record.fork() for uid, record in self._records.items()})

    def become(self, other: TextStore) -> None:
        """Hold what another store holds; the other one is not used any more."""
        self._records = other._records

    async def hear_all(self, uid: JobUid) -> None:
        """Have every pod that is there send a heartbeat, which holds the plan in force."""
        state = _state(self._records[uid].state)
        quorum = state.plan.quorum if state.plan else None
        for pod in tuple(self._records[uid].seen):
            await self.beat(uid, Heartbeat(pod=pod, slots=(), quorum=quorum))

    async def ping(self) -> None: ...
    async def aclose(self) -> None: ...

    async def create(self, state: CoordinatorState, manifest: Mapping[str, Any]) -> bool:
        config = state.config
        if config.job in self._records:
            return False
        name = f"{config.namespace}:{config.name}" if config.namespace else config.name
        text = _text(json.dumps(manifest))
        self._records[config.job] = _Record(name, text, _text(codec.dumps(state)))
        return True

    async def delete(self, uid: JobUid) -> bool:
        return self._records.pop(uid, None) is not None

    async def put_manifest(self, uid: JobUid, manifest: Mapping[str, Any]) -> None:
        self._records[uid].manifest = _text(json.dumps(manifest))

    async def resolve(self, job: str) -> JobUid | None:
        _text(job)
        if job in self._records:
            return JobUid(job)
        return next((uid for uid, record in self._records.items() if record.name == job), None)

    async def list_uids(self) -> tuple[JobUid, ...]:
        return tuple(sorted(self._records))

    async def load(self, uid: JobUid) -> Snapshot | None:
        record = self._records.get(uid)
        if record is None:
            return None
        return Snapshot(revision=record.revision, state=_state(record.state), server=SERVER)

    async def fetch_manifest(self, uid: JobUid) -> dict[str, Any]:
        return dict(json.loads(self._records[uid].manifest))

    async def fetch_plan(self, uid: JobUid) -> tuple[str | None, str, str]:
        record = self._records[uid]
        cursor = record.stream[-1].id if record.stream else "0-0"
        return record.plan, cursor, _state(record.state).phase.value

    async def commit(self, uid: JobUid, revision: int, change: Change) -> None:
        record = self._records[uid]
        if record.revision != revision:
            raise StoreConflictError("another revision")
        record.revision += 1
        record.state = _text(codec.dumps(change.state))
        if change.plan is not None:
            record.plan = _text(codec.dumps(change.plan))
        for action in change.shown:
            for kind, data in stream_items(action, change.at_s):
                self._add(record, kind, data)
        for recovery in change.recoveries:
            record.recoveries[recovery.quorum.id] = _text(codec.dumps(recovery))
        for pod in change.arrived:
            record.seen[PodUid(_text(pod))] = self._tick()
        for pod in change.gone:
            record.seen.pop(pod, None)
            record.beats.pop(pod, None)
            record.stores.pop(pod, None)
            record.checks.pop(pod, None)
            record.doubts.pop(pod, None)

    async def append(self, uid: JobUid, kind: str, data: str) -> None:
        self._add(self._records[uid], kind, data)

    async def beat(self, uid: JobUid, heartbeat: Heartbeat) -> BeatReply:
        record = self._records[uid]
        state = _state(record.state)
        known = heartbeat.pod in record.seen
        if known:
            record.seen[heartbeat.pod] = self._tick()
            record.beats[heartbeat.pod] = _text(codec.dumps(heartbeat))
        quorum: QuorumId | None = state.plan.quorum if state.plan else None
        phase: JobPhase = state.phase
        return BeatReply(known=known, quorum=quorum, phase=phase, restored_at_s=state.restored_at_s)

    async def fetch_seen(self, uid: JobUid) -> Seen:
        return Seen(now_us=self._now_us, at_us=dict(self._records[uid].seen))

    async def fetch_beats(self, uid: JobUid) -> dict[PodUid, Heartbeat]:
        beats = self._records[uid].beats
        return {pod: codec.loads(Heartbeat, text) for pod, text in beats.items()}

    async def put_store(self, uid: JobUid, status: StoreStatus) -> StoreReply:
        record = self._records[uid]
        record.stores[status.pod] = _text(codec.dumps(replace(status, checked=None)))
        if status.checked is not None:
            record.checks[status.pod] = _text(codec.dumps(status.checked))
        doubts = record.doubts.get(status.pod)
        return StoreReply(
            check=record.check, doubts=codec.loads(Doubts, doubts) if doubts else None
        )

    async def fetch_stores(self, uid: JobUid) -> dict[PodUid, StoreStatus]:
        stores = self._records[uid].stores
        return {pod: codec.loads(StoreStatus, text) for pod, text in stores.items()}

    async def fetch_checks(self, uid: JobUid) -> tuple[int, dict[PodUid, StoreCheck]]:
        record = self._records[uid]
        told = {pod: codec.loads(StoreCheck, text) for pod, text in record.checks.items()}
        return record.check, told

    async def put_doubts(self, uid: JobUid, check: int, doubts: Mapping[PodUid, Doubts]) -> None:
        record = self._records.get(uid)
        if record is not None and record.check == check:
            record.doubts = {pod: _text(codec.dumps(found)) for pod, found in doubts.items()}

    async def want_check(self, uid: JobUid) -> int:
        self._records[uid].check += 1
        return self._records[uid].check

    async def fetch_recoveries(self, uid: JobUid) -> tuple[Recovery, ...]:
        texts = self._records[uid].recoveries.items()
        return tuple(codec.loads(Recovery, text) for _, text in sorted(texts))

    async def fetch_ledger(
        self, uid: JobUid, keys: Sequence[LedgerKey]
    ) -> dict[LedgerKey, LedgerEntry]:
        ledger = self._records[uid].ledger
        return {key: codec.loads(LedgerEntry, ledger[key]) for key in keys if key in ledger}

    async def put_ledger(self, uid: JobUid, entries: Sequence[LedgerEntry]) -> None:
        self._records[uid].ledger.update({e.key: _text(codec.dumps(e)) for e in entries})

    async def put_findings(self, uid: JobUid, told: Sequence[ToldFinding]) -> NewFindings:
        known = self._records[uid].findings
        fresh = tuple({one.id: one for one in told if one.id not in known}.values())
        known.update({one.id: _text(codec.dumps(one)) for one in fresh})
        return NewFindings(fresh=fresh, total=len(known))

    async def fetch_findings(
        self, uid: JobUid, first: int = 0, newest: int = MAX_KEPT
    ) -> FindingsPage:
        texts = dict(enumerate(self._records[uid].findings.values(), 1))
        read = [codec.loads(ToldFinding, text) for text in texts.values()]
        counts = Counter(f"verdict:{one.finding.verdict.value}" for one in read)
        shown = {place: text for place, text in list(texts.items())[-newest:] if place >= first}
        return read_findings(shown, {name: str(number) for name, number in counts.items()})

    async def read_stream(
        self, uid: JobUid, after: str, block_s: float | None
    ) -> tuple[StreamItem, ...]:
        del block_s
        first = int(after.partition("-")[0])
        return tuple(
            item for item in self._records[uid].stream if int(item.id.partition("-")[0]) > first
        )

    async def hold_lease(self, holder: str, lease_s: float) -> bool:
        del holder, lease_s
        return True

    async def release_lease(self, holder: str) -> None: ...

    def _add(self, record: _Record, kind: str, data: str) -> None:
        item = StreamItem(id=f"{self._tick()}-0", kind=kind, data=_text(data))
        record.stream = (*record.stream, item)

    def _tick(self) -> int:
        self._now_us += 1000
        return self._now_us


def _text(text: str) -> str:
    """Return a text that can be written: Redis takes bytes."""
    text.encode()
    return text


@lru_cache(maxsize=64)
def _state(text: str) -> CoordinatorState:
    return codec.loads(CoordinatorState, text)
