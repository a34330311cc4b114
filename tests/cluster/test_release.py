"""Mainstay as users run it: the chart on three nodes, pods that train, and everything that dies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import building, toolbox
from tests.cluster.client import Object
from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import reason_told
from tests.cluster.release import CORPUS, JOBS, MODEL, SYSTEM, TRAINING_JOBS, Platform, make_job
from tests.e2e.harness import local_job

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(900)]
GATES = (3, 7, 11, 15, 19, 23)
STEPS = 27
GIVE_UP_S = 240.0
POLL_S = 0.1
OWNED = ("pods", "services", "serviceaccounts", "secrets")
PODS = f"/api/v1/namespaces/{JOBS}/pods"


@pytest.fixture(scope="module")
def expected(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The final digests of a run of the same job in local mode, undisturbed."""
    undisturbed = make_job(platform, "undisturbed", STEPS)
    undisturbed["spec"]["workload"] = {
        "entrypoint": "mainstay_train.models.llama:workload",
        "config": MODEL | {"data": {"path": str(CORPUS)}},
    }
    del undisturbed["spec"]["template"]
    undisturbed["spec"]["spares"] = {"replicas": 0}
    with local_job(tmp_path_factory.mktemp("undisturbed"), undisturbed) as running:
        return running.report()["digests"]["final"]


@pytest.fixture(scope="module")
def platform(cluster: Callable[[int], Cluster]) -> Platform:
    with reason_told():
        made = Platform(cluster(3), toolbox.say_to_stdout)
    made.install()
    return made


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait for what no watch shows; return it."""
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(POLL_S)
    raise AssertionError(f"{what}: not in {GIVE_UP_S:.0f} s")


def condition_of(job: Object | None, kind: str) -> str:
    listed = (job or {}).get("status", {}).get("conditions", [])
    return str(next((c["status"] for c in listed if c["type"] == kind), "Unknown"))


def with_digests(report: Any) -> Any:
    return report if report and report["digests"]["final"] else None


class Story:
    """One job, and what happens to it while it stands at a gate."""

    def __init__(
        self, platform: Platform, name: str, steps: int, gates: Sequence[int], **spec: Any
    ) -> None:
        self.platform = platform
        self.name = name
        for gate in gates:
            for file in (f"at-{gate}", str(gate)):
                (platform.gates / file).unlink(missing_ok=True)
        job = make_job(platform, name, steps, *gates, **spec)
        # Copies of the state on nodes of their own, as far as there are nodes.
        job["spec"]["scheduling"] = {"spreadTopologyKey": "kubernetes.io/hostname"}
        self.uid = platform.apply(job)["metadata"]["uid"]
        self.num_recoveries = 0

    def stand_at(self, gate: int) -> None:
        wait_for((self.platform.gates / f"at-{gate}").exists, f"training before step {gate}")

    def go_on(self, gate: int, then: int | None = None) -> None:
        """Pass a gate; the fault must be recovered from, and all pods be there again.

        The last join may only end beyond the next gate.
        """
        self.platform.open_gates(gate)
        if then is not None:
            self.stand_at(then)

        def is_repaired(job: Object | None) -> bool:
            status = (job or {}).get("status", {})
            pods, recovery = status.get("pods", {}), status.get("recovery", {})
            return (
                recovery.get("total", 0) > self.num_recoveries
                and pods.get("ready") == pods.get("wanted") == 4
                and condition_of(job, "SparesAvailable") == "True"
            )

        job = self.platform.wait(self.name, is_repaired, f"not whole after gate {gate}")
        self.num_recoveries = job["status"]["recovery"]["total"]

    def serving(self, but_on: Sequence[str] = ()) -> Object:
        """A pod that holds a rank, on none of these nodes."""

        def find() -> Object | None:
            listed = self.platform.fetch(self.uid, "pods")["pods"]
            uids = {pod["uid"] for pod in listed if pod["serving"]}
            pods = [p for p in self.platform.pods(self.name) if p["metadata"]["uid"] in uids]
            return next((p for p in pods if p["spec"]["nodeName"] not in but_on), None)

        found: Object = wait_for(find, "a pod that serves")
        return found

    def finish(self) -> Any:
        """Wait until the job is complete and no step of it was lost; return its final digests."""
        self.platform.wait(
            self.name, lambda job: condition_of(job, "Complete") == "True", "not complete"
        )
        report = wait_for(
            lambda: with_digests(self.platform.try_fetch(self.uid, "report")), "the digests"
        )
        assert report["steps"]["lost"] == 0, report["recoveries"]
        return report["digests"]["final"]

    def restarts(self, pod: Object) -> dict[str, int]:
        """How often each of a pod's containers was started again."""
        status = self.platform.api.get(f"{PODS}/{pod['metadata']['name']}")["status"]
        listed = [*status["containerStatuses"], *status["initContainerStatuses"]]
        return {c["name"]: c["restartCount"] for c in listed}


