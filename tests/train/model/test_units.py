"""Units tile a block, and a frozen one skips its weight gradient and moves no other bit."""

import random

import pytest
import torch
from torch import nn

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.exact import draws, numerics
from mainstay_train.model import blocks, split, units, workload
from mainstay_train.model.units import Unit

MOE = "mainstay_train.models.moe:workload"
ADDRESS = draws.Address(1, 2, 3, 0)
SMALL = {
    "dim": 24, "layers": 2, "heads": 4, "kvHeads": 2, "hidden": 40, "sequence": 10,
    "microBatchSize": 2, "experts": 3, "activeExperts": 2, "expertHidden": 12,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def test_units_that_tile_a_block_are_returned_by_model_wide_names():
    a, b = Unit(name="a", parameters=("x", "z")), Unit(name="b", parameters=("y",))
    assert units.tile("block", (a, b), ("x", "y", "z")) == {
        "block.a": ("block.x", "block.z"),
        "block.b": ("block.y",),
    }


def test_a_block_that_names_no_units_is_one():
    assert units.tile("block", (), ("x", "y")) == {"block": ("block.x", "block.y")}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"a": ("x",)}, "block 'block' has parameter 'y' in no unit"),
        ({"a": ("x", "y"), "b": ("y",)}, "has parameter 'y' in the units 'a' and 'b'"),
        ({"a": ("x", "x"), "b": ("y",)}, "has parameter 'x' in the units 'a' and 'a'"),
        ({"a": ("x", "y", "w")}, "has no parameter 'w', which unit 'a' names"),
    ],
)
def test_what_does_not_tile_a_block_is_refused_by_name(named, message):
    given = [Unit(name=name, parameters=within) for name, within in named.items()]
    with pytest.raises(InvalidSpecError, match=message):
        units.tile("block", given, ("x", "y"))


def test_two_units_of_one_name_are_refused():
    twice = [Unit(name="a", parameters=("x",)), Unit(name="a", parameters=("y",))]
    with pytest.raises(InvalidSpecError, match=r"names the units \['a'\] twice"):
        units.tile("block", twice, ("x", "y"))


@pytest.mark.parametrize("seed", range(4))
def test_accepted_is_exactly_what_has_each_parameter_once(seed):
    rng, accepted = random.Random(seed), 0
    for _ in range(300):
        parameters = [f"p{n}" for n in range(rng.randint(1, 5))]
        named = parameters.copy()
        if rng.random() < 0.3:
            named.append(rng.choice(parameters))
        if rng.random() < 0.3:
            named.pop(rng.randrange(len(named)))
        if rng.random() < 0.1:
            named.append("other")
        rng.shuffle(named)
        number = rng.randint(1, 3)
        given = [Unit(name=f"u{n}", parameters=tuple(named[n::number])) for n in range(number)]
        if sorted(named) != parameters:
            with pytest.raises(InvalidSpecError):
                units.tile("block", given, parameters)
            continue
        accepted += 1
        tiled = units.tile("block", given, parameters)
        assert [*tiled] == [f"block.{unit.name}" for unit in given]
        held = sorted(name for names in tiled.values() for name in names)
        assert held == [f"block.{name}" for name in parameters]
    assert accepted > 100


def test_a_layer_with_experts_has_a_unit_for_each_the_router_and_the_rest():
    model = workload.load(MOE, SMALL)
    (dense,), (mixed,) = model.build([1]), model.build([2])
    assert [*dense.units] == ["layers.0"]
    names = ["rest", "router", "experts.0", "experts.1", "experts.2"]
    assert [*mixed.units] == [f"layers.1.{name}" for name in names]
    assert mixed.units["layers.1.router"] == (
        "layers.1.mixture.router.weight", "layers.1.mixture.router.bias",
    )  # fmt: skip
    assert mixed.units["layers.1.experts.2"] == (
        "layers.1.mixture.experts.2.gate_up.weight", "layers.1.mixture.experts.2.down.weight",
    )  # fmt: skip
    assert "layers.1.mixture.shared.down.weight" in mixed.units["layers.1.rest"]


