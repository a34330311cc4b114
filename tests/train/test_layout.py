import itertools
import random

import pytest
import torch

from mainstay_train import layout


def _brute_force(costs, stages):
    options = []
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        borders = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(borders)]
        options.append((max(sums), sum(s * s for s in sums), borders))
    return min(options)


def test_cuts_into_stages_equal_a_brute_force():
    rng = random.Random(1)
    for _ in range(500):
        costs = [float(rng.randrange(0, 20)) for _ in range(rng.randrange(1, 9))]
        stages = rng.randrange(1, len(costs) + 1)
        ranges = layout.stage_blocks(costs, stages)
        assert [i for r in ranges for i in r] == list(range(len(costs)))
        assert all(len(r) > 0 for r in ranges)
        sums = [sum(costs[i] for i in r) for r in ranges]
        assert (max(sums), sum(s * s for s in sums)) == _brute_force(costs, stages)[:2]


def test_more_stages_than_blocks_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="stages is 4 but the model has 3 blocks"):
        layout.stage_blocks([1.0, 1.0, 1.0], 4)
    with pytest.raises(ValueError, match="at least 1"):
        layout.stage_blocks([1.0], 0)


def test_parameters_are_padded_so_that_every_view_is_aligned():
    block = layout.BlockLayout.of("b", {"w": (5, 7), "v": (3,), "u": (64,), "s": ()})
    assert [p.offset for p in block.params] == [0, 64, 96, 160]
    assert block.size == 192
    assert block.num_parameters == 35 + 3 + 64 + 1
    for dtype in (torch.float32, torch.bfloat16):
        flat = layout.aligned_zeros(block.size, dtype=dtype)
        views = block.views(flat)
        assert list(views) == ["b.w", "b.v", "b.u", "b.s"]
        assert all(view.data_ptr() % layout.ALIGNMENT_BYTES == 0 for view in views.values())
        views["b.w"].fill_(1)
        assert flat.sum() == 35


def test_the_chunk_grid_restarts_at_each_block():
    sizes = [layout.CHUNK + 32, 64, 2 * layout.CHUNK]
    stage = layout.StageLayout(
        blocks=tuple(layout.BlockLayout.of(f"b{i}", {"w": (n,)}) for i, n in enumerate(sizes))
    )
    found = [(c.index, c.block, c.start, c.stop) for c in stage.chunks()]
    c = layout.CHUNK
    assert found == [
        (0, 0, 0, c), (1, 0, c, c + 32), (2, 1, 0, 64), (3, 2, 0, c), (4, 2, c, 2 * c),
    ]  # fmt: skip
    assert stage.offsets == (0, c + 32, c + 96)
    flat = stage.allocate()
    assert flat.numel() == sum(sizes)
    views = stage.views(flat)
    views["b1.w"].fill_(2)
    assert stage.block_views(flat)[1].sum() == 128
    assert flat.sum() == 128
