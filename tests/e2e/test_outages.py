"""The control plane goes away, in mid-run and in mid-recovery: the bits are those of a quiet run.

Protocol section 9. One run per kind of trouble; each trouble comes while the job stands at a gate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.cluster import Cluster, cluster, kill
from tests.e2e.harness import Layout, make_job, run_undisturbed

from mainstay_core.coordinator.state import MAX_STEP_SECONDS, median
from mainstay_core.wire.recoveries import STAGES

pytestmark = pytest.mark.slow

LAYOUT = Layout(stages=1, lanes=3, shards_per_lane=2, spares=0)
NUM_STEPS = 16
GATES = (3, 4, 6, 7, 9, 10, 12, 13)
"""In pairs: who comes back joins at the end of the first one's step."""
HEARTBEAT_TIMEOUT_S = 4
HEARTBEAT_S = 1.0
"""The default: a last one may be under way when a pod is cut off."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Any:
    report = run_undisturbed(tmp_path_factory.mktemp("quiet"), LAYOUT.least, NUM_STEPS, corpus)
    return report["digests"]


class Run:
    """A job that stands at its gates."""

    def __init__(self, made: Cluster, gates: Path) -> None:
        self.cluster = made
        self.gates = gates

    def stand_at(self, step: int) -> list[dict[str, Any]]:
        """Return the members once all places are taken and the job stands at a pair's second gate.

        Args:
            step: of the pair's first gate.
        """
        self.reach(step)
        self.cluster.wait_for_members(LAYOUT.num_cells, or_joining=True)
        self.open(step)
        self.reach(step + 1)
        self.cluster.wait_for_members(LAYOUT.num_cells)
        return self.cluster.members()

    def reach(self, step: int) -> None:
        """Wait until the trainers are at a gate, whoever knows of it."""
        self.cluster.wait_until((self.gates / f"at-{step}").exists)

    def open(self, step: int) -> None:
        (self.gates / str(step)).touch()

    def finish(self, expected: Any) -> dict[str, Any]:
        report = self.cluster.report()
        assert report["digests"] == expected
        assert report["steps"]["lost"] == 0
        return report


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> Iterator[Run]:
    gates = tmp_path / "gates"
    gates.mkdir()
    spec = make_job(
        LAYOUT,
        NUM_STEPS,
        corpus,
        gates,
        GATES,
        detection={"heartbeatTimeoutSeconds": HEARTBEAT_TIMEOUT_S},
    )
    with cluster(tmp_path) as made:
        made.start_job(spec, LAYOUT.num_cells)
        yield Run(made, gates)


def silences(cluster: Cluster) -> list[dict[str, Any]]:
    """The recoveries from pods that fell silent."""
    return [r for r in cluster.fetch("recoveries") if "silent for" in r["fault"]]


def check_times(cluster: Cluster, silent: dict[str, Any], cut_s: float) -> None:
    """Compare what is told of a silent pod's recovery with what one rank wrote into the ledger.

    Args:
        cluster: of the job, which is over.
        silent: the recovery.
        cut_s: wall clock when nothing more was heard of the pod.
    """
    entries = cluster.fetch("ledger")
    next_commit = next(e for e in entries if e["quorum"]["id"] >= silent["quorum"]["id"])
    before = entries[: entries.index(next_commit)]
    gap_s = next_commit["committed_at_s"] - before[-1]["committed_at_s"]
    times = [silent[f"{stage}_s"] for stage in STAGES]
    assert min(times) >= 0
    # The last sign of life: after the last commit, which needed the pod, and no beat after the cut.
    assert before[-1]["committed_at_s"] <= silent["started_at_s"] <= cut_s + HEARTBEAT_S
    # It is noticed a timeout after the last heartbeat. A commit after that, which needed the pod's
    # vote, is a later sign of life: so from that sign it may take less.
    assert silent["started_at_s"] + silent["detect_s"] > cut_s
    assert silent["detect_s"] < sum(times) <= gap_s
    ended_s = silent["started_at_s"] + sum(times)
    assert ended_s == pytest.approx(next_commit["committed_at_s"], abs=1e-3)
    later_s = gap_s - median(e["step_s"] for e in before)
    assert silent["first_commit_after_s"] == pytest.approx(later_s, abs=1e-3)
    # All steps are among those that the median is taken of.
    assert len(entries) <= MAX_STEP_SECONDS
    useful_s = len(entries) * median(e["step_s"] for e in entries)
    began_s = next(e["at_s"] for e in cluster.fetch("events") if e["reason"] == "PlanPublished")
    ettr = useful_s / (entries[-1]["committed_at_s"] - began_s)
    assert cluster.fetch("summary")["training"]["ettr"] == pytest.approx(ettr, rel=0.01)


def outlast_the_timeout() -> None:
    """An outage has a length: this one is longer than any pod may be silent."""
    time.sleep(HEARTBEAT_TIMEOUT_S + 0.5)


@pytest.mark.chaos
def test_redis_hangs_for_a_minute_in_mid_recovery(run: Run, expected: Any) -> None:
    cluster = run.cluster
    members = run.stand_at(3)
    quorum = cluster.quorum()
    kill(members[1])
    cluster.wait_until(lambda: cluster.quorum() > quorum)
    cluster.redis.pause()
    # The survivors need nobody to go on, as far as the next gate.
    run.open(4)
    run.reach(6)
    run.open(6)
    run.reach(7)
    kill(members[2])
    time.sleep(60.0)
    cluster.redis.resume()
    run.open(7)
    for gate in (9, 12):
        run.stand_at(gate)
        run.open(gate + 1)
    report = run.finish(expected)
    gone = [event for event in report["events"] if event["reason"] == "PodGone"]
    assert gone == [], "nobody is evicted by an outage"


@pytest.mark.chaos
def test_redis_is_emptied_and_falls_back(run: Run, expected: Any) -> None:
    cluster = run.cluster
    # Emptied while nothing else happens.
    before = {m["pid"] for m in run.stand_at(3)}
    quorum = cluster.quorum()
    cluster.redis.lose()
    cluster.wait_until(lambda: cluster.quorum() == quorum)
    run.open(4)
    members = run.stand_at(6)
    assert {m["pid"] for m in members} == before, "nobody was evicted"
    assert "StoreRestored" in cluster.reasons()
    # Emptied, and somebody dies before it is restored.
    cluster.redis.stop()
    kill(members[1])
    cluster.redis.lose()
    run.open(7)
    run.stand_at(9)
    backup = cluster.redis.back_up()
    # Fallen back over two recoveries: ids go on above what the supervisors hold.
    kill(cluster.members()[2])
    cluster.wait_until(lambda: cluster.quorum() > quorum + 2)
    run.open(10)
    run.stand_at(12)
    newest = cluster.quorum()
    cluster.redis.lose(backup)
    cluster.wait_until(lambda: cluster.quorum() == newest)
    kill(cluster.members()[0])
    cluster.wait_until(lambda: cluster.quorum() > newest)
    run.open(13)
    report = run.finish(expected)
    # The history itself was lost with the store: of the three, those since the second are told.
    assert [event["reason"] for event in report["events"]].count("StoreRestored") == 2


@pytest.mark.chaos
def test_the_api_dies_around_a_decision(run: Run, expected: Any) -> None:
    cluster = run.cluster
    # Before the decision: it is told of a death that it cannot write down.
    members = run.stand_at(3)
    quorum = cluster.quorum()
    cluster.redis.pause()
    kill(members[1])
    run.open(4)
    outlast_the_timeout()
    cluster.api.kill()
    cluster.redis.resume()
    cluster.api.start()
    cluster.wait_until(lambda: cluster.quorum() > quorum)
    # Between compare-and-set and publication: the plan is stored, and nobody has it.
    members = run.stand_at(6)
    quorum = cluster.quorum()
    for relay in cluster.relays.values():
        relay.hold()
    kill(members[2])
    cluster.wait_until(lambda: cluster.quorum() > quorum)
    cluster.api.kill()
    for relay in cluster.relays.values():
        relay.drop()
    cluster.api.start()
    run.open(7)
    # After one supervisor has got the plan: the others get it from him, with no api at all.
    members = run.stand_at(9)
    quorum = cluster.quorum()
    told = members[0]["pod"]
    for pod, relay in cluster.relays.items():
        if pod != told:
            relay.hold()
    kill(members[1])
    cluster.wait_until(lambda: cluster.quorum() > quorum)
    log = cluster.directory / f"{told}.log"
    cluster.wait_until(lambda: f"q{quorum + 1}-" in log.read_text())
    cluster.api.kill()
    for relay in cluster.relays.values():
        relay.drop()
    run.open(10)
    run.reach(12)
    run.open(12)
    run.reach(13)
    # Still without an api, and without Redis: what dies now waits for both.
    cluster.redis.stop()
    kill(members[2])
    outlast_the_timeout()
    cluster.redis.start()
    cluster.api.start()
    run.open(13)
    report = run.finish(expected)
    gone = [event for event in report["events"] if event["reason"] == "PodGone"]
    assert gone == [], "nobody is evicted by an outage"


@pytest.mark.chaos
def test_the_times_of_a_silent_pods_recovery_are_those_of_the_ledger(
    run: Run, expected: Any
) -> None:
    """A node without power: no socket ends, and the others wait for its pod."""
    cluster = run.cluster
    members = run.stand_at(3)
    cluster.cut_off(members[1])
    cut_s = time.time()
    run.open(4)
    cluster.wait_until(lambda: any(r["done"] for r in silences(cluster)))
    cluster.let_back(members[1])
    for gate in GATES:
        run.open(gate)
    run.finish(expected)
    (silent,) = silences(cluster)
    check_times(cluster, silent, cut_s)
