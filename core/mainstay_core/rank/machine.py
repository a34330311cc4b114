"""The rank's state machine: the phases of a trainer (protocol sections 2, 5 and 6).

``step(state, event)`` returns the new state, the actions for the shell to carry out in order, and a
reason. The last action of a transition is the one whose outcome is the next event. One table owns
the transitions: an event that the phase does not accept raises and changes nothing.

:mod:`mainstay_core.rank.state` defines the state, and what a plan means that arrives meanwhile.
:mod:`mainstay_core.rank.adoption` has the transitions by which a rank leaves its quorum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.values import replace
from mainstay_core.job.config import LogKind
from mainstay_core.rank import checkpoints, recheck, refusals, windows
from mainstay_core.rank.adoption import adopt, ask_first, fail, park, wait_for_fork
from mainstay_core.rank.events import (
    Action,
    Applied,
    Apply,
    CastVote,
    Compute,
    ComputeBroken,
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
    ReportsGathered,
    SavesGathered,
    SendFact,
    ShareSaves,
    StateLoaded,
    TellVoidGuard,
    TodoDone,
    VoidSave,
    VotesGathered,
    WaitForPlan,
)
from mainstay_core.rank.forks import histories, orders, repeats
from mainstay_core.rank.forks.guard_copies import is_outnumbered, rivals_of_copies, void_copies
from mainstay_core.rank.making import forked, making_of, missed_fork
from mainstay_core.rank.saving.saves import judge_saves
from mainstay_core.rank.settle import PositionDigests, StateAction, settle
from mainstay_core.rank.state import (
    Interrupt,
    RankState,
    SnapshotRules,
    Transition,
    extend_commit_chain,
    fact_of,
    interrupts,
    must_adopt,
    saw_durable,
    saw_plan,
)
from mainstay_core.rank.votes import (
    Verdict,
    judge,
    judge_reports,
    judge_states,
    norms_by_block,
)
from mainstay_core.wire.facts import (
    Adopted,
    Cause,
    Paused,
    Phase,
    Settled,
)
from mainstay_core.wire.recoveries import Replayed

__all__ = [
    "Interrupt",
    "Phase",
    "RankState",
    "SnapshotRules",
    "Transition",
    "interrupts",
    "must_adopt",
    "saw_durable",
    "saw_plan",
    "step",
]


_GONE: Mapping[str, Any] = {"valid": False, "held": (), "mark": None, "guarded": ()}
"""What is left of a rank's state when it gets another one. What it guards is of the old one."""


def step(state: RankState, event: Event) -> Transition:
    """Return the transition that ``event`` causes.

    Raises:
        LocalProtocolError: the phase does not accept the event; nothing changed.
    """
    handler = _TABLE.get((state.phase, type(event)))
    if handler is None:
        raise LocalProtocolError(f"a rank that is {state.phase} accepts no {type(event).__name__}")
    return handler(state, event)


def _on_plan(state: RankState, event: Event) -> Transition:
    del event
    if state.newest is None or not must_adopt(state):
        return Transition(state, (WaitForPlan(),), "no newer unplanned plan yet")
    return adopt(state)


def _on_plan_idle(state: RankState, event: Event) -> Transition:
    """Adopt any newer plan, planned or not: a spare has no quorum to keep."""
    del event
    if state.newest is None or (state.plan and state.plan.quorum.id >= state.newest.quorum.id):
        return Transition(state, (WaitForPlan(),), "no newer plan yet")
    return adopt(state)


