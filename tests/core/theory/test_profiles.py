"""Profiles of jobs: what follows from their counts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.theory import paper_jobs
from mainstay_core.theory.profiles import read_profile

ROOT = Path(__file__).resolve().parents[3]
DEEPSEEK = paper_jobs.TABLE_3["DeepSeek-MoE"]


def test_a_profile_is_read_as_it_was_written() -> None:
    for job in (*paper_jobs.TABLE_3.values(), *paper_jobs.TABLE_7.values()):
        assert read_profile(codec.dumps(job)) == job


def test_the_pages_example_is_a_profile() -> None:
    page = (ROOT / "docs" / "snapshots-theory.md").read_text()
    job = read_profile(page.partition("```json\n")[2].partition("```")[0])

    assert job.name == "mine"
    assert job.shape.num_accelerators == 32
    assert job.step_s == pytest.approx(17 * 0.11 + 0.2 * (0.0001 + 2.5e-11 * 2.1e9) + 0.05)


def test_active_and_total_parameters_tell_the_experts_from_the_rest() -> None:
    model = DEEPSEEK.model
    experts = model.expert_share * model.num_params

    assert experts / 8 + (model.num_params - experts) == pytest.approx(model.num_active_params)
    assert model.expert_share == pytest.approx(0.885, abs=0.001)
    assert model.expert_compute_share == pytest.approx(experts / 8 / model.num_active_params)
    assert model.num_units == 28 * 66


def test_steps_of_the_papers_jobs_take_what_their_overheads_say() -> None:
    assert [round(job.step_s, 6) for job in paper_jobs.TABLE_3.values()] == [1.69, 2.11, 2.51, 2.9]


def test_a_stall_is_what_does_not_leave_beside_a_step() -> None:
    job = paper_jobs.TABLE_7["FP8/FP8/FP8+FP16"]

    assert job.stall_s == pytest.approx(4 / 1.28 - 1.7)


def without(field: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.pop(field)


def put(value: object, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model"), "profile.model"),
        (put(0, "shape", "num_stages"), "profile.shape.num_stages: 0 is not between 1"),
        (put(65, "model", "num_routed"), "profile.model.num_routed: is 65, must be at most"),
        (put(1e9, "model", "num_active_params"), "profile.model.num_active_params: is 1e+09, must"),
        (put("fast", "snapshot_bytes_per_s"), "profile.snapshot_bytes_per_s"),
        (put([[0.0] * 12], "times", "stage_s"), "profile.times: a step takes no time"),
        (put([[0.1] * 11], "times", "stage_s"), "profile.times.stage_s: must have 1 lists"),
        (put(65_536, "model", "num_layers"), "profile.model: has 4325376 units"),
        (put(65_536, "shape", "num_pipelines"), "profile.shape: has 786432 cells"),
        (
            put({"compute_bytes": 2, "master_bytes": 0, "optimizer_bytes": []}, "types"),
            "profile.types: has no bytes of masters and optimizer",
        ),
    ],
)
def test_a_profile_that_cannot_be_is_refused_by_its_field(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    data = json.loads(codec.dumps(DEEPSEEK))
    change(data)
    with pytest.raises(InvalidSpecError) as caught:
        read_profile(json.dumps(data))
    assert str(caught.value).startswith(message)


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="profile: not JSON"):
        read_profile("name: mine")
