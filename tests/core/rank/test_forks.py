"""The fork: whose states count, what is made anew at which version, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan, slot_of

from mainstay_core.base import codec
from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.ids import Incarnation, QuorumId
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.rank import machine
from mainstay_core.rank.events import (
    Applied,
    Apply,
    DropHeld,
    LoadState,
    PlanSeen,
    ReportsGathered,
    SendFact,
    VotesGathered,
)
from mainstay_core.rank.forks import histories, repeats
from mainstay_core.rank.forks.makers import plan_making
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.reports import entry_of
from mainstay_core.rank.settle import Settlement, StateAction, settle
from mainstay_core.rank.state import RankState, extend_commit_chain
from mainstay_core.rank.votes import judge_reports, norms_by_block
from mainstay_core.reinitialisation.sources import Policy
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.facts import Failed, Parked, Phase, Settled, StateRefused
from mainstay_core.wire.plan import Method, Partial, Plan
from mainstay_core.wire.reinitialisation import (
    MAX_TOLD_FORKS,
    BlockOutline,
    Fork,
    ForkOrder,
    ForkOutcome,
    OptimizerState,
    PlaceDigest,
    Reinitialisation,
    describe_fork,
    digest_of_fork,
)
from mainstay_core.wire.votes import Commit, SettleReport, TypeStat, Vote

STAY, ROLL, HEAL, LOAD, MAKE = (
    StateAction.STAY,
    StateAction.ROLL,
    StateAction.HEAL,
    StateAction.LOAD,
    StateAction.MAKE,
)
RULES = ForkRules(
    outline=tuple((BlockOutline(name=f"layers.{i}", kind="layer"),) for i in range(5))
)

UNHEARD_OF = ApproximateConfig(optimizer_state="Best")


def commit(step: int, *norms_sq: float) -> Commit:
    return Commit(
        step=step, norm=1, scale=1, tokens=1, loss=1, data="0" * 32, norms_sq=norms_sq or (1,) * 5
    )


def order(plan: Plan, *positions: int, lineage: int = 1, since: int = 0) -> Plan:
    return replace(plan, lineage=lineage, fork=ForkOrder(positions=positions, since=since))


def pipeline(quorum: int = 2, *made: int) -> Plan:
    """One replica of five stages: a.1 to e.1; trainers of ``made`` are new, as b.2."""
    lives = [f"{name}.{2 if i in made else 1}" for i, name in enumerate("abcde")]
    stayed = {life: 1 for i, life in enumerate(lives) if i not in made}
    joining = [lives[i] for i in made]
    return make_plan({0: lives}, quorum=quorum, since=stayed, joining=joining, lanes=1)


def reports(
    plan: Plan, version: int = 8, *without: int, **fields: dict[str, Any]
) -> list[SettleReport]:
    """Of members at a version, those of ``without`` having none; fields by life, as ``a``."""
    told = []
    for member in plan.members:
        if member.index in without:
            told.append(SettleReport(index=member.index, valid=False, heal_address="x"))
            continue
        given = {
            "version": version,
            "lineage": plan.lineage,
            "settled": 1,
            "certified_in": "q1-n",
            "commit": commit(version - 1, 1, 1, 3, 1, 1),
            "chain": "before",
            "state": f"state-{member.index}",
            **fields.get(str(member.incarnation)[0], {}),
        }
        told.append(SettleReport(index=member.index, valid=True, **given))
    return told


def settled(plan: Plan, told: Sequence[SettleReport]) -> Settlement:
    return settle(plan, 1, told, fork_rules=RULES)


def made_of(fork: Fork | None) -> list[tuple[int, list[tuple[int, float]]]]:
    assert fork is not None
    return [
        (p.stage, [(s.stage, s.weight) for b in p.blocks for s in b.sources])
        for p in fork.made.positions
    ]


def test_what_nobody_holds_is_made_anew_at_the_version_of_the_others() -> None:
    plan = order(pipeline(2, 1), 1)

    outcome = settled(plan, reports(plan, 8, 1))

    assert outcome.version == 8
    assert outcome.actions == (STAY, MAKE, STAY, STAY, STAY)
    assert made_of(outcome.fork) == [(1, [(0, 0.25), (2, 0.75)])]
    assert [f.version for f in outcome.history] == [8]
    assert outcome.commit_chain != "before"
    assert "stage 1 is made anew from 0.25 of stage 0, 0.75 of stage 2" in outcome.reason


def test_without_an_order_nothing_is_made_anew() -> None:
    plan = replace(pipeline(2, 1), lineage=1)

    outcome = settled(plan, reports(plan, 8, 1))

    assert set(outcome.actions) == {LOAD}
    assert outcome.fork is None


def test_only_what_the_order_names_is_made_anew() -> None:
    plan = order(pipeline(2, 1, 3), 1)

    assert set(settled(plan, reports(plan, 8, 1, 3)).actions) == {LOAD}


def test_a_job_that_does_not_allow_it_makes_nothing() -> None:
    plan = order(pipeline(2, 1), 1)

    with pytest.raises(LocalProtocolError, match="does not allow"):
        settle(plan, 1, reports(plan, 8, 1))


def test_a_committed_step_is_not_lost() -> None:
    """One rank has applied step 8; the others hold its mark, and roll to it before the fork."""
    plan = order(pipeline(2, 1), 1)
    behind = {"version": 8, "mark": "q1-n", "certified_in": "q0-n"}
    told = reports(plan, 9, 1, c=behind, d=behind, e=behind)

    outcome = settled(plan, told)

    assert outcome.version == 9
    assert outcome.actions == (STAY, MAKE, ROLL, ROLL, ROLL)
    assert outcome.fork is not None
    assert outcome.fork.version == 9


def test_what_was_held_of_the_interrupted_step_is_void() -> None:
    plan = order(pipeline(2, 1), 1)
    held = {"held": (Partial(lane=0, first=0, last=0),), "held_in": 1}
    told = reports(plan, 8, 1, a=held, c=held, d=held, e=held)

    outcome = settled(plan, told)

    assert outcome.step.todo == {0: (0,)}, "it is computed again through all stages"


def test_a_fork_that_was_interrupted_is_repeated_with_the_same_bits() -> None:
    first = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    plan = order(pipeline(3, 1), 1, lineage=2)
    knows = {"history": first.history, "chain": first.commit_chain}

    again = settled(plan, reports(plan, 8, 1, c=knows, e=knows))

    assert again.fork == first.fork
    assert again.history == first.history
    assert again.commit_chain == first.commit_chain


def course(version: int, *stages: int, weights: str = "GradientNorm") -> dict[str, Any]:
    """What a state tells that contains one fork, at that version."""
    plan = order(pipeline(2, *stages), *stages)
    rules = replace(RULES, policy=Policy(weighting=Weighting(weights)))
    forked = settle(plan, 1, reports(plan, version, *stages), fork_rules=rules)
    return {"history": forked.history, "chain": forked.commit_chain}


@pytest.mark.parametrize("stays", [True, False])
def test_a_state_of_another_course_does_not_count_though_its_lineage_has_the_number(
    stays: bool,
) -> None:
    """A store that fell back has given the number twice; the others have gone on from their fork.

    It does not matter whether the plan takes the old trainer for a member that stayed.
    """
    plan = replace(pipeline(7, *([] if stays else [1])), lineage=1)
    ours, theirs = course(5, 3), course(5, 1, 3)
    others = {name: ours | {"settled": 6} for name in "acde"}
    told = reports(plan, 8, **others, b=theirs | {"settled": 5})

    outcome = settled(plan, told)

    assert set(outcome.actions) == {LOAD}, "nobody else has stage 1"
    slot = plan.members[1].slot
    assert f"of another course, so that it does not count, is the state of {slot}" in outcome.reason
    mine = rank("b.1", index=1, position=1, lineage=1, plan=plan, phase=Phase.SETTLING)
    heard = machine.step(mine, ReportsGathered(reports=tuple(told)))
    (refused,) = [
        a.fact
        for a in heard.actions
        if isinstance(a, SendFact) and isinstance(a.fact, StateRefused)
    ]
    assert (refused.stage, refused.step) == (1, 8)
    assert refused.evidence == "the forks in it are not those of the members that stayed"


def test_a_replica_that_went_another_way_copies_the_states_of_those_who_stayed() -> None:
    lives = {0: ["a.1", "b.1", "c.1"], 1: ["d.1", "e.1", "f.1"]}
    stayed = dict.fromkeys(lives[0], 1)
    plan = replace(make_plan(lives, quorum=7, since=stayed, joining=lives[1]), lineage=1)
    ours, theirs = course(5, 1), course(5, 3)
    told = {name: ours | {"settled": 6} for name in "abc"}
    told |= {name: theirs | {"settled": 6} for name in "def"}

    outcome = settled(plan, reports(plan, 8, **told))

    actions = {str(m.incarnation)[0]: outcome.actions[m.index] for m in plan.members}
    assert actions == dict.fromkeys("abc", STAY) | dict.fromkeys("def", HEAL)
    assert outcome.history == ours["history"]


def test_a_stage_that_was_made_of_other_sources_at_this_very_version_does_not_count() -> None:
    plan = replace(pipeline(7, 1), lineage=1)
    others = {name: course(8, 1) | {"settled": 6} for name in "acde"}
    told = reports(plan, 8, **others, b=course(8, 1, weights="Uniform") | {"settled": 6})

    assert set(settled(plan, told).actions) == {LOAD}


def test_who_missed_the_fork_of_its_very_version_is_of_the_same_course() -> None:
    plan = replace(pipeline(7), lineage=1)
    knows = {name: course(8, 1) | {"settled": 6} for name in "bc"}

    outcome = settled(plan, reports(plan, 8, **knows))

    assert set(outcome.actions) == {STAY}
    assert outcome.history == knows["b"]["history"]


@pytest.mark.parametrize(
    "comes_back",
    [
        pytest.param({}, id="at the fork's very version"),
        pytest.param({"version": 7, "mark": "q1-n", "certified_in": "q0-n"}, id="with its mark"),
    ],
)
def test_the_lost_exact_state_of_what_was_made_at_this_very_version_does_not_count(
    comes_back: dict[str, Any],
) -> None:
    """Two states of one position would be compared, and one found bad though no device was wrong.

    Members that missed the fork of another position are of the course.
    """
    lives = {0: ["a.1", "b.1", "c.1"], 1: ["d.1", "e.1", "f.1"]}
    stayed = dict.fromkeys([*lives[0], "d.1", "f.1"], 1)
    plan = replace(make_plan(lives, quorum=7, since=stayed, joining=["e.1"]), lineage=1)
    told = {name: course(8, 1) | {"settled": 6} for name in "abc"}
    told |= {name: {"settled": 6} for name in "df"}
    told |= {"b": told["b"] | {"state": "made"}, "e": {"settled": 2, "state": "exact"} | comes_back}
    for pair in ("ad", "cf"):
        told |= {name: told[name] | {"state": f"state-{pair}"} for name in pair}

    heard = reports(plan, 8, **told)
    outcome = settled(plan, heard)

    actions = {str(m.incarnation)[0]: outcome.actions[m.index] for m in plan.members}
    assert actions == dict.fromkeys("abcdf", STAY) | {"e": HEAL}
    assert not judge_reports(plan, heard, outcome.actions).state_bad


def test_what_was_made_before_is_not_made_again() -> None:
    first = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    plan = order(pipeline(3), 1, lineage=2)
    knows = {"history": first.history, "chain": first.commit_chain}

    outcome = settled(plan, reports(plan, 8, b=knows, c=knows))

    assert outcome.actions == (STAY,) * 5
    assert outcome.fork is None
    assert (outcome.history, outcome.commit_chain) == (first.history, first.commit_chain)


def test_one_of_two_stages_that_is_lost_again_is_made_as_before() -> None:
    both = order(pipeline(2, 1, 3), 1, 3)
    first = settled(both, reports(both, 8, 1, 3))
    plan = order(pipeline(3, 3), 3, lineage=2)
    knows = {"history": first.history, "chain": first.commit_chain}

    again = settled(plan, reports(plan, 8, 3, a=knows, b=knows, c=knows, e=knows))

    assert again.actions == (STAY, STAY, STAY, MAKE, STAY)
    assert again.fork == first.fork
    assert (again.history, again.commit_chain) == (first.history, first.commit_chain)


def test_another_stage_at_the_same_version_is_another_fork_after_the_first() -> None:
    first = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    plan = order(pipeline(3, 3), 3, lineage=2)
    knows = {"history": first.history, "chain": first.commit_chain}

    outcome = settled(plan, reports(plan, 8, 3, b=knows, c=knows))

    assert [made_of(f)[0][0] for f in outcome.history] == [1, 3]
    assert outcome.history[1].chain == first.commit_chain


def test_a_checkpoint_newer_than_a_fork_could_be_is_loaded() -> None:
    """Where no version is common to all others, nothing is made anew."""
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1, a={"version": 7, "settled": 1})

    assert set(settled(plan, told).actions) == {LOAD}


@pytest.mark.parametrize(
    ("limit", "durable", "is_forked"),
    [(None, 0, True), (None, 3, False), (5, 3, False), (4, 3, True)],
)
def test_a_young_checkpoint_that_the_coordinator_had_not_heard_of_is_loaded(
    limit: int | None, durable: int, is_forked: bool
) -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1, d={"durable": durable})

    outcome = settle(plan, 1, told, fork_rules=replace(RULES, after_lost_steps=limit))

    assert (outcome.fork is not None) == is_forked
    assert outcome.version == (8 if is_forked else durable)
    assert (MAKE in outcome.actions) == is_forked
    assert (set(outcome.actions) == {LOAD}) != is_forked


@pytest.mark.parametrize("durable", [0, 8])
@pytest.mark.parametrize("limit", [None, 0])
def test_at_a_version_that_is_an_exact_source_itself_nothing_is_made_anew(
    durable: int, limit: int | None
) -> None:
    """All others have come back to the seed, or to the checkpoint, in a restart."""
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, durable, 1, d={"durable": durable})

    outcome = settle(plan, 1, told, fork_rules=replace(RULES, after_lost_steps=limit))

    assert (outcome.fork, outcome.history, outcome.version) == (None, (), durable)
    assert set(outcome.actions) == {LOAD}


def test_a_history_that_was_replaced_by_one_of_more_stages_does_not_come_back() -> None:
    """One has missed the quorum that made stages 1 and 3 anew, and knows of stage 1 alone."""
    alone = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    both = order(pipeline(3, 1, 3), 1, 3, lineage=2)
    knew = {"history": alone.history, "chain": alone.commit_chain}
    second = settled(both, reports(both, 8, 1, 3, a=knew, c=knew, e=knew))
    assert [place for place, _ in made_of(second.fork)] == [1, 3]
    knows = {"history": second.history, "chain": second.commit_chain}
    plan = order(pipeline(4), 1, 3, lineage=3)

    outcome = settled(plan, reports(plan, 8, a=knew, b=knows, c=knows, d=knows, e=knows))

    assert (outcome.history, outcome.commit_chain) == (second.history, second.commit_chain)


def test_all_cells_of_a_lost_stage_make_their_own_copy_by_turns() -> None:
    chains = {0: ["a.1", "b.2", "c.1"], 1: ["d.1", "e.2", "f.1"]}
    since = dict.fromkeys(("a.1", "c.1", "d.1", "f.1"), 1)
    plan = order(make_plan(chains, quorum=2, since=since, joining=["b.2", "e.2"]), 1)
    joiners = [m.index for m in plan.members if m.joining]
    told = reports(plan, 8, *joiners)
    rules = replace(RULES, outline=RULES.outline[:3])

    outcome = settle(plan, 1, told, fork_rules=rules)

    assert outcome.fork is not None
    assert [outcome.actions[i] for i in joiners] == [MAKE, MAKE]
    stages = [[m.index for m in members] for members in plan.positions]
    holders = {0: stages[0], 1: [], 2: stages[2]}
    turns = [plan_making(plan, outcome.fork, i, holders, told) for i in joiners]
    assert [[b.members for b in t.beside] for t in turns] == [
        [tuple(stages[0]), tuple(stages[2])],
        [tuple(reversed(stages[0])), tuple(reversed(stages[2]))],
    ]
    assert [b.position for b in turns[0].beside] == [0, 2]


def rank(life: str, **fields: Any) -> RankState:
    state = RankState(
        slot=slot_of(life),
        incarnation=Incarnation(life),
        num_steps=20,
        shards_per_lane=1,
        clip_norm=None,
        heal_address=life,
        fork_rules=RULES,
    )
    given = {
        "plan": pipeline(fields.get("settled", 1)),
        "valid": True,
        "position": 0,
        "version": 8,
        "settled": 1,
        "digest": "state-0",
        "commit": commit(7, 1, 1, 3, 1, 1),
        "commit_chain": "before",
        **fields,
    }
    return replace(state, **given)


def adopted(state: RankState, plan: Plan) -> RankState:
    return machine.step(machine.saw_plan(state, plan), PlanSeen()).state


@pytest.mark.parametrize(
    ("state", "since", "counts"),
    [
        pytest.param({"lineage": 0}, 0, True, id="a member that stayed"),
        pytest.param({"lineage": 1}, 0, True, id="one that settled in a fork that failed"),
        pytest.param({"lineage": 1, "settled": 0}, 0, False, id="one left out since that fork"),
        pytest.param({"lineage": 2, "settled": 0}, 0, False, id="one of a rival of this plan"),
        pytest.param({"lineage": 0, "settled": 0}, 0, False, id="one that was left out meanwhile"),
        pytest.param({"lineage": 0}, 1, False, id="one of a lineage that was void before"),
        pytest.param({"lineage": 0, "position": 2}, 0, False, id="one of another stage"),
        pytest.param({"lineage": 0, "valid": False}, 0, False, id="one with a bad state"),
    ],
)
def test_a_state_of_a_lineage_before_counts_if_its_rank_stayed(
    state: dict[str, Any], since: int, counts: bool
) -> None:
    plan = order(pipeline(3, 1), 1, lineage=2, since=since)

    after = adopted(rank("a.1", **state), plan)

    assert after.valid == counts
    if counts:
        assert after.lineage == 2


def test_a_state_that_counted_in_an_earlier_plan_of_a_fork_counts_though_that_failed() -> None:
    """It came back under the first one and has not settled in it: nobody has without it."""
    plan = order(pipeline(3, 1), 1, lineage=2)
    members = [replace(m, since=2) if m.index == 0 else m for m in plan.members]
    came_back = rank("a.1", lineage=1, settled=0, plan=order(pipeline(2, 1), 1))

    assert adopted(came_back, replace(plan, members=tuple(members))).valid


def test_a_rank_that_was_left_out_before_a_fork_returns_under_its_first_plan() -> None:
    """Nobody has gone another way yet. A planned plan may have dropped it, and is taken back."""
    taken_back = rank("a.1", lineage=0, settled=0)
    first = order(pipeline(3, 1), 1, lineage=1)

    assert adopted(taken_back, first).valid
    assert not adopted(rank("a.1", lineage=0, settled=0), order(first, 1, lineage=2)).valid


def test_a_position_that_only_a_returning_rank_holds_is_not_lost_by_a_fork() -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1, d={"settled": 0})

    outcome = settled(plan, told)

    assert outcome.version == 8
    assert outcome.actions == (STAY, MAKE, STAY, STAY, STAY)


def test_inner_ranks_that_are_ordered_together_are_made_anew_together() -> None:
    """One of them is lost again, and the other one has gone on: its moments are not zero."""
    lives = ["a.1", "b.1", "c.2", "d.2", "e.1", "f.1"]
    since = dict.fromkeys(("a.1", "b.1", "c.2", "e.1", "f.1"), 1)
    plan = make_plan({0: lives}, quorum=3, since=since, joining=["d.2"], ranks_per_stage=2)
    plan = order(plan, 2, 3, lineage=2)
    rules = replace(RULES, outline=RULES.outline[:3])

    outcome = settle(plan, 1, reports(plan, 8, 3), fork_rules=rules)

    assert outcome.actions == (STAY, STAY, MAKE, MAKE, STAY, STAY)
    assert outcome.fork is not None
    assert [(p.stage, p.inner) for p in outcome.fork.made.positions] == [(1, 0), (1, 1)]


def test_a_maker_without_a_source_says_so() -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1)
    fork = settled(plan, told).fork
    assert fork is not None

    making = plan_making(plan, fork, 1, {0: [], 2: [2]}, told)

    assert [b.members for b in making.beside] == [(), (2,)]


def test_what_is_loaded_is_of_no_fork_and_its_commit_is_known() -> None:
    """The next window is planned from the commit that a member at the checkpoint's version has."""
    plan = order(pipeline(2, 1), 1)
    exact = {"version": 7, "durable": 7, "commit": commit(6), "history": (fork(7, "x"),)}

    outcome = settled(plan, reports(plan, 8, 1, a=exact))

    assert set(outcome.actions) == {LOAD}
    assert (outcome.version, outcome.history) == (7, ())
    assert outcome.commit == commit(6)
    assert outcome.unnoted == (commit(6),)


