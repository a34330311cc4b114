"""Objects of others that have a name of a job's, and a job that the version before began."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.worlds.served_namespace import Job, ServedNamespace, manifest, serve_namespace, wait

from mainstay_core.job.object_names import object_name
from mainstay_operator.builders import (
    build_disruption_budget,
    build_network_policy,
    build_secret,
    build_service,
    build_service_account,
)
from mainstay_operator.resources import view_job

SELECTOR = {"matchLabels": {"app": "theirs"}}
CONTENT: dict[str, dict[str, Any]] = {
    "Service": {"spec": {"clusterIP": "None", "selector": {"app": "theirs"}}},
    "ServiceAccount": {"automountServiceAccountToken": True},
    "Secret": {"stringData": {"secret": "theirs"}},
    "PodDisruptionBudget": {"spec": {"minAvailable": 1, "selector": SELECTOR}},
    "NetworkPolicy": {"spec": {"podSelector": SELECTOR}},
}
RESOURCES = {
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "Secret": "secrets",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "NetworkPolicy": "networkpolicies",
}
SMALL: dict[str, Any] = {
    "training": {"steps": 60, "seed": 1, "lanes": 1},
    "parallelism": {},
    "spares": {"replicas": 0},
}


def make(served: ServedNamespace, kind: str, name: str) -> None:
    """Make somebody's object of this name."""
    body = {"metadata": {"name": name}, **CONTENT[kind]}
    served.kube.create(served.path(RESOURCES[kind]), body)


def now(served: ServedNamespace, kind: str, name: str) -> dict[str, Any]:
    """The object as it is now; its controllers write its status alone."""
    found = served.kube.get(served.path(RESOURCES[kind], name))
    return {key: found.get(key) for key in ("metadata", "spec", "data")}


def without_status(found: dict[str, Any]) -> dict[str, Any]:
    """What nobody but its owner changes of an object."""
    metadata = {
        key: value
        for key, value in found["metadata"].items()
        if key not in ("resourceVersion", "managedFields")
    }
    return {**found, "metadata": metadata}


class Town:
    """A namespace in which jobs and objects of others were made while no operator was there."""

    def __init__(self, served: ServedNamespace) -> None:
        self.served = served
        self.jobs: dict[str, Job] = {}
        self.theirs: dict[str, dict[str, Any]] = {}
        """By job: somebody's object that has a name of the job's, as it was."""
        served.operator.stop()
        for kind in CONTENT:
            job = self.submit(kind.lower())
            make(served, kind, object_name(job.name, job.uid))
            self.theirs[kind] = self.now(kind)
        self.pose()
        self.begin_before()
        served.operator.start()

    def submit(self, name: str) -> Job:
        self.jobs[name] = self.served.submit(manifest(name, **SMALL))
        return self.jobs[name]

    def now(self, kind: str) -> dict[str, Any]:
        """Somebody's object of this kind as it is now."""
        job = self.jobs[kind.lower()]
        return without_status(now(self.served, kind, object_name(job.name, job.uid)))

    def pose(self) -> None:
        """Make a pod that looks like a job's but for its owner."""
        job = self.submit("posing")
        spec = {"containers": [{"name": "c", "image": "c:1"}], "schedulerName": "nobody"}
        labels = {"mainstay.dev/job-uid": job.uid, "mainstay.dev/pod-index": "0"}
        metadata = {"name": "posing-0", "labels": labels}
        self.posing = self.served.kube.create(
            self.served.path("pods"), {"metadata": metadata, "spec": spec}
        )

    def begin_before(self) -> None:
        """Make a job and what the operator of the version before made for it."""
        job = self.submit("older")
        self.served.kube.patch(job.path, {"metadata": {"finalizers": ["mainstay.dev/finalizer"]}})
        view = view_job(job.get())
        names = view.old_object_names()
        for body in (
            build_service(view, names),
            build_service_account(view, names),
            build_secret(view, names, "theirs"),
            build_disruption_budget(view, names, 1),
            build_network_policy(view, names, {}),
        ):
            self.served.kube.create(self.served.path(RESOURCES[body["kind"]]), body)
        self.secret = now(self.served, "Secret", "older-secret")


