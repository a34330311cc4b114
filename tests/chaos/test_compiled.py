"""Compiled blocks: a heal and a restart leave no trace in the bits, whoever compiled what when."""

import shutil
from pathlib import Path

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, local_job, make_job

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler (g++)"),
]

LAYOUT = Layout(stages=2, lanes=2, shards_per_lane=2, spares=0)
STEPS, HELD_AT = 9, 5
KILLS = [
    {"at": {"step": 2, "phase": "backward"}, "target": {"replica": 1, "stage": 0}},
    # Every copy of a stage: all restart.
    {"at": {"step": 6, "phase": "vote"}, "target": {"replica": 0, "stage": 1}},
    {"at": {"step": 6, "phase": "vote"}, "target": {"replica": 1, "stage": 1}},
]


def test_trainers_that_compile_anew_after_kills_go_on_with_the_same_bits(tmp_path: Path) -> None:
    for name in ("corpus", "gates", "undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    corpus = matrix.write_corpus(tmp_path / "corpus")
    reports = []
    for name, kills in (("undisturbed", []), ("disturbed", KILLS)):
        gates = tmp_path / "gates" if kills else None
        job = make_job(
            LAYOUT,
            STEPS,
            corpus,
            gates,
            [HELD_AT],
            runtime={"device": "CPU", "backend": "Gloo", "compile": "Blocks", "recompute": True},
            scheduling={"startupDeadlineSeconds": 240},
        )
        faults = [{**kill, "action": "kill-trainer"} for kill in kills]
        with local_job(tmp_path / name, job, faults) as run:
            if gates:
                run.wait_for_members(HELD_AT, LAYOUT.num_ranks)
                (gates / str(HELD_AT)).touch()
            reports.append(run.report())
    undisturbed, disturbed = reports
    assert disturbed["digests"] == undisturbed["digests"]
    methods = {recovery["method"] for recovery in disturbed["recoveries"]}
    assert {"mask", "join", "restart"} <= methods
