"""Summaries of a job: in short, on one page, and the pods that it wants.

The page is for whoever shows or keeps its status: the operator, tables, alerts. It is bounded:
nothing in it grows with the number of ranks or of steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.bounds import cut
from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.intake.checkpoints import describe_problem
from mainstay_core.coordinator.leaving import leaving_pods
from mainstay_core.coordinator.names import pod_name, slot_name
from mainstay_core.coordinator.progress import find_ettr
from mainstay_core.coordinator.scaling import plan_pods
from mainstay_core.coordinator.siting import spare_pods
from mainstay_core.coordinator.situation import left_ahead
from mainstay_core.coordinator.state import CoordinatorState, has_members, is_gone, median, uid_of
from mainstay_core.coordinator.taints import count_witnessed
from mainstay_core.dmr.settings import describe_coverage
from mainstay_core.job.phase import JobPhase
from mainstay_core.job.protections import LOOP, Protection, entry_of, protections_of
from mainstay_core.wire.findings import FindingsPage
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.page import (
    CheckpointState,
    JobPage,
    PodLine,
    PodNumbers,
    PodsPage,
    RecoveryLine,
    RecoveryOverview,
    ReplicaCounts,
    Training,
)
from mainstay_core.wire.recoveries import Recovery
from mainstay_core.wire.reinitialisation import MAX_REFUSED_STATES, describe_fork
from mainstay_core.wire.stores import SnapshotSummary

UNSETTLED = (JobPhase.RECOVERING, JobPhase.WAITING)


def show_job(state: CoordinatorState, now_s: float) -> dict[str, Any]:
    """Return a job in short; what is left of times, in seconds, at ``now_s``."""
    now = _in_force(state)
    return {
        **_name_and_state(state),
        "step": state.step,
        "steps": state.shape.steps,
        "quorum": now["quorum"],
        "replicas": now["replicas"],
        "replicas_wanted": state.wanted,
        "stages": state.shape.stages,
        "ranks_per_stage": state.shape.ranks_per_stage,
        "followers": now["followers"],
        "all_reduce_stack": now["all_reduce_stack"],
        "pods": sum(not p.gone for p in state.pods),
        "leaving": _leaving(state, now_s),
        "held_back": _held_back(state, now_s),
        "approximate": state.config.approximate is not None,
        "ahead": codec.encode(ahead) if (ahead := left_ahead(state)) is not None else None,
        "approximate_since": state.approximate_since,
        "tainted": show_taints(state),
        "checking": _checking(state),
        "recovering": [codec.encode(o.recovery) for o in state.recoveries],
        "crash": show_crash(state),
        "checkpoint": {"step": state.durable, "problem": describe_problem(state)},
        "created_at_s": state.created_at_s,
        **show_protections(state),
    }


def _checking(state: CoordinatorState) -> dict[str, Any]:
    """Return what is checked in force, and what is wanted, if the next plan changes that."""
    now, wanted = state.checks_in_force, state.config.checks
    return {
        **codec.encode(now),
        "told": now.describe(),
        "wanted": wanted.describe() if wanted != now else "",
    }


def show_taints(state: CoordinatorState) -> list[dict[str, Any]]:
    """Return the steps that wrong devices may have computed, each with a sentence for people."""
    return [{**codec.encode(taint), "told": taint.describe()} for taint in state.taints]


def show_page(
    state: CoordinatorState,
    recoveries: Sequence[Recovery],
    newest: Iterable[LedgerEntry],
    now_s: float,
    stores: SnapshotSummary | None = None,
    findings: FindingsPage | None = None,
) -> JobPage:
    """Return the job on one page.

    Args:
        state: of the job.
        recoveries: all of them, oldest first.
        newest: the ledger's entries of the newest committed step.
        now_s: wall clock.
        stores: what the pods' stores of segments hold; None in a job without snapshots.
        findings: of checks, in short; None where nothing is checked.
    """
    now = _in_force(state)
    entry = entry_of(state.fingerprints)
    return JobPage(
        **_name_and_state(state),
        recovering=state.phase in UNSETTLED,
        quorum=state.in_force.quorum if state.in_force else None,
        all_reduce_stack=now["all_reduce_stack"],
        replicas=ReplicaCounts(
            whole=now["replicas"],
            wanted=state.wanted,
            min=state.shape.min_replicas,
            lanes=state.shape.lanes,
            followers=now["followers"],
        ),
        pods=_pods(state),
        training=_training(state, recoveries, tuple(newest)),
        recovery=_recovery(state, recoveries),
        crash=state.crash,
        checkpoint=CheckpointState(
            every_steps=state.shape.checkpoint_every_steps,
            step=state.durable,
            problem=describe_problem(state),
        ),
        held_back=sum(s.held_until_s > now_s for s in state.slots),
        created_at_s=state.created_at_s,
        entry=entry or None,
        made_anew=cut(describe_fork(state.history[-1])) if state.history else "",
        refused_states=state.refused_states[-MAX_REFUSED_STATES:],
        snapshots=state.config.snapshots is not None,
        stores=stores,
        dmr_coverage=_coverage(state),
        taints=state.taints,
        findings=findings,
        protections=_protections(state, entry),
    )


def show_pods(state: CoordinatorState) -> PodsPage:
    """Return how many pods the job needs now, which to end, and what the living ones are for."""
    wanted = plan_pods(state)
    return PodsPage(
        state=state.phase,
        num_pods=wanted.num_pods,
        leaving=wanted.leaving,
        ending=wanted.ending,
        pods=tuple(
            PodLine(
                uid=p.registration.pod,
                name=p.registration.name,
                address=p.registration.address,
                domain=p.registration.domain,
                serving=state.in_force is not None and has_members(state, p.registration.pod),
                leaving=p.leaving,
            )
            for p in state.pods
            if not p.gone
        ),
    )


def show_crash(state: CoordinatorState) -> dict[str, Any] | None:
    """Return the newest exception that ended a trainer's program; None without one."""
    if state.crash is None:
        return None
    told, crash = state.crash, state.crash.crash
    return {
        "type": crash.type,
        "message": crash.message,
        "frames": list(crash.frames),
        "rank": None if crash.rank is None else str(crash.rank),
        "step": crash.step,
        "trainer": told.trainer,
        "at_s": told.at_s,
        "times": told.times,
    }


