"""What the coordinator knows of the checks that each stage's trainers have planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_api.summary import show_page, show_protections
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.wire.facts import Checks
from mainstay_core.wire.plan import Member

Start = Callable[..., Any]


def planned(world: Any, member: Member, plan: str, shares: str, why: str, stage: int = 0) -> None:
    fact = Checks(
        pod=member.slot.pod,
        slot=member.slot.index,
        incarnation=member.incarnation,
        stage=stage,
        plan=plan,
        shares=shares,
        evidence=why,
    )
    world.tell(fact)


def test_each_stage_is_told_as_its_trainers_said_last(start: Start) -> None:
    world = start(replicas=2, stages=2)
    config = replace(world.state.config, dmr=Mode.FULL, dmr_plan=PlanName.AUTO)
    assert world.state.plan is not None
    plan = replace(world.state.plan, checks=config.checks)
    world.state = replace(world.state, config=config, plan=plan)
    before = show_page(world.state, (), (), 0.0).dmr_coverage
    expected = "transient faults: naive 100 % until the first steps are profiled, then by plan; "
    assert before.startswith(expected)

    planned(world, world.member(0, 1), "Auto", "inter 60 %, naive 40 %", "planned", stage=1)
    planned(world, world.member(0, 0), "Auto", "P 60 %, naive 40 %", "planned")
    planned(world, world.member(1, 0), "Auto", "P 70 %, naive 30 %", "planned")
    assert world.announced().count("ChecksPlanned") == 2, "another trainer's times are no news"
    planned(world, world.member(1, 1), "Naive", "naive 100 %", "no plan could be made", stage=1)
    assert world.announced().count("ChecksPlanned") == 3

    coverage = "stage 0: P 70 %, naive 30 %; stage 1: naive 100 % (no plan could be made)"
    told = show_page(world.state, (), (), 0.0).dmr_coverage
    shares = "shares are of the operator time of a micro-batch's passes"
    assert told.startswith(f"transient faults: {coverage}; {shares}")
    shown = show_protections(world.state)
    assert shown["dmr_coverage"] == told
    assert [stage["plan"] for stage in shown["checks"]] == ["Auto", "Naive"]


def test_a_stage_that_the_job_has_not_is_refused(start: Start) -> None:
    world = start(replicas=2, stages=2)
    with pytest.raises(RemoteProtocolError, match=r"Checks\.stage: 2 is none of the job's 2"):
        planned(world, world.member(0, 0), "Auto", "naive 100 %", "planned", stage=2)