def test_an_old_pod_with_the_lost_stages_true_state_is_refused() -> None:
    lives = ["a.1", "b.1", "c.1", "d.1", "e.1"]
    since = dict.fromkeys(("a.1", "c.1", "d.1", "e.1"), 1)
    back = make_plan({0: lives}, quorum=3, since=since, lanes=1)
    true_state = rank("b.1", position=1, lineage=0)

    assert not adopted(true_state, order(back, 1, lineage=2)).valid, "the fork is not over"
    assert not adopted(true_state, replace(back, lineage=1)).valid, "it is over"


def refusals(state: RankState, plan: Plan) -> list[StateRefused]:
    """What a rank tells of its own state as it adopts a plan."""
    actions = machine.step(machine.saw_plan(state, plan), PlanSeen()).actions
    facts = [a.fact for a in actions if isinstance(a, SendFact)]
    return [fact for fact in facts if isinstance(fact, StateRefused)]


def left_out(**fields: Any) -> RankState:
    """The rank of b.1, which is at work in a plan that others have left meanwhile."""
    return rank("b.1", position=1, index=1, lineage=0, phase=Phase.PARKED, **fields)


def test_who_comes_back_with_the_lost_stages_true_state_tells_once_that_it_is_refused() -> None:
    without = replace(pipeline(3, 1), lineage=1)
    lives = ["a.1", "b.1", "c.1", "d.1", "e.1"]
    since = dict.fromkeys(("a.1", "c.1", "d.1", "e.1"), 1)
    back = replace(make_plan({0: lives}, quorum=4, since=since, lanes=1), lineage=1)

    (as_member,), (as_spare,) = refusals(left_out(), back), refusals(left_out(), without)

    for told in (as_member, as_spare):
        assert (told.stage, told.inner, told.step) == (1, 0, 8)
        assert told.evidence == "it is of lineage 0, and others have begun lineage 1 since"
    assert not refusals(adopted(left_out(), without), back), "it has told"


