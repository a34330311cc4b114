"""Races, outages and silence: what holds when several api processes or none are there."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_api.heartbeats import HeartbeatWatch
from mainstay_api.metrics import Metrics
from mainstay_api.settings import Settings
from mainstay_api.store import RedisStore
from mainstay_api.tasks import end_tasks
from mainstay_api.transactions import GIVE_WAY_S, Transactions
from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError, StoreConflictError
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId
from mainstay_core.base.shape import JobShape
from mainstay_core.control_plane.heartbeats import HeartbeatLag
from mainstay_core.control_plane.job_store import Change, Snapshot, StoreUnavailableError
from mainstay_core.coordinator.events import (
    Announce,
    FactsReported,
    PodRegistered,
    StepsCommitted,
)
from mainstay_core.coordinator.invariants import check_invariants
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.facts import (
    Heartbeat,
    Parked,
    PodGone,
    PodRegistration,
    Settled,
    TrainerUp,
)
from mainstay_core.wire.ledger import LedgerEntry

SETTINGS = Settings(redis_url="unix://", admin_token="a", agent_token="b")


def config(uid: str, **fields: Any) -> JobConfig:
    shape = JobShape(
        lanes=2, shards_per_lane=2, replicas=2, min_replicas=1, stages=2, steps=60, seed=1
    )
    return JobConfig(
        job=JobUid(uid), name=uid, shape=shape, entrypoint="a:b", workload={}, **fields
    )


class Crew:
    """Pods of a job, telling one or several apis."""

    def __init__(self, uid: str, *apis: Transactions) -> None:
        self.uid = JobUid(uid)
        self.apis = apis

    def transactions(self, index: int) -> Transactions:
        return self.apis[index % len(self.apis)]

    async def register(self, index: int) -> None:
        pod = PodUid(f"pod-{index}")
        registration = PodRegistration(pod=pod, name=pod, address="h", gather="g", num_slots=1)
        event = PodRegistered(registration=registration)
        await self.transactions(index).apply(self.uid, event)

    async def up(self, index: int) -> None:
        fact = TrainerUp(
            pod=PodUid(f"pod-{index}"),
            slot=0,
            incarnation=Incarnation(f"life-{index}"),
            fingerprint={},
        )
        await self.transactions(index).apply(self.uid, FactsReported(facts=(fact,)))

    async def start(self, num_pods: int = 4) -> None:
        for index in range(num_pods):
            await self.register(index)
            await self.up(index)

    async def settle(self) -> None:
        plan = (await self.apis[0].load(self.uid)).plan
        assert plan is not None
        facts = tuple(
            Settled(
                pod=m.slot.pod,
                slot=0,
                incarnation=m.incarnation,
                quorum=plan.quorum,
                step=0,
            )
            for m in plan.members
        )
        await self.apis[0].apply(self.uid, FactsReported(facts=facts))


@pytest.fixture
def new_transactions(shared_redis: Any) -> Callable[..., Transactions]:
    return lambda **fields: Transactions(
        RedisStore(shared_redis.url), replace(SETTINGS, **fields), Metrics()
    )


async def closing(*apis: Transactions) -> None:
    for transactions in apis:
        await transactions.aclose()
        await transactions.store.aclose()


def test_two_apis_that_learn_everything_at_once_lose_nothing(
    new_transactions: Callable[..., Transactions],
) -> None:
    """Whatever the order in which they win, the outcome is one quorum with everybody in it."""

    async def race() -> None:
        apis = [new_transactions() for _ in range(4)]
        uid = "race-1"
        assert await apis[0].create(config(uid), {})
        crew = Crew(uid, *apis)
        await asyncio.gather(*(crew.register(i) for i in range(8)))
        await asyncio.gather(*(crew.up(i) for i in range(8)))
        state = await apis[3].load(JobUid(uid))
        check_invariants(state)
        assert len(state.pods) == 8
        assert all(s.incarnation for s in state.slots)
        assert state.plan is not None
        assert state.plan.quorum.id == 1
        await closing(*apis)

    asyncio.run(race())


def test_two_apis_get_one_fault_and_make_one_plan(
    new_transactions: Callable[..., Transactions],
) -> None:
    async def race() -> None:
        one, other = new_transactions(), new_transactions()
        uid = JobUid("race-2")
        assert await one.create(config(uid), {})
        crew = Crew(uid, one)
        await crew.start()
        await crew.settle()
        gone = FactsReported(facts=(PodGone(pod=PodUid("pod-1")),))
        outcomes = await asyncio.gather(*(s.apply(uid, gone) for s in (one, other) * 5))
        assert sum(o.plan is not None for o in outcomes) == 1
        state = await other.load(uid)
        assert state.plan is not None
        assert state.plan.quorum.id == 2
        plans = [i for i in await one.store.read_stream(uid, "0-0", None) if i.kind == "plan"]
        assert len(plans) == 2
        await closing(one, other)

    asyncio.run(race())


def test_a_decision_on_an_old_version_is_refused_whole(
    new_transactions: Callable[..., Transactions],
) -> None:
    async def late() -> None:
        transactions = new_transactions()
        uid = JobUid("late-1")
        assert await transactions.create(config(uid), {})
        old = await transactions.store.load(uid)
        assert isinstance(old, Snapshot)
        await Crew(uid, transactions).register(0)
        change = Change(state=old.state, shown=(Announce(code="R", message="m"),))
        before = await transactions.store.read_stream(uid, "0-0", None)
        with pytest.raises(StoreConflictError):
            await transactions.store.commit(uid, old.revision, change)
        assert await transactions.store.read_stream(uid, "0-0", None) == before
        assert len((await transactions.load(uid)).pods) == 1
        await closing(transactions)

    asyncio.run(late())


def test_a_plan_is_in_the_stream_once_its_state_is_durable(
    new_transactions: Callable[..., Transactions],
) -> None:
    """There is no moment between compare-and-set and publish in which an api could die."""

    async def look() -> None:
        transactions = new_transactions()
        uid = JobUid("atomic-1")
        assert await transactions.create(config(uid), {})
        await Crew(uid, transactions).start()
        plan, cursor, phase = await transactions.store.fetch_plan(uid)
        assert plan is not None
        assert phase == "running"
        items = await transactions.store.read_stream(uid, "0-0", None)
        assert [i.data for i in items if i.kind == "plan"] == [plan]
        assert items[-1].id == cursor
        await closing(transactions)

    asyncio.run(look())


def test_a_job_goes_on_after_redis_and_api_were_killed(own_redis: Any, new_api: Any) -> None:
    from_before = new_api(own_redis.url)
    created = from_before.post(
        "/v1/jobs",
        {"config": _encoded(config("survivor")), "uid": "survivor"},
        status=201,
    )
    assert created["uid"] == "survivor"
    own_redis.stop()
    reply = from_before.get("/v1/jobs/survivor", status=503)
    assert reply["error"] == "store-unavailable"
    from_before.get("/healthz")
    from_before.get("/readyz", status=503)
    own_redis.start()
    assert from_before.get("/v1/jobs/survivor")["state"] == "forming"
    assert new_api(own_redis.url).get("/v1/jobs/survivor")["uid"] == "survivor"


def test_a_job_that_vanished_from_the_store_is_unknown(own_redis: Any, new_api: Any) -> None:
    api = new_api(own_redis.url)
    api.post("/v1/jobs", {"config": _encoded(config("gone-1")), "uid": "gone-1"}, status=201)
    api.get("/v1/jobs/gone-1")
    own_redis.stop()
    for path in own_redis.directory.rglob("*.aof*"):
        path.unlink()
    own_redis.start()
    assert api.get("/v1/jobs/gone-1", status=404)["error"] == "unknown-job"


def _encoded(job: JobConfig) -> Any:
    return codec.encode(job)


def test_a_store_that_is_away_is_one_kind_of_error(own_redis: Any) -> None:
    async def ask() -> None:
        store = RedisStore(own_redis.url)
        await store.ping()
        own_redis.stop()
        with pytest.raises(StoreUnavailableError):
            await store.ping()
        await store.aclose()

    asyncio.run(ask())


def test_the_ledger_keeps_the_newest_steps(own_redis: Any) -> None:
    uid, quorum = JobUid("long"), QuorumId(id=1, nonce="n")

    async def scenario() -> set[int]:
        store = RedisStore(own_redis.url, max_ledger_steps=5)
        for step in range(0, 20, 2):
            await store.put_ledger(uid, [entry(n, 1, quorum) for n in (step, step + 1)])
        keys = [entry(step, 1, quorum).key for step in range(20)]
        kept = await store.fetch_ledger(uid, keys)
        await store.aclose()
        return {e.step for e in kept.values()}

    assert asyncio.run(scenario()) == set(range(15, 20))


def test_the_lease_has_one_holder(own_redis: Any) -> None:
    async def contend() -> None:
        store = RedisStore(own_redis.url)
        assert await store.hold_lease("one", 60.0)
        assert not await store.hold_lease("other", 60.0)
        assert await store.hold_lease("one", 60.0)
        await store.release_lease("other")
        assert not await store.hold_lease("other", 60.0)
        await store.release_lease("one")
        assert await store.hold_lease("other", 60.0)
        await store.release_lease("other")
        await store.aclose()

    asyncio.run(contend())


def test_the_heartbeat_watch_forms_the_same_quorum_again_after_the_probe(own_redis: Any) -> None:
    async def suspect() -> None:
        store = RedisStore(own_redis.url)
        transactions = Transactions(store, SETTINGS, Metrics())
        uid = JobUid("probed")
        assert await transactions.create(config(uid, probe_s=0.01), {})
        crew = Crew(uid, transactions)
        await crew.start()
        await crew.settle()
        # A job that comes before it, whose state no look can read.
        assert await transactions.create(config("broken"), {})
        unreadable = {"state": "no state", "version": 99}
        await store._redis.hset("mainstay:{broken}:job", mapping=unreadable)
        assert [state.config.job for state in await transactions.load_all()] == [uid]
        await transactions.aclose()  # nothing but the watch looks at the job from now on
        plan = (await transactions.load(uid)).plan
        assert plan is not None
        member = plan.members[0]
        parked = Parked(
            pod=member.slot.pod,
            slot=0,
            incarnation=member.incarnation,
            quorum=plan.quorum,
        )
        await transactions.apply(uid, FactsReported(facts=(parked,)))
        ticking = asyncio.create_task(HeartbeatWatch(transactions, SETTINGS).run())
        while (await transactions.load(uid)).last_id == 1:
            await asyncio.sleep(0)
        await end_tasks(ticking)
        state = await transactions.load(uid)
        assert state.plan is not None
        assert state.plan.method == "re-form"
        await closing(transactions)

    asyncio.run(suspect())


def test_it_is_recorded_when_a_plan_was_stored_that_nobody_asked_for(own_redis: Any) -> None:
    """A plan that follows from a look at the heartbeats, not from a request."""

    async def probe() -> None:
        times = itertools.count(1000)
        transactions = Transactions(
            RedisStore(own_redis.url), SETTINGS, Metrics(), clock=lambda: float(next(times))
        )
        uid = JobUid("looked-at")
        assert await transactions.create(config(uid, probe_s=10.0), {})
        crew = Crew(uid, transactions)
        await crew.start()
        await crew.settle()
        plan = (await transactions.load(uid)).plan
        assert plan is not None
        member = plan.members[0]
        parked = Parked(
            pod=member.slot.pod, slot=0, incarnation=member.incarnation, quorum=plan.quorum
        )
        await transactions.apply(uid, FactsReported(facts=(parked,)))
        for _ in range(20):
            looked = await transactions.look(uid, HeartbeatLag())
            if looked is not None and looked.plan is not None:
                break
        await transactions.aclose()
        state = await transactions.load(uid)
        assert state.plan is not None
        assert state.plan.quorum.id == 2
        (opened,) = (o for o in state.recoveries if o.recovery.quorum == state.plan.quorum)
        assert opened.durable_s > state.plan.created_at_s
        await transactions.store.aclose()

    asyncio.run(probe())


def test_silence_counts_while_others_are_heard() -> None:
    silence = HeartbeatLag()
    a, b = PodUid("a"), PodUid("b")
    for second in range(20):
        behind = silence.update({a: second * 1_000_000 + 1, b: 1}, heartbeat_s=1.0)
    assert behind[a] == 0.0
    assert behind[b] == pytest.approx(19.0)


def test_after_an_outage_nobody_is_evicted() -> None:
    """All expired together; the first to be heard again must not make the others look gone."""
    silence = HeartbeatLag()
    pods = [PodUid(name) for name in "abc"]
    silence.update(dict.fromkeys(pods, 1_000_000), heartbeat_s=1.0)
    silence.update(dict.fromkeys(pods, 1_000_000), heartbeat_s=1.0)
    late = {pods[0]: 601_000_000, pods[1]: 1_000_000, pods[2]: 1_000_000}
    behind = silence.update(late, heartbeat_s=1.0)
    assert max(behind.values()) <= 2.0


def test_silence_of_all_is_nobodys_fault() -> None:
    silence = HeartbeatLag()
    for _ in range(100):
        behind = silence.update({PodUid("a"): 5, PodUid("b"): 6}, heartbeat_s=1.0)
    assert set(behind.values()) == {0.0}


class UnreadStore(RedisStore):
    """A store that takes heartbeats, and reads no job while it is told so."""

    is_shut = False

    async def load(self, uid: JobUid) -> Snapshot | None:
        if self.is_shut:
            raise StoreUnavailableError("it is slow")
        return await super().load(uid)


def test_a_heartbeat_that_was_taken_is_answered_though_nobody_can_read_how_the_job_is_called(
    shared_redis: Any,
) -> None:
    async def beat() -> None:
        store = UnreadStore(shared_redis.url)
        api = Transactions(store, SETTINGS, Metrics())
        uid = config("unread").job
        await api.create(config("unread"), {})
        await Crew("unread", api).register(0)
        heartbeat = Heartbeat(pod=PodUid("pod-0"), slots=())
        for store.is_shut in (True, True, False):
            await api.job(uid).take_heartbeat(heartbeat)
        labels = {"job": uid, "namespace": "", "name": "unread"}
        counted = api.metrics.registry.get_sample_value("mainstay_heartbeats_total", labels)
        assert counted == 3
        await closing(api)

    asyncio.run(beat())


class OddStore(RedisStore):
    """One job's record cannot be used."""

    async def load(self, uid: JobUid) -> Snapshot | None:
        if uid == "odd":
            raise AssertionError("a record that nobody thought of")
        return await super().load(uid)


