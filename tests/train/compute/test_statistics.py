"""Statistics of a step, and the router bias that changes with them at its commit alone."""

import dataclasses
import itertools

import pytest
import torch

from mainstay_core.base import codec
from mainstay_core.base.bounds import MAX_STATISTICS
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import JobUid, PodUid, Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.votes import Commit, TypeStat
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.statistics import TypeResult, TypeSums
from mainstay_train.exact import numerics
from mainstay_train.model import workload
from mainstay_train.models import experts

MOE = "mainstay_train.models.moe:workload"
SMALL = {
    "dim": 16, "layers": 3, "heads": 2, "kvHeads": 1, "hidden": 24, "sequence": 12, "experts": 4,
    "activeExperts": 2, "expertHidden": 8, "biasRate": 0.125, "warmupSteps": 0,
}  # fmt: skip
TYPES, MICRO_BATCHES = 4, 2
BIAS = "layers.{}.mixture.router.bias"


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def make_engine(*, recompute=False, **config):
    model = workload.load(MOE, {**SMALL, **config})
    shape = JobShape(
        lanes=2, shards_per_lane=2, replicas=2, min_replicas=1, stages=1, steps=9, seed=3,
        micro_batches=MICRO_BATCHES,
    )  # fmt: skip
    job = JobConfig(
        job=JobUid("job"), name="job", shape=shape, entrypoint=MOE, workload={},
        recompute=recompute,
    )  # fmt: skip
    engine = Engine.build(
        model, job, Loader(model.dataset), stage=0, num_stages=1, device="cpu", hook=[].append
    )
    engine.state.initialize(3)
    return engine


def ballot(engine, types=range(TYPES), step=0):
    engine.compute(types, step, None)
    table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
    engine.reduce(None, table, [0], 0)
    return engine.ballot(None, table, 0, Slot(pod=PodUid("a"), index=0), "")


def told(stats):
    return {stat.type: stat.statistics for stat in stats}


def commit_of(statistics, step=0):
    return Commit(
        step=step, norm=1, scale=1e-3, tokens=1, loss=1, data="0" * 32, statistics=statistics
    )


def master(engine, name):
    (found,) = [t for t in engine.state.state_tensors() if (t.name, t.kind) == (name, "master")]
    return found.tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_type_tells_how_many_tokens_each_expert_had(dtype):
    engine = make_engine(dtype=dtype)
    counts = told(ballot(engine).stats)
    assert set(counts) == set(range(TYPES))
    for per_type in counts.values():
        layers = [per_type[:4], per_type[4:]]
        assert [sum(layer) for layer in layers] == [2 * 12 * MICRO_BATCHES] * 2
    assert len(set(counts.values())) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_who_computes_a_type_and_whether_again_does_not_change_what_it_tells(dtype):
    whole = told(ballot(make_engine(dtype=dtype)).stats)
    parts = [told(ballot(make_engine(dtype=dtype), types).stats) for types in ([0, 1], [3, 2])]
    again = told(ballot(make_engine(dtype=dtype, recompute=True)).stats)
    assert whole == parts[0] | parts[1] == again


def test_a_type_that_was_dropped_and_computed_again_counts_once():
    engine = make_engine()
    first = told(ballot(engine).stats)
    engine.drop_held()
    assert told(ballot(engine).stats) == first


def test_micro_batches_add_up_block_by_block_in_model_order():
    sums = TypeSums()
    assert sums.statistics() is None
    for block, counts in ((2, [5, 6]), (0, [1]), (2, [10, 20]), (0, [2])):
        sums.add_counts(block, torch.tensor(counts))
    assert sums.statistics().tolist() == [3, 15, 26]


def test_a_count_below_0_is_refused_before_anybody_is_told():
    result = TypeResult(statistics=torch.tensor([3, -1]))
    with pytest.raises(workload.WorkloadError, match="a block counted -1"):
        result.told(0, None, lambda: torch.tensor([3, -1]))


def test_more_statistics_than_a_vote_carries_are_refused():
    model = workload.load(MOE, SMALL)
    many = dataclasses.replace(model.blocks[2], statistics=("a",) * (MAX_STATISTICS - 3))
    with pytest.raises(InvalidSpecError, match="has blocks that count 1048577 integers, at most"):
        dataclasses.replace(model, blocks=(*model.blocks[:2], many, *model.blocks[3:]))


