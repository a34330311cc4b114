"""Digest and norms of a gradient by part: the same bits, and few operations."""

import pytest
import torch
from tests.train.norms import block_norms_sq
from tests.train.operations import Operations, without_memory

from mainstay_core.base import digest
from mainstay_train.exact import numerics, reduction
from mainstay_train.exact.gradients import GradientSums
from mainstay_train.exact.layout import CHUNK, BlockLayout, StageLayout
from mainstay_train.exact.slices import Slice
from mainstay_train.sums import digests
from mainstay_train.sums.readout import Readout


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


@pytest.fixture(autouse=True)
def _in_both_forms(form):
    """Each test runs with compiled code and without."""


def stage(*sizes):
    blocks = (BlockLayout.of(f"b{i}", {"w": (size,)}) for i, size in enumerate(sizes))
    return StageLayout(blocks=tuple(blocks))


def bounds(layout, chunks):
    lengths = [chunk.stop - chunk.start for chunk in layout.chunks()]
    return reduction.bounds(lengths, chunks * 4 * CHUNK)


def taken(sums, within, flat):
    sums.begin()
    for start, _ in within[::-1]:  # in whatever order they come
        sums.take(flat, start)
    readout = Readout()
    read = sums.read(readout)
    readout.fetch()
    return read


@pytest.mark.parametrize("chunks", [1, 2, 3, 100])
def test_buckets_change_neither_digest_nor_norms(chunks):
    layout = stage(3 * CHUNK + 500, 32, 70_000, 5 * CHUNK, 100)
    flat = layout.allocate().normal_(generator=torch.Generator().manual_seed(chunks))
    within = bounds(layout, chunks)
    sums = GradientSums(layout, within)
    views = layout.block_views(flat)
    of_blocks = tuple(digests.tensor_digest(f"gradient:b{i}", view) for i, view in enumerate(views))
    expected = digest.total(of_blocks)

    read = taken(sums, within, flat)

    assert read.block_digests() == of_blocks
    assert read.digest() == sums.digest(flat) == expected
    assert read.norms_sq() == tuple(block_norms_sq(views))
    flat[CHUNK] += 1.0
    assert sums.digest(flat) != expected


@pytest.mark.parametrize("counts_copies", [True, False])
def test_copies_count_on_one_inner_rank(counts_copies):
    part = Slice(name="b.w", shape=(2, CHUNK), start=(0, 0), size=(1, CHUNK))
    shared = BlockLayout.of("b", {"w": (1, CHUNK), "n": (CHUNK + 96,)}, {"w": part})
    copied = BlockLayout.of("c", {"n": (64,)}, {})
    layout = StageLayout(blocks=(shared, copied))
    flat = layout.allocate().normal_()
    place = "@0" if counts_copies else "@1"
    within = bounds(layout, 1)
    sums = GradientSums(layout, within, place=place, counts_copies=counts_copies)
    views = layout.block_views(flat)

    read = taken(sums, within, flat)

    counted = views if counts_copies else [views[0][:CHUNK], views[1][:0]]
    assert read.norms_sq() == tuple(block_norms_sq(counted))
    assert read.digest() == digest.total(
        digests.tensor_digest(f"gradient:{name}{place}", view)
        for name, view in zip("bc", views, strict=True)
    )


def _operations(num_parameters, num_buckets):
    """Operations of what a step tells of its gradient and partial, without memory."""
    layout = stage(num_parameters)
    each = -(-len(layout.chunks()) // num_buckets)
    within = bounds(layout, each)
    assert len(within) == num_buckets
    with without_memory() as device:
        sums = GradientSums(layout, within, device=device)
        flat = layout.allocate(device=device)
        sums.sums(flat)  # what is made once is there
        with Operations() as seen:
            sums.begin()
            sums.sums(flat)
            for start, _ in within:
                sums.take(flat, start)
            sums.read(Readout())
    return seen.count, len(sums.parts)


def test_operations_are_counted_by_parts_alone():
    """At 10^6 and at 10^8 parameters: a + b x parts, and one number for one bucket.

    A part is a bucket, or as many as make a batch of 64 chunks.
    """
    one, parts = _operations(1_000_000, 1)
    assert parts == 1
    assert _operations(1_000_000, 4) == (one, 1)
    tail = 1_000_000 % CHUNK
    as_long_a_tail = 100_000_000 // CHUNK * CHUNK + tail
    assert _operations(as_long_a_tail, 1) == (one, 1)
    two, _ = _operations(as_long_a_tail, 2)
    for buckets, parts in ((4, 4), (16, 16), (1526, 24)):
        assert _operations(as_long_a_tail, buckets) == (one + (parts - 1) * (two - one), parts)
    # A chunk has up to four rows, a view and a sum each; the last one fills four, and not two.
    assert _operations(100_000_000, 1) == (one + 4, 1)
