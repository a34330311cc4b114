"""Builds the status of a TrainingJob from the api's replies: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mainstay_core.base.bounds import cut
from mainstay_core.base.words import show_bytes
from mainstay_core.job.spec import LABEL_UID
from mainstay_core.pool.conditions import (
    INVALID_SPEC,
    ConditionType,
    JobSummary,
    ObservedJob,
    State,
    code_of,
    derive_conditions,
    derive_state,
    with_times,
)
from mainstay_core.pool.losses import Loss, LossCause
from mainstay_core.pool.observed import ObservedPod
from mainstay_core.wire.crashes import ToldCrash
from mainstay_core.wire.page import JobPage, RecoveryOverview
from mainstay_core.wire.plan import Method
from mainstay_core.wire.recoveries import STAGES
from mainstay_core.wire.stores import SnapshotSummary, WindowHeld
from mainstay_operator.resources import JobView, parse_time, show_time

MAX_RECENT = 256
"""Losses that the status remembers; the window is counted by them."""
MAX_ACTIVE = 16
MAX_SENTENCE = 4096
MAX_SHORT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """The record of a job's pods in its status: a new operator goes on from there."""

    made: int = 0
    counted: int = 0
    uncounted: int = 0
    recent: tuple[Mapping[str, Any], ...] = ()
    """Newest losses as the status shows them, oldest first."""

    @classmethod
    def of_status(cls, status: Mapping[str, Any]) -> PodRecord:
        """Return what a status remembers."""
        repair = status.get("repair") or {}
        return cls(
            made=int((status.get("pods") or {}).get("made", 0)),
            counted=int(repair.get("counted", 0)),
            uncounted=int(repair.get("uncounted", 0)),
            recent=tuple(repair.get("recent") or ()),
        )

    def counted_times(self) -> list[float]:
        """Return when the losses were that count against the budget."""
        return [parse_time(item["time"]) for item in self.recent if item.get("counts", True)]

    def nodes_without_image(self, pods: Iterable[ObservedPod], since_s: float) -> frozenset[str]:
        """Return the nodes that cannot pull an image now, or could not since then."""
        cause = LossCause.IMAGE.value
        before = {
            item.get("node", "")
            for item in self.recent
            if code_of(item) == cause and parse_time(item["time"]) > since_s
        }
        return frozenset(before | {p.node for p in pods if p.stuck_on_image}) - {""}

    def with_losses(self, losses: Iterable[Loss]) -> PodRecord:
        """Return the record with more losses; what the operator ended itself is none."""
        record = self
        for loss in losses:
            if loss.cause is LossCause.ENDED:
                continue
            item = {
                "time": show_time(loss.at_s),
                "pod": loss.name,
                "node": loss.node,
                "reason": loss.cause.value,
                "counts": loss.counts,
            }
            record = replace(
                record,
                counted=record.counted + loss.counts,
                uncounted=record.uncounted + (not loss.counts),
                recent=(*record.recent, item)[-MAX_RECENT:],
            )
        return record


def summary_of(page: JobPage) -> JobSummary:
    """Return the api's page of a job as conditions take it."""
    open_ones = [r for r in page.recovery.active if not r.done]
    return JobSummary(
        state=page.state,
        reason=page.reason,
        steps=page.training.steps,
        replicas=page.replicas.whole,
        replicas_wanted=page.replicas.wanted,
        recovering=tuple(r.fault for r in open_ones),
        method=_method_of(open_ones[0].method) if open_ones else None,
        checkpoint_problem=page.checkpoint.problem,
        durable=page.checkpoint.step,
        snapshots=page.snapshots,
        approximate_since=page.training.approximate_since,
        tainted="; ".join(taint.describe() for taint in page.taints if taint.counts),
        made_anew=page.made_anew,
        coverage=page.stores.coverage if page.stores is not None else "",
    )


def _method_of(told: str) -> Method | None:
    """Return a recovery's method; None for one that only a newer api knows."""
    return Method(told) if told in set(Method) else None


def read_state(status: Mapping[str, Any]) -> tuple[State, str] | None:
    """Return state and reason that a status shows; None if it shows none that may last.

    A refused specification is no end: it may have been mended since.
    """
    failed = find_condition(status, ConditionType.FAILED)
    if not status.get("state") or code_of(failed) == INVALID_SPEC:
        return None
    return State(status["state"]), status.get("reason") or ""


def find_condition(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any]:
    """Return a condition of a status; an empty one if it has none of that type."""
    found = (c for c in status.get("conditions") or () if c.get("type") == kind.value)
    return next(found, {})


def build_status(
    view: JobView,
    seen: ObservedJob,
    page: JobPage | None,
    record: PodRecord,
    now_s: float,
) -> dict[str, Any]:
    """Return the whole status; fields that are left out are removed by the apply.

    Args:
        view: the job, with its status so far.
        seen: what conditions are derived from.
        page: the api's newest page of the job; None if there was none yet.
        record: what is remembered of pods.
        now_s: wall clock.
    """
    old, now = view.status, show_time(now_s)
    state, why = derive_state(seen)
    conditions = with_times(
        derive_conditions(seen), old.get("conditions") or (), view.generation, now
    )
    pods = seen.pods
    status: dict[str, Any] = {
        "observedGeneration": view.generation,
        "state": state.value,
        "reason": why[:MAX_SENTENCE],
        "ready": f"{min(pods.places, pods.ready)}/{pods.places}",
        "spares": f"{min(pods.spares_ready, pods.spares_wanted)}/{pods.spares_wanted}",
        "selector": f"{LABEL_UID}={view.uid}",
        "conditions": conditions,
        "pods": {
            "wanted": pods.wanted,
            "ready": pods.ready,
            "pending": pods.pending,
            "leaving": pods.leaving,
            "made": record.made,
        },
        "repair": {
            "counted": record.counted,
            "uncounted": record.uncounted,
            "recent": [dict(item) for item in record.recent],
        },
    }
    status |= _times(old, state.value, now)
    if page is not None:
        status |= _of_page(page)
    else:
        kept = ("training", "quorum", "recovery", "crash", "protection")
        status |= {key: old[key] for key in kept if key in old}
    return status


