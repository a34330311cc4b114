"""Mainstay on a real cluster: the chart installed by Helm, images from the Dockerfile, and jobs.

The cluster allows little: a release's namespace enforces restricted pods, quotas on requests and
limits hold there and where its jobs are, and there is no StorageClass.
"""

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
OTHER_SYSTEM = "other-system"
OTHER_JOBS = "other-jobs"
REDIS_USER = 999
REDIS_TLS = "redis-tls"
IMAGE = {"registry": building.REGISTRY, "tag": building.TAG}
REDIS: dict[str, Any] = {
    "image": {
        "registry": building.REGISTRY,
        "repository": "debian",
        "tag": f"{building.SUITE}-slim",
    },
    "runAsUser": REDIS_USER,
}
OF_SUPERVISORS = {
    "requests": {"cpu": "50m", "memory": "64Mi"},
    "limits": {"cpu": "1", "memory": "512Mi"},
}
"""With OF_TRAINERS, what a pod counts for in a quota (`Release.allow_pods`)."""
OF_TRAINERS = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "2", "memory": "1Gi"},
}
VALUES: dict[str, Any] = {
    "image": IMAGE,
    "watchNamespaces": [JOBS],
    "agent": {"resources": OF_SUPERVISORS},
    "api": {"replicas": 2},
    "operator": {},
    "redis": {"internal": {**REDIS, "tls": {"secret": REDIS_TLS}}},
}
NUM_PODS = 12
"""Of several jobs, as one ends while the next begins. A pod of a dead node counts as well."""
MODEL = {"dim": 32, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 64, "sequence": 16}
CORPUS = ROOT / "docs"
"""What jobs learn. The built-in corpus is Python's own library, which differs between images."""
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class Release:
    """A release of the chart, in a namespace of its own, and the namespace that it serves.

    Args:
        cluster: where it is.
        system: its own namespace.
        jobs: the namespace of its jobs.
        values: what it is installed with.
    """

    def __init__(self, cluster: Cluster, system: str, jobs: str, values: dict[str, Any]) -> None:
        self.cluster = cluster
        self.api = cluster.api
        self.chart = CHART
        self.namespace = system
        self.jobs = jobs
        self.values = values
        self.pods_path = f"/api/v1/namespaces/{jobs}/pods"
        self.jobs_path = f"/apis/mainstay.dev/v1alpha1/namespaces/{jobs}/trainingjobs"
        self.dir = cluster.dir / f"release-{system}"
        self.gates = self.dir / "gates"
        self.checkpoints = self.dir / "checkpoints"
        for shared in (self.gates, self.checkpoints):
            shared.mkdir(parents=True)
            shared.chmod(0o777)
        cluster.make_namespace(system, **RESTRICTED)
        cluster.make_namespace(jobs)
        self.home = cluster.living[0].name
        """The node of operator and store: no test kills it."""
        self._url: str | None = None

    def allow(self, namespace: str, **hard: str) -> None:
        """Have a namespace keep a quota, and wait until it does."""
        hard = {name.replace("_", "."): amount for name, amount in hard.items()}
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all"}}
        self.api.apply(quota | {"spec": {"hard": hard}}, namespace)

        def is_kept(found: Object | None) -> bool:
            return bool(found and found.get("status", {}).get("hard") == found["spec"]["hard"])

        self.api.wait(f"/api/v1/namespaces/{namespace}/resourcequotas/all", is_kept)

    def allow_pods(self, count: int) -> None:
        """Have the jobs' namespace keep a quota that so many pods of a job use up."""
        self.allow(
            self.jobs,
            requests_cpu=f"{150 * count}m",
            requests_memory=f"{320 * count}Mi",
            limits_cpu=str(3 * count),
            limits_memory=f"{1536 * count}Mi",
        )

    def install(self, *options: str, wait: bool = True, **values: Any) -> str:
        """Install or upgrade the release; wait until all of it is ready; return Helm's words."""
        path = self.dir / "values.json"
        home = {"nodeSelector": {"kubernetes.io/hostname": self.home}}
        given: dict[str, Any] = {**self.values, **values}
        given["operator"] = {**given["operator"], **home}
        given["redis"] = {"internal": {**given["redis"]["internal"], **home}}
        path.write_text(json.dumps(given))
        action = ["upgrade", "--install", RELEASE, str(self.chart), "-n", self.namespace]
        waiting = ["--wait", "--timeout", "3m"] if wait else []
        return self.cluster.helm(*action, "-f", str(path), *waiting, *options)

    def apply(self, job: Object) -> Object:
        return self.api.apply(job, self.jobs)

    def job(self, name: str) -> Object:
        return self.api.get(f"{self.jobs_path}/{name}")

    def wait(self, name: str, until: Callable[[Object | None], Any], what: str = "") -> Object:
        seen = self.api.wait(f"{self.jobs_path}/{name}", until, what)
        return seen or {}

    def pods(self, name: str) -> list[Object]:
        """The job's pods that are not on their way out, by index."""
        return self._pods(self.jobs, f"mainstay.dev/job-name={name}")

    def system(self, component: str, *, leaving: bool = False) -> list[Object]:
        """The pods of one of the release's own components; those on their way out if wanted."""
        selector = f"app.kubernetes.io/component={component}"
        return self._pods(self.namespace, selector, leaving=leaving)

    def _pods(self, namespace: str, selector: str, *, leaving: bool = False) -> list[Object]:
        listed = self.api.list(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
        pods = [pod for pod in listed if leaving or "deletionTimestamp" not in pod["metadata"]]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def open_gates(self, *steps: int) -> None:
        for step in steps:
            (self.gates / str(step)).touch()

    def fetch(self, uid: str, what: str) -> Any:
        """A part of a job as the api shows it to a person with the admin's rights."""
        return self._ask(f"/v1/jobs/{uid}/{what}")

    def _ask(self, path: str) -> Any:
        # From where both run: other nodes may be dead.
        network = self.cluster.nodes[self.home].network
        if self._url is None:
            self._url = self.cluster.reach(f"{RELEASE}-api", self.namespace, network)
        answer = httpx.get(
            f"{self._url}{path}",
            headers={"Authorization": f"Bearer {self.cluster.tokens['admin']}"},
            trust_env=False,
            timeout=30,
        )
        answer.raise_for_status()
        return answer.json()

    def served(self) -> set[str]:
        """The uids of the jobs that the api knows."""
        return {job["uid"] for job in self._ask("/v1/jobs")}

    def try_fetch(self, uid: str, what: str) -> Any:
        """The same, or None while the api does not answer."""
        try:
            return self.fetch(uid, what)
        except httpx.HTTPError:
            return None


class Platform(Release):
    """The release of most tests: two replicas of the api, a Redis with TLS and a volume."""

    def __init__(self, cluster: Cluster, say: Say) -> None:
        cluster.add_image(building.make_images(say))
        super().__init__(cluster, SYSTEM, JOBS, VALUES)
        self._make_volume()
        self._make_certificates()
        # Room for two more pods of the api: one that an upgrade makes beside one that still ends.
        self.allow(
            SYSTEM,
            requests_cpu="600m",
            requests_memory="1216Mi",
            limits_cpu="12",
            limits_memory="7Gi",
        )
        self.allow_pods(NUM_PODS)

    def upgrade(self, version: str) -> str:
        """Move to the next version of the chart, with images by another tag."""
        self.chart = self.dir / f"mainstay-{version}"
        shutil.copytree(CHART, self.chart)
        about = yaml.safe_load((self.chart / "Chart.yaml").read_text())
        about |= {"version": version, "appVersion": version}
        (self.chart / "Chart.yaml").write_text(yaml.safe_dump(about))
        return self.install(image={**IMAGE, "tag": building.NEXT_TAG})

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


class Neighbour(Release):
    """A second release beside the first, of the same name: as it comes, but on one node."""

    def __init__(self, cluster: Cluster) -> None:
        home = {"nodeSelector": {"kubernetes.io/hostname": cluster.living[0].name}}
        values = {
            "image": IMAGE,
            "crds": {"enabled": False},
            "watchNamespaces": [OTHER_JOBS],
            "agent": {"resources": OF_SUPERVISORS},
            "api": {"replicas": 1, **home},
            "operator": {},
            "redis": {"internal": REDIS},
        }
        super().__init__(cluster, OTHER_SYSTEM, OTHER_JOBS, values)
        self.allow(
            OTHER_SYSTEM,
            requests_cpu="300m",
            requests_memory="640Mi",
            limits_cpu="6",
            limits_memory="4Gi",
        )
        self.allow_pods(3)


def make_job(platform: Release, name: str, steps: int, *gates: int, **spec: Any) -> Object:
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
    container["resources"] = OF_TRAINERS
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
