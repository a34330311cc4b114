"""Segments: figures 8 and 9, table 1, and all that a brute force finds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.core.dmr.stages import MIB, RandomStage, linear_stage, llama_stage, window_of

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr import segments
from mainstay_core.dmr.operators import MAX_BLOCK_OPERATORS, Operator, Origin, Pass, Tensor
from mainstay_core.dmr.plan import Method, Policy, piece_bytes
from mainstay_core.dmr.profiles import Profile
from mainstay_core.dmr.segments import (
    BlockGraph,
    Candidate,
    choose_segments,
    find_candidates,
)
from mainstay_core.dmr.static import plan_checks

ALL = 1 << 30


def all_candidates(profile: Profile, unchecked: frozenset[int], slack_s: float) -> list[Candidate]:
    """The candidates of the first block, from every subset of its operators."""
    graph = profile.graph
    places = graph.blocks[0]
    found = []
    for size in range(1, len(places) + 1):
        for chosen in itertools.combinations(places, size):
            operators = [graph.operators[place] for place in chosen]
            candidate = Candidate(
                members=sum(1 << places.index(place) for place in chosen),
                gain_s=sum(graph.operators[p].median_s for p in chosen if p in unchecked),
                replay_s=sum(op.median_s + op.communication_s for op in operators),
                size_bytes=boundary_bytes(profile, set(chosen), unchecked),
            )
            if (
                candidate.gain_s > 0
                and candidate.replay_s <= slack_s
                and all(op.static for op in operators)
                and is_connected(profile, chosen)
                and is_convex(profile, set(chosen))
            ):
                found.append(candidate)
    return found


def boundary_bytes(profile: Profile, inside: set[int], unchecked: frozenset[int]) -> int:
    names = set()
    for place in inside:
        operator = profile.operators[place]
        for name in operator.inputs:
            if profile.graph.makers.get(name) not in inside:
                names.add(name)
        for name in operator.outputs:
            outside = set(profile.graph.readers[name]) - inside
            if place in unchecked and (outside or name in profile.results):
                names.add(name)
    return profile.graph.size_of(names)


def is_connected(profile: Profile, places: Sequence[int]) -> bool:
    tensors = {
        place: {*profile.operators[place].inputs, *profile.operators[place].outputs}
        for place in places
    }
    reached, todo = {places[0]}, [places[0]]
    while todo:
        here = todo.pop()
        for other in set(places) - reached:
            if tensors[here] & tensors[other]:
                reached.add(other)
                todo.append(other)
    return len(reached) == len(places)


def is_convex(profile: Profile, inside: set[int]) -> bool:
    """No path of the block that leaves comes back: nothing is reached by it and reaches it."""
    after: set[int] = set()
    for place in profile.graph.blocks[0]:
        operator = profile.operators[place]
        makers = {profile.graph.makers.get(name) for name in operator.inputs}
        if makers & after and place in inside:
            return False
        if place not in inside and makers & (inside | after):
            after.add(place)
    return True


def unchecked_of(profile: Profile) -> frozenset[int]:
    """The operators that no AC segment has."""
    taken = {name for segment in profile.ac_segments for name in segment.operators}
    return frozenset(
        place for place, operator in enumerate(profile.operators) if operator.id not in taken
    )


def candidates_of(profile: Profile, slack_s: float, most: int = ALL) -> list[Candidate]:
    return find_candidates(BlockGraph(profile, 0, unchecked_of(profile)), slack_s, most)


def find(profile: Profile, *names: str) -> Candidate:
    block = profile.graph.blocks[0]
    members = sum(1 << block.index(profile.graph.places[f"0/{name}"]) for name in names)
    (found,) = [c for c in candidates_of(profile, 99.0) if c.members == members]
    return found


def test_figure_8_a_segment_keeps_8_tensors_where_its_operators_keep_14() -> None:
    profile = linear_stage(1, 4, recomputed=0, window_s=0, headroom=0)
    unchecked = unchecked_of(profile)
    alone = {
        name for operator in profile.operators for name in (*operator.inputs, *operator.outputs)
    }

    assert len(alone) == 14
    assert boundary_bytes(profile, set(range(12)), unchecked) == 8
    (whole,) = [c for c in candidates_of(profile, 99.0) if c.members == (1 << 12) - 1]
    assert whole.size_bytes == 8


def test_figure_9_the_three_candidates() -> None:
    # F1 to F3 are checked by P-DMR. A third of memory is 6, of the window 5.
    profile = linear_stage(1, 4, recomputed=3, window_s=15, headroom=18)
    every = [f"{kind}/{layer}" for kind in ("forward", "backward", "weight") for layer in range(4)]

    first = find(profile, *every)
    # F1 and W1 share A0 and nothing else: what merely shares an input is connected.
    second = find(profile, "forward/0", "weight/0", "weight/1", "backward/1")
    third = find(
        profile,
        *(f"{kind}/{layer}" for kind in ("forward", "backward", "weight") for layer in (2, 3)),
    )

    told = [(c.size_bytes, c.replay_s, c.gain_s) for c in (first, second, third)]
    assert told == [(8, 12, 9), (5, 4, 3), (6, 6, 5)]


def test_figure_9_the_best_that_fits_is_chosen_for_each_of_three_blocks() -> None:
    profile = linear_stage(3, 4, recomputed=3, window_s=15, headroom=18)

    plan = plan_checks(profile, Policy.PAPER)

    chosen = [piece for piece in plan.pieces if piece.name.startswith("agc")]
    assert len(chosen) == 3
    for piece in chosen:
        assert piece.window == "wait"
        assert len(piece.operators) <= 5
        assert piece_bytes(profile, piece) <= 6
        # Better than segment 2 of the figure, which is one of three that it shows of all.
        assert len(piece.operators) - len(piece.helpers) == 5


@pytest.mark.parametrize(
    ("blocks", "headroom", "slack", "cost", "execution", "saved"),
    [
        (26, 706, 26.602, 472, 15.627, 7.860),
        (27, 853, 13.229, 104, 13.178, 5.441),
        (27, 380, 25.020, 136, 13.360, 5.659),
        (40, 257, 10.845, 120, 6.939, 3.484),
        (40, 84, 10.507, 80, 6.617, 3.747),
    ],
)
def test_table_1_a_stage_of_its_shape(
    blocks: int, headroom: int, slack: float, cost: int, execution: float, saved: float
) -> None:
    """The paper's times of single operators are not printed, so its savings are a lower bound."""
    profile = llama_stage(blocks, headroom, slack)
    block = BlockGraph(profile, 0, unchecked_of(profile))
    candidates = find_candidates(block, slack / 1000, 20_000)

    (chosen,) = choose_segments([candidates], headroom * MIB, slack / 1000, Policy.PAPER)

    assert chosen is not None
    assert chosen.size_bytes <= headroom * MIB
    assert chosen.replay_s <= slack / 1000
    assert chosen.gain_s * 1000 >= 0.9 * saved
    if headroom > 472:
        # Where nothing binds it is the whole block, as in the paper.
        assert 0.4 < chosen.gain_s / chosen.replay_s < 0.6 or slack < execution


