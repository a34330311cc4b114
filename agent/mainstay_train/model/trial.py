"""Tries compiled blocks before a trainer says hello: they compile here, and repeat their bits.

Blocks that are alike have one trial: they have the same modules with the same numbers, and
parameters of the same shapes. What it compiles is not lost: the compiler keeps it on the disk, and
the blocks that train find it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from mainstay_core.base.errors import InvalidSpecError
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
    batch = model.dataset.batch(ADDRESS)
    x = _activation(model, device)
    for number, spec in _kinds(model):
        given = batch.tokens.to(device) if number == 0 else x
        targets = batch.targets.to(device) if spec.is_last else None
        try:
            (block,) = model.build([number], device, compiles=True)
            block.initialize(0)
            first, second = (_run(block, given, targets) for _ in range(2))
        except Exception as error:
            if compilation.is_refusal(error):
                raise compilation.refused(spec.name, error) from error
            raise
        if not all(map(torch.equal, first, second)):
            raise InvalidSpecError(
                compilation.PATH,
                f"is Blocks, but two runs of block {spec.name!r} as compiled code have other bits; "
                "use Off",
            )
    return entry


def _kinds(model: Workload) -> Iterator[tuple[int, BlockSpec]]:
    """The first block of each kind, with its number."""
    seen = set()
    for number, (spec, flat) in enumerate(zip(model.blocks, model.layouts(), strict=True)):
        shapes = tuple((p.name.removeprefix(f"{spec.name}."), p.shape) for p in flat.params)
        with torch.device("meta"):
            module = spec.build()
        numbers = str([_numbers(inside) for inside in module.modules()])
        kind = (shapes, str(module), numbers, spec.draws, number == 0, spec.is_last)
        if kind not in seen:
            seen.add(kind)
            yield number, spec


def _numbers(module: nn.Module) -> list[tuple[str, object]]:
    """The settings of a module: not texts, by which equal layers may be named."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, int | float)]


def _activation(model: Workload, device: torch.device) -> torch.Tensor:
    shape = torch.Size(model.activation_shape)
    values = torch.linspace(-1, 1, shape.numel(), dtype=torch.float32).sin_()
    return values.view(shape).to(device, model.dtype)


def _run(block: Block, x: torch.Tensor, targets: torch.Tensor | None) -> list[torch.Tensor]:
    """Output or loss, the input's gradient and the weights' of a micro-batch."""
    if targets is not None:
        tape = block.recompute_loss(x, targets, ADDRESS)
        output, dy = tape.loss, None
    else:
        tape = block.recompute(x, ADDRESS)
        assert tape.output is not None
        output = tape.output.detach()
        dy = output.clone()
    dx = block.backward_input(tape, dy)
    weights = torch.zeros(block.layout.size, device=x.device)
    block.backward_weight(tape, block.layout.views(weights))
    return [output, weights, *([] if dx is None else [dx])]
