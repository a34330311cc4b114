import functools
import random
import threading
from itertools import count

import numpy as np
import pytest
import torch
from tests.train.operations import Operations

from mainstay_core.planning.partials import grow_all
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.plan import Partial
from mainstay_train.exact import reduction
from mainstay_train.exact.buckets import cut
from mainstay_train.exact.layout import CHUNK, PAD, BlockLayout, StageLayout
from mainstay_train.exact.reduction import PartialStore, Reducer

LAYOUT = StageLayout(
    blocks=(
        BlockLayout.of("first", {"weight": (70_000,), "bias": (17,)}),
        BlockLayout.of("second", {"weight": (400, 500)}),
        BlockLayout.of("third", {"weight": (5,)}),
    )
)


def gradients(num_types, seed):
    """One flat fp32 gradient per type; magnitudes differ so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    flats = []
    for _ in range(num_types):
        flat = torch.randn(LAYOUT.size, generator=generator)
        flat *= 10.0 ** torch.randint(-6, 6, (LAYOUT.size,), generator=generator)
        flats.append(flat)
    return flats


def sum_by_rule_3(flats, lanes, shards_per_lane):
    """Design rule 3 word for word, in numpy: types ascending in a lane, then lanes ascending."""
    total = None
    for lane in range(lanes):
        lane_sum = None
        for shard_type in range(lane * shards_per_lane, (lane + 1) * shards_per_lane):
            flat = flats[shard_type].numpy()
            lane_sum = flat.copy() if lane_sum is None else lane_sum + flat
        total = lane_sum if total is None else total + lane_sum
    assert total.dtype == np.float32
    return torch.from_numpy(total)


def bits(tensor):
    return tensor.view(torch.int32)


def filled(flats, order, shards_per_lane):
    """A store in which the types of ``order`` were completed in that order."""
    store = PartialStore(LAYOUT, shards_per_lane)
    for shard_type in order:
        store.scratch.copy_(flats[shard_type])
        store.complete(shard_type)
    return store


@pytest.mark.parametrize("piece", [7, 1000, 1 << 30])
def test_sums_of_types_have_the_same_bits_whatever_is_added_at_a_time(monkeypatch, piece):
    monkeypatch.setattr(reduction, "PIECE_ELEMENTS", piece)
    flats = torch.randn(3, LAYOUT.size, generator=torch.Generator().manual_seed(1))

    store = filled(flats, range(3), 3)

    (total,) = store.partials.values()
    assert torch.equal(bits(total), bits(flats[0] + flats[1] + flats[2]))


def random_work(rng, num_types, num_cells):
    """Each cell's list of types: every type at least once, some twice, in any order."""
    work = [[] for _ in range(num_cells)]
    for shard_type in range(num_types):
        for cell in rng.sample(range(num_cells), rng.randint(1, min(2, num_cells))):
            work[cell].append(shard_type)
    for types in work:
        if rng.random() < 0.5:
            rng.shuffle(types)
    return work


def random_table(rng, stores, lanes, shards_per_lane):
    """Any choice of suppliers: of each lane a longest run, then single types."""
    table = []
    for lane in range(lanes):
        first, next_type = lane * shards_per_lane, lane * shards_per_lane
        runs = [
            Supply(partial=p, index=i)
            for i, store in enumerate(stores)
            for p in store.partials
            if p.lane == lane and p.first == first
        ]
        if runs:
            last = max(s.partial.last for s in runs)
            table.append(rng.choice([s for s in runs if s.partial.last == last]))
            next_type = last + 1
        for shard_type in range(next_type, first + shards_per_lane):
            single = Partial(lane=lane, first=shard_type, last=shard_type)
            holders = [i for i, store in enumerate(stores) if single in store.partials]
            table.append(Supply(partial=single, index=rng.choice(holders)))
    return table


