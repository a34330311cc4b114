"""The CRD on a real API server: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.client import Api, ApiError
from tests.cluster.control_plane import ControlPlane
from tests.worlds.crd import apply_crd

from mainstay_core.base.ids import JobUid
from mainstay_core.job import crd, crd_rules, spec
from mainstay_core.pool.conditions import ConditionType

ROOT = Path(__file__).parents[2]
JOBS = f"/apis/{spec.API_VERSION}/namespaces/default/{spec.PLURAL}"
TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "trainer", "image": "torch"}]}}
SMALLEST: dict[str, Any] = {
    "apiVersion": spec.API_VERSION,
    "kind": spec.KIND,
    "metadata": {"name": "demo"},
    "spec": {
        "training": {"steps": 60, "lanes": 4},
        "workload": {"entrypoint": "mainstay_train.models.llama:workload", "config": {"dim": 8}},
        "template": TEMPLATE,
    },
}
NAME = "must be at most 40 lower-case letters, digits and '-'"
FIXED = "cannot be changed: it is part of what the job is"
NO_TRAINER = "is needed in a cluster: spec.containers with a container whose image has torch"
RESOURCES = "spec.supervisor.resources"
AMOUNTS, KEYED = r"\.(limits|requests)\.(\w+)$", r".\1[\2]"
AMOUNT = "must be an amount as in a pod's resources"
AUTO = "must be a whole number from 1 to 65536, or Auto"
SWAPPED = {"order": "Swapped"}
SAVED = {"everySteps": 5, "storage": "/data"}
PLAN_OF_STAGES = {"mode": "Full", "plan": "/plans/{stage}.json"}
PLAN_OF_WAYS = {"mode": "Full", "plan": "/plans/{stage}-{way}.json"}
LABEL = "must be the key of a node's label, e.g. topology.kubernetes.io/zone"


@dataclass(frozen=True)
class Refused:
    """A manifest that breaks one rule."""

    at: str
    """Field that the rule blames."""
    kind: str
    """type: the model's of one field; cross: between fields; change: of a change."""
    path: str
    """What to set in the smallest job (for a change: in a job that is there)."""
    value: Any
    words: str
    status: dict[str, Any] | None = None
    """What the operator had written before the change."""


