"""Coverage: plans keep the rule, mutants do not, and a played stage sees every flip that counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.core.dmr.played import PlayedStage, list_flips, without
from tests.core.dmr.stages import RandomStage, linear_stage, window_of

from mainstay_core.dmr.coverage import UncoveredError, complete, verify_plan
from mainstay_core.dmr.operators import Graph, Operator, Origin, Pass, Tensor
from mainstay_core.dmr.piggyback import plan_piggyback
from mainstay_core.dmr.plan import (
    Compared,
    Comparison,
    Method,
    Piece,
    Plan,
    Policy,
    piece_bytes,
    sum_totals,
)
from mainstay_core.dmr.profiles import AcSegment, Profile, WindowKind
from mainstay_core.dmr.static import plan_checks


def mutants_of(plan: Plan) -> Iterator[tuple[Comparison, Plan]]:
    """A plan with one comparison dropped, for each of them."""
    for number, piece in enumerate(plan.pieces):
        for comparison in piece.comparisons:
            lacking = replace(piece, comparisons=without(piece, comparison))
            pieces = (*plan.pieces[:number], lacking, *plan.pieces[number + 1 :])
            yield comparison, replace(plan, pieces=pieces)


def with_piece(plan: Plan, number: int, **changes: object) -> Plan:
    pieces = list(plan.pieces)
    pieces[number] = replace(pieces[number], **changes)  # type: ignore[arg-type]
    return replace(plan, pieces=tuple(pieces))


def check_mutants(seeds: range, *, visits: int = 1) -> int:
    dropped = 0
    for seed in seeds:
        blocks = max(visits, 1 + seed % 2)
        profile = RandomStage(seed, blocks=blocks, most_operators=4, visits=visits).draw()
        plan = plan_checks(profile, list(Policy)[seed // 2 % 2])
        verify_plan(profile, plan)
        for comparison, mutant in mutants_of(plan):
            with pytest.raises(UncoveredError) as refused:
                verify_plan(profile, mutant)
            assert refused.value.tensor == comparison.tensor
            maker = profile.operators[profile.graph.makers[comparison.tensor]].id
            assert refused.value.operator == maker
            dropped += 1
    return dropped


def check_flips(seeds: range) -> tuple[int, int]:
    """Return how many flips counted, and how many of these only kept tensors show."""
    effective = by_kept_alone = 0
    for seed in seeds:
        profile = RandomStage(seed, most_operators=4).draw()
        plan = plan_checks(profile)
        undisturbed = PlayedStage(profile)
        assert not undisturbed.is_seen(plan.pieces), f"seed {seed}: a false alarm"
        outputs_alone = [_compare_outputs_alone(profile.graph, piece) for piece in plan.pieces]
        for flip in list_flips(profile):
            stage = PlayedStage(profile, flip)
            if stage.results == undisturbed.results:
                continue
            effective += 1
            assert stage.is_seen(plan.pieces), f"seed {seed}: {flip}"
            by_kept_alone += not stage.is_seen(outputs_alone)
    return effective, by_kept_alone


def draw_pieces(profile: Profile, seed: int) -> tuple[Piece, ...]:
    """Pieces that no planner would make: any operators together, with any helpers."""
    rng = random.Random(seed)
    pieces, _ = plan_piggyback(profile)
    taken = {name for piece in pieces for name in piece.operators}
    left = [name for name in profile.graph.ids if name not in taken]
    while left:
        some = [
            left.pop(rng.randrange(len(left))) for _ in range(min(len(left), rng.randint(1, 4)))
        ]
        others = [name for name in profile.graph.ids if name not in some]
        helpers = rng.sample(others, rng.randint(0, min(3, len(others))))
        places = sorted(profile.graph.places[name] for name in (*some, *helpers))
        operators = tuple(profile.graph.ids[place] for place in places)
        pieces.append(
            Piece(
                name=f"drawn-{len(pieces)}",
                method=Method.NAIVE,
                operators=operators,
                helpers=tuple(helpers),
                comparisons=(),
            )
        )
    return complete(profile, pieces)


def _compare_outputs_alone(graph: Graph, piece: Piece) -> Piece:
    """The paper's P-DMR: only what a later forward reads, or a result."""
    if piece.method is not Method.PIGGYBACK:
        return piece
    return replace(
        piece,
        comparisons=tuple(c for c in piece.comparisons if c.by is Compared.BITS),
    )


