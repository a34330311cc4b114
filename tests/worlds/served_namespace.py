"""An operator as its own process on a real control plane, with a real api and Redis.

There is no kubelet: tests bind pods to nodes that are names only, write their
status, and play their supervisors at the api.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.api.conftest import Redis
from tests.cluster.client import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.worlds import played
from tests.worlds.crd import apply_crd

from mainstay_core.job.object_names import object_name
from mainstay_core.supervisor.outbox import MAX_BATCH

TOKEN = "operator-tests"
GIVE_UP_S = 120.0
JOBS = "/apis/mainstay.dev/v1alpha1"
AGENT_IMAGE = "mainstay-agent:test"


def manifest(name: str = "demo", **spec: Any) -> dict[str, Any]:
    """A job of four worker pods and a spare."""
    return {
        "apiVersion": "mainstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "training": {"steps": 60, "seed": 1, "lanes": 2, "shardsPerLane": 2},
            "parallelism": {"stages": 2},
            "spares": {"replicas": 1},
            "workload": {"entrypoint": "package.module:workload", "config": {}},
            "template": {"spec": {"containers": [{"name": "trainer", "image": "torch:test"}]}},
            **spec,
        },
    }


def wait(until: Callable[[], Any], what: str) -> Any:
    """Return the first true answer."""
    deadline = time.monotonic() + GIVE_UP_S
    while not (answer := until()):
        assert time.monotonic() < deadline, f"{what}: not within {GIVE_UP_S:.0f} s"
        time.sleep(0.03)
    return answer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class ApiProcess:
    """``python -m mainstay_api`` on a port that it keeps over restarts, and its Redis."""

    def __init__(self, directory: Path) -> None:
        self.redis = Redis(directory)
        self.redis.start()
        self._log = directory / "api.log"
        self._port_file = directory / "port"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {TOKEN}"},
            trust_env=False,
            timeout=30,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "MAINSTAY_REDIS_URL": self.redis.url,
            "MAINSTAY_TOKEN": TOKEN,
            "MAINSTAY_API_PORT": str(self.port),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mainstay_api", "--port-file", str(self._port_file)],
                env=environment,
                stderr=log,
                stdout=log,
            )
        wait(self._port_file.exists, f"the api's start, see {self._log}")

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.stop()
        self.client.close()
        self.redis.stop()

    def get(self, path: str) -> Any:
        reply = self.client.get(path)
        reply.raise_for_status()
        return reply.json()

    def post(self, path: str, body: Any) -> Any:
        reply = self.client.post(path, json=body)
        assert reply.is_success, reply.text
        return reply.json()


class OperatorProcess:
    """``python -m mainstay_operator``."""

    def __init__(self, plane: ControlPlane, directory: Path, **environment: str) -> None:
        self._log = directory / "operator.log"
        self.url = f"http://127.0.0.1:{free_port()}"
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(plane.kubeconfig_as("operator")),
            "MAINSTAY_AGENT_IMAGE": AGENT_IMAGE,
            "MAINSTAY_TOKEN": TOKEN,
            "MAINSTAY_LIVENESS_URL": f"{self.url}/healthz",
            "MAINSTAY_POLL_S": "0.2",
            "MAINSTAY_STATUS_S": "1",
            **environment,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mainstay_operator"],
                env=self._environment,
                stderr=log,
                stdout=log,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill it with -9, in whatever it is doing."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait_end(self) -> int:
        """Wait until it has ended by itself; return its exit code."""
        assert self._process is not None
        return self._process.wait(timeout=GIVE_UP_S)

    def is_up(self) -> bool:
        """Start it again if it has ended, as the kubelet does; return True."""
        assert self._process is not None
        if self._process.poll() is not None:
            self.start()
        return True

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def is_alive(self) -> bool:
        """What its liveness probe says; it must answer."""
        return httpx.get(f"{self.url}/healthz", trust_env=False, timeout=30).status_code == 200

    def metric(self, name: str, **labels: str) -> float | None:
        """The sum of a metric's series that have these labels; None if there is none."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=30).text
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None

    def log(self) -> str:
        return self._log.read_text(errors="replace")


