"""Bytes of snapshots and logs."""

from __future__ import annotations

import random

import pytest

from mainstay_core.snapshots.windows import PrintedWindow, generate_schedule
from mainstay_core.theory import paper_jobs
from mainstay_core.theory.sizes import (
    frozen_bytes_per_param,
    gemini_bytes_per_param,
    instalment_bytes,
    log_bytes,
)

TYPES = paper_jobs.FP16_FP32


def test_a_snapshot_has_full_states_and_the_compute_weights_of_what_is_to_come() -> None:
    assert instalment_bytes(TYPES, 2, 4) == 32
    assert instalment_bytes(TYPES, 6, 0) == 72


def test_frozen_copies_are_those_that_a_schedule_lists() -> None:
    rng = random.Random(6)
    for _ in range(100):
        num_units = rng.randint(2, 60)
        num_active = rng.randint(1, num_units)
        window = PrintedWindow(length=-(-num_units // num_active), num_active=num_active)
        schedule = generate_schedule(range(num_units), window)
        listed = sum(2 * len(frozen) for _, frozen in schedule) / num_units
        found = frozen_bytes_per_param(TYPES, num_active / num_units, window.length)
        assert found == pytest.approx(listed)


@pytest.mark.parametrize("window", range(1, 9))
def test_even_windows_freeze_half_of_all_but_one(window: int) -> None:
    assert frozen_bytes_per_param(TYPES, 1 / window, window) == pytest.approx(window - 1)


def test_gemini_keeps_26_bytes_of_a_parameter() -> None:
    assert gemini_bytes_per_param(TYPES) == 26


def test_a_log_has_every_border_both_ways() -> None:
    shape = paper_jobs.TABLE_3["DeepSeek-MoE"].shape

    assert log_bytes(shape, TYPES, 1) == 2 * 11 * 512 * 2048 * 2048 * 2
