"""Ends the lives of trainers and pods in the coordinator's state.

A life that has ended is remembered, so that a late fact about it changes nothing. An end that
nobody planned counts against its slot and its failure domain.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.coordinator.events import Announce, Transition
from mainstay_core.coordinator.intake.backoff import hold_domain, hold_slot
from mainstay_core.coordinator.intake.silence import dated
from mainstay_core.coordinator.names import pod_name
from mainstay_core.coordinator.state import (
    MAX_ENDED,
    CoordinatorState,
    SlotState,
    has_left,
    is_leaving,
    with_pod,
    with_slot,
)


def end_slot(
    state: CoordinatorState,
    slot: SlotState,
    incarnation: Incarnation | None,
    why: str,
    at_s: float,
    now_s: float,
) -> SlotState:
    """Return the slot after ``incarnation`` (or the life that runs) has ended."""
    ended = incarnation or slot.incarnation
    if ended is None or ended in slot.ended:
        return slot
    remembered = (*slot.ended, ended)[-MAX_ENDED:]
    if slot.incarnation not in (None, ended):
        return replace(slot, ended=remembered)
    over = replace(
        slot,
        incarnation=None,
        ended=remembered,
        handed_over=False,
        down_at_s=at_s,
        learnt_down_s=now_s,
        failures=slot.failures + 1,
        why=why,
    )
    if is_leaving(state, slot.slot.pod):
        return replace(over, failures=slot.failures)
    return hold_slot(state, over, now_s)


def note_end(state: CoordinatorState, pod: PodUid, why: str, now_s: float) -> CoordinatorState:
    """Return the state with an unplanned end counted against its failure domain."""
    return state if is_leaving(state, pod) else hold_domain(state, pod, why, now_s)


def end_all(
    state: CoordinatorState, pod: PodUid, why: str, at_s: float, now_s: float, *, sure: bool = True
) -> CoordinatorState:
    """Return the state with every trainer of a pod ended.

    If the end is not sure, they may come back.
    """
    for slot in state.slots:
        if slot.slot.pod == pod and slot.incarnation is not None:
            ended = end_slot(state, slot, slot.incarnation, why, at_s, now_s)
            if sure:
                state = note_end(state, pod, why, now_s)
            else:
                ended = replace(
                    ended,
                    ended=slot.ended,
                    failures=slot.failures,
                    held_until_s=slot.held_until_s,
                )
            state = with_slot(state, replace(ended, restarting=False))
    return state


def lose_pod(
    state: CoordinatorState, uid: PodUid, why: str, at_s: float, now_s: float, *, sure: bool = True
) -> Transition:
    """Return the state with a pod gone and its trainers ended."""
    pod = state.pod(uid)
    if pod is None or pod.gone:
        return Transition(state=state, reason=f"pod {uid} is known to be gone")
    left = has_left(state, uid)
    what = "has left" if left else "is gone"
    message = f"pod {pod_name(state, uid)} {what}: {why or 'no detail'}"
    at_s = dated(state, pod, at_s)
    state = end_all(state, uid, why or "its pod is gone", at_s, now_s, sure=sure)
    state = with_pod(state, replace(pod, gone=True, why=why, gone_at_s=at_s))
    if sure:
        # A pod without a known node is its own domain, and never comes back under its name.
        state = replace(state, domains={n: d for n, d in state.domains.items() if n != uid})
    return Transition(
        state=state,
        actions=(
            Announce(code="PodLeft" if left else "PodGone", message=message, warning=not left),
        ),
        reason=message,
    )
