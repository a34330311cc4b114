"""Makes the state of a stage from parameters of others: W = w_a W_a + w_b W_b.

From Blagoev et al., "All is Not Lost: LLM Recovery without Checkpoints", 2025, algorithm 1, line 3.
Each product and the sum are computed in fp64 and rounded to fp32 once, element by element, so the
bits depend on nothing but the plan and the sources. Moments and step counts begin at zero, or what
has the shape of a parameter (Adam's moments, a momentum) is the same sum of the sources'.

A parameter's step count is the smallest of its sources' then. As a rule they are equal: all have
trained from the start. They differ where a source was itself made anew with an optimizer that began
from nothing, or loaded an older copy.

The average is sound as far as the step goes that Adam takes with it, which is c(k) |m| / sqrt(v) at
count k, with c(k) = sqrt(1 - b2^k) / (1 - b1^k). By Cauchy and Schwarz |m| / sqrt(v) of an average
is at most the largest of its sources'. So with equal counts the step is at most the largest that a
source would take with its own moments. With the smallest of different counts that holds only where
c is no larger there than at the others. It is larger at small ones: 1.64 for the betas (0.9, 0.95)
and k = 2, and then a source that has nearly nothing, or nearly no weight, would have the whole
parameter leap. So where counts differ and the smallest is below ``SETTLED_STEPS``, all of the
parameter's optimizer state begins at zero. From that count on c is at most 1.0001, or still grows
towards 1, for the betas in use (b1 at most 0.99, and b2 no smaller): the step is not larger than
its sources' by more than that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from mainstay_core.wire.reinitialisation import (
    BlockSource,
    MadeBlock,
    MadePosition,
    OptimizerState,
    SourceKind,
)
from mainstay_train.exact.optimizer import StatePart, StateTensor
from mainstay_train.sums import compiled
from mainstay_train.sums.rows import scratch

logger = logging.getLogger(__name__)

SETTLED_STEPS = 1000
"""Steps from which on a count corrects an optimizer's moments by next to nothing, or by less with
each step. Below, only sources with equal counts are averaged."""

_RUN_ON_CPU = 1 << 14
"""Elements that are blended at a time: both products, in fp64, stay in a core's cache."""
_RUN = 1 << 22
"""The same on other devices: there the start of an operation is what costs."""


class Parts(Protocol):
    """A source: blocks with their masters, and with their optimizer's state if that is averaged."""

    @property
    def blocks(self) -> Sequence[StatePart]:
        """In model order."""
        ...

    def flats(self) -> list[StateTensor]:
        """All of its state."""
        ...


class Whole(Parts, Protocol):
    """The state of a stage that is made anew."""

    def refresh(self) -> None:
        """Renew what is computed with."""
        ...


Beside = Mapping[tuple[int, int], Parts]
"""States of other positions, by (stage, inner rank)."""


def clear(state: Whole, made: MadePosition, *, keeps_own: bool) -> None:
    """Zero what no source gives: the optimizer's state, and what lies between parameters.

    Args:
        state: of the position that is made; what it held is lost.
        made: its blocks.
        keeps_own: whether blocks that guards have stay as they are.
    """
    kept = {block.block for block in made.blocks if block.is_exact and keeps_own}
    given = {block.block for block in made.blocks}
    for flat in state.flats():
        if flat.name not in kept and (flat.kind != "master" or flat.name not in given):
            flat.tensor.zero_()
    for block in state.blocks:
        if block.name in given - kept:
            end = 0
            for param in block.layout.params:
                block.masters[end : param.offset].zero_()
                end = param.offset + param.numel
            block.masters[end:].zero_()


def make_anew(
    state: Whole,
    made: MadePosition,
    beside: Beside,
    guarded: Mapping[str, Whole] | None = None,
    *,
    is_clear: bool = False,
) -> None:
    """Write a state: masters of the sources, and an optimizer as the position says.

    Args:
        state: of the position that is made; what it held is lost.
        made: its blocks and their sources.
        beside: what the sources hold.
        guarded: what guards hold, by block; None: blocks that guards have stay as they are.
        is_clear: whether :func:`clear` has been called since anything else wrote to it.
    """
    if not is_clear:
        clear(state, made, keeps_own=guarded is None)
    blocks = {block.name: block for block in state.blocks}
    for one in made.blocks:
        if one.is_exact:
            if guarded is not None:
                _take_back(state, one.block, guarded[one.block])
            continue
        _make_block(blocks[one.block], one, beside)
        if made.optimizer_state is OptimizerState.AVERAGE:
            own = [f for f in state.flats() if f.name == one.block and f.kind != "master"]
            _average(own, blocks[one.block], one, beside)
    state.refresh()


def _take_back(state: Whole, block: str, guard: Whole) -> None:
    """Write a block as a guard has it, with its optimizer's state."""
    kept = {flat.id: flat.tensor for flat in guard.flats() if flat.name == block}
    with torch.no_grad():
        for flat in state.flats():
            if flat.name == block:
                flat.tensor.copy_(kept[flat.id])


