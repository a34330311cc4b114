"""Wrong bits, losses and wrong devices in a swapped pipeline: the digests are the undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e import matrix
from tests.e2e.harness import TINY_MODEL, Layout, local_job, make_job
from tests.e2e.test_flips import AUTO, DYNAMIC, FULL, PIGGYBACK
from tests.e2e.test_flips_and_losses import STEP, flip, kill
from tests.e2e.test_guards import SWAPPED

from mainstay_cli.commands import dmr
from mainstay_core.base.shape import Order
from mainstay_core.planning.routes import name_of, ways_of

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

NUM_STEPS = 7
Expected = tuple[Path, dict[str, Any]]


def run(
    directory: Path,
    corpus: Path,
    faults: list[dict[str, Any]],
    lanes: int = 2,
    **spec: Any,
) -> tuple[dict[str, Any], str]:
    """Run a job of two stages; return its report and its logs."""
    directory.mkdir(parents=True, exist_ok=True)
    with local_job(directory, job_of(corpus, lanes, **spec), faults) as running:
        return running.report(), running.tails(num_lines=1000)


def job_of(corpus: Path, lanes: int = 2, **spec: Any) -> dict[str, Any]:
    layout = Layout(stages=2, lanes=lanes, shards_per_lane=2, spares=lanes - 2)
    job = make_job(layout, NUM_STEPS, corpus, pipeline=SWAPPED, **spec)
    data = {"path": str(corpus)}
    job["spec"]["workload"]["config"] = TINY_MODEL | {"layers": 2, "data": data}
    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Return the corpus, and the report of a job without faults and checks."""
    corpus = matrix.write_corpus(tmp_path_factory.mktemp("corpus"))
    report, _ = run(tmp_path_factory.mktemp("undisturbed"), corpus, [])
    return corpus, report


CASES = {
    "a flip and a kill": (FULL, [flip(0, 0), kill(1, 1, "backward")]),
    "the stage that was wrong dies": (DYNAMIC, [flip(0, 1), kill(0, 1, "BACKWARD_WEIGHT")]),
    "a plan of its own": (AUTO, [flip(0, 0), kill(1, 0, "RECV_B")]),
    "a forward found late": (PIGGYBACK, [flip(0, 0), kill(0, 1, "BACKWARD_INPUT")]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_bit_beside_a_loss_changes_no_digest(
    tmp_path: Path, undisturbed: Expected, name: str
) -> None:
    (corpus, expected), (spec, faults) = undisturbed, CASES[name]

    report, logs = run(tmp_path / "run", corpus, faults, **spec)

    assert report["digests"] == expected["digests"], logs
    assert report["recoveries"], logs
    assert "was not put in" not in logs
    assert name != "a flip and a kill" or report["findings"]["findings"], logs


def test_plans_of_files_for_each_way_are_followed_and_find_a_wrong_bit_beside_a_loss(
    tmp_path: Path, undisturbed: Expected
) -> None:
    corpus, expected = undisturbed
    path = str(tmp_path / "{stage}-{way}.json")
    checks = {"mode": "Full", "plan": path, "profileSteps": 1}
    spec = {"detection": {"dmr": checks}, "runtime": {"recompute": True}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_of(corpus, **spec)))
    for stage in range(2):
        for way in ways_of(Order.SWAPPED, stage, 2):
            name = name_of(way)
            profile = tmp_path / f"profile-{stage}-{name}.json"
            dmr.profile(
                file, out=profile, stage=stage, way=name, steps=2, window_s=0.01, budget="64Mi"
            )
            dmr.plan(profile, out=Path(path.format(stage=stage, way=name)))
    faults = [flip(0, 0), kill(1, 1, "backward")]

    report, logs = run(tmp_path / "run", corpus, faults, **spec)

    assert report["digests"] == expected["digests"], logs
    assert report["recoveries"], logs
    assert {told["plan"] for told in report["checks"]} == {"File"}, logs
    assert report["findings"]["findings"], logs
    assert "was not put in" not in logs


@pytest.mark.parametrize(("stage", "block"), [(0, 1), (1, 0)])
def test_a_device_that_is_always_wrong_is_named_and_no_other(
    tmp_path: Path, undisturbed: Expected, stage: int, block: int
) -> None:
    """Its block is the second of the first stage's visits, or the first of the last stage's."""
    corpus, _ = undisturbed
    expected, _ = run(tmp_path / "three", corpus, [], lanes=3)
    wrong = flip(1, stage, block=block, sticky=True, bit=20)
    wrong["at"]["step"] = STEP

    witness = {"detection": {"witness": {"everySteps": 1}}, "recovery": {"onTaint": "Restart"}}
    checkpoint = {"checkpoint": {"everySteps": 1, "storage": str(tmp_path / "saved")}}
    report, logs = run(tmp_path / "run", corpus, [wrong], lanes=3, **witness, **checkpoint)

    findings = [kept["told"]["finding"] for kept in report["findings"]["findings"]]
    assert findings, logs
    assert {f["verdict"] for f in findings} == {"deterministic"}, logs
    ranks = {(f["rank"]["replica"], f["rank"]["stage"]) for f in findings}
    assert ranks == {(1, stage)}, logs
    assert report["digests"] == expected["digests"], logs
