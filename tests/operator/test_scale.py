"""A job of very many pods: what the operator asks the API server for, by the server's own count.

Nodes and pods are played by kwok, supervisors by the tests. The tests go on where the one before
them ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.cluster.audit import Audit, Request, count
from tests.cluster.control_plane import ControlPlane
from tests.cluster.fixtures import reason_told
from tests.cluster.played_nodes import played_nodes
from tests.operator import wide
from tests.worlds.served_namespace import Job, serve_namespace, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_PODS = [124, pytest.param(1000, marks=pytest.mark.chaos)]
"""What is wrong with a thousand shows with an eighth of them, in an eighth of the time."""
NUM_NODES = 10
QPS, BURST = 50, 20
"""So few that an operator which keeps to no limit is found with the fewer pods, too."""
STATUS_S = 3
IN_FLIGHT = 32
"""Requests that one job has under way at a time, at most."""
BEATS, ROUNDS = 50, 20


@dataclass(frozen=True)
class Wide:
    """The job and the record of the operator's requests."""

    job: Job
    audit: Audit
    num_pods: int


@pytest.fixture(scope="module", params=NUM_PODS, ids="{}-pods".format)
def started(
    control_plane: ControlPlane,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Wide]:
    """The job with all its pods ready; nothing has registered yet."""
    num_pods: int = request.param
    environment = {
        "MAINSTAY_POLL_S": "1",
        "MAINSTAY_QPS": str(QPS),
        "MAINSTAY_BURST": str(BURST),
        "MAINSTAY_STATUS_S": str(STATUS_S),
    }
    with contextlib.ExitStack() as stack:
        with reason_told():
            stack.enter_context(played_nodes(control_plane, NUM_NODES))
        audit = Audit(control_plane.dir)
        folder = tmp_path_factory.mktemp("served")
        served = stack.enter_context(serve_namespace(control_plane, folder, **environment))
        # All pods are gone at once so, and no controller is busy with them afterwards.
        everything = served.path("pods")
        stack.callback(lambda: served.kube.delete(everything, gracePeriodSeconds="0"))
        stack.callback(served.operator.stop)
        job = served.submit(wide.wide_manifest(num_pods))
        wide.wait_ready(job, num_pods)
        yield Wide(job, audit, num_pods)


def test_many_pods_cost_hardly_more_than_a_request_each(started: Wide) -> None:
    num_pods, asked = started.num_pods, started.audit.take()
    pods = [r for r in asked if (r.verb, r.resource) == ("create", "pods")]
    # One more than there are is made on trial: what it costs is counted, too.
    assert len({r.name for r in pods}) == len(pods) - 1 == num_pods
    assert len(asked) <= num_pods + 60 + num_pods // 25, count(asked)
    assert status_writes_are_few(asked), count(asked)
    # As many as were left over, and as many as the time allowed.
    span_s = max(r.at_s for r in pods) - min(r.at_s for r in pods)
    assert len(pods) <= IN_FLIGHT + BURST + QPS * span_s
    status = started.job.get()["status"]
    wanted = {"wanted": num_pods, "ready": num_pods, "pending": 0, "leaving": 0, "made": num_pods}
    assert status["pods"] == wanted
    num_spares = wide.SPARES
    assert status["ready"] == f"{num_pods - num_spares}/{num_pods - num_spares}"
    assert status["spares"] == f"{num_spares}/{num_spares}"


def test_nothing_is_written_because_of_a_heartbeat(started: Wide) -> None:
    job = started.job
    wide.register_all(job, job.pods())
    job.wait_condition("Ready", "True", "Training")
    plan = job.plan()
    # What follows from the plan is done.
    wide.wait_budget(job)
    began_s = time.time()
    for step in range(ROUNDS):
        wide.beat(job, plan, plan["members"][:BEATS], step)
        wide.commit(job, plan, step)
    job.wait_status(lambda s: s["training"]["step"] == ROUNDS, "the last step")
    written: list[Request] = []

    def find_written() -> list[Request]:
        """The server writes down what it was asked a moment after what was asked for shows."""
        asked = started.audit.take()
        written.extend(r for r in asked if r.writes and r.at_s >= began_s)
        return written

    wait(find_written, "the status' writes in the server's log")
    assert {f"{r.verb} {r.resource}" for r in written} == {"patch trainingjobs/status"}
    assert status_writes_are_few(written), written
    assert len(written) < ROUNDS


def test_the_repair_of_a_pod_costs_a_handful_of_requests(started: Wide) -> None:
    job = started.job
    before = {pod["metadata"]["uid"]: pod for pod in job.pods()}
    lost = job.plan()["members"][0]["slot"]["pod"]
    started.audit.take()
    wide.delete_pods(job, [before[lost]])
    wide.wait_ready(job, started.num_pods, made=started.num_pods + 1)
    wait(lambda: lost not in wide.serving(job), "a plan without the pod")
    wide.register_all(job, [pod for pod in job.pods() if pod["metadata"]["uid"] not in before])
    wide.finish_recoveries(job, ROUNDS)
    asked = started.audit.take()
    assert count(asked)["create pods"] == 1
    assert not count(asked)["delete pods"]
    assert len(asked) <= 25, count(asked)


def status_writes_are_few(requests: list[Request]) -> bool:
    """Hardly more than one in `STATUS_S`; a changed condition is written at once."""
    times = [r.at_s for r in requests if r.writes and r.resource == "trainingjobs/status"]
    return len(times) <= 6 + (max(times) - min(times)) / STATUS_S
