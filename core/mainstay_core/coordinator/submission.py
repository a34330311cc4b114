"""Decides what may change when a job is submitted again, and what would make it another job.

The owner of the jobs' definitions (in a cluster the operator) submits them again and again. A field
that has not changed since the last submission changes nothing. So a request that came by another
way in between stands until the definition itself changes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import count
from mainstay_core.coordinator.events import (
    Announce,
    JobSubmitted,
    SuspendRequested,
    TopologyReported,
    Transition,
)
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.coordinator.suspension import note_suspend
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.job.config import DECAY_ONE, ApproximateConfig, JobConfig, SnapshotConfig
from mainstay_core.job.protections import LOOP, entry_of
from mainstay_core.job.types import show_quantity

MUTABLE_SHAPE = ("replicas", "min_replicas")
MUTABLE = (
    "suspend",
    "spares",
    "startup_deadline_s",
    "restart_grace_s",
    "hold_back_s",
    "hold_back_max_s",
    "approximate",
    "permitted",
    "goes_back",
    "dmr",
    "dmr_plan",
    "dmr_plan_file",
    "dmr_profile_steps",
    "dmr_memory_bytes",
    "witness_every_steps",
)
"""Fields on which only decisions depend. Running trainers and supervisors hold no copy of them, or
are told of it with each decision, as of checks with each plan."""
_NOT_SUBMITTED = ("job", "faults", "repeats")

_PATHS = {
    "name": "metadata.name",
    "namespace": "metadata.namespace",
    "shape.lanes": "spec.training.lanes",
    "shape.shards_per_lane": "spec.training.shardsPerLane",
    "shape.steps": "spec.training.steps",
    "shape.seed": "spec.training.seed",
    "shape.stages": "spec.parallelism.stages",
    "shape.ranks_per_stage": "spec.parallelism.ranksPerStage",
    "shape.ranks_per_pod": "spec.parallelism.ranksPerPod",
    "shape.micro_batches": "spec.pipeline.microBatches",
    "shape.checkpoint_every_steps": "spec.checkpoint.everySteps",
    "shape.order": "spec.pipeline.order",
    "shape.cut": "spec.pipeline.cut",
    "entrypoint": "spec.workload.entrypoint",
    "args": "spec.workload.args",
    "workload": "spec.workload.config",
    "device": "spec.runtime.device",
    "backend": "spec.runtime.backend",
    "compile": "spec.runtime.compile",
    "recompute": "spec.runtime.recompute",
    "recompute_share": "spec.runtime.recomputeShare",
    "bucket_bytes": "spec.runtime.bucketMebibytes",
    "connect_s": "spec.runtime.connectSeconds",
    "redundancy": "spec.redundancy",
    "checkpoint_dir": "spec.checkpoint.storage",
    "checkpoint_keep": "spec.checkpoint.keep",
    "checkpoint_copy_bytes": "spec.checkpoint.copyMebibytes",
    "checkpoint_signed": "spec.checkpoint.keySecret",
    "resume_from": "spec.checkpoint.resumeFrom",
    "resume_version": "spec.checkpoint.resumeVersion",
    "heartbeat_s": "spec.detection.heartbeatSeconds",
    "heartbeat_timeout_s": "spec.detection.heartbeatTimeoutSeconds",
    "hang_s": "spec.detection.hangSeconds",
    "operation_timeout_s": "spec.detection.hangSeconds",
    "guards": "spec.recovery.approximate.guards",
    "approximate.after_lost_steps": "spec.recovery.approximateAfterLostSteps",
    "approximate.weights": "spec.recovery.approximate.weights",
    "approximate.lr_boost": "spec.recovery.approximate.lrBoostPercent",
    "approximate.boost_steps": "spec.recovery.approximate.boostSteps",
    "approximate.stale_steps": "spec.recovery.approximate.staleSteps",
    "approximate.wait_s": "spec.recovery.approximate.waitSeconds",
    "approximate.optimizer_state": "spec.recovery.approximate.optimizerState",
    "handover_s": "spec.recovery.handoverSeconds",
    "max_restarts": "spec.recovery.maxRestarts",
    "escalate_after": "spec.recovery.escalateAfter",
    "snapshots.enabled": "spec.snapshots.enabled",
    "snapshots.memory_bytes": "spec.snapshots.memory",
    "snapshots.num_instalments": "spec.snapshots.window",
    "snapshots.peers": "spec.snapshots.peers",
    "snapshots.domains": "spec.protection.domains",
    "snapshots.ordering": "spec.snapshots.ordering",
    "snapshots.decay": "spec.snapshots.decayPercent",
    "snapshots.boundary": "spec.snapshots.replay",
}
"""Where a user finds a field that the processes name otherwise."""
_MEBIBYTE = 1 << 20
_UNITS: Mapping[str, Callable[[Any], object]] = {
    "bucket_bytes": lambda size: size // _MEBIBYTE,
    "checkpoint_copy_bytes": lambda size: size // _MEBIBYTE,
    "snapshots.memory_bytes": show_quantity,
    "snapshots.num_instalments": lambda length: length or "Auto",
    "snapshots.boundary": lambda boundary: "Boundary" if boundary else "Gradients",
    "snapshots.decay": lambda decay: round(100 * decay / DECAY_ONE),
}
"""In what a definition says fields that the processes have in other units."""


def note_submission(state: CoordinatorState, event: JobSubmitted, now_s: float) -> Transition:
    """Return the state with the job's definition as it was submitted now.

    Raises:
        InvalidSpecError: something differs that cannot change in a job that exists.
    """
    old = state.config
    new = replace(
        event.config,
        faults=old.faults,
        repeats=old.repeats,
        snapshots=_settled_choice(old, event.config),
    )
    for name, before, after in _differences(old, new):
        raise InvalidSpecError(
            _PATHS.get(name, name),
            f"is {_show(name, after)}, was {_show(name, before)}: it cannot change in a job that "
            "exists; "
            "delete the job and create it anew",
        )
    _check_checks(state, new)
    if new == old:
        return Transition(state=state, reason="the job is submitted again, unchanged")
    wanted = state.wanted if new.shape.replicas == old.shape.replicas else new.shape.replicas
    wanted = max(wanted, new.shape.min_replicas)
    changed = [
        f"{name} {before} -> {after}"
        for name, before, after in (
            ("replicas", state.wanted, wanted),
            ("minReplicas", old.shape.min_replicas, new.shape.min_replicas),
            ("spares", old.spares, new.spares),
            ("recovery.allowApproximate", *_allowed(old, new)),
            *_rules(old, new),
            ("recovery.onTaint", *_on_taint(old, new)),
            ("checks", old.checks.describe(), new.checks.describe()),
        )
        if before != after
    ]
    state = replace(state, config=new, scaled_to=wanted)
    if new.checks != old.checks:
        # Stages tell anew how they are planned.
        started = state.checks_at_start or old.checks
        state = replace(state, checks_at_start=started, checks=())
    result = Transition(state=state)
    if new.suspend != old.suspend:
        wish = SuspendRequested(suspend=new.suspend, who="its definition")
        result = note_suspend(state, wish, now_s)
        if not changed:
            return result
    message = f"the job's definition has changed: {', '.join(changed) or 'times'}"
    announce = Announce(code="Submitted", message=message)
    return result.then(Transition(state=result.state, actions=(announce,), reason=message))


def _show(name: str, value: Any) -> str:
    """Return the value of a field as a definition says it."""
    said = _UNITS[name](value) if name in _UNITS else value
    return repr(said.value if isinstance(said, enum.Enum) else said)


def _check_checks(state: CoordinatorState, new: JobConfig) -> None:
    """Refuse checks that the job's trainers cannot carry out.

    Raises:
        InvalidSpecError: it has a loop of the user's own, which has no passes that are known.
    """
    if entry_of(state.fingerprints) != LOOP or new.checks == state.config.checks:
        return
    if new.dmr is Mode.PIGGYBACK:
        raise InvalidSpecError(
            "spec.detection.dmr.mode",
            "is Piggyback, but the passes of an own loop are not known; use Full or Off",
        )
    if new.dmr_plan is not PlanName.NAIVE:
        raise InvalidSpecError(
            "spec.detection.dmr.plan",
            f"is {new.dmr_plan_file or new.dmr_plan.value}, but an own loop waits for no other "
            "stage; use Naive",
        )


def _allowed(*configs: JobConfig) -> tuple[str, ...]:
    return tuple("false" if config.approximate is None else "true" for config in configs)


def _rules(*configs: JobConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, old value, new value) of how stages are made anew, by policy or permission."""
    before, after = (config.approximate_rules for config in configs)
    for f in fields(ApproximateConfig):
        path = _PATHS[f"approximate.{f.name}"].removeprefix("spec.")
        yield path, _as_said(f.name, before), _as_said(f.name, after)


