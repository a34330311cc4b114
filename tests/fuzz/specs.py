"""Valid TrainingJobs with every field, for the targets that need one."""

from __future__ import annotations

from typing import Any

from mainstay_core.base.ids import JobUid
from mainstay_core.faults.files import parse_faults
from mainstay_core.job.spec import parse_training_job

SMALL: dict[str, Any] = {
    "apiVersion": "mainstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "demo"},
    "spec": {
        "training": {"steps": 60, "seed": 1, "lanes": 2, "shardsPerLane": 2},
        "parallelism": {"stages": 2},
        "workload": {"entrypoint": "package.module:workload", "config": {}},
    },
}
MANIFEST: dict[str, Any] = {
    "apiVersion": "mainstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {
        "name": "demo",
        "namespace": "research",
        "labels": {"team": "a"},
        "annotations": {"note": "b"},
        "uid": "5eed",
        "generation": 3,
    },
    "spec": {
        "suspend": False,
        "managedBy": "mainstay.dev/operator",
        "activeDeadlineSeconds": 3600,
        "ttlSecondsAfterFinished": 60,
        "priorityClassName": "low",
        "training": {"steps": 100, "seed": 7, "lanes": 4, "shardsPerLane": "Auto"},
        "parallelism": {
            "replicas": 4,
            "minReplicas": 2,
            "stages": 2,
            "ranksPerStage": 2,
            "ranksPerPod": 2,
        },
        "redundancy": "Auto",
        "pipeline": {"schedule": "1F1B", "microBatches": 2, "order": "InOrder"},
        "workload": {
            "entrypoint": "mainstay_train.models.llama:workload",
            "args": ["--fast", "1"],
            "config": {"dim": 192, "layers": 8, "heads": 6, "data": {"path": "/data"}, "x": None},
        },
        "runtime": {"device": "CPU", "backend": "Gloo", "recompute": True, "compile": "Off"}
        | {"bucketMebibytes": 8, "connectSeconds": 30},
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "terminationGracePeriodSeconds": 60,
                "containers": [
                    {
                        "name": "trainer",
                        "image": "torch:1",
                        "env": [{"name": "A", "value": "b"}],
                        "volumeMounts": [
                            {"name": "data", "mountPath": "/shared"},
                            {"name": "shm", "mountPath": "/dev/shm", "readOnly": False},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "data", "persistentVolumeClaim": {"claimName": "a"}},
                    {"name": "shm", "emptyDir": {"medium": "Memory"}},
                ],
            },
        },
        "spares": {"replicas": 1, "mode": "Warm"},
        "detection": {
            "hangSeconds": 30,
            "heartbeatSeconds": 1,
            "heartbeatTimeoutSeconds": 15,
            "dmr": {"mode": "Full", "plan": "Naive"},
        },
        "checkpoint": {
            "storage": "/shared/a",
            "everySteps": 10,
            "keep": 2,
            "resumeFrom": "/shared/b",
            "keySecret": "key",
        },
        "recovery": {
            "allowApproximate": False,
            "onHostsLost": "Rehost",
            "maxRestarts": 10,
            "restartGraceSeconds": 10,
            "handoverSeconds": 30,
            "holdBackSeconds": 1,
            "holdBackMaxSeconds": 300,
            "window": {"seconds": 3600, "maxRepairs": "Auto"},
            "quarantine": {
                "mode": "DryRun",
                "afterMismatches": 2,
                "windowSeconds": 86400,
                "maxNodesPercent": 10,
                "trustedNodes": ["node-1"],
            },
        },
        "scheduling": {
            "startupDeadlineSeconds": 120,
            "replicaTopologyKey": "topology.kubernetes.io/rack",
            "spreadTopologyKey": "kubernetes.io/hostname",
        },
    },
    "status": {"phase": "Running"},
}
FAULTS: list[dict[str, Any]] = [
    {"id": "a", "at": {"step": 3, "phase": "backward"}, "target": {"replica": 1, "stage": 0},
     "action": "kill-pod"},
    {"id": "b", "at": {"with": "a"}, "target": {"replica": 0, "stage": 1, "inner": 1},
     "action": "stop", "forSeconds": 2.5},
    {"at": {"during": "heal", "of": "a"}, "target": {"replica": 1, "stage": 0},
     "action": "kill-trainer"},
    {"at": {"step": 5}, "target": {"replica": 0, "stage": 0}, "action": "slow", "delayMs": 5,
     "factor": 2, "steps": 3},
    {"at": {"step": 5, "phase": "backward"}, "target": {"replica": 0, "stage": 0}, "action": "flip",
     "flip": {"type": 1, "microBatch": 0, "pass": "weight", "block": 1, "operator": "aten.mm",
              "output": 0, "element": 7, "bit": 30, "execution": "checker"}},
    {"at": {"step": 6}, "target": {"spare": 0}, "action": "disconnect", "forSeconds": 1},
    {"at": {"step": 7}, "target": {"process": "api"}, "action": "kill"},
    {"at": {"after": "a", "delayMs": 2}, "target": {"replica": 2, "stage": 1}, "action": "stop"},
]  # fmt: skip
JOB = parse_training_job(MANIFEST)
CONFIG = JOB.to_job_config(JobUid("5eed"), parse_faults(FAULTS, JOB.shape, 1))
