"""Keeps jobs in Redis: compare-and-set for decisions, plain writes for the rest.

:class:`store_protocol.Store` is what the transactions need; :class:`RedisStore` is the only
implementation outside of the simulation. A decision (state, plan, recoveries, history)
becomes visible in one script. So a plan is stored before anybody sees it, and everybody
sees it once it is stored, whatever process dies in between. That a confirmed write is on
disk is the server's business (``appendfsync always``, protocol section 9).

Keys, with ``{uid}`` also the hash tag of a Redis cluster:

    mainstay:uids              set     uids of all jobs
    mainstay:names             hash    [namespace:]name -> uid of the newest job of that name
    mainstay:lease             string  the replica that watches for silence
    mainstay:{uid}:job         hash    version, state, phase, quorum, plan, restored, manifest,
                                       name, check (number of the newest check of snapshots)
    mainstay:{uid}:stream      stream  plan, inject, stop, event: pushed to supervisors; history
    mainstay:{uid}:recoveries  hash    quorum id -> Recovery
    mainstay:{uid}:ledger      hash    step:stage:inner -> LedgerEntry
    mainstay:{uid}:findings    hash    slot:incarnation:number -> ToldFinding, the newest
    mainstay:{uid}:found       zset    the same names, by their place among all findings
    mainstay:{uid}:verdicts    hash    how many findings were told, by verdict
    mainstay:{uid}:stores      hash    pod -> what its store of segments told last
    mainstay:{uid}:checks      hash    pod -> outcome of its store's newest check
    mainstay:{uid}:doubts      hash    pod -> what a check of all stores found damaged in its store
    mainstay:{uid}:seen        hash    pod -> time of its last heartbeat by the store's clock, us
    mainstay:{uid}:beats       hash    pod -> its last Heartbeat
    mainstay:{uid}:forgotten   string  it was deleted: no supervisor makes it again

The hash's field ``version`` holds the revision of the job's state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from mainstay_api.findings import read_findings
from mainstay_api.long_work import LARGE, LARGE_TEXT, PIECE, beside, in_pieces, size_of
from mainstay_api.redis_client import RedisLogin, open_line
from mainstay_api.redis_scripts import (
    BEAT,
    COMMIT,
    CREATE,
    DELETE,
    LEASE,
    PUT_DOUBTS,
    PUT_FINDINGS,
    RELEASE,
)
from mainstay_api.store_protocol import DeletedJobError, NewFindings, stream_items
from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError, StoreConflictError
from mainstay_core.base.field_texts import FieldTexts
from mainstay_core.base.ids import JobUid, PodUid, QuorumId
from mainstay_core.base.shape import JobShape
from mainstay_core.control_plane.job_store import (
    BeatReply,
    Change,
    Seen,
    Snapshot,
    StoreUnavailableError,
)
from mainstay_core.control_plane.stream import StreamItem
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.findings import MAX_KEPT, FindingsPage, ToldFinding
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey
from mainstay_core.wire.recoveries import Recovery
from mainstay_core.wire.stores import Doubts, StoreCheck, StoreReply, StoreStatus

T = TypeVar("T")

PREFIX = "mainstay"
TIMEOUT_S = 3.0
"""Of one call, a blocking read included; a server that is silent longer counts as down."""


MAX_LEDGER_STEPS = 100_000
"""Newest steps of a job whose entries are kept, if there is room for so many."""
MAX_LEDGER_ENTRIES = 400_000
"""Room for entries of a job's ledger, about 500 bytes each."""
MIN_LEDGER_STEPS = 1000
"""Steps whose entries are kept in any case, however many positions a step has."""
MAX_RECOVERIES = 4000
"""Recoveries of a job that are kept, about 2 KiB each: the newest."""
DELETED_S = 24 * 3600
"""How long a deleted job's uid is remembered: longer than any pod of it can go on ending."""


async def _call(pending: Any) -> Any:
    """Await a Redis call; its failures are one kind of trouble to everybody else.

    Raises:
        StoreUnavailableError: the server cannot be reached or is not able to answer.
    """
    try:
        return await pending
    except (RedisError, OSError) as error:
        raise StoreUnavailableError(f"Redis: {str(error) or type(error).__name__}") from error


