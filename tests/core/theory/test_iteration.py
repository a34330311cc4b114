"""A step's time by appendix C: the slowest pipeline, what shows of the all-reduce, the update."""

from __future__ import annotations

import pytest

from mainstay_core.theory.iteration import Collective, StepTimes, pipeline_s, step_s


def test_a_pipeline_takes_its_slowest_stage_for_every_micro_batch_and_every_stage() -> None:
    assert pipeline_s(16, (0.1, 0.3, 0.2)) == pytest.approx(18 * 0.3)
    assert pipeline_s(1, (0.5,)) == 0.5
    assert pipeline_s(4, ()) == 0.0


def test_a_step_waits_for_the_slowest_pipeline_and_shows_what_of_the_all_reduce_is_not_hidden() -> (
    None
):
    times = StepTimes(
        num_micro_batches=4,
        stage_s=((0.1, 0.1), (0.2, 0.1)),
        sync=Collective(latency_s=0.01, s_per_byte=1e-9),
        sync_bytes=1e9,
        sync_overlap=0.75,
        update_s=0.05,
    )

    assert step_s(times) == pytest.approx(5 * 0.2 + 0.25 * 1.01 + 0.05)


def test_a_collective_is_affine_in_its_message() -> None:
    collective = Collective(latency_s=0.002, s_per_byte=2e-9)

    assert collective.seconds(0) == 0.002
    assert collective.seconds(1e6) == pytest.approx(0.004)
