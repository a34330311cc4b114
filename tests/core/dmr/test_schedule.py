"""What a trainer does of a plan: single checks that wait, and blocks whose recompute checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.dmr.stages import RandomStage, linear_stage

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr import schedule as schedule_rules
from mainstay_core.dmr.coverage import UncoveredError, verify_plan
from mainstay_core.dmr.plan import DEFERRED, Method, Plan, sum_totals
from mainstay_core.dmr.profiles import Profile, WindowKind
from mainstay_core.dmr.schedule import (
    BATCHED_IMPRINT,
    COMPILED_IMPRINT,
    ImprintPrice,
    RefusedPlanError,
    demote,
    follow,
    is_pointwise_cheaper,
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
    some = num_segments = 0
    for seed in range(60):
        profile = drawn(seed)
        plan, schedule = plan_here(profile)
        verify_plan(profile, plan)
        waiting = {
            piece.operators[0]: piece.window
            for piece in plan.pieces
            if piece.method in (*DEFERRED, Method.DYNAMIC) and len(piece.operators) == 1
        }
        assert {name: later.window for name, later in schedule.later.items()} == waiting
        for piece in (p for p in plan.pieces if len(p.operators) > 1 and p.window is not None):
            num_segments += 1
            parts = {name: schedule.parts[name] for name in piece.operators}
            assert sum(part.is_last for part in parts.values()) == 1
            assert {name for name, part in parts.items() if part.helps} == set(piece.helpers)
            operators = [profile.operators[profile.graph.places[name]] for name in parts]
            assert {
                operator.outputs[number]
                for operator in operators
                for number in parts[operator.id].compared
            } == {comparison.tensor for comparison in piece.comparisons}
        blocks = {
            profile.operators[profile.graph.places[piece.operators[0]]].block
            for piece in plan.pieces
            if piece.method is Method.PIGGYBACK
        }
        assert schedule.piggyback == blocks
        some += len(waiting)
    assert some > 100
    assert num_segments > 10


def test_what_cannot_wait_is_naive_and_a_plan_that_has_it_wait_is_refused() -> None:
    some = 0
    for seed in range(20):
        free = drawn(seed)
        plan, schedule = plan_here(free)
        bound = replace(free, operators=tuple(replace(o, waits=False) for o in free.operators))
        assert plan_here(bound)[1].later == plan_here(bound)[1].parts == {}
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


def test_waits_for_inner_ranks_and_parts_in_two_segments_are_refused_by_name() -> None:
    profile, plan = segments()
    (segment,) = [piece for piece in plan.pieces if len(piece.operators) > 1][:1]
    twice = replace(plan, pieces=(*plan.pieces, replace(segment, name="agc-again")))
    with pytest.raises(RefusedPlanError, match=r"is replayed in agc-\d and in agc-again"):
        schedule_of(profile, twice)
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


def test_what_waits_for_a_window_that_never_comes_is_checked_at_once() -> None:
    num_demoted = num_kept = 0
    for seed in range(60):
        profile = drawn(seed)
        plan = plan_checks(profile)
        if not any(piece.window for piece in plan.pieces):
            continue
        gone = next(piece.window for piece in plan.pieces if piece.window)
        windows = tuple(
            replace(w, median_s=0.0, least_s=0.0) if w.name == gone else w for w in profile.windows
        )
        run = replace(profile, windows=windows)
        with pytest.raises(UncoveredError, match="totals"):
            verify_plan(run, plan)

        kept = demote(run, plan)

        timed = replace(kept, totals=sum_totals(run, kept.pieces, kept.choices))
        verify_plan(run, timed)
        assert all(piece.window != gone for piece in kept.pieces)
        for before, after in zip(plan.choices, kept.choices, strict=True):
            if before.window == gone:
                num_demoted += 1
                assert after.method is Method.NAIVE
                assert after.reason == f"{gone} does not come in this run"
            else:
                num_kept += before.window is not None
                assert after == before
        assert demote(run, kept) == kept
    assert num_demoted > 50
    assert num_kept > 50


def test_what_is_over_at_once_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_rules, "AGAIN_S", 0.0)
    imprint = ImprintPrice(start_s=1e-5, s_per_byte=6e-11)
    num_quick = num_cheap = 0
    for seed in range(40):
        slow = drawn(seed)
        # As on a device a million times as fast: windows stay as they are.
        quick = replace(
            slow, operators=tuple(replace(o, median_s=o.median_s * 1e-6) for o in slow.operators)
        )
        plan, schedule = plan_here(quick, imprint)
        verify_plan(quick, plan)
        assert not any(piece.window for piece in plan.pieces)
        assert not schedule.later, "nor does it wait where the dynamic planner would have it"
        num_quick += any("less than to let" in choice.reason for choice in plan.choices)
        recomputed = {
            name
            for piece in plan.pieces
            if piece.method is Method.PIGGYBACK
            for name in piece.operators
        }
        assert schedule.cheap == recomputed
        assert not plan_here(slow, imprint)[1].cheap
        num_cheap += len(recomputed)
    assert num_quick > 5
    assert num_cheap > 20


@pytest.mark.parametrize("sizes", [(1024,), (1 << 16,), (1 << 20,), (1 << 22,), (256, 256)])
def test_what_computes_element_by_element_is_executed_twice_where_imprints_cost_more(
    sizes: tuple[int, ...],
) -> None:
    assert is_pointwise_cheaper(sizes, BATCHED_IMPRINT)
    assert is_pointwise_cheaper(sizes, COMPILED_IMPRINT) == (len(sizes) > 1)


@pytest.mark.parametrize(
    ("size", "measured_us"),
    [(1 << 10, 7.8), (1 << 14, 34), (1 << 16, 59), (1 << 20, 255), (1 << 22, 850)],
)
def test_the_price_of_an_imprint_is_about_what_was_measured(size: int, measured_us: float) -> None:
    """Without compiled code, by the table in docs/benchmarks.md."""
    ratio = BATCHED_IMPRINT.of([size]) * 1e6 / measured_us
    assert 0.6 < ratio < 1.1
    assert BATCHED_IMPRINT.of([size, size]) == pytest.approx(2 * BATCHED_IMPRINT.of([size]))


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
    with pytest.raises(
        InvalidSpecError, match=r"of the way 'whole', and .* layers-head; .*\{way\}"
    ):
        read_ordered_plan(text, "/p.json", profile.fingerprint, "layers-head")


def test_a_plan_is_followed_by_micro_batches_of_its_way_alone() -> None:
    profile = replace(drawn(3), way="layers-head")
    plan, _ = plan_here(profile)

    text = codec.dumps(plan).encode()
    assert read_ordered_plan(text, "/p.json", profile.fingerprint, "layers-head") == plan
    with pytest.raises(
        UncoveredError, match="of the way layers-head, the profile of the way whole"
    ):
        verify_plan(replace(profile, way="whole"), plan)
