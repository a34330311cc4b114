"""A device that is wrong in each execution is named by a witness, replaced, and leaves no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, LocalJob, local_job, make_job

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

FIRST = 2
"""The step from which on a device is wrong."""
BEHIND, LAST = 6, 9
"""Steps with a gate: behind the round in which the device must be named, and when it is gone."""
NUM_STEPS = 11
BROKEN = 1
"""The replica with the wrong device."""
WITNESS: dict[str, Any] = {
    "detection": {"witness": {"everySteps": 1}},
    "recovery": {"onTaint": "Restart"},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> matrix.Expected:
    return matrix.find_undisturbed(tmp_path_factory, NUM_STEPS)


def always_wrong(stage: int, in_pass: str) -> dict[str, Any]:
    """Return the fault of a device whose products are wrong in a pass, in every execution."""
    phase = "forward" if in_pass == "forward" else "backward"
    return {
        "at": {"step": FIRST, "phase": phase},
        "target": {"replica": BROKEN, "stage": stage},
        "action": "flip",
        "flip": {
            "pass": in_pass,
            "operator": "aten.mm",
            "element": 3,
            "bit": 20,
            "sticky": True,
        },
    }


def findings_of(running: LocalJob) -> list[dict[str, Any]]:
    return [kept["told"]["finding"] for kept in running.fetch("findings")["findings"]]


def device(finding: dict[str, Any]) -> tuple[str, int]:
    return finding["slot"]["pod"], finding["slot"]["index"]


@pytest.mark.parametrize("lanes", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("in_pass", ["forward", "backward", "weight"])
def test_a_device_that_is_always_wrong_in_a_pass_is_named_within_a_round_and_replaced(
    tmp_path: Path, expected: matrix.Expected, in_pass: str, stage: int, lanes: int
) -> None:
    """Of two replicas that both insist, neither is named until the spare has computed the type."""
    layout = Layout(stages=2, lanes=lanes, shards_per_lane=2, spares=1)
    corpus, undisturbed = expected(layout)
    (tmp_path / "gates").mkdir()
    saved: dict[str, Any] = {"checkpoint": {"everySteps": 1, "storage": str(tmp_path / "saved")}}
    gates = (FIRST, BEHIND, LAST)
    job = make_job(layout, NUM_STEPS, corpus, tmp_path / "gates", gates, **WITNESS, **saved)

    with local_job(tmp_path, job, [always_wrong(stage, in_pass)]) as running:
        # The spares are there, so that who is named is replaced at once.
        running.wait_for_members(FIRST, layout.num_ranks)
        running.wait_until_all_up(layout.num_ranks + layout.spares)
        (wrong,) = (
            m for m in running.fetch("members") if (m["replica"], m["stage"]) == (BROKEN, stage)
        )
        (tmp_path / "gates" / str(FIRST)).touch()
        running.wait_until(lambda: bool(findings_of(running)))
        (tmp_path / "gates" / str(BEHIND)).touch()

        def is_replaced() -> bool:
            ranks = [m for m in running.fetch("members") if m["rank"] != "spare"]
            gone = wrong["pod"] not in {m["pod"] for m in ranks}
            return gone and len(ranks) == layout.num_ranks and running.fetch()["step"] == LAST

        running.wait_until(is_replaced)
        (tmp_path / "gates" / str(LAST)).touch()
        report, logs = running.report(), running.tails(num_lines=1000)

    assert "was not put in" not in logs
    findings = [kept["told"]["finding"] for kept in report["findings"]["findings"]]
    assert {finding["slot"]["pod"] for finding in findings} == {wrong["pod"]}, logs
    assert {finding["verdict"] for finding in findings} == {"deterministic"}, logs
    # Each replica is witnessed once in as many steps as there are replicas.
    assert FIRST <= findings[0]["step"] < FIRST + lanes, logs
    assert [taint["slot"]["pod"] for taint in report["tainted"]] == [wrong["pod"]]
    assert report["tainted"][0]["since"] <= FIRST
    assert report["digests"] == undisturbed["digests"], logs


@pytest.mark.parametrize("stage", [0, 1])
def test_of_two_replicas_without_a_spare_both_are_named_until_one_comes(
    tmp_path: Path, expected: matrix.Expected, stage: int
) -> None:
    layout = Layout(stages=2, lanes=2, shards_per_lane=2, spares=0)
    corpus, undisturbed = expected(layout)
    saved: dict[str, Any] = {"checkpoint": {"everySteps": 1, "storage": str(tmp_path / "saved")}}
    job = make_job(layout, NUM_STEPS, corpus, **WITNESS, **saved)

    with local_job(tmp_path, job, [always_wrong(stage, "weight")]) as running:
        running.wait_until(lambda: running.fetch()["state"] == "waiting")
        waits = running.fetch()
        members = running.fetch("members")
        assert findings_of(running) == [], "nobody is named yet"
        devices = {m["slot"]: m for m in members if m["stage"] == stage}
        assert len(devices) == layout.lanes
        assert all(slot in waits["reason"] for slot in devices), waits["reason"]
        assert waits["step"] == FIRST, "the step waits"
        scaled = running.post("scale", {"spares": 1})
        assert scaled["name"] == "tiny"
        report, logs = running.report(), running.tails(num_lines=1000)

    assert "was not put in" not in logs
    (wrong,) = (m["pod"] for m in devices.values() if m["replica"] == BROKEN)
    findings = [kept["told"]["finding"] for kept in report["findings"]["findings"]]
    assert {finding["slot"]["pod"] for finding in findings} == {wrong}, logs
    assert {finding["verdict"] for finding in findings} == {"deterministic"}, logs
    assert report["digests"] == undisturbed["digests"], logs


def test_with_a_witness_alone_a_block_that_is_no_pure_function_fails_the_job(
    tmp_path: Path,
) -> None:
    layout = Layout(lanes=3, spares=0)
    job = make_job(layout, 2, matrix.write_corpus(tmp_path), **WITNESS)
    job["spec"]["workload"]["entrypoint"] = f"{Path(__file__).with_name('noisy_llama.py')}:workload"

    with local_job(tmp_path, job) as running:
        assert running.wait() == 1
        output = (tmp_path / "output.log").read_text()

    assert "spec.detection.witness.everySteps: is 1, but block 'noise' gave other bits" in output
    assert "WrongResult" not in output
