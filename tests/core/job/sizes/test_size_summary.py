"""What is said of the sizes of a job's ranks from its specification alone."""

from typing import Any

import pytest

from mainstay_core.base.shape import JobShape
from mainstay_core.job.model_sizes import LLAMA
from mainstay_core.job.sizes import llama_sizes
from mainstay_core.job.sizes.rank_sizes import Made, even_shares, rank_sizes
from mainstay_core.job.sizes.size_summary import SizeSummary, summarize_sizes

SMALL = {"dim": 16, "layers": 3, "heads": 4, "kvHeads": 2, "hidden": 32, "vocab": 300}


def shape_of(**changes: Any) -> JobShape:
    values = {
        "lanes": 2, "shards_per_lane": 2, "replicas": 2, "min_replicas": 1, "stages": 2,
        "steps": 1, "seed": 0,
    }  # fmt: skip
    return JobShape(**(values | changes))


def summary_of(config: dict[str, Any], **changes: Any) -> SizeSummary:
    return summarize_sizes(LLAMA, config, shape_of(**changes), recompute=False)


def test_the_rank_that_holds_the_most_is_told_and_each_one_is_there() -> None:
    found = summary_of(SMALL)
    assert len(found.ranks) == 2
    sizes = llama_sizes.sizes_of(SMALL, 1, 0, accumulates=False)
    shape = shape_of()
    both = rank_sizes(sizes, shape, even_shares(shape), recompute=False, replicas=(0,))
    most = max(range(2), key=lambda stage: both[stage].memory_bytes)
    assert (
        found.message
        == f"of the 2 ranks of a replica the one that holds the most: {found.ranks[most]}"
    )
    for stage, rank in enumerate(both):
        said = f"stage {stage}, inner 0: {rank.num_parameters:,} parameters, memory "
        assert found.ranks[stage].startswith(said)


def test_what_an_inner_stage_copies_to_be_made_anew_is_told() -> None:
    def told(made: Made | None) -> list[str]:
        shape = shape_of(stages=3)
        found = summarize_sizes(LLAMA, SMALL, shape, recompute=False, made=made)
        return [rank.partition("; to be made anew it copies ")[2] for rank in found.ranks]

    def copied(text: str) -> float:
        number, unit, *rest = text.split()
        assert rest == ["beside", "its", "state"]
        return float(number) * {"KiB": 1, "MiB": 1024}[unit]

    assert told(None) == ["", "", ""]
    first, zero, last = told(Made(averages_optimizer=False))
    assert (first, last) == ("", "")
    assert copied(told(Made(averages_optimizer=True))[1]) > 2 * copied(zero)


def test_of_a_stage_s_ranks_the_first_and_the_last_are_told() -> None:
    config = {**SMALL, "heads": 8, "kvHeads": 4, "vocab": 301}
    told = [rank.partition(":")[0] for rank in summary_of(config, ranks_per_stage=4).ranks]
    assert told == ["stage 0, inner 0", "stage 0, inner 3", "stage 1, inner 0", "stage 1, inner 3"]


@pytest.mark.parametrize(
    ("config", "changes", "problem"),
    [
        ({**SMALL, "heads": 3}, {}, "spec.workload.config.heads"),
        ({**SMALL, "layer": 3}, {}, "spec.workload.config.layer"),
        (SMALL, {"stages": 6}, "spec.parallelism.stages"),
    ],
)
def test_what_no_trainer_could_use_is_named(
    config: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    found = summary_of(config, **changes)
    assert found.is_wrong
    assert problem in found.message
    assert found.ranks == ()


def test_a_deep_model_and_a_user_s_own_are_not_computed_here() -> None:
    deep = summary_of({**SMALL, "layers": 60_000})
    own = summarize_sizes("mine:model", {"dim": "?"}, shape_of(), recompute=False)
    for found in (deep, own):
        assert not found.is_wrong
        assert "--dry-run" in found.message
        assert found.ranks == ()
