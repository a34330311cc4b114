"""Who is witnessed by whom, where two chains differ first, and who is named."""

from __future__ import annotations

import random

import pytest

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.dmr import witness
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.dmr.witness import (
    MIN_CHAINS,
    Account,
    Difference,
    Ruling,
    Telling,
    Told,
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


def slot(name: str) -> Slot:
    return Slot(pod=PodUid(name), index=0)


def told(asked: int, cells: str, telling: Telling, replica: int = 0) -> Told:
    """What a chain of devices, a letter each, tells when it is asked for the n-th time."""
    names = tuple(slot(f"{name}{position}") for position, name in enumerate(cells))
    return Told(quorum=1, attempt=asked, replica=replica, cells=names, telling=telling)


def named(ruling: Ruling) -> list[tuple[Slot, Verdict]]:
    return [(d.slot, d.verdict) for d in ruling.deviations]


def test_two_that_differ_are_asked_again_before_anybody_is_named() -> None:
    right, wrong = compute(2, 1), compute(2, 1, places(2, 1)[0])
    ruling = rule([told(0, "aa", right, 0), told(0, "bb", wrong, 1)])
    assert (ruling.agreed, ruling.deviations) == (None, ())
    assert ruling.doubted == (slot("a0"), slot("b0"))
    assert "replicas 0, 1" in ruling.reason


def test_who_differs_once_is_transient_and_who_insists_is_deterministic() -> None:
    place = places(2, 1)[0]
    right, wrong = compute(2, 1), compute(2, 1, place)
    first = [told(0, "aa", wrong, 0), told(0, "bb", right, 1)]
    others = [told(1, "bb", right, 1), told(1, "cc", right, 2)]

    once = rule([*first, *others, told(1, "aa", right, 0)])
    again = rule([*first, *others, told(1, "aa", wrong, 0)])

    assert once.agreed == again.agreed == right
    assert named(once) == [(slot("a0"), Verdict.TRANSIENT)]
    assert named(again) == [(slot("a0"), Verdict.DETERMINISTIC)]
    assert again.deviations[0].difference == place


def test_nothing_is_agreed_on_while_no_two_devices_tell_the_same() -> None:
    one, two, three = (compute(2, 1, places(2, 1)[0], name) for name in "abc")
    ruling = rule(
        [told(0, "aa", one), told(0, "bb", two), told(1, "aa", one), told(1, "cc", three)]
    )
    assert (ruling.agreed, ruling.doubted) == (None, (slot("a0"), slot("b0"), slot("c0")))


def test_two_that_insist_are_both_doubted_and_one_that_gives_in_was_hit_once() -> None:
    right, wrong = compute(2, 1), compute(2, 1, places(2, 1)[0])
    first = [told(0, "aa", wrong, 0), told(0, "bb", right, 1)]
    insists = rule([*first, told(1, "aa", wrong, 0), told(1, "bb", right, 1)])
    assert (insists.agreed, insists.doubted) == (None, (slot("a0"), slot("b0")))
    gives_in = rule([*first, told(1, "aa", right, 0), told(1, "bb", right, 1)])
    assert named(gives_in) == [(slot("a0"), Verdict.TRANSIENT)]


def test_a_device_that_is_gone_keeps_its_voice() -> None:
    right, wrong = compute(2, 1), compute(2, 1, places(2, 1)[0])
    first = [told(0, "aa", wrong, 0), told(0, "bb", right, 1)]
    ruling = rule([*first, told(1, "aa", wrong, 0), told(1, "cc", right, 1)])
    assert named(ruling) == [(slot("a0"), Verdict.DETERMINISTIC)]


def test_a_device_has_one_voice_in_whatever_chain_it_is() -> None:
    right, wrong = compute(2, 1), compute(2, 1, places(2, 1)[0])
    first = [told(0, "aa", wrong, 0), told(0, "bb", right, 1)]
    remade = rule([*first, told(1, "ab", wrong, 0)])
    assert (remade.agreed, remade.doubted) == (None, (slot("a0"), slot("b0")))
    # A third device in the place of one of the two says who it was.
    for third, who in ((right, "a0"), (wrong, "b0")):
        ruling = rule([*first, told(1, "bb", right, 1), told(1, "ca", third, 0)])
        assert {s for s, _ in named(ruling)} == {slot(who)}
        assert ruling.agreed == third


def test_a_wrong_device_behind_another_is_not_judged_by_what_the_first_has_spoilt() -> None:
    """a0 and b1 are both wrong: what a1 made of a wrong activation is no voice about b1."""
    first_stage, second_stage = places(2, 1)[0], Difference(position=1, in_pass=Pass.WEIGHT)
    right = compute(2, 1)
    tellings = {
        "aa": compute(2, 1, first_stage),
        "bb": compute(2, 1, second_stage),
        "cc": right,
        "dd": right,
    }
    three = [told(n, cells, tellings[cells]) for n in (0, 1) for cells in ("aa", "bb", "cc")]
    assert rule(three).doubted == (slot("b1"), slot("c1"))
    four = rule([*three, told(2, "dd", right)])
    assert {s for s, _ in named(four)} == {slot("a0"), slot("b1")}
    assert four.agreed == right


@pytest.mark.parametrize("seed", range(60))
def test_with_one_wrong_device_no_other_is_ever_named(seed: int) -> None:
    """Chains are asked in any order, some remade of others' cells, until all is agreed on."""
    rng = random.Random(seed)
    right, place = compute(3, 2), rng.choice(places(3, 2))
    wrong, sticks = compute(3, 2, place), rng.random() < 0.5
    bad = rng.choice("abcd") + str(place.position)
    asked: list[Told] = []
    hits = 0
    for number in range(12):
        for _ in range(rng.randint(1, 3)):
            cells = "".join(rng.choice("abcd") for _ in range(3))
            is_hit = cells[place.position] == bad[0] and (sticks or not hits)
            hits += is_hit
            asked.append(told(number, cells, wrong if is_hit else right, len(asked)))
        ruling = rule(asked)
        assert {s for s, _ in named(ruling)} <= {slot(bad)}
        if ruling.agreed is not None:
            assert ruling.agreed == right or len({t.telling for t in asked}) == 1
        else:
            assert slot(bad) in ruling.doubted or not ruling.doubted
        if ruling.deviations:
            (found,) = ruling.deviations
            assert found.difference == place
            times = len([t for t in asked if t.telling == wrong])
            assert (found.verdict is Verdict.DETERMINISTIC) == (times > 1)


def test_chains_that_tell_the_same_are_not_looked_at_place_by_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("each clean step would cost seconds where there are many collectives")

    monkeypatch.setattr(witness, "_places", never)
    telling = (Account(forward=("x",), weights=("w",)),)
    told = [
        Told(
            quorum=1,
            attempt=0,
            replica=replica,
            cells=(Slot(pod=PodUid(f"{replica}"), index=0),),
            telling=telling,
        )
        for replica in range(2)
    ]
    assert rule(told) == Ruling(agreed=telling, reason="all chains agree")
    assert first_difference(telling, telling) is None
