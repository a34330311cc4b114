"""The process of the experiments about lost stages: what it computes, loses and makes anew."""

import itertools
from dataclasses import replace

import pytest
import torch
from benchmarks.support.approximate.losses import (
    LATER_STEPS,
    Cost,
    Draw,
    Loss,
    cost_of,
    reaches,
    restarted,
)
from benchmarks.support.approximate.staged_model import StagedModel, Strategy
from benchmarks.support.approximate.walks import FIRST_TOKEN, RESET, TURN, Walks
from benchmarks.support.intervals import Claim, interval_of
from benchmarks.support.played_step import played_s

from mainstay_core.base.shape import Cut, JobShape, Order
from mainstay_train.exact.draws import Address
from mainstay_train.models import llama

STAGES = 4
SHAPE = JobShape(
    lanes=1,
    shards_per_lane=2,
    replicas=1,
    min_replicas=1,
    stages=STAGES,
    steps=100,
    seed=3,
    micro_batches=2,
    cut=Cut.EQUAL,
)
SWAPPED = replace(SHAPE, order=Order.SWAPPED)
PLAN = Strategy(name="the product's")


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text("Stages are lost and made anew. " * 40)
    sizes = {"dim": 16, "layers": 4, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}
    return llama.workload(sizes | {"data": {"path": str(text)}})


def trained(workload, shape, steps=3, **options):
    model = StagedModel(workload, shape, **options)
    digests = []
    for step in range(steps):
        model.step(step)
        digests.append(model.masters_digest())
    return model, digests


def test_block_by_block_the_bits_are_those_of_the_interpreter(workload):
    _, digests = trained(workload, SHAPE)
    assert trained(workload, SHAPE, by_routes=True)[1] == digests
    assert trained(workload, SWAPPED)[1] != digests


def test_a_redundant_forward_changes_no_bit(workload):
    assert trained(workload, SHAPE, redundant=True)[1] == trained(workload, SHAPE)[1]


@pytest.mark.parametrize(("end", "twin"), [(0, 1), (STAGES - 1, STAGES - 2)])
def test_a_swapped_end_is_copied_from_its_twin_and_its_guarded_block_comes_back(
    workload, end, twin
):
    model, _ = trained(workload, SWAPPED)
    before = model.copy_of(end)
    guarded = "embedding" if end == 0 else "head"

    weights = model.lose(end, 3, PLAN, {})

    assert weights == {twin: 1.0}
    after, (theirs,) = model.copy_of(end), model.layers_of(twin)
    other = model.copy_of(twin)
    for id_, tensor in after.items():
        kind, _, block = id_.partition(":")
        if block == guarded:
            assert torch.equal(tensor, before[id_])
        elif kind == "master":
            assert torch.equal(tensor, other[f"master:{theirs}"])
        else:
            assert not tensor.any()


def test_an_end_in_order_cannot_be_made_anew_unless_it_is_copied_as_the_authors_do(workload):
    model, _ = trained(workload, SHAPE)
    with pytest.raises(ValueError, match="it has no two neighbours"):
        model.lose(0, 3, PLAN, {})
    assert model.lose(0, 3, replace(PLAN, copies_ends=True), {}) == {1: 1.0}


@pytest.mark.parametrize("every", [2, 3])
def test_a_job_that_restarts_has_the_versions_of_an_undisturbed_one(workload, every):
    """Against a job that really goes back."""
    losses = [Loss(step=1, stage=0), Loss(step=4, stage=2), Loss(step=5, stage=1)]
    versions = restarted(losses, every, 8)
    _, undisturbed = trained(workload, SHAPE, max(versions))

    model = StagedModel(workload, SHAPE)
    version, checkpoint = 0, (0, model.snapshot())
    for iteration, expected in enumerate(versions):
        if iteration in {loss.step for loss in losses}:
            version, copied = checkpoint
            model.go_back(copied)
        model.step(version)
        version += 1
        if version % every == 0:
            checkpoint = version, model.snapshot()
        assert version == expected
        assert model.masters_digest() == undisturbed[version - 1]


