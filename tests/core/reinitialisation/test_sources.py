"""The sources of lost blocks: golden cases of the paper, and a brute force on drawn pipelines."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from mainstay_core.base import codec
from mainstay_core.base.shape import Order
from mainstay_core.reinitialisation import sources
from mainstay_core.reinitialisation.sources import (
    Left,
    NoSource,
    Policy,
    Position,
    plan_reinitialisation,
)
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.reinitialisation import (
    BlockOutline,
    Reinitialisation,
    Rule,
    SourceKind,
    StageOutline,
)

SWAPPED = Policy(order=Order.SWAPPED)


def pipeline(*layers: int, ends: bool = True) -> tuple[StageOutline, ...]:
    """A pipeline of stages with so many layers each, embedding and head at its ends."""
    numbers = itertools.count()
    stages = [
        tuple(BlockOutline(name=f"layers.{next(numbers)}", kind="layer") for _ in range(n))
        for n in layers
    ]
    if ends:
        stages[0] = (BlockOutline(name="embed", kind="embed"), *stages[0])
        stages[-1] = (*stages[-1], BlockOutline(name="head", kind="head"))
    return tuple(stages)


def plan(
    stages: tuple[StageOutline, ...],
    *lost: int | Position,
    norms_sq: dict[str, float] | None = None,
    left: Left | None = None,
    policy: Policy | None = None,
    version: int = 100,
    ranks: int = 1,
) -> Reinitialisation | NoSource:
    return plan_reinitialisation(
        stages,
        [(one, 0) if isinstance(one, int) else one for one in lost],
        version=version,
        norms_sq=norms_sq or {},
        left=left or Left(),
        policy=policy or Policy(),
        ranks_per_stage=ranks,
    )


def shares(answer: Reinitialisation | NoSource) -> dict[str, list[tuple[str, float]]]:
    """By lost block: (source's block, weight)."""
    assert isinstance(answer, Reinitialisation), answer
    return {
        made.block: [(s.block, s.weight) for s in made.sources]
        for position in answer.positions
        for made in position.blocks
    }


def refusal(answer: Reinitialisation | NoSource) -> str:
    assert isinstance(answer, NoSource), answer
    return answer.reason


def test_an_inner_stage_is_the_average_of_its_neighbours_by_squared_norms() -> None:
    # Algorithm 1: omega is the squared norm of the neighbour's whole gradient.
    norms_sq = {"layers.0": 1.0, "layers.1": 2.0, "layers.4": 6.0, "layers.5": 3.0}

    answer = plan(pipeline(2, 2, 2), 1, norms_sq=norms_sq)

    assert shares(answer) == {
        "layers.2": [("layers.0", 0.25), ("layers.4", 0.75)],
        "layers.3": [("layers.1", 0.25), ("layers.5", 0.75)],
    }
    assert isinstance(answer, Reinitialisation)
    assert answer.reason == "stage 1 is made anew from 0.25 of stage 0, 0.75 of stage 2"
    assert codec.decode(Reinitialisation, codec.encode(answer)) == answer


def test_an_embedding_in_the_stage_does_not_outweigh_its_layers() -> None:
    norms_sq = {"embed": 1e6, "layers.0": 1.0, "layers.2": 1.0}

    assert shares(plan(pipeline(1, 1, 1), 1, norms_sq=norms_sq)) == {
        "layers.1": [("layers.0", 0.5), ("layers.2", 0.5)]
    }


def test_stages_that_are_not_equal_are_averaged_block_by_block() -> None:
    norms_sq = {"layers.0": 1.0, "layers.4": 1.0}

    assert shares(plan(pipeline(1, 3, 2), 1, norms_sq=norms_sq)) == {
        "layers.1": [("layers.0", 0.5), ("layers.4", 0.5)],
        "layers.2": [("layers.0", 0.5), ("layers.5", 0.5)],
        "layers.3": [("layers.0", 0.5), ("layers.5", 0.5)],
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_the_ends_have_no_two_neighbours_in_order(stage: int) -> None:
    assert refusal(plan(pipeline(1, 1, 1, 1), stage)) == (
        f"stage {stage} is an end of the pipeline: it has no two neighbours"
    )


def test_the_only_stage_has_no_neighbour_in_any_order() -> None:
    assert "the only stage" in refusal(plan(pipeline(2), 0))
    assert "the only stage" in refusal(plan(pipeline(2), 0, policy=SWAPPED))


def test_ends_are_copied_from_their_twins_where_orders_are_swapped() -> None:
    left = Left(guards={("embed", 0): 1, ("head", 0): 2})

    answer = plan(pipeline(2, 2, 2, 2), 0, 3, left=left, policy=SWAPPED)

    assert shares(answer) == {
        "embed": [("embed", 1.0)],
        "layers.0": [("layers.2", 1.0)],
        "layers.1": [("layers.3", 1.0)],
        "layers.6": [("layers.4", 1.0)],
        "layers.7": [("layers.5", 1.0)],
        "head": [("head", 1.0)],
    }
    assert isinstance(answer, Reinitialisation)
    assert answer.reason == (
        "stage 0 is made anew from a guard of embed in stage 1, its twin stage 1; stage 3 is made "
        "anew from its twin stage 2, a guard of head in stage 2"
    )


def test_without_a_guard_an_embedding_is_lost() -> None:
    assert refusal(plan(pipeline(1, 1, 1), 0, policy=SWAPPED)) == (
        "stage 0: stage 1 has no block like embed, and no guard of embed is left"
    )


def test_inner_stages_are_averaged_where_orders_are_swapped_too() -> None:
    answer = plan(pipeline(1, 1, 1, 1), 1, policy=SWAPPED)

    assert shares(answer) == {"layers.1": [("layers.0", 0.5), ("layers.2", 0.5)]}


def test_twins_with_other_numbers_of_layers_are_refused() -> None:
    stages = pipeline(1, 2, 1, ends=False)

    assert refusal(plan(stages, 0, policy=SWAPPED)) == (
        "stage 0: its twin stage 1 has 2 blocks like layers.0, it has 1"
    )


def test_two_stages_are_each_others_twin() -> None:
    stages = pipeline(1, 1, ends=False)

    assert shares(plan(stages, 1, policy=SWAPPED)) == {"layers.1": [("layers.0", 1.0)]}
    assert "lost together" in refusal(plan(stages, 0, 1, policy=SWAPPED))


def test_two_stages_side_by_side_have_no_source_but_their_own_young_copies() -> None:
    stages = pipeline(1, 1, 1, 1)

    assert refusal(plan(stages, 1, 2)) == "stage 1 and its neighbour stage 2 are lost together"

    old = Left(stale={(1, 0): 10, (2, 0): 20})
    assert "lost together" in refusal(plan(stages, 1, 2, left=old, policy=Policy(stale_steps=89)))
    answer = plan(stages, 1, 2, left=old, policy=Policy(stale_steps=90))
    assert isinstance(answer, Reinitialisation)
    assert [s.version for p in answer.positions for b in p.blocks for s in b.sources] == [10, 20]


@pytest.mark.parametrize(("age", "kind"), [(50, "STALE_COPY"), (51, "NEIGHBOUR")])
def test_a_stale_copy_goes_before_neighbours_up_to_its_age(age: int, kind: str) -> None:
    left, policy = Left(stale={(1, 0): 100 - age}), Policy(stale_steps=50)

    answer = plan(pipeline(1, 1, 1), 1, left=left, policy=policy)

    assert isinstance(answer, Reinitialisation)
    kinds = {s.kind for p in answer.positions for b in p.blocks for s in b.sources}
    assert kinds == {SourceKind[kind]}


def test_a_guard_is_better_than_a_stale_copy_as_it_is_exact() -> None:
    left = Left(guards={("embed", 0): 1}, stale={(0, 0): 99})

    answer = plan(pipeline(1, 1, 1), 0, left=left, policy=Policy(stale_steps=50))

    assert isinstance(answer, Reinitialisation)
    assert [b.sources[0].kind for b in answer.positions[0].blocks] == [
        SourceKind.GUARD,
        SourceKind.STALE_COPY,
    ]


@pytest.mark.parametrize("rule", [Rule.GUARD, Rule.NO])
def test_a_block_whose_author_forbids_it_is_not_made_of_others(rule: Rule) -> None:
    first, second, third = pipeline(1, 1, 1)
    second = (BlockOutline(name="layers.1", kind="layer", rule=rule),)

    reason = refusal(plan((first, second, third), 1))
    assert reason == "stage 1: layers.1 may not be made of other blocks"


@pytest.mark.parametrize(
    ("before", "after", "taken"), [(3.0, 1.0, 0), (1.0, 3.0, 2), (0.0, 0.0, 0)]
)
def test_experts_are_copied_from_the_heavier_neighbour(
    before: float, after: float, taken: int
) -> None:
    first, _, third = pipeline(1, 1, 1)
    second = (BlockOutline(name="layers.1", kind="layer", rule=Rule.COPY),)
    norms_sq = {"layers.0": before, "layers.2": after}

    answer = plan((first, second, third), 1, norms_sq=norms_sq)

    assert shares(answer) == {"layers.1": [(f"layers.{taken}", 1.0)]}


def test_a_stage_of_several_ranks_is_made_position_by_position() -> None:
    first, _, third = pipeline(1, 1, 1)
    second = (BlockOutline(name="layers.1", kind="layer", copied=("norm",)),)
    stages = (first, second, third)

    answer = plan(stages, (1, 1), ranks=2)

    assert isinstance(answer, Reinitialisation)
    held, *averaged = answer.positions[0].blocks[0].sources
    assert (held.kind, held.inner, held.parameters) == (SourceKind.INNER_RANK, 0, ("norm",))
    assert [(s.stage, s.inner, s.weight) for s in averaged] == [(0, 1, 0.5), (2, 1, 0.5)]
    assert answer.reason == (
        "inner rank 1.1 is made anew from inner rank 1.0, 0.5 of stage 0, 0.5 of stage 2 "
        "(one half each, as the norms of their gradients are not known)"
    )
    # Beside each other, but not in the same inner rank.
    assert isinstance(plan(stages, (1, 0), (2, 1), ranks=2, policy=SWAPPED), NoSource)
    four = pipeline(1, 1, 1, 1)
    assert isinstance(plan(four, (1, 0), (2, 1), ranks=2), Reinitialisation)


def test_a_lost_stage_whose_neighbour_has_no_like_block_is_refused() -> None:
    stages = (*pipeline(1, 1, ends=False), (BlockOutline(name="odd", kind="odd"),))

    assert refusal(plan(stages, 1)) == "stage 1: stage 2 has no block like layers.1"


def twin(
    stages: tuple[StageOutline, ...],
    lost: set[int],
    norms_sq: dict[str, float],
    left: Left,
    policy: Policy,
    version: int,
) -> dict[str, dict[tuple[int, str], float]] | None:
    """The same by brute force: for each block, every stage's share is looked at in turn."""
    last, found = len(stages) - 1, {}
    for stage in lost:
        stale = left.stale.get((stage, 0))
        own = {b.name: {(stage, b.name): 1.0} for b in stages[stage]}
        if stale is not None and version - stale <= policy.stale_steps:
            made: dict[str, dict[tuple[int, str], float]] | None = own
        else:
            made = others(stages, stage, lost, norms_sq, left, policy, last)
        if made is None:
            return None
        for block in stages[stage]:
            guard = left.guards.get((block.name, 0))
            found[block.name] = made[block.name] if guard is None else {(guard, block.name): 1.0}
    return found


def others(
    stages: tuple[StageOutline, ...],
    stage: int,
    lost: set[int],
    norms_sq: dict[str, float],
    left: Left,
    policy: Policy,
    last: int,
) -> dict[str, dict[tuple[int, str], float]] | None:
    sources = [stage - 1, stage + 1]
    if stage in (0, last):
        if policy.order is Order.IN_ORDER:
            sources = []
        sources = [s for s in sources if 0 <= s <= last][:1]
    made: dict[str, dict[tuple[int, str], float]] = {}
    for block in stages[stage]:
        made[block.name] = {}
        if (block.name, 0) in left.guards:
            continue
        if block.rule in (Rule.GUARD, Rule.NO) or not sources or lost & set(sources):
            return None
        kin = [b.name for b in stages[stage] if b.kind == block.kind]
        total = {
            s: sum(norms_sq.get(b.name, 0.0) for b in stages[s] if b.kind == block.kind)
            for s in sources
        }
        for source in sources:
            like = [b.name for b in stages[source] if b.kind == block.kind]
            if not like or (stage in (0, last) and len(like) != len(kin)):
                return None
            chosen = like[math.floor((kin.index(block.name) + 0.5) * len(like) / len(kin))]
            share = total[source] / sum(total.values()) if sum(total.values()) else 1 / len(sources)
            if len(sources) == 1:
                share = 1.0
            elif block.rule is Rule.COPY:
                heavier = sources[0] if total[sources[0]] >= total[sources[1]] else sources[1]
                share = float(source == heavier)
            if share:
                made[block.name][(source, chosen)] = share
    return made


def test_the_plan_is_what_a_brute_force_finds() -> None:
    rng = random.Random(11)
    made = refused = 0
    for _ in range(6000):
        number = itertools.count()
        stages = tuple(
            tuple(
                BlockOutline(
                    name=f"b.{next(number)}",
                    kind=rng.choice("aaaaab"),
                    rule=rng.choice((None, None, None, Rule.AVERAGE, Rule.COPY, Rule.GUARD)),
                )
                for _ in range(rng.randint(1, 3))
            )
            for _ in range(rng.randint(1, 6))
        )
        lost = {rng.randrange(len(stages)) for _ in range(rng.randint(1, 2))}
        names = [b.name for stage in stages for b in stage]
        norms_sq = {name: float(rng.randint(0, 3)) for name in names if rng.random() < 0.8}
        left = Left(
            guards={(n, 0): 0 for n in names if rng.random() < 0.2},
            stale={(s, 0): rng.randint(0, 99) for s in lost if rng.random() < 0.2},
        )
        policy = Policy(order=rng.choice(list(Order)), stale_steps=rng.choice((0, 30)))

        answer = plan(stages, *lost, norms_sq=norms_sq, left=left, policy=policy)
        expected = twin(stages, lost, norms_sq, left, policy, 100)

        if expected is None:
            refused += 1
            assert refusal(answer)
            continue
        made += 1
        assert isinstance(answer, Reinitialisation), answer
        found = {
            b.block: {(s.stage, s.block): s.weight for s in b.sources}
            for p in answer.positions
            for b in p.blocks
        }
        assert found.keys() == expected.keys()
        for name, by_source in found.items():
            assert by_source == pytest.approx(expected[name], abs=1e-15), name
            assert sum(by_source.values()) == 1.0
    assert min(made, refused) > 1000


def test_whoever_plans_gets_the_same_plan() -> None:
    stages = pipeline(2, 2, 2, 2, 2)
    norms_sq = {f"layers.{i}": 1.0 + i for i in range(10)}

    plans = {
        codec.dumps(plan(stages, *order, norms_sq=norms_sq))
        for order in ((1, 3), (3, 1), (3, 1, 3))
    }

    assert len(plans) == 1


def test_weightings_of_figure_2() -> None:
    norms_sq = {"layers.0": 1.0, "layers.2": 3.0}
    for weighting, expected in (
        (Weighting.GRADIENT_NORM, [("layers.0", 0.25), ("layers.2", 0.75)]),
        (Weighting.UNIFORM, [("layers.0", 0.5), ("layers.2", 0.5)]),
        (Weighting.COPY, [("layers.0", 1.0)]),
    ):
        answer = plan(pipeline(1, 1, 1), 1, norms_sq=norms_sq, policy=Policy(weighting=weighting))
        assert shares(answer) == {"layers.1": expected}


def test_norms_are_added_left_to_right_whatever_the_built_in_sum_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It compensates rounding from Python 3.12 on, and a fork's record has these bits."""
    monkeypatch.setattr(sources, "sum", lambda values, _=0.0: math.fsum(values), raising=False)
    stages = pipeline(10, 1, 2, ends=False)
    norms_sq = {f"layers.{i}": 0.1 for i in range(10)} | {"layers.11": 0.5, "layers.12": 0.25}

    assert sources.norms_beside(stages, 1, "layer", norms_sq) == (0.9999999999999999, 0.75)
    answer = plan(stages, 1, norms_sq=norms_sq)
    assert isinstance(answer, Reinitialisation)
    assert answer.positions[0].blocks[0].norms_sq == (0.9999999999999999, 0.75)


@pytest.mark.parametrize(
    ("version", "norms_sq", "told"),
    [
        pytest.param(100, {}, (), id="a commit without norms"),
        pytest.param(0, {}, (0.0, 0.0), id="no step before"),
        pytest.param(100, {"layers.0": 0.0, "layers.2": 0.0}, (0.0, 0.0), id="norms of 0"),
    ],
)
def test_norms_that_are_not_known_are_not_told_as_0(
    version: int, norms_sq: dict[str, float], told: tuple[float, ...]
) -> None:
    """A run that makes the fork again has norms, and would refuse it for these."""
    answer = plan(pipeline(1, 1, 1, ends=False), 1, version=version, norms_sq=norms_sq)
    assert shares(answer) == {"layers.1": [("layers.0", 0.5), ("layers.2", 0.5)]}
    assert isinstance(answer, Reinitialisation)
    assert answer.positions[0].blocks[0].norms_sq == told


@pytest.mark.parametrize(
    ("version", "norms_sq", "why"),
    [
        (7, {"layers.0": 0.0, "layers.2": 0.0}, "as both gradients are zero"),
        (7, {}, "as the norms of their gradients are not known"),
        (0, {}, "as no step has been taken"),
    ],
)
def test_one_half_each_is_said_where_norms_do_not_decide(
    version: int, norms_sq: dict[str, float], why: str
) -> None:
    answer = plan(pipeline(1, 1, 1), 1, norms_sq=norms_sq, version=version)

    assert isinstance(answer, Reinitialisation)
    assert answer.reason.endswith(f"0.5 of stage 0, 0.5 of stage 2 (one half each, {why})")
    alike = plan(pipeline(1, 1, 1), 1, norms_sq={"layers.0": 4.0, "layers.2": 4.0})
    assert isinstance(alike, Reinitialisation)
    assert "half" not in alike.reason
