"""Bounds on connections that have proved nothing: against a twin that looks at all of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from mainstay_core.base.admission import FULL_PAUSE_S, Admission, Bounds

SMALL = Bounds(
    total=6, per_address=3, prove_s=5.0, asked=4, answer_s=20.0, accepts_per_s=2.0, burst=8
)


def made(bounds: Bounds = SMALL) -> Admission[int]:
    return Admission(bounds, 0.0)


def test_whoever_is_late_is_closed_and_nobody_else() -> None:
    admission = made()
    admission.opened(1, "a", 0.0)
    admission.opened(2, "a", 1.0)
    assert admission.next_deadline_s() == 5.0
    assert admission.expired(4.9) == []
    assert admission.expired(5.0) == [1]
    assert admission.next_deadline_s() == 6.0
    admission.proved(2)
    assert admission.next_deadline_s() is None
    assert admission.expired(100.0) == []


def test_an_address_with_too_many_loses_its_oldest() -> None:
    admission = made()
    closed = [admission.opened(key, "a", 0.0) for key in range(5)]
    assert closed == [[], [], [], [0], [1]]
    assert admission.opened(9, "b", 0.0) == []


def test_with_too_many_in_all_the_most_present_address_pays() -> None:
    """A pod that calls in the midst of strangers is not what goes."""
    admission = made()
    for key, address in enumerate(["pod", "x", "y", "y", "x", "y"]):
        assert admission.opened(key, address, 0.0) == []
    assert admission.opened(6, "z", 0.0) == [2]
    assert len(admission) == SMALL.total


def test_those_that_prove_themselves_do_not_slow_down_others() -> None:
    admission = made()
    for key in range(1000):
        assert admission.pause_s(0.0) == 0.0
        admission.opened(key, "pod", 0.0)
        admission.proved(key)
    assert len(admission) == 0


def test_those_that_do_not_are_accepted_at_a_pace() -> None:
    admission = made()
    for key in range(SMALL.burst):
        assert admission.pause_s(0.0) == 0.0
        admission.opened(key, str(key), 0.0)
        admission.ended(key)
    assert admission.pause_s(0.0) == 0.5
    assert admission.pause_s(0.25) == 0.25
    assert admission.pause_s(0.5) == 0.0
    admission.opened(99, "x", 0.5)
    assert admission.pause_s(0.5) == 0.5
    assert admission.pause_s(1000.0) == 0.0


def test_who_has_asked_has_longer_and_is_not_what_goes() -> None:
    admission = made(replace(SMALL, total=2))
    admission.opened(1, "pod", 0.0)
    assert admission.asked(1, 4.0) == []
    for key in range(2, 9):
        admission.opened(key, str(key), 4.0)
    assert 1 not in admission.expired(23.9)
    assert admission.asked(1, 23.9) == [], "asking again gives no more time"
    assert admission.expired(24.0) == [1]


def test_nobody_is_accepted_while_too_many_wait_for_an_answer() -> None:
    admission = made()
    for key in range(SMALL.asked):
        admission.opened(key, str(key), 0.0)
        admission.asked(key, 0.0)
    assert admission.pause_s(0.0) == FULL_PAUSE_S
    admission.proved(0)
    assert admission.pause_s(0.0) == 0.0


def test_an_address_that_asks_too_much_at_a_time_is_closed() -> None:
    admission = made()
    closed = []
    for key in range(4):
        admission.opened(key, "a", 0.0)
        closed += admission.asked(key, 0.0)
    assert closed == [3]
    assert len(admission) == 3


def test_without_descriptors_the_older_half_goes_those_that_wait_for_an_answer_last() -> None:
    admission = made()
    admission.opened(0, "a", 0.0)
    admission.asked(0, 0.0)
    for key in range(1, 6):
        admission.opened(key, "b" * key, 0.0)
    assert admission.make_room() == [1, 2, 3]
    assert admission.make_room() == [4]
    assert admission.make_room() == [5]
    assert admission.make_room() == [0]
    assert admission.make_room() == []


@dataclass
class Seen:
    """A connection as the twin knows it."""

    key: int
    address: str
    due_s: float
    asked: bool = False


class Twin:
    """The same rules, by looking at every connection each time."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.seen: list[Seen] = []

    def silent(self) -> list[Seen]:
        return [s for s in self.seen if not s.asked]

    def drop(self, gone: list[Seen]) -> list[int]:
        self.seen = [s for s in self.seen if s not in gone]
        return [s.key for s in gone]

    def opened(self, key: int, address: str, now_s: float) -> list[int]:
        self.seen.append(Seen(key, address, now_s + self.bounds.prove_s))
        same = [s for s in self.silent() if s.address == address]
        if len(same) > self.bounds.per_address:
            return self.drop(same[:1])
        if len(self.silent()) <= self.bounds.total:
            return []
        counts: dict[str, int] = {}
        for each in self.silent():
            counts[each.address] = counts.get(each.address, 0) + 1
        most = [a for a in counts if counts[a] == max(counts.values())]
        return self.drop([s for s in self.silent() if s.address in most][:1])

    def asked(self, key: int, now_s: float) -> list[int]:
        for each in self.silent():
            if each.key == key:
                busy = [s for s in self.seen if s.asked and s.address == each.address]
                if len(busy) >= self.bounds.per_address:
                    return self.drop([each])
                self.seen.remove(each)
                self.seen.append(Seen(key, each.address, now_s + self.bounds.answer_s, asked=True))
        return []

    def expired(self, now_s: float) -> list[int]:
        return self.drop([s for s in self.seen if s.due_s <= now_s])


@pytest.mark.parametrize("seed", range(300))
def test_it_does_what_a_look_at_all_connections_says(seed: int) -> None:
    rng = random.Random(seed)
    bounds = Bounds(
        total=rng.randint(1, 6), per_address=rng.randint(1, 4), asked=rng.randint(1, 4),
        prove_s=5.0, answer_s=9.0, burst=4, accepts_per_s=1.0,
    )  # fmt: skip
    admission, twin, now_s = made(bounds), Twin(bounds), 0.0
    for key in range(120):
        now_s += rng.choice([0.0, 0.0, 0.5, 2.0])
        late = admission.expired(now_s)
        assert sorted(late) == sorted(twin.expired(now_s))
        address = rng.choice("abc")
        assert admission.opened(key, address, now_s) == twin.opened(key, address, now_s)
        old = rng.randint(0, key)
        match rng.randrange(4):
            case 0:
                assert admission.asked(old, now_s) == twin.asked(old, now_s)
            case 1:
                admission.proved(old)
                twin.drop([s for s in twin.seen if s.key == old])
            case 2:
                admission.ended(old)
                twin.drop([s for s in twin.seen if s.key == old])
        assert len(admission) == len(twin.seen)
        assert len(twin.silent()) <= bounds.total
