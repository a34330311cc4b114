"""A reduction that begins while a cell still computes: the same bits, and nothing spoilt."""

import itertools
import random
import threading

import pytest
import torch
from tests.train.exact.test_reduction import (
    LAYOUT,
    Hall,
    bits,
    filled,
    gradients,
    sum_by_rule_3,
)

from mainstay_core.job.sizes.reduction_sizes import share_edges
from mainstay_core.planning.partials import covers, grow_all
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.early import EarlyReduction
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_train.base.background import Background
from mainstay_train.exact.early import BegunReduction
from mainstay_train.exact.layout import CHUNK
from mainstay_train.exact.reduction import Reducer

LAST_FIRST = range(len(LAYOUT.blocks) - 1, -1, -1)
SMALL = 4 * CHUNK
"""A bucket of one chunk."""


def shared_work(rng, num_types, num_cells):
    """Each type on one cell, in any order."""
    work = [[] for _ in range(num_cells)]
    for shard_type in range(num_types):
        rng.choice(work).append(shard_type)
    for types in work:
        rng.shuffle(types)
    return work


def table_of(work, shards_per_lane):
    supplies = [
        Supply(partial=partial, index=index)
        for index, types in enumerate(work)
        for partial in grow_all((), types, shards_per_lane)
    ]
    return tuple(sorted(supplies, key=lambda s: (s.partial.lane, s.partial.first)))


def early_of(group, work, shards_per_lane, index):
    mine = grow_all((), work[index], shards_per_lane)
    (last,) = (partial for partial in mine if covers(partial, work[index][-1]))
    return EarlyReduction(
        group=group,
        table=table_of(work, shards_per_lane),
        members=tuple(range(len(work))),
        index=index,
        partial=last,
    )


def begin(group, work, shards_per_lane, index, flats, reducer, placed=lambda _: None):
    """A cell at the moment when its last type is in scratch: its store, and its reduction."""
    store = filled(flats, work[index][:-1], shards_per_lane)
    early = early_of(group, work, shards_per_lane, index)
    begun = BegunReduction(early, LAYOUT, store, reducer, Background("early reduction"), placed)
    return store, begun


def deliver(store, flats, shard_type, begun, block):
    """The backward pass of the last type leaves a block's gradients."""
    start = LAYOUT.offsets[block]
    within = slice(start, start + LAYOUT.blocks[block].size)
    store.scratch[within] = flats[shard_type][within]
    begun.deliver(block)


def run_cell(hall, work, shards_per_lane, index, flats, *, early):
    reducer, members = Reducer(LAYOUT, bucket_bytes=SMALL), list(range(len(work)))
    group = hall.cell(index)
    if not early:
        store = filled(flats, work[index], shards_per_lane)
        table = table_of(work, shards_per_lane)
        return store, reducer.reduce(group, table, members, index, store.partials)
    placed = {}

    def take(start):
        placed[start] = reducer.reduced[start : dict(reducer.bounds)[start]].clone()

    store, begun = begin(group, work, shards_per_lane, index, flats, reducer, take)
    last = work[index][-1]
    for block in LAST_FIRST:
        deliver(store, flats, last, begun, block)
    store.complete(last, joined=True)
    begun.finish()
    assert torch.equal(
        bits(torch.cat([placed[start] for start, _ in reducer.bounds])), bits(reducer.reduced)
    )
    return store, reducer.reduced


@pytest.mark.parametrize("seed", range(12))
def test_cells_that_begin_early_and_cells_that_do_not_reduce_together(seed):
    rng = random.Random(seed)
    lanes, shards_per_lane = rng.choice([(1, 2), (2, 1), (2, 3), (3, 2)])
    flats = gradients(lanes * shards_per_lane, seed)
    expected = bits(sum_by_rule_3(flats, lanes, shards_per_lane))
    num_cells = rng.randint(2, 4)
    work = shared_work(rng, lanes * shards_per_lane, num_cells)
    hall, cells = Hall(num_cells), [None] * num_cells

    def run(index):
        early = bool(work[index]) and index % 3 != 2
        cells[index] = run_cell(hall, work, shards_per_lane, index, flats, early=early)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_cells)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for types, (store, reduced) in zip(work, cells, strict=True):
        assert torch.equal(bits(reduced), expected)
        plain = filled(flats, types, shards_per_lane)
        assert store.held() == plain.held()
        for partial, flat in plain.partials.items():
            assert torch.equal(bits(store.partials[partial]), bits(flat))


class Recorded:
    """A group of which everything comes back as zeros; it notes what was sent, and when."""

    def __init__(self, ends_after=None):
        self.sent, self.ended = [], False
        self.abandoned = 0
        self._ends_after = ends_after
        self.changed = threading.Condition()

    def start_exchange(self, received, sent, received_sizes, sent_sizes):
        del received_sizes, sent_sizes
        with self.changed:
            self.sent.append(sent.clone())
            self.changed.notify_all()
        received.zero_()
        return received

    def finish_exchange(self, exchange):
        del exchange
        with self.changed:
            if self._ends_after is not None:
                self.changed.wait_for(lambda: self.ended or self._ends_after > 0)
                self._ends_after -= 1
            if self.ended:
                raise GroupEnded("the group has ended")

    def wait_sent(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.sent) >= count, 30)

    def shutdown(self, why):
        del why
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def abandon(self, exchanges):
        self.abandoned += len(exchanges)
        self.shutdown("abandoned")


