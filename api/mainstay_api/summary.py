"""A job on one page, for whoever shows or keeps its status: the operator, tables, alerts.

Everything is bounded: nothing in it grows with the number of ranks or of steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mainstay_api.run_report import show_protections
from mainstay_core.base import codec
from mainstay_core.coordinator.leaving import leaving_pods
from mainstay_core.coordinator.scaling import plan_pods
from mainstay_core.coordinator.siting import spare_pods
from mainstay_core.coordinator.state import CoordinatorState, has_members, median, uid_of
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.recoveries import Recovery

UNSETTLED = (JobPhase.RECOVERING, JobPhase.WAITING)


def summarize(
    state: CoordinatorState,
    recoveries: Sequence[Recovery],
    newest: Iterable[LedgerEntry],
    now_s: float,
) -> dict[str, Any]:
    """Return the job's summary.

    Args:
        state: of the job.
        recoveries: all of them, oldest first.
        newest: the ledger's entries of the newest committed step.
        now_s: wall clock.
    """
    plan, reason = state.in_force, state.waiting.reason if state.waiting else state.outcome
    entries = tuple(newest)
    return {
        "uid": state.config.job,
        "name": state.config.name,
        "namespace": state.config.namespace,
        "state": state.phase.value,
        "reason": reason,
        "suspend": state.suspend,
        "recovering": state.phase in UNSETTLED,
        "quorum": codec.encode(plan.quorum) if plan else None,
        "all_reduce_stack": plan.all_reduce_stack if plan else 0,
        "replicas": {
            "whole": len(plan.chains) if plan else 0,
            "wanted": state.wanted,
            "min": state.shape.min_replicas,
            "lanes": state.shape.lanes,
            "followers": sum(m.rank.replica is None for m in plan.members) if plan else 0,
        },
        "pods": _pods(state),
        "training": _training(state, recoveries, entries, now_s),
        "recovery": _recovery(state, recoveries),
        "checkpoint": {
            "every_steps": state.shape.checkpoint_every_steps,
            "step": state.durable,
            "problem": state.checkpoint_problem,
        },
        "held_back": sum(s.held_until_s > now_s for s in state.slots),
        "created_at_s": state.created_at_s,
        **show_protections(state),
    }


def _pods(state: CoordinatorState) -> dict[str, int]:
    spares = [p for p in spare_pods(state) if not p.leaving]
    up = {s.slot.pod for s in state.slots if s.incarnation is not None and not s.refused}
    return {
        "wanted": plan_pods(state).num_pods,
        "living": sum(not p.gone for p in state.pods),
        "serving": sum(not p.gone and has_members(state, uid_of(p)) for p in state.pods),
        "leaving": len(leaving_pods(state)),
        "spares_wanted": state.config.spares,
        "spares_free": sum(uid_of(p) in up for p in spares),
    }


def _training(
    state: CoordinatorState,
    recoveries: Sequence[Recovery],
    entries: Sequence[LedgerEntry],
    now_s: float,
) -> dict[str, Any]:
    again = sum(r.lost_steps + r.redone_steps for r in recoveries)
    committed_at_s = max((e.committed_at_s for e in entries), default=None)
    still = state.terminal or state.phase is JobPhase.SUSPENDED
    until_s = committed_at_s if still and committed_at_s else now_s
    return {
        "step": state.step,
        "steps": state.shape.steps,
        "loss": next((e.loss for e in reversed(entries)), None),
        "step_seconds": median(state.step_seconds) or None,
        "committed_at_s": committed_at_s,
        "goodput": state.step / (state.step + again) if state.step else None,
        "ettr": _ettr(state, until_s),
    }


def _ettr(state: CoordinatorState, until_s: float) -> float | None:
    """Share of the time since the start in which new steps were computed, by their median."""
    elapsed_s = until_s - state.started_at_s
    done = state.step - state.started_step
    if not state.started_at_s or elapsed_s <= 0 or done <= 0:
        return None
    return min(1.0, done * median(state.step_seconds) / elapsed_s)


def _recovery(state: CoordinatorState, recoveries: Sequence[Recovery]) -> dict[str, Any]:
    open_ids = {o.recovery.quorum.id for o in state.recoveries}
    closed = [r for r in recoveries if r.quorum.id not in open_ids]
    return {
        "active": [_short(o.recovery) for o in state.recoveries],
        "last": _short(closed[-1]) if closed else None,
        "counts": dict(Counter(r.method.value for r in recoveries)),
        "lost_steps": sum(r.lost_steps for r in recoveries),
        "approximate": sum(not r.exact for r in recoveries),
    }


def _short(recovery: Recovery) -> dict[str, Any]:
    return {
        "quorum": str(recovery.quorum),
        "method": recovery.method.value,
        "exact": recovery.exact,
        "fault": recovery.fault,
        "reason": recovery.reason,
        "from_step": recovery.from_step,
        "lost_steps": recovery.lost_steps,
        "started_at_s": recovery.started_at_s,
        "first_commit_after_s": recovery.first_commit_after_s,
        "slots": [str(s) for s in recovery.slots],
        "done": recovery.done,
        **codec.encode(recovery.times),
    }
