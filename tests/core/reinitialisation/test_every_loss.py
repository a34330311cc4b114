"""Every set of lost stages of every pipeline: what the ladder answers, and what a settle makes."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from tests.core.plans import make_plan

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.shape import Cut, Order
from mainstay_core.coordinator.ladder import Decision, Row, Situation, StageHolders, decide
from mainstay_core.job.stages import cut_blocks, tell_unlike_twins
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.settle import Settlement, StateAction, settle
from mainstay_core.reinitialisation.guards import guarded_blocks
from mainstay_core.reinitialisation.sources import Left, Policy
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import BlockOutline, ForkOrder, Outline, SourceKind
from mainstay_core.wire.votes import Commit, GuardedDigest, SettleReport

VERSION = 8
EXACT, AVERAGED, TWIN = SourceKind.GUARD, SourceKind.NEIGHBOUR, SourceKind.TWIN

Share = tuple[SourceKind, int, str, float]
"""(kind, stage, block, weight) of a source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A model in stages, and the order in which its micro-batches pass them."""

    order: Order
    stages: int
    cut: Cut
    layers: int
    embedding: float = 0.0
    """Its cost, where a layer's is 1."""
    head: float = 0.0

    @property
    def kinds(self) -> list[str]:
        return ["embedding", *("layer" for _ in range(self.layers)), "head"]

    @property
    def cuts(self) -> list[range]:
        costs = [self.embedding, *(1.0 for _ in range(self.layers)), self.head]
        return cut_blocks(costs, self.stages, self.cut)

    @property
    def outline(self) -> Outline:
        named = [
            BlockOutline(name=kind if kind != "layer" else f"layers.{i - 1}", kind=kind)
            for i, kind in enumerate(self.kinds)
        ]
        return tuple(tuple(named[i] for i in cut) for cut in self.cuts)

    def __str__(self) -> str:
        sizes = "+".join(str(len([b for b in s if b.kind == "layer"])) for s in self.outline)
        return f"{self.order}-{self.cut}-{sizes}"


IN_ORDER = [
    *(Pipeline(order=Order.IN_ORDER, stages=n, cut=Cut.EQUAL, layers=n + 1) for n in (3, 4, 5, 7)),
    *(
        Pipeline(
            order=Order.IN_ORDER,
            stages=n,
            cut=Cut.BALANCED,
            layers=n + 2,
            embedding=0.25,
            head=0.5,
        )
        for n in (3, 4, 5, 7)
    ),
]
SWAPPED = [
    Pipeline(order=Order.SWAPPED, stages=n, cut=cut, layers=layers)
    for n, layers, cut in (
        # Of three stages all are twins of one another: they are alike.
        *((3, 6, cut) for cut in Cut),
        *((4, 6, cut) for cut in Cut),
        (5, 6, Cut.EQUAL),
        (5, 7, Cut.BALANCED),
        *((7, 9, cut) for cut in Cut),
    )
]
PIPELINES = [*IN_ORDER, *SWAPPED]


def losses(stages: int) -> Iterator[frozenset[int]]:
    for number in range(1, stages + 1):
        yield from map(frozenset, itertools.combinations(range(stages), number))


def guards_left(outline: Outline, order: Order, lost: Collection[int]) -> Left:
    """Each end's twin guards what the end alone has, as long as it lives."""
    if order is Order.IN_ORDER:
        return Left()
    last = len(outline) - 1
    twins = [(0, 1), (last, last - 1)]
    living = [(end, twin) for end, twin in twins if twin not in lost]
    return Left(
        guards={(name, 0): twin for end, twin in living for name in guarded_blocks(outline, end)}
    )


def answer(
    outline: Outline, order: Order, lost: Collection[int], durable: int | None = 0
) -> Decision:
    """What the ladder says of a job of one replica at ``VERSION``."""
    return decide(
        Situation(
            stages=tuple(
                StageHolders(stage=i, holders=int(i not in lost), living=int(i not in lost))
                for i in range(len(outline))
            ),
            step=VERSION,
            free_slots=len(lost),
            lost=len(lost),
            durable_step=durable,
            allow_approximate=True,
            approximate_after_lost_steps=2,
            outline=outline,
            reinitialisation=Policy(order=order),
            left=guards_left(outline, order, lost),
        )
    )


