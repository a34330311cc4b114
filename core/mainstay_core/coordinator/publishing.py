"""Makes a decision visible: a new plan, or the end of the job."""

from __future__ import annotations

from mainstay_core.base.values import replace
from mainstay_core.coordinator.events import (
    Action,
    Announce,
    EndJob,
    PublishPlan,
    RecordRecovery,
    Transition,
)
from mainstay_core.coordinator.records import close_all, is_shown
from mainstay_core.coordinator.state import CoordinatorState, with_slots
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.plan import Member, Method, Plan
from mainstay_core.wire.reinitialisation import Permission


def publish(state: CoordinatorState, plan: Plan, phase: JobPhase) -> Transition:
    """Return the state with ``plan`` as the newest one, and the actions that make it visible."""
    plan = replace(plan, outgoing=_outgoing(state.plan, plan), taints=state.taints)
    seated = []
    for member in plan.members:
        slot = state.slot(member.slot)
        assert slot is not None
        if (slot.stage, slot.inner) != member.rank.position:
            seated.append(replace(slot, stage=member.rank.stage, inner=member.rank.inner))
    state = with_slots(state, seated)
    begins_lineage = state.plan is not None and plan.lineage > state.plan.lineage
    starts = plan.method is Method.START
    state = replace(
        state,
        phase=phase,
        plan=plan,
        last_id=plan.quorum.id,
        adopted_at_s={},
        settled_at_s={},
        settled_step=None,
        commits=0,
        # Who had finished does so again, perhaps in another way.
        finals=() if begins_lineage or starts else state.finals,
        silent=() if begins_lineage else state.silent,
        paused=(),
        suspicion=None,
        waiting=None,
        rivals=(),
        told_history=None,
        is_history_told=False,
        permission=_left_permission(state.permission, plan),
    )
    recorded = tuple(
        RecordRecovery(recovery=o.recovery)
        for o in state.recoveries
        if o.recovery.quorum == plan.quorum and is_shown(o)
    )
    message = f"{plan.quorum} ({plan.method}): {plan.reason}"
    actions: tuple[Action, ...] = (
        PublishPlan(plan=plan),
        *recorded,
        Announce(
            code="PlanPublished", message=message, warning=not plan.planned and bool(recorded)
        ),
    )
    return Transition(state=state, actions=actions, reason=message)


def _left_permission(given: Permission | None, plan: Plan) -> Permission | None:
    """Return a recovery's permission as far as it outlasts a plan.

    One for the recovery that the job waits for ends where all go back instead: what they load may
    have what was made by it. One that was given ahead may count again once all go on.
    """
    ends = plan.method is Method.RESTART and given is not None and not given.is_ahead
    return None if ends else given


def _outgoing(before: Plan | None, plan: Plan) -> tuple[Member, ...]:
    """Return the members that a planned plan drops.

    The others need their votes until they adopt it.
    """
    if before is None or not plan.planned:
        return ()
    return tuple(m for m in before.members if plan.member_of(m.slot, m.incarnation) is None)


def end_job(state: CoordinatorState, phase: JobPhase, reason: str) -> Transition:
    """Return the state of the ended job, and the actions that tell everybody."""
    state, closed = close_all(state)
    state = replace(state, phase=phase, waiting=None, suspicion=None, outcome=reason)
    state = replace(state, permission=None, ahead=None)
    actions: tuple[Action, ...] = (
        *(RecordRecovery(recovery=r) for r in closed),
        Announce(code=phase.capitalize(), message=reason, warning=phase is JobPhase.FAILED),
        EndJob(state=phase, reason=reason),
    )
    return Transition(state=state, actions=actions, reason=reason)