def _on_reports(state: RankState, event: ReportsGathered) -> Transition:
    assert state.plan is not None
    log = state.snapshots.log if state.snapshots else LogKind.GRADIENTS
    outcome = settle(
        state.plan, state.shards_per_lane, event.reports, event.stores, log, state.fork_rules
    )
    verdict = judge_reports(state.plan, event.reports, outcome.actions)
    if verdict.state_bad:
        # Marks stay: they are applied on a certificate alone, whose votes found the states good.
        return _refused(state, verdict, (), state.mark)
    mine = outcome.actions[state.index]
    reached = max((r.version for r in event.reports if r.valid), default=None)
    loads = StateAction.LOAD in outcome.actions
    if loads and state.plan.asks_first:
        return ask_first(state, outcome.reason, event.stores)
    about = {"step": outcome.version, "evidence": outcome.reason, "reached": reached}
    tell = SendFact(fact_of(state, Adopted, **about, loads=loads))
    settled = checkpoints.settled(state, max(r.durable for r in event.reports))
    settled = replace(
        recheck.settled(settled, outcome),
        settlement=outcome,
        step_plan=recheck.witnessed_step(state, outcome),
        refused_in=outcome.refused_in,
        basis=windows.settled_basis(state, outcome),
    )
    commits = windows.records_told(state, outcome, event.stores)
    stored: tuple[Action, ...] = commits
    if mine in (StateAction.STAY, StateAction.ROLL):
        settled, older = windows.catch_up(settled, outcome.kept_from, event.reports)
        stored = (*older, *commits)
    missed = missed_fork(state, outcome)
    if mine is StateAction.STAY and (state.plan.fork is not None or missed):
        settled = forked(settled, outcome)
    refused = state.held_in <= outcome.refused_in
    if mine is StateAction.STAY and state.held and (refused or missed or outcome.fork is not None):
        # The votes that refused the step did not reach this rank: the others' reports tell it. Or
        # what is held came through a stage that is another one now.
        return _begin(replace(settled, held=(), mark=None), tell, *stored, DropHeld())
    if mine is StateAction.STAY:
        kept = outcome.step.kept.get(state.index, ())
        told = next(r.held for r in event.reports if r.index == state.index)
        void = tuple(partial for partial in told if partial not in kept)
        drop = (DropPartials(void),) if void else ()
        return _begin(replace(settled, mark=None, held=kept), tell, *stored, *drop)
    if mine is StateAction.ROLL:
        assert outcome.commit is not None
        rolling = replace(settled, phase=Phase.APPLYING)
        record = windows.record_rolled(state, outcome)
        actions = (tell, *stored, *record, Apply(outcome.commit))
        return Transition(rolling, actions, outcome.reason)
    # Nobody has judged the state that goes, nor will: a checkpoint must not have it.
    unsaved = (VoidSave(state.version),) if state.valid else ()
    from_disk = mine is StateAction.LOAD
    back = windows.go_back(state, outcome.version, outcome.kept_from, from_disk=from_disk)
    restoring = replace(settled, phase=Phase.HEALING, kept_from=outcome.kept_from, **_GONE)
    replay = outcome.replays.get(state.member_position) if mine is StateAction.REPLAY else None
    restore = LoadState(
        mine,
        outcome.version,
        outcome.sources[state.index],
        outcome.expected[state.index],
        replay,
        making_of(state, outcome, event.reports) if mine is StateAction.MAKE else None,
    )
    refusal = refusals.tell_other_course(state, event.reports)
    actions = (*refusal, tell, *unsaved, *back, *commits, DropHeld(), restore)
    return Transition(restoring, actions, outcome.reason)


def _on_state_loaded(state: RankState, event: StateLoaded) -> Transition:
    assert state.plan is not None
    assert state.settlement is not None
    outcome = state.settlement
    last = outcome.told[state.member_position] if outcome.told else PositionDigests()
    restored = replace(
        state,
        valid=True,
        position=state.member_position,
        lineage=state.plan.lineage,
        version=outcome.version,
        certified_in=outcome.certified_in,
        commit=outcome.commit if event.commit is None else event.commit,
        commit_chain=outcome.commit_chain if event.commit_chain is None else event.commit_chain,
        history=outcome.history if event.history is None else event.history,
        digest=event.digest,
        last_gradient=last.gradient,
        last_masters=last.masters,
        recomputed=0,
        clean_from=recheck.clean_from(state, outcome.version),
    )
    return _begin(restored, replayed=event.told)


def _on_load_failed(state: RankState, event: LoadFailed) -> Transition:
    assert state.settlement is not None
    sources = state.settlement.sources[state.index]
    heals = state.settlement.actions[state.index] is StateAction.HEAL
    cause = Cause.HEAL if heals else Cause.LOAD
    return park(replace(state, valid=False), event.why, (), cause=cause, sources=sources)


