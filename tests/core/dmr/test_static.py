"""The static planner as a whole: what its plans cost, and what they depend on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.core.dmr.stages import RandomStage, linear_stage, window_of

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.plan import (
    DEFERRED,
    Method,
    Plan,
    Policy,
    piece_bytes,
    retained_bytes,
    sum_loads,
)
from mainstay_core.dmr.profiles import Profile, WindowKind
from mainstay_core.dmr.static import plan_checks


def naive_s(profile: Profile) -> float:
    """What it costs to execute everything that counts twice at once."""
    return sum(
        profile.operators[place].median_s * (2 if place in profile.recomputed_at else 1)
        for place in profile.reaching
        if not profile.operators[place].compared
    )


def test_equal_arguments_give_equal_plans() -> None:
    for seed in range(10):
        plans = {codec.dumps(plan_checks(RandomStage(seed).draw())) for _ in range(2)}

        assert len(plans) == 1


def test_without_memory_nothing_waits() -> None:
    for seed in range(50):
        plan = plan_checks(RandomStage(seed).draw(), budget_bytes=0)

        assert not any(piece.method in DEFERRED for piece in plan.pieces)
        assert plan.totals.peak_bytes == 0


def test_no_plan_exposes_more_than_naive_checks_and_ours_less_than_the_papers() -> None:
    exposed = dict.fromkeys(Policy, 0.0)
    everything = 0.0
    for seed in range(100):
        profile = RandomStage(seed).draw()
        everything += naive_s(profile)
        for policy in Policy:
            totals = plan_checks(profile, policy).totals
            assert totals.exposed_s <= naive_s(profile) + 1e-9
            exposed[policy] += totals.exposed_s

    assert exposed[Policy.OWN] < 0.98 * exposed[Policy.PAPER] < 0.9 * everything


def test_the_totals_are_the_sums_of_the_plan() -> None:
    for seed in range(50):
        profile = RandomStage(seed).draw()
        plan = plan_checks(profile)
        totals = plan.totals

        assert sum(share.num_operators for share in totals.shares) == len(profile.operators)
        assert totals.operator_s == sum(operator.median_s for operator in profile.operators)
        retained = retained_bytes(profile, plan.pieces)
        assert totals.peak_bytes == max(retained, default=0) <= plan.budget_bytes
        overrun = sum(
            max(0.0, load - profile.window_of[name].usable_s)
            for name, load in sum_loads(profile, plan.pieces).items()
        )
        assert totals.overrun_s == overrun


def test_totals_are_rounded_once_in_every_version_of_python() -> None:
    plain = linear_stage(1, 5, recomputed=0, window_s=0.7, headroom=99)
    tenths = tuple(replace(operator, median_s=0.1) for operator in plain.operators)
    profile = replace(plain, operators=tenths, windows=(replace(plain.windows[0], static=True),))

    plan = plan_checks(profile)

    assert sum_one_by_one([0.1] * 15) != 1.5, "additions one by one are rounded each"
    assert plan.totals.operator_s == math.fsum([0.1] * 15) == 1.5
    for share in plan.totals.shares:
        assert share.operator_s == math.fsum([0.1] * share.num_operators)
    waiting = sum(len(piece.operators) for piece in plan.pieces if piece.window)
    assert sum_loads(profile, plan.pieces) == {"wait": math.fsum([0.1] * waiting)}
    naive = [0.1] * (15 - waiting)
    assert plan.totals.exposed_s == math.fsum((plan.totals.overrun_s, *naive))


def sum_one_by_one(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def play_memory(profile: Profile, plan: Plan) -> list[int]:
    """What deferred pieces retain when each window opens, from a walk through the passage."""
    found: list[int] = []
    alive: set[str] = set()
    for executed in range(len(profile.operators) + 1):
        for piece in plan.pieces:
            starts = (
                profile.recomputed_at.get(place, place + 1)
                for place in map(profile.graph.places.__getitem__, piece.operators)
            )
            if piece.window is not None and min(starts) == executed:
                alive.add(piece.name)
        for window in profile.windows:
            if window.after == executed:
                waiting = [piece for piece in plan.pieces if piece.name in alive]
                found.append(sum(piece_bytes(profile, piece) for piece in waiting))
                alive -= {piece.name for piece in waiting if piece.window == window.name}
    return found


def test_what_waits_fits_into_the_headroom_of_every_window_on_the_way() -> None:
    num_full = 0
    for seed in range(150):
        profile = RandomStage(seed).draw()
        for policy in Policy:
            plan = plan_checks(profile, policy)
            retained = play_memory(profile, plan)
            assert retained == retained_bytes(profile, plan.pieces)
            for window, size_bytes in zip(profile.windows, retained, strict=True):
                most = min(window.headroom_bytes, plan.budget_bytes)
                assert size_bytes <= most
                num_full += 0 < most < size_bytes + 5
    assert num_full > 50


def test_a_window_without_memory_is_not_passed_by_what_waits_for_a_later_one() -> None:
    plain = linear_stage(1, 3, recomputed=0, window_s=0, headroom=0)
    late = window_of("late", 9, 99.0)

    for policy in Policy:
        alone = plan_checks(replace(plain, windows=(late,)), policy)
        both = plan_checks(replace(plain, windows=(window_of("full", 5, 0.5, 0), late)), policy)

        assert all(choice.window == "late" for choice in alone.choices)
        assert [choice.window for choice in both.choices] == [None] * 5 + ["late"] * 4


def test_a_budget_beyond_the_profiles_is_refused() -> None:
    profile = linear_stage(1, 2, recomputed=0, window_s=1, headroom=9, budget=9)

    with pytest.raises(InvalidSpecError, match="budget: is 10 bytes, must be at most the profile"):
        plan_checks(profile, budget_bytes=10)


def test_the_papers_rules_overrun_no_window() -> None:
    for seed in range(50):
        assert plan_checks(RandomStage(seed).draw(), Policy.PAPER).totals.overrun_s == 0


def test_a_window_inside_a_block_takes_single_operators() -> None:
    profile = linear_stage(1, 3, recomputed=3, window_s=0, headroom=0)
    inner = window_of("inner", 6, 2.0, kind=WindowKind.INTRA)

    plan = plan_checks(replace(profile, windows=(inner,)))

    waiting = [choice for choice in plan.choices if choice.window == "inner"]
    assert [choice.method for choice in waiting] == [Method.INTRA] * 2
    assert plan.totals.exposed_s == 4.0


def test_dynamic_operators_are_left_to_the_dynamic_planner() -> None:
    profile = linear_stage(1, 2, recomputed=1, window_s=99, headroom=99)
    dynamic = tuple(replace(operator, static=False) for operator in profile.operators)

    plan = plan_checks(replace(profile, operators=dynamic))

    methods = [choice.method for choice in plan.choices]
    assert methods == [Method.PIGGYBACK] + [Method.DYNAMIC] * 5
    assert plan.totals.exposed_s == 0.0


def test_every_choice_has_a_reason_that_says_why() -> None:
    plan = plan_checks(linear_stage(1, 2, recomputed=1, window_s=0, headroom=0))
    reasons = {choice.operator: choice.reason for choice in plan.choices}

    assert reasons["0/forward/0"].startswith("AC segment ac-0: its recompute checks it")
    assert reasons["0/weight/0"] == "no later window has time and memory left for it"
    none = replace(linear_stage(1, 2, recomputed=1, window_s=0, headroom=0), windows=())
    assert reason_of(plan_checks(none), "0/weight/0") == "no window comes after it"
    small = plan_checks(linear_stage(1, 2, recomputed=1, window_s=9, headroom=0), budget_bytes=2)
    assert reason_of(small, "0/weight/0") == "retains 3 bytes, more than the budget of 2"


def reason_of(plan: Plan, operator: str) -> str:
    return plan.choice_of[operator].reason
