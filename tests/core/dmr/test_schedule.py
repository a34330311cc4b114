"""What a trainer does of a plan: single checks that wait, and blocks whose recompute checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.dmr.stages import RandomStage, linear_stage

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.coverage import UncoveredError, verify_plan
from mainstay_core.dmr.plan import DEFERRED, Method, Plan
from mainstay_core.dmr.profiles import Profile, WindowKind
from mainstay_core.dmr.schedule import (
    RefusedPlanError,
    follow,
    plan_here,
    read_ordered_plan,
    schedule_of,
)
from mainstay_core.dmr.static import plan_checks


def drawn(seed: int) -> Profile:
    """A random stage whose windows are those that trainers have."""
    profile = RandomStage(seed).draw()
    windows = tuple(replace(w, kind=WindowKind.INTER) for w in profile.windows)
    return replace(profile, windows=windows)


def test_a_trainers_plan_keeps_the_rule_and_its_schedule_names_what_waits() -> None:
    some = 0
    for seed in range(60):
        profile = drawn(seed)
        plan, schedule = plan_here(profile)
        verify_plan(profile, plan)
        waiting = {
            piece.operators[0]: piece.window
            for piece in plan.pieces
            if piece.method in (*DEFERRED, Method.DYNAMIC)
        }
        assert {name: later.window for name, later in schedule.later.items()} == waiting
        assert all(
            len(piece.operators) == 1 for piece in plan.pieces if piece.method in DEFERRED
        ), "no segment is replayed"
        blocks = {
            profile.operators[profile.graph.places[piece.operators[0]]].block
            for piece in plan.pieces
            if piece.method is Method.PIGGYBACK
        }
        assert schedule.piggyback == blocks
        some += len(waiting)
    assert some > 100


def test_what_cannot_wait_is_naive_and_a_plan_that_has_it_wait_is_refused() -> None:
    some = 0
    for seed in range(20):
        free = drawn(seed)
        plan, schedule = plan_here(free)
        bound = replace(free, operators=tuple(replace(o, waits=False) for o in free.operators))
        assert plan_here(bound)[1].later == {}
        assert not any(p.method in DEFERRED for p in plan_checks(bound).pieces)
        if schedule.later:
            some += 1
            with pytest.raises(UncoveredError, match="cannot be executed again later"):
                verify_plan(bound, plan)
    assert some > 10


def segments() -> tuple[Profile, Plan]:
    profile = linear_stage(blocks=2, layers=4, recomputed=0, window_s=9.0, headroom=9)
    plan = plan_checks(profile)
    assert any(len(piece.operators) > 1 for piece in plan.pieces)
    return profile, plan


def test_segments_and_waits_for_inner_ranks_are_refused_by_name() -> None:
    profile, plan = segments()
    with pytest.raises(RefusedPlanError, match=r"replays \d+ operators together.*--no-replays"):
        schedule_of(profile, plan)
    windows = tuple(replace(w, kind=WindowKind.INTRA) for w in profile.windows)
    inner = replace(profile, windows=windows)
    with pytest.raises(RefusedPlanError, match="a wait for inner ranks"):
        plan_here(inner)


def test_a_plan_of_other_times_is_followed_and_one_of_another_graph_is_not() -> None:
    profile = drawn(3)
    plan, _ = plan_here(profile)
    slower = replace(
        profile,
        operators=tuple(replace(o, median_s=3 * o.median_s + 1) for o in profile.operators),
    )
    with pytest.raises(UncoveredError, match="totals"):
        verify_plan(slower, plan)
    timed, schedule = follow(slower, plan)
    verify_plan(slower, timed)
    assert set(schedule.later) == set(schedule_of(profile, plan).later)
    with pytest.raises(UncoveredError):
        follow(drawn(4), replace(plan, fingerprint=drawn(4).fingerprint))


def test_a_file_of_a_plan_is_refused_with_one_message_each() -> None:
    profile = drawn(3)
    plan, _ = plan_here(profile)
    text = codec.dumps(plan).encode()

    assert read_ordered_plan(text, "/p.json", profile.fingerprint) == plan
    for bad, message in (
        (text[:40], r"spec\.detection\.dmr\.plan: /p\.json is no plan that can be read: plan: not"),
        (codec.dumps(profile).encode(), r"plan\.kind: is 'mainstay-dmr-profile'"),
    ):
        with pytest.raises(InvalidSpecError, match=message):
            read_ordered_plan(bad, "/p.json", profile.fingerprint)
    with pytest.raises(InvalidSpecError, match=r"/p\.json is of the fingerprint .*other"):
        read_ordered_plan(text, "/p.json", "other")
