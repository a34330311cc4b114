"""What is removed from a full disk, so that the next checkpoint has room."""

from __future__ import annotations

import itertools
import random

from mainstay_core.rank.saving.disk_room import (
    RoomPlan,
    Stored,
    find_clean,
    find_way_back,
    plan_room,
)


def good(version: int, size_bytes: int = 10) -> Stored:
    name = f"step-{version}"
    return Stored(name=name, version=version, size_bytes=size_bytes, complete=True)


def bad(version: int, size_bytes: int = 10) -> Stored:
    name = f"step-{version}.bad"
    return Stored(name=name, version=version, size_bytes=size_bytes, complete=False)


def test_nothing_goes_while_there_is_room() -> None:
    assert plan_room([good(1), bad(2)], 10, 10) == RoomPlan()


def test_damaged_versions_go_first() -> None:
    plan = plan_room([good(1), good(2), bad(3)], 10, 0)
    assert (plan.remove, plan.verify_first) == (("step-3.bad",), "")


def test_the_oldest_go_next_and_only_as_many_as_are_needed() -> None:
    plan = plan_room([good(1), good(2), good(3)], 10, 5)
    assert (plan.remove, plan.verify_first) == (("step-1",), "")


def test_the_only_one_left_is_read_before_the_others_go() -> None:
    plan = plan_room([good(1), good(2)], 10, 5)
    assert (plan.remove, plan.verify_first) == (("step-1",), "step-2")


def test_nothing_complete_goes_in_vain() -> None:
    assert plan_room([good(1), good(2)], 100, 5).remove == ()
    assert plan_room([good(1)], 10, 5).remove == ()


def test_the_plan_is_that_of_a_search_over_everything_that_could_go() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        stored = [
            Stored(
                name=f"s{i}",
                version=draw.randrange(5),
                size_bytes=draw.randrange(1, 20),
                complete=draw.random() < 0.7,
            )
            for i in range(draw.randrange(6))
        ]
        needed, free = draw.randrange(60), draw.randrange(40)
        plan = plan_room(stored, needed, free)
        gone = [s for s in stored if s.name in plan.remove]
        left = [s for s in stored if s.complete and s not in gone]
        room = free + sum(s.size_bytes for s in gone)
        assert not any(s.complete for s in gone) or (room >= needed and left)
        if left:
            assert all(s.version <= min(x.version for x in left) for s in gone if s.complete)
        damaged = sum(s.size_bytes for s in stored if not s.complete)
        complete = sorted((s for s in stored if s.complete), key=lambda s: (s.version, s.name))
        enough = [
            count
            for count in range(len(complete))
            if free + damaged + sum(s.size_bytes for s in complete[:count]) >= needed
        ]
        if needed > free and enough:
            assert sum(s.complete for s in gone) == enough[0], "as few as will do"
        for order in itertools.islice(itertools.permutations(stored), 3):
            assert plan_room(order, needed, free) == plan


def test_the_newest_exact_version_stays_as_long_as_the_job_is_approximate() -> None:
    def version(number: int, *, exact: bool, complete: bool = True) -> Stored:
        return Stored(
            name=f"step-{number}", version=number, size_bytes=10, complete=complete, exact=exact
        )

    exact = [version(10, exact=True), version(20, exact=True)]
    approximate = [version(30, exact=False), version(40, exact=False)]

    assert find_way_back(exact) is None, "the job is exact"
    assert find_way_back([*exact, *approximate]) == 20
    assert find_way_back(approximate) is None, "there is none"
    damaged = version(25, exact=True, complete=False)
    assert find_way_back([*exact, damaged, *approximate]) == 20
    plan = plan_room([*exact, *approximate], needed_bytes=20, free_bytes=0)
    assert plan.remove == ("step-10", "step-30")
    assert plan_room([*exact, *approximate], needed_bytes=30, free_bytes=0).remove == ()


def test_the_newest_version_that_no_device_can_have_tainted_stays() -> None:
    versions = [
        Stored(name=str(v), version=v, size_bytes=10, complete=v != 25)
        for v in (10, 20, 25, 30, 40)
    ]
    assert [find_clean(versions, at) for at in (None, 9, 19, 25, 40)] == [None, None, 10, 20, 40]
    assert plan_room(versions, 30, 0).remove == ("25", "10", "20")
    assert plan_room(versions, 30, 0, 25).remove == ("25", "10", "30")
    assert plan_room(versions, 30, 0, 40).remove == ("25", "10", "20")