class ServedNamespace:
    """One namespace of the control plane with the job's own operator, api and Redis."""

    def __init__(self, plane: ControlPlane, directory: Path, **environment: str) -> None:
        self.plane = plane
        self.kube = plane.api
        self.namespace = plane.make_namespace()
        self.api = ApiProcess(directory)
        self.operator = OperatorProcess(
            plane,
            directory,
            MAINSTAY_API_URL=self.api.url,
            MAINSTAY_NAMESPACES=self.namespace,
            **environment,
        )
        self.operator.start()

    def close(self) -> None:
        self.operator.stop()
        with contextlib.suppress(ApiError):
            self.kube.delete(f"/api/v1/namespaces/{self.namespace}")
        self.api.close()

    # --- objects ---

    def path(self, resource: str, name: str = "") -> str:
        base = {
            "trainingjobs": JOBS,
            "poddisruptionbudgets": "/apis/policy/v1",
            "networkpolicies": "/apis/networking.k8s.io/v1",
        }.get(resource, "/api/v1")
        path = f"{base}/namespaces/{self.namespace}/{resource}"
        return f"{path}/{name}" if name else path

    def submit(self, body: dict[str, Any]) -> Job:
        made = self.kube.create(self.path("trainingjobs"), body)
        return Job(self, made["metadata"]["name"], made["metadata"]["uid"])

    def events(self, reason: str = "") -> list[dict[str, Any]]:
        found = self.kube.list(self.path("events"))
        return [e for e in found if not reason or e["reason"] == reason]

    def is_forgotten(self, uid: str) -> bool:
        """Whether the api has deleted its record of a job."""
        return self.api.client.get(f"/v1/jobs/{uid}").status_code == 410

    def make_node(self, name: str, **labels: str) -> None:
        """A node that is a name only."""
        with contextlib.suppress(ApiError):
            self.kube.create(
                "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}, "spec": {}}
            )
        self.set_node_ready(name, ready=True)

    def set_node_ready(self, name: str, *, ready: bool) -> None:
        status = {"type": "Ready", "status": str(ready), "reason": "Test"}
        self.kube.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [status]}})

    def taint_node(self, name: str, key: str, effect: str) -> None:
        """Add a taint; the node lifecycle controller may have some of its own."""
        taints = self.kube.get(f"/api/v1/nodes/{name}")["spec"].get("taints", [])
        taints.append({"key": key, "effect": effect})
        self.kube.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": taints}})


