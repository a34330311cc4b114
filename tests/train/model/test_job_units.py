"""The units of which every trainer plans windows: those that the stages' trainers copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape
from mainstay_core.snapshots.job_units import check_ordering
from mainstay_core.snapshots.orderings import Ordering
from mainstay_core.snapshots.units import UnitKind
from mainstay_train.comm.mesh import SINGLE, InnerMesh
from mainstay_train.exact import optimizer
from mainstay_train.exact.optimizer import StageState
from mainstay_train.model import blocks, workload
from mainstay_train.model.job_units import units_of_parts, units_of_workload
from mainstay_train.model.units import PROBABILITY, Unit
from mainstay_train.snapshots.unit_bytes import UnitBytes

MOE = "mainstay_train.models.moe:workload"
LLAMA = "mainstay_train.models.llama:workload"
SMALL = {
    "dim": 24, "layers": 3, "heads": 4, "kvHeads": 2, "hidden": 40, "sequence": 10,
    "microBatchSize": 2, "experts": 6, "activeExperts": 3, "sharedExperts": 2, "expertHidden": 12,
}  # fmt: skip
DENSE = {key: SMALL[key] for key in ("dim", "layers", "heads", "kvHeads", "hidden", "sequence")}
CPU = torch.device("cpu")
STEP_BYTES = 4
"""Of a parameter's number of steps, which Adam counts and prices leave out."""


def shape_of(stages: int) -> JobShape:
    return JobShape(
        lanes=1, shards_per_lane=1, replicas=1, min_replicas=1, stages=stages, steps=1, seed=0
    )


@pytest.mark.parametrize(("entrypoint", "config"), [(MOE, SMALL), (LLAMA, DENSE)])
@pytest.mark.parametrize("stages", [1, 2])
def test_they_are_those_that_each_stage_copies_in_number_name_and_size(
    entrypoint: str, config: dict[str, int], stages: int
) -> None:
    model = workload.load(entrypoint, config)
    found = units_of_workload(model, shape_of(stages), SINGLE, CPU)

    assert len(found.positions) == stages
    assert found.types.compute_bytes == model.dtype.itemsize
    for mine, units in zip(model.stages(stages), found.positions, strict=True):
        state = StageState(model.build(mine), model.optimizer)
        copied = UnitBytes(state, torch.zeros(state.layout.size))
        assert tuple(unit.name for unit in units) == copied.names
        for unit, price in zip(units, copied.prices, strict=True):
            told = unit.num_elements * found.types.full_bytes
            gaps = 3 * (64 + STEP_BYTES + 32 * 4) * len(copied.parameters[0]) * 8
            assert abs(told - price.full_bytes) < gaps


def test_inner_ranks_of_a_stage_have_its_units_each() -> None:
    model = workload.load(LLAMA, DENSE)
    shape = replace(shape_of(2), ranks_per_stage=2)
    found = units_of_workload(model, shape, InnerMesh(size=2), CPU)
    names = [[unit.name for unit in units] for units in found.positions]
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert names[0] + names[2] == [spec.name for spec in model.blocks]
    whole = units_of_workload(model, shape_of(2), SINGLE, CPU)
    for parts, units in zip(found.positions[::2], whole.positions, strict=True):
        for part, unit in zip(parts, units, strict=True):
            assert unit.num_elements / 2 <= part.num_elements < unit.num_elements


@pytest.mark.parametrize(("entrypoint", "config"), [(MOE, SMALL), (LLAMA, DENSE)])
def test_units_hold_each_element_of_their_blocks_once(
    entrypoint: str, config: dict[str, int]
) -> None:
    model = workload.load(entrypoint, config)
    (units,) = units_of_workload(model, shape_of(1), SINGLE, CPU).positions
    for index, flat in enumerate(model.layouts()):
        spans = sorted(span for unit in units if unit.block_index == index for span in unit.spans)
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == flat.size
        assert {unit.block for unit in units if unit.block_index == index} == {flat.name}


def test_experts_are_those_that_are_counted_and_know_their_place_in_a_commit() -> None:
    model = workload.load(MOE, SMALL)
    found = units_of_workload(model, shape_of(2), SINGLE, CPU)
    statistics = tuple(range(100, 112))

    counts = found.counts(statistics, Ordering.POPULARITY)
    named = dict(zip((expert.unit for expert in found.experts), counts, strict=True))
    assert named == model.popularity(statistics)
    assert found.layers == (2,) * 6 + (3,) * 6
    kinds = {unit.name: unit.kind for units in found.positions for unit in units}
    assert kinds["layers.2.experts.5"] is UnitKind.EXPERT
    assert kinds["layers.2.router"] is UnitKind.GATE
    assert kinds["layers.2.rest"] is UnitKind.REST
    assert kinds["layers.0"] is UnitKind.LAYER
    order = [price.name for price in found.order(1, Ordering.POPULARITY, (9, 1, 5, 5, 7, 3) * 2)]
    assert order[:3] == ["layers.2.experts.1", "layers.2.experts.5", "layers.2.experts.2"]
    assert order[-2:] == ["layers.2.router", "layers.2.rest"]


def test_an_order_for_which_a_model_tells_too_little_is_refused_by_name() -> None:
    plain = units_of_workload(workload.load(MOE, SMALL), shape_of(1), SINGLE, CPU)
    told = workload.load(MOE, {**SMALL, "counts": "probabilities"})
    counting = units_of_workload(told, shape_of(1), SINGLE, CPU)

    for ordering in (Ordering.POPULARITY, Ordering.TIME_DECAYED, Ordering.BACK_TO_FRONT):
        check_ordering(plain, ordering)
    check_ordering(counting, Ordering.SOFT_COUNT)
    assert counting.counts(range(24), Ordering.SOFT_COUNT) == (*range(6, 12), *range(18, 24))
    with pytest.raises(InvalidSpecError, match=r"does not count the probabilities of layers\.1\."):
        check_ordering(plain, Ordering.SOFT_COUNT)
    with pytest.raises(InvalidSpecError, match=r"layers\.1\.experts\.0 has no capacity; say it in"):
        check_ordering(plain, Ordering.CAPACITY_AWARE)


def test_a_block_of_the_users_says_capacities() -> None:
    spec = blocks.BlockSpec(
        name="mixture",
        build=lambda: torch.nn.Linear(4, 8),
        units=(
            Unit(name="one", parameters=("weight",), capacity=7),
            Unit(name="other", parameters=("bias",)),
        ),
        statistics=("one", f"one{PROBABILITY}", "other"),
    )
    model = workload.load(LLAMA, DENSE)
    model = workload.Workload(
        blocks=(*model.blocks[:-1], spec, model.blocks[-1]),
        dataset=model.dataset,
        activation_shape=model.activation_shape,
        learning_rate=model.learning_rate,
    )
    one, other = units_of_workload(model, shape_of(1), SINGLE, CPU).experts
    assert (one.unit, one.capacity, one.tokens, one.probabilities) == ("mixture.one", 7, 0, 1)
    assert (other.unit, other.capacity, other.tokens, other.probabilities) == (
        "mixture.other",
        0,
        2,
        None,
    )


def test_a_plain_models_pieces_are_layers() -> None:
    spec = blocks.BlockSpec(name="a", build=lambda: torch.nn.Linear(30, 50))
    parts = [blocks.Block(spec)]
    found = units_of_parts(parts, optimizer.each(torch.optim.SGD, momentum=0.9), CPU)

    ((unit,),) = found.positions
    assert (unit.name, unit.kind, unit.num_elements) == ("a", UnitKind.LAYER, 1504 + 64)
    assert (found.types.full_bytes, found.experts) == (8, ())
