"""A stage whose every copy is gone is made anew from its neighbours, by permission, and alike each
time."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import MAINSTAY, TINY_MODEL, Layout, LocalJob, local_job, make_job

from mainstay_cli.base.comparison import compare_reports

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

LAYOUT = Layout(stages=4, lanes=1, shards_per_lane=2, spares=1)
NUM_STEPS = 12
LOST_AT = 8
ALLOWED = {"allowApproximate": True, "approximateAfterLostSteps": 1}
"""Steps that are lost count as far as they have been told by then: the newest may not be."""
SWAPPED = {"order": "Swapped", "microBatches": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


def kill(stage: int, step: int = LOST_AT, phase: str = "backward") -> dict[str, Any]:
    return {
        "at": {"step": step, "phase": phase},
        "target": {"replica": 0, "stage": stage},
        "action": "kill-trainer",
    }


def run(
    directory: Path,
    corpus: Path,
    faults: list[dict[str, Any]],
    layout: Layout = LAYOUT,
    options: Sequence[str] = (),
    checkpoint: dict[str, Any] | None = None,
    pipeline: dict[str, Any] | None = None,
    fails: bool = False,
    layers: int = 8,
    **recovery: Any,
) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    parts = {"checkpoint": checkpoint or {}, "pipeline": pipeline or {}}
    job = make_job(layout, NUM_STEPS, corpus, recovery=recovery, **parts)
    config = TINY_MODEL | {"layers": layers, "data": {"path": str(corpus)}}
    job["spec"]["workload"]["config"] = config
    with local_job(directory, job, faults, *options) as running:
        if not fails:
            return running.report()
        assert running.wait() != 0, running.tails()
        return dict(json.loads((directory / "report.json").read_text()))


def check_forked(report: dict[str, Any]) -> None:
    """The one recovery was approximate, and no step was lost."""
    (recovery,) = report["recoveries"]
    assert (recovery["method"], recovery["exact"]) == ("approximate", False), recovery
    assert report["steps"]["lost"] == 0
    assert report["digests"]["final"]["history"]
    assert (report["exact"], report["approximate_since"]) == (False, LOST_AT)


def states_after(report: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each fork has led to, and of what."""
    return [fork["outcome"]["states"] for fork in report["lineage"]["forks"]]


