"""Checks a job's pod template for a cluster. Local mode does not read it.

Only mistakes that would come to light late, or never, are checked here: the fields that are not the
template's to set are refused by name, never replaced in silence. The API server judges the rest of
a pod that is made of the template, strictly, before the first one is made.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import quote
from mainstay_core.job.object_names import PREFIX as ACCOUNT_PREFIX
from mainstay_core.job.spec import GROUP, TrainingJobSpec

TRAINER = "trainer"
SUPERVISOR = "supervisor"
"""Container of ours in every pod: the pod's supervisor."""
INSTALL = "install"
"""Container of ours that ends before the others begin: it copies our package to a volume."""
OWN_VOLUMES = "mainstay-"
"""Prefix of the names of volumes of ours."""
TOKEN_DIR = "/var/run/secrets/mainstay.dev"
POD_DIR = "/run/mainstay"
PACKAGE_DIR = "/opt/mainstay"
RESTART_POLICY = "OnFailure"
OWN_VARIABLES = frozenset(
    {
        "MAINSTAY_ADDRESS",
        "MAINSTAY_API_URL",
        "MAINSTAY_CHECKPOINT_KEY_FILE",
        "MAINSTAY_DOMAIN",
        "MAINSTAY_JOB",
        "MAINSTAY_NUM_SLOTS",
        "MAINSTAY_POD",
        "MAINSTAY_POD_DIR",
        "MAINSTAY_POD_NAME",
        "MAINSTAY_SECRET_FILE",
        "MAINSTAY_SNAPSHOT_MEMORY",
        "MAINSTAY_TOKEN_FILE",
    }
)
"""Variables that every container of ours, and the trainer, are given."""
OWN_LABELS = frozenset(
    f"app.kubernetes.io/{key}" for key in ("name", "instance", "component", "part-of", "managed-by")
)
"""Labels of every object of a job, beside those under our own group."""
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
"""Parts of an affinity, as Kubernetes calls them."""
_TEMPLATE = "spec.template"
_SPEC = f"{_TEMPLATE}.spec"
_NAMED_LISTS = ("containers", "initContainers", "volumes")
_METADATA = ("annotations", "labels")
_NOT_THEIRS = {
    "hostname": "pods are known by their own names",
    "subdomain": "pods are known by their own names, under the job's Service",
    "serviceAccount": "the field is deprecated; use serviceAccountName",
    "nodeName": "pods are scheduled, and taken off nodes that fail; use nodeSelector or affinity",
    "ephemeralContainers": "they are added to pods that run",
}
"""Fields of a pod's specification that a template must leave out, and why."""


def check_template(spec: TrainingJobSpec) -> None:
    """Refuse a template from which no pod can be made, or that would silently break a promise.

    Raises:
        InvalidSpecError: with the path of the field and what would be right.
    """
    pod = spec.template.get("spec") or {}
    for name in _NAMED_LISTS:
        _check_named(pod.get(name, []), f"{_SPEC}.{name}")
    _check_types(pod)
    _check_metadata(spec.template.get("metadata") or {})
    _check_not_theirs(pod, spec.priority_class_name)
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
    _check_trainer(trainer, path)
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


def _check_types(pod: Mapping[str, Any]) -> None:
    """Refuse what pods could not be made of, as something is added to it."""
    objects: dict[str, object] = {"securityContext": pod.get("securityContext")}
    affinity = objects["affinity"] = pod.get("affinity")
    for kind in ("nodeAffinity", "podAffinity"):
        given = affinity.get(kind) if isinstance(affinity, Mapping) else None
        objects[f"affinity.{kind}"] = given
        _check_list(given, PREFERRED, f"{_SPEC}.affinity.{kind}")
        if kind == "nodeAffinity" and isinstance(given, Mapping):
            required = objects[f"affinity.{kind}.{REQUIRED}"] = given.get(REQUIRED)
            _check_list(required, "nodeSelectorTerms", f"{_SPEC}.affinity.{kind}.{REQUIRED}")
    for path, value in objects.items():
        if value is not None and not isinstance(value, Mapping):
            raise InvalidSpecError(f"{_SPEC}.{path}", "must be an object, as in a pod")
    _check_list(pod, "topologySpreadConstraints", _SPEC)