def test_only_a_state_that_others_went_on_without_is_told_to_be_refused() -> None:
    stayed = rank("a.1", index=0, lineage=0, phase=Phase.PARKED)

    assert not refusals(stayed, order(pipeline(3, 1), 1, lineage=1)), "it counts"
    assert not refusals(stayed, replace(pipeline(3, 1), lineage=1)), "all go back together"
    assert not refusals(left_out(), replace(pipeline(3), lineage=0)), "no lineage has begun"
    assert not refusals(left_out(valid=False), replace(pipeline(3, 1), lineage=1)), "it has none"


def test_whom_a_restart_of_all_moves_or_drops_was_not_left_behind() -> None:
    """The others' states of that lineage do not count either."""
    lives = ["a.1", "x.1", "b.1", "d.1", "e.1"]
    since = dict.fromkeys(("a.1", "x.1", "d.1", "e.1"), 1)
    moves = make_plan({0: lives}, quorum=3, since=since, lanes=1)
    for back in (moves, pipeline(3, 1)):
        again = replace(back, lineage=1, method=Method.RESTART)
        assert not refusals(left_out(), again)
        (later,) = refusals(left_out(), replace(again, lineage=2))
        assert later.evidence.endswith("others have begun lineage 2 since"), "one was missed"
        assert refusals(left_out(), replace(again, method=Method.JOIN))


