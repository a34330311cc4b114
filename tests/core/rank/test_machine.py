"""The rank's state machine: its table, and whole runs with faults drawn from seeds.

The runs check protocol section 11 at every move: see ``tests.worlds.trainers``. A failing
seed is repeated with ``PlayedTrainers(seed, shape).run()``.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.core.plans import make_plan, slot_of
from tests.worlds.trainers import PlayedTrainers, Shape

from mainstay_core.base.codec import dumps
from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.ids import Incarnation, Slot
from mainstay_core.rank import machine
from mainstay_core.rank.events import (
    Applied,
    Apply,
    Compute,
    ComputeBroken,
    CorrectEntry,
    DropHeld,
    DropPartials,
    Event,
    Finish,
    Leave,
    LoadFailed,
    LoadState,
    PlanSeen,
    QuorumLost,
    Reduce,
    Reduced,
    RenameCheckpoint,
    ReportsGathered,
    SavesGathered,
    SendFact,
    Settle,
    ShareSaves,
    StateLoaded,
    TodoDone,
    VoidSave,
    VotesGathered,
    WaitForPlan,
    WriteCheckpoint,
)
from mainstay_core.rank.machine import Phase, RankState, Transition
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.state import fact_of, report_of
from mainstay_core.wire.facts import Cause, FactKind, Parked
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.votes import Commit, LastStatus, SettleReport, TypeStat, Vote

ACCEPTED: dict[Phase, set[type]] = {
    Phase.IDLE: {PlanSeen},
    Phase.PARKED: {PlanSeen},
    Phase.SETTLING: {ReportsGathered, QuorumLost},
    Phase.HEALING: {StateLoaded, LoadFailed, ComputeBroken, QuorumLost},
    Phase.COMPUTING: {TodoDone, ComputeBroken},
    Phase.REDUCING: {Reduced, QuorumLost},
    Phase.VOTING: {VotesGathered, QuorumLost},
    Phase.APPLYING: {Applied},
    Phase.SAVING: {SavesGathered, QuorumLost},
    Phase.PAUSED: {PlanSeen},
    Phase.FINISHED: {PlanSeen},
    Phase.FAILED: {PlanSeen},
}
"""The table of protocol section 5, written again."""

EVENTS: dict[type, Event] = {
    PlanSeen: PlanSeen(),
    ReportsGathered: ReportsGathered(()),
    StateLoaded: StateLoaded("digest"),
    LoadFailed: LoadFailed("why"),
    TodoDone: TodoDone(()),
    ComputeBroken: ComputeBroken((), "why"),
    Reduced: Reduced(),
    VotesGathered: VotesGathered(()),
    QuorumLost: QuorumLost("why"),
    SavesGathered: SavesGathered(()),
    Applied: Applied("digest", Commit(step=0, norm=1, scale=1, tokens=1, loss=1, data="0" * 32)),
}


def fresh(life: str = "a.1", **fields: object) -> RankState:
    state = RankState(
        slot=slot_of(life),
        incarnation=Incarnation(life),
        num_steps=3,
        shards_per_lane=1,
        clip_norm=None,
        heal_address=life,
    )
    return replace(state, **fields)  # type: ignore[arg-type]


PLAN = make_plan({0: ["a.1"], 1: ["b.1"]})


def report(index: int, version: int = 0, **fields: object) -> SettleReport:
    given: dict[str, object] = {"valid": True, "version": version, "settled": 0}
    return SettleReport(index=index, **(given | fields))  # type: ignore[arg-type]


def vote(step: int = 0, **fields: object) -> Vote:
    given: dict[str, object] = {
        "step": step,
        "attempt": 0,
        "ok": True,
        "norms_sq": (4.0,),
        "gradient": "gradient",
        "state": "digest",
        "stats": (TypeStat(type=0, loss_sum=1.0, tokens=2, data="0" * 32),),
        "newest_plan": 1,
        "newest_nonce": "n",
    }
    return Vote(**(given | fields))  # type: ignore[arg-type]


def follow(state: RankState, *events: Event) -> Transition:
    for event in events[:-1]:
        state = machine.step(state, event).state
    return machine.step(state, events[-1])


def adopting(plan: Plan = PLAN, **fields: object) -> RankState:
    return machine.step(machine.saw_plan(fresh(**fields), plan), PlanSeen()).state


def computing(plan: Plan = PLAN, **fields: object) -> RankState:
    """A rank that computes step 0 of a new job."""
    absent = ReportsGathered(tuple(report(m.index, valid=False) for m in plan.members))
    return follow(adopting(plan, **fields), absent, StateLoaded("digest", None, "")).state


def voting(plan: Plan = PLAN, **fields: object) -> RankState:
    held = (Partial(lane=0, first=0, last=0),)
    return follow(computing(plan, **fields), TodoDone(held), Reduced()).state


# The table ------------------------------------------------------------------


def test_events_of_this_test_are_all_there_are() -> None:
    assert set(EVENTS) == set(typing.get_args(Event))
    assert set(ACCEPTED) == set(Phase)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("kind", list(EVENTS))
def test_an_event_that_the_phase_does_not_accept_raises_and_changes_nothing(
    phase: Phase, kind: type
) -> None:
    if kind in ACCEPTED[phase]:
        return
    state = replace(computing(), phase=phase)
    before = repr(state)

    with pytest.raises(LocalProtocolError, match=f"{phase} accepts no {kind.__name__}"):
        machine.step(state, EVENTS[kind])
    assert repr(state) == before


# One transition at a time ---------------------------------------------------


def test_a_spare_adopts_the_first_plan_that_names_it_and_settles() -> None:
    outcome = machine.step(machine.saw_plan(fresh(), PLAN), PlanSeen())

    assert outcome.state.phase is Phase.SETTLING
    (settle,) = outcome.actions
    assert isinstance(settle, Settle)
    assert (settle.report.index, settle.report.valid, settle.report.settled) == (0, False, -1)


def test_a_plan_that_names_another_life_of_the_same_slot_has_no_place_for_this_one() -> None:
    outcome = machine.step(machine.saw_plan(fresh("a.2"), PLAN), PlanSeen())

    assert outcome.state.phase is Phase.IDLE
    assert outcome.actions == (DropHeld(), Leave(), WaitForPlan())


def test_an_older_plan_is_never_the_newest() -> None:
    newer = make_plan({0: ["a.1"]}, quorum=5)
    state = machine.saw_plan(fresh(), newer)

    assert machine.saw_plan(state, PLAN) is state


def test_a_new_job_loads_the_initial_state_and_computes() -> None:
    absent = ReportsGathered((report(0, valid=False), report(1, valid=False)))

    loading = machine.step(adopting(), absent)
    started = machine.step(loading.state, StateLoaded("digest", None, ""))

    assert isinstance(loading.actions[-1], LoadState)
    assert loading.actions[-1].action is StateAction.LOAD
    assert next(a for a in started.actions if isinstance(a, SendFact)).fact.kind is FactKind.SETTLED
    assert started.actions[-1] == Compute((0,))
    assert (started.state.settled, started.state.version) == (1, 0)


def test_a_finished_list_goes_into_the_reduction_with_the_settled_table() -> None:
    held = (Partial(lane=0, first=0, last=0),)

    outcome = machine.step(computing(), TodoDone(held))

    (reduce,) = outcome.actions
    assert isinstance(reduce, Reduce)
    assert [(s.partial.first, s.index) for s in reduce.table] == [(0, 0), (1, 1)]
    assert outcome.state.held == held


def test_the_mark_carries_the_quorum_that_reduced() -> None:
    state = voting()

    assert (state.phase, state.mark) == (Phase.VOTING, "q1-n")


def test_with_all_votes_the_step_is_applied_and_the_next_begins() -> None:
    applying = machine.step(voting(), VotesGathered((vote(), vote())))
    (apply,) = applying.actions
    assert isinstance(apply, Apply)

    applied = machine.step(applying.state, Applied("after", apply.commit))

    assert applied.actions == (DropHeld(), Compute((0,)))
    state = applied.state
    assert (state.version, state.certified_in, state.digest) == (1, "q1-n", "after")
    assert (state.held, state.mark) == ((), None)


def test_a_vote_of_no_is_reduced_again_and_the_mark_is_erased() -> None:
    outcome = machine.step(voting(), VotesGathered((vote(), vote(ok=False, problem="a check"))))

    (reduce,) = outcome.actions
    assert isinstance(reduce, Reduce)
    assert (reduce.attempt, outcome.state.mark) == (1, None)
    assert outcome.state.held, "what is complete is kept"


WIDE = make_plan({0: ["a.1"], 1: ["b.1"]}, shards_per_lane=2)
WIDE_RUN = Partial(lane=0, first=0, last=1)


def wide(**fields: object) -> RankState:
    """A rank of two types that votes."""
    state = computing(WIDE, shards_per_lane=2, **fields)
    return follow(state, TodoDone((WIDE_RUN,)), Reduced()).state


def test_a_type_that_votes_call_wrong_is_computed_again_with_what_it_was_summed_into() -> None:
    bad = VotesGathered((vote(), vote(ok=False, bad=(3,))))

    own = machine.step(wide(), VotesGathered((vote(ok=False, bad=(1,)), vote())))
    others = machine.step(wide(), bad)

    assert own.actions == (DropPartials((WIDE_RUN,)), Compute((0, 1)))
    assert (own.state.held, own.state.mark, own.state.attempt) == ((), None, 1)
    assert others.actions == (Compute(()),), "what nobody calls wrong is kept"
    assert others.state.held == (WIDE_RUN,)
    done = follow(own.state, TodoDone((WIDE_RUN,)))
    assert [type(action) for action in done.actions] == [Reduce]
    assert {m.quorum for m in done.state.made} == {1}


@pytest.mark.parametrize("tells", [True, False])
def test_a_report_says_who_computed_what_is_held_only_where_that_may_matter(tells: bool) -> None:
    state = wide(tells_makers=tells)

    report = report_of(state)

    assert report.held == (WIDE_RUN,)
    assert [made.type for made in report.made] == ([0, 1] if tells else [])
    assert ("made" in dumps(report)) == tells, "where nothing is checked it costs no byte"


def test_a_chain_that_votes_wrong_types_twice_leaves_them_to_another_one() -> None:
    bad = VotesGathered((vote(ok=False, bad=(0,)), vote()))

    once = machine.step(wide(), bad)
    twice = follow(once.state, TodoDone((WIDE_RUN,)), Reduced(), bad)

    assert once.actions[-1] == Compute((0, 1))
    assert twice.actions == (DropPartials((WIDE_RUN,)), Compute(()))
    assert twice.state.step_plan is not None
    assert twice.state.step_plan.todo == {1: (0, 1)}


def test_a_report_tells_types_that_votes_called_wrong_until_a_settle_has_heard_it() -> None:
    again = machine.step(wide(), VotesGathered((vote(ok=False, bad=(1,)), vote()))).state
    newer = make_plan(
        {0: ["a.1"], 1: ["b.1"]}, shards_per_lane=2, quorum=2, since={"a.1": 1, "b.1": 1}
    )
    parked = follow(machine.saw_plan(again, newer), TodoDone((WIDE_RUN,)))
    (settle,) = [a for a in parked.actions if isinstance(a, Settle)]
    assert settle.report.bad == (1,)
    assert [m.type for m in settle.report.made] == [0, 1]

    heard = machine.step(
        parked.state,
        ReportsGathered((replace(settle.report, state=""), report(1, held=(), held_in=1))),
    )

    assert DropPartials((WIDE_RUN,)) in heard.actions
    assert heard.actions[-1] == Compute((0, 1))
    assert heard.state.bad == ()


def test_what_cannot_be_agreed_on_is_computed_again_before_a_rank_gives_up() -> None:
    state, no = voting(max_attempts=2), VotesGathered((vote(), vote(ok=False, problem="a check")))

    worn = follow(state, no, Reduced(), no)

    assert (worn.state.phase, worn.state.valid, worn.state.held) == (Phase.PARKED, True, ())
    assert (worn.state.recomputed, worn.state.refused_in) == (1, 1)
    assert DropHeld() in worn.actions
    assert machine.step(replace(state, recomputed=1), no).state.phase is Phase.REDUCING


@pytest.mark.parametrize("norm_sq", [math.nan, math.inf])
def test_a_norm_that_is_no_number_has_all_computed_again_once(norm_sq: float) -> None:
    """One wrong bit may have done it; the same again is no bit."""
    no = VotesGathered((vote(norms_sq=(norm_sq,)), vote(norms_sq=(norm_sq,))))

    once = machine.step(wide(), no)

    assert once.actions == (DropPartials((WIDE_RUN,)), Compute((0, 1)))
    assert "computed again, once" in once.reason
    again = (TodoDone((WIDE_RUN,)), Reduced())
    assert follow(once.state, *again, no).state.phase is Phase.FAILED
    yes = VotesGathered((vote(attempt=1), vote(attempt=1)))
    assert follow(once.state, *again, yes).state.phase is Phase.APPLYING


def test_a_rank_gives_up_after_as_many_attempts_as_it_may() -> None:
    state = replace(voting(max_attempts=2), recomputed=1)
    no = VotesGathered((vote(), vote(ok=False, problem="a check")))

    outcome = follow(state, no, Reduced(), no)

    assert outcome.state.phase is Phase.FAILED
    tell = outcome.actions[-2]
    assert isinstance(tell, SendFact)
    assert (tell.fact.kind, "a check" in tell.fact.evidence) == (FactKind.FAILED, True)
    assert machine.step(outcome.state, PlanSeen()).state is outcome.state


def test_a_rank_in_doubt_of_its_state_parks_with_nothing() -> None:
    plan = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]})
    votes = (vote(state="other"), vote(), vote())

    outcome = machine.step(voting(plan), VotesGathered(votes))

    assert (outcome.state.phase, outcome.state.valid) == (Phase.PARKED, False)
    assert Leave() in outcome.actions
    assert DropHeld() in outcome.actions
    assert VoidSave(0) in outcome.actions, "what it has copied of that state is bad, too"


def test_the_version_before_a_bad_state_is_not_made_durable_nor_its_part_ever_called_safe() -> None:
    """Wrong moments of version 4 show in the parameters of version 5: its vote finds them."""
    plan = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]})
    part = {"step": 5, "checkpoint_safe": 4, "checkpoint_nonce": "n"}
    votes = (vote(state="other", **part), vote(**part), vote(**part))

    outcome = machine.step(replace(voting(plan), version=5), VotesGathered(votes))

    assert not [a for a in outcome.actions if isinstance(a, RenameCheckpoint)]
    assert {VoidSave(4), VoidSave(5)} <= set(outcome.actions)


@pytest.mark.parametrize(
    ("states", "tells"),
    [
        (("bad", "good", "good"), [1]),
        (("good", "bad", "good"), []),
        (("good", "good", "good"), []),
    ],
)
def test_the_first_cell_with_a_good_state_tells_the_entry_of_one_that_wrote_a_bad_one(
    states: tuple[str, ...], tells: list[int]
) -> None:
    plan = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]})
    votes = VotesGathered(tuple(vote(step=5, state=state) for state in states))
    told = []
    for index, life in enumerate(("a.1", "b.1", "c.1")):
        state = replace(voting(plan), version=5, index=index, slot=slot_of(life))
        told += [index] if CorrectEntry(4) in machine.step(state, votes).actions else []
    assert told == tells


def test_nobody_tells_an_entry_again_where_no_copy_can_be_believed() -> None:
    plan = make_plan({0: ["a.1"], 1: ["b.1"]})
    votes = VotesGathered((vote(step=5, state="x"), vote(step=5, state="y")))
    outcome = machine.step(replace(voting(plan), version=5), votes)
    assert not [a for a in outcome.actions if isinstance(a, CorrectEntry)]


def test_nobody_keeps_gradients_that_the_chain_of_a_bad_state_may_have_computed() -> None:
    plan = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]})
    votes = (vote(), vote(state="other"), vote())

    outcome = machine.step(voting(plan), VotesGathered(votes))

    assert (outcome.state.phase, outcome.state.valid) == (Phase.PARKED, True)
    assert (outcome.state.held, outcome.state.mark) == ((), None)
    assert DropHeld() in outcome.actions


def test_who_missed_the_refused_vote_voids_what_it_holds_when_others_tell() -> None:
    plan = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]}, shards_per_lane=1)
    refused = machine.step(voting(plan), VotesGathered((vote(), vote(state="other"), vote()))).state
    missed = machine.step(voting(plan), QuorumLost("a reset")).state
    assert (refused.refused_in, missed.refused_in) == (1, -1)
    assert missed.held
    again = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]}, quorum=2, shards_per_lane=1)
    old = {"held": missed.held, "held_in": missed.held_in}
    reports = (report(0, settled=1, **old), report(1, valid=False), report(2, refused_in=1))

    outcome = machine.step(
        machine.step(machine.saw_plan(missed, again), PlanSeen()).state, ReportsGathered(reports)
    )

    assert (outcome.state.held, outcome.state.refused_in) == ((), 1)
    assert DropHeld() in outcome.actions
    assert outcome.actions[-1] == Compute((0, 1)), "its own type, and that of the bad state"


def test_what_was_computed_after_the_refused_vote_counts() -> None:
    held = (Partial(lane=0, first=0, last=0),)
    before = adopting(make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=3), held=held, held_in=2)
    reports = (report(0, held=held, held_in=2), report(1, refused_in=1))

    outcome = machine.step(before, ReportsGathered(reports))

    assert outcome.state.held == held


FOUR = make_plan(
    {r: [f"{'abcd'[r]}.1"] for r in range(4)}, quorum=2, since={f"{x}.1": 1 for x in "abcd"}
)
"""Four cells of one position."""


def settled_four(*states: str, **fields: object) -> Transition:
    """Return what a rank of four does whose settle has these states; "" is no valid one."""
    reports = [
        report(i, 1, state=state, settled=1) if state else report(i, valid=False)
        for i, state in enumerate(states)
    ]
    before = replace(adopting(FOUR), valid=bool(states[0]), version=1, **fields)  # type: ignore[arg-type]
    return machine.step(before, ReportsGathered(tuple(reports)))


def test_who_heals_is_checked_against_the_digest_that_the_reports_name() -> None:
    healing = settled_four("", "good", "good", "good")

    assert isinstance(healing.actions[-1], LoadState)
    assert healing.actions[-1].expected == "good"


def test_nobody_heals_from_a_settle_with_a_bad_state_and_all_meet_again_without_it() -> None:
    joiner = settled_four("", "bad", "good", "good")

    assert joiner.state.phase is Phase.PARKED
    tell = joiner.actions[-2]
    assert isinstance(tell, SendFact)
    assert isinstance(tell.fact, Parked)
    assert tell.fact.differing == (slot_of("b.1"),), "its node is charged, as by a vote"
    assert Leave() in joiner.actions


def test_a_state_that_a_settle_finds_bad_is_void_with_the_checkpoint_of_it() -> None:
    held = (Partial(lane=0, first=0, last=0),)

    bad = settled_four("bad", "good", "good", "good", held=held)

    assert (bad.state.phase, bad.state.valid, bad.state.held) == (Phase.PARKED, False, ())
    assert {VoidSave(1), DropHeld()} <= set(bad.actions)
    assert bad.state.refused_in == 2


def test_who_has_a_good_state_keeps_its_mark_and_no_partial_when_a_settle_finds_a_bad_one() -> None:
    held = (Partial(lane=0, first=0, last=0),)

    good = settled_four("good", "bad", "good", "good", held=held, mark="q1-n")

    assert (good.state.valid, good.state.held, good.state.mark) == (True, (), "q1-n")
    assert (good.state.refused_in, DropHeld() in good.actions) == (2, True)
    assert not any(isinstance(a, VoidSave) for a in good.actions)


def test_a_settle_in_which_nobody_can_be_believed_voids_all_copies_and_names_nobody() -> None:
    split = settled_four("good", "good", "bad", "bad")

    assert (split.state.phase, split.state.valid) == (Phase.PARKED, False)
    (fact,) = [a.fact for a in split.actions if isinstance(a, SendFact)]
    assert isinstance(fact, Parked)
    assert (fact.cause, fact.differing) == (Cause.STATE, ())


def test_who_heals_over_a_state_that_nobody_judged_never_saves_it() -> None:
    outcome = machine.step(
        replace(adopting(FOUR), valid=True, version=1, digest="bad"),
        ReportsGathered((report(0, 1, state="bad"), *(report(i, 2, settled=1) for i in (1, 2, 3)))),
    )

    assert VoidSave(1) in outcome.actions
    assert isinstance(outcome.actions[-1], LoadState)


def test_what_was_computed_with_a_cell_that_is_no_member_any_more_is_void() -> None:
    """Nobody hears of its state any more: it may have been bad."""
    plan = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]})
    held = (Partial(lane=0, first=0, last=0),)
    parked = follow(computing(plan), TodoDone(held), QuorumLost("a reset")).state
    whole = make_plan({0: ["a.1", "b.1"]}, quorum=2, lanes=2)
    broken = make_plan({1: ["c.1", "d.1"]}, followers=[("a.1", 0)], quorum=2, lanes=2)

    kept = machine.step(machine.saw_plan(parked, whole), PlanSeen())
    void = machine.step(machine.saw_plan(parked, broken), PlanSeen())

    assert (kept.state.held, void.state.held) == (held, ())
    assert DropHeld() in void.actions
    assert DropHeld() not in kept.actions
    settle = void.actions[-1]
    assert isinstance(settle, Settle)
    assert settle.report.held == ()


def test_a_mark_outlives_the_cell_with_which_its_partials_were_computed() -> None:
    plan = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]})
    parked = machine.step(voting(plan), QuorumLost("a reset")).state
    broken = make_plan({1: ["c.1", "d.1"]}, followers=[("a.1", 0)], quorum=2, lanes=2)

    outcome = machine.step(machine.saw_plan(parked, broken), PlanSeen())

    assert (outcome.state.held, outcome.state.mark) == ((), "q1-n")


@pytest.mark.parametrize("make", [adopting, voting])
def test_who_loses_the_quorum_parks_with_everything_and_names_the_suspects(
    make: Callable[[], RankState],
) -> None:
    before = make()

    outcome = machine.step(before, QuorumLost("a reset", (1,)))

    kept = ("held", "mark", "version", "valid", "settled")
    assert outcome.state.phase is Phase.PARKED
    assert Leave() in outcome.actions, "others of the chain may wait for it in the pipeline"
    assert [getattr(outcome.state, f) for f in kept] == [getattr(before, f) for f in kept]
    tell, wait = outcome.actions[-2:]
    expected = fact_of(
        outcome.state,
        Parked,
        step=0,
        evidence="a reset",
        suspects=(slot_of("b.1"),),
        cause=Cause.MEETING,
        sources=(slot_of("b.1"),),
    )
    assert tell == SendFact(expected)
    assert wait == WaitForPlan()


def parked_for(state: RankState, event: Event) -> tuple[Cause | None, tuple[Slot, ...], bool]:
    """The typed cause that a rank tells when an event has it give its quorum up."""
    (fact,) = (
        action.fact
        for action in machine.step(state, event).actions
        if isinstance(action, SendFact) and isinstance(action.fact, Parked)
    )
    return fact.cause, fact.sources, fact.was_told


def test_who_gives_its_quorum_up_tells_the_kind_of_the_cause() -> None:
    lost, other = QuorumLost("why", was_told=True), slot_of("b.1")
    reducing = follow(computing(), TodoDone(())).state
    assert parked_for(voting(), lost) == (Cause.MEETING, (), True)
    assert parked_for(reducing, QuorumLost("why", (1,))) == (Cause.REDUCTION, (other,), False)
    assert parked_for(computing(), ComputeBroken((), "why")) == (Cause.CHAIN, (), False)
    three = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]})
    votes = [vote(state="bad" if index == 1 else "digest") for index in range(3)]
    assert parked_for(voting(three), VotesGathered(tuple(votes)))[:2] == (Cause.STATE, (other,))


def test_who_cannot_heal_tells_from_whom_and_who_cannot_load_names_nobody() -> None:
    other = slot_of("b.1")
    for version, cause, sources in ((1, Cause.HEAL, (other,)), (0, Cause.LOAD, ())):
        reports = (report(0, valid=False), report(1, version=version, valid=version > 0))
        healing = machine.step(adopting(), ReportsGathered(reports)).state
        assert healing.phase is Phase.HEALING
        assert parked_for(healing, LoadFailed("why")) == (cause, sources, False)
        # The quorum ended meanwhile: nothing is wrong with the source.
        assert parked_for(healing, QuorumLost("why")) == (Cause.MEETING, (), False)


def test_a_broken_chain_keeps_its_complete_types() -> None:
    held = (Partial(lane=0, first=0, last=0),)

    outcome = machine.step(computing(), ComputeBroken(held, "the chain broke"))

    assert (outcome.state.phase, outcome.state.held) == (Phase.PARKED, held)


def test_who_knows_a_newer_unplanned_plan_adopts_it_instead_of_parking() -> None:
    newer = make_plan({0: ["a.1"]}, quorum=2, since={"a.1": 1})
    state = machine.saw_plan(voting(), newer)

    outcome = machine.step(state, QuorumLost("the plan ended it"))

    leave, settle = outcome.actions
    assert leave == Leave(), "others of the chain may have applied and wait for it"
    assert isinstance(settle, Settle)
    assert (settle.report.mark, settle.report.settled) == ("q1-n", 1)
    assert settle.report.held == state.held


def test_a_planned_plan_reaches_a_parked_rank_only_with_a_newer_unplanned_one() -> None:
    parked = machine.step(voting(), QuorumLost("why")).state
    planned = make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=2, planned=True, unplanned=1)
    unplanned = make_plan({0: ["a.1"]}, quorum=3)

    waits = machine.step(machine.saw_plan(parked, planned), PlanSeen())
    adopts = machine.step(machine.saw_plan(waits.state, unplanned), PlanSeen())

    assert (waits.state.phase, waits.actions) == (Phase.PARKED, (WaitForPlan(),))
    assert adopts.state.phase is Phase.SETTLING


def test_a_planned_plan_is_adopted_once_the_votes_show_that_all_have_seen_it() -> None:
    planned = make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=2, planned=True, unplanned=1)
    state = machine.saw_plan(voting(), planned)
    seen = vote(newest_plan=2)

    for votes, phase in (((seen, vote()), Phase.COMPUTING), ((seen, seen), Phase.SETTLING)):
        applying = machine.step(state, VotesGathered(votes))
        apply = applying.actions[-1]
        assert isinstance(apply, Apply)
        assert machine.step(applying.state, Applied("after", apply.commit)).state.phase is phase


def test_who_rolls_has_the_certificate_of_the_quorum_that_voted() -> None:
    parked = machine.step(voting(), QuorumLost("why")).state
    plan = make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=2, since={"a.1": 1, "b.1": 1})
    settling = machine.step(machine.saw_plan(parked, plan), PlanSeen())
    settle = settling.actions[-1]
    assert isinstance(settle, Settle)
    commit = Commit(step=0, norm=1, scale=1, tokens=4, loss=1, data="0" * 32, data_total="1" * 32)
    ahead = report(1, 1, settled=1, certified_in="q1-n", commit=commit)

    rolling = machine.step(settling.state, ReportsGathered((settle.report, ahead)))
    rolled = machine.step(rolling.state, Applied("after", commit))

    assert rolling.actions[-1] == Apply(commit)
    assert rolled.state.phase is Phase.COMPUTING
    assert (rolled.state.version, rolled.state.certified_in, rolled.state.settled) == (1, "q1-n", 2)
    assert rolled.actions[0] == DropHeld()


def test_who_heals_from_a_rank_that_loaded_a_checkpoint_has_its_history() -> None:
    """Without it the total of the data digests would start anew on one rank."""
    plan = make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=2, since={"b.1": 1})
    commit = Commit(step=0, norm=1, scale=1, tokens=4, loss=1, data="0" * 32, data_total="1" * 32)
    loaded = report(1, 1, settled=1, certified_in=None, commit=commit, chain="history")
    settling = adopting(plan)

    healing = machine.step(settling, ReportsGathered((report(0, valid=False), loaded)))
    healed = machine.step(healing.state, StateLoaded("digest"))

    assert isinstance(healing.actions[-1], LoadState)
    assert (healed.state.commit, healed.state.commit_chain) == (commit, "history")


def test_a_failed_heal_leaves_no_valid_state() -> None:
    settling = adopting()
    healing = machine.step(settling, ReportsGathered((report(0, valid=False), report(1))))

    outcome = machine.step(healing.state, LoadFailed("the source is gone"))

    assert (outcome.state.phase, outcome.state.valid) == (Phase.PARKED, False)


def test_after_the_last_step_a_rank_finishes_and_still_helps_others_to_settle() -> None:
    state = voting(num_steps=1)
    applying = machine.step(state, VotesGathered((vote(), vote())))
    apply = applying.actions[-1]
    assert isinstance(apply, Apply)

    finished = machine.step(applying.state, Applied("after", apply.commit))
    newer = make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=2, since={"a.1": 1, "b.1": 1})
    again = machine.step(machine.saw_plan(finished.state, newer), PlanSeen())

    assert finished.state.phase is Phase.FINISHED
    assert finished.actions[-2:] == (Finish(), WaitForPlan())
    assert again.state.phase is Phase.SETTLING


def test_who_finishes_and_already_knows_a_newer_plan_adopts_it_nothing_else_would_wake_it() -> None:
    done = report(1, 3, settled=1, certified_in="q0-n", chain="c")
    settling = replace(adopting(), settled=1, valid=True, position=0, version=3)
    newer = make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=2)

    outcome = machine.step(
        machine.saw_plan(settling, newer), ReportsGathered((report(0, 3, settled=1), done))
    )

    assert outcome.state.phase is Phase.SETTLING
    assert outcome.state.plan == newer


# Checkpoints ----------------------------------------------------------------


def applied(state: RankState, *votes: Vote) -> Transition:
    applying = machine.step(state, VotesGathered(votes))
    apply = applying.actions[-1]
    assert isinstance(apply, Apply)
    return machine.step(applying.state, Applied("after", apply.commit))


@pytest.mark.parametrize(("life", "writes"), [("a.1", True), ("b.1", False)])
def test_a_stages_lowest_member_writes_a_due_checkpoint(life: str, writes: bool) -> None:
    state = fresh(life, checkpoint_every_steps=1)
    state = machine.step(machine.saw_plan(state, PLAN), PlanSeen()).state
    absent = ReportsGathered((report(0, valid=False), report(1, valid=False)))
    state = follow(state, absent, StateLoaded("digest", None, ""), TodoDone(()), Reduced()).state

    outcome = applied(state, vote(), vote())

    assert any(isinstance(a, WriteCheckpoint) for a in outcome.actions) is writes


@pytest.mark.parametrize(("stays", "writes"), [("a.1", True), ("b.1", False)])
def test_who_is_dropped_at_a_boundary_writes_nothing_for_a_place_that_it_has_not(
    stays: str, writes: bool
) -> None:
    state = fresh("a.1", checkpoint_every_steps=1)
    state = machine.step(machine.saw_plan(state, PLAN), PlanSeen()).state
    absent = ReportsGathered((report(0, valid=False), report(1, valid=False)))
    state = follow(state, absent, StateLoaded("digest", None, ""), TodoDone(()), Reduced()).state
    plan = replace(make_plan({0: [stays]}, quorum=2), planned=True, unplanned_id=1)
    told = vote(newest_plan=2, newest_nonce=plan.quorum.nonce)
    outcome = applied(machine.saw_plan(state, plan), told, told)
    assert outcome.state.plan == plan
    assert any(isinstance(a, WriteCheckpoint) for a in outcome.actions) is writes


def test_only_the_first_member_renames_and_nobody_counts_the_version_as_complete_yet() -> None:
    votes = VotesGathered((vote(1, checkpoint_safe=1), vote(1)))
    state = replace(voting(checkpoint_every_steps=1), version=1)

    first = machine.step(state, votes)
    other = machine.step(replace(state, index=1), votes)

    assert first.actions[0] == RenameCheckpoint(1, "")
    assert (first.state.durable, first.state.safe) == (0, 1), "not before it says so itself"
    assert not any(isinstance(a, RenameCheckpoint) for a in other.actions)
    assert (other.state.durable, other.state.safe) == (0, 1)


# Interrupts -----------------------------------------------------------------

GRID = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, quorum=1)
KEPT = {0: GRID.quorum, 1: GRID.quorum}


def test_a_planned_plan_interrupts_nobody() -> None:
    planned = make_plan({0: ["a.1", "b.1"]}, quorum=2, planned=True, unplanned=1)

    assert machine.interrupts(GRID, 0, planned) == machine.Interrupt(quorum=False, pipeline=False)
    assert machine.interrupts(None, -1, planned) == machine.Interrupt(quorum=False, pipeline=False)


def test_an_unplanned_plan_ends_the_quorum_and_spares_the_chains_it_leaves_intact() -> None:
    masked = make_plan({0: ["a.1", "b.1"]}, quorum=2, followers=[("c.1", 0)], formed=KEPT)

    assert machine.interrupts(GRID, 0, masked) == machine.Interrupt(quorum=True, pipeline=False)
    assert machine.interrupts(GRID, 1, masked) == machine.Interrupt(quorum=True, pipeline=True)


def test_the_same_cells_chained_anew_are_another_chain() -> None:
    again = make_plan({0: ["a.1", "b.1"]}, quorum=2)

    assert machine.interrupts(GRID, 0, again).pipeline


def test_a_planned_plan_on_top_of_an_unplanned_one_interrupts_like_that() -> None:
    later = make_plan({0: ["a.1", "b.1"]}, quorum=3, planned=True, unplanned=2, formed=KEPT)

    assert machine.interrupts(GRID, 0, later).quorum


def test_a_pipeline_that_is_not_connected_is_never_spared() -> None:
    """Whom it waits for may have parked before it began; nobody would tell the waiting cell."""
    masked = make_plan({0: ["a.1", "b.1"]}, quorum=2, formed=KEPT)

    assert machine.interrupts(GRID, 0, masked, connected=False).pipeline


def test_a_follower_has_no_pipeline_to_lose() -> None:
    plan = make_plan({0: ["a.1"]}, followers=[("b.1", 0)])
    newer = make_plan({0: ["a.1"]}, quorum=2)

    assert machine.interrupts(plan, 1, newer) == machine.Interrupt(quorum=True, pipeline=False)


# Whole runs -----------------------------------------------------------------

SHAPES = {
    "one crash, one stage": Shape(stages=1, shards_per_lane=2, spares=1),
    "everything, one stage": Shape(
        stages=1,
        replicas=3,
        spares=1,
        kills=2,
        stops=1,
        resets=1,
        exclusions=1,
        corruptions=1,
        checkpoint_every=1,
    ),
    "one crash, two stages": Shape(shards_per_lane=2),
    "two crashes, three replicas of three stages": Shape(stages=3, replicas=3, kills=2, spares=1),
    "stops and false suspicion": Shape(kills=0, stops=2, exclusions=1, resets=2, corruptions=1),
    "two crashes, two inner ranks": Shape(stages=1, inner=2, shards_per_lane=2, kills=2, spares=1),
    "everything, two stages of two inner ranks": Shape(
        inner=2,
        spares=2,
        kills=2,
        stops=1,
        resets=1,
        exclusions=1,
        corruptions=1,
        checkpoint_every=1,
    ),
    "everything": Shape(
        shards_per_lane=2,
        spares=1,
        kills=2,
        stops=1,
        resets=1,
        exclusions=1,
        corruptions=1,
        checkpoint_every=1,
    ),
}
SEEDS_PER_BATCH = 50


@pytest.mark.parametrize("batch", [0, *(pytest.param(n, marks=pytest.mark.chaos) for n in (1, 2))])
@pytest.mark.parametrize("name", list(SHAPES))
def test_every_run_with_faults_ends_as_the_run_without(name: str, batch: int) -> None:
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        world = PlayedTrainers(seed, SHAPES[name])
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"PlayedTrainers({seed}, SHAPES[{name!r}]): {error}") from error


def test_runs_together_reach_every_transition_and_every_way_to_a_version() -> None:
    reached: set[tuple[Phase, type]] = set()
    happened: set[str] = set()
    for seed in range(1000, 1000 + 3 * SEEDS_PER_BATCH):
        world = PlayedTrainers(seed, SHAPES[list(SHAPES)[-1 - seed % 3]])
        world.run()
        reached |= world.reached
        happened |= world.happened

    wanted = {(phase, kind) for phase, kinds in ACCEPTED.items() for kind in kinds}
    never = {(Phase.FAILED, PlanSeen), (Phase.PAUSED, PlanSeen), (Phase.HEALING, LoadFailed)}
    never.add((Phase.HEALING, ComputeBroken))
    assert wanted - reached == never, (
        "no job fails here, nobody suspends it, no copy is damaged, no cell replays"
    )
    assert happened >= {"stay", "roll", "heal", "load", "join", "mask", "checkpoint", "corrupt"}


# A job that is to be suspended -------------------------------------------------


def test_a_pausing_plan_is_settled_saved_and_told_and_nothing_is_computed() -> None:
    plan = replace(PLAN, pause=True)
    paused = computing(plan)
    assert paused.phase is Phase.PAUSED
    absent = ReportsGathered(tuple(report(m.index, valid=False) for m in plan.members))
    last = follow(adopting(plan), absent, StateLoaded("digest", None, ""))
    told = [action.fact.kind for action in last.actions if isinstance(action, SendFact)]
    assert told == [FactKind.SETTLED, FactKind.PAUSED]
    assert last.actions[-1] == WaitForPlan()


def test_who_pauses_goes_on_by_an_unplanned_plan_only() -> None:
    paused = computing(replace(PLAN, pause=True))
    planned = replace(PLAN, quorum=replace(PLAN.quorum, id=2), planned=True)
    assert machine.step(machine.saw_plan(paused, planned), PlanSeen()).state.phase is Phase.PAUSED
    unplanned = replace(planned, planned=False, unplanned_id=2)
    assert (
        machine.step(machine.saw_plan(paused, unplanned), PlanSeen()).state.phase is Phase.SETTLING
    )


def test_a_version_that_is_not_on_the_disk_is_saved_before_a_rank_pauses() -> None:
    commit = Commit(step=0, norm=1, scale=1, tokens=1, loss=1, data="0" * 32)
    state = replace(
        adopting(replace(PLAN, pause=True)),
        valid=True,
        version=1,
        commit=commit,
        checkpoint_every_steps=10,
        position=0,
    )
    reports = tuple(report(m.index, version=1, commit=commit) for m in PLAN.members)
    saving = machine.step(state, ReportsGathered(reports))
    assert saving.state.phase is Phase.SAVING
    idle = tuple(LastStatus() for _ in PLAN.members)
    writing = machine.step(saving.state, SavesGathered(idle))
    assert WriteCheckpoint(1, commit, writing.state.commit_chain) in writing.actions
    safe = tuple(LastStatus(checkpoint_safe=1, checkpoint_nonce="n") for _ in PLAN.members)
    renaming = machine.step(writing.state, SavesGathered(safe))
    assert renaming.state.phase is Phase.SAVING
    durable = tuple(LastStatus(durable=1) for _ in PLAN.members)
    assert machine.step(renaming.state, SavesGathered(durable)).state.phase is Phase.PAUSED


def test_a_state_that_differs_is_not_saved_where_no_vote_would_find_it() -> None:
    commit = Commit(step=0, norm=1, scale=1, tokens=1, loss=1, data="0" * 32)
    plan = replace(make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]}), pause=True)
    state = replace(
        adopting(plan),
        valid=True,
        version=1,
        commit=commit,
        checkpoint_every_steps=10,
        position=0,
        digest="bad",
    )
    reports = tuple(report(m.index, version=1, commit=commit) for m in plan.members)
    saving = machine.step(state, ReportsGathered(reports))
    assert saving.actions[-1] == ShareSaves(0, "bad")
    told = tuple(LastStatus(state=digest) for digest in ("bad", "good", "good"))
    parked = machine.step(saving.state, SavesGathered(told))
    assert (parked.state.phase, parked.state.valid) == (Phase.PARKED, False)
    assert VoidSave(1) in parked.actions
    assert not any(isinstance(a, WriteCheckpoint) for a in parked.actions)


def at_the_end(**fields: object) -> RankState:
    """A rank of three cells that has applied the last step, in a job that saves nothing."""
    plan = make_plan({0: ["a.1"], 1: ["b.1"], 2: ["c.1"]})
    commit = Commit(step=2, norm=1, scale=1, tokens=1, loss=1, data="0" * 32)
    state = replace(
        adopting(plan, **fields), valid=True, version=3, commit=commit, position=0, digest="mine"
    )
    reports = tuple(report(m.index, version=3, commit=commit) for m in plan.members)
    return machine.step(state, ReportsGathered(reports)).state


def test_the_states_after_the_last_step_are_compared_though_nothing_is_saved() -> None:
    assert at_the_end().phase is Phase.FINISHED
    state = at_the_end(compares_last=True)
    assert state.phase is Phase.SAVING
    alike = tuple(LastStatus(state="mine", rest="r") for _ in range(3))
    assert Finish() in machine.step(state, SavesGathered(alike)).actions


@pytest.mark.parametrize(
    "wrong", [LastStatus(state="x", rest="r"), LastStatus(state="m", rest="x")]
)
def test_who_differs_after_the_last_step_gives_its_state_up_before_the_job_is_complete(
    wrong: LastStatus,
) -> None:
    good = LastStatus(state="m", rest="r")
    parked = machine.step(at_the_end(compares_last=True), SavesGathered((wrong, good, good)))
    assert (parked.state.phase, parked.state.valid) == (Phase.PARKED, False)
    kept = machine.step(at_the_end(compares_last=True), SavesGathered((good, wrong, good)))
    assert (kept.state.phase, kept.state.valid) == (Phase.PARKED, True)