def _begin(state: RankState, *prefix: Action, replayed: Replayed | None = None) -> Transition:
    """Go on with the step: the settle is complete and the state is valid.

    Args:
        state: of the rank.
        prefix: what is done first.
        replayed: how its state was made anew, if it was.
    """
    assert state.plan is not None
    settled = windows.begin_window(replace(state, settled=state.plan.quorum.id))
    made = state.settlement is not None and (
        state.settlement.fork is not None
        or orders.is_made(state.plan, state.history, state.settlement.version)
    )
    history = histories.tell_history(state.history, made=made) if state.index == 0 else None
    told = fact_of(settled, Settled, durable=settled.durable, replayed=replayed, history=history)
    return _compute(settled, *prefix, SendFact(told))


def _compute(state: RankState, *prefix: Action) -> Transition:
    """Begin the step at ``version``, go on with it, or finish."""
    assert state.plan is not None
    due = repeats.find_due(state.repeats, state.history, state.version)
    if due is not None and not state.plan.pause:
        return wait_for_fork(state, due, *prefix)
    over = state.version >= state.num_steps or state.plan.pause
    if over and must_adopt(state):
        return adopt(state, *prefix)  # its PlanSeen is over: nothing would wake this rank
    if over and (checkpoints.is_open(state) or checkpoints.is_unjudged_end(state)):
        return _share_saves(state, *prefix)
    if over:
        return _end(state, *prefix)
    step_plan = state.step_plan or recheck.plan_undisturbed(state)
    held_in = state.held_in if state.held else state.plan.quorum.id
    chain = state.plan.chain_of(state.index)
    cells = state.plan.chain_identity(chain) if chain else ()
    held_with = (state.held_with if state.held else frozenset()).union(cells)
    new = replace(
        state,
        phase=Phase.COMPUTING,
        step_plan=step_plan,
        held_in=held_in,
        held_with=held_with,
        clean_from=state.version if state.clean_from is None else state.clean_from,
    )
    copies = windows.due_snapshot(new)
    actions = (*prefix, *copies, Compute(recheck.todo_of(new)))
    return Transition(new, actions, f"computes step {state.version}")


def _share_saves(state: RankState, *prefix: Action) -> Transition:
    """Exchange statuses. No step follows, and this version is not durable yet."""
    saving, share = replace(state, phase=Phase.SAVING), ShareSaves(state.save_round, state.digest)
    return Transition(saving, (*prefix, share), "writes its checkpoint")


def _end(state: RankState, *prefix: Action) -> Transition:
    if state.version < state.num_steps:
        paused = replace(state, phase=Phase.PAUSED)
        tell = SendFact(fact_of(state, Paused, durable=state.durable))
        return Transition(paused, (*prefix, tell, WaitForPlan()), "the job is to be suspended")
    done = replace(state, phase=Phase.FINISHED)
    return Transition(done, (*prefix, Finish(), WaitForPlan()), "the last step is applied")


def _on_saves(state: RankState, event: SavesGathered) -> Transition:
    assert state.plan is not None
    # Joined, as both are of one state.
    states = {i: f"{s.state} {s.rest}" for i, s in enumerate(event.statuses)}
    verdict = judge_states(state.plan, states)
    if verdict.state_bad:
        return _refused(state, verdict, ())  # no vote comes any more that would find it
    saves = judge_saves(state.plan, event.statuses)
    state, actions, done = checkpoints.end_round(state, saves)
    if must_adopt(state):
        # As in _compute: its PlanSeen is over, and nothing would wake this rank once it has ended.
        return adopt(state, *actions, Leave())
    return _end(state, *actions) if done else _share_saves(state, *actions)


def _on_todo_done(state: RankState, event: TodoDone) -> Transition:
    held, drop = recheck.without_witness(state, event.held)
    watched = recheck.watched_now(state) or state.watched
    made = recheck.makers_of_held(state, held)
    new = replace(state, held=held, made=made, watched=watched)
    return adopt(new, *drop) if must_adopt(new) else _reduce(new, *drop)