class Hall:
    """Where the cells of one stage, a thread each, exchange: the group of a stage in-process.

    It has no buffers: until an exchange is finished, what is sent is read from where it
    lies, and what is received there may be anything.
    """

    def __init__(self, size):
        self._size, self._changed = size, threading.Condition()
        self._posted, self._taken = {}, {}

    def cell(self, rank):
        return Cell(self, rank)

    def post(self, number, rank, pieces):
        with self._changed:
            self._posted[number, rank] = pieces
            self._changed.notify_all()

    def take(self, number, rank, received):
        everybody = [(number, peer) for peer in range(self._size)]
        with self._changed:
            assert self._changed.wait_for(lambda: self._posted.keys() >= set(everybody), 30)
            received.copy_(torch.cat([self._posted[key][rank] for key in everybody]))
            self._taken[number, rank] = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._taken.keys() >= set(everybody), 30)


class Cell:
    def __init__(self, hall, rank):
        self._hall, self._rank, self._count = hall, rank, 0
        self.most = 0
        """Exchanges that were on their way together."""
        self._open = 0

    def start_exchange(self, received, sent, received_sizes, sent_sizes):
        assert sum(sent_sizes) == sent.numel()
        assert sum(received_sizes) == received.numel()
        received.fill_(float("nan"))
        self._hall.post(self._count, self._rank, sent.split(list(sent_sizes)))
        self._count += 1
        self._open += 1
        self.most = max(self.most, self._open)
        return self._count - 1, received

    def finish_exchange(self, exchange):
        number, received = exchange
        self._hall.take(number, self._rank, received)
        self._open -= 1