def _make_block(target: StatePart, made: MadeBlock, beside: Beside) -> None:
    for name, master in target.layout.views(target.masters).items():
        local = name.removeprefix(f"{target.name}.")
        with torch.no_grad():
            sources = _sources_of(made, local)
            had = [_masters(source, beside)[f"{source.block}.{local}"] for source in sources]
            _blend(sources, had, master)


def _average(
    flats: Sequence[StateTensor], target: StatePart, made: MadeBlock, beside: Beside
) -> None:
    """Write a block's optimizer state, which is zero, of that of the sources of each parameter."""
    shaped = {flat.kind for flat in flats if _is_shaped(flat, target)}
    views = {flat.kind: _by_parameter(flat, target) for flat in flats}
    young = []
    for name in (p.name for p in target.layout.params if p.name not in target.committed):
        local = name.removeprefix(f"{target.name}.")
        sources = _sources_of(made, local)
        with torch.no_grad():
            had = {
                kind: [_kept(s, kind, beside)[f"{s.block}.{local}"] for s in sources]
                for kind in views
            }
            counts = {kind: torch.stack(had[kind]) for kind in had.keys() - shaped}
            if any(_are_young(each) for each in counts.values()):
                young.append(local)
                continue
            for kind, view in views.items():
                if kind in counts:
                    view[name].copy_(counts[kind].amin(0))
                else:
                    _blend(sources, had[kind], view[name])
    if young:
        logger.warning(
            "the optimizer's state of %s of %s begins from nothing: its sources have trained "
            "for different numbers of steps, and one for fewer than %d",
            ", ".join(young),
            target.name,
            SETTLED_STEPS,
        )


def _are_young(counts: torch.Tensor) -> bool:
    """Return whether sources have counted differently, and one of them few steps."""
    least, most = float(counts.amin()), float(counts.amax())
    return least != most and least < SETTLED_STEPS


def _sources_of(made: MadeBlock, local: str) -> list[BlockSource]:
    """Return the sources of a parameter: an inner rank that holds it, too, or other stages."""
    inner = [s for s in made.sources if s.kind is SourceKind.INNER_RANK]
    shared = [source for source in inner if local in source.parameters]
    return shared[-1:] or [s for s in made.sources if s.kind is not SourceKind.INNER_RANK]


def _blend(sources: Sequence[BlockSource], had: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Write the weighted sum of what the sources have in a parameter's place.

    Args:
        sources: with their weights.
        had: what each has.
        into: where it goes.
    """
    weights = [source.weight for source in sources]
    if weights == [1.0]:
        into.copy_(had[0])
        return
    flat, of = into.view(-1), [tensor.reshape(-1) for tensor in had]
    plain = all(t.dtype is torch.float32 and t.device.type == "cpu" for t in (flat, *of))
    if plain and len(of) == 2 and compiled.load() is not None:
        compiled.blend(flat, of, weights)
        return
    run = _RUN_ON_CPU if into.device.type == "cpu" else _RUN
    for start in range(0, flat.numel(), run):
        piece = flat[start : start + run]
        total, part = (
            scratch(name, piece.device, torch.float64, piece.numel()) for name in ("total", "part")
        )
        total.copy_(of[0][start : start + run]).mul_(weights[0])
        for weight, tensor in zip(weights[1:], of[1:], strict=True):
            total += part.copy_(tensor[start : start + run]).mul_(weight)
        piece.copy_(total)


def _block(source: BlockSource, beside: Beside) -> StatePart:
    (block,) = [b for b in beside[source.stage, source.inner].blocks if b.name == source.block]
    return block


def _masters(source: BlockSource, beside: Beside) -> Mapping[str, torch.Tensor]:
    block = _block(source, beside)
    return block.layout.views(block.masters)


def _kept(source: BlockSource, kind: str, beside: Beside) -> Mapping[str, torch.Tensor]:
    """Return one kind of a source's optimizer state, by parameter."""
    flats = beside[source.stage, source.inner].flats()
    (flat,) = [f for f in flats if (f.name, f.kind) == (source.block, kind)]
    return _by_parameter(flat, _block(source, beside))


def _by_parameter(flat: StateTensor, block: StatePart) -> Mapping[str, torch.Tensor]:
    """Return one kind of a block's optimizer state, by parameter."""
    return block.layout.views(flat.tensor) if _is_shaped(flat, block) else _counts(flat, block)


def _is_shaped(flat: StateTensor, block: StatePart) -> bool:
    """Return whether a kind of state has the shape of the parameters; else it has one number each.

    A layout has more elements than parameters.
    """
    return flat.tensor.numel() == block.layout.size


def _counts(flat: StateTensor, block: StatePart) -> dict[str, torch.Tensor]:
    """Return the one number of each parameter that the optimizer changes, by its name."""
    trained = [p.name for p in block.layout.params if p.name not in block.committed]
    return dict(zip(trained, flat.tensor, strict=True))
