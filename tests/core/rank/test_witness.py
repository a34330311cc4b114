"""Which type a second chain computes, who joins when they differ, and what a rank makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.test_machine import computing, follow, vote

from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.rank import machine
from mainstay_core.rank.events import (
    Apply,
    Compute,
    DropPartials,
    Reduce,
    Reduced,
    TellDeviation,
    TodoDone,
    VotesGathered,
)
from mainstay_core.rank.machine import RankState
from mainstay_core.rank.step_plan import Compared, Supply, plan_step
from mainstay_core.rank.witness import compared_in
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.votes import Vote, WitnessAccount

PLAN = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]}, shards_per_lane=2)
RUNS = [Partial(lane=lane, first=2 * lane, last=2 * lane + 1) for lane in range(3)]
COPY = Partial(lane=0, first=0, last=0)


def told(weights: str, shard_type: int = 0) -> Vote:
    account = WitnessAccount(type=shard_type, weights=(weights,))
    return vote(witness=account, stats=())


def voting(life: str, *held: Partial, **fields: object) -> RankState:
    """A rank whose chain has computed step 0, in which replica 1 witnesses replica 0."""
    state = computing(PLAN, shards_per_lane=2, witness_every_steps=1, **fields)
    assert life == "a.1"
    return follow(state, TodoDone(held), Reduced()).state


@pytest.mark.parametrize("lanes", [3, 4, 5])
def test_in_a_round_each_replica_is_witnessed_by_each_other_in_types_of_its_own(
    lanes: int,
) -> None:
    plan = make_plan({r: [f"{'abcde'[r]}.1"] for r in range(lanes)}, shards_per_lane=2)
    pairs: Counter[tuple[int, ...]] = Counter()
    for step in range(lanes * (lanes - 1)):
        compared = compared_in(plan, step, 1, 2)
        assert compared is not None
        assert plan.suppliers[compared.type] == compared.replicas[0]
        assert compared.type % 2 == 0, "no run begins with a witness's copy"
        pairs[compared.replicas] += 1
    assert len(pairs) == lanes * (lanes - 1)
    assert set(pairs.values()) == {1}


def test_a_witness_computes_the_type_last_and_its_copy_does_not_count() -> None:
    compared = Compared(type=0, replicas=(0, 1))
    step = plan_step(PLAN, 2, compared=compared)
    assert step.todo == {0: (0, 1), 1: (2, 3, 0), 2: (4, 5)}
    assert step.compared == compared
    assert step.table == plan_step(PLAN, 2).table
    assert step.holdings == plan_step(PLAN, 2).holdings


def test_another_chain_can_supply_what_is_compared() -> None:
    step = plan_step(PLAN, 2, compared=Compared(type=0, replicas=(2, 0, 1)))
    assert step.todo == {0: (1, 0), 1: (2, 3, 0), 2: (4, 5, 0)}
    assert Supply(partial=COPY, index=2) in step.table[0]


def test_nobody_witnesses_a_type_that_is_held_already() -> None:
    held = {0: (RUNS[0],)}
    step = plan_step(PLAN, 2, held, compared=Compared(type=0, replicas=(0, 1)))
    assert step.compared is None
    assert step.todo == {0: (), 1: (2, 3), 2: (4, 5)}


def witness_of(plan: Plan = PLAN) -> RankState:
    """The state of replica 1's rank, which computes type 0 behind its own."""
    state = computing(plan, shards_per_lane=2, witness_every_steps=1)
    return replace(state, index=1)


def test_a_witness_drops_its_copy_before_the_reduction() -> None:
    done = machine.step(witness_of(), TodoDone((COPY, RUNS[1])))
    assert done.actions[0] == DropPartials((COPY,))
    assert isinstance(done.actions[1], Reduce)
    assert done.state.held == (RUNS[1],)


def test_a_step_in_which_two_chains_agree_is_committed() -> None:
    outcome = machine.step(
        voting("a.1", RUNS[0]), VotesGathered((told("same"), told("same"), vote(stats=())))
    )
    assert "differently" not in outcome.reason


def test_a_disagreement_refuses_the_step_and_a_third_chain_computes_the_type() -> None:
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))

    outcome = machine.step(voting("a.1", RUNS[0]), differ)

    assert "replicas 0, 1 have computed a type differently" in outcome.reason
    assert outcome.actions == (DropPartials((RUNS[0],)), Compute((1, 0)))
    step = outcome.state.step_plan
    assert step is not None
    assert step.compared == Compared(type=0, replicas=(2, 0, 1))


@pytest.mark.parametrize(
    ("second", "verdict"), [("y", Verdict.TRANSIENT), ("x", Verdict.DETERMINISTIC)]
)
def test_the_device_that_most_contradict_tells_of_itself(second: str, verdict: Verdict) -> None:
    single = Partial(lane=0, first=1, last=1)
    tokens = vote().stats
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    agree = VotesGathered(tuple(replace(told(word), stats=tokens) for word in (second, "y", "y")))

    outcome = follow(voting("a.1", RUNS[0]), differ, TodoDone((COPY, single)), Reduced(), agree)

    (tell,) = [a for a in outcome.actions if isinstance(a, TellDeviation)]
    assert (tell.step, tell.shard_type, tell.deviation.verdict) == (0, 0, verdict)
    assert isinstance(outcome.actions[-1], Apply)
    other = replace(outcome.state, phase=machine.Phase.VOTING, index=1)
    assert not [a for a in machine.step(other, agree).actions if isinstance(a, TellDeviation)]


def test_a_third_chain_that_differs_too_leaves_its_place_to_one_that_most_agree_with() -> None:
    single = Partial(lane=0, first=1, last=1)
    differ = VotesGathered((told("x"), told("y"), vote(stats=())))
    alone = VotesGathered((told("y"), told("y"), told("z")))

    outcome = follow(voting("a.1", RUNS[0]), differ, TodoDone((COPY, single)), Reduced(), alone)

    step = outcome.state.step_plan
    assert step is not None
    assert step.compared == Compared(type=0, replicas=(0, 2, 1))
    assert outcome.actions[-1] == Compute((0,))
