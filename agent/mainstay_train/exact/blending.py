"""Makes the state of a stage from parameters of others: W = w_a W_a + w_b W_b.

From Blagoev et al., "All is Not Lost: LLM Recovery without Checkpoints", 2025, algorithm 1, line 3.
Each product and the sum are computed in fp64 and rounded to fp32 once, element by element, so the
bits depend on nothing but the plan and the sources. Moments and step counts begin at zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from mainstay_core.wire.reinitialisation import BlockSource, MadeBlock, MadePosition, SourceKind
from mainstay_train.exact.optimizer import StatePart, StateTensor


class Parts(Protocol):
    """A source: blocks with their masters."""

    @property
    def blocks(self) -> Sequence[StatePart]:
        """In model order."""
        ...


class Whole(Parts, Protocol):
    """The state of a stage that is made anew."""

    def flats(self) -> list[StateTensor]:
        """All of its state."""
        ...

    def refresh(self) -> None:
        """Renew what is computed with."""
        ...


Beside = Mapping[tuple[int, int], Parts]
"""Masters of other positions, by (stage, inner rank)."""


def make_anew(
    state: Whole, made: MadePosition, beside: Beside, guarded: Mapping[str, Whole] | None = None
) -> None:
    """Write a state: masters of the sources, and an optimizer that has seen nothing yet.

    Args:
        state: of the position that is made; what it held is lost.
        made: its blocks and their sources.
        beside: what the sources hold.
        guarded: what guards hold, by block.
    """
    for flat in state.flats():
        flat.tensor.zero_()
    blocks = {block.name: block for block in state.blocks}
    for one in made.blocks:
        if one.is_exact:
            assert guarded is not None, f"no guard of {one.block} was copied"
            _take_back(state, one.block, guarded[one.block])
        else:
            _make_block(blocks[one.block], one, beside)
    state.refresh()


def _take_back(state: Whole, block: str, guard: Whole) -> None:
    """Write a block as a guard has it, with its optimizer's state."""
    kept = {flat.id: flat.tensor for flat in guard.flats() if flat.name == block}
    with torch.no_grad():
        for flat in state.flats():
            if flat.name == block:
                flat.tensor.copy_(kept[flat.id])


def _make_block(target: StatePart, made: MadeBlock, beside: Beside) -> None:
    shared = {
        name: source
        for source in made.sources
        if source.kind is SourceKind.INNER_RANK
        for name in source.parameters
    }
    others = [source for source in made.sources if source.kind is not SourceKind.INNER_RANK]
    for name, master in target.layout.views(target.masters).items():
        local = name.removeprefix(f"{target.name}.")
        sources = [shared[local]] if local in shared else others
        with torch.no_grad():
            master.copy_(_blend(sources, local, beside))


def _blend(sources: Sequence[BlockSource], local: str, beside: Beside) -> torch.Tensor:
    """Return a parameter as the weighted sum of what its sources have in its place, fp32."""
    if len(sources) == 1 and sources[0].weight == 1.0:
        return _master(sources[0], local, beside)
    total = None
    for source in sources:
        part = _master(source, local, beside).double() * source.weight
        total = part if total is None else total + part
    assert total is not None, "every block has a source"
    return total.float()


def _master(source: BlockSource, local: str, beside: Beside) -> torch.Tensor:
    state = beside[source.stage, source.inner]
    (block,) = [b for b in state.blocks if b.name == source.block]
    return block.layout.views(block.masters)[f"{source.block}.{local}"]
