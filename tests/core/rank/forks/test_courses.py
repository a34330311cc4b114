"""Courses: whose states count where one number was given to two lineages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan
from tests.core.rank.forks.pipelines import (
    HEAL,
    LOAD,
    STAY,
    course,
    pipeline,
    rank,
    reports,
    settled,
)

from mainstay_core.rank import machine
from mainstay_core.rank.events import ReportsGathered, SendFact
from mainstay_core.rank.votes import judge_reports
from mainstay_core.wire.facts import Phase, StateRefused


@pytest.mark.parametrize("stays", [True, False])
def test_a_state_of_another_course_does_not_count_though_its_lineage_has_the_number(
    stays: bool,
) -> None:
    """A store that fell back has given the number twice; the others have gone on from their fork.

    It does not matter whether the plan takes the old trainer for a member that stayed.
    """
    plan = replace(pipeline(7, *([] if stays else [1])), lineage=1)
    ours, theirs = course(5, 3), course(5, 1, 3)
    others = {name: ours | {"settled": 6} for name in "acde"}
    told = reports(plan, 8, **others, b=theirs | {"settled": 5})

    outcome = settled(plan, told)

    assert set(outcome.actions) == {LOAD}, "nobody else has stage 1"
    slot = plan.members[1].slot
    assert f"of another course, so that it does not count, is the state of {slot}" in outcome.reason
    mine = rank("b.1", index=1, position=1, lineage=1, plan=plan, phase=Phase.SETTLING)
    heard = machine.step(mine, ReportsGathered(reports=tuple(told)))
    (refused,) = [
        a.fact
        for a in heard.actions
        if isinstance(a, SendFact) and isinstance(a.fact, StateRefused)
    ]
    assert (refused.stage, refused.step) == (1, 8)
    assert refused.evidence == "the forks in it are not those of the members that stayed"


def test_a_replica_that_went_another_way_copies_the_states_of_those_who_stayed() -> None:
    lives = {0: ["a.1", "b.1", "c.1"], 1: ["d.1", "e.1", "f.1"]}
    stayed = dict.fromkeys(lives[0], 1)
    plan = replace(make_plan(lives, quorum=7, since=stayed, joining=lives[1]), lineage=1)
    ours, theirs = course(5, 1), course(5, 3)
    told = {name: ours | {"settled": 6} for name in "abc"}
    told |= {name: theirs | {"settled": 6} for name in "def"}

    outcome = settled(plan, reports(plan, 8, **told))

    actions = {str(m.incarnation)[0]: outcome.actions[m.index] for m in plan.members}
    assert actions == dict.fromkeys("abc", STAY) | dict.fromkeys("def", HEAL)
    assert outcome.history == ours["history"]


def test_a_stage_that_was_made_of_other_sources_at_this_very_version_does_not_count() -> None:
    plan = replace(pipeline(7, 1), lineage=1)
    others = {name: course(8, 1) | {"settled": 6} for name in "acde"}
    told = reports(plan, 8, **others, b=course(8, 1, weights="Uniform") | {"settled": 6})

    assert set(settled(plan, told).actions) == {LOAD}


def test_who_missed_the_fork_of_its_very_version_is_of_the_same_course() -> None:
    plan = replace(pipeline(7), lineage=1)
    knows = {name: course(8, 1) | {"settled": 6} for name in "bc"}

    outcome = settled(plan, reports(plan, 8, **knows))

    assert set(outcome.actions) == {STAY}
    assert outcome.history == knows["b"]["history"]


@pytest.mark.parametrize(
    "comes_back",
    [
        pytest.param({}, id="at the fork's very version"),
        pytest.param({"version": 7, "mark": "q1-n", "certified_in": "q0-n"}, id="with its mark"),
    ],
)
def test_the_lost_exact_state_of_what_was_made_at_this_very_version_does_not_count(
    comes_back: dict[str, Any],
) -> None:
    """Two states of one position would be compared, and one found bad though no device was wrong.

    Members that missed the fork of another position are of the course.
    """
    lives = {0: ["a.1", "b.1", "c.1"], 1: ["d.1", "e.1", "f.1"]}
    stayed = dict.fromkeys([*lives[0], "d.1", "f.1"], 1)
    plan = replace(make_plan(lives, quorum=7, since=stayed, joining=["e.1"]), lineage=1)
    told = {name: course(8, 1) | {"settled": 6} for name in "abc"}
    told |= {name: {"settled": 6} for name in "df"}
    told |= {"b": told["b"] | {"state": "made"}, "e": {"settled": 2, "state": "exact"} | comes_back}
    for pair in ("ad", "cf"):
        told |= {name: told[name] | {"state": f"state-{pair}"} for name in pair}

    heard = reports(plan, 8, **told)
    outcome = settled(plan, heard)

    actions = {str(m.incarnation)[0]: outcome.actions[m.index] for m in plan.members}
    assert actions == dict.fromkeys("abcdf", STAY) | {"e": HEAL}
    assert not judge_reports(plan, heard, outcome.actions).state_bad
