"""Says which stores of segments the pods of a job still have."""

from __future__ import annotations

from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.state import CoordinatorState


def keeps_segments(state: CoordinatorState) -> bool:
    """Return whether a pod of the newest plan is left with the store of segments that it had then.

    What that store holds only members can tell, once they have asked it.
    """
    if state.plan is None or state.config.snapshots is None:
        return False
    named = [(h.pod, h.snapshots) for h in state.plan.hosts if h.snapshots]
    named += [(other.pod, other.address) for other in state.plan.other_stores]
    return any(has_store(state, pod, address) for pod, address in named)


def has_store(state: CoordinatorState, uid: PodUid, address: str) -> bool:
    """Return whether a living pod has its store of segments at an address."""
    pod = state.pod(uid)
    return pod is not None and not pod.gone and pod.registration.snapshots == address
