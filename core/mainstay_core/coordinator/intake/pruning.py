"""Drops lost pods that the coordinator no longer needs to know.

A job may lose thousands of pods in its life, and each decision writes its whole state. So the
number of lost pods in it is bounded.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.coordinator.state import CoordinatorState, uid_of

MAX_GONE_PODS = 32
"""Lost pods that are kept, with the trainers that ended there. A pod that comes back later than
that registers as a new one. Its old quorum fences it all the same."""


def prune_gone_pods(state: CoordinatorState) -> CoordinatorState:
    """Return the state without the pods lost longest ago, and without fingerprints of lost pods.

    Members of the plan are kept: a decision about their loss is still due.
    """
    members = {m.slot.pod for m in state.plan.members} if state.plan else set()
    gone = sorted(
        (p for p in state.pods if p.gone and uid_of(p) not in members), key=lambda p: p.gone_at_s
    )
    if not gone:
        return state
    lost = {uid_of(p) for p in gone}
    forgotten = {uid_of(p) for p in gone[:-MAX_GONE_PODS]}
    useless = {str(s.slot) for s in state.slots if s.slot.pod in lost}
    return replace(
        state,
        pods=tuple(p for p in state.pods if uid_of(p) not in forgotten),
        slots=tuple(s for s in state.slots if s.slot.pod not in forgotten),
        fingerprints={k: v for k, v in state.fingerprints.items() if k not in useless},
    )
