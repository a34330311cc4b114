"""Pods really run: on several nodes, with DNS and Services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cluster.client import Object
from tests.cluster.cluster import Cluster
from tests.cluster.images import BUSYBOX

MakeCluster = Callable[[int], Cluster]


def make_pod(name: str, node: str, *command: str, **spec: Any) -> Object:
    container = {
        "name": "main",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", *command],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [container | spec.pop("container", {})],
            **spec,
        },
    }


def run_pod(cluster: Cluster, namespace: str, pod: Object, phase: str = "Succeeded") -> str:
    """Run a pod until it is in a phase; return its log."""
    cluster.api.apply(pod, namespace)
    path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
    cluster.api.wait(path, lambda seen: seen is not None and seen["status"].get("phase") == phase)
    answer = cluster.api.http.get(f"{path}/log")
    assert answer.is_success, answer.text
    return answer.text


def test_pods_of_all_nodes_reach_a_service_by_its_name(cluster: MakeCluster) -> None:
    made = cluster(2)
    first, second = [node.name for node in made.living[:2]]
    namespace = made.make_namespace()
    serve = "echo hello >/tmp/index.html; exec httpd -f -p 8080 -h /tmp"
    run_pod(made, namespace, make_pod("web", first, serve), "Running")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    made.api.apply(service, namespace)
    ask = "until wget -q -O - http://web; do sleep 0.1; done"
    for index, node in enumerate((first, second)):
        assert run_pod(made, namespace, make_pod(f"ask{index}", node, ask)).endswith("hello\n")
    assert made.api.http.get(made.reach("web", namespace)).text == "hello\n"


def test_a_container_beyond_its_memory_is_killed(cluster: MakeCluster) -> None:
    made = cluster(1)
    namespace = made.make_namespace()
    greedy = {"resources": {"limits": {"memory": "32Mi"}}}
    fill = "x=x; while true; do x=$x$x; done"
    pod = make_pod("greedy", made.living[0].name, fill, container=greedy)
    run_pod(made, namespace, pod, "Failed")
    seen = made.api.get(f"/api/v1/namespaces/{namespace}/pods/greedy")
    state = seen["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["reason"] == "OOMKilled", state