def test_every_plan_keeps_the_rule_and_no_mutant_does() -> None:
    assert check_mutants(range(1000)) > 10_000


def test_plans_of_passages_with_two_visits_keep_the_rule_and_miss_no_flip() -> None:
    assert check_mutants(range(300), visits=2) > 3000
    assert check_drawn_pieces(range(30), visits=2) > 300


@pytest.mark.chaos
def test_every_plan_keeps_the_rule_and_no_mutant_does_in_many_graphs() -> None:
    assert check_mutants(range(1000, 11_000)) > 100_000


def test_every_flip_that_changes_a_result_is_seen() -> None:
    effective, by_kept_alone = check_flips(range(150))

    assert effective > 2000
    # The paper compares outputs alone; the rule exists for these.
    assert by_kept_alone > 20


def check_drawn_pieces(seeds: range, *, visits: int = 1) -> int:
    effective = 0
    for seed in seeds:
        profile = RandomStage(seed, most_operators=4, visits=visits).draw()
        pieces = draw_pieces(profile, seed)
        undisturbed = PlayedStage(profile)
        assert not undisturbed.is_seen(pieces), f"seed {seed}: a false alarm"
        for flip in list_flips(profile):
            stage = PlayedStage(profile, flip)
            if stage.results != undisturbed.results:
                effective += 1
                assert stage.is_seen(pieces), f"seed {seed}: {flip}"
    return effective


def test_the_rule_holds_for_any_pieces() -> None:
    assert check_drawn_pieces(range(100)) > 1000


@pytest.mark.chaos
def test_the_rule_holds_for_any_pieces_in_many_graphs() -> None:
    assert check_drawn_pieces(range(1000, 6000)) > 50_000


@pytest.mark.chaos
def test_every_flip_that_changes_a_result_is_seen_in_many_graphs() -> None:
    assert check_flips(range(1000, 6000))[0] > 50_000


def test_without_one_of_its_comparisons_a_plan_misses_flips() -> None:
    missed = 0
    for seed in range(20):
        profile = RandomStage(seed, most_operators=4).draw()
        undisturbed = PlayedStage(profile)
        effective = [
            stage
            for flip in list_flips(profile)
            if (stage := PlayedStage(profile, flip)).results != undisturbed.results
        ]
        missed += sum(
            not stage.is_seen(mutant.pieces)
            for _, mutant in mutants_of(plan_checks(profile))
            for stage in effective
        )

    assert missed > 100


def test_a_recomputed_tensor_that_the_backward_keeps_is_compared_by_digest() -> None:
    profile = linear_stage(1, 2, recomputed=2, window_s=0, headroom=0)
    plan = plan_checks(profile)

    (piece,) = [piece for piece in plan.pieces if piece.method is Method.PIGGYBACK]

    # A2 leaves the stage; A1 is read by the weight gradient alone.
    assert piece.comparisons == (
        Comparison(tensor="A1", by=Compared.DIGEST),
        Comparison(tensor="A2", by=Compared.DIGEST),
    )
    number = plan.pieces.index(piece)
    by_bits = tuple(replace(c, by=Compared.BITS) for c in piece.comparisons)
    with pytest.raises(UncoveredError, match=r"ac-0 A1: .* the forward's is not kept"):
        verify_plan(profile, with_piece(plan, number, comparisons=by_bits))


def test_a_kept_tensor_is_not_compared_where_what_reads_it_is_replayed_from_further_back() -> None:
    # F1 is recomputed. Its output is kept for W2, and for nobody else but F2, which P-DMR covers.
    profile = linear_stage(1, 3, recomputed=2, window_s=2, headroom=3, budget=3)
    plan = plan_checks(profile, budget_bytes=0)
    number = [piece.name for piece in plan.pieces].index("0/weight/1")
    assert [c.tensor for c in plan.pieces[0].comparisons] == ["A1", "A2"]
    lacking = with_piece(plan, 0, comparisons=plan.pieces[0].comparisons[1:])
    assert refused(profile, lacking) == (
        "0/forward/0 A1: leaves its piece (is used by 0/weight/1) and is not compared"
    )
    segment = with_piece(
        lacking,
        number,
        name="agc-0",
        method=Method.INTER,
        operators=("0/forward/0", "0/weight/1"),
        helpers=("0/forward/0",),
        window="wait",
    )
    choices = tuple(
        replace(choice, method=Method.INTER, window="wait")
        if choice.operator == "0/weight/1"
        else choice
        for choice in plan.choices
    )

    totals = sum_totals(profile, segment.pieces, choices)
    verify_plan(profile, replace(segment, choices=choices, totals=totals, budget_bytes=3))
    assert "not the sums of its pieces" in refused(
        profile, replace(segment, choices=choices, budget_bytes=3)
    )


