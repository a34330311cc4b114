"""Mainstay for a person who plays with a cluster: images, values and a job; no registry needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.cluster import building
from tests.cluster.cluster import Cluster
from tests.cluster.toolbox import Say

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "llama-tiny.yaml"
SYSTEM = "mainstay-system"
VALUES: dict[str, Any] = {
    "image": {"registry": building.REGISTRY, "tag": building.TAG},
    "redis": {
        "internal": {
            "image": {
                "registry": building.REGISTRY,
                "repository": "debian",
                "tag": f"{building.SUITE}-slim",
            },
            # The cluster has nobody who makes volumes.
            "persistence": {"enabled": False},
        }
    },
}


def add_mainstay(cluster: Cluster, say: Say) -> None:
    """Put this checkout's images on every node; write values and a job that use them."""
    cluster.add_image(building.make_images(say))
    values, job = cluster.dir / "values.yaml", cluster.dir / "llama-tiny.yaml"
    values.write_text(yaml.safe_dump(VALUES))
    job.write_text(yaml.safe_dump(playable(yaml.safe_load(EXAMPLE.read_text()))))
    say("the images of this checkout are on all nodes; for example, with KUBECONFIG as below:")
    options = f"-n {SYSTEM} --create-namespace -f {values}"
    say(f"helm install mainstay {ROOT / 'charts/mainstay'} {options}")
    say(f"kubectl apply -n {SYSTEM} -f {job}")


def playable(job: dict[str, Any]) -> dict[str, Any]:
    """Return an example with a trainer whose image is at hand: torch is this environment's."""
    resources = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    job["spec"]["template"] = building.trainer_template(resources=resources)
    return job
