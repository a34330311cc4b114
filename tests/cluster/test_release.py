"""Mainstay as users run it: the chart on three nodes, pods that train, and everything that dies."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.cluster import building
from tests.cluster.cluster import Cluster
from tests.cluster.release import (
    JOBS,
    NUM_PODS,
    OTHER_SYSTEM,
    SYSTEM,
    Neighbour,
    Platform,
    Release,
    make_job,
)
from tests.cluster.stories import (
    Story,
    condition_of,
    kill,
    run_out_of_memory,
    run_undisturbed,
    supervisor_tags,
    tags_of,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(900)]
GATES = (3, 7, 11, 15, 19, 23)
STEPS = 27
OWNED = ("pods", "services", "serviceaccounts", "secrets")
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="module")
def expected(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The final digests of a run of the same job in local mode, undisturbed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    job = make_job(platform, "undisturbed", STEPS)
    return run_undisturbed(job, directory)["digests"]["final"]


@pytest.fixture(scope="module")
def neighbour(platform: Platform) -> Neighbour:
    """A second release, installed with the store's volume as it comes: nobody makes volumes."""
    made = Neighbour(platform.cluster)
    made.install(wait=False)
    return made


@pytest.fixture(scope="module")
def twin(neighbour: Neighbour) -> Story:
    """A job of the second release, of the same name as one of the first; it stands at a gate."""
    helm(neighbour, *remedy(neighbour))
    spec = {
        "training": {"steps": 8, "seed": 12, "lanes": 2, "shardsPerLane": 1},
        "parallelism": {"replicas": 2, "minReplicas": 1, "stages": 1},
        "spares": {"replicas": 0},
        # It stands for as long as the other release's tests take.
        "detection": {"hangSeconds": 3600},
    }
    return Story(neighbour, "changes", 8, (3,), **spec)


def helm(release: Release, action: str, *words: str) -> str:
    return release.cluster.helm(action, *words, "-n", release.namespace)


def remedy(release: Release) -> list[str]:
    """What the notes say to do where there is no volume to be had: a helm command's words."""
    notes = helm(release, "get", "notes", "mainstay")
    (line,) = (line for line in notes.splitlines() if "persistence.enabled=false" in line)
    program, *words = shlex.split(line.replace("CHART", str(release.chart)), comments=True)
    assert program == "helm"
    return words


def test_the_installed_release_passes_its_own_test(platform: Platform) -> None:
    said = platform.cluster.helm("test", "mainstay", "-n", SYSTEM, "--timeout", "2m")
    assert "Succeeded" in said


@pytest.mark.chaos
def test_the_bits_are_those_of_an_undisturbed_run_whatever_dies(
    platform: Platform, expected: Any
) -> None:
    story = Story(platform, "story", STEPS, GATES)
    story.stand_at(3)
    nodes = {pod["spec"]["nodeName"] for pod in platform.pods("story")}
    assert len(nodes) == 3, nodes

    story.lose_pod(grace=True)
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
    story.lose_pod()
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


def test_without_a_storage_class_the_notes_say_what_starts_the_store(
    neighbour: Neighbour, request: pytest.FixtureRequest
) -> None:
    """Nothing is deleted by hand."""
    apps = f"/apis/apps/v1/namespaces/{OTHER_SYSTEM}/statefulsets"
    notes = helm(neighbour, "get", "notes", "mainstay")
    assert "The CRD is not part of this release. It is there: another release has it" in notes
    assert "this cluster has no default StorageClass" in notes
    pod = f"/api/v1/namespaces/{OTHER_SYSTEM}/pods/mainstay-redis-0"
    neighbour.api.wait(pod, lambda found: condition_of(found, "PodScheduled") == "False")
    made = neighbour.api.get(f"{apps}/mainstay-redis")["metadata"]["uid"]
    request.getfixturevalue("twin")
    neighbour.api.wait(
        f"{apps}/mainstay-redis",
        lambda found: found and found["status"].get("readyReplicas") == 1,
        "the store does not start",
    )
    assert neighbour.api.get(f"{apps}/mainstay-redis")["metadata"]["uid"] == made
    assert "StorageClass" not in helm(neighbour, "get", "notes", "mainstay")


@pytest.mark.chaos
def test_the_bits_are_those_of_an_undisturbed_run_whatever_changes(
    platform: Platform, expected: Any, twin: Story
) -> None:
    """An upgrade, an operator that is away for a whole failure, a suspension.

    A job of the same name trains beside it, served by another release.
    """
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
        assert tags_of(platform.system(component)) == {building.NEXT_TAG}
    assert [pod["metadata"]["uid"] for pod in platform.pods("changes")] == before
    assert [pod["metadata"]["uid"] for pod in platform.system("redis")] == stores
    assert platform.job("changes")["status"]["recovery"]["total"] == 0

    platform.api.patch(operator, {"spec": {"replicas": 0}})
    platform.api.wait(operator, lambda found: "replicas" not in (found or {})["status"])
    kill(platform, "operator")
    story.lose_pod()
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

    path = f"{platform.jobs_path}/changes"
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
    assert story.uid in platform.served()
    wait_for(lambda: twin.platform.served() == {twin.uid}, "the other release's job, and no other")
    assert twin.uid not in platform.served()


