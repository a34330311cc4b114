"""Checks kernels after their values were used, in what checks that wait retain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.schedule import Later
from mainstay_core.dmr.verdicts import Judgement, Remedy, Verdict, judge
from mainstay_train.checks import bits, imprints
from mainstay_train.checks.calls import Call, first_differing, put, repaired
from mainstay_train.checks.collectives import waited
from mainstay_train.checks.kernels import Effects, may_wait
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.recomputes import ForwardRecord
from mainstay_train.checks.twins import Twins
from mainstay_train.checks.waiting import Waiting, WaitingChecks, detached, kept_by


class Judged(Protocol):
    """Checks of a trainer, as they hear of what was found late."""

    void: set[int]
    waiting: WaitingChecks
    given: frozenset[int]

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
        """Tell what two executions that differed came to."""


def compare(
    checks: Judged,
    place: Place,
    noted: ForwardRecord,
    call: Call,
    mine: tuple[Any, list[torch.Tensor]],
    kept: Twins | None,
) -> tuple[Any, bool]:
    """Compare a recompute's call with the forward's.

    Args:
        checks: hears of what is found.
        place: of the call.
        noted: of the forward.
        call: of the recompute.
        mine: its result, with what it made and wrote.
        kept: twins of what it overwrites, as that was before; None if it reads none of it.

    Returns:
        The result that counts, and whether later calls can be compared: a forward that was wrong
        went on from that.

    Raises:
        UnreliableDeviceError: a third execution differs from both.
    """
    result, outputs = mine
    forward, found = noted.take(call.kernel.name), imprints.imprints(outputs)
    if forward == found:
        return result, True
    third_result, third = call.again(call.given_again(kept))
    pairs = enumerate(zip(forward, found, strict=False))
    differing = next((number for number, (one, other) in pairs if one != other), 0)
    executions = (forward, found, imprints.imprints(third))
    judgement = judge(*map(imprints.joined, executions), used=True, goes_on=True)
    if judgement.remedy is Remedy.VOID_TYPE and place.shard_type is not None:
        checks.void.add(place.shard_type)
    checks.tell(
        place,
        ordinal=call.ordinal,
        operator=call.kernel.name,
        output=differing,
        num_elements=0,
        judgement=judgement,
    )
    if judgement.remedy is not Remedy.REPAIR:
        return result, False
    return repaired(call, mine, (third_result, third)), True


def take_shared(
    checks: Judged,
    place: Place,
    records: tuple[ForwardRecord | None, ForwardRecord | None],
    kernel: str,
    ordinal: int,
    result: torch.Tensor,
) -> ForwardRecord | None:
    """Note what inner ranks have computed together, or compare it with what came in the forward.

    Where that differs any of them may have given something wrong. Whose kernel it was finds it; to
    go on comparing here would lay it to the kernel that comes next.

    Args:
        checks: hears of what is found.
        place: of the call.
        records: where it is noted, and with what it is compared; None: it is not.
        kernel: name of the collective.
        ordinal: its number among them.
        result: of the call.

    Returns:
        With what later calls are compared; None: with nothing.
    """
    notes, noted = records
    if notes is not None:
        notes.note(kernel, [waited(result)])
    if noted is None or noted.take(kernel) == imprints.imprints([waited(result)]):
        return noted
    if place.shard_type is not None:
        checks.void.add(place.shard_type)
    reason = (
        f"{kernel} (#{ordinal}) of {place.name or place.phase.value} gave other bits in the "
        "forward than in its recompute: some rank of the stage has put in something wrong"
    )
    judgement = Judgement(verdict=Verdict.WIRE, remedy=Remedy.VOID_TYPE, reason=reason)
    checks.tell(
        place,
        ordinal=ordinal,
        operator=kernel,
        output=0,
        num_elements=0,
        judgement=judgement,
    )
    return None


def can_wait(place: Place, call: Call, effects: Effects) -> bool:
    """Return whether a call's check may wait: in a pass of a block, and it overwrites nothing."""
    return (
        place.phase in (Phase.FORWARD, Phase.BACKWARD)
        and place.block is not None
        and place.shard_type is not None
        and call.generator is None
        and may_wait(call.kernel, call.args, call.kwargs, effects)
    )


def let_wait(
    checks: Judged,
    place: Place,
    call: Call,
    outputs: list[torch.Tensor],
    flips: Sequence[Flip],
    later: Later,
) -> None:
    """Have the check of a call wait.

    Args:
        checks: hears of what will be found.
        place: of the call.
        call: see :func:`can_wait`.
        outputs: what it made.
        flips: of the call.
        later: until when it waits.
    """
    assert place.shard_type is not None
    call = replace(
        call,
        args=detached(tuple(call.args)),
        kwargs={name: detached(value) for name, value in call.kwargs.items()},
    )
    outputs = detached(outputs)
    inputs = [tensor for tensor, _ in call.kernel.operands(call.args, call.kwargs)]
    keys, size_bytes = kept_by([*inputs, *outputs], checks.given)
    execute = partial(_check, checks, place, call, outputs, flips)
    checks.waiting.add(
        Waiting(
            place.shard_type,
            keys,
            size_bytes,
            execute,
            micro_batch=place.micro_batch or 0,
            window=later.window,
            expected_s=later.expected_s,
        )
    )


def _check(
    checks: Judged, place: Place, call: Call, outputs: list[torch.Tensor], flips: Sequence[Flip]
) -> None:
    """Execute again a call whose value was used.

    Args:
        checks: hears of what was found.
        place: of the call.
        call: writes to no operand.
        outputs: what it made.
        flips: of the call.

    Raises:
        UnreliableDeviceError: a third execution differs from both.
    """
    if place.shard_type is None or place.shard_type in checks.void:
        return
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        _, found = call.again(None)
        put(flips, (Execution.CHECKER, Execution.BOTH), found)
        differing = first_differing(outputs, found)
        if differing is None:
            return
        _, third = call.again(None)
        digests = (bits.digest_of(tensors) for tensors in (outputs, found, third))
        judgement = judge(*digests, used=True)
        if judgement.remedy is Remedy.VOID_TYPE:
            checks.void.add(place.shard_type)
        checks.tell(
            place,
            ordinal=call.ordinal,
            operator=call.kernel.name,
            output=differing,
            num_elements=bits.count_differing(outputs[differing], found[differing]),
            judgement=judgement,
        )