def twin(directory: Path, *losses: tuple[int, int]) -> list[str]:
    """The digests of the run in ``directory`` with its (steps, stage) losses, in one process."""
    module, job = "tests.e2e.staged_twin", str(directory / "job.yaml")
    done = subprocess.run(
        [sys.executable, "-m", module, job, json.dumps(losses)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    digests: list[str] = json.loads(done.stdout)
    return digests


def test_a_lost_inner_stage_is_made_anew_with_the_bits_of_the_experiments_process(
    tmp_path: Path, corpus: Path
) -> None:
    report = run(tmp_path, corpus, [kill(1)], **ALLOWED)

    check_forked(report)
    steps, undisturbed = report["digests"]["steps"], twin(tmp_path)
    assert steps == twin(tmp_path, (LOST_AT, 1))
    assert steps[:LOST_AT] == undisturbed[:LOST_AT]
    assert not set(steps[LOST_AT:]) & set(undisturbed[LOST_AT:])
    (fork,), (recovery,) = report["lineage"]["forks"], report["recoveries"]
    assert all(norm > 0 for b in fork["made"]["positions"][0]["blocks"] for norm in b["norms_sq"])
    assert fork["outcome"]["quorum"] == recovery["quorum"]
    assert [state["stage"] for state in fork["outcome"]["states"]] == [0, 1, 2]


@pytest.mark.chaos
def test_a_run_that_loses_nothing_makes_the_forks_of_another_runs_report(
    tmp_path: Path, corpus: Path
) -> None:
    """Two forks at different steps; the run that repeats them is killed here and there itself."""
    first = run(tmp_path, corpus, [kill(1, 6), kill(2, 10)], **ALLOWED)
    options = ("--repeat-lineage", str(tmp_path / "report.json"))

    again = run(tmp_path / "again", corpus, [], options=options)
    disturbed = run(tmp_path / "disturbed", corpus, [kill(3, 8)], LAYOUT, options, **ALLOWED)

    assert {r["fault"] for r in again["recoveries"]} == {"nothing has failed"}
    assert [r["method"] for r in again["recoveries"]] == ["approximate", "approximate"]
    assert compare_reports(first, again) == []
    assert compare_reports(first, disturbed) == []
    assert states_after(first) == states_after(again) == states_after(disturbed)


@pytest.mark.chaos
def test_a_lineage_that_led_to_other_digests_is_refused_before_its_step_is_applied(
    tmp_path: Path, corpus: Path
) -> None:
    report = run(tmp_path, corpus, [kill(1)], **ALLOWED)
    made = report["lineage"]["forks"][0]["outcome"]["states"][1]
    made["masters"] = made["masters"][::-1]
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(report))

    options = ("--repeat-lineage", str(path))
    again = run(tmp_path / "again", corpus, [], options=options, fails=True)

    assert again["state"] == "failed"
    assert again["steps"]["committed"] <= LOST_AT
    told = f"has stage 1 with the digest {made['masters']} after its fork at step {LOST_AT}"
    assert told in again["reason"]


@pytest.mark.chaos
def test_averaged_moments_have_the_bits_of_the_experiments_process_and_are_repeated(
    tmp_path: Path, corpus: Path
) -> None:
    averaged = ALLOWED | {"approximate": {"optimizerState": "Average"}}
    first = run(tmp_path, corpus, [kill(2)], **averaged)
    options = ("--repeat-lineage", str(tmp_path / "report.json"))
    again = run(tmp_path / "again", corpus, [], options=options)

    check_forked(first)
    assert first["digests"]["steps"] == twin(tmp_path, (LOST_AT, 2))
    (place,) = first["lineage"]["forks"][0]["made"]["positions"]
    assert place["optimizer_state"] == "Average"
    assert compare_reports(first, again) == []


@pytest.mark.chaos
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_swapped_pipeline_that_loses_a_stage_has_the_bits_of_the_experiments_process(
    tmp_path: Path, corpus: Path, stage: int
) -> None:
    """An end is made of its twin and a guard, an inner stage of both neighbours."""
    report = run(tmp_path, corpus, [kill(stage)], pipeline=SWAPPED, **ALLOWED)

    check_forked(report)
    assert report["digests"]["steps"] == twin(tmp_path, (LOST_AT, stage))


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("lost", "pipeline"),
    [
        pytest.param((1, 3), {}, id="in order"),
        pytest.param((0, 2), SWAPPED, id="swapped"),
    ],
)
def test_stages_apart_that_are_lost_at_once_are_made_anew_together(
    tmp_path: Path, corpus: Path, lost: tuple[int, int], pipeline: dict[str, Any]
) -> None:
    layout = Layout(stages=5, lanes=1, shards_per_lane=2, spares=2)
    # Each dies as it begins the step: neither waits for the other.
    both = [kill(stage) | {"at": {"step": LOST_AT}} for stage in lost]
    report = run(tmp_path, corpus, both, layout, pipeline=pipeline, **ALLOWED)

    assert (report["exact"], report["approximate_since"]) == (False, LOST_AT)
    assert report["steps"]["lost"] == 0
    (fork,) = report["lineage"]["forks"]
    assert [place["stage"] for place in fork["made"]["positions"]] == [*lost]
    assert report["digests"]["steps"] == twin(tmp_path, *((LOST_AT, stage) for stage in lost))