def test_losses_of_fewer_steps_are_the_first_of_those_of_more():
    draw = Draw(rate=0.05, seed=1, first=10, with_ends=True)
    few, many = draw.losses(6, 100), draw.losses(6, 400)
    assert few
    assert few == many[: len(few)]
    assert {loss.stage for loss in many} == set(range(6))
    inner = Draw(rate=0.05, seed=1, first=10).losses(6, 400)
    assert {loss.stage for loss in inner} == {1, 2, 3, 4}
    assert min(loss.step for loss in inner) >= 10


def test_a_level_is_reached_at_the_first_step_at_or_below_it():
    assert reaches({10: 2.0, 20: 1.0, 30: 1.5, 40: 0.5}, 1.0) == 20
    assert reaches({10: 2.0}, 1.0) is None


def test_a_loss_costs_what_it_is_over_the_loss_before_and_over_an_undisturbed_run():
    lost = {"step": 20, "stage": 0, "before": 1.0, "after": 1.75}
    held_out, undisturbed = {20 + LATER_STEPS: 1.25}, {20: 1.5, 20 + LATER_STEPS: 0.75}
    assert cost_of(lost, held_out, undisturbed) == Cost(jump=0.75, right_after=0.25, later=0.5)
    assert cost_of(lost, {}, undisturbed) == Cost(jump=0.75, right_after=0.25, later=None)
    assert cost_of(lost, held_out, {}) == Cost(jump=0.75, right_after=None, later=None)


def test_targets_of_walks_are_where_the_moves_have_led():
    """Against a walk that is gone move by move."""
    walks = Walks(sequence=40, micro_batch_size=16, places=5)
    batch = walks.batch(Address(1, 2, 3, 4))
    for row, targets in zip(batch.tokens - FIRST_TOKEN, batch.targets - FIRST_TOKEN, strict=True):
        place, is_back = 0, 0
        for move, target in zip(row.tolist(), targets.tolist(), strict=True):
            if move == RESET:
                place, is_back = 0, 0
            elif move == TURN:
                is_back = 1 - is_back
            else:
                place = (place + (move - TURN) * (1 - 2 * is_back)) % 5
            assert target == 2 * place + is_back
    again = walks.batch(Address(1, 2, 3, 4))
    assert torch.equal(batch.tokens, again.tokens)


def test_an_interval_holds_the_mean_in_nineteen_of_twenty_draws():
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn((2000, 5), generator=generator, dtype=torch.float64).tolist()
    found = [interval_of(values) for values in draws]
    holds = sum(abs(interval.mean) <= interval.half for interval in found)
    assert 0.93 < holds / len(draws) < 0.97


def test_a_claim_is_confirmed_refuted_or_open():
    def verdict(*differences):
        return Claim(says="", section="", differences=differences).verdict()

    assert verdict(-1.0, -1.1, -0.9) == "confirmed"
    assert verdict(1.0, 1.1, 0.9) == "not so at this scale"
    assert verdict(-1.0, 1.1, 0.2) == "not shown at this scale"
    assert verdict(-1.0) == "not measured"
    assert verdict() == "not measured"


def test_every_pair_of_weights_adds_up_to_one(workload):
    model, _ = trained(workload, SHAPE)
    for stage, how in itertools.product((1, 2), ("plan", "authors")):
        weights = model.lose(stage, 3, Strategy(name="", how=how), {})
        assert set(weights) == {stage - 1, stage + 1}
        assert sum(weights.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("num_flows", [4, 16])
def test_programs_in_order_take_as_long_as_a_pipeline_that_fills_and_drains(num_flows):
    """Each stage works on every flow; the last one begins when a forward has come to it."""
    lasts = num_flows + (STAGES - 1) * 2 / 3
    assert played_s(Order.IN_ORDER, num_flows, STAGES, 1.0) == pytest.approx(lasts)
    swapped = played_s(Order.SWAPPED, num_flows, STAGES, 1.0)
    assert lasts - 1 <= swapped < 1.4 * lasts


@pytest.mark.parametrize(("num_flows", "over"), [(16, 1.037), (64, 1.010)])
def test_a_swapped_step_takes_by_its_programs_what_the_pages_say(num_flows, over):
    """docs/design.md section 6 and docs/benchmarks.md have these figures."""
    swapped, in_order = (
        played_s(order, num_flows, 4, 1.0) for order in (Order.SWAPPED, Order.IN_ORDER)
    )
    assert swapped / in_order == pytest.approx(over, abs=5e-4)
