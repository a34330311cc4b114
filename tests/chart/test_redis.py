"""The chart's Redis and its volume: without a default StorageClass, and of older releases."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.chart.charts import CHART, container_of, find, render
from tests.cluster.client import Object
from tests.cluster.control_plane import ControlPlane

CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
DEFAULT = "storageclass.kubernetes.io/is-default-class"


@pytest.fixture
def storage_class(control_plane: ControlPlane) -> Iterator[str]:
    """A StorageClass that is not the default one, whose volumes nobody makes."""
    name = f"fast-{secrets.token_hex(3)}"
    body = {"metadata": {"name": name}, "provisioner": "example.com/nobody"}
    control_plane.api.create(CLASSES, body)
    yield name
    control_plane.api.delete(f"{CLASSES}/{name}")


class Release:
    """A release of the chart in a namespace of its own."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.namespace = plane.make_namespace()
        self.name = "mainstay"
        base = f"/api/v1/namespaces/{self.namespace}"
        self.claim = f"{base}/persistentvolumeclaims/mainstay-redis"
        apps = f"/apis/apps/v1/namespaces/{self.namespace}"
        self.store = f"{apps}/statefulsets/mainstay-redis"
        self.pod = f"{base}/pods/mainstay-redis-0"

    def helm(self, action: str, *values: str) -> str:
        given = [word for value in ("crds.enabled=false", *values) for word in ("--set", value)]
        return self.plane.helm(action, self.name, str(CHART), "-n", self.namespace, *given)

    def uninstall(self) -> None:
        self.plane.helm("uninstall", self.name, "-n", self.namespace)
        self.plane.api.wait(self.claim, lambda found: found is None)


def keeps_data_in(source: str) -> Callable[[Object | None], bool]:
    """Whether a pod's data are in a volume of this kind."""

    def look(pod: Object | None) -> bool:
        volumes = (pod or {}).get("spec", {}).get("volumes", [])
        return any(volume["name"] == "data" and source in volume for volume in volumes)

    return look


@pytest.fixture
def release(control_plane: ControlPlane) -> Iterator[Release]:
    made = Release(control_plane)
    yield made
    made.uninstall()


def test_without_a_default_class_helm_says_what_is_missing_and_an_upgrade_mends_it(
    control_plane: ControlPlane, release: Release, storage_class: str
) -> None:
    api, persistence = control_plane.api, "redis.internal.persistence"
    said = release.helm("install")
    assert "this cluster has no default StorageClass" in said
    assert "the claim mainstay-redis names none" in said
    assert f"there are: {storage_class}" in said
    assert f"--set {persistence}.storageClass=NAME" in said
    assert "storageClassName" not in api.get(release.claim)["spec"]
    store = api.get(release.store)["metadata"]["uid"]

    said = release.helm("upgrade", f"{persistence}.storageClass={storage_class}")
    assert "StorageClass" not in said
    assert api.get(release.claim)["spec"]["storageClassName"] == storage_class
    assert api.get(release.store)["metadata"]["uid"] == store

    # The other remedy: no volume at all.
    release.helm("upgrade", f"{persistence}.enabled=false")
    api.wait(release.claim, lambda found: found is None)
    stateful = api.get(release.store)
    assert stateful["metadata"]["uid"] == store
    volumes = stateful["spec"]["template"]["spec"]["volumes"]
    assert [volume for volume in volumes if volume["name"] == "data"] == [
        {"name": "data", "emptyDir": {}}
    ]
    # A StatefulSet waits for its pods one by one: the one that waits for the claim must not stay.
    api.wait(release.pod, keeps_data_in("emptyDir"), "the pod waits for a claim that is gone")