REFUSED = [
    Refused("metadata.name", "cross", "metadata.name", "n" * 41, NAME),
    Refused("metadata.name", "cross", "metadata.name", "1demo", NAME),
    Refused("metadata.name", "cross", "metadata.name", "a.b", NAME),
    Refused(
        "spec.parallelism.replicas",
        "cross",
        "spec.parallelism.replicas",
        5,
        "must be at most spec.training.lanes: a lane has at most one replica",
    ),
    Refused(
        "spec.parallelism.minReplicas",
        "cross",
        "spec.parallelism.minReplicas",
        5,
        "must be at most the replicas: parallelism.replicas, or training.lanes",
    ),
    Refused(
        "spec.parallelism.minReplicas",
        "cross",
        "spec.parallelism",
        {"replicas": 2, "minReplicas": 3},
        "must be at most the replicas: parallelism.replicas, or training.lanes",
    ),
    Refused(
        "spec.parallelism.ranksPerPod",
        "cross",
        "spec.parallelism",
        {"replicas": 2, "stages": 2, "ranksPerPod": 5},
        "must be at most the number of ranks: replicas x stages x ranksPerStage",
    ),
    Refused(
        "spec.parallelism",
        "cross",
        "spec.parallelism",
        {"stages": 4096, "ranksPerStage": 4096},
        "makes too many ranks (replicas x stages x ranksPerStage)",
    ),
    Refused(
        "spec.training.shardsPerLane",
        "cross",
        "spec.training",
        {"lanes": 65_536, "shardsPerLane": 65_536},
        "makes too many shard types (lanes x shardsPerLane)",
    ),
    Refused(
        "spec.redundancy",
        "cross",
        "spec.redundancy",
        5,
        "must be at most spec.training.lanes, or Auto: a shard type has at most one host",
    ),
    Refused(
        "spec.runtime.backend",
        "cross",
        "spec.runtime",
        {"device": "CPU", "backend": "NCCL"},
        "is NCCL, which needs CUDA; use Gloo or Auto with device CPU",
    ),
    Refused(
        "spec.runtime.compile",
        "cross",
        "spec",
        SMALLEST["spec"] | {"runtime": {"compile": "Blocks"}, "parallelism": {"ranksPerStage": 2}},
        "is Blocks, but blocks that are spread over several ranks are not compiled; use Off",
    ),
    Refused(
        "spec.detection.dmr.mode",
        "cross",
        "spec",
        SMALLEST["spec"]
        | {"runtime": {"compile": "Blocks"}, "detection": {"dmr": {"mode": "Full"}}},
        "is not Off, but of compiled blocks the operators are not seen; use runtime.compile Off",
    ),
    Refused(
        "spec.detection.dmr.mode",
        "cross",
        "spec",
        SMALLEST["spec"] | {"detection": {"dmr": {"mode": "Piggyback"}}},
        "is Piggyback, but without runtime.recompute no forward is executed again; set",
    ),
    Refused(
        "spec.pipeline.order",
        "cross",
        "spec.pipeline.order",
        "Swapped",
        "is Swapped, but a single stage has nothing to swap; use InOrder, or more stages",
    ),
    *(
        Refused(
            "spec.pipeline.order",
            "cross",
            "spec",
            SMALLEST["spec"] | {"pipeline": SWAPPED, "parallelism": {"stages": 4}} | other,
            f"is Swapped, with which this version can only have {words}",
        )
        for other, words in (
            ({"detection": {"dmr": PLAN_OF_STAGES}}, "{way} in the path of detection.dmr.plan"),
            (
                {"detection": {"dmr": PLAN_OF_WAYS}, "pipeline": SWAPPED | {"microBatches": 3}},
                "one micro-batch or an even number (microBatches) with a file as",
            ),
            ({"snapshots": {"enabled": True, "replay": "Boundary"}}, "snapshots.replay Gradients"),
            ({"runtime": {"compile": "Blocks"}}, "runtime.compile Off; use that, or InOrder"),
        )
    ),
    Refused(
        "spec.pipeline.order",
        "cross",
        "spec",
        {
            "training": {"steps": 60, "lanes": 1},
            "parallelism": {"stages": 2},
            "pipeline": SWAPPED,
        },
        "is Swapped, but a step has a single micro-batch, which takes one of the two ways",
    ),
    Refused(
        "spec.recovery.allowApproximate",
        "cross",
        "spec.recovery",
        {"allowApproximate": True},
        "is true, but with 1 stage no stage has two neighbours to make it anew from",
    ),
    *(
        Refused(
            "spec.recovery.allowApproximate",
            "cross",
            "spec",
            SMALLEST["spec"] | {"recovery": {"allowApproximate": True}} | other,
            words,
        )
        for other, words in (
            (
                {"parallelism": {"stages": 2}},
                "pipeline.order Swapped, or checkpoints (checkpoint.everySteps) and approximate",
            ),
            (
                {"parallelism": {"stages": 2}, "checkpoint": SAVED},
                "or approximateAfterLostSteps below approximate.staleSteps, so that a stage",
            ),
            (
                {
                    "parallelism": {"stages": 2},
                    "checkpoint": SAVED,
                    "recovery": {
                        "allowApproximate": True,
                        "approximateAfterLostSteps": 3,
                        "approximate": {"staleSteps": 0},
                    },
                },
                "or approximateAfterLostSteps below approximate.staleSteps, so that a stage",
            ),
            (
                {
                    "parallelism": {"stages": 2},
                    "pipeline": SWAPPED,
                    "workload": {"entrypoint": "a:b"},
                    "snapshots": {"enabled": True, "memory": "1Gi"},
                },
                "is true, but with snapshots there are no guards unless they are asked for",
            ),
            (
                {"parallelism": {"stages": 2, "ranksPerStage": 2}, "pipeline": SWAPPED},
                "is true, but with several ranks to a stage nobody guards what each",
            ),
        )
    ),
    *(
        Refused(
            "spec.recovery.approximate.guards",
            "cross",
            "spec",
            SMALLEST["spec"]
            | {"recovery": {"approximate": {"guards": guards}}, "pipeline": SWAPPED}
            | {"parallelism": {"stages": 4, "ranksPerStage": ranks}},
            words,
        )
        for guards, ranks, words in (
            (5, 1, "is above the lanes, but the stage beside an end has one cell for each lane"),
            (1, 2, "is above 0, but nobody guards what several ranks of a stage share"),
        )
    ),
    Refused(
        "spec.recovery.approximate.staleSteps",
        "cross",
        "spec.recovery.approximate",
        {"staleSteps": 9},
        "is above 0, but the job keeps no checkpoint from which a stage could be loaded; set",
    ),
    Refused(
        "spec.detection.witness.everySteps",
        "cross",
        "spec",
        SMALLEST["spec"]
        | {"parallelism": {"replicas": 1}, "detection": {"witness": {"everySteps": 5}}},
        "is above 0, but the job has a single replica, so that nobody else computes the same",
    ),
    Refused(
        "spec.detection.dmr.plan",
        "cross",
        "spec.detection.dmr",
        {"mode": "Off", "plan": "Dynamic"},
        "is not Naive, but no check waits in this mode; use Naive, or mode Full",
    ),
    Refused(
        "spec.detection.dmr.memory",
        "cross",
        "spec.detection.dmr",
        {"mode": "Full", "memory": "1Gi"},
        "is for checks that wait; use another plan than Naive, or leave it out",
    ),
    Refused(
        "spec.snapshots.window",
        "cross",
        "spec.snapshots",
        {"enabled": True, "window": 1025},
        "must be at most 1024 steps, or Auto",
    ),
    Refused(
        "spec.snapshots.peers",
        "cross",
        "spec.snapshots",
        {"enabled": True, "peers": 4},
        "must be fewer than the job's pods, spares included",
    ),
    Refused(
        "spec.protection.domains",
        "cross",
        "spec",
        SMALLEST["spec"] | {"snapshots": {"enabled": True}, "protection": {"domains": 5}},
        "must be at most the job's pods, spares included",
    ),
    Refused(
        "spec.detection.heartbeatTimeoutSeconds",
        "cross",
        "spec.detection",
        {"heartbeatSeconds": 4, "heartbeatTimeoutSeconds": 11},
        "must be at least three times heartbeatSeconds",
    ),
    Refused(
        "spec.recovery.holdBackMaxSeconds",
        "cross",
        "spec.recovery",
        {"holdBackSeconds": 9, "holdBackMaxSeconds": 8},
        "must be at least holdBackSeconds, which it bounds",
    ),
    Refused(
        "spec.scheduling.spreadTopologyKey",
        "cross",
        "spec.scheduling",
        {"replicaTopologyKey": "rack", "spreadTopologyKey": "rack"},
        "pods cannot be kept together and apart by one label",
    ),
    Refused(
        "spec.checkpoint.resumeVersion",
        "cross",
        "spec.checkpoint",
        {"resumeVersion": 6},
        "is for jobs that go on from an earlier run; name its checkpoints in resumeFrom",
    ),
    Refused(
        "spec.checkpoint.resumeVersion",
        "cross",
        "spec.checkpoint",
        {"resumeVersion": 6, "resumeFrom": "/ckpt/a", "storage": "/ckpt/a"},
        "goes back in the directory that is the job's own storage, too",
    ),
    Refused(
        "spec.checkpoint",
        "cross",
        "spec.checkpoint",
        {"everySteps": 5},
        "everySteps needs storage in a cluster",
    ),
    Refused("spec.redundancy", "type", "spec.redundancy", "auto", AUTO),
    Refused("spec.snapshots.window", "type", "spec.snapshots.window", 0, AUTO),
    Refused("spec.snapshots.memory", "type", "spec.snapshots.memory", "much", AMOUNT),
    Refused(
        "spec.detection.dmr.plan",
        "type",
        "spec.detection.dmr.plan",
        "plan.json",
        "must be Naive, Dynamic, Auto, or the absolute path of a plan",
    ),
    Refused("spec.detection.dmr.memory", "type", "spec.detection.dmr.memory", "much", AMOUNT),
    Refused(f"{RESOURCES}.limits.cpu", "type", f"{RESOURCES}.limits.cpu", "much", AMOUNT),
    Refused(f"{RESOURCES}.requests.cpu", "type", f"{RESOURCES}.requests.cpu", "-1", AMOUNT),
    Refused("spec.redundancy", "type", "spec.redundancy", 0, AUTO),
    Refused("spec.training.shardsPerLane", "type", "spec.training.shardsPerLane", 0, AUTO),
    Refused(
        "spec.recovery.window.maxRepairs", "type", "spec.recovery.window.maxRepairs", "None", AUTO
    ),
    Refused(
        "spec.managedBy", "type", "spec.managedBy", "somebody", "must be a domain and a path, e.g."
    ),
    Refused(
        "spec.priorityClassName",
        "type",
        "spec.priorityClassName",
        "High",
        "must be the name of an object of the cluster",
    ),
    Refused(
        "spec.checkpoint.keySecret",
        "type",
        "spec.checkpoint.keySecret",
        "Key",
        "must be the name of an object of the cluster",
    ),
    Refused(
        "spec.workload.entrypoint",
        "type",
        "spec.workload.entrypoint",
        "llama",
        "must be module:function or path/to/file.py:function, e.g.",
    ),
    Refused(
        "spec.checkpoint.storage",
        "type",
        "spec.checkpoint.storage",
        "s3://bucket",
        "must be the absolute path of a directory",
    ),
    Refused(
        "spec.checkpoint.resumeFrom",
        "type",
        "spec.checkpoint.resumeFrom",
        "earlier",
        "must be the absolute path of a directory",
    ),
    Refused(
        "spec.scheduling.replicaTopologyKey",
        "type",
        "spec.scheduling.replicaTopologyKey",
        "a b",
        LABEL,
    ),
    Refused(
        "spec.scheduling.spreadTopologyKey", "type", "spec.scheduling.spreadTopologyKey", "/", LABEL
    ),
    Refused(
        "spec.suspend",
        "change",
        "spec.suspend",
        True,
        "needs a checkpoint to go on from, and spec.checkpoint.everySteps is 0",
        {"quorum": {"id": "q1"}},
    ),
    Refused(
        "spec.recovery.approximate.guards",
        "cross",
        "spec.recovery.approximate.guards",
        2,
        "is above 0, but in order no stage is an end's twin, from which its layers could be made",
    ),
    Refused(
        "spec.recovery.approximate.guards",
        "change",
        "spec.recovery.approximate.guards",
        0,
        FIXED,
    ),
    Refused("spec.managedBy", "change", "spec.managedBy", "other.io/controller", FIXED),
    Refused("spec.priorityClassName", "change", "spec.priorityClassName", "high", FIXED),
    Refused("spec.training", "change", "spec.training.steps", 61, FIXED),
    Refused("spec.training", "change", "spec.training.seed", 1, FIXED),
    Refused("spec.parallelism.stages", "change", "spec.parallelism.stages", 2, FIXED),
    Refused("spec.parallelism.ranksPerStage", "change", "spec.parallelism.ranksPerStage", 2, FIXED),
    Refused("spec.parallelism.ranksPerPod", "change", "spec.parallelism.ranksPerPod", 2, FIXED),
    Refused("spec.redundancy", "change", "spec.redundancy", 2, FIXED),
    Refused("spec.pipeline", "change", "spec.pipeline.microBatches", 2, FIXED),
    Refused("spec.pipeline", "change", "spec.pipeline.order", "Swapped", FIXED),
    Refused("spec.pipeline", "change", "spec.pipeline.cut", "Equal", FIXED),
    Refused("spec.workload", "change", "spec.workload.entrypoint", "a:b", FIXED),
    Refused("spec.workload", "change", "spec.workload.args", ["x"], FIXED),
    Refused("spec.workload", "change", "spec.workload.config.dim", 9, FIXED),
    Refused("spec.workload", "change", "spec.workload.config", {"dim": None, "heads": 8}, FIXED),
    Refused("spec.runtime", "change", "spec.runtime.recompute", True, FIXED),
    Refused("spec.detection.hangSeconds", "change", "spec.detection.hangSeconds", 9, FIXED),
    Refused(
        "spec.detection.heartbeatSeconds", "change", "spec.detection.heartbeatSeconds", 2, FIXED
    ),
    Refused(
        "spec.detection.heartbeatTimeoutSeconds",
        "change",
        "spec.detection.heartbeatTimeoutSeconds",
        3000,
        FIXED,
    ),
    Refused("spec.snapshots", "change", "spec.snapshots.enabled", True, FIXED),
    Refused("spec.protection", "change", "spec.protection.domains", 3, FIXED),
    Refused("spec.checkpoint", "change", "spec.checkpoint.storage", "/data", FIXED),
    Refused("spec.recovery.maxRestarts", "change", "spec.recovery.maxRestarts", 3, FIXED),
    Refused("spec.recovery.escalateAfter", "change", "spec.recovery.escalateAfter", 3, FIXED),
    Refused(
        "spec.recovery.restartGraceSeconds", "change", "spec.recovery.restartGraceSeconds", 3, FIXED
    ),
    Refused("spec.recovery.handoverSeconds", "change", "spec.recovery.handoverSeconds", 3, FIXED),
    Refused("spec.recovery.holdBackSeconds", "change", "spec.recovery.holdBackSeconds", 3, FIXED),
    Refused(
        "spec.recovery.holdBackMaxSeconds", "change", "spec.recovery.holdBackMaxSeconds", 9, FIXED
    ),
    Refused("spec.scheduling", "change", "spec.scheduling.spreadTopologyKey", "rack", FIXED),
    Refused("spec.template", "cross", "spec.template", None, NO_TRAINER),
    Refused(
        "spec.template",
        "change",
        "spec.template",
        {"spec": {"nodeName": "n"}},
        "can be changed while the job is suspended only",
    ),
]
CLUSTER_ONLY = {f"{rule.section}{rule.field}" for rule in crd_rules.CLUSTER_ONLY}
ACCEPTED: dict[str, dict[str, Any]] = {
    "the smallest": {},
    "a suspended one of another manager": {
        "suspend": True,
        "managedBy": "kueue.x-k8s.io/multikueue",
    },
    "deadline, ttl, priority": {
        "activeDeadlineSeconds": 1,
        "ttlSecondsAfterFinished": 0,
        "priorityClassName": "research.high",
    },
    "a swapped pipeline": {
        "parallelism": {"stages": 4},
        "pipeline": {"order": "Swapped"},
        "detection": {"dmr": {"mode": "Full", "plan": "Auto"}, "witness": {"everySteps": 5}},
    },
    "fewer replicas than guards, as after a scale-down": {
        "parallelism": {"stages": 4, "replicas": 1},
        "pipeline": {"order": "Swapped"},
        "recovery": {"approximate": {"guards": 3}},
    },
    "a limit on lost steps whose permission is switched off": {
        "recovery": {"allowApproximate": False, "approximateAfterLostSteps": 3}
    },
    "two stages in order that may load checkpoints of their own": {
        "parallelism": {"stages": 2},
        "checkpoint": SAVED,
        "recovery": {"allowApproximate": True, "approximateAfterLostSteps": 3},
    },
    "staleSteps switched off in a job without checkpoints": {
        "recovery": {"approximate": {"staleSteps": 0}}
    },
    "an equal cut": {"parallelism": {"stages": 2}, "pipeline": {"cut": "Equal"}},
    "as many replicas as lanes": {"parallelism": {"replicas": 4, "minReplicas": 4}},
    "as many ranks to a pod as there are": {
        "parallelism": {"replicas": 2, "stages": 2, "ranksPerStage": 2, "ranksPerPod": 8}
    },
    "redundancy as a number": {"redundancy": 4},
    "redundancy Auto": {"redundancy": "Auto"},
    "NCCL on CUDA": {"runtime": {"device": "CUDA", "backend": "NCCL"}},
    "checks by re-execution": {"detection": {"dmr": {"mode": "Full", "plan": "Naive"}}},
    "three heartbeats": {"detection": {"heartbeatSeconds": 4, "heartbeatTimeoutSeconds": 12}},
    "checkpoints": {"checkpoint": {"everySteps": 5, "storage": "/data", "resumeFrom": "/old"}},
    "signed checkpoints": {
        "checkpoint": {"everySteps": 5, "storage": "/data", "keySecret": "checkpoint-key"}
    },
    "snapshots of a model of one's own": {
        "workload": {"entrypoint": "a:b"},
        "snapshots": {"enabled": True, "window": 3, "peers": 3, "memory": "1.5Gi"},
        "protection": {"domains": 4},
    },
    "an amount as a number": {
        "workload": {"entrypoint": "a:b"},
        "snapshots": {"enabled": True, "memory": 1_000_000},
    },
    "two topology keys": {
        "scheduling": {
            "replicaTopologyKey": "topology.kubernetes.io/rack",
            "spreadTopologyKey": "kubernetes.io/hostname",
        }
    },
    "a budget and a quarantine": {
        "recovery": {
            "window": {"seconds": 60, "maxRepairs": 3},
            "quarantine": {"mode": "Taint", "afterMismatches": 3, "maxNodesPercent": 5},
        }
    },
    "an entrypoint in a file": {"workload": {"entrypoint": "examples/own_loop.py:train"}},
}
ALLOWED = {"parallelism": {"stages": 3}, "recovery": {"allowApproximate": True}}
FREE: list[tuple[str, Any]] = [
    ("spec.suspend", True),
    ("spec.parallelism.replicas", 2),
    ("spec.parallelism.minReplicas", 2),
    ("spec.supervisor.resources.limits", {"cpu": 1, "memory": "1Gi"}),
    ("spec.spares.replicas", 3),
    ("spec.activeDeadlineSeconds", 60),
    ("spec.ttlSecondsAfterFinished", 60),
    ("spec.recovery.window.maxRepairs", 7),
    ("spec.recovery.allowApproximate", False),
    ("spec.recovery.approximateAfterLostSteps", 10),
    ("spec.recovery.approximate.lrBoostPercent", 120),
    ("spec.recovery.quarantine.mode", "Taint"),
    ("spec.recovery.quarantine.trustedNodes", ["node1"]),
]
"""What may change while a job runs that may make stages anew."""
PIPELINES = [
    {
        "training": {"steps": 60, "lanes": lanes},
        # Layers of this one are known to nobody, so only what fields say can be refused.
        "workload": {"entrypoint": "a:b"},
        "parallelism": {"stages": stages, "ranksPerStage": ranks},
        "pipeline": {"order": order},
        "checkpoint": {"everySteps": 5 if saves else 0, "storage": "/data"},
        "snapshots": {"enabled": keeps, "memory": "1Gi", "peers": 1},
        "recovery": {
            "allowApproximate": allows,
            **({} if limit is None else {"approximateAfterLostSteps": limit}),
            "approximate": {
                **({} if guards is None else {"guards": guards}),
                **({} if stale is None else {"staleSteps": stale}),
            },
        },
    }
    for order in ("InOrder", "Swapped")
    for lanes, stages, ranks in ((1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (2, 3, 1))
    for saves in (False, True)
    for keeps in (False, True)
    for allows in (False, True)
    for guards in (None, 0, 2)
    for limit, stale in ((None, None), (None, 9), (3, None), (100, None), (3, 9), (9, 9))
]
"""Pipelines, each with and without permission, guards, checkpoints, snapshots and staleSteps, or a
limit on lost steps, which sets staleSteps, or both, of which either may be more."""


def at(path: str, value: Any) -> dict[str, Any]:
    """A merge patch that sets one field."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def merged(base: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(base, dict):
        return copy.deepcopy(patch)
    return {**base, **{key: merged(base.get(key), value) for key, value in patch.items()}}


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane) -> Api:
    """The API server, with the CRD that the chart installs."""
    apply_crd(control_plane)
    return control_plane.api


@pytest.fixture
def job(api: Api) -> Iterator[str]:
    """The path of a small job that is there."""
    manifest = merged(SMALLEST, {"metadata": {"name": None, "generateName": "job-"}})
    del manifest["metadata"]["name"]
    path = f"{JOBS}/{api.create(JOBS, manifest)['metadata']['name']}"
    yield path
    api.delete(path)


def rules_of_the_crd() -> set[tuple[str, str]]:
    """All rules, as (field that is blamed, kind)."""
    found = {
        (f"{rule.section}{rule.field}".lstrip("."), "change" if rule.forbidden else "cross")
        for rule in crd_rules.RULES
    }

    def walk(node: dict[str, Any], path: str) -> None:
        # Rules without a reason are those of the model's types.
        if any("reason" not in rule for rule in node.get(crd.VALIDATIONS, ())):
            found.add((path, "type"))
        for name, child in node.get("properties", {}).items():
            walk(child, f"{path}.{name}".lstrip("."))
        if isinstance(amounts := node.get("additionalProperties"), dict):
            walk(amounts, f"{path}.cpu")

    walk(crd.build_schema(), "")
    return found


def test_every_rule_has_a_manifest_that_breaks_it() -> None:
    assert {(case.at, case.kind) for case in REFUSED} == rules_of_the_crd()


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: f"{c.kind}-{c.path}-{c.value}"[:60])
def test_what_breaks_a_rule_is_refused_with_the_field_and_what_would_be_right(
    api: Api, request: pytest.FixtureRequest, case: Refused
) -> None:
    change = at(case.path, case.value)
    if case.status:
        api.patch(f"{request.getfixturevalue('job')}/status", {"status": case.status})
    send = (
        partial(api.patch, request.getfixturevalue("job"), change)
        if case.kind == "change"
        else partial(api.create, JOBS, merged(SMALLEST, change))
    )
    with pytest.raises(ApiError) as refused:
        send(dryRun="All")
    assert refused.value.status == 422
    # The API server writes the key of a map in brackets.
    assert f"{re.sub(AMOUNTS, KEYED, case.at)}: " in refused.value.message
    assert case.words in refused.value.message


@pytest.mark.parametrize("fields", ACCEPTED.values(), ids=ACCEPTED)
def test_what_keeps_the_rules_is_accepted(api: Api, fields: dict[str, Any]) -> None:
    manifest = merged(SMALLEST, {"spec": fields})
    made = api.create(JOBS, manifest, dryRun="All", fieldValidation="Strict")
    # What the API server made of it, defaults filled in, is the same job to the model.
    uid = JobUid("u")
    ours = spec.parse_training_job(manifest).to_job_config(uid)
    assert spec.parse_training_job(made).to_job_config(uid) == ours


@pytest.mark.parametrize(
    "case",
    [case for case in REFUSED if case.kind != "change" and case.at not in CLUSTER_ONLY],
    ids=lambda c: f"{c.path}-{c.value}"[:60],
)
def test_the_model_refuses_the_same_at_the_same_field(case: Refused) -> None:
    with pytest.raises(spec.InvalidSpecError) as refused:
        spec.parse_training_job(merged(SMALLEST, at(case.path, case.value)))
    assert refused.value.field == case.at


@pytest.mark.parametrize("share", [7, pytest.param(1, marks=pytest.mark.chaos)])
def test_pipelines_are_refused_by_both_in_the_same_words_or_by_neither(
    api: Api, share: int
) -> None:
    num_refused = 0
    pipelines = PIPELINES[::share]
    for fields in pipelines:
        manifest = SMALLEST | {"spec": fields | {"template": TEMPLATE}}
        theirs, ours = refusal_of_server(api, manifest), refusal_of_model(manifest)
        num_refused += bool(ours)
        assert bool(theirs) == bool(ours), (fields, theirs, ours)
        named = [r for r in crd_rules.PIPELINE if ours.startswith(f"{r.section}{r.field}: ")]
        alike = [r for r in named if r.message in theirs and f"{r.section}{r.field}: " in theirs]
        assert not ours or any(words_of(r) in ours for r in alike), f"{fields}\n{theirs}\n{ours}"
    assert 0.2 < num_refused / len(pipelines) < 0.8, num_refused


def refusal_of_server(api: Api, manifest: dict[str, Any]) -> str:
    """What an API server says of a job; empty if it accepts it."""
    try:
        api.create(JOBS, manifest, dryRun="All")
    except ApiError as refused:
        return refused.message
    return ""


def refusal_of_model(manifest: dict[str, Any]) -> str:
    try:
        spec.parse_training_job(manifest)
    except spec.InvalidSpecError as refused:
        return str(refused)
    return ""


def words_of(rule: crd_rules.Rule) -> str:
    """What a rule says after the value, which is the model's sentence."""
    return rule.message.partition(", but ")[2] or rule.message


@pytest.mark.parametrize(("path", "value"), FREE)
def test_what_may_change_changes(api: Api, path: str, value: Any) -> None:
    manifest = merged(SMALLEST, {"metadata": {"name": "free"}, "spec": ALLOWED})
    job = f"{JOBS}/{api.create(JOBS, manifest)['metadata']['name']}"
    try:
        changed: Any = api.patch(job, at(path, value))
    finally:
        api.delete(job)
    for name in path.split("."):
        changed = changed[name]
    assert changed == value


def test_the_template_changes_while_the_job_is_suspended(api: Api, job: str) -> None:
    api.patch(job, at("spec.suspend", True))
    api.patch(job, at("spec.template", {"spec": {"nodeName": "a"}}))
    changed = api.patch(job, {"spec": {"suspend": False, "template": {"spec": {"nodeName": "b"}}}})
    assert changed["spec"]["template"] == {"spec": {**TEMPLATE["spec"], "nodeName": "b"}}
    with pytest.raises(ApiError, match="while the job is suspended only"):
        api.patch(job, at("spec.template", {"spec": {"nodeName": "c"}}))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_examples_are_accepted(api: Api, path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    if isinstance(manifest, list):
        pytest.skip("a faults file")
    checkpoint = manifest["spec"].get("checkpoint", {})
    if checkpoint.get("everySteps") and "storage" not in checkpoint:
        # Local mode has a directory for them; a cluster has to be told one.
        with pytest.raises(ApiError, match="everySteps needs storage in a cluster"):
            api.create(JOBS, manifest, dryRun="All")
        checkpoint["storage"] = "/checkpoints"
    if "template" not in manifest["spec"]:
        with pytest.raises(ApiError, match=NO_TRAINER):
            api.create(JOBS, manifest, dryRun="All")
        manifest["spec"]["template"] = TEMPLATE
    api.create(JOBS, manifest, dryRun="All", fieldValidation="Strict")


@pytest.mark.parametrize("field", ["gang", "witness", "paralelism"])
def test_a_field_that_nothing_executes_is_unknown(api: Api, field: str) -> None:
    with pytest.raises(ApiError, match=f'unknown field "spec.{field}"'):
        api.create(
            JOBS,
            merged(SMALLEST, {"spec": {field: {"enabled": True}}}),
            dryRun="All",
            fieldValidation="Strict",
        )


def test_a_template_without_containers_is_none(api: Api) -> None:
    template = at("spec.template.spec", {"containers": None, "nodeName": "n"})
    with pytest.raises(ApiError, match=r"spec\.template\.spec\.containers: Required value"):
        api.create(JOBS, merged(SMALLEST, template), dryRun="All")


def test_a_template_of_200_kib_fits_and_comes_back_as_it_was(
    api: Api, control_plane: ControlPlane
) -> None:
    words = [f"{number:04d}-" + "x" * 1019 for number in range(200)]
    container = {"name": "trainer", "image": "some-image", "args": words}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}}
    manifest = merged(SMALLEST, {"metadata": {"name": "large"}, "spec": {"template": template}})
    control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))
    made = api.get(f"{JOBS}/large")
    assert made["spec"]["template"] == template
    # As large as it is, every rule can still be checked on a change.
    api.patch(f"{JOBS}/large", at("spec.suspend", True))
    api.delete(f"{JOBS}/large")


