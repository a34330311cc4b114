"""Chains whose stages have several ranks: which of them is named, and when a whole cell is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.dmr.witness import (
    Account,
    Exchanged,
    Telling,
    Told,
    first_difference,
    rule,
    turn_of,
)

PASSES = (Pass.FORWARD, Pass.BACKWARD)


@dataclass(frozen=True)
class Spot:
    """A value that a played chain computes: what is given, added up, received or left behind."""

    what: str
    stage: int
    inner: int
    in_pass: Pass
    micro_batch: int | None
    exchange: int | None = None


@dataclass(frozen=True)
class Chains:
    """The shape of played chains."""

    stages: int = 2
    width: int = 2
    micro_batches: int = 2
    exchanges: int = 2
    scatters: bool = False
    """Whether each rank gets a part of a sum of its own, and the next sum puts parts together."""

    def spots(self, *kinds: str) -> list[Spot]:
        """All values of some kinds."""
        found = []
        ranks = itertools.product(range(self.stages), range(self.width))
        for (stage, inner), in_pass, flow in itertools.product(
            ranks, PASSES, range(self.micro_batches)
        ):
            for number in range(self.exchanges):
                found += [
                    Spot(kind, stage, inner, in_pass, flow, number)
                    for kind in ("given", "added", "made")
                ]
            found.append(Spot("left", stage, inner, in_pass, flow))
        found += [
            Spot("weights", stage, inner, Pass.WEIGHT, None)
            for stage, inner in itertools.product(range(self.stages), range(self.width))
        ]
        return [spot for spot in found if spot.what in kinds]

    def compute(self, is_wrong: Callable[[Spot], bool]) -> Telling:
        """What a chain tells of a type, some of whose values come out wrong."""

        def value(spot: Spot, *inputs: object) -> str:
            right = f"{hash((spot, inputs))}"
            return f"wrong {right}" if is_wrong(spot) else right

        ranks = [*itertools.product(range(self.stages), range(self.width))]
        exchanged: dict[tuple[int, int], list[Exchanged]] = {rank: [] for rank in ranks}
        left: dict[tuple[int, int], dict[Pass, list[str]]] = {
            rank: {in_pass: [] for in_pass in PASSES} for rank in ranks
        }
        seen: dict[tuple[int, int], list[str]] = {rank: [] for rank in ranks}
        for flow in range(self.micro_batches):
            state = dict.fromkeys(range(self.width), f"sample {flow}")
            for in_pass, order in (
                (Pass.FORWARD, range(self.stages)),
                (Pass.BACKWARD, reversed(range(self.stages))),
            ):
                for stage in order:
                    told: dict[int, tuple[list[str], list[str]]] = {
                        inner: ([], []) for inner in range(self.width)
                    }
                    for number in range(self.exchanges):
                        at = {"in_pass": in_pass, "micro_batch": flow, "exchange": number}
                        given = {
                            inner: value(Spot("given", stage, inner, **at), state[inner])
                            for inner in state
                        }
                        parts = tuple(given.values())
                        sums = [value(Spot("added", stage, inner, **at), parts) for inner in state]
                        for inner in state:
                            # A part of a sum goes round: who adds to it last but one is another.
                            apart = self.scatters and number % 2 == 0
                            made = f"{hash(sums[inner - 1] if apart else tuple(sums))}"
                            if is_wrong(Spot("made", stage, inner, **at)):
                                made = f"wrong {made}"
                            told[inner][0].append(given[inner])
                            told[inner][1].append(made)
                            state[inner] = f"{hash((state[inner], made))}"
                    for inner in range(self.width):
                        rank = stage, inner
                        exchanged[rank].append(
                            Exchanged(
                                in_pass=in_pass,
                                micro_batch=flow,
                                given=tuple(told[inner][0]),
                                made=tuple(told[inner][1]),
                            )
                        )
                        out = value(Spot("left", stage, inner, in_pass, flow), state[inner])
                        is_sent = stage < self.stages - 1 if in_pass is Pass.FORWARD else stage > 0
                        if is_sent:
                            left[rank][in_pass].append(out)
                        seen[rank].append(out)
                        state[inner] = out
        return tuple(
            Account(
                forward=tuple(left[rank][Pass.FORWARD]),
                backward=tuple(left[rank][Pass.BACKWARD]),
                weights=(value(Spot("weights", *rank, Pass.WEIGHT, None), tuple(seen[rank])),),
                exchanged=tuple(exchanged[rank]),
            )
            for rank in ranks
        )


def slot(chain: int, position: int) -> Slot:
    return Slot(pod=PodUid(f"{'abc'[chain]}{position}"), index=0)


def hear(asked: int, chain: int, shape: Chains, telling: Telling) -> Told:
    cells = tuple(slot(chain, position) for position in range(shape.stages * shape.width))
    return Told(quorum=1, attempt=asked, replica=chain, cells=cells, telling=telling)


RIGHT = {shape: shape.compute(lambda _: False) for shape in (Chains(), Chains(scatters=True))}


def named_in_a_round(shape: Chains, bad: int, is_wrong: Callable[[Spot], bool]) -> list[object]:
    """Run a round in which each of three chains is witnessed once; return what is told."""
    wrong, right = shape.compute(is_wrong), RIGHT[shape]
    found: list[object] = []
    for step in range(3):
        turn = turn_of(step, 1, 3)
        assert turn is not None
        tellings = {chain: wrong if chain == bad else right for chain in range(3)}
        heard = [hear(0, chain, shape, tellings[chain]) for chain in turn]
        ruling = rule(heard, shape.width)
        assert not ruling.deviations
        if ruling.agreed is None:
            heard += [hear(1, chain, shape, tellings[chain]) for chain in range(3)]
            ruling = rule(heard, shape.width)
        assert ruling.agreed == right
        found += [(d.slot, d.beside, d.verdict) for d in ruling.deviations]
    return found


@pytest.mark.parametrize("bad", range(3))
def test_a_rank_that_is_always_wrong_is_named_within_a_round_and_no_other_ever(bad: int) -> None:
    shape = Chains()
    for spot in shape.spots("given", "made", "left", "weights"):
        found = named_in_a_round(shape, bad, lambda each, spot=spot: each == spot)
        device = slot(bad, spot.stage * shape.width + spot.inner)
        assert set(found) == {(device, (), Verdict.DETERMINISTIC)}, spot


def test_of_a_sum_that_is_wrong_on_all_ranks_the_cell_is_suspected_and_nobody_is_named() -> None:
    shape = Chains()
    for spot in shape.spots("added"):
        found = named_in_a_round(shape, 1, lambda each, spot=spot: each == spot)
        first = spot.stage * shape.width
        cell = [slot(1, first + inner) for inner in range(shape.width)]
        expected = {(one, tuple(o for o in cell if o != one), Verdict.WIRE) for one in cell}
        assert set(found) == expected, spot


def test_who_gets_a_wrong_part_of_a_sum_is_not_blamed_for_what_others_have_added() -> None:
    shape = Chains(scatters=True)
    for spot in shape.spots("added"):
        if spot.exchange != 0:
            continue
        found = named_in_a_round(shape, 2, lambda each, spot=spot: each == spot)
        assert {verdict for _, _, verdict in found} == {Verdict.WIRE}, spot  # type: ignore[misc]


def test_collectives_of_which_a_rank_does_not_tell_leave_the_whole_cell_suspected() -> None:
    shape = Chains()
    spot = shape.spots("given")[0]
    tellings = [
        tuple(replace(account, exchanged=(), is_partial=True) for account in telling)
        for telling in (shape.compute(lambda each: each == spot), RIGHT[shape])
    ]
    heard = [hear(asked, chain, shape, tellings[chain > 0]) for asked in (0, 1) for chain in (0, 1)]
    ruling = rule([*heard, hear(1, 2, shape, tellings[1])], shape.width)
    assert {d.verdict for d in ruling.deviations} == {Verdict.WIRE}
    assert {d.slot for d in ruling.deviations} == {slot(0, 0), slot(0, 1)}
    assert "which compute together" in ruling.reason


def test_one_that_was_wrong_once_is_transient_and_the_place_is_told() -> None:
    shape = Chains()
    spot = Spot("given", 1, 1, Pass.BACKWARD, 1, 1)
    wrong, right = shape.compute(lambda each: each == spot), RIGHT[shape]
    heard = [hear(0, 0, shape, wrong), hear(0, 1, shape, right)]
    heard += [hear(1, chain, shape, right) for chain in range(3)]
    (deviation,) = rule(heard, shape.width).deviations
    assert (deviation.slot, deviation.verdict) == (slot(0, 3), Verdict.TRANSIENT)
    assert deviation.difference == first_difference(wrong, right, shape.width)
    assert deviation.difference.describe() == (
        "what went into collective 1 of the backward pass of micro-batch 1"
    )


def test_cells_that_share_a_device_have_one_voice_on_what_they_add_up() -> None:
    """Of two chains that differ, one rank of a cell is replaced: the cell is no third voice."""
    shape = Chains(stages=1)
    spot = shape.spots("added")[0]
    wrong, right = shape.compute(lambda each: each == spot), shape.compute(lambda _: False)
    first = [hear(0, 0, shape, wrong), hear(0, 1, shape, right)]
    mixed = replace(hear(1, 0, shape, wrong), cells=(slot(0, 0), slot(2, 1)))
    ruling = rule([*first, mixed, hear(1, 1, shape, right)], shape.width)
    assert ruling.agreed is None
    gives_in = replace(mixed, telling=right)
    ruling = rule([*first, gives_in, hear(1, 1, shape, right)], shape.width)
    assert ruling.agreed == right
    assert {d.slot for d in ruling.deviations} == {slot(0, 0), slot(0, 1)}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_one_rank_does_and_whoever_is_asked_nobody_else_is_named(seed: int) -> None:
    rng = random.Random(seed)
    shape = rng.choice([*RIGHT])
    spot = rng.choice(shape.spots("given", "left", "weights"))
    wrong, right = shape.compute(lambda each: each == spot), RIGHT[shape]
    bad = slot(rng.randrange(3), spot.stage * shape.width + spot.inner)
    heard: list[Told] = []
    for asked in range(8):
        for _ in range(rng.randint(1, 3)):
            # Cells are put together of any chains' devices.
            cells = tuple(
                slot(rng.randrange(3), position) for position in range(shape.stages * shape.width)
            )
            one = hear(asked, 0, shape, wrong if bad in cells else right)
            heard.append(replace(one, replica=len(heard), cells=cells))
        named = {d.slot for d in rule(heard, shape.width).deviations}
        assert named <= {bad}