def refused(profile: Profile, plan: Plan) -> str:
    with pytest.raises(UncoveredError) as error:
        verify_plan(profile, plan)
    return str(error.value)


def test_a_plan_that_cannot_be_carried_out_is_refused_by_name() -> None:
    plain = linear_stage(1, 3, recomputed=2, window_s=0, headroom=0)
    profile = replace(plain, windows=(window_of("wait", 9, 2.0, kind=WindowKind.INTRA),))
    plan = plan_checks(profile)
    methods = [piece.method for piece in plan.pieces]
    naive, deferred = methods.index(Method.NAIVE), methods.index(Method.INTRA)
    name, later = plan.pieces[naive].name, plan.pieces[deferred].name

    assert "job, the profile of other" in refused(replace(profile, fingerprint="other"), plan)
    lacking = replace(plan, pieces=plan.pieces[:naive] + plan.pieces[naive + 1 :])
    assert refused(profile, lacking).startswith(f"{name} ")
    twice = replace(plan, pieces=(*plan.pieces, plan.pieces[naive]))
    assert refused(profile, twice).startswith(f"{name}: is checked twice")
    nowhere = with_piece(plan, deferred, window="nowhere")
    choices = tuple(
        replace(c, window="nowhere") if c.operator == later else c for c in plan.choices
    )
    assert "nowhere is not in the profile" in refused(profile, replace(nowhere, choices=choices))
    assert "wait: checks retain up to" in refused(profile, replace(plan, budget_bytes=1))
    smaller = replace(profile, budget_bytes=plan.budget_bytes - 1)
    assert f"more than the profile's of {plan.budget_bytes - 1}" in refused(smaller, plan)
    full = replace(profile, windows=(replace(profile.windows[0], headroom_bytes=1),))
    assert "when it opens, more than its headroom of 1" in refused(full, plan)
    unknown = with_piece(plan, naive, operators=("9/forward/9",))
    assert "9/forward/9: is in" in refused(profile, unknown)
    both = with_piece(plan, naive, operators=("0/forward/0", name), helpers=("0/forward/0",))
    assert "has several operators" in refused(profile, both)
    partly = with_piece(plan, methods.index(Method.PIGGYBACK), operators=("0/forward/0",))
    assert "not all operators of one AC segment" in refused(profile, partly)


def test_a_window_before_the_operator_is_refused() -> None:
    profile = linear_stage(1, 2, recomputed=0, window_s=50, headroom=99)
    plan = plan_checks(profile)
    early = replace(profile, windows=(window_of("wait", 1, 50.0),))

    assert "is executed only after the window wait" in refused(early, plan)


def test_a_check_that_communicates_in_a_window_of_unknown_length_is_refused() -> None:
    plain = linear_stage(1, 2, recomputed=0, window_s=50, headroom=99)
    operators = tuple(replace(op, communication_s=1.0) for op in plain.operators)
    profile = replace(plain, operators=operators)
    plan = plan_checks(profile)
    assert any(len(piece.operators) > 1 for piece in plan.pieces)
    unknown = replace(profile, windows=(window_of("wait", 6, 50.0, 99, static=False),))

    assert "communicates, which no check may in the window wait" in refused(unknown, plan)
    assert {piece.method for piece in plan_checks(unknown).pieces} == {Method.NAIVE}


def test_what_is_overwritten_before_its_check_is_copied() -> None:
    def operator(ordinal: int, read: str, made: str, *overwrites: str) -> Operator:
        return Operator(
            block=0,
            in_pass=Pass.WEIGHT,
            ordinal=ordinal,
            name="add",
            inputs=(read,),
            outputs=(made,),
            median_s=1.0,
            overwrites=overwrites,
        )

    profile = Profile(
        fingerprint="job",
        stage=0,
        budget_bytes=100,
        tensors=(
            Tensor(name="x", size_bytes=1, origin=Origin.ADDRESSED),
            *(Tensor(name=name, size_bytes=1) for name in ("s0", "s1", "s2")),
        ),
        operators=(operator(0, "x", "s0"), operator(1, "s0", "s1", "s0"), operator(2, "s1", "s2")),
        results=("s2",),
        windows=(window_of("wait", 3, 1.0, kind=WindowKind.INTRA),),
    )
    for budget in (0, 100):
        plan = plan_checks(profile, budget_bytes=budget)
        copies = {piece.name: piece.copies for piece in plan.pieces}
        # The sum in place is copied by its own check, even at once; by the first one if it waits.
        assert copies["0/weight/1"] == ("s0",)
        number = [piece.name for piece in plan.pieces].index("0/weight/1")
        assert "0/weight/1 overwrites it" in refused(profile, with_piece(plan, number, copies=()))
    waiting = [piece for piece in plan.pieces if piece.window]
    assert [(piece.name, piece.copies) for piece in waiting] == [("0/weight/0", ("s0",))]


