"""Says when a pod that is not heard gave its last sign of life.

A silence is noticed long after it began, and what was lost meanwhile is lost since it began. So the
loss of a silent pod is dated by its last sign of life, whoever reports the loss in the end. A sign
of life is a heartbeat, or a commit of a quorum in which the pod has a member: it needs each
member's vote.

The dates are for the records of recoveries. Nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.state import CoordinatorState, PodState, uid_of

SILENT_BEATS = 2.0
"""A pod is clearly silent after so many heartbeats without a word, while others are heard."""


def patience_s(state: CoordinatorState) -> float:
    """Return the seconds after which a pod that is not heard, while others are, is silent."""
    return SILENT_BEATS * state.config.heartbeat_s


def note_signs(
    state: CoordinatorState,
    behind_s: Mapping[str, float],
    heard_at_s: Mapping[str, float],
    now_s: float,
) -> CoordinatorState:
    """Return the state in which clearly silent pods have the time at which they were heard last.

    Args:
        state: what is known.
        behind_s: for each pod, how far it lags behind the job's newest heartbeat.
        heard_at_s: for each pod, when it was heard last; its lag ago if that is not given.
        now_s: wall clock.
    """
    patient_s = patience_s(state)

    def noted(pod: PodState) -> PodState:
        behind = behind_s.get(uid_of(pod), 0.0)
        heard_s = heard_at_s.get(uid_of(pod), now_s - behind)
        if pod.gone:
            return pod
        if behind > patient_s and not pod.silent_since_s:
            return replace(pod, silent_since_s=heard_s)
        if now_s - heard_s <= patient_s and pod.silent_since_s:
            return replace(pod, silent_since_s=0.0)
        return pod

    pods = tuple(noted(pod) for pod in state.pods)
    return state if pods == state.pods else replace(state, pods=pods)


def dated(state: CoordinatorState, pod: PodState, at_s: float) -> float:
    """Return when a pod was lost whose loss was seen at ``at_s``.

    That is its last sign of life, if it has been silent since; else ``at_s``.
    """
    if not pod.silent_since_s:
        return at_s
    return min(at_s, max(pod.silent_since_s, _last_vote_s(state, uid_of(pod))))


def _last_vote_s(state: CoordinatorState, uid: PodUid) -> float:
    """Return the time of the newest commit that needed a vote of the pod; 0 without one."""
    last, plan = state.last_commit, state.plan
    if last is None or plan is None:
        return 0.0
    # A member since a later quorum has no part in the commit.
    voted = any(m.slot.pod == uid and m.since <= last.quorum_id for m in plan.members)
    return last.at_s if voted else 0.0
