"""Scopes: parts of a trainer's work in which kernels are checked, and what may be asked of them.

A dispatch mode belongs to a thread. So whoever computes enters a scope of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self

from torch.utils._python_dispatch import TorchDispatchMode

from mainstay_core.dmr.flips import Execution
from mainstay_core.dmr.operators import Pass
from mainstay_train.checks.recomputes import ForwardRecord
from mainstay_train.checks.sums import Once


class Scope(Protocol):
    """A part of the work, all of whose kernels are checked; a context manager of its thread.

    It can be entered several times, one after the other: its kernels are counted on.
    """

    def __enter__(self) -> Self:
        """Begin, or go on."""

    def __exit__(self, *error: Any) -> None:
        """End, or pause."""

    def enter(self, in_pass: Pass, block: int | None = None, name: str | None = None) -> None:
        """Say which pass comes next.

        Args:
            in_pass: of the block.
            block: its number in the stage; None: what comes belongs to no block.
            name: of the block.
        """

    def twice(self) -> AbstractContextManager[None]:
        """Have each kernel executed twice meanwhile, whatever the mode."""

    def once(self, once: Once, execution: Execution | None) -> AbstractContextManager[None]:
        """Have each kernel executed once meanwhile; the caller executes all of them again.

        Args:
            once: describes them; written in the primary execution, and read in others.
            execution: which one it is; None: the third.
        """

    def note(self, record: ForwardRecord) -> AbstractContextManager[None]:
        """Note meanwhile what the kernels of a block's forward make."""

    def compare(self, record: ForwardRecord) -> AbstractContextManager[None]:
        """Compare meanwhile what the kernels of its recompute make with what was noted.

        Raises:
            InvalidSpecError: the recompute calls other kernels.
        """


class _Unchecked:
    """The scope of work that is not checked."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing was begun."""

    def enter(self, in_pass: Pass, block: int | None = None, name: str | None = None) -> None:
        """Nobody needs it."""

    def twice(self) -> AbstractContextManager[None]:
        return nullcontext()

    def once(self, once: Once, execution: Execution | None) -> AbstractContextManager[None]:
        del once, execution
        return nullcontext()

    def note(self, record: ForwardRecord) -> AbstractContextManager[None]:
        del record
        return nullcontext()

    def compare(self, record: ForwardRecord) -> AbstractContextManager[None]:
        del record
        return nullcontext()


UNCHECKED: Scope = _Unchecked()


class Pushed:
    """Has a mode see what its thread calls meanwhile, whatever its own begin does.

    Args:
        mode: the mode.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        TorchDispatchMode.__enter__(self._mode)  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self._mode, *error)  # type: ignore[no-untyped-call]