def reduce_all(stores, table, reducers, arrived=None):
    """Every cell reduces in its own thread; returns what each got.

    ``arrived`` is called with the index of a cell and what came to it.
    """
    members = list(range(len(stores)))
    if len(stores) == 1:
        return [reducers[0].reduce(None, table, members, 0, stores[0].partials)]
    hall, results = Hall(len(stores)), [None] * len(stores)

    def run(index):
        results[index] = reducers[index].reduce(
            hall.cell(index),
            table,
            members,
            index,
            stores[index].partials,
            arrived=arrived and functools.partial(arrived, index),
        )

    threads = [threading.Thread(target=run, args=(i,)) for i in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("seed", range(12))
def test_the_bits_are_those_of_rule_3_whoever_computed_and_supplies(seed):
    rng = random.Random(seed)
    lanes, shards_per_lane = rng.choice([(1, 1), (2, 1), (2, 3), (3, 2), (4, 4)])
    num_types = lanes * shards_per_lane
    flats = gradients(num_types, seed)
    expected = bits(sum_by_rule_3(flats, lanes, shards_per_lane))
    for num_cells in (1, 2, 3, 4):
        work = random_work(rng, num_types, num_cells)
        stores = [filled(flats, types, shards_per_lane) for types in work]
        table = random_table(rng, stores, lanes, shards_per_lane)
        reducers = [Reducer(LAYOUT) for _ in stores]
        for _ in range(2):  # a second time in the same buffers, as after a refused vote
            for result in reduce_all(stores, table, reducers):
                assert torch.equal(bits(result), expected)


def test_cells_may_come_and_go_between_steps():
    reducers = [Reducer(LAYOUT) for _ in range(3)]
    for step, num_cells in enumerate((3, 1, 2, 3)):
        flats = gradients(6, step)
        stores = [filled(flats, range(i, 6, num_cells), 2) for i in range(num_cells)]
        table = random_table(random.Random(step), stores, 3, 2)
        expected = bits(sum_by_rule_3(flats, 3, 2))
        for result in reduce_all(stores, table, reducers):
            assert torch.equal(bits(result), expected)


@pytest.mark.parametrize("num_cells", [1, 2])
def test_signs_of_zero_are_those_of_the_plain_sum(num_cells):
    flats = [torch.full((LAYOUT.size,), -0.0) for _ in range(4)]
    flats[1][::2] = 0.0
    stores = [filled(flats, range(i, 4, num_cells), 2) for i in range(num_cells)]
    table = random_table(random.Random(0), stores, 2, 2)
    for result in reduce_all(stores, table, [Reducer(LAYOUT) for _ in stores]):
        assert torch.equal(bits(result), bits(sum_by_rule_3(flats, 2, 2)))
        assert torch.signbit(result[1::2]).all()
        assert not torch.signbit(result[::2]).any()


def test_a_reduction_leaves_partials_as_they_were_also_when_it_is_interrupted():
    flats = gradients(4, 5)
    stores = [filled(flats, (0, 1, 3), 2), filled(flats, (2, 1), 2)]
    table = random_table(random.Random(1), stores, 2, 2)
    before = [{p: t.clone() for p, t in store.partials.items()} for store in stores]

    class Broken:
        """Ends in its nth exchange. What is on its way then is written to much later."""

        def __init__(self, completes):
            self._left = completes
            self.abandoned = []

        def start_exchange(self, received, sent, received_sizes, sent_sizes):
            del sent, received_sizes, sent_sizes
            return [received]

        def finish_exchange(self, exchange):
            exchange[0].fill_(float("nan"))
            if self._left == 0:
                raise GroupEnded("a member is gone")
            self._left -= 1

        def abandon(self, exchanges):
            self.abandoned += [received for (received,) in exchanges]

    reducers = [Reducer(LAYOUT, bucket_bytes=4 * 65_536) for _ in stores]
    late = []
    for completes in range(8):
        for index, store in enumerate(stores):
            group = Broken(completes)
            with pytest.raises(GroupEnded):
                reducers[index].reduce(group, table, [0, 1], index, store.partials)
            assert group.abandoned
            late += group.abandoned

    def writes_late(*_):
        for received in late:
            received.fill_(float("nan"))

    for reducer in reducers:
        reducer._sum_own = lambda *args, add=reducer._sum_own: (writes_late(), add(*args))[1]
    for result in reduce_all(stores, table, reducers):
        assert torch.equal(bits(result), bits(sum_by_rule_3(flats, 2, 2)))
    for store, kept in zip(stores, before, strict=True):
        assert store.partials.keys() == kept.keys()
        assert all(torch.equal(bits(store.partials[p]), bits(kept[p])) for p in kept)


def test_runs_merge_in_ascending_order_and_other_types_stay_alone():
    flats = gradients(8, 3)
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [4, 5, 7, 6, 0], [5, 4, 1]):
        store = filled(flats, order, 4)
        assert store.held() == grow_all((), order, 4)
        for partial, buffer in store.partials.items():
            expected = flats[partial.first].clone()
            for shard_type in range(partial.first + 1, partial.last + 1):
                expected += flats[shard_type]
            assert torch.equal(bits(buffer), bits(expected))


def test_a_partial_is_never_half_written():
    flats = gradients(3, 8)
    store = filled(flats, (0, 1), 4)
    run = Partial(lane=0, first=0, last=1)
    kept = store.partials[run].clone()
    store.scratch.copy_(flats[2])  # a type on its way, interrupted before it is complete
    assert store.held() == (run,)
    assert torch.equal(bits(store.partials[run]), bits(kept))
    store.scratch.copy_(flats[2])
    store.complete(2)
    assert store.held() == (Partial(lane=0, first=0, last=2),)


def test_buffers_are_reused_and_never_shared():
    flats = gradients(4, 9)
    store = filled(flats, (0, 2, 3), 2)
    first = {t.data_ptr() for t in store.partials.values()} | {store.scratch.data_ptr()}
    assert len(first) == len(store.partials) + 1
    store.clear()
    assert store.held() == ()
    for shard_type in (0, 2, 1):
        for view in store.scratch_views.values():
            assert store.scratch.data_ptr() <= view.data_ptr()
        store.scratch.copy_(flats[shard_type])
        store.complete(shard_type)
    second = {t.data_ptr() for t in store.partials.values()} | {store.scratch.data_ptr()}
    assert len(second) == len(store.partials) + 1
    assert second <= first


