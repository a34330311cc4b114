"""A pod of which the trainer half dies as a whole, as a container that runs out of memory does."""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, LocalJob, local_job, make_job, run_undisturbed

pytestmark = pytest.mark.slow

NUM_STEPS = 9
LAYOUT = Layout(stages=2, ranks_per_pod=2, lanes=2, shards_per_lane=2, spares=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Any:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), LAYOUT.least, NUM_STEPS, corpus)


def trainers(job: LocalJob) -> set[int]:
    return {m["pid"] for m in job.fetch("members") if m["pid"]}


@pytest.mark.chaos
def test_a_launcher_and_all_its_trainers_are_killed_and_the_pod_lives_on(
    tmp_path: Path, corpus: Path, undisturbed: Any
) -> None:
    """Twice, and the pod may host the quorum's gather: that stands."""
    gates = tmp_path / "gates"
    gates.mkdir()
    spec = make_job(LAYOUT, NUM_STEPS, corpus, gates, [2, 5])
    with local_job(tmp_path, spec) as job:
        log = tmp_path / "output.log"
        for number, step in enumerate((2, 5), 1):
            job.wait_for_members(step, LAYOUT.num_ranks)
            pods = {p["uid"]: p for p in job.fetch("pods")["pods"]}
            before = trainers(job)
            job.kill_one("launcher")
            job.wait_until(lambda n=number: log.read_text().count("another one is started") == n)
            # Not before the new ones are there, or the others finish while they come up.
            job.wait_until(lambda before=before: len(trainers(job) - before) == 2)
            (gates / str(step)).touch()
            assert {p["uid"] for p in job.fetch("pods")["pods"]} == set(pods)
        report = job.report()
    assert report["digests"] == undisturbed["digests"]
    assert report["steps"]["lost"] == 0
    masked = [r for r in report["recoveries"] if r["method"] == "mask"]
    assert sum(len(r["slots"]) for r in masked) == 4
    assert "PodGone" not in [event["reason"] for event in report["events"]]
    assert len(report["pods"]) == 2
