"""Who looks for silence, and when; which ledger entries are news; how refusals are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mainstay_core.base.errors import (
    InvalidSpecError,
    LocalProtocolError,
    RemoteProtocolError,
    StoreConflictError,
)
from mainstay_core.base.ids import JobUid, QuorumId
from mainstay_core.control_plane.heartbeats import HeartbeatLag
from mainstay_core.control_plane.job_store import UnknownJobError
from mainstay_core.control_plane.problems import problem_of
from mainstay_core.control_plane.transactions import find_news
from mainstay_core.control_plane.watch import Watch
from mainstay_core.coordinator.events import Transition
from mainstay_core.coordinator.intake.facts import UnregisteredPodError
from mainstay_core.coordinator.intake.store_recovery import StoreBehindError
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.wire.api import ApiRefused
from mainstay_core.wire.formats import UnknownFormatError
from mainstay_core.wire.ledger import LedgerEntry

JOB = JobUid("job")


class Leased:
    """A lease that others may have, and a job whose looks find a state; it has ended without."""

    def __init__(self) -> None:
        self.is_ours = True
        self.state: CoordinatorState | None = None
        self.asked = 0
        self.looks: list[HeartbeatLag] = []
        self.watch = Watch(
            lease_s=3.0,
            idle_s=1.0,
            hold_lease=self.hold_lease,
            list_uids=self.list_uids,
            look=self.look,
            begin=self.begin,
            failed=self.failed,
        )

    async def hold_lease(self) -> bool:
        self.asked += 1
        return self.is_ours

    async def list_uids(self) -> tuple[JobUid, ...]:
        return (JOB,)

    async def look(self, uid: JobUid, silence: HeartbeatLag) -> Transition | None:
        assert uid == JOB
        self.looks.append(silence)
        return None if self.state is None else Transition(state=self.state)

    async def begin(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await look()

    def failed(self, uid: JobUid, error: Exception) -> None:
        raise AssertionError(uid) from error

    def round(self, now_s: float) -> None:
        asyncio.run(self.watch.round(now_s))


def test_only_the_replica_with_the_lease_looks_and_a_job_that_has_ended_is_left_alone() -> None:
    leased = Leased()
    leased.is_ours = False
    leased.round(10.0)
    assert leased.looks == []
    leased.is_ours = True
    for now_s in (10.1, 10.2, 20.0):
        leased.round(now_s)
    assert len(leased.looks) == 1


def test_the_lease_is_renewed_after_a_third_of_its_time() -> None:
    leased = Leased()
    for now_s in (10.0, 10.5, 10.9, 11.1, 11.2):
        leased.round(now_s)
    assert leased.asked == 2


def test_a_job_is_looked_at_now_and_then_and_all_the_time_while_something_is_pending(
    start: Callable[..., Any],
) -> None:
    world, leased = start(), Leased()

    def looked(*rounds_s: float) -> list[float]:
        leased.state, times = world.state, []
        for now_s in rounds_s:
            before = len(leased.looks)
            leased.round(now_s)
            times += [now_s] * (len(leased.looks) - before)
        return times

    assert looked(10.0, 10.1, 10.9, 11.0, 11.9, 12.0) == [10.0, 11.0, 12.0]
    world.park(world.member(0, 0))  # a plan follows when the others have had time to say more
    assert looked(12.9, 13.0, 13.1, 13.2) == [13.0, 13.1, 13.2]
    assert len(set(map(id, leased.looks))) == 1, "silence is counted from one look to the next"


def test_a_replica_that_had_lost_the_lease_counts_silence_anew(start: Callable[..., Any]) -> None:
    leased = Leased()
    leased.state = start().state
    for now_s, is_ours in ((10.0, True), (20.0, False), (30.0, True)):
        leased.is_ours = is_ours
        leased.round(now_s)

    first, second = leased.looks
    assert first is not second


class Neighbours:
    """Jobs that are looked at side by side: the look at one fails, the look at another hangs."""

    def __init__(self, state: CoordinatorState) -> None:
        self.state = state
        self.uids = [JobUid(name) for name in ("broken", "hanging", "well")]
        self.looked: list[str] = []
        self.silences: list[HeartbeatLag] = []
        self.listed = 0
        self.failures: list[tuple[str, str]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.watch = Watch(
            lease_s=3.0,
            idle_s=1.0,
            hold_lease=self.hold_lease,
            list_uids=self.list_uids,
            look=self.look,
            begin=self.begin,
            failed=lambda uid, error: self.failures.append((uid, str(error))),
        )

    async def hold_lease(self) -> bool:
        return True

    async def list_uids(self) -> list[JobUid]:
        self.listed += 1
        return self.uids

    async def look(self, uid: JobUid, silence: HeartbeatLag) -> Transition:
        self.silences.append(silence)
        self.looked.append(uid)
        if uid == "broken":
            raise ValueError("its state cannot be read")
        if uid == "hanging":
            await asyncio.Event().wait()
        return Transition(state=self.state)

    async def begin(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.tasks.append(asyncio.create_task(look()))

    async def round(self, now_s: float) -> None:
        """Run a round, and all that comes of it but what hangs."""
        await self.watch.round(now_s)
        for _ in range(3):
            await asyncio.sleep(0)

    def rounds(self, *times_s: float) -> None:
        async def run() -> None:
            for now_s in times_s:
                await self.round(now_s)
            for task in self.tasks:
                task.cancel()

        asyncio.run(run())


def test_neither_a_look_that_fails_nor_one_that_hangs_keeps_another_job_from_being_looked_at(
    start: Callable[..., Any],
) -> None:
    jobs = Neighbours(start().state)
    jobs.rounds(10.0, 11.0, 12.0)

    assert jobs.looked.count("well") == 3
    assert jobs.looked.count("broken") == 3, "it may be mended"
    assert jobs.looked.count("hanging") == 1, "a job is never looked at twice at a time"
    assert jobs.failures == [("broken", "its state cannot be read")] * 3


def test_nothing_is_kept_of_jobs_that_are_no_more(start: Callable[..., Any]) -> None:
    jobs = Neighbours(start().state)
    jobs.uids = [JobUid("well")]
    jobs.rounds(10.0, 10.1)
    assert jobs.looked == ["well"]
    jobs.uids = []
    jobs.rounds(11.0)
    jobs.uids = [JobUid("well")]
    jobs.rounds(12.0)
    assert jobs.looked == ["well"] * 2
    assert jobs.silences[0] is not jobs.silences[1], "silence is counted anew"


def test_jobs_are_listed_now_and_then_and_once_more_when_one_cannot_be_looked_at(
    start: Callable[..., Any],
) -> None:
    jobs = Neighbours(start().state)
    jobs.uids = [JobUid("well")]
    jobs.rounds(*(10.0 + number / 10 for number in range(20)))
    assert jobs.listed == 2
    jobs.uids = [JobUid("broken")]
    jobs.rounds(12.0)
    jobs.uids = [JobUid("well")]
    jobs.rounds(12.1)
    assert jobs.listed == 4
    assert jobs.looked[-2:] == ["broken", "well"]


def entry(number: int = 1, masters: str = "m", history: str = "") -> LedgerEntry:
    return LedgerEntry(
        step=1, stage=0, quorum=QuorumId(id=number, nonce="a"), gradient="g", masters=masters,
        data="d", loss=1.0, norm=1.0, tokens=1, step_s=0.1, replicas=1, history=history,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("known", "told", "is_fresh", "contradicts"),
    [
        (None, entry(), True, False),
        (entry(), entry(), False, False),
        (entry(2), entry(1), False, False),
        (entry(1), entry(2, "other"), True, True),
        (entry(2), entry(1, "other"), False, False),
    ],
    ids=["first", "again", "older", "newer, other bits", "older, other bits"],
)
def test_an_entry_is_written_if_it_is_news_and_other_bits_of_a_newer_quorum_contradict(
    known: LedgerEntry | None, told: LedgerEntry, is_fresh: bool, contradicts: bool
) -> None:
    news = find_news({} if known is None else {known.key: known}, [told])
    assert news.fresh == ((told,) if is_fresh else ())
    assert news.contradictions == (((known, told),) if contradicts else ())


@pytest.mark.parametrize("masters", ["m", "other"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("before", "after"), [("", "one fork"), ("one fork", "two forks")])
def test_an_entry_of_another_history_is_news_and_contradicts_nothing(
    before: str, after: str, number: int, masters: str
) -> None:
    """Another course is not the same, whatever its bits, and owes nobody the same ones."""
    for known, told in ((before, after), (after, before)):
        old, new = entry(history=known), entry(number, masters, told)
        news = find_news({old.key: old}, [new])
        assert (news.fresh, news.contradictions) == ((new,), ())
    again, other = entry(2, "m", after), entry(2, "other", after)
    news = find_news({again.key: again}, [again, other])
    assert (news.fresh, news.contradictions) == ((other,), ((again, other),))


@pytest.mark.parametrize(
    ("error", "register_again"),
    [
        (UnregisteredPodError("x"), True),
        (StoreBehindError("x"), True),
        (UnknownJobError("x"), True),
        (RemoteProtocolError("x"), False),
        (InvalidSpecError("field", "x"), False),
        (UnknownFormatError("x"), False),
    ],
)
def test_a_supervisor_registers_again_where_it_is_not_known_and_nowhere_else(
    error: Any, register_again: bool
) -> None:
    problem = problem_of(error)
    assert problem is not None
    assert ApiRefused(*problem).is_unknown == register_again


def test_trouble_with_the_store_is_no_refusal_and_a_bug_of_ours_no_answer() -> None:
    assert problem_of(StoreConflictError("x")) == (503, "busy")
    assert problem_of(LocalProtocolError("x")) is None
