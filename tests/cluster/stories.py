"""Stories of jobs on a release: a job stands at a gate while something happens, and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.client import Object
from tests.cluster.release import CORPUS, JOBS, MODEL, SYSTEM, Platform, Release, make_job
from tests.e2e.harness import local_job

GIVE_UP_S = 240.0
POLL_S = 0.1


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
        self, platform: Release, name: str, steps: int, gates: Sequence[int], **spec: Any
    ) -> None:
        self.platform = platform
        self.name = name
        for gate in gates:
            for file in (f"at-{gate}", str(gate)):
                (platform.gates / file).unlink(missing_ok=True)
        job = make_job(platform, name, steps, *gates, **spec)
        # Copies of the state on nodes of their own, as far as there are nodes.
        job["spec"]["scheduling"] = {"spreadTopologyKey": "kubernetes.io/hostname"}
        shape = job["spec"]["parallelism"]
        self.num_pods = shape["replicas"] * shape["stages"] + job["spec"]["spares"]["replicas"]
        self.uid = platform.apply(job)["metadata"]["uid"]
        self.num_recoveries = 0
        self.last_told = ""

    def stand_at(self, gate: int) -> None:
        wait_for((self.platform.gates / f"at-{gate}").exists, f"training before step {gate}")

    def go_on(self, gate: int, then: int | None = None) -> None:
        """Pass a gate; the fault must be recovered from, and all pods be there again.

        The last join may only end beyond the next gate. So may a hand-over: all is done by then but
        the first step of the quorum that it has made.
        """
        self.platform.open_gates(gate)
        if then is not None:
            self.stand_at(then)

        def num_recovered(status: Object) -> int:
            recovery = status.get("recovery", {})
            made = status.get("quorum", {}).get("id")
            handed = [
                active
                for active in recovery.get("active", [])
                if active["method"] == "hand-over" and active["quorum"] == made
            ]
            return int(recovery.get("total", 0)) + len(handed)

        def is_repaired(job: Object | None) -> bool:
            status = (job or {}).get("status", {})
            pods = status.get("pods", {})
            return (
                num_recovered(status) > self.num_recoveries
                and pods.get("ready") == pods.get("wanted") == self.num_pods
                and condition_of(job, "SparesAvailable") == "True"
            )

        job = self.platform.wait(self.name, is_repaired, f"not whole after gate {gate}")
        self.num_recoveries = num_recovered(job["status"])

    def serving(self, but_on: Sequence[str] = ()) -> Object:
        """A pod that holds a rank, on none of these nodes."""

        def find() -> Object | None:
            uids = self.members()
            pods = [p for p in self.platform.pods(self.name) if p["metadata"]["uid"] in uids]
            return next((p for p in pods if p["spec"]["nodeName"] not in but_on), None)

        found: Object = wait_for(find, "a pod that serves")
        return found

    def members(self) -> set[str]:
        """Return the uids of the pods that hold ranks."""
        listed = self.platform.fetch(self.uid, "pods")["pods"]
        return {str(pod["uid"]) for pod in listed if pod["serving"]}

    def is_whole(self) -> bool:
        """Return whether there are as many pods as the job needs, and the api knows them all."""
        listed = self.platform.fetch(self.uid, "pods")["pods"]
        there = {str(pod["metadata"]["uid"]) for pod in self.platform.pods(self.name)}
        return len(there) == self.num_pods and there == {str(pod["uid"]) for pod in listed}

    def last_reason(self) -> str:
        """Return what the status says of a recovery that is over: why it was made, and how.

        A recovery counts from its decision on, so one that is counted may not be over yet. Each is
        returned once.
        """

        def find() -> Object | None:
            status = self.platform.job(self.name)["status"]
            last: Object = status["recovery"].get("last", {"quorum": self.last_told})
            return last if last["quorum"] != self.last_told else None

        last = wait_for(find, "another recovery that is over")
        self.last_told = last["quorum"]
        return str(last["reason"])

    def lose_pod(self, grace: bool = False) -> None:
        """Delete a pod that holds a rank; without grace nobody is told before."""
        path = f"{self.platform.pods_path}/{self.serving()['metadata']['name']}"
        self.platform.api.delete(path, **({} if grace else {"gracePeriodSeconds": "0"}))

    def finish(self) -> Any:
        """Wait until the job is complete and no step of it was lost; return its final digests."""
        return self.complete()["digests"]["final"]

    def complete(self) -> Any:
        """Wait until the job is complete and no step of it was lost; return its report."""
        self.platform.wait(
            self.name, lambda job: condition_of(job, "Complete") == "True", "not complete"
        )
        report = wait_for(
            lambda: with_digests(self.platform.try_fetch(self.uid, "report")), "the digests"
        )
        assert report["steps"]["lost"] == 0, report["recoveries"]
        return report

    def restarts(self, pod: Object) -> dict[str, int]:
        """How often each of a pod's containers was started again."""
        path = f"{self.platform.pods_path}/{pod['metadata']['name']}"
        status = self.platform.api.get(path)["status"]
        listed = [*status["containerStatuses"], *status["initContainerStatuses"]]
        return {c["name"]: c["restartCount"] for c in listed}


def localize(job: Object, model: Object = MODEL) -> Object:
    """Return a job of a release as it runs in local mode, without gates, spares and snapshots.

    Args:
        job: as `make_job` has made it; changed.
        model: its configuration, without the data.
    """
    spec = job["spec"]
    spec["workload"] = {
        "entrypoint": "mainstay_train.models.llama:workload",
        "config": model | {"data": {"path": str(CORPUS)}},
    }
    spec["spares"] = {"replicas": 0}
    del spec["template"]
    spec.pop("snapshots", None)
    spec.pop("protection", None)
    return job


def run_undisturbed(job: Object, directory: Path) -> Any:
    """Run a job of a release in local mode, as `localize` makes it; return its report.

    Args:
        job: as `make_job` has made it; changed.
        directory: an empty one.
    """
    with local_job(directory, localize(job)) as running:
        return running.report()


def pid_of_trainer(platform: Platform, pod: Object) -> int | None:
    """The first process of a pod's trainer container; None: it has ended.

    Args:
        platform: of the job.
        pod: as it was, perhaps, before it was deleted.
    """
    statuses = pod["status"]["containerStatuses"]
    container = next(c["containerID"] for c in statuses if c["name"] == "trainer")
    return platform.cluster.nodes[pod["spec"]["nodeName"]].pid_of(container.rpartition("/")[2])


def run_out_of_memory(platform: Platform, pod: Object) -> None:
    """Have the kernel kill a pod's trainer container, whose memory goes to a file."""
    pid = pid_of_trainer(platform, pod)
    assert pid is not None
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
    return _tags(c for c in containers if c["name"] == "supervisor")


def tags_of(pods: Sequence[Object]) -> set[str]:
    """Return the tags of the images of pods' first containers."""
    return _tags(pod["spec"]["containers"][0] for pod in pods)


def _tags(containers: Iterable[Object]) -> set[str]:
    return {container["image"].rpartition(":")[2] for container in containers}