def test_replicas_are_scaled_within_the_lanes(
    api: Api, control_plane: ControlPlane, job: str
) -> None:
    name = job.rpartition("/")[2]
    control_plane.kubectl("scale", "mtj", name, "--replicas=2")
    assert api.get(job)["spec"]["parallelism"]["replicas"] == 2
    said = control_plane.kubectl("scale", "mtj", name, "--replicas=5", check=False)
    assert "must be at most spec.training.lanes" in said
    api.patch(job, at("spec.detection.witness.everySteps", 5))
    said = control_plane.kubectl("scale", "mtj", name, "--replicas=1", check=False)
    assert "nobody else computes the same" in said
    assert api.get(job)["spec"]["parallelism"]["replicas"] == 2


def test_a_job_whose_permission_is_switched_off_alone_can_be_used(api: Api) -> None:
    limit = {"allowApproximate": True, "approximateAfterLostSteps": 3}
    fields = {"parallelism": {"stages": 4}, "recovery": limit}
    path = f"{JOBS}/allowed"
    api.create(JOBS, merged(SMALLEST, {"metadata": {"name": "allowed"}, "spec": fields}))
    try:
        changed = api.patch(path, at("spec.recovery.allowApproximate", False))
        job = spec.parse_training_job(changed).to_job_config(JobUid("u"))
    finally:
        api.delete(path)
    assert (job.approximate, job.approximate_rules.after_lost_steps) == (None, 3)


