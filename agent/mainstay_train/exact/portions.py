"""Some blocks of a stage's state: what guards keep of an end, copy from it, and compare."""

from __future__ import annotations

from collections.abc import Collection

from mainstay_train.exact import digests
from mainstay_train.exact.optimizer import (
    REST_PARTS,
    StageState,
    StateTensor,
    part_of,
    whole_masters,
)
from mainstay_train.exact.readout import Readout


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
        rest = [
            readout.add(digests.tensor_sums(f"rest:{f.id}", part_of(f.tensor, step % REST_PARTS)))
            for f in self._flats
            if f.kind != "master"
        ]
        readout.fetch()
        of_masters, of_rest = (
            digests.added([sums() for sums in each]).hex() for each in (masters, rest)
        )
        return of_masters, of_rest