def run_out_of_memory(platform: Platform, pod: Object) -> None:
    """Have the kernel kill a pod's trainer container, whose memory goes to a file."""
    statuses = pod["status"]["containerStatuses"]
    container = next(c["containerID"] for c in statuses if c["name"] == "trainer")
    pid = platform.cluster.nodes[pod["spec"]["nodeName"]].pid_of(container.rpartition("/")[2])
    # The container's first process goes first, and with it all others.
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    fill = "dd if=/dev/zero of=/fill/file bs=1M count=2000; rm -f /fill/file"
    name = ["-n", JOBS, pod["metadata"]["name"], "-c", "trainer"]
    platform.cluster.kubectl("exec", *name, "--", "sh", "-c", fill, check=False)


def kill(platform: Platform, component: str) -> None:
    """Delete a component's pods without any grace."""
    for pod in platform.system(component):
        name = pod["metadata"]["name"]
        platform.api.delete(f"/api/v1/namespaces/{SYSTEM}/pods/{name}", gracePeriodSeconds="0")


def supervisor_tags(pods: Sequence[Object]) -> set[str]:
    containers = [c for pod in pods for c in pod["spec"]["initContainers"]]
    images = [c["image"] for c in containers if c["name"] == "supervisor"]
    return {image.rpartition(":")[2] for image in images}


def test_the_installed_release_passes_its_own_test(platform: Platform) -> None:
    said = platform.cluster.helm("test", "mainstay", "-n", SYSTEM, "--timeout", "2m")
    assert "Succeeded" in said


def test_the_bits_are_those_of_an_undisturbed_run_whatever_dies(
    platform: Platform, expected: Any
) -> None:
    story = Story(platform, "story", STEPS, GATES)
    story.stand_at(3)
    nodes = {pod["spec"]["nodeName"] for pod in platform.pods("story")}
    assert len(nodes) == 3, nodes

    platform.api.delete(f"{PODS}/{story.serving()['metadata']['name']}")
    story.go_on(3, then=7)

    victim = story.serving()
    run_out_of_memory(platform, victim)
    story.go_on(7, then=11)
    # The kubelet says so later than the trainer is back.
    wait_for(lambda: story.restarts(victim)["trainer"] == 1, "the trainer's restart")
    assert story.restarts(victim)["supervisor"] == 0

    drained = story.serving(but_on=[platform.home])["spec"]["nodeName"]
    only = ["--pod-selector=mainstay.dev/job-name=story", "--delete-emptydir-data"]
    platform.open_gates(11)
    platform.cluster.kubectl("drain", drained, *only, "--timeout=120s")
    platform.cluster.kubectl("uncordon", drained)
    story.go_on(11, then=15)

    kill(platform, "operator")
    name = story.serving()["metadata"]["name"]
    platform.api.delete(f"{PODS}/{name}", gracePeriodSeconds="0")
    story.go_on(15, then=19)

    platform.cluster.kill_node(story.serving(but_on=[platform.home])["spec"]["nodeName"])
    story.go_on(19, then=23)

    kill(platform, "api")
    kill(platform, "redis")
    platform.open_gates(23)
    assert story.finish() == expected
    told = platform.cluster.kubectl("describe", "mtj", "-n", JOBS, "story")
    for reason in ("RecoveryHandOver", "RecoveryMask", "OOMKilled", "Complete"):
        assert reason in told
    head, row = platform.cluster.kubectl("get", "mtj", "-n", JOBS, "story").splitlines()
    assert head.split() == ["NAME", "STATE", "READY", "SPARES", "STEP", "RECOVERIES", "AGE"]
    assert row.split()[:2] == ["story", "Complete"]
    assert int(row.split()[5]) >= len(GATES)


