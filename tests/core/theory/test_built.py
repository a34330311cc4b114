"""Windows of profiled jobs, planned with the code of running ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mainstay_core.snapshots.units import UnitKind
from mainstay_core.theory import paper_jobs
from mainstay_core.theory.built import plan_built_window, step_stall_s
from mainstay_core.theory.model_units import build_units, find_printed_window
from mainstay_core.theory.profiles import JobProfile

JOBS = [*paper_jobs.TABLE_3.values(), *paper_jobs.TABLE_7.values()]
DEEPSEEK = paper_jobs.TABLE_3["DeepSeek-MoE"]


@pytest.mark.parametrize("job", [*JOBS, *paper_jobs.FIGURE_11.values()], ids=lambda job: job.name)
def test_units_have_the_parameters_of_the_model_and_are_spread_over_the_stages(
    job: JobProfile,
) -> None:
    units = build_units(job)
    layers = Counter(unit.position.stage for unit in units if unit.kind is UnitKind.GATE)

    assert len(units) == job.model.num_units
    assert len({unit.name for unit in units}) == len(units)
    assert sum(u.num_elements for u in units) == pytest.approx(job.model.num_params, rel=1e-4)
    assert sum(layers.values()) == job.model.num_layers
    assert set(layers) == set(range(min(job.shape.num_stages, job.model.num_layers)))
    assert max(layers.values()) - min(layers.values()) <= 1


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_unit_is_in_full_in_one_instalment_of_one_author_and_all_fit_into_a_step(
    job: JobProfile,
) -> None:
    plan = plan_built_window(job)
    full = Counter(name for one in plan.assignments for i in one.instalments for name in i.full)

    assert full == dict.fromkeys((unit.name for unit in build_units(job)), 1)
    assert all(len(one.instalments) == plan.window.length for one in plan.assignments)
    budget = job.step_s * job.snapshot_bytes_per_s / job.shape.num_stages
    assert plan.fits
    assert step_stall_s(job, plan) == 0
    assert plan.largest_bytes <= budget


def test_cells_that_share_the_copying_have_shorter_windows() -> None:
    job = paper_jobs.TABLE_7["FP8/FP32/FP32+FP32"]

    assert (
        plan_built_window(job, num_authors=1).window.length == find_printed_window(job).length == 6
    )
    assert plan_built_window(job).window.length == 3


def test_the_rest_of_a_layer_makes_a_window_longer_than_that_of_equal_units() -> None:
    assert find_printed_window(DEEPSEEK).length == 6
    assert plan_built_window(DEEPSEEK).window.length == 7


def test_what_fits_in_no_window_makes_steps_wait() -> None:
    slow = replace(DEEPSEEK, snapshot_bytes_per_s=1e9)
    plan = plan_built_window(slow)

    assert not plan.fits
    assert 0 < step_stall_s(slow, plan) <= plan.largest_bytes / (1e9 / 12) - slow.step_s
