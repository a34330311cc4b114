"""The operator does all its work with the rights that the chart gives it in one namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.api.conftest import Api, Redis
from tests.cluster.control_plane import ControlPlane
from tests.worlds.installed_chart import API, InstalledChart, Pod
from tests.worlds.served_namespace import OperatorProcess, manifest, wait


def write_kubeconfig(plane: ControlPlane, token: str, path: Path) -> None:
    config = yaml.safe_load(plane.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    path.write_text(yaml.safe_dump(config))


def test_an_operator_with_the_charts_rights_is_refused_nothing(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    namespace, left, seen = (control_plane.make_namespace() for _ in range(3))
    served = ",".join((namespace, left, seen))
    world = InstalledChart(control_plane, tmp_path, f"watchNamespaces={{{served}}}")
    kubeconfig, token = tmp_path / "kubeconfig", tmp_path / "token"
    write_kubeconfig(control_plane, world.token(world.system, "mainstay-operator"), kubeconfig)
    token.write_text(world.token(world.system, "mainstay-operator", API))
    redis = Redis(tmp_path)
    redis.start()
    api = Api(
        redis.url,
        auth="kubernetes",
        kube=world.kube_settings(),
        operator_user=world.operator_user,
    )
    operator = OperatorProcess(
        control_plane,
        tmp_path,
        KUBECONFIG=str(kubeconfig),
        MAINSTAY_TOKEN_FILE=str(token),
        MAINSTAY_API_URL=api.url,
        MAINSTAY_NAMESPACES=served,
        MAINSTAY_LEASE=f"{world.system}/mainstay-operator",
        MAINSTAY_RESYNC_S="0.5",
    )
    operator.start()
    try:
        live_through(control_plane, world, api, namespace)
        assert "forbidden" not in operator.log().lower(), operator.log()
        assert "Traceback" not in operator.log(), operator.log()
        lose_namespaces(control_plane, api, operator, kept=namespace, left=left, seen=seen)
    finally:
        operator.stop()
        api.stop()
        redis.stop()


def jobs_of(namespace: str) -> str:
    return f"/apis/mainstay.dev/v1alpha1/namespaces/{namespace}/trainingjobs"


def lose_namespaces(
    plane: ControlPlane, api: Api, operator: OperatorProcess, *, kept: str, left: str, seen: str
) -> None:
    """Two namespaces are deleted, and the Roles in them: without the operator, and beside it."""

    def make_job(namespace: str, name: str) -> str:
        uid = str(plane.api.create(jobs_of(namespace), manifest(name))["metadata"]["uid"])
        pod = f"/api/v1/namespaces/{namespace}/pods/{name}-0"
        wait(lambda: operator.is_up() and plane.api.find(pod), f"pods of {name}")
        return uid

    def delete(namespace: str) -> None:
        path = f"/api/v1/namespaces/{namespace}"
        plane.api.delete(path)
        plane.api.wait(path, lambda found: found is None, "the namespace is not gone")

    uids = {namespace: make_job(namespace, "lost") for namespace in (left, seen)}
    with api.new_client(plane.tokens["admin"]) as client:

        def is_forgotten(namespace: str) -> bool:
            return bool(client.get(f"/v1/jobs/{uids[namespace]}").status_code == 410)

        operator.kill()
        delete(left)
        wait(lambda: operator.is_up() and is_forgotten(left), "the record that nobody saw go")
        delete(seen)
        wait(lambda: operator.is_up() and is_forgotten(seen), "the other record")
    # The operator, or the one after it, serves the rest.
    make_job(kept, "late")


def live_through(plane: ControlPlane, world: InstalledChart, api: Api, namespace: str) -> None:
    """A job is made, a pod known by its token; it is lost and made anew; the job's time is over."""
    kube = plane.api
    base = jobs_of(namespace)
    uid = kube.create(base, manifest("demo"))["metadata"]["uid"]
    pods = f"/api/v1/namespaces/{namespace}/pods"

    def is_there(pod: dict[str, Any] | None) -> bool:
        return pod is not None

    made = kube.wait(f"{pods}/demo-0", is_there)
    assert made is not None
    account = made["spec"]["serviceAccountName"]
    assert account == world.account_of(namespace, "demo")
    pod = Pod("demo-0", made["metadata"]["uid"], account, namespace)
    # What the kubelet projects into the operator's pods: the api knows them by it.
    with api.new_client(world.pod_token(pod, uid)) as supervisor:
        supervisor.headers["Mainstay-Pod"] = pod.uid
        registration = {
            "pod": pod.uid,
            "name": pod.name,
            "address": "127.0.0.1",
            "gather": "a:1",
            "num_slots": 1,
        }
        path = f"/v1/jobs/{uid}/agent/pods"
        wait(lambda: supervisor.post(path, json=registration).is_success, "the pod's registration")
    num_pods = len(kube.list(pods))
    kube.delete(f"{pods}/demo-0")
    # Under the same name, or another one if the operator has seen the old pod's end only halfway.
    wait(
        lambda: num_pods <= len({p["metadata"]["uid"] for p in kube.list(pods)} - {pod.uid}),
        "a new pod",
    )
    kube.wait(f"{base}/demo", lambda job: job is not None and bool(job.get("status")), "a status")
    events = f"/api/v1/namespaces/{namespace}/events"
    wait(lambda: any(e["reason"] == "PodDeleted" for e in kube.list(events)), "an Event")
    # The operator stops it, and deletes it.
    kube.patch(f"{base}/demo", {"spec": {"activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 0}})
    kube.wait(f"{base}/demo", lambda job: job is None, "the job's end")
