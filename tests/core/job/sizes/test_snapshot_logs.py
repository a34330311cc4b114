"""From what a lost state is made anew: what each kind of log costs, and which one is taken."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.core.job.sizes.test_snapshot_sizes import SMALL, job_of, shape_of

from mainstay_core.base.bounds import MAX_MEMBERS
from mainstay_core.job.config import LogKind
from mainstay_core.job.sizes import snapshot_logs, snapshot_sizes
from mainstay_core.job.sizes.block_sizes import ModelSizes
from mainstay_core.job.sizes.llama_sizes import sizes_of
from mainstay_core.job.sizes.snapshot_logs import PAGE_BYTES, boundary_bytes, choose_log, type_bytes
from mainstay_core.job.stages import stage_blocks

ASKED: dict[str, Any] = {"enabled": True, "replay": "Boundary"}


def model_of(**config: Any) -> ModelSizes:
    return sizes_of({**SMALL, **config}, 1, 0, accumulates=False)


def choose(replay: str, model: ModelSizes | None, **shape: Any) -> snapshot_logs.LogChoice:
    wanted = shape_of(**shape)
    cuts = [] if model is None else stage_blocks([b.cost for b in model.blocks], wanted.stages)
    models = None if model is None else [model]
    return choose_log(replay, models, cuts, wanted, window=4, peers=1)


def test_what_is_asked_for_reaches_the_pods() -> None:
    for replay, log in (("Boundary", LogKind.BOUNDARY), ("Gradients", LogKind.GRADIENTS)):
        config = job_of({"enabled": True, "replay": replay}).plan_snapshots()
        assert config is not None
        assert config.log is log


ONE_LANE = {"lanes": 1, "replicas": 1}


def test_auto_takes_the_kind_with_fewer_bytes_and_names_both() -> None:
    wide = choose("Auto", model_of(dim=256, hidden=1024), **ONE_LANE)
    assert wide.log is LogKind.BOUNDARY, wide.reason
    many = choose("Auto", model_of(), **ONE_LANE, micro_batches=4096)
    assert many.log is LogKind.GRADIENTS, many.reason
    for choice in (wide, many):
        assert re.fullmatch(
            r"a step adds [\d.]+ .iB of gradients to all stores together, or [\d.]+ .iB of what "
            r"crosses stage boundaries and of compute weights, and with one replica both cover the "
            r"loss of the same pods",
            choice.reason,
        )


def test_auto_takes_gradients_where_a_lost_pod_would_leave_others_uncovered() -> None:
    for replicas in (1, 2):  # another may be added while the job runs
        choice = choose(
            "Auto", model_of(dim=256, hidden=1024), lanes=2, replicas=replicas, min_replicas=1
        )
        assert choice.log is LogKind.GRADIENTS
        assert choice.reason.startswith("a job with 2 lanes goes on without a lost replica, and ")
        assert "(a step adds " in choice.reason


def test_auto_takes_gradients_of_a_model_that_is_not_known_before_it_runs() -> None:
    choice = choose("Auto", None, **ONE_LANE)
    assert choice.log is LogKind.GRADIENTS
    assert choice.reason == "the sizes of the model are not known before it runs"


@pytest.mark.parametrize("replay", ["Auto", "Gradients", "Boundary"])
def test_the_choice_and_its_reason_reach_the_pods(replay: str) -> None:
    job = job_of({"enabled": True, "replay": replay})
    choice, config = job.choose_log(), job.plan_snapshots()
    assert choice is not None
    assert config is not None
    assert (config.log, config.log_reason) == (choice.log, choice.reason)
    assert job_of(None).choose_log() is None


def test_several_ranks_to_a_stage_may_log_boundaries() -> None:
    sections = {"parallelism": {"stages": 2, "ranksPerStage": 2}}
    config = job_of(ASKED, **sections).plan_snapshots()
    assert config is not None
    assert config.log is LogKind.BOUNDARY


def test_auto_takes_gradients_where_several_ranks_are_at_a_stage() -> None:
    assert choose("Auto", model_of(dim=256), **ONE_LANE, ranks_per_stage=2).log is LogKind.GRADIENTS


def test_each_inner_rank_of_a_stage_sends_the_whole_activation() -> None:
    parts = [sizes_of(SMALL, 2, inner, accumulates=False) for inner in (0, 1)]
    cuts = stage_blocks([b.cost for b in parts[0].blocks], 2)
    for known in (parts[:1], parts):

        def added(lanes: int, known: list[ModelSizes] = known) -> int:
            shape = shape_of(lanes=lanes, replicas=1, stages=2, ranks_per_stage=2)
            return boundary_bytes(known, cuts, shape, window=1, peers=0)

        sent = sum(type_bytes(parts[0], cut, shape_of(stages=2)) for cut in cuts)
        assert added(2) - added(1) == 2 * shape_of().shards_per_lane * sent


def test_a_stage_sends_what_the_blocks_at_its_ends_pass_on() -> None:
    model = model_of()
    shape = shape_of(stages=3, micro_batches=2)
    cuts = stage_blocks([b.cost for b in model.blocks], 3)
    pages = -(-model.blocks[0].output_bytes // PAGE_BYTES)
    sent = [type_bytes(model, cut, shape) for cut in cuts]
    assert sent == [2 * pages * PAGE_BYTES, 2 * 2 * pages * PAGE_BYTES, 2 * pages * PAGE_BYTES]
    alone = stage_blocks([b.cost for b in model.blocks], 1)
    assert type_bytes(model, alone[0], shape_of(stages=1)) == 0


def test_a_pod_has_room_for_what_it_sends_while_a_replica_is_missing() -> None:
    model = model_of()
    shape = shape_of(lanes=4, replicas=4, stages=2, micro_batches=3)
    cuts = stage_blocks([b.cost for b in model.blocks], 2)

    def least(shape: Any) -> int:
        return snapshot_sizes.store_bytes([model], shape, window=2, peers=0, log=LogKind.BOUNDARY)

    # 8 types on the 3 replicas that are left are 3 at most, in 2 x 2 + 4 steps.
    sent = max(type_bytes(model, cut, replace(shape, micro_batches=1)) for cut in cuts)
    more = replace(shape, micro_batches=4)
    assert least(more) - least(shape) == 8 * 3 * sent
    assert least(replace(shape, lanes=MAX_MEMBERS)) > least(shape)
