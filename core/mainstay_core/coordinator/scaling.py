"""Decides how many replicas and pods the job needs, and which pods it does not need."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.base.names import natural
from mainstay_core.base.words import count
from mainstay_core.coordinator.events import Announce, ScaleRequested, Transition
from mainstay_core.coordinator.leaving import still_needed
from mainstay_core.coordinator.siting import held_until_s
from mainstay_core.coordinator.state import CoordinatorState, PodState, has_members, uid_of
from mainstay_core.job.phase import JobPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """The pods that the job needs, and those that should end."""

    num_pods: int
    """Pods that should live and not leave, spares included."""
    leaving: tuple[PodUid, ...]
    """Pods that end by themselves or are drained. Other pods are made in their place."""
    ending: tuple[PodUid, ...]
    """Pods to end, in this order: their work is handed over, or they never had any. A pod that
    leaves and still serves is not among them: a plan drops it first."""


def note_scale(state: CoordinatorState, event: ScaleRequested, now_s: float) -> Transition:
    """Return the state with another number of wanted replicas or spares.

    Raises:
        InvalidSpecError: replicas are not within minReplicas..lanes, spares are
            negative, or neither is given.
    """
    del now_s
    shape, config = state.shape, state.config
    least, most = shape.min_replicas, shape.lanes
    replicas = state.wanted if event.replicas is None else event.replicas
    spares = config.spares if event.spares is None else event.spares
    if event.replicas is None and event.spares is None:
        raise InvalidSpecError("replicas", "is missing; say how many replicas or spares are wanted")
    if not least <= replicas <= most:
        raise InvalidSpecError(
            "replicas", f"is {replicas}, must be within minReplicas..lanes, {least}..{most}"
        )
    if spares < 0:
        raise InvalidSpecError("spares", f"is {spares}, must be at least 0")
    changes = []
    if replicas != state.wanted:
        changes.append(f"wanted: {count(replicas, 'replica')} instead of {state.wanted}")
        state = replace(state, scaled_to=replicas)
    if spares != config.spares:
        changes.append(f"wanted: {count(spares, 'spare')} instead of {config.spares}")
        state = replace(state, config=replace(config, spares=spares))
    if not changes:
        reason = f"{count(replicas, 'replica')} and {count(spares, 'spare')} are wanted already"
        return Transition(state=state, reason=reason)
    message = f"{'; '.join(changes)}: {event.who} asked for it"
    return Transition(
        state=state,
        actions=(Announce(code="Scaled", message=message),),
        reason=message,
    )


def plan_pods(state: CoordinatorState) -> PodPlan:
    """Return how many pods the job needs now, and which registered pods should end.

    A pod that serves never ends here: a plan drops a leaving pod first, and a dropped pod ends only
    after all others have adopted that plan. Of the free pods, those that leave end first, then
    those that are held back, then the newest by name.
    """
    if state.terminal:
        return PodPlan(num_pods=0, leaving=(), ending=())
    if state.phase is JobPhase.SUSPENDED:
        ending = tuple(uid_of(p) for p in state.pods if not p.gone)
        return PodPlan(num_pods=0, leaving=(), ending=ending)
    num_pods = _num_pods(state)
    living = [p for p in state.pods if not p.gone]
    staying = [p for p in living if not p.leaving]
    free = [p for p in living if not has_members(state, uid_of(p))]
    leaving = [p for p in free if p.leaving]
    serving = {m.slot.pod for m in still_needed(state)}
    rest = [p for p in reversed(free) if not p.leaving and uid_of(p) not in serving]
    rest.sort(key=lambda p: -_held_until_s(state, p))
    surplus = rest[: max(0, len(staying) - num_pods)]
    ordered = [*sorted(leaving, key=lambda p: natural(p.registration.name)), *surplus]
    return PodPlan(
        num_pods=num_pods,
        leaving=tuple(uid_of(p) for p in living if p.leaving),
        ending=tuple(uid_of(p) for p in ordered),
    )


def may_still_come(state: CoordinatorState, num_slots: int) -> bool:
    """Return whether that many trainers may still come up, though they are late.

    In a cluster pods come late: images are pulled, nodes are added, other jobs end. The job waits
    for them, unless so many trainers were refused or have ended that the rest cannot be enough. On
    one machine all pods are there at once.

    A trainer that ended before the job began is not expected to do better the next time. Later it
    is, as long as its launcher forks another one.
    """
    if not state.config.namespace:
        return False
    living = {uid_of(p) for p in state.pods if not p.gone}
    again = state.phase is JobPhase.WAITING
    broken = sum(
        bool(s.refused or (s.incarnation is None and s.why and not (again and s.restarting)))
        for s in state.slots
        if s.slot.pod in living
    )
    return _num_pods(state) * state.shape.ranks_per_pod - broken >= num_slots


def _num_pods(state: CoordinatorState) -> int:
    num_ranks = state.wanted * len(state.shape.positions)
    return math.ceil(num_ranks / state.shape.ranks_per_pod) + state.config.spares


def _held_until_s(state: CoordinatorState, pod: PodState) -> float:
    slots = [s for s in state.slots if s.slot.pod == uid_of(pod)]
    return max((held_until_s(state, s) for s in slots), default=0.0)
