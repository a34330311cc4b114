"""Who could take a place: trainers that are up and free, that come back soon, and spare pods."""

from __future__ import annotations

from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.state import CoordinatorState, PodState, SlotState, is_living, uid_of


def usable_slots(state: CoordinatorState, now_s: float) -> tuple[SlotState, ...]:
    """Return the slots whose trainer is up, may be used and is no member, in pod order.

    With an infinite ``now_s`` those that are held back count as well. Who is known only from a
    restored plan that lets him go does not count before his supervisor has told of him.
    """
    unheard = {uid_of(p) for p in state.pods if p.placeholder}
    let_go = {m.incarnation for m in state.plan.outgoing} if state.plan else set()
    members = {m.slot for m in state.plan.members} if state.plan else set()
    order = {uid_of(p): i for i, p in enumerate(state.pods) if not (p.gone or p.leaving)}
    fit = [
        s
        for s in state.slots
        if s.incarnation is not None
        and s.slot.pod in order
        and not (s.slot.pod in unheard and s.incarnation in let_go)
        and not s.refused
        and s.failures <= state.config.max_restarts
        and held_until_s(state, s) <= now_s
    ]
    living = {m.slot for m in state.plan.members if is_living(state, m)} if state.plan else set()
    free = [s for s in fit if s.slot not in members or s.slot not in living]
    return tuple(sorted(free, key=lambda s: (order[s.slot.pod], s.slot.index)))


def restarting_slots(state: CoordinatorState, now_s: float) -> tuple[SlotState, ...]:
    """Return the slots that served a stage and whose next trainer is worth waiting for."""
    gone = {uid_of(p) for p in state.pods if p.gone or p.leaving}
    return tuple(
        s
        for s in state.slots
        if s.incarnation is None
        and s.restarting
        and s.stage is not None
        and s.slot.pod not in gone
        and not s.refused
        and s.failures <= state.config.max_restarts
        and now_s - s.learnt_down_s < state.config.restart_grace_s
        and held_until_s(state, s) <= now_s
    )


def held_until_s(state: CoordinatorState, slot: SlotState) -> float:
    """Return until when a slot gets no place: its own trainers', or its domain's, ends in a row."""
    domain = state.domains.get(domain_of(state, slot.slot.pod))
    return max(slot.held_until_s, domain.held_until_s if domain else 0.0)


def domain_of(state: CoordinatorState, uid: PodUid) -> str:
    """Return the failure domain of a pod; the pod itself where none is known."""
    pod = state.pod(uid)
    return (pod.registration.domain if pod else "") or uid


def spare_pods(state: CoordinatorState) -> tuple[PodState, ...]:
    """Return the living pods without a member, in order: spare 0, 1, ..."""
    used = {m.slot.pod for m in state.plan.members} if state.plan else set()
    return tuple(p for p in state.pods if not p.gone and uid_of(p) not in used)