def _as_said(name: str, rules: ApproximateConfig) -> int | str | None:
    """Return a rule in the unit in which a definition says it."""
    if name == "lr_boost":
        return round(100 * rules.lr_boost)
    said: int | float | str | None = getattr(rules, name)
    return f"{said:g}" if isinstance(said, float) else said


def _on_taint(*configs: JobConfig) -> tuple[str, ...]:
    return tuple("Restart" if config.goes_back else "Report" for config in configs)


def note_topology(state: CoordinatorState, event: TopologyReported, now_s: float) -> Transition:
    """Return the state with what the cluster says about its nodes. The next plans use it."""
    del now_s
    if event.nodes == state.topology:
        return Transition(state=state, reason="the nodes are where they were")
    message = f"the locations of {count(len(event.nodes), 'node')} are known"
    return Transition(state=replace(state, topology=dict(event.nodes)), reason=message)


def _differences(old: JobConfig, new: JobConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old value, new value) of each field that differs and must not.

    What others follow from comes first: a swapped pipeline has guards, for example.
    """
    pairs = [
        (f"shape.{f.name}", getattr(old.shape, f.name), getattr(new.shape, f.name))
        for f in fields(old.shape)
        if f.name not in MUTABLE_SHAPE
    ]
    pairs += [
        (f.name, getattr(old, f.name), getattr(new, f.name))
        for f in fields(JobConfig)
        if f.name not in (*MUTABLE, *_NOT_SUBMITTED, "shape", "snapshots")
    ]
    pairs += _snapshot_pairs(old, new)
    yield from ((name, before, after) for name, before, after in pairs if before != after)


def _settled_choice(old: JobConfig, new: JobConfig) -> SnapshotConfig | None:
    """Return how snapshots are kept as it was submitted, with the kind of log that the job has.

    Where that was left to us another version may choose otherwise; a job that exists keeps its
    own.
    """
    before, after = old.snapshots, new.snapshots
    if before is None or after is None or not after.auto_log or before.boundary == after.boundary:
        return after
    return replace(
        after,
        boundary=before.boundary,
        log_reason=before.log_reason,
        memory_bytes=before.memory_bytes,
    )


def _snapshot_pairs(old: JobConfig, new: JobConfig) -> list[tuple[str, Any, Any]]:
    """Return (name, old value, new value) of how snapshots are kept.

    How much memory Auto takes follows from the replicas, which may change: pods that are made from
    then on have as much as the new number says. Why a kind of log was chosen is for people.
    """
    before, after = old.snapshots, new.snapshots
    if before is None or after is None:
        return [("snapshots.enabled", before is not None, after is not None)]
    scaled = old.shape.replicas != new.shape.replicas
    return [
        (f"snapshots.{f.name}", getattr(before, f.name), getattr(after, f.name))
        for f in fields(SnapshotConfig)
        if f.name not in ("auto_log", "log_reason") and not (scaled and f.name == "memory_bytes")
    ]
