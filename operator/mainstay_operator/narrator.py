"""Makes Events of what happened and what was done: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any

from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count, show_bytes
from mainstay_core.job.approximation import made_anew
from mainstay_core.job.guards import resolve_guards
from mainstay_core.job.pod_templates import SUPERVISOR
from mainstay_core.job.sizes.size_summary import summarize_sizes
from mainstay_core.job.sizes.snapshot_sizes import describe_shortage, known_models
from mainstay_core.job.sizes.snapshot_traffic import describe_traffic, pod_traffic
from mainstay_core.job.spec import TrainingJob
from mainstay_core.pool.conditions import (
    INVALID_SPEC,
    ConditionType,
    State,
    code_of,
)
from mainstay_core.pool.counts import NOT_AUTHORIZED, PODS_REFUSED
from mainstay_core.pool.losses import Loss, LossCause
from mainstay_core.pool.observed import ObservedPod
from mainstay_core.pool.repair import Repair
from mainstay_core.wire.crashes import ToldCrash
from mainstay_core.wire.findings import FindingsPage
from mainstay_core.wire.page import JobPage
from mainstay_core.wire.plan import Method
from mainstay_core.wire.recoveries import Recovery
from mainstay_core.wire.reinitialisation import REINITIALISED, RefusedState, describe_course
from mainstay_operator.actuator import NameTakenError
from mainstay_operator.events import Note
from mainstay_operator.kube import RIGHTS_REMEDY, KubeError
from mainstay_operator.ownership import TakenName
from mainstay_operator.status import find_condition

MAX_NAMES = 8
"""Names in one Event."""


_NOT_YET = frozenset({State.PENDING, State.SUSPENDED, State.FAILED})
"""States of a job that has not begun to train, or no longer does, and may begin yet."""
_BEGUN = frozenset({State.RUNNING, State.RECOVERING, State.WAITING})


def of_progress(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Note]:
    """Return what is told of the way of a job: that it trains, is complete, or has failed.

    Args:
        before: its status as it was written last, by an operator before this one perhaps.
        after: as it is to be written now.
    """
    was, now = State(before.get("state") or State.PENDING), State(after["state"])
    if now in _BEGUN and was in _NOT_YET:
        shown = after.get("quorum") or {}
        replicas = f"{shown.get('replicas', 0)} of {shown.get('replicasWanted', 0)}"
        message = f"it trains: replicas {replicas}, pods ready {after['ready']}"
        return [Note(reason="Started", message=message, key=after.get("startTime", ""))]
    if now is State.COMPLETE and was is not now:
        return [Note(reason="Complete", message=after["reason"], key="")]
    if now is not State.FAILED:
        return []
    failed = find_condition(after, ConditionType.FAILED)
    message = str(failed["message"])
    if code_of(failed) == INVALID_SPEC:
        return [Note(reason=INVALID_SPEC, message=message, key=message, warning=True)]
    if was is now:
        return []
    return [Note(reason="Failed", message=f"{code_of(failed)}: {message}", warning=True)]


def of_refusal(refused: str, generation: int) -> list[Note]:
    """Return what is told of a change of the specification that cannot be used; '': there is none.

    Args:
        refused: why.
        generation: of the specification.
    """
    if not refused:
        return []
    message = f"{refused}; the job goes on as it was"
    key = f"{generation}/{refused}"
    return [Note(reason="ChangeRefused", message=message, key=key, warning=True)]


def of_sizes(job: TrainingJob, *, has_begun: bool = False) -> tuple[list[Note], tuple[str, ...]]:
    """Return what is told of the sizes of a job's ranks, and what is logged besides: each rank.

    Of a job that has begun it is what its replicas, which may change, have no memory for.
    """
    short = of_memory(job)
    if has_begun:
        return short, ()
    workload = job.spec.workload
    found = summarize_sizes(
        workload.entrypoint,
        workload.config,
        job.shape,
        recompute=job.spec.runtime.recomputed,
        bucket_bytes=job.spec.runtime.bucket_bytes,
        guards=resolve_guards(job.spec.recovery, job.shape, snapshots=job.spec.snapshots.enabled),
        made=made_anew(job.spec.recovery),
    )
    message = found.message + (_beside_ranks(job) if found.ranks else "")
    note = Note(reason="Sizes", message=message, warning=found.is_wrong)
    return [note, *short], found.ranks


def _beside_ranks(job: TrainingJob) -> str:
    """Return what snapshots send, and what checks that wait keep, of a job whose model is known."""
    told = ""
    kept = job.plan_snapshots()
    models = known_models(job.spec.workload, job.shape)
    if kept is not None and models is not None:
        traffic = pod_traffic(
            models, job.shape, window=kept.num_instalments, peers=kept.peers, log=kept.log
        )
        told += f"; of snapshots {describe_traffic(traffic)}"
    waiting_bytes = job.spec.detection.dmr.waiting_bytes
    if waiting_bytes:
        told += f"; checks that wait keep up to {show_bytes(waiting_bytes)} more in each rank"
    return told


def of_memory(job: TrainingJob) -> list[Note]:
    """Return what is told where so few replicas keep more snapshots than a pod has memory for."""
    told = describe_shortage(job.spec.snapshots, job.spec.workload, job.shape)
    return [Note(reason="SnapshotMemory", message=told, key=told, warning=True)] if told else []


def of_losses(losses: Iterable[Loss]) -> list[Note]:
    """Return what is told of pods that are no more: one Event per cause and node."""
    groups: dict[tuple[LossCause, str], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.cause, loss.node), []).append(loss)
    notes = []
    for (cause, node), lost in groups.items():
        message = lost[0].evidence
        if len(lost) > 1:
            where = f" on node {node}" if node else ""
            message = f"{len(lost)} pods{where}: {_names(p.name for p in lost)}: {message}"
        notes.append(
            Note(
                reason=cause.value,
                message=message,
                key=",".join(loss.uid for loss in lost),
                warning=cause not in (LossCause.ENDED, LossCause.LEFT),
            )
        )
    return notes


def of_recoveries(recoveries: Iterable[Recovery], since_s: float) -> list[Note]:
    """Return what is told of recoveries that began after ``since_s``: that they began, and ended.

    Each names the fault (with rank and slot), the method and the reason.
    """
    notes = []
    for recovery in recoveries:
        if recovery.started_at_s < since_s:
            continue
        quorum = str(recovery.quorum)
        method = recovery.method
        notes.append(
            Note(
                reason=f"Recovery{method.code}",
                message=f"{recovery.fault}: {method} in {quorum}: {recovery.reason}",
                key=quorum,
                warning=not recovery.exact or method in (Method.WAIT, Method.RESTART),
            )
        )
        if recovery.approximate_since is not None:
            course = describe_course(recovery.approximate_since)
            notes.append(
                Note(
                    reason=REINITIALISED,
                    message=f"{course}: {recovery.fault}: {recovery.reason}",
                    key=quorum,
                    warning=True,
                )
            )
        if recovery.done:
            after = recovery.first_commit_after_s
            times = recovery.times.by_stage.items()
            shown = ", ".join(f"{name} {value:.3f} s" for name, value in times if value is not None)
            late = f" {after:.3f} s later than normal" if after is not None else ""
            # How lost states were made anew stands at the end of a replay's reason by now.
            how = f"; {recovery.reason}" if recovery.replays else ""
            notes.append(
                Note(
                    reason="Recovered",
                    message=f"{quorum} committed its first step{late}"
                    f"{f' ({shown})' if shown else ''}, steps lost: {recovery.lost_steps}{how}",
                    key=quorum,
                )
            )
    return notes


def of_page(page: JobPage, since_s: float) -> list[Note]:
    """Return what is told of a job's page: its newest crash, findings, and refused states."""
    refused = of_refused_states(page.refused_states, since_s)
    return of_crash(page.crash, since_s) + of_findings(page.findings, since_s) + refused


