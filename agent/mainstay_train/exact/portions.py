"""Some blocks of a stage's state: what guards keep of an end, copy from it, and compare."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch

from mainstay_train.exact.masters import whole_masters
from mainstay_train.exact.optimizer import REST_PARTS, StageState, StateTensor, part_of
from mainstay_train.sums import compiled, digests
from mainstay_train.sums.readout import Readout
from mainstay_train.sums.rows import Piece


class Portion:
    """Some blocks of a state, with all that belongs to them.

    Args:
        state: of a stage with one rank.
        names: of the blocks.
    """

    def __init__(self, state: StageState, names: Collection[str]) -> None:
        blocks = [block for block in state.blocks if block.name in names]
        self._masters = whole_masters(blocks, copies=False)
        self._flats = [flat for flat in state.flats() if flat.name in names]
        self._rest: dict[int, list[Callable[[], torch.Tensor]]] = {}
        """What makes the sums of a part of the rest, by its number, once it was due: guards and
        owners make them in every step."""

    def flats(self) -> list[StateTensor]:
        """Return its flat buffers, as :meth:`StageState.flats` does."""
        return list(self._flats)

    def everything(self) -> list[StateTensor]:
        """Return the same: what is computed with follows from the masters."""
        return self.flats()

    def digests(self, step: int) -> tuple[str, str]:
        """Return the digests of its masters, and of a part of the rest; waits for the device once.

        The first is that of a state of these blocks alone.

        Args:
            step: at hand; it says which part of the rest is due.
        """
        readout = Readout()
        masters = [readout.add(known.sums(block.masters)) for block, known in self._masters]
        rest = [readout.add(sums()) for sums in self._rest_of(step % REST_PARTS)]
        readout.fetch()
        of_masters, of_rest = (
            digests.added([sums() for sums in each]).hex() for each in (masters, rest)
        )
        return of_masters, of_rest

    def _rest_of(self, number: int) -> list[Callable[[], torch.Tensor]]:
        if number not in self._rest:
            rest = ((f, part_of(f.tensor, number)) for f in self._flats if f.kind != "master")
            self._rest[number] = [
                _sums_of(f"rest:{f.id}", part) for f, part in rest if part.numel()
            ]
        return self._rest[number]


def _sums_of(name: str, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what makes ``digests.tensor_sums`` of a tensor as it is then; its memory stays.

    Keys are drawn here, and kept, where compiled code reads any row where it lies. That is in a
    step, where what is computed may come out wrong, so they are drawn twice and compared.
    """
    flat = tensor.view(-1)
    is_plain = flat.element_size() == 4 and not flat.is_complex()
    if is_plain and flat.device.type == "cpu" and compiled.load() is not None:
        known = digests.drawn_twice([Piece(name, 0, flat.numel())], flat.device)
        return partial(known.sums, flat)
    return partial(digests.tensor_sums, name, tensor)
