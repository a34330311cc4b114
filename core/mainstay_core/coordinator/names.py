"""Names pods, slots and places of a job for people."""

from __future__ import annotations

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.coordinator.state import CoordinatorState, uid_of


def pod_name(state: CoordinatorState, uid: PodUid) -> str:
    """Return the name of a pod, as people use it."""
    pod = state.pod(uid)
    return pod.registration.name if pod else uid


def slot_name(state: CoordinatorState, slot: Slot) -> str:
    """Return the name of a slot, as people use it."""
    return f"{pod_name(state, slot.pod)}/{slot.index}"


def place_name(state: CoordinatorState, slot: Slot) -> str:
    """Return the name of a slot with its pod's node, where that is known."""
    pod = state.pod(slot.pod)
    domain = pod.registration.domain if pod else ""
    name = slot_name(state, slot)
    return f"{name} (node {domain})" if domain and domain != slot.pod else name


def named_by_pod(state: CoordinatorState, told: str) -> str:
    """Return what a trainer tells for people, with names of pods: it knows slots by UIDs alone."""
    for pod in state.pods:
        told = told.replace(f"{uid_of(pod)}/", f"{pod.registration.name}/")
    return told
