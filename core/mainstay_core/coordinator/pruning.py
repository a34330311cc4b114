"""What the coordinator need not know any longer.

A job may lose thousands of pods in its life, and its state is written whole with
each decision: what is kept of the lost ones has a bound.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.coordinator.state import CoordinatorState, uid_of

MAX_GONE_PODS = 32
"""Lost pods that are remembered by name, with the trainers that ended there. One that comes back
later than that registers as if it were new; its old quorum fences it all the same."""


def prune_gone_pods(state: CoordinatorState) -> CoordinatorState:
    """Return the state without the pods that were lost longest ago, nor fingerprints of lost ones.

    Members of the plan are kept: their loss is still to be decided about.
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
