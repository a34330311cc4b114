"""Decides on the first plan of a job: who takes part, and when it is too late to start.

A job forms when it is submitted, and again when it was suspended.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.coordinator import seating
from mainstay_core.coordinator.events import Action, Transition
from mainstay_core.coordinator.fingerprints import difference_of, refusal
from mainstay_core.coordinator.names import slot_name
from mainstay_core.coordinator.progress import begin_progress
from mainstay_core.coordinator.publishing import end_job, publish
from mainstay_core.coordinator.scaling import may_still_come
from mainstay_core.coordinator.siting import usable_slots
from mainstay_core.coordinator.state import CoordinatorState, with_slot
from mainstay_core.coordinator.suspension import suspend_now
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.plan import Plan


def decide_forming(state: CoordinatorState, now_s: float, nonce: str) -> Transition:
    """Publish the first plan once enough trainers are up, or give up at the deadline."""
    if state.suspend:
        return suspend_now(state, now_s)
    wanted, least = state.wanted, state.shape.min_replicas
    since_s = state.forming_since_s or state.created_at_s
    overdue = now_s - since_s >= state.config.startup_deadline_s
    if not overdue and len(usable_slots(state, now_s)) < wanted * len(state.shape.positions):
        return Transition(state=state)
    # Not earlier: the lowest slot, which sets the fingerprint, might have come up later.
    state, refusals = _same_arithmetic(state, now_s)
    result = Transition(state=state, actions=refusals)
    for num_replicas in range(wanted, (least if overdue else wanted) - 1, -1):
        plan = seating.start_plan(state, num_replicas, now_s, nonce)
        if plan is not None:
            state = replace(state, fingerprint=_fingerprint_of(state, plan))
            state = begin_progress(state, now_s)
            return result.then(publish(state, plan, JobPhase.RUNNING))
    if overdue and not may_still_come(state, least * len(state.shape.positions)):
        return result.then(end_job(state, JobPhase.FAILED, _missing(state, now_s)))
    return result


def _same_arithmetic(
    state: CoordinatorState, now_s: float
) -> tuple[CoordinatorState, tuple[Action, ...]]:
    """Refuse the trainers whose fingerprint is not that of the first trainer, in slot order."""
    usable = sorted(usable_slots(state, now_s), key=lambda s: s.slot)
    if not usable:
        return state, ()
    ours = state.fingerprints.get(str(usable[0].slot), {})
    refusals: list[Action] = []
    for slot in usable[1:]:
        theirs = state.fingerprints.get(str(slot.slot), {})
        difference = difference_of(ours, theirs)
        if difference:
            state = with_slot(state, replace(slot, refused=difference))
            refusals.append(refusal(slot_name(state, slot.slot), difference))
    return state, tuple(refusals)


def _fingerprint_of(state: CoordinatorState, plan: Plan) -> dict[str, str]:
    first = min(m.slot for m in plan.members)
    return state.fingerprints.get(str(first), {})


def _missing(state: CoordinatorState, now_s: float) -> str:
    """Return a sentence about what kept the job from starting."""
    shape = state.shape
    needed = shape.min_replicas * len(shape.positions)
    cells = f"{shape.min_replicas} x {shape.stages} cells"
    if shape.ranks_per_stage > 1:
        cells += f" of {shape.ranks_per_stage} ranks"
    up = [slot_name(state, s.slot) for s in usable_slots(state, now_s)]
    counted = (
        f"{len(up)} of the {needed} trainers needed for {cells}"
        f" were up after {state.config.startup_deadline_s:g} s ({', '.join(up) or 'none'})"
    )
    parts = [counted]
    parts += [
        f"{slot_name(state, s.slot)} is refused: {s.refused}" for s in state.slots if s.refused
    ]
    parts += [
        f"{slot_name(state, s.slot)} is down: {s.why}"
        for s in state.slots
        if s.incarnation is None and s.why
    ]
    if not state.pods:
        parts.append("no pod has registered")
    return "; ".join(parts)