def show_protections(state: CoordinatorState) -> dict[str, Any]:
    """Return how the user's code comes in, and what the job is protected by, with reasons."""
    entry = entry_of(state.fingerprints)
    shown = [codec.encode(p) for p in _protections(state, entry)]
    coverage = _coverage(state)
    checks: dict[str, Any] = {"dmr_coverage": coverage} if coverage else {}
    if state.checks:
        checks["checks"] = [codec.encode(stage) for stage in state.checks]
    return {"entry": entry or None, "protections": shown, **checks}


def _coverage(state: CoordinatorState) -> str:
    rules = state.checks_in_force
    told = describe_coverage(
        rules.mode,
        rules.plan,
        state.checks,
        rules.witness_every_steps,
        count_witnessed(state),
        is_loop=entry_of(state.fingerprints) == LOOP,
    )
    return cut(told)


def _protections(state: CoordinatorState, entry: str) -> tuple[Protection, ...]:
    mode = state.checks_in_force.mode
    return protections_of(state.shape, entry, state.config.snapshots, mode)


def _name_and_state(state: CoordinatorState) -> dict[str, Any]:
    return {
        "uid": state.config.job,
        "name": state.config.name,
        "namespace": state.config.namespace,
        "state": state.phase,
        "reason": state.waiting.reason if state.waiting else state.outcome,
        "suspend": state.suspend,
    }