def of_refused_states(states: Iterable[RefusedState], since_s: float) -> list[Note]:
    """Return what is told of states that came back after a fork, since ``since_s``."""
    return [
        Note(
            reason="StateRefused",
            message=one.describe(),
            key=f"{one.incarnation}/{one.place}/{one.step}",
        )
        for one in states
        if one.at_s >= since_s
    ]


def of_crash(told: ToldCrash | None, since_s: float) -> list[Note]:
    """Return what is told of the newest exception that ended a trainer after ``since_s``.

    Tries of a step that end alike are one Event. The status counts them.
    """
    if told is None or told.at_s < since_s:
        return []
    crash = told.crash
    lines = [f"trainer {told.trainer}: {crash.describe()}", crash.message, *crash.frames]
    return [
        Note(
            reason="TrainerCrashed",
            message="\n".join(line for line in lines if line),
            key=f"{crash.type}/{crash.step}/{crash.frames or crash.message}",
            warning=True,
        )
    ]


def of_findings(page: FindingsPage | None, since_s: float) -> list[Note]:
    """Return what is told of the newest wrong results that checks found after ``since_s``.

    One Event for each life of a trainer and verdict: a device may compute wrongly in every step.
    """
    told = [kept.told for kept in page.findings] if page is not None else []
    return [
        Note(
            reason="WrongResult",
            message=one.describe(),
            key=f"{one.finding.slot}/{one.incarnation}/{one.finding.verdict.value}",
            warning=True,
        )
        for one in told
        if one.at_s >= since_s
    ]