def why_not(outline: Outline, order: Order, lost: Collection[int]) -> str:
    """The first lost stage without a source, in the ladder's words; empty if all have some."""
    last = len(outline) - 1
    if len(lost) == len(outline):
        return "no stage has a living cell to initialise the others from"
    for stage in sorted(lost):
        is_end = stage in (0, last)
        if is_end and order is Order.IN_ORDER:
            return f"stage {stage} is an end of the pipeline: it has no two neighbours"
        beside = [s for s in (stage - 1, stage + 1) if 0 <= s <= last]
        gone = [s for s in beside if s in lost]
        if not gone:
            continue
        what = "its twin" if is_end else "its neighbour"
        first = outline[stage][0].name
        lacks = f", and no guard of {first} is left" if is_end and first in guarded(outline) else ""
        return f"stage {stage} and {what} stage {gone[0]} are lost together{lacks}"
    return ""


def guarded(outline: Outline) -> set[str]:
    return {name for end in (0, len(outline) - 1) for name in guarded_blocks(outline, end)}


def order_of(stages: int, lost: Collection[int]) -> Plan:
    """The plan of one replica that orders to make the lost stages anew."""
    lives = [f"s{i}.{2 if i in lost else 1}" for i in range(stages)]
    stayed = {life: 1 for i, life in enumerate(lives) if i not in lost}
    joining = [lives[i] for i in sorted(lost)]
    plan = make_plan({0: lives}, quorum=2, since=stayed, joining=joining, lanes=1)
    return replace(plan, lineage=1, fork=ForkOrder(positions=tuple(sorted(lost)), since=0))


def settled(
    pipeline: Pipeline, outline: Outline, lost: Collection[int], norms_sq: dict[str, float]
) -> Settlement:
    plan, last = order_of(len(outline), lost), len(outline) - 1
    commit = Commit(
        step=VERSION - 1,
        norm=1,
        scale=1,
        tokens=1,
        loss=1,
        data="0" * 32,
        norms_sq=tuple(norms_sq.values()),
    )
    guards_of = {
        twin: [end for end, t in ((0, 1), (last, last - 1)) if t == twin] for twin in (1, last - 1)
    }
    swapped = pipeline.order is Order.SWAPPED
    told = [
        SettleReport(index=i, valid=False, heal_address="x")
        if i in lost
        else SettleReport(
            index=i,
            valid=True,
            version=VERSION,
            lineage=1,
            settled=1,
            certified_in="q1-n",
            commit=commit,
            chain="before",
            state=f"state-{i}",
            guarded=tuple(
                GuardedDigest(stage=end, masters="right", rest="")
                for end in (guards_of.get(i, []) if swapped else [])
            ),
        )
        for i in range(len(outline))
    ]
    rules = ForkRules(
        outline=outline,
        policy=Policy(order=pipeline.order),
        after_lost_steps=2,
        guards=1 if swapped else 0,
    )
    return settle(plan, 1, told, fork_rules=rules)


def stands_for(index: int, num_lost: int, num_other: int) -> int:
    """The block of another stage in whose part of it the middle of a lost one lies."""
    middle = Fraction(2 * index + 1, 2 * num_lost)
    (found,) = [
        j for j in range(num_other) if Fraction(j, num_other) <= middle < Fraction(j + 1, num_other)
    ]
    return found


def formula(outline: Outline, stage: int, norms_sq: dict[str, float]) -> dict[str, list[Share]]:
    """The sources of a lost stage's blocks as the paper says, sections 4.2 and 4.3."""
    last = len(outline) - 1
    is_end = stage in (0, last)
    beside = [1] if stage == 0 else [last - 1] if stage == last else [stage - 1, stage + 1]
    layers = [[b.name for b in s if b.kind == "layer"] for s in outline]
    weights = [sum(norms_sq[name] for name in layers[s]) for s in beside]
    found: dict[str, list[Share]] = {}
    for block in outline[stage]:
        if block.kind != "layer":
            found[block.name] = [(EXACT, beside[0], block.name, 1.0)]
            continue
        index = layers[stage].index(block.name)
        found[block.name] = [
            (
                TWIN if is_end else AVERAGED,
                s,
                layers[s][stands_for(index, len(layers[stage]), len(layers[s]))],
                pytest.approx(weight / sum(weights)),
            )
            for s, weight in zip(beside, weights, strict=True)
        ]
    return found


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_whatever_stages_are_lost_they_are_made_anew_or_the_ladder_says_why_not(
    pipeline: Pipeline,
) -> None:
    outline, rng = pipeline.outline, random.Random(15)
    norms_sq = {b.name: rng.uniform(0.1, 9) for stage in outline for b in stage}
    made = 0
    for lost in losses(pipeline.stages):
        decision = answer(outline, pipeline.order, lost)
        reason = why_not(outline, pipeline.order, lost)
        assert (decision.row is Row.APPROXIMATE) == (not reason), (sorted(lost), decision)
        if reason:
            check_next_answers(outline, pipeline.order, lost, reason)
            check_nothing_is_made(pipeline, outline, lost, norms_sq)
            continue
        made += 1
        outcome = settled(pipeline, outline, lost, norms_sq)
        assert outcome.version == VERSION, "no step is lost"
        assert [a is StateAction.MAKE for a in outcome.actions] == [
            i in lost for i in range(pipeline.stages)
        ]
        assert outcome.fork is not None
        found = {
            place.stage: {
                b.block: [(s.kind, s.stage, s.block, s.weight) for s in b.sources]
                for b in place.blocks
            }
            for place in outcome.fork.made.positions
        }
        assert found == {stage: formula(outline, stage, norms_sq) for stage in sorted(lost)}
    assert made == num_apart(pipeline)


