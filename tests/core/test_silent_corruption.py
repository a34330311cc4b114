"""The page on silent corruption says what the code does: names, bounds, and what is refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mainstay_api.findings import FINDING_CODE, MAX_IN_HISTORY
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import JobUid, PodUid, RankId, Slot
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode, describe_executions, uncovered
from mainstay_core.dmr.verdicts import Verdict, judge
from mainstay_core.faults.flips import FLIP, FLIP_PHASES
from mainstay_core.job.spec import parse_training_job
from mainstay_core.wire.findings import MAX_KEPT, MAX_WAITING

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "silent-corruption.md").read_text()
FAULTS = (ROOT / "docs" / "faults.md").read_text()


def job(detection: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "mainstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "demo"},
        "spec": {
            "training": {"steps": 2, "lanes": 1},
            "workload": {"entrypoint": "a:b"},
            "detection": detection,
            **spec,
        },
    }


def test_the_example_of_the_page_is_a_job_with_checks() -> None:
    (example,) = re.findall(r"```yaml\n(spec:.*?)```", PAGE, re.DOTALL)
    found = yaml.safe_load(example)["spec"]["detection"]
    assert parse_training_job(job(found)).to_job_config(JobUid("u")).dmr is Mode.FULL


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("detection.dmr.mode: Piggyback", job({"dmr": {"mode": "Piggyback"}})),
        ("detection.dmr.plan", job({"dmr": {"mode": "Off", "plan": "Auto"}})),
        ("detection.dmr.plan", job({"dmr": {"mode": "Piggyback", "plan": "Dynamic"}})),
        ("detection.dmr.plan", job({"dmr": {"mode": "Full", "plan": "plan.json"}})),
        ("detection.dmr.profileSteps", job({"dmr": {"profileSteps": 0}})),
        ("detection.dmr.memory", job({"dmr": {"mode": "Full", "memory": "1Gi"}})),
        ("detection.witness", job({"witness": {"everySteps": 2}})),
        ("runtime.compile: Blocks", job({"dmr": {"mode": "Full"}}, runtime={"compile": "Blocks"})),
    ],
)
def test_what_the_page_calls_refused_is_refused(name: str, bad: dict[str, Any]) -> None:
    refused = PAGE.partition("Refused by name:")[2].partition("\n\n")[0]
    assert f"`{name}`" in refused
    with pytest.raises(InvalidSpecError):
        parse_training_job(bad)


def test_the_sentence_of_the_page_is_that_of_a_finding() -> None:
    verdict = judge("a", "b", "b", used=False)
    finding = Finding(
        step=12,
        slot=Slot(pod=PodUid("uid"), index=0),
        rank=RankId(replica=0, stage=1),
        in_pass=Pass.WEIGHT,
        block="layers.3",
        ordinal=4,
        operator="aten.mm",
        num_elements=1,
        verdict=verdict.verdict,
        remedy=verdict.remedy,
        reason=verdict.reason,
    )
    assert f"```\n{finding.describe('demo-3/0')}\n```" in PAGE


def test_names_and_bounds_of_the_page_are_those_of_the_code() -> None:
    for verdict in Verdict:
        assert f"| `{verdict.value}` |" in PAGE
    for name in (FINDING_CODE, *map(describe_executions, (Mode.FULL, Mode.PIGGYBACK))):
        assert f"`{name}`" in PAGE
    words = " ".join(PAGE.split())
    for mode, every in itertools.product(Mode, (0, 1)):
        for name in uncovered(mode, witness_every_steps=every):
            assert name.partition(",")[0] in words, "the page names what is not covered"
    assert f"A pod holds {MAX_WAITING} findings" in PAGE
    assert f"keeps the newest {MAX_KEPT:,} of a job" in PAGE
    assert f"history tells of the first {MAX_IN_HISTORY:,}" in " ".join(PAGE.split())
    rules = (ROOT / "charts/mainstay/files/rules.yaml").read_text()
    assert "alert: MainstayWrongResult" in rules
    assert "mainstay_check_findings_total" in rules


def test_the_page_of_faults_names_every_field_and_phase_of_a_flip() -> None:
    section = FAULTS.partition("### A wrong bit")[2].partition("\n`disconnect`")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"\| (`[^|]*) \|", table)))) >= set(FLIP)
    for phase in FLIP_PHASES:
        assert f"`{phase}`" in section
    (example,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert set(yaml.safe_load(example)[0]["flip"]) <= set(FLIP)