def micro_batches(block, dtype, frozen, number):
    """Outputs, input gradients and weight gradients of three micro-batches."""
    flat = torch.full((block.layout.size,), float("nan"))
    views, outputs = block.layout.views(flat), []
    for micro_batch in range(3):
        address = draws.Address(1, 2, 3, micro_batch)
        x = torch.randn(2, 10, 24, generator=address.generator("x")).to(dtype)
        if number == 0:
            x = torch.randint(0, 256, (2, 10), generator=address.generator("t"))
        if block.spec.is_last:
            targets = torch.randint(0, 256, (2, 10), generator=address.generator("u"))
            tape, dy = block.recompute_loss(x, targets, address), None
        else:
            tape = block.recompute(x, address)
            dy = torch.cos(tape.output.detach())
        outputs.append(tape.output.detach())
        dx = block.backward_input(tape, dy)
        outputs += [] if dx is None else [dx]
        block.backward_weight(tape, views, accumulate=micro_batch > 0, frozen=frozen)
    return outputs, views


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", range(4), ids=["embedding", "dense", "experts", "head"])
def test_a_frozen_unit_has_no_gradient_and_moves_no_other_bit(number, dtype):
    model = workload.load(MOE, SMALL)
    block = blocks.Block(model.blocks[number], dtype=dtype)
    block.initialize(5)
    block.masters.mul_(4)
    block.refresh()
    wanted, full = micro_batches(block, dtype, (), number)
    full = {name: view.clone() for name, view in full.items()}
    choices = [{unit} for unit in block.units] + [set(block.units), set([*block.units][1:])]
    for frozen in choices:
        outputs, views = micro_batches(block, dtype, frozen, number)
        assert all(map(torch.equal, outputs, wanted))
        skipped = {name for unit in frozen for name in block.units[unit]}
        for name, view in views.items():
            expected = torch.zeros_like(view) if name in skipped else full[name]
            assert torch.equal(view.view(torch.int32), expected.view(torch.int32)), name
    assert all(full[name].any() for name in full if not name.endswith("bias"))


def test_a_frozen_unit_computes_no_product_for_its_weights(monkeypatch):
    model = workload.load(MOE, SMALL)
    block = blocks.Block(model.blocks[2])
    block.initialize(5)
    made = []
    add_product = split.add_product
    monkeypatch.setattr(split, "add_product", lambda v, *a: made.append(v) or add_product(v, *a))
    micro_batches(block, torch.float32, [*block.units], 2)
    assert made == []
    micro_batches(block, torch.float32, [u for u in block.units if "experts" not in u], 2)
    assert len(made) == 3 * 3 * 2


def test_only_a_unit_of_split_modules_can_be_frozen():
    spec = blocks.BlockSpec(
        name="block",
        build=lambda: nn.Sequential(split.Linear(4, 4), nn.Linear(4, 4)),
        units=(
            Unit(name="apart", parameters=("0.weight",)),
            Unit(name="at_once", parameters=("1.weight", "1.bias")),
        ),
    )
    block = blocks.Block(spec)
    block.initialize(1)
    views = block.layout.views(torch.zeros(block.layout.size))

    def weights(frozen):
        tape = block.recompute(torch.ones(2, 4), ADDRESS)
        block.backward_input(tape, torch.ones(2, 4))
        block.backward_weight(tape, views, frozen=frozen)

    assert block.can_skip("block.apart")
    assert not block.can_skip("block.at_once")
    weights(["block.apart"])
    assert not views["block.0.weight"].any()
    with pytest.raises(ValueError, match=r"unit 'block.at_once' cannot be frozen: the gradient of"):
        weights(["block.at_once"])
    with pytest.raises(ValueError, match=r"no unit 'apart' \(it has: block.apart, block.at_once\)"):
        weights(["apart"])


def test_what_a_block_counts_without_naming_it_is_refused():
    class Counts(nn.Module):
        def forward(self, x):
            split.count(torch.tensor([1, 2]))
            return x

    for names in ((), ("a",), ("a", "b", "c")):
        block = blocks.Block(blocks.BlockSpec(name="block", build=Counts, statistics=names))
        with pytest.raises(ValueError, match=f"counted 2 integers.*names {len(names)}"):
            block.recompute(torch.ones(3), ADDRESS)
    block = blocks.Block(blocks.BlockSpec(name="block", build=Counts, statistics=("a", "b")))
    assert block.recompute(torch.ones(3), ADDRESS).statistics.tolist() == [1, 2]


def test_committed_parameters_that_a_block_does_not_have_are_refused():
    spec = blocks.BlockSpec(
        name="block",
        build=lambda: split.Linear(4, 4),
        committed=blocks.CommittedState(parameters=("bias",), rule=lambda *_: None),
    )
    with pytest.raises(ValueError, match="has no parameter 'bias', which its `committed` names"):
        blocks.Block(spec)
