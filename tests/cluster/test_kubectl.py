"""`kubectl mainstay` by a real kubectl: to the api through the API server, by the chart's roles."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Api, Redis
from tests.cluster import relay
from tests.cluster.cluster import Cluster
from tests.cluster.images import BUSYBOX
from tests.worlds.installed_chart import InstalledChart

from mainstay_core.job.object_names import object_name

CLONE_NEWNET = 0x40000000
ROOT = Path(__file__).parents[2]
SPEC: dict[str, Any] = {
    "training": {"steps": 60, "seed": 1, "lanes": 1},
    "workload": {"entrypoint": "package.module:workload"},
    "template": {"spec": {"containers": [{"name": "trainer", "image": "some-image"}]}},
}
SERVICE = "mainstay-api"
PORT = 8080


def listen_in(network: str, address: str) -> socket.socket:
    """A listening socket in a network namespace, for this process, which stays where it is."""

    def listen() -> socket.socket:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{network}") as place:
            if libc.setns(place.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return socket.create_server((address, 0))

    # A thread of its own moves, and ends with the pool.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(listen).result()


@dataclass
class Town:
    """A job with one pod that really runs, known to an api behind the chart's Service."""

    world: InstalledChart
    namespace: str
    uid: str
    plugins: Path

    def kubeconfig(self, token: str) -> Path:
        """A kubeconfig as a person has one."""
        plane = self.world.plane
        cluster = {"server": plane.url, "certificate-authority": str(plane.authority)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token} if token else {}}],
            "contexts": [
                {
                    "name": "c",
                    "context": {"cluster": "c", "user": "u", "namespace": self.namespace},
                }
            ],
        }
        path = self.plugins / f"kubeconfig-{len(list(self.plugins.iterdir()))}"
        path.write_text(json.dumps(config))
        return path

    def run(self, *args: str, token: str) -> subprocess.CompletedProcess[str]:
        """Run ``kubectl mainstay`` as whoever the token is."""
        environment = {
            "HOME": str(self.plugins),
            "PATH": f"{self.plugins}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "KUBECONFIG": str(self.kubeconfig(token)),
            "NO_COLOR": "1",
        }
        return subprocess.run(
            [str(self.world.plane.tools / "kubectl"), "mainstay", *args],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def said(self, *args: str, token: str) -> str:
        done = self.run(*args, token=token)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def start_api(world: InstalledChart, redis: Redis, stack: list[Callable[[], object]]) -> Api:
    """An api of this process behind a Service of the cluster."""
    api = Api(
        redis.url,
        auth="kubernetes",
        kube=world.kube_settings(),
        operator_user=world.operator_user,
        fault_injection=True,
    )
    stack.append(api.stop)
    place = world.plane.place
    assert place.network is not None
    listening = listen_in(place.network, place.address)
    carrier = subprocess.Popen(
        [sys.executable, relay.__file__, str(listening.fileno()), *api.url[7:].split(":")],
        pass_fds=[listening.fileno()],
    )
    stack.append(carrier.kill)
    port = listening.getsockname()[1]
    listening.close()
    # The API server passes nothing on but to a pod: this one carries it on to our process.
    carry = f"exec nc -ll -p {PORT} -e nc {place.address} {port}"
    pod = make_pod("api", carry, labels={"app": SERVICE})
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVICE},
        "spec": {"selector": {"app": SERVICE}, "ports": [{"name": "http", "port": PORT}]},
    }
    world.plane.api.apply(service, world.system)
    run_pod(world, world.system, pod)
    ready = f"/api/v1/namespaces/{world.system}/endpoints/{SERVICE}"
    world.plane.api.wait(ready, lambda seen: seen is not None and "subsets" in seen)
    return api


def make_pod(name: str, command: str, **fields: Any) -> dict[str, Any]:
    container = {
        "name": "trainer",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", command],
        "env": fields.pop("env", []),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": fields.pop("labels")},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], **fields},
    }


def run_pod(world: InstalledChart, namespace: str, pod: dict[str, Any]) -> str:
    """Have a pod run; return its uid."""
    world.plane.api.apply(pod, namespace)
    path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
    running = world.plane.api.wait(
        path, lambda seen: seen is not None and seen["status"].get("phase") == "Running"
    )
    assert running is not None
    return str(running["metadata"]["uid"])


