"""A message that gloo loses ends its trainer, and the job ends with the undisturbed digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import HERE, Layout, local_job, make_job, run_undisturbed
from tests.e2e.test_flips import DYNAMIC

from mainstay_train.comm.ending import EXIT_BLOCKED

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

NUM_STEPS = 6


@pytest.mark.parametrize("checks", [{}, DYNAMIC], ids=["no checks", "checks that wait"])
def test_a_trainer_that_cannot_be_got_out_of_a_wait_ends_and_its_slot_heals(
    tmp_path: Path, checks: dict[str, Any]
) -> None:
    """With checks that wait another thread waits for the message; the main one waits for that."""
    for name in ("corpus", "undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    corpus = matrix.write_corpus(tmp_path / "corpus")
    layout = Layout(stages=2, lanes=2, shards_per_lane=2, spares=0)
    expected = run_undisturbed(tmp_path / "undisturbed", layout.least, NUM_STEPS, corpus)
    job = make_job(layout, NUM_STEPS, corpus, **checks)
    workload = job["spec"]["workload"]
    workload |= {"entrypoint": f"{HERE / 'lossy_llama.py'}:workload", "args": [str(tmp_path)]}
    fault = {
        "at": {"step": 2, "phase": "BACKWARD_INPUT"},
        "target": {"replica": 0, "stage": 1},
        "action": "kill-trainer",
    }

    with local_job(tmp_path / "disturbed", job, [fault]) as running:
        report, logs = running.report(), running.tails(num_lines=1000)

    assert (tmp_path / "lost").exists(), logs
    assert report["digests"] == expected["digests"], logs
    assert "an operation does not end; this trainer does" in logs, logs
    assert f"(code {EXIT_BLOCKED})" in logs, logs
