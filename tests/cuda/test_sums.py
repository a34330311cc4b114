"""Norms, the canonical reduction and gradients by part: their bits are defined."""

import math
import random

import pytest
import torch
from tests.train.exact import test_gradients, test_reduction
from tests.train.exact.test_reduction import LAYOUT, bits, gradients, reduce_all, sum_by_rule_3
from tests.train.sums.test_norms import drawn

from mainstay_core.base.digest import CHUNK
from mainstay_train.exact import wire_sums
from mainstay_train.exact.gradients import GradientSums
from mainstay_train.exact.reduction import PartialStore, Reducer
from mainstay_train.sums.norms import FlatNorms
from mainstay_train.sums.readout import Readout
from mainstay_train.sums.rows import Piece


@pytest.mark.parametrize("seed", range(4))
def test_norms_have_the_bits_of_the_host(device, seed):
    rng, pieces, end = random.Random(seed), [], 0
    for number in range(9):
        numel = rng.choice([1, 31, 500, 9000, 17_000, CHUNK - 1, CHUNK, 2 * CHUNK, 3 * CHUNK + 40])
        start = end + 32 * rng.randrange(3)
        pieces.append(Piece(str(number), start, numel))
        end = start + -(-numel // 32) * 32
    flat = drawn(end, seed)
    flat[rng.randrange(end)] = 1e-42  # denormal
    here = FlatNorms(pieces).squares(flat)
    there = FlatNorms(pieces, device).squares(flat.to(device))
    assert [value.hex() for value in there.tolist()] == [value.hex() for value in here.tolist()]


def test_a_norm_that_is_no_number_says_so(device):
    flat = torch.ones(64, device=device)
    flat[3] = math.inf
    assert FlatNorms([Piece("", 0, 64)], device).squares(flat).tolist() == [math.inf]


@pytest.mark.parametrize("chunks", [1, 2, 100])
def test_digest_and_norms_of_a_gradient(device, chunks):
    layout = test_gradients.stage(3 * CHUNK + 500, 32, 70_000, 5 * CHUNK, 100)
    flat = layout.allocate().normal_(generator=torch.Generator().manual_seed(chunks))
    within = test_gradients.bounds(layout, chunks)
    here = test_gradients.taken(GradientSums(layout, within), within, flat)
    sums, there = GradientSums(layout, within, device=device), flat.to(device)
    found = test_gradients.taken(sums, within, there)
    assert found.block_digests() == here.block_digests()
    assert found.norms_sq() == here.norms_sq()
    assert found.digest() == here.digest() == sums.digest(there)


def filled(flats, order, shards_per_lane, device):
    store = PartialStore(LAYOUT, shards_per_lane, device)
    for shard_type in order:
        store.scratch.copy_(flats[shard_type])
        store.complete(shard_type)
    return store


@pytest.mark.parametrize("compares_wire", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_reduction_has_the_bits_of_rule_3(device, seed, compares_wire):
    """One cell; several ones, threads on one device that take what others sent, over the host."""
    rng = random.Random(seed)
    lanes, shards_per_lane = rng.choice([(2, 3), (3, 2), (4, 4)])
    num_types = lanes * shards_per_lane
    flats = gradients(num_types, seed)
    expected = bits(sum_by_rule_3(flats, lanes, shards_per_lane))
    for num_cells in (1, 3):
        work = test_reduction.random_work(rng, num_types, num_cells)
        stores = [filled(flats, types, shards_per_lane, device) for types in work]
        table = test_reduction.random_table(rng, stores, lanes, shards_per_lane)
        reducers = [Reducer(LAYOUT, device, compares_wire=compares_wire) for _ in stores]
        for _ in range(2):
            for result in reduce_all(stores, table, reducers):
                assert result.device == device
                assert torch.equal(bits(result.cpu()), expected)
        if compares_wire and num_cells > 1:
            for reducer in reducers:
                (differing,) = reducer.differing
                assert differing.tolist() == [0] * num_cells


def test_signs_of_zero_are_those_of_the_plain_sum(device):
    flats = [torch.full((LAYOUT.size,), -0.0) for _ in range(4)]
    flats[1][::2] = 0.0
    stores = [filled(flats, range(4), 2, device)]
    table = test_reduction.random_table(random.Random(0), stores, 2, 2)
    (result,) = reduce_all(stores, table, [Reducer(LAYOUT, device)])
    assert torch.signbit(result[1::2]).all()
    assert not torch.signbit(result[::2]).any()


def test_sums_of_what_is_sent_lie_where_it_lies(device):
    sums = wire_sums.WireSums(device)
    sums.begin([1, 1])
    sent = torch.arange(128.0, device=device)
    sums.send(0, 0, sent, [64, 64])
    sums.receive(0, 0, sent, [64, 64], 0)
    assert sums.stated().device == device
    assert sums.differing(sums.stated()).tolist() == [0, 1], "the second was for another cell"


def test_results_are_fetched_together(device):
    values = [
        torch.arange(5, device=device),
        torch.tensor(1.5, dtype=torch.float64, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.arange(6.0, dtype=torch.float64, device=device).view(2, 3).t(),
        torch.tensor(7),
    ]
    readout = Readout()
    later = readout.add_all(values)
    readout.fetch()
    for fetched, value in zip(later, values, strict=True):
        assert fetched().device.type == "cpu"
        assert torch.equal(fetched(), value.cpu())


def test_a_reduction_does_not_wait_for_the_device(needs_cuda):
    flats = gradients(4, 1)
    stores = [filled(flats, range(4), 2, needs_cuda)]
    table = test_reduction.random_table(random.Random(0), stores, 2, 2)
    reducers = [Reducer(LAYOUT, needs_cuda)]
    reduce_all(stores, table, reducers)
    torch.cuda.set_sync_debug_mode("error")
    try:
        reduce_all(stores, table, reducers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
