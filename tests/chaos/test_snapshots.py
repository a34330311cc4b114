"""Losses of whole stages with snapshots: every pair of two values of the matrix.

The factors are in :mod:`tests.e2e.loss_factors`. Each run has one loss, and what is lost while a
state is made anew after it. That the matrix has every pair is :mod:`tests.e2e.test_loss_factors`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import stage_losses
from tests.e2e.harness import local_job, make_job
from tests.e2e.stage_losses import Loss

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

LOSSES = stage_losses.table()
MEANWHILE = {
    "the-spare-that-replays": "pod vote last 3 moe bfloat16 4 further=pod",
    "the-pod-of-a-cell-that-replays": "trainer vote last 2 llama bfloat16 2 1 1 2 further=pod",
    "a-pod-with-copies": "trainer vote last 3 moe bfloat16 4 which=middle further=holder",
    "the-api": "trainer vote middle 3 moe bfloat16 4 which=middle further=api",
}
"""What is lost in the midst of a replay. With boundary logs the pod with copies is one that has the
logs of the stage beside it, which its loss takes along."""
TIMES = {"Gradients": ("replay", "replayed"), "Boundary": ("replay-read", "replay-write")}


LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that does not change: whether the order of units does depends on what is learnt."""
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "text.txt").write_text(LICENSE.read_text())
    return directory


class Undisturbed(dict[Any, Any]):
    """Reports of undisturbed runs without snapshots, one for each set of bits, made when needed."""

    def __init__(self, make: Callable[[Loss], dict[str, Any]]) -> None:
        self._make = make

    def of(self, loss: Loss) -> dict[str, Any]:
        bits = stage_losses.bits(loss)
        if bits not in self:
            self[bits] = self._make(loss)
        return dict(self[bits])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Undisturbed:
    steps = max(stage_losses.num_steps([loss]) for loss in LOSSES)
    place = tmp_path_factory.mktemp
    return Undisturbed(
        lambda loss: stage_losses.undisturbed(place("undisturbed"), loss, steps, corpus)
    )


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_lost_stage_leaves_no_trace_in_the_bits(
    tmp_path: Path, corpus: Path, undisturbed: Undisturbed, loss: Loss
) -> None:
    stage_losses.check_losses(tmp_path, [loss], corpus, undisturbed.of(loss))


@pytest.mark.parametrize("name", [*MEANWHILE])
@pytest.mark.parametrize(
    ("replay", "during"), [(replay, at) for replay, times in TIMES.items() for at in times]
)
def test_what_is_lost_in_the_midst_of_a_replay_leaves_no_trace_either(
    tmp_path: Path, corpus: Path, undisturbed: Undisturbed, name: str, replay: str, during: str
) -> None:
    line = f"{MEANWHILE[name]} replay={replay} during={during}"
    loss = stage_losses.parse(line)
    report = stage_losses.check_losses(tmp_path, [loss], corpus, undisturbed.of(loss))
    fired = {fault["id"]: fault["fired"] for fault in report["faults"]}
    if name == "the-spare-that-replays":
        assert fired["loss-0-replaying-0"]["pod"] != fired["loss-0-0"]["pod"]
    if name == "the-api":
        told = [(event["reason"], event["message"]) for event in report["events"]]
        lost, died = (
            next(number for number, (_, what) in enumerate(told) if f"fault {fault} fires" in what)
            for fault in ("loss-0-0", "loss-0-further-0")
        )
        reasons = [reason for reason, _ in told]
        assert lost < died < reasons.index("Settled", lost), told


def test_while_a_stage_is_made_anew_the_status_says_whose_loss_would_join_it(
    tmp_path: Path, corpus: Path, undisturbed: Undisturbed
) -> None:
    """The trainer that makes it anew is stopped, so that what is said meanwhile can be read."""
    loss = stage_losses.parse("trainer vote last 2 moe bfloat16 4 replay=Boundary which=middle")
    (tmp_path / "gates").mkdir()
    stopped = {
        "id": "stopped",
        "at": {"during": "replay", "of": "loss-0"},
        "target": {"replica": 0, "stage": 2},
        "action": "stop",
        "forSeconds": 5,
    }
    steps, held = stage_losses.num_steps([loss]), [loss.step]
    job = make_job(loss.layout, steps, corpus, tmp_path / "gates", held, **loss.spec)
    with local_job(tmp_path, job, [*loss.kills(loss.step), stopped]) as running:
        running.wait_for_members(loss.step, loss.layout.num_ranks)
        running.wait_until(lambda: running.fetch("snapshots")["summary"]["num_covered"] == 4)
        (tmp_path / "gates" / str(loss.step)).touch()
        said = (
            "s2 is being made anew; a further loss of these would join it: s1 (s1 to s2 together), "
            "s3 (s2 to s3 together)"
        )
        running.wait_until(lambda: said in running.fetch("summary")["stores"]["coverage"])
        stretches = [p["stretch"] for p in running.fetch("snapshots")["positions"]]
        report = running.report()
    assert stretches == [
        {"first": first, "last": last} for first, last in ((0, 0), (1, 2), (2, 2), (2, 3))
    ]
    expected = undisturbed.of(loss)
    stage_losses.check_report(report, [loss], expected, ["stopped"], names=["loss"])