def _on_compute_broken(state: RankState, event: ComputeBroken) -> Transition:
    if state.phase is not Phase.COMPUTING:
        broken = replace(state, held=event.held, made=())
        return park(broken, event.why, event.suspects, cause=Cause.CHAIN)
    held, drop = recheck.without_witness(state, event.held)
    broken = replace(state, held=held, made=recheck.makers_of_held(state, held))
    return park(broken, event.why, event.suspects, *drop, cause=Cause.CHAIN)


def _reduce(state: RankState, *prefix: Action) -> Transition:
    assert state.step_plan is not None
    table = state.step_plan.table[state.member_position]
    new = replace(state, phase=Phase.REDUCING)
    reduce = Reduce(table, state.attempt)
    return Transition(new, (*prefix, reduce), f"reduces step {state.version}")


def _on_reduced(state: RankState, event: Reduced) -> Transition:
    assert state.plan is not None
    new = replace(state, phase=Phase.VOTING, mark=str(state.plan.quorum), guarded=event.guarded)
    return Transition(new, (CastVote(state.version, state.attempt),), "votes")


def _on_lost(state: RankState, event: QuorumLost) -> Transition:
    cause = Cause.REDUCTION if state.phase is Phase.REDUCING else Cause.MEETING
    return park(state, event.why, event.suspects, cause=cause, was_told=event.was_told)


def _on_votes(state: RankState, event: VotesGathered) -> Transition:
    plan = state.plan
    assert plan is not None
    before = state.commit.data_total if state.commit else ""
    verdict = judge(plan, event.votes, state.clip_norm, before)
    state = recheck.note_clean(state, event.votes)
    state, rename = checkpoints.note_saves(state, verdict.saves)
    state, verdict, deviations = recheck.heard(state, verdict, event.votes)
    if verdict.commit is None:
        return _refused(state, verdict, (*rename, *deviations))
    commit = verdict.commit
    others = repeats.differing_states(
        plan, state.outcomes, state.history, state.version, event.votes
    )
    if others:
        return fail(state, others, *rename, *deviations)
    if state.fork_rules is not None:
        commit = replace(commit, norms_sq=norms_by_block(plan, event.votes))
    state, needless = windows.note_copies(state, event.votes)
    state = windows.note_commit(state, commit, event.votes)
    record = windows.record_of(state, commit, event.votes)
    void = void_copies(plan, state.guards, event.votes, state.index)
    guarded = tuple(copy for copy in state.guarded if copy.stage not in void)
    rivals = rivals_of_copies(plan, state.guards, event.votes, state.index)
    told = tuple(
        TellVoidGuard(
            commit.step, end, others, is_outnumbered(plan, state.guards, event.votes, end)
        )
        for end, others in rivals.items()
    )
    applying = replace(
        state, phase=Phase.APPLYING, adopt_next=verdict.adopt_planned, guarded=guarded
    )
    actions = (*rename, *needless, *record, *deviations, *told, Apply(commit))
    return Transition(applying, actions, verdict.reason)


def _refused(
    state: RankState, verdict: Verdict, prefix: tuple[Action, ...], mark: str | None = None
) -> Transition:
    """Reduce again, compute the step again, or give up: the step is refused.

    Args:
        state: of the rank.
        verdict: that of the votes, of last statuses or of settle reports.
        prefix: actions that come first.
        mark: what stays a mark when the members meet again.
    """
    if verdict.hopeless:
        verdict = recheck.try_again(state, verdict)
    if verdict.doubted and not (verdict.hopeless or verdict.state_bad):
        return recheck.wait_for_another(state, verdict, prefix)
    worn = state.attempt + 1 >= state.max_attempts and not verdict.state_bad
    if verdict.hopeless or (worn and state.recomputed + 1 >= state.max_attempts):
        return fail(state, verdict.reason, *prefix)
    if verdict.bad and not (worn or verdict.state_bad):
        return recheck.compute_again(state, verdict, prefix)
    if worn:
        # Reducing the same partials again does not help: one of them may be wrong.
        state = replace(state, recomputed=state.recomputed + 1)
    if verdict.state_bad or worn:
        # What the chain of a bad state computed is bad in all its stages: nothing held is kept.
        assert state.plan is not None
        void = replace(state, held=(), mark=mark, refused_in=state.plan.quorum.id)
        if verdict.state_bad:
            # What was computed from a bad state says nothing of a device.
            void = replace(void, told=(), told_of=None, watched=None)
        prefix = (*prefix, *recheck.corrected_entry(state, verdict))
        if state.index in verdict.state_bad:
            void = replace(void, valid=False)
            # Its moments may have been wrong before its parameters were.
            suspect = range(max(0, state.version - 1), state.version + 1)
            prefix = (*prefix, *map(VoidSave, suspect))
        prefix = (*prefix, DropHeld(), Leave())
        cause = Cause.STATE if verdict.state_bad else Cause.RESULT
        return park(void, verdict.reason, (), *prefix, cause=cause, differing=verdict.differing)
    again = _reduce(replace(state, attempt=state.attempt + 1, mark=None))
    return replace(again, actions=(*prefix, *again.actions))