def is_urgent(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether a status must be written at once: a condition or the state has changed."""
    return _gist(old) != _gist(new)


def _gist(status: Mapping[str, Any]) -> tuple[Any, ...]:
    conditions = [
        (c.get("type"), c.get("status"), c.get("reason")) for c in status.get("conditions") or ()
    ]
    return status.get("state"), status.get("observedGeneration"), tuple(conditions)


def _times(old: Mapping[str, Any], state: str, now: str) -> dict[str, Any]:
    """Start and end: set once; a resumed job starts again. Waiting for pods is part of its time."""
    times = {}
    begun = old.get("startTime") or ("" if state in ("Complete", "Failed") else now)
    if begun and state != "Suspended":
        times["startTime"] = begun
    if state in ("Complete", "Failed"):
        times["completionTime"] = old.get("completionTime") or now
    return times


def _of_page(page: JobPage) -> dict[str, Any]:
    training, replicas = page.training, page.replicas
    shown: dict[str, Any] = {
        "training": _without_none(
            step=training.step,
            steps=training.steps,
            loss=_number(training.loss, 6),
            stepSeconds=_number(training.step_seconds, 3),
            approximateSince=training.approximate_since,
            ettr=_number(training.ettr, 3),
        ),
        "recovery": _recovery(page.recovery),
    }
    if page.crash is not None:
        shown["crash"] = _crash(page.crash)
    if page.quorum is not None:
        shown["quorum"] = {
            "id": str(page.quorum),
            "replicas": replicas.whole,
            "replicasWanted": replicas.wanted,
            "followers": replicas.followers,
            "allReduceStack": page.all_reduce_stack,
        }
    if page.entry:
        shown["protection"] = {
            "entry": page.entry,
            "items": [{"name": p.name, "on": p.given, "reason": p.why} for p in page.protections],
        }
        if page.dmr_coverage:
            shown["protection"]["dmrCoverage"] = page.dmr_coverage
        if page.stores is not None:
            shown["protection"] |= _snapshots(page.stores)
    return shown


def _recovery(recovery: RecoveryOverview) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "total": sum(recovery.counts.values()),
        "active": [
            {
                "fault": r.fault[:MAX_SENTENCE],
                "method": r.method,
                "reason": r.reason[:MAX_SENTENCE],
                "quorum": r.quorum,
                "startedAt": show_time(r.started_at_s),
            }
            for r in recovery.active[:MAX_ACTIVE]
        ],
        "counts": [{"method": m, "count": n} for m, n in sorted(recovery.counts.items())],
    }
    last = recovery.last
    if last is not None:
        seconds = {name: _number(getattr(last, f"{name}_s"), 3) for name in STAGES}
        took_s = (getattr(last, f"{name}_s") or 0.0 for name in STAGES)
        finished_s = last.started_at_s + sum(took_s)
        shown["last"] = {
            "fault": last.fault[:MAX_SENTENCE],
            "method": last.method,
            "exact": last.exact,
            "reason": last.reason[:MAX_SENTENCE],
            "quorum": last.quorum,
            "fromStep": last.from_step,
            "finishedAt": show_time(finished_s),
            "seconds": {name: text for name, text in seconds.items() if text is not None},
        }
        if last.approximate_since is not None:
            shown["last"]["approximateSince"] = last.approximate_since
    return shown


def _snapshots(stores: SnapshotSummary) -> dict[str, Any]:
    used, memory = show_bytes(stores.used_bytes), show_bytes(stores.memory_bytes)
    shown = _without_none(
        window=_versions(stores.window),
        inFlight=_versions(stores.in_flight),
        ordering=stores.ordering or None,
        log=stores.log or None,
        memory=f"{used} of {memory}",
        positions=stores.num_positions,
        covered=stores.num_covered,
        survivePod=stores.num_survive_pod,
        surviveDomain=stores.num_survive_domain,
        replaySteps=stores.replay_steps,
        coverage=stores.coverage[:MAX_SENTENCE],
        shortOf=stores.short_of[:MAX_SENTENCE] or None,
    )
    kinds = [{"kind": k.kind, "size": show_bytes(k.size_bytes)} for k in stores.kinds]
    return {"snapshotLagSteps": stores.lag, "snapshots": {**shown, "kinds": kinds}}


def _versions(window: WindowHeld | None) -> str | None:
    return None if window is None else f"{window.first} to {window.last}"


def _crash(told: ToldCrash) -> dict[str, Any]:
    crash = told.crash
    return _without_none(
        type=crash.type,
        message=crash.message,
        frames=list(crash.frames),
        rank=None if crash.rank is None else str(crash.rank),
        step=crash.step,
        trainer=cut(told.trainer, MAX_SHORT),
        time=show_time(told.at_s),
        times=told.times,
    )


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}g}"


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