def test_a_job_whose_figures_fail_is_named_in_the_log_and_hides_those_of_no_other(
    shared_redis: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def look() -> None:
        api = Transactions(OddStore(shared_redis.url), SETTINGS, Metrics())
        for uid in ("odd", "plain"):
            await api.create(config(uid), {})
            api.metrics.note_job(uid)
        await api.refresh_metrics()
        labels = {"job": "plain", "namespace": "", "name": "plain"}
        value = api.metrics.registry.get_sample_value
        assert value("mainstay_job_step", labels) == 0
        assert value("mainstay_unshown_jobs_total") == 1
        await closing(api)

    asyncio.run(look())
    told = [r for r in caplog.records if r.levelname == "ERROR"]
    assert [r.getMessage() for r in told] == ["how the job is, cannot be shown"]
    assert vars(told[0])["fields"] == {"uid": "odd"}
    assert "a record that nobody thought of" in caplog.text


def test_a_heartbeat_of_a_pod_that_never_registered_is_not_taken(
    new_transactions: Callable[..., Transactions],
) -> None:
    async def beat() -> None:
        transactions = new_transactions()
        uid = JobUid("beaten")
        assert await transactions.create(config(uid), {})
        stranger = Heartbeat(pod=PodUid("stranger"), slots=())
        assert not (await transactions.job(uid).beat(stranger)).known
        assert (await transactions.store.fetch_seen(uid)).at_us == {}
        await closing(transactions)

    asyncio.run(beat())


def test_commits_that_race_with_each_other_all_count(
    new_transactions: Callable[..., Transactions],
) -> None:
    async def race() -> None:
        one, other = new_transactions(), new_transactions()
        uid = JobUid("race-3")
        assert await one.create(config(uid), {})
        crew = Crew(uid, one)
        await crew.start()
        await crew.settle()
        plan = (await one.load(uid)).plan
        assert plan is not None
        events = [
            StepsCommitted(step=step, quorum=plan.quorum, committed_at_s=1.0) for step in range(10)
        ]
        await asyncio.gather(
            *((one, other)[i % 2].apply(uid, event) for i, event in enumerate(events))
        )
        assert (await other.load(uid)).step == 10
        await closing(one, other)

    asyncio.run(race())


def entry(step: int, stage: int, quorum: QuorumId) -> LedgerEntry:
    return LedgerEntry(
        step=step,
        stage=stage,
        quorum=quorum,
        gradient="",
        masters="",
        data="",
        loss=0.0,
        norm=0.0,
        tokens=1,
        step_s=0.1,
        replicas=2,
    )


def test_steps_that_are_told_together_are_one_decision(
    new_transactions: Callable[..., Transactions],
) -> None:
    async def tell() -> None:
        transactions, uid = new_transactions(), JobUid("together-2")
        assert await transactions.create(config(uid), {})
        crew = Crew(uid, transactions)
        await crew.start()
        await crew.settle()
        before = await transactions.job(uid).load()
        assert before.state.plan is not None
        quorum, stages = before.state.plan.quorum, range(before.state.shape.stages)
        told = [entry(step, stage, quorum) for step in range(20) for stage in stages]
        # The last step is not whole yet, and nobody knows of the tenth.
        told = [each for each in told[:-1] if each.step != 10]
        await transactions.job(uid).add_to_ledger(told)
        after = await transactions.job(uid).load()
        assert after.revision == before.revision + 1
        assert after.state.step == 19
        await closing(transactions)

    asyncio.run(tell())


@pytest.mark.parametrize("dear", [True, False])
def test_whoever_else_asks_gets_turns_while_a_transaction_decides(
    shared_redis: Any, dear: bool
) -> None:
    """Before each decision that comes after dear ones; of cheap ones many come in one turn."""
    turns, seen = 0, list[int]()

    def draw_nonce() -> str:
        seen.append(turns)
        until_s = time.thread_time() + 1.1 * GIVE_WAY_S
        while dear and time.thread_time() < until_s:
            pass
        return f"n-{len(seen)}"

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> None:
        store = RedisStore(shared_redis.url)
        transactions = Transactions(store, SETTINGS, Metrics(), draw_nonce=draw_nonce)
        uid = JobUid(f"turns-{dear}")
        assert await transactions.create(config(uid), {})
        counting = asyncio.create_task(count())
        await asyncio.gather(*(Crew(uid, transactions).register(i) for i in range(30)))
        counting.cancel()
        await closing(transactions)

    asyncio.run(run())
    assert len(seen) >= 30
    assert len(set(seen)) == len(seen) if dear else len(set(seen)) < len(seen)


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({}, "MAINSTAY_TOKEN"),
        ({"MAINSTAY_TOKEN": "t"}, "MAINSTAY_REDIS_URL"),
        (
            {
                "MAINSTAY_TOKEN": "t",
                "MAINSTAY_REDIS_URL": "redis://h",
                "MAINSTAY_API_PORT": "http",
            },
            "MAINSTAY_API_PORT",
        ),
    ],
)
def test_a_missing_setting_is_named(environment: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        Settings.from_environment(environment)
    assert caught.value.field == field
