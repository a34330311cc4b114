"""What one job may leave in Redis: its history, its recoveries and its ledger have bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mainstay_api.store import RedisStore, kept_steps
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import JobUid, QuorumId
from mainstay_core.base.shape import JobShape
from mainstay_core.control_plane.job_store import Change
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import Announce
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Method
from mainstay_core.wire.recoveries import Recovery

UID = JobUid("greedy")


def shape_of(stages: int = 1) -> JobShape:
    return JobShape(
        lanes=1,
        shards_per_lane=1,
        replicas=1,
        min_replicas=1,
        stages=stages,
        steps=10**9,
        seed=1,
    )


def driven(
    url: str, drive: Callable[[RedisStore, CoordinatorState], Awaitable[Any]], **bounds: int
) -> Any:
    """What ``drive`` returns of a store with bounds, in which there is a job."""

    async def run() -> Any:
        store = RedisStore(url, **bounds)  # type: ignore[arg-type]
        config = JobConfig(job=UID, name=UID, shape=shape_of(), entrypoint="a:b", workload={})
        state = machine.initial(config, 1.0)
        await store.create(state, {})
        try:
            return await drive(store, state)
        finally:
            await store.aclose()

    return asyncio.run(run())


def test_of_a_jobs_history_the_newest_is_kept_by_number_and_by_size(own_redis: Any) -> None:
    async def drive(store: RedisStore, state: CoordinatorState) -> list[int]:
        kept, revision = [], 1
        for length in (10, 8000):
            for _ in range(20):
                shown = tuple(Announce(code="C", message="x" * length) for _ in range(50))
                await store.commit(UID, revision, Change(state=state, shown=shown))
                revision += 1
            kept.append(len(await store.read_stream(UID, "0-0", None)))
        return kept

    short, long = driven(own_redis.url, drive, max_events=500, max_events_bytes=1 << 20)
    # Redis drops whole blocks of entries: a few more stay.
    assert 500 <= short < 700
    assert 128 <= long < 160


def test_of_many_recoveries_the_newest_are_kept(own_redis: Any) -> None:
    def recovery(number: int) -> Recovery:
        return Recovery(
            quorum=QuorumId(id=number, nonce="n"),
            method=Method.MASK,
            fault="a trainer died",
            exact=True,
            from_step=1,
            reason="again",
        )

    async def drive(store: RedisStore, state: CoordinatorState) -> list[int]:
        for revision in range(1, 21):
            told = tuple(recovery(10 * revision + i) for i in range(10))
            await store.commit(UID, revision, Change(state=state, recoveries=told))
        return [r.quorum.id for r in await store.fetch_recoveries(UID)]

    kept = driven(own_redis.url, drive, max_recoveries=80)
    assert 80 <= len(kept) <= 90
    assert kept == list(range(210 - len(kept), 210))


def entry(step: int) -> LedgerEntry:
    return LedgerEntry(
        step=step, stage=0, quorum=QuorumId(id=1, nonce="n"), gradient="", masters="", data="",
        loss=0.0, norm=0.0, tokens=1, step_s=0.1, replicas=1,
    )  # fmt: skip


def test_who_fills_the_ledger_so_that_nothing_is_dropped_is_refused(own_redis: Any) -> None:
    async def drive(store: RedisStore, state: CoordinatorState) -> int:
        del state
        refused = 0
        for first in range(1_000_000, 0, -50_000):
            try:
                await store.put_ledger(UID, [entry(first - i) for i in range(50)])
            except RemoteProtocolError as error:
                refused += "the ledger is full" in str(error)
        assert refused == 15
        return int(await store._redis.hlen(f"mainstay:{{{UID}}}:ledger"))

    assert driven(own_redis.url, drive, max_ledger_entries=100) == 250


@pytest.mark.parametrize(
    ("stages", "steps"), [(1, 100_000), (4, 100_000), (16, 25_000), (4000, 1000)]
)
def test_of_a_job_with_many_positions_fewer_steps_are_kept(stages: int, steps: int) -> None:
    assert kept_steps(shape_of(stages)) == steps
