import torch

from mainstay_train.exact import layout


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
