"""Cuts a kernel that goes through lists of tensors element by element, as fused optimizers do.

Such a kernel changes in place all that a block has of parameters and moments. To execute it twice
takes two copies of that. Piece by piece it takes copies of a piece, which stay in a cache.

The bits are those of one call: each element is computed from the elements at its place alone, and
a kernel's vectors begin at the same elements, as a piece is a multiple of every vector's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.verdicts import Judgement, Verdict
from mainstay_train.checks import at_once
from mainstay_train.checks.places import Place
from mainstay_train.checks.telling import Telling
from mainstay_train.kernels.calls import Call, put
from mainstay_train.kernels.dispatch import Kernel
from mainstay_train.kernels.twins import Overwritten

CUT = frozenset({"aten._fused_adam_", "aten._fused_adamw_", "aten._fused_sgd_"})
"""Kernels that can be cut. They return nothing."""
PIECE_ELEMENTS = 1 << 16
"""Elements of each list's tensor in a piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a call: the same elements of one tensor of each list."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    number: int
    """Of the tensor in its list."""
    start: int
    """The first element."""
    stop: int
    """One past the last one."""
    length: int
    """How many tensors a list has."""
    elements: int
    """Of the whole tensor."""

    def numbers(self, num_written: int) -> tuple[int, ...]:
        """Return the numbers of what the piece writes among all that the call writes."""
        return tuple(self.number + self.length * at for at in range(num_written))

    def flips(self, flips: Sequence[Flip], num_written: int) -> list[Flip]:
        """Return the flips of the call that are in the piece, as the piece has them.

        Args:
            flips: of the call.
            num_written: how many tensors the piece writes.
        """
        found = []
        for flip in flips:
            output = flip.output % (num_written * self.length)
            element = flip.element % self.elements
            if output % self.length == self.number and self.start <= element < self.stop:
                at = output // self.length
                found.append(replace(flip, output=at, element=element - self.start))
        return found


@dataclass(slots=True)
class _Told:
    """Findings in the pieces of a call, told as one as long as the judgement is the same.

    Args:
        checks: hear of it.
    """

    checks: Telling
    _found: dict[str, Any] | None = None
    """All that :meth:`Telling.tell` is given of what was not told yet."""

    def tell(
        self,
        place: Place,
        *,
        ordinal: int,
        operator: str,
        output: int,
        num_elements: int,
        judgement: Judgement,
    ) -> None:
        before = self._found
        if before is not None and before["judgement"] == judgement:
            before["num_elements"] += num_elements
            before["output"] = min(before["output"], output)
            return
        self.end()
        self._found = {
            "place": place,
            "ordinal": ordinal,
            "operator": operator,
            "output": output,
            "num_elements": num_elements,
            "judgement": judgement,
        }
        if judgement.verdict is Verdict.UNRELIABLE:
            self.end()  # which raises

    def end(self) -> None:
        """Tell what was not told yet."""
        found, self._found = self._found, None
        if found is not None:
            self.checks.tell(**found)


def execute(
    checks: Telling,
    place: Place,
    whole: Call,
    pieces: Iterable[Piece],
    enter: Callable[[Call], list[Flip]],
    run: Callable[..., Any],
) -> None:
    """Execute a call piece by piece, each twice, and a third time if the two differ.

    Args:
        checks: hear of what is found, once for all pieces that are judged alike.
        place: of the call.
        whole: the call; it is numbered here, and returns nothing.
        pieces: of it.
        enter: has the call counted; returns its flips.
        run: calls a kernel for the first time.

    Raises:
        UnreliableDeviceError: three executions of a piece differ.
    """
    all_flips, told = enter(whole), _Told(checks)
    try:
        _execute(told, place, whole, pieces, all_flips, run)
    finally:
        told.end()


def _execute(
    checks: Telling,
    place: Place,
    whole: Call,
    pieces: Iterable[Piece],
    all_flips: Sequence[Flip],
    run: Callable[..., Any],
) -> None:
    for piece in pieces:
        operands = whole.kernel.operands(piece.args, piece.kwargs)
        overwritten = Overwritten(operands, replaces=False)
        written = overwritten.written
        flips = piece.flips(all_flips, len(written))
        numbers = piece.numbers(len(written))
        call = replace(
            whole,
            args=piece.args,
            kwargs=piece.kwargs,
            overwritten=overwritten,
            numbers=numbers,
        )
        copies = overwritten.copy(), overwritten.copy()
        run(call.func, call.args, call.kwargs)
        put(flips, (Execution.PRIMARY, Execution.BOTH), written)
        at_once.check(checks, place, call, (None, written), flips, copies)


def pieces_of(
    kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Piece] | None:
    """Return the pieces of a call, in order; None: it is not cut.

    Args:
        kernel: that is called.
        args: of the call.
        kwargs: of the call.
    """
    if kernel.name not in CUT:
        return None
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    lists = [tensors for tensors in lists if len(tensors)]
    if not lists or not _can_cut(lists):
        return None
    if sum(tensor.numel() for tensor in lists[0]) <= PIECE_ELEMENTS:
        return None
    return _cut(args, kwargs, lists[0])


def _can_cut(lists: Sequence[Sequence[Any]]) -> bool:
    """Return whether all lists have tensors of the same sizes, or of one element, all packed."""
    first = lists[0]
    return all(
        len(tensors) == len(first)
        and all(
            isinstance(tensor, torch.Tensor)
            and tensor.is_contiguous()
            and tensor.numel() in (1, of_first.numel())
            for tensor, of_first in zip(tensors, first, strict=True)
        )
        for tensors in lists
    )


def _cut(
    args: Sequence[Any], kwargs: Mapping[str, Any], first: Sequence[torch.Tensor]
) -> Iterator[Piece]:
    for number, whole in enumerate(first):
        elements = whole.numel()
        for start in range(0, elements, PIECE_ELEMENTS):
            stop = min(start + PIECE_ELEMENTS, elements)

            def part(value: Any, at: slice = slice(start, stop), number: int = number) -> Any:
                if not isinstance(value, list | tuple) or not len(value):
                    return value
                tensor = value[number]
                return [tensor if tensor.numel() == 1 else tensor.view(-1)[at]]

            yield Piece(
                [part(value) for value in args],
                {name: part(value) for name, value in kwargs.items()},
                number, start, stop, len(first), elements,
            )  # fmt: skip
