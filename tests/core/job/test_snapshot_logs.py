"""From what a lost state is made anew: what each kind of log costs, and which one is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.job.test_snapshot_sizes import SMALL, job_of, shape_of

from mainstay_core.base.bounds import MAX_MEMBERS
from mainstay_core.job import snapshot_logs, snapshot_sizes
from mainstay_core.job.block_sizes import ModelSizes
from mainstay_core.job.config import LogKind
from mainstay_core.job.llama_sizes import sizes_of
from mainstay_core.job.snapshot_logs import PAGE_BYTES, boundary_bytes, choose_log, type_bytes
from mainstay_core.job.stages import stage_blocks

ASKED: dict[str, Any] = {"enabled": True, "replay": "Boundary"}


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_logs, "AUTO_MAY_TAKE_BOUNDARY", True)


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


def test_auto_takes_gradients_and_says_how_to_ask_for_boundaries() -> None:
    choice = job_of({"enabled": True}).choose_log()
    assert choice is not None
    assert choice.log is LogKind.GRADIENTS
    assert "have to be asked for in this version (spec.snapshots.replay: Boundary)" in choice.reason
    assert job_of(None).choose_log() is None


@pytest.mark.usefixtures("auto")
def test_auto_takes_the_kind_with_fewer_bytes() -> None:
    wide = choose("Auto", model_of(dim=256, hidden=1024))
    assert wide.log is LogKind.BOUNDARY, wide.reason
    many = choose("Auto", model_of(), lanes=64, replicas=64, micro_batches=64)
    assert many.log is LogKind.GRADIENTS, many.reason
    assert choose("Auto", None).log is LogKind.GRADIENTS


def test_several_ranks_to_a_stage_may_log_boundaries() -> None:
    sections = {"parallelism": {"stages": 2, "ranksPerStage": 2}}
    config = job_of(ASKED, **sections).plan_snapshots()
    assert config is not None
    assert config.log is LogKind.BOUNDARY


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
