"""Decides what follows after a fault: recover, re-form, wait, or end the job.

Each function looks at the whole state, not at the event that changed it: a decision depends on what
is known, not on the order in which it was noted. A transition makes at most one plan, as a plan
takes one nonce.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from mainstay_core.base.ids import Slot
from mainstay_core.coordinator import ladder, repeats, seating, taints
from mainstay_core.coordinator.causes import Repetition, Suspicion
from mainstay_core.coordinator.events import Announce, Transition
from mainstay_core.coordinator.finishing import decide_finishing, is_finishing
from mainstay_core.coordinator.leaving import outgoing_died, outgoing_missed, still_needed
from mainstay_core.coordinator.names import place_name, slot_name
from mainstay_core.coordinator.permission import use_permission, with_permission
from mainstay_core.coordinator.planned import decide_between_faults
from mainstay_core.coordinator.publishing import end_job, publish
from mainstay_core.coordinator.records import drop_hand_overs, open_loss, open_suspicion
from mainstay_core.coordinator.repeated_forks import make_again
from mainstay_core.coordinator.repeats import Rung
from mainstay_core.coordinator.returning import (
    note_silent,
    take_back,
    wait_for_outline,
    wait_for_silent,
)
from mainstay_core.coordinator.scaling import may_still_come
from mainstay_core.coordinator.seating import Draft
from mainstay_core.coordinator.siting import usable_slots
from mainstay_core.coordinator.situation import (
    awaits_outline,
    find_situation,
    has_asked,
    rules_of,
    waits_until,
)
from mainstay_core.coordinator.state import (
    CoordinatorState,
    Waiting,
    all_settled,
    holds_state,
    is_living,
    lost_members,
    with_slot,
)
from mainstay_core.coordinator.suspension import has_paused, pause_plan, resume_now, suspend_now
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.plan import Member, Method, Plan

_AGAIN = repeats.Escalation(rung=Rung.AGAIN)
_REFILLS = {
    ladder.Row.REPLAY: Method.REPLAY,
    ladder.Row.RESTART: Method.RESTART,
    ladder.Row.APPROXIMATE: Method.APPROXIMATE,
}
"""Rows whose plan gives the places of empty stages to other trainers."""
MAX_PROBE_DOUBLINGS = 5
"""Bound on the doublings of the pause before a re-form: a quorum that fails again and again is
re-formed ever more slowly, up to 32 x probe_s."""


def decide_running(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Complete, recover, re-form or join: do the first that is due."""
    back = taints.go_back(state, now_s, nonce)
    if back is not None:
        return back
    if is_finishing(state):
        return decide_finishing(state, now_s)
    if has_paused(state) and state.suspend:
        return suspend_now(state, now_s)
    lost = lost_members(state)
    if lost:
        return _taking_back(state, lambda whole: _recover(whole, lost, now_s, nonce))
    if state.rivals:
        return _meet_again(state, "supervisors hold another plan of the same id", now_s, nonce)
    if state.suspicion is not None:
        return _taking_back(state, lambda whole: _reform(whole, now_s, nonce))
    missed = outgoing_missed(state, now_s)
    if missed:
        return _meet_again(state, _ended_early(state, missed), now_s, nonce, missed)
    assert state.plan is not None
    if state.plan.pause and not state.suspend:
        return _meet_again(state, "the job is not to be suspended any more", now_s, nonce)
    if state.phase is not JobPhase.RUNNING or not all_settled(state) or state.plan.pause:
        return Transition(state=state)
    if state.suspend and state.shape.steps - state.step > 1:
        return publish(state, pause_plan(state, now_s, nonce), JobPhase.RUNNING)
    return decide_between_faults(state, now_s, nonce)


def _taking_back(
    state: CoordinatorState, decide: Callable[[CoordinatorState], Transition]
) -> Transition:
    """Decide on an unplanned plan as if the planned plan before it had dropped no living member.

    The dropped members come back as followers: they may be the last to hold what is lost now. The
    next planned plan drops them again.
    """
    back = still_needed(state)
    if not back or state.plan is None:
        return decide(state)
    members = state.plan.members
    returning = tuple(
        replace(
            member,
            index=len(members) + number,
            rank=replace(member.rank, replica=None),
            since=state.last_id + 1,
            joining=False,
        )
        for number, member in enumerate(back)
    )
    plan = replace(state.plan, members=(*members, *returning))
    decided = decide(replace(state, plan=plan))
    return decided if decided.plan is not None else decide(state)


