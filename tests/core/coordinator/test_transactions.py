"""Events of one job that come together: one transaction, and each as if it had come alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import Incarnation, JobUid, PodUid
from mainstay_core.base.shape import JobShape
from mainstay_core.control_plane.job_store import Change, Snapshot, StoredJob, StoreUnavailableError
from mainstay_core.control_plane.transactions import MAX_TOGETHER, JobTransactions
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import Event, FactsReported, PodRegistered
from mainstay_core.coordinator.intake.facts import UnregisteredPodError
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.facts import PodRegistration, TrainerUp
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey


class Memory:
    """One job in memory, behind a gate: a store that takes its time."""

    def __init__(self, job: StoredJob) -> None:
        self.job, self.open, self.commits, self.plans = job, asyncio.Event(), 0, 0
        self.away = False

    async def load(self) -> Snapshot:
        await self.open.wait()
        return Snapshot(revision=self.job.revision, state=self.job.state, server="")

    async def fetch_ledger(self, keys: Sequence[LedgerKey]) -> dict[LedgerKey, LedgerEntry]:
        return {key: self.job.ledger[key] for key in keys if key in self.job.ledger}

    async def put_ledger(self, entries: Sequence[LedgerEntry]) -> None:
        self.job = self.job.put_ledger(entries)

    async def commit(self, revision: int, change: Change) -> None:
        if self.away:
            raise StoreUnavailableError("gone between two writes")
        await asyncio.sleep(0)
        self.job = self.job.commit(revision, change, 0)
        self.commits += 1
        self.plans += change.plan is not None


class Transactions(JobTransactions):
    def __init__(self, store: Any, breaks: Event | None = None) -> None:
        super().__init__(store, 3)
        self.lock, self.seen, self.breaks = asyncio.Lock(), [], breaks

    async def step(self, state, event):
        self.seen.append(event)
        if event is self.breaks:
            raise ZeroDivisionError("a fault of the product")
        return machine.step(state, event, 1.0, f"nonce-{len(self.seen)}")

    def turn(self):
        return self.lock

    def now_s(self):
        return 1.0

    def decided(self, before, outcome):
        pass

    def conflicted(self):
        pass

    def note_later(self, procedure):
        pass

    def warn(self, text):
        raise AssertionError(text)

    async def contradicted(self, old, new):
        raise AssertionError((old, new))

    def entered(self, _state, entries):
        self.new_entries = entries

    def unknown_job(self):
        raise AssertionError("it is there")


def new_job(replicas: int) -> StoredJob:
    shape = JobShape(
        lanes=replicas, shards_per_lane=1, replicas=replicas, min_replicas=1, stages=1, steps=9,
        seed=1,
    )  # fmt: skip
    config = JobConfig(job=JobUid("j"), name="j", shape=shape, entrypoint="a:b", workload={})
    return StoredJob(state=machine.initial(config, 0.0))


def arrivals(count: int) -> list[Event]:
    """Pods come, then their trainers: the last one makes the first plan."""
    uids = [PodUid(f"pod-{i}") for i in range(count)]
    pods = [PodRegistration(pod=u, name=u, address="h", gather="g", num_slots=1) for u in uids]
    ups = [
        TrainerUp(pod=u, slot=0, incarnation=Incarnation(f"life-{u}"), fingerprint={}) for u in uids
    ]
    return [
        *(PodRegistered(registration=pod) for pod in pods),
        *(FactsReported(facts=(up,)) for up in ups),
    ]


async def run(transactions: Transactions, events: Sequence[Event]) -> list[Any]:
    """Apply events that all come while the store is busy; return what each came to."""
    store: Any = transactions._store
    tasks = [asyncio.create_task(transactions.apply(event)) for event in events]
    await asyncio.sleep(0)
    store.open.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def one_by_one(replicas: int, events: Sequence[Event]) -> tuple[Any, list[Any]]:
    """The brute-force twin: each event by itself."""
    state, outcomes = new_job(replicas).state, []
    for number, event in enumerate(events, 1):
        try:
            outcome = machine.step(state, event, 1.0, f"nonce-{number}")
        except MainstayError as error:
            outcomes.append(type(error))
            continue
        outcomes.append(outcome)
        state = outcome.state
    return state, outcomes


def kinds(outcomes: Sequence[Any]) -> list[Any]:
    return [type(o) if isinstance(o, Exception) else o for o in outcomes]


@pytest.mark.parametrize("replicas", [1, 3, 40])
def test_what_comes_together_is_decided_as_if_each_came_alone(replicas):
    events = arrivals(replicas)
    stranger = TrainerUp(
        pod=PodUid("stranger"), slot=0, incarnation=Incarnation("l"), fingerprint={}
    )
    events.insert(1, FactsReported(facts=(stranger,)))
    state, expected = one_by_one(replicas, events)

    async def scenario():
        store = Memory(new_job(replicas))
        outcomes = await run(Transactions(store), events)
        assert kinds(outcomes) == expected
        assert UnregisteredPodError in kinds(outcomes)
        assert store.job.state == state
        assert (store.plans, store.commits) == (1, 1)

    asyncio.run(scenario())


def test_a_plan_ends_a_transaction_so_that_none_is_skipped():
    events = [*arrivals(1), *arrivals(3)[3:]]
    state, expected = one_by_one(1, events)

    async def scenario():
        store = Memory(new_job(1))
        transactions = Transactions(store)
        outcomes = await run(transactions, events)
        assert kinds(outcomes) == expected
        assert store.job.state == state
        assert outcomes[1].plan is not None
        assert transactions.seen == events

    asyncio.run(scenario())


def test_a_transaction_takes_a_bounded_number_of_events():
    events = arrivals(MAX_TOGETHER)[:MAX_TOGETHER] + arrivals(MAX_TOGETHER + 9)[MAX_TOGETHER:][:9]

    async def scenario():
        store = Memory(new_job(MAX_TOGETHER + 9))
        await run(Transactions(store), events)
        assert len(store.job.state.pods) == MAX_TOGETHER + 9
        assert store.commits == 2

    asyncio.run(scenario())


def test_what_cannot_be_decided_harms_no_other_event():
    events = arrivals(3)

    async def scenario():
        store = Memory(new_job(3))
        outcomes = await run(Transactions(store, breaks=events[1]), events)
        assert kinds(outcomes)[1] is ZeroDivisionError
        assert UnregisteredPodError in kinds(outcomes)  # the trainer of the pod that did not come
        assert len(store.job.state.pods) == 2

    asyncio.run(scenario())


def test_who_gives_up_leaves_the_others_their_turn():
    events = arrivals(3)

    async def scenario():
        store = Memory(new_job(3))
        transactions = Transactions(store)
        tasks = [asyncio.create_task(transactions.apply(event)) for event in events]
        await asyncio.sleep(0)
        tasks[0].cancel()  # while it has its turn, for all of them
        tasks[1].cancel()  # while it waits
        store.open.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[:2])
        assert [pod.registration.pod for pod in store.job.state.pods] == ["pod-2"]
        assert not transactions._waiting

    asyncio.run(scenario())


def test_entries_that_were_written_without_their_commit_commit_the_step_when_told_again():
    async def scenario():
        store = Memory(new_job(1))
        transactions = Transactions(store)
        await run(transactions, arrivals(1))
        quorum = store.job.state.plan.quorum
        entry = LedgerEntry(
            step=0, stage=0, quorum=quorum, gradient="0" * 32, masters="1" * 32, data="2" * 32,
            loss=1.0, norm=1.0, tokens=8, step_s=0.1, replicas=1, committed_at_s=1.0,
        )  # fmt: skip
        store.away = True
        with pytest.raises(StoreUnavailableError):
            await transactions.add_to_ledger((entry,), quorum)
        store.away = False
        assert (store.job.state.step, store.job.ledger) == (0, {entry.key: entry})
        for _ in range(2):  # the second time nothing is left to do
            await transactions.add_to_ledger((entry,), quorum)
            assert store.job.state.step == 1
            assert store.job.state.progress.steps == 1
            assert transactions.new_entries == ()

    asyncio.run(scenario())