@pytest.mark.chaos
@pytest.mark.parametrize("end", [0, 6])
def test_an_end_and_two_inner_stages_of_seven_are_made_anew_where_stages_differ_in_layers(
    tmp_path: Path, corpus: Path, end: int
) -> None:
    """The stages have 1, 1, 2, 2, 1, 1 and 1 layers."""
    layout = Layout(stages=7, lanes=1, shards_per_lane=2, spares=3)
    lost = sorted((end, 2, 4))
    all_lost = [kill(stage) | {"at": {"step": LOST_AT}} for stage in lost]
    report = run(tmp_path, corpus, all_lost, layout, pipeline=SWAPPED, layers=9, **ALLOWED)

    assert (report["exact"], report["approximate_since"]) == (False, LOST_AT)
    assert report["steps"]["lost"] == 0
    places = [place for f in report["lineage"]["forks"] for place in f["made"]["positions"]]
    assert sorted(place["stage"] for place in places) == lost
    sources = {p["stage"]: {s["stage"] for b in p["blocks"] for s in b["sources"]} for p in places}
    assert sources == {end: {1 if end == 0 else 5}, 2: {1, 3}, 4: {3, 5}}
    numbers = {p["stage"]: len({b["block"] for b in p["blocks"]}) for p in places}
    assert numbers == {end: 2, 2: 2, 4: 1}
    assert report["digests"]["steps"] == twin(tmp_path, *((LOST_AT, stage) for stage in lost))


@pytest.mark.chaos
def test_a_stage_between_others_of_more_and_of_fewer_layers_is_made_anew(
    tmp_path: Path, corpus: Path
) -> None:
    """Of stages with 3, 3 and 2 layers the second is lost: a layer of the third stands for two."""
    layout = Layout(stages=3, lanes=1, shards_per_lane=2, spares=1)
    report = run(tmp_path, corpus, [kill(1)], layout, pipeline={"cut": "Equal"}, **ALLOWED)

    check_forked(report)
    blocks = report["lineage"]["forks"][0]["made"]["positions"][0]["blocks"]
    taken = [[s["block"] for b in blocks for s in b["sources"] if s["stage"] == n] for n in (0, 2)]
    assert [(len(names), len({*names})) for names in taken] == [(3, 3), (3, 2)]
    assert report["digests"]["steps"] == twin(tmp_path, (LOST_AT, 1))


@pytest.mark.chaos
def test_the_same_loss_at_the_same_step_has_the_same_bits(tmp_path: Path, corpus: Path) -> None:
    first = run(tmp_path / "first", corpus, [kill(1)], **ALLOWED)
    second = run(tmp_path / "second", corpus, [kill(1, phase="forward")], **ALLOWED)

    check_forked(first)
    check_forked(second)
    assert compare_reports(first, second) == []


@pytest.mark.chaos
def test_an_end_of_the_pipeline_has_the_ladders_next_answer(tmp_path: Path, corpus: Path) -> None:
    report = run(tmp_path, corpus, [kill(0)], **ALLOWED)

    (recovery,) = report["recoveries"]
    assert (recovery["method"], recovery["exact"]) == ("restart", True)
    assert "for want of anything newer" in recovery["reason"]
    assert report["exact"]
    assert report["digests"]["steps"] == twin(tmp_path)


@pytest.mark.chaos
def test_an_end_loads_a_checkpoint_of_its_own_alone(tmp_path: Path, corpus: Path) -> None:
    """And a run that loses nothing repeats that, from its own checkpoint of the same step."""
    allowed = {"allowApproximate": True, "approximateAfterLostSteps": 1}
    allowed |= {"approximate": {"staleSteps": 4}}
    first = run(tmp_path, corpus, [kill(0)], checkpoint={"everySteps": 5}, **allowed)
    options = ("--repeat-lineage", str(tmp_path / "report.json"))
    again = run(tmp_path / "again", corpus, [], options=options, checkpoint={"everySteps": 5})

    check_forked(first)
    assert "made anew from its own copy of step 5, 3 steps old" in first["recoveries"][0]["reason"]
    assert compare_reports(first, again) == []