def _on_applied(state: RankState, event: Applied) -> Transition:
    """Note one more version, committed by the quorum's votes or rolled forward in a settle."""
    assert state.plan is not None
    assert state.settlement is not None
    rolling = state.settled < state.plan.quorum.id
    certified_in = state.settlement.certified_in if rolling else str(state.plan.quorum)
    doubt = state.settlement.doubt if rolling else None
    new = replace(
        state,
        version=state.version + 1,
        made=(),
        bad=(),
        bad_chains=(),
        told=() if doubt is None else doubt.told,
        told_of=None if doubt is None else doubt.type,
        watched=None,
        named_as=None,
        digest=event.digest,
        guarded=event.guarded,
        last_gradient=event.gradient if state.snapshots else "",
        last_masters=state.digest if state.snapshots and event.gradient else "",
        held=(),
        mark=None,
        attempt=0,
        recomputed=0,
        step_plan=state.step_plan if rolling else None,
        adopt_next=False,
        certified_in=certified_in,
        commit=event.commit,
        commit_chain=extend_commit_chain(state.commit_chain, event.commit),
    )
    if rolling and (state.plan.fork is not None or missed_fork(new, state.settlement)):
        new = forked(new, state.settlement)
    if rolling:
        return _begin(new, DropHeld())
    if new.window is None:
        new = windows.begin_window(new)
    new, writing = checkpoints.begin_due(new)
    prefix: tuple[Action, ...] = (DropHeld(), *writing)
    if state.adopt_next:
        return adopt(new, *prefix)
    if must_adopt(new):
        # Others may have begun the next step before they heard of the plan.
        return adopt(new, *prefix, Leave())
    return _compute(new, *prefix)


def _ignore(state: RankState, event: Event) -> Transition:
    del event
    return Transition(state, (WaitForPlan(),), "waits for the api's decision")


_TABLE: dict[tuple[Phase, type], Callable[[RankState, Any], Transition]] = {
    (Phase.IDLE, PlanSeen): _on_plan_idle,
    (Phase.PARKED, PlanSeen): _on_plan,
    (Phase.FINISHED, PlanSeen): _on_plan,
    (Phase.PAUSED, PlanSeen): _on_plan,
    (Phase.FAILED, PlanSeen): _ignore,
    (Phase.SETTLING, ReportsGathered): _on_reports,
    (Phase.SETTLING, QuorumLost): _on_lost,
    (Phase.HEALING, StateLoaded): _on_state_loaded,
    (Phase.HEALING, LoadFailed): _on_load_failed,
    (Phase.HEALING, ComputeBroken): _on_compute_broken,
    (Phase.HEALING, QuorumLost): _on_lost,
    (Phase.COMPUTING, TodoDone): _on_todo_done,
    (Phase.COMPUTING, ComputeBroken): _on_compute_broken,
    (Phase.REDUCING, Reduced): _on_reduced,
    (Phase.REDUCING, QuorumLost): _on_lost,
    (Phase.VOTING, VotesGathered): _on_votes,
    (Phase.VOTING, QuorumLost): _on_lost,
    (Phase.APPLYING, Applied): _on_applied,
    (Phase.SAVING, SavesGathered): _on_saves,
    (Phase.SAVING, QuorumLost): _on_lost,
}
"""The transitions: the events that each phase accepts. Any other event is a bug of the shell."""
