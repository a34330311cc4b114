"""How a pod that is told to end leaves: it serves on until its work is handed over.

    told to end --LEAVING told--> heard by the api --plan without this pod-->
    its trainers have adopted that --> released --nobody meets here--> ended

The api makes no plan that seats the pod after it has heard of the leave, so what
is decided here needs no answer of the api. A planned plan drops the pod, and the
others need its votes until they adopt it: so its own trainers' word that they
have adopted it counts, not the plan's arrival. After the deadline the pod ends as
it is; for the others that is a death like any other.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.supervisor.events import (
    Action,
    LeaveRequested,
    Release,
    SendFact,
    SlotPhase,
    SlotState,
    SupervisorState,
)
from mainstay_core.supervisor.slots import Transition
from mainstay_core.wire.facts import Leaving, Phase

EXIT_TERMINATED = 143
"""128 + SIGTERM: ended before its work was handed over."""


def can_leave(state: SupervisorState) -> bool:
    """Return whether there may be something to hand over, and somebody to tell."""
    return state.registered and state.settings.handover_s > 0


def leave_requested(state: SupervisorState, event: LeaveRequested, now_s: float) -> Transition:
    """Return what follows from being told to end; being told twice changes nothing."""
    if state.leaving is not None or state.ending:
        return Transition(state, (), f"{event.why}, again")
    grace_s = state.settings.handover_s
    fact = Leaving(
        pod=state.pod,
        evidence=event.why,
        observed_at_s=now_s,
        grace_s=grace_s,
    )
    state = replace(state, leaving=fact, leave_by_s=now_s + grace_s)
    return Transition(
        state, (SendFact(fact),), f"{event.why}: hands its work over, within {grace_s:g} s"
    )


def leave_acknowledged(state: SupervisorState, event: object, now_s: float) -> Transition:
    """Return the state in which the api knows of the leave."""
    del event, now_s
    return Transition(replace(state, leave_acknowledged=state.leaving is not None))


def repeated(state: SupervisorState) -> tuple[Action, ...]:
    """Return what is told again: an api that lost it must not count on this pod."""
    if state.leaving is None or state.released or state.ending:
        return ()
    return (SendFact(state.leaving),)


def release(state: SupervisorState) -> Transition:
    """Return the release of the pod, once no rank of it is needed."""
    due = state.leave_acknowledged and not (state.released or state.ending)
    if not due or not all(_is_free(state, slot) for slot in state.slots):
        return Transition(state)
    plan = state.plan
    if plan is not None and any(m.slot.pod == state.pod for m in plan.members):
        return Transition(state)
    return Transition(replace(state, released=True), (Release(),), "its work is handed over")


def _is_free(state: SupervisorState, slot: SlotState) -> bool:
    """Whether a slot's trainer, if any, has adopted the plan in which it has no place."""
    if slot.phase is not SlotPhase.UP or state.plan is None:
        return True
    status = slot.status
    return (
        status is not None
        and status.phase == Phase.IDLE
        and status.quorum is not None
        and status.quorum.id >= state.plan.quorum.id
    )
