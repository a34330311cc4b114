"""What waits to be heard by the api: told again until it is answered, in order, none left out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.core.plans import make_plan

from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.supervisor.outbox import (
    MAX_BATCH,
    MAX_LEDGER,
    RETRY_FIRST_S,
    RETRY_MAX_S,
    Answer,
    Away,
    FactOutbox,
    Heard,
    LedgerOutbox,
    Refused,
    Unknown,
    told,
)
from mainstay_core.wire.facts import Fact, PodGone
from mainstay_core.wire.ledger import LedgerEntry


def fact(number: int) -> Fact:
    return PodGone(pod=PodUid(f"p{number}"))


def holding(*numbers: int) -> FactOutbox:
    outbox = FactOutbox()
    for number in numbers:
        outbox = outbox.put(fact(number))
    return outbox


def told_of(outbox: FactOutbox) -> tuple[Fact, ...]:
    return outbox.ask()[1]


def entry(step: int) -> LedgerEntry:
    return LedgerEntry(
        step=step, stage=0, quorum=QuorumId(id=1, nonce="a"), gradient="g", masters="m", data="d",
        loss=1.0, norm=1.0, tokens=1, step_s=0.1, replicas=1,
    )  # fmt: skip


def test_a_fact_that_is_repeated_is_told_last_too_and_twice_at_most() -> None:
    assert holding(1, 1).waiting == (fact(1),)
    assert holding(1, 2, 1).waiting == (fact(1), fact(2), fact(1))
    assert holding(1, 2, 1, 2, 1, 2).waiting == (fact(1), fact(2), fact(1), fact(2))


def test_a_fact_that_is_repeated_during_its_request_is_told_though_that_is_refused() -> None:
    # Answered late: meanwhile the api has given the pod up, and the pod has registered again.
    outbox, batch = holding(1).ask()
    outbox = outbox.put(fact(2)).put(fact(1))
    outbox = told(outbox, batch, Refused(None)).outbox
    assert told_of(outbox) == (fact(2), fact(1))
    outbox, batch = holding(1).ask()
    outbox = told(outbox.put(fact(1)), batch, Refused(None)).outbox
    assert told_of(outbox) == (fact(1),)


@given(st.lists(st.integers(0, 4)), st.integers(0, 4))
def test_what_waits_is_bounded_and_the_last_said_comes_last(
    said: list[int], num_asked: int
) -> None:
    outbox = replace(holding(*range(num_asked)), num_asked=num_asked)
    for number in said:
        outbox = outbox.put(fact(number))
        later = outbox.waiting[num_asked:]
        assert outbox.waiting[:num_asked] == tuple(fact(n) for n in range(num_asked))
        assert later[-1] == fact(number)
        assert all(later.count(f) <= 2 for f in later)
    # In the order in which each was said last, and in that in which each was said first.
    later = [f.pod for f in outbox.waiting[num_asked:]]
    names = [f"p{number}" for number in said]
    assert list(dict.fromkeys(later)) == list(dict.fromkeys(names))
    assert list(dict.fromkeys(later[::-1])) == list(dict.fromkeys(names[::-1]))


def test_all_that_wait_are_told_in_one_request_up_to_a_bound() -> None:
    outbox = holding(*range(MAX_BATCH + 3))
    assert len(told_of(outbox)) == MAX_BATCH
    after = told(outbox, told_of(outbox), Heard(None))
    assert after.heard == told_of(outbox)
    assert told_of(after.outbox) == outbox.waiting[MAX_BATCH:]


def test_what_was_added_during_a_request_waits_for_the_next() -> None:
    outbox, batch = holding(1).ask()
    outbox = outbox.put(fact(2))
    assert told_of(told(outbox, batch, Heard(None)).outbox) == (fact(2),)


def test_nothing_is_lost_while_the_api_is_away_and_the_delays_double_up_to_a_bound() -> None:
    outbox, waits_s = holding(1, 2), []
    for _ in range(12):
        after = told(outbox, told_of(outbox), Away())
        outbox = after.outbox
        waits_s.append(after.wait_s)
        assert not after.register
    assert outbox.waiting == (fact(1), fact(2))
    assert waits_s[:3] == [RETRY_FIRST_S, 2 * RETRY_FIRST_S, 4 * RETRY_FIRST_S]
    assert waits_s[-1] == RETRY_MAX_S
    again = told(told(outbox, told_of(outbox), Heard(None)).outbox.put(fact(3)), (fact(3),), Away())
    assert again.wait_s == RETRY_FIRST_S


def test_an_api_that_does_not_know_the_pod_is_told_of_it_before_the_facts_come_again() -> None:
    outbox = holding(1)
    after = told(outbox, told_of(outbox), Unknown())
    assert (after.register, after.outbox.waiting) == (True, (fact(1),))


def test_a_plan_in_an_answer_is_learnt_also_from_a_refusal_of_one_fact() -> None:
    plan = make_plan({0: ("a.1",)})
    for answer in (Heard(plan), Refused(plan)):
        assert told(holding(1), (fact(1),), answer).plan is plan


def test_a_failure_between_facts_that_are_told_one_by_one_has_all_told_together_again() -> None:
    outbox = holding(1, 2, 3)
    outbox = told(outbox, told_of(outbox), Refused(None)).outbox
    assert told_of(outbox) == (fact(1),)
    outbox = told(outbox, told_of(outbox), Heard(None)).outbox
    assert told_of(outbox) == (fact(2),)
    outbox = told(outbox, told_of(outbox), Away()).outbox
    assert told_of(outbox) == (fact(2), fact(3))


@given(st.integers(1, 6), st.sets(st.integers(0, 5)), st.lists(st.sampled_from((Away, Unknown))))
def test_the_refused_are_dropped_and_all_others_heard_once_and_in_order(
    count: int, refused: Collection[int], failures: list[type[Away | Unknown]]
) -> None:
    outbox = holding(*range(count))
    heard: list[Fact] = []
    bad = [fact(number) for number in refused]
    while batch := told_of(outbox):
        answer: Answer = Refused(None) if any(f in bad for f in batch) else Heard(None)
        after = told(outbox, batch, failures.pop()() if failures else answer)
        outbox = after.outbox
        heard += after.heard
    assert heard == [fact(n) for n in range(count) if n not in refused]


def test_ledger_entries_are_held_and_mirrored_only_if_marked() -> None:
    outbox = LedgerOutbox().put(entry(1), post=False).put(entry(2), post=True)
    outbox, batch = outbox.take()
    assert (batch, outbox.waiting) == ((entry(2),), ())
    assert outbox.repeat().take()[1] == (entry(1), entry(2))


def test_only_the_newest_ledger_entries_are_held() -> None:
    outbox = LedgerOutbox()
    for step in range(MAX_LEDGER + 5):
        outbox = outbox.put(entry(step), post=True)
    assert (len(outbox.held), outbox.held[0].step) == (MAX_LEDGER, 5)
    outbox, batch = outbox.take()
    assert (len(batch), outbox.waiting[0].step) == (MAX_BATCH, 5 + MAX_BATCH)
