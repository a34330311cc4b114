"""A wrong bit in each phase of a real run: it is found, and the bits are those of a clean run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, local_job, make_job, run_undisturbed

pytestmark = pytest.mark.slow

NUM_STEPS = 6
FULL = {"detection": {"dmr": {"mode": "Full", "plan": "Naive"}}}
DYNAMIC = {"detection": {"dmr": {"mode": "Full", "plan": "Dynamic", "memory": "64Mi"}}}
PIGGYBACK = {"detection": {"dmr": {"mode": "Piggyback"}}, "runtime": {"recompute": True}}
PLACES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("forward", {"replica": 0, "stage": 1}, {"operator": "aten.mm"}),
    ("backward", {"replica": 1, "stage": 0}, {"pass": "weight", "operator": "aten.mm"}),
    ("reduce", {"replica": 0, "stage": 0}, {"operator": "aten.add"}),
    ("apply", {"replica": 1, "stage": 1}, {"operator": "aten._fused_adamw_"}),
    ("reduce", {"replica": 1, "stage": 0}, {"operator": "exchange"}),
]
WHAT_FOLLOWS = {"exchange": ("wire", "reduce-again")}


def test_a_wrong_bit_in_each_phase_is_found_and_changes_no_digest(tmp_path: Path) -> None:
    layout = Layout(stages=2, lanes=2, shards_per_lane=2, spares=0)
    check_flips(tmp_path, layout)


@pytest.mark.chaos
@pytest.mark.parametrize(
    "layout",
    [
        Layout(stages=2, lanes=2, shards_per_lane=2, spares=0, dtype="bfloat16"),
        Layout(stages=2, lanes=2, shards_per_lane=2, spares=0, experts=True),
        Layout(stages=2, lanes=2, ranks_per_stage=2, ranks_per_pod=2, spares=0),
    ],
    ids=["bf16", "experts", "inner"],
)
def test_other_models_and_inner_ranks_are_checked_likewise(tmp_path: Path, layout: Layout) -> None:
    check_flips(tmp_path, layout)


def check_flips(tmp_path: Path, layout: Layout) -> None:
    """Run a job with a wrong bit in each phase, and compare it with an undisturbed one."""
    (tmp_path / "corpus").mkdir()
    corpus = matrix.write_corpus(tmp_path / "corpus")
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    expected = run_undisturbed(tmp_path / "undisturbed", layout.least, NUM_STEPS, corpus)
    faults = [
        {
            "at": {"step": step, "phase": phase},
            "target": target,
            "action": "flip",
            "flip": {"element": 7, "bit": 30} | flip,
        }
        for step, (phase, target, flip) in enumerate(PLACES, 1)
    ]
    job = make_job(layout, NUM_STEPS, corpus, **FULL)

    with local_job(tmp_path / "disturbed", job, faults) as running:
        report = running.report()
        logs = running.tails(num_lines=1000)

    assert report["digests"] == expected["digests"], logs
    assert report["recoveries"] == []
    told = [kept["told"]["finding"] for kept in report["findings"]["findings"]]
    told.sort(key=lambda finding: finding["step"])  # each pod tells its own
    names = [flip["operator"] for _, _, flip in PLACES]
    assert [(f["step"], f["operator"], (f["verdict"], f["remedy"])) for f in told] == [
        (step, name, WHAT_FOLLOWS.get(name, ("primary", "repair")))
        for step, name in enumerate(names, 1)
    ]
    ranks = [{"inner": 0, **target} for _, target, _ in PLACES]
    assert [finding["rank"] for finding in told] == ranks
    assert "was not put in" not in logs


@pytest.mark.parametrize(
    ("spec", "second", "coverage"),
    [
        (PIGGYBACK, {"pass": "forward"}, "P 100 %"),
        pytest.param(
            DYNAMIC,
            {"pass": "backward", "execution": "checker"},
            "inter and naive",
            marks=pytest.mark.chaos,
        ),
    ],
    ids=["Piggyback", "Dynamic"],
)
def test_a_wrong_value_that_was_used_refuses_its_step(
    tmp_path: Path, spec: dict[str, Any], second: dict[str, Any], coverage: str
) -> None:
    """What a wrong forward gave the next stage is found only afterwards."""
    follows = ("checker", "repair") if spec is PIGGYBACK else ("checker", "nothing")
    layout = Layout(stages=2, lanes=2, shards_per_lane=2, spares=0)
    (tmp_path / "corpus").mkdir()
    corpus = matrix.write_corpus(tmp_path / "corpus")
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    expected = run_undisturbed(tmp_path / "undisturbed", layout.least, NUM_STEPS, corpus)
    places = [
        ("forward", {"replica": 0, "stage": 0}, {"pass": "forward"}, ("primary", "void-type")),
        ("backward", {"replica": 1, "stage": 1}, second, follows),
    ]
    faults = [
        {
            "at": {"step": step, "phase": phase},
            "target": target,
            "action": "flip",
            "flip": {"element": 7, "bit": 30, "operator": "aten.mm", **flip},
        }
        for step, (phase, target, flip, _) in enumerate(places, 1)
    ]
    job = make_job(layout, NUM_STEPS, corpus, **spec)

    with local_job(tmp_path / "disturbed", job, faults) as running:
        report = running.report()
        logs = running.tails(num_lines=1000)

    assert report["digests"] == expected["digests"], logs
    told = [kept["told"]["finding"] for kept in report["findings"]["findings"]]
    told.sort(key=lambda finding: finding["step"])
    assert [(f["step"], (f["verdict"], f["remedy"])) for f in told] == [
        (step, expect) for step, (_, _, _, expect) in enumerate(places, 1)
    ]
    assert [f["rank"] for f in told] == [{"inner": 0, **target} for _, target, _, _ in places]
    assert report["dmr_coverage"].startswith(coverage)
    (recovery,) = report["recoveries"]
    assert "wrong result was used in shard type" in str(recovery), recovery
