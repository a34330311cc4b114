"""Stages of which a cluster has one copy: their nodes and containers go, and no step is lost.

The bits are those of an undisturbed run in local mode without snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.cluster import building
from tests.cluster.client import Object
from tests.cluster.release import CHART, NUM_PODS, SYSTEM, Platform, make_job
from tests.cluster.stories import (
    Story,
    run_out_of_memory,
    run_undisturbed,
    supervisor_tags,
    tags_of,
    wait_for,
)
from tests.cluster.surfaces import count_metrics, events_of, recoveries_of, run_plugin

from mainstay_core.wire.recoveries import describe_replays

pytestmark = [pytest.mark.chaos, pytest.mark.root, pytest.mark.timeout(900)]
GATES = (7, 13, 19)
STEPS = 22
STAGES = 2
SPEC: dict[str, Any] = {
    "training": {"steps": STEPS, "seed": 11, "lanes": 2, "shardsPerLane": 1},
    "parallelism": {"replicas": 1, "stages": STAGES},
    "spares": {"replicas": 1},
    "detection": {"heartbeatTimeoutSeconds": 10},
    "snapshots": {"enabled": True, "window": 2, "peers": 1, "memory": "64Mi"},
    "protection": {"domains": 2},
}


@pytest.fixture(scope="module")
def expected(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The digests of an undisturbed run."""
    job = make_job(platform, "undisturbed", STEPS, **SPEC)
    return run_undisturbed(job, tmp_path_factory.mktemp("undisturbed"))["digests"]


@pytest.fixture
def roomy(platform: Platform) -> Platform:
    """The release, with three living nodes and a quota that holds nobody back."""
    platform.cluster.scale(3)
    platform.allow_pods(NUM_PODS)
    return platform


@pytest.fixture
def upgradable(roomy: Platform) -> Iterator[Platform]:
    """The release, which is what it was again when the test ends."""
    yield roomy
    roomy.chart = CHART
    roomy.install()


def wait_until_covered(story: Story, version: int) -> Object:
    """Wait until the status says that each stage survives any loss of a pod or a node.

    Args:
        story: of the job.
        version: at which the newest complete window begins at the earliest.

    Returns:
        What the status says of snapshots.
    """

    def shown(job: Object | None) -> Object:
        found: Object = (job or {}).get("status", {}).get("protection", {}).get("snapshots", {})
        return found

    def is_covered(job: Object | None) -> bool:
        told = shown(job)
        counts = [told.get(key) for key in ("covered", "survivePod", "surviveDomain", "positions")]
        window = str(told.get("window", "-1")).partition(" ")[0]
        return counts == [STAGES] * len(counts) and int(window) >= version

    job = story.platform.wait(story.name, is_covered, "not all stages are covered")
    return shown(job)


def check_words(story: Story, told: Sequence[str]) -> None:
    """Compare what status, Events, timeline and metrics say of a job's recoveries.

    Args:
        story: of a job in which every recovery was a replay.
        told: what the status said of each, in order.
    """
    found = recoveries_of(story)
    assert [(r.method.value, r.lost_steps, r.exact) for r in found] == [
        ("replay", 0, True) for _ in told
    ], found
    assert [r.reason for r in found] == list(told)
    timeline, events = run_plugin(story, "timeline"), events_of(story)
    for recovery in found:
        decided, mark, end = recovery.reason.partition(f"; {describe_replays(recovery.replays)}")
        assert (bool(mark), end) == (True, "")
        assert f"replay (exact): {recovery.reason}" in timeline
        ours = [(reason, text) for reason, text in events if str(recovery.quorum) in text]
        assert any(reason == "Recovered" and recovery.reason in text for reason, text in ours), ours
        # How it was done was not known yet.
        assert any(reason == "RecoveryReplay" and decided in text for reason, text in ours), ours
    replays = [replay for recovery in found for replay in recovery.replays]
    assert replays
    assert {replay.kind for replay in replays} == {"gradients"}
    assert count_metrics(
        story,
        "mainstay_recoveries_total",
        "mainstay_steps_lost_total",
        "mainstay_steps_replayed_total",
    ) == {
        ("mainstay_recoveries_total", "replay"): len(told),
        ("mainstay_steps_replayed_total", "gradients"): sum(r.steps for r in replays),
    }


def test_the_only_copy_of_a_stage_is_cut_off_and_another_runs_out_of_memory(
    roomy: Platform, expected: Any
) -> None:
    story = Story(roomy, "only", STEPS, GATES, **SPEC)
    story.stand_at(7)
    assert len({pod["spec"]["nodeName"] for pod in roomy.pods("only")}) == story.num_pods
    wait_until_covered(story, 0)

    lost = story.serving(but_on=[roomy.home])
    with roomy.cluster.cut_off(lost["spec"]["nodeName"]):
        story.go_on(7, then=13)
        assert lost["metadata"]["uid"] not in story.members()
        told = [story.last_reason()]
    # Its trainer goes on where it was and finds that it is no member any more. One of the two pods
    # that would be the spare now is ended.
    wait_for(story.is_whole, "as many pods as the job needs, all of which the api knows")
    wait_until_covered(story, 7)

    victim = story.serving()
    run_out_of_memory(roomy, victim)
    story.go_on(13, then=19)
    told.append(story.last_reason())
    # The kubelet says so later than the trainer is back.
    wait_for(lambda: story.restarts(victim)["trainer"] == 1, "the trainer's restart")
    assert story.restarts(victim)["supervisor"] == 0
    wait_until_covered(story, 13)
    check_words(story, told)
    assert "OOMKilled" in {reason for reason, _ in events_of(story)}

    roomy.open_gates(19)
    assert story.complete()["digests"] == expected


def test_an_upgrade_of_the_chart_leaves_snapshots_as_they_are(
    upgradable: Platform, expected: Any
) -> None:
    story = Story(upgradable, "kept", STEPS, GATES, **SPEC)
    story.stand_at(7)
    wait_until_covered(story, 0)
    pods = [pod["metadata"]["uid"] for pod in upgradable.pods("kept")]
    operator = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/mainstay-operator"
    generation = upgradable.api.get(operator)["metadata"]["generation"]
    with ThreadPoolExecutor(max_workers=1) as pool:
        upgraded = pool.submit(upgradable.upgrade, "0.3.0")
        upgradable.api.wait(operator, lambda found: found["metadata"]["generation"] > generation)
        # Steps go on, and windows with them, while operator and api are replaced.
        upgradable.open_gates(7)
        story.stand_at(13)
        upgraded.result()
    for component in ("operator", "api"):
        assert tags_of(upgradable.system(component)) == {building.NEXT_TAG}
    # What a replica of the api has counted goes with it. So the old ones must not decide any more.
    wait_for(
        lambda: tags_of(upgradable.system("api", leaving=True)) == {building.NEXT_TAG},
        "the end of the api's old replicas",
    )
    assert [pod["metadata"]["uid"] for pod in upgradable.pods("kept")] == pods
    wait_until_covered(story, 7)
    assert upgradable.job("kept")["status"]["recovery"]["total"] == 0

    # What the new api and operator make of a loss. A pod that is deleted may still hand its work
    # over, also without grace: the kubelet tells it to end before it kills it.
    run_out_of_memory(upgradable, story.serving())
    story.go_on(13, then=19)
    wait_until_covered(story, 13)
    assert supervisor_tags(upgradable.pods("kept")) == {building.TAG}
    check_words(story, [story.last_reason()])
    upgradable.open_gates(19)
    assert story.complete()["digests"] == expected