@pytest.mark.chaos
@pytest.mark.parametrize(("times", "room"), [(2, NUM_PODS), (5, 5)])
def test_a_job_that_is_deleted_and_applied_again_trains_each_time(
    platform: Platform, times: int, room: int
) -> None:
    """Kubelets keep an immutable Secret as they read it, for as long as pods name it.

    With room for no more pods than it has, a job waits for the end of the one before.
    """
    platform.cluster.scale(3)
    platform.allow_pods(room)
    for left in reversed(range(times)):
        story = Story(platform, "again", 11, (3, 7), spares={"replicas": 2})
        story.stand_at(3)
        # One pod is enough to train; the others come as soon as the quota lets them.
        wait_for(lambda: len(platform.pods("again")) == 5, "all pods")
        if not left:
            # Who comes later proves the same secret as those who are there.
            story.lose_pod(grace=True)
            # Held until then: the few steps that are left take less time than a pod's notice.
            wait_for(lambda: platform.job("again")["status"]["recovery"]["active"], "the hand-over")
            story.go_on(3, then=7)
            platform.open_gates(7)
            story.finish()
        platform.api.delete(f"{platform.jobs_path}/again")
        platform.wait("again", lambda job: job is None, "the job is not gone")


@pytest.mark.chaos
def test_a_deleted_job_leaves_nothing_though_the_store_is_gone(platform: Platform) -> None:
    platform.cluster.scale(3)
    story = Story(platform, "orphan", 1000, (3,))
    story.stand_at(3)
    store = f"/apis/apps/v1/namespaces/{SYSTEM}/statefulsets/mainstay-redis"
    platform.api.patch(store, {"spec": {"replicas": 0}})
    kill(platform, "redis")
    # Those that other tests left as well.
    names = [job["metadata"]["name"] for job in platform.api.list(platform.jobs_path)]
    assert "orphan" in names
    for name in names:
        platform.api.delete(f"{platform.jobs_path}/{name}")
    for name in names:
        platform.wait(name, lambda job: job is None, "the job is not gone")

    def left() -> list[str]:
        return [
            f"{kind}/{found['metadata']['name']}"
            for kind in OWNED
            for found in platform.api.list(f"/api/v1/namespaces/{JOBS}/{kind}")
            if "mainstay.dev/job-name" in found["metadata"].get("labels", {})
        ]

    wait_for(lambda: not left(), "the objects' end")


@pytest.mark.chaos
def test_an_uninstalled_release_leaves_its_neighbour_and_the_crd_alone(
    platform: Platform, twin: Story
) -> None:
    platform.cluster.scale(3)
    twin.stand_at(3)
    other = twin.platform

    def pods() -> set[str]:
        return {pod["metadata"]["uid"] for pod in other.pods(twin.name)}

    first = pods()
    assert len(first) == 2
    calm = other.job(twin.name)["status"]["recovery"]["total"]
    before = objects_of_releases(platform.cluster)
    others = {name for name in before if OTHER_SYSTEM in name or other.jobs in name}
    assert others < before
    helm(platform, "uninstall", "mainstay", "--wait", "--timeout", "2m")
    wait_for(lambda: objects_of_releases(platform.cluster) == others, "the release's end, alone")

    # All that the other one does goes on.
    assert pods() == first
    assert other.job(twin.name)["status"]["recovery"]["total"] == calm
    twin.lose_pod()
    wait_for(lambda: len(pods() - first) == 1 and len(pods()) == 2, "another pod")
    other.open_gates(3)
    twin.finish()
    # It may take the CRD over, as nobody has it now.
    adopt = ["--reset-then-reuse-values", "--take-ownership", "--set", "crds.enabled=true"]
    helm(other, "upgrade", "mainstay", str(other.chart), *adopt)
    helm(other, "uninstall", "mainstay")
    (crd,) = other.api.list(CRDS)
    assert crd["metadata"]["name"] == "trainingjobs.mainstay.dev"
    assert crd["metadata"]["annotations"]["meta.helm.sh/release-namespace"] == OTHER_SYSTEM


def objects_of_releases(cluster: Cluster) -> set[str]:
    """The namespaces and names of what releases of this name have made."""
    kinds = "deploy,sts,svc,sa,secret,cm,role,rolebinding,pdb,pvc,networkpolicy"
    wide = "clusterrole,clusterrolebinding,validatingadmissionpolicy,"
    wide += "validatingadmissionpolicybinding"
    parts = '{.metadata.namespace}{" "}{.kind}{" "}{.metadata.name}{"\\n"}'
    told = ["-l", "app.kubernetes.io/instance=mainstay", "-o"]
    told.append(f"jsonpath={{range .items[*]}}{parts}{{end}}")
    lines = cluster.kubectl("get", kinds, "-A", *told) + cluster.kubectl("get", wide, *told)
    return {line.strip() for line in lines.splitlines()}
