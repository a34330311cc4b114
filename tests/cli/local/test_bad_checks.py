"""Checks and wrong bits that cannot be: each is refused with one message that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mainstay_cli.base.exits import ExitCode, UsageError
from mainstay_cli.local import manifests

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"
FULL = {"mode": "Full", "plan": "Auto"}
DMR, WITNESS = "spec.detection.dmr", "spec.detection.witness"
JOBS: list[tuple[str, dict[str, Any], str]] = [
    ("detection", {"dmr": {"mode": "full"}}, f"{DMR}.mode: is 'full', must be 'Off', 'P"),
    ("detection", {"dmr": {"mode": "PiggyBack"}}, f"{DMR}.mode: is 'PiggyBack', must be"),
    ("detection", {"dmr": {"mode": True}}, f"{DMR}.mode: "),
    ("detection", {"dmr": {"mode": None}}, f"{DMR}.mode: "),
    ("detection", {"dmr": {"mod": "Full"}}, f"{DMR}.mod: unknown field; did you mean mode?"),
    ("detection", {"dmr": "Full"}, f"{DMR}: expected fields (mode, plan, profileSteps, memory)"),
    ("detection", {"dmr": {"mode": "Piggyback"}}, f"{DMR}.mode: is Piggyback, but without runtime"),
    ("detection", {"dmr": {"mode": "Full", "plan": "auto"}}, f"{DMR}.plan: is 'auto', must be"),
    ("detection", {"dmr": {"mode": "Full", "plan": ""}}, f"{DMR}.plan: is '', must be Naive,"),
    ("detection", {"dmr": {"mode": "Full", "plan": "p.json"}}, "or the absolute path of a plan"),
    ("detection", {"dmr": {"mode": "Full", "memory": "1Gi"}}, f"{DMR}.memory: is for checks that"),
    (
        "detection",
        {"dmr": FULL | {"memory": "-1"}},
        f"{DMR}.memory: is '-",
    ),
    (
        "detection",
        {"dmr": FULL | {"memory": 1.5}},
        f"{DMR}.memory: is 1.5",
    ),
    (
        "detection",
        {"dmr": FULL | {"memory": "1Ei"}},
        f"{DMR}.memory: is '1",
    ),
    ("detection", {"witness": {"everySteps": -1}}, f"{WITNESS}.everySteps: is -1, must be greater"),
    ("detection", {"witness": {"everySteps": 10**9}}, f"{WITNESS}.everySteps: is 1000000000, must"),
    ("detection", {"witness": {"everysteps": 2}}, f"{WITNESS}.everysteps: unknown field; did you"),
    ("detection", {"witness": 2}, f"{WITNESS}: expected fields (everySteps), found int"),
    (
        "recovery",
        {"onTaint": "restart"},
        "spec.recovery.onTaint: is 'restart', must be 'Report' or",
    ),
]
FORWARD = {"step": 1, "phase": "forward"}
FLIPS: list[tuple[dict[str, Any], str]] = [
    ({"flip": {"element": 0, "bit": -1}}, "flip.bit: is -1, must be a whole number from 0 to 127"),
    ({"flip": {"element": 0, "bit": 128}}, "flip.bit: is 128, must be a whole number from 0 to"),
    ({"flip": {"element": 0, "bit": "x"}}, "flip.bit: is 'x', must be a whole number"),
    ({"flip": {"element": -1, "bit": 0}}, "flip.element: is -1, must be a whole number"),
    ({"flip": {"bit": 0}}, "flip.element: is missing"),
    ({"flip": {"type": 99}}, "flip.type: is 99, must be a whole number from 0 to 3, as the job's"),
    ({"flip": {"microBatch": 5}}, "flip.microBatch: is 5, must be a whole number from 0 to 0"),
    ({"flip": {"where": "disk"}}, "flip.where: is 'disk', must be one of compute, wire, state"),
    ({"flip": {"execution": "Checker"}}, "flip.execution: is 'Checker', must be one of primary"),
    ({"at": {"step": 1}}, "at.phase: is missing, must be one of forward, backward, reduce, vote"),
    ({"at": FORWARD | {"step": 99}}, "at.step: is 99, must be a whole number from 0 to 29"),
    ({"at": FORWARD | {"step": -1}}, "at.step: is -1, must be a whole number from 0 to 29"),
    ({"target": {"replica": 0, "stage": 7}}, "target.stage: is 7, must be a whole number from 0"),
    ({"target": {"replica": 7, "stage": 0}}, "target.replica: is 7, must be a whole number from"),
    ({"target": {"replica": 0, "stage": 0, "inner": 1}}, "target.inner: is 1, must be a whole"),
]


@pytest.mark.parametrize(("section", "fields", "message"), JOBS, ids=str)
def test_checks_that_cannot_be_are_refused(
    tmp_path: Path, section: str, fields: dict[str, Any], message: str
) -> None:
    job, path = yaml.safe_load(QUICKSTART.read_text()), tmp_path / "job.yaml"
    job["spec"][section] = fields
    path.write_text(yaml.safe_dump(job))

    with pytest.raises(UsageError) as error:
        manifests.load_job(path)

    check(error.value, f"{path}: spec.", message)


@pytest.mark.parametrize(("fields", "message"), FLIPS, ids=str)
def test_wrong_bits_that_cannot_be_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path, job = tmp_path / "faults.yaml", manifests.load_job(QUICKSTART).job
    right = {"at": FORWARD, "target": {"replica": 0, "stage": 0}, "action": "flip"}
    flip = fields.get("flip", {})
    given = flip if set(flip) & {"element", "bit"} else {"element": 0, "bit": 0} | flip
    path.write_text(yaml.safe_dump([right | fields | {"flip": given}]))

    with pytest.raises(UsageError) as error:
        manifests.load_faults(path, job)

    check(error.value, f"{path}: faults[0].", message)


def check(error: UsageError, begins: str, message: str) -> None:
    """Check that one line names the file, the field and what would be right."""
    text = str(error)
    assert text.startswith(begins)
    assert message in text
    assert text.count("\n") == 0
    assert error.code is ExitCode.USAGE