def _recover(
    state: CoordinatorState, lost: tuple[Member, ...], now_s: float, nonce: str
) -> Transition:
    """Enter the ladder with everything that is known to be lost.

    Nothing more than before may be: members ask what to do where no store brings a stage back.
    """
    back = take_back(state, lost, now_s, nonce)
    if back is not None:
        return back
    rules = rules_of(state)
    answer = ladder.decide(find_situation(state, len(lost), now_s, rules))
    takers = usable_slots(state, now_s)
    if answer.row is ladder.Row.WAIT:
        # A trainer that is held back disturbs nobody in a job that stands still.
        answer = ladder.decide(find_situation(state, len(lost), math.inf, rules))
        takers = usable_slots(state, math.inf)
    until_s = waits_until(state, rules)
    if answer.row in (ladder.Row.RESTART, ladder.Row.WAIT) and awaits_outline(state):
        both = wait_for_outline(state, answer, silent=now_s < until_s)
        return _wait(state, both, now_s, least_until_s=until_s)
    if answer.row is ladder.Row.APPROXIMATE and now_s < until_s:
        return _wait(state, wait_for_silent(state, answer), now_s, least_until_s=until_s)
    if answer.row is ladder.Row.MASK:
        draft = Draft(
            method=Method.MASK, planned=False, reason=answer.reason, now_s=now_s, nonce=nonce
        )
        plan: Plan | None = seating.mask_plan(state, draft)
    elif answer.row in _REFILLS:
        draft = Draft(
            method=_REFILLS[answer.row],
            planned=False,
            reason=answer.reason,
            now_s=now_s,
            nonce=nonce,
        )
        plan = seating.restart_plan(state, draft, takers)
        if plan is not None and answer.row is ladder.Row.APPROXIMATE:
            plan = seating.with_fork(state, plan)
    else:
        plan = None
    if plan is None:
        return _wait(state, with_permission(state, answer, now_s), now_s)
    state, allowed_by = use_permission(state, plan)
    opened = open_loss if lost or state.suspicion is None else open_suspicion
    recovered = note_silent(state, opened(state, lost, plan, answer.reason, allowed_by), plan)
    if plan.method is Method.RESTART:
        recovered = replace(recovered, restarted_id=plan.quorum.id)
    return publish(recovered, plan, JobPhase.RECOVERING)


def _wait(
    state: CoordinatorState, answer: ladder.Decision, now_s: float, least_until_s: float = 0.0
) -> Transition:
    """Carry out row 6: keep all members parked until the condition holds or time is over.

    Args:
        state: of the job.
        answer: why it waits.
        now_s: wall clock.
        least_until_s: before which the deadline does not begin to run.
    """
    old, reason = state.waiting, answer.reason
    if old is not None and old.lack == answer.lack:
        return Transition(state=state)
    deadline_s = old.deadline_s if old else now_s + state.config.startup_deadline_s
    deadline_s = max(deadline_s, least_until_s + state.config.startup_deadline_s)
    waiting = Waiting(
        reason=reason,
        since_s=old.since_s if old else now_s,
        deadline_s=deadline_s,
        lack=answer.lack,
    )
    fails = f"; fails in {deadline_s - now_s:.0f} s if that does not change"
    # In a cluster other pods may come later than any deadline.
    message = f"waits: {reason}{'' if state.config.namespace else fails}"
    return Transition(
        state=replace(state, phase=JobPhase.WAITING, waiting=waiting),
        actions=(Announce(code="Waiting", message=message, warning=True),),
        reason=message,
    )


