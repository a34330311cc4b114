"""Retention: some complete window and its logs exist at every instant, and no bad one counts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.snapshots.duties import Author
from mainstay_core.snapshots.retention import (
    MAX_COVERED,
    Coverage,
    Retention,
    WindowStatus,
    after_commit,
    begin_window,
)
from mainstay_core.snapshots.windows import Window

WINDOW = Window(first=4, length=3)


def author(name: str, life: str = "life") -> Author:
    return Author(slot=Slot(pod=PodUid(name), index=0), incarnation=Incarnation(life))


A, B = author("a"), author("b")
BEGUN = begin_window(Retention(), WINDOW, [B, A])


def status(*covered: int, failed: int = -1) -> WindowStatus:
    return WindowStatus(covered=covered, failed=failed)


def test_a_window_is_complete_when_every_author_covers_it_at_its_last_version() -> None:
    kept, reason = after_commit(BEGUN, 6, {A: status(4), B: status(1, 4)})

    assert kept == Retention(complete=WINDOW)
    assert reason == "the window of versions 4 to 6 is complete, of 2 authors"
    assert kept.first_log == 4


@pytest.mark.parametrize(
    ("step", "votes"),
    [
        # Its last state has not been judged yet.
        (5, {A: status(4), B: status(4)}),
        (6, {A: status(4), B: status()}),
        (6, {A: status(4), B: status(1)}),
    ],
)
def test_until_then_it_stays_open(step: int, votes: dict[Author, WindowStatus]) -> None:
    assert after_commit(BEGUN, step, votes) == (BEGUN, "")


@pytest.mark.parametrize(
    ("votes", "reason"),
    [
        ({A: status(4)}, "its author b/0 is no member any more"),
        ({A: status(4), author("b", "next"): status(4)}, "its author b/0 is no member any more"),
        ({A: status(4, failed=4), B: status(4)}, "its author a/0 cannot cover it"),
    ],
)
def test_a_window_that_lacks_an_author_is_given_up(
    votes: dict[Author, WindowStatus], reason: str
) -> None:
    older = Window(first=1, length=3)
    begun = begin_window(Retention(complete=older), WINDOW, [A, B])

    kept, said = after_commit(begun, 6, votes)

    assert kept == Retention(complete=older)
    assert said == f"the window from version 4 is given up: {reason}"
    assert kept.first_log == 1


def test_a_failure_of_an_older_window_does_not_harm_the_open_one() -> None:
    kept, _ = after_commit(BEGUN, 6, {A: status(4, failed=1), B: status(4)})

    assert kept.complete == WINDOW


def test_without_an_open_window_a_commit_changes_nothing() -> None:
    assert after_commit(Retention(), 6, {}) == (Retention(), "")
    assert Retention().first_log is None


def test_stores_keep_two_windows_and_the_logs_since_the_older() -> None:
    older = Window(first=1, length=3)
    begun = begin_window(Retention(complete=older), WINDOW, [A])

    assert begun.windows == (older, WINDOW)
    assert begun.first_log == 1


def test_windows_do_not_overlap() -> None:
    with pytest.raises(LocalProtocolError, match="the window from version 4 is open"):
        begin_window(BEGUN, Window(first=9, length=1), [A])
    with pytest.raises(LocalProtocolError, match="must begin after 6"):
        begin_window(Retention(complete=WINDOW), Window(first=6, length=1), [A])


OWN, PEERS = PodUid("a"), (PodUid("c"), PodUid("d"))


def test_an_author_covers_a_window_when_every_holder_has_every_instalment() -> None:
    coverage = Coverage().begin(WINDOW, (0, 2), OWN, PEERS)
    placings = [(number, holder) for number in (0, 2) for holder in (OWN, *PEERS)]
    for number, holder in placings:
        assert coverage.status == status()
        coverage = coverage.placed(4, number, holder).placed(9, number, holder)

    assert coverage.status == status(4)


def test_who_has_nothing_to_copy_covers_the_window_at_once() -> None:
    assert Coverage().begin(WINDOW, (), OWN, PEERS).status == status(4)


def test_a_window_goes_on_with_the_peers_that_are_left_and_fails_without_any() -> None:
    coverage = Coverage().begin(WINDOW, (0,), OWN, PEERS).placed(4, 0, OWN)

    one_left = coverage.lost(PEERS[0])
    assert one_left.placed(4, 0, PEERS[1]).status == status(4)
    assert one_left.lost(PEERS[1]).status == status(failed=4)
    assert coverage.lost(PodUid("stranger")) == coverage


def test_who_has_no_peers_by_its_settings_loses_none() -> None:
    coverage = Coverage().begin(WINDOW, (0,), OWN, ()).lost(PodUid("c")).placed(4, 0, OWN)

    assert coverage.status == status(4)


def test_a_bad_state_fails_every_window_that_was_begun() -> None:
    coverage = Coverage().begin(WINDOW, (), OWN, PEERS).fail()

    assert coverage.status == status(failed=4)
    assert coverage.placed(4, 0, OWN).status == status(failed=4)
    assert coverage.begin(Window(first=8, length=1), (), OWN, ()).status == status(8, failed=4)


def test_a_vote_names_the_newest_windows_only() -> None:
    coverage = Coverage()
    for first in range(0, 12, 2):
        coverage = coverage.begin(Window(first=first, length=2), (), OWN, PEERS)

    assert len(coverage.status.covered) == MAX_COVERED
    assert coverage.status == status(6, 8, 10)


@dataclass
class Pod:
    """A pod with a store and one author; it hears of commits late, as stores may."""

    author: Author
    coverage: Coverage = field(default_factory=Coverage)
    copies: set[tuple[int, str, int]] = field(default_factory=set)
    """(window, author's pod, instalment)"""
    logs: set[int] = field(default_factory=set)
    underway: list[tuple[int, int, str]] = field(default_factory=list)


class Job:
    """Some pods that copy windows, lose each other, and find states bad."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pods = {name: Pod(author(name)) for name in "abcde"[: rng.randint(2, 5)]}
        self.retention = Retention()
        self.version = 0
        self.bad: set[int] = set()
        self.authors: dict[int, list[str]] = {}
        self.num_complete = 0

    def step(self) -> None:
        rng = self.rng
        if self.retention.open is None and rng.random() < 0.8:
            self.begin()
        self.copy()
        if rng.random() < 0.05:
            self.find_bad(rng.choice(list(self.pods)))
        if rng.random() < 0.05 and len(self.pods) > 2:
            self.lose(rng.choice(list(self.pods)))
        for pod in self.pods.values():
            pod.logs.add(self.version)
        votes = {pod.author: pod.coverage.status for pod in self.pods.values()}
        before = self.retention
        self.retention, _ = after_commit(before, self.version, votes)
        self.num_complete += self.retention.complete != before.complete
        self.version += 1
        for pod in self.pods.values():
            if rng.random() < 0.7:
                self.drop(pod)

    def begin(self) -> None:
        window = Window(first=self.version, length=self.rng.randint(1, 3))
        self.authors[window.first] = list(self.pods)
        authors = [pod.author for pod in self.pods.values()]
        self.retention = begin_window(self.retention, window, authors)
        for name, pod in self.pods.items():
            others = [PodUid(other) for other in self.pods if other != name]
            peers = self.rng.sample(others, min(2, len(others)))
            pod.coverage = pod.coverage.begin(window, range(window.length), PodUid(name), peers)
            pod.underway = [
                (placing.number, window.first, placing.holder)
                for placing in pod.coverage.windows[-1].awaited
            ]

    def copy(self) -> None:
        for name, pod in self.pods.items():
            for number, first, holder in list(pod.underway):
                due = first + number <= self.version
                if due and self.rng.random() < 0.7 and holder in self.pods:
                    pod.underway.remove((number, first, holder))
                    self.pods[holder].copies.add((first, name, number))
                    pod.coverage = pod.coverage.placed(first, number, PodUid(holder))

    def find_bad(self, name: str) -> None:
        """The vote of this step finds a state bad; it heals, and the step is voted again."""
        if self.retention.open is not None:
            window = self.retention.open.window
            if self.pods[name].author in self.retention.open.authors:
                self.bad.add(window.first)
        self.pods[name].coverage = self.pods[name].coverage.fail()

    def lose(self, name: str) -> None:
        """A pod is gone, unless it holds the last copy of something that is needed."""
        left = {n: pod for n, pod in self.pods.items() if n != name}
        if self.find_lacks(left):
            return
        self.pods = left
        for pod in left.values():
            pod.coverage = pod.coverage.lost(PodUid(name))

    def drop(self, pod: Pod) -> None:
        kept = {window.first for window in self.retention.windows}
        pod.copies = {copy for copy in pod.copies if copy[0] in kept}
        first = self.retention.first_log
        pod.logs = {step for step in pod.logs if first is not None and step >= first}

    def find_lacks(self, pods: dict[str, Pod]) -> list[str]:
        """What no pod has of the complete window and of its logs."""
        complete = self.retention.complete
        if complete is None:
            return []
        copies = {copy for pod in pods.values() for copy in pod.copies}
        lacks = [
            f"instalment {number} of {name}"
            for name in self.authors[complete.first]
            for number in range(complete.length)
            if (complete.first, name, number) not in copies
        ]
        logs = {step for pod in pods.values() for step in pod.logs}
        return lacks + [
            f"log of {step}" for step in range(complete.first, self.version) if step not in logs
        ]


@pytest.mark.parametrize("seed", range(10))
def test_at_every_instant_some_complete_window_and_its_logs_exist(seed: int) -> None:
    completed = 0
    for case in range(100):
        job = Job(random.Random(seed * 1000 + case))
        newest = -1
        for _ in range(30):
            job.step()
            complete = job.retention.complete
            if complete is None:
                continue
            assert complete.first >= newest
            assert complete.first not in job.bad
            assert complete.last < job.version
            newest = complete.first
            assert job.find_lacks(job.pods) == []
        completed += job.num_complete
    assert completed > 200
