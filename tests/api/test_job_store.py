"""Redis does to a job what core says of its scripts: both are driven by the same drawn calls."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan

from mainstay_api.store import RedisStore
from mainstay_api.store_protocol import stream_items
from mainstay_core.base import codec
from mainstay_core.base.errors import StoreConflictError
from mainstay_core.base.ids import JobUid, PodUid, QuorumId
from mainstay_core.base.shape import JobShape
from mainstay_core.control_plane.job_store import Change, Lease, StoredJob
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import Action, Announce, EndJob, PublishPlan, RecordRecovery
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Heartbeat
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Method, Plan
from mainstay_core.wire.recoveries import Recovery

PODS = tuple(PodUid(f"pod-{i}") for i in range(4))
CALLS = 60
KEYS = [(step, stage, 0) for step in range(3) for stage in range(2)]


class Twins:
    """One job in Redis and as a value."""

    def __init__(self, uid: str, store: RedisStore, rng: random.Random) -> None:
        shape = JobShape(
            lanes=2, shards_per_lane=1, replicas=2, min_replicas=1, stages=2, steps=9, seed=1
        )
        self.uid, self.store, self.rng = JobUid(uid), store, rng
        config = JobConfig(job=self.uid, name=uid, shape=shape, entrypoint="a:b", workload={})
        self.job = StoredJob(state=machine.initial(config, 1.0))
        self.num_calls = 0

    async def call(self) -> None:
        """Make one drawn call to both; they answer alike."""
        self.num_calls += 1
        await self.rng.choice((self._commit, self._commit, self._beat, self._put_ledger))()
        await self._compare()

    async def _commit(self) -> None:
        revision = self.job.revision - self.rng.choice((0, 0, 0, 1))
        change = self._draw_change()
        refused = False
        try:
            self.job = self.job.commit(revision, change, self.num_calls)
        except StoreConflictError:
            refused = True
        if refused:
            with pytest.raises(StoreConflictError):
                await self.store.commit(self.uid, revision, change)
        else:
            await self.store.commit(self.uid, revision, change)

    def _draw_change(self) -> Change:
        rng, number = self.rng, self.num_calls
        plan: Plan | None = None
        shown: list[Action] = []
        recoveries: tuple[Recovery, ...] = ()
        if rng.random() < 0.5:
            plan = make_plan({0: ["a.1", "b.1"]}, quorum=number)
            shown.append(PublishPlan(plan=plan))
        if rng.random() < 0.3:
            told = Recovery(
                quorum=QuorumId(id=rng.randint(1, 4), nonce="n"),
                method=Method.MASK,
                fault="a trainer died",
                exact=True,
                from_step=number,
                reason=f"call {number}",
            )
            recoveries = (told,)
            shown.append(RecordRecovery(recovery=told))
        if rng.random() < 0.5:
            shown.append(Announce(code="Code", message=f"call {number}"))
        if rng.random() < 0.1:
            shown.append(EndJob(state=JobPhase.STOPPED, reason="somebody wanted it"))
        restored = rng.choice((0.0, float(number)))
        phase = rng.choice(list(JobPhase))
        return Change(
            state=replace(self.job.state, phase=phase, restored_at_s=restored, step=number),
            plan=plan,
            shown=tuple(shown),
            recoveries=recoveries,
            arrived=tuple(rng.sample(PODS, rng.randint(0, 2))),
            gone=tuple(rng.sample(PODS, rng.randint(0, 1))),
            at_s=float(number),
        )

    async def _beat(self) -> None:
        quorum = self.rng.choice((None, QuorumId(id=self.num_calls, nonce="n")))
        heartbeat = Heartbeat(pod=self.rng.choice(PODS), slots=(), quorum=quorum)
        self.job, reply = self.job.beat(heartbeat, self.num_calls)
        assert await self.store.beat(self.uid, heartbeat) == reply

    async def _put_ledger(self) -> None:
        entries = [self._entry(*key) for key in self.rng.sample(KEYS, 2)]
        self.job = self.job.put_ledger(entries)
        await self.store.put_ledger(self.uid, entries)

    def _entry(self, step: int, stage: int, inner: int) -> LedgerEntry:
        return LedgerEntry(
            step=step,
            stage=stage,
            inner=inner,
            quorum=QuorumId(id=self.num_calls, nonce="n"),
            gradient="",
            masters="",
            data="",
            loss=0.0,
            norm=0.0,
            tokens=1,
            step_s=0.1,
            replicas=2,
        )

    async def _compare(self) -> None:
        store, uid, job = self.store, self.uid, self.job
        snapshot = await store.load(uid)
        assert snapshot is not None
        assert (snapshot.revision, snapshot.state) == (job.revision, job.state)
        plan, _, phase = await store.fetch_plan(uid)
        assert (codec.loads(Plan, plan) if plan else None) == job.plan
        assert phase == job.state.phase.value
        seen = (await store.fetch_seen(uid)).at_us
        assert seen.keys() == job.seen_us.keys()
        # By two clocks, but in one order; those of one commit are heard at one time.
        by_redis = [[seen[p] <= seen[q] for q in seen] for p in seen]
        assert by_redis == [[job.seen_us[p] <= job.seen_us[q] for q in seen] for p in seen]
        assert await store.fetch_beats(uid) == job.beats
        assert await store.fetch_ledger(uid, KEYS) == job.ledger
        assert {r.quorum.id: r for r in await store.fetch_recoveries(uid)} == job.recoveries

    async def compare_streams(self, times: dict[int, float]) -> None:
        """The streams tell the same, in the same order, before and after any entry."""
        items = await self.store.read_stream(self.uid, "0-0", None)
        told = [text for e in self.job.stream for text in stream_items(e.action, times[e.number])]
        assert [(item.kind, item.data) for item in items] == told
        assert [item.kind for item in items] == [entry.kind for entry in self.job.stream]
        numbers = [entry.number for entry in self.job.stream]
        assert numbers == sorted(set(numbers))
        middle = len(items) // 2
        after = await self.store.read_stream(self.uid, items[middle].id, None)
        assert len(after) == len(self.job.after(numbers[middle]))


@pytest.mark.parametrize("seed", range(4))
def test_redis_does_to_a_job_what_its_scripts_are_said_to_do(shared_redis: Any, seed: int) -> None:
    async def drive() -> None:
        store = RedisStore(shared_redis.url)
        twins = Twins(f"twins-{seed}", store, random.Random(seed))
        assert await store.create(twins.job.state, {})
        assert not await store.create(twins.job.state, {})
        times: dict[int, float] = {}
        for _ in range(CALLS):
            known = len(twins.job.stream)
            await twins.call()
            times |= {e.number: float(twins.num_calls) for e in twins.job.stream[known:]}
        await twins.compare_streams(times)
        await store.aclose()

    asyncio.run(drive())


def test_a_lease_is_held_as_in_redis(own_redis: Any) -> None:
    async def contend() -> None:
        store, lease = RedisStore(own_redis.url), Lease()
        for now_us, holder in enumerate(("one", "other", "one", "other", "one")):
            taken = lease.take(holder, 60_000_000, now_us)
            assert await store.hold_lease(holder, 60.0) == (taken is not None)
            lease = taken or lease
        await store.aclose()

    asyncio.run(contend())
    ended = Lease(holder="one", until_us=5)
    assert ended.take("other", 10, 4) is None
    assert ended.take("other", 10, 5) == Lease(holder="other", until_us=15)
