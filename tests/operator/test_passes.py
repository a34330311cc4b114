"""Passes over one job, at a cluster and an api that answer as they are told."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from tests.operator.test_builders import view

from mainstay_core.pool.conditions import ConditionType
from mainstay_core.pool.observed import ObservedNode
from mainstay_core.wire.api import ApiError, Failure
from mainstay_core.wire.routes import JobApi, Request
from mainstay_operator.actuator import Actuator
from mainstay_operator.kube import KubeError
from mainstay_operator.metrics import Metrics
from mainstay_operator.observed import observe_pod
from mainstay_operator.pod_cache import PodCache
from mainstay_operator.reconciler import Reconciler
from mainstay_operator.resources import LABEL_INDEX
from mainstay_operator.settings import parse
from mainstay_operator.status import find_condition

SETTINGS = parse(
    [],
    {
        "MAINSTAY_API_URL": "u",
        "MAINSTAY_AGENT_IMAGE": "i",
        "MAINSTAY_TOKEN": "t",
        "MAINSTAY_POLL_S": "0.0001",
    },
)
AWAY = KubeError("POST: the server is not reached", 0)
DENIED = KubeError("POST: refused with 403: exceeded quota", 403, "Forbidden", "exceeded quota")


UNAUTHORIZED = KubeError(
    "POST: refused with 403: pods is forbidden", 403, "Forbidden", unauthorized=True
)


class Kube:
    """A Kubernetes API that has some pods, keeps Events, and refuses by kind what it is told to."""

    def __init__(self) -> None:
        self.refuse: dict[str, KubeError] = {}
        self.events: list[dict[str, Any]] = []
        self.trials = 0
        self.pods: list[dict[str, Any]] = []

    async def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if body["kind"] in self.refuse:
            raise self.refuse[body["kind"]]
        if body["kind"] == "Event":
            self.events.append(dict(body))
        return {**body, "metadata": {**body["metadata"], "uid": body["metadata"]["name"]}}

    async def try_create(self, *_: Any, **__: Any) -> None:
        self.trials += 1
        if "trial" in self.refuse:
            raise self.refuse["trial"]

    async def fetch(self, *_: Any) -> None:
        return None

    async def list(self, *_: Any) -> list[dict[str, Any]]:
        return self.pods

    async def apply_status(self, body: Mapping[str, Any], _: str) -> None:
        self.status = body["status"]

    def reasons(self) -> list[str]:
        return [e["reason"] for e in self.events]


class Api(JobApi):
    """An api that is given a job, wants two pods for it, and takes some for living."""

    def __init__(self) -> None:
        self.submitted = 0
        self.living: list[str] = []

    async def send(self, request: Request) -> Any:
        if request.method == "POST":
            self.submitted += 1
            return {}
        if request.path.endswith("/pods") and self.submitted:
            pods = [{"uid": u, "name": u, "serving": True} for u in self.living]
            page = {"format": 1, "state": "running", "num_pods": 2, "pods": pods}
            return {**page, "leaving": [], "ending": []}
        raise ApiError("unknown", Failure.UNKNOWN)


class Pass:
    """The reconciler of a job, pass by pass."""

    def __init__(self, **changes: Any) -> None:
        self.kube, self.api = Kube(), Api()
        self.nodes: dict[str, ObservedNode] = {}
        self.reconciler = Reconciler(
            dataclasses.replace(view(), **changes),
            pods=PodCache(lambda: [observe_pod(body) for body in self.kube.pods]),
            nodes=lambda: self.nodes,
            actuator=Actuator(self.kube, SETTINGS, "me", Metrics()),  # type: ignore[arg-type]
            api=self.api,  # type: ignore[arg-type]
            settings=SETTINGS,
            metrics=Metrics(),
        )
        # What its ranks would hold was told by the operator before.
        self.reconciler._state.sized = self.reconciler.view.generation

    def again(self) -> None:
        self.reconciler._state.make_at_s = 0.0  # whatever it waits for is over
        asyncio.run(self.reconciler.reconcile())


def lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_pods_that_are_refused_again_and_again_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    job = Pass()
    job.kube.refuse["Pod"] = DENIED
    for _ in range(3):
        job.again()
    assert job.kube.reasons() == ["PodActionFailed"]
    assert lines(caplog, "2 pods could not be made or ended: POST: refused with 403") == 1

    # What it may not do is not what a quota does not admit, though both are 403.
    job.kube.refuse["Pod"] = UNAUTHORIZED
    job.again()
    assert job.kube.reasons() == ["PodActionFailed"] * 2
    held = find_condition(job.kube.status, ConditionType.DEGRADED)
    assert held["reason"] == "NotAuthorized"
    assert held["message"].endswith("name it in watchNamespaces, or set rbac.cluster")
    job.kube.refuse["Pod"] = DENIED
    job.again()
    assert find_condition(job.kube.status, ConditionType.DEGRADED)["reason"] == "PodsRefused"

    # Another refusal is news, and so is the same one after pods could be made.
    job.kube.refuse["Pod"] = AWAY
    job.again()
    job.again()
    assert job.kube.reasons() == ["PodActionFailed"] * 3
    del job.kube.refuse["Pod"]
    job.again()
    assert job.kube.reasons() == [*["PodActionFailed"] * 3, "PodsMade"]


def test_pods_that_have_been_refused_for_days_are_tried_again() -> None:
    job = Pass()
    job.kube.refuse["Pod"] = DENIED
    job.reconciler._state.make_failures = 5000
    job.again()
    assert job.reconciler._state.make_failures == 5001
    del job.kube.refuse["Pod"]
    job.again()
    assert job.kube.reasons()[-1] == "PodsMade"


def test_an_event_that_could_not_be_made_is_made_when_the_cluster_answers_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Pass()
    job.kube.refuse["Event"] = AWAY
    for _ in range(3):
        job.again()
    assert lines(caplog, "1 Event could not be made yet") == 1

    del job.kube.refuse["Event"]
    job.again()
    job.again()
    assert job.kube.reasons() == ["PodsMade"]

    job = Pass(invalid="spec.template: it is bad", job=None)
    job.kube.refuse["Event"] = AWAY
    job.again()
    del job.kube.refuse["Event"]
    job.again()
    assert job.kube.reasons() == ["InvalidSpec"]

    # One that is refused is not asked for again.
    job = Pass()
    job.kube.refuse["Event"] = DENIED
    job.again()
    del job.kube.refuse["Event"]
    job.again()
    assert job.kube.reasons() == []


@pytest.mark.parametrize("status", [0, 401, 429, 500])
def test_a_trial_without_an_answer_is_repeated_before_the_job_begins(status: int) -> None:
    job = Pass()
    job.kube.refuse["trial"] = KubeError("no answer", status)
    job.again()
    job.again()
    assert (job.kube.trials, job.api.submitted) == (2, 0)
    assert "is not known: no answer" in job.kube.status["reason"]

    job.kube.refuse["trial"] = KubeError("bad", 422, "Invalid", "bad", ("spec.containers",))
    job.again()
    assert (job.api.submitted, job.kube.status["state"]) == (0, "Failed")


def test_a_trial_that_the_operator_has_no_right_to_is_no_answer() -> None:
    """Nobody has looked at the template: a quota has, and what it says is no fault of it."""
    job = Pass()
    job.kube.refuse["trial"] = UNAUTHORIZED
    job.again()
    job.again()
    assert (job.kube.trials, job.api.submitted) == (2, 0)
    assert job.kube.status["reason"].endswith("name it in watchNamespaces, or set rbac.cluster")

    job.kube.refuse["trial"] = DENIED
    job.again()
    assert job.api.submitted == 1


def test_a_trial_with_an_answer_is_not_repeated() -> None:
    job = Pass()
    job.again()
    job.again()
    assert (job.kube.trials, job.api.submitted) == (1, 1)


def running(index: int, node: str, phase: str = "Running") -> dict[str, Any]:
    job = view()
    name = job.pod_name(index)
    metadata = {"uid": name, "name": name, "ownerReferences": [job.owner()]}
    labels = {**job.labels(), LABEL_INDEX: str(index)}
    spec, status = {"nodeName": node}, {"phase": phase}
    return {"metadata": {**metadata, "labels": labels}, "spec": spec, "status": status}


@pytest.mark.parametrize(("phase", "made"), [("Running", ["PodsMade"]), ("Pending", [])])
def test_a_new_operator_replaces_what_the_api_gave_up_before_it_came(
    phase: str, made: list[str]
) -> None:
    """The node that died had the operator before it, too."""
    job = Pass()
    job.kube.pods = [running(0, "alive"), running(1, "dead", phase)]
    job.nodes = {
        "alive": ObservedNode(name="alive"),
        "dead": ObservedNode(name="dead", ready=False),
    }
    job.api.living = ["demo-0"]
    job.again()
    assert job.kube.reasons() == made
