"""Who leads: the decision on values, and whole elections with clocks that run unequally."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from mainstay_operator.leadership import (
    Candidate,
    LeaseRecord,
    LeaseTiming,
    Step,
    read_lease,
    show_lease,
    show_micro_time,
)

TIMING = LeaseTiming(duration_s=15.0, renew_s=10.0, retry_s=2.0)
OTHERS = LeaseRecord(holder="other", duration_s=15.0, transitions=4, version="7")
ME = Candidate(identity="me", timing=TIMING)


def test_a_lease_that_is_not_there_or_that_nobody_holds_is_claimed() -> None:
    assert ME.decide(0.0).step is Step.CLAIM
    free = ME.after_look(replace(OTHERS, holder=""), 5.0)
    assert free.decide(5.0).step is Step.CLAIM
    # A claim whose answer was lost.
    assert ME.after_look(replace(OTHERS, holder="me"), 5.0).decide(5.0).step is Step.CLAIM


def test_a_lease_is_taken_over_when_it_has_not_been_seen_changed_for_its_duration() -> None:
    waiting = ME.after_look(OTHERS, 100.0)
    verdict = waiting.decide(114.9)
    assert (verdict.step, verdict.reason) == (Step.WAIT, "other leads")
    assert waiting.decide(115.0).step is Step.CLAIM

    # Its times are no clock: one from long ago is waited for like any other.
    old = replace(OTHERS, renewed="1999-01-01T00:00:00.000000Z", version="8")
    assert waiting.after_look(old, 110.0).decide(124.9).step is Step.WAIT
    # What is seen again unchanged is no renewal; nor is a Lease that somebody has deleted an end.
    assert waiting.after_look(OTHERS, 110.0).decide(115.0).step is Step.CLAIM
    assert waiting.after_look(None, 110.0).decide(114.9).step is Step.WAIT


@pytest.mark.parametrize("duration_s", [40.0, 1e9])
def test_the_holders_duration_counts_within_its_bound(duration_s: float) -> None:
    waiting = ME.after_look(replace(OTHERS, duration_s=duration_s), 0.0)
    bound_s = min(duration_s, 600.0)
    assert waiting.decide(bound_s - 0.1).step is Step.WAIT
    assert waiting.decide(bound_s).step is Step.CLAIM


def test_a_term_counts_from_when_its_renewal_was_sent() -> None:
    leading = ME.after_claim(replace(OTHERS, holder="me"), 100.0)
    assert leading.left_s(103.0) == 7.0
    assert leading.decide(109.9).step is Step.CLAIM
    assert leading.left_s(110.0) == 0.0
    stopped = leading.decide(110.0)
    assert (stopped.step, stopped.reason) == (
        Step.STOP,
        "the Lease could not be renewed for 10 s",
    )
    gone = leading.after_look(None, 101.0).decide(101.0)
    assert (gone.step, gone.reason) == (Step.STOP, "the Lease was deleted or emptied")
    lost = leading.after_look(OTHERS, 101.0).decide(101.0)
    assert (lost.step, lost.reason) == (Step.STOP, "the Lease was taken away: other has it")


def test_claims_count_transitions_and_keep_the_time_of_the_first() -> None:
    first = ME.claim(0.0)
    assert (first.holder, first.transitions, first.duration_s) == ("me", 0, 15.0)
    assert first.acquired == first.renewed == "1970-01-01T00:00:00.000000Z"
    # The chart makes one that is empty.
    assert ME.after_look(read_lease({"metadata": {}}), 0.0).claim(0.0).transitions == 0

    renewed = ME.after_claim(first, 0.0).claim(1.5)
    assert renewed == replace(first, renewed=show_micro_time(1.5))
    taken = ME.after_look(OTHERS, 0.0).claim(1.5)
    assert (taken.transitions, taken.acquired) == (5, show_micro_time(1.5))
    left = ME.after_claim(first, 0.0).release(2.0)
    assert (left.holder, left.duration_s, left.transitions) == ("", 1, 0)
    assert replace(ME, identity="next").after_look(left, 0.0).claim(3.0).transitions == 1


def test_a_lease_object_is_written_and_read_back() -> None:
    record = replace(ME.claim(0.25), version="9")
    body = {"metadata": {"resourceVersion": "9"}, "spec": show_lease(record)}
    assert read_lease(body) == record
    assert "holderIdentity" not in show_lease(replace(record, holder=""))
    assert read_lease(None) is None
    given_back = replace(ME.after_claim(record, 0.0).release(2.0), version="10")
    body = {"metadata": {"resourceVersion": "10"}, "spec": show_lease(given_back)}
    assert read_lease(body) == given_back


@pytest.mark.parametrize("spec", [{}, None, {"holderIdentity": ""}, {"holderIdentity": None}])
def test_a_lease_that_somebody_has_emptied_is_taken_when_its_holders_term_is_over(
    spec: dict[str, Any] | None,
) -> None:
    held = show_lease(replace(OTHERS, acquired="2026-01-01T00:00:00.000000Z"))
    if spec:
        spec = {**held, **spec}
    emptied = read_lease({"metadata": {"resourceVersion": "8"}, "spec": spec})

    waiting = ME.after_look(OTHERS, 100.0).after_look(emptied, 101.0)
    assert waiting.decide(114.9).step is Step.WAIT, "its holder may not have seen it yet"
    assert waiting.decide(115.0).step is Step.CLAIM
    assert waiting.claim(0.0).transitions == 5
    # Its holder stops, and who has seen nothing else takes it as a new one.
    assert ME.after_claim(ME.claim(0.0), 100.0).after_look(emptied, 101.0).decide(101.0).step is (
        Step.STOP
    )
    assert ME.after_look(emptied, 101.0).decide(101.0).step is Step.CLAIM


# --- whole elections ------------------------------------------------------------------------------


@dataclass
class Player:
    """An operator: its clock, and what it knows. It dies, stands still, and begins anew."""

    name: str
    rate: float
    offset_s: float
    candidate: Candidate
    life: int = 0
    cut_until_s: float = 0.0
    """Before, nothing of it arrives (true time)."""

    def clock(self, true_s: float) -> float:
        return self.offset_s + self.rate * true_s

    def leads(self, true_s: float) -> bool:
        return self.candidate.left_s(self.clock(true_s)) > 0


@dataclass
class Election:
    """Players and a Lease in simulated time. Requests are late or lost, as are answers."""

    seed: int
    timing: LeaseTiming = TIMING
    rates: tuple[float, float] = (0.85, 1.2)
    end_s: float = 300.0
    calm_from_s: float = 220.0
    """From then on nothing is late, lost or killed."""
    lease: LeaseRecord | None = None
    now_s: float = 0.0
    num_terms: int = 0
    worst: int = 0
    """Most players that led at once."""
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=itertools.count)
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.longest_s = self.draw.choice((0.1, 3.0, 25.0))
        self.players = [self.new_player(name) for name in "abc"]
        for player in self.players:
            self.at(self.draw.uniform(0, 3), self.look, player, 0)
        self.at(self.draw.uniform(20, 60), self.strike)

    def new_player(self, name: str) -> Player:
        candidate = Candidate(identity=f"{name}0", timing=self.timing)
        rate, offset_s = self.draw.uniform(*self.rates), self.draw.uniform(-1e3, 1e6)
        return Player(name, rate, offset_s, candidate)

    def at(self, in_s: float, do: Callable[..., None], *args: object) -> None:
        heapq.heappush(self.queue, (self.now_s + in_s, next(self.order), lambda: do(*args)))

    def delay_s(self) -> float:
        if self.now_s > self.calm_from_s:
            return 0.01
        usual_s = self.draw.uniform(0, 0.1)
        return usual_s if self.draw.random() < 0.6 else self.draw.uniform(0, self.longest_s)

    def is_lost(self, player: Player) -> bool:
        if self.now_s > self.calm_from_s:
            return False
        return self.now_s < player.cut_until_s or self.draw.random() < 0.1

    def run(self) -> Election:
        while self.queue and self.queue[0][0] < self.end_s:
            self.now_s, _, do = heapq.heappop(self.queue)
            do()
            self.worst = max(self.worst, sum(p.leads(self.now_s) for p in self.players))
        return self

    def begin_anew(self, player: Player) -> None:
        player.life += 1
        identity = f"{player.name}{player.life}"
        player.candidate = Candidate(identity=identity, timing=self.timing)
        self.at(self.draw.uniform(0, 5), self.look, player, player.life)

    def strike(self) -> None:
        """Kill somebody, cut it off, or have it end in good order."""
        if self.now_s > self.calm_from_s:
            return
        self.at(self.draw.uniform(10, 60), self.strike)
        player = self.draw.choice(self.players)
        if self.draw.random() < 0.5:
            player.cut_until_s = self.now_s + self.draw.uniform(5, 60)
            return
        if player.leads(self.now_s) and self.draw.random() < 0.5:
            # It stops to lead, and then gives the Lease back.
            self.at(self.delay_s(), self.write, player.candidate.release(0.0), self.lease)
        self.begin_anew(player)

    def look(self, player: Player, life: int) -> None:
        if player.life != life:
            return
        self.at(self.timing.retry_s / player.rate, self.look, player, life)
        if not self.is_lost(player):
            self.at(self.delay_s(), self.answer, player, life)

    def answer(self, player: Player, life: int) -> None:
        self.at(self.delay_s(), self.judge, player, life, self.lease)

    def judge(self, player: Player, life: int, found: LeaseRecord | None) -> None:
        if player.life != life:
            return
        now_s = player.clock(self.now_s)
        player.candidate = player.candidate.after_look(found, now_s)
        verdict = player.candidate.decide(now_s)
        if verdict.step is Step.STOP:
            self.begin_anew(player)
        elif verdict.step is Step.CLAIM:
            # It may stand still between the look and the claim.
            self.at(self.delay_s(), self.claim, player, life, found)

    def claim(self, player: Player, life: int, found: LeaseRecord | None) -> None:
        if player.life != life:
            return
        sent_at_s = player.clock(self.now_s)
        record = player.candidate.claim(0.0)

        def arrive() -> None:
            written = self.write(record, found)
            if written is not None and not self.is_lost(player):
                self.at(self.delay_s(), hear, written)

        def hear(written: LeaseRecord) -> None:
            if player.life == life:
                self.num_terms += not player.leads(self.now_s)
                since_s = self.begin_term(player, sent_at_s)
                player.candidate = player.candidate.after_claim(written, since_s)

        if not self.is_lost(player):
            self.at(self.delay_s(), arrive)

    def begin_term(self, player: Player, sent_at_s: float) -> float:
        """From when on, by the player's clock, a claim that has succeeded counts."""
        del player
        return sent_at_s

    def write(self, record: LeaseRecord, over: LeaseRecord | None) -> LeaseRecord | None:
        """The API server: only over the version that was read."""
        if (self.lease and self.lease.version) != (over and over.version):
            return None
        self.lease = replace(record, version=str(next(self.versions)))
        return self.lease


def test_two_never_lead_at_once_and_somebody_leads_again_when_all_is_calm() -> None:
    terms = 0
    for seed in range(50):
        election = Election(seed).run()
        assert election.worst == 1, seed
        assert sum(p.leads(election.now_s) for p in election.players) == 1, seed
        terms += election.num_terms
    assert terms > 100


class LateTerms(Election):
    """Terms count from when the answer comes, not from when the claim was sent."""

    def begin_term(self, player: Player, sent_at_s: float) -> float:
        del sent_at_s
        return player.clock(self.now_s)


@pytest.mark.parametrize(
    "broken",
    [
        partial(Election, timing=replace(TIMING, renew_s=20.0)),
        partial(Election, rates=(0.4, 2.0)),
        LateTerms,
    ],
)
def test_outside_of_the_rules_the_election_finds_two_leaders(
    broken: Callable[[int], Election],
) -> None:
    assert any(broken(seed).run().worst > 1 for seed in range(150))