WORK = [[0, 1], [2, 3]]


def test_a_bucket_is_sent_when_all_its_blocks_are_there_and_not_before():
    flats, group = gradients(4, 1), Recorded()
    store, begun = begin(group, WORK, 2, 0, flats, Reducer(LAYOUT, bucket_bytes=SMALL))
    whole = flats[0] + flats[1]
    chunks = [
        (LAYOUT.offsets[c.block] + c.start, LAYOUT.offsets[c.block] + c.stop, c.block)
        for c in reversed(LAYOUT.chunks())
    ]
    for block in LAST_FIRST:
        deliver(store, flats, 1, begun, block)
        there = [chunk for chunk in chunks if chunk[2] >= block]
        # Behind the first bucket, each one's sum goes out after the next one's parts.
        group.wait_sent(2 * len(there) - 1)
        scattered = [group.sent[0], *group.sent[1::2]][: len(there)]
        assert len(group.sent) <= 2 * len(there)
        for sent, (start, stop, _) in zip(scattered, there, strict=True):
            others = start + share_edges(stop - start, 2)[1]  # its own share stays where it is
            assert torch.equal(bits(sent), bits(whole[others:stop]))
    store.complete(1, joined=True)
    begun.finish()


@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("ends_after", [0, 1, 3, None])
def test_what_is_given_up_leaves_partials_as_they_were_and_ends_its_group(blocks, ends_after):
    flats, group = gradients(4, 2), Recorded(ends_after)
    reducer = Reducer(LAYOUT, bucket_bytes=SMALL)
    before = reducer.reduced
    store, begun = begin(group, WORK, 2, 0, flats, reducer)
    kept = {partial: flat.clone() for partial, flat in store.partials.items()}
    for block in list(LAST_FIRST)[:blocks]:
        deliver(store, flats, 1, begun, block)
    if blocks:
        group.wait_sent(1)
    begun.give_up()
    assert begun._over.is_set()
    assert store.partials.keys() == kept.keys()
    assert all(torch.equal(bits(store.partials[p]), bits(kept[p])) for p in kept)
    if not blocks:
        assert not group.ended, "nobody has heard of it"
    is_over = begun._error is None
    assert is_over or isinstance(begun._error, GroupEnded)
    if blocks and not is_over:
        assert group.ended
    if group.abandoned:
        assert reducer.reduced is not before, "what comes late comes elsewhere"
    # As a patch of the next quorum.
    store.scratch.copy_(flats[1])
    store.complete(1)
    expected = filled(flats, WORK[0], 2)
    for partial, flat in expected.partials.items():
        assert torch.equal(bits(store.partials[partial]), bits(flat))


def test_a_group_that_ends_while_nobody_waits_is_told_at_the_end():
    flats, group = gradients(4, 3), Recorded(ends_after=0)
    store, begun = begin(group, WORK, 2, 0, flats, Reducer(LAYOUT, bucket_bytes=SMALL))
    deliver(store, flats, 1, begun, 2)
    deliver(store, flats, 1, begun, 1)
    group.wait_sent(2)
    group.shutdown("a member is gone")
    deliver(store, flats, 1, begun, 0)
    store.complete(1, joined=True)
    with pytest.raises(GroupEnded, match="the group has ended"):
        begun.finish()
    assert group.abandoned
    plain = filled(flats, WORK[0], 2)
    assert store.held() == plain.held()
    for partial, flat in plain.partials.items():
        assert torch.equal(bits(store.partials[partial]), bits(flat))


def test_it_is_known_by_its_group_table_and_members():
    flats, group = gradients(4, 4), Recorded()
    _, begun = begin(group, WORK, 2, 0, flats, Reducer(LAYOUT, bucket_bytes=SMALL))
    table = table_of(WORK, 2)
    assert begun.is_for(group, list(table), [0, 1])
    assert not begun.is_for(Recorded(), table, [0, 1])
    assert not begun.is_for(group, table[::-1], [0, 1])
    assert not begun.is_for(group, table, [1, 0])
    begun.give_up()


def test_a_type_that_joined_its_run_piece_by_piece_has_the_bits_of_one_that_was_added():
    flats = [*gradients(2, 6), torch.full((LAYOUT.size,), -0.0)]
    flats[1][::3], flats[0][::3] = -0.0, 0.0
    plain, pieces = filled(flats, (0, 1, 2), 3), filled(flats, (0, 1), 3)
    pieces.scratch.copy_(flats[2])
    edges = [LAYOUT.size, *reversed(LAYOUT.offsets)]
    for stop, start in itertools.pairwise(edges):
        pieces.join_run(2, slice(start, stop))
    pieces.complete(2, joined=True)
    assert pieces.held() == plain.held()
    (whole,) = plain.partials.values()
    assert torch.equal(bits(pieces.partials[plain.held()[0]]), bits(whole))
    buffers = {flat.data_ptr() for flat in (*pieces.partials.values(), pieces.scratch)}
    assert len(buffers) == 2
