"""Two releases in a cluster that allows little: restricted pods, quotas on limits, no volumes."""

from __future__ import annotations

from tests.chart.charts import CHART
from tests.cluster.client import Object
from tests.cluster.control_plane import ControlPlane

QUOTA = {
    "requests.cpu": "2",
    "requests.memory": "4Gi",
    "limits.cpu": "20",
    "limits.memory": "20Gi",
}


def test_the_pods_of_two_releases_are_made(control_plane: ControlPlane) -> None:
    """What admission refuses is refused to the controllers: no pod would be there."""
    api = control_plane.api
    enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespaces = [control_plane.make_namespace(None, **enforced) for _ in range(2)]
    for namespace in namespaces:
        base = f"/api/v1/namespaces/{namespace}"
        body = {"metadata": {"name": "all"}, "spec": {"hard": QUOTA}}
        api.create(f"{base}/resourcequotas", body)
        api.wait(f"{base}/resourcequotas/all", is_counted)
        options = ["--set", "crds.enabled=false", "-n", namespace]
        control_plane.helm("install", "mainstay", str(CHART), *options)
        apps = f"/apis/apps/v1/namespaces/{namespace}"
        for path, count in (
            (f"{apps}/deployments/mainstay-operator", 1),
            (f"{apps}/deployments/mainstay-api", 2),
            (f"{apps}/statefulsets/mainstay-redis", 1),
        ):
            api.wait(path, lambda found, count=count: has_pods(found, count), f"{path}: no pods")
        used = api.get(f"{base}/resourcequotas/all")["status"]["used"]
        assert used["limits.cpu"] == "8"
    # A namespace that two releases serve would have two operators, each with an api of its own.
    serve = ["--set", f"crds.enabled=false,watchNamespaces={{{namespaces[1]}}}"]
    options = [*serve, "-n", namespaces[0]]
    said = control_plane.helm("install", "another", str(CHART), *options, check=False)
    assert "cannot be imported into the current release" in said
    assert f'in namespace "{namespaces[1]}" exists' in said


def is_counted(quota: Object | None) -> bool:
    return bool((quota or {}).get("status", {}).get("used"))


def has_pods(workload: Object | None, count: int) -> bool:
    return bool((workload or {}).get("status", {}).get("replicas", 0) == count)
