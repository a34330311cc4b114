"""Tries each kind of block before a trainer says hello.

Compiled blocks must compile here and repeat their bits. And where a replay leaves out the weight
gradients of frozen units, that must not move a bit of anything else.

Blocks that are alike have one trial: they have the same modules with the same numbers, and
parameters of the same shapes. What it compiles is not lost: the compiler keeps it on the disk, and
the blocks that train find it there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.operators import Pass
from mainstay_train.exact.draws import Address
from mainstay_train.model import compilation
from mainstay_train.model.blocks import Block, BlockSpec
from mainstay_train.model.workload import Workload

ADDRESS = Address(0, 0, 0, 0)


def check(model: Workload, device: torch.device) -> Mapping[str, str]:
    """Return the entry of the fingerprint, after each kind of block has run twice.

    Raises:
        InvalidSpecError: a block cannot be compiled here, or two runs of it have other bits.
    """
    entry = {"compile": compilation.describe(device)}
    for kind in prepared(model, device):
        try:
            block = kind.build(model, device, compiles=True)
            first, second = (run_once(block, kind.given, kind.targets) for _ in range(2))
        except Exception as error:
            if compilation.is_refusal(error):
                raise compilation.refused(kind.spec.name, error) from error
            raise
        if differing(first, second):
            raise InvalidSpecError(
                compilation.PATH,
                f"is Blocks, but two runs of block {kind.spec.name!r} as compiled code have other "
                "bits; use Off",
            )
    return entry


def find_unskippable(model: Workload, device: torch.device) -> dict[str, str]:
    """Try what a block's outputs are without the weight gradients of some of its units.

    The input's gradient, and the weight gradients that are computed, must have the same bits
    whichever others are left out (MoEvement, arXiv 2412.15411, section 3.3, leaves out those of
    frozen units). For each two units there is a run in which one is left out and the other is not:
    2 + 2 log2(units) micro-batches of each kind of block.

    Returns:
        Of each block whose bits differ, what differs. Its units must not be skipped.
    """
    found: dict[str, str] = {}
    for kind in prepared(model, device):
        difference = _difference(kind.build(model, device), kind.given, kind.targets)
        if difference:
            found |= dict.fromkeys(kind.alike, difference)
    return found


def _difference(block: Block, x: torch.Tensor, targets: torch.Tensor | None) -> str:
    """Return what changes if weight gradients of some units are left out; empty if nothing does."""
    units = [unit for unit in block.units if block.can_skip(unit)]
    if not units:
        return ""
    whole = run_once(block, x, targets)
    for frozen in skipped_sets(units):
        again = run_once(block, x, targets, frozen)
        computed = [n for unit, names in block.units.items() if unit not in frozen for n in names]
        left_out = ", ".join(frozen) if len(frozen) < len(units) else "all units"
        for name in ("the output", "the gradient of the input", *computed):
            if name in whole and not has_bits_of(whole[name], again[name]):
                return f"{name} has other bits without the weight gradients of {left_out}"
    return ""


def skipped_sets(units: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield sets of units to leave out: all, and for each two units one with only one of them."""
    yield tuple(units)
    for bit in range((len(units) - 1).bit_length()):
        for value in (0, 1):
            yield tuple(unit for n, unit in enumerate(units) if n >> bit & 1 == value)


def has_bits_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal as bytes: negative zeros and no-numbers count."""
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def differing(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> str:
    """Return the name of what differs in two runs of a block; empty: nothing does."""
    return next((name for name in first if not has_bits_of(first[name], second[name])), "")


def fill(block: Block) -> None:
    """Give a block weights to be tried with.

    Those that begin as zeros are moved away from that: they would make all gradients behind them
    zeros, which are equal whatever is wrong.
    """
    block.initialize(0)
    block.masters.add_(_waves(block.masters.shape).to(block.device), alpha=0.02)
    block.refresh()


class Kind(NamedTuple):
    """Blocks that are alike, and what the first of them is tried with."""

    number: int
    """Of the first one in the model."""
    spec: BlockSpec
    alike: list[str]
    """Names of all."""
    given: torch.Tensor
    """Its input: tokens, or what a block before it gives."""
    targets: torch.Tensor | None

    def build(self, model: Workload, device: torch.device, *, compiles: bool = False) -> Block:
        """Return the first one, with weights to be tried with."""
        (block,) = model.build([self.number], device, compiles=compiles)
        fill(block)
        return block


def prepared(model: Workload, device: torch.device) -> Iterator[Kind]:
    """Yield each kind of block with its inputs on a device."""
    batch = model.dataset.batch(ADDRESS)
    x = activation(model, device)
    for number, spec, alike in kinds(model):
        given = batch.tokens.to(device) if number == 0 else x
        targets = batch.targets.to(device) if spec.is_last else None
        yield Kind(number, spec, alike, given, targets)


def kinds(model: Workload) -> Iterator[tuple[int, BlockSpec, list[str]]]:
    """Yield the first block of each kind, with its number, and the names of all like it."""
    alike: dict[object, list[str]] = {}
    first: list[tuple[int, BlockSpec, list[str]]] = []
    for number, (spec, flat) in enumerate(zip(model.blocks, model.layouts(), strict=True)):
        shapes = tuple((p.name.removeprefix(f"{spec.name}."), p.shape) for p in flat.params)
        with torch.device("meta"):
            module = spec.build()
        numbers = str([_numbers(inside) for inside in module.modules()])
        kind = (shapes, str(module), numbers, spec.draws, number == 0, spec.is_last)
        if kind not in alike:
            alike[kind] = []
            first.append((number, spec, alike[kind]))
        alike[kind].append(spec.name)
    yield from first


def _numbers(module: nn.Module) -> list[tuple[str, object]]:
    """The settings of a module: not texts, by which equal layers may be named."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, int | float)]


def activation(model: Workload, device: torch.device) -> torch.Tensor:
    """Return an input of a block, the same on every device."""
    return _waves(torch.Size(model.activation_shape)).to(device, model.dtype)


def _waves(shape: torch.Size) -> torch.Tensor:
    """Return values between -1 and 1 that hardly repeat, fp32."""
    return torch.arange(1, shape.numel() + 1, dtype=torch.float32).sin_().view(shape)


def run_once(
    block: Block,
    x: torch.Tensor,
    targets: torch.Tensor | None,
    frozen: Collection[str] = (),
    enter: Callable[[Pass], None] = lambda _: None,
) -> dict[str, torch.Tensor]:
    """Return what a micro-batch makes, by name.

    That is the output or loss, what the block counts, the input's gradient and the weights'.

    Args:
        block: is run.
        x: its input.
        targets: of the last block; None of others.
        frozen: units whose weight gradients are left out.
        enter: called before each pass.
    """
    enter(Pass.FORWARD)
    if targets is not None:
        tape = block.recompute_loss(x, targets, ADDRESS)
        output, dy = tape.loss, None
    else:
        tape = block.recompute(x, ADDRESS)
        assert tape.output is not None
        output = tape.output.detach()
        dy = output.clone()
    enter(Pass.BACKWARD)
    dx = block.backward_input(tape, dy)
    enter(Pass.WEIGHT)
    weights = block.layout.views(torch.zeros(block.layout.size, device=x.device))
    block.backward_weight(tape, weights, frozen=frozen)
    found = {"the output": output}
    if (counts := tape.statistics) is not None:
        found["what it counts"] = counts
    if dx is not None:
        found["the gradient of the input"] = dx
    return found | weights