def test_the_status_is_written_apart_and_shown_in_columns(
    api: Api, control_plane: ControlPlane, job: str
) -> None:
    moment = "2026-01-02T03:04:05Z"
    status = {
        "observedGeneration": 1,
        "state": "Running",
        "ready": "4/4",
        "spares": "1/1",
        "startTime": moment,
        "conditions": [
            {
                "type": kind,
                "status": "Unknown",
                "reason": "NotObserved",
                "message": "",
                "lastTransitionTime": moment,
            }
            for kind in ConditionType
        ],
        "training": {"step": 17, "loss": "2.5", "ettr": "0.97", "approximateSince": 8},
        "quorum": {"id": "3", "replicas": 4},
        "recovery": {"total": 2, "last": {"method": "mask", "exact": True}},
    }
    before = api.patch(job, {"status": status})
    assert "status" not in before, "only through the subresource"
    after = api.patch(f"{job}/status", {"status": status, "spec": {"suspend": True}})
    assert after["status"] == status
    assert after["spec"]["suspend"] is False
    name = job.rpartition("/")[2]
    header, row = control_plane.kubectl("get", "mtj", name).splitlines()
    assert header.split() == ["NAME", "STATE", "READY", "SPARES", "STEP", "RECOVERIES", "AGE"]
    assert row.split()[:6] == [name, "Running", "4/4", "1/1", "17", "2"]
    wide = control_plane.kubectl("get", "mainstay", "-o", "wide").splitlines()
    assert wide[0].split()[-6:] == ["REPLICAS", "LOSS", "ETTR", "APPROXIMATE", "LAST", "REASON"]
    assert "trainingjob.mainstay.dev/" in control_plane.kubectl("get", "all", "-o", "name")


