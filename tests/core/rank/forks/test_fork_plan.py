"""The fork that a settle carries out: at which version, of what, and once in the history."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.forks.pipelines import (
    LOAD,
    MAKE,
    ROLL,
    RULES,
    STAY,
    course,
    forked_at_8,
    made_of,
    order,
    pipeline,
    reports,
    settled,
)

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.rank.forks import sources
from mainstay_core.rank.settle import settle
from mainstay_core.reinitialisation.sources import Policy
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.plan import Partial


def test_what_nobody_holds_is_made_anew_at_the_version_of_the_others() -> None:
    plan = order(pipeline(2, 1), 1)

    outcome = settled(plan, reports(plan, 8, 1))

    assert outcome.version == 8
    assert outcome.actions == (STAY, MAKE, STAY, STAY, STAY)
    assert made_of(outcome.fork) == [(1, [(0, 0.25), (2, 0.75)])]
    assert [f.version for f in outcome.history] == [8]
    assert outcome.commit_chain != "before"
    assert "stage 1 is made anew from 0.25 of stage 0, 0.75 of stage 2" in outcome.reason


def test_a_job_that_does_not_allow_it_makes_nothing() -> None:
    plan = order(pipeline(2, 1), 1)

    with pytest.raises(LocalProtocolError, match="does not allow"):
        settle(plan, 1, reports(plan, 8, 1))


def test_a_committed_step_is_not_lost() -> None:
    """One rank has applied step 8; the others hold its mark, and roll to it before the fork."""
    plan = order(pipeline(2, 1), 1)
    behind = {"version": 8, "mark": "q1-n", "certified_in": "q0-n"}
    told = reports(plan, 9, 1, c=behind, d=behind, e=behind)

    outcome = settled(plan, told)

    assert outcome.version == 9
    assert outcome.actions == (STAY, MAKE, ROLL, ROLL, ROLL)
    assert outcome.fork is not None
    assert outcome.fork.version == 9


def test_what_was_held_of_the_interrupted_step_is_void() -> None:
    plan = order(pipeline(2, 1), 1)
    held = {"held": (Partial(lane=0, first=0, last=0),), "held_in": 1}
    told = reports(plan, 8, 1, a=held, c=held, d=held, e=held)

    outcome = settled(plan, told)

    assert outcome.step.todo == {0: (0,)}, "it is computed again through all stages"


def test_inner_ranks_that_are_ordered_together_are_made_anew_together() -> None:
    """One of them is lost again, and the other one has gone on: its moments are not zero."""
    lives = ["a.1", "b.1", "c.2", "d.2", "e.1", "f.1"]
    since = dict.fromkeys(("a.1", "b.1", "c.2", "e.1", "f.1"), 1)
    plan = make_plan({0: lives}, quorum=3, since=since, joining=["d.2"], ranks_per_stage=2)
    plan = order(plan, 2, 3, lineage=2)
    rules = replace(RULES, outline=RULES.outline[:3])

    outcome = settle(plan, 1, reports(plan, 8, 3), fork_rules=rules)

    assert outcome.actions == (STAY, STAY, MAKE, MAKE, STAY, STAY)
    assert outcome.fork is not None
    assert [(p.stage, p.inner) for p in outcome.fork.made.positions] == [(1, 0), (1, 1)]


def test_a_fork_has_the_norms_by_which_two_stages_are_weighed() -> None:
    (place,) = forked_at_8().made.positions
    assert [block.norms_sq for block in place.blocks] == [(1.0, 3.0)]

    uniform = course(8, 1, weights="Uniform")["history"][0]
    assert [block.norms_sq for block in uniform.made.positions[0].blocks] == [()]


def test_a_fork_that_was_interrupted_is_repeated_with_the_same_bits() -> None:
    first = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    plan = order(pipeline(3, 1), 1, lineage=2)
    knows = {"history": first.history, "chain": first.commit_chain}

    again = settled(plan, reports(plan, 8, 1, c=knows, e=knows))

    assert again.fork == first.fork
    assert again.history == first.history
    assert again.commit_chain == first.commit_chain


def test_what_was_made_before_is_not_made_again() -> None:
    first = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    plan = order(pipeline(3), 1, lineage=2)
    knows = {"history": first.history, "chain": first.commit_chain}

    outcome = settled(plan, reports(plan, 8, b=knows, c=knows))

    assert outcome.actions == (STAY,) * 5
    assert outcome.fork is None
    assert (outcome.history, outcome.commit_chain) == (first.history, first.commit_chain)


def test_one_of_two_stages_that_is_lost_again_is_made_as_before() -> None:
    both = order(pipeline(2, 1, 3), 1, 3)
    first = settled(both, reports(both, 8, 1, 3))
    plan = order(pipeline(3, 3), 3, lineage=2)
    knows = {"history": first.history, "chain": first.commit_chain}

    again = settled(plan, reports(plan, 8, 3, a=knows, b=knows, c=knows, e=knows))

    assert again.actions == (STAY, STAY, STAY, MAKE, STAY)
    assert again.fork == first.fork
    assert (again.history, again.commit_chain) == (first.history, first.commit_chain)


def test_another_stage_at_the_same_version_is_another_fork_after_the_first() -> None:
    first = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    plan = order(pipeline(3, 3), 3, lineage=2)
    knows = {"history": first.history, "chain": first.commit_chain}

    outcome = settled(plan, reports(plan, 8, 3, b=knows, c=knows))

    assert [made_of(f)[0][0] for f in outcome.history] == [1, 3]
    assert outcome.history[1].chain == first.commit_chain


def test_a_history_that_was_replaced_by_one_of_more_stages_does_not_come_back() -> None:
    """One has missed the quorum that made stages 1 and 3 anew, and knows of stage 1 alone."""
    alone = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    both = order(pipeline(3, 1, 3), 1, 3, lineage=2)
    knew = {"history": alone.history, "chain": alone.commit_chain}
    second = settled(both, reports(both, 8, 1, 3, a=knew, c=knew, e=knew))
    assert [place for place, _ in made_of(second.fork)] == [1, 3]
    knows = {"history": second.history, "chain": second.commit_chain}
    plan = order(pipeline(4), 1, 3, lineage=3)

    outcome = settled(plan, reports(plan, 8, a=knew, b=knows, c=knows, d=knows, e=knows))

    assert (outcome.history, outcome.commit_chain) == (second.history, second.commit_chain)


def test_who_settled_last_knows_which_forks_were_replaced() -> None:
    """Two forks of one version, and then one of both stages by other rules, that a source missed.

    Both histories name the same positions. The older one is longer.
    """
    plan = order(pipeline(2, 1), 1)
    first = settled(plan, reports(plan, 8, 1))
    knew = {"history": first.history, "chain": first.commit_chain, "settled": 2}
    plan = order(pipeline(3, 3), 3, lineage=2, since=1)
    second = settled(plan, reports(plan, 8, 3, a=knew, b=knew, c=knew, e=knew))
    assert [made_of(fork)[0][0] for fork in second.history] == [1, 3]
    missed = {"history": second.history, "chain": second.commit_chain, "settled": 3}
    plan = order(pipeline(4, 1, 3), 1, 3, lineage=3, since=2)
    uniform = replace(RULES, policy=Policy(weighting=Weighting.UNIFORM))
    told = reports(plan, 8, 1, 3, a=missed, c=missed, e=missed)
    third = settle(plan, 1, told, fork_rules=uniform)
    assert len(third.history) == 1
    knows = {"history": third.history, "chain": third.commit_chain, "settled": 4}
    plan = order(pipeline(5), 1, 3, lineage=4, since=2)

    told = reports(plan, 8, a=missed, b=knows, c=knows, d=knows, e=knows)
    outcome = settle(plan, 1, told, fork_rules=uniform)

    assert (outcome.history, outcome.commit_chain) == (third.history, third.commit_chain)


@pytest.mark.parametrize(("again", "makes"), [(False, False), (True, True)])
def test_a_full_history_gets_no_further_fork_though_one_is_ordered(
    monkeypatch: pytest.MonkeyPatch, again: bool, makes: bool
) -> None:
    """A store that has lost the job does not know how many there are. One may be repeated."""
    monkeypatch.setattr(sources, "MAX_FORKS", 1)
    plan = order(pipeline(2, 1), 1)
    first = settled(plan, reports(plan, 8 if again else 7, 1))
    lost = (1, 3)
    plan = order(pipeline(3, *lost), *lost, lineage=2, since=1)
    knows = {"history": first.history, "chain": first.commit_chain, "settled": 2}
    told = reports(plan, 8, *lost, a=knows, c=knows, e=knows)
    outcome = settled(plan, told)

    assert len(first.history) == 1
    assert outcome.version == (8 if makes else 0)
    assert len(outcome.history) == makes
    assert set(outcome.actions) == ({STAY, MAKE} if makes else {LOAD})