def test_without_an_order_no_state_of_another_lineage_counts() -> None:
    assert not adopted(rank("a.1", lineage=0), replace(pipeline(3), lineage=1)).valid


def test_all_members_have_one_history_and_chain_after_a_fork() -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1)
    stays = adopted(rank("a.1", held=(Partial(lane=0, first=0, last=0),)), plan)
    maker = adopted(rank("b.2", valid=False, position=-1), plan)

    stayed = machine.step(stays, ReportsGathered(tuple(told)))
    making = machine.step(maker, ReportsGathered(tuple(told)))
    loads = [a for a in making.actions if isinstance(a, LoadState)]
    made = machine.step(making.state, machine.StateLoaded("made"))

    assert DropHeld() in stayed.actions
    assert loads[0].making is not None
    assert [b.position for b in loads[0].making.beside] == [0, 2]
    assert [b.expected for b in loads[0].making.beside] == ["state-0", "state-2"]
    states = (stayed.state, made.state)
    assert len({codec.dumps((s.history, s.commit_chain, s.lineage)) for s in states}) == 1
    assert stayed.state.history


def test_a_history_is_that_of_the_checkpoint_that_was_loaded() -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1, a={"version": 7})
    loading = machine.step(adopted(rank("c.1", position=2), plan), ReportsGathered(tuple(told)))

    exact = machine.step(loading.state, machine.StateLoaded("x", commit(3), "chain", ()))

    assert exact.state.history == ()


