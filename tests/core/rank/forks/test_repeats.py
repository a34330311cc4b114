"""Forks of another run that are made again: when they are due, by whom, and what they come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan
from tests.core.rank.forks.pipelines import (
    HEAL,
    LOAD,
    MAKE,
    ROLL,
    STAY,
    adopted,
    commit,
    forked_at_8,
    order,
    pipeline,
    rank,
    reports,
    settled,
)

from mainstay_core.base.ids import QuorumId
from mainstay_core.rank import machine
from mainstay_core.rank.events import Apply, ReportsGathered, SendFact, VotesGathered
from mainstay_core.rank.forks import repeats
from mainstay_core.rank.reports import entry_of
from mainstay_core.rank.settle import settle
from mainstay_core.wire.facts import Failed, Parked, Phase
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import (
    Fork,
    ForkOrder,
    ForkOutcome,
    PlaceDigest,
    digest_of_fork,
)
from mainstay_core.wire.votes import TypeStat, Vote


def again(plan: Plan, fork: Fork) -> Plan:
    """A plan that orders to make a fork of another run, though members hold all."""
    stages = tuple(place.stage for place in fork.made.positions)
    return replace(plan, lineage=1, fork=ForkOrder(positions=stages, since=0, repeats=fork))


def test_a_fork_of_another_run_is_made_of_what_members_hold_at_its_version() -> None:
    """Nobody is lost: the state that its position has is given up, and no rules are needed."""
    fork = forked_at_8()
    plan = again(pipeline(2), fork)
    behind = {"version": 7, "mark": "q1-n", "certified_in": "q0-n"}

    outcome = settle(plan, 1, reports(plan, 8, b=behind, c=behind))

    assert outcome.actions == (STAY, MAKE, ROLL, STAY, STAY)
    assert outcome.fork == fork
    assert outcome.history == (fork,)
    lost = order(pipeline(2, 1), 1)
    assert outcome.commit_chain == settled(lost, reports(lost, 8, 1)).commit_chain
    assert not any(outcome.step.kept.values())


def test_at_another_version_nothing_is_made_again() -> None:
    plan = again(pipeline(2), forked_at_8())

    outcome = settle(plan, 1, reports(plan, 7))

    assert set(outcome.actions) == {STAY}
    assert (outcome.fork, outcome.history) == (None, ())


def test_what_is_lost_before_the_version_is_loaded_and_not_made() -> None:
    plan = again(pipeline(2, 1), forked_at_8())

    assert set(settle(plan, 1, reports(plan, 7, 1)).actions) == {LOAD}


def test_a_fork_that_some_have_made_again_is_not_made_twice() -> None:
    """Others noted it as they settled. Who was interrupted as it copied makes it as before."""
    fork = forked_at_8()
    plan = again(pipeline(3), fork)
    noted = {life: {"history": (fork,), "chain": "forked"} for life in "abcde"}

    assert set(settle(plan, 1, reports(plan, 8, **noted)).actions) == {STAY}
    outcome = settle(plan, 1, reports(plan, 8, 1, **noted))
    assert outcome.actions == (STAY, MAKE, STAY, STAY, STAY)
    assert (outcome.history, outcome.commit_chain) == ((fork,), "forked")


@pytest.mark.parametrize("behind", [False, True])
def test_who_missed_a_fork_that_others_made_again_makes_it_and_does_not_keep_its_state(
    behind: bool,
) -> None:
    fork = forked_at_8()
    plan = again(pipeline(3), fork)
    noted: dict[str, Any] = {life: {"history": (fork,), "chain": "forked"} for life in "acde"}
    if behind:
        noted["b"] = {"version": 7, "mark": "q1-n", "certified_in": "q0-n"}

    outcome = settle(plan, 1, reports(plan, 8, **noted))

    assert outcome.actions == (STAY, MAKE, STAY, STAY, STAY)
    assert (outcome.fork, outcome.history, outcome.commit_chain) == (fork, (fork,), "forked")


def test_a_copy_of_who_missed_a_fork_heals_from_one_that_made_it() -> None:
    fork = forked_at_8()
    lives = {0: [f"{x}.1" for x in "abcde"], 1: [f"{x}.1" for x in "fghij"]}
    since = {f"{x}.1": 1 for x in "abcdefghij"}
    plan = again(make_plan(lives, quorum=3, since=since, lanes=2), fork)
    noted = {life: {"history": (fork,), "chain": "forked"} for life in "abcdefhij"}

    outcome = settle(plan, 1, reports(plan, 8, **noted))

    missed = next(m.index for m in plan.members if str(m.incarnation) == "g.1")
    made = next(m.index for m in plan.members if str(m.incarnation) == "b.1")
    assert outcome.actions[missed] is HEAL
    assert outcome.sources[missed] == (made,)
    assert MAKE not in outcome.actions


def test_a_fork_is_due_at_its_version_once_those_before_it_are_made() -> None:
    first = forked_at_8()
    second = replace(first, chain="then")
    third = replace(first, version=9)
    forks = (first, second, third)

    assert repeats.find_due(forks, (), 7) is None
    assert repeats.find_due(forks, (), 8) == 0
    assert repeats.find_due(forks, (first,), 8) == 1
    assert repeats.find_due(forks, (first, second), 8) is None
    assert repeats.find_due(forks, (first, second), 9) == 2
    assert repeats.find_due(forks, forks, 9) is None
    assert repeats.find_due(forks, (second,), 8) is None


@pytest.mark.parametrize(("chain", "told"), [("same", Parked), ("another", Failed)])
def test_a_rank_waits_at_the_version_of_a_fork_that_follows_the_same_commits(
    chain: str, told: type
) -> None:
    """With another model or other data the chains of commits differ: the job fails and says so."""
    plan = pipeline(2)
    state = rank("a.1", repeats=(replace(forked_at_8(), chain="same"),), commit_chain=chain)
    all_told = tuple(replace(report, chain=chain) for report in reports(plan, 8))

    after = machine.step(adopted(state, plan), ReportsGathered(all_told))

    facts = [action.fact for action in after.actions if isinstance(action, SendFact)]
    assert isinstance(facts[-1], told)
    if isinstance(facts[-1], Parked):
        assert facts[-1].repeats == 0
    else:
        assert "of another model, data or device" in facts[-1].evidence


def failures(after: Any) -> list[str]:
    told = (action.fact for action in after.actions if isinstance(action, SendFact))
    return [fact.evidence for fact in told if isinstance(fact, Failed)]


def with_norms(fork: Fork, *norms_sq: float, weights: tuple[float, float] = (0.25, 0.75)) -> Fork:
    """A fork whose record says that its first block was weighed by these norms."""
    (place,) = fork.made.positions
    (block,) = place.blocks
    sources = tuple(
        replace(source, weight=weight)
        for source, weight in zip(block.sources, weights, strict=True)
    )
    block = replace(block, norms_sq=norms_sq, sources=sources)
    made = replace(fork.made, positions=(replace(place, blocks=(block,)),))
    return replace(fork, made=made)


@pytest.mark.parametrize(
    ("norms_sq", "weights", "said"),
    [
        pytest.param((1.0, 3.0), (0.25, 0.75), "", id="the same"),
        pytest.param((), (0.5, 0.5), "", id="a report of an older release"),
        pytest.param(
            (1.0, 9.0),
            (0.1, 0.9),
            "by squared gradient norms of 1.0 and 9.0, and this run has 1.0 and 3.0",
            id="others",
        ),
        pytest.param(
            (1.0, 3.0),
            (0.5, 0.5),
            "takes 0.5 of stage 0 for layers.1, and its norms give 0.25",
            id="other weights",
        ),
    ],
)
def test_a_fork_that_was_weighed_by_other_norms_is_not_repeated(
    norms_sq: tuple[float, ...], weights: tuple[float, float], said: str
) -> None:
    plan = pipeline(2)
    fork = with_norms(replace(forked_at_8(), chain="same"), *norms_sq, weights=weights)
    state = rank("a.1", repeats=(fork,), commit_chain="same")
    told = tuple(replace(report, chain="same") for report in reports(plan, 8))

    after = machine.step(adopted(state, plan), ReportsGathered(told))

    found = failures(after)
    assert bool(found) == bool(said)
    assert not said or said in found[0]
    assert after.state.phase is (Phase.FAILED if said else Phase.PARKED)


def outcome_of(*masters: str) -> ForkOutcome:
    """What came of a fork: the masters of stages 0, 1, 2."""
    states = tuple(PlaceDigest(stage=stage, masters=m) for stage, m in enumerate(masters))
    return ForkOutcome(quorum=QuorumId(id=9, nonce="f"), states=states)


@pytest.mark.parametrize(
    ("outcome", "version", "said"),
    [
        pytest.param(outcome_of("state-0", "state-1", "state-2"), 8, "", id="the same"),
        pytest.param(None, 8, "", id="not known"),
        pytest.param(outcome_of("state-0", "other", "state-2"), 9, "", id="a later step"),
        pytest.param(
            outcome_of("state-0", "other", "state-2"),
            8,
            "has stage 1 with the digest other after its fork at step 8, and this run state-1",
            id="another result",
        ),
        pytest.param(
            outcome_of("else", "state-1", "state-2"), 8, "has stage 0 with", id="another source"
        ),
    ],
)
def test_a_fork_that_is_repeated_has_the_digests_of_the_first_one(
    outcome: ForkOutcome | None, version: int, said: str
) -> None:
    """The votes on its first step tell them: no step is committed if they differ."""
    plan, fork = pipeline(2), forked_at_8()
    state = rank(
        "a.1",
        plan=plan,
        phase=Phase.VOTING,
        version=version,
        repeats=(fork,),
        outcomes=(outcome,),
        history=(fork,),
    )
    votes = tuple(
        Vote(
            step=version,
            attempt=0,
            ok=True,
            norms_sq=(1.0,),
            gradient=f"gradient-{index}",
            state=f"state-{index}",
            stats=(TypeStat(type=0, loss_sum=1.0, tokens=1, data="0" * 32),) if not index else (),
            newest_plan=2,
            newest_nonce="n",
        )
        for index in range(5)
    )

    after = machine.step(state, VotesGathered(votes))

    found = failures(after)
    assert bool(found) == bool(said)
    assert not said or said in found[0]
    assert any(isinstance(action, Apply) for action in after.actions) == (not said)


def test_the_ledger_has_the_masters_with_which_the_first_step_after_a_fork_began() -> None:
    fork = forked_at_8()
    state = rank("a.1", plan=pipeline(2), history=(fork,))
    told = {"gradient": "g", "masters": "m", "step_s": 1.0, "now_s": 1.0}

    entry = entry_of(state, commit(8), began="state-0", **told)

    assert entry.forked is not None
    assert (entry.forked.fork, entry.forked.masters) == (digest_of_fork(fork), "state-0")
    assert entry_of(state, commit(8), **told).forked is None, "it was replayed"
    assert entry_of(state, commit(9), began="state-0", **told).forked is None
    assert entry_of(state, commit(7), began="state-0", **told).forked is None
