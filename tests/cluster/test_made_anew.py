"""A stage that nobody holds any more: a person has it made anew, and the cluster says so.

The bits are those of a computation in one process that makes the same stage anew at the same step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.release import JOBS, MODEL, NUM_PODS, Platform, make_job
from tests.cluster.stories import Story, condition_of, localize, pid_of_trainer, wait_for
from tests.cluster.surfaces import ask_plugin, events_of, metrics_of, recoveries_of, run_plugin
from tests.e2e.test_approximate import twin

pytestmark = [pytest.mark.chaos, pytest.mark.root, pytest.mark.timeout(900)]
LOST_AT, THEN = 7, 13
STEPS = 16
LOST = 1
"""The stage; it has a neighbour on either side."""
SAYS = f"approximate since step {LOST_AT}"
DEEPER = MODEL | {"layers": 6}
SPEC: dict[str, Any] = {
    "training": {"steps": STEPS, "seed": 11, "lanes": 2, "shardsPerLane": 1},
    # Both train from the beginning.
    "parallelism": {"replicas": 2, "minReplicas": 2, "stages": 3},
    "spares": {"replicas": 1},
    "detection": {"heartbeatTimeoutSeconds": 10},
    "workload": {
        "entrypoint": "/code/gated_llama.py:workload",
        "config": DEEPER | {"data": {"path": "/corpus"}},
        "args": ["/gates", str(LOST_AT), str(THEN)],
    },
}


@pytest.fixture
def roomy(platform: Platform) -> Platform:
    """The release, with three living nodes and a quota that holds nobody back."""
    platform.cluster.scale(3)
    platform.allow_pods(NUM_PODS)
    return platform


def delete(platform: Platform, *names: str) -> None:
    """Delete pods of a job without any grace."""
    for name in names:
        platform.api.delete(f"{platform.pods_path}/{name}", gracePeriodSeconds="0")


def lose_stage(story: Story) -> list[str]:
    """Have a stage, and the spare, lose all their pods while no other can be made; return them."""
    platform = story.platform
    serving = {
        member["slot"].partition("/")[0]: member["stage"]
        for member in platform.fetch(story.uid, "members")
        if member.get("stage") is not None
    }
    pods = {pod["metadata"]["name"]: pod for pod in platform.pods(story.name)}
    spares = [name for name in pods if name not in serving]
    lost = [name for name in pods if serving.get(name) == LOST]
    assert (len(spares), len(lost)) == (1, 2), serving
    delete(platform, *spares)
    # With a spare that is free the job would go back to the seed at once.
    wait_for(
        lambda: len(platform.fetch(story.uid, "pods")["pods"]) == len(serving), "the spare's end"
    )
    delete(platform, *lost)
    # Pods end a while after they are deleted, and train until then.
    wait_for(
        lambda: not any(pid_of_trainer(platform, pods[name]) for name in lost), "the stage's end"
    )
    return lost


def check_words(story: Story, lost: list[str]) -> None:
    """Compare what all surfaces of the cluster say of the one approximate recovery."""
    (recovery,) = (r for r in recoveries_of(story) if not r.exact)
    assert (recovery.method.value, recovery.lost_steps) == ("approximate", 0)
    assert recovery.allowed_by == "admin"

    job = story.platform.job(story.name)
    assert job["status"]["training"]["approximateSince"] == LOST_AT
    (exact,) = (c for c in job["status"]["conditions"] if c["type"] == "Exact")
    assert (exact["status"], exact["reason"]) == ("False", "StageReinitialised")
    assert exact["message"].startswith(SAYS)
    (event,) = (text for reason, text in events_of(story) if reason == "StageReinitialised")
    assert event.startswith(SAYS)
    for word in ("stage 1 is made anew", "of stage 0", "of stage 2", "admin allowed it"):
        assert word in event, event
    # One that went before the last was masked, and has an Event of its own.
    assert any(f"pod {name} (" in event for name in lost), event
    described = story.platform.cluster.kubectl("describe", "mtj", "-n", JOBS, story.name)
    for word in (SAYS, "StageReinitialised", "RecoveryApproximate", *lost):
        assert word in described, described
    wide = story.platform.cluster.kubectl("get", "mtj", "-n", JOBS, story.name, "-o", "wide")
    head, row = wide.splitlines()
    at = head.index("APPROXIMATE")
    assert row[at:].split()[0] == str(LOST_AT)
    for command in ("timeline", "status", "lineage"):
        assert SAYS in run_plugin(story, command), command
    since = "mainstay_job_approximate_since_step"
    assert set(metrics_of(story, since)) == {(since, "", LOST_AT)}


def test_a_stage_whose_pods_are_all_deleted_is_made_anew_by_permission(
    roomy: Platform, tmp_path: Path
) -> None:
    story = Story(roomy, "anew", STEPS, (LOST_AT, THEN), **SPEC)
    story.stand_at(LOST_AT)
    wait_for(story.is_whole, "all pods")
    whole = ask_plugin(story, "approximate", "anew", "--yes")
    assert "every stage has a living cell" in whole.stderr
    assert whole.returncode == 1
    # As in a namespace of many jobs.
    roomy.allow_pods(1)
    lost = lose_stage(story)
    roomy.open_gates(LOST_AT)
    roomy.wait("anew", lambda job: (job or {})["status"]["state"] == "Waiting", "does not wait")

    tried = run_plugin(story, "approximate", "--dry-run")
    assert "stage 1 is made anew from stages 0 and 2" in tried
    assert "goes back to the seed, and loses 7 steps" in tried
    other = ask_plugin(story, "approximate", "anew", "--stage", "2", "--yes")
    assert "the permission is for stage 2, and lost is stage 1" in other.stderr
    assert condition_of(roomy.job("anew"), "Exact") == "True"
    run_plugin(story, "approximate", "--stage", "1", "--yes")
    assert "admin allows the next recovery" in run_plugin(story, "lineage")

    roomy.allow_pods(NUM_PODS)
    story.stand_at(THEN)
    wait_for(story.is_whole, "as many pods as the job needs, all of which the api knows")
    roomy.wait("anew", lambda job: condition_of(job, "Exact") == "False", "is exact")
    check_words(story, lost)
    roomy.open_gates(THEN)
    report = story.complete()

    assert (report["exact"], report["approximate_since"]) == (False, LOST_AT)
    job = localize(make_job(roomy, "twin", STEPS, **SPEC), DEEPER)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert report["digests"]["steps"] == twin(tmp_path, (LOST_AT, LOST))
