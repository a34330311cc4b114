"""Suspends a job, so that it stands still without pods, and resumes it.

    running --request--> a planned plan that pauses --all pause--> suspended
    suspended --request withdrawn--> forming --START--> running, from the newest checkpoint

The pausing plan has the same members. A member adopts it at the end of a step, like any planned
plan, and computes no further. It writes a checkpoint as after the last step, and reports that it
pauses. No other plan is made meanwhile, as planned plans need votes.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import Slot
from mainstay_core.coordinator import seating
from mainstay_core.coordinator.events import (
    Announce,
    EndJob,
    RecordRecovery,
    SuspendRequested,
    Transition,
)
from mainstay_core.coordinator.records import close_all
from mainstay_core.coordinator.seats import living_seats
from mainstay_core.coordinator.state import MAX_ENDED, CoordinatorState
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Paused
from mainstay_core.wire.plan import Method, Plan

SUSPENDED = "the job is suspended"


def note_suspend(state: CoordinatorState, event: SuspendRequested, now_s: float) -> Transition:
    """Return the state in which a suspension is wanted, or not wanted any more.

    Raises:
        InvalidSpecError: what was computed could not be kept.
    """
    del now_s
    if event.suspend == state.suspend:
        return Transition(state=state, reason="that is wanted already")
    saves = state.config.checkpoint_dir and state.shape.checkpoint_every_steps
    if event.suspend and state.plan is not None and not saves:
        raise InvalidSpecError(
            "spec.suspend",
            "needs a durable checkpoint to go on from: this job has none, as "
            "spec.checkpoint.everySteps is 0; it can be stopped, or deleted",
        )
    what = "a suspension is wanted" if event.suspend else "the job is to go on"
    message = f"{what}: {event.who} asked for it"
    announce = Announce(code="SuspendWanted" if event.suspend else "ResumeWanted", message=message)
    return Transition(
        state=replace(state, suspend=event.suspend), actions=(announce,), reason=message
    )


def note_paused(state: CoordinatorState, fact: Paused, now_s: float) -> Transition:
    """Return the state in which a member has written what it can, and computes no further."""
    at_s = fact.observed_at_s or now_s
    plan = state.plan
    if plan is None or fact.quorum != plan.quorum:
        return Transition(state=state, reason=f"{fact.kind} of {fact.quorum} is stale", stale=True)
    member = plan.member_of(Slot(pod=fact.pod, index=fact.slot), fact.incarnation)
    if member is None or member.index in state.paused:
        return Transition(state=state, reason="known, or no member")
    state = replace(
        state,
        paused=tuple(sorted({*state.paused, member.index})),
        # A member that pauses has settled, even if a store that fell back does not know it.
        settled_at_s={member.index: at_s, **state.settled_at_s},
        step=max(state.step, fact.step or 0),
        durable=max(state.durable, fact.durable or 0),
    )
    return Transition(state=state, reason=f"{member.rank} pauses")


def pause_plan(state: CoordinatorState, now_s: float, nonce: str) -> Plan:
    """Return the plan in which the same members pause."""
    reason = "the job is to be suspended: all write a checkpoint and compute no further"
    draft = seating.Draft(
        method=Method.SUSPEND, planned=True, reason=reason, now_s=now_s, nonce=nonce
    )
    return replace(seating.compose(state, living_seats(state), draft), pause=True)


def has_paused(state: CoordinatorState) -> bool:
    """Return whether every member of a pausing plan has reported that it pauses."""
    plan = state.plan
    return plan is not None and plan.pause and len(state.paused) == len(plan.members)


def suspend_now(state: CoordinatorState, now_s: float) -> Transition:
    """Return the suspended job: every pod is told to end, and the job needs no pods.

    A permission that was given ahead, and whose recovery has not come to an end, stays until all go
    on again: a checkpoint may have a stage that was made anew by it, of which nobody has told.
    """
    state, closed = close_all(state)
    given = state.permission
    lost = max(0, state.step - state.durable) if state.plan is not None else 0
    message = f"suspended at step {state.step}"
    if lost:
        message += f"; the newest checkpoint is of step {state.durable}: {lost} will be done again"
    state = replace(
        state,
        phase=JobPhase.SUSPENDED,
        paused=(),
        suspicion=None,
        waiting=None,
        permission=given if given is not None and given.is_ahead else None,
        unheard=(),
        rivals=(),
        pods=tuple(
            p if p.gone else replace(p, gone=True, why=SUSPENDED, gone_at_s=now_s)
            for p in state.pods
        ),
        slots=tuple(
            replace(
                s,
                incarnation=None,
                ended=s.ended if s.incarnation is None else (*s.ended, s.incarnation)[-MAX_ENDED:],
                restarting=False,
                failures=0,
                held_until_s=0.0,
            )
            for s in state.slots
        ),
        domains={},
    )
    return Transition(
        state=state,
        actions=(
            *(RecordRecovery(recovery=r) for r in closed),
            Announce(code="Suspended", message=message, warning=bool(lost)),
            EndJob(state=JobPhase.SUSPENDED, reason=SUSPENDED),
        ),
        reason=message,
    )


def resume_now(state: CoordinatorState, now_s: float) -> Transition:
    """Return the job as it forms again: new pods come, and load the newest checkpoint."""
    message = "the job goes on once its pods are there"
    if state.plan is not None:
        message += f", from the checkpoint of step {state.durable}"
    state = replace(
        state,
        phase=JobPhase.FORMING,
        forming_since_s=now_s,
        # Facts of trainers that came meanwhile were ignored: all trainers are reported again.
        restored_at_s=now_s,
        restarted_id=state.last_id + 1,
        settled_at_s={},
        adopted_at_s={},
        settled_step=None,
        commits=0,
        reforms=0,
        suspected_before=(),
    )
    return Transition(
        state=state, actions=(Announce(code="Resumed", message=message),), reason=message
    )
