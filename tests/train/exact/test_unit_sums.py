"""Digests of units fall out of the pass that makes the whole, and add up to it."""

import random
from itertools import pairwise

import pytest
import torch
from tests.train.exact.test_gradients import bounds, taken

from mainstay_core.base.digest import total
from mainstay_core.wire.unit_digests import unpack
from mainstay_train.exact import numerics, optimizer
from mainstay_train.exact.gradients import GradientSums
from mainstay_train.exact.layout import CHUNK, BlockLayout, StageLayout
from mainstay_train.exact.unit_sums import packed, units_of, whole_of
from mainstay_train.model import workload as workloads
from mainstay_train.sums import compiled, digests, products, rows

SIZES = [1, 31, 500, 9000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 40]


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


@pytest.fixture(autouse=True)
def _in_both_forms(form):
    """Each test runs with compiled code and without."""


class Block:
    """A block whose parameters are dealt to units, which may lie in turns."""

    def __init__(self, rng, name):
        numbers = range(rng.randrange(1, 9))
        self.layout = BlockLayout.of(name, {f"w{n}": (rng.choice(SIZES),) for n in numbers})
        self.units = {}
        for param in self.layout.params:
            unit = f"{name}.unit{rng.randrange(4)}"
            self.units[unit] = (*self.units.get(unit, ()), param.name)


def by_elements(block, flat, name):
    """Twin: digests of a block's units, one run of a parameter and its padding at a time."""
    params = block.layout.params
    stops = [p.offset for p in params[1:]] + [block.layout.size]
    places = {p.name: slice(p.offset, stop) for p, stop in zip(params, stops, strict=True)}
    return [
        total(digests.tensor_digest(name, flat[places[p]], places[p].start) for p in names)
        for names in block.units.values()
    ]


@pytest.mark.parametrize("seed", range(12))
def test_a_gradient_falls_apart_into_its_units_whatever_its_buckets(seed):
    rng = random.Random(seed)
    blocks = [Block(rng, f"b{n}") for n in range(rng.randrange(1, 4))]
    layout = StageLayout(blocks=tuple(block.layout for block in blocks))
    within = bounds(layout, rng.choice([1, 2, 100]))
    flat = layout.allocate().normal_(generator=torch.Generator().manual_seed(seed))
    whole = taken(GradientSums(layout, within), within, flat)

    read = taken(GradientSums(layout, within, units=units_of(blocks)), within, flat)

    views = layout.block_views(flat)
    twin = [d for b, v in zip(blocks, views, strict=True)
            for d in by_elements(b, v, f"gradient:{b.layout.name}")]  # fmt: skip
    assert list(unpack(packed(read.unit_sums()))) == twin
    assert read.digest() == whole.digest() == total(twin) == whole_of(read.unit_sums())
    assert read.block_digests() == whole.block_digests()
    assert read.norms_sq() == whole.norms_sq()


@pytest.mark.parametrize("batch", [32, CHUNK, 3 * CHUNK, None])
@pytest.mark.parametrize("seed", range(4))
def test_parts_of_a_tensor_add_up_wherever_it_is_cut(seed, batch):
    rng = random.Random(seed)
    numel = rng.choice([96, 9024, CHUNK + 64, 3 * CHUNK + 128])
    flat = torch.randint(-(2**31), 2**31 - 1, (numel,), dtype=torch.int32).view(torch.float32)
    cuts = sorted({0, numel, *(32 * rng.randrange(numel // 32) for _ in range(6))})
    pieces = [
        rows.Piece("w", start, stop - start, *divmod(start, CHUNK))
        for start, stop in pairwise(cuts)
    ]
    known = digests.FlatDigest(pieces, batch=batch)

    found = digests.of_pieces(known.sums_of_pieces(flat))

    assert found == [
        digests.tensor_digest("w", flat[p.start : p.start + p.numel], p.start) for p in pieces
    ]
    assert known.digest(flat) == digests.tensor_digest("w", flat)


def test_whole_chunks_do_not_pay_for_parts_beside_them(monkeypatch):
    """Without compiled code the keys of parts are picked row by row, which costs more."""
    monkeypatch.setattr(compiled, "load", lambda: None)
    by_parts = []
    plain = products.multiply_at

    def noted(wide, *others):
        by_parts.append(tuple(wide.shape))
        plain(wide, *others)

    monkeypatch.setattr(products, "multiply_at", noted)
    flat = torch.randn(4 * CHUNK + 64)
    stops = [0, 4 * CHUNK - 4_992, 4 * CHUNK + 64]
    pieces = [rows.Piece("w", a, b - a, *divmod(a, CHUNK)) for a, b in pairwise(stops)]

    assert digests.FlatDigest(pieces).digest(flat) == digests.tensor_digest("w", flat)
    assert by_parts == [(2, 4_992)], "the part, and the tail that is read with it"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("entrypoint", ["", "mainstay_train.models.moe:workload"])
def test_masters_fall_apart_into_their_units(entrypoint, dtype):
    config = {"dim": 16, "layers": 3, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}
    if entrypoint:
        config |= {"experts": 4, "activeExperts": 2, "expertHidden": 16}
    model = workloads.load(entrypoint, {**config, "dtype": dtype})
    state = optimizer.StageState(model.build(model.stages(1)[0]), model.optimizer)
    state.initialize(3)
    masters = {t.name: t for t in state.state_tensors() if t.kind == "master"}

    shared = state.masters_digest()

    twin = [
        total(masters[name].digest() for name in names)
        for block in state.blocks
        for names in block.units.values()
    ]
    assert list(unpack(packed(shared.by_unit))) == twin
    assert shared.whole == total(twin) == total(t.digest() for t in masters.values())
