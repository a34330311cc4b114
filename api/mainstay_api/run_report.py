"""Answers for people about a run: its ranks, its injected faults and the final report.

Pure functions of values from the store; docs/report.md has the report's schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mainstay_api.summary import show_crash, show_protections, show_taints
from mainstay_core.base import codec
from mainstay_core.base.digest import Digest
from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.injection import FaultStatus, list_faults
from mainstay_core.coordinator.names import pod_name, slot_name
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.wire.facts import Heartbeat, SlotStatus
from mainstay_core.wire.findings import FindingsPage
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry, LedgerKey
from mainstay_core.wire.recoveries import Recovery, show_recovery
from mainstay_core.wire.reinitialisation import Fork
from mainstay_core.wire.repeated_lineage import show_lineage_of

REPORT_VERSION = 2
"""Version 1 said ``approximate_since`` of the steps that the ledger still had, and no lineage."""


def show_members(
    state: CoordinatorState, beats: Mapping[PodUid, Heartbeat]
) -> list[dict[str, Any]]:
    """Return one line per rank, in index order, then one per trainer without a rank."""
    plan = state.in_force
    members = plan.members if plan else ()
    lines = [
        {
            "rank": str(m.rank),
            "index": m.index,
            "replica": m.rank.replica,
            "stage": m.rank.stage,
            "inner": m.rank.inner,
            "slot": slot_name(state, m.slot),
            "pod": m.slot.pod,
            "incarnation": m.incarnation,
            "since": m.since,
            "joining": m.joining,
            "settled": m.index in state.settled_at_s,
            **_beat_line(_status(beats, m.slot.pod, m.slot.index)),
        }
        for m in members
    ]
    used = {m.slot for m in members}
    gone = {p.registration.pod for p in state.pods if p.gone}
    lines += [
        {
            "rank": "spare",
            "index": None,
            "replica": None,
            "stage": None,
            "inner": None,
            "slot": slot_name(state, s.slot),
            "pod": s.slot.pod,
            "incarnation": s.incarnation,
            "since": None,
            "joining": False,
            "settled": False,
            **_beat_line(_status(beats, s.slot.pod, s.slot.index)),
        }
        for s in state.slots
        if s.slot not in used and s.slot.pod not in gone
    ]
    return lines


def _status(beats: Mapping[PodUid, Heartbeat], pod: PodUid, index: int) -> SlotStatus | None:
    beat = beats.get(pod)
    return next((s for s in beat.slots if s.index == index), None) if beat else None


def _beat_line(status: SlotStatus | None) -> dict[str, Any]:
    if status is None:
        return {"pid": 0, "phase": "unknown", "waiting": False, "step": 0}
    return {
        "pid": status.pid,
        "phase": status.phase,
        "waiting": status.waiting,
        "step": status.step,
    }


def show_fault(status: FaultStatus, state: CoordinatorState) -> dict[str, Any]:
    """Return a fault as people see it."""
    fired = None
    if status.fired is not None:
        fired = {
            "pod": pod_name(state, status.fired.pod),
            "slot": status.fired.slot,
            "rank": status.fired.rank,
            "at_s": status.fired.at_s,
        }
    shown = {**codec.encode(status.fault), "state": status.state, "fired": fired}
    return shown | ({"problem": status.problem} if status.problem else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStep:
    """The part of a committed step's ledger entries that a report shows."""

    step: int
    masters: str
    loss: float
    step_s: float


def report_steps(
    ledger: Mapping[LedgerKey, LedgerEntry],
    positions: Sequence[tuple[int, int]],
    steps: Iterable[int],
) -> list[ReportedStep | None]:
    """Return what a report shows of each step; None of one that lacks some position's entry.

    All that held that entry may have died before they could tell.
    """
    found = ([ledger.get((step, *p)) for p in positions] for step in steps)
    return [_report_step(entries) for entries in found]


def _report_step(entries: Sequence[LedgerEntry | None]) -> ReportedStep | None:
    known = [entry for entry in entries if entry is not None]
    if len(known) < len(entries):
        return None
    return ReportedStep(
        step=known[0].step,
        masters=_sum(e.masters for e in known),
        loss=known[-1].loss,
        step_s=max(e.step_s for e in known),
    )


def make_report(
    state: CoordinatorState,
    steps: Sequence[ReportedStep | None],
    recoveries: Sequence[Recovery],
    events: Sequence[Mapping[str, Any]],
    findings: FindingsPage,
    forks: Sequence[Fork],
) -> dict[str, Any]:
    """Return the content of REPORT.json.

    Args:
        state: of the job.
        steps: up to the newest, as :func:`report_steps` returns them; the report begins with the
            first one that is known.
        recoveries: of the job.
        events: of its history.
        findings: of its checks.
        forks: that its states contain, with what came of them.
    """
    first = next((number for number, step in enumerate(steps) if step), len(steps))
    steps = steps[first:]
    known = [step for step in steps if step is not None]
    seconds = sorted(step.step_s for step in known)
    return {
        "version": REPORT_VERSION,
        "job": state.config.name,
        "uid": state.config.job,
        "state": state.phase.value,
        "reason": state.outcome,
        "crash": show_crash(state),
        **show_protections(state),
        "exact": state.approximate_since is None,
        "approximate_since": state.approximate_since,
        "lineage": show_lineage_of(state.config, state.num_forks, forks),
        "digests": {
            "final": _final(state),
            "steps": [step.masters if step else None for step in steps],
        },
        "steps": {
            "committed": state.step,
            "first": known[0].step if known else 0,
            "redone": sum(r.redone_steps for r in recoveries),
            "lost": sum(r.lost_steps for r in recoveries),
        },
        "recoveries": [show_recovery(r) for r in recoveries],
        "findings": codec.encode(findings),
        "tainted": show_taints(state),
        "faults": [show_fault(status, state) for status in list_faults(state)],
        "step_seconds": {"p50": _percentile(seconds, 0.5), "p99": _percentile(seconds, 0.99)},
        "losses": [step.loss if step else None for step in steps],
        "pods": {p.registration.pod: pod_name(state, p.registration.pod) for p in state.pods},
        "events": list(events),
    }


def _final(state: CoordinatorState) -> dict[str, Any]:
    """Sums over positions; the samples are those of the whole job, the same on each.

    The history, and since when, are there if the job is approximate.
    """
    finals: tuple[FinalDigests, ...] = state.finals
    if len(finals) < len(state.shape.positions):
        return {}
    return {
        "params": _sum(f.params for f in finals),
        "masters": _sum(f.masters for f in finals),
        "optimizer": _sum(f.optimizer for f in finals),
        "data": next((f.data for f in finals if f.data), ""),
        **(_course(finals[0]) if finals[0].history else {}),
    }


def _course(final: FinalDigests) -> dict[str, Any]:
    return {"history": final.history, "approximate_since": final.approximate_since}


def _sum(digests: Any) -> str:
    total = Digest.zero()
    for text in digests:
        total = total + Digest.parse(text)
    return total.hex()


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
