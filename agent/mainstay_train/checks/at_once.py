"""Executes a call a second time at once, before anybody has used its value.

Where the host looks at the comparison, whatever was computed wrongly is repaired in place: a third
execution says which one that was. Else the outcome stays on the device until it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.verdicts import Remedy, judge
from mainstay_train.checks.flags import Flags
from mainstay_train.checks.places import Place
from mainstay_train.checks.telling import Telling
from mainstay_train.kernels import bits
from mainstay_train.kernels.calls import Call, first_differing, put, repaired
from mainstay_train.kernels.twins import Twins

Executed = tuple[Any, list[torch.Tensor]]
"""The result of an execution, with what it made and wrote."""


def check(
    checks: Telling,
    place: Place,
    call: Call,
    primary: Executed,
    flips: Sequence[Flip],
    copies: tuple[Twins | None, Twins | None],
) -> Any:
    """Execute a call a second time, and a third time if the two differ; return what counts.

    Args:
        checks: hear of what is found.
        place: of the call.
        call: was executed once.
        primary: of that execution.
        flips: of the call.
        copies: twins of what it overwrites, as that was before: for the checker, and for a
            third execution. None: there are none.

    Raises:
        UnreliableDeviceError: all three differ.
    """
    (result, outputs), (twins, kept) = primary, copies
    second, found = call.again(twins)
    if flips:
        put(flips, (Execution.CHECKER, Execution.BOTH), found)
    differing = first_differing(outputs, found)
    if differing is None:
        return result
    _, third = call.again(call.given_again(kept))
    put([flip for flip in flips if flip.sticky], (Execution.BOTH,), third)
    judgement = judge(*(bits.digest_of(tensors) for tensors in (outputs, found, third)), used=False)
    checks.tell(
        place,
        ordinal=call.ordinal,
        operator=call.kernel.name,
        output=differing if call.numbers is None else call.numbers[differing],
        num_elements=bits.count_differing(outputs[differing], found[differing]),
        judgement=judgement,
    )
    if judgement.remedy is not Remedy.REPAIR:
        return result
    return repaired(call, primary, (second, found))


def compare(
    flags: Flags,
    place: Place,
    call: Call,
    outputs: list[torch.Tensor],
    flips: Sequence[Flip],
    twins: Twins | None,
) -> None:
    """Execute a call a second time, and leave on its device what the comparison comes to.

    Args:
        flags: where it is left.
        place: of the call.
        call: was executed once.
        outputs: what it made and wrote.
        flips: of the call.
        twins: of what it overwrites, as that was before; None: it overwrites nothing.
    """
    _, found = call.again(twins)
    if flips:
        put(flips, (Execution.CHECKER, Execution.BOTH), found)
    flags.compare(place, (call.ordinal, call.kernel.name), outputs, found)