@pytest.fixture(scope="module")
def town(control_plane: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    directory = tmp_path_factory.mktemp("town")
    with serve_namespace(control_plane, directory, MAINSTAY_NETWORK_POLICY="true") as served:
        yield Town(served)


def wait_taken(job: Job, kind: str) -> str:
    """Wait until the job says that an object of this kind is not its own; return the sentence."""
    message = str(job.wait_condition("Degraded", "True", "NameTaken")["message"])
    named = f"{kind} {job.served.namespace}/{object_name(job.name, job.uid)}"
    assert named in message
    wait(lambda: [e for e in job.served.events("NameTaken") if named in e["message"]], "the Event")
    return message


def test_objects_that_are_named_like_a_job_are_neither_changed_nor_deleted(town: Town) -> None:
    served = town.served
    names = {kind: "web-secret" if kind == "Secret" else "web" for kind in CONTENT}
    before = {}
    for kind, name in names.items():
        make(served, kind, name)
        before[kind] = without_status(now(served, kind, name))

    job = served.submit(manifest("web", **SMALL))
    (pod,) = job.wait_pods("web-0")
    # The budget is the last that is made.
    budget = job.own_path("poddisruptionbudgets")
    served.kube.wait(budget, lambda found: found is not None)
    assert pod["spec"]["serviceAccountName"] == object_name("web", job.uid)
    job.delete()
    for resource in RESOURCES.values():
        served.kube.wait(job.own_path(resource), lambda found: found is None)

    after = {kind: without_status(now(served, kind, name)) for kind, name in names.items()}
    assert after == before


def test_a_job_waits_while_others_have_what_its_pods_need(town: Town) -> None:
    needed = [kind for kind in CONTENT if kind != "PodDisruptionBudget"]
    for kind in needed:
        job = town.jobs[kind.lower()]
        assert "left as it is" in wait_taken(job, kind)
        assert job.pods() == []
        assert town.now(kind) == town.theirs[kind]

    for kind in needed:
        town.served.kube.delete(town.jobs[kind.lower()].own_path(RESOURCES[kind]))

    for kind in needed:
        job = town.jobs[kind.lower()]
        job.wait_pods(f"{job.name}-0")
        job.wait_status(lambda s: "NameTaken" not in str(s), "nothing is taken any more")


def test_a_budget_of_others_is_left_alone_and_pods_are_made_all_the_same(town: Town) -> None:
    kind = "PodDisruptionBudget"
    job = town.jobs[kind.lower()]

    wait_taken(job, kind)

    job.wait_pods(f"{job.name}-0")
    assert town.now(kind) == town.theirs[kind]


def test_a_pod_of_others_is_not_taken_for_a_job_s_by_its_labels(town: Town) -> None:
    served, job = town.served, town.jobs["posing"]
    job.wait_pods("posing-0", "posing-1")
    job.delete()
    served.kube.wait(served.path("pods", "posing-1"), lambda found: found is None)

    left = served.kube.get(served.path("pods", "posing-0"))["metadata"]

    assert left["uid"] == town.posing["metadata"]["uid"]
    assert "deletionTimestamp" not in left


def test_a_job_that_the_version_before_began_keeps_its_objects(town: Town) -> None:
    """Its pods present that Secret to each other and are known by that account."""
    served, job = town.served, town.jobs["older"]
    (pod,) = job.wait_pods("older-0")

    spec = pod["spec"]
    assert (spec["serviceAccountName"], spec["subdomain"]) == ("older", "older")
    (sources,) = [
        v["projected"]["sources"] for v in spec["volumes"] if v["name"] == "mainstay-token"
    ]
    assert sources[1]["secret"]["name"] == "older-secret"
    assert now(served, "Secret", "older-secret") == town.secret
    # They are kept as they should be.
    budget = served.path("poddisruptionbudgets", "older")
    served.kube.wait(budget, lambda found: found and found["spec"]["minAvailable"] == 0)
    for resource in RESOURCES.values():
        assert served.kube.find(job.own_path(resource)) is None
    served.kube.wait(job.path, lambda found: found and "finalizers" not in found["metadata"])
    job.delete()
    served.kube.wait(served.path("services", "older"), lambda found: found is None)
