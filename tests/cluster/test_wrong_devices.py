"""A device that computes wrongly each time: the others name it, and its pod is replaced.

The bits are those of an undisturbed run in local mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.release import JOBS, NUM_PODS, Platform, make_job
from tests.cluster.stories import Story, run_undisturbed, wait_for
from tests.cluster.surfaces import count_metrics, events_of, recoveries_of, run_plugin

pytestmark = [pytest.mark.chaos, pytest.mark.root, pytest.mark.timeout(900)]
GATES = (5, 31)
STEPS = 34
BROKEN = 1
"""The replica; each other one witnesses it, and is witnessed by it, once in six steps."""
SPEC: dict[str, Any] = {
    # All train from the beginning.
    "parallelism": {"replicas": 3, "minReplicas": 3, "stages": 1},
    "detection": {"dmr": {"mode": "Full"}, "witness": {"everySteps": 1}},
}
FLIP = "operator=aten.mm,element=3,bit=20,sticky=true,type=0"
"""A shard type that this replica computes as a witness alone, so that it never counts."""


@pytest.fixture
def breakable(platform: Platform) -> Iterator[Platform]:
    """The release, which lets who may change a job inject faults; it is what it was afterwards."""
    platform.cluster.scale(3)
    platform.allow_pods(NUM_PODS)
    platform.install(faultInjection={"enabled": True})
    yield platform
    platform.install()


def test_a_device_that_insists_on_a_wrong_number_is_named_and_its_pod_replaced(
    breakable: Platform, tmp_path: Any
) -> None:
    story = Story(breakable, "wrong", STEPS, GATES, **SPEC)
    story.stand_at(5)
    wait_for(story.is_whole, "all pods")
    before = {pod["metadata"]["uid"] for pod in breakable.pods("wrong")}
    (slot,) = (
        member["slot"]
        for member in breakable.fetch(story.uid, "members")
        if member.get("replica") == BROKEN
    )
    name = slot.partition("/")[0]
    (uid,) = (
        p["metadata"]["uid"] for p in breakable.pods("wrong") if p["metadata"]["name"] == name
    )
    fault = ["--target", f"replica={BROKEN},stage=0", "--action", "flip", "--at-step", "7"]
    run_plugin(story, "faults inject", *fault, "--phase", "forward", "--flip", FLIP)
    story.go_on(5, then=31)

    findings = breakable.fetch(story.uid, "findings")
    told = [kept["told"]["finding"] for kept in findings["findings"]]
    assert told, findings
    assert {(f["verdict"], f["rank"]["replica"]) for f in told} == {("deterministic", BROKEN)}
    assert findings["counts"] == {"deterministic": len(told)}
    assert slot in run_plugin(story, "findings")
    # All others are as they were; who left is replaced.
    after = {pod["metadata"]["uid"] for pod in breakable.pods("wrong")}
    assert before - after == {uid}
    assert len(after - before) == 1
    assert {r.method.value for r in recoveries_of(story)} <= {"hand-over", "join"}
    events = events_of(story)
    (wrong,) = (text for reason, text in events if reason == "WrongResult")
    assert slot in wrong
    assert "RecoveryHandOver" in {reason for reason, _ in events}
    counted = count_metrics(story, "mainstay_check_findings_total")
    assert {label: n for (_, label), n in counted.items() if n} == {"deterministic": len(told)}
    assert "WrongResult" in breakable.cluster.kubectl("describe", "mtj", "-n", JOBS, "wrong")

    breakable.open_gates(31)
    report = story.complete()
    job = make_job(breakable, "undisturbed", STEPS)
    assert report["digests"] == run_undisturbed(job, tmp_path)["digests"]
