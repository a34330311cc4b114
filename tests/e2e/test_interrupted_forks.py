"""What ends, or comes back, in the middle of a re-initialisation changes no bit of what follows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e import matrix
from tests.e2e.cluster import Cluster, cluster, kill
from tests.e2e.harness import Layout, local_job, make_job
from tests.e2e.test_approximate import twin

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

LAYOUT = Layout(stages=3, lanes=2, shards_per_lane=2, spares=2, layers=6)
NUM_STEPS = 12
LOST_AT = 6
ALLOWED: dict[str, Any] = {"allowApproximate": True, "approximateAfterLostSteps": 1}
"""Steps that are lost count as far as they have been told by then: the newest may not be."""
STOPPED_S = 3
"""How long the maker of a stage stands still, so that what ends meanwhile ends in the middle."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


SWAPPED = {"order": "Swapped", "microBatches": 2}
"""The twin of both ends is the inner stage, whose cells guard what each end alone has."""


@dataclass(frozen=True, slots=True)
class Case:
    """A stage of which both cells are lost, and the pipeline."""

    stage: int
    pipeline: dict[str, Any]

    def __str__(self) -> str:
        return f"{'swapped' if self.pipeline else 'in-order'}-{self.stage}"

    @property
    def sources(self) -> tuple[int, ...]:
        """The stages of which it is made anew."""
        return (0, 2) if self.stage == 1 else (1,)


IN_ORDER, INNER, FIRST, LAST = Case(1, {}), Case(1, SWAPPED), Case(0, SWAPPED), Case(2, SWAPPED)


def loss(replica: int, stage: int) -> dict[str, Any]:
    return {
        "id": f"loss-{replica}",
        "at": {"step": LOST_AT, "phase": "backward"},
        "target": {"replica": replica, "stage": stage},
        "action": "kill-trainer",
    }


def killed(stage: int, during: str, replica: int = 0) -> dict[str, Any]:
    """Return the fault that ends a trainer in the recovery from the loss."""
    return {
        "at": {"during": during, "of": "loss-1"},
        "target": {"replica": replica, "stage": stage},
        "action": "kill-trainer",
    }


def run(
    directory: Path,
    corpus: Path,
    case: Case,
    faults: Sequence[dict[str, Any]],
    also: Sequence[int] = (),
) -> dict[str, Any]:
    """Lose both cells of a stage and what else is said; return the report, of one fork.

    Args:
        directory: of the run.
        corpus: that it learns.
        case: what is lost first.
        faults: what ends, or stands still, in the middle of the fork.
        also: stages whose cells these faults end.
    """
    job = make_job(LAYOUT, NUM_STEPS, corpus, recovery=ALLOWED, pipeline=case.pipeline)
    both = [loss(replica, case.stage) for replica in (0, 1)]
    with local_job(directory, job, [*both, *faults]) as running:
        report = running.report()
    assert {fault["state"] for fault in report["faults"]} == {"fired"}, report["faults"]
    assert (report["exact"], report["approximate_since"]) == (False, LOST_AT)
    assert report["steps"]["lost"] == 0, report["recoveries"]
    lost = sorted((case.stage, *also))
    (fork,) = report["lineage"]["forks"]
    assert [place["stage"] for place in fork["made"]["positions"]] == lost
    assert report["digests"]["steps"] == twin(directory, *((LOST_AT, stage) for stage in lost))
    return report


@pytest.mark.parametrize(
    ("case", "source"),
    [
        pytest.param(case, source, id=f"{case}-of-{source}")
        for case in (IN_ORDER, INNER, FIRST, LAST)
        for source in case.sources
    ],
)
def test_a_source_that_dies_as_it_is_copied_has_another_beside_it(
    tmp_path: Path, corpus: Path, case: Case, source: int
) -> None:
    """Of an end the source is its guard as well."""
    run(tmp_path, corpus, case, [killed(source, "heal-source")])


@pytest.mark.parametrize("case", [IN_ORDER, INNER, FIRST, LAST], ids=str)
def test_a_maker_that_dies_as_it_copies_is_followed_by_another(
    tmp_path: Path, corpus: Path, case: Case
) -> None:
    run(tmp_path, corpus, case, [killed(case.stage, "heal")])


@pytest.mark.parametrize(("first", "second"), [(FIRST, 2), (LAST, 0)])
def test_a_second_stage_that_is_lost_as_all_settle_is_made_anew_with_the_first(
    tmp_path: Path, corpus: Path, first: Case, second: int
) -> None:
    both = [killed(second, "settle", replica) for replica in (0, 1)]
    run(tmp_path, corpus, first, both, also=(second,))


