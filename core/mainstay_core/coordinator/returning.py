"""Waits for trainers that were only cut off, and takes them back with what was given up as lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mainstay_core.coordinator import ladder, seating
from mainstay_core.coordinator.events import Transition
from mainstay_core.coordinator.names import pod_name
from mainstay_core.coordinator.publishing import publish
from mainstay_core.coordinator.records import open_loss, open_suspicion
from mainstay_core.coordinator.seating import Draft
from mainstay_core.coordinator.seats import Seat, keep_whole, living_seats
from mainstay_core.coordinator.siting import usable_slots
from mainstay_core.coordinator.situation import cut_off, has_asked
from mainstay_core.coordinator.state import CoordinatorState, holds_state
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.plan import Member, Method, Plan


def wait_for_silent(state: CoordinatorState, answer: ladder.Decision) -> ladder.Decision:
    """Return the answer to wait for holders that were cut off, before a stage is made anew."""
    inner = state.shape.ranks_per_stage > 1
    places = sorted({m.rank.position for m in cut_off(state)})
    stages = tuple((stage, number if inner else None) for stage, number in places)
    reason = f"{answer.reason}{_unless_heard(state)}"
    lack = ladder.Lack(row=ladder.Row.APPROXIMATE, stages=stages, silent=True)
    return replace(answer, row=ladder.Row.WAIT, exact=True, reason=reason, lack=lack)


def _unless_heard(state: CoordinatorState) -> str:
    """Return who has the lost state and was only cut off, as the end of a sentence."""
    names = ", ".join(dict.fromkeys(pod_name(state, m.slot.pod) for m in cut_off(state)))
    return f", unless {names} is heard in time, which was only cut off"


def wait_for_outline(
    state: CoordinatorState, answer: ladder.Decision, *, silent: bool
) -> ladder.Decision:
    """Return the answer to wait until a member has told the store that lost the job of blocks.

    Args:
        state: of the job.
        answer: without the wait.
        silent: whether holders that were only cut off are waited for at the same time.
    """
    places = sorted(
        {
            members[0].rank.position
            for members in (state.plan.positions if state.plan is not None else ())
            if not any(holds_state(state, member) for member in members)
        }
    )
    inner = state.shape.ranks_per_stage > 1
    stages = tuple((stage, number if inner else None) for stage, number in places)
    reason = (
        "the store was lost, and no trainer has told again yet of what blocks the stages consist: "
        f"a lost one may be made anew{_unless_heard(state) if silent else ''}"
    )
    lack = ladder.Lack(row=ladder.Row.APPROXIMATE, stages=stages, outline=True, silent=silent)
    return replace(answer, row=ladder.Row.WAIT, exact=True, reason=reason, lack=lack)


def note_silent(
    state: CoordinatorState, recovered: CoordinatorState, plan: Plan
) -> CoordinatorState:
    """Return the state with the holders that a plan gives up which are only silent.

    Args:
        state: for which the plan was made.
        recovered: by the plan.
        plan: it tells its members to ask first: nobody goes back before they have asked.
    """
    lives = [m.incarnation for m in cut_off(state)] if plan.asks_first else []
    kept = state.silent if plan.asks_first else ()
    return replace(recovered, silent=tuple(sorted({*kept, *lives})))


def take_back(
    state: CoordinatorState, lost: Sequence[Member], now_s: float, nonce: str
) -> Transition | None:
    """Have a holder that was silent meet with those who have asked what becomes of its stage.

    Nobody has gone back or forward since. If it does not have the state after all, they ask again,
    and it is not taken back a second time.

    Args:
        state: of the job.
        lost: members that are gone.
        now_s: for the plan.
        nonce: for the plan.

    Returns:
        None if nobody has asked, or no such holder is there.
    """
    if not has_asked(state) or state.plan is None:
        return None
    empty = {
        members[0].rank.position
        for members in state.plan.positions
        if not any(holds_state(state, member) for member in members)
    }
    # A trainer that is held back disturbs nobody in a job that stands still.
    back = [
        Seat(
            stage=slot.stage,
            inner=slot.inner,
            replica=None,
            slot=slot.slot,
            incarnation=slot.incarnation,
            joining=True,
        )
        for slot in usable_slots(state, math.inf)
        if slot.incarnation is not None
        and slot.incarnation in state.silent
        and slot.stage is not None
        and (slot.stage, slot.inner) in empty
    ]
    positions = state.shape.positions
    seats = keep_whole([*living_seats(state), *back], len(positions))
    if not back or {s.position for s in seats} != set(positions):
        return None
    if not any(s.replica is not None for s in seats):
        seats = seating.mate(state, seats, most=state.wanted)
    names = ", ".join(dict.fromkeys(pod_name(state, s.slot.pod) for s in back))
    reason = f"{names} is heard again, which was only cut off: it may have what is lost"
    draft = Draft(method=Method.REFORM, planned=False, reason=reason, now_s=now_s, nonce=nonce)
    asking = replace(state, unreached=False, silent=())
    plan = seating.compose(asking, seats, draft)
    opened = open_loss if lost or state.suspicion is None else open_suspicion
    return publish(opened(asking, lost, plan, reason), plan, JobPhase.RECOVERING)