class RedisStore:
    """The store in Redis (6.2 or newer).

    Args:
        url: where the server is, or the Sentinels that name it.
        max_events: length of a job's stream, about.
        max_events_bytes: what the stream's entries take, about; 16 are kept in any case.
        max_recoveries: newest recoveries that are kept, about.
        max_ledger_steps: newest steps whose entries are kept, if there is room for so many.
        max_ledger_entries: room for entries of the ledger.
        timeout_s: of one call.
        login: passwords and certificates.

    Raises:
        InvalidSpecError: the url cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        max_events: int = 10_000,
        max_events_bytes: int = 32 << 20,
        max_recoveries: int = MAX_RECOVERIES,
        max_ledger_steps: int = MAX_LEDGER_STEPS,
        max_ledger_entries: int = MAX_LEDGER_ENTRIES,
        timeout_s: float = TIMEOUT_S,
        login: RedisLogin | None = None,
    ) -> None:
        self._line = open_line(url, login or RedisLogin(), timeout_s, self._on_connect)
        self._redis = self._line.client
        self._max_events, self._max_events_bytes = max_events, max_events_bytes
        self._max_recoveries = max_recoveries
        self._max_ledger_steps, self._max_ledger_entries = max_ledger_steps, max_ledger_entries
        self._max_block_s = timeout_s / 2
        self._server = ""
        self._cache: dict[JobUid, Snapshot] = {}
        self._texts: dict[JobUid, FieldTexts] = {}
        self._ledger_sizes: dict[JobUid, int] = {}
        """Entries of each job's ledger, as they were counted last."""
        self._commit = self._redis.register_script(COMMIT)
        self._beat = self._redis.register_script(BEAT)
        self._create = self._redis.register_script(CREATE)
        self._delete = self._redis.register_script(DELETE)
        self._lease = self._redis.register_script(LEASE)
        self._release = self._redis.register_script(RELEASE)
        self._put_findings = self._redis.register_script(PUT_FINDINGS)
        self._put_doubts = self._redis.register_script(PUT_DOUBTS)

    async def _on_connect(self, connection: AbstractConnection) -> None:
        await connection.on_connect()
        self._server = ""

    async def _identify(self) -> str:
        """Return the name that the Redis process drew when it started."""
        if not self._server:
            self._server = str((await _call(self._redis.info("server")))["run_id"])
        return self._server

    async def ping(self) -> None:
        await _call(self._redis.ping())

    async def aclose(self) -> None:
        await self._line.aclose()

    async def create(self, state: CoordinatorState, manifest: Mapping[str, Any]) -> bool:
        """Store a new job; False when its uid is taken.

        Raises:
            DeletedJobError: a job of this uid was deleted.
        """
        uid = state.config.job
        phase, text = state.phase.value, json.dumps(manifest)
        config = state.config
        name = f"{config.namespace}:{config.name}" if config.namespace else config.name
        args = [uid, codec.dumps(state), phase, text, name]
        created = int(await _call(self._create(keys=_whole(uid), args=args)))
        if created < 0:
            raise DeletedJobError(f"job {uid} was deleted")
        return created == 1

    async def delete(self, uid: JobUid) -> bool:
        """Delete everything about a job; False when there was nothing."""
        self._cache.pop(uid, None)
        self._texts.pop(uid, None)
        self._ledger_sizes.pop(uid, None)
        names = ("stream", "recoveries", "ledger", "seen", "beats", *_OF_FINDINGS, *_OF_STORES)
        parts = [_key(uid, p) for p in names]
        known = await _call(self._delete(keys=[*_whole(uid), *parts], args=[uid, DELETED_S]))
        return bool(known)

    async def put_manifest(self, uid: JobUid, manifest: Mapping[str, Any]) -> None:
        """Keep a newer manifest of a job."""
        await _call(self._redis.hset(_key(uid, "job"), "manifest", json.dumps(manifest)))

    async def resolve(self, job: str) -> JobUid | None:
        """Return the uid that ``job`` is, or names.

        Raises:
            DeletedJobError: a job of this uid was deleted.
        """
        if await _call(self._redis.sismember(f"{PREFIX}:uids", job)):
            return JobUid(job)
        uid = await _call(self._redis.hget(f"{PREFIX}:names", job))
        if not uid and await _call(self._redis.exists(_key(job, "forgotten"))):
            raise DeletedJobError(f"job {job} was deleted")
        return JobUid(uid) if uid else None

    async def list_uids(self) -> tuple[JobUid, ...]:
        """Return the uids of all jobs, sorted."""
        members = await _call(self._redis.smembers(f"{PREFIX}:uids"))
        return tuple(sorted(JobUid(m) for m in members))

    async def load(self, uid: JobUid) -> Snapshot | None:
        """Return the job's state; decoding is skipped while its revision is the one known here."""
        key = _key(uid, "job")
        revision = await _call(self._redis.hget(key, "version"))
        if revision is None:
            return None
        # After the first read: a connection that was made for it may be one to another process.
        server = await self._identify()
        cached = self._cache.get(uid)
        if cached is not None and (cached.revision, cached.server) == (int(revision), server):
            return cached
        revision, text = await _call(self._redis.hmget(key, ["version", "state"]))
        if revision is None:
            return None
        # A text that is long is of a large job.
        size = LARGE + 1 if len(text) > LARGE_TEXT else 0
        state = await beside(size, codec.loads, CoordinatorState, text)
        snapshot = Snapshot(revision=int(revision), state=state, server=server)
        self._cache[uid] = snapshot
        return snapshot

    async def fetch_manifest(self, uid: JobUid) -> dict[str, Any]:
        """Return the manifest as the user wrote it."""
        text = await _call(self._redis.hget(_key(uid, "job"), "manifest"))
        return cast("dict[str, Any]", json.loads(text or "{}"))

    async def fetch_plan(self, uid: JobUid) -> tuple[str | None, str, str]:
        """Return (plan as JSON, stream position at which it is current, phase)."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.hmget(_key(uid, "job"), ["plan", "phase"])
        pipe.xrevrange(_key(uid, "stream"), count=1)
        (plan, phase), newest = await _call(pipe.execute())
        return plan, newest[0][0] if newest else "0-0", phase or ""

    async def commit(self, uid: JobUid, revision: int, change: Change) -> None:
        """Store a decision and make it visible, if the state still has ``revision``.

        Raises:
            StoreConflictError: somebody else decided first.
        """
        known = self._texts.setdefault(uid, FieldTexts())
        texts = await beside(size_of(change.state), _texts_of, change, known)
        state, plan, quorum, items = texts
        args: list[Any] = [revision, state, change.state.phase.value, plan, quorum]
        args += [self._max_events, change.state.restored_at_s, self._max_events_bytes]
        args += [self._max_recoveries, len(items)]
        args += [text for item in items for text in item]
        args.append(len(change.recoveries))
        for recovery in change.recoveries:
            args += [recovery.quorum.id, codec.dumps(recovery)]
        args += [len(change.arrived), *change.arrived, len(change.gone), *change.gone]
        parts = ("job", "stream", "recoveries", "seen", "beats", *_OF_STORES)
        reply = await _call(self._commit(keys=[_key(uid, p) for p in parts], args=args))
        if not reply:
            self._cache.pop(uid, None)
            raise StoreConflictError(f"job {uid} is not at revision {revision} any more")
        self._cache[uid] = Snapshot(
            revision=int(reply[0]), state=change.state, server=change.state.server
        )

    async def append(self, uid: JobUid, kind: str, data: str) -> None:
        """Add an entry to the job's stream that no decision made."""
        fields: Any = {"kind": kind, "data": data}
        room = max(16, self._max_events_bytes // max(1024, len(data)))
        kept = min(self._max_events, room)
        await _call(self._redis.xadd(_key(uid, "stream"), fields, maxlen=kept))

    async def beat(self, uid: JobUid, heartbeat: Heartbeat) -> BeatReply:
        """Note that a pod is alive: one write, never a compare-and-set."""
        keys = [_key(uid, part) for part in ("job", "seen", "beats")]
        args = [heartbeat.pod, codec.dumps(heartbeat)]
        known, (quorum, phase, restored) = await _call(self._beat(keys=keys, args=args))
        return BeatReply(
            known=bool(known),
            quorum=codec.loads(QuorumId, quorum) if quorum else None,
            phase=JobPhase(phase) if phase else None,
            restored_at_s=float(restored or 0.0),
        )

    async def fetch_seen(self, uid: JobUid) -> Seen:
        """Return when each pod was last heard."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.hgetall(_key(uid, "seen"))
        pipe.time()
        seen, (seconds, microseconds) = await _call(pipe.execute())
        return Seen(
            now_us=seconds * 1_000_000 + microseconds,
            at_us={PodUid(pod): int(at) for pod, at in seen.items()},
        )

    async def fetch_beats(self, uid: JobUid) -> dict[PodUid, Heartbeat]:
        """Return the last heartbeat of each pod."""
        return await _by_pod(Heartbeat, await _call(self._redis.hgetall(_key(uid, "beats"))))

    async def put_store(self, uid: JobUid, status: StoreStatus) -> StoreReply:
        """Keep what a pod's store of segments tells; return what to answer."""
        pipe = self._redis.pipeline(transaction=False)
        told = codec.dumps(replace(status, checked=None))
        pipe.hset(_key(uid, "stores"), status.pod, told)
        if status.checked is not None:
            pipe.hset(_key(uid, "checks"), status.pod, codec.dumps(status.checked))
        pipe.hget(_key(uid, "job"), "check")
        pipe.hget(_key(uid, "doubts"), status.pod)
        check, doubts = (await _call(pipe.execute()))[-2:]
        return StoreReply(
            check=int(check or 0), doubts=codec.loads(Doubts, doubts) if doubts else None
        )

    async def fetch_stores(self, uid: JobUid) -> dict[PodUid, StoreStatus]:
        """Return what each pod's store of segments has told last."""
        return await _by_pod(StoreStatus, await _call(self._redis.hgetall(_key(uid, "stores"))))

    async def fetch_checks(self, uid: JobUid) -> tuple[int, dict[PodUid, StoreCheck]]:
        """Return the number of the newest check that is wanted, and each pod's newest outcome."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.hget(_key(uid, "job"), "check")
        pipe.hgetall(_key(uid, "checks"))
        wanted, texts = await _call(pipe.execute())
        return int(wanted or 0), await _by_pod(StoreCheck, texts)

    async def put_doubts(self, uid: JobUid, check: int, doubts: Mapping[PodUid, Doubts]) -> None:
        """Keep what a check has found damaged in pods' stores, unless it is the newest no more."""
        told = [text for pod, found in doubts.items() for text in (pod, codec.dumps(found))]
        keys = [_key(uid, "job"), _key(uid, "doubts")]
        await _call(self._put_doubts(keys=keys, args=[check, *told]))

    async def want_check(self, uid: JobUid) -> int:
        """Note that somebody wants all stores of segments checked; return the check's number."""
        return int(await _call(self._redis.hincrby(_key(uid, "job"), "check", 1)))

    async def fetch_recoveries(self, uid: JobUid) -> tuple[Recovery, ...]:
        """Return all recoveries, oldest first."""
        texts = await _call(self._redis.hvals(_key(uid, "recoveries")))
        recoveries = await in_pieces(partial(codec.loads, Recovery), texts)
        return tuple(sorted(recoveries, key=lambda r: r.quorum.id))

    async def fetch_ledger(
        self, uid: JobUid, keys: Sequence[LedgerKey]
    ) -> dict[LedgerKey, LedgerEntry]:
        """Return the entries that there are."""
        found: dict[LedgerKey, LedgerEntry] = {}
        for first in range(0, len(keys), PIECE):
            piece = keys[first : first + PIECE]
            fields = [":".join(map(str, key)) for key in piece]
            texts = await _call(self._redis.hmget(_key(uid, "ledger"), fields))
            for key, text in zip(piece, texts, strict=True):
                if text is not None:
                    found[key] = codec.loads(LedgerEntry, text)
        return found

    async def put_ledger(self, uid: JobUid, entries: Sequence[LedgerEntry]) -> None:
        """Write entries over what is there; those of steps that are too old are dropped.

        Raises:
            RemoteProtocolError: somebody writes entries in such an order that none is dropped.
        """
        if not entries:
            return
        bound = 2 * self._max_ledger_entries
        if self._ledger_sizes.get(uid, 0) > bound:
            self._ledger_sizes[uid] = int(await _call(self._redis.hlen(_key(uid, "ledger"))))
            if self._ledger_sizes[uid] > bound:
                raise RemoteProtocolError("the ledger is full; tell entries by ascending step")
        mapping: Any = {":".join(map(str, e.key)): codec.dumps(e) for e in entries}
        known = self._cache.get(uid)
        kept = self._max_ledger_steps
        kept = kept if known is None else min(kept, kept_steps(known.state.shape))
        old = [(e.step - kept, *e.key[1:]) for e in entries]
        dropped = [":".join(map(str, key)) for key in old if key[0] >= 0]
        pipe = self._redis.pipeline(transaction=False)
        pipe.hset(_key(uid, "ledger"), mapping=mapping)
        if dropped:
            pipe.hdel(_key(uid, "ledger"), *dropped)
        pipe.hlen(_key(uid, "ledger"))
        self._ledger_sizes[uid] = int((await _call(pipe.execute()))[-1])

    async def put_findings(self, uid: JobUid, told: Sequence[ToldFinding]) -> NewFindings:
        """Keep findings; return those that are new. One is known again while it is kept."""
        texts = [(t.id, t.finding.verdict.value, t.untold, codec.dumps(t)) for t in told]
        args = [MAX_KEPT, *(part for text in texts for part in text)]
        keys = [_key(uid, part) for part in ("job", *_OF_FINDINGS)]
        reply = await _call(self._put_findings(keys=keys, args=args))
        total, fresh = reply or (0, [])
        known = {t.id: t for t in told}
        return NewFindings(fresh=tuple(known[name] for name in fresh), total=int(total))

    async def fetch_findings(
        self, uid: JobUid, first: int = 0, newest: int = MAX_KEPT
    ) -> FindingsPage:
        """Return how many findings a job has, and those that are kept.

        Args:
            uid: of the job.
            first: only those from this place among all of the job on.
            newest: at most so many, the newest.
        """
        pipe = self._redis.pipeline(transaction=True)
        pipe.zrange(_key(uid, "found"), "+inf", first, desc=True, byscore=True,
                    offset=0, num=newest, withscores=True)  # fmt: skip
        pipe.hgetall(_key(uid, "verdicts"))
        found, numbers = await _call(pipe.execute())
        names = [name for name, _ in found]
        texts = await _call(self._redis.hmget(_key(uid, "findings"), names)) if names else []
        places = [int(place) for _, place in found]
        return read_findings(dict(zip(places, texts, strict=True)), numbers)

    async def read_stream(
        self, uid: JobUid, after: str, block_s: float | None
    ) -> tuple[StreamItem, ...]:
        """Return the entries after ``after``, waiting up to ``block_s`` for the first.

        It waits for less if the timeout of a call does not allow so much.
        """
        wait_s = None if block_s is None else min(block_s, self._max_block_s)
        block = None if wait_s is None else max(1, int(wait_s * 1000))
        streams: Any = {_key(uid, "stream"): after}
        reply = await _call(self._redis.xread(streams, count=1000, block=block))
        entries = reply[0][1] if reply else []
        return tuple(
            StreamItem(id=entry, kind=fields["kind"], data=fields["data"])
            for entry, fields in entries
        )

    async def hold_lease(self, holder: str, lease_s: float) -> bool:
        """Take or renew the watcher's lease; False while another replica has it."""
        args: list[Any] = [holder, int(lease_s * 1000)]
        return bool(await _call(self._lease(keys=[f"{PREFIX}:lease"], args=args)))

    async def release_lease(self, holder: str) -> None:
        """Give the lease back at once, if it is ours."""
        await _call(self._release(keys=[f"{PREFIX}:lease"], args=[holder]))


def kept_steps(shape: JobShape) -> int:
    """Return of how many of a job's newest steps the ledger keeps the entries."""
    room = MAX_LEDGER_ENTRIES // (shape.stages * shape.ranks_per_stage)
    return max(MIN_LEDGER_STEPS, min(MAX_LEDGER_STEPS, room))


def _texts_of(change: Change, known: FieldTexts) -> tuple[str, str, str, list[tuple[str, str]]]:
    """Return what a change writes: state, plan and quorum, and entries of the stream.

    Args:
        change: what was decided.
        known: what was written of the job's state before.
    """
    plan = change.plan
    return (
        known.dumps(change.state),
        "" if plan is None else codec.dumps(plan),
        "" if plan is None else codec.dumps(plan.quorum),
        [item for action in change.shown for item in stream_items(action, change.at_s)],
    )


async def _by_pod(kind: type[T], texts: Mapping[str, str]) -> dict[PodUid, T]:
    """Return what pods have told, read from its JSON."""
    told = await in_pieces(partial(codec.loads, kind), tuple(texts.values()))
    return dict(zip(map(PodUid, texts), told, strict=True))


_OF_FINDINGS = ("findings", "found", "verdicts")
_OF_STORES = ("stores", "checks", "doubts")
"""What pods' stores of segments have told, and are told: no decision needs it."""


def _key(uid: str, part: str) -> str:
    return f"{PREFIX}:{{{uid}}}:{part}"


def _whole(uid: str) -> list[str]:
    """The keys by which a job is there, or is known not to be."""
    return [_key(uid, "job"), f"{PREFIX}:uids", f"{PREFIX}:names", _key(uid, "forgotten")]
