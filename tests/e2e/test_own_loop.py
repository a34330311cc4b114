"""A training loop of the user's own: killed in mid-work and in reduce, it keeps its bits."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.failing_loop import FAILS_AT, TEXT
from tests.e2e.harness import Layout, local_job, make_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
FAILING = Path(__file__).parent / "failing_loop.py"
NUM_STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


def loop_job(corpus: Path, steps: int, **spec: Any) -> dict[str, Any]:
    layout = Layout(stages=1, lanes=3, shards_per_lane=2, spares=1)
    job = make_job(layout, steps, corpus, pipeline={"microBatches": 2})
    job["spec"]["workload"] = {
        "entrypoint": f"{EXAMPLE}:train",
        "config": {"width": 32, "sequence": 16, "samples": 2, "path": str(corpus)},
    }
    job["spec"] |= spec
    return job


def run(
    directory: Path, job: dict[str, Any], faults: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    directory.mkdir()
    with local_job(directory, job, faults or []) as running:
        return running.report()


def kill(step: int, phase: str, replica: int, action: str = "kill-trainer") -> dict[str, Any]:
    target = {"replica": replica, "stage": 0}
    return {"at": {"step": step, "phase": phase}, "target": target, "action": action}


@pytest.mark.slow
def test_kills_in_mid_work_and_in_reduce_leave_no_trace_in_the_bits(
    tmp_path: Path, corpus: Path
) -> None:
    expected = run(tmp_path / "alone", loop_job(corpus, NUM_STEPS, parallelism={"replicas": 1}))
    faults = [kill(2, "backward", 1), kill(6, "reduce", 0, "kill-pod")]
    report = run(tmp_path / "disturbed", loop_job(corpus, NUM_STEPS), faults)
    assert report["digests"] == expected["digests"]
    assert report["steps"]["lost"] == 0
    assert len([r for r in report["recoveries"] if r["method"] == "mask"]) == 2
    lacking = {p["name"] for p in report["protections"] if not p["given"]}
    assert report["entry"] == "loop"
    assert lacking == {"durable checkpoints", "pipeline stages", "replay", "op-level checks"}


@pytest.mark.chaos
@pytest.mark.slow
def test_an_exception_that_comes_back_fails_the_job_and_is_its_last_line(tmp_path: Path) -> None:
    job = make_job(Layout(stages=1, lanes=1, spares=0), NUM_STEPS, tmp_path)
    job["spec"]["workload"] = {"entrypoint": f"{FAILING}:train", "config": {}}
    job["spec"]["recovery"] = {"maxRestarts": 2}
    with local_job(tmp_path, job) as running:
        assert running.wait() == 1
        log = (tmp_path / "output.log").read_text()
        report = json.loads((tmp_path / "report.json").read_text())
    line = FAILING.read_text().splitlines().index("        raise OSError(TEXT)") + 1
    where = f"(r0.s0.i0, step {FAILS_AT}, {FAILING}:{line} in read)"
    last = log.strip().splitlines()[-1]
    assert "3 tries of step 2 ended with the same exception" in last
    assert last.endswith(f"OSError: the shard is not there {where}")
    assert report["reason"] in last
    crash = report["crash"]
    assert (crash["type"], crash["message"], crash["step"]) == ("OSError", TEXT, FAILS_AT)
    assert [frame.rpartition(" in ")[2] for frame in crash["frames"]] == ["train", "read"]
    told = [e for e in report["events"] if e["reason"] == "TrainerDown"]
    assert any(where in event["message"] for event in told)
    assert any(where in recovery["fault"] for recovery in report["recoveries"])


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_kill_in_every_phase_leaves_no_trace_in_the_bits(tmp_path: Path, corpus: Path) -> None:
    kills = list(itertools.product(matrix.PHASES, matrix.ACTIONS))
    steps = 10 * len(kills) + 5
    expected = run(tmp_path / "undisturbed", loop_job(corpus, steps))
    faults = [
        kill(5 + 10 * number, phase, number % 3, action)
        for number, (phase, action) in enumerate(kills)
    ]
    report = run(tmp_path / "disturbed", loop_job(corpus, steps), faults)
    assert report["digests"] == expected["digests"]
    assert report["steps"]["lost"] == 0