def test_a_class_that_does_not_exist_is_told(
    control_plane: ControlPlane, release: Release, storage_class: str
) -> None:
    said = release.helm("install", "redis.internal.persistence.storageClass=fats")
    assert "there is no StorageClass fats" in said
    # What it says to do works.
    command = next(line for line in said.splitlines() if line.startswith("    kubectl "))
    control_plane.kubectl(*command.split()[1:])
    control_plane.api.wait(release.claim, lambda found: found is None)
    said = release.helm("upgrade", f"redis.internal.persistence.storageClass={storage_class}")
    assert "StorageClass" not in said
    claim = control_plane.api.get(release.claim)
    assert claim["spec"]["storageClassName"] == storage_class


def test_with_a_default_class_nothing_is_missing(
    control_plane: ControlPlane, release: Release, storage_class: str
) -> None:
    control_plane.api.patch(
        f"{CLASSES}/{storage_class}", {"metadata": {"annotations": {DEFAULT: "true"}}}
    )
    assert "StorageClass" not in release.helm("install")
    assert control_plane.api.get(release.claim)["spec"]["storageClassName"] == storage_class
    # An upgrade leaves to the claim what the cluster has filled in.
    release.helm("upgrade", "api.replicas=3")
    assert control_plane.api.get(release.claim)["spec"]["storageClassName"] == storage_class


@pytest.mark.parametrize(
    ("told", "expected"),
    [("redis.internal.persistence.storageClass=-", ""), ("rbac.create=false", None)],
)
def test_helm_asks_for_no_class_where_it_is_told_or_may_not(
    release: Release, told: str, expected: str | None
) -> None:
    assert "StorageClass" not in release.helm("install", told)
    claim = release.plane.api.get(release.claim)
    assert claim["spec"].get("storageClassName") == expected


def test_an_older_release_keeps_the_claims_of_its_statefulset(
    control_plane: ControlPlane, release: Release, storage_class: str
) -> None:
    """Before, the claim was the StatefulSet's own and pods came one by one: neither may change."""
    api = control_plane.api
    older = find(render(control_plane, release.namespace), "StatefulSet", "mainstay-redis")
    older["metadata"]["annotations"] = {
        "meta.helm.sh/release-name": release.name,
        "meta.helm.sh/release-namespace": release.namespace,
    }
    del older["spec"]["template"]["spec"]["volumes"]
    older["spec"]["podManagementPolicy"] = "OrderedReady"
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "8Gi"}}}
    older["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": spec}]
    older["spec"]["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": "Delete"}
    api.apply(older, fieldManager="helm")
    claims = api.get(release.store)["spec"]["volumeClaimTemplates"]
    uid = api.get(release.store)["metadata"]["uid"]

    said = release.helm("install")
    assert api.get(release.store)["metadata"]["uid"] == uid
    assert api.get(release.store)["spec"]["volumeClaimTemplates"] == claims
    assert api.find(release.claim) is None
    release.helm("upgrade", "redis.internal.persistence.size=9Gi")
    assert api.get(release.store)["spec"]["volumeClaimTemplates"] == claims
    # Its claim waits for a class as well; what helm says to do works.
    claim = release.claim.replace("mainstay-redis", "data-mainstay-redis-0")
    api.wait(claim, lambda found: found is not None)
    command = next(line for line in said.splitlines() if line.startswith("    kubectl "))
    *words, patch = command.replace("NAME", storage_class).split()[1:]
    control_plane.kubectl(*words, patch.strip("'"))
    assert api.get(claim)["spec"]["storageClassName"] == storage_class


def test_a_redis_with_tls_speaks_nothing_else(control_plane: ControlPlane) -> None:
    objects = render(control_plane, "default", "redis.internal.tls.secret=redis-tls")
    store = find(objects, "StatefulSet", "mainstay-redis")
    container = container_of(store)
    config = container["command"][-1].splitlines()
    assert "port 0" in config
    assert "tls-port 6379" in config
    assert "port 6379" not in config
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert "--tls --cacert" in container[probe]["exec"]["command"][-1]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"tls-cert-file {mounts['tls']}/tls.crt" in config
    volumes: list[dict[str, Any]] = store["spec"]["template"]["spec"]["volumes"]
    assert {"name": "tls", "secret": {"secretName": "redis-tls"}} in volumes
