"""Compares the recompute of a block with its forward: SpareTrain's piggyback DMR (section 3.1).

Activation checkpointing executes the kernels of a forward once more. So the recompute is the second
execution of each, and costs no third one. Of the forward's tensors only imprints are left by then.
All of them are compared, not the block's output alone: rounding can hide a wrong tensor from the
output while the backward reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.kernels import imprints
from mainstay_train.kernels.imprints import Imprint

FIELD = "spec.detection.dmr.mode"


class ForwardRecord:
    """The kernels of one forward of a block, and the imprints of what each of them made.

    Args:
        block: its name.
    """

    def __init__(self, block: str) -> None:
        self._block = block
        self._noted: list[tuple[str, tuple[Imprint, ...] | None]] = []
        self._next = 0

    def note(self, kernel: str, outputs: Sequence[torch.Tensor]) -> None:
        """Keep the imprints of what a kernel of the forward has made."""
        self._noted.append((kernel, imprints.imprints(outputs)))

    def pass_by(self, kernel: str) -> None:
        """Keep that a kernel of the forward was executed twice at once: so is its recompute."""
        self._noted.append((kernel, None))

    def take(self, kernel: str) -> tuple[Imprint, ...] | None:
        """Return what the forward's kernel made in the place of the recompute's next one.

        None: it was executed twice at once.

        Raises:
            InvalidSpecError: it is another kernel.
        """
        name, made = self._noted[self._next] if self._next < len(self._noted) else ("nothing", ())
        self._next += 1
        if name != kernel:
            raise self._impure(f"{kernel} where its forward called {name}")
        return made

    def end(self) -> None:
        """The recompute is over.

        Raises:
            InvalidSpecError: the forward had more kernels.
        """
        if self._next < len(self._noted):
            raise self._impure(f"nothing where its forward called {self._noted[self._next][0]}")

    def _impure(self, what: str) -> InvalidSpecError:
        # All that both had made before was equal, so no wrong bit led to it.
        return InvalidSpecError(
            FIELD,
            f"has the recompute of block {self._block!r} compared with its forward, but that "
            f"calls {what}; a forward must call the same each time after its first; mend it, or "
            "use Full with plan Naive",
        )