@pytest.mark.parametrize("num_cells", [1, 2, 3, 8, pytest.param(4_000, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("chunks", [1, 3, 100])
def test_every_element_is_in_one_share_and_shares_are_even(num_cells, chunks):
    lengths = [chunk.stop - chunk.start for chunk in LAYOUT.chunks()]
    shares = torch.zeros(LAYOUT.size, dtype=torch.int32)
    for bucket in cut(lengths, chunks * CHUNK * 4, num_cells):
        assert bucket.stop - bucket.start <= chunks * CHUNK
        assert max(bucket.sizes) - min(bucket.sizes) <= PAD
        for rank in range(num_cells):
            share = bucket.share(rank)
            assert share.start % PAD == 0
            assert share.stop - share.start == bucket.sizes[rank]
            shares[share] += 1
    assert torch.equal(shares, torch.ones_like(shares))


@pytest.mark.parametrize("bucket_bytes", [1, 4 * CHUNK, 8 * CHUNK, 12 * CHUNK])
def test_the_bits_do_not_depend_on_the_size_of_buckets(bucket_bytes):
    flats = gradients(6, 4)
    stores = [filled(flats, types, 2) for types in ((0, 1, 4), (2, 5), (3,))]
    table = random_table(random.Random(2), stores, 3, 2)
    expected = bits(sum_by_rule_3(flats, 3, 2))
    for _ in range(2):
        reducers = [Reducer(LAYOUT, bucket_bytes=bucket_bytes) for _ in stores]
        for result in reduce_all(stores, table, reducers):
            assert torch.equal(bits(result), expected)


@pytest.mark.parametrize("num_cells", [2, 3, 4])
def test_the_first_and_the_last_cell_send_nothing_to_themselves(num_cells):
    flats = gradients(num_cells, 5)
    stores = [filled(flats, (i,), 1) for i in range(num_cells)]
    table = [Supply(partial=next(iter(s.partials)), index=i) for i, s in enumerate(stores)]
    hall, to_itself = Hall(num_cells), {}

    class Noting(Cell):
        def start_exchange(self, received, sent, received_sizes, sent_sizes):
            assert received_sizes[self._rank] == sent_sizes[self._rank]
            to_itself.setdefault(self._rank, set()).add(sent_sizes[self._rank] > 0)
            return super().start_exchange(received, sent, received_sizes, sent_sizes)

    def run(rank):
        reducer = Reducer(LAYOUT, bucket_bytes=4 * CHUNK)
        cells = list(range(num_cells))
        reducer.reduce(Noting(hall, rank), table, cells, rank, stores[rank].partials)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_cells)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert to_itself[0] == to_itself[num_cells - 1] == {False}
    assert all(True in to_itself[rank] for rank in range(1, num_cells - 1))


def test_buckets_overtake_nobody_and_one_is_on_its_way_while_another_is_summed():
    flats = gradients(2, 4)
    stores = [filled(flats, (i,), 1) for i in range(2)]
    table = random_table(random.Random(0), stores, 2, 1)
    hall, seen = Hall(2), []

    def run(index):
        cell = hall.cell(index)
        reducer = Reducer(LAYOUT, bucket_bytes=4 * CHUNK)
        begun = []
        reducer.reduce(
            cell, table, [0, 1], index, stores[index].partials, lambda: begun.append(cell._open)
        )
        seen.append((cell.most, cell._open, begun))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The next scatter and the gathers of the two before it; what was to be done meanwhile was.
    assert seen == [(3, 0, [1])] * 2


class Echo:
    """A group of which nothing comes back: it does for counting."""

    def start_exchange(self, received, sent, received_sizes, sent_sizes):
        del received, sent, received_sizes, sent_sizes

    def finish_exchange(self, exchange):
        del exchange


def _operations(num_parameters, num_blocks, num_buckets, num_cells, num_runs=1):
    """Operations of a reduction, without memory: its tensors have no elements to speak of."""
    layout = StageLayout(
        blocks=tuple(
            BlockLayout.of(f"b{i}", {"w": (num_parameters // num_blocks,)})
            for i in range(num_blocks)
        )
    )
    num_chunks = len(layout.chunks())
    each = -(-num_chunks // num_buckets)
    assert -(-num_chunks // each) == num_buckets
    reducer = Reducer(layout, "meta", 4 * CHUNK * each)
    table = [
        Supply(partial=Partial(lane=i, first=2 * run, last=2 * run), index=i)
        for i in range(num_cells)
        for run in range(num_runs)
    ]
    own = {s.partial: layout.allocate(device="meta") for s in table if s.index == 0}
    members = list(range(num_cells))
    group = None if num_cells == 1 else Echo()
    reducer.reduce(group, table, members, 0, own)  # what is allocated once is there
    with Operations() as seen:
        reducer.reduce(group, table, members, 0, own)
    return seen.count


@pytest.mark.parametrize("num_runs", [1, 3])
@pytest.mark.parametrize("num_cells", [1, 2, 4])
def test_operations_are_counted_by_buckets_alone(num_cells, num_runs):
    """At 10^6 and at 10^8 parameters, with few blocks and with many: a + b x buckets."""
    small = [_operations(1_000_000, 1, buckets, num_cells, num_runs) for buckets in (1, 2, 4)]
    per_bucket = small[1] - small[0]
    assert small[2] == small[0] + 3 * per_bucket
    for num_blocks in (1, 16):
        for buckets in (1, 2, 4):
            found = _operations(100_000_000, num_blocks, buckets, num_cells, num_runs)
            assert found == small[0] + (buckets - 1) * per_bucket


@pytest.mark.parametrize("seed", range(6))
def test_what_arrives_otherwise_than_it_was_sent_is_known_with_its_sender(seed):
    rng = random.Random(seed)
    lanes, shards_per_lane, num_cells = 2, 3, rng.randint(2, 4)
    flats = gradients(lanes * shards_per_lane, seed)
    work = random_work(rng, len(flats), num_cells)
    stores = [filled(flats, order, shards_per_lane) for order in work]
    table = random_table(rng, stores, lanes, shards_per_lane)
    bucket_bytes = rng.choice([1 << 16, 1 << 18, 1 << 30])
    reducers = [Reducer(LAYOUT, "cpu", bucket_bytes, compares_wire=True) for _ in stores]
    expected = sum_by_rule_3(flats, lanes, shards_per_lane)

    came = [[] for _ in stores]
    for result in reduce_all(stores, table, reducers, lambda i, tensor: came[i].append(tensor)):
        assert torch.equal(bits(result), bits(expected))
    assert [r.differing[0].tolist() for r in reducers] == [[0] * num_cells] * num_cells

    receiver = rng.choice([i for i in range(num_cells) if sum(map(torch.numel, came[i]))])
    sizes = [tensor.numel() for tensor in came[receiver]]
    number = rng.choices(range(len(sizes)), sizes)[0]
    element, bit = rng.randrange(sizes[number]), 1 << rng.randrange(31)
    seen = count()

    def flip(index, tensor):
        if index == receiver and next(seen) == number:
            bits(tensor)[element] ^= bit

    reduce_all(stores, table, reducers, flip)
    told = [reducer.differing[0].tolist() for reducer in reducers]
    assert [sum(cells) for cells in told] == [int(i == receiver) for i in range(num_cells)]

    for result in reduce_all(stores, table, reducers):
        assert torch.equal(bits(result), bits(expected))