def check_candidates(seeds: range) -> int:
    found = 0
    for seed in seeds:
        profile = RandomStage(seed, blocks=1, most_operators=2 + (seed % 8 == 0)).draw()
        slack_s = float(random.Random(seed).randint(4, 60))
        expected = all_candidates(profile, unchecked_of(profile), slack_s)
        made = candidates_of(profile, slack_s)
        assert sorted(made, key=lambda c: c.members) == sorted(expected, key=lambda c: c.members)
        found += len(made)
    return found


def test_all_connected_convex_segments_are_found() -> None:
    assert check_candidates(range(1000)) > 5000


@pytest.mark.chaos
def test_all_connected_convex_segments_are_found_in_many_graphs() -> None:
    assert check_candidates(range(1000, 6000)) > 50_000


def draw_blocks(rng: random.Random) -> list[list[Candidate]]:
    return [
        [
            Candidate(
                members=1 << number,
                gain_s=float(rng.randint(1, 9)),
                replay_s=float(rng.randint(1, 9)),
                size_bytes=rng.randint(1, 9),
            )
            for number in range(rng.randint(0, 5))
        ]
        for block in range(rng.randint(1, 4))
    ]


def test_sharing_is_the_best_of_all_combinations_and_dividing_is_not() -> None:
    better = 0
    for seed in range(1000):
        rng = random.Random(seed)
        blocks = draw_blocks(rng)
        headroom, slack_s = rng.randint(2, 25), float(rng.randint(2, 25))

        def gain(chosen: Sequence[Candidate | None]) -> float:
            return sum(c.gain_s for c in chosen if c is not None)

        fitting = [
            gain(chosen)
            for chosen in itertools.product(*([None, *block] for block in blocks))
            if sum(c.size_bytes for c in chosen if c) <= headroom
            and sum(c.replay_s for c in chosen if c) <= slack_s
        ]
        shared = choose_segments(blocks, headroom, slack_s, Policy.OWN)
        even = choose_segments(blocks, headroom, slack_s, Policy.PAPER)

        assert gain(shared) == max(fitting)
        assert sum(c.size_bytes for c in shared if c) <= headroom
        assert sum(c.replay_s for c in shared if c) <= slack_s
        for block, choice in zip(blocks, even, strict=True):
            fits = [
                c.gain_s
                for c in block
                if c.size_bytes * len(blocks) <= headroom and c.replay_s * len(blocks) <= slack_s
            ]
            assert (choice.gain_s if choice else 0.0) == max(fits, default=0.0)
        better += gain(shared) > gain(even)
    assert better > 500