def test_two_writers_of_conditions_keep_each_others(api: Api, job: str) -> None:
    def condition(kind: str, reason: str) -> dict[str, str]:
        return {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": "",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }

    name = job.rpartition("/")[2]
    for manager, mine in (
        ("one", condition("Ready", "A")),
        ("other", condition("Queued", "B")),
    ):
        body = {
            "apiVersion": spec.API_VERSION,
            "kind": spec.KIND,
            "metadata": {"name": name},
            "status": {"conditions": [mine]},
        }
        api.request(
            "PATCH",
            f"{job}/status",
            body,
            params={"fieldManager": manager},
            headers={"Content-Type": "application/apply-patch+yaml"},
        )
    kept = {c["type"]: c["reason"] for c in api.get(job)["status"]["conditions"]}
    assert kept == {"Ready": "A", "Queued": "B"}


def test_explain_reads_well(api: Api, control_plane: ControlPlane) -> None:
    recovery = control_plane.kubectl("explain", "mtj.spec.recovery")
    assert "What a recovery may do." in recovery
    assert "maxRestarts\t<integer>" in recovery
    assert "Restarts of one slot's trainer until it works again; then it stays" in recovery
    assert "0: it ends at once. Default: 30." in " ".join(recovery.split())
    window = control_plane.kubectl("explain", "mtj.spec.recovery.window")
    assert "The budget of repairs: pods that died and are made again." in window
    mode = control_plane.kubectl("explain", "mtj.spec.recovery.quarantine.mode")
    assert "enum: Avoid, DryRun, Off, Taint" in mode or "ENUM" in mode
    assert "The newest recovery that ended." in control_plane.kubectl(
        "explain", "mtj.status.recovery"
    )