def num_apart(pipeline: Pipeline) -> int:
    """Sets of stages none of which lie side by side: in order of inner stages, else of all."""
    inner = pipeline.stages - (2 if pipeline.order is Order.IN_ORDER else 0)
    before, now = 1, 2
    for _ in range(inner - 1):
        before, now = now, before + now
    return now - 1


def check_next_answers(outline: Outline, order: Order, lost: Collection[int], reason: str) -> None:
    """What is left goes on from the seed, or waits if even that is gone, and says why."""
    for durable, row in ((0, Row.RESTART), (None, Row.WAIT)):
        decision = answer(outline, order, lost, durable)
        assert (decision.row, decision.exact) == (row, True), sorted(lost)
        assert f"row 5 (approximate): {reason}" in decision.why_not
    assert "for want of anything newer" in answer(outline, order, lost).reason


def check_nothing_is_made(
    pipeline: Pipeline, outline: Outline, lost: Collection[int], norms_sq: dict[str, float]
) -> None:
    """Were it ordered all the same, the order is refused as impossible, or all go back."""
    outcome = None
    with contextlib.suppress(LocalProtocolError):
        outcome = settled(pipeline, outline, lost, norms_sq)
    if outcome is not None:
        assert outcome.fork is None
        assert set(outcome.actions) == {StateAction.LOAD}


def test_the_table_has_equal_and_unequal_cuts_whose_twins_are_alike() -> None:
    for pipeline in PIPELINES:
        sizes = [sum(b.kind == "layer" for b in stage) for stage in pipeline.outline]
        is_swapped = pipeline.order is Order.SWAPPED
        alike = is_swapped and pipeline.stages == 3
        assert (len(set(sizes)) == 1) == alike, str(pipeline)
        if is_swapped:
            assert tell_unlike_twins(pipeline.kinds, pipeline.cuts) == ""


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("order", list(Order))
def test_a_kind_without_a_neighbour_has_the_ladders_next_answer(order: Order, stage: int) -> None:
    """And so has a set of stages with one that has it, though the others could be made."""
    pipeline = Pipeline(order=order, stages=5, cut=Cut.EQUAL, layers=5)
    odd = (*pipeline.outline[stage], BlockOutline(name="odd", kind="odd"))
    outline = tuple(odd if i == stage else s for i, s in enumerate(pipeline.outline))
    reason = f"stage {stage}: stage {stage - 1} has no block like odd"

    check_next_answers(outline, order, {stage}, reason)
    if stage != 2:
        check_next_answers(outline, order, {1, 3}, reason)


@pytest.mark.parametrize("layers", [5, 6, 9])
def test_a_stage_beside_one_without_a_layer_has_the_ladders_next_answer(layers: int) -> None:
    """The head is so dear that it is a stage by itself."""
    pipeline = Pipeline(
        order=Order.IN_ORDER, stages=4, cut=Cut.BALANCED, layers=layers, head=float(layers)
    )
    outline = pipeline.outline
    assert [block.name for block in outline[3]] == ["head"]
    first = outline[2][0].name

    check_next_answers(outline, Order.IN_ORDER, {2}, f"stage 2: stage 3 has no block like {first}")
    assert answer(outline, Order.IN_ORDER, {1}).row is Row.APPROXIMATE