@pytest.mark.parametrize("case", [IN_ORDER, INNER, FIRST], ids=str)
@pytest.mark.parametrize("process", ["api", "redis"])
def test_the_control_plane_dies_while_a_stage_is_made_anew(
    tmp_path: Path, corpus: Path, process: str, case: Case
) -> None:
    held = killed(case.stage, "heal") | {"id": "held", "action": "stop", "forSeconds": STOPPED_S}
    ended = {
        "id": "ended",
        "at": {"with": "held"},
        "target": {"process": process},
        "action": "kill",
    }
    report = run(tmp_path, corpus, case, [held, ended])

    told = [(event["reason"], event["message"]) for event in report["events"]]
    ordered = next(i for i, (_, what) in enumerate(told) if "(approximate)" in what)
    (died,) = (i for i, (_, what) in enumerate(told) if "injected fault ended fires" in what)
    made = next(i for i, (why, _) in enumerate(told) if why == "StageReinitialised")
    assert ordered < died < made, told


class Run:
    """A job of two replicas, whose pods a test holds one by one, at gates."""

    def __init__(self, made: Cluster, gates: Path) -> None:
        self.cluster = made
        self.gates = gates

    def reach(self, step: int) -> None:
        self.cluster.wait_until((self.gates / f"at-{step}").exists)

    def open(self, step: int) -> None:
        (self.gates / str(step)).touch()

    def lose_stage(self) -> dict[str, Any]:
        """Cut one cell of stage 1 off and kill the other; return the one that is cut off."""
        self.reach(LOST_AT)
        self.cluster.wait_for_members(CUT_LAYOUT.num_ranks)
        killed, holder = (m for m in self.cluster.members() if m["stage"] == 1)
        self.cluster.cut_off(holder)
        kill(killed)
        self.open(LOST_AT)
        return holder


CUT_LAYOUT = Layout(stages=3, lanes=2, shards_per_lane=2, spares=0, layers=6)
"""Without a spare, whoever comes back has a place to take."""
GATES = (LOST_AT, 9, 10)


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Iterator[Any]:
    """Starts the job, once it is said how long it waits for a holder that was cut off."""
    gates = tmp_path / "gates"
    gates.mkdir()
    with cluster(tmp_path) as made:

        def begin(wait_seconds: int) -> Run:
            recovery = ALLOWED | {"approximate": {"waitSeconds": wait_seconds}}
            detection = {"heartbeatTimeoutSeconds": 8}
            parts = {"recovery": recovery, "detection": detection}
            job = make_job(CUT_LAYOUT, NUM_STEPS, corpus, gates, GATES, **parts)
            (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
            made.start_job(job, CUT_LAYOUT.num_ranks)
            return Run(made, gates)

        yield begin


def test_a_holder_that_is_heard_in_time_keeps_the_job_exact(tmp_path: Path, start: Any) -> None:
    run: Run = start(wait_seconds=120)
    cluster, holder = run.cluster, run.lose_stage()
    cluster.wait_until(lambda: "is heard in time" in str(cluster.fetch()))
    cluster.let_back(holder)
    for gate in GATES:
        run.open(gate)
    report = cluster.report()

    assert report["exact"]
    assert {r["exact"] for r in report["recoveries"]} == {True}
    assert report["steps"]["lost"] == 0
    assert report["digests"]["steps"] == twin(tmp_path)


def test_a_holder_that_comes_back_after_the_fork_is_refused_by_name_and_changes_no_bit(
    tmp_path: Path, start: Any
) -> None:
    run: Run = start(wait_seconds=2)
    cluster, holder = run.cluster, run.lose_stage()
    run.reach(9)
    assert cluster.fetch("lineage")["approximate_since"] == LOST_AT
    cluster.let_back(holder)
    # It takes the place that it had, at the end of a step, and copies what the others have made.
    cluster.wait_for_members(CUT_LAYOUT.num_ranks, or_joining=True)
    run.open(9)
    run.reach(10)
    cluster.wait_for_members(CUT_LAYOUT.num_ranks)
    back = {m["incarnation"] for m in cluster.members()}
    run.open(10)
    report = cluster.report()

    assert holder["incarnation"] in back
    told = [line for line in cluster.logs(500).splitlines() if "does not count in" in line]
    assert any("its state of lineage 0 does not count in 1" in line for line in told), told
    assert (report["exact"], report["approximate_since"]) == (False, LOST_AT)
    assert report["steps"]["lost"] == 0
    assert report["digests"]["steps"] == twin(tmp_path, (LOST_AT, 1))