@pytest.mark.parametrize(
    ("least", "most"), [(0.0, 0.5), (0.04, 0.06)], ids=["any", "twenty-of-thirty-fit"]
)
def test_many_blocks_share_a_window_within_its_bounds_and_never_worse_than_evenly(
    least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MAX_MIXES", 0)  # thinned at every block
    headroom, slack_s = 100_000, 1000.0
    better = 0
    for seed in range(4):
        rng = random.Random(seed)
        blocks = []
        for _ in range(30):
            replays = [slack_s * rng.uniform(least, most) for _ in range(80)]
            blocks.append(
                [
                    Candidate(
                        gain_s=rng.uniform(0.2, 0.9) * replay_s,
                        replay_s=replay_s,
                        size_bytes=int(headroom * rng.uniform(least, most)),
                        members=1 << number,
                    )
                    for number, replay_s in enumerate(replays)
                ]
            )

        shared = [c for c in choose_segments(blocks, headroom, slack_s, Policy.OWN) if c]
        even = [c for c in choose_segments(blocks, headroom, slack_s, Policy.PAPER) if c]

        assert sum(c.size_bytes for c in shared) <= headroom
        assert sum(c.replay_s for c in shared) <= slack_s
        assert sum(c.gain_s for c in shared) >= sum(c.gain_s for c in even)
        better += sum(c.gain_s for c in shared) > 1.05 * sum(c.gain_s for c in even)
    assert better == 4


def test_with_too_many_sets_the_best_of_each_size_go_on() -> None:
    profile = linear_stage(1, 4, recomputed=3, window_s=15, headroom=18)
    every = candidates_of(profile, 99.0)

    some = candidates_of(profile, 99.0, 100)

    assert len(some) < len(every)
    assert {c.members for c in some} < {c.members for c in every}
    assert max(c.gain_s for c in some) == max(c.gain_s for c in every)


def shared_stage(number: int) -> Profile:
    """A block whose operators all read one tensor, and no other's: every set of them is connected.

    One window behind all.
    """
    operators = tuple(
        Operator(
            block=0,
            in_pass=Pass.WEIGHT,
            ordinal=ordinal,
            name="op",
            inputs=("x",),
            outputs=(f"w{ordinal}",),
            median_s=1.0,
        )
        for ordinal in range(number)
    )
    results = tuple(f"w{ordinal}" for ordinal in range(number))
    return Profile(
        fingerprint="job",
        stage=0,
        budget_bytes=ALL,
        tensors=(
            Tensor(name="x", size_bytes=1, origin=Origin.RECEIVED),
            *(Tensor(name=name, size_bytes=1) for name in results),
        ),
        operators=operators,
        results=results,
        windows=(window_of("wait", number, 2.0 * number),),
    )


@pytest.mark.parametrize("slack_s", [20.0, 2000.0])
def test_the_sets_of_a_large_block_with_a_tensor_for_all_are_bounded(
    slack_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = shared_stage(2000)
    block = BlockGraph(profile, 0, unchecked_of(profile))
    num_made = 0
    add = BlockGraph.add

    def count(self: BlockGraph, *args: Any) -> Any:
        nonlocal num_made
        num_made += 1
        return add(self, *args)

    monkeypatch.setattr(BlockGraph, "add", count)
    max_sets = 100

    found = find_candidates(block, slack_s, max_sets)

    assert 2000 <= len(found) <= num_made
    assert num_made <= 2000 + max_sets + segments.MAX_NEIGHBOURS * 2 * 2000
    assert max(candidate.gain_s for candidate in found) == slack_s


def test_a_set_grows_by_operators_that_gain_and_by_others() -> None:
    profile = shared_stage(60)
    block = BlockGraph(profile, 0, frozenset(range(30, 60)))

    found = find_candidates(block, 20.0, 10)

    assert {c.replay_s - c.gain_s > 0 for c in found} == {True, False}
    assert max(candidate.gain_s for candidate in found) == 20.0


def test_a_block_with_too_many_operators_is_refused_by_name() -> None:
    shared_stage(MAX_BLOCK_OPERATORS)

    with pytest.raises(InvalidSpecError, match=r"operators\[2048\].block: block 0 has 2049 oper"):
        shared_stage(MAX_BLOCK_OPERATORS + 1)


def test_a_segment_is_replayed_after_its_block_and_has_no_dynamic_operator() -> None:
    num_segments = 0
    for seed in range(200):
        profile = RandomStage(seed).draw()
        for piece in plan_checks(profile).pieces:
            if piece.name.startswith("agc"):
                num_segments += 1
                assert piece.method is Method.INTER
                for name in piece.operators:
                    assert profile.operators[profile.graph.places[name]].static
    assert num_segments > 40