def fork(version: int, *blocks: str, steps: int | None = None, inner: int = 0) -> Fork:
    made = [
        {"block": b, "sources": [{"kind": "neighbour", "stage": 0, "block": b}]} for b in blocks
    ]
    told = {"positions": [{"stage": 1, "inner": inner, "blocks": made}], "reason": ""}
    return Fork(
        version=version,
        chain="",
        made=codec.decode(Reinitialisation, told),
        lr_boost=1.1,
        boost_steps=steps,
    )


def test_the_learning_rate_of_what_was_made_is_raised_from_then_on() -> None:
    history = (fork(8, "x"), fork(20, "x", "y"))

    assert [histories.boosts_of(history, step, 0).get("x", 1.0) for step in (7, 8, 19, 20, 99)] == [
        1.0,
        1.1,
        1.1,
        1.1,
        1.1,
    ], "a second loss sets it again, and does not compound"
    of_y = [histories.boosts_of(history, step, 0).get("y", 1.0) for step in (8, 19, 20)]
    assert of_y == [1.0, 1.0, 1.1]
    assert "z" not in histories.boosts_of(history, 99, 0)


def test_an_inner_rank_that_was_not_made_anew_learns_as_before() -> None:
    history = (fork(8, "x", inner=1),)

    assert [histories.boosts_of(history, 9, inner) for inner in (0, 1)] == [{}, {"x": 1.1}]