def test_a_model_that_counts_nothing_tells_nothing():
    assert "statistics" not in codec.dumps(TypeStat(type=0, loss_sum=1.0))
    llama = workload.load("", {"dim": 16, "layers": 1, "heads": 2, "kvHeads": 1, "hidden": 24})
    assert llama.statistics(range(3)) == (slice(0, 0),) * 3
    assert llama.popularity(()) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bias_changes_at_commit_by_the_committed_counts_and_by_nothing_else(dtype):
    engine = make_engine(dtype=dtype)
    ballot(engine)
    assert not master(engine, BIAS.format(1)).any()
    engine.apply(commit_of((9, 3, 5, 7, 6, 6, 6, 6)), 0.1)
    assert master(engine, BIAS.format(1)).tolist() == [-0.125, 0.125, 0.125, -0.125]
    assert master(engine, BIAS.format(2)).tolist() == [0.0] * 4
    engine.drop_held()
    ballot(engine, step=1)
    engine.apply(commit_of((0, 24, 0, 0, 1, 1, 1, 21), step=1), 0.1)
    assert master(engine, BIAS.format(1)).tolist() == [0.0, 0.0, 0.25, 0.0]
    assert master(engine, BIAS.format(2)).tolist() == [0.125, 0.125, 0.125, -0.125]
    kinds = [t.kind for t in engine.state.state_tensors() if t.name == BIAS.format(1)]
    assert kinds == ["master"], "the optimizer keeps nothing of it"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_choose_by_the_fp32_bias_in_any_type(dtype):
    engine = make_engine(dtype=dtype)
    block = engine.state.blocks[2]
    bias = block.module.mixture.router.bias
    assert bias.dtype == torch.float32
    master(engine, BIAS.format(1)).copy_(torch.tensor([0.0, 5.0, 0.0, 5.0001]))
    engine.state.refresh()
    assert bias[3] > bias[1], "bfloat16 would round both to 5"
    tokens = 12 * MICRO_BATCHES
    assert told(ballot(engine, [0]).stats)[0][:4] == (0, tokens, 0, tokens)


def test_a_bias_is_part_of_the_digests_and_of_what_is_healed():
    engine, other = make_engine(), make_engine()
    assert engine.state.masters_digest() == other.state.masters_digest()
    master(engine, BIAS.format(2))[3] = 0.5
    assert engine.state.masters_digest() != other.state.masters_digest()
    for mine, theirs in zip(other.state.flats(), engine.state.flats(), strict=True):
        mine.tensor.copy_(theirs.tensor)
    other.state.refresh()
    assert engine.state.masters_digest() == other.state.masters_digest()
    assert other.state.blocks[3].module.mixture.router.bias.tolist() == [0, 0, 0, 0.5]


def test_a_commit_without_the_counts_of_a_block_is_refused():
    engine = make_engine()
    ballot(engine)
    with pytest.raises(ValueError, match="counts 4 statistics, the commit has 1 of it"):
        engine.apply(commit_of((1, 2, 3, 4, 5)), 0.1)


def test_the_shift_of_a_bias_is_decided_in_integers():
    random = torch.Generator().manual_seed(4)
    for _ in range(200):
        width = int(torch.randint(1, 9, (1,), generator=random))
        counts = torch.randint(0, 4, (width,), generator=random).tolist()
        bias = torch.randn(width, generator=random)
        expected = bias.clone()
        for expert, count in enumerate(counts):
            if count * width < sum(counts):
                expected[expert] += 0.25
            elif count * width > sum(counts):
                expected[expert] -= 0.25
        experts.shift_bias(bias, counts, 0.25)
        assert torch.equal(bias, expected)


def test_popularity_is_by_unit_over_the_whole_model():
    model = workload.load(MOE, SMALL)
    assert model.statistics(range(5)) == tuple(
        itertools.starmap(slice, [(0, 0), (0, 0), (0, 4), (4, 8), (8, 8)])
    )
    popular = model.popularity(tuple(range(8)))
    assert popular["layers.1.experts.3"] == 3
    assert popular["layers.2.experts.0"] == 4
    assert len(popular) == 8
