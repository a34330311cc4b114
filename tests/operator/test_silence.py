"""Connections to the API server that are open and say nothing: what the operator makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.operator.swallowing import LOOPBACK, Relay
from tests.worlds.served_namespace import manifest, serve_namespace, wait

MISSED = "mainstay_operator_watch_missed_total"


@pytest.mark.chaos
def test_silent_watches_are_made_good_by_lists_and_show_in_liveness(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    kubeconfig = json.loads(control_plane.kubeconfig.read_text())
    (cluster,) = kubeconfig["clusters"]
    with Relay(control_plane.place.ports["apiserver"]) as relay:
        cluster["cluster"]["server"] = f"https://{LOOPBACK}:{relay.port}"
        path = tmp_path / "relayed.kubeconfig"
        path.write_text(json.dumps(kubeconfig))
        environment = {
            "KUBECONFIG": str(path),
            "MAINSTAY_RESYNC_S": "0.5",
            "MAINSTAY_KUBE_TIMEOUT_S": "1",
            "MAINSTAY_MAX_IDLE_S": "4",
        }
        with serve_namespace(control_plane, tmp_path, **environment) as served:
            operator = served.operator
            job = served.submit(manifest("silent"))
            pods = job.wait_pods(*(f"silent-{i}" for i in range(5)))
            served.make_node("silent-node")
            for pod in pods:
                job.bind(pod, "silent-node")
            job.run(*(f"silent-{i}" for i in range(5)))
            assert operator.is_alive()

            # Nothing is answered: a restart might help.
            relay.swallow()
            wait(lambda: not operator.is_alive(), "that it says so")
            relay.carry()
            wait(operator.is_alive, "that it gets on by itself")

            # Lists are answered, watches stay open and are silent.
            relay.mute()
            lost = pods[0]["metadata"]["uid"]
            served.kube.delete(served.path("pods", "silent-0"), gracePeriodSeconds="0")
            wait(lambda: lost not in job.living(), "the fact")
            wait(lambda: "silent-0" in job.names(), "the refill")
            second = served.submit(manifest("unseen"))
            second.wait_pods(*(f"unseen-{i}" for i in range(5)))
            second.delete()
            served.kube.wait(second.path, lambda found: found is None)
            served.kube.patch("/api/v1/nodes/silent-node", {"spec": {"unschedulable": True}})
            wait(job.leaving, "that the work on a cordoned node leaves")
            for resource in ("pods", "trainingjobs", "nodes"):
                assert operator.metric(MISSED, resource=resource), resource
            gone = {"job": second.uid}
            wait(lambda: operator.metric("mainstay_operator_job_pods", **gone) is None, "its end")
            wait(lambda: not operator.is_alive(), "that it says that a watch is of no use")