class Job:
    """A job in the cluster, and its supervisors at the api."""

    def __init__(self, served: ServedNamespace, name: str, uid: str) -> None:
        self.served = served
        self.name = name
        self.uid = uid
        self._lives = itertools.count()

    @property
    def path(self) -> str:
        return self.served.path("trainingjobs", self.name)

    def own_path(self, resource: str) -> str:
        """The path of what the job has of this sort beside its pods."""
        return self.served.path(resource, object_name(self.name, self.uid))

    def get(self) -> dict[str, Any]:
        return self.served.kube.get(self.path)

    def patch(self, **spec: Any) -> None:
        self.served.kube.patch(self.path, {"spec": spec})

    def delete(self) -> None:
        self.served.kube.delete(self.path)

    def wait_status(self, until: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """Wait until the status is as wanted; return it."""
        found = self.served.kube.wait(
            self.path, lambda job: job is not None and until(job.get("status") or {}), what
        )
        assert found is not None
        return dict(found["status"])

    def wait_condition(self, kind: str, status: str, reason: str = "") -> dict[str, Any]:
        def holds(shown: dict[str, Any]) -> bool:
            condition = condition_of(shown, kind)
            return condition.get("status") == status and reason in ("", condition.get("reason"))

        return condition_of(self.wait_status(holds, f"{kind} {status} {reason}"), kind)

    # --- pods ---

    def pods(self) -> list[dict[str, Any]]:
        """Its pods, those that are being deleted among them, by index."""
        found = self.served.kube.list(
            self.served.path("pods"), labelSelector=f"mainstay.dev/job-uid={self.uid}"
        )
        return sorted(found, key=lambda p: int(p["metadata"]["labels"]["mainstay.dev/pod-index"]))

    def names(self) -> list[str]:
        return [p["metadata"]["name"] for p in self.pods()]

    def wait_pods(self, *names: str) -> list[dict[str, Any]]:
        """Wait until exactly these pods exist."""
        wait(lambda: set(self.names()) == set(names), f"pods {names}, not {self.names()}")
        return self.pods()

    def bind(self, pod: dict[str, Any], node: str) -> None:
        name = pod["metadata"]["name"]
        self.served.kube.create(
            self.served.path("pods", name) + "/binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            },
        )

    def bind_all(self, pods: Iterable[dict[str, Any]], first: str, rest: str) -> None:
        """Bind the first pod to a node of its own."""
        for number, pod in enumerate(pods):
            self.bind(pod, rest if number else first)

    def remove(self, pod: dict[str, Any]) -> None:
        """End a pod for good, as its kubelet does."""
        path = self.served.path("pods", pod["metadata"]["name"])
        self.served.kube.delete(path, gracePeriodSeconds="0")

    def set_pod(self, pod: dict[str, Any], **status: Any) -> None:
        path = self.served.path("pods", pod["metadata"]["name"])
        self.served.kube.patch(f"{path}/status", {"status": status})

    def set_waiting(self, pod: dict[str, Any], reason: str) -> None:
        """Its trainer's container waits."""
        waiting = {"waiting": {"reason": reason, "message": f"{reason}: no such thing"}}
        container = {
            "name": "trainer",
            "image": "torch:test",
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": waiting,
        }
        self.set_pod(pod, phase="Pending", containerStatuses=[container])

    def set_ready(self, pods: Iterable[dict[str, Any]]) -> None:
        for pod in pods:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            condition = {"type": "Ready", "status": "True", "lastTransitionTime": now}
            self.set_pod(pod, phase="Running", conditions=[condition])

    # --- supervisors ---

    def agent(self, path: str, body: Any) -> Any:
        return self.served.api.post(f"/v1/jobs/{self.uid}/agent/{path}", body)

    def topology(self) -> dict[str, Any]:
        """Places of nodes that the operator has told."""
        return dict(self.served.api.get(f"/v1/jobs/{self.uid}/topology")["nodes"])

    def register(
        self, pods: Iterable[dict[str, Any]], domains: Mapping[str, str] | None = None
    ) -> None:
        """The pods' supervisors come, and say that a trainer is up in each slot."""
        for pod in pods:
            uid = pod["metadata"]["uid"]
            self.introduce(pod, (domains or {}).get(uid, ""))
            self.fact("trainer-up", uid, self.new_life(), fingerprint={"torch": "2"})

    def introduce(self, pod: dict[str, Any], domain: str = "") -> None:
        """A pod's supervisor comes."""
        name = pod["metadata"]["name"]
        self.agent(
            "pods",
            {
                "pod": pod["metadata"]["uid"],
                "name": name,
                "address": "127.0.0.1",
                "gather": f"{name}:1",
                "num_slots": 1,
                "pid": 1,
                "domain": domain,
            },
        )

    def new_life(self) -> str:
        """A name for a trainer's process."""
        return f"life{next(self._lives)}"

    def fact(self, kind: str, pod: str, life: str, **fields: Any) -> None:
        self.agent("facts", {"facts": [played.fact(kind, pod, life, **fields)]})

    def leaving(self) -> set[str]:
        """Pods whose work is to be handed over."""
        return set(self.wanted()["leaving"])

    def living(self) -> set[str]:
        """Pods that the api takes for living."""
        return {p["uid"] for p in self.wanted()["pods"]}

    def plan(self) -> dict[str, Any]:
        return dict(self.served.api.get(f"/v1/jobs/{self.uid}/plan")["plan"] or {})

    def wanted(self) -> dict[str, Any]:
        return dict(self.served.api.get(f"/v1/jobs/{self.uid}/pods"))

    def settle(self, step: int = 0) -> None:
        """All members of the newest plan go on in it."""
        self.tell(played.settle_facts(self.plan(), step))

    def tell(self, facts: Sequence[Any]) -> None:
        """Tell facts, as many in a request as a supervisor tells."""
        for first in range(0, len(facts), MAX_BATCH):
            self.agent("facts", {"facts": facts[first : first + MAX_BATCH]})

    def commit(self, step: int) -> None:
        """All stages commit a step."""
        quorum = self.plan()["quorum"]
        entries = [played.ledger_entry(step, stage, quorum) for stage in (0, 1)]
        self.agent("ledger", {"entries": entries})

    def run(self, *names: str, domains: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Wait for the pods, and have them run and train."""
        pods = self.wait_pods(*names)
        self.set_ready(pods)
        self.register(pods, domains)
        wait(self.plan, "the first plan")
        self.settle()
        return pods


def condition_of(status: dict[str, Any], kind: str) -> dict[str, Any]:
    found = [c for c in status.get("conditions") or () if c["type"] == kind]
    return dict(found[0]) if found else {}


@contextlib.contextmanager
def serve_namespace(
    plane: ControlPlane, directory: Path, **environment: str
) -> Iterator[ServedNamespace]:
    """A served namespace that is taken down at the end; a failed test shows the operator's log."""
    apply_crd(plane)
    served = ServedNamespace(plane, directory, **environment)
    try:
        yield served
    finally:
        served.close()
        sys.stdout.write(served.operator.log()[-20_000:])
