"""What is told as Events: pure functions of what happened and what was done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from mainstay_core.ids import PodUid
from mainstay_core.pod_losses import Loss, LossCause
from mainstay_core.pods_seen import SeenPod
from mainstay_core.repairing import Repair
from mainstay_operator.events import Note
from mainstay_operator.hands import NameTakenError
from mainstay_operator.reporting import TIMES, show_quorum


def of_losses(losses: Iterable[Loss]) -> list[Note]:
    """Return what is told of pods that are no more."""
    return [
        Note(
            reason=loss.cause.value,
            message=loss.evidence,
            key=loss.uid,
            warning=loss.cause not in (LossCause.ENDED, LossCause.LEFT),
        )
        for loss in losses
    ]


def of_recoveries(recoveries: Iterable[Mapping[str, Any]], since_s: float) -> list[Note]:
    """Return what is told of recoveries that began after ``since_s``: that they began, and ended.

    Each names the fault (with rank and slot), the method and the reason.
    """
    notes = []
    for recovery in recoveries:
        if recovery["started_at_s"] < since_s:
            continue
        quorum = show_quorum(recovery["quorum"])
        method = recovery["method"]
        title = "".join(word.capitalize() for word in method.split("-"))
        notes.append(
            Note(
                reason=f"Recovery{title}",
                message=f"{recovery['fault']}: {method} in {quorum}: {recovery['reason']}",
                key=quorum,
                warning=not recovery["exact"] or method in ("wait", "restart"),
            )
        )
        if recovery.get("done"):
            after = recovery.get("first_commit_after_s")
            times = [(name, recovery.get(f"{name}_s")) for name in TIMES]
            shown = ", ".join(f"{name} {value:.3f} s" for name, value in times if value is not None)
            late = f" after {after:.3f} s" if after is not None else ""
            notes.append(
                Note(
                    reason="Recovered",
                    message=f"{quorum} committed its first step{late}"
                    f"{f' ({shown})' if shown else ''}, {recovery['lost_steps']} steps lost",
                    key=quorum,
                )
            )
    return notes


def of_repair(repair: Repair, made: list[SeenPod], errors: list[Exception]) -> list[Note]:
    """Return what is told of a repair that was carried out."""
    notes = []
    if made:
        names = ", ".join(p.name for p in made[:8]) + (" ..." if len(made) > 8 else "")
        uids = ",".join(p.uid for p in made)
        notes.append(Note(reason="PodsMade", message=f"{len(made)} pods: {names}", key=uids))
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
    if repair.held_back:
        notes.append(
            Note(reason="ReplacementsExhausted", message=repair.reason, key="", warning=True)
        )
    for error in errors:
        taken = isinstance(error, NameTakenError)
        notes.append(
            Note(
                reason="NameTaken" if taken else "PodActionFailed",
                message=f"a pod could not be made or ended: {error}",
                warning=True,
            )
        )
    return notes


def of_container_ends(
    pods: Iterable[SeenPod], told: MutableMapping[tuple[PodUid, str], int]
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
            notes.append(
                Note(
                    reason="OOMKilled" if end.reason == "OOMKilled" else "Restarted",
                    message=f"container {end.container} of pod {pod.name} on node {pod.node} ended "
                    f"with code {end.exit_code} ({end.reason}) and is started again, for the "
                    f"{end.restarts}. time",
                    key=f"{pod.uid}/{end.container}/{end.restarts}",
                    warning=True,
                )
            )
    return notes