def _in_force(state: CoordinatorState) -> dict[str, Any]:
    """Return what the plan in force comes to; before the first one, to nothing."""
    plan = state.in_force
    return {
        "quorum": codec.encode(plan.quorum) if plan else None,
        "replicas": len(plan.chains) if plan else 0,
        "followers": sum(m.rank.replica is None for m in plan.members) if plan else 0,
        "all_reduce_stack": plan.all_reduce_stack if plan else 0,
    }


def _leaving(state: CoordinatorState, now_s: float) -> list[dict[str, Any]]:
    """Pods that will end and still serve: why, how long they stay at most, what they wait for."""
    return [
        {
            "pod": p.registration.name,
            "uid": p.registration.pod,
            "reason": p.leaving,
            "left_s": max(0.0, p.leave_by_s - now_s) if p.leave_by_s else None,
            "waits": p.leave_waits,
        }
        for p in leaving_pods(state)
    ]


def _held_back(state: CoordinatorState, now_s: float) -> list[dict[str, Any]]:
    """Slots and failure domains that get no place for a while, as trainers end there in a row."""
    held = [
        (slot_name(state, s.slot), s.failures, s.held_until_s, s.why)
        for s in state.slots
        if s.held_until_s > now_s and not is_gone(state, s.slot.pod)
    ]
    held += [
        (f"domain {pod_name(state, PodUid(name))}", d.failures, d.held_until_s, d.why)
        for name, d in state.domains.items()
        if d.held_until_s > now_s and not is_gone(state, PodUid(name))
    ]
    return [
        {"what": what, "failures": failures, "left_s": until_s - now_s, "reason": why}
        for what, failures, until_s, why in held
    ]


def _pods(state: CoordinatorState) -> PodNumbers:
    spares = [p for p in spare_pods(state) if not p.leaving]
    up = {s.slot.pod for s in state.slots if s.incarnation is not None and not s.refused}
    return PodNumbers(
        wanted=plan_pods(state).num_pods,
        living=sum(not p.gone for p in state.pods),
        serving=sum(not p.gone and has_members(state, uid_of(p)) for p in state.pods),
        leaving=len(leaving_pods(state)),
        spares_wanted=state.config.spares,
        spares_free=sum(uid_of(p) in up for p in spares),
    )


def _training(
    state: CoordinatorState,
    recoveries: Sequence[Recovery],
    entries: Sequence[LedgerEntry],
) -> Training:
    again = sum(r.lost_steps + r.redone_steps for r in recoveries)
    return Training(
        step=state.step,
        steps=state.shape.steps,
        loss=next((e.loss for e in reversed(entries)), None),
        step_seconds=median(state.step_seconds) or None,
        committed_at_s=max((e.committed_at_s for e in entries), default=None),
        goodput=state.step / (state.step + again) if state.step else None,
        ettr=find_ettr(state),
        approximate_since=state.approximate_since,
    )


def _recovery(state: CoordinatorState, recoveries: Sequence[Recovery]) -> RecoveryOverview:
    open_ids = {o.recovery.quorum.id for o in state.recoveries}
    closed = [r for r in recoveries if r.quorum.id not in open_ids]
    return RecoveryOverview(
        active=tuple(_short(o.recovery) for o in state.recoveries),
        last=_short(closed[-1]) if closed else None,
        counts=dict(Counter(r.method.value for r in recoveries)),
        lost_steps=sum(r.lost_steps for r in recoveries),
        approximate=sum(not r.exact for r in recoveries),
    )


def _short(recovery: Recovery) -> RecoveryLine:
    return RecoveryLine(
        quorum=str(recovery.quorum),
        method=recovery.method,
        exact=recovery.exact,
        approximate_since=recovery.approximate_since,
        fault=recovery.fault,
        reason=recovery.reason,
        from_step=recovery.from_step,
        lost_steps=recovery.lost_steps,
        started_at_s=recovery.started_at_s,
        first_commit_after_s=recovery.first_commit_after_s,
        slots=tuple(str(s) for s in recovery.slots),
        done=recovery.done,
        **codec.encode(recovery.times),
    )
