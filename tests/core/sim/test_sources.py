"""Whether an ordered fork has sources, as a run is checked: what a settle finds, and by values."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tests.core.plans import make_plan

from mainstay_core.base.shape import Order
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.settle import StateAction, settle
from mainstay_core.reinitialisation.sources import Policy
from mainstay_core.sim import terms
from mainstay_core.sim.invariants.sources import Remains, have_sources
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import (
    BlockSource,
    Fork,
    ForkOrder,
    History,
    MadeBlock,
    MadePosition,
    OptimizerState,
    Reinitialisation,
    SourceKind,
)
from mainstay_core.wire.votes import Commit, SettleReport

STAGES, VERSION = 5, 8
COMMIT = Commit(step=VERSION - 1, norm=1, scale=1, tokens=1, loss=1, data="0" * 32)


def ordered(lost: tuple[int, ...], how: ApproximateConfig | None = None) -> Plan:
    """One replica; a fork of what is lost is ordered."""
    lives = [f"{name}.1" for name in "abcde"]
    plan = make_plan({0: lives}, quorum=2, since=dict.fromkeys(lives, 1), lanes=1)
    return replace(plan, lineage=1, fork=ForkOrder(positions=lost, since=0, how=how))


def rules(stale_steps: int, order: Order = Order.IN_ORDER) -> ForkRules:
    return ForkRules(
        outline=terms.outline(STAGES, order),
        policy=Policy(order=order, stale_steps=stale_steps),
        after_lost_steps=0,
    )


def made(stage: int, kind: SourceKind, version: int = VERSION) -> Fork:
    """A fork that made one stage of one block that it had itself, or a guard of it."""
    source = BlockSource(kind=kind, stage=stage, inner=0, block="block")
    place = MadePosition(
        stage=stage,
        inner=0,
        blocks=(MadeBlock(block="block", sources=(source,)),),
        optimizer_state=OptimizerState.ZERO,
    )
    again = Reinitialisation(positions=(place,), reason="")
    return Fork(version=version, chain="", made=again, lr_boost=1.0, boost_steps=None)


def remains(durable: int = 0, history: History = (), guarded: tuple[int, ...] = ()) -> Remains:
    return Remains(durable=durable, histories=[history], guarded=guarded)


def others(lost: tuple[int, ...]) -> set[int]:
    return set(range(STAGES)).difference(lost)


@pytest.mark.parametrize("forked_at", [None, 5])
@pytest.mark.parametrize("stale_steps", [1, 2, 3, 9])
@pytest.mark.parametrize("durable", [0, 5, 6])
def test_a_settle_goes_back_where_there_are_no_sources_and_nowhere_else(
    durable: int, stale_steps: int, forked_at: int | None
) -> None:
    history = () if forked_at is None else (made(2, SourceKind.NEIGHBOUR, forked_at),)
    answers = set()
    for number in range(1, STAGES):
        for lost in itertools.combinations(range(STAGES), number):
            plan = ordered(lost)
            told = [
                SettleReport(
                    index=index,
                    valid=index not in lost,
                    durable=durable,
                    version=VERSION,
                    lineage=1,
                    settled=1,
                    certified_in="q1-n",
                    commit=COMMIT,
                    state=f"state-{index}",
                    history=history,
                )
                for index in range(STAGES)
            ]
            outcome = settle(plan, 1, told, fork_rules=rules(stale_steps))
            answer = have_sources(
                plan, rules(stale_steps), others(lost), VERSION, remains(durable, history)
            )
            assert answer == (StateAction.LOAD not in outcome.actions), (lost, outcome.reason)
            answers.add(answer)
    young = 0 < VERSION - durable <= stale_steps and durable not in (0, forked_at)
    assert answers == ({True} if young else {True, False})


@pytest.mark.parametrize(("version", "is_young"), [(7, True), (8, False)])
def test_a_version_of_which_nobody_had_told_may_be_too_far_from_the_checkpoint(
    version: int, is_young: bool
) -> None:
    lost = (0, 1, 2, 3)
    found = have_sources(ordered(lost), rules(2), others(lost), version, remains(5))
    assert found == is_young


def test_the_rules_of_the_order_count() -> None:
    how = ApproximateConfig(stale_steps=3)
    assert have_sources(ordered((0,), how), rules(0), others((0,)), VERSION, remains(5))


def test_what_members_have_needs_no_source() -> None:
    assert have_sources(ordered((0,)), rules(0), range(STAGES), VERSION, remains())


@pytest.mark.parametrize("guarded", [(), (0,), (4,)])
def test_an_end_of_a_swapped_pipeline_needs_a_guard_or_its_own_checkpoint(
    guarded: tuple[int, ...],
) -> None:
    left, swapped = remains(5, guarded=guarded), Order.SWAPPED
    about = ordered((0,)), rules(2, swapped), others((0,)), VERSION, left
    assert have_sources(*about) == (0 in guarded)
    assert have_sources(about[0], rules(3, swapped), *about[2:])


@pytest.mark.parametrize("guarded", [(), (0,)])
def test_what_guards_gave_is_made_once_more_of_what_guards_have(guarded: tuple[int, ...]) -> None:
    """A checkpoint that is young enough is of another step."""
    left = remains(5, (made(0, SourceKind.GUARD),), guarded)
    about = ordered((0,)), rules(3, Order.SWAPPED), others((0,)), VERSION, left
    assert have_sources(*about) == bool(guarded)
