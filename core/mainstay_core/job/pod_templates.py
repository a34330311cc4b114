"""Checks a job's pod template for a cluster. Local mode does not read it.

Only mistakes that would come to light late, or never, are checked here. The API server judges the
rest when the first pod is made, and its words are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job.spec import TrainingJobSpec

TRAINER = "trainer"
_SPEC = "spec.template.spec"
_NAMED_LISTS = ("containers", "initContainers", "volumes")


def check_template(spec: TrainingJobSpec) -> None:
    """Refuse a template from which no pod can be made, or that would silently break a promise.

    Raises:
        InvalidSpecError: with the path of the field and what would be right.
    """
    pod = spec.template.get("spec") or {}
    for name in _NAMED_LISTS:
        _check_named(pod.get(name, []), f"{_SPEC}.{name}")
    containers = pod.get("containers") or []
    if not containers:
        raise InvalidSpecError(
            f"{_SPEC}.containers",
            "is missing; a job in a cluster needs a container whose image has torch: the one "
            f"named {TRAINER}, or the first, is the trainer",
        )
    trainer = containers[trainer_index(containers)]
    path = f"{_SPEC}.containers[{trainer_index(containers)}]"
    if not trainer.get("image"):
        raise InvalidSpecError(f"{path}.image", "is missing; any image with torch will do")
    _check_named(trainer.get("env", []), f"{path}.env")
    _check_named(trainer.get("volumeMounts", []), f"{path}.volumeMounts", "mountPath")
    _check_grace(pod, spec.recovery.handover_seconds)
    if spec.checkpoint.every_steps and spec.checkpoint.storage:
        _check_mounted(pod, trainer, "spec.checkpoint.storage", spec.checkpoint.storage)
    if spec.checkpoint.resume_from:
        _check_mounted(pod, trainer, "spec.checkpoint.resumeFrom", spec.checkpoint.resume_from)


def trainer_index(containers: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the trainer's container: the one of that name, or the first."""
    return next((i for i, c in enumerate(containers) if c.get("name") == TRAINER), 0)


def _check_named(items: object, path: str, key: str = "name") -> None:
    """Refuse a value that is no list of objects with a text under the key."""
    if not isinstance(items, list):
        raise InvalidSpecError(path, f"is no list; must be a list of objects with {key}")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or not isinstance(item.get(key), str):
            raise InvalidSpecError(f"{path}[{index}].{key}", "is missing; must be a text")


def _check_grace(pod: Mapping[str, Any], handover_s: int) -> None:
    grace_s = pod.get("terminationGracePeriodSeconds")
    if handover_s and isinstance(grace_s, int) and grace_s <= handover_s:
        raise InvalidSpecError(
            f"{_SPEC}.terminationGracePeriodSeconds",
            f"is {grace_s}, must be larger than spec.recovery.handoverSeconds, {handover_s}, or a "
            "pod that ends is killed in the middle of its hand-over; left out it is large enough",
        )


def _check_mounted(
    pod: Mapping[str, Any], trainer: Mapping[str, Any], path: str, directory: str
) -> None:
    """Refuse a directory on which the trainer mounts no volume that pods share."""
    here = PurePosixPath(directory)
    mounts = trainer.get("volumeMounts") or []
    above = [m for m in mounts if here.is_relative_to(m["mountPath"])]
    if not above:
        has = ", ".join(m["mountPath"] for m in mounts) or "nothing"
        raise InvalidSpecError(
            path,
            f"is {directory}, where the trainer mounts no volume (it mounts {has}), so that each "
            "pod would have files of its own; mount a volume there that all pods share",
        )
    nearest = max(above, key=lambda m: len(PurePosixPath(m["mountPath"]).parts))
    volumes: list[Mapping[str, Any]] = pod.get("volumes") or []
    volume = next((v for v in volumes if v["name"] == nearest.get("name")), {})
    if "emptyDir" in volume:
        raise InvalidSpecError(
            path,
            f"is {directory}, on volume {volume['name']}, an emptyDir: each pod has its own, and "
            "it ends with the pod; use a volume that all pods share",
        )