def of_repair(
    repair: Repair,
    made: list[ObservedPod],
    errors: list[Exception],
    *,
    before: Repair | None,
    told: Collection[tuple[int, str]],
) -> list[Note]:
    """Return what is told of a repair that was carried out.

    Args:
        repair: what was to be done.
        made: pods that were made.
        errors: why other pods were not made, or not ended.
        before: the repair of the pass before.
        told: status and code of the refusals that were told before, and go on.
    """
    notes = []
    if made:
        names = _names(p.name for p in made)
        uids = ",".join(p.uid for p in made)
        notes.append(
            Note(reason="PodsMade", message=f"{count(len(made), 'pod')}: {names}", key=uids)
        )
    notes += [
        Note(
            reason="PodForcedOut",
            message=f"pod {end.name} is removed by force: {end.why}",
            key=end.uid,
            warning=True,
        )
        for end in repair.end
        if end.force
    ]
    if repair.counts.not_made and not (before is not None and before.counts.not_made):
        notes.append(
            Note(reason="ReplacementsExhausted", message=repair.reason, key="", warning=True)
        )
    notes += [
        Note(reason="NameTaken", message=f"a pod could not be made: {error}", warning=True)
        for error in errors
        if isinstance(error, NameTakenError)
    ]
    for kind, alike in group_refusals(errors).items():
        if kind in told:
            continue
        message = f"{count(len(alike), 'pod')} could not be made or ended: {alike[0]}"
        notes.append(Note(reason="PodActionFailed", message=message, warning=True))
    return notes


def group_refusals(errors: Iterable[Exception]) -> dict[tuple[int, str], list[Exception]]:
    """Return errors by status and code of the Kubernetes API's answer; missing rights are a code.

    Their texts differ by the pod, and by what a quota has left. A name that is taken is no refusal.
    """
    groups: dict[tuple[int, str], list[Exception]] = {}
    for error in errors:
        if not isinstance(error, NameTakenError):
            key = (0, "")
            if isinstance(error, KubeError):
                key = (error.status, NOT_AUTHORIZED if error.unauthorized else error.code)
            groups.setdefault(key, []).append(error)
    return groups


def explain_refusal(error: Exception) -> tuple[str, str]:
    """Return reason and message of the condition for a pod that could not be made."""
    if isinstance(error, KubeError) and error.unauthorized:
        return NOT_AUTHORIZED, f"{error}; {RIGHTS_REMEDY}"
    return PODS_REFUSED, str(error)


def of_taken_names(taken: Iterable[TakenName], told: Collection[TakenName]) -> list[Note]:
    """Return what is told of names that the job needs and others have.

    Args:
        taken: those that others have now.
        told: those at the last look.
    """
    return [
        Note(reason="NameTaken", message=name.describe(), warning=True)
        for name in taken
        if name not in told
    ]


def of_container_ends(
    pods: Iterable[ObservedPod], told: MutableMapping[tuple[PodUid, str], int]
) -> list[Note]:
    """Return what is told of containers that were started again in their pod: it is no loss.

    Args:
        pods: that exist.
        told: restarts by pod and container that were told before; changed.
    """
    notes = []
    for pod in pods:
        for end in pod.container_ends:
            key = (pod.uid, end.container)
            if told.get(key, 0) >= end.restarts:
                continue
            told[key] = end.restarts
            if end.container == SUPERVISOR and end.exit_code == 0:
                continue  # it was told to end: the kubelet starts sidecars again until the pod ends
            notes.append(
                Note(
                    reason="OOMKilled" if end.code == "OOMKilled" else "Restarted",
                    message=f"container {end.container} of pod {pod.name} on node {pod.node} ended "
                    f"with code {end.exit_code} ({end.code}) and is started again "
                    f"(restart {end.restarts})",
                    key=f"{pod.uid}/{end.container}/{end.restarts}",
                    warning=True,
                )
            )
    return notes


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    return ", ".join(listed[:MAX_NAMES]) + more
