"""A fork in a job with snapshots: who asks, and what stores are worth after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.forks.pipelines import adopted, commit, order, pipeline, rank, reports

from mainstay_core.base.ids import PodUid
from mainstay_core.job.config import LogKind
from mainstay_core.rank import machine
from mainstay_core.rank.events import LoadState, ReportsGathered, SendFact
from mainstay_core.rank.reach import newest
from mainstay_core.rank.replays.replaying import Stores
from mainstay_core.rank.settle import StateAction, settle
from mainstay_core.wire.facts import Parked, Phase
from mainstay_core.wire.plan import Method, Plan
from mainstay_core.wire.segments import Run, StoreReport, UnitHeld
from mainstay_core.wire.votes import CommitRecord, SettleReport, seal_record

MAKE, LOAD, REPLAY = StateAction.MAKE, StateAction.LOAD, StateAction.REPLAY


def store(plan: Plan, version: int = 8, forked: str = "") -> StoreReport:
    """A store that has all of every position since two versions before."""
    first = version - 2
    units = tuple(
        UnitHeld(
            position=position,
            unit=0,
            unit_name="layer",
            num_units=1,
            states=(first,),
            gradients=(Run(first=first, last=version - 1),),
        )
        for position in range(len(plan.positions))
    )
    records = tuple(
        seal_record(
            CommitRecord(
                lineage=plan.lineage,
                commit=commit(step),
                certified_in="q1-n",
                chain="chain",
                gradients=("g",) * len(plan.positions),
                states=("s",) * len(plan.positions),
                forks=forked,
            )
        )
        for step in range(first, version)
    )
    return StoreReport(
        pod=PodUid("a"), address="a:1", lineage=plan.lineage, units=units, records=records
    )


@pytest.mark.parametrize("asks_first", [False, True])
def test_who_is_told_to_asks_before_all_go_back_and_keeps_its_state(asks_first: bool) -> None:
    plan = replace(pipeline(2, 1), method=Method.REPLAY, asks_first=asks_first)
    state = adopted(rank("a.1"), plan)
    done = machine.step(state, ReportsGathered(reports(plan, 8, 1), ()))

    told = [a.fact for a in done.actions if isinstance(a, SendFact)]
    loads = any(isinstance(action, LoadState) for action in done.actions)
    asked = any(isinstance(fact, Parked) and fact.unreached for fact in told)
    assert (loads, asked) == (not asks_first, asks_first)
    if asks_first:
        assert (done.state.phase, done.state.valid, done.state.version) == (Phase.PARKED, True, 8)
        fork = order(replace(pipeline(3, 1), method=Method.APPROXIMATE), 1)
        assert adopted(done.state, fork).valid, "what it has counts in the fork"


def test_where_stores_bring_a_stage_back_nobody_asks() -> None:
    plan = replace(pipeline(2, 1), method=Method.REPLAY, asks_first=True)
    told = reports(plan, 8, 1)
    outcome = settle(plan, 1, told, [store(plan)])
    assert (outcome.version, outcome.actions[1]) == (8, REPLAY)


def test_a_replay_knows_the_forks_of_what_it_makes() -> None:
    plan = order(pipeline(2, 1), 1)
    fork = settle(plan, 1, reports(plan, 8, 1), fork_rules=rank("a.1").fork_rules).fork
    assert fork is not None
    after = replace(pipeline(3, 1), lineage=1, method=Method.REPLAY)
    noted = {life: {"history": (fork,)} for life in "acde"}
    outcome = settle(after, 1, reports(after, 10, 1, **noted), [store(after, 10, "forked")])
    assert (outcome.version, outcome.actions[1]) == (10, REPLAY)
    assert outcome.replays[1].history == outcome.history == (fork,)


@pytest.mark.parametrize(("forked", "reached"), [("", 8), ("forked", None)])
def test_what_stores_alone_have_is_not_gone_on_from_if_it_has_a_history(
    forked: str, reached: int | None
) -> None:
    """No member is there who knows the forks, and no store does. A checkpoint has its own."""
    lives = {0: [f"{name}.2" for name in "abcde"]}
    plan = make_plan(lives, quorum=2, joining=list(lives[0]), lanes=1)
    told = [SettleReport(index=m.index, valid=False) for m in plan.members]
    assert newest(plan, told, Stores([store(plan, 8, forked)], plan.lineage)) == reached


@pytest.mark.parametrize("log", list(LogKind))
def test_what_stores_kept_before_a_fork_is_no_part_of_it(log: LogKind) -> None:
    """They are of the lineage before. The stage is made of others, whatever is logged."""
    plan = order(pipeline(2, 1), 1)
    before = store(replace(plan, lineage=0))
    rules = rank("a.1").fork_rules
    outcome = settle(plan, 1, reports(plan, 8, 1), [before], log, rules)
    assert outcome.actions[1] is MAKE
    assert not outcome.replays
    assert outcome.kept_from == 0


def test_a_window_that_was_complete_before_a_fork_is_not_after_it() -> None:
    plan = order(pipeline(2, 1), 1)
    state = adopted(rank("a.1", kept_from=6), plan)
    assert (state.lineage, state.kept_from) == (1, 0)
    same = adopted(rank("a.1", kept_from=6), pipeline(2, 1))
    assert (same.lineage, same.kept_from) == (0, 6)


def test_who_asks_says_if_a_store_did_not_answer() -> None:
    plan = replace(pipeline(2, 1), method=Method.REPLAY, asks_first=True)
    why = "it did not answer within 5 s"
    silent = StoreReport(pod=PodUid("a"), address="", lineage=plan.lineage, problem=why)
    empty = replace(silent, problem="")
    for store_report, unasked in ((silent, True), (empty, False)):
        event = ReportsGathered(tuple(reports(plan, 8, 1)), (store_report,))
        done = machine.step(adopted(rank("a.1"), plan), event)
        told = [a.fact for a in done.actions if isinstance(a, SendFact)]
        asked = [f for f in told if isinstance(f, Parked)]
        assert [(f.unreached, f.unasked) for f in asked] == [(True, unasked)]


def test_who_was_cut_off_while_others_asked_has_its_state_still() -> None:
    """It had no place in the plan in which they asked. Its state counts in the next one."""
    plan = make_plan({0: ["a.1", "b.1"]}, quorum=1, lanes=1)
    given = make_plan({0: ["a.1", "c.1"]}, quorum=2, joining=["c.1"], lanes=1)
    given = replace(given, method=Method.REPLAY, asks_first=True)
    silent = adopted(rank("b.1", position=1, plan=plan), given)
    assert (silent.phase, silent.valid) == (Phase.IDLE, True)
    lives = {0: ["a.1", "c.1"]}
    back = make_plan(lives, quorum=3, joining=["b.1", "c.1"], followers=[("b.1", 1)], lanes=1)
    known = adopted(silent, replace(back, method=Method.REFORM, asks_first=True))
    assert (known.phase, known.valid, known.version) == (Phase.SETTLING, True, 8)