def _check_list(parent: object, name: str, path: str) -> None:
    items = parent.get(name) if isinstance(parent, Mapping) else None
    if items is None:
        return
    if not isinstance(items, list) or not all(isinstance(i, Mapping) for i in items):
        raise InvalidSpecError(f"{path}.{name}", "must be a list of objects, as in a pod")


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse what pods cannot have from their template, and labels by which they are found."""
    unknown = sorted(set(metadata) - set(_METADATA))
    if unknown:
        raise InvalidSpecError(
            f"{_TEMPLATE}.metadata.{unknown[0]}",
            "must be left out; of a template's metadata, pods take labels and annotations",
        )
    for kind in _METADATA:
        given = metadata.get(kind) or {}
        if not isinstance(given, Mapping):
            raise InvalidSpecError(f"{_TEMPLATE}.metadata.{kind}", "must be names with texts")
        for name in sorted(map(str, given)):
            owned = name.startswith(f"{GROUP}/") or (kind == "labels" and name in OWN_LABELS)
            if owned:
                raise InvalidSpecError(
                    f"{_TEMPLATE}.metadata.{kind}[{name}]",
                    "must be left out; it is set on every pod of a job",
                )


def _check_not_theirs(pod: Mapping[str, Any], priority_class: str | None) -> None:
    """Refuse fields of the pod that are set for every pod of a job, and names of ours."""
    for field, why in _NOT_THEIRS.items():
        if pod.get(field):
            raise InvalidSpecError(f"{_SPEC}.{field}", f"must be left out; {why}")
    policy = pod.get("restartPolicy", RESTART_POLICY)
    if policy != RESTART_POLICY:
        raise InvalidSpecError(
            f"{_SPEC}.restartPolicy",
            f"is {quote(policy)}, must be {RESTART_POLICY} or left out: a launcher that fails is "
            "started again in its pod, and one that has finished is not",
        )
    account = pod.get("serviceAccountName") or ""
    if not isinstance(account, str):
        raise InvalidSpecError(f"{_SPEC}.serviceAccountName", "must be a text")
    if account.startswith(f"{ACCOUNT_PREFIX}-"):
        raise InvalidSpecError(
            f"{_SPEC}.serviceAccountName",
            f"is {quote(account)}, must not begin with {ACCOUNT_PREFIX}-: such an account is that "
            "of one job's pods; each job gets one of its own",
        )
    named = pod.get("priorityClassName")
    if named and priority_class and named != priority_class:
        raise InvalidSpecError(
            f"{_SPEC}.priorityClassName",
            f"is {quote(named)}, must be left out, or as spec.priorityClassName: {priority_class}",
        )
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(pod.get(kind) or ()):
            if container["name"] in (INSTALL, SUPERVISOR):
                raise InvalidSpecError(
                    f"{_SPEC}.{kind}[{index}].name",
                    f"is {container['name']}, must be another: every pod has one of that name",
                )
    for index, volume in enumerate(pod.get("volumes") or ()):
        if volume["name"].startswith(OWN_VOLUMES):
            raise InvalidSpecError(
                f"{_SPEC}.volumes[{index}].name",
                f"is {quote(volume['name'])}, must not begin with {OWN_VOLUMES}: such volumes are "
                "added to every pod",
            )


def _check_trainer(trainer: Mapping[str, Any], path: str) -> None:
    """Refuse variables and mounts that the trainer gets from us."""
    for index, variable in enumerate(trainer.get("env") or ()):
        if variable["name"] == "PYTHONPATH" and not isinstance(variable.get("value", ""), str):
            raise InvalidSpecError(f"{path}.env[{index}].value", "must be a text")
        if variable["name"] == "PYTHONPATH" and variable.get("valueFrom"):
            raise InvalidSpecError(
                f"{path}.env[{index}].valueFrom",
                f"must be left out; give PYTHONPATH as a value: {PACKAGE_DIR} is put before it",
            )
        if variable["name"] in OWN_VARIABLES:
            raise InvalidSpecError(
                f"{path}.env[{index}].name",
                f"is {variable['name']}, must be left out; it is set in every trainer",
            )
    for index, mount in enumerate(trainer.get("volumeMounts") or ()):
        here = PurePosixPath(posixpath.normpath("/" + mount["mountPath"].lstrip("/")))
        taken = [d for d in (TOKEN_DIR, POD_DIR, PACKAGE_DIR) if here.is_relative_to(d)]
        if taken:
            raise InvalidSpecError(
                f"{path}.volumeMounts[{index}].mountPath",
                f"is {quote(mount['mountPath'])}, must not lie in {taken[0]}: every trainer has a "
                "volume of ours there",
            )


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