def test_a_boost_may_last_for_some_steps() -> None:
    history = (fork(8, "x", steps=3), fork(20, "x", steps=3))

    boosts = [histories.boosts_of(history, step, 0).get("x", 1.0) for step in range(30)]
    assert [step for step, boost in enumerate(boosts) if boost > 1] == [8, 9, 10, 20, 21, 22]


def test_norms_of_inner_ranks_add_up_by_block() -> None:
    plan = make_plan({0: ["a.1", "b.1", "c.1", "d.1"]}, ranks_per_stage=2)
    told = [(1.0, 2.0), (0.5, 0.0), (3.0,), (0.25,)]
    votes = [
        Vote(
            step=0,
            attempt=0,
            ok=True,
            norms_sq=norms,
            gradient="",
            state="",
            stats=(),
            newest_plan=1,
            newest_nonce="n",
        )
        for norms in told
    ]

    assert norms_by_block(plan, votes) == (1.5, 2.0, 3.25)


def test_the_chain_of_commits_is_of_what_is_told_and_not_of_what_equals_it() -> None:
    """Ranks with equal numbers of other bytes would have other certificates."""
    commit = Commit(step=1, norm=0.0, scale=1.0, tokens=1, loss=1.0, data="0" * 32)
    chains = [extend_commit_chain("x", replace(commit, norm=norm)) for norm in (0.0, -0.0)]
    assert chains[0] != chains[1]


def test_norms_are_no_part_of_the_commit_chain() -> None:
    with_norms = commit(3, 1.0, 2.0)

    assert extend_commit_chain("x", with_norms) == extend_commit_chain(
        "x", replace(with_norms, norms_sq=())
    )


def test_a_steps_outcome_depends_on_the_forks_up_to_its_version() -> None:
    history = (fork(8, "x"), fork(20, "x"))

    assert histories.digest_of(()) == ""
    assert histories.history_at(history, 7) == ()
    assert histories.history_at(history, 8) == history[:1]
    assert histories.digest_of(history[:1]) != histories.digest_of(history)


def test_an_order_is_carried_out_by_the_rules_that_it_names() -> None:
    """The job's policy may have changed since this rank was started."""
    how = ApproximateConfig(after_lost_steps=2, weights="Uniform", lr_boost=1.5, boost_steps=10)
    plan = order(pipeline(2, 1), 1)
    assert plan.fork is not None
    named = replace(plan, fork=replace(plan.fork, how=how))

    outcome = settled(named, reports(plan, 8, 1))

    assert made_of(outcome.fork) == [(1, [(0, 0.5), (2, 0.5)])]
    assert outcome.fork is not None
    assert (outcome.fork.lr_boost, outcome.fork.boost_steps) == (1.5, 10)
    young = reports(plan, 8, 1, a={"durable": 6})
    assert set(settled(named, young).actions) == {LOAD}, "two steps are not worth it"
    old = reports(plan, 8, 1, a={"durable": 5})
    assert settled(named, old).actions[1] is MAKE
    assert set(settled(plan, old).actions) == {LOAD}, "without a bound any checkpoint is"


