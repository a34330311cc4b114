"""Decides how a pod that is told to end hands its work over before it ends.

    told to end --LEAVING sent--> acknowledged by the api --plan without this pod-->
    its trainers have adopted that --> released --nobody meets here--> ended

The api seats the pod in no plan once it knows of the leave, so the decisions here need no answer of
the api. A planned plan drops the pod, and the others need its votes until they adopt that plan. So
the pod waits until its own trainers say that they have adopted it; the plan's arrival is not
enough. After the deadline the pod ends as it is, which is a death like any other to the other pods.
"""

from __future__ import annotations

from mainstay_core.base.values import replace
from mainstay_core.supervisor.events import Action, LeaveRequested, Release, SendFact
from mainstay_core.supervisor.slots import Transition
from mainstay_core.supervisor.state import SlotPhase, SlotState, SupervisorState
from mainstay_core.wire.facts import Leaving, Phase

EXIT_TERMINATED = 143
"""128 + SIGTERM: the pod ended before its work was handed over."""


def can_leave(state: SupervisorState) -> bool:
    """Return whether there may be work to hand over and an api to tell."""
    return state.registered and state.settings.handover_s > 0


def leave_requested(state: SupervisorState, event: LeaveRequested, now_s: float) -> Transition:
    """Return what follows from being told to end. Being told twice changes nothing."""
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
    """Return the state in which the api knows that the pod leaves."""
    del event, now_s
    return Transition(replace(state, leave_acknowledged=state.leaving is not None))


def repeated(state: SupervisorState) -> tuple[Action, ...]:
    """Return the fact that the pod leaves, as an api that lost it must not count on this pod."""
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
    """Return whether a slot has no trainer, or one that has adopted the plan that drops it."""
    if slot.phase is not SlotPhase.UP or state.plan is None:
        return True
    status = slot.status
    return (
        status is not None
        and status.phase == Phase.IDLE
        and status.quorum is not None
        and status.quorum.id >= state.plan.quorum.id
    )