@pytest.mark.chaos
@pytest.mark.parametrize("stage", [1, 2])
def test_a_second_loss_after_a_fork_is_another_fork(
    tmp_path: Path, corpus: Path, stage: int
) -> None:
    report = run(tmp_path, corpus, [kill(1, 6), kill(stage, 10)], **ALLOWED)

    assert [r["method"] for r in report["recoveries"]] == ["approximate", "approximate"]
    assert report["approximate_since"] == 6
    assert report["steps"]["lost"] == 0
    assert report["digests"]["steps"] == twin(tmp_path, (6, 1), (10, stage))


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("stage", "phase", "made"),
    [
        pytest.param(1, "heal", [1], id="the maker dies as it copies"),
        pytest.param(3, "settle", [], id="an end dies as all settle: the job goes back"),
        pytest.param(2, "heal-source", [], id="a source dies as it is copied: the job goes back"),
    ],
)
def test_a_further_loss_in_the_middle_of_a_fork(
    tmp_path: Path, corpus: Path, stage: int, phase: str, made: list[int]
) -> None:
    report = run(tmp_path, corpus, [kill(1), kill(stage, phase=phase)], **ALLOWED)

    methods = [r["method"] for r in report["recoveries"]]
    assert methods == (["approximate", "approximate"] if made else ["approximate", "restart"])
    assert report["exact"] == (not made)
    assert report["digests"]["steps"] == twin(tmp_path, *((LOST_AT, one) for one in made))


@pytest.mark.chaos
def test_replicas_make_the_same_stage_and_agree(tmp_path: Path, corpus: Path) -> None:
    """Both cells of a stage are lost: each of their successors makes its own copy."""
    layout = Layout(stages=3, lanes=2, shards_per_lane=2, spares=2)
    both = [kill(1), kill(1) | {"target": {"replica": 1, "stage": 1}}]

    report = run(tmp_path, corpus, both, layout, **ALLOWED)

    assert not report["exact"]
    assert report["approximate_since"] == LOST_AT
    assert report["steps"]["lost"] == 0
    assert report["digests"]["steps"] == twin(tmp_path, (LOST_AT, 1))


@pytest.mark.chaos
@pytest.mark.parametrize("replay", ["Gradients", "Boundary"])
def test_what_pods_keep_comes_first_before_a_fork_and_after_it(
    tmp_path: Path, corpus: Path, replay: str
) -> None:
    """A pod goes with the only copy of its stage; later a trainer of it goes, and the copy stays.

    So the job has one fork, and the replay applies its steps as fast as the made stage learns.
    """
    layout = Layout(stages=4, lanes=1, shards_per_lane=2, spares=2)
    gone = kill(1, 5) | {"action": "kill-pod"}
    snapshots = {"enabled": True, "peers": 0, "window": 2, "replay": replay, "memory": "64Mi"}
    allowed = ALLOWED | {"approximateAfterLostSteps": 1}
    job = make_job(layout, NUM_STEPS, corpus, recovery=allowed, snapshots=snapshots)
    job["spec"]["workload"]["config"] = TINY_MODEL | {"layers": 8, "data": {"path": str(corpus)}}
    with local_job(tmp_path, job, [gone, kill(1, 10)]) as running:
        report = running.report()

    methods = [r["method"] for r in report["recoveries"]]
    assert methods[-2:] == ["approximate", "replay"], report["recoveries"]
    assert (report["approximate_since"], report["steps"]["lost"]) == (5, 0)
    assert report["digests"]["steps"] == twin(tmp_path, (5, 1))


def answer(running: LocalJob, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAINSTAY, *arguments], capture_output=True, text=True, env=running.environment
    )