def register(api: Api, world: InstalledChart, namespace: str, uid: str, pod: str) -> None:
    """Tell the api what the pod's supervisor would: its trainer is up and begins."""
    token = world.token(
        namespace,
        object_name("alpha", uid),
        f"mainstay.dev/jobs/{uid}",
        type("Bound", (), {"name": "alpha-0", "uid": pod})(),
    )
    with api.new_client(token) as client:
        client.headers["Mainstay-Pod"] = pod

        def tell(what: str, body: dict[str, Any]) -> None:
            reply = client.post(f"/v1/jobs/{uid}/agent/{what}", json=body)
            assert reply.is_success, reply.text

        tell(
            "pods",
            {
                "pod": pod,
                "name": "alpha-0",
                "address": "127.0.0.1",
                "gather": "alpha-0:1",
                "num_slots": 1,
                "pid": 1,
            },
        )
        fact = {
            "kind": "trainer-up",
            "pod": pod,
            "slot": 0,
            "incarnation": "life",
            "observed_at_s": time.time(),
            "fingerprint": {"torch": "2"},
        }
        tell("facts", {"facts": [fact]})


@pytest.fixture(scope="module")
def town(
    cluster: Callable[[int], Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Town]:
    plane = cluster(1)
    directory = tmp_path_factory.mktemp("town")
    world = InstalledChart(plane, directory)
    stack: list[Callable[[], object]] = []
    redis = Redis(directory)
    redis.start()
    stack.append(redis.stop)
    try:
        api = start_api(world, redis, stack)
        namespace = plane.make_namespace()
        manifest = {
            "apiVersion": "mainstay.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "alpha", "namespace": namespace},
            "spec": SPEC,
        }
        uid = plane.api.apply(manifest, namespace)["metadata"]["uid"]
        account = object_name("alpha", uid)
        world.make_account(namespace, account)
        with api.new_client(world.operator) as client:
            body = {"manifest": manifest, "uid": uid, "namespace": namespace}
            assert client.post("/v1/jobs", json=body).status_code == 201
        pod = make_pod(
            "alpha-0",
            "echo step 1; echo step 2; exec sleep 3600",
            labels={"mainstay.dev/job-uid": uid},
            serviceAccountName=account,
            env=[
                {"name": "MAINSTAY_API_URL", "value": f"http://{SERVICE}.{world.system}.svc:{PORT}"}
            ],
        )
        register(api, world, namespace, uid, run_pod(world, namespace, pod))
        plugins = directory / "bin"
        plugins.mkdir()
        plugin = plugins / "kubectl-mainstay"
        plugin.write_text(
            f'#!/bin/sh\nexec {sys.executable} -m mainstay_cli.commands.kubectl "$@"\n'
        )
        plugin.chmod(0o755)
        yield Town(world, namespace, uid, plugins)
    finally:
        for end in reversed(stack):
            end()


@pytest.fixture
def viewer(town: Town) -> str:
    """The token, as kubectl uses it, of somebody who has the cluster's role view."""
    return grant_cluster_role(town, "view")


@pytest.fixture
def editor(town: Town) -> str:
    return grant_cluster_role(town, "edit")


def grant_cluster_role(town: Town, role: str) -> str:
    """A person with a role that every cluster has: the chart's rights are added to it."""
    world = town.world
    token = world.person(town.namespace, None, audience=None)
    name = world.plane.kubectl("auth", "whoami", "-o", "json", f"--token={token}")
    user = json.loads(name)["status"]["userInfo"]["username"]
    account = user.split(":")[-1]
    world.plane.kubectl(
        *["create", "rolebinding", f"{account}-{role}", "-n", town.namespace],
        *[f"--clusterrole={role}", f"--serviceaccount={town.namespace}:{account}"],
    )
    allowed = ["auth", "can-i", "get", "trainingjobs", "-n", town.namespace, f"--token={token}"]
    # The controller adds the chart's rights to the role a moment after they are there.
    while world.plane.kubectl(*allowed, check=False).strip() != "yes":
        pass
    return token


def test_status_finds_the_api_by_what_the_jobs_pods_were_told(town: Town, viewer: str) -> None:
    text = town.said("status", "alpha", token=viewer)
    assert text.startswith(f"{town.namespace}/alpha: ")
    assert "quorum q1" in text
    assert "r0.s0" in text
    assert "alpha-0/0" in text
    status = json.loads(town.said("status", "--json", token=viewer))
    assert status["job"]["uid"] == town.uid, "the only job needs no name"


def test_options_that_say_which_cluster_may_stand_anywhere(town: Town, viewer: str) -> None:
    for args in (("-n", town.namespace, "status", "alpha"), ("status", "alpha", "-n", "default")):
        done = town.run(*args, token=viewer)
        assert (done.returncode == 0) == (args[0] == "-n"), done.stderr
    assert 'cannot get resource "trainingjobs"' in done.stderr


def test_the_timeline_is_told(town: Town, viewer: str) -> None:
    told = json.loads(town.said("timeline", "alpha", "--json", token=viewer))
    assert told["events"]
    assert "no recoveries" in town.said("timeline", "alpha", token=viewer)


def test_the_report_is_printed_or_written(town: Town, viewer: str, tmp_path: Path) -> None:
    printed = json.loads(town.said("report", "alpha", token=viewer))
    assert (printed["uid"], printed["state"]) == (town.uid, "running")
    file = tmp_path / "alpha.json"
    said = town.said("report", "alpha", "--output", str(file), token=viewer)
    assert said == f"alpha: running, 0 steps committed; report written to {file}\n"
    assert json.loads(file.read_text())["uid"] == town.uid
    done = town.run("report", "alpha", "--output", str(tmp_path), token=viewer)
    assert (done.returncode, "Is a directory" in done.stderr) == (2, True)


def test_logs_are_those_of_the_pod_that_serves_the_rank(town: Town, viewer: str) -> None:
    assert town.said("logs", "alpha", "--rank", "r0.s0", token=viewer) == "step 1\nstep 2\n"
    assert town.said("logs", "alpha", "--tail", "1", token=viewer) == "step 2\n"
    done = town.run("logs", "alpha", "--rank", "r7.s0", token=viewer)
    assert done.returncode == 2
    assert "nobody serves r7.s0 now; there are: r0.s0" in done.stderr


def test_who_may_change_the_job_may_break_it(town: Town, viewer: str, editor: str) -> None:
    fault = ["faults", "inject", "alpha", "--target", "replica=0,stage=0"]
    fault += ["--action", "kill-trainer", "--at-step", "50"]
    done = town.run(*fault, token=viewer)
    assert done.returncode == 1
    assert "may not patch trainingjobs.mainstay.dev alpha" in done.stderr
    assert "kill-trainer" in town.said(*fault, token=editor)
    assert "step 50" in town.said("faults", "ls", "alpha", token=viewer)


def test_somebody_without_any_right_is_told_so(town: Town) -> None:
    stranger = town.world.person(town.namespace, None, audience=None)
    done = town.run("status", "alpha", token=stranger)
    assert done.returncode == 1
    assert 'cannot get resource "trainingjobs"' in done.stderr


def test_a_token_for_the_api_alone_is_made_for_a_service_account(town: Town) -> None:
    world = town.world
    person = world.person(town.namespace, "view")
    account = json.loads(
        world.plane.kubectl("get", "serviceaccounts", "-n", town.namespace, "-o", "json")
    )["items"][-1]["metadata"]["name"]
    admin = world.plane.tokens["admin"]
    assert person
    text = town.said("status", "alpha", "--service-account", account, token=admin)
    assert "quorum q1" in text


def test_an_api_that_is_not_there_leaves_what_the_cluster_itself_knows(
    town: Town, viewer: str
) -> None:
    text = town.said("status", "alpha", "--api", f"{town.world.system}/nothing:80", token=viewer)
    assert text.startswith(f"{town.namespace}/alpha: not seen by the operator yet")
    assert "the API server did not pass it on: " in text
    assert "rbac.reach" in text, "that service is not one that everybody may reach"
