"""Who is witnessed by whom, where two chains differ first, and who is named."""

from __future__ import annotations

import random

import pytest

from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.dmr.witness import (
    MIN_CHAINS,
    Account,
    Difference,
    Telling,
    first_difference,
    rule,
    turn_of,
)


@pytest.mark.parametrize("num_chains", range(MIN_CHAINS, 9))
@pytest.mark.parametrize("every_steps", [1, 3])
def test_in_a_round_each_chain_is_witnessed_by_each_other_once(
    num_chains: int, every_steps: int
) -> None:
    length = num_chains * (num_chains - 1)
    for begin in (0, length, 5 * length):
        steps = range(begin * every_steps, (begin + length) * every_steps)
        turns = [turn_of(step, every_steps, num_chains) for step in steps]
        pairs = [turn for turn in turns if turn is not None]
        assert sorted(pairs) == [
            (one, other) for one in range(num_chains) for other in range(num_chains) if one != other
        ]
        assert [one for one, _ in pairs[:num_chains]] == [*range(num_chains)]


def test_nobody_is_witnessed_where_nobody_could_say_who_is_wrong() -> None:
    assert turn_of(0, 1, MIN_CHAINS - 1) is None
    assert turn_of(0, 0, 5) is None
    assert turn_of(3, 2, 5) is None


def compute(
    stages: int, micro_batches: int, wrong: Difference | None = None, name: str = "x"
) -> Telling:
    """What a chain tells of a type, one of whose values comes out wrong."""

    def value(inputs: object, position: int, in_pass: Pass, micro_batch: int | None) -> str:
        here = Difference(position=position, in_pass=in_pass, micro_batch=micro_batch)
        right = f"{hash((inputs, position, in_pass, micro_batch))}"
        return f"{name} of {right}" if here == wrong else right

    forward: list[list[str]] = [[] for _ in range(stages)]
    backward: list[list[str]] = [[] for _ in range(stages)]
    seen: list[list[str]] = [[] for _ in range(stages)]
    for m in range(micro_batches):
        flow = f"sample {m}"
        for s in range(stages):
            seen[s].append(flow)
            if s < stages - 1:
                flow = value(flow, s, Pass.FORWARD, m)
                forward[s].append(flow)
        for s in reversed(range(stages)):
            seen[s].append(flow)
            flow = value((flow, tuple(seen[s])), s, Pass.BACKWARD, m)
            if s > 0:
                backward[s].append(flow)
    return tuple(
        Account(
            forward=tuple(forward[s]),
            backward=tuple(backward[s]),
            weights=(value(tuple(seen[s]), s, Pass.WEIGHT, None),),
        )
        for s in range(stages)
    )


def places(stages: int, micro_batches: int) -> list[Difference]:
    """Every value that leaves a cell."""
    forwards = [(s, Pass.FORWARD) for s in range(stages - 1)]
    backwards = [(s, Pass.BACKWARD) for s in range(1, stages)]
    return [
        Difference(position=s, in_pass=in_pass, micro_batch=m)
        for s, in_pass in forwards + backwards
        for m in range(micro_batches)
    ] + [Difference(position=s, in_pass=Pass.WEIGHT) for s in range(stages)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_whatever_is_wrong_is_the_first_place_at_which_two_chains_differ(
    stages: int, micro_batches: int
) -> None:
    right = compute(stages, micro_batches)
    assert first_difference(right, right) is None
    for wrong in places(stages, micro_batches):
        told = compute(stages, micro_batches, wrong)
        assert first_difference(told, right) == first_difference(right, told) == wrong


def test_two_that_differ_are_asked_again_before_anybody_is_named() -> None:
    right, wrong = compute(2, 1), compute(2, 1, places(2, 1)[0])
    ruling = rule([{0: right, 1: wrong}])
    assert (ruling.agreed, ruling.deviations) == (None, ())
    assert "replicas 0, 1" in ruling.reason


def test_who_differs_once_is_transient_and_who_insists_is_deterministic() -> None:
    place = places(2, 1)[0]
    right, wrong = compute(2, 1), compute(2, 1, place)
    first = {0: wrong, 1: right}

    once = rule([first, {2: right, 0: right, 1: right}])
    again = rule([first, {2: right, 0: wrong, 1: right}])

    assert once.agreed == again.agreed == right
    assert [(d.replica, d.verdict) for d in once.deviations] == [(0, Verdict.TRANSIENT)]
    assert [(d.replica, d.verdict) for d in again.deviations] == [(0, Verdict.DETERMINISTIC)]
    assert again.deviations[0].difference == place


def test_nothing_is_agreed_on_while_no_two_chains_tell_the_same() -> None:
    tellings = [compute(2, 1, places(2, 1)[0], name) for name in "abc"]
    rounds = [dict(enumerate(tellings[:2])), dict(enumerate(tellings))]
    assert rule(rounds).agreed is None


@pytest.mark.parametrize("seed", range(20))
def test_with_one_wrong_device_no_other_is_ever_named(seed: int) -> None:
    """The protocol of attempts, played: who is asked, whose copy counts, until all is agreed."""
    rng = random.Random(seed)
    right = compute(3, 2)
    bad, place, sticks = rng.randrange(3), rng.choice(places(3, 2)), rng.random() < 0.5
    wrong = compute(3, 2, place)
    first = rng.choice([(0, 1), (1, 2), (2, 0)])
    rounds = [{r: wrong if r == bad else right for r in first}]
    while rule(rounds).agreed is None:
        assert len(rounds) < 3
        rounds.append({r: wrong if r == bad and sticks else right for r in range(3)})
    ruling = rule(rounds)
    assert ruling.agreed == right
    named = {d.replica for d in ruling.deviations}
    assert named == ({bad} if bad in first else set())
    for deviation in ruling.deviations:
        assert deviation.difference == place
        assert (deviation.verdict is Verdict.DETERMINISTIC) == sticks
