"""Mainstay on a real cluster: the chart installed by Helm, images from the Dockerfile, and jobs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.cluster import building
from tests.cluster.client import Object
from tests.cluster.cluster import Cluster
from tests.cluster.toolbox import Say
from tests.worlds.tls import Certificates

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "mainstay"
RELEASE = "mainstay"
SYSTEM = "mainstay-system"
JOBS = "jobs"
REDIS_USER = 999
REDIS_TLS = "redis-tls"
TRAINING_JOBS = f"/apis/mainstay.dev/v1alpha1/namespaces/{JOBS}/trainingjobs"
VALUES: dict[str, Any] = {
    "image": {"registry": building.REGISTRY, "tag": building.TAG},
    "watchNamespaces": [JOBS],
    "api": {"replicas": 2},
    "operator": {},
    "redis": {
        "internal": {
            "image": {
                "registry": building.REGISTRY,
                "repository": "debian",
                "tag": f"{building.SUITE}-slim",
            },
            "runAsUser": REDIS_USER,
            "tls": {"secret": REDIS_TLS},
        }
    },
}
MODEL = {"dim": 32, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 64, "sequence": 16}
CORPUS = ROOT / "docs"
"""What jobs learn. The built-in corpus is Python's own library, which differs between images."""
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class Platform:
    """An installed release. Its own namespace enforces restricted pods; jobs run in another."""

    def __init__(self, cluster: Cluster, say: Say) -> None:
        self.cluster = cluster
        self.api = cluster.api
        self.chart = CHART
        self._url: str | None = None
        self.gates = cluster.dir / "gates"
        self.checkpoints = cluster.dir / "checkpoints"
        for shared in (self.gates, self.checkpoints):
            shared.mkdir()
            shared.chmod(0o777)
        cluster.add_image(building.make_images(say))
        cluster.make_namespace(SYSTEM, **RESTRICTED)
        cluster.make_namespace(JOBS)
        self._make_volume()
        self._make_certificates()
        self.home = cluster.living[0].name
        """The node of operator and store: no test kills it."""

    def install(self, **values: Any) -> str:
        """Install or upgrade the release; wait until all of it is ready; return Helm's words."""
        path = self.cluster.dir / "values.json"
        home = {"nodeSelector": {"kubernetes.io/hostname": self.home}}
        given: dict[str, Any] = {**VALUES, **values}
        given["operator"] = {**given["operator"], **home}
        given["redis"] = {"internal": {**given["redis"]["internal"], **home}}
        path.write_text(json.dumps(given))
        action = ["upgrade", "--install", RELEASE, str(self.chart), "-n", SYSTEM]
        return self.cluster.helm(*action, "-f", str(path), "--wait", "--timeout", "3m")

    def upgrade(self, version: str) -> str:
        """Move to the next version of the chart, with images by another tag."""
        self.chart = self.cluster.dir / f"mainstay-{version}"
        shutil.copytree(CHART, self.chart)
        about = yaml.safe_load((self.chart / "Chart.yaml").read_text())
        about |= {"version": version, "appVersion": version}
        (self.chart / "Chart.yaml").write_text(yaml.safe_dump(about))
        return self.install(image={**VALUES["image"], "tag": building.NEXT_TAG})

    def apply(self, job: Object) -> Object:
        return self.api.apply(job, JOBS)

    def job(self, name: str) -> Object:
        return self.api.get(f"{TRAINING_JOBS}/{name}")

    def wait(self, name: str, until: Callable[[Object | None], Any], what: str = "") -> Object:
        seen = self.api.wait(f"{TRAINING_JOBS}/{name}", until, what)
        return seen or {}

    def pods(self, name: str) -> list[Object]:
        """The job's pods that are not on their way out, by index."""
        return self._pods(JOBS, f"mainstay.dev/job-name={name}")

    def system(self, component: str) -> list[Object]:
        """The pods of one of the release's own components that are not on their way out."""
        return self._pods(SYSTEM, f"app.kubernetes.io/component={component}")

    def _pods(self, namespace: str, selector: str) -> list[Object]:
        listed = self.api.list(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
        pods = [pod for pod in listed if "deletionTimestamp" not in pod["metadata"]]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def open_gates(self, *steps: int) -> None:
        for step in steps:
            (self.gates / str(step)).touch()

    def fetch(self, uid: str, what: str) -> Any:
        """A part of a job as the api shows it to a person with the admin's rights."""
        # From where both run: other nodes may be dead.
        network = self.cluster.nodes[self.home].network
        if self._url is None:
            self._url = self.cluster.reach(f"{RELEASE}-api", SYSTEM, network)
        answer = httpx.get(
            f"{self._url}/v1/jobs/{uid}/{what}",
            headers={"Authorization": f"Bearer {self.cluster.tokens['admin']}"},
            trust_env=False,
            timeout=30,
        )
        answer.raise_for_status()
        return answer.json()

    def try_fetch(self, uid: str, what: str) -> Any:
        """The same, or None while the api does not answer."""
        try:
            return self.fetch(uid, what)
        except httpx.HTTPError:
            return None

    def _make_certificates(self) -> None:
        """Make the store's certificate: api and store of this release speak TLS."""
        folder = self.cluster.dir / "certificates"
        folder.mkdir()
        made = Certificates(folder, f"DNS:{RELEASE}-redis.{SYSTEM}.svc")
        files = {"tls.crt": made.server, "tls.key": made.server_key, "ca.crt": made.authority}
        self.api.create(
            f"/api/v1/namespaces/{SYSTEM}/secrets",
            {
                "metadata": {"name": REDIS_TLS},
                "type": "kubernetes.io/tls",
                "stringData": {name: path.read_text() for name, path in files.items()},
            },
        )

    def _make_volume(self) -> None:
        """The volume that the store claims: the cluster has nobody who makes volumes."""
        data = self.cluster.dir / "redis"
        data.mkdir()
        os.chown(data, REDIS_USER, REDIS_USER)
        self.api.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": "redis"},
                "spec": {
                    "capacity": {"storage": "8Gi"},
                    "accessModes": ["ReadWriteOnce"],
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": str(data)},
                },
            }
        )