def test_a_copy_of_an_addressed_tensor_costs_memory() -> None:
    def operator(ordinal: int, made: str, *overwrites: str) -> Operator:
        return Operator(
            block=0,
            in_pass=Pass.STEP,
            ordinal=ordinal,
            name="apply",
            inputs=("weight",),
            outputs=(made,),
            median_s=1.0,
            overwrites=overwrites,
        )

    profile = Profile(
        fingerprint="job",
        stage=0,
        budget_bytes=100,
        tensors=(
            Tensor(name="weight", size_bytes=5, origin=Origin.ADDRESSED),
            *(Tensor(name=name, size_bytes=1) for name in ("norm", "next")),
        ),
        operators=(operator(0, "norm"), operator(1, "next", "weight")),
        results=("norm", "next"),
    )

    def retained(after: int, budget: int) -> list[int]:
        windows = (window_of("wait", after, 2.0, kind=WindowKind.INTRA),)
        waiting = replace(profile, windows=windows)
        plan = plan_checks(waiting, budget_bytes=budget)
        return [piece_bytes(waiting, piece) for piece in plan.pieces if piece.window]

    assert retained(1, 100) == [1]  # before it is overwritten
    assert retained(2, 100) == [6, 6]
    assert retained(2, 11) == [6]
    assert retained(2, 5) == []


def test_a_result_that_nobody_checks_may_be_told_none_only_if_it_does_not_count() -> None:
    profile = linear_stage(1, 2, recomputed=0, window_s=0, headroom=0)
    unread = replace(profile, results=("A2", "dA0", "dW1"))

    choice = plan_checks(unread).choice_of["0/weight/1"]

    assert choice.method is Method.NONE
    assert refused(profile, plan_checks(unread)).startswith("0/weight/1 dW2: its result counts")


def test_a_compared_operator_that_is_recomputed_needs_a_piece() -> None:
    plain = linear_stage(1, 2, recomputed=2, window_s=0, headroom=0)
    operators = tuple(replace(op, compared=op.id == "0/forward/0") for op in plain.operators)
    profile = replace(plain, operators=operators)
    plan = plan_checks(profile)
    (number,) = [n for n, piece in enumerate(plan.pieces) if piece.method is Method.PIGGYBACK]
    assert [c.tensor for c in plan.pieces[number].comparisons] == ["A1", "A2"]

    # Forward 0 is told compared, and forward 1 is checked by executing it again both times.
    alone = replace(plan.pieces[number], name="0/forward/1", operators=("0/forward/1",))
    pieces = (
        *plan.pieces[:number],
        *plan.pieces[number + 1 :],
        replace(alone, method=Method.NAIVE),
    )
    methods = {"0/forward/0": Method.COMPARED, "0/forward/1": Method.NAIVE}
    choices = tuple(
        replace(c, method=methods.get(c.operator, c.method), segment=None) for c in plan.choices
    )

    completed = complete(profile, pieces)
    totals = sum_totals(profile, completed, choices)
    lacking = replace(plan, pieces=completed, choices=choices, totals=totals)
    assert refused(profile, lacking) == (
        "0/forward/0 A1: its result counts, and no piece checks it"
    )


def test_segments_that_keep_their_last_output_are_compared_by_bits() -> None:
    profile = linear_stage(1, 3, recomputed=0, window_s=0, headroom=0)
    names = ("0/forward/0", "0/forward/1")
    segment = AcSegment(name="ac", operators=names, kept=names[1:])
    plan = plan_checks(replace(profile, ac_segments=(segment,)))

    assert plan.pieces[0].comparisons == (
        Comparison(tensor="A1", by=Compared.DIGEST),
        Comparison(tensor="A2", by=Compared.BITS),
    )
