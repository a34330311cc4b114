"""Notes which pods will end: the pod, the provider, or a user says so, or a device of it is wrong.

A pod that leaves serves until its work is handed over (the ladder's row 0). Leaving is a state, not
an event: a hand-over that a recovery or a missing successor prevents is done as soon as it can be.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.coordinator.events import Announce, DrainRequested, Transition
from mainstay_core.coordinator.names import named_by_pod, place_name, slot_name
from mainstay_core.coordinator.state import (
    CoordinatorState,
    PodState,
    all_settled,
    has_members,
    is_leaving,
    is_living,
    uid_of,
    with_pod,
)
from mainstay_core.coordinator.taints import note_taint
from mainstay_core.wire.facts import Leaving, Named
from mainstay_core.wire.plan import Member


def note_leaving(state: CoordinatorState, fact: Leaving, now_s: float) -> Transition:
    """Return the state in which a pod leaves, because the pod or the provider said so."""
    pod = state.pod(fact.pod)
    assert pod is not None
    at_s = fact.observed_at_s or now_s
    leave_by_s = at_s + fact.grace_s if fact.grace_s else 0.0
    return _leaves(state, pod, fact.evidence or "it says so", now_s, leave_by_s)


def note_named(state: CoordinatorState, fact: Named, now_s: float) -> Transition:
    """Return the state in which a pod leaves, because a device of it computes wrongly each time.

    What is fixed to a pod is replaced with it, so all slots of the pod go. That counts whatever
    has become of the trainer: the device is the same. Its steps are tainted also once it is gone.
    """
    pod, state = state.pod(fact.named.pod), note_taint(state, fact)
    if pod is None or pod.gone:
        name = slot_name(state, fact.named)
        return Transition(state=state, reason=f"{name} was wrong, and is gone")
    told = named_by_pod(state, fact.evidence) or "no detail"
    why = f"the device of {place_name(state, fact.named)} computes wrongly each time ({told})"
    return _leaves(state, pod, why, now_s, 0.0)


def note_drain(state: CoordinatorState, event: DrainRequested, now_s: float) -> Transition:
    """Return the state in which a pod leaves, because a user asked for it.

    Raises:
        RemoteProtocolError: there is no such pod, or it has gone.
    """
    pod = find_pod(state, event.pod)
    if pod is None:
        raise RemoteProtocolError(f"there is no living pod {event.pod}")
    return _leaves(state, pod, f"{event.who} asked for it", now_s, 0.0)


def find_pod(state: CoordinatorState, name: str) -> PodState | None:
    """Return the living pod with this UID, else the newest pod with this name."""
    living = [p for p in state.pods if not p.gone]
    named = [p for p in living if name in (uid_of(p), p.registration.name)]
    return max(named, key=lambda p: uid_of(p) == name, default=None)


def _leaves(
    state: CoordinatorState, pod: PodState, why: str, now_s: float, leave_by_s: float
) -> Transition:
    name = pod.registration.name
    if pod.leaving:
        # A drained pod that is told to end later gets a time limit then.
        limited = replace(pod, leave_by_s=pod.leave_by_s or leave_by_s)
        changed = state if limited == pod else with_pod(state, limited)
        return Transition(state=changed, reason=f"pod {name} is known to leave")
    pod = replace(pod, leaving=why, leaving_at_s=now_s, leave_by_s=leave_by_s)
    limit = f", at the latest in {leave_by_s - now_s:.0f} s" if leave_by_s else ""
    message = f"pod {name} will leave{limit}: {why}"
    return Transition(
        state=with_pod(state, pod),
        actions=(Announce(code="Leaving", message=message),),
        reason=message,
    )


def leaving_members(state: CoordinatorState) -> tuple[Member, ...]:
    """Return the living members on pods that will end, in index order."""
    members = state.plan.members if state.plan else ()
    return tuple(m for m in members if is_leaving(state, m.slot.pod) and is_living(state, m))


def leaving_pods(state: CoordinatorState) -> tuple[PodState, ...]:
    """Return the pods that leave and still serve, in the order in which they asked."""
    serving = [p for p in state.pods if p.leaving and not p.gone and has_members(state, uid_of(p))]
    return tuple(sorted(serving, key=lambda p: (p.leaving_at_s, uid_of(p))))


def outgoing(state: CoordinatorState) -> tuple[Member, ...]:
    """Return the members that the newest plan drops and for which others may still wait.

    Nobody waits any more once all members go on in the plan, or once a step is committed in it.
    """
    if state.plan is None or state.commits or all_settled(state):
        return ()
    return state.plan.outgoing


def still_needed(state: CoordinatorState) -> tuple[Member, ...]:
    """Return the members that a planned plan drops, but to which the job may have to go back.

    Until all others have adopted the plan, a dropped member may be the last to hold the state of
    its position. A pod that leaves gets no new place, and a pod known only from a recovered plan
    may be about to leave: the members of both do not count.
    """
    return tuple(
        m
        for m in outgoing(state)
        if is_living(state, m)
        and (pod := state.pod(m.slot.pod)) is not None
        and not (pod.leaving or pod.placeholder)
    )


def outgoing_died(state: CoordinatorState) -> tuple[Member, ...]:
    """Return the members that ended between the plan that drops them and its adoption.

    Who ended in good order had adopted that plan. So all votes of the step before were in, and
    nobody misses it, however long the others take to adopt the plan as well.
    """
    return tuple(m for m in outgoing(state) if not (is_living(state, m) or _left_well(state, m)))


def _left_well(state: CoordinatorState, member: Member) -> bool:
    slot = state.slot(member.slot)
    return slot is not None and slot.handed_over and member.incarnation in slot.ended


def outgoing_missed(state: CoordinatorState, now_s: float) -> tuple[Member, ...]:
    """Return the ended members whose votes the others miss to adopt the plan that drops them.

    An end that resets sockets parks the other ranks, and they report it. An end that resets none (a
    node without power) leaves them waiting for votes in the old quorum. Where the end is not known
    to have been in good order, the others may be about to report that they have adopted the plan,
    so they get ``probe_s`` to do so.
    """
    died = outgoing_died(state)
    if not any(now_s - _learnt_s(state, m) >= state.config.probe_s for m in died):
        return ()
    members = state.plan.members if state.plan else ()
    return () if all(m.joining or has_adopted(state, m) for m in members) else died


def has_adopted(state: CoordinatorState, member: Member) -> bool:
    """Return whether a member has reported that it adopted the newest plan or goes on in it."""
    return member.index in state.adopted_at_s or member.index in state.settled_at_s


def _learnt_s(state: CoordinatorState, member: Member) -> float:
    slot = state.slot(member.slot)
    return slot.learnt_down_s if slot is not None else 0.0
