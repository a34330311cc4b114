"""Losses of whole stages with snapshots: every pair of two values of the matrix.

The factors are in :mod:`tests.e2e.stage_losses`. Each run has one loss, and those of a cascade.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix, stage_losses
from tests.e2e.stage_losses import Loss

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

LOSSES = stage_losses.table()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[Any, Any]:
    """Reports of undisturbed runs without snapshots, one for each set of bits."""
    examples = {stage_losses.bits(loss): loss for loss in LOSSES}
    steps = max(stage_losses.num_steps([loss]) for loss in LOSSES)
    return {
        bits: stage_losses.undisturbed(tmp_path_factory.mktemp("undisturbed"), loss, steps, corpus)
        for bits, loss in examples.items()
    }


def test_the_losses_have_every_possible_pair_of_values() -> None:
    assert all(loss.is_possible for loss in LOSSES)
    found = {pair for loss in LOSSES for pair in stage_losses.pairs(loss)}
    assert found == stage_losses.possible_pairs()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_lost_stage_leaves_no_trace_in_the_bits(
    tmp_path: Path, corpus: Path, undisturbed: dict[Any, Any], loss: Loss
) -> None:
    stage_losses.check_losses(tmp_path, [loss], corpus, undisturbed[stage_losses.bits(loss)])
