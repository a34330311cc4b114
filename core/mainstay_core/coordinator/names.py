"""Names pods, slots and places of a job for people."""

from __future__ import annotations

import re

from mainstay_core.base.bounds import MAX_NAME, cut
from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.coordinator.state import CoordinatorState, uid_of

_BEFORE_INDEX = re.compile(r"[\w.-]+(?=/\d)")
"""What may be the UID of a pod: a slot is its UID, a slash and its index."""


def pod_name(state: CoordinatorState, uid: PodUid) -> str:
    """Return the name of a pod, as people use it."""
    pod = state.pod(uid)
    return pod.registration.name if pod else uid


def slot_name(state: CoordinatorState, slot: Slot) -> str:
    """Return the name of a slot, as people use it; a long one is cut to the bound of a name."""
    return cut(f"{pod_name(state, slot.pod)}/{slot.index}", MAX_NAME)


def place_name(state: CoordinatorState, slot: Slot) -> str:
    """Return the name of a slot with its pod's node, where that is known."""
    pod = state.pod(slot.pod)
    domain = pod.registration.domain if pod else ""
    name = slot_name(state, slot)
    return cut(f"{name} (node {domain})", MAX_NAME) if domain and domain != slot.pod else name


def named_by_pod(state: CoordinatorState, told: str) -> str:
    """Return what a trainer tells for people, with names of pods: it knows slots by UIDs alone."""
    names = {uid_of(pod): pod.registration.name for pod in state.pods}
    return _BEFORE_INDEX.sub(lambda found: names.get(PodUid(found[0]), found[0]), told)
