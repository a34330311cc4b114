"""Executes a large kernel twice and keeps one result at a time: of the first an imprint is left.

To compare bits takes memory for both results, and for two copies of what a kernel changes in place:
for the second execution, and for a third one. Here the checker's execution comes first. Its result
is let go of before the second execution begins, whose result goes on. So a check takes no memory
but for one copy of what a kernel changes in place. Only of a small result of large operands, such
as a sum, there is a copy besides: so that what differs can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.verdicts import Remedy, judge
from mainstay_train.checks.places import Place
from mainstay_train.checks.telling import Telling
from mainstay_train.kernels import bits, imprints
from mainstay_train.kernels.calls import Call, put, repaired
from mainstay_train.kernels.dispatch import Effects, Kernel
from mainstay_train.kernels.imprints import Imprint
from mainstay_train.kernels.twins import Twins

LARGE_BYTES = 1 << 20
"""Of a kernel's operands: smaller ones are compared bit by bit, which takes less time."""

Operands = Sequence[tuple[torch.Tensor, bool]]
Enter = Callable[[Call], list[Flip]]
"""Has a call counted that has computed something; returns its flips."""


def is_large(kernel: Kernel, operands: Operands) -> bool:
    """Return whether one result of a call is to be kept at a time."""
    if kernel.tells:
        return False
    return sum(tensor.numel() * tensor.element_size() for tensor, _ in operands) >= LARGE_BYTES


def execute(
    checks: Telling,
    place: Place,
    call: Call,
    operands: Operands,
    see: Callable[[Any], None],
    enter: Enter,
    run: Callable[..., Any],
) -> Any:
    """Execute a call twice, and a third time if the two differ; return the result that counts.

    Args:
        checks: hear of what is found.
        place: of the call.
        call: draws nothing; it is numbered here.
        operands: of it, all in the host's memory.
        see: called with the first result, to refuse one that cannot be checked.
        enter: see :data:`Enter`.
        run: calls a kernel whose result goes on.

    Raises:
        UnreliableDeviceError: all three executions differ.
    """
    first = _execute_first(call, see, enter)
    if first is None:
        return run(call.func, call.args, call.kwargs)
    checker, small, flips = first
    kept = _copied(call)
    result = run(call.func, call.args, call.kwargs)
    effects = Effects.of(call.kernel, operands, result)
    outputs = [*effects.new, *effects.written]
    put(flips, (Execution.PRIMARY, Execution.BOTH), outputs)
    primary = imprints.imprints(outputs)
    if primary == checker:
        return result
    again, third = call.again(call.given_again(kept))
    put([flip for flip in flips if flip.sticky], (Execution.BOTH,), third)
    executions = (primary, checker, imprints.imprints(third))
    judgement = judge(*map(imprints.joined, executions), used=False)
    pairs = enumerate(zip(primary, checker, strict=True))
    differing = next(number for number, (one, other) in pairs if one != other)
    is_repaired = judgement.remedy is Remedy.REPAIR
    other = small or (third if is_repaired else None)  # the checker's, as far as it is there
    checks.tell(
        place,
        ordinal=call.ordinal,
        operator=call.kernel.name,
        output=differing,
        num_elements=bits.count_differing(outputs[differing], other[differing]) if other else 0,
        judgement=judgement,
    )
    return repaired(call, (result, outputs), (again, third)) if is_repaired else result


def _execute_first(
    call: Call, see: Callable[[Any], None], enter: Enter
) -> tuple[tuple[Imprint, ...], list[torch.Tensor] | None, list[Flip]] | None:
    """Execute a call for the checker; return what is left of it, and the call's flips.

    Left are imprints, and copies if all of it is small.

    None: it has made and written nothing.
    """
    twins = _copied(call)
    _, found = call.again(twins, see)
    if twins is None and call.overwritten is not None:  # what it only replaces is replaced twice
        found = [*found, *call.overwritten.written]
    if not found:
        return None
    flips = enter(call)
    put(flips, (Execution.CHECKER, Execution.BOTH), found)
    return imprints.imprints(found), _copies_of_small(found), flips


def _copies_of_small(found: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return copies of what an execution has made and written; None: that is large."""
    if sum(tensor.numel() * tensor.element_size() for tensor in found) >= LARGE_BYTES:
        return None
    copies = [torch.empty_like(tensor) for tensor in found]
    for copy, tensor in zip(copies, found, strict=True):
        bits.overwrite(copy, tensor)  # their bits, which a clone of a conjugate would not have
    return copies


def _copied(call: Call) -> Twins | None:
    """Return twins of what a call overwrites, if it reads some of that."""
    overwritten = call.overwritten
    return overwritten.copy() if overwritten is not None and overwritten.has_contents else None
