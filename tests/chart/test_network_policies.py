"""Who reaches whom by the NetworkPolicies of a release and its jobs, read as a plugin reads them.

No plugin runs here: the network of the tests' cluster enforces none.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests.chart.charts import environment_of, find, render
from tests.cluster.control_plane import ControlPlane
from tests.worlds.policies import Place, may_connect
from tests.worlds.served_namespace import manifest

from mainstay_operator.builders import build_network_policy
from mainstay_operator.resources import JobView, ObjectNames, view_job
from mainstay_operator.settings import parse

SYSTEM, JOBS = "system", "jobs"
KUBE_API = "10.0.0.1"
OUTSIDE = "192.0.2.7"


def job(uid: str) -> JobView:
    body = manifest()
    body["metadata"] |= {"uid": uid, "namespace": JOBS, "name": f"job-{uid}"}
    return view_job(body)


def release(plane: ControlPlane, *values: str) -> tuple[list[dict[str, Any]], dict[str, Place]]:
    """The policies of a release with two jobs, and everybody who might connect."""
    objects = render(plane, SYSTEM, f"watchNamespaces={{{JOBS}}}", *values)
    places = {
        o["metadata"]["name"].removeprefix("mainstay-"): Place(
            SYSTEM, o["spec"]["template"]["metadata"]["labels"]
        )
        for o in objects
        if o["kind"] in ("Deployment", "StatefulSet")
    }
    test = next(o for o in objects if o["kind"] == "Pod")
    places |= {
        "test": Place(SYSTEM, test["metadata"]["labels"]),
        "neighbour": Place(SYSTEM, {"app": "other"}),
        "stranger": Place("others", {"app": "other"}),
        "tunnel": Place("kube-system", {"k8s-app": "konnectivity-agent"}),
        "dns": Place("kube-system", {"k8s-app": "kube-dns"}),
        "kube-api": Place(address=KUBE_API),
        "outside": Place(address=OUTSIDE),
    }
    policies = [o for o in objects if o["kind"] == "NetworkPolicy"]
    operator = environment_of(find(objects, "Deployment", "mainstay-operator"))
    settings = parse([], operator)
    selector = dict(pair.split("=") for pair in settings.api_selector.split(","))
    for uid in ("one", "two"):
        places[f"job {uid}"] = Place(JOBS, job(uid).labels())
        if settings.network_policy:
            names = ObjectNames(shared=f"mtj-{uid}", secret=f"mtj-{uid}")
            policy = build_network_policy(job(uid), names, selector, settings.api_namespace)
            policies.append(policy)
    return policies, places


@functools.cache
def default_release(plane: ControlPlane) -> tuple[list[dict[str, Any]], dict[str, Place]]:
    return release(plane)


NEEDED = [
    ("operator", "api", 8080),
    ("operator", "kube-api", 6443),
    ("operator", "dns", 53),
    ("api", "kube-api", 443),
    ("api", "redis", 6379),
    ("api", "dns", 53),
    ("job one", "api", 8080),
    ("job one", "job one", 40000),
    ("job one", "dns", 53),
    ("test", "api", 8080),
    ("tunnel", "api", 8080),
]
REFUSED = [
    ("stranger", "api", 8080),
    ("neighbour", "api", 8080),
    ("outside", "api", 8080),
    ("stranger", "operator", 8080),
    ("job one", "operator", 8080),
    ("operator", "redis", 6379),
    ("job one", "redis", 6379),
    ("neighbour", "redis", 6379),
    ("outside", "redis", 6379),
    ("redis", "outside", 443),
    ("redis", "api", 8080),
    ("redis", "kube-api", 6443),
    ("api", "outside", 80),
    ("api", "job one", 40000),
    ("operator", "job one", 40000),
    ("operator", "stranger", 8080),
    ("job one", "job two", 40000),
    ("stranger", "job one", 40000),
    ("job one", "stranger", 80),
    ("job one", "kube-api", 6443),
    ("job one", "outside", 443),
]


@pytest.mark.parametrize("way", NEEDED, ids=lambda way: f"{way[0]} to {way[1]}")
def test_who_has_to_be_reached_is_reached(
    control_plane: ControlPlane, way: tuple[str, str, int]
) -> None:
    policies, places = default_release(control_plane)
    source, target, port = way
    assert may_connect(policies, places[source], places[target], port, "TCP")
    if target == "dns":
        assert may_connect(policies, places[source], places[target], port, "UDP")


@pytest.mark.parametrize("way", REFUSED, ids=lambda way: f"{way[0]} to {way[1]}")
def test_nobody_else_is(control_plane: ControlPlane, way: tuple[str, str, int]) -> None:
    policies, places = default_release(control_plane)
    source, target, port = way
    assert not may_connect(policies, places[source], places[target], port, "TCP")


def test_the_api_server_can_be_named_by_its_address(control_plane: ControlPlane) -> None:
    policies, places = release(control_plane, f"networkPolicy.kubeApi.cidrs={{{KUBE_API}/32}}")
    for component in ("operator", "api"):
        assert may_connect(policies, places[component], places["kube-api"], 6443, "TCP")
        assert not may_connect(policies, places[component], places["outside"], 6443, "TCP")
    # As kubectl mainstay comes.
    assert may_connect(policies, places["kube-api"], places["api"], 8080, "TCP")
    assert not may_connect(policies, places["outside"], places["api"], 8080, "TCP")


def test_the_api_reaches_a_store_outside_and_its_sentinels(control_plane: ControlPlane) -> None:
    values = ("redis.internal.enabled=false", "redis.external.port=6380")
    policies, places = release(control_plane, *values, "redis.external.host=redis")
    assert may_connect(policies, places["api"], places["outside"], 6380, "TCP")
    assert not may_connect(policies, places["api"], places["outside"], 26379, "TCP")
    sentinels = "redis.external.sentinel.hosts={one,two:7}"
    policies, places = release(
        control_plane, *values, "redis.external.sentinel.master=store", sentinels
    )
    for port in (6380, 26379, 7):
        assert may_connect(policies, places["api"], places["outside"], port, "TCP")
        assert not may_connect(policies, places["operator"], places["outside"], port, "TCP")


def test_all_of_them_can_be_left_out(control_plane: ControlPlane) -> None:
    policies, _ = release(
        control_plane, "networkPolicy.enabled=false", "operator.jobNetworkPolicies=false"
    )
    assert policies == []