@pytest.mark.chaos
def test_a_person_allows_one_recovery_of_a_job_that_waits(tmp_path: Path, corpus: Path) -> None:
    """Nobody takes the lost place, as its slot is worn out and there is no spare."""
    layout = Layout(stages=4, lanes=1, shards_per_lane=2, spares=0)
    patient = {"startupDeadlineSeconds": 600}
    job = make_job(layout, NUM_STEPS, corpus, recovery={"maxRestarts": 0}, scheduling=patient)
    job["spec"]["workload"]["config"] = TINY_MODEL | {"layers": 8, "data": {"path": str(corpus)}}
    with local_job(tmp_path, job, [kill(1)]) as running:
        running.wait_until(lambda: running.fetch()["state"] == "waiting")
        other = answer(running, "approximate", "tiny", "--stage", "2", "--yes")
        assert "the permission is for stage 2, and lost is stage 1" in other.stderr
        unasked = answer(running, "approximate", "tiny")
        assert "--yes: is missing" in unasked.stderr
        tried = answer(running, "approximate", "tiny", "--dry-run")
        assert "stage 1 is made anew from stages 0 and 2" in tried.stdout
        assert running.fetch("lineage")["permitted_by"] == ""
        given = answer(running, "approximate", "tiny", "--stage", "1", "--yes")
        assert given.returncode == 0, given.stderr
        assert running.fetch("lineage")["permitted_by"] == "token"
        (lost,) = (m["slot"] for m in running.fetch("members") if m["stage"] == 1)
        # In the place of a pod that leaves another is made, whose trainer takes the stage.
        answer(running, "drain", "tiny", lost.partition("/")[0])
        report = running.report()

    check_forked(report)
    assert report["recoveries"][0]["allowed_by"] == "token"
    assert report["digests"]["steps"] == twin(tmp_path, (LOST_AT, 1))


@pytest.mark.chaos
def test_a_person_allows_one_recovery_ahead_of_the_losses(tmp_path: Path, corpus: Path) -> None:
    """The job has a trainer to spare, so it never waits. The api ends after it was told.

    A loss of few steps is no use of the permission; the next one is; the last one comes after it.
    """
    layout = Layout(stages=4, lanes=1, shards_per_lane=2, spares=2)
    gates, gate = tmp_path / "gates", 2
    gates.mkdir()
    job = make_job(layout, NUM_STEPS, corpus, gates, [gate])
    config = TINY_MODEL | {"layers": 8, "data": {"path": str(corpus)}}
    job["spec"]["workload"]["config"] = config
    first = kill(1, 3) | {"id": "first"}
    api_ends = {"at": {"with": "first"}, "target": {"process": "api"}, "action": "kill"}
    faults = [first, api_ends, kill(1, LOST_AT), kill(2, 10)]
    with local_job(tmp_path, job, faults) as running:
        running.wait_for_members(gate, layout.num_ranks)
        whole = answer(running, "approximate", "tiny", "--yes")
        assert "the job is whole" in whole.stderr
        # Of what is lost the newest steps may not have been told by then.
        limit = ("--ahead", "--after-lost-steps", "3")
        given = answer(running, "approximate", "tiny", *limit, "--yes")
        assert given.returncode == 0, given.stderr
        assert "for one recovery of stages 0 to 3 that would lose more than 3" in given.stdout
        taken = answer(running, "approximate", "tiny", "--withdraw")
        assert "token takes back what token has allowed" in taken.stdout, taken.stderr
        answer(running, "approximate", "tiny", *limit, "--yes")
        assert "permission: given by token at " in answer(running, "status", "tiny").stdout
        (gates / str(gate)).touch()
        report = running.report()

    told = [(r["method"], r.get("allowed_by", "")) for r in report["recoveries"]]
    of_losses = [each for each in told if each[0] in ("restart", "approximate")]
    assert of_losses == [("restart", ""), ("approximate", "token"), ("restart", "")], told
    # The last loss sends the job back to the seed, and so to an exact course.
    assert report["exact"]
    assert report["digests"]["steps"] == twin(tmp_path)