def test_an_order_to_average_moments_is_recorded_and_whole_states_are_copied() -> None:
    plan = pipeline(2, 1)
    for name, copied in (("Zero", True), ("Average", False)):
        how = ApproximateConfig(optimizer_state=name)
        ordered = replace(plan, lineage=1, fork=ForkOrder(positions=(1,), since=0, how=how))
        told = reports(ordered, 8, 1)
        outcome = settled(ordered, told)
        assert outcome.fork is not None
        (place,) = outcome.fork.made.positions
        assert place.optimizer_state == name
        assert ("optimizer" in describe_fork(outcome.fork)) == (not copied)
        making = plan_making(ordered, outcome.fork, 1, {0: [0], 2: [2]}, told)
        assert [beside.wanted("q2-n", 8).masters_only for beside in making.beside] == [copied] * 2
    wrong = replace(order(plan, 1), fork=ForkOrder(positions=(1,), since=0, how=UNHEARD_OF))
    with pytest.raises(LocalProtocolError, match="with optimizer state 'Best'"):
        settled(wrong, reports(wrong, 8, 1))


def test_what_comes_whole_from_a_guard_or_a_checkpoint_averages_nothing() -> None:
    policy = Policy(stale_steps=9, optimizer_state=OptimizerState.AVERAGE)
    rules = replace(RULES, policy=policy, after_lost_steps=0)
    plan = order(pipeline(2, 0), 0)
    told = [replace(r, durable=6) for r in reports(plan, 8, 0)]
    outcome = settle(plan, 1, told, fork_rules=rules)
    assert outcome.fork is not None
    (place,) = outcome.fork.made.positions
    assert place.optimizer_state is OptimizerState.ZERO


def test_an_order_by_weights_that_there_are_not_is_refused() -> None:
    plan = order(pipeline(2, 1), 1)
    assert plan.fork is not None
    how = ApproximateConfig(weights="ByTaste")
    with pytest.raises(LocalProtocolError, match="orders a fork by weights 'ByTaste'"):
        settled(replace(plan, fork=replace(plan.fork, how=how)), reports(plan, 8, 1))


@pytest.mark.parametrize("rolls", [False, True])
def test_who_missed_a_fork_takes_its_history_though_the_plan_orders_none(rolls: bool) -> None:
    """Without it its state would be void at the next settle, and all would go back."""
    plan = replace(pipeline(7), lineage=1)
    knows = course(8, 1)
    held = (Partial(lane=0, first=0, last=0),)
    behind: dict[str, Any] = {"version": 7, "mark": "q1-n", "certified_in": "q0-n"}
    mine = behind if rolls else {"held": held, "held_in": 1}
    told = reports(plan, 8, a={"settled": 5} | mine, b=knows, c=knows)
    state = adopted(rank("a.1", lineage=1, settled=5, **mine), plan)

    settling = machine.step(state, ReportsGathered(tuple(told)))

    if rolls:
        assert isinstance(settling.actions[-1], Apply)
        applied = Applied(digest="state-0", commit=commit(7, 1, 1, 3, 1, 1))
        settling = machine.step(settling.state, applied)
    assert settling.state.version == 8
    assert settling.state.history == knows["history"]
    assert settling.state.commit_chain == knows["chain"]
    assert settling.state.held == ()
    assert DropHeld() in settling.actions
    assert settled(plan, told).step.todo == {0: (0,)}, "it came through the stage that was lost"


@pytest.mark.parametrize("life", ["a.1", "c.1"])
def test_the_first_member_alone_tells_the_history_once_it_goes_on(life: str) -> None:
    plan = order(pipeline(2, 1), 1)
    position = 0 if life == "a.1" else 2
    state = machine.step(
        replace(rank(life), position=position, digest=f"state-{position}", newest=plan),
        PlanSeen(),
    ).state
    actions = machine.step(state, ReportsGathered(tuple(reports(plan, 8, 1)), ())).actions
    (told,) = (a.fact for a in actions if isinstance(a, SendFact) and isinstance(a.fact, Settled))

    if life != "a.1":
        assert told.history is None
        return
    assert told.history is not None
    assert (told.history.since, told.history.num_forks, told.history.made) == (8, 1, True)
    assert told.history.newest[0].made.reason.startswith("stage 1 is made anew from 0.25")


@pytest.mark.parametrize(
    ("ordered", "version", "made"),
    [
        pytest.param((1,), 8, True, id="it was made before the meeting failed"),
        pytest.param((1, 3), 8, True, id="another was lost meanwhile, and somebody held it"),
        pytest.param((3,), 8, False, id="it was made for an order before, and this is held"),
        pytest.param((1,), 9, False, id="all have gone on since"),
    ],
)
def test_a_repeated_order_that_finds_its_fork_made_is_told_as_made(
    ordered: tuple[int, ...], version: int, made: bool
) -> None:
    first = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    plan = order(pipeline(3), *ordered, lineage=2)
    knows = {"history": first.history, "commit_chain": first.commit_chain}
    state = rank("a.1", lineage=1, version=version, plan=order(pipeline(2), 1), **knows)
    told = {"history": first.history, "chain": first.commit_chain}
    everybody = reports(plan, version, **dict.fromkeys("abcde", told))

    actions = machine.step(adopted(state, plan), ReportsGathered(tuple(everybody), ())).actions

    (fact,) = (a.fact for a in actions if isinstance(a, SendFact) and isinstance(a.fact, Settled))
    assert fact.history is not None
    assert (fact.history.since, fact.history.num_forks, fact.history.made) == (8, 1, made)