def decide_waiting(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Enter the ladder again. At the deadline the job has failed."""
    assert state.waiting is not None
    back = taints.go_back(state, now_s, nonce)
    if back is not None:
        return back
    if is_finishing(state):
        return decide_finishing(state, now_s)
    if state.suspend:
        # Some stage has no state left to write: the checkpoint on the disk is all that remains.
        return suspend_now(state, now_s)
    lost = lost_members(state)
    asked = None
    climbs = bool(lost) or has_asked(state)
    if not climbs and state.suspicion is not None and state.suspicion.doubted:
        asked = _ask_another(state, now_s, nonce)
    if not climbs and asked is None:
        reason = "the members that were silent are heard again"
        return _meet_again(state, reason, now_s, nonce)
    result = asked or _taking_back(state, lambda whole: _recover(whole, lost, now_s, nonce))
    overdue = result.state.phase is JobPhase.WAITING and now_s >= state.waiting.deadline_s
    if overdue and not may_still_come(state, len(state.shape.positions)):
        reason = f"waited {now_s - state.waiting.since_s:.0f} s: {state.waiting.reason}"
        return result.then(end_job(result.state, JobPhase.FAILED, reason))
    return result


def decide_suspended(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Form again, once nobody wants the job suspended any more."""
    del nonce
    return Transition(state=state) if state.suspend else resume_now(state, now_s)


def _meet_again(
    state: CoordinatorState,
    reason: str,
    now_s: float,
    nonce: str,
    left: tuple[Member, ...] = (),
) -> Transition:
    """Make a newer plan of the same members, so that they meet in one quorum.

    Args:
        state: of the job.
        reason: why they are to meet.
        now_s: for the plan.
        nonce: for the plan.
        left: members that a planned plan dropped, and whose votes the others wait for in vain: a
            planned plan does not interrupt them.
    """
    if has_asked(state):
        whole = drop_hand_overs(state, left)
        return _taking_back(whole, lambda known: _recover(known, left, now_s, nonce))
    method = Method.MASK if left else Method.REFORM
    draft = Draft(method=method, planned=False, reason=reason, now_s=now_s, nonce=nonce)
    plan = seating.mask_plan(state, draft)
    opened = open_loss(drop_hand_overs(state, left), left, plan, reason)
    return publish(opened, plan, JobPhase.RECOVERING)


def _reform(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Form the same quorum again after a failed collective: nobody is known to be gone.

    A pause leaves time for evidence. A member that is suspected a second time without a commit in
    between is left out, if the others can do without it (protocol section 8). A cause that comes
    back again and again escalates (:mod:`~mainstay_core.coordinator.repeats`).
    """
    assert state.suspicion is not None
    doublings = min(state.reforms, MAX_PROBE_DOUBLINGS)
    left = outgoing_died(state)
    if not left and now_s - state.suspicion.first_s < state.config.probe_s * 2**doublings:
        return Transition(state=state)
    asked = None if left else _answer(state, state.suspicion, now_s, nonce)
    if asked is not None:
        return asked
    if has_asked(state):
        return _recover(drop_hand_overs(state, left), left, now_s, nonce)
    # Whose death is known explains what the others tell, and who asks has no fault to tell: these
    # are no repetitions.
    asks = state.suspicion.unreached
    state, cause = (state, None) if left or asks else repeats.note_repetition(state)
    answer = repeats.escalate(state, cause) if cause is not None else _AGAIN
    if not left and answer.rung < Rung.RESTART:
        asked = _ask_another(state, now_s, nonce)
        if asked is not None:
            return asked
    if answer.rung is Rung.FAIL:
        return end_job(state, JobPhase.FAILED, answer.reason)
    if cause is not None:
        state = repeats.note_answer(state, cause, answer)
    if cause is not None and answer.rung is Rung.RESTART:
        return _restart_all(state, cause, answer.reason, now_s, nonce)
    assert state.plan is not None
    assert state.suspicion is not None
    excluded = tuple(m for m in state.plan.members if m.slot in answer.excluded)
    excluded = excluded or _repeat_suspects(state)
    method, reason = _method_of(state, answer, excluded, left)
    plan = seating.mask_plan(
        state,
        Draft(
            method=method,
            planned=False,
            reason=reason,
            now_s=now_s,
            nonce=nonce,
            avoid_rendezvous=repeats.hosts_to_avoid(state, cause),
        ),
        frozenset(m.slot for m in excluded),
    )
    if method is Method.RESTART and state.approximate_since is not None:
        plan = seating.next_course(plan)
    opened = open_suspicion(drop_hand_overs(state, left), excluded, plan, reason)
    for member in excluded:
        opened = _hold_back(opened, member.slot, now_s)
    suspected = tuple(sorted({*state.suspected_before, *state.suspicion.suspects}))
    opened = replace(
        opened,
        suspected_before=suspected,
        reforms=state.reforms + 1,
        asked=state.asked + asks,
    )
    if method is Method.RESTART:
        opened = replace(opened, restarted_id=plan.quorum.id)
    return publish(opened, plan, JobPhase.RECOVERING)


def _answer(
    state: CoordinatorState, asked: Suspicion, now_s: float, nonce: str
) -> Transition | None:
    """Return what members are told that ask for the next plan; None if something has failed."""
    if asked.repeats is not None:
        return make_again(state, asked.repeats, now_s, nonce)
    return _recover(state, (), now_s, nonce) if asked.unreached and state.unreached else None


def _ask_another(state: CoordinatorState, now_s: float, nonce: str) -> Transition | None:
    """Have another trainer compute what devices have computed differently, or wait for one.

    The same members meet again if a chain of theirs may decide; but once only, as what it tells may
    not count where these devices differ.

    Returns:
        None without such devices, or where none of them serves any more.
    """
    suspicion, plan = state.suspicion, state.plan
    assert suspicion is not None
    assert plan is not None
    places = [m.rank for m in plan.members if m.slot in suspicion.doubted and is_living(state, m)]
    if not places:
        return None
    names = ", ".join(place_name(state, slot) for slot in suspicion.doubted)
    said = f"{names} have computed a type of stage {places[0].stage} differently"
    living = {m.slot for m in plan.members if is_living(state, m)}
    gone = [slot_name(state, slot) for slot in suspicion.doubted if slot not in living]
    if gone:
        # It was hit once perhaps, or the other one is wrong each time: the words are the same.
        said += f", and {', '.join(gone)} cannot be asked again"
    draft = Draft(
        method=Method.REFORM,
        planned=False,
        reason=f"{said}: another trainer computes it, too",
        now_s=now_s,
        nonce=nonce,
    )
    # A trainer that is held back disturbs nobody in a job that stands still.
    known = frozenset(suspicion.doubted)
    made = None if repeats.was_asked(state) else seating.serving_plan(state, draft, known)
    if made is not None:
        state = repeats.note_asked(state)
    made = made or seating.another_plan(state, draft, known, usable_slots(state, now_s))
    made = made or seating.another_plan(state, draft, known, usable_slots(state, math.inf))
    if made is not None:
        opened = open_suspicion(state, (), made, draft.reason)
        opened = replace(opened, reforms=state.reforms + 1)
        return publish(opened, made, JobPhase.RECOVERING)
    reason = (
        f"{said}: needs another trainer of that stage, on another device, to say which of them is "
        "wrong; one more pod is enough (spec.spares.replicas), on another node unless all have GPUs"
    )
    inner = places[0].inner if plan.ranks_per_stage > 1 else None
    lack = ladder.Lack(row=ladder.Row.WAIT, stages=((places[0].stage, inner),))
    answer = ladder.Decision(row=ladder.Row.WAIT, exact=True, reason=reason, why_not=(), lack=lack)
    return _wait(state, answer, now_s)


def _restart_all(
    state: CoordinatorState, cause: Repetition, reason: str, now_s: float, nonce: str
) -> Transition:
    """Have all members restart from the newest checkpoint, if possible without those named."""
    assert state.plan is not None
    named = frozenset({*cause.sources, *cause.witnesses})
    draft = Draft(
        method=Method.RESTART,
        planned=False,
        reason=reason,
        now_s=now_s,
        nonce=nonce,
        avoid_rendezvous=repeats.hosts_to_avoid(state, cause),
    )
    takers = usable_slots(state, now_s)
    without = seating.void_plan(state, draft, takers, named)
    plan = without or seating.void_plan(state, draft, takers, frozenset())
    assert plan is not None, "the plan before had a member in each position"
    left = [m for m in state.plan.members if m.slot in named] if without else []
    state = open_suspicion(state, left, plan, reason)
    for member in left:
        state = _hold_back(state, member.slot, now_s)
    state = replace(state, reforms=state.reforms + 1, restarted_id=plan.quorum.id)
    return publish(state, plan, JobPhase.RECOVERING)


def _method_of(
    state: CoordinatorState,
    answer: repeats.Escalation,
    excluded: tuple[Member, ...],
    left: tuple[Member, ...],
) -> tuple[Method, str]:
    """Return by which method the same members meet again, or all but those left out, and why."""
    assert state.suspicion is not None
    method = Method.MASK if excluded or left else Method.REFORM
    if answer.excluded:
        return method, answer.reason
    if left:
        return method, _ended_early(state, left)
    if excluded:
        names = ", ".join(slot_name(state, m.slot) for m in excluded)
        return method, f"suspected twice without a commit in between: {names}"
    if state.suspicion.unreached:
        return method, "not all is known of what pods keep in memory: the same members ask again"
    if repeats.is_undecided(state.suspicion):
        return Method.RESTART, (
            "copies of a state differ and none has a majority: all go on from the newest version "
            "that is kept elsewhere"
        )
    return method, "nobody is confirmed gone: the same members meet again"


def _ended_early(state: CoordinatorState, left: tuple[Member, ...]) -> str:
    names = ", ".join(slot_name(state, m.slot) for m in left)
    return f"ended before the plan that drops them was adopted: {names}"


def _repeat_suspects(state: CoordinatorState) -> tuple[Member, ...]:
    """Return the members to leave out: suspected again, silent, and needed by no position."""
    assert state.plan is not None
    assert state.suspicion is not None
    again = set(state.suspicion.suspects) & set(state.suspected_before)
    excluded = [
        m for m in state.plan.members if m.slot in again and m.slot not in state.suspicion.reporters
    ]
    for position in state.plan.positions:
        holders = [m for m in position if holds_state(state, m)]
        if all(m in excluded for m in holders):
            return ()
    return tuple(excluded)


def _hold_back(state: CoordinatorState, slot: Slot, now_s: float) -> CoordinatorState:
    """Hold an excluded slot back, longer each time: each failed join costs the others a settle."""
    known = state.slot(slot)
    assert known is not None
    pause_s = state.config.restart_grace_s * 2 ** min(known.failures, MAX_PROBE_DOUBLINGS)
    return with_slot(
        state, replace(known, failures=known.failures + 1, held_until_s=now_s + pause_s)
    )