def make_job(platform: Platform, name: str, steps: int, *gates: int, **spec: Any) -> Object:
    """A tiny job of three lanes, a pod each, and a spare; it waits before steps with gates."""
    template = building.trainer_template()
    container = template["spec"]["containers"][0]
    mounts = {
        "gates": (platform.gates, "/gates"),
        "checkpoints": (platform.checkpoints, "/checkpoints"),
        "code": (ROOT / "tests" / "e2e", "/code"),
        "corpus": (CORPUS, "/corpus"),
    }
    for volume, (path, target) in mounts.items():
        template["spec"]["volumes"].append({"name": volume, "hostPath": {"path": str(path)}})
        container["volumeMounts"].append({"name": volume, "mountPath": target})
    # Memory to run out of: /dev/shm has a bound of its own.
    template["spec"]["volumes"].append({"name": "fill", "emptyDir": {"medium": "Memory"}})
    container["volumeMounts"].append({"name": "fill", "mountPath": "/fill"})
    container["resources"] = {"limits": {"memory": "1Gi"}}
    return {
        "apiVersion": "mainstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "training": {"steps": steps, "seed": 11, "lanes": 3, "shardsPerLane": 1},
            "parallelism": {"replicas": 3, "minReplicas": 1, "stages": 1},
            "spares": {"replicas": 1},
            "runtime": {"device": "CPU", "backend": "Gloo"},
            "workload": {
                "entrypoint": "/code/gated_llama.py:workload",
                "config": MODEL | {"data": {"path": "/corpus"}},
                "args": ["/gates", *map(str, gates)],
            },
            "template": template,
            **spec,
        },
    }