def test_the_bits_are_those_of_an_undisturbed_run_whatever_changes(
    platform: Platform, expected: Any
) -> None:
    """An upgrade, an operator that is away for a whole failure, a suspension."""
    platform.cluster.scale(3)
    saved = {"checkpoint": {"everySteps": 1000, "storage": "/checkpoints"}}
    story = Story(platform, "changes", STEPS, (3, 7, 11, 15, 19), **saved)
    story.stand_at(3)

    before = [pod["metadata"]["uid"] for pod in platform.pods("changes")]
    stores = [pod["metadata"]["uid"] for pod in platform.system("redis")]
    operator = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/mainstay-operator"
    generation = platform.api.get(operator)["metadata"]["generation"]
    with ThreadPoolExecutor(max_workers=1) as pool:
        upgraded = pool.submit(platform.upgrade, "0.2.0")
        platform.api.wait(operator, lambda found: found["metadata"]["generation"] > generation)
        # Steps go on while everything but the store is replaced.
        platform.open_gates(3)
        story.stand_at(7)
        upgraded.result()
    for component in ("operator", "api"):
        images = {pod["spec"]["containers"][0]["image"] for pod in platform.system(component)}
        assert {image.rpartition(":")[2] for image in images} == {building.NEXT_TAG}
    assert [pod["metadata"]["uid"] for pod in platform.pods("changes")] == before
    assert [pod["metadata"]["uid"] for pod in platform.system("redis")] == stores
    assert platform.job("changes")["status"]["recovery"]["total"] == 0

    platform.api.patch(operator, {"spec": {"replicas": 0}})
    platform.api.wait(operator, lambda found: "replicas" not in (found or {})["status"])
    kill(platform, "operator")
    platform.api.delete(f"{PODS}/{story.serving()['metadata']['name']}", gracePeriodSeconds="0")
    platform.open_gates(7)
    # Nobody has made another pod: the others go on without it.
    story.stand_at(11)
    assert len(platform.pods("changes")) == len(before) - 1
    platform.api.patch(operator, {"spec": {"replicas": 1}})
    story.go_on(11, then=15)
    # The new pod is of the version of those that it trains with.
    assert supervisor_tags(platform.pods("changes")) == {building.TAG}
    platform.open_gates(15)
    story.stand_at(19)

    path = f"{TRAINING_JOBS}/changes"
    platform.api.patch(path, {"spec": {"suspend": True}})
    # Held until then: the few steps that are left take less time than a plan.
    wait_for(lambda: platform.fetch(story.uid, "plan")["plan"]["pause"], "the pausing plan")
    platform.open_gates(19)
    platform.wait(
        "changes", lambda job: condition_of(job, "Suspended") == "True", "is not suspended"
    )
    wait_for(lambda: not platform.pods("changes"), "the pods' end")
    platform.api.patch(path, {"spec": {"suspend": False}})
    wait_for(lambda: platform.pods("changes"), "the pods of the resumed job")
    assert supervisor_tags(platform.pods("changes")) == {building.NEXT_TAG}
    assert story.finish() == expected


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.chaos)])
def test_a_job_that_is_deleted_and_applied_again_trains_each_time(
    platform: Platform, times: int
) -> None:
    """Kubelets keep an immutable Secret as they read it, for as long as pods name it."""
    platform.cluster.scale(3)
    for left in reversed(range(times)):
        story = Story(platform, "again", 8, (3,), spares={"replicas": 2})
        story.stand_at(3)
        assert len(platform.pods("again")) == 5
        if not left:
            # Who comes later proves the same secret as those who are there.
            platform.api.delete(f"{PODS}/{story.serving()['metadata']['name']}")
            platform.open_gates(3)
            story.finish()
            assert platform.job("again")["status"]["recovery"]["total"]
        platform.api.delete(f"{TRAINING_JOBS}/again")
        platform.wait("again", lambda job: job is None, "the job is not gone")


def test_a_deleted_job_leaves_nothing_though_the_store_is_gone(platform: Platform) -> None:
    platform.cluster.scale(3)
    story = Story(platform, "orphan", 1000, (3,))
    story.stand_at(3)
    store = f"/apis/apps/v1/namespaces/{SYSTEM}/statefulsets/mainstay-redis"
    platform.api.patch(store, {"spec": {"replicas": 0}})
    kill(platform, "redis")
    for name in ("story", "changes", "orphan"):
        with contextlib.suppress(AssertionError):
            platform.api.delete(f"{TRAINING_JOBS}/{name}")
    for name in ("story", "changes", "orphan"):
        platform.wait(name, lambda job: job is None, "the job is not gone")

    def left() -> list[str]:
        return [
            f"{kind}/{found['metadata']['name']}"
            for kind in OWNED
            for found in platform.api.list(f"/api/v1/namespaces/{JOBS}/{kind}")
            if "mainstay.dev/job-name" in found["metadata"].get("labels", {})
        ]

    wait_for(lambda: not left(), "the objects' end")


def test_an_uninstalled_release_leaves_the_crd_alone(platform: Platform) -> None:
    platform.cluster.helm("uninstall", "mainstay", "-n", SYSTEM, "--wait", "--timeout", "2m")
    kinds = "deploy,sts,svc,sa,secret,cm,role,rolebinding,pdb,pvc,networkpolicy"
    own = ["-l", "app.kubernetes.io/instance=mainstay", "-A", "-o", "name"]

    def left() -> str:
        wide = "clusterrole,clusterrolebinding"
        wide += ",validatingadmissionpolicy,validatingadmissionpolicybinding"
        wide = platform.cluster.kubectl("get", wide, *own[:2], *own[3:])
        return platform.cluster.kubectl("get", kinds, *own) + wide

    wait_for(lambda: not left(), "the release's end")
    crds = platform.api.list("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    assert [crd["metadata"]["name"] for crd in crds] == ["trainingjobs.mainstay.dev"]
