"""Plans from supervisor to supervisor: the newer one goes to whoever lacks it."""

from __future__ import annotations

import pytest
from tests.core.plans import make_plan

from mainstay_core.supervisor.gossip import (
    Given,
    Holds,
    Thanks,
    Wanted,
    answer,
    follow_up,
    offer_after_s,
)
from mainstay_core.wire.plan import Plan


def plan(number: int) -> Plan:
    return make_plan({0: ("a.1",)}, quorum=number)


@pytest.mark.parametrize(
    ("ours", "theirs", "after"),
    [(3, 2, 3), (2, 3, 3), (2, 2, 2)],
    ids=["we have the newer", "they have the newer", "both have the same"],
)
def test_after_one_conversation_both_hold_the_newer_plan(
    ours: int, theirs: int, after: int
) -> None:
    held, held_there = plan(ours), plan(theirs)
    told = follow_up(held, answer(held_there, Holds(held.quorum)))
    if told.learn is not None:
        held = told.learn
    if told.give is not None:
        assert answer(held_there, told.give) == Thanks()
        held_there = told.give.plan
    assert (held.quorum.id, held_there.quorum.id) == (after, after)


def test_a_plan_travels_only_to_who_lacks_it() -> None:
    assert answer(plan(2), Holds(plan(2).quorum)) == Thanks()
    assert follow_up(plan(2), Thanks()).give is None


def test_a_supervisor_without_a_plan_wants_any() -> None:
    assert answer(None, Holds(plan(1).quorum)) == Wanted()
    assert follow_up(plan(1), Wanted()).give == Given(plan(1))


def test_an_offer_waits_only_while_the_api_brings_plans_itself() -> None:
    assert offer_after_s(stream_stands=False) == 0.0
    assert offer_after_s(stream_stands=True) > 0.0
