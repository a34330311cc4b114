"""P-DMR: figure 7, the rule of section 5.1, and the cheaper of two played timelines."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.core.dmr.stages import linear_stage

from mainstay_core.dmr.piggyback import choose_piggyback
from mainstay_core.dmr.plan import Method, exposed_s
from mainstay_core.dmr.profiles import AcSegment, Profile
from mainstay_core.dmr.static import plan_checks


def stage_of(recompute: list[float], last: float, gather: float, *, static: bool = True) -> Profile:
    """A block of one AC segment, whose last operator is not recomputed and gathers operands."""
    plain = linear_stage(1, len(recompute) + 1, recomputed=0, window_s=0, headroom=0)
    forward = [
        replace(plain.operators[number], median_s=seconds, static=static or number > 0)
        for number, seconds in enumerate([*recompute, last])
    ]
    forward[-1] = replace(forward[-1], communication_s=gather)
    names = tuple(operator.id for operator in forward)
    return replace(
        plain,
        operators=(*forward, *plain.operators[len(forward) :]),
        ac_segments=(AcSegment(name="ac", operators=names, kept=names[-1:]),),
    )


def method_of(profile: Profile) -> Method:
    return choose_piggyback(profile, profile.ac_segments[0]).method


def added_s(recompute: list[float], last: float, gather: float) -> dict[Method, float]:
    """By how much each method makes the timeline longer, played operator by operator."""
    unchecked = [*recompute, gather, last, *recompute]
    naive = [s for seconds in recompute for s in (seconds, seconds)]
    naive += [gather, last, last]
    naive += [s for seconds in recompute for s in (seconds, seconds)]
    piggyback = [*recompute, gather, last, *recompute, gather, last]
    return {
        Method.NAIVE: sum(naive) - sum(unchecked),
        Method.PIGGYBACK: sum(piggyback) - sum(unchecked),
    }


def test_figure_7_twice_the_recompute_is_less_than_to_gather_again() -> None:
    profile = stage_of([1.0], 1.0, 3.0)

    assert method_of(profile) is Method.NAIVE
    assert added_s([1.0], 1.0, 3.0) == {Method.NAIVE: 3.0, Method.PIGGYBACK: 4.0}
    # A and B, both times that A runs: what the figure's (b) adds.
    pieces = [p for p in plan_checks(profile).pieces if "/forward/" in p.name]
    assert sum(exposed_s(profile, piece) for piece in pieces) == 3.0


def test_at_the_boundary_of_the_rule_naive_is_taken() -> None:
    assert method_of(stage_of([1.0], 1.0, 2.0)) is Method.NAIVE
    assert method_of(stage_of([1.0], 1.0, 1.5)) is Method.PIGGYBACK
    assert method_of(stage_of([1.0], 1.0, 0.0)) is Method.PIGGYBACK


def test_the_choice_is_the_cheaper_timeline() -> None:
    taken = set()
    for seed in range(1000):
        rng = random.Random(seed)
        recompute = [float(rng.randint(0, 5)) for _ in range(rng.randint(1, 3))]
        last, gather = float(rng.randint(1, 5)), float(rng.randint(0, 15))
        profile = stage_of(recompute, last, gather)

        added = added_s(recompute, last, gather)
        method = method_of(profile)

        assert added[method] == min(added.values())
        taken.add(method)
        if seed >= 200:
            continue
        pieces = [p for p in plan_checks(profile).pieces if "weight" not in p.operators[0]]
        forward = [p for p in pieces if "backward" not in p.operators[0]]
        assert sum(exposed_s(profile, piece) for piece in forward) == added[method]
    assert taken == {Method.NAIVE, Method.PIGGYBACK}


def test_a_segment_with_an_operator_of_unknown_time_gets_its_recompute() -> None:
    assert method_of(stage_of([1.0], 1.0, 3.0, static=False)) is Method.PIGGYBACK


def test_a_segment_that_runs_again_as_a_whole_costs_nothing() -> None:
    profile = linear_stage(1, 3, recomputed=3, window_s=0, headroom=0)
    (piece,) = [p for p in plan_checks(profile).pieces if p.method is Method.PIGGYBACK]

    assert exposed_s(profile, piece) == 0.0