def test_a_long_history_is_told_by_its_newest_forks() -> None:
    made = Reinitialisation(positions=(), reason="")
    history = tuple(Fork(version=v, chain=str(v), made=made) for v in range(3, 40))
    told = histories.tell_history(history, made=False)
    assert told is not None
    assert (told.since, told.num_forks, told.newest) == (3, 37, history[-MAX_TOLD_FORKS:])
    assert histories.tell_history((), made=False) is None


def again(plan: Plan, fork: Fork) -> Plan:
    """A plan that orders to make a fork of another run, though members hold all."""
    stages = tuple(place.stage for place in fork.made.positions)
    return replace(plan, lineage=1, fork=ForkOrder(positions=stages, since=0, repeats=fork))


def forked_at_8() -> Fork:
    """The fork of a run that has lost stage 1 at version 8."""
    plan = order(pipeline(2, 1), 1)
    fork = settled(plan, reports(plan, 8, 1)).fork
    assert fork is not None
    return fork


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


def test_a_fork_has_the_norms_by_which_two_stages_are_weighed() -> None:
    (place,) = forked_at_8().made.positions
    assert [block.norms_sq for block in place.blocks] == [(1.0, 3.0)]

    uniform = course(8, 1, weights="Uniform")["history"][0]
    assert [block.norms_sq for block in uniform.made.positions[0].blocks] == [()]


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


def settled_with_copies(
    plan: Plan, told: Sequence[SettleReport], stale_steps: int, after: int = 0
) -> Settlement:
    """Settle a job whose stages may load checkpoints of theirs alone."""
    policy = Policy(stale_steps=stale_steps)
    rules = replace(RULES, policy=policy, after_lost_steps=after)
    return settle(plan, 1, told, fork_rules=rules)


def with_durable(told: Sequence[SettleReport], durable: int) -> list[SettleReport]:
    return [replace(report, durable=durable) for report in told]


def versions_of(fork: Fork | None) -> list[tuple[int, int | None]]:
    assert fork is not None
    return [(p.stage, s.version) for p in fork.made.positions for b in p.blocks for s in b.sources]


@pytest.mark.parametrize(
    ("lost", "stale_steps", "made"),
    [
        pytest.param((1,), 3, [(1, 5)], id="young enough: before its neighbours"),
        pytest.param((1,), 2, [(1, None), (1, None)], id="too old: its neighbours"),
        pytest.param((0,), 3, [(0, 5)], id="an end of the pipeline"),
        pytest.param((1, 2), 3, [(1, 5), (2, 5)], id="two side by side"),
    ],
)
def test_a_lost_stage_loads_its_own_checkpoint_while_the_others_stay(
    lost: tuple[int, ...], stale_steps: int, made: list[tuple[int, int | None]]
) -> None:
    plan = order(pipeline(2, *lost), *lost)

    outcome = settled_with_copies(plan, with_durable(reports(plan, 8, *lost), 5), stale_steps)

    assert outcome.version == 8
    assert [i for i, action in enumerate(outcome.actions) if action is MAKE] == list(lost)
    assert versions_of(outcome.fork) == made


def test_a_checkpoint_that_is_too_old_is_taken_by_no_stage_alone() -> None:
    """The newer one went from the disk after the coordinator looked: all go back together."""
    plan = order(pipeline(2, 0), 0)

    outcome = settled_with_copies(plan, with_durable(reports(plan, 8, 0), 5), 2)

    assert set(outcome.actions) == {LOAD}
    assert (outcome.version, outcome.fork) == (5, None)


@pytest.mark.parametrize("durable", [0, 8])
def test_without_a_checkpoint_left_all_go_back(durable: int) -> None:
    """It went from the disk after the coordinator looked, or it has the very version."""
    plan = order(pipeline(2, 0), 0)

    outcome = settled_with_copies(plan, with_durable(reports(plan, 8, 0), durable), 9)

    assert set(outcome.actions) == {LOAD}
    assert (outcome.version, outcome.fork) == (durable, None)


def test_a_checkpoint_of_a_forks_very_version_does_not_count() -> None:
    """Nobody knows whether it is from before or after the fork."""
    plan = order(pipeline(2, 1), 1)
    noted = {life: {"history": (fork(5, "layers.3"),)} for life in "acde"}
    told = with_durable(reports(plan, 8, 1, **noted), 5)

    assert versions_of(settled_with_copies(plan, told, 9).fork) == [(1, None), (1, None)]


def test_a_maker_that_loads_its_own_checkpoint_copies_nobody() -> None:
    plan = order(pipeline(2, 0), 0)
    told = with_durable(reports(plan, 8, 0), 5)
    rules = replace(RULES, policy=Policy(stale_steps=9), after_lost_steps=0)
    maker = adopted(rank("a.2", valid=False, position=-1, fork_rules=rules), plan)

    making = machine.step(maker, ReportsGathered(tuple(told)))

    (load,) = [action for action in making.actions if isinstance(action, LoadState)]
    assert load.making is not None
    assert (load.making.stale, load.making.stale_history, load.making.beside) == (5, (), ())
